"""Derivatives of every kind, taken inside the function; custom rules; checkpoints."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .registry import Case, area, normal, weights


program = area("derivatives")


def _tower(x, layers):
    for w in layers:
        x = jnp.tanh(x @ w)
    return x


def _loss(layers, x):
    return jnp.mean(_tower(x, layers) ** 2)


@program(thorough=True)
def a_gradient():
    return Case(jax.grad(_loss), (weights(6), normal(64, 64)))


@program(thorough=True)
def a_value_with_its_gradient():
    def fn(layers, x):
        loss = lambda layers, x: (_loss(layers, x), {"last": _tower(x, layers)})
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layers, x)

    return Case(fn, (weights(4), normal(64, 64)))


@program(thorough=True)
def a_step_of_gradient_descent():
    def fn(layers, x):
        grads = jax.grad(_loss)(layers, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads)

    return Case(fn, (weights(6), normal(64, 64)))


@program()
def jacobians_forwards_and_backwards():
    def fn(w, x):
        f = lambda x: jnp.tanh(w @ x)
        return jax.jacfwd(f)(x), jax.jacrev(f)(x)

    return Case(fn, (weights(1)[0], normal(64)))


@program()
def a_hessian():
    def fn(w, x):
        return jax.hessian(lambda x: jnp.sum(jnp.sin(w @ x) ** 2))(x)

    return Case(fn, (weights(1)[0], normal(64)))


@program()
def pushing_forward_and_pulling_back():
    def fn(w, x, t):
        f = lambda w, x: jnp.sin(x @ w)
        y, pushed = jax.jvp(f, (w, x), (t, t))
        _, pull = jax.vjp(f, w, x)
        return y, pushed, pull(y)

    return Case(fn, (weights(1)[0], normal(64, 64), normal(64, 64, seed=1)))


@program()
def linearized_and_transposed():
    def fn(w, x):
        y, linear = jax.linearize(lambda x: jnp.tanh(x @ w) @ w, x)
        (back,) = jax.linear_transpose(lambda v: v @ w, x)(y)
        return linear(x), linear(y), back

    return Case(fn, (weights(1)[0], normal(64, 64)))


@program()
def gradients_of_each_example():
    def fn(w, xs, ys):
        loss = lambda w, x, y: (jnp.tanh(x @ w).sum() - y) ** 2
        return jax.vmap(jax.grad(loss), (None, 0, 0))(w, xs, ys)

    return Case(fn, (weights(1)[0], normal(8, 64), normal(8, seed=1)))


@program()
def stopped_gradients():
    def fn(w, x):
        def loss(w):
            y = x @ w
            return jnp.mean((y - lax.stop_gradient(jnp.tanh(y))) ** 2)

        return jax.grad(loss)(w)

    return Case(fn, (weights(1)[0], normal(64, 64)))


@program()
def a_custom_jvp():
    @jax.custom_jvp
    def log1pexp(x):
        return jnp.log(1.0 + jnp.exp(x))

    @log1pexp.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return log1pexp(x), (1 - 1 / (1 + jnp.exp(x))) * t

    def fn(w, x):
        f = lambda w: jnp.sum(log1pexp(x @ w))
        return log1pexp(x @ w), jax.grad(f)(w)

    return Case(fn, (weights(1)[0], normal(64, 64)))


@program()
def a_custom_jvp_by_argument():
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def apply(f, x, y):
        return f(x) * y

    @apply.defjvp
    def _(f, primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        return apply(f, x, y), f(x) * dy + jnp.cos(x) * y * dx

    def fn(w, x):
        return jax.grad(lambda w: apply(jnp.sin, x @ w, w).sum())(w)

    return Case(fn, (weights(1)[0], normal(64, 64)))


@program()
def a_custom_vjp():
    @jax.custom_vjp
    def clipped(lo, hi, x):
        return x

    clipped.defvjp(
        lambda lo, hi, x: (x, (lo, hi)), lambda r, g: (None, None, jnp.clip(g, r[0], r[1]))
    )

    def fn(w, x):
        f = lambda w: jnp.sum(clipped(-0.5, 0.5, x @ w) ** 2)
        return clipped(-1.0, 1.0, x @ w), jax.grad(f)(w)

    return Case(fn, (weights(1)[0], normal(64, 64)))


@program(long=True)
def a_fixed_point_with_a_custom_vjp():
    def iterate(f, x):
        far = lambda s: jnp.max(jnp.abs(s[0] - s[1])) > 1e-4
        return lax.while_loop(far, lambda s: (s[1], f(s[1])), (x, f(x)))[1]

    @jax.custom_vjp
    def fixed(a, x):
        return iterate(lambda x: jnp.tanh(0.3 * x @ a) + 0.1, x)

    def backward(residuals, g):
        a, x = residuals
        _, pull = jax.vjp(lambda a, x: jnp.tanh(0.3 * x @ a) + 0.1, a, x)
        u = iterate(lambda u: pull(u)[1] + g, g)
        return pull(u)[0], jnp.zeros_like(x)

    fixed.defvjp(lambda a, x: (y := fixed(a, x), (a, y)), backward)
    fn = jax.grad(lambda a, x: fixed(a, x).sum())
    return Case(fn, (weights(1)[0], normal(64, 64)))


@program(thorough=True)
def checkpointed_layers():
    def fn(layers, x):
        block = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w)))

        def loss(layers):
            h = x
            for w in layers:
                h = block(h, w)
            return jnp.mean(h**2)

        return jax.value_and_grad(loss)(layers)

    return Case(fn, (weights(6), normal(64, 64)))


@program()
def a_checkpoint_that_keeps_names():
    def fn(layers, x):
        policy = jax.checkpoint_policies.save_only_these_names("hidden")

        @functools.partial(jax.checkpoint, policy=policy)
        def loss(layers):
            h = x
            for w in layers:
                h = checkpoint_name(jnp.tanh(h @ w), "hidden")
            return jnp.mean(jnp.sin(h))

        return jax.grad(loss)(layers)

    return Case(fn, (weights(3), normal(64, 64)))


@program()
def a_gradient_through_a_scan():
    def fn(stacked, x):
        step = lambda h, w: (jnp.tanh(h @ w), None)
        return jax.grad(lambda s: jnp.sum(lax.scan(step, x, s)[0]))(stacked)

    return Case(fn, (jnp.stack(weights(5)), normal(64, 64)))


@program()
def a_gradient_through_a_checkpointed_scan():
    def fn(stacked, x):
        step = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        return jax.grad(lambda s: jnp.sum(lax.scan(step, x, s)[0]))(stacked)

    return Case(fn, (jnp.stack(weights(5)), normal(64, 64)))


@program()
def a_gradient_through_a_cond():
    def fn(w, x):
        one, other = lambda y: jnp.sin(y @ y) @ y, lambda y: jnp.cos(y @ y.T) @ y
        f = lambda w: lax.cond(w[0, 0] > 0, one, other, x @ w).sum()
        return jax.grad(f)(w)

    return Case(fn, (weights(1)[0], normal(64, 64)))


@program()
def a_forward_derivative_through_a_while_loop():
    def fn(w, x):
        far = lambda s: s[0] < 3
        f = lambda x: lax.while_loop(far, lambda s: (s[0] + 1, jnp.sin(s[1] @ w)), (0, x))[
            1
        ]
        return jax.jvp(f, (x,), (x,))

    return Case(fn, (weights(1)[0], normal(64, 64)))


@program()
def a_gradient_of_complex_numbers():
    def fn(z):
        f = lambda z: jnp.sum(jnp.abs(z @ z) ** 2)
        return jax.grad(f)(z), jax.grad(lambda z: jnp.sin(z @ z).sum(), holomorphic=True)(z)

    return Case(
        fn, ((normal(32, 32) + 1j * normal(32, 32, seed=1)).astype("complex64") / 32,)
    )


@program()
def a_gradient_of_integers():
    def fn(x, n):
        f = lambda x, n: jnp.sum((x @ x) * n)
        return jax.vjp(f, x, n)[1](1.0)[0], jax.grad(f, allow_int=True)(x, n)

    return Case(fn, (normal(64, 64), 3))
