"""The MemGraph: the tasks plus what moves bytes, and every rule about their order.

Each stay of a buffer on the device is an *instance* with a slot: one or several ranges of a
virtual arena of `gpu_bytes`. A host copy is an instance without ranges. Edges say "may not
start before"; any order that keeps them is correct, stays in the budget, and can finish,
because `ops` itself is such an order.

Four kinds of op:

| kind | reads | writes |
| --- | --- | --- |
| run | the device instances of a task's inputs | those of its outputs |
| offload | a device instance | a host instance of the same buffer |
| reload | a host instance | a fresh device instance of the same buffer |
| drop | the device instance whose bytes it frees | nothing |

Only a drop frees a slot (a run frees its own workspace), but a run may write an output over
an input: then that instance is over, and the output's has its slot. An offload copies: the
device instance stays until its drop. A host instance is never freed by an op; the runtime
lets go of it after its last reader. Differs from TURNIP (section 4 of the paper), where
`evict` copies and frees at once and `alloc`/`del` carry the memory dependencies: here a
drop is the `del`, and the op that takes the bytes depends on it directly.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple, NewType

from jturnip.graph.taskgraph import BufferId, TaskId


OpId = NewType("OpId", int)
InstanceId = NewType("InstanceId", int)

# Ranges of the arena: ((offset, nbytes), ...), disjoint, sorted by offset.
Ranges = tuple[tuple[int, int], ...]


def ranges_bytes(ranges: Ranges) -> int:
    """The bytes of some ranges together."""
    if len(ranges) == 1:  # most slots are one range
        return ranges[0][1]
    return sum([nbytes for _, nbytes in ranges])


class OpKind(enum.Enum):
    """What an op does."""

    RUN = "run"
    OFFLOAD = "offload"
    RELOAD = "reload"
    DROP = "drop"

    # Members are compared by identity; enum's own hash is a Python call each.
    __hash__ = object.__hash__


class DepKind(enum.Enum):
    """Why an op may not start before another."""

    # It reads what the other wrote.
    DATA = "data"
    # It takes bytes the other used or freed (a WAR or WAW hazard).
    MEMORY = "memory"
    # A strategy fixes the order; correctness does not need it.
    ORDER = "order"


class Dep(NamedTuple):
    """One edge: the op that holds it waits for `op`."""

    op: OpId
    kind: DepKind
    # The reason in words, for a memory or order dependency.
    why: str = ""


@dataclass(frozen=True, slots=True)
class Instance:
    """One stay of a buffer in one memory."""

    id: InstanceId
    buffer: BufferId
    # Where its bytes lie in the arena; empty for a host instance or a buffer of no bytes.
    ranges: Ranges
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """A node of the MemGraph; see the module's table for `reads` and `writes`."""

    id: OpId
    kind: OpKind
    # The task of a run, else None.
    task: TaskId | None
    # In the order of the task's inputs and outputs, for a run.
    reads: tuple[InstanceId, ...]
    writes: tuple[InstanceId, ...]
    # Ranges a run uses for its temporaries, its own until it ends.
    workspace: Ranges
    deps: tuple[Dep, ...]
    # (written, read): instances of a run of which the first takes over the second's slot.
    overwrites: tuple[tuple[InstanceId, InstanceId], ...] = ()


@dataclass(frozen=True, slots=True)
class MemGraph:
    """Ops in a valid serial order (ids are positions), and the instances they use."""

    gpu_bytes: int
    ops: tuple[Op, ...]
    instances: tuple[Instance, ...]
    # Instances that exist before the first op: every input and constant, once each.
    inputs_at_start: tuple[InstanceId, ...]
    # The instances that hold the TaskGraph's outputs at the end, in its order.
    outputs_at_end: tuple[InstanceId, ...]
