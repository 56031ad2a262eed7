"""Tasks to a plan that is verified, and predicted to be the fastest of some."""

import contextlib
import dataclasses
import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jturnip import placement
from jturnip.compiler.executables import Executable
from jturnip.compiler.trials import Trials, try_out
from jturnip.errors import HostMemoryError
from jturnip.frontend import hints
from jturnip.frontend.values import Equation
from jturnip.graph.memgraph import OpKind
from jturnip.graph.plan import Plan
from jturnip.graph.taskgraph import Task, TaskGraph
from jturnip.placement import Budget, Whose
from jturnip.planner import bound, figures, orders
from jturnip.planner.planner import smallest_budget
from jturnip.planner.verify import verify
from jturnip.programs.devices import link_of
from jturnip.programs.fastest import PROMISING, are_many, fastest, plan_by
from jturnip.programs.found import Found, Given
from jturnip.programs.places import argument_bytes
from jturnip.programs.records import Split, Straight
from jturnip.programs.searching import better_order
from jturnip.programs.setting import How
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.schedule import COMPUTE, D2H, H2D, Link, Schedule
from jturnip.units import format_bytes, padded


def measure(candidate: Split, trials: Trials) -> Split:
    """Runs each new executable on zeros, where there is room for that.

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
    try_out(
        list(zip(candidate.executables, largest, strict=True)),
        placement.sharding(device, on_host=False),
        trials,
    )
    tasks = tuple(_with_times(t, candidate.executables[t.executable]) for t in graph.tasks)
    return dataclasses.replace(candidate, graph=dataclasses.replace(graph, tasks=tasks))


def _with_times(task: Task, executable: Executable) -> Task:
    if executable.seconds is None:
        return task
    return dataclasses.replace(
        task,
        seconds=executable.seconds,
        dispatch_seconds=executable.dispatch_seconds,
    )


def planned(split: Split, budget: Budget, how: How) -> Straight:
    """Tasks with their plan, as the user chose to have it made; raises as `make_plan`."""
    if how.any_plan and how.strategy == "auto":
        # There is a plan if there is one by the first strategy that `auto` tries, but for
        # the host: it may hold what another plan moves.
        with contextlib.suppress(HostMemoryError):
            return planned(split, budget, dataclasses.replace(how, strategy=PROMISING[0]))
    strategy = how.strategy
    if strategy == "auto":
        split = in_program_order(split)
    tasks, plan, ready = make_plan(
        split, budget.room, strategy, how.link, how.accelerator is None
    )
    plan = dataclasses.replace(plan, measured=how.trials is not None)
    return Straight(in_order(split, tasks), plan, ready)


def searched(made: Straight, budget: Budget, how: How) -> Straight:
    """The same in a better order, if a search finds one (`searching.py`)."""
    split, before = made.split, made.plan
    if how.strategy != "auto" or how.any_plan or how.finest:
        return made
    device = split.arguments.device
    link = link_of(device, how.link)
    arena = placement.arena_bytes(budget.room, device.platform)
    host_bytes = _host_room(split)[0] if how.accelerator is None else math.inf
    given = Given(split.graph, arena, link)
    if are_many(given):
        return made
    with _without_cycle_collection():
        allowed = lambda found: found.taken.host_peak_bytes <= host_bytes
        found = better_order(given, before.strategy, allowed)
        if found is None:
            return made
        plan = _plan_of(found, budget.room, device.platform)
    plan = dataclasses.replace(
        plan, measured=before.measured, repeated_tasks=before.repeated_tasks
    )
    return Straight(in_order(split, found.tasks), plan, found.schedule)


def make_plan(
    candidate: Split,
    gpu_bytes: int,
    strategy: str,
    over: SimulatedLink | Link | None,
    runs_here: bool = True,
) -> tuple[Sequence[int], Plan, Schedule]:
    """Plans by one strategy in the order in which the tasks stand, or ("auto") by the
    strategy and in the order that the simulator finds fastest; verifies.

    Returns:
      The order of the tasks, the plan, and what runs it.

    Raises:
      HostMemoryError: where it is to run here, and the host cannot hold what must leave
        the device.
    """
    device = candidate.arguments.device
    link = link_of(device, over)
    arena = placement.arena_bytes(gpu_bytes, device.platform)
    host_bytes, why = _host_room(candidate) if runs_here else (math.inf, "")
    with _without_cycle_collection():
        if strategy == "auto":
            may_repeat = _may_repeat(candidate)
            found = fastest(candidate.graph, arena, link, may_repeat, host_bytes)
        else:
            given = Given(candidate.graph, arena, link)
            found = plan_by(given, strategy, host_bytes=host_bytes)
        plan = _plan_of(found, gpu_bytes, device.platform)
    if plan.host_bytes > host_bytes:
        raise HostMemoryError(
            f"what must leave the device takes {format_bytes(plan.host_bytes)} of host"
            f" memory; {why}. Raise gpu_bytes above {format_bytes(plan.gpu_bytes)}, or free"
            " host memory."
        )
    return found.tasks, plan, found.schedule


def _plan_of(found: Found, gpu_bytes: int, platform: str) -> Plan:
    """What was found, verified."""
    peak = verify(found.graph, found.memgraph)
    plan = _figures(found, gpu_bytes, peak)
    others = _OtherBudgets(found.graph, found.strategy, found.given.link, platform)
    return dataclasses.replace(plan, others=others)


def _may_repeat(split: Split) -> frozenset[int]:
    """The tasks that may run twice."""
    equations = split.flat.equations
    return frozenset(
        at
        for at, group in enumerate(split.groups)
        if all(gives_the_same_again(equations[i]) for i in group.equations)
    )


def gives_the_same_again(e: Equation) -> bool:
    """Whether an equation may be done again instead of keeping what it gave."""
    return not e.effects and hints.gives_the_same_bits_again(e.origin)


def in_order(split: Split, tasks: Sequence[int]) -> Split:
    """The same with its tasks in another valid order, in which some may come again."""
    if tuple(tasks) == tuple(range(len(split.groups))):
        return split
    places = split.program_order or range(len(split.groups))
    program_order = tuple(places[t] for t in tasks)
    in_program = tuple(range(len(program_order)))  # never so where some come again
    return dataclasses.replace(
        split,
        groups=tuple(split.groups[t] for t in tasks),
        numbers=tuple(split.numbers[t] for t in tasks),
        graph=orders.reordered(split.graph, tasks),
        program_order=program_order if program_order != in_program else (),
    )


def in_program_order(split: Split) -> Split:
    """The same with every task once, in the order of the program."""
    if not split.program_order:
        return split
    where, graph = orders.as_given(split.graph, split.program_order)
    return dataclasses.replace(
        split,
        groups=tuple(split.groups[t] for t in where),
        numbers=tuple(split.numbers[t] for t in where),
        graph=graph,
        program_order=(),
    )


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
            given = Given(self.graph, arena, self.link)
            return plan_by(given, self.strategy).predicted().seconds


def _figures(found: Found, gpu_bytes: int, peak_bytes: int) -> Plan:
    graph, memgraph, rates = found.graph, found.memgraph, found.given.rates
    run = found.predicted()
    h2d, d2h = figures.moved_bytes(graph, memgraph)
    least = max(
        found.least_seconds(), h2d / rates.h2d, d2h / rates.d2h, _slowed_seconds(found)
    )
    # The simulator adds the same numbers in another order.
    bound_seconds = min(run.seconds, least)
    return Plan(
        gpu_bytes=gpu_bytes,
        peak_bytes=peak_bytes,
        h2d_bytes=h2d,
        d2h_bytes=d2h,
        host_bytes=figures.host_peak_bytes(graph, memgraph),
        predicted_seconds=run.seconds,
        predicted_run=run,
        lower_bound_seconds=bound_seconds,
        strategy=found.strategy,
        task_order=found.order,
        repeated_tasks=len(found.tasks) - len(set(found.tasks)),
        taskgraph=graph,
        memgraph=memgraph,
    )


def _slowed_seconds(found: Found) -> float:
    """What the tasks take at least, with what the copies of the plan take from them."""
    ready, link, ops = found.schedule, found.given.link, found.memgraph.ops
    computing = [
        s for s, e in zip(ready.seconds, ready.engines, strict=True) if e == COMPUTE
    ]
    read = {i for op in ops if op.kind is OpKind.RUN for i in op.reads}
    lost: list[float] = []
    late: dict[int, list[tuple[float, float]]] = {H2D: [], D2H: []}
    for op, engine, nbytes, own in zip(
        ops, ready.engines, ready.moves, ready.seconds, strict=True
    ):
        if engine not in late:
            continue
        if engine == H2D and not read.isdisjoint(op.writes):
            lost.append(link.lost_seconds(nbytes))
        else:
            late[engine].append((link.lost_seconds(nbytes), own))
    return bound.slowed_seconds(computing, lost, list(late.values()))


def _host_room(candidate: Split) -> tuple[int, str]:
    """The bytes of host memory for what must leave the device, and why no more."""
    device = candidate.arguments.device
    if device.platform == "cpu":
        return placement.host_bytes_limit(device)
    flat, arguments = candidate.flat, candidate.arguments
    ours = argument_bytes(flat, arguments, (Whose.OURS_HOST,))
    theirs = argument_bytes(flat, arguments, (Whose.CALLER_HOST, Whose.DONATED_HOST))
    return placement.host_bytes_limit(device, ours, theirs)


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
