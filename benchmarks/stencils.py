"""Stencils over arrays that do not fit: chains of steps, their gradients, and loops."""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jturnip
from benchmarks.measure import Figure, Section, column, in_turn, ratios, seconds_of
from jturnip.demo import peak_bytes


_SHARES = (2, 4, 8)  # the budgets are the peak of `jax.jit` over these
_STEPS = 4
_ITERATIONS = 20
_SETTLED = 0.01  # a largest change that comes after about as many iterations


def _neighbours(p: Any) -> Any:
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2]


def _zeros_around(u: Any) -> Any:
    return u + 0.1 * (_neighbours(jnp.pad(u, 1)) - 4 * u)


def _set_inside(u: Any) -> Any:
    inside = u[1:-1, 1:-1]
    return u.at[1:-1, 1:-1].set(inside + 0.1 * (_neighbours(u) - 4 * inside))


def _torus(u: Any) -> Any:
    around = [jnp.roll(u, by, axis) for by in (1, -1) for axis in (0, 1)]
    return u + 0.1 * (sum(around) - 4 * u)


def _gradients(u: Any) -> Any:
    along: Any = jnp.gradient
    down, right = along(u)
    length = jnp.sqrt(1 + down**2 + right**2)
    return u + 0.1 * (along(down / length, axis=0) + along(right / length, axis=1))


def _differences(u: Any) -> Any:
    right = jnp.diff(u, axis=1, append=u[:, -1:])
    down = jnp.diff(u, axis=0, append=u[-1:])
    bent = jnp.diff(right, axis=1, prepend=0.0) + jnp.diff(down, axis=0, prepend=0.0)
    return u + 0.1 * bent


def _chain(step: Callable[[Any], Any], u: Any) -> Any:
    for _ in range(_STEPS):
        u = jnp.tanh(step(u))
    return u


def _loop(step: Callable[[Any], Any], u: Any) -> Any:
    return jax.lax.fori_loop(0, _ITERATIONS, lambda _, u: jnp.tanh(step(u)), u)


def _until_a_time(step: Callable[[Any], Any], u: Any) -> Any:
    """As often, but nobody knows that before."""
    body = lambda state: (jnp.tanh(step(state[0])), state[1] + 0.5)
    end = jnp.float32(_ITERATIONS / 2)
    return jax.lax.while_loop(lambda state: state[1] < end, body, (u, 0.0))[0]


def _until_it_settles(step: Callable[[Any], Any], u: Any) -> Any:
    """As often as its largest change is not small."""

    def body(state: Any) -> Any:
        u, _ = state
        after = jnp.tanh(step(u))
        return after, jnp.max(jnp.abs(after - u))

    return jax.lax.while_loop(lambda state: state[1] > _SETTLED, body, (u, jnp.inf))[0]


def _gradient_of(step: Callable[[Any], Any], u: Any) -> Any:
    return jax.grad(lambda u: jnp.sum(jnp.square(_chain(step, u))))(u)


_CASES: dict[str, Callable[[Any], Any]] = {
    "zeros around": functools.partial(_chain, _zeros_around),
    "set inside": functools.partial(_chain, _set_inside),
    "a torus": functools.partial(_chain, _torus),
    "gradients": functools.partial(_chain, _gradients),
    "differences": functools.partial(_chain, _differences),
    "the gradient of zeros around": functools.partial(_gradient_of, _zeros_around),
    "a loop, zeros around": functools.partial(_loop, _zeros_around),
    "a loop, set inside": functools.partial(_loop, _set_inside),
    "a loop, a torus": functools.partial(_loop, _torus),
    "until a time, zeros around": functools.partial(_until_a_time, _zeros_around),
    "until it settles, zeros around": functools.partial(_until_it_settles, _zeros_around),
}


def stencils(length: int, pairs: int) -> Section:
    """Times steps on a field in a half, a quarter and an eighth of their peak.

    Args:
      length: of both sides of the field.
      pairs: measurements of each, in turn with stock `jax.jit`.
    """
    field = np.random.default_rng(0).normal(size=(length, length)).astype(np.float32)
    figures = [
        _measured(f"{name}, 1/{share}", fn, field, share, pairs)
        for name, fn in _CASES.items()
        for share in _SHARES
    ]
    about = (
        f"{_STEPS} steps of diffusion on a field in host memory, written in some ways, the"
        f" gradient of one, loops of {_ITERATIONS} steps, and loops that end after about as"
        " many, at a time or when the field has settled; in a half, a quarter and an eighth"
        " of the peak of `jax.jit`, which has the field on the device: time over its time,"
        " and how many fields went over the link. Where the peak is three fields, a quarter"
        " is less than one."
    )
    return Section("(p) Stencils", about, tuple(figures))


def _measured(
    name: str, fn: Callable[[Any], Any], field: np.ndarray, share: int, pairs: int
) -> Figure:
    stock = jax.jit(fn)
    peak = peak_bytes(stock.lower(field).compile())
    ours = jturnip.jit(fn, peak // share)
    here, there = jax.device_put(field), jturnip.host(field)
    try:
        first = seconds_of(functools.partial(ours, there))
    except jturnip.DoesNotFit as refusal:
        return Figure(name, (), "", 1.5, {"refused": str(refusal)})
    ways = [
        functools.partial(seconds_of, functools.partial(ours, there)),
        functools.partial(seconds_of, functools.partial(stock, here)),
    ]
    taken = in_turn(ways, pairs)
    run = ours.last_run
    assert run is not None
    more: dict[str, float | str] = {
        "peak, fields": peak / field.nbytes,
        "jax.jit, ms": 1e3 * statistics.median(column(taken, 1)),
        "fields over the link": (run.h2d_bytes + run.d2h_bytes) / field.nbytes,
        "first, s": first,
    }
    return Figure(name, ratios(taken), "", 1.5, more)
