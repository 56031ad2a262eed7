"""Runs a schedule to its end. This is the only place that waits."""

from collections.abc import Sequence
from typing import Protocol

from jturnip.errors import InternalError
from jturnip.graph.report import RunReport
from jturnip.runtime.report import Recorder
from jturnip.runtime.schedule import Schedule
from jturnip.runtime.state import Limits, RunState


class Engines(Protocol):
    """What performs instructions: the device, or a virtual clock."""

    def now(self) -> float:
        """Seconds on the clock that completions are told in."""
        ...

    def start(self, op: int) -> None:
        """Performs `op`; returns before it completes, except for a drop."""
        ...

    def wait(self, few_runs: int) -> Sequence[tuple[int, float]]:
        """Sleeps until something completes: (op, when) for all that has, at least one.

        It need not wake up for the end of a run while more than `few_runs` are in flight.
        """
        ...

    def drain(self) -> None:
        """Lets what is in flight finish and forgets it. Raises nothing of its own."""
        ...


def run(
    schedule: Schedule, engines: Engines, strategy: str, limits: Limits | None = None
) -> RunReport:
    """Starts ops as they become ready until all have completed.

    Raises:
      InternalError: ops are left, and nothing in flight could ever free them.
      BaseException: the first error of an engine, after what was in flight has finished.
    """
    running = Running(schedule, engines, strategy, limits)
    running.start_all()
    return running.finish()


class Running:
    """One run of a schedule, on its way: `start_all`, then `finish`.

    Both raise what `run` raises.
    """

    def __init__(
        self,
        schedule: Schedule,
        engines: Engines,
        strategy: str,
        limits: Limits | None = None,
    ):
        self._engines = engines
        self._strategy = strategy
        self._state = RunState(schedule, limits)
        self._recorder = Recorder(schedule, engines.now())

    def start_all(self) -> None:
        """Until every op has been started."""
        try:
            self._perform(self._state.begin())
            while not self._state.all_started:
                self._wait()
        except BaseException:
            self._engines.drain()
            raise

    def finish(self) -> RunReport:
        """Until every op has completed."""
        try:
            while not self._state.finished:
                self._wait()
        except BaseException:
            self._engines.drain()
            raise
        return self._recorder.report(self._strategy)

    def _wait(self) -> None:
        state, recorder, engines = self._state, self._recorder, self._engines
        if not state.in_flight:
            raise InternalError(_story(state))
        began = engines.now()
        events = engines.wait(state.few_runs)
        if state.stalled:
            recorder.stalled(max(0.0, events[0][1] - began))
        self.tell(events)

    def tell(self, events: Sequence[tuple[int, float]]) -> bool:
        """These ops have completed, as `Engines.wait` has it; whether all have now."""
        for op, when in events:
            self._recorder.done(op, when)
        self._perform(self._state.handle([op for op, _ in events]))
        return self._state.finished

    def _perform(self, instructions: Sequence[int]) -> None:
        recorder, engines = self._recorder, self._engines
        for op in instructions:
            recorder.starting(op, engines.now())
            engines.start(op)


def _story(state: RunState) -> str:
    blocked = state.blocked()
    named = ", ".join(f"op {op} waits for {n}" for op, n in blocked[:8])
    return f"{len(blocked)} ops can never start, nothing is in flight: {named}"
