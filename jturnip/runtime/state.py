"""What is ready, in flight and done: a pure state machine.

Events in (ops that have completed), instructions out (ops to start, in this order). There
are no threads here, no clock and no device; the same machine drives the real engines and
the simulator, so what is predicted is what is run.

When an edge counts as satisfied depends on the op at its tail:
- a run: at its dispatch, since the compute engine is one queue in order;
- a drop: at once, it only lets go of references;
- a transfer: when its copy has completed.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from jturnip.runtime.schedule import COMPUTE, D2H, H2D, NONE, Schedule


@dataclass(frozen=True, slots=True)
class Limits:
    """How many ops each engine may hold at a time.

    A deep compute queue kills overlap on a GPU: a copy waits for all compute that was
    enqueued when its destination was allocated. One of short runs costs a copy little, and
    without it the device waits for the loop to dispatch the next. On a CPU a copy waits for
    nothing but its source, and a deeper queue lets the loop sleep for longer, whose thread
    takes a core: what matters where runs take less than half a millisecond.
    """

    compute: int = 2
    h2d: int = 2
    d2h: int = 2
    # As many runs while all in flight take no longer than so many seconds together.
    short_runs: int = 0
    queue_seconds: float = 0.0

    @classmethod
    def on(cls, platform: str) -> "Limits":
        """Those of a device of some platform, such as "cpu"."""
        if platform == "cpu":
            return cls(compute=4, short_runs=8, queue_seconds=4e-3)
        return cls(h2d=4, d2h=4, short_runs=16, queue_seconds=2e-3)

    @property
    def most_runs(self) -> int:
        """Never more runs than this."""
        return max(self.compute, self.short_runs)


class RunState:
    """One run of a schedule. Instructions must be performed in the order given."""

    def __init__(self, schedule: Schedule, limits: Limits | None = None):
        self._limits = limits = limits or Limits()
        self._schedule = schedule
        # How many unsatisfied edges each op has; it becomes ready at zero.
        self._waits = list(schedule.waits)
        # Ranks of the ready ops of each engine (heaps), and free places in it.
        self._ready: tuple[list[int], ...] = ([], [], [])
        self._places = [limits.most_runs, limits.h2d, limits.d2h]
        # Ready drops, which need no engine.
        self._drops: list[int] = []
        # Ops that have not completed, ops started and not completed, runs among both.
        self.remaining = len(schedule.engines)
        self.in_flight = 0
        self.computing = 0
        # What the runs in flight are expected to take, in seconds.
        self._queued_seconds = 0.0
        self.runs_left = schedule.engines.count(COMPUTE)

    def begin(self) -> list[int]:
        """The first instructions."""
        for op, waits in enumerate(self._waits):
            if waits == 0:
                self._make_ready(op)
        return self._advance()

    def handle(self, done: Iterable[int]) -> list[int]:
        """Takes ops that have completed; returns ops to start now."""
        engines = self._schedule.engines
        for op in done:
            engine = engines[op]
            self._places[engine] += 1
            self.in_flight -= 1
            self.remaining -= 1
            if engine == COMPUTE:
                self.computing -= 1
                self.runs_left -= 1
                self._queued_seconds -= self._schedule.seconds[op]
            else:
                self._satisfy(op)
        return self._advance()

    @property
    def few_runs(self) -> int:
        """With no more runs in flight the end of each must be heard of, so that the next
        is there in time: half of as many as there may be of their kind."""
        limits = self._limits
        some = self.computing <= limits.compute
        return (limits.compute if some else limits.most_runs) // 2

    @property
    def finished(self) -> bool:
        """Whether every op has completed."""
        return self.remaining == 0

    @property
    def all_started(self) -> bool:
        """Whether every op has been started; a drop is over when it is."""
        return self.remaining == self.in_flight

    @property
    def stalled(self) -> bool:
        """Whether compute is idle although runs are left: they wait for transfers."""
        return self.computing == 0 and self.runs_left > 0

    def blocked(self) -> list[tuple[int, int]]:
        """Ops with unsatisfied edges, and how many."""
        return [(op, waits) for op, waits in enumerate(self._waits) if waits > 0]

    def _advance(self) -> list[int]:
        """Drops first, then transfers, then one run; until nothing more can start."""
        ready_runs, ready_h2d, ready_d2h = self._ready
        places, by_rank = self._places, self._schedule.by_rank
        started: list[int] = []
        while True:
            while self._drops:
                op = self._drops.pop()
                started.append(op)
                self.remaining -= 1
                self._satisfy(op)
            while ready_d2h and places[D2H]:
                self._start(by_rank[heapq.heappop(ready_d2h)], D2H, started)
            while ready_h2d and places[H2D]:
                self._start(by_rank[heapq.heappop(ready_h2d)], H2D, started)
            if not ready_runs or not places[COMPUTE]:
                return started
            op = by_rank[ready_runs[0]]
            if not self._may_be_queued(op):
                return started
            heapq.heappop(ready_runs)
            self._start(op, COMPUTE, started)
            self.computing += 1
            self._queued_seconds += self._schedule.seconds[op]
            self._satisfy(op)

    def _may_be_queued(self, run: int) -> bool:
        """Whether the compute queue, which has a place, takes this run."""
        if self.computing < self._limits.compute:
            return True
        seconds = self._queued_seconds + self._schedule.seconds[run]
        return seconds <= self._limits.queue_seconds

    def _start(self, op: int, engine: int, started: list[int]) -> None:
        self._places[engine] -= 1
        self.in_flight += 1
        started.append(op)

    def _satisfy(self, op: int) -> None:
        waits = self._waits
        for successor in self._schedule.successors[op]:
            waits[successor] -= 1
            if waits[successor] == 0:
                self._make_ready(successor)

    def _make_ready(self, op: int) -> None:
        engine = self._schedule.engines[op]
        if engine == NONE:
            self._drops.append(op)
        else:
            heapq.heappush(self._ready[engine], self._schedule.ranks[op])
