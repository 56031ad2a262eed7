"""Peaks of memory, shaved by swaps that fit free time of the link (TENSILE, arXiv
2105.13336).

The tasks are laid out in time as if all bytes found room: each begins when the one before
is over and what it reads of the host has come. Each direction of the link is a timeline,
on which what must be copied anyway has its intervals. Then, where most bytes are in use,
the largest buffer is swapped that nobody reads just then, if a copy to the host fits free
time before that peak and a copy back fits free time after it, as late as possible before
its next reader. One swap after the other, until no peak is above the budget or nothing
fits. What is still above it is for the planner to evict.
"""

import bisect
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jturnip.graph.taskgraph import BufferId, Place, TaskGraph, TaskId
from jturnip.planner.rates import FREE, Rates
from jturnip.planner.transfers import Transfers
from jturnip.units import padded


# What fits free time, but not where it is wanted, is looked at again so often: others take
# of that time meanwhile.
_TRIES = 4


def packed(graph: TaskGraph, gpu_bytes: int, rates: Rates | None) -> Transfers:
    """Swaps that bring the bytes in use under the budget, as far as the link has time.

    Args:
      graph: its tasks in the order in which they run.
      gpu_bytes: size of the arena, in bytes.
      rates: of the link; without them copies take no time.
    """
    if not graph.tasks:
        return Transfers()
    packing = _Packing(graph, gpu_bytes, rates or FREE)
    packing.shave()
    return packing.transfers()


@dataclass(slots=True)
class _Gap:
    """A time in which nobody reads a buffer: between two tasks that do."""

    # Of those that could be swapped; -1: the buffer comes for the first time.
    number: int
    buffer: BufferId
    nbytes: int
    # The task that reads or writes it before (-1: none) and the next that reads it (the
    # number of tasks: none).
    after: int
    until: int
    # Among these tasks it could be away, as far as that has been looked at.
    first: int
    last: int
    # How often it was looked at.
    tries: int = 0


@dataclass(frozen=True, slots=True)
class _Swap:
    """Intervals of a buffer's copies, by when they begin and take; none: not needed."""

    gap: _Gap
    out: tuple[float, float] | None
    back: tuple[float, float] | None
    # Among these tasks it is away.
    first: int
    last: int


