"""What follows a run while it happens, and makes its report."""

from jturnip.graph.report import RunReport
from jturnip.runtime.schedule import COMPUTE, D2H, H2D, NONE, Schedule


class Gathered:
    """The reports of pieces that run one after the other, as they come, in one."""

    # Of what a loop does over and over, so many ops are told of one by one.
    MOST_OPS = 100_000

    def __init__(self) -> None:
        self._began: float | None = None
        self._seconds = self._stall = self._compute = 0.0
        self._h2d = self._d2h = self._peak = self._left_out = 0
        self._order: list[int] = []
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._in_use: list[int] = []

    def add(self, report: RunReport, first_op: int = 0, beside_bytes: int = 0) -> None:
        """One more piece ran.

        Args:
          report: what it did.
          first_op: the number, among the ops of all pieces, of its first op.
          beside_bytes: what others took on the device meanwhile.
        """
        if self._began is None:
            self._began = report.began
        later = report.began - self._began
        self._seconds += report.seconds
        self._stall += report.stall_seconds
        self._compute += report.compute_seconds
        self._h2d += report.h2d_bytes
        self._d2h += report.d2h_bytes
        self._peak = max(self._peak, report.peak_bytes + beside_bytes)
        told = max(0, min(len(report.order), self.MOST_OPS - len(self._order)))
        self._order += [first_op + op for op in report.order[:told]]
        self._starts += [later + seconds for seconds in report.starts[:told]]
        self._ends += [later + seconds for seconds in report.ends[:told]]
        self._in_use += [nbytes + beside_bytes for nbytes in report.in_use[:told]]
        self._left_out += len(report.order) - told + report.not_in_order

    def at_rest(self, nbytes: int) -> None:
        """So many bytes are on the device between two pieces."""
        self._peak = max(self._peak, nbytes)

    def report(self, h2d_bytes: int = 0) -> RunReport:
        """All of it, with so many bytes more that were moved to the device."""
        return RunReport(
            strategy="driven",
            seconds=self._seconds,
            stall_seconds=self._stall,
            h2d_bytes=self._h2d + h2d_bytes,
            d2h_bytes=self._d2h,
            peak_bytes=self._peak,
            compute_seconds=self._compute,
            order=tuple(self._order),
            starts=tuple(self._starts),
            ends=tuple(self._ends),
            in_use=tuple(self._in_use),
            not_in_order=self._left_out,
            began=self._began or 0.0,
        )


class Recorder:
    """Follows one run, and makes its report.

    Invariant: `live_bytes` is what dispatched and undropped instances occupy, and the
    workspace of the run that is being dispatched.
    """

    def __init__(self, schedule: Schedule, now: float):
        self._schedule = schedule
        self._begin = self._end = now
        self.live_bytes = self.peak_bytes = schedule.bytes_at_start
        self._order: list[int] = []
        self._starts: list[float] = []
        self._in_use: list[int] = []
        self._ends: dict[int, float] = {}
        self._stall = 0.0

    def starting(self, op: int, now: float) -> None:
        """Just before `op` is performed."""
        schedule = self._schedule
        if schedule.engines[op] == NONE:
            self.live_bytes -= schedule.frees[op]
            return
        self.live_bytes += schedule.takes[op]
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        self._in_use.append(self.live_bytes)
        self.live_bytes -= schedule.gives_back[op]
        self._order.append(op)
        self._starts.append(now)

    def done(self, op: int, when: float) -> None:
        """`op` completed at `when`."""
        self._ends[op] = when
        if when > self._end:
            self._end = when

    def stalled(self, seconds: float) -> None:
        """The loop waited with no run in flight and runs left."""
        self._stall += seconds

    def report(self, strategy: str) -> RunReport:
        """The report, once everything has completed."""
        schedule, begin = self._schedule, self._begin
        starts, ends, compute, free = [], [], 0.0, begin
        for op, start in zip(self._order, self._starts, strict=True):
            end = self._ends[op]
            if schedule.engines[op] == COMPUTE:
                # The compute queue is in order: a run begins when the one before is over.
                start = max(start, free)
                free = end = max(end, start)
                compute += end - start
            starts.append(start - begin)
            ends.append(end - begin)
        return RunReport(
            strategy=strategy,
            seconds=self._end - begin,
            stall_seconds=self._stall,
            h2d_bytes=self._moved(H2D),
            d2h_bytes=self._moved(D2H),
            peak_bytes=self.peak_bytes,
            compute_seconds=compute,
            order=tuple(self._order),
            starts=tuple(starts),
            ends=tuple(ends),
            in_use=tuple(self._in_use),
            began=begin,
        )

    def _moved(self, engine: int) -> int:
        schedule = self._schedule
        return sum(
            schedule.moves[op] for op in self._order if schedule.engines[op] == engine
        )
