"""Numbers of every width, promotion, and the mode of 64 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .registry import Case, area, normal, weights


program = area("dtypes")
_wide = functools.partial(jax.enable_x64, True)


@program(ulps=4)
def bfloat16():
    def fn(x, w):
        y = jnp.tanh(x @ w)
        return y, y @ w, -y.T

    return Case(
        fn, (normal(64, 64).astype(jnp.bfloat16), weights(1)[0].astype(jnp.bfloat16))
    )


@program(ulps=8)
def float16():
    def fn(x, w):
        y = jnp.sin(x @ w)
        return y, y @ w, jnp.finfo(y.dtype).max * y[0]

    return Case(fn, (normal(64, 64).astype(np.float16), weights(1)[0].astype(np.float16)))


@program(context=_wide)
def doubles():
    def fn(x, w, n):
        y = jnp.tanh(x @ w)
        return y @ w, y.sum() * n, jnp.arange(3), n

    return Case(fn, (normal(64, 64, dtype=float), weights(1)[0].astype(float), 3))


@program(context=_wide)
def doubles_beside_singles():
    def fn(x, w):
        return (
            x @ w,
            (x @ x).astype(jnp.float64),
            jnp.float64(1.5) * x,
            lax.iota("int64", 3),
        )

    return Case(fn, (normal(64, 64), weights(1)[0].astype(float)))


@program(context=_wide)
def complex_doubles():
    def fn(z):
        return z @ z, jnp.abs(z), z.T @ z

    return Case(
        fn, (normal(64, 64, dtype=float) + 1j * normal(64, 64, seed=1, dtype=float),)
    )


@program()
def doubles_that_become_singles():
    def fn(x, n):
        return x @ x, n * 2, jnp.asarray(np.float64(2.0)), jnp.arange(4)

    return Case(fn, (normal(64, 64, dtype=float), np.int64(5)))


@program()
def integers_of_every_width():
    def fn(xs):
        return [x @ x for x in xs], [x.sum() for x in xs], xs[0] << 2, ~xs[1]

    base = np.arange(64 * 64).reshape(64, 64) % 5
    kinds = (np.int8, np.uint8, np.int16, np.uint32)
    return Case(fn, ([base.astype(kind) for kind in kinds],))


@program()
def truths():
    def fn(x, y):
        both = (x > 0) & (y > 0)
        return both, both @ both, jnp.all(both, 0), both.sum(), jnp.logical_xor(both, x < 1)

    return Case(fn, (normal(64, 64), normal(64, 64, seed=1)))


@program(ulps=0)
def eight_bit_floats():
    def fn(x, w):
        small = x.astype(jnp.float8_e4m3fn)
        back = small.astype(jnp.float32)
        return small, back @ w * 0 + back, w.astype(jnp.float8_e5m2)

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def eight_bit_floats_as_arguments():
    def fn(x, w):
        return x.astype(jnp.float32) @ w, x, x.T, jnp.abs(x.astype(jnp.bfloat16))

    return Case(fn, (jnp.asarray(normal(64, 64), jnp.float8_e5m2), weights(1)[0]))


@program()
def four_bit_integers():
    def fn(q, scale, x):
        w = q.astype(jnp.float32) * scale
        return x @ w, q, jnp.round(w).astype(jnp.int4)

    q = jnp.arange(64 * 64).reshape(64, 64) % 15 - 7
    return Case(fn, (q.astype(jnp.int4), np.float32(0.1), normal(64, 64)))


@program(needs="jax.numpy.float4_e2m1fn")
def four_bit_floats():
    def fn(x):
        q = x.astype(jnp.float4_e2m1fn)
        return q.astype(jnp.float32) @ x, q.astype(jnp.float32)

    return Case(fn, (normal(64, 64),))


@program()
def a_quantised_product():
    def fn(x, w):
        scale = jnp.abs(w).max(0) / 127
        q = jnp.round(w / scale).astype(jnp.int8)
        y = lax.dot(x, q, preferred_element_type=jnp.int32)
        return y * scale, q

    return Case(fn, ((normal(64, 64) * 20).astype(np.int8), weights(1)[0]))


@program()
def bits_reinterpreted():
    def fn(x):
        bits = lax.bitcast_convert_type(x @ x * 0 + x, jnp.uint32)
        halves = lax.bitcast_convert_type(x, jnp.uint16)
        return bits >> 23, halves, (x * 2).view(jnp.int32), lax.population_count(bits)

    return Case(fn, (normal(64, 64),))


@program()
def promotion():
    def fn(i, h, f, c):
        return i + h, h * f, f @ f - i, c * i, i / 2, i // 2, h + 1.0, i + 1

    return Case(
        fn,
        (
            np.ones((64, 64), np.int8),
            jnp.ones((64, 64), jnp.bfloat16),
            normal(64, 64),
            np.complex64(1j),
        ),
    )


@program(context=functools.partial(jax.numpy_dtype_promotion, "strict"))
def strict_promotion():
    def fn(x, n):
        return x @ x * 2, x + n, jnp.sum(x, 0)

    return Case(fn, (normal(64, 64), np.float32(2)))


@program(context=functools.partial(jax.default_matmul_precision, "highest"))
def the_precision_of_products_from_the_context():
    return Case(lambda x, w: jnp.tanh(x @ w) @ w, (normal(64, 64), weights(1)[0]))


@program()
def numbers_that_are_not():
    def fn(x):
        z = jnp.sqrt(x) + jnp.log(x) / 0
        return z, jnp.nan_to_num(z) @ x, jnp.isnan(z), jnp.nanmax(jnp.sqrt(x), 0), x / 0

    return Case(fn, (normal(64, 64),))
