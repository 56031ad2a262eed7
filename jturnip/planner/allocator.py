"""The virtual arena: which bytes are free, and which op freed them.

Addresses are virtual, so a slot may be several ranges and a plan never fragments. A free
block remembers the op that freed it (TURNIP's `freed_by`, section 5 of the paper); whoever
takes bytes must wait for those ops. The bytes freed longest ago are taken first: their ops
are the likeliest to be over when the bytes are wanted.
"""

from collections import OrderedDict, defaultdict

from jturnip.graph.memgraph import OpId, Ranges


# The granule of JAX's GPU allocator: every buffer takes a multiple of it.
ALIGNMENT = 256


def padded(nbytes: int) -> int:
    """Bytes that a buffer of `nbytes` takes in the arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """Free blocks in the order they were freed.

    Invariants: blocks are disjoint; `free_bytes` is their total; the first block was freed
    no later than the second, and so on.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.free_bytes = 0
        # key → (offset, nbytes, the op that freed it or None where it was never used)
        self._blocks: OrderedDict[int, tuple[int, int, OpId | None]] = OrderedDict()
        # nbytes → keys of blocks of just that size, oldest first
        self._by_size: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self._next_key = 0
        self.free(((0, nbytes),) if nbytes else (), None)

    def free(self, ranges: Ranges, freed_by: OpId | None) -> None:
        """Returns a slot's ranges; `freed_by` must not be older than any earlier one."""
        for offset, nbytes in ranges:
            key = self._next_key
            self._next_key += 1
            self._blocks[key] = (offset, nbytes, freed_by)
            self._by_size[nbytes][key] = None
            self.free_bytes += nbytes

    def take(self, nbytes: int) -> tuple[Ranges, tuple[OpId, ...]]:
        """Takes a slot of `nbytes` and tells which ops freed its bytes.

        A whole block of just this size is preferred when it was freed no later than the
        oldest bytes that would do, since the real allocator re-uses such a block best.
        """
        assert nbytes <= self.free_bytes, f"{nbytes} asked, {self.free_bytes} free"
        if nbytes == 0:
            return (), ()
        keys = self._oldest(nbytes)
        same_size = self._by_size.get(nbytes)
        if same_size:
            whole = next(iter(same_size))
            if whole <= keys[-1]:
                keys = [whole]
        taken, freers, left = [], {}, nbytes
        for key in keys:
            offset, size, freed_by = self._blocks[key]
            used = min(size, left)
            self._shrink(key, used)
            taken.append((offset, used))
            if freed_by is not None:
                freers[freed_by] = None
            left -= used
        self.free_bytes -= nbytes
        return _coalesced(taken), tuple(freers)

    def _oldest(self, nbytes: int) -> list[int]:
        """Keys of the oldest blocks that together hold `nbytes`."""
        keys, total = [], 0
        for key, (_, size, _) in self._blocks.items():
            keys.append(key)
            total += size
            if total >= nbytes:
                break
        return keys

    def _shrink(self, key: int, used: int) -> None:
        """Takes `used` bytes from the front of a block, which keeps its age."""
        offset, size, freed_by = self._blocks[key]
        del self._by_size[size][key]
        if not self._by_size[size]:
            del self._by_size[size]
        if used == size:
            del self._blocks[key]
            return
        self._blocks[key] = (offset + used, size - used, freed_by)
        # Not at its place by age among its new equals; any place is correct, and the
        # front is right for the bytes that are left of an old block.
        self._by_size[size - used][key] = None
        self._by_size[size - used].move_to_end(key, last=False)


def _coalesced(ranges: list[tuple[int, int]]) -> Ranges:
    """The same bytes in the fewest ranges, sorted by offset."""
    merged: list[tuple[int, int]] = []
    for offset, nbytes in sorted(ranges):
        if merged and merged[-1][0] + merged[-1][1] == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
        else:
            merged.append((offset, nbytes))
    return tuple(merged)
