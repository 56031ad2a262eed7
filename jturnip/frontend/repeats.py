"""A pass: images that are enlarged by whole numbers, as broadcasts.

`jax.image.resize` to the nearest pixel reads each row several times, by numbers that it
computes: of a gather it is only known that it may read any row. Where these numbers depend
on nothing, they are known here, and what is read again and again is spread instead, which
can be done in parts. The gradients add up what was spread.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from jturnip.frontend.known import known
from jturnip.frontend.results import with_others
from jturnip.frontend.values import Atom, Equation, FlatJaxpr


# What takes less than this share of what there is stays as it is.
_LARGE = 1 / 16


def repeated(flat: FlatJaxpr, arena: int) -> FlatJaxpr:
    """The function with large gathers of each row so many times in turn, and the sums that
    are their gradients, as broadcasts and sums; itself where there are none."""
    written = {v: e for e in flat.equations for v in e.outputs}
    found = [
        _instead(e, flat, written) if _is_large(e, flat, arena * _LARGE) else None
        for e in flat.equations
    ]
    return with_others(flat, found)


def _is_large(e: Equation, flat: FlatJaxpr, least: float) -> bool:
    if e.name not in ("gather", "scatter-add"):
        return False
    types = [*flat.operand_types(e), *(flat.types[v] for v in e.outputs)]
    return max(t.nbytes for t in types) > least


def _instead(
    e: Equation, flat: FlatJaxpr, written: Mapping[int, Equation]
) -> tuple[tuple[Atom, ...], Any] | None:
    """What is read, and a jaxpr of that, for a gather or a sum of rows that come so many
    times in turn."""
    numbers = e.origin.params["dimension_numbers"]
    types = flat.operand_types(e)
    few = types[0]
    if e.name == "gather":
        many = flat.types[e.outputs[0]]
        read, rows = numbers.start_index_map, numbers.collapsed_slice_dims
        others = numbers.offset_dims
    else:
        many = types[2]
        read, rows = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
        others = numbers.update_window_dims
    if numbers.operand_batching_dims or read != rows or len(rows) != 1:
        return None
    (dim,) = rows
    if len(many.shape) != len(few.shape):
        return None
    times, rest = divmod(many.shape[dim], few.shape[dim]) if few.shape[dim] else (0, 1)
    expected = (*few.shape[:dim], many.shape[dim], *few.shape[dim + 1 :])
    if rest or many.shape != expected or types[1].shape != (many.shape[dim], 1):
        return None
    if tuple(others) != tuple(d for d in range(len(few.shape)) if d != dim):
        return None
    wanted = np.repeat(np.arange(few.shape[dim]), times)
    read_rows = known(e.inputs[1], flat, written)
    if read_rows is None or not np.array_equal(read_rows, wanted[:, None]):
        return None
    shape = (*few.shape[: dim + 1], times, *few.shape[dim + 1 :])
    if e.name == "gather":
        kept = [d for d in range(len(shape)) if d != dim + 1]
        spread = lambda x: lax.reshape(lax.broadcast_in_dim(x, shape, kept), many.shape)
        return e.inputs[:1], jax.make_jaxpr(spread)(few.struct())
    zero = np.zeros((), few.dtype)

    def summed(x: Any, rows: Any) -> Any:
        return x + lax.reduce(lax.reshape(rows, shape), zero, lax.add, (dim + 1,))

    both = few.struct(), many.struct()
    return (e.inputs[0], e.inputs[2]), jax.make_jaxpr(summed)(*both)
