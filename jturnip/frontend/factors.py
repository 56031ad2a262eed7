"""Cholesky factors and triangular systems in tiles: what is done with a tile, and in which
order.

A tile of a factor is that of the matrix, less products of tiles that are left of it, and
then factorised, or solved with the one on the diagonal: the left-looking algorithm of
LAPACK's `potrf` (G. H. Golub, C. F. Van Loan, Matrix Computations, section 4.2.6). A tile
of what solves a system is that of the right side, less products with tiles that are solved
already (section 3.1.4). XLA does either at once, of the whole matrix.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jturnip.frontend.rules import Rule
from jturnip.frontend.values import Equation, FlatJaxpr, Type


CHOLESKY = "cholesky"
# What is made of tiles that are made before.
IN_ORDER = frozenset([CHOLESKY, "triangular_solve"])
# Labels: of a matrix that is factorised; and of the right side of a system, along what is
# solved one after the other and along what is not.
ROW, COLUMN, FREE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class InOrder(Rule):
    """Labels of what is made of tiles that are made before."""


def has_factors(flat: FlatJaxpr, least: int) -> bool:
    """Whether matrices of more than so many bytes are factorised, or solved with."""
    return any(
        e.name in IN_ORDER and flat.operand_types(e)[0].nbytes > least
        for e in flat.equations
    )


def rule_in_order(e: Equation, types: Sequence[Type]) -> InOrder:
    """The labels of a factorisation or of a system, of operands of these types."""
    several = (None,) * (len(types[-1].shape) - 2)
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
