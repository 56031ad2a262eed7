"""What is computed again rather than taken to the host and back.

What is made early and read late, as activations are in a training step, leaves the device
in between where there is no room. If what it was made of is there when it is to be read,
its task can run a second time instead: a third choice beside keeping and moving. Which
tasks are worth it follows from a plan: from what that moves, and from the seconds that
takes, as Capuchin weighs them (Peng et al., ASPLOS 2020).
"""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from jturnip.graph.memgraph import MemGraph, OpKind
from jturnip.graph.taskgraph import Buffer, BufferId, Place, TaskGraph, TaskId
from jturnip.planner.rates import Rates


# The tasks that run again are those that save the link so many times the seconds they take:
# first the most worthwhile alone.
_WORTH = (4, 1)


@dataclass(frozen=True, slots=True)
class _Again:
    """A task that could run a second time."""

    task: TaskId
    # The task that would come next.
    before: TaskId
    # Seconds that the link is saved, and that the device needs more.
    gain: float
    cost: float


def repeating(
    graph: TaskGraph,
    memgraph: MemGraph,
    tasks: Sequence[int],
    rates: Rates,
    may_repeat: Collection[int],
    least_gain: float = 0.0,
) -> Iterator[tuple[TaskId, ...]]:
    """Orders of the tasks in which some come again, few first; none where nothing is worth
    it.

    Args:
      graph: what is to be computed.
      memgraph: a plan for it: it says what moves.
      tasks: for each task what it is, the same for those that already are each other again.
      rates: of the link.
      may_repeat: tasks that give the same again, and have no effects.
      least_gain: seconds that all of them together must save the link, at least.
    """
    found = list(_worthwhile(graph, memgraph, tasks, rates, may_repeat))
    taken: set[int] = set()
    for worth in _WORTH:
        some = [each for each in found if each.gain > worth * each.cost]
        is_much = sum(each.gain for each in some) > least_gain
        if is_much and len(some) > len(taken):
            taken = {each.task for each in some}
            yield _order(graph, some)


def _order(graph: TaskGraph, again: Sequence[_Again]) -> tuple[TaskId, ...]:
    before: dict[int, list[TaskId]] = {}
    for each in again:
        before.setdefault(each.before, []).append(each.task)
    every = ((*before.get(task.id, ()), task.id) for task in graph.tasks)
    return tuple(itertools.chain.from_iterable(every))


def _worthwhile(
    graph: TaskGraph,
    memgraph: MemGraph,
    tasks: Sequence[int],
    rates: Rates,
    may_repeat: Collection[int],
) -> Iterator[_Again]:
    moved = _moved_both_ways(memgraph)
    readers: dict[BufferId, list[TaskId]] = {}
    for task in graph.tasks:
        for b in task.inputs:
            readers.setdefault(b, []).append(task.id)
    overwriter = {b: task.id for task in graph.tasks for b in task.overwritten}
    begin = list(itertools.accumulate((t.seconds for t in graph.tasks), initial=0.0))
    copies = _Copies(graph, tasks)

    def reader_after_the_longest_gap(b: BufferId, t: TaskId) -> TaskId:
        uses = [t, *readers[b]]
        gaps = [begin[y] - begin[x] for x, y in itertools.pairwise(uses)]
        return uses[1 + max(range(len(gaps)), key=gaps.__getitem__)]

    for task in graph.tasks:
        away = [b for b in task.outputs if b in moved and b in readers]
        if not away or task.overwrites or task.id not in may_repeat:
            continue
        # A second run serves the readers of all results: it comes before the first of them.
        at = min(reader_after_the_longest_gap(b, task.id) for b in away)
        operands = [copies.read_at(b, at) for b in task.inputs]
        if any(overwriter.get(b, math.inf) < at for b in operands):
            continue  # there is nothing to make it of any more
        gain = sum(rates.seconds(graph.buffers[b].nbytes, moved[b]) for b in away)
        gain -= sum(
            _seconds_to_have(graph.buffers[b], rates)
            for b in operands
            if max(readers.get(b, ()), default=-1) < at
        )
        if gain > 0:
            yield _Again(task.id, at, gain, task.seconds)


class _Copies:
    """Which buffer has a value when, where tasks that came again wrote copies of it."""

    def __init__(self, graph: TaskGraph, tasks: Sequence[int]):
        first: dict[int, TaskId] = {}
        self._original: dict[BufferId, BufferId] = {}
        # Of a buffer that has copies, where each is written, itself first.
        self._versions: dict[BufferId, list[tuple[TaskId, BufferId]]] = {}
        for task, of in zip(graph.tasks, tasks, strict=True):
            if first.setdefault(of, task.id) == task.id:
                continue
            before = graph.tasks[first[of]]
            for b, copy in zip(before.outputs, task.outputs, strict=True):
                self._original[copy] = b
                versions = self._versions.setdefault(b, [(before.id, b)])
                versions.append((task.id, copy))

    def read_at(self, b: BufferId, position: int) -> BufferId:
        """The copy of a buffer that a task would read there."""
        b = self._original.get(b, b)
        written = [copy for t, copy in self._versions.get(b, ()) if t < position]
        return written[-1] if written else b


def _moved_both_ways(memgraph: MemGraph) -> dict[BufferId, int]:
    """Buffers that are taken to the host, and how often they come back."""
    away: set[BufferId] = set()
    back: dict[BufferId, int] = {}
    for op in memgraph.ops:
        if op.kind is OpKind.OFFLOAD:
            away.add(memgraph.instances[op.reads[0]].buffer)
        elif op.kind is OpKind.RELOAD:
            b = memgraph.instances[op.reads[0]].buffer
            back[b] = back.get(b, 0) + 1
    return {b: times for b, times in back.items() if b in away}


def _seconds_to_have(buffer: Buffer, rates: Rates) -> float:
    """What the link pays at most to keep an operand that nobody else reads until then."""
    if buffer.pinned:
        return 0.0
    if buffer.start is Place.HOST:
        return buffer.nbytes / rates.h2d
    return rates.seconds(buffer.nbytes)
