"""Steps that add up an array and the same array shifted, in the ways people write them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _neighbours(p: Any) -> Any:
    """The sum of the four neighbours, of what has a border of one position."""
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2]


def _padded(mode: str) -> Callable[[Any], Any]:
    return lambda u: _neighbours(jnp.pad(u, 1, mode=mode)) - 4 * u


def _inside(u: Any) -> Any:
    return _neighbours(u) - 4 * u[1:-1, 1:-1]


def _gradients(u: Any) -> Any:
    along: Any = jnp.gradient
    down, right = along(u)
    length = jnp.sqrt(1 + down**2 + right**2)
    return along(down / length, axis=0) + along(right / length, axis=1)


def _differences(u: Any) -> Any:
    right = jnp.diff(u, axis=1, append=u[:, -1:])
    down = jnp.diff(u, axis=0, append=u[-1:])
    return jnp.diff(right, axis=1, prepend=0.0) + jnp.diff(down, axis=0, prepend=0.0)


def _at_borders(u: Any) -> Any:
    u = u.at[1:-1, 1:-1].add(0.1 * _inside(u))
    u = u.at[0].set(0.0).at[-1].set(u[-2])
    return u.at[:, 0].set(1.0).at[:, -1].set(u[:, -2])


def _convolved(u: Any) -> Any:
    kernel = jnp.array([[0, 1, 0], [1, -4, 1], [0, 1, 0]], jnp.float32)
    return jax.lax.conv(u[None, None], kernel[None, None], (1, 1), "SAME")[0, 0]


def _largest_around(u: Any) -> Any:
    return jax.lax.reduce_window(u, -jnp.inf, jax.lax.max, (3, 3), (1, 1), "SAME")


STEPS: dict[str, Callable[[Any], Any]] = {
    "zeros around": lambda u: u + 0.1 * _padded("constant")(u),
    "the edge around": lambda u: u + 0.1 * _padded("edge")(u),
    "mirrored": lambda u: u + 0.1 * _padded("reflect")(u),
    "a torus by pad": lambda u: u + 0.1 * _padded("wrap")(u),
    "a torus by roll": lambda u: sum(
        0.2 * jnp.roll(u, by, axis) for by in (1, -1) for axis in (0, 1)
    ),
    "set inside": lambda u: u.at[1:-1, 1:-1].set(u[1:-1, 1:-1] + 0.1 * _inside(u)),
    "added inside": lambda u: u.at[1:-1, 1:-1].add(0.1 * _inside(u)),
    "set at borders": _at_borders,
    "gradients": lambda u: u + 0.1 * _gradients(u),
    "differences": lambda u: u + 0.1 * _differences(u),
    "a convolution": lambda u: u + 0.1 * _convolved(u),
    "the largest around": lambda u: u + 0.1 * _largest_around(u),
    "upside down": lambda u: 0.5 * u[::-1] + 0.5 * jnp.pad(u[1:], ((0, 1), (0, 0))),
}


def chain(name: str, count: int = 3) -> Callable[[Any], Any]:
    """So many steps, one after the other."""

    def function(u: Any) -> Any:
        for _ in range(count):
            u = jnp.tanh(STEPS[name](u))
        return u

    return function


def gradients(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The gradients of the sum of squares of what a function gives."""
    return jax.grad(lambda u: jnp.sum(jnp.square(fn(u))))


def field(*shape: int) -> np.ndarray:
    """Random numbers."""
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)
