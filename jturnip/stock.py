"""What stock `jax.jit` needs for a function, to compare a budget with."""

import types
from collections.abc import Callable
from typing import Any

import jax

from jturnip import compat
from jturnip.api import Wrapped
from jturnip.stages import anywhere


def peak_bytes(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> int:
    """Device bytes that stock `jax.jit` needs for a call of `fn`, by XLA's own analysis.

    Arguments, results and temporaries, less the results that take the memory of donated
    arguments; arrays that `fn` closes over are not counted. Compiles the whole function and
    allocates no arrays: any argument may be a `jax.ShapeDtypeStruct`, and is taken to be on
    the device wherever it lies. The figure is that of the backend at hand: the compiler of
    another one fuses otherwise, and needs other temporaries.

    Args:
      fn: a function, one that `jax.jit` made, or one that `jturnip.jit` made, whose static
        and donated arguments then count.
      args, kwargs: arguments, or structs like them.

    Returns:
      Bytes.
    """
    if isinstance(fn, types.MethodType) and isinstance(fn.__func__, Wrapped):
        args, fn = (fn.__self__, *args), fn.__func__
    if isinstance(fn, Wrapped):  # what it gives for export is one executable
        lowered = fn.trace(*args, **kwargs).lower(lowering_platforms=None)
        return executable_bytes(lowered.compile())
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    args, kwargs = jax.tree.map(lambda leaf: anywhere([leaf])[0], (args, kwargs))
    with compat.tracing():
        return executable_bytes(jitted.lower(*args, **kwargs).compile())


def executable_bytes(compiled: Any) -> int:
    """The device bytes that a `jax.stages.Compiled` needs, arguments and results included,
    by XLA's own analysis."""
    sizes = compiled.memory_analysis()
    arguments_and_outputs = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    return arguments_and_outputs - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
