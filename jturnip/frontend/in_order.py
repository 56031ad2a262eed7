"""Tiles of what is made in order: of factors, and of what solves triangular systems.

Which tile is made of which others, and how, is `factors.py`; here they are asked for.
"""

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jturnip.frontend import factors, stacks
from jturnip.frontend.builder import Builder
from jturnip.frontend.values import Atom, Constant, Equation, FlatJaxpr, Type


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


class TilesInOrder:
    """What makes them.

    Args:
      flat: the function.
      builder: of the new one.
      tile: makes a tile of a value of `flat`.
      columns: makes some columns of a matrix, of those that one tile has, by their bounds.
      bounds: where tiles begin and end along a dimension of so many positions.
      panel_bytes: of a panel of an LU decomposition, at most.
    """

    def __init__(
        self,
        flat: FlatJaxpr,
        builder: Builder,
        tile: Callable[[int, Tile], Making],
        columns: Callable[[int, int, tuple[int, int]], Making],
        bounds: Callable[[int], Sequence[tuple[int, int]]],
        panel_bytes: int,
    ):
        self._flat = flat
        self._builder = builder
        self._tile = tile
        self._columns = columns
        self._bounds = bounds
        self._panel_bytes = panel_bytes
        self._made: dict[Key, Any] = {}

    def results(self, i: int, at: At) -> Making:
        """Tiles of all results of an equation; None for those that are not asked for."""
        e = self._flat.equations[i]
        if e.name == factors.LU and not at:
            pivots, order = yield self._pivots, i
            return None, pivots, order
        if e.name == factors.LU:
            value = yield self._tile_of_panels, i, at
            return value, None, None
        value = yield (self._factor if e.name == factors.CHOLESKY else self._solved), i, at
        return (value,)

    # -- Cholesky factors and triangular systems ---------------------------------------

    def _factor(self, i: int, at: At) -> Making:
        """A tile of a Cholesky factor: left of its diagonal, on it, or zeros."""
        e, (row, column) = self._flat.equations[i], (k for _, k in at)
        if row < column:
            t = self._flat.types[e.outputs[0]]
            bounds = self._bounds(t.shape[-1])
            sides = (end - begin for begin, end in (bounds[row], bounds[column]))
            shape = (*t.shape[:-2], *sides)
            return self._ours(factors.zeros(dataclasses.replace(t, shape=shape)), (), e)
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
        count = len(self._bounds(e.origin.invars[0].aval.shape[-1]))
        return factors.solved_before(e, number, count)

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

    # -- LU decompositions -------------------------------------------------------------

    def _panels(self, e: Equation) -> list[tuple[int, int]]:
        """Where panels begin and end: one tile has the columns of one or more."""
        t = Type.of(e.origin.invars[0].aval)
        found = []
        for begin, end in self._bounds(t.shape[-1]):
            nbytes = t.nbytes // t.shape[-1] * (end - begin)
            width = -(-(end - begin) // -(-nbytes // self._panel_bytes))
            found += [(begin + a, begin + b) for a, b in stacks.bounds(end - begin, width)]
        return found

    def _panel(self, i: int, number: int, count: int) -> Making:
        """What the first so many panels leave of one."""
        e = self._flat.equations[i]
        if not count:
            (v,), bounds = e.inputs, self._panels(e)[number]
            assert isinstance(v, int)
            value = yield self._columns, v, self._tile_with(e, bounds), bounds
            return value
        left = yield self._panel, i, number, count - 1
        panel, order, _ = yield self._decomposed, i, count - 1
        return self._of_panels(factors.updated, e, count - 1, left, panel, order)[0]

    def _decomposed(self, i: int, number: int) -> Making:
        """A panel, the order of the rows with its pivots, and these."""
        e = self._flat.equations[i]
        left = yield self._panel, i, number, number
        if number:
            _, order, _ = yield self._decomposed, i, number - 1
        else:
            order = self._ours(factors.any_order(self._builder.types[left]), (), e)
        return self._of_panels(factors.decomposed, e, number, left, order)

    def _pivots(self, i: int) -> Making:
        """All pivots, and the order of the rows."""
        e = self._flat.equations[i]
        order, pivots = None, []
        for number in range(len(self._panels(e))):
            _, order, each = yield self._decomposed, i, number
            pivots.append(each)
        return self._done(factors.joined, e, *pivots), order

    def _tile_of_panels(self, i: int, at: At) -> Making:
        """A tile of a decomposition, with its rows in their order."""
        e, along = self._flat.equations[i], dict(at)
        _, order = yield self._pivots, i
        t = self._builder.types[order]
        begin, end = self._bounds(t.shape[-1])[along[factors.ROW]]
        cutting = stacks.cutting(t, len(t.shape) - 1, end - begin)
        order = self._ours(cutting, (order, Constant.position(begin, np.uint32)), e)
        pieces = []
        for number, bounds in enumerate(self._panels(e)):
            if self._tile_with(e, bounds) == along[factors.COLUMN]:
                panel, _, _ = yield self._decomposed, i, number
                pieces += self._of_panels(factors.ordered, e, None, panel, order)
        if len(pieces) == 1:
            return pieces[0]
        types = tuple(self._builder.types[v] for v in pieces)
        return self._ours(stacks.joining(types, len(types[0].shape) - 1), pieces, e)

    def _tile_with(self, e: Equation, bounds: tuple[int, int]) -> int:
        """Which tile has the columns of a panel."""
        tiles = self._bounds(e.origin.invars[0].aval.shape[-1])
        return next(k for k, (_, end) in enumerate(tiles) if bounds[1] <= end)

    def _of_panels(
        self, make: Callable[..., Any], e: Equation, number: int | None, *operands: int
    ) -> Sequence[int]:
        """Adds what is done with panels, as one equation; returns its results."""
        types = tuple(self._builder.types[v] for v in operands)
        position = ()
        if number is not None:
            position = (Constant.position(self._panels(e)[number][0]),)
        key = make, id(e.origin), types
        if key not in self._made:
            of_position = tuple(p.type for p in position)
            self._made[key] = factors.of_panels(make, *of_position, *types)
        return self._builder.emit(
            self._made[key], (*position, *operands), e.within, ours=True
        )

    # ----------------------------------------------------------------------------------

    def _done(self, make: Callable[..., Any], e: Equation, *tiles: int) -> int:
        """Adds what is done with tiles of a factor or a system; returns its result."""
        types = tuple(self._builder.types[v] for v in tiles)
        key = make, id(e.origin), types
        if key not in self._made:
            self._made[key] = make(e, *types)
        return self._ours(self._made[key], tiles, e)

    def _ours(self, closed: Any, operands: Sequence[Atom], e: Equation) -> int:
        (value,) = self._builder.ours(closed, operands, e.within)
        return value


def _of_square(row: int, column: int) -> At:
    return at_of({factors.ROW: row, factors.COLUMN: column})
