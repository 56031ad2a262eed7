"""Flat functions, and what they give."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jturnip.frontend.flatten import flatten
from jturnip.frontend.values import Constant, FlatJaxpr, Parts


def flat_of(fn: Callable[..., Any], *args: Any, forwarded: Sequence[int] = ()) -> FlatJaxpr:
    """A function of these arguments as the passes see it."""
    return flatten(jax.jit(fn).trace(*args).jaxpr, forwarded)


def evaluated(flat: FlatJaxpr, *args: Any) -> list[Any]:
    """What a flat function gives, without any planning."""

    def run(args: Any) -> list[Any]:
        values = _values(flat, args)
        return [
            together(o, values) if isinstance(o, Parts) else values[o] for o in flat.outputs
        ]

    return jax.jit(run)(args)


def all_values(flat: FlatJaxpr, *args: Any) -> dict[int, Any]:
    """All that a flat function reads and makes."""
    return jax.jit(lambda args: _values(flat, args))(args)


def _values(flat: FlatJaxpr, args: Sequence[Any]) -> dict[int, Any]:
    values = dict(zip(flat.inputs, args, strict=True))
    values.update(flat.constants)
    for s in flat.slices:
        values[s.value] = values[s.source][s.window.index]
    for e in flat.equations:
        read = [v.value if isinstance(v, Constant) else values[v] for v in e.inputs]
        for v, x in zip(e.outputs, e.bind(read), strict=True):
            assert (x.shape, x.dtype) == (flat.types[v].shape, flat.types[v].dtype)
            values[v] = x
    return values


def together(parts: Parts, values: Mapping[int, Any]) -> Any:
    """A result that is left in parts; what none of them is stays a number that is wrong."""
    whole = jnp.full(parts.type.shape, 77, parts.type.dtype)
    for v, window in zip(parts.values, parts.windows, strict=True):
        whole = whole.at[window.index].set(values[v])
    return whole
