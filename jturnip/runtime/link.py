"""A simulated link: real copies whose completions are told later.

On a machine without an accelerator a copy between memories is quick; a simulated link
shows what a slow one does to a plan, to its order and to its stall.
"""

import contextlib
import heapq
import itertools
import math
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from jturnip.inbox import Inbox


@dataclass(frozen=True)
class SimulatedLink:
    """A link with a rate for each direction, both of which may be busy at once.

    Attributes:
      h2d_bytes_per_second: rate towards the device.
      d2h_bytes_per_second: rate towards the host.
      latency_seconds: added to every transfer; does not occupy the link.
      jitter: each transfer takes up to this share longer, at random.
      seed: of that randomness.

    Raises:
      ValueError: for a rate that is not positive or a latency or jitter below zero.
    """

    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    latency_seconds: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("h2d_bytes_per_second", "d2h_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name in ("latency_seconds", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be zero or more")


class LinkClock:
    """One run's transfers over a simulated link: tells when each would be over.

    Each direction moves one buffer at a time, in the order in which they could begin. One
    thread, the process's, tells the completions of all runs.
    """

    def __init__(self, link: SimulatedLink, push: Callable[[int], None]):
        _start()
        self._push = push
        self._random = (random.Random(link.seed), random.Random(link.seed + 1))
        self._link = link
        # When each direction is free again.
        self._free = [0.0, 0.0]
        self._closed = False

    def deliver(self, op: int, nbytes: int, to_host: bool, began: float) -> None:
        """A copy that could begin at `began` has really been made."""
        _inbox.put((self, op, nbytes, to_host, began))

    def close(self) -> None:
        """Completions that are not told yet never will be."""
        self._closed = True
        _inbox.put(None)

    def _over(self, nbytes: int, to_host: bool, began: float) -> float:
        link = self._link
        rate = link.d2h_bytes_per_second if to_host else link.h2d_bytes_per_second
        longer = 1.0 + link.jitter * self._random[to_host].random()
        self._free[to_host] = max(self._free[to_host], began) + nbytes / rate * longer
        return self._free[to_host] + link.latency_seconds

    def _tell(self, op: int) -> None:
        if not self._closed:
            self._push(op)


# Copies that were made, and None for a run that is over.
_inbox: "Inbox[tuple[LinkClock, int, int, bool, float] | None]" = Inbox()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def _start() -> None:
    """Starts the thread, once."""
    global _thread
    with _starting:
        if _thread is None:
            _thread = threading.Thread(target=_serve, name="jturnip-link", daemon=True)
            _thread.start()


def _serve() -> None:
    # When each is over, and in which order they were made.
    due: list[tuple[float, int, LinkClock, int]] = []
    for number in itertools.count():
        left = max(0.0, due[0][0] - time.perf_counter()) if due else None
        with contextlib.suppress(queue.Empty):
            made = _inbox.get(timeout=left)
            if made is not None:
                clock, op, nbytes, to_host, began = made
                when = clock._over(nbytes, to_host, began)
                heapq.heappush(due, (when, number, clock, op))
            else:
                due = [entry for entry in due if not entry[2]._closed]
                heapq.heapify(due)
            made = clock = None
        while due and due[0][0] <= time.perf_counter():
            _, _, clock, op = heapq.heappop(due)
            clock._tell(op)
            clock = None
