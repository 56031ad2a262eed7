"""A pass: QR and singular value decompositions of tall matrices, by blocks of their rows.

A decomposition reads all of its matrix at once; a batch of them can be cut. A tall matrix
is seen as a batch of blocks of its rows, and what is decomposed then are their triangles,
one below the other (J. Demmel, L. Grigori, M. Hoemmen, J. Langou, Communication-optimal
parallel and sequential QR and LU factorizations, SIAM J. Sci. Comput. 34, 2012). The first
block stays as it is, on top of them: signs are by its diagonal, as LAPACK's. Singular
values are those of the last triangle, as LAPACK has it for tall matrices (`gesdd`), and of
a wide matrix what a tall one has, turned over.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jturnip.frontend.results import with_others
from jturnip.frontend.values import Equation, FlatJaxpr, Type, bind


QR, SVD = "qr", "svd"
# A matrix that takes this share of what there is does not fit with its results, and with
# what LAPACK works in.
_LARGE = 1 / 4
# What is so many times as tall as wide has triangles that are less than itself.
_TALL = 3


def tall_as_blocks(flat: FlatJaxpr, arena: int) -> FlatJaxpr:
    """The function with its large and tall matrices decomposed by blocks, and so what is
    then made of their triangles, where that is large too."""
    while True:
        found = [
            (e.inputs, _of_blocks(e, flat.operand_types(e)[0]))
            if _is_done_by_blocks(e, flat, arena)
            else None
            for e in flat.equations
        ]
        if not any(found):
            return flat
        flat = with_others(flat, found)


def _is_done_by_blocks(e: Equation, flat: FlatJaxpr, arena: int) -> bool:
    if e.name not in (QR, SVD):
        return False
    t, params = flat.operand_types(e)[0], e.origin.params
    if e.name == QR:
        is_plain = not params["full_matrices"] and not params.get("pivoting")
    else:
        is_plain = not (params["full_matrices"] and params["compute_uv"])
        is_plain = is_plain and params.get("subset_by_index") is None
    if len(t.shape) != 2 or not is_plain or t.nbytes <= arena * _LARGE:
        return False
    rows, columns = t.shape if e.name == QR else sorted(t.shape, reverse=True)
    return 0 < columns * _TALL <= rows


def _of_blocks(e: Equation, t: Type) -> Any:
    """A decomposition by blocks, as a jaxpr."""

    def function(x: Any) -> Any:
        if e.name == QR:
            return _qr(x)
        is_wide = x.shape[0] < x.shape[1]
        triangle, times = _triangle(x.conj().T if is_wide else x)
        if is_wide:
            triangle = triangle.conj().T
        values, *vectors = bind(e.origin, (triangle,))
        if not vectors:
            return [values]
        left, right = vectors
        if is_wide:
            return values, left, times(right.conj().T).conj().T
        return values, times(left), right

    return jax.make_jaxpr(function)(t.struct())


def _qr(x: Any) -> tuple[Any, Any]:
    triangle, times = _triangle(x)
    return times(None), triangle


def _triangle(x: Any) -> tuple[Any, Any]:
    """The triangle of a tall matrix, and what multiplies what is orthogonal in it with a
    square matrix, or with nothing."""
    rows, columns = x.shape
    # So long that blocks and all of their triangles take about as much.
    length = max(2 * columns, math.isqrt(rows * columns))
    count = (rows - columns) // length
    first = rows - count * length
    blocks = lax.reshape(x[first:], (count, length, columns))
    inside, triangles = lax.linalg.qr(blocks, full_matrices=False)
    below = lax.reshape(triangles, (count * columns, columns))
    outside, triangle = lax.linalg.qr(
        jnp.concatenate([x[:first], below]), full_matrices=False
    )

    def times(square: Any) -> Any:
        product = lambda a, b: jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
        new = outside if square is None else product(outside, square)
        each = lax.reshape(new[first:], (count, columns, columns))
        below = lax.reshape(product(inside, each), (count * length, columns))
        return jnp.concatenate([new[:first], below])

    return triangle, times
