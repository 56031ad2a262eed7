"""What a run did, as a record."""

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jturnip.units import format_bytes


if TYPE_CHECKING:
    from jturnip.graph.plan import Plan


@dataclass(frozen=True, slots=True)
class RunReport:
    """One call of a jturnip function. Times are seconds since its loop began."""

    # The strategy of the plan that ran; "whole" where it ran as one executable.
    strategy: str
    # From the first instruction to the last completion; for "whole", the dispatch only.
    seconds: float
    # Time in which compute was idle while runs were left, waiting for transfers or for
    # the bytes they free. Intervals do not overlap, so nothing is counted twice.
    stall_seconds: float
    # With what was put on the device to stay there, before the first instruction.
    h2d_bytes: int
    d2h_bytes: int
    # The most bytes in use at any moment, workspace and transfers in flight included.
    peak_bytes: int
    # Sum of the runs' own times on the device.
    compute_seconds: float = 0.0
    # Op ids of the plan in the order they were started, drops left out, and their times. Of
    # a plan in pieces, numbers that `Plan.locate` knows; what a loop repeats comes again.
    order: tuple[int, ...] = field(default=(), repr=False)
    starts: tuple[float, ...] = field(default=(), repr=False)
    ends: tuple[float, ...] = field(default=(), repr=False)
    # Device bytes in use once each of them had been started, workspace included.
    in_use: tuple[int, ...] = field(default=(), repr=False)
    # How many more ops there were, of a loop with very many turns.
    not_in_order: int = 0
    # When its loop began, by `time.perf_counter`.
    began: float = field(default=0.0, repr=False, compare=False)
    # Device bytes that stay there until the next call, of arrays in host memory.
    kept_bytes: int = 0
    # What ran; None for a part of a run, and in the simulator.
    plan: "Plan | None" = field(default=None, repr=False, compare=False)

    def summary(self) -> str:
        """One line for people."""
        return (
            f"{self.strategy}: {self.seconds:.3f} s, stalled {self.stall_seconds:.3f} s,"
            f" peak {format_bytes(self.peak_bytes)}, {format_bytes(self.h2d_bytes)} to the"
            f" device, {format_bytes(self.d2h_bytes)} to the host"
        )

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the run as a trace that Perfetto (https://ui.perfetto.dev) opens.

        In the Trace Event Format, as JSON; compressed where the name ends in ".gz". A lane
        each for compute and the link's two directions, arrows from a reload to the first
        task that reads it, counters for memory in use and the link's rates.

        Raises:
          ValueError: the run is of no plan with ops, as of a function that runs whole.
        """
        from jturnip.show import trace

        trace.save(self, path)

    def _repr_html_(self) -> str:
        from jturnip.show import pages

        return pages.of_run(self)
