"""A time that no plan that runs each task once can beat in a budget, whatever its order.

Three engines work at once, each on one thing at a time: compute, and the link each way. A
set of jobs on one engine takes at least its own sum, after the earliest moment at which one
of them can begin and before the least that must follow one of them (the bound for one
machine with heads and tails, J. R. Jackson, 1955). Heads and tails come from the graph: all
that a task depends on is computed and copied before it, and of what is needed after it no
more than the budget is on the device when it ends: the rest crosses the link afterwards.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from jturnip.graph.taskgraph import BufferId, Place, TaskGraph, TaskId


# Beyond so many tasks or buffers only sums are taken: the tables would have too many cells.
_MOST = 2048

_Array: TypeAlias = np.ndarray


def busy_seconds(
    graph: TaskGraph, h2d_bytes_per_second: float, d2h_bytes_per_second: float
) -> float:
    """Seconds that the busiest of compute and the link each way takes at least: nor does a
    plan beat that which runs tasks again.

    Args:
      graph: the tasks, with their seconds.
      h2d_bytes_per_second: the link's rate to the device.
      d2h_bytes_per_second: its rate to the host.
    """
    read = {b for task in graph.tasks for b in task.inputs}
    comes_in = [b.nbytes for b in graph.buffers if b.start is Place.HOST and b.id in read]
    goes_out = [b.nbytes for b in graph.buffers if b.end_on_host and b.start is None]
    return max(
        sum(task.seconds for task in graph.tasks),
        sum(comes_in) / h2d_bytes_per_second,
        sum(goes_out) / d2h_bytes_per_second,
    )


def slowed_seconds(
    computing: Sequence[float],
    lost: Sequence[float],
    late: Sequence[Sequence[tuple[float, float]]],
) -> float:
    """Seconds that a run takes at least, with what copies take from the computing.

    A copy that begins before the last task is over takes from the tasks, or from idle time,
    which no run gets back either. Copies that no task waits for may begin after it, and
    take nothing then, but their own time, one after the other each way.

    Args:
      computing: seconds of each task.
      lost: seconds that each copy which a task waits for takes from the computing.
      late: of the other copies, for each way of the link, the seconds that each takes from
        the computing, and its own.
    """
    # Of each way, first those that take most for their time; parts of copies count too.
    ways = [
        np.cumsum([(0.0, 0.0), *sorted(way, key=_for_its_time, reverse=True)], axis=0).T
        for way in late
    ]
    # All together take least where the last of some way ends that come after the tasks.
    ends = np.unique(np.concatenate([[0.0], *[own for _, own in ways]]))
    beside = [x[-1] - np.interp(ends, own, x) for x, own in ways]
    return sum(computing) + sum(lost) + float((ends + sum(beside)).min())


def _for_its_time(copy: tuple[float, float]) -> float:
    """What a copy takes from the computing, over its own time."""
    lost, own = copy
    return lost / own if own > 0 else math.inf


def least_seconds(
    graph: TaskGraph,
    gpu_bytes: int,
    h2d_bytes_per_second: float,
    d2h_bytes_per_second: float,
) -> float:
    """Seconds that a run takes at least in which each task runs once.

    Args:
      graph: the tasks, with their seconds.
      gpu_bytes: size of the arena, in bytes.
      h2d_bytes_per_second: the link's rate to the device.
      d2h_bytes_per_second: its rate to the host.
    """
    compute = np.array([task.seconds for task in graph.tasks])
    sizes = np.array([b.nbytes for b in graph.buffers], float)
    read = {b for task in graph.tasks for b in task.inputs}
    writer = {b: task.id for task in graph.tasks for b in task.outputs}
    comes_in = [b.id for b in graph.buffers if b.start is Place.HOST and b.id in read]
    goes_out = [b.id for b in graph.buffers if b.end_on_host and b.id in writer]
    into, out = sizes / h2d_bytes_per_second, sizes / d2h_bytes_per_second
    sums = busy_seconds(graph, h2d_bytes_per_second, d2h_bytes_per_second)
    if not graph.tasks or max(len(graph.tasks), len(graph.buffers)) > _MOST:
        return sums
    around = _Around(graph, writer)
    before = around.before.astype(float)  # of truth values numpy makes a copy each time
    # What each task, or one before it, reads of the host; and what it, or one after it,
    # leaves there.
    head = np.maximum(before @ compute, around.read_before[:, comes_in] @ into[comes_in])
    left = around.known & around.read_after
    again = np.maximum(left @ sizes - gpu_bytes, 0) / h2d_bytes_per_second
    writers = [writer[b] for b in goes_out]
    written_after = around.before.T[:, writers] | (
        np.array(writers, int)[None, :] == np.arange(len(compute))[:, None]
    )
    tail = np.maximum.reduce([before.T @ compute, again, written_after @ out[goes_out]])
    _along(head, tail, compute, around.parents)
    # A copy is followed by all that reads it.
    longest: dict[BufferId, float] = {}
    for task in graph.tasks:
        following = float(compute[task.id] + tail[task.id])
        longest.update((b, max(longest.get(b, 0.0), following)) for b in task.inputs)
    tails_in = np.array([longest[b] for b in comes_in])
    heads_out = (head + compute)[writers]
    return float(
        max(
            sums,
            (head + compute + tail).max(),
            _one_machine(head, compute, tail),
            _one_machine(tail, compute, head),
            _one_machine(tails_in, into[comes_in], np.zeros(len(comes_in))),
            _one_machine(heads_out, out[goes_out], np.zeros(len(goes_out))),
        )
    )


class _Around:
    """What is before and after each task, in any order that keeps the dependencies.

    Rows are tasks; columns are tasks or buffers.
    """

    def __init__(self, graph: TaskGraph, writer: dict[BufferId, TaskId]):
        tasks, buffers = len(graph.tasks), len(graph.buffers)
        self.parents: list[Sequence[int]] = [
            sorted({writer[b] for b in task.inputs if b in writer}) for task in graph.tasks
        ]
        # Tasks that a task depends on.
        self.before = np.zeros((tasks, tasks), bool)
        # Buffers that a task or one before it reads, and that those after it read.
        reads = np.zeros((tasks, buffers), bool)
        cells = [(t.id, b) for t in graph.tasks for b in t.inputs]
        reads[tuple(np.array(cells, int).reshape(-1, 2).T)] = True
        self.read_before = reads.copy()
        self.read_after = np.zeros_like(reads)
        for t, parents in enumerate(self.parents):
            for p in parents:
                self.before[t] |= self.before[p]
                self.before[t, p] = True
                self.read_before[t] |= self.read_before[p]
        for t in range(tasks - 1, -1, -1):
            for p in self.parents[t]:
                self.read_after[p] |= self.read_after[t] | reads[t]
        # Buffers that surely have been written when a task ends.
        made = np.array([writer.get(b.id, -1) for b in graph.buffers], int)
        upto = self.before | np.eye(tasks, dtype=bool)
        self.known = np.where(made < 0, True, upto[:, np.maximum(made, 0)])


def _along(
    head: _Array, tail: _Array, compute: _Array, parents: Sequence[Sequence[int]]
) -> None:
    """Makes heads and tails at least what they are along each path."""
    for t, mine in enumerate(parents):
        for p in mine:
            head[t] = max(head[t], head[p] + compute[p])
    for t in range(len(parents) - 1, -1, -1):
        for p in parents[t]:
            tail[p] = max(tail[p], compute[t] + tail[t])


def _one_machine(first: _Array, seconds: _Array, last: _Array) -> float:
    """The largest of what sets of jobs take: those whose `first` is at least some value
    take that, their sum, and the least `last` among them."""
    if not len(seconds):
        return 0.0
    order = np.argsort(first)[::-1]
    sums = np.cumsum(seconds[order])
    least = np.minimum.accumulate(last[order])
    return float((first[order] + sums + least).max())
