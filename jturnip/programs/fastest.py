"""The fastest plan of some tasks, of those that are promising, as the simulator says."""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from jturnip.graph.memgraph import MemGraph
from jturnip.graph.report import RunReport
from jturnip.graph.taskgraph import TaskGraph
from jturnip.planner import figures, orders, recomputing
from jturnip.planner.bound import busy_seconds, least_seconds
from jturnip.planner.planner import plan as make_memgraph
from jturnip.planner.rates import Rates
from jturnip.planner.strategies import STRATEGIES, Strategy
from jturnip.runtime.schedule import Link, Schedule, schedule
from jturnip.runtime.simulated import simulate


# What `auto` plans and simulates, in the order of the program and in others. Planning many
# tasks takes seconds: beyond some number only in the program's order and what takes one
# plan each, and then only the first strategy.
PROMISING = (
    "ours",
    "tensile",
    "superpipeline",
    "ahead",
    "layerwise",
    "turnip",
    "fixed_order",
)
_PROMISING_REORDERED = ("ours", "ahead")
_MANY_TASKS = 20_000
MANY_TO_REORDER = 5_000
# What is computed again changes what is moved: so often that is looked at.
_ROUNDS = 3

# The paper's free order adapts to what really happens, which no prediction knows: another
# strategy or order, or to compute some again, must be predicted to take less than this
# share of the time of the best plan so far.
CLEARLY = 0.97

# Planning is most of what many layers take until their first result, and most plans are
# not the fastest. So of more than a few tasks some are left out: of a strategy with numbers
# only so many are tried if the best of these takes so many times as long as the best plan
# so far; what the paper's strategy makes is held in order only if it is the fastest; and in
# another order of the tasks the second strategy is planned only where the first is faster
# than in that of the program.
_FEW_TASKS = 32
_FIRST_WAYS = 2
_HOPELESS = 1.25


@dataclass(frozen=True)
class Found:
    """A plan by one strategy in one order."""

    # Tasks of the graph as it was given, in the order in which they run, some perhaps
    # again; the name of that order; and the graph in it.
    tasks: Sequence[int]
    order: str
    graph: TaskGraph
    memgraph: MemGraph
    schedule: Schedule
    # With the numbers that were chosen.
    way: Strategy
    link: Link

    @property
    def strategy(self) -> str:
        """By name."""
        return self.way.name

    @functools.cached_property
    def run(self) -> RunReport:
        """As the simulator predicts it if copies took nothing from the computing."""
        return simulate(self.schedule, self.strategy, self.link.harmless)

    @functools.cached_property
    def seconds(self) -> float:
        """By which plans are compared: what copies take makes all of it slower alike.

        Taken from the tasks beside each copy, it hides which plan keeps the link busy:
        where it makes computing the limit, all plans of the same bytes are equal.
        """
        lost = sum(map(self.link.lost_seconds, filter(None, self.schedule.moves)))
        return self.run.seconds * (1 + lost / max(self.run.compute_seconds, lost, 1e-9))

    def predicted(self) -> RunReport:
        """As the simulator predicts it, copies taking from the tasks beside them."""
        if self.link == self.link.harmless:
            return self.run
        return simulate(self.schedule, self.strategy, self.link)


def fastest(
    graph: TaskGraph,
    arena: int,
    link: Link,
    may_repeat: Collection[int] = (),
    host_bytes: float = math.inf,
) -> Found:
    """The plan of those that are promising which the simulator finds fastest.

    Args:
      graph: what is to be computed.
      arena: device bytes.
      link: what the transfer engines are expected to do.
      may_repeat: tasks that give the same again, and have no effects: they may run twice
        rather than have their results moved.
      host_bytes: what may leave the device at once; where no plan keeps to that, the first
        is returned.
    """
    if len(graph.tasks) > _MANY_TASKS:
        return plan_by(graph, arena, PROMISING[0], link)
    rates = link.h2d_bytes_per_second, link.d2h_bytes_per_second
    # What plans that run each task once take at least, and all plans.
    once, least = least_seconds(graph, arena, *rates), busy_seconds(graph, *rates)
    held = lambda found: host_peak_bytes(found) <= host_bytes
    first: Found | None = None
    best: Found | None = None
    of_order: dict[str, float] = {}
    for tasks, order, strategy in _promising(graph, arena):
        enough = math.inf
        if len(graph.tasks) > _FEW_TASKS and best is not None:
            if strategy == "fixed_order" and best.strategy != "turnip":
                continue
            if order and order in of_order and of_order[order] >= of_order[""]:
                continue
            enough = _HOPELESS * best.seconds
        found = plan_by(graph, arena, strategy, link, tasks, order, host_bytes, enough)
        first = first or found
        of_order.setdefault(order, found.seconds)
        if not held(found):
            continue
        if best is None or found.seconds < CLEARLY * best.seconds:
            best = found
        if CLEARLY * best.run.seconds <= once:
            break  # nothing that runs each task once could be clearly faster
    if best is not None and CLEARLY * best.run.seconds <= least:
        return best
    before = best or first
    assert before is not None
    if len(graph.tasks) <= MANY_TO_REORDER:
        again = _computing_again(graph, before, arena, link, may_repeat, held)
        if best is None or again.seconds < CLEARLY * best.seconds:
            return again
    return before


