"""A pass: the largest numbers of long rows, by blocks of these.

`top_k`, `argmax` and `argmin` read all of a row at once; a batch of rows can be cut. The
largest of a row are among the largest of blocks of it. What comes first of equal ones stays
first.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jturnip.frontend.results import with_others
from jturnip.frontend.sorting import has_positions
from jturnip.frontend.values import Equation, FlatJaxpr, Type, bind


TOP_K = "top_k"
_EXTREMES: dict[str, Callable[..., Any]] = {"argmax": jnp.max, "argmin": jnp.min}
# A row that takes this share of what there is does not fit with what is made of it.
_LONG = 1 / 4
# Of rows so many times as long as what is wanted of them, less is left over by blocks.
_TIMES = 4


def largest_as_blocks(flat: FlatJaxpr, arena: int) -> FlatJaxpr:
    """The function with the largest of its long rows found among those of blocks."""
    found = [
        (e.inputs, _of_blocks(e, flat.operand_types(e)[0]))
        if _is_done_by_blocks(e, flat, arena)
        else None
        for e in flat.equations
    ]
    return with_others(flat, found)


def _dim(e: Equation, t: Type) -> int | None:
    """Along which dimension; None where it is along several."""
    if e.name == TOP_K:
        return e.origin.params.get("axis", -1) % len(t.shape)
    axes = e.origin.params["axes"]
    return axes[0] if len(axes) == 1 else None


def _is_done_by_blocks(e: Equation, flat: FlatJaxpr, arena: int) -> bool:
    if e.name != TOP_K and e.name not in _EXTREMES:
        return False
    t = flat.operand_types(e)[0]
    dim = _dim(e, t)
    if dim is None:
        return False
    n, k = t.shape[dim], e.origin.params.get("k", 1)
    if not has_positions(flat.types[e.outputs[-1]].dtype, n):
        return False
    return n * t.dtype.itemsize > arena * _LONG and 0 < k * _TIMES <= n


def _of_blocks(e: Equation, t: Type) -> Any:
    """The largest of rows by blocks, as a jaxpr; what fills no block is by itself."""
    dim = _dim(e, t)
    assert dim is not None
    n, k = t.shape[dim], e.origin.params.get("k", 1)
    length = max(2 * k, math.isqrt(n * k))
    count = n // length
    rest = n - count * length
    before, after = t.shape[:dim], t.shape[dim + 1 :]

    def function(x: Any) -> Any:
        cut = lambda a, b: lax.slice_in_dim(x, a, b, axis=dim)
        blocks = lax.reshape(cut(rest, n), (*before, count, length, *after))
        values, places = _largest(e, blocks, dim + 1)
        places += rest + length * lax.broadcasted_iota(places.dtype, places.shape, dim)
        first = cut(0, rest)
        numbers = lax.broadcasted_iota(places.dtype, first.shape, dim)
        together = lambda each: lax.reshape(each, (*before, count * k, *after))
        values = lax.concatenate([first, together(values)], dim)
        places = lax.concatenate([numbers, together(places)], dim)
        found, which = _largest(e, values, dim)
        places = jnp.take_along_axis(places, which, axis=dim, mode="promise_in_bounds")
        return (found, places) if e.name == TOP_K else (jnp.squeeze(places, dim),)

    return jax.make_jaxpr(function)(t.struct())


def _largest(e: Equation, x: Any, dim: int) -> tuple[Any, Any]:
    """The largest along a dimension, and where they are; as long as what is wanted."""
    if e.name == TOP_K:
        axis = {"axis": dim} if "axis" in e.origin.params else {}
        values, places = bind(e.origin, (x,), **axis)
        return values, places
    (places,) = bind(e.origin, (x,), axes=(dim,))
    return (
        _EXTREMES[e.name](x, axis=dim, keepdims=True),
        lax.expand_dims(places, (dim,)),
    )
