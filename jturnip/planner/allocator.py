"""The virtual arena: which bytes are free, and which op freed them.

Addresses are virtual, so a slot may be several ranges and a plan never fragments. A free
block remembers the op that freed it (TURNIP's `freed_by`, section 5 of the paper); whoever
takes bytes must wait for those ops. The bytes freed first are taken first: their ops are
the likeliest to be over when the bytes are wanted.
"""

import bisect
from collections import defaultdict
from typing import NamedTuple

from jturnip.graph.memgraph import OpId, Ranges, ranges_bytes


class _Block(NamedTuple):
    """What one slot gave back, or what is left of it."""

    ranges: Ranges
    nbytes: int
    # The op that freed it; None where the bytes were never used.
    freed_by: OpId | None


class _Key(NamedTuple):
    """Names a block; the smallest was freed first."""

    seconds: float
    number: int


class Arena:
    """Free blocks in the order in which they are freed.

    Invariants: blocks are disjoint; `free_bytes` is their total; `_order` has the keys of
    all, sorted.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.free_bytes = 0
        self._blocks: dict[_Key, _Block] = {}
        self._order: list[_Key] = []
        # nbytes → keys of blocks of just that size, sorted; some may be gone or have
        # another size by now.
        self._by_size: defaultdict[int, list[_Key]] = defaultdict(list)
        self._count = 0
        self.free(((0, nbytes),) if nbytes else (), None)

    def free(self, ranges: Ranges, freed_by: OpId | None, seconds: float = 0.0) -> None:
        """Returns a slot.

        Args:
          ranges: its bytes.
          freed_by: the op that frees them.
          seconds: when that is expected to be over; of equal ones the first is the older.
        """
        if not ranges:
            return
        nbytes = ranges_bytes(ranges)
        self._count += 1
        self._add(_Key(seconds, self._count), _Block(ranges, nbytes, freed_by))
        self.free_bytes += nbytes

    def take(self, nbytes: int) -> tuple[Ranges, tuple[OpId, ...]]:
        """Takes a slot of `nbytes` and tells which ops freed its bytes.

        A whole block of just this size is preferred when it was freed no later than the
        oldest bytes that would do, since the real allocator re-uses such a block best.
        """
        assert nbytes <= self.free_bytes, f"{nbytes} asked, {self.free_bytes} free"
        if nbytes == 0:
            return (), ()
        self.free_bytes -= nbytes
        whole = self._oldest_of_size(nbytes)
        total = count = 0
        for key in self._order:
            if key == whole:
                del self._order[count]
                block = self._blocks.pop(key)
                return block.ranges, () if block.freed_by is None else (block.freed_by,)
            count += 1
            total += self._blocks[key].nbytes
            if total >= nbytes:
                break
        keys = self._order[:count]
        del self._order[:count]
        blocks = [self._blocks.pop(key) for key in keys]
        if total > nbytes:
            last = blocks[-1]
            taken, rest = _cut(last.ranges, last.nbytes - (total - nbytes))
            self._add(keys[-1], _Block(rest, total - nbytes, last.freed_by))
            blocks[-1] = _Block(taken, ranges_bytes(taken), last.freed_by)
        freers = dict.fromkeys(b.freed_by for b in blocks if b.freed_by is not None)
        return _coalesced([r for b in blocks for r in b.ranges]), tuple(freers)

    def _add(self, key: _Key, block: _Block) -> None:
        self._blocks[key] = block
        bisect.insort(self._order, key)
        bisect.insort(self._by_size[block.nbytes], key)

    def _oldest_of_size(self, nbytes: int) -> _Key | None:
        keys = self._by_size.get(nbytes)
        while keys:
            block = self._blocks.get(keys[0])
            if block is not None and block.nbytes == nbytes:
                return keys[0]
            del keys[0]
        return None


def _cut(ranges: Ranges, nbytes: int) -> tuple[Ranges, Ranges]:
    """The first `nbytes` of some ranges, and the others."""
    for index, (offset, size) in enumerate(ranges):
        if size > nbytes:
            begun = ((offset, nbytes),) if nbytes else ()
            ending = (offset + nbytes, size - nbytes)
            return ranges[:index] + begun, (ending, *ranges[index + 1 :])
        nbytes -= size
    return ranges, ()


def _coalesced(ranges: list[tuple[int, int]]) -> Ranges:
    """The same bytes in the fewest ranges, sorted by offset."""
    merged: list[tuple[int, int]] = []
    for offset, nbytes in sorted(ranges):
        if merged and merged[-1][0] + merged[-1][1] == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
        else:
            merged.append((offset, nbytes))
    return tuple(merged)
