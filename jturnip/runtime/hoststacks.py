"""Large arrays in host memory, read and written some rows at a time.

Reading: the rows of an argument become arrays of their own, which share its memory where
the backend allows that (the CPU's does); elsewhere they are copies, made once for each
array and let go of with it. Writing: a result's parts are copied to their rows as they
arrive, into the memory of a donated argument if nobody else knows that memory.
"""

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Container, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jturnip.frontend.values import Type


# XLA's CPU client shares numpy's memory if it begins at a multiple of this.
_ALIGNMENT = 64

_LOCK = threading.Lock()
# id of an array → what dies with it.
_COPIES: dict[int, tuple[Any, dict[tuple[tuple[int, int], ...], list[jax.Array]]]] = {}


def view(array: jax.Array) -> np.ndarray:
    """The contents of an array in host memory, not copied where that can be helped.

    Keeps the memory alive, even if the array is deleted.
    """
    return np.asarray(array.addressable_data(0))


def rows_of(
    array: jax.Array, cuts: tuple[tuple[int, int], ...], keep: bool
) -> list[jax.Array]:
    """Some rows of an array in host memory, as arrays there.

    Args:
      array: in `pinned_host` memory.
      cuts: first and past last row of each.
      keep: whether copies, if there must be any, are kept for the next time.
    """
    with _LOCK:
        known = _COPIES.get(id(array))
        if known is not None and cuts in known[1]:
            return known[1][cuts]
    contents = view(array)
    pieces = [contents[start:stop] for start, stop in cuts]
    rows = [jax.device_put(p, array.sharding) for p in pieces]
    if keep and not all(_is_shared(p, array) for p in pieces):
        _remember(array, cuts, jax.block_until_ready(rows))
    return rows


def _is_shared(piece: np.ndarray, array: jax.Array) -> bool:
    return _is_within_reach(array) and piece.ctypes.data % _ALIGNMENT == 0


def _remember(
    array: jax.Array, cuts: tuple[tuple[int, int], ...], rows: list[jax.Array]
) -> None:
    key = id(array)
    with _LOCK:
        if key not in _COPIES:
            gone = weakref.ref(array, lambda _: _COPIES.pop(key, None))
            _COPIES[key] = gone, {}
        _COPIES[key][1][cuts] = rows


@dataclass(frozen=True, slots=True)
class Assembled:
    """A result that is put together in host memory."""

    type: Type
    # Host instance of each part, and its first and past last row.
    parts: tuple[tuple[int, int, int], ...]
    # Position of the donated argument whose memory it may take over, and for each part the
    # host instances whose readers must then be over before it is written.
    argument: int | None = None
    readers: tuple[tuple[int, ...], ...] = ()


class Assembly:
    """The results that one run puts together.

    Invariant: a part is in `_target` or, while its rows are still to be read, in `_late`.
    """

    def __init__(self, results: Sequence[Assembled]):
        self._results = results
        # The donated argument whose memory a result takes over, and what is written to.
        self._taken: list[jax.Array | None] = [None] * len(results)
        self._target: list[np.ndarray] = []
        # Host instance → (number of the result, first row, past last row, readers)
        self._of: dict[int, tuple[int, int, int, tuple[int, ...]]] = {}
        self._late: list[tuple[int, jax.Array]] = []

    def take_over(self, leaves: Sequence[Any], keep: Container[int] = ()) -> list[Any]:
        """Takes the memory of donated arguments, but those to keep; the arguments to go on
        with.

        Where somebody else knows that memory (numpy may), the new argument is a copy.
        """
        leaves = list(leaves)
        for number, result in enumerate(self._results):
            at = result.argument
            in_place = at is not None and at not in keep and _is_within_reach(leaves[at])
            if at is not None and in_place:
                leaves[at], memory = taken_over(leaves[at])
                self._taken[number] = leaves[at]
                self._target.append(memory)
            else:
                self._target.append(_empty(result.type))
            for k, (instance, start, stop) in enumerate(result.parts):
                readers = result.readers[k] if in_place else ()
                self._of[instance] = number, start, stop, readers
        return leaves

    @property
    def instances(self) -> Set[int]:
        """The host instances that are parts."""
        return self._of.keys()

    @property
    def arguments(self) -> list[int]:
        """Positions of the arguments that were taken over."""
        return [
            r.argument
            for r, taken in zip(self._results, self._taken, strict=True)
            if taken is not None and r.argument is not None
        ]

    def putting(
        self, instance: int, array: jax.Array, unread: Callable[[int], bool]
    ) -> Callable[[], None] | None:
        """What puts a part in its place, to be called once it has arrived; None if that
        has to wait until the end.

        Args:
          instance: the host instance of the part.
          array: its array, which may not be ready.
          unread: whether a host instance is still to be read.
        """
        number, start, stop, readers = self._of[instance]
        if any(map(unread, readers)):
            self._late.append((instance, array))
            return None
        return lambda: np.copyto(self._target[number][start:stop], view(array))

    def finish(self, sharding: jax.sharding.Sharding) -> list[jax.Array]:
        """The results, when all parts have arrived and nothing is to be read any more."""
        for instance, array in self._late:
            number, start, stop, _ = self._of[instance]
            np.copyto(self._target[number][start:stop], view(array))
        self._late.clear()
        results = [
            jax.device_put(target, sharding) if taken is None else taken
            for taken, target in zip(self._taken, self._target, strict=True)
        ]
        self._target.clear()
        self._taken.clear()
        return results


def taken_over(
    array: jax.Array, copied: bool = False
) -> tuple[jax.Array | None, np.ndarray]:
    """The memory of a donated array, to be written to, and the array that now has it.

    Where somebody else knows that memory it is a copy; where the host cannot write to the
    device's arrays there is no array. With `copied` the array stays the caller's.
    """
    if copied or not _is_within_reach(array):
        memory = _empty(Type.of(array))
        np.copyto(memory, view(array))
        if not copied:
            array.delete()
        return None, memory
    taken = _moved(array.sharding)(array)
    array.delete()
    return taken, _writable(view(taken))


@functools.cache
def _moved(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """A function to a new array of the same memory; XLA copies where it must."""
    return jax.jit(lambda array: array, donate_argnums=0, out_shardings=sharding)


def _is_within_reach(array: jax.Array) -> bool:
    """Whether the host reaches the memory of an array of ours itself."""
    return next(iter(array.devices())).platform == "cpu"


def _empty(t: Type) -> np.ndarray:
    nbytes = int(np.prod(t.shape, dtype=np.int64)) * t.dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + nbytes].view(t.dtype).reshape(t.shape)


def _writable(contents: np.ndarray) -> np.ndarray:
    """The same memory without numpy's protection."""
    memory: Any = (ctypes.c_uint8 * contents.nbytes).from_address(contents.ctypes.data)
    memory.contents = contents  # keeps it alive
    return np.frombuffer(memory, contents.dtype).reshape(contents.shape)
