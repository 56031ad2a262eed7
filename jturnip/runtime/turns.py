"""Whose turn it is on the device, among the calls of one function.

The budget is the function's, for all signatures and threads. Runs of plans take turns, and
wait for what earlier calls still compute. Whole calls that copy arguments to the device
wait until there is room; others go ahead as under `jax.jit`, whatever else is going on.
"""

import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import jax

from jturnip import compat, memory
from jturnip.errors import UnsupportedError
from jturnip.placement import is_on_host
from jturnip.runtime import waiters
from jturnip.runtime.kept import Kept, Source


class Owner(Protocol):
    """A program that keeps something of its own on the device between its runs."""

    def leave(self) -> None:
        """Lets go of it."""
        ...


class Rest(Protocol):
    """What is left of a run after its call."""

    def finish(self) -> object:
        """Waits for its end."""
        ...


class Calling(threading.Thread):
    """Calls a function of the user's for a run that waits for it, in a thread of its own,
    as XLA does."""

    def __init__(self, call: Callable[[], Any]):
        super().__init__(name="jturnip-call", daemon=True)
        self._call = call
        self._outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run(self) -> None:
        try:
            self._outcome.set_result(self._call())
        except BaseException as error:
            self._outcome.set_exception(error)

    def result(self) -> Any:
        """What it gives, or raises."""
        self.start()
        return self._outcome.result()


class Turn:
    """One function's. Whoever calls `alone`, `make_room`, `copied` or `left` has the lock.

    Invariant: `_under_way` has an entry for every whole call that copied arguments and
    whose results nobody has seen ready: its bytes, and these until they are.
    """

    def __init__(self) -> None:
        # Taken by `with` where it is needed, so that Ctrl-C cannot leave it locked.
        self.lock = threading.RLock()
        self._owner: weakref.ref[Owner] | None = None
        self._rest: Rest | None = None
        self._under_way: list[tuple[int, list[Any]]] = []
        # The last plain call's first result in each thread.
        self._last: dict[int, weakref.ref[Any]] = {}
        # What stays on the device between calls.
        self.kept = Kept()
        # Residuals of transformed calls, on the device.
        self._residuals: list[weakref.ref[Any]] = []

    def check(self) -> None:
        """Raises UnsupportedError where to wait for the lock would be to wait for ever: in
        a callback of the run that has it, which XLA calls in a thread of its own."""
        by_xla_or_us = threading._DummyThread | Calling
        if not isinstance(threading.current_thread(), by_xla_or_us):
            return
        if not self.lock.acquire(blocking=False):
            raise UnsupportedError(
                "the function was called by a callback while it runs in its budget, and its"
                " calls take turns. Call another jturnip.jit of it in the callback."
            )
        self.lock.release()

    def alone(self, owner: Owner | None) -> None:
        """Waits until nothing else of the function is on the device; what is kept there is
        the owner's matter."""
        self._change_owner(owner)
        if owner is None:
            self.kept.clear()
        self.make_room(0)
        while self._last:
            _, last = self._last.popitem()
            _wait(last())

    def make_room(self, nbytes: int) -> None:
        """Waits until the last run of a plan is over, and whole calls that copied arguments
        take no more than `nbytes`."""
        if self._rest is not None:
            self._rest.finish()
            self._rest = None
        while self._under_way:
            self._under_way = [entry for entry in self._under_way if entry[1]]
            if sum(n for n, _ in self._under_way) <= nbytes:
                return
            _wait(*self._under_way[0][1])
            del self._under_way[0]

    def left(self, rest: Rest) -> None:
        """A run of a plan left this to XLA."""
        self._rest = rest

    def copied(self, nbytes: int, results: Sequence[Any]) -> None:
        """A call that copied arguments takes `nbytes` until these results are ready."""
        cell = [result for result in results if isinstance(result, jax.Array)]
        self._under_way.append((nbytes, cell))
        waiters.submit(waiters.Job(cell, lambda error, ready: cell.clear()))

    def leave(self, sources: Collection[Source] = (), room: int = 0) -> None:
        """Lets what is kept on the device between runs leave, if nothing runs: but copies
        of `sources`, and of others if these take no more than `room` bytes."""
        if self._owner is None and not self.kept:
            return
        if self.lock.acquire(blocking=False):
            try:
                self._change_owner(None)
                self.kept.keep_only(sources, room)
            finally:
                self.lock.release()

    def dispatched(self, results: Any) -> None:
        """A whole call gave these results, all of which are ready together.

        They are waited for while somebody has them: to hold them would be to keep them.
        """
        first = results
        while type(first) in (tuple, list) and first:
            first = first[0]
        if type(first) is not compat.array_type():
            arrays = (r for r in jax.tree.leaves(results))
            first = next((r for r in arrays if type(r) is compat.array_type()), None)
        if first is not None:
            self._last[threading.get_ident()] = weakref.ref(first)

    def gave_out(self, residuals: Iterable[Any]) -> None:
        """Parts of a transformed call gave these arrays to later ones."""
        self._residuals += [weakref.ref(r) for r in residuals if not is_on_host(r)]

    def residual_bytes(self, beside: Iterable[Any]) -> int:
        """Device bytes of residuals that are alive, without some arrays."""
        alive = [r for ref in self._residuals if (r := ref()) is not None]
        self._residuals = [weakref.ref(r) for r in alive if not r.is_deleted()]
        counted = set(map(id, beside))
        return memory.device_bytes(r for r in alive if id(r) not in counted)

    def _change_owner(self, owner: Owner | None) -> None:
        before = self._owner() if self._owner is not None else None
        if before is not None and before is not owner:
            before.leave()
        self._owner = None if owner is None else weakref.ref(owner)


def _wait(*arrays: Any) -> None:
    for array in arrays:
        # What went wrong with it, or who deleted it, is its caller's matter.
        with contextlib.suppress(Exception):
            if array is not None and not array.is_deleted():
                jax.block_until_ready(array)