class _Packing:
    """Tasks in time, the two timelines, and how many bytes are in use beside each task."""

    def __init__(self, graph: TaskGraph, gpu_bytes: int, rates: Rates):
        self._graph = graph
        self._gpu_bytes = gpu_bytes
        self._rates = rates
        self._sizes = [padded(b.nbytes) for b in graph.buffers]
        # Who writes (-1: it is there at the start) and reads each buffer, in order.
        self._accesses: list[list[int]] = [
            [-1] if b.start is Place.DEVICE else [] for b in graph.buffers
        ]
        for task in graph.tasks:
            for b in task.inputs + task.outputs:
                self._accesses[b].append(task.id)
        # What is on the device at the end.
        wanted = (b for b in graph.outputs if not graph.buffers[b].end_on_host)
        self._staying = {b.id for b in graph.buffers if b.pinned}.union(wanted)
        self._swaps: list[_Swap] = []
        # Buffers with a copy on the host: after which task, and from when on.
        self._copied: dict[BufferId, tuple[int, float]] = {}
        first_reads = self._first_reads()
        self._begins, self._ends = self._in_time(first_reads)
        # To swap what is smaller than this frees next to nothing; and what is left free of
        # the link and is shorter than its copy is of no use.
        self._trifle = gpu_bytes // 4096
        end = self._ends[-1]
        self._to_device = _Timeline(end, self._trifle / rates.h2d)
        self._to_host = _Timeline(end, self._trifle / rates.d2h)
        self._load(first_reads)
        self._write()
        self._used = np.array(list(itertools.accumulate(self._changes()))[:-1])

    # -- what is given -----------------------------------------------------------------

    def _first_reads(self) -> list[tuple[TaskId, BufferId]]:
        """What comes from the host, in order of who is the first to read it."""
        there = {b.id for b in self._graph.buffers if b.start is not Place.HOST}
        found: list[tuple[TaskId, BufferId]] = []
        for task in self._graph.tasks:
            found += [(task.id, b) for b in task.inputs if b not in there]
            there.update(task.inputs)
        return found

    def _in_time(
        self, first_reads: Sequence[tuple[TaskId, BufferId]]
    ) -> tuple[list[float], list[float]]:
        """When each task begins and ends, if only what it reads of the host delays it."""
        loaded, come = [0.0] * len(self._graph.tasks), 0.0
        for t, b in first_reads:
            come += self._seconds_in(b)
            loaded[t] = come + self._rates.latency_seconds
        begins: list[float] = []
        ends: list[float] = []
        now = 0.0
        for task in self._graph.tasks:
            begins.append(max(now, loaded[task.id]))
            now = begins[-1] + task.seconds
            ends.append(now)
        return begins, ends

    def _load(self, first_reads: Sequence[tuple[TaskId, BufferId]]) -> None:
        """What comes from the host for the first time, as late as possible: the last one
        first."""
        busy_from = math.inf
        for t, b in reversed(first_reads):
            seconds = self._seconds_in(b)
            due = self._begins[t] - self._rates.latency_seconds
            begin = busy_from = max(0.0, min(busy_from, due) - seconds)
            self._to_device.take(begin, seconds)
            self._copied[b] = -1, 0.0
            gap = _Gap(-1, b, self._sizes[b], -1, t, 0, t - 1)
            last = min(t, self._next_at(begin)) - 1
            self._swaps.append(_Swap(gap, None, (begin, seconds), 0, last))

    def _write(self) -> None:
        """Results that go to the host anyway, as soon as they are there."""
        for task in self._graph.tasks:
            for b in task.outputs:
                if self._graph.buffers[b].end_on_host:
                    begin = self._to_host.earliest(
                        self._seconds_out(b), self._ends[task.id], math.inf
                    )
                    if begin is not None:  # else it is over after the last task
                        self._take_out(b, task.id, begin)

    def _changes(self) -> Iterator[int]:
        """By how many bytes more are in use beside each task than beside the one before,
        and after the last."""
        graph, tasks = self._graph, len(self._graph.tasks)
        change = [0] * (tasks + 1)
        overwriter = {b: task.id for task in graph.tasks for b in task.overwritten}
        here = {swap.gap.buffer: swap.last + 1 for swap in self._swaps}
        for b, accesses in enumerate(self._accesses):
            if accesses:
                change[here.get(BufferId(b), max(0, accesses[0]))] += self._sizes[b]
                # Who writes over it has its bytes for the result.
                over = overwriter.get(BufferId(b))
                last = accesses[-1] if over is None else over - 1
                change[tasks if b in self._staying else last + 1] -= self._sizes[b]
        for task in graph.tasks:
            change[task.id] += padded(task.workspace)
            change[task.id + 1] -= padded(task.workspace)
        yield from change

    # -- shaving -----------------------------------------------------------------------

    def shave(self) -> None:
        """Swaps the largest buffers at the highest peaks, one at a time."""
        used, gaps = self._used, _Gaps(self._gaps(), len(self._used))
        while True:
            peak = int(used.argmax())
            if used[peak] <= self._gpu_bytes:
                return
            gap = gaps.largest_at(peak)
            if gap is None:
                used[peak] = -1  # nothing that fits is left here
                continue
            swap = self._fitting(gap)
            gap.tries += 1
            if swap is None or gap.tries > _TRIES:
                gaps.remove(gap)
            elif swap.first <= peak <= swap.last:
                gaps.remove(gap)
                self._accept(swap)
            else:  # for another peak, perhaps
                gaps.narrow(gap, swap.first, swap.last)

    def _gaps(self) -> Iterator[_Gap]:
        numbers = itertools.count()
        for b, accesses in enumerate(self._accesses):
            if self._sizes[b] <= self._trifle or self._graph.buffers[b].pinned:
                continue
            nbytes, end = self._sizes[b], [len(self._graph.tasks)]
            every = accesses + end if b in self._staying else accesses
            for after, until in itertools.pairwise(every):
                if after + 1 < until:
                    among = after + 1, until - 1
                    yield _Gap(next(numbers), BufferId(b), nbytes, after, until, *among)

    def _fitting(self, gap: _Gap) -> _Swap | None:
        """A swap in free time of the link: out at once, back as late as possible."""
        out = back = None
        now = self._ends[gap.after] if gap.after >= 0 else 0.0
        copied = self._copied.get(gap.buffer)
        if copied and copied[0] <= gap.after:
            now = max(now, copied[1])
        else:
            seconds = self._seconds_out(gap.buffer)
            begin = self._to_host.earliest(seconds, now, self._begins[gap.until - 1])
            if begin is None:
                return None
            out = begin, seconds
            now = begin + seconds + self._rates.latency_seconds
        first = max(gap.first, bisect.bisect_left(self._begins, now))
        last = gap.last
        if gap.until < len(self._graph.tasks):
            seconds = self._seconds_in(gap.buffer)
            due = self._begins[gap.until] - self._rates.latency_seconds
            begin = self._to_device.latest(seconds, now, due)
            if begin is None:
                return None
            back = begin, seconds
            last = min(last, self._next_at(begin) - 1)
        return _Swap(gap, out, back, first, last) if first <= last else None

    def _accept(self, swap: _Swap) -> None:
        if swap.out:
            self._take_out(swap.gap.buffer, swap.gap.after, swap.out[0])
        if swap.back:
            self._to_device.take(*swap.back)
        self._used[swap.first : swap.last + 1] -= swap.gap.nbytes
        self._swaps.append(swap)

    def _take_out(self, b: BufferId, after: int, begin: float) -> None:
        seconds = self._seconds_out(b)
        self._to_host.take(begin, seconds)
        copied = after, begin + seconds + self._rates.latency_seconds
        self._copied[b] = min(copied, self._copied.get(b, copied))

    def transfers(self) -> Transfers:
        """All swaps, in the order in which their copies are over and begin."""
        leave: defaultdict[int, list[BufferId]] = defaultdict(list)
        come: defaultdict[int, list[tuple[BufferId, TaskId]]] = defaultdict(list)
        # Others come for the first time.
        leaving = (s for s in self._swaps if s.out or s.gap.after >= 0)
        is_out = lambda s: sum(s.out) if s.out else self._ends[s.gap.after]
        for swap in sorted(leaving, key=is_out):
            leave[swap.first - 1].append(swap.gap.buffer)
        coming = (s for s in self._swaps if s.back)
        for swap in sorted(coming, key=lambda s: s.back or ()):
            come[swap.last + 1].append((swap.gap.buffer, TaskId(swap.gap.until)))
        return Transfers(leave, come)

    # -- time --------------------------------------------------------------------------

    def _next_at(self, seconds: float) -> int:
        """The task that runs then, or the next one."""
        return bisect.bisect_right(self._ends, seconds)

    def _seconds_in(self, b: BufferId) -> float:
        return self._graph.buffers[b].nbytes / self._rates.h2d

    def _seconds_out(self, b: BufferId) -> float:
        return self._graph.buffers[b].nbytes / self._rates.d2h


