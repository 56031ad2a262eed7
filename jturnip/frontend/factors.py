"""Factors of matrices and triangular systems in tiles: what is done with a tile.

A tile of a factor is that of the matrix, less products of tiles that are left of it, and
then factorised, or solved with the one on the diagonal: the left-looking algorithm of
LAPACK's `potrf` (G. H. Golub, C. F. Van Loan, Matrix Computations, section 4.2.6). A tile
of what solves a system is that of the right side, less products with tiles that are solved
already (section 3.1.4).

A panel of an LU decomposition, all rows of some columns, is that of the matrix, less
products with the panels to its left, and is then decomposed: LAPACK's `getrf`, but
left-looking (section 3.4.5). Rows stay where they are until all pivots are known: which row
is at which place is an array of its own, and only the decomposition of a panel is of rows
in their order.

XLA does each at once, of the whole matrix.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jturnip.frontend.rules import InOrder
from jturnip.frontend.values import Equation, Type


CHOLESKY, LU = "cholesky", "lu"
# How the names of what is done with panels begin.
_OF_PANELS = "lu_panel_"
FACTORS = frozenset([CHOLESKY, LU, "triangular_solve"])
# Labels: of a matrix that is factorised; and of the right side of a system, along what is
# solved one after the other and along what is not.
ROW, COLUMN, FREE = 0, 1, 2


def matrix_bytes(t: Type) -> int:
    """Bytes of one of the matrices that a value is."""
    return math.prod(t.shape[-2:]) * t.dtype.itemsize


def rule_in_order(e: Equation, types: Sequence[Type]) -> InOrder | None:
    """The labels of a factorisation or of a system, of operands of these types; None for
    decompositions of more columns than rows."""
    several = (None,) * (len(types[-1].shape) - 2)
    if e.name == LU:
        rows, columns = types[0].shape[-2:]
        labels, all_rows = (*several, ROW, COLUMN), (*several, None)
        return InOrder((labels,), (labels, all_rows, all_rows)) if rows >= columns else None
    if e.name == CHOLESKY:
        labels = (*several, ROW, COLUMN)
        return InOrder((labels,), (labels,))
    ends = (COLUMN, FREE) if e.origin.params["left_side"] else (FREE, COLUMN)
    matrix = (None,) * len(types[0].shape)
    return InOrder((matrix, (*several, *ends)), ((*several, *ends),))


def solved_before(e: Equation, number: int, count: int) -> Sequence[int]:
    """Which of `count` tiles of what solves a system are needed for one, in the order in
    which they are solved."""
    params = e.origin.params
    is_lower = params["lower"] != params["transpose_a"]
    first_come_first = is_lower == params["left_side"]
    return range(number) if first_come_first else range(count - 1, number, -1)


def between(e: Equation, number: int, known: int) -> tuple[int, int]:
    """Row and column of the tile of a system's matrix by which a known tile of what solves
    it enters in another."""
    params = e.origin.params
    row, column = (number, known) if params["left_side"] else (known, number)
    return (column, row) if params["transpose_a"] else (row, column)


def zeros(t: Type) -> Any:
    """A tile right of the diagonal of a factor, as a jaxpr."""
    return jax.make_jaxpr(lambda: lax.full(t.shape, 0, t.dtype))()


def factorised(e: Equation, left: Type) -> Any:
    """A tile on the diagonal of a factor, as a jaxpr of what is left there."""
    del e
    factor = functools.partial(lax.linalg.cholesky, symmetrize_input=False)
    return jax.make_jaxpr(factor)(left.struct())


def below(e: Equation, diagonal: Type, left: Type) -> Any:
    """Another tile of a factor, as a jaxpr of that on the diagonal above it and of what is
    left there."""
    del e
    solve = functools.partial(
        lax.linalg.triangular_solve,
        left_side=False,
        lower=True,
        transpose_a=True,
        conjugate_a=True,
    )
    return jax.make_jaxpr(solve)(diagonal.struct(), left.struct())


def solved(e: Equation, diagonal: Type, left: Type) -> Any:
    """A tile of what solves a system, as a jaxpr of that on the diagonal of its matrix and
    of what is left of the right side."""
    solve = functools.partial(lax.linalg.triangular_solve, **e.origin.params)
    return jax.make_jaxpr(solve)(diagonal.struct(), left.struct())


def less(e: Equation, left: Type, one: Type, other: Type) -> Any:
    """What is left after one more product, as a jaxpr of what was left before and of two
    tiles: of a factor, each of a row; or of a system's matrix, and of what solves it."""
    params = e.origin.params

    def product(one: Any, other: Any) -> Any:
        if e.name == CHOLESKY:
            return _product(one, _changed(other, True, True))
        one = _changed(one, params["transpose_a"], params["conjugate_a"])
        return _product(one, other) if params["left_side"] else _product(other, one)

    function = lambda left, one, other: left - product(one, other)
    return jax.make_jaxpr(function)(left.struct(), one.struct(), other.struct())


