"""Threads that sleep until arrays are ready, and say so.

JAX has no way to wait for the first of several arrays, so each array that is waited for has
a thread asleep in `block_until_ready` for as long. The threads are the process's and live
as long as it does. They are handed jobs through a `SimpleQueue`, whose methods are single
calls into C: Ctrl-C in the middle of handing over cannot leave anything locked.
"""

import atexit
import queue
import threading
import time
from collections.abc import Callable
from typing import Any


# More than one run may have in flight in all its engines.
_THREADS = 16
# How long the end of the process waits for jobs.
_LAST_JOBS_SECONDS = 10.0
_inbox: "queue.SimpleQueue[Job | None]" = queue.SimpleQueue()
_starting = threading.Lock()
_started: list[threading.Thread] = []


# Called, in another thread, with what went wrong and when the first array was ready.
Then = Callable[[BaseException | None, float], None]


class Job:
    """Arrays to wait for, and what then. Holds both until they are ready, and no longer."""

    __slots__ = ("_arrays", "_taken", "_then", "over")

    def __init__(self, arrays: list[Any], then: Then):
        self._arrays = arrays
        self._then: Then | None = then
        self._taken = False
        self.over = False

    def run(self) -> None:
        """Waits, lets go of the arrays, and says so."""
        self._taken = True  # before looking what to do; `give_up` goes the other way
        self._wait()
        self._then = None
        self.over = True

    def _wait(self) -> None:
        arrays, then, error, ready = self._arrays, self._then, None, 0.0
        array = None
        if then is None:
            return
        try:
            # One call into C each: `jax.block_until_ready`, which takes any tree, holds up
            # the loop for longer.
            for array in arrays:
                array.block_until_ready()
                ready = ready or time.perf_counter()
        except BaseException as failure:
            error = failure
        self._arrays = arrays = []
        array = None
        then(error, ready)
        del error  # it knows this frame

    def give_up(self) -> None:
        """Lets go of everything: a thread that has it now may finish, one that has not will
        find nothing to do. The arrays must be known to be ready."""
        self._then = None
        self._arrays = []
        while self._taken and not self.over:
            time.sleep(1e-4)


def start() -> None:
    """Starts the threads, once."""
    with _starting:
        if not _started:
            atexit.register(_finish)
        while len(_started) < _THREADS:
            name = f"jturnip-waiter-{len(_started)}"
            thread = threading.Thread(target=_serve, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends, and starts no more
                return
            _started.append(thread)


def submit(job: Job) -> None:
    """Hands a job to the threads; does it at once where there can be none any more."""
    if not _started:
        start()
    if _started:
        _inbox.put(job)
    else:
        job.run()


def _serve() -> None:
    while _next():
        pass


def _next() -> bool:
    """Does a job, and holds nothing of it afterwards; whether there may be more."""
    job = _inbox.get()
    if job is not None:
        job.run()
    return job is not None


def _finish() -> None:
    """Lets every thread end: one that the interpreter ends while it waits inside XLA takes
    the process with it."""
    end = time.perf_counter() + _LAST_JOBS_SECONDS
    for _ in _started:
        _inbox.put(None)
    for thread in _started:
        thread.join(max(0.0, end - time.perf_counter()))
    _started.clear()  # whoever submits a job after this starts others
