"""Arrays of many short dimensions, as the states of qubits are; and a pass for them.

A number that is set in such an array becomes a choice between it and the array. A scatter
can be cut along one of the dimensions that its indices name, but not along some of them at
once; what is done with each number by itself can be cut along all. Most simulations of
qubits begin so: with zeros, and a one.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from jturnip.frontend.results import with_others
from jturnip.frontend.values import Equation, FlatJaxpr, Type


# Arrays of so many dimensions of no more than so many positions are cut along some of
# these, into single positions.
_MANY = 6
SHORT = 4
_SET, _ADD = "scatter", "scatter-add"


def has_short_dims(t: Type) -> bool:
    """Whether an array has many short dimensions, and no long one."""
    return sum(n > 1 for n in t.shape) >= _MANY and max(t.shape) <= SHORT


def points_as_choices(flat: FlatJaxpr, least: int) -> FlatJaxpr:
    """The function with numbers set in arrays of more than so many bytes, and of many short
    dimensions, where the array has their positions."""
    found = []
    for e in flat.equations:
        types = flat.operand_types(e)
        is_one = e.name in (_SET, _ADD) and _sets_one(e, types, least)
        found.append((e.inputs, _chosen(e, types)) if is_one else None)
    return with_others(flat, found)


def _sets_one(e: Equation, types: Sequence[Type], least: int) -> bool:
    """Whether a scatter sets, or adds to, one number of a large array."""
    x, indices, updates = types
    numbers = e.origin.params["dimension_numbers"]
    return (
        x.nbytes > least
        and has_short_dims(x)
        and updates.shape.count(1) == len(updates.shape)
        and indices.shape.count(1) >= len(indices.shape) - 1
        and not numbers.operand_batching_dims
        and max(x.shape) <= jnp.iinfo(indices.dtype).max
    )


def _chosen(e: Equation, types: Sequence[Type]) -> Any:
    """The same by a comparison of each position, as a jaxpr."""
    dims = e.origin.params["dimension_numbers"].scatter_dims_to_operand_dims
    clips = e.origin.params["mode"] == GatherScatterMode.CLIP

    def function(x: Any, indices: Any, updates: Any) -> Any:
        indices, new = lax.reshape(indices, (len(dims),)), lax.reshape(updates, ())
        at = [jnp.zeros((), indices.dtype)] * x.ndim
        for column, d in enumerate(dims):
            index = indices[column]
            at[d] = jnp.clip(index, 0, x.shape[d] - 1) if clips else index
        is_there = jnp.ones((), bool)
        for d, index in enumerate(at):
            is_there &= lax.broadcasted_iota(indices.dtype, x.shape, d) == index
        new = x + new if e.name == _ADD else lax.broadcast(new, x.shape)
        return lax.select(is_there, new, x)

    return jax.make_jaxpr(function)(*(t.struct() for t in types))
