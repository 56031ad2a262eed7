"""Orders in which a plan may simulate the tasks, beside that of the program.

What a task reads is best read while it is on the device: a step over several microbatches
goes through them layer by layer, so that each weight comes once and not once for each
(FlexGen's zig-zag schedule; arXiv 2303.06865, section 4.1). Which of the tasks that could
run is next is decided one by one, as list scheduling does, by the bytes it would bring in.
"""

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from jturnip.graph.taskgraph import BufferId, Place, Role, Task, TaskGraph, TaskId
from jturnip.units import padded


# Of the tasks that could run next so many are looked at, the first in the program.
_LOOKED_AT = 64
_NEVER = 1 << 60


class Growth(NamedTuple):
    """What a task would change, in bytes."""

    # Of what it reads, not on the device.
    missing: int
    # Of what it writes.
    new: int
    # Of what nobody needs after it.
    freed: int


# Names to what is compared among the tasks that could run next: the smallest goes first.
ORDERS: dict[str, Callable[[Growth], int]] = {
    # What is on the device is read as often as possible before anything else comes.
    "reuse": lambda growth: growth.missing,
    # What needs the fewest bytes more goes first: results are used up soon.
    "lean": lambda growth: growth.missing + growth.new - growth.freed,
}


def order(graph: TaskGraph, gpu_bytes: int, name: str) -> tuple[TaskId, ...]:
    """A valid serial order of the tasks.

    Args:
      graph: its own order decides where the named one does not.
      gpu_bytes: size of the arena.
      name: a key of `ORDERS`.
    """
    return _Scheduler(graph, gpu_bytes).order(ORDERS[name])


def reordered(graph: TaskGraph, tasks: Sequence[int]) -> TaskGraph:
    """The same graph with its tasks in another valid order; ids are positions there. A task
    that comes again writes copies of its results, which all read that come after it."""
    if len(tasks) == len(graph.tasks) and all(t == at for at, t in enumerate(tasks)):
        return graph
    buffers = list(graph.buffers)
    copies: dict[BufferId, BufferId] = {}
    moved: list[Task] = []
    ran: set[int] = set()
    latest = lambda buffers: tuple([copies.get(b, b) for b in buffers])
    for at, t in enumerate(tasks):
        task = graph.tasks[t]
        inputs = latest(task.inputs)
        if t in ran:
            for b in task.outputs:
                copies[b] = BufferId(len(buffers))
                copy = replace(buffers[b], id=copies[b], role=Role.INTERMEDIATE)
                buffers.append(replace(copy, end_on_host=False))
        outputs = latest(task.outputs)
        ran.add(t)
        moved.append(replace(task, id=TaskId(at), inputs=inputs, outputs=outputs))
    return replace(graph, buffers=tuple(buffers), tasks=tuple(moved))


def as_given(graph: TaskGraph, program_order: Sequence[int]) -> tuple[list[int], TaskGraph]:
    """The graph that `reordered` made another of.

    Args:
      graph: the other.
      program_order: for each of its tasks, where it stood in the graph it was made of.

    Returns:
      Where the tasks of that stand in the other, and that.
    """
    # Of several runs of a task the original is the one with the first buffers: an order may
    # have it after the others.
    outputs = [task.outputs for task in graph.tasks]
    first: dict[int, int] = {}
    for at, place in enumerate(program_order):
        first[place] = min(first.get(place, at), at, key=outputs.__getitem__)
    copied: dict[BufferId, BufferId] = {}
    for at, place in enumerate(program_order):
        if first[place] != at:
            copied.update(zip(outputs[at], outputs[first[place]], strict=True))
    where = [first[place] for place in sorted(first)]
    original = lambda buffers: tuple([copied.get(b, b) for b in buffers])
    tasks = (
        replace(graph.tasks[t], id=TaskId(at), inputs=original(graph.tasks[t].inputs))
        for at, t in enumerate(where)
    )
    buffers = tuple([b for b in graph.buffers if b.id not in copied])
    return where, replace(graph, buffers=buffers, tasks=tuple(tasks))


