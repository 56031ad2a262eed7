"""A pass: what is large in tiles of one size, along all of its dimensions at once.

A stretch (`stretches.py`) has each value in parts along one dimension. Linear algebra needs
both sides of its matrices cut: products of products read a matrix from both, and so do a
factorisation, and systems that are solved with its result (`factors.py`). Here each large
value is a grid of tiles, and what a tile is made of is asked for, from the results on:
along a dimension that is contracted, products of tiles are added up. Such graphs of tiles
are TURNIP's own (arXiv 2405.16283, section 3; EinDecomp, arXiv 2410.02682). Tiles have one
size, so that their tasks share executables. What only takes positions of such values, or
puts them together, is no equation of its own: its tiles are windows of theirs.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from jturnip.frontend import factors, parts, stacks
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.builder import Builder
from jturnip.frontend.choosing import Where
from jturnip.frontend.costs import nested
from jturnip.frontend.in_order import (
    At,
    Key,
    Making,
    Tile,
    TilesInOrder,
    at_of,
    is_made_in_order,
    most_sorted,
    needed,
    rule_in_order,
    tile_of,
)
from jturnip.frontend.results import live
from jturnip.frontend.rules import SAME, Along, InOrder, Rule, without_halos
from jturnip.frontend.short import SHORT, has_short_dims
from jturnip.frontend.values import (
    Atom,
    Constant,
    Equation,
    FlatJaxpr,
    Parts,
    Slice,
    Type,
    Window,
    is_key,
    is_packed,
)


# What there is over a tile: a task has four, and the next one's are on their way. And what
# there is over a panel of an LU decomposition: a task has three.
_TILES = ((16, 4), (32, 6), (100, 8))
# Of what is sorted together, a task has two tiles, and gives as many. Comparisons grow
# faster than tiles: few come first.
_OF_SORTED = (6, 9)
# What takes one over so much of the budget, a matrix that is factorised or a row that is
# sorted, is made in order.
OF_ONE = 6
# So many times fewer or more tiles along a dimension may there be, if all are of one size
# then; else their sides are a multiple of what a vector holds.
_FEWER, _MORE = 0.8, 1.6
_ALIGNED = 16
# More tiles along a dimension than so many, and more equations, take long to plan.
_MOST_TILES = 64
_MOST_EQUATIONS = 20_000
# What only takes positions of its operands, or puts them together; a `reshape` where it has
# no rule.
_VIEWS = frozenset("slice concatenate reshape rev".split())
# What is done along one dimension only, whatever else could be cut.
_ALONG_ONE = frozenset("ragged_dot_general conv_general_dilated sort".split())


def in_grids(
    flat: FlatJaxpr, where: Where, arena: int, known: Known
) -> Iterator[FlatJaxpr]:
    """The function with all that is large in tiles: in few, then in more.

    Args:
      flat: the function.
      where: where its arguments are.
      arena: bytes on the device.
      known: rules of its equations; grows.
    """
    of_equation = rules(flat, parts.works, known)
    seen: list[Any] = []
    sorted_together = most_sorted(flat, arena // OF_ONE)
    few = tuple((k * sorted_together, 4) for k in _OF_SORTED) if sorted_together else ()
    for of_tile, of_panel in (*few, *_TILES):
        sizes = arena, arena // of_tile, arena // of_panel
        grids = _Grids(flat, where, of_equation, *sizes, sorts=bool(sorted_together))
        if grids.counts and grids.counts not in seen:
            seen.append(grids.counts)
            made = grids.result()
            if made is not None:
                yield made


class _CannotBe(Exception):
    """There would be too many tiles, or equations; or an equation cannot be done along some
    of its labels at once."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """How an equation is done: along which labels of its rule, each with the length of its
    dimensions."""

    rule: Rule
    lengths: dict[int, int]

    def dims(self, labels: Sequence[int | None]) -> frozenset[int]:
        """The dimensions of an operand or a result that are cut."""
        return frozenset(d for d, x in enumerate(labels) if x in self.lengths)

    @property
    def reduced(self) -> list[int]:
        """The labels along which what the parts give is combined."""
        return [x for x in self.lengths if x in self.rule.reduced]


@dataclass(frozen=True, slots=True)
class _View(_Cut):
    """How an equation is done that only takes positions of its operands, or puts them
    together: each tile of its result is made of windows of these."""


class _Grids:
    """The new function, while it is made."""

    def __init__(
        self,
        flat: FlatJaxpr,
        where: Where,
        of_equation: Sequence[Rule | None],
        arena: int,
        tile_bytes: int,
        panel_bytes: int,
        sorts: bool,
    ):
        self._flat = flat
        self._where = where
        self._arena, self._least = arena, tile_bytes
        itemsize = max((t.dtype.itemsize for t in flat.types if _is_plain(t)), default=4)
        self.side = math.isqrt(tile_bytes // itemsize)
        self._builder = Builder.of(dataclasses.replace(flat, equations=()))
        self._slices = {s.value: s for s in flat.slices}
        self._writer = {v: i for i, e in enumerate(flat.equations) for v in e.outputs}
        # Else longer tiles of narrow arrays moved more, not less.
        self._short = not sorts and have_short_dims(flat, tile_bytes)
        narrow = sorts or self._short
        self._sides = _sides(flat, self.side, tile_bytes) if narrow else {}
        self._bounds = functools.cache(lambda n: _bounds(self._side_of(n), n))
        # How each equation is done; and value → the dimensions along which it is made in
        # tiles.
        self._cuts: list[_Cut | None] = []
        self._dims: dict[int, frozenset[int]] = {}
        for e, rule in zip(flat.equations, of_equation, strict=True):
            cut = self._cut(e, rule) if self.side else None
            self._cuts.append(cut)
            for at, v in enumerate(e.outputs):
                self._dims[v] = cut.dims(cut.rule.results[at]) if cut else frozenset()
        self._in_order = TilesInOrder(
            flat, self._builder, self._tile, self._within, self._bounds, panel_bytes
        )
        # What was asked for, and equations on tiles as jaxprs.
        self._there: dict[Key, Any] = {}
        self._jaxprs: dict[Key, Any] = {}
        self._combined: dict[int, list[tuple[int, ...]]] = {}
        # What was read from host memory: the value, and which part → the new value.
        self._read: dict[tuple[int, Window], int] = {}

    @property
    def counts(self) -> list[tuple[int, int]] | None:
        """How long what is cut is, and into how many tiles that is, and of how many panels
        LU decompositions are; nothing where that would be too many."""
        lengths = {n for cut in self._cuts if cut for n in cut.lengths.values()}
        try:
            tiles = [(n, len(self._bounds(n))) for n in sorted(lengths)]
            short = max(map(_short_labels, self._cuts), default=0) if self._short else 0
            tiles.extend([(SHORT, short)] if short else [])
            return [*tiles, *((i, len(self._in_order.panels(i))) for i in self._lus())]
        except _CannotBe:
            return None

    def _lus(self) -> Iterator[int]:
        """LU decompositions that are made in panels."""
        for i, (e, cut) in enumerate(zip(self._flat.equations, self._cuts, strict=True)):
            if e.name == factors.LU and cut and isinstance(cut.rule, InOrder):
                yield i

    def result(self) -> FlatJaxpr | None:
        """The function; None where it cannot be in tiles."""
        flat = self._flat
        if sum(map(self._count, range(len(flat.equations)))) > _MOST_EQUATIONS:
            return None
        try:
            for i, e in enumerate(flat.equations):  # in their order
                if e.effects or e.origin.effects:
                    self._get((self._part, i, ()))
            outputs = self._of_their_own([self._output(output) for output in flat.outputs])
        except _CannotBe:
            return None
        slices = self._slices.values()
        return live(self._builder.finish(flat.inputs, outputs, tuple(slices)))

    def _count(self, i: int) -> int:
        """About how many equations one becomes, if all of it is asked for."""
        cut = self._cuts[i]
        if cut is None:
            return 1
        if isinstance(cut.rule, InOrder):
            return self._in_order.count(i)
        return math.prod(len(self._bounds(n)) for n in cut.lengths.values())

    def _of_their_own(self, outputs: Sequence[int | Parts]) -> list[int | Parts]:
        """Results, each of which is a value that an equation writes, and no other is: what
        is read from host memory, and what comes twice, is copied. An argument that the
        function returns stays what it is."""
        made = {v for e in self._builder.equations for v in e.outputs}
        given = {v for v in self._flat.outputs if isinstance(v, int)} - self._writer.keys()
        seen = set(given)

        def own(v: int) -> int:
            if v not in made or v in seen:
                return self._builder.one(stacks.copying(self._builder.types[v]), (v,), ())
            seen.add(v)
            return v

        found: list[int | Parts] = []
        for was, now in zip(self._flat.outputs, outputs, strict=True):
            if isinstance(now, Parts):
                found.append(dataclasses.replace(now, values=tuple(map(own, now.values))))
            else:
                found.append(now if was in given else own(now))
        return found

    def _output(self, output: int | Parts) -> int | Parts:
        if isinstance(output, Parts):
            whole = (self._get((self._tile, v, _all(self._type(v)))) for v in output.values)
            return dataclasses.replace(output, values=tuple(whole))
        t, dims = self._type(output), self._dims.get(output)
        if not dims or t.nbytes <= self._least:
            return self._get((self._tile, output, _all(t)))
        values, windows = [], []
        for tile in self._tiles(t, dims):
            values.append(self._get((self._tile, output, tile)))
            windows.append(self._window(t, tile))
        return Parts(tuple(values), tuple(windows), t)

    # -- how what is cut --------------------------------------------------------------

    def _cut(self, e: Equation, rule: Rule | None) -> _Cut | None:
        """How an equation is done in tiles; None for one that is done as it is."""
        types = self._flat.operand_types(e)
        results = [self._type(v) for v in e.outputs]
        large = any(t.nbytes > self._least for t in (*types, *results))
        if not large or e.effects or e.origin.effects or e.driven:
            return None
        view = self._view(e, types, results[0]) if e.name in _VIEWS else None
        if view is not None and e.name != "reshape":
            return view
        rule = without_halos(rule)
        if is_made_in_order(e, types, self.side, self._arena // OF_ONE):
            in_order = rule_in_order(e, types)
            if in_order is not None:
                lengths = self._long(e, in_order)
                if needed(e) <= lengths.keys():
                    return _Cut(in_order, lengths)
        if rule is not None:
            long, short = self._long(e, rule), self._short_lengths(e, rule)
            together = self._done_together(e, rule, types, long | short)
            lengths = {x: n for x, n in together.items() if x in long}
            short = {x: n for x, n in together.items() if x in short}
            lengths |= self._chosen_short(e, rule, lengths, short)
            if lengths:
                return _Cut(rule, lengths)
        return view

    def _long(self, e: Equation, rule: Rule) -> dict[int, int]:
        """The labels of an equation along which there are several tiles, and their
        lengths."""
        lengths = _lengths(self._sides_of(e, rule))
        return {x: n for x, n in lengths.items() if self._is_long(n)}

    def _short_lengths(self, e: Equation, rule: Rule) -> dict[int, int]:
        """The labels of an equation of a few positions, and of how many, where there are
        arrays that are to be cut along them."""
        lengths = _lengths(self._sides_of(e, rule)) if self._short else {}
        return {x: n for x, n in lengths.items() if 1 < n <= SHORT}

    def _sides_of(self, e: Equation, rule: Rule) -> list[tuple[Type, Sequence[int | None]]]:
        """The types of its results and operands, each with its labels."""
        types = (*map(self._type, e.outputs), *self._flat.operand_types(e))
        return list(zip(types, (*rule.results, *rule.operands), strict=True))

    def _chosen_short(
        self, e: Equation, rule: Rule, long: Mapping[int, int], lengths: Mapping[int, int]
    ) -> dict[int, int]:
        """Those of its short labels along which an equation is cut so that tiles are small
        enough: along which what it reads is cut, then the first ones of its results."""
        sides = self._sides_of(e, rule)
        read = zip(e.inputs, rule.operands, strict=True)
        before = {
            labels[d]
            for v, labels in read
            if not isinstance(v, Constant)
            for d in self._dims.get(v, ())
        }
        all_labels = itertools.chain(*(labels for _, labels in sides))
        in_order = dict.fromkeys(x for x in all_labels if x is not None and x in lengths)
        chosen: dict[int, int] = {}
        for x in sorted(in_order, key=lambda x: (x not in before, x in rule.reduced)):
            count = lambda y: len(self._bounds(chosen.get(y, long.get(y, 1))))
            tile_bytes = (t.nbytes / math.prod(map(count, labels)) for t, labels in sides)
            if max(tile_bytes) <= self._least:
                break
            chosen[x] = lengths[x]
        return chosen

    def _view(self, e: Equation, types: Sequence[Type], result: Type) -> _View | None:
        """How an equation is done by windows of its operands, if it can be."""
        params = e.origin.params
        if any(isinstance(v, Constant) for v in e.inputs) or not math.prod(result.shape):
            return None
        if e.name == "reshape" and params["dimensions"] is not None:
            return None  # of what is transposed first
        if e.name == "slice" and any(x != 1 for x in params["strides"] or ()):
            return None
        rule = _of_positions(types, result)
        if e.name == "reshape":  # what is next to one another stays so
            dims = {d: result.shape[d] for d in self._leading(result)}
        else:
            dims = {d: n for d, n in enumerate(result.shape) if self._is_long(n)}
            dims |= self._chosen_short(e, rule, dims, self._short_lengths(e, rule))
        if not dims and e.name != "slice":
            return None
        return _View(rule, dims)

    def _leading(self, t: Type) -> Iterator[int]:
        """The first dimensions of a value that are cut, each but the last into single
        positions, so that tiles are small enough and what is in one is next to one
        another."""
        tile_bytes = t.nbytes
        for d, n in enumerate(t.shape):
            is_short = self._short and n <= SHORT
            if n == 1 or (is_short and tile_bytes <= self._least):
                continue
            if is_short or self._is_long(n):
                yield d
            if not is_short:
                return
            tile_bytes //= n

    def _done_together(
        self, e: Equation, rule: Rule, types: Sequence[Type], lengths: Mapping[int, int]
    ) -> dict[int, int]:
        """Those labels along all of which an equation can be cut at once."""
        everywhere = [x for x in lengths if all(x in labels for labels in rule.results)]
        of_one = len(e.outputs) == 1
        reduced = [x for x in lengths if of_one and rule.reduced.get(x, (SAME,)) != (SAME,)]
        along = [*everywhere, *reduced]
        calls = any(True for _ in nested(e.origin))
        if e.name == "gather" and reduced:
            # Of what it takes from, all is there, or a part along one dimension.
            sides = zip(types[0].shape, rule.operands[0], strict=True)
            sides = (self._length(n) if x in everywhere else n for n, x in sides)
            nbytes = math.prod(sides) * types[0].dtype.itemsize
            is_large = 2 * nbytes > self._arena
            along = [*everywhere, *(reduced[:1] if is_large else ())]
        elif e.name in _ALONG_ONE or calls or _goes_by_one_position(e):
            along = sorted(along, key=lambda x: (x in reduced, -lengths[x]))[:1]
        return {x: lengths[x] for x in along}

    def _length(self, n: int) -> int:
        """How long a tile is along a dimension of `n` positions."""
        try:
            return self._bounds(n)[0][1]
        except _CannotBe:
            return self._side_of(n)

    def _side_of(self, n: int) -> int:
        """How long tiles are about along dimensions of `n` positions that are cut."""
        if self._short and n <= SHORT:
            return 1
        return self._sides.get(n, self.side)

    def _is_long(self, n: int) -> bool:
        """Whether a dimension of `n` positions is cut wherever it can be."""
        return n > self._sides.get(n, self.side)

    def _tiles(self, t: Type, dims: frozenset[int]) -> Iterator[Tile]:
        """All tiles of a value that is cut along some dimensions."""
        counts = [
            range(len(self._bounds(n))) if d in dims else [None]
            for d, n in enumerate(t.shape)
        ]
        yield from itertools.product(*counts)

    def _window(self, t: Type, tile: Tile) -> Window:
        window = Window.of(t.shape)
        for d, at in enumerate(tile):
            if at is not None:
                window = window.part(d, *self._bounds(t.shape[d])[at])
        return window

    def _shape(self, t: Type, tile: Tile) -> tuple[int, ...]:
        return tuple(b - a for a, b in self._window(t, tile).bounds)

    def _type(self, v: int) -> Type:
        return self._flat.types[v]

    # -- what is asked for ------------------------------------------------------------

    def _get(self, wanted: Key) -> Any:
        """What is asked for; makes it, and before it what it is made of."""
        agenda: list[tuple[Key, Making]] = []
        while True:
            if wanted not in self._there:
                make, *of = wanted
                agenda.append((wanted, make(*of)))
                answer = None
            else:
                answer = self._there[wanted]
            while True:
                if not agenda:
                    return answer
                key, making = agenda[-1]
                try:
                    wanted = making.send(answer)
                    break
                except StopIteration as end:
                    agenda.pop()
                    answer = self._there[key] = end.value
                    if len(self._builder.equations) > _MOST_EQUATIONS:
                        raise _CannotBe from None

    def _tile(self, v: int, tile: Tile) -> Making:
        """A tile of a value; all positions along the dimensions where that says None."""
        t = self._type(v)
        if v not in self._writer:
            if all(at is None for at in tile):
                return v
            if self._is_there(v):
                return self._read_there(v, self._window(t, tile))
            dims = frozenset[int]()
        else:
            dims = self._dims[v]
        other = lambda d, k: (*tile[:d], k, *tile[d + 1 :])
        whole = (d for d in dims if tile[d] is None)
        for d in sorted(whole):  # of parts of tiles, if need be
            pieces = []
            for k in range(len(self._bounds(t.shape[d]))):
                piece = yield self._tile, v, other(d, k)
                pieces.append(piece)
            return self._builder.joined(pieces, d, self._calls(v))
        for d, at in enumerate(tile):
            if at is not None and d not in dims:  # it is not made in such tiles
                more = yield self._tile, v, other(d, None)
                bounds = self._bounds(t.shape[d])[at]
                return self._builder.part_of(more, d, bounds, self._calls(v))
        i = self._writer[v]
        cut, at = self._cuts[i], self._flat.equations[i].outputs.index(v)
        labels = cut.rule.results[at] if cut else ()
        along = {
            x: k
            for x, k in zip(labels, tile, strict=bool(cut))
            if not (x is None or k is None)
        }
        found = yield self._part, i, at_of(along)
        return found[at]

    def _is_there(self, v: int) -> bool:
        """Whether it is a large array in host memory."""
        is_on_host = v in self._where.hosted or v in self._slices
        return v not in self._writer and is_on_host and self._type(v).nbytes > self._least

    def _read_there(self, v: int, window: Window) -> int:
        """A part of an array in host memory."""
        if (v, window) in self._read:
            return self._read[v, window]
        key, t, before, source = (v, window), self._type(v), self._slices.get(v), v
        shape = tuple(b - a for a, b in window.bounds)
        if before is not None:
            window, source = window.within(before.window), before.source
        value = self._builder.value(dataclasses.replace(t, shape=shape))
        self._slices[value] = Slice(value, source, window)
        self._read[key] = value
        return value

    def _calls(self, v: int) -> tuple[Any, ...]:
        """Of what is made of a value."""
        return self._flat.equations[self._writer[v]].within if v in self._writer else ()

    # -- equations --------------------------------------------------------------------

    def _part(self, i: int, at: At) -> Making:
        """All results of an equation for some tiles along its labels."""
        e, cut = self._flat.equations[i], self._cuts[i]
        if cut is None:
            operands: list[Atom] = []
            for v in e.inputs:
                is_number = isinstance(v, Constant)
                value = v if is_number else (yield self._tile, v, _all(self._type(v)))
                operands.append(value)
            self._builder.equations.append(dataclasses.replace(e, inputs=tuple(operands)))
            return e.outputs
        if isinstance(cut.rule, InOrder):
            results = yield from self._in_order.results(i, at)
            return results
        if isinstance(cut, _View):
            value = yield from self._viewed(i, at)
            return (value,)
        if cut.reduced:
            value = yield self._sum, i, at, len(self._combinations(i)) - 1
            return (value,)
        results = yield from self._applied(i, dict(at))
        return results

    # -- windows ----------------------------------------------------------------------

    def _viewed(self, i: int, at: At) -> Making:
        """A tile of what takes positions of its operands, or puts them together."""
        e = self._flat.equations[i]
        t = self._type(e.outputs[0])
        window = self._window(t, tile_of(range(len(t.shape)), dict(at)))
        if e.name == "reshape":
            value = yield from self._in_another_shape(e, t, window)
            return value
        bounds, operands = window.bounds, [v for v in e.inputs if isinstance(v, int)]
        if e.name == "slice":
            starts = e.origin.params["start_indices"]
            moved = ((a + k, b + k) for (a, b), k in zip(bounds, starts, strict=True))
            value = yield self._within, operands[0], Window(tuple(moved))
            return value
        if e.name == "rev":
            dims = e.origin.params["dimensions"]
            ends = zip(bounds, t.shape, strict=True)
            turned = (
                (n - b, n - a) if d in dims else (a, b)
                for d, ((a, b), n) in enumerate(ends)
            )
            piece = yield self._within, operands[0], Window(tuple(turned))
            closed = jax.make_jaxpr(lambda x: lax.rev(x, dims))(
                self._builder.types[piece].struct()
            )
            return self._builder.one(closed, (piece,), e.within)
        dim, begin, pieces = e.origin.params["dimension"], 0, []
        for v in operands:
            past = begin + self._type(v).shape[dim]
            first, end = max(begin, bounds[dim][0]), min(past, bounds[dim][1])
            if first < end:
                inside = list(bounds)
                inside[dim] = first - begin, end - begin
                piece = yield self._within, v, Window(tuple(inside))
                pieces.append(piece)
            begin = past
        return self._builder.joined(pieces, dim, e.within)

    def _in_another_shape(self, e: Equation, t: Type, window: Window) -> Making:
        """Some numbers next to one another of a result, from the part of the operand that
        has them."""
        (v,) = e.inputs
        assert isinstance(v, int)
        shape = tuple(b - a for a, b in window.bounds)
        begin = int(np.ravel_multi_index([a for a, _ in window.bounds], t.shape))
        size = math.prod(shape)
        part, skipped = _part_with(self._type(v).shape, begin, begin + size)
        piece = yield self._within, v, part
        before, given = Constant.position(skipped), self._builder.types[piece]
        if math.prod(given.shape) == size:
            closed = jax.make_jaxpr(lambda x: lax.reshape(x, shape))(given.struct())
            return self._builder.one(closed, (piece,), e.within)

        def function(x: Any, before: Any) -> Any:
            return lax.dynamic_slice_in_dim(x.reshape(-1), before, size).reshape(shape)

        closed = jax.make_jaxpr(function)(given.struct(), before.type.struct())
        return self._builder.one(closed, (piece, before), e.within)

    def _within(self, v: int, window: Window) -> Making:
        """Some positions of a value, of the tiles that have them."""
        if self._is_there(v):
            return self._read_there(v, window)
        t, dims = self._type(v), self._dims.get(v, frozenset())
        value = yield from self._along(v, t, dims, window, ())
        return value

    def _along(
        self, v: int, t: Type, dims: frozenset[int], window: Window, tile: Tile
    ) -> Making:
        """The same, with the tile known along the first dimensions."""
        dim = len(tile)
        if dim == len(t.shape):
            piece = yield self._tile, v, tile
            return piece
        begin, end = window.bounds[dim]
        bounds = self._bounds(t.shape[dim]) if dim in dims else [(0, t.shape[dim])]
        pieces = []
        for k, (first, past) in enumerate(bounds):
            low, high = max(begin, first), min(end, past)
            if low < high:
                at = k if dim in dims else None
                piece = yield from self._along(v, t, dims, window, (*tile, at))
                if (low, high) != (first, past):
                    inside = low - first, high - first
                    piece = self._builder.part_of(piece, dim, inside, self._calls(v))
                pieces.append(piece)
        return self._builder.joined(pieces, dim, self._calls(v))

    # -- reductions -------------------------------------------------------------------

    def _combinations(self, i: int) -> list[tuple[int, ...]]:
        """Which tiles of an equation are combined, along each reduced label."""
        if i not in self._combined:
            cut = self._cuts[i]
            assert cut is not None
            counts = (range(len(self._bounds(cut.lengths[x]))) for x in cut.reduced)
            self._combined[i] = list(itertools.product(*counts))
        return self._combined[i]

    def _sum(self, i: int, at: At, last: int) -> Making:
        """What a reduction has of its first parts, up to one of this number."""
        cut, sofar = self._cuts[i], None
        assert cut is not None
        if last:
            sofar = yield self._sum, i, at, last - 1
        combinations = self._combinations(i)
        others = zip(cut.reduced, combinations[last], strict=True)
        (value,) = yield from self._applied(i, dict((*at, *others)))
        if sofar is None:
            return value
        (how,) = cut.rule.reduced[cut.reduced[0]]
        assert how is not None
        e, is_last = self._flat.equations[i], last == len(combinations) - 1
        types = self._builder.types[sofar], self._builder.types[value]
        dtype = self._type(e.outputs[0]).dtype if is_last else None
        combining = parts.combining(how, *types, dtype)
        return self._builder.one(combining, (sofar, value), e.within)

    def _applied(
        self, i: int, along: Mapping[int, int]
    ) -> Generator[Key, Any, Sequence[int]]:
        """Adds an equation on tiles; returns its results."""
        e, cut = self._flat.equations[i], self._cuts[i]
        assert cut is not None
        operands: list[Atom] = []
        for v, labels in zip(e.inputs, cut.rule.operands, strict=True):
            is_number = isinstance(v, Constant)
            value = v if is_number else (yield self._tile, v, tile_of(labels, along))
            operands.append(value)
        types = tuple(map(self._builder.type_of, operands))
        shapes = tuple(
            self._shape(self._type(v), tile_of(labels, along))
            for v, labels in zip(e.outputs, cut.rule.results, strict=True)
        )
        label = _first_label(e, cut)
        key = id(e.origin), types, shapes, label
        if key not in self._jaxprs:
            dim = lambda labels: (labels.index(label), 1) if label in labels else None
            where = Along(tuple(map(dim, cut.rule.operands)), dim(cut.rule.results[0]))
            try:
                self._jaxprs[key] = parts.on_part(e, types, shapes, where)
            except Exception as error:  # as `parts.works` asks of each label by itself
                raise _CannotBe from error
        begin, _ = self._bounds(cut.lengths[label])[along[label]]
        position = Constant.position(begin)
        return self._builder.ours(self._jaxprs[key], (position, *operands), e.within)


def have_short_dims(flat: FlatJaxpr, least: int) -> bool:
    """Whether there are values of more than so many bytes with many short dimensions."""
    return any(t.nbytes > least and has_short_dims(t) for t in flat.types)


def _short_labels(cut: _Cut | None) -> int:
    """Along how many short labels an equation is cut."""
    return sum(n <= SHORT for n in cut.lengths.values()) if cut else 0


def _sides(flat: FlatJaxpr, side: int, tile_bytes: int) -> dict[int, int]:
    """How long tiles of so many bytes may be along dimensions of so many positions, where
    others are cut into sides: longer where all that have such a dimension are narrow."""
    found: dict[int, int] = {}
    large = {(t.shape, t.dtype.itemsize) for t in flat.types if t.nbytes > tile_bytes}
    for shape, itemsize in large:
        for d, n in enumerate(shape):
            others = (min(m, side) for k, m in enumerate(shape) if k != d)
            long = tile_bytes // (itemsize * max(1, math.prod(others)))
            found[n] = min(found.get(n, long), long)
    return {n: max(side, long) for n, long in found.items()}


def _bounds(side: int, n: int) -> list[tuple[int, int]]:
    """Where tiles of about this side begin and end along a dimension of `n` positions.

    Raises:
      _CannotBe: where there would be too many.
    """
    count = -(-n // side)
    if count > _MOST_TILES:
        raise _CannotBe
    counts = range(math.ceil(count * _FEWER), int(count * _MORE) + 1)
    even = (k for k in counts if n % k == 0)
    size = next((n // k for k in even), 0)
    if not size:
        size = -(-n // count // _ALIGNED) * _ALIGNED
        size = size if size < n else -(-n // count)
    return stacks.bounds(n, size)


def _lengths(sides: Sequence[tuple[Type, Sequence[int | None]]]) -> dict[int, int]:
    """How long each label is, of those that are as long in all dimensions."""
    found: dict[int, set[int]] = {}
    for t, labels in sides:
        for n, x in zip(t.shape, labels, strict=True):
            if x is not None:
                found.setdefault(x, set()).add(n)
    return {x: max(each) for x, each in found.items() if len(each) == 1}


def _goes_by_one_position(e: Equation) -> bool:
    """Whether an equation must be told where a part begins along each label."""
    return parts.goes_by_position(e) and e.name not in ("iota", "gather")


def _of_positions(types: Sequence[Type], result: Type) -> Rule:
    """The rule of what takes positions of its operands, or puts them together: along
    dimensions that have all of them."""
    labels = tuple(range(len(result.shape)))
    of = lambda t: tuple(
        d if d < len(result.shape) and n == result.shape[d] else None
        for d, n in enumerate(t.shape)
    )
    return Rule(tuple(map(of, types)), (labels,))


def _first_label(e: Equation, cut: _Cut) -> int:
    """The label of which an equation is told the position."""
    if e.name == "iota":
        label = cut.rule.results[0][e.origin.params["dimension"]]
        if label in cut.lengths:
            return label
    return next(iter(cut.reduced or cut.lengths))


def _part_with(shape: Sequence[int], begin: int, end: int) -> tuple[Window, int]:
    """The smallest part of an array that has its numbers from one to another, in the order
    in which they lie, and is one window; and how many before them it has."""
    bounds, stride = [(0, n) for n in shape], math.prod(shape)
    for d, n in enumerate(shape):
        stride //= n
        first, past = begin // stride, -(-end // stride)
        bounds[d] = first, past
        begin, end = begin - first * stride, end - first * stride
        if past - first > 1:
            break
    return Window(tuple(bounds)), begin


def _all(t: Type) -> Tile:
    return (None,) * len(t.shape)


def _is_plain(t: Type) -> bool:
    """Whether it is of numbers of whole bytes."""
    return not is_key(t.dtype) and not is_packed(t.dtype)
