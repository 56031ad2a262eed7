"""What a strategy says about when buffers leave and come; the rest is the planner's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jturnip.graph.taskgraph import BufferId, TaskId


@dataclass(frozen=True, slots=True)
class Transfers:
    """Buffers that leave the device, and those that come back, at tasks of their own.

    Whoever leaves is not read until it is back, and no pinned buffer does.
    """

    # After which task (-1: at the start) which buffers leave.
    leave: Mapping[int, Sequence[BufferId]] = field(default_factory=dict)
    # Beside which task buffers come for which of their readers, if there is room.
    come: Mapping[int, Sequence[tuple[BufferId, TaskId]]] = field(default_factory=dict)
