"""The loop on a virtual clock: what a plan would take, without a device.

Compute is one queue in order; each direction of the link moves one buffer at a time at full
rate. A copy begins once what it depends on is really over, even where the state machine may
issue it earlier; on a GPU it also waits for all computing started before it.
What a copy costs the computing beside it is taken from the compute engine
when the copy starts: it delays the next task, unless that has to wait for longer anyway.
The loop starts one op after the other and hears of none meanwhile, and it takes a while
to hear of one, longer where the device computes with the loop's own cores. A CPU does a
small task within the call that starts it, unless it has to wait: then the call returns at
once.
"""

import heapq
import math

from jturnip.graph.report import RunReport
from jturnip.runtime.loop import run
from jturnip.runtime.schedule import COMPUTE, NONE, Link, Schedule
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


class _VirtualEngines:
    """Invariant: `_over[op]` is when all that `op` waits for is over, as far as started."""

    def __init__(self, schedule: Schedule, link: Link):
        self._schedule = schedule
        self._link = link
        self._now = 0.0
        self._free = [0.0, 0.0, 0.0]
        self._over = [0.0] * len(schedule.engines)
        self._events: list[tuple[float, int]] = []

    def now(self) -> float:
        return self._now

    def start(self, op: int) -> None:
        engine = self._schedule.engines[op]
        moves = self._schedule.moves[op]
        end = self._over[op]
        if engine == COMPUTE:
            end = self._run(op, end)
        elif engine != NONE:
            self._now += self._schedule.dispatch_seconds[op]
            begin = max(self._now, self._free[engine], end)
            if self._link.after_compute:
                begin = max(begin, self._free[COMPUTE])
            end = self._free[engine] = begin + self._schedule.seconds[op]
            end += self._link.latency_seconds
            self._free[COMPUTE] += self._link.lost_seconds(moves)
        if engine != NONE:
            heapq.heappush(self._events, (end, op))
        for successor in self._schedule.successors[op]:
            if end > self._over[successor]:
                self._over[successor] = end

    def _run(self, op: int, ready: float) -> float:
        """When a task is over whose operands are there at `ready`."""
        seconds = self._schedule.seconds[op]
        dispatch = self._schedule.dispatch_seconds[op]
        begin = max(self._now, self._free[COMPUTE], ready)
        if begin == self._now or dispatch < seconds:
            self._now += dispatch
        self._free[COMPUTE] = begin + seconds
        return self._free[COMPUTE]

    def wait(self, few_runs: int) -> list[tuple[int, float]]:
        first = self._events[0][0]
        # A core is free at the latest when there is nothing to compute.
        late = min(first + self._link.late_seconds, self._free[COMPUTE])
        self._now = max(self._now, first, late)
        events = []
        while self._events and self._events[0][0] <= self._now:
            end, op = heapq.heappop(self._events)
            events.append((op, end))
        self._now += len(events) * self._link.heard_seconds
        return events

    def drain(self) -> None:
        self._events.clear()