def _promising(graph: TaskGraph, arena: int) -> Iterator[tuple[Sequence[int], str, str]]:
    """Orders of the tasks, each with its name and a strategy to try in it."""
    program = tuple(range(len(graph.tasks)))
    are_many = len(graph.tasks) > MANY_TO_REORDER
    for strategy in PROMISING:
        if not (are_many and STRATEGIES[strategy].variants):
            yield program, "", strategy
    if are_many:
        return
    known = [program]
    for name in orders.ORDERS:
        tasks = orders.order(graph, arena, name)
        if tasks not in known:
            known.append(tasks)
            for strategy in _PROMISING_REORDERED:
                yield tasks, name, strategy


def _computing_again(
    graph: TaskGraph,
    found: Found,
    arena: int,
    link: Link,
    may_repeat: Collection[int],
    held: Callable[[Found], bool],
) -> Found:
    """A plan in which some tasks run again: where that is faster, or where only then the
    host can hold what is moved. Their operands live longer, and may have to be moved now:
    so what was found is looked at again."""
    rates = _rates(link)
    # Where the host does not hold what is moved now, any saving may do.
    least = (1 - CLEARLY) * found.seconds if held(found) else 0.0
    for _ in range(_ROUNDS):
        before = found
        may = {at for at, t in enumerate(before.tasks) if t in may_repeat}
        graphs = before.graph, before.memgraph
        for longer in recomputing.repeating(*graphs, before.tasks, rates, may, least):
            tasks = tuple(before.tasks[t] for t in longer)
            made = plan_by(graph, arena, before.way, link, tasks, before.order)
            if held(found):
                is_better = held(made) and made.seconds < found.seconds
            else:  # less on the host, until it holds that
                is_better = host_peak_bytes(made) < host_peak_bytes(found)
            if is_better:
                found = made
        if found is before:
            break
    return found


def plan_by(
    graph: TaskGraph,
    arena: int,
    strategy: str | Strategy,
    link: Link,
    tasks: Sequence[int] | None = None,
    order: str = "",
    host_bytes: float = math.inf,
    enough: float = math.inf,
) -> Found:
    """A plan by one strategy; in the order in which tasks stand, if not in another. Of one
    by name, with the numbers that the simulator finds fastest, of those with which the
    host can hold what leaves the device; of the first of these only, where they all take
    more than `enough` seconds."""
    tasks = range(len(graph.tasks)) if tasks is None else tasks
    graph = orders.reordered(graph, tasks)

    def found(way: Strategy) -> Found:
        memgraph = make_memgraph(graph, arena, way, _rates(link))
        ready = schedule(graph, memgraph, link)
        return Found(tasks, order, graph, memgraph, ready, way, link)

    if isinstance(strategy, Strategy):
        return found(strategy)
    ways = STRATEGIES[strategy], *STRATEGIES[strategy].variants
    if len(ways) == 1:
        return found(ways[0])
    fits = lambda made: host_peak_bytes(made) <= host_bytes
    made = list(map(found, ways[:_FIRST_WAYS]))
    if min(m.seconds for m in made) <= enough:
        made += map(found, ways[_FIRST_WAYS:])
    return min(made, key=lambda made: (not fits(made), made.seconds))


def _rates(link: Link) -> Rates:
    return Rates(link.h2d_bytes_per_second, link.d2h_bytes_per_second, link.latency_seconds)


def host_peak_bytes(found: Found) -> int:
    """Bytes of host memory that hold what left the device, at most at once."""
    return figures.host_peak_bytes(found.graph, found.memgraph)
