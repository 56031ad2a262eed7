"""What the order of the tasks brings where several batches read the same weights."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jturnip
from benchmarks.measure import Figure, Section, column, in_turn, ratios, seconds_of
from benchmarks.steps import batch_of, numbers
from jturnip.models import llama


# Bytes a second each way: transfers bind.
_RATE = 0.5e9
_BATCHES = 4


def batches(model: llama.LlamaConfig, budgets: Sequence[float], pairs: int) -> Section:
    """Several batches in one call, with weights in host memory, over a simulated link.

    Args:
      model: of the Llama; each batch has a quarter of its length.
      budgets: shares of the peak of `jax.jit`.
      pairs: calls of each way that count.
    """
    model = dataclasses.replace(model, length=max(2, model.length // 4))
    params = numbers(llama.abstract_state(model, llama.adamw())).params
    tokens = [np.roll(batch_of(model), at, axis=1) for at in range(_BATCHES)]
    there = jturnip.host(params)
    weights = sum(a.nbytes for a in jax.tree.leaves(there))
    link = jturnip.SimulatedLink(_RATE, _RATE, 20e-6)
    figures: list[Figure] = []
    for name, fn in _functions(model):
        peak = jturnip.peak_bytes(fn, params, tokens)
        for budget in budgets:
            ways = [
                jturnip.jit(fn, int(budget * peak), link=link, strategy=strategy)
                for strategy in ("auto", "turnip")
            ]
            calls = [
                functools.partial(seconds_of, functools.partial(way, there, tokens))
                for way in ways
            ]
            taken = in_turn(calls, pairs, warm_up=2)
            ours, paper = (way.last_run for way in ways)
            assert ours is not None
            assert paper is not None
            assert ours.plan is not None
            more: dict[str, float | str] = {
                "in the program's order, s": sorted(column(taken, 1))[len(taken) // 2],
                "order": ours.plan.task_order or "the program's",
                "all weights, times moved": ours.h2d_bytes / weights,
                "in the program's order": paper.h2d_bytes / weights,
                "MiB kept": ours.kept_bytes / 2**20,
                "budget, MiB": budget * peak / 2**20,
            }
            title = f"{name}, {budget:.0%}"
            figures.append(Figure(title, ratios(taken), "", 1.0, more))
    about = (
        f"{_BATCHES} batches of {model.batch} x {model.length} tokens, one after the other"
        f" in one function, through a Llama ({model.layers} layers of width {model.width})"
        f" with its {weights / 2**20:.0f} MiB of weights in host memory, over a simulated"
        f" link of {_RATE / 1e9:g} GB/s, at shares of what `jax.jit` needs. `auto`, which"
        " may choose another order of the tasks, over `turnip` in the order of the program;"
        " and how often all weights cross the link to the device in a call after others."
    )
    return Section("(l) Several batches", about, tuple(figures))


def _functions(model: llama.LlamaConfig) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions of weights and batches of tokens, with their names."""
    forward = functools.partial(llama.forward, model)

    def next_tokens(params: Any, batches: Sequence[Any]) -> list[Any]:
        return [jnp.argmax(forward(params, each)[:, -1], axis=-1) for each in batches]

    yield "next tokens", next_tokens

    def accumulated(params: Any, batches: Sequence[Any]) -> Any:
        of_loss = jax.grad(functools.partial(llama.loss, model))
        gradients = [of_loss(params, each) for each in batches]
        step = lambda weight, *each: weight - 1e-3 * sum(each)
        return jax.tree.map(step, params, *gradients)

    yield "gradients added up", accumulated
