"""Fourier transforms over several dimensions, one dimension after the other.

XLA does such a transform at once, of which no part can be done without the rest. One over
the last dimension works with each row by itself, the next with each column: either can be
done in parts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jturnip.frontend.values import Type


def one_by_one(eqn: Any, largest: float) -> Any:
    """An `fft` over several dimensions as a jaxpr of ones over a single one, of the same
    operand; None for any other equation, and for one that gives no more than `largest`
    bytes. Source: `jax/_src/lax/fft.py`."""
    if eqn.primitive.name != "fft" or len(eqn.params["fft_lengths"]) < 2:
        return None
    if Type.of(eqn.outvars[0].aval).nbytes <= largest:
        return None
    operand = eqn.invars[0].aval
    kind, lengths = eqn.params["fft_type"], tuple(eqn.params["fft_lengths"])

    def transform(x: Any) -> Any:
        last, *others = reversed(list(zip(range(-len(lengths), 0), lengths, strict=True)))
        if kind == lax.FftType.RFFT:
            x = lax.fft(x, kind, last[1:])
            last, inner = None, lax.FftType.FFT
        else:
            inner = lax.FftType.IFFT if kind == lax.FftType.IRFFT else kind
        for axis, length in others:
            x = jnp.swapaxes(lax.fft(jnp.swapaxes(x, axis, -1), inner, (length,)), axis, -1)
        return x if last is None else lax.fft(x, kind, last[1:])

    struct = jax.ShapeDtypeStruct(operand.shape, operand.dtype)
    return jax.make_jaxpr(transform)(struct)
