"""A queue that one thread sleeps on, with a timeout that holds."""

import collections
import contextlib
import math
import queue
import threading
import time
from typing import Generic, TypeVar


_Item = TypeVar("_Item")


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
