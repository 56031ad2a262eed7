"""The TaskGraph: what is to be computed, before anyone asks where the bytes live.

A `Buffer` is a value's bytes, written once. A `Task` reads buffers and writes buffers. The
tasks of a `TaskGraph` stand in a valid serial order, which planners may simulate.
"""

import enum
from dataclasses import dataclass
from typing import NewType


BufferId = NewType("BufferId", int)
TaskId = NewType("TaskId", int)


class Role(enum.Enum):
    """What a buffer is to the function."""

    INPUT = "input"
    CONSTANT = "constant"
    INTERMEDIATE = "intermediate"
    OUTPUT = "output"


class Place(enum.Enum):
    """One of the two memories of a plan."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A value's bytes; immutable once written."""

    id: BufferId
    # Bytes the value takes in either memory.
    nbytes: int
    role: Role
    # Where it is when a call starts; None for what a task writes.
    start: Place | None = None
    # The caller keeps this device array: it holds its bytes during the whole call.
    pinned: bool = False
    # Outputs only: True where the result must be in host memory at the end of the call.
    end_on_host: bool = False
    # How to speak of it to the user, for example "state['mu']['wq']".
    name: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """One executable's worth of work."""

    id: TaskId
    # Distinct buffers, in the order the executable takes them.
    inputs: tuple[BufferId, ...]
    # Distinct buffers, in the order the executable returns them.
    outputs: tuple[BufferId, ...]
    # Temporary device bytes while it runs.
    workspace: int = 0
    flops: float = 0.0
    bytes_accessed: float = 0.0
    # Estimated or measured time on the device.
    seconds: float = 0.0
    # Measured time for which its start holds the loop; a CPU runs small tasks in there.
    dispatch_seconds: float = 0.0
    # What it does, for people: the name of its heaviest primitive.
    name: str = ""
    # The user's "file:line".
    source: str = ""
    # Index of its executable among the distinct executables of the function.
    executable: int = 0
    # (position of an output, position of an input): the output takes over the bytes of the
    # input, which nobody reads any more.
    overwrites: tuple[tuple[int, int], ...] = ()

    @property
    def overwritten(self) -> tuple[BufferId, ...]:
        """The inputs whose bytes outputs take over."""
        return tuple([self.inputs[i] for _, i in self.overwrites])

    @property
    def new(self) -> tuple[BufferId, ...]:
        """The outputs that take bytes of their own."""
        if not self.overwrites:
            return self.outputs
        over = {o for o, _ in self.overwrites}
        return tuple([b for o, b in enumerate(self.outputs) if o not in over])


@dataclass(frozen=True, slots=True, repr=False)
class TaskGraph:
    """Buffers and tasks; `tasks` is a valid serial order and ids are positions."""

    buffers: tuple[Buffer, ...]
    tasks: tuple[Task, ...]
    # Distinct buffers that must exist at the end. Each is written by a task.
    outputs: tuple[BufferId, ...]

    def check(self) -> None:
        """Raises AssertionError where the record breaks its own rules."""
        for position, buffer in enumerate(self.buffers):
            assert buffer.id == position, f"buffer {buffer.id} stands at {position}"
            assert buffer.nbytes >= 0, f"buffer {position} has {buffer.nbytes} bytes"
            assert not buffer.pinned or buffer.start is Place.DEVICE
        written = {b.id for b in self.buffers if b.start is not None}
        kept = {b.id for b in self.buffers if b.pinned}.union(self.outputs)
        for position, task in enumerate(self.tasks):
            assert task.id == position, f"task {task.id} stands at {position}"
            assert len(set(task.inputs)) == len(task.inputs)
            missing = [b for b in task.inputs if b not in written]
            assert not missing, f"task {position} reads {missing} before they are written"
            for b in task.outputs:
                assert b not in written, f"task {position} writes buffer {b} again"
                written.add(b)
            outputs = {o for o, _ in task.overwrites}
            assert len(outputs) == len(set(task.overwritten)) == len(task.overwrites)
            for o, i in task.overwrites:
                over, b = task.outputs[o], task.inputs[i]
                assert b not in kept, f"task {position} writes over buffer {b}, which stays"
                sizes = self.buffers[over].nbytes, self.buffers[b].nbytes
                assert sizes[0] == sizes[1], f"task {position} overwrites {sizes} bytes"
                written.remove(b)  # who reads it later reads what is not there
        assert len(set(self.outputs)) == len(self.outputs)
        for b in self.outputs:
            assert self.buffers[b].start is None, f"output {b} is an input"
            assert b in written, f"output {b} is never written"

    def _repr_html_(self) -> str:
        from jturnip.show import pages

        return pages.of_taskgraph(self)

    def __repr__(self) -> str:
        return f"<TaskGraph of {len(self.tasks)} tasks and {len(self.buffers)} buffers>"
