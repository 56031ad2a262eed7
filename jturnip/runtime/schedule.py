"""A MemGraph made ready to run: what waits for what, and who goes first among the ready.

Everything here is computed once per plan and shared by every run of it.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jturnip.graph.memgraph import MemGraph, OpKind, ranges_bytes
from jturnip.graph.taskgraph import TaskGraph


# Which engine performs an op; small integers, since the loop compares them per op.
COMPUTE, H2D, D2H, NONE = range(4)
_ENGINE = {
    OpKind.RUN: COMPUTE,
    OpKind.RELOAD: H2D,
    OpKind.OFFLOAD: D2H,
    OpKind.DROP: NONE,
}


@dataclass(frozen=True, slots=True)
class Link:
    """What the transfer engines are expected to do."""

    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    latency_seconds: float = 0.0
    # What the loop takes to start a copy.
    issue_seconds: float = 0.0
    # What the loop takes to hear that an op is over, and to see what that allows.
    heard_seconds: float = 0.0
    # How much later it hears of it while the device computes, where it has no core of its
    # own.
    late_seconds: float = 0.0
    # How much longer computing takes for each copy beside it, and for each of its bytes.
    compute_seconds_per_copy: float = 0.0
    compute_seconds_per_byte: float = 0.0
    # Whether a copy begins only when all computing is over that was started before it, as
    # on a GPU, where XLA hands out memory in the order of the compute stream.
    after_compute: bool = dataclasses.field(default=False, kw_only=True)

    def lost_seconds(self, nbytes: int, copies: int = 1) -> float:
        """What the computing beside them loses to copies of so many bytes together."""
        return (
            copies * self.compute_seconds_per_copy + nbytes * self.compute_seconds_per_byte
        )

    @property
    def harmless(self) -> "Link":
        """The same if copies took nothing from the computing."""
        return dataclasses.replace(
            self, compute_seconds_per_copy=0.0, compute_seconds_per_byte=0.0
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Per op, by op id."""

    # COMPUTE, H2D, D2H or NONE.
    engines: tuple[int, ...]
    # Number of ops it waits for, and the ops that wait for it.
    waits: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    # Among the ready ops of an engine the lowest rank goes first; a permutation.
    ranks: tuple[int, ...]
    by_rank: tuple[int, ...]
    # Predicted time on its engine, and for which its start holds the loop.
    seconds: tuple[float, ...]
    dispatch_seconds: tuple[float, ...]
    # Arena bytes that its start takes (outputs, workspace or a reload's slot), that the
    # return of its dispatch gives back (workspace), and that it frees (a drop).
    takes: tuple[int, ...]
    gives_back: tuple[int, ...]
    frees: tuple[int, ...]
    # Bytes over the link, unpadded.
    moves: tuple[int, ...]
    # Arena bytes occupied before the first op.
    bytes_at_start: int


def schedule(graph: TaskGraph, memgraph: MemGraph, link: Link) -> Schedule:
    """Prepares a plan for `RunState`."""
    ops = memgraph.ops
    sizes = [ranges_bytes(i.ranges) for i in memgraph.instances]  # none on the host
    engines = tuple(_ENGINE[op.kind] for op in ops)
    moves = tuple(
        graph.buffers[memgraph.instances[op.reads[0]].buffer].nbytes
        if e in (H2D, D2H)
        else 0
        for op, e in zip(ops, engines, strict=True)
    )
    seconds = tuple(
        _seconds(graph, op.task, e, m, link)
        for op, e, m in zip(ops, engines, moves, strict=True)
    )
    workspaces = tuple(ranges_bytes(op.workspace) for op in ops)
    frees = tuple(
        sizes[op.reads[0]] if e == NONE else 0 for op, e in zip(ops, engines, strict=True)
    )
    passed_on = tuple(sum([sizes[read] for _, read in op.overwrites]) for op in ops)
    successors: list[list[int]] = [[] for _ in ops]
    for op in ops:
        for dep in op.deps:
            successors[dep.op].append(op.id)
    ranks, by_rank = _ranks(engines)
    return Schedule(
        engines=engines,
        waits=tuple(len(op.deps) for op in ops),
        successors=tuple(map(tuple, successors)),
        ranks=ranks,
        by_rank=by_rank,
        seconds=seconds,
        dispatch_seconds=tuple(
            link.issue_seconds
            if e in (H2D, D2H)
            else 0.0
            if op.task is None
            else graph.tasks[op.task].dispatch_seconds
            for op, e in zip(ops, engines, strict=True)
        ),
        takes=tuple(
            sum([sizes[i] for i in op.writes]) + w - p
            for op, w, p in zip(ops, workspaces, passed_on, strict=True)
        ),
        gives_back=workspaces,
        frees=frees,
        moves=moves,
        bytes_at_start=sum(sizes[i] for i in memgraph.inputs_at_start),
    )


def _seconds(
    graph: TaskGraph, task: int | None, engine: int, nbytes: int, link: Link
) -> float:
    if engine == COMPUTE:
        assert task is not None
        return graph.tasks[task].seconds
    if engine == H2D:
        return nbytes / link.h2d_bytes_per_second
    if engine == D2H:
        return nbytes / link.d2h_bytes_per_second
    return 0.0


def _ranks(engines: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """On each engine in planned order: it was chosen by simulated time."""
    by_rank = tuple(sorted(range(len(engines)), key=engines.__getitem__))
    ranks = [0] * len(engines)
    for rank, op in enumerate(by_rank):
        ranks[op] = rank
    return tuple(ranks), by_rank
