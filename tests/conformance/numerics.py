"""Special functions, statistics, optimisers, ODEs, signals: jax.scipy and around it."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
from jax.scipy.optimize import minimize

from .registry import Case, area, normal, one_task, weights


program = area("numerics")
# Loops in loops, planned in the smallest budget.
_SLOW = 300


@program()
def special_functions():
    def fn(x, w):
        y = x @ w
        special = jsp.special
        return special.erf(y), special.gammaln(jnp.abs(y) + 1), special.expit(y) @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def logarithms_of_sums():
    def fn(x, w):
        y = x @ w * 50
        return jsp.special.logsumexp(y, axis=1, keepdims=True), jax.nn.log_softmax(y) @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program(one_task("while"), ulps=2**14, seconds=_SLOW)
def minimised_by_bfgs():
    def fn(x, target):
        far = lambda p: jnp.sum((p @ x / 8 - target) ** 2)
        result = minimize(far, jnp.zeros(16), method="BFGS", options={"maxiter": 5})
        return result.x, result.fun, result.nit

    return Case(fn, (normal(16, 16), normal(16, seed=1)))


@program(ulps=2**12, seconds=_SLOW)
def an_ordinary_differential_equation():
    from jax.experimental.ode import odeint

    def fn(a, y):
        return odeint(lambda y, t, a: jnp.sin(a @ y) - t, y, jnp.linspace(0.0, 1.0, 4), a)

    return Case(fn, (weights(1, 16)[0], normal(16)))


@program()
def convolutions_of_signals():
    def fn(x, k):
        line = jsp.signal.convolve(x[0], k[0], mode="same")
        image = jsp.signal.convolve2d(x, k, mode="valid")
        return line, image @ image.T, jnp.convolve(x[1], k[1])

    return Case(fn, (normal(64, 64), normal(5, 5, seed=1)))


@program()
def interpolation_on_a_grid():
    def fn(x, places):
        z = x @ x
        return jsp.ndimage.map_coordinates(z, list(places * 63), order=1), z.sum()

    return Case(fn, (normal(64, 64), abs(normal(2, 50, seed=1)) % 1))


@program()
def searching_a_sorted_array():
    def fn(x, w):
        y = jnp.sort((x @ w).ravel())
        return jnp.searchsorted(y, x.ravel(), method="sort"), y.reshape(64, 64) @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def the_mandelbrot_set():
    def fn(x, y):
        c = x[None, :] + 1j * y[:, None]
        z, steps = jnp.zeros_like(c), jnp.zeros(c.shape, jnp.int32)
        for _ in range(4):
            inside = jnp.abs(z) < 2
            z, steps = jnp.where(inside, z * z + c, z), steps + inside
        return steps, jnp.abs(z) @ jnp.abs(z)

    grid = jnp.linspace(-2, 1, 64)
    return Case(fn, (grid, grid / 2))
