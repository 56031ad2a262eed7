"""The fastest plan of some tasks, of those that are promising, as the simulator says."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence

from jturnip.graph.taskgraph import TaskGraph
from jturnip.planner import orders, recomputing
from jturnip.planner.bound import busy_seconds
from jturnip.planner.strategies import STRATEGIES, Strategy
from jturnip.programs.found import Found, Given
from jturnip.runtime.schedule import Link


# What `auto` plans and simulates, in the order of the program and in others. Planning many
# tasks takes seconds: beyond some number only in the program's order and what takes one
# plan each (without the planner's twin), and then only the first strategy.
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
_MANY_WITHOUT_TWIN = 5_000
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
    given = Given(graph, arena, link)
    if len(graph.tasks) > _MANY_TASKS:
        return plan_by(given, PROMISING[0])
    held = lambda found: found.taken.host_peak_bytes <= host_bytes
    first: Found | None = None
    best: Found | None = None
    of_order: dict[str, float] = {}
    for tasks, order, strategy in _promising(given):
        enough = math.inf
        if len(graph.tasks) > _FEW_TASKS and best is not None:
            if strategy == "fixed_order" and best.strategy != "turnip":
                continue
            if order and order in of_order and of_order[order] >= of_order[""]:
                continue
            enough = _HOPELESS * best.seconds
        found = plan_by(given, strategy, tasks, order, host_bytes, enough)
        first = first or found
        of_order.setdefault(order, found.seconds)
        if not held(found):
            continue
        if best is None or found.seconds < CLEARLY * best.seconds:
            best = found
        if CLEARLY * best.taken.seconds <= given.least_seconds:
            break  # nothing that runs each task once could be clearly faster
    least = busy_seconds(graph, given.rates.h2d, given.rates.d2h)
    if best is not None and CLEARLY * best.taken.seconds <= least:
        return best
    before = best or first
    assert before is not None
    if not are_many(given):
        again = _computing_again(before, may_repeat, held)
        if best is None or again.seconds < CLEARLY * best.seconds:
            return again
    return before


def are_many(given: Given) -> bool:
    """Whether there are too many tasks to look at other orders of them."""
    most = _MANY_WITHOUT_TWIN if given.twin is None else _MANY_TASKS
    return len(given.graph.tasks) > most


def _promising(given: Given) -> Iterator[tuple[Sequence[int], str, str]]:
    """Orders of the tasks, each with its name and a strategy to try in it."""
    program = tuple(range(len(given.graph.tasks)))
    many = are_many(given)
    for strategy in PROMISING:
        if not (many and STRATEGIES[strategy].variants):
            yield program, "", strategy
    if many:
        return
    known = [program]
    for name in orders.ORDERS:
        tasks = given.in_order(name)
        if tasks not in known:
            known.append(tasks)
            for strategy in _PROMISING_REORDERED:
                yield tasks, name, strategy


def _computing_again(
    found: Found,
    may_repeat: Collection[int],
    held: Callable[[Found], bool],
) -> Found:
    """A plan in which some tasks run again: where that is faster, or where only then the
    host can hold what is moved. Their operands live longer, and may have to be moved now:
    so what was found is looked at again."""
    given = found.given
    # Where the host does not hold what is moved now, any saving may do.
    least = (1 - CLEARLY) * found.seconds if held(found) else 0.0
    for _ in range(_ROUNDS):
        before = found
        may = {at for at, t in enumerate(before.tasks) if t in may_repeat}
        graphs = before.graph, before.memgraph
        for longer in recomputing.repeating(*graphs, before.tasks, given.rates, may, least):
            tasks = tuple(before.tasks[t] for t in longer)
            made = plan_by(given, before.way, tasks, before.order)
            if held(found):
                is_better = held(made) and made.seconds < found.seconds
            else:  # less on the host, until it holds that
                is_better = made.taken.host_peak_bytes < found.taken.host_peak_bytes
            if is_better:
                found = made
        if found is before:
            break
    return found


def plan_by(
    given: Given,
    strategy: str | Strategy,
    tasks: Sequence[int] | None = None,
    order: str = "",
    host_bytes: float = math.inf,
    enough: float = math.inf,
) -> Found:
    """A plan by one strategy, made when it is asked for; in the order in which tasks stand,
    if not in another. Of one by name, with the numbers that the simulator finds fastest, of
    those with which the host can hold what leaves the device; of the first of these only,
    where they all take more than `enough` seconds."""
    in_order = range(len(given.graph.tasks)) if tasks is None else tasks

    def found(way: Strategy) -> Found:
        return Found(given, in_order, order, way)

    if isinstance(strategy, Strategy):
        return found(strategy)
    ways = STRATEGIES[strategy], *STRATEGIES[strategy].variants
    if len(ways) == 1:
        return found(ways[0])
    fits = lambda made: made.taken.host_peak_bytes <= host_bytes
    made = list(map(found, ways[:_FIRST_WAYS]))
    if min(m.seconds for m in made) <= enough:
        made += map(found, ways[_FIRST_WAYS:])
    return min(made, key=lambda made: (not fits(made), made.seconds))
