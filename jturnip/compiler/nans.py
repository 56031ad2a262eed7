"""Which equation made a NaN, for `jax_debug_nans` and `jax_debug_infs`.

JAX looks at what an executable returns. Which of its equations is to blame shows when they
are run again one by one; `jax.jit` does the same.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jturnip import compat
from jturnip.frontend.values import Constant, FlatJaxpr


def blame(
    flat: FlatJaxpr,
    equations: Iterable[int],
    inputs: Sequence[int],
    operands: Sequence[Any],
) -> FloatingPointError:
    """The error for some equations of which one made a NaN or an infinity.

    Args:
      flat: the function.
      equations: those that were run together.
      inputs: the values they read.
      operands: the arrays of these; where some are deleted, no equation is blamed.
    """
    config: Any = jax.config
    asked = [
        (name, bad)
        for name, bad in (("nan", jnp.isnan), ("inf", jnp.isinf))
        if getattr(config, f"jax_debug_{name}s")
    ]
    where = ""
    if not any(isinstance(o, jax.Array) and o.is_deleted() for o in operands):
        with jax.debug_nans(False), jax.debug_infs(False):
            operands = [compat.settled(o, committed=True) for o in operands]
            values = dict(zip(inputs, operands, strict=True))
            where = _first(flat, equations, values, asked)
    return FloatingPointError(where or "invalid value encountered in the function")


def _first(
    flat: FlatJaxpr,
    equations: Iterable[int],
    values: dict[int, Any],
    asked: Sequence[tuple[str, Any]],
) -> str:
    for v, array in flat.constants:
        values.setdefault(v, jnp.asarray(array))
    for e in equations:
        equation = flat.equations[e]
        read = (v.value if isinstance(v, Constant) else values[v] for v in equation.inputs)
        results = equation.bind(list(read))
        for result in results:
            if not jnp.issubdtype(result.dtype, jnp.inexact):
                continue
            for what, bad in asked:
                if bool(bad(result).any()):
                    where = equation.source or "unknown line"
                    return (
                        f"invalid value ({what}) encountered in {equation.name} ({where})"
                    )
        values.update(zip(equation.outputs, results, strict=True))
    return ""
