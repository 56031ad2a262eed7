"""The loop on a virtual clock: what a plan would take, without a device.

Compute is one queue in order; each direction of the link moves one buffer at a time at full
rate. A copy begins once what it depends on is really over, even where the state machine may
issue it earlier; on a GPU it also waits for all computing started before it.
What a copy costs the computing beside it is taken from the task that is computed
when the copy begins, which is over so much later, as is all that waits for it; where none
is, it delays the next task, unless that has to wait for longer anyway.
The loop starts one op after the other and hears of none meanwhile, and it takes a while
to hear of one, longer where the device computes with the loop's own cores. A CPU does a
small task within the call that starts it, unless it has to wait: then the call returns at
once.
"""

import math
from dataclasses import dataclass

from jturnip.graph.report import RunReport
from jturnip.runtime.loop import run
from jturnip.runtime.schedule import COMPUTE, D2H, H2D, NONE, Link, Schedule
from jturnip.runtime.state import Limits


def simulate(
    schedule: Schedule,
    strategy: str = "",
    link: Link | None = None,
    limits: Limits | None = None,
) -> RunReport:
    """Runs `schedule` in virtual time, by the seconds it predicts for each op; of `link`
    come the latency, and what copies cost the computing beside them."""
    link = link or Link(math.inf, math.inf)
    limits = limits or limits_over(link)
    return run(schedule, _VirtualEngines(schedule, link), strategy, limits)


def limits_over(link: Link) -> Limits:
    """How many ops the engines hold at a time, of a device with such a link."""
    return Limits.on("gpu") if link.after_compute else Limits()


@dataclass(slots=True)
class _Started:
    """An op on its way."""

    op: int
    engine: int
    # When the loop started it.
    issued: float
    # Of a run: what the copies beside it take, and those since the run before it.
    lost: float = 0.0
    lost_before: float = 0.0
    # When it begins, when its engine is through with it, and when it is over.
    begin: float = 0.0
    free: float = 0.0
    end: float = 0.0


class _VirtualEngines:
    """Invariants: `_on_the_way` has all that is not over, in the order of their starts;
    `_free` is when each engine is through with all that was started, `_free_before` with
    all that is over; `_over[op]` is when all that `op` waits for is over, as far as
    started."""

    def __init__(self, schedule: Schedule, link: Link):
        self._schedule = schedule
        self._link = link
        self._now = 0.0
        self._free = [0.0, 0.0, 0.0]
        self._free_before = [0.0, 0.0, 0.0]
        self._over = [0.0] * len(schedule.engines)
        self._on_the_way: dict[int, _Started] = {}
        # What copies take since the last run that was started.
        self._lost = 0.0

    def now(self) -> float:
        return self._now

    def start(self, op: int) -> None:
        engine = self._schedule.engines[op]
        dispatch = self._schedule.dispatch_seconds[op]
        if engine in (H2D, D2H):
            self._now += dispatch
        started = _Started(op, engine, self._now)
        if engine == COMPUTE:
            started.lost_before, self._lost = self._lost, 0.0
        self._find_end(started)
        if engine != NONE or started.end > self._now:
            self._on_the_way[op] = started
        if engine == COMPUTE:
            if started.begin == self._now or dispatch < self._schedule.seconds[op]:
                self._now += dispatch
        elif engine != NONE:
            self._take(self._link.lost_seconds(self._schedule.moves[op]), started.begin)

    def _find_end(self, started: _Started) -> None:
        """When an op is over, as far as is known, and that what waits for it knows."""
        op, engine = started.op, started.engine
        begin = end = self._over[op]
        if engine != NONE:
            begin = max(started.issued, self._free[engine] + started.lost_before, begin)
            if engine != COMPUTE and self._link.after_compute:
                begin = max(begin, self._free[COMPUTE])
            end = begin + self._schedule.seconds[op] + started.lost
            self._free[engine] = started.free = end
        if engine in (H2D, D2H):
            end += self._link.latency_seconds
        started.begin = begin
        started.end = end
        for successor in self._schedule.successors[op]:
            if end > self._over[successor]:
                self._over[successor] = end

    def _take(self, lost: float, begin: float) -> None:
        """Takes what a copy that begins then costs from the computing."""
        if not lost:
            return
        for started in self._on_the_way.values():
            if started.engine == COMPUTE and started.end > begin:
                started.lost += lost
                break
        else:
            self._lost += lost
            return
        self._free = list(self._free_before)
        for started in self._on_the_way.values():
            self._find_end(started)

    def wait(self, few_runs: int) -> list[tuple[int, float]]:
        on_the_way = self._on_the_way.values()
        first = min([s.end for s in on_the_way if s.engine != NONE])
        # A core is free at the latest when there is nothing to compute.
        late = min(first + self._link.late_seconds, self._free[COMPUTE])
        self._now = max(self._now, first, late)
        over = [s for s in on_the_way if s.end <= self._now]
        for started in over:
            del self._on_the_way[started.op]
            if started.engine != NONE:
                self._free_before[started.engine] = started.free
        events = sorted([(s.end, s.op) for s in over if s.engine != NONE])
        self._now += len(events) * self._link.heard_seconds
        return [(op, end) for end, op in events]

    def drain(self) -> None:
        self._on_the_way.clear()
