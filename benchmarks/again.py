"""What it brings to run tasks a second time, where activations are most of what moves."""

import functools
from collections.abc import Sequence

import jax

import jturnip
from benchmarks.measure import Figure, Section, column, in_turn, ratios, seconds_of
from benchmarks.steps import Training, numbers
from jturnip.models import llama, pair


# Bytes a second each way.
_RATES = (0.4e9, 1e9)


def again(residues: pair.PairConfig, budgets: Sequence[float], pairs: int) -> Section:
    """Training steps of the pair model with its state in host memory.

    Args:
      residues: of the pair model.
      budgets: shares of the peak of `jax.jit`.
      pairs: calls of each way that count.
    """
    optimizer = llama.adamw()
    init = functools.partial(pair.init_state, residues, optimizer)
    state = numbers(jax.eval_shape(init, jax.random.key(0)))
    batch = next(pair.examples(residues))
    step = functools.partial(pair.train_step, residues, optimizer)
    peak = jturnip.peak_bytes(jax.jit(step, donate_argnums=0), state, batch)
    figures: list[Figure] = []
    for budget in budgets:
        for rate in _RATES:
            link = jturnip.SimulatedLink(rate, rate, 20e-6)
            jitted = functools.partial(
                jturnip.jit, step, int(budget * peak), link=link, donate_argnums=0
            )
            ways = [jitted(strategy=strategy) for strategy in ("auto", "turnip")]
            calls = [
                functools.partial(seconds_of, Training(way, jturnip.host(state), batch))
                for way in ways
            ]
            taken = in_turn(calls, pairs, warm_up=1)
            ours, moving = (way.last_run for way in ways)
            over = ours.h2d_bytes + ours.d2h_bytes
            more: dict[str, float | str] = {
                "moving, s": sorted(column(taken, 1))[len(taken) // 2],
                "tasks": float(len(moving.plan.taskgraph.tasks)),
                "twice": float(ours.plan.repeated_tasks),
                "bytes over the link, of those of moving": over
                / (moving.h2d_bytes + moving.d2h_bytes),
                "computing, of that of moving": ours.compute_seconds
                / moving.compute_seconds,
                "budget, MiB": budget * peak / 2**20,
            }
            title = f"{budget:.0%}, {rate / 1e9:g} GB/s"
            figures.append(Figure(title, ratios(taken), "", 1.0, more))
    about = (
        f"A training step of the pair model ({residues.blocks} blocks, {residues.length}"
        " residues), whose activations are most of what it needs, with its state in host"
        " memory and donated, over a simulated link, at shares of what `jax.jit` needs."
        " `auto`, which runs tasks a second time where that is predicted to be faster than"
        " to move what they give, over `turnip`, which moves all that finds no room."
    )
    return Section("(m) Computed again", about, tuple(figures))