def _product(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _changed(x: Any, transposed: bool, conjugated: bool) -> Any:
    x = jnp.swapaxes(x, -1, -2) if transposed else x
    return jnp.conj(x) if conjugated else x


# -- panels of an LU decomposition ---------------------------------------------------------


def first_order(panel: Type) -> Any:
    """The rows of a panel in the order in which they are, as a jaxpr of nothing; int32."""
    *several, rows, _ = panel.shape
    shape = *several, rows
    return jax.make_jaxpr(lambda: lax.broadcasted_iota(np.int32, shape, len(several)))()


def decomposed(position: Any, panel: Any, order: Any) -> Any:
    """A panel decomposed, the order of its rows with its pivots, and these as
    `lax.linalg.lu` gives them.

    Args:
      position: its first column.
      panel: what is left of it, of shape [rows, width].
      order: which row is at each place, int32 of shape [rows]; those at places before
        `position` were pivots.
    """
    rows, width = panel.shape
    count = rows - position
    order = jnp.roll(order, -position)  # what is decomposed comes first
    is_left = (jnp.arange(rows) < count)[:, None]
    new, pivots, _ = lax.linalg.lu(jnp.where(is_left, panel[order], 0))
    # Where there is a NaN, a row that was a pivot may be taken for one again.
    is_wrong = pivots >= count
    pivots = jnp.where(is_wrong, jnp.arange(width, dtype=pivots.dtype), pivots)
    new = jnp.where(jnp.any(is_wrong), np.nan, new)
    order = order[lax.linalg.lu_pivots_to_permutation(pivots, rows)]
    places = _places(order)
    result = jnp.where((places < count)[:, None], new[places], panel)
    return result, jnp.roll(order, position), pivots + position


def updated(position: Any, left: Any, panel: Any, order: Any) -> Any:
    """What a decomposed panel leaves of another.

    Args:
      position: first column of the decomposed panel.
      left: what is left of the other before, of shape [rows, its width].
      panel: the decomposed one, of shape [rows, width].
      order: which row is at each place, with its pivots; int32 of shape [rows].
    """
    rows, width = panel.shape
    height = min(rows, max(width, _LEAST_ROWS))
    pivots = lax.dynamic_slice_in_dim(order, position, width)
    upper = lax.linalg.triangular_solve(
        panel[pivots], left[pivots], left_side=True, lower=True, unit_diagonal=True
    )
    places = _places(order)

    def block(i: Any, left: Any) -> Any:  # written where it is
        begin = jnp.minimum(i * height, rows - height)
        of_block = lambda x: lax.dynamic_slice_in_dim(x, begin, height)
        changes = of_block(places) >= position + width
        changes &= begin + jnp.arange(height) >= i * height
        before = of_block(left)
        after = before - _product(of_block(panel), upper)
        after = jnp.where(changes[:, None], after, before)
        return lax.dynamic_update_slice_in_dim(left, after, begin, 0)

    left = lax.fori_loop(0, -(-rows // height), block, left)
    return left.at[pivots].set(upper)


# Blocks of fewer rows are done as fast as one of so many.
_LEAST_ROWS = 128
# Each writes its first result over its second operand.
OVER_PANELS = frozenset(f"{_OF_PANELS}{f.__name__}" for f in (decomposed, updated))


def in_tiles(bounds: Sequence[tuple[int, int]]) -> Any:
    """What gives the rows of a decomposed panel in their order, as tiles."""

    def ordered(panel: Any, order: Any) -> Any:
        return tuple(panel[order[begin:end]] for begin, end in bounds)

    return ordered


def of_panel(e: Equation) -> str:
    """The name of what an equation does with panels; of another, ""."""
    name = str(e.origin.params.get("name", ""))
    return name if name.startswith(_OF_PANELS) else ""


def of_panels(function: Any, *types: Type) -> Any:
    """One of the functions above as an equation on operands of these types. Those of
    several matrices have more dimensions, but not the position; the last is the order."""
    axes = tuple(0 if t.shape else None for t in types)
    several = lambda *operands: function(*operands)
    for _ in types[-1].shape[:-1]:
        several = jax.vmap(several, axes)
    several.__name__ = several.__qualname__ = f"{_OF_PANELS}{function.__name__}"
    (eqn,) = jax.make_jaxpr(jax.jit(several))(*(t.struct() for t in types)).jaxpr.eqns
    return eqn


def _places(order: Any) -> Any:
    """The place of each row, of which row is at each place."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
