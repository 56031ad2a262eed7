"""Text, token by token, from a model whose weights do not all fit."""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import jturnip
from benchmarks.measure import Figure, Section, in_turn, seconds_of
from benchmarks.steps import numbers
from jturnip.models import llama


# Bytes a second each way, and the tokens of a prompt.
_RATE = 1e9
_PROMPT = 4


def generating(
    model: llama.LlamaConfig, budgets: Sequence[float], count: int, pairs: int
) -> Section:
    """Greedy decoding with weights in host memory, over a simulated link.

    Args:
      model: of the Llama.
      budgets: shares of the bytes of its weights.
      count: tokens of a short text; a long one has twice as many.
      pairs: texts of each length.
    """
    params = numbers(llama.abstract_state(model, llama.adamw())).params
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    prompt = np.zeros((1, _PROMPT), np.int32)
    link = jturnip.SimulatedLink(_RATE, _RATE, 20e-6)
    there = jturnip.host(params)
    texts = [functools.partial(llama.generate, model, count=n) for n in (count, 2 * count)]
    on_device = jax.device_put(params)
    stock = _seconds_a_token(list(map(jax.jit, texts)), on_device, prompt, count, pairs)
    del on_device
    figures: list[Figure] = []
    for budget in budgets:
        gpu_bytes = int(budget * weights)
        ways = [jturnip.jit(text, gpu_bytes, link=link) for text in texts]
        taken = _seconds_a_token(ways, there, prompt, count, pairs)
        short, long = (way.last_run for way in ways)
        assert short is not None
        assert long is not None
        moved = (long.h2d_bytes - short.h2d_bytes) / count
        least = max(moved / _RATE, statistics.median(stock))
        more: dict[str, float | str] = {
            "ms a token": 1e3 * statistics.median(taken),
            "MB a token": moved / 1e6,
            "of the weights do not fit, MB": max(0.0, weights - gpu_bytes) / 1e6,
            "kept, MB": long.kept_bytes / 1e6,
            "jax.jit, ms": 1e3 * statistics.median(stock),
        }
        over = tuple(seconds / least for seconds in taken)
        figures.append(Figure(f"{budget:.0%}", over, "", 1.1, more))
    about = (
        f"A Llama ({model.layers} layers of width {model.width}, {weights / 1e6:.0f} MB of"
        " weights in host memory) that generates one token after the other with a cache of"
        f" keys and values, over a simulated link of {_RATE / 1e9:g} GB/s, in shares of the"
        f" bytes of its weights. What {count} more tokens take, each, over the larger of"
        " the time of the link for the bytes that cross it, and of `jax.jit` with all"
        " weights on the device."
    )
    return Section("(n) Token by token", about, tuple(figures))


def _seconds_a_token(
    ways: Sequence[Callable[..., Any]], params: Any, prompt: Any, count: int, pairs: int
) -> list[float]:
    """What each of `count` more tokens takes, by the two ways that differ in so many."""
    calls = [functools.partial(way, params, prompt) for way in ways]
    taken = in_turn([functools.partial(seconds_of, call) for call in calls], pairs)
    return [(long - short) / count for short, long in taken]
