"""A pass: stretches over which windows slide, in as few tiles as fit.

Where the borders of tiles would be too large a share of the work, a chain is cut where
little crosses, and what is between its pieces stays in parts.
"""

import bisect
import collections
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jturnip.frontend import parts
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.choosing import Where
from jturnip.frontend.costs import HEAVY, REDUCTIONS
from jturnip.frontend.cutting import one_after_the_other, with_cuttings
from jturnip.frontend.halos import examples_of
from jturnip.frontend.pieces import AT_PLACES, with_pieces
from jturnip.frontend.repeats import repeated
from jturnip.frontend.rules import Rule
from jturnip.frontend.sliding import SLIDING, Axis, Extent, sliding_rules
from jturnip.frontend.stretches import Stretch, Stretches
from jturnip.frontend.tiles import Step, Tile, Tiles, axes_of
from jturnip.frontend.values import (
    Constant,
    Equation,
    FlatJaxpr,
    nbytes_of,
    touched,
)


# What takes more than this share of what there is, is large.
_LARGE = 1 / 8
# The share that a tile takes at once by itself: it may be one task.
_OF_TILE = 1 / 3
# One that is several tasks anyway takes so much, with what the next one reads, which is on
# its way meanwhile, and what the last one gave, which leaves.
_OF_TASKS = 3 / 4
_COUNTS = tuple(2**k for k in range(1, 9))
_MOST_EQUATIONS = 20_000
# So many equations are looked at, each for some numbers of tiles: some seconds.
_MOST_LOOKED = 10_000
# Tiles do so many times the work of the whole at most.
_MOST_TWICE = 1.3
# What windows slide over is there as a whole where that takes less than this share.
_AS_A_WHOLE = 1 / 3
# Axes of so many of the largest values are looked at.
_SEEDS = 2
# What XLA does while something else reads it.
_WHILE_READ = frozenset("slice broadcast_in_dim".split())
# What XLA writes down, whatever reads it.
_WRITTEN = HEAVY | REDUCTIONS
# What it reads is written down for it, if it is not anyway.
_BARRIER = "optimization_barrier"


@dataclass(frozen=True, slots=True)
class Tiled:
    """A function with stretches over which windows slide in tiles."""

    flat: FlatJaxpr
    # How often at most a stretch is gone through, since what is read of it follows from
    # all of it.
    loops: int


def in_tiles(flat: FlatJaxpr, where: Where, arena: int, known: Known) -> Iterator[Tiled]:
    """The function with large stretches over which windows slide in tiles: in few, if XLA
    fuses what it may, then in more; nothing where there are none."""
    most = arena * _AS_A_WHOLE
    if not any(
        e.name in SLIDING | AT_PLACES and nbytes_of(flat, touched(e) - where.staying) > most
        for e in flat.equations
    ):
        return
    stretches, slid = _stretches(flat, arena, known)
    seen: list[Any] = []
    for fused in (True, False):
        tiling = _Tiling(stretches, slid, where, arena, fused)
        tiling.cut(stretches.ruled())
        cuttings = one_after_the_other(stretches, tiling.cuttings)
        how = [tiles.key for tiles in cuttings]
        if (
            cuttings
            and how not in seen
            and _equations(stretches.flat, cuttings) <= _MOST_EQUATIONS
        ):
            loops = max(tiles.stretch.loops for tiles in cuttings)
            made = with_cuttings(stretches, cuttings)
            yield Tiled(made, loops)
        seen.append(how)


def of_each_example(
    flat: FlatJaxpr, where: Where, arena: int, known: Known
) -> FlatJaxpr | None:
    """The function with what convolutions are part of done for one of several examples
    after the other, if some of it does not fit for one; None where that is not so."""
    if not any(_has_examples(flat, e) for e in flat.equations):
        return None
    stretches, slid = _stretches(flat, arena, known)
    tiling = _Tiling(stretches, slid, where, arena, fused=True)
    tiling.cut_examples()
    cuttings = one_after_the_other(stretches, tiling.cuttings)
    if not cuttings or _equations(stretches.flat, cuttings) > _MOST_EQUATIONS:
        return None
    return with_cuttings(stretches, cuttings)


def _stretches(
    flat: FlatJaxpr, arena: int, known: Known
) -> tuple[Stretches, list[Rule | None]]:
    """What finds the stretches of a function over which windows may slide, and the rules
    of its equations; with what is large written otherwise, so that they do."""
    flat = with_pieces(repeated(flat, arena), int(arena * _LARGE))
    slid = sliding_rules(flat, rules(flat, parts.works, known))
    return Stretches(flat, slid), slid


