"""A better order of the tasks, by trying small changes of one.

The orders of `planner/orders.py` are made by looking at bytes. When a task had better run,
so that the link always has something to do, only shows in time: an optimizer's update may
wait until its moments have come, a product may go before the one whose weight is on its
way. So a task is put to another place where it may stand, and stays there if the simulator
finds that no slower, one after the other: a local search, the same each time.
"""

import random
from collections.abc import Callable, Sequence

from jturnip.graph.taskgraph import TaskGraph
from jturnip.planner import orders
from jturnip.programs.fastest import plan_by
from jturnip.programs.found import Found, Given


# As many changes are tried as take about so many times what a call is predicted to take;
# none where these are too few, also for so many tasks, and no more than are of use: of few
# tasks, each of which is planned at once, as many as plan so many tasks in all.
_CALLS = 3
_FEWEST, _MOST = 5, 1000
_MOST_TASKS = 24_000
_TASKS_A_CHANGE = 50
# What it takes to plan and simulate one task (guesses): by the planner, by its twin, and by
# that where the strategy looks at the graph first.
_BY_PLANNER, _BY_TWIN, _LOOKING = 160e-6, 4e-6, 30e-6
# What is found must take less than this share of the time before.
_WORTH = 0.99


def better_order(
    given: Given,
    strategy: str,
    allowed: Callable[[Found], bool],
) -> Found | None:
    """A plan in another order that is predicted to be clearly faster, if one is found.

    Args:
      given: its tasks stand in the order to begin with.
      strategy: of all the plans.
      allowed: whether a plan may be taken.
    """
    graph = given.graph
    best = begin = plan_by(given, strategy)
    count = max(1, len(graph.tasks))
    most = max(_MOST, _MOST_TASKS // count)
    tries = min(most, int(_CALLS * begin.taken.seconds / _seconds_a_try(begin)))
    if tries < max(_FEWEST, count // _TASKS_A_CHANGE):
        return None
    places, at_random = _Places(graph), random.Random(0)
    # Those that read and write much decide what the link does when.
    weights = [
        1 + sum(graph.buffers[b].nbytes for b in (*task.inputs, *task.outputs))
        for task in graph.tasks
    ]
    for t in at_random.choices(range(len(graph.tasks)), weights, k=tries):
        if _WORTH * best.taken.seconds <= given.least_seconds:
            break
        tasks = places.moved(best.tasks, t, at_random)
        if tasks is None:
            continue
        found = plan_by(given, best.way, tasks, "search")
        if found.seconds <= best.seconds and allowed(found):
            best = found
    return best if best.seconds < _WORTH * begin.seconds else None


def _seconds_a_try(found: Found) -> float:
    """About what it takes to say what another order takes."""
    a_task = _BY_PLANNER
    if found.given.twin is not None:
        a_task = _LOOKING if found.way.window or found.way.transfers else _BY_TWIN
    return a_task * max(1, len(found.tasks))


class _Places:
    """Where each task may stand."""

    def __init__(self, graph: TaskGraph):
        self._after, _ = orders.dependencies(graph)
        self._before: list[list[int]] = [[] for _ in graph.tasks]
        for t, followers in enumerate(self._after):
            for follower in followers:
                self._before[follower].append(t)

    def moved(
        self, tasks: Sequence[int], t: int, at_random: random.Random
    ) -> tuple[int, ...] | None:
        """The same with a task at any other place where it may stand; None if it may stand
        nowhere else."""
        place = {task: at for at, task in enumerate(tasks)}
        first = max((place[b] + 1 for b in self._before[t]), default=0)
        last = min((place[a] for a in self._after[t]), default=len(tasks)) - 1
        if first == last:
            return None
        to = at_random.randrange(first, last)
        to += to >= place[t]
        others = [task for task in tasks if task != t]
        return *others[:to], t, *others[to:]
