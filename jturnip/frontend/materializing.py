"""Which values a stretch in several loops writes down for the later ones, and how much.

A softmax is three loops over the blocks of its scores, an iteration of Sinkhorn three over
those of its costs. What a later loop reads of an earlier one is made anew in it: for that
no room is needed. Where there is some, and it takes longer to make a value anew than to
write it down and read it, the first blocks of it are written down, as many as there is
room for; only the others are made anew.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jturnip.frontend.costs import DeviceRates, flops
from jturnip.frontend.stretches import Pass, Stretch
from jturnip.frontend.values import FlatJaxpr, read_by


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


def worth_materializing(
    flat: FlatJaxpr, stretch: Stretch, size: int, free: int, rates: DeviceRates
) -> Materialized | None:
    """What is best written down of a stretch in blocks, if anything is.

    Args:
      flat: the function.
      stretch: a stretch of it.
      size: positions of a block.
      free: bytes for what is written down.
      rates: what the device is expected to do.
    """
    if stretch.loops * len(stretch.equations) > _MOST_EQUATIONS:
        return None
    count = stretch.length // size
    anew = _flops(flat, stretch.passes(flat))
    best, most = None, _LEAST_SAVED * anew / rates.flops_per_second * count
    for values in _sets(flat, stretch):
        nbytes = sum(flat.types[v].nbytes for v in values)
        blocks = min(count, free * stretch.length // (nbytes * size))
        passes = list(stretch.passes(flat, values))
        saved = (anew - _flops(flat, passes)) / rates.flops_per_second
        taken = (nbytes + _read_bytes(flat, passes, values)) / rates.bytes_per_second
        gained = (saved - _WORTH * taken) * blocks
        if blocks >= _LEAST_BLOCKS * count and gained > most:
            best, most = Materialized(values, blocks), gained
    return best


def _sets(flat: FlatJaxpr, stretch: Stretch) -> Iterator[frozenset[int]]:
    """Each of the largest values that a later loop reads of the same block, and all."""
    loop = {v: stretch.loop[i] for i in stretch.working for v in flat.equations[i].outputs}
    inside = loop.keys() & stretch.dims.keys() - set(stretch.leaving)
    crossing = {
        v
        for i in stretch.working
        for v in inside.intersection(read_by(flat.equations[i]))
        if stretch.loop[i] > loop[v]
    }
    crossing = sorted(crossing, key=lambda v: (-flat.types[v].nbytes, v))[:_MOST_VALUES]
    yield from (frozenset([v]) for v in crossing)
    if len(crossing) > 1:
        yield frozenset(crossing)


def _read_bytes(flat: FlatJaxpr, passes: Iterable[Pass], values: frozenset[int]) -> int:
    """Bytes of some values that passes read and do not make, each time that they do."""
    nbytes = 0
    for each in passes:
        equations = [flat.equations[i] for i in each.steps]
        made = {v for e in equations for v in e.outputs}
        read = {v for e in equations for v in read_by(e)} - made
        nbytes += sum(flat.types[v].nbytes for v in values & read)
    return nbytes


def _flops(flat: FlatJaxpr, passes: Iterable[Pass]) -> float:
    return sum(flops(flat.equations[i].origin) for each in passes for i in each.steps)
