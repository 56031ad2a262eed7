"""Tiles of what is made in order: of factors, of what solves triangular systems, and of
rows that are sorted.

Which tile is made of which others, and how, is `factors.py` and `sorting.py`; here they are
asked for.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

from jturnip.frontend import factors, sorting, stacks
from jturnip.frontend.builder import Builder
from jturnip.frontend.rules import InOrder
from jturnip.frontend.values import Constant, Equation, FlatJaxpr, Type, Window


# What is made of tiles that are made before.
IN_ORDER = factors.FACTORS.union([sorting.SORT])


# Which tile along each dimension; None for all positions.
Tile: TypeAlias = tuple[int | None, ...]
# Label → which tile along it, in the order of the labels.
At: TypeAlias = tuple[tuple[int, int], ...]
# What is asked for: the method that makes it, and of what.
Key: TypeAlias = tuple[Any, ...]
Making: TypeAlias = Generator[Key, Any, Any]


def at_of(along: Mapping[int, int]) -> At:
    return tuple(sorted(along.items()))


def tile_of(labels: Sequence[int | None], along: Mapping[int, int]) -> Tile:
    """The tile of an operand or a result of which the rule has these labels."""
    return tuple(None if x is None else along.get(x) for x in labels)


def has_in_order(flat: FlatJaxpr, least: int) -> bool:
    """Whether something of more than so many bytes is made in order: a matrix that is
    factorised, or solved with, or a row that is sorted."""
    return any(_bytes_at_once(e, flat.operand_types(e)) > least for e in flat.equations)


def most_sorted(flat: FlatJaxpr, least: int) -> int:
    """How many values are sorted together, where rows have more than so many bytes."""
    return max(
        (
            sorting.several(e, flat)
            for e in flat.equations
            if e.name == sorting.SORT and _bytes_at_once(e, flat.operand_types(e)) > least
        ),
        default=0,
    )


def rule_in_order(e: Equation, types: Sequence[Type]) -> InOrder | None:
    """The labels of what is made in order, of operands of these types; None for what is
    not."""
    if e.name == sorting.SORT:
        return sorting.rule_in_order(types)
    return factors.rule_in_order(e, types) if e.name in factors.FACTORS else None


def is_made_in_order(e: Equation, types: Sequence[Type], side: int, least: int) -> bool:
    """Whether an equation is made so: of a matrix with longer sides, or of rows of more
    bytes."""
    if e.name == sorting.SORT:
        return _bytes_at_once(e, types) > least
    return e.name in factors.FACTORS and types[0].shape[-1] > side


def needed(e: Equation) -> frozenset[int]:
    """The labels without which an equation is not made in order."""
    if e.name == sorting.SORT:
        return frozenset([e.origin.params["dimension"]])
    is_factor = e.name in (factors.CHOLESKY, factors.LU)
    return frozenset([factors.ROW, factors.COLUMN] if is_factor else [factors.COLUMN])


def _bytes_at_once(e: Equation, types: Sequence[Type]) -> int:
    if e.name == sorting.SORT:
        # A task sorts a row with little beside it: twice as long a row as the side of what
        # is factorised. Positions have 31 bits.
        n = types[0].shape[e.origin.params["dimension"]]
        return sorting.row_bytes(e, types) // 2 if n < 2**31 else 0
    return factors.matrix_bytes(types[0]) if e.name in factors.FACTORS else 0


class TilesInOrder:
    """Makes tiles of factors, of what solves systems, and of sorted rows.

    Args:
      flat: the function.
      builder: of the new one.
      tile: makes a tile of a value of `flat`.
      within: makes some positions of a value of `flat`.
      bounds: where tiles begin and end along a dimension of so many positions.
      panel_bytes: of a panel of an LU decomposition at most, unless it is one column.
    """

    def __init__(
        self,
        flat: FlatJaxpr,
        builder: Builder,
        tile: Callable[[int, Tile], Making],
        within: Callable[[int, Window], Making],
        bounds: Callable[[int], Sequence[tuple[int, int]]],
        panel_bytes: int,
    ):
        self._flat = flat
        self._builder = builder
        self._tile = tile
        self._within = within
        self._bounds = bounds
        self._panel_bytes = panel_bytes
        self._made: dict[Key, Any] = {}
        self.panels = functools.cache(self._panels)
        equations = flat.equations
        self._position_of = functools.cache(
            lambda i: sorting.position_of(equations[i], flat)
        )

    def count(self, i: int) -> int:
        """About how many equations one that is made in order becomes."""
        e = self._flat.equations[i]
        tiles = len(self._tiles(e))
        if e.name == sorting.SORT:
            of_pair = 4 * sorting.several(e, self._flat)  # joined, sorted, cut in two
            return of_pair * len(sorting.network(tiles))
        if e.name == factors.LU:
            panels = len(self.panels(i))
            return panels * (panels + 1) // 2 + tiles**2
        if e.name == factors.CHOLESKY:
            return tiles**3 // 6
        t = self._flat.types[e.outputs[0]]
        others = t.shape[-1 if e.origin.params["left_side"] else -2]
        return tiles**2 * len(self._bounds(others)) // 2

    def results(self, i: int, at: At) -> Making:
        """Tiles of all results of an equation; None for those that are not asked for."""
        e = self._flat.equations[i]
        if e.name == factors.LU and not at:
            pivots, order = yield self._pivots, i
            return None, pivots, order
        if e.name == factors.LU:
            value = yield self._tile_of_panels, i, at
            return value, None, None
        if e.name == sorting.SORT:
            values = yield self._sorted, i, at
            return values
        value = yield (self._factor if e.name == factors.CHOLESKY else self._solved), i, at
        return (value,)

    def _tiles(self, e: Equation) -> Sequence[tuple[int, int]]:
        """Where tiles along the columns of the matrix of an equation, or along what it
        sorts, begin and end."""
        dim = e.origin.params["dimension"] if e.name == sorting.SORT else -1
        return self._bounds(self._flat.operand_types(e)[0].shape[dim])

    # -- Cholesky factors and triangular systems ---------------------------------------

    def _factor(self, i: int, at: At) -> Making:
        """A tile of a Cholesky factor: left of its diagonal, on it, or zeros."""
        e, (row, column) = self._flat.equations[i], (k for _, k in at)
        if row < column:
            t = self._flat.types[e.outputs[0]]
            bounds = self._bounds(t.shape[-1])
            sides = (end - begin for begin, end in (bounds[row], bounds[column]))
            shape = (*t.shape[:-2], *sides)
            key = factors.zeros, shape, t.dtype
            if key not in self._made:
                self._made[key] = factors.zeros(dataclasses.replace(t, shape=shape))
            return self._builder.one(self._made[key], (), e.within)
        left = yield self._left, i, at, column
        if row == column:
            return self._done(factors.factorised, e, left)
        diagonal = yield self._factor, i, _of_square(column, column)
        return self._done(factors.below, e, diagonal, left)

    def _solved(self, i: int, at: At) -> Making:
        """A tile of what solves a triangular system."""
        e, number = self._flat.equations[i], dict(at)[factors.COLUMN]
        left = yield self._left, i, at, len(self._before(e, number))
        diagonal = yield self._of_matrix(e, number, number)
        return self._done(factors.solved, e, diagonal, left)

    def _left(self, i: int, at: At, count: int) -> Making:
        """A tile of what is factorised, or of the right side of a system, less its first
        products with tiles that are known."""
        e, along = self._flat.equations[i], dict(at)
        if not count:
            value = yield self._given(e, along)
            return value
        left = yield self._left, i, at, count - 1
        if e.name == factors.CHOLESKY:
            one = yield self._factor, i, _of_square(along[factors.ROW], count - 1)
            other = yield self._factor, i, _of_square(along[factors.COLUMN], count - 1)
        else:
            number = along[factors.COLUMN]
            known = self._before(e, number)[count - 1]
            one = yield self._of_matrix(e, *factors.between(e, number, known))
            other = yield self._solved, i, at_of({**along, factors.COLUMN: known})
        return self._done(factors.less, e, left, one, other)

    def _before(self, e: Equation, number: int) -> Sequence[int]:
        """Which tiles of what solves a system are needed for one of them."""
        return factors.solved_before(e, number, len(self._tiles(e)))

    def _given(self, e: Equation, along: Mapping[int, int]) -> Key:
        """What asks for a tile of what is factorised, or of the right side of a system."""
        v, rule = e.inputs[-1], factors.rule_in_order(e, self._flat.operand_types(e))
        assert isinstance(v, int)
        assert rule is not None
        return self._tile, v, tile_of(rule.operands[-1], along)

    def _of_matrix(self, e: Equation, row: int, column: int) -> Key:
        """What asks for a tile of a system's matrix."""
        v = e.inputs[0]
        assert isinstance(v, int)
        several = (None for _ in self._flat.types[v].shape[:-2])
        return self._tile, v, (*several, row, column)

    # -- sorted rows ---------------------------------------------------------------------

    def _sorted(self, i: int, at: At) -> Making:
        """A tile of what is sorted."""
        e, along = self._flat.equations[i], dict(at)
        tile = along.pop(e.origin.params["dimension"])
        found = yield from self._so_far(i, at_of(along), tile, None)
        return found[: len(e.outputs)]

    def _so_far(self, i: int, at: At, tile: int, before: int | None) -> Making:
        """What a tile of some rows is before a comparison, or after all."""
        pairs = sorting.network(len(self._tiles(self._flat.equations[i])))
        last = sorting.last_of(tile, pairs[:before])
        if last is None:
            found = yield self._unsorted, i, at, tile
        else:
            sides = yield self._compared, i, at, last
            found = sides[pairs[last].index(tile)]
        return found

    def _compared(self, i: int, at: At, number: int) -> Making:
        """The two tiles of a comparison after it."""
        e = self._flat.equations[i]
        pair = sorting.network(len(self._tiles(e)))[number]
        operands: list[int] = []
        for tile in pair:
            of_tile = yield from self._so_far(i, at, tile, number)
            operands += of_tile
        types = tuple(self._builder.types[v] for v in operands)
        position = self._position_of(i)
        key = sorting.compared, id(e.origin), position, types
        if key not in self._made:
            self._made[key] = sorting.compared(e, position, *types)
        values = self._builder.ours(self._made[key], operands, e.within)
        half = len(values) // 2
        return values[:half], values[half:]

    def _unsorted(self, i: int, at: At, tile: int) -> Making:
        """A tile of what is to be sorted, and its positions if these are needed."""
        e = self._flat.equations[i]
        dim = e.origin.params["dimension"]
        labels = range(len(self._flat.operand_types(e)[0].shape))
        of_tile = tile_of(labels, {**dict(at), dim: tile})
        found: list[int] = []
        for v in e.inputs:
            assert isinstance(v, int)
            value = yield self._tile, v, of_tile
            found.append(value)
        if self._position_of(i) == len(found):
            t, begin = self._builder.types[found[0]], self._tiles(e)[tile][0]
            position = Constant.position(begin)
            numbers = sorting.positions(t, dim, position.type)
            found.append(self._builder.one(numbers, (position,), e.within))
        return found

    # -- LU decompositions -------------------------------------------------------------

    def _panels(self, i: int) -> list[tuple[int, tuple[int, int]]]:
        """Panels: which tile has their columns, and where they begin and end."""
        e = self._flat.equations[i]
        t = self._flat.operand_types(e)[0]
        most = max(1, self._panel_bytes // (t.nbytes // t.shape[-1]))
        found = []
        for tile, (begin, end) in enumerate(self._tiles(e)):
            count = -(-(end - begin) // most)
            for a, b in stacks.bounds(end - begin, -(-(end - begin) // count)):
                found.append((tile, (begin + a, begin + b)))
        return found

    def _panel(self, i: int, number: int, count: int) -> Making:
        """What the first so many panels leave of one."""
        if not count:
            (v,) = self._flat.equations[i].inputs
            assert isinstance(v, int)
            shape, (_, columns) = self._flat.types[v].shape, self.panels(i)[number]
            value = yield self._within, v, Window.of(shape).part(len(shape) - 1, *columns)
            return value
        left = yield self._panel, i, number, count - 1
        panel, order, _ = yield self._decomposed, i, count - 1
        return self._of_panels(factors.updated, i, count - 1, left, panel, order)[0]

    def _decomposed(self, i: int, number: int) -> Making:
        """A panel, the order of the rows with its pivots, and these."""
        left = yield self._panel, i, number, number
        if number:
            _, order, _ = yield self._decomposed, i, number - 1
        else:
            of_rows = factors.first_order(self._builder.types[left])
            order = self._builder.one(of_rows, (), self._calls(i))
        return self._of_panels(factors.decomposed, i, number, left, order)

    def _pivots(self, i: int) -> Making:
        """All pivots, and the order of the rows."""
        order, pivots = None, []
        for number in range(len(self.panels(i))):
            _, order, each = yield self._decomposed, i, number
            pivots.append(each)
        dim = len(self._builder.types[pivots[0]].shape) - 1
        return self._builder.joined(pivots, dim, self._calls(i)), order

    def _ordered(self, i: int, number: int) -> Making:
        """A panel with its rows in their order, in tiles."""
        _, order = yield self._pivots, i
        panel, _, _ = yield self._decomposed, i, number
        bounds = self._bounds(self._builder.types[order].shape[-1])
        return self._of_panels(factors.in_tiles(bounds), i, None, panel, order)

    def _tile_of_panels(self, i: int, at: At) -> Making:
        """A tile of a decomposition."""
        along, pieces = dict(at), []
        for number, (tile, _) in enumerate(self.panels(i)):
            if tile == along[factors.COLUMN]:
                tiles = yield self._ordered, i, number
                pieces.append(tiles[along[factors.ROW]])
        dim = len(self._builder.types[pieces[0]].shape) - 1
        return self._builder.joined(pieces, dim, self._calls(i))

    def _of_panels(
        self, make: Callable[..., Any], i: int, number: int | None, *operands: int
    ) -> Sequence[int]:
        """Adds what is done with panels, as one equation; returns its results."""
        types = tuple(self._builder.types[v] for v in operands)
        position = ()
        if number is not None:
            _, (begin, _) = self.panels(i)[number]
            position = (Constant.position(begin),)
        key = make.__name__, types
        if key not in self._made:
            of_position = tuple(p.type for p in position)
            self._made[key] = factors.of_panels(make, *of_position, *types)
        read = (*position, *operands)
        return self._builder.emit(self._made[key], read, self._calls(i), ours=True)

    # ----------------------------------------------------------------------------------

    def _done(self, make: Callable[..., Any], e: Equation, *tiles: int) -> int:
        """Adds what is done with tiles of a factor or a system; returns its result."""
        types = tuple(self._builder.types[v] for v in tiles)
        key = make, id(e.origin), types
        if key not in self._made:
            self._made[key] = make(e, *types)
        return self._builder.one(self._made[key], tiles, e.within)

    def _calls(self, i: int) -> tuple[Any, ...]:
        """Those that an equation was inlined from."""
        return self._flat.equations[i].within


def _of_square(row: int, column: int) -> At:
    return at_of({factors.ROW: row, factors.COLUMN: column})
