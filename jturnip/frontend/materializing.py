"""Which values a stretch in several loops writes down for the later ones, and how much.

A softmax is three loops over the blocks of its scores, an iteration of Sinkhorn three over
those of its costs. What a later loop reads of an earlier one is made anew in it: for that
no room is needed. Where there is some, and it takes longer to make a value anew than to
write it down and read it, the first blocks of it are written down, as many as there is
room for; only the others are made anew.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jturnip.frontend.costs import HEAVY, DeviceRates
from jturnip.frontend.stretches import Pass, Stretch, Stretches
from jturnip.frontend.values import FlatJaxpr, entering, nbytes_of


# What is saved is at least so many times what it takes to write down and read: both are
# guesses, and what is found so is measured beside what is made anew.
_WORTH = 1 / 2
# Neither less than this share of the blocks nor what saves less than this share of the time
# is worth a second form, which takes time to compile.
_LEAST_BLOCKS = 3 / 8
_LEAST_SAVED = 1 / 4
# So many of the largest values are looked at, where that is little work.
_MOST_VALUES = 4
_MOST_EQUATIONS = 100_000


@dataclass(frozen=True, slots=True)
class Materialized:
    """Values of which the first blocks are written down by the loop that makes them."""

    values: frozenset[int]
    blocks: int


NOTHING = Materialized(frozenset(), 0)


@dataclass(frozen=True, slots=True)
class Again:
    """What stretches in blocks make anew in their later loops, and would otherwise keep."""

    # What they compute, and how much less it would be.
    seconds: float
    saved_seconds: float
    # What would be kept, and how much of it is read, each time that it is.
    written_bytes: int
    read_bytes: int

    def __add__(self, other: "Again") -> "Again":
        return Again(
            self.seconds + other.seconds,
            self.saved_seconds + other.saved_seconds,
            self.written_bytes + other.written_bytes,
            self.read_bytes + other.read_bytes,
        )

    @property
    def share(self) -> float:
        """The share of the time that would be saved."""
        return self.saved_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Kept:
    """Values that are not made anew, what that saves, and the bytes that it takes."""

    values: frozenset[int]
    saved_seconds: float
    written_bytes: int
    read_bytes: int

    def gained_seconds(self, rates: DeviceRates) -> float:
        """What is saved, less what it is taken to cost to write and read them."""
        nbytes = self.written_bytes + self.read_bytes
        return self.saved_seconds - _WORTH * nbytes / rates.bytes_per_second


def worth_keeping(
    stretches: Stretches, stretch: Stretch, rates: DeviceRates
) -> Kept | None:
    """What the later loops of a stretch had better not make anew, if anything is."""
    anew = _computing(stretches, stretch.passes(stretches.flat), rates)
    return _best_kept(stretches, stretch, rates, anew)


def made_again(
    stretches: Stretches, stretch: Stretch, rates: DeviceRates, share: float = 1.0
) -> Again:
    """What a stretch in blocks makes anew that is best kept.

    Args:
      stretches: of a function.
      stretch: one of them.
      rates: what the device is expected to do.
      share: of how much of its blocks nothing is written down.
    """
    anew = _computing(stretches, stretch.passes(stretches.flat), rates)
    kept = _best_kept(stretches, stretch, rates, anew)
    if kept is None:
        return Again(anew, 0.0, 0, 0)
    return Again(
        anew - (1 - share) * kept.saved_seconds,
        share * kept.saved_seconds,
        int(share * kept.written_bytes),
        int(share * kept.read_bytes),
    )


def worth_materializing(
    stretches: Stretches, stretch: Stretch, size: int, free: int, rates: DeviceRates
) -> Materialized | None:
    """What is best written down of a stretch in blocks, if anything is.

    Args:
      stretches: of a function.
      stretch: one of them.
      size: positions of a block.
      free: bytes for what is written down.
      rates: what the device is expected to do.
    """
    count = stretch.length // size
    anew = _computing(stretches, stretch.passes(stretches.flat), rates)
    best, most = None, _LEAST_SAVED * anew * count
    for kept in _may_be_kept(stretches, stretch, rates, anew):
        blocks = min(count, free * stretch.length // (kept.written_bytes * size))
        gained = kept.gained_seconds(rates) * blocks
        if blocks >= _LEAST_BLOCKS * count and gained > most:
            best, most = Materialized(kept.values, blocks), gained
    return best


def _best_kept(
    stretches: Stretches, stretch: Stretch, rates: DeviceRates, anew: float
) -> Kept | None:
    gained = lambda kept: kept.gained_seconds(rates)
    best = max(_may_be_kept(stretches, stretch, rates, anew), key=gained, default=None)
    return best if best is not None and gained(best) > _LEAST_SAVED * anew else None


def _may_be_kept(
    stretches: Stretches, stretch: Stretch, rates: DeviceRates, anew: float
) -> Iterator[Kept]:
    """What a stretch may keep that takes so many seconds where all is made anew."""
    flat = stretches.flat
    if stretch.loops * len(stretch.equations) > _MOST_EQUATIONS:
        return
    for values in _sets(flat, stretch):
        passes = list(stretch.passes(flat, values))
        saved = anew - _computing(stretches, passes, rates)
        written = sum(flat.types[v].nbytes for v in values)
        yield Kept(values, saved, written, _read_bytes(flat, passes, values))


def _sets(flat: FlatJaxpr, stretch: Stretch) -> Iterator[frozenset[int]]:
    """Of the values that a later loop reads of the same block, each of the largest, these
    together, and all those that take long to make."""
    loop = {v: stretch.loop[i] for i in stretch.working for v in flat.equations[i].outputs}
    inside = loop.keys() & stretch.dims.keys() - set(stretch.leaving)
    crossing = {
        v
        for i in stretch.working
        for v in inside.intersection(flat.equations[i].reads)
        if stretch.loop[i] > loop[v]
    }
    largest = sorted(crossing, key=lambda v: (-flat.types[v].nbytes, v))[:_MOST_VALUES]
    makes = (e for i in stretch.working if (e := flat.equations[i]).name in HEAVY)
    heavy = crossing.intersection(v for e in makes for v in e.outputs)
    found = [*([v] for v in largest), largest, heavy]
    yield from dict.fromkeys(frozenset(values) for values in found if values)


def _read_bytes(flat: FlatJaxpr, passes: Iterable[Pass], values: frozenset[int]) -> int:
    """Bytes of some values that passes read and do not make, each time that they do."""
    nbytes = 0
    for each in passes:
        read = entering([flat.equations[i] for i in each.steps])
        nbytes += nbytes_of(flat, values.intersection(read))
    return nbytes


def _computing(stretches: Stretches, passes: Iterable[Pass], rates: DeviceRates) -> float:
    """Seconds that passes take by their arithmetic."""
    seconds = stretches.computing(rates)
    return sum(seconds[i] for each in passes for i in each.steps)
