"""Partitions of consecutive tasks, and which of them are on the device at once.

A jaxpr does not say where a model's layers begin, its bytes do: a partition is as many
tasks as touch a share of the budget.
"""

from dataclasses import dataclass

from jturnip.graph.taskgraph import BufferId, Place, TaskGraph
from jturnip.planner.transfers import Transfers
from jturnip.units import padded


@dataclass(frozen=True, slots=True)
class Window:
    """Partitions, of which so many are on the device while one of them computes."""

    # The partition of each task, and the first task of each.
    partitions: tuple[int, ...]
    firsts: tuple[int, ...]
    # How many are on the device: Superpipeline's k. And how many must have been computed
    # until as many others may come: its k', no more than k.
    resident: int = 2
    returned: int = 1

    def may_load(self, position: int, executed: int) -> bool:
        """Whether what task `position` reads may come while task `executed` is next."""
        return self.partitions[position] < self._begin(executed) + self.resident

    def loads_after(self, position: int) -> int:
        """The task after which what task `position` reads may come; -1: from the start."""
        beyond = self.partitions[position] + 1 - self.resident
        begin = -(-beyond // self.returned) * self.returned
        return self.firsts[max(0, begin)] - 1

    def ends(self, position: int) -> bool:
        """Whether what is on the device changes after task `position`."""
        return position + 1 < len(self.partitions) and (
            self._begin(position) < self._begin(position + 1)
        )

    def _begin(self, position: int) -> int:
        """The first partition on the device when task `position` is next."""
        return self.partitions[position] // self.returned * self.returned


def every_task(graph: TaskGraph, gpu_bytes: int) -> Window:
    """Every task is a partition, and alone on the device."""
    every = tuple(range(len(graph.tasks)))
    return Window(every, every, resident=1)


def of_resident(
    graph: TaskGraph, gpu_bytes: int, resident: int, returned: int = 1
) -> Window:
    """Partitions whose distinct buffers fill at most one of `resident` equal shares of the
    budget."""
    share = gpu_bytes // resident
    sizes = [padded(b.nbytes) for b in graph.buffers]
    partitions: list[int] = []
    firsts: list[int] = []
    held: set[int] = set()
    filled = 0
    for task in graph.tasks:
        touched = task.inputs + task.outputs
        new = sum([sizes[b] for b in touched if b not in held])
        if not firsts or (held and filled + new + task.workspace > share):
            firsts.append(task.id)
            held, filled = set(), 0
            new = sum([sizes[b] for b in touched])
        held.update(touched)
        filled += new
        partitions.append(len(firsts) - 1)
    return Window(tuple(partitions), tuple(firsts), resident, returned)


def returned_after_use(graph: TaskGraph, window: Window) -> Transfers:
    """What partitions that have been computed touched leaves the device with them, unless
    one of those that are there next reads it."""
    readers: list[list[int]] = [[] for _ in graph.buffers]  # the next one last
    for task in reversed(graph.tasks):
        for b in task.inputs:
            readers[b].append(task.id)
    touched = {b.id: None for b in graph.buffers if b.start is Place.DEVICE}
    leave: dict[int, tuple[BufferId, ...]] = {}

    def let_go(executed: int) -> None:
        """What leaves before a task is next; what stays is touched again."""
        leave[executed - 1] = tuple(
            b
            for b in touched
            if readers[b] and not window.may_load(readers[b][-1], executed)
            if not graph.buffers[b].pinned
        )
        touched.clear()

    if graph.tasks:
        let_go(0)
    for task in graph.tasks:
        for b in task.inputs:
            readers[b].pop()
        touched |= dict.fromkeys(task.inputs + task.outputs)
        if window.ends(task.id):
            let_go(task.id + 1)
    return Transfers(leave)
