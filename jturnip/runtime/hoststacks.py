"""Large arrays in host memory, read and written part by part.

Reading: the parts of an argument are views of its memory, of which no copy is kept.
Writing: a result's parts are copied to their places as they arrive, into the memory of a
donated argument if nobody else knows that memory.
"""

import ctypes
import functools
import gc
import time
import weakref
from collections.abc import Callable, Container, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jturnip import compat, memory
from jturnip.frontend.values import Type, Window, is_key, is_packed
from jturnip.memory import view


def parts_of(array: jax.Array, windows: Sequence[Window]) -> list[jax.Array | np.ndarray]:
    """Parts of an array in host memory, to be read from there.

    Args:
      array: in `pinned_host` memory.
      windows: where each part is.

    Returns:
      For each window an array that shares its memory; where the backend has none such (the
      CPU's has for what is contiguous and begins at a whole cache line), numpy's view. Of
      keys, which numpy does not have, copies.
    """
    contents = view(array)
    pieces = [contents[window.index] for window in windows]
    if is_key(array.dtype):  # they are small: copies will do
        made = functools.partial(
            memory.with_contents, dtype=array.dtype, where=array.sharding
        )
        return [made(np.array(piece)) for piece in pieces]
    if not _is_within_reach(array):
        return list(pieces)
    _lend(array, pieces)
    return [
        memory.from_numpy(p, array.sharding)
        if p.flags.c_contiguous and not p.ctypes.data % memory.ALIGNMENT
        else p
        for p in pieces
    ]


class Views:
    """Parts of arrays in host memory that a loop reads in each of its iterations: each
    array is looked at once for all of them.

    It is for one run of a loop: it keeps the arrays.
    """

    def __init__(self, arrays: Iterable[Any], outer: "Views | None" = None):
        """Of the arrays that are the same in all iterations.

        Args:
          arrays: those.
          outer: the same of a loop around it.
        """
        self._outer = outer
        self._same = {id(array): array for array in arrays}
        # (id of an array, id of the windows) → both, which keeps the ids theirs, and the
        # parts.
        self._known: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def parts_of(
        self, array: Any, windows: Sequence[Window], same: bool = False
    ) -> list[jax.Array | np.ndarray]:
        """The function of that name, or what it gave for the same before.

        Args:
          array: in `pinned_host` memory.
          windows: where each part is.
          same: whether it is the same in all iterations, though it is not among `arrays`.
        """
        if self._outer is not None and (same or self._outer.knows(array)):
            return self._outer.parts_of(array, windows, same)
        if not same and id(array) not in self._same:
            return parts_of(array, windows)
        key = id(array), id(windows)
        if key not in self._known:
            self._known[key] = array, windows, parts_of(array, windows)
        return self._known[key][-1]

    def knows(self, array: Any) -> bool:
        """Whether an array is the same in all iterations, of this loop or one around it."""
        outer = self._outer is not None and self._outer.knows(array)
        return outer or id(array) in self._same


@dataclass(frozen=True, slots=True)
class Assembled:
    """A result that is put together in host memory."""

    type: Type
    # Host instance of each part, and where it belongs.
    parts: tuple[tuple[int, Window], ...]
    # Position of the donated argument whose memory it may take over, and for each part the
    # host instances whose readers must then be over before it is written.
    argument: int | None = None
    readers: tuple[tuple[int, ...], ...] = ()


