"""Fourier transforms over several dimensions, one dimension after the other, and those of
long rows as ones over two dimensions.

XLA does such a transform at once, of which no part can be done without the rest. One over
the last dimension works with each row by itself, the next with each column: either can be
done in parts. A row of a·b numbers is seen as a rows of b: its transform is one over the
columns, numbers of modulus one times that, and one over the rows (W. M. Gentleman,
G. Sande, Fast Fourier transforms: for fun and profit, AFIPS 1966).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jturnip.frontend.values import Type


# What has no divisor from this to its root stays one row; so does what is so long that its
# quarters have no numbers in 32 bits.
_LEAST_ROWS = 8
_MOST_NUMBERS = 2**29


def one_by_one(eqn: Any, largest: float) -> Any:
    """An `fft` as a jaxpr of ones over a single dimension each, of the same operand: of
    several dimensions, or of one with rows of more than `largest` bytes. None for any other
    equation, and for one that gives no more than `largest` bytes in all. Source:
    `jax/_src/lax/fft.py`."""
    if eqn.primitive.name != "fft":
        return None
    result = Type.of(eqn.outvars[0].aval)
    if result.nbytes <= largest:
        return None
    kind, lengths = eqn.params["fft_type"], tuple(eqn.params["fft_lengths"])
    operand = eqn.invars[0].aval
    struct = jax.ShapeDtypeStruct(operand.shape, operand.dtype)
    if len(lengths) == 1:
        n = lengths[0]
        long = n * np.result_type(result.dtype, np.complex64).itemsize > largest
        rows = _rows(n) if long and kind != lax.FftType.IRFFT else 0
        return jax.make_jaxpr(lambda x: _of_rows(x, kind, rows))(struct) if rows else None
    if not lengths:
        return None

    def transform(x: Any) -> Any:
        last, *others = reversed(list(zip(range(-len(lengths), 0), lengths, strict=True)))
        if kind == lax.FftType.RFFT:
            x = lax.fft(x, kind, last[1:])
            last, inner = None, lax.FftType.FFT
        else:
            inner = lax.FftType.IFFT if kind == lax.FftType.IRFFT else kind
        for axis, length in others:
            x = _over(x, inner, length, axis)
        return x if last is None else lax.fft(x, kind, last[1:])

    return jax.make_jaxpr(transform)(struct)


def _over(x: Any, kind: Any, length: int, axis: int) -> Any:
    """A transform over one dimension."""
    return jnp.swapaxes(lax.fft(jnp.swapaxes(x, axis, -1), kind, (length,)), axis, -1)


def _rows(n: int) -> int:
    """As how many rows one of `n` numbers is seen; 0 where it cannot be."""
    if n >= _MOST_NUMBERS:
        return 0
    rows = next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0)
    return rows if rows >= _LEAST_ROWS else 0


def _of_rows(x: Any, kind: Any, rows: int) -> Any:
    """A transform of rows that are each seen as several."""
    n = x.shape[-1]
    is_real = kind == lax.FftType.RFFT
    inner = lax.FftType.FFT if is_real else kind
    if is_real:
        x = lax.complex(x, lax.full_like(x, 0))
    x = lax.reshape(x, (*x.shape[:-1], rows, n // rows))
    x = _over(x, inner, rows, -2)
    turns = _turns(rows, n // rows, x.dtype, inner == lax.FftType.FFT)
    x = x * jnp.broadcast_to(turns, x.shape)
    x = lax.fft(x, inner, (n // rows,))
    x = lax.reshape(jnp.swapaxes(x, -1, -2), (*x.shape[:-2], n))
    return lax.slice_in_dim(x, 0, n // 2 + 1, axis=x.ndim - 1) if is_real else x


def _turns(rows: int, columns: int, dtype: Any, forward: bool) -> Any:
    """exp(∓2πi·row·column/n), of all n = rows·columns: quarters of a turn are exact, and
    what is left is small, so that it is as exact as its dtype."""
    n, real = rows * columns, np.finfo(dtype).dtype
    shape = rows, columns
    number = lax.broadcasted_iota(np.int32, shape, 0) * lax.broadcasted_iota(
        np.int32, shape, 1
    )
    quarters = jnp.round(number.astype(real) * (4 / n)).astype(np.int32)
    # In units of a turn over 4n: `_MOST_NUMBERS` keeps both below 2**31.
    left = 4 * number - quarters * n
    angle = left.astype(real) * real.type(np.pi / 2 / n)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    odd, back = quarters % 2 == 1, quarters % 4 >= 2
    cos, sin = jnp.where(odd, -sin, cos), jnp.where(odd, cos, sin)
    cos, sin = jnp.where(back, -cos, cos), jnp.where(back, -sin, sin)
    return lax.complex(cos, -sin if forward else sin)