def _has_examples(flat: FlatJaxpr, e: Equation) -> bool:
    """Whether an equation is a convolution of several examples."""
    if e.name != "conv_general_dilated" or isinstance(e.inputs[0], Constant):
        return False
    return flat.types[e.inputs[0]].shape[examples_of(e)] > 1


def _equations(flat: FlatJaxpr, cuttings: Sequence[Tiles]) -> int:
    """How many equations some tiles have."""
    return sum(
        tiles.count * len(tiles.tile(flat, each.wanted, tiles.count // 2).steps)
        for tiles in cuttings
        for each in tiles.stretch.passes(flat)
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """A stretch in tiles, and how many times the work of the whole they do."""

    tiles: Tiles
    twice: float


class _Tiling:
    """Chooses the tiles of a function."""

    def __init__(
        self,
        stretches: Stretches,
        slid: Sequence[Rule | None],
        where: Where,
        arena: int,
        fused: bool,
    ):
        self.cuttings: list[Tiles] = []
        self._stretches = stretches
        self._flat = stretches.flat
        self._slid = slid
        self._where = where
        self._arena = arena
        self._fused = fused
        self._hosted = where.hosted.union(s.value for s in stretches.flat.slices)
        self._taken: set[int] = set()
        self._looked = 0

    def cut(self, members: Sequence[int]) -> None:
        """Cuts what some equations do into tiles; where there are none for all of it, what
        the first of them do, then what the others do."""
        self._looked += len(members)
        if not members or self._looked > _MOST_LOOKED or self._fits(members):
            return
        best = self._best(members)
        if best is not None:
            self.cuttings.append(best)
            self._taken.update(best.stretch.equations)
            first, last = best.stretch.equations[0], best.stretch.equations[-1]
            left = [i for i in members if i not in self._taken]
            self.cut([i for i in left if i < first])
            self.cut([i for i in left if first < i < last])
            self.cut([i for i in left if i > last])
        elif len(members) > 1:
            at = self._where_little_crosses(members)
            self.cut(members[:at])
            self.cut(members[at:])

    def cut_examples(self) -> None:
        """Cuts what is done for several examples, so that there is a tile for each, where
        one equation does not fit for one."""
        flat, members = self._flat, self._stretches.ruled()
        for i in members:
            e = flat.equations[i]
            if i in self._taken or not _has_examples(flat, e):
                continue
            (v, *_), dim = e.inputs, examples_of(e)
            assert not isinstance(v, Constant)
            stretch = self._stretches.around(members, v, dim)
            if stretch is None or not self._taken.isdisjoint(stretch.equations):
                continue
            self._taken.update(stretch.equations)
            most = stretch.length * self._arena
            if any(self._held(each) > most for each in stretch.working):
                axes = axes_of(flat, self._slid, stretch)
                self.cuttings.append(self._so_many(stretch, axes, stretch.length))

    def _held(self, i: int) -> int:
        """Bytes that an equation holds by itself."""
        return self._nbytes(self._flat.equations[i]) + self._stretches.inner[i]

    def _fits(self, members: Sequence[int]) -> bool:
        """Whether what windows slide over may be there as a whole."""
        most = self._arena * _AS_A_WHOLE
        equations = (self._flat.equations[i] for i in members)
        return not any(e.name in SLIDING and self._nbytes(e) > most for e in equations)

    def _nbytes(self, e: Equation) -> int:
        return nbytes_of(self._flat, touched(e) - self._where.staying)

    def _where_little_crosses(self, members: Sequence[int]) -> int:
        """Where to cut some equations in two: in the middle half, where few bytes cross."""
        flat, ends = self._flat, {i: at for at, i in enumerate(members)}
        crossing = [0] * (len(members) + 1)
        for at, i in enumerate(members):
            for v in flat.equations[i].outputs:
                readers = self._stretches.readers.get(v, ())
                last = max((ends.get(r, at) for r in readers), default=at)
                for between in range(at + 1, last + 1):
                    crossing[between] += flat.types[v].nbytes
        quarter = len(members) // 4
        middle = range(max(1, quarter), max(2, len(members) - quarter))
        return min(middle, key=lambda at: (crossing[at], abs(2 * at - len(members))))

    def _best(self, members: Sequence[int]) -> Tiles | None:
        """The tiles that leave least of some equations as it is, then those that do the
        least work twice."""
        found = []
        seen: set[Any] = set()
        for v, dim in self._seeds(members):
            stretch = self._stretches.around(members, v, dim)
            if stretch is None or not self._taken.isdisjoint(stretch.equations):
                continue
            if stretch.key in seen:
                continue
            seen.add(stretch.key)
            axes = axes_of(self._flat, self._slid, stretch)
            choice = self._tiles(stretch, axes) if self._is_long(axes) else None
            if choice is not None:
                others = (i for i in members if i not in stretch.working)
                left = sum(self._nbytes(self._flat.equations[i]) for i in others)
                found.append((left, choice.twice, dim, len(found), choice))
        return min(found)[-1].tiles if found else None

    def _seeds(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """Dimensions of the largest values that windows slide over among some equations,
        or that they give."""
        flat = self._flat
        equations = (flat.equations[i] for i in members)
        values = set().union(*(touched(e) for e in equations if e.name in SLIDING))
        shapes: dict[tuple[int, ...], int] = {}
        for v in sorted(values, key=lambda v: (-flat.types[v].nbytes, v)):
            shapes.setdefault(flat.types[v].shape, v)
        return [
            (v, dim)
            for shape, v in list(shapes.items())[:_SEEDS]
            for dim, size in enumerate(shape)
            if size > 1
        ]

    def _is_long(self, axes: Mapping[int, Axis]) -> bool:
        """Whether windows slide along the axis over what takes much, all together."""
        sliding = (axis.equation for axis in axes.values() if axis.slides)
        over = set[int]().union(*map(touched, sliding)) - self._where.staying
        return nbytes_of(self._flat, over) > self._arena * _AS_A_WHOLE

    def _tiles(self, stretch: Stretch, axes: Mapping[int, Axis]) -> _Choice | None:
        """The fewest tiles that are expected to fit, of those that do little twice."""
        apart = frozenset[int]().union(*(tiles.apart for tiles in self.cuttings))

        def work(count: int) -> _Work:
            return _Work(self._flat, self._so_many(stretch, axes, count))

        # Each task has one of these (`partition.py`).
        heavy = [axis for axis in axes.values() if axis.equation.name in HEAVY]
        many_tasks = len(heavy) > 1

        def fits(count: int) -> bool:
            tiles = work(count)
            held = tiles.held_bytes(apart, self._where, self._fused)
            if held <= self._arena * _OF_TILE:
                return True
            return (
                many_tasks and held + tiles.moving_bytes(apart) <= self._arena * _OF_TASKS
            )

        # The more tiles there are, the less each holds, if each has some of everything.
        shortest = work(2).shortest
        counts = [n for n in _COUNTS if n <= shortest]
        at = bisect.bisect_left(counts, True, key=fits)
        if at == len(counts):
            return None
        found = work(counts[at])
        twice = found.twice
        return _Choice(found.tiles, twice) if twice <= _MOST_TWICE else None

    def _so_many(self, stretch: Stretch, axes: Mapping[int, Axis], count: int) -> Tiles:
        """A stretch as so many tiles."""
        flat, stretches = self._flat, self._stretches
        inside = frozenset(stretch.equations)
        crossing = {v for v in stretch.leaving if v in stretch.dims}
        left = {
            v
            for v in crossing & stretches.results
            if inside.issuperset(stretches.readers.get(v, ()))
        }
        large = {v for v in crossing if flat.types[v].nbytes > self._arena * _LARGE}
        sliced = frozenset(self._hosted.intersection(stretch.entering))
        return Tiles(stretch, axes, count, sliced, frozenset(left), frozenset(large - left))


class _Work:
    """What tiles are expected to do and to hold."""

    def __init__(self, flat: FlatJaxpr, tiles: Tiles):
        self._flat = flat
        self.tiles = tiles
        self._wanted = [each.wanted for each in tiles.stretch.passes(flat) if each.wanted]
        wanted = [v for each in self._wanted for v in each]
        # All between the first and the last are alike, while they have some of everything.
        last = [tiles.last(flat, v) for v in wanted]
        self._count, middle = 1 + max(last), min(last) // 2
        self._alike = [tiles.tile(flat, each, middle) for each in self._wanted]
        # How many tiles may have some of all that is wanted.
        self.shortest = min(tiles.length(flat, v) for v in wanted)

    @property
    def twice(self) -> float:
        """How many times what the whole writes is written."""
        equations, count = self._flat.equations, self._count
        whole = sum(self._bytes(v) for i in self.tiles.axes for v in equations[i].outputs)
        ends = [0] if count == 1 else [0, count - 1]
        at_ends = sum(
            self._written_bytes(self.tiles.tile(self._flat, wanted, number))
            for wanted in self._wanted
            for number in ends
        )
        between = (count - len(ends)) * sum(map(self._written_bytes, self._alike))
        return (at_ends + between) / whole

    def held_bytes(self, apart: Collection[int], where: Where, fused: bool) -> int:
        """Bytes that one tile holds at once, with what is there for all of them.

        Args:
          apart: what is there in parts only.
          where: what is in host memory, and what stays anyway.
          fused: whether what one equation reads is made while it does.
        """
        others = {*apart, *where.staying}
        return max(self._held(tile, others, fused) for tile in self._alike)

    def moving_bytes(self, apart: Collection[int]) -> int:
        """What one tile reads of what is in host memory or in parts, and what it gives of
        what leaves."""
        return max(self._moving(tile, apart) for tile in self._alike)

    def _moving(self, tile: Tile, apart: Collection[int]) -> int:
        comes = self.tiles.sliced.union(apart)
        leaves = self.tiles.left_in_parts | self.tiles.apart
        reads = (
            self._bytes(v, Extent(dim, *span))
            for (v, dim), spans in tile.read.items()
            if v in comes
            for span in spans
        )
        gives = (self._bytes(v, extent) for v, extent in tile.wanted.items() if v in leaves)
        return sum(reads) + sum(gives)

    def _held(self, tile: Tile, others: set[int], fused: bool) -> int:
        flat, tiles = self._flat, self.tiles
        in_parts = tiles.sliced | tiles.left_in_parts | tiles.apart | others
        whole = {v for v, _ in tile.read if v not in in_parts}
        whole.update(v for v in tiles.stretch.leaving if v not in in_parts)
        for step in tile.steps:
            pairs = zip(flat.equations[step.equation].inputs, step.reads, strict=True)
            whole.update(
                v for v, extent in pairs if extent is None and not isinstance(v, Constant)
            )
        return nbytes_of(flat, whole - others) + self._alive(tile, fused)

    def _alive(self, tile: Tile, fused: bool) -> int:
        """The most bytes of parts that are there at once, if what others read of each is
        there until the last of these."""
        begins: dict[int, int] = {}
        ends: dict[int, int] = {v: len(tile.steps) for v in tile.wanted}
        nbytes: collections.Counter[int] = collections.Counter()
        equations = [self._flat.equations[step.equation] for step in tile.steps]
        readers = collections.Counter(v for e in equations for v in e.reads)
        for (v, dim), spans in tile.read.items():
            nbytes[v] += sum(self._bytes(v, Extent(dim, *span)) for span in spans)
        for at, step in reversed([*enumerate(tile.steps)]):
            e = equations[at]
            is_read_once = all(readers[v] == 1 for v in e.outputs)
            virtual = e.name in _WHILE_READ or (
                fused and is_read_once and e.name not in _WRITTEN
            )
            if e.name == _BARRIER:  # the same bytes as what it reads, where that has some
                virtual = not fused
            end = max([at, *(ends[v] for v in e.outputs if virtual and v in ends)])
            for v in e.reads:
                ends[v] = max(ends.get(v, 0), end)
                begins[v] = min(begins.get(v, at), at)
            for v, extent in self._written(step):
                begins[v] = min(begins.get(v, at), at)
                nbytes[v] += 0 if virtual else self._bytes(v, extent)
        change: collections.Counter[int] = collections.Counter()
        for v, size in nbytes.items():
            change[begins[v]] += size
            change[ends.get(v, begins[v]) + 1] -= size
        return max(itertools.accumulate(change[at] for at in sorted(change)), default=0)

    def _written_bytes(self, tile: Tile) -> int:
        written = (self._written(step) for step in tile.steps)
        return sum(self._bytes(v, extent) for each in written for v, extent in each)

    def _written(self, step: Step) -> Iterator[tuple[int, Extent | None]]:
        outputs = self._flat.equations[step.equation].outputs
        return zip(outputs, step.writes, strict=True)

    def _bytes(self, v: int, extent: Extent | None = None) -> int:
        t = self._flat.types[v]
        return (t if extent is None else t.part(extent.dim, extent.length)).nbytes
