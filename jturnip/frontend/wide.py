"""Functions of which a part is in 64 bits, in a process of 32.

`jax.enable_x64` holds for what is traced within it, and so a function of 32 bits may have
values of 64. JAX makes 32 bits of such types wherever it meets them outside: in structs, in
new traces, in arguments of executables. So what is done with such a function is done with
64 bits enabled; each of its equations still has the types that it was traced with.
"""

import contextlib
from typing import Any

import jax
import numpy as np

from jturnip.frontend.hints import nested
from jturnip.frontend.values import Type, needs_x64


def has_wide_parts(closed: Any) -> bool:
    """Whether a jaxpr has values of 64 bits at any depth: where it is traced with 64 bits
    enabled, it may be compiled and run without."""
    found = set[Any]()
    _add_dtypes(closed, found)
    with jax.enable_x64(False):
        return needs_x64(Type((), dtype) for dtype in found if isinstance(dtype, np.dtype))


def _add_dtypes(closed: Any, found: set[Any]) -> None:
    jaxpr = getattr(closed, "jaxpr", closed)
    written = (v for eqn in jaxpr.eqns for v in eqn.outvars)
    for v in (*jaxpr.invars, *jaxpr.constvars, *written):
        found.add(getattr(v.aval, "dtype", None))
    for eqn in jaxpr.eqns:
        for inner in nested(eqn):
            _add_dtypes(inner, found)


def types_as_traced(has_wide_parts: bool) -> contextlib.AbstractContextManager[None]:
    """Within it, values have the types that they were traced with."""
    return jax.enable_x64(True) if has_wide_parts else contextlib.nullcontext()


def as_traced(leaf: Any) -> Any:
    """An argument of a call as it is traced: of numpy's types as JAX has them now.

    Raises:
      OverflowError: an `int` is larger than that.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if isinstance(leaf, int):  # which is not to be cut off
        return np.asarray(leaf, dtype)
    return array.astype(dtype, copy=False)