class Assembly:
    """The results that one run puts together.

    Invariant: a part is in `_target` or, while its place is still to be read, in `_late`.
    """

    def __init__(self, results: Sequence[Assembled]):
        self._results = results
        # The donated argument whose memory a result takes over, and what is written to.
        self._taken: list[jax.Array | None] = [None] * len(results)
        self._target: list[np.ndarray] = []
        # Host instance → (number of the result, its place there, readers)
        self._of: dict[int, tuple[int, Window, tuple[int, ...]]] = {}
        self._late: list[tuple[int, jax.Array]] = []

    def take_over(self, leaves: Sequence[Any], keep: Container[int] = ()) -> list[Any]:
        """Takes the memory of donated arguments, but those to keep; the arguments to go on
        with.

        Where somebody else knows that memory (numpy may), the new argument is a copy.
        """
        leaves = list(leaves)
        for number, result in enumerate(self._results):
            at = result.argument
            in_place = (
                at is not None
                and at not in keep
                and _is_as_numpy_has_it(result.type.dtype)
                and _is_within_reach(leaves[at])
            )
            if at is not None and in_place:
                leaves[at], contents = taken_over(leaves[at])
                self._taken[number] = leaves[at]
                self._target.append(contents)
            else:
                self._target.append(_empty(result.type))
            for k, (instance, window) in enumerate(result.parts):
                readers = result.readers[k] if in_place else ()
                self._of[instance] = number, window, readers
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
        number, window, readers = self._of[instance]
        if any(map(unread, readers)):
            self._late.append((instance, array))
            return None
        return lambda: np.copyto(self._target[number][window.index], view(array))

    def finish(self, sharding: jax.sharding.Sharding) -> list[jax.Array]:
        """The results, when all parts have arrived and nothing is to be read any more."""
        for instance, array in self._late:
            number, window, _ = self._of[instance]
            np.copyto(self._target[number][window.index], view(array))
        self._late.clear()
        results = [
            memory.with_contents(target, result.type.dtype, sharding)
            if taken is None
            else taken
            for taken, target, result in zip(
                self._taken, self._target, self._results, strict=True
            )
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
        contents = _empty(Type.of(array))
        np.copyto(contents, view(array))
        if not copied:
            array.delete()
        return None, contents
    _wait_for_readers(array)
    # Committed: XLA takes one that is not for an array on the device, and ends the process.
    taken = _moved(array.sharding)(compat.settled(array, committed=True))
    array.delete()
    return taken, _writable(view(taken))


# Array, by its id → its weak reference, and those of views of its memory that were lent.
_lent: dict[int, tuple[weakref.ref[jax.Array], list[weakref.ref[np.ndarray]]]] = {}
# JAX lets go of what a copy was made of soon after the copy has arrived, on a thread of its
# own. It is waited for so long at most: memory of which somebody has a view is copied.
_PATIENCE_SECONDS = 0.1


def _lend(array: jax.Array, pieces: Sequence[np.ndarray]) -> None:
    """Remembers that somebody has views of an array's memory."""
    known = id(array)
    if known not in _lent or _lent[known][0]() is not array:
        _lent[known] = weakref.ref(array, lambda _: _lent.pop(known, None)), []
    views = _lent[known][1]
    views[:] = [v for v in views if v() is not None]
    views += map(weakref.ref, pieces)


def _wait_for_readers(array: jax.Array) -> None:
    """Waits until nobody has a view that was lent of an array's memory, if not for long."""
    lent = _lent.get(id(array))
    if lent is None or lent[0]() is not array:
        return
    end = time.perf_counter() + _PATIENCE_SECONDS
    while any(v() is not None for v in lent[1]) and time.perf_counter() < end:
        gc.collect(0)  # JAX gives back then what its threads let go of
        time.sleep(1e-4)


@functools.cache
def _moved(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """A function to a new array of the same memory; XLA copies where it must."""
    return jax.jit(lambda array: array, donate_argnums=0, out_shardings=sharding)


def _is_within_reach(array: jax.Array) -> bool:
    """Whether the host reaches the memory of an array of ours itself."""
    return memory.is_on_cpu(array.sharding)


def _is_as_numpy_has_it(dtype: Any) -> bool:
    """Whether host memory holds what `view` gives: not so for keys and int4."""
    return not is_key(dtype) and not is_packed(dtype)


def _empty(t: Type) -> np.ndarray:
    return memory.room_for(t.struct())


def _writable(contents: np.ndarray) -> np.ndarray:
    """The same memory without numpy's protection."""
    cells: Any = (ctypes.c_uint8 * contents.nbytes).from_address(contents.ctypes.data)
    cells.contents = contents  # keeps it alive
    return np.frombuffer(cells, contents.dtype).reshape(contents.shape)
