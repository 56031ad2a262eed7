"""The planner and the simulator in C++, where there is the extension.

They are twins of `planner/planner.py` and `runtime/simulated.py`, which say what each step
is for, and take their place where they cannot be had: the same plans in a part of the time
(`xla_ext/plan_ops.h`, `xla_ext/plan_seconds.h`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jturnip.graph.memgraph import Dep, DepKind, Instance, InstanceId, MemGraph, Op, OpKind
from jturnip.graph.taskgraph import Place, TaskGraph
from jturnip.planner import orders
from jturnip.planner.rates import Rates
from jturnip.planner.strategies import Strategy
from jturnip.runtime.schedule import Link
from jturnip.runtime.simulated import limits_over
from jturnip.units import padded


@dataclass(frozen=True, slots=True)
class Taken:
    """What a plan takes by the simulator, if copies took nothing from the computing."""

    seconds: float
    # Of that, the runs' own times.
    compute_seconds: float
    # Copies over the link, and their bytes.
    copies: int
    h2d_bytes: int
    d2h_bytes: int
    # Host memory that holds what left the device, at most at once.
    host_peak_bytes: int


# Names for what the extension has: typed in `native/_native.pyi`.
_Graph: TypeAlias = Any
_Way: TypeAlias = Any


class Twin:
    """Some tasks in C++.

    Methods return None where there is no such plan: the planner says why.
    """

    def __init__(self, graph: TaskGraph):
        from jturnip.native import _native

        self._native = _native
        self._graph: _Graph = _native.TaskGraph(
            [
                (b.nbytes, padded(b.nbytes), _START[b.start], b.pinned, b.end_on_host)
                for b in graph.buffers
            ],
            [
                (
                    task.inputs,
                    task.outputs,
                    task.overwrites,
                    padded(task.workspace),
                    task.seconds,
                    task.dispatch_seconds,
                )
                for task in graph.tasks
            ],
            graph.outputs,
        )

    def order(self, arena: int, name: str) -> tuple[int, ...]:
        """As `orders.order`."""
        return self._graph.order(arena, _ORDERS.index(name))

    def way(
        self, way: Strategy, graph: Callable[[], TaskGraph], arena: int, rates: Rates
    ) -> _Way:
        """A strategy, with what it says of a graph, if it asks for that."""
        window = way.window(graph(), arena) if way.window else None
        transfers = way.transfers(graph(), arena, rates) if way.transfers else None
        return self._native.Strategy(
            way.serial,
            way.belady,
            way.late,
            way.ahead,
            way.spare,
            window and (window.partitions, window.firsts, window.resident, window.returned),
            transfers.leave if transfers else {},
            transfers.come if transfers else {},
        )

    def taken(
        self, tasks: Sequence[int], arena: int, way: _Way, link: Link
    ) -> Taken | None:
        """What a plan for the tasks in this order takes."""
        limits = limits_over(link)
        try:
            taken = self._native.times(
                self._graph.reordered(tasks),
                arena,
                way,
                self._native.Link(
                    link.h2d_bytes_per_second,
                    link.d2h_bytes_per_second,
                    link.latency_seconds,
                    link.issue_seconds,
                    link.heard_seconds,
                    link.late_seconds,
                    link.after_compute,
                ),
                self._native.Limits(
                    limits.compute,
                    limits.h2d,
                    limits.d2h,
                    limits.short_runs,
                    limits.queue_seconds,
                ),
            )
        except RuntimeError:
            return None
        return Taken(*taken)

    def plan(
        self, tasks: Sequence[int], graph: TaskGraph, arena: int, way: _Way, rates: Rates
    ) -> MemGraph | None:
        """A plan for the tasks in this order, which is that of `graph`."""
        in_order = self._graph.reordered(tasks)
        try:
            ops, instances, at_start, at_end = self._native.plan(
                in_order, arena, way, rates.h2d, rates.d2h
            )
        except RuntimeError:
            return None
        return MemGraph(
            arena,
            tuple([_op(at, graph, *each) for at, each in enumerate(ops)]),
            tuple([Instance(InstanceId(at), *each) for at, each in enumerate(instances)]),
            at_start,
            at_end,
        )


def twin_of(graph: TaskGraph) -> Twin | None:
    """The same tasks in C++; None without the extension."""
    return Twin(graph) if is_there() else None


@functools.cache
def is_there() -> bool:
    """Whether there is the extension; unlike marks it needs no version of XLA's."""
    try:
        from jturnip.native import _native
    except ImportError:
        return False
    return bool(_native)


# By their numbers in C++: `Start`, `Order`, `OpKind` and `Why`.
_START = {None: 0, Place.DEVICE: 1, Place.HOST: 2}
_ORDERS = tuple(orders.ORDERS)
_KINDS = (OpKind.RUN, OpKind.RELOAD, OpKind.OFFLOAD, OpKind.DROP)
_WHY = (
    (DepKind.DATA, ""),
    (DepKind.MEMORY, "writes buffer {} into bytes it freed"),
    (DepKind.MEMORY, "reloads buffer {} into bytes it freed"),
    (DepKind.MEMORY, "uses bytes for workspace"),
    (DepKind.MEMORY, "frees its bytes after the last reader"),
    (DepKind.MEMORY, "frees its bytes for others once its copy is safe"),
    (DepKind.ORDER, "keeps the simulated order"),
    (DepKind.ORDER, "waits until its partition may come"),
)


def _op(
    at: Any,
    graph: TaskGraph,
    kind: int,
    of: Any,
    reads: Any,
    writes: Any,
    workspace: tuple[tuple[int, int], ...],
    deps: Sequence[tuple[Any, int, int]],
) -> Op:
    """An op as `native/_native.pyi` has it."""
    # Without the call that a NamedTuple makes of it: there are many.
    waits = tuple([_new(Dep, (on, *_why(why, buffer))) for on, why, buffer in deps])
    if kind != 0:
        return Op(at, _KINDS[kind], None, reads, writes, (), waits)
    over = tuple([(writes[o], reads[i]) for o, i in graph.tasks[of].overwrites])
    return Op(at, OpKind.RUN, of, reads, writes, workspace, waits, over)


def _why(why: int, buffer: int) -> tuple[DepKind, str]:
    kind, words = _WHY[why]
    return kind, words if buffer < 0 else words.format(buffer)


_new = tuple.__new__