class _Scheduler:
    """Tasks one after the other over a device whose content is simulated in bytes: what is
    read again the latest in the program leaves first."""

    def __init__(self, graph: TaskGraph, gpu_bytes: int):
        self._graph = graph
        self._gpu_bytes = gpu_bytes
        self._sizes = [padded(b.nbytes) for b in graph.buffers]
        self._staying = {b.id for b in graph.buffers if b.pinned}
        results = {b for b in graph.outputs if not graph.buffers[b].end_on_host}
        # What nobody's last reading frees.
        self._needed = self._staying | results
        # Tasks that read each buffer and have not run, the first last.
        self._readers: list[list[TaskId]] = [[] for _ in graph.buffers]
        for task in reversed(graph.tasks):
            for b in task.inputs:
                self._readers[b].append(task.id)
        self._there = {b.id for b in graph.buffers if b.start is Place.DEVICE}
        self._used = sum(self._sizes[b] for b in self._there)
        # Of tasks that could run next, as far as they are known and have not changed.
        self._scores: dict[int, int] = {}
        # What may leave, the best first, as (minus its next reader, buffer).
        self._victims: list[tuple[int, BufferId]] = []
        for b in self._there:
            self._offer_as_victim(b)

    def order(self, score: Callable[[Growth], int]) -> tuple[TaskId, ...]:
        """All tasks, of those that could run the one with the smallest score first."""
        followers, waits = dependencies(self._graph)
        ready = [t for t, n in enumerate(waits) if not n]
        chosen: list[TaskId] = []
        while ready:
            at = 0
            if len(ready) > 1:
                known, looked_at = self._scores, ready[:_LOOKED_AT]
                for t in looked_at:
                    if t not in known:
                        known[t] = score(self._growth(t))
                scores = [known[t] for t in looked_at]
                at = scores.index(min(scores))
            t = TaskId(ready.pop(at))
            chosen.append(t)
            self._run(self._graph.tasks[t])
            for follower in followers[t]:
                waits[follower] -= 1
                if not waits[follower]:
                    bisect.insort(ready, follower)
        return tuple(chosen)

    def _changed(self, b: BufferId) -> None:
        """Forgets the scores of what reads a buffer that came or left, or that only one
        task is still to read."""
        for t in self._readers[b]:
            self._scores.pop(t, None)

    def _growth(self, t: int) -> Growth:
        task, sizes = self._graph.tasks[t], self._sizes
        return Growth(
            missing=sum([sizes[b] for b in task.inputs if b not in self._there]),
            new=sum([sizes[b] for b in task.new]),
            freed=sum([sizes[b] for b in task.inputs if self._is_freed(b, task)]),
        )

    def _is_freed(self, b: BufferId, by: Task) -> bool:
        if len(self._readers[b]) > 1 or b in self._needed:
            return False
        return not by.overwrites or b not in by.overwritten

    def _run(self, task: Task) -> None:
        arriving = [b for b in task.inputs if b not in self._there]
        nbytes = sum(self._sizes[b] for b in chain(arriving, task.new))
        self._make_room(nbytes + padded(task.workspace), frozenset(task.inputs))
        self._there.update(arriving, task.outputs)
        self._used += nbytes
        self._there.difference_update(task.overwritten)  # the results have their bytes
        for b in task.inputs:
            self._readers[b].remove(task.id)
            if b in arriving or len(self._readers[b]) == 1:
                self._changed(b)
        for b in chain(task.inputs, task.outputs):
            if b not in self._there or b in self._staying:
                continue
            if self._readers[b] or b in self._needed:
                self._offer_as_victim(b)
            else:
                self._leave(b)

    def _make_room(self, nbytes: int, keep: frozenset[BufferId]) -> None:
        kept: list[tuple[int, BufferId]] = []
        while self._used + nbytes > self._gpu_bytes and self._victims:
            entry = heapq.heappop(self._victims)
            if entry[1] not in self._there or entry != self._as_victim(entry[1]):
                continue  # it has gone, or has been read since
            if entry[1] in keep:
                kept.append(entry)
            else:
                self._leave(entry[1])
        for entry in kept:
            heapq.heappush(self._victims, entry)

    def _leave(self, b: BufferId) -> None:
        self._there.remove(b)
        self._used -= self._sizes[b]
        self._changed(b)

    def _offer_as_victim(self, b: BufferId) -> None:
        if b not in self._staying:
            heapq.heappush(self._victims, self._as_victim(b))

    def _as_victim(self, b: BufferId) -> tuple[int, BufferId]:
        return -(self._readers[b][-1] if self._readers[b] else _NEVER), b


def dependencies(graph: TaskGraph) -> tuple[list[list[TaskId]], list[int]]:
    """The tasks that wait for each task, and how many each waits for."""
    writer = {b: task.id for task in graph.tasks for b in task.outputs}
    readers: dict[BufferId, list[TaskId]] = {}
    for task in graph.tasks:
        for b in task.inputs:
            readers.setdefault(b, []).append(task.id)
    followers: list[list[TaskId]] = [[] for _ in graph.tasks]
    waits = [0] * len(graph.tasks)
    for task in graph.tasks:
        before = {writer[b] for b in task.inputs if b in writer}
        # Who reads what is written over comes first.
        before.update(r for b in task.overwritten for r in readers[b] if r != task.id)
        for earlier in before:
            followers[earlier].append(task.id)
        waits[task.id] = len(before)
    return followers, waits
