"""What it brings to keep weights on the device between calls."""

import functools
from collections.abc import Sequence

import jax

import jturnip
from benchmarks import inside
from benchmarks.measure import Figure, Section, column, in_turn, ratios, seconds_of
from benchmarks.steps import batch_of, numbers
from jturnip.models import llama


# Bytes a second each way: transfers bind.
_RATE = 1e9


def calls(model: llama.LlamaConfig, budgets: Sequence[float], pairs: int) -> Section:
    """Forward passes with the same weights in host memory, over a simulated link.

    Args:
      model: of the Llama.
      budgets: shares of the peak of `jax.jit`.
      pairs: calls of each way that count.
    """
    params = numbers(llama.abstract_state(model, llama.adamw())).params
    tokens = batch_of(model)[:, :-1]
    forward = functools.partial(llama.forward, model)
    peak = jturnip.peak_bytes(forward, params, tokens)
    there = jturnip.host(params)
    weights = sum(a.nbytes for a in jax.tree.leaves(there))
    link = jturnip.SimulatedLink(_RATE, _RATE, 20e-6)
    figures: list[Figure] = []
    for budget in budgets:
        jitted = jturnip.jit(forward, int(budget * peak), link=link)
        keeping = jitted.lower(there, tokens).compile()
        lowered = jturnip.jit(forward, int(budget * peak), link=link).lower(there, tokens)
        moving = inside.keeping_nothing(lowered).compile()
        ways = [
            functools.partial(seconds_of, functools.partial(way, there, tokens))
            for way in (keeping, moving)
        ]
        taken = in_turn(ways, pairs, warm_up=2)
        run = keeping.last_run
        assert run is not None
        more: dict[str, float | str] = {
            "with all moved, s": sorted(column(taken, 1))[len(taken) // 2],
            "MiB moved a call": run.h2d_bytes / 2**20,
            "of all weights": run.h2d_bytes / weights,
            "MiB kept": run.kept_bytes / 2**20,
            "budget, MiB": budget * peak / 2**20,
        }
        figures.append(Figure(f"{budget:.0%}", ratios(taken), "", 1.0, more))
    about = (
        f"A Llama's forward pass ({model.layers} layers of width {model.width},"
        f" {model.batch} x {model.length} tokens) with its {weights / 2**20:.0f} MiB of"
        f" weights in host memory, over a simulated link of {_RATE / 1e9:g} GB/s, at shares"
        f" of the {peak / 2**20:.0f} MiB that `jax.jit` needs. A call after others with the"
        " same weights, over a call of the same function that keeps nothing between calls."
    )
    return Section("(k) One call after the other", about, tuple(figures))