class _Timeline:
    """One direction of the link.

    Invariant: the free intervals are disjoint, in order, and each longer than `least`.
    """

    def __init__(self, end: float, least: float):
        self._least = least
        self._begins = [0.0]
        self._ends = [end]

    def earliest(self, seconds: float, after: float, before: float) -> float | None:
        """When a copy can begin that is over in time; None where it fits nowhere."""
        if seconds <= 0:
            return after if after <= before else None
        at = max(0, bisect.bisect_right(self._begins, after) - 1)
        while at < len(self._begins):
            begin = max(after, self._begins[at])
            if begin + seconds > before:
                return None
            if begin + seconds <= self._ends[at]:
                return begin
            at += 1
        return None

    def latest(self, seconds: float, after: float, before: float) -> float | None:
        """The same, as late as possible."""
        if seconds <= 0:
            return before if after <= before else None
        at = bisect.bisect_left(self._begins, before) - 1
        while at >= 0:
            begin = min(before, self._ends[at]) - seconds
            if begin < after:
                return None
            if begin >= self._begins[at]:
                return begin
            at -= 1
        return None

    def take(self, begin: float, seconds: float) -> None:
        """Whatever of the interval is free."""
        end = begin + seconds
        at = max(0, bisect.bisect_right(self._begins, begin) - 1)
        upto = bisect.bisect_left(self._begins, end, at)
        if seconds <= 0 or at == upto:
            return
        rest = [(self._begins[at], min(begin, self._ends[at]))]
        rest.append((max(end, self._begins[upto - 1]), self._ends[upto - 1]))
        rest = [(a, b) for a, b in rest if b - a > self._least]
        self._begins[at:upto] = [a for a, _ in rest]
        self._ends[at:upto] = [b for _, b in rest]


class _Gaps:
    """Gaps by the tasks at which their buffers could be away: a segment tree whose nodes
    have those that cover all of their tasks, but not all of their parents', the largest
    first."""

    def __init__(self, gaps: Iterator[_Gap], tasks: int):
        self._width = 1 << max(0, tasks - 1).bit_length()
        # By node: (minus bytes, number, first, last).
        self._nodes: defaultdict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        self._gaps = list(gaps)
        for gap in self._gaps:
            self._insert(gap)

    def largest_at(self, task: int) -> _Gap | None:
        """The largest that could be away at a task; of equal ones the first."""
        best: tuple[int, int, int, int] | None = None
        node = task + self._width
        while node:
            entries = self._nodes.get(node)
            while entries and self._is_stale(entries[0]):
                heapq.heappop(entries)
            if entries and (best is None or entries[0] < best):
                best = entries[0]
            node //= 2
        return None if best is None else self._gaps[best[1]]

    def remove(self, gap: _Gap) -> None:
        """It is swapped, or cannot be."""
        gap.first, gap.last = 0, -1

    def narrow(self, gap: _Gap, first: int, last: int) -> None:
        """It could be away only there."""
        gap.first, gap.last = first, last
        self._insert(gap)

    def _insert(self, gap: _Gap) -> None:
        entry = -gap.nbytes, gap.number, gap.first, gap.last
        low, high = gap.first + self._width, gap.last + self._width + 1
        while low < high:
            if low & 1:
                heapq.heappush(self._nodes[low], entry)
                low += 1
            if high & 1:
                high -= 1
                heapq.heappush(self._nodes[high], entry)
            low //= 2
            high //= 2

    def _is_stale(self, entry: tuple[int, int, int, int]) -> bool:
        gap = self._gaps[entry[1]]
        return (gap.first, gap.last) != entry[2:]
