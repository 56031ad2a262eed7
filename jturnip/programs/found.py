"""A plan by one strategy in one order, and what it would take.

Many are compared and one is taken: so a plan is made only when somebody asks for it. What
it would take is said without making records of it, where there is the C++ extension.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jturnip.graph.memgraph import MemGraph
from jturnip.graph.report import RunReport
from jturnip.graph.taskgraph import TaskGraph
from jturnip.planner import figures, orders
from jturnip.planner.bound import least_seconds
from jturnip.planner.planner import plan
from jturnip.planner.rates import Rates
from jturnip.planner.strategies import Strategy
from jturnip.programs.twin import Taken, Twin, twin_of
from jturnip.runtime.schedule import Link, Schedule, schedule
from jturnip.runtime.simulated import simulate


class Given:
    """Some tasks, and what there is for them: the same for all plans that are compared.

    Attributes:
      graph: what is to be computed.
      arena: device bytes.
      link: what the transfer engines are expected to do.
      rates: what a planner knows of it.
    """

    def __init__(self, graph: TaskGraph, arena: int, link: Link):
        self.graph = graph
        self.arena = arena
        self.link = link
        self.rates = Rates(
            link.h2d_bytes_per_second, link.d2h_bytes_per_second, link.latency_seconds
        )

    @functools.cached_property
    def least_seconds(self) -> float:
        """What a run takes at least in which each task runs once."""
        return least_seconds(self.graph, self.arena, self.rates.h2d, self.rates.d2h)

    def in_order(self, name: str) -> tuple[int, ...]:
        """The tasks in an order by name (`planner/orders.py`)."""
        if self.twin is not None:
            return self.twin.order(self.arena, name)
        return orders.order(self.graph, self.arena, name)

    @functools.cached_property
    def twin(self) -> Twin | None:
        """The tasks in C++; None without the extension."""
        return twin_of(self.graph)


@dataclass(frozen=True)
class Found:
    """A plan by one strategy in one order.

    What it takes, and what it is, is found when it is asked for, and raises as `plan`.
    """

    given: Given
    # Tasks of the graph as it was given, in the order in which they run, some perhaps
    # again; the name of that order; and the strategy, with the numbers that were chosen.
    tasks: Sequence[int]
    order: str
    way: Strategy

    @property
    def strategy(self) -> str:
        """By name."""
        return self.way.name

    @functools.cached_property
    def graph(self) -> TaskGraph:
        """The tasks in that order."""
        return orders.reordered(self.given.graph, self.tasks)

    @functools.cached_property
    def memgraph(self) -> MemGraph:
        """The plan."""
        given = self.given
        if given.twin is not None:
            made = given.twin.plan(
                self.tasks, self.graph, given.arena, self._way_in_twin, given.rates
            )
            if made is not None:
                return made
        return plan(self.graph, given.arena, self.way, given.rates)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The plan, ready to run."""
        return schedule(self.graph, self.memgraph, self.given.link)

    @functools.cached_property
    def taken(self) -> Taken:
        """What it takes."""
        given = self.given
        if given.twin is not None:
            taken = given.twin.taken(self.tasks, given.arena, self._way_in_twin, given.link)
            if taken is not None:
                return taken
        run = simulate(self.schedule, self.strategy, given.link.harmless)
        return Taken(
            run.seconds,
            run.compute_seconds,
            sum(nbytes > 0 for nbytes in self.schedule.moves),
            run.h2d_bytes,
            run.d2h_bytes,
            figures.host_peak_bytes(self.graph, self.memgraph),
        )

    @property
    def seconds(self) -> float:
        """By which plans are compared: what copies take makes all of it slower alike.

        Taken from the tasks beside each copy, it hides which plan keeps the link busy:
        where it makes computing the limit, all plans of the same bytes are equal.
        """
        taken = self.taken
        moved = taken.h2d_bytes + taken.d2h_bytes
        lost = self.given.link.lost_seconds(moved, taken.copies)
        return taken.seconds * (1 + lost / max(taken.compute_seconds, lost, 1e-9))

    def predicted(self) -> RunReport:
        """As the simulator predicts it, copies taking from the tasks beside them."""
        return simulate(self.schedule, self.strategy, self.given.link)

    def least_seconds(self) -> float:
        """What a run of these tasks takes at least, each of them as often as here."""
        if len(self.tasks) == len(self.given.graph.tasks):
            return self.given.least_seconds
        rates = self.given.rates
        return least_seconds(self.graph, self.given.arena, rates.h2d, rates.d2h)

    @functools.cached_property
    def _way_in_twin(self) -> Any:
        given = self.given
        assert given.twin is not None
        # Most strategies ask nothing of the graph in its order.
        return given.twin.way(self.way, lambda: self.graph, given.arena, given.rates)
