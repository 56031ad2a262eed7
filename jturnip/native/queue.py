"""The queue the runtime's loop sleeps on until the first of many things happens."""

import collections
import contextlib
import math
import queue
import threading
import time
from typing import Generic, Protocol, TypeVar

from jturnip.errors import InternalError
from jturnip.native import marks


_Item = TypeVar("_Item")


class CompletionQueue(Protocol):
    """Any thread pushes ids, the loop drains them. All methods are thread-safe."""

    @property
    def has_marks(self) -> bool:
        """Whether marks in executables can push here; if not, slots cannot be opened."""
        ...

    def push(self, id: int) -> None:
        """Queues `id`, which fits 64 bits, and wakes the sleeper."""
        ...

    def drain(self, timeout_seconds: float) -> list[tuple[int, float]]:
        """Takes everything queued, as (id, time pushed) pairs, oldest first.

        With nothing queued it sleeps until the first arrives or the timeout (which may be
        0 or infinite) passes, and then returns []. Times are on the clock of
        `time.perf_counter()`.
        """
        ...

    def open_slot(self) -> int:
        """A new slot number, an int32, for `mark`."""
        ...

    def arm(self, slot: int, id: int) -> None:
        """Lets the next mark on `slot`, and only that one, push `id`."""
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


class Inbox(Generic[_Item]):
    """What any thread puts and one thread gets.

    `queue.SimpleQueue.get` may sleep for ever although it was given a timeout (CPython 3.11
    to 3.13): where something was put and taken before without a wait, and the timeout has
    passed when it begins to wait again, with a negative one. Ctrl-C cannot leave it locked.
    """

    def __init__(self) -> None:
        self._items: collections.deque[_Item] = collections.deque()
        # Released when something was put since the last time it was acquired.
        self._news = threading.Lock()
        self._news.acquire()

    def put(self, item: _Item) -> None:
        self._items.append(item)
        with contextlib.suppress(RuntimeError):  # it is released already
            self._news.release()

    def get(self, timeout: float | None = None) -> _Item:
        """The oldest; raises `queue.Empty` where nothing came for so many seconds."""
        end = math.inf if timeout is None else time.perf_counter() + timeout
        while True:
            with contextlib.suppress(IndexError):
                return self._items.popleft()
            left = end - time.perf_counter()
            if left <= 0:
                raise queue.Empty
            self._news.acquire(timeout=min(left, threading.TIMEOUT_MAX))


class PythonQueue:
    """A `CompletionQueue` in plain Python, without marks."""

    has_marks = False

    def __init__(self) -> None:
        self._completions = Inbox[tuple[int, float]]()
        # When the last that was drained was pushed.
        self._latest = 0.0

    def push(self, id: int) -> None:
        self._completions.put((id, time.perf_counter()))

    def drain(self, timeout_seconds: float) -> list[tuple[int, float]]:
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

    def arm(self, slot: int, id: int) -> None:
        raise _no_marks()

    def close_slot(self, slot: int) -> None:
        raise _no_marks()


def _no_marks() -> InternalError:
    return InternalError("a slot was used on a queue without marks; ask has_marks first")
