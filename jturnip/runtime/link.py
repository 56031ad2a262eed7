"""A simulated link: real copies whose completions are told later.

On a machine without an accelerator a copy between memories is quick; a simulated link
shows what a slow one does to a plan, to its order and to its stall.
"""

import math
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


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


class LinkThreads:
    """One thread per direction, which tells completions when the link would be done.

    Each direction moves one buffer at a time, in the order in which they could begin.
    """

    def __init__(self, link: SimulatedLink, push: Callable[[int], None]):
        self._push = push
        self._random = (random.Random(link.seed), random.Random(link.seed + 1))
        self._link = link
        self._inboxes = (queue.SimpleQueue(), queue.SimpleQueue())
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, args=(d,), daemon=True) for d in (0, 1)
        ]
        for thread in self._threads:
            thread.start()

    def deliver(self, op: int, nbytes: int, to_host: bool, began: float) -> None:
        """A copy that could begin at `began` has really been made."""
        self._inboxes[to_host].put((op, nbytes, began))

    def close(self) -> None:
        """Ends the threads at once; completions that are not told yet never will be."""
        self._closed.set()
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, direction: int) -> None:
        link = self._link
        rate = (link.h2d_bytes_per_second, link.d2h_bytes_per_second)[direction]
        inbox, rng, free = self._inboxes[direction], self._random[direction], 0.0
        while (item := inbox.get()) is not None:
            op, nbytes, began = item
            longer = 1.0 + link.jitter * rng.random()
            free = max(free, began) + nbytes / rate * longer
            left = free + link.latency_seconds - time.perf_counter()
            if not self._closed.wait(max(0.0, left)):
                self._push(op)
