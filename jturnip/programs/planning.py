"""Tasks to a plan that is verified, and predicted to be the fastest of some."""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from dataclasses import dataclass

from jturnip import placement
from jturnip.compiler import executables as compiler
from jturnip.compiler.executables import Trials
from jturnip.errors import HostMemoryError
from jturnip.graph.memgraph import MemGraph
from jturnip.graph.plan import Plan
from jturnip.graph.report import RunReport
from jturnip.graph.taskgraph import TaskGraph
from jturnip.placement import Budget, Whose
from jturnip.planner import figures
from jturnip.planner.bound import least_seconds
from jturnip.planner.planner import plan as make_memgraph, smallest_budget
from jturnip.planner.verify import verify
from jturnip.programs.calibration import calibrate
from jturnip.programs.devices import link_of
from jturnip.programs.places import argument_bytes
from jturnip.programs.records import How, Split, Straight
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.schedule import Link, Schedule, schedule
from jturnip.runtime.simulated import simulate
from jturnip.units import format_bytes, padded


# What `auto` plans and simulates; the paper's alone beyond this many tasks, since there
# planning takes seconds.
_PROMISING = ("turnip", "ahead", "layerwise", "fixed_order")
_MANY_TASKS = 20_000


# The paper's free order adapts to what really happens, which no prediction knows: another
# strategy must be predicted to take no more than this share of its time.
_CLEARLY = 0.97


def measure(candidate: Split, trials: Trials) -> Split:
    """Runs each new executable on zeros, where there is room for that, and measures the
    link where that has not been done.

    Returns:
      The same with measured seconds in its tasks.
    """
    graph = candidate.graph
    largest = [0] * len(candidate.executables)
    for task in graph.tasks:
        # All of its operands are made anew, also where the caller has them already.
        arrays = (graph.buffers[b] for b in (*task.inputs, *task.outputs))
        needs = padded(task.workspace) + sum(padded(b.nbytes) for b in arrays)
        largest[task.executable] = max(needs, largest[task.executable])
    device = candidate.arguments.device
    compiler.try_out(
        list(zip(candidate.executables, largest, strict=True)),
        placement.sharding(device, on_host=False),
        trials,
    )
    calibrate(device, trials)
    tasks = tuple(
        dataclasses.replace(
            t, seconds=candidate.executables[t.executable].seconds or t.seconds
        )
        for t in graph.tasks
    )
    return dataclasses.replace(candidate, graph=dataclasses.replace(graph, tasks=tasks))


def planned(split: Split, budget: Budget, how: How) -> Straight:
    """Tasks with their plan, as the user chose to have it made; raises as `make_plan`."""
    plan, ready = make_plan(
        split, budget.room, how.strategy, how.link, how.accelerator is None
    )
    plan = dataclasses.replace(plan, measured=how.trials is not None)
    return Straight(split, plan, ready)


def make_plan(
    candidate: Split,
    gpu_bytes: int,
    strategy: str,
    over: SimulatedLink | Link | None,
    runs_here: bool = True,
) -> tuple[Plan, Schedule]:
    """Plans by one strategy, or by the one that the simulator finds fastest; verifies.

    Raises:
      HostMemoryError: where it is to run here, and the host cannot hold what must leave
        the device.
    """
    graph, device = candidate.graph, candidate.arguments.device
    link = link_of(device, over)
    names = (strategy,) if strategy != "auto" else _promising(graph)
    arena = placement.arena_bytes(gpu_bytes, device.platform)
    best: tuple[RunReport, MemGraph, Schedule] | None = None
    with _without_cycle_collection():
        for name in names:
            found = _simulated(graph, arena, name, link)
            if best is None or found[0].seconds < _CLEARLY * best[0].seconds:
                best = found
        assert best is not None
        run, memgraph, ready = best
        peak = verify(graph, memgraph)
        plan = _figures(graph, memgraph, gpu_bytes, peak, run, link)
    if runs_here:
        _check_host(plan, candidate)
    others = _OtherBudgets(graph, run.strategy, link, device.platform)
    return dataclasses.replace(plan, others=others), ready


def _simulated(
    graph: TaskGraph, arena: int, strategy: str, link: Link
) -> tuple[RunReport, MemGraph, Schedule]:
    """A plan by one strategy, and its run as the simulator predicts it."""
    memgraph = make_memgraph(graph, arena, strategy)
    ready = schedule(graph, memgraph, link)
    return simulate(ready, strategy, link), memgraph, ready


@dataclass(frozen=True, slots=True)
class _OtherBudgets:
    """The same tasks, planned by the same strategy in other budgets."""

    graph: TaskGraph
    strategy: str
    link: Link
    platform: str

    @property
    def least_bytes(self) -> int:
        return placement.gpu_bytes_for(smallest_budget(self.graph), self.platform)

    def seconds_in(self, gpu_bytes: int) -> float:
        arena = placement.arena_bytes(gpu_bytes, self.platform)
        with _without_cycle_collection():
            return _simulated(self.graph, arena, self.strategy, self.link)[0].seconds


def _promising(graph: TaskGraph) -> tuple[str, ...]:
    return _PROMISING if len(graph.tasks) <= _MANY_TASKS else _PROMISING[:1]


def _figures(
    graph: TaskGraph,
    memgraph: MemGraph,
    gpu_bytes: int,
    peak_bytes: int,
    run: RunReport,
    link: Link,
) -> Plan:
    h2d, d2h = figures.moved_bytes(graph, memgraph)
    rates = link.h2d_bytes_per_second, link.d2h_bytes_per_second
    least = least_seconds(graph, memgraph.gpu_bytes, *rates)
    # The simulator adds the same numbers in another order.
    bound = min(run.seconds, max(least, h2d / rates[0], d2h / rates[1]))
    return Plan(
        gpu_bytes=gpu_bytes,
        peak_bytes=peak_bytes,
        h2d_bytes=h2d,
        d2h_bytes=d2h,
        host_bytes=figures.host_peak_bytes(graph, memgraph),
        predicted_seconds=run.seconds,
        predicted_run=run,
        lower_bound_seconds=bound,
        strategy=run.strategy,
        taskgraph=graph,
        memgraph=memgraph,
    )


def _check_host(plan: Plan, candidate: Split) -> None:
    device, needed = candidate.arguments.device, plan.host_bytes
    if device.platform != "cpu":  # the CPU backend takes numpy's memory as it is
        needed += argument_bytes(candidate.flat, candidate.arguments, (Whose.OURS_HOST,))
    limit, why = placement.host_bytes_limit(device)
    if needed > limit:
        raise HostMemoryError(
            f"what must leave the device takes {format_bytes(needed)} of host memory; {why}"
            f" is {format_bytes(limit)}. Raise gpu_bytes above"
            f" {format_bytes(plan.gpu_bytes)}, or free host memory."
        )


@contextlib.contextmanager
def _without_cycle_collection() -> Iterator[None]:
    """Planning makes many records and no cycles; looking for those takes long."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
