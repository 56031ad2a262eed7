"""How the time to the first result grows with the number of equations."""

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jturnip
from benchmarks import inside
from benchmarks.measure import Figure, Section, column, in_turn, ratios
from jturnip.frontend.flatten import flatten
from jturnip.frontend.partition import Partitioner
from jturnip.programs.devices import rates


_WIDTH = 8
_LARGEST_TASK = 1 << 20  # bytes: so many equations that joining them is all there is to do


def growth(sizes: tuple[int, ...], pairs: int) -> Section:
    """Times taking functions of growing length apart, and their first results.

    Args:
      sizes: numbers of small products, an equation each and one more for what follows.
      pairs: measurements of the first result of the largest, in turn with stock `jax.jit`;
        of one half as large twice as many, and so on up to eight times.
    """
    figures = []
    apart = {size: _apart_seconds(size) for size in sizes}
    for size, seconds in apart.items():
        more: dict[str, float | str] = {"µs an equation": 5e5 * min(seconds) / size}
        figures.append(Figure(f"{size:,} products, taken apart", seconds, "s", None, more))
    small, large = sizes[0], sizes[-1]
    grown = min(apart[large]) / min(apart[small]) / (large / small)
    name = f"growth, {small:,} to {large:,} products, over linear"
    figures.append(Figure(name, (grown,), "", 1.3))
    for size in sizes:
        ways: list[Callable[[], float]] = [
            functools.partial(_first_result, way, size) for way in (_fitting, jax.jit)
        ]
        taken = in_turn(ways, pairs * min(8, large // size), warm_up=0)
        more = {
            "jturnip, s": float(np.median(column(taken, 0))),
            "jax.jit, s": float(np.median(column(taken, 1))),
        }
        name = f"first result of {size:,} products that fit"
        figures.append(Figure(name, ratios(taken), "", 1.1, more))
    about = (
        f"A chain of {_WIDTH} x {_WIDTH} products. Taken apart: made flat and cut into"
        " tasks. To the first result: trace, decide, compile, run, with the caches of jax"
        " and jturnip empty before each; over `jax.jit`'s own."
    )
    return Section("(g) Many equations", about, tuple(figures))


def _products(count: int) -> Callable[[Any], Any]:
    def fn(x: Any) -> Any:
        for _ in range(count):
            x = jnp.tanh(x @ x)
        return x

    return fn


def _apart_seconds(size: int) -> tuple[float, ...]:
    x = jax.ShapeDtypeStruct((_WIDTH, _WIDTH), jnp.float32)
    jaxpr = jax.jit(_products(size)).trace(x).jaxpr
    seconds = []
    for _ in range(3):
        gc.collect()
        begin = time.perf_counter()
        partitioner = Partitioner(flatten(jaxpr), rates(jax.devices()[0]))
        partitioner.partition(_LARGEST_TASK)
        seconds.append(time.perf_counter() - begin)
    return tuple(seconds)


def _fitting(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jturnip.jit(fn, 1 << 30)


def _first_result(way: Callable[..., Any], size: int) -> float:
    inside.forget_everything()
    x, fn = jnp.ones((_WIDTH, _WIDTH)) / _WIDTH, way(_products(size))
    begin = time.perf_counter()
    jax.block_until_ready(fn(x))
    return time.perf_counter() - begin
