"""A pass: running sums of long rows, as running sums of blocks of these.

A running sum can be cut along other rows only. A row that is itself too large is seen as
blocks side by side: a running sum is that of a block, and what all blocks before it give.
Blocks are independent, and what they give is little.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jturnip.frontend import parts
from jturnip.frontend.results import with_others
from jturnip.frontend.values import Equation, FlatJaxpr, Type, bind


# How what blocks give is combined.
_COMBINED = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}
# Into so many blocks a row is cut: as many as there may be.
_FEWEST, _MOST = 8, 1024
# A row that takes this share of what there is does not fit with its result, and with what
# XLA writes down between them.
_LONG = 1 / 4


def rows_as_blocks(flat: FlatJaxpr, arena: int) -> FlatJaxpr:
    """The function with its long running sums made of those of blocks."""
    found = [
        (e.inputs, _of_blocks(e, flat.operand_types(e)[0], count))
        if (count := _blocks(e, flat, arena))
        else None
        for e in flat.equations
    ]
    return with_others(flat, found)


def _blocks(e: Equation, flat: FlatJaxpr, arena: int) -> int:
    """How many blocks of one length a row is made of; 0 for one that stays as it is."""
    if e.name not in _COMBINED:
        return 0
    t, axis = flat.operand_types(e)[0], e.origin.params["axis"]
    n = t.shape[axis]
    # Sums of 16-bit numbers are rounded at each step: there the order would be seen.
    narrow = jnp.issubdtype(t.dtype, jnp.floating) and t.dtype.itemsize < 4
    if n * t.dtype.itemsize <= arena * _LONG or narrow:
        return 0
    return next((k for k in range(_MOST, _FEWEST - 1, -1) if n % k == 0), 0)


def _of_blocks(e: Equation, t: Type, count: int) -> Any:
    """A running sum by blocks, as a jaxpr."""
    axis, reverse = e.origin.params["axis"], e.origin.params["reverse"]
    length, how = t.shape[axis] // count, _COMBINED[e.name]
    none = parts.nothing(how, Type((), t.dtype))

    def function(x: Any) -> Any:
        shape = *x.shape[:axis], count, length, *x.shape[axis + 1 :]
        blocks = lax.reshape(x, shape)
        each = lax.reduce(blocks, none, parts.COMBINE[how], (axis + 1,))
        (upto,) = bind(e.origin, (each,))
        # Of those before it: the first has none.
        moved = [(0, 0, 0)] * each.ndim
        moved[axis] = (-1, 1, 0) if reverse else (1, -1, 0)
        before = lax.expand_dims(lax.pad(upto, none, moved), (axis + 1,))
        (inside,) = bind(e.origin, (blocks,), axis=axis + 1)
        before = lax.broadcast_in_dim(before, shape, tuple(range(len(shape))))
        return lax.reshape(parts.COMBINE[how](before, inside), x.shape)

    return jax.make_jaxpr(function)(t.struct())
