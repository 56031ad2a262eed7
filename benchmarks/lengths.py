"""How much longer an input may be than under `jax.jit`, in the same bytes."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jturnip
from benchmarks.axes import attention, numbers
from benchmarks.measure import Figure, Section
from jturnip.demo import peak_bytes
from jturnip.models import pair


_TIMES = (1.5, 2, 4, 8)
_WORDS = ", ".join(map(str, _TIMES))
_ASKED = 1 / 4

# A function and its arguments, as numpy arrays.
_Case = tuple[Callable[..., Any], tuple[Any, ...]]


def lengths(sequence: int, residues: int) -> Section:
    """The longest inputs in what `jax.jit` needs for shorter ones.

    Args:
      sequence: what attention has under `jax.jit`.
      residues: what a block of the pair model has.
    """
    figures = [
        _longest("causal attention", _attention, sequence),
        _longest("a block of the pair model", _pair_block, residues),
    ]
    about = (
        "The budget is the peak of `jax.jit` at a length; arguments are in host memory."
        f" That length over the longest that runs in it, of {_WORDS} times the length; and"
        " the seconds of a second call."
    )
    return Section("(i) Length in a fixed budget", about, tuple(figures))


def _attention(length: int) -> _Case:
    return attention, numbers([(8, length, 64)] * 3)


def _pair_block(length: int) -> _Case:
    model = pair.config("small", length=length, blocks=1)
    random = np.random.default_rng(0)
    make = lambda s: (random.normal(size=s.shape) / 4).astype(s.dtype)
    params = jax.tree.map(make, pair.abstract_params(model))
    representation = numbers([(length, length, model.width)])
    return lambda params, x: pair.forward(model, params, x), (params, *representation)


def _longest(name: str, make: Callable[[int], _Case], length: int) -> Figure:
    fn, args = make(length)
    stock = jax.jit(fn)
    gpu_bytes = peak_bytes(stock.lower(*args).compile())
    more: dict[str, float | str] = {
        "budget, MiB": gpu_bytes / (1 << 20),
        "jax.jit": f"{length}: {_seconds(stock, args):.3g} s",
    }
    longest = 1.0
    for times in _TIMES:
        fn, args = make(int(times * length))
        ours = jturnip.jit(fn, gpu_bytes)
        hosted = jturnip.host(args)
        try:
            taken = _seconds(ours, hosted)
        except jturnip.DoesNotFit:
            break
        longest = times
        more["jturnip"] = f"{int(times * length)}: {taken:.3g} s"
    return Figure(name, (1 / longest,), "", _ASKED, more)


def _seconds(call: Callable[..., Any], args: tuple[Any, ...]) -> float:
    jax.block_until_ready(call(*args))
    begin = time.perf_counter()
    jax.block_until_ready(call(*args))
    return time.perf_counter() - begin
