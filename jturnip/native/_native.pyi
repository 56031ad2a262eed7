from collections.abc import Mapping, Sequence
from typing import Any

class CompletionQueue:
    def __init__(self) -> None: ...
    @property
    def has_marks(self) -> bool: ...
    def push(self, id: int) -> None: ...
    def drain(self, timeout_seconds: float, few: int = ...) -> list[tuple[int, float]]: ...
    def open_slot(self) -> int: ...
    def arm(self, slot: int, id: int, is_called_next: bool = False) -> None: ...
    def close_slot(self, slot: int) -> None: ...

def mark_cpu() -> Any: ...  # a capsule with the FFI handler, as mark_cuda
def mark_cuda() -> Any: ...
def api_version() -> tuple[int, int]: ...

# Plans, and what they take (`xla_ext/plan_ops.h`).
class TaskGraph:
    # Buffers: bytes over the link and in the arena, where it is at the start (0: a task
    # writes it, 1: the device, 2: the host), whether it is pinned, and ends on the host.
    # Tasks: inputs, outputs, overwrites, workspace, seconds, seconds to start it.
    def __init__(
        self,
        buffers: Sequence[tuple[int, int, int, bool, bool]],
        tasks: Sequence[
            tuple[
                Sequence[int],
                Sequence[int],
                Sequence[tuple[int, int]],
                int,
                float,
                float,
            ]
        ],
        outputs: Sequence[int],
    ) -> None: ...
    def reordered(self, tasks: Sequence[int]) -> TaskGraph: ...
    # By what is read again ("reuse", 0), or by bytes in use ("lean", 1).
    def order(self, arena_bytes: int, order: int) -> tuple[int, ...]: ...

class Strategy:
    def __init__(
        self,
        serial: bool,
        belady: bool,
        late: bool,
        ahead: int,
        spare: float,
        window: tuple[Sequence[int], Sequence[int], int, int] | None,
        leave: Mapping[int, Sequence[int]],
        come: Mapping[int, Sequence[tuple[int, int]]],
    ) -> None: ...

class Link:
    def __init__(
        self,
        h2d: float,
        d2h: float,
        latency: float,
        issue: float,
        heard: float,
        late: float,
        after_compute: bool,
    ) -> None: ...

class Limits:
    def __init__(
        self, compute: int, h2d: int, d2h: int, short_runs: int, queue_seconds: float
    ) -> None: ...

# Ops: kind, the task of a run or the buffer, what it reads and writes, its workspace, and
# (op, why, buffer or -1) of each that it waits for. Instances: buffer, ranges, whether it
# is on the host. Then those at the start, and those of the outputs.
def plan(
    graph: TaskGraph, arena_bytes: int, strategy: Strategy, h2d: float, d2h: float
) -> tuple[list[Any], list[Any], tuple[Any, ...], tuple[Any, ...]]: ...

# Seconds, those of computing, copies, bytes to the device and to the host, and the most
# bytes on the host.
def times(
    graph: TaskGraph, arena_bytes: int, strategy: Strategy, link: Link, limits: Limits
) -> tuple[float, float, int, int, int, int]: ...
