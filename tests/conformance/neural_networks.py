"""What networks are made of: jax.nn, convolutions, attention, optimizers."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .registry import Case, area, normal, weights


program = area("neural networks")


@program()
def activations():
    def fn(x, w):
        y = x @ w
        kinds = jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.elu, jax.nn.softplus
        return [kind(y) @ w for kind in kinds]

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def one_hot_and_cross_entropy():
    def fn(w, x, labels):
        def loss(w):
            picked = jax.nn.one_hot(labels, 64) * jax.nn.log_softmax(x @ w)
            return -picked.sum() / 64

        return jax.value_and_grad(loss)(w), jax.nn.one_hot(labels - 5, 10, dtype=jnp.int8)

    return Case(fn, (weights(1)[0], normal(64, 64), jnp.arange(64)))


@program()
def attention_by_hand():
    def fn(x, q, k, v):
        q, k, v = (jnp.reshape(x @ w, (64, 4, 16)) for w in (q, k, v))
        scores = jnp.einsum("ihd,jhd->hij", q, k) / 4
        seen = jnp.tril(jnp.ones((64, 64), bool))
        weights_ = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("hij,jhd->ihd", weights_, v)

    return Case(fn, (normal(64, 64), *weights(3)))


@program()
def attention_of_jax_nn():
    def fn(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), q.sum(0) @ k[
            0, :, 0
        ].T

    return Case(fn, tuple(normal(1, 32, 2, 16, seed=s) for s in range(3)))


@program(thorough=True)
def a_convolutional_network():
    def fn(images, first, second):
        def conv(x, k):
            return lax.conv_general_dilated(
                x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )

        return conv(jax.nn.relu(conv(images, first)), second).mean((1, 2))

    return Case(fn, (normal(4, 32, 32, 8), normal(3, 3, 8, 16), normal(3, 3, 16, 8)))


@program()
def a_gradient_of_a_convolution():
    def fn(x, k):
        f = lambda k, x: jnp.sum(lax.conv(x, k, (1, 1), "VALID") ** 2)
        return jax.grad(f, (0, 1))(k, x)

    return Case(fn, (normal(2, 4, 16, 16), normal(8, 4, 3, 3, seed=1)))


@program()
def pooling_and_its_gradient():
    def fn(x):
        pool = lambda x: lax.reduce_window(
            x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
        return pool(x), jax.grad(lambda x: jnp.sum(pool(x) ** 2))(x)

    return Case(fn, (normal(4, 16, 16, 8),))


@program()
def an_embedding_and_its_gradient():
    def fn(table, tokens, w):
        f = lambda table: jnp.sum(jnp.tanh(table[tokens] @ w))
        return jax.value_and_grad(f)(table)

    return Case(fn, (normal(100, 64), jnp.arange(50) % 7, weights(1)[0]))


@program()
def dropout():
    def fn(key, x, w):
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.where(kept, x / 0.9, 0) @ w

    return Case(fn, (jax.random.key(3), normal(64, 64), weights(1)[0]))


@program()
def a_gradient_of_a_recurrent_network():
    def fn(w, u, xs):
        def loss(w, u):
            step = lambda h, x: (jnp.tanh(h @ w + x @ u), None)
            return lax.scan(step, jnp.zeros(64), xs)[0].sum()

        return jax.grad(loss, (0, 1))(w, u)

    return Case(fn, (*weights(2), normal(12, 64)))


@program(thorough=True)
def a_step_of_adam():
    def fn(params, moments, count, x):
        loss = lambda p: jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), p, x) ** 2)
        grads = jax.grad(loss)(params)
        count = count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, moments[1], grads)
        rate = 0.1 * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
        step = lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-3)
        return jax.tree.map(step, params, first, second), (first, second), count

    params = weights(3)
    moments = ([normal(64, 64, seed=5) / 9] * 3, [1 + normal(64, 64, seed=6) ** 2] * 3)
    return Case(fn, (params, moments, 3, normal(64, 64)))


@program()
def mixed_precision():
    def fn(params, x):
        def loss(params):
            h = x.astype(jnp.bfloat16)
            for w in params:
                h = jax.nn.relu(h @ w.astype(jnp.bfloat16))
            return jnp.mean(h.astype(jnp.float32) ** 2) * 128

        value, grads = jax.value_and_grad(loss)(params)
        return value / 128, [g / 128 for g in grads]

    return Case(fn, (weights(3), normal(64, 64)))


@program(long=True)
def a_ragged_product():
    def fn(x, experts, sizes):
        return lax.ragged_dot(x, experts, sizes) @ experts[0], x.sum(0)

    return Case(fn, (normal(64, 32), normal(4, 32, 32, seed=1), jnp.array([10, 0, 30, 24])))


@program()
def flash_attention_by_a_scan():
    def fn(q, k, v):
        def block(carry, kv):
            best, total, out = carry
            scores = q @ kv[0].T / 8
            highest = jnp.maximum(best, scores.max(1))
            p, shrink = jnp.exp(scores - highest[:, None]), jnp.exp(best - highest)
            total, out = total * shrink + p.sum(1), out * shrink[:, None] + p @ kv[1]
            return (highest, total, out), None

        start = jnp.full(64, -jnp.inf), jnp.zeros(64), jnp.zeros((64, 64))
        blocks = k.reshape(4, 16, 64), v.reshape(4, 16, 64)
        (_, total, out), _ = lax.scan(block, start, blocks)
        return out / total[:, None]

    return Case(fn, tuple(normal(64, 64, seed=s) for s in range(3)))
