"""The queue the runtime's loop sleeps on until the first of many things happens."""

import contextlib
import queue
import time
from typing import Protocol

from jturnip.errors import InternalError
from jturnip.inbox import Inbox
from jturnip.native import marks


# More marks than are ever armed.
MANY = 1 << 62


class CompletionQueue(Protocol):
    """Any thread pushes ids, the loop drains them. All methods are thread-safe."""

    @property
    def has_marks(self) -> bool:
        """Whether marks in executables can push here; if not, slots cannot be opened."""
        ...

    def push(self, id: int) -> None:
        """Queues `id`, which fits 64 bits, and wakes the sleeper."""
        ...

    def drain(self, timeout_seconds: float, few: int = MANY) -> list[tuple[int, float]]:
        """Takes everything queued, as (id, time pushed) pairs, oldest first.

        With nothing queued it sleeps until the first arrives or the timeout (which may be
        0 or infinite) passes, and then returns what there is, perhaps []. While more than
        `few` armed marks are still to come, it may sleep although others have pushed. Times
        are on the clock of `time.perf_counter()`.
        """
        ...

    def open_slot(self) -> int:
        """A new slot number, an int32, for `mark`."""
        ...

    def arm(self, slot: int, id: int, is_called_next: bool = False) -> None:
        """Lets the next mark on `slot`, and only that one, push `id`.

        With `is_called_next` that mark is in the executable which this thread calls next:
        then a GPU need not copy the slot's number to the host, behind all else it copies.
        """
        ...

    def close_slot(self, slot: int) -> None:
        """Ends the use of `slot`: marks still to come on it are ignored."""
        ...


def make_queue() -> CompletionQueue:
    """The native queue where the extension can be used, else a `PythonQueue`."""
    if not marks.load():
        return PythonQueue()
    from jturnip.native import _native

    return _native.CompletionQueue()


class PythonQueue:
    """A `CompletionQueue` in plain Python, without marks."""

    has_marks = False

    def __init__(self) -> None:
        self._completions = Inbox[tuple[int, float]]()
        # When the last that was drained was pushed.
        self._latest = 0.0

    def push(self, id: int) -> None:
        self._completions.put((id, time.perf_counter()))

    def drain(self, timeout_seconds: float, few: int = MANY) -> list[tuple[int, float]]:
        if not timeout_seconds >= 0:
            raise ValueError("timeout_seconds must be zero or more")
        taken = []
        with contextlib.suppress(queue.Empty):
            taken.append(self._completions.get(timeout_seconds))
            while True:
                taken.append(self._completions.get(timeout=0.0))
        # Two threads may look at the clock in one order and push in the other.
        for k, (id, when) in enumerate(taken):
            self._latest = max(self._latest, when)
            taken[k] = id, self._latest
        return taken

    def open_slot(self) -> int:
        raise _no_marks()

    def arm(self, slot: int, id: int, is_called_next: bool = False) -> None:
        raise _no_marks()

    def close_slot(self, slot: int) -> None:
        raise _no_marks()


def _no_marks() -> InternalError:
    return InternalError("a slot was used on a queue without marks; ask has_marks first")
