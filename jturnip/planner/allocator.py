"""The virtual arena: which bytes are free, and which op freed them.

Addresses are virtual, so a slot may be several ranges and a plan never fragments. A free
block remembers the op that freed it (TURNIP's `freed_by`, section 5 of the paper); whoever
takes bytes must wait for those ops. The bytes freed longest ago are taken first: their ops
are the likeliest to be over when the bytes are wanted.
"""

from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

from jturnip.graph.memgraph import OpId, Ranges, ranges_bytes


class _Block(NamedTuple):
    """What one slot gave back, or what is left of it."""

    ranges: Ranges
    nbytes: int
    # The op that freed it; None where the bytes were never used.
    freed_by: OpId | None


class Arena:
    """Free blocks in the order they were freed.

    Invariants: blocks are disjoint; `free_bytes` is their total; the first block was freed
    no later than the second, and so on; keys grow in the same order.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.free_bytes = 0
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        # nbytes → keys of blocks of just that size, oldest first; some of them may be gone
        # or have another size by now.
        self._by_size: defaultdict[int, deque[int]] = defaultdict(deque)
        self._next_key = 0
        self.free(((0, nbytes),) if nbytes else (), None)

    def free(self, ranges: Ranges, freed_by: OpId | None) -> None:
        """Returns a slot; `freed_by` must not be older than any earlier one."""
        if not ranges:
            return
        nbytes = ranges_bytes(ranges)
        self._blocks[self._next_key] = _Block(ranges, nbytes, freed_by)
        self._by_size[nbytes].append(self._next_key)
        self._next_key += 1
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
        keys, total = [], 0
        for key, block in self._blocks.items():
            if key == whole:
                del self._blocks[key]
                return block.ranges, () if block.freed_by is None else (block.freed_by,)
            keys.append(key)
            total += block.nbytes
            if total >= nbytes:
                break
        blocks = [self._blocks.pop(key) for key in keys]
        if total > nbytes:
            blocks[-1] = self._give_back(keys[-1], blocks[-1], total - nbytes)
        freers = dict.fromkeys(b.freed_by for b in blocks if b.freed_by is not None)
        return _coalesced([r for b in blocks for r in b.ranges]), tuple(freers)

    def _oldest_of_size(self, nbytes: int) -> int | None:
        keys = self._by_size.get(nbytes)
        while keys:
            block = self._blocks.get(keys[0])
            if block is not None and block.nbytes == nbytes:
                return keys[0]
            keys.popleft()
        return None

    def _give_back(self, key: int, block: _Block, left: int) -> _Block:
        """Gives back the last `left` bytes of a block, at its age; returns the rest."""
        taken, rest = _cut(block.ranges, block.nbytes - left)
        self._blocks[key] = _Block(rest, left, block.freed_by)
        self._blocks.move_to_end(key, last=False)
        # Perhaps not at its place by age among its new equals, where any place is correct;
        # the front is right for what is left of an old block.
        self._by_size[left].appendleft(key)
        return _Block(taken, block.nbytes - left, block.freed_by)


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
