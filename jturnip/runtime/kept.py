"""What stays on the device between the calls of one function: copies of arrays that it was
given in host memory, and that are likely to come again, as weights do.

An array of JAX's never changes, so its copy is good for as long as the same object comes.
When that is gone, so is its copy.
"""

import weakref
from collections.abc import Collection, Hashable
from typing import Any, TypeAlias

import jax

from jturnip import memory, placement
from jturnip.compat import Device


# An array and which part of it; None for all.
Source: TypeAlias = tuple[Any, Hashable]


class Kept:
    """Copies by their sources. Thread-safe: a copy that is taken lives while it is used."""

    def __init__(self) -> None:
        # By the id of the source, which is alive while there is an entry, and the part.
        self._copies: dict[tuple[int, Hashable], tuple[weakref.ref[Any], jax.Array]] = {}
        at = id(self)
        _all[at] = weakref.ref(self, lambda _: _all.pop(at, None))

    def __bool__(self) -> bool:
        """Whether anything is kept."""
        return bool(self._copies)

    @property
    def nbytes(self) -> int:
        """Device bytes of all copies."""
        return self.nbytes_beside(())

    def nbytes_beside(self, sources: Collection[Source]) -> int:
        """Device bytes of all copies but those of some sources."""
        mine, copies = set(map(_key, sources)), list(self._copies.items())
        return memory.device_bytes(copy for key, (_, copy) in copies if key not in mine)

    def copy_of(self, source: Source) -> jax.Array | None:
        """The copy, if it is there."""
        entry = self._copies.get(_key(source))
        return entry[1] if entry is not None and entry[0]() is source[0] else None

    def keep(self, source: Source, copy: jax.Array) -> None:
        """Keeps a copy while its source lives; not of numpy's arrays, which may change."""
        if not isinstance(source[0], jax.Array):
            return
        key, weak_self = _key(source), weakref.ref(self)

        def gone(ref: weakref.ref[Any]) -> None:
            kept = weak_self()
            if kept is not None and kept._copies.get(key, (None,))[0] is ref:
                kept._copies.pop(key, None)

        self._copies[key] = weakref.ref(source[0], gone), copy

    def keep_only(self, sources: Collection[Source], room: int = 0) -> None:
        """Lets go of all others, unless these take no more than `room` bytes."""
        if not self._copies or self.nbytes_beside(sources) <= room:
            return
        for key in set(self._copies).difference(map(_key, sources)):
            self._copies.pop(key, None)

    def clear(self) -> None:
        """Lets go of all."""
        self._copies.clear()

    def make_way(self, device: Device, nbytes: int) -> None:
        """Before a call of the function that may take `nbytes` in all: where the device has
        not so much left, other functions let go of what they keep."""
        # The copy is made at once: others may come and go meanwhile.
        alive = [ref() for ref in list(_all.values())]
        others = [kept for kept in alive if kept and kept is not self]
        if not others:
            return
        left = placement.unused_device_bytes(device)
        if left is not None and left + self.nbytes < nbytes:
            for kept in others:
                kept.clear()


def _key(source: Source) -> tuple[int, Hashable]:
    array, part = source
    return id(array), part


# By id. Without a lock, which Ctrl-C might leave locked: each use is one call into C.
_all: dict[int, "weakref.ref[Kept]"] = {}
