"""Which equation made a NaN, for `jax_debug_nans` and `jax_debug_infs`.

JAX looks at what an executable returns. Which of its equations is to blame shows when they
are run again one by one; `jax.jit` does the same.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jturnip import compat
from jturnip.frontend.values import Constant, FlatJaxpr


# Names of what is looked for, with what finds it.
Kinds: TypeAlias = tuple[tuple[str, Callable[[Any], Any]], ...]


def looked_for() -> Kinds:
    """What the user wants to hear of."""
    config: Any = jax.config
    kinds = (("nan", jnp.isnan), ("inf", jnp.isinf))
    return tuple((k, bad) for k, bad in kinds if getattr(config, f"jax_debug_{k}s"))


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """While this lasts, JAX looks for nothing."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def is_bad(array: Any, kinds: Kinds) -> bool:
    """Whether an array has one of these in it."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return False
    with unheard():
        array = compat.settled(array, committed=True)
        return any(bool(bad(array).any()) for _, bad in kinds)


def blame(
    flat: FlatJaxpr,
    equations: Iterable[int],
    inputs: Sequence[int],
    operands: Sequence[Any],
    kinds: Kinds,
) -> FloatingPointError:
    """The error for some equations of which one made a NaN or an infinity.

    Args:
      flat: the function.
      equations: those that were run together.
      inputs: the values they read.
      operands: the arrays of these; where some are deleted, no equation is blamed.
      kinds: what was looked for.
    """
    where = ""
    if not any(isinstance(o, jax.Array) and o.is_deleted() for o in operands):
        with unheard():
            operands = [compat.settled(o, committed=True) for o in operands]
            values = dict(zip(inputs, operands, strict=True))
            where = _first(flat, equations, values, kinds)
    return FloatingPointError(where or "invalid value encountered in the function")


def _first(
    flat: FlatJaxpr,
    equations: Iterable[int],
    values: dict[int, Any],
    kinds: Kinds,
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
            for what, bad in kinds:
                if bool(bad(result).any()):
                    where = equation.source or "unknown line"
                    return (
                        f"invalid value ({what}) encountered in {equation.name} ({where})"
                    )
        values.update(zip(equation.outputs, results, strict=True))
    return ""
