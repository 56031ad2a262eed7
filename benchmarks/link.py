"""How close real runs come to max(compute, bytes over the link), and where they wait."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jturnip
from benchmarks.measure import Figure, Section
from benchmarks.steps import Training, batch_of, new_state, train_step
from jturnip.demo import peak_bytes
from jturnip.models import llama
from jturnip.planner.strategies import STRATEGIES


# What the link takes for the published plan's bytes, over the time of computing.
_LOADS = {"link = compute": 1.0, "link = half": 0.5}


def link(model: llama.LlamaConfig, budgets: Sequence[float], rounds: int) -> Section:
    """Every strategy on the same training step, over simulated links.

    Args:
      model: what to train; its state stays in host memory, donated.
      budgets: shares of the peak of `jax.jit`.
      rounds: runs of each strategy, in turn, after one that warms up.
    """
    state, batch = new_state(model), batch_of(model)
    struct = jax.eval_shape(lambda: state)
    whole = jax.jit(train_step(model), donate_argnums=0).lower(struct, batch).compile()
    peak = peak_bytes(whole)
    del whole
    names = ["auto", *STRATEGIES]
    figures: list[Figure] = []
    training = Training(train_step(model), jturnip.host(state), batch)
    for budget in budgets:
        gpu_bytes = int(budget * peak)
        try:
            compute, nbytes = _balance(model, training, gpu_bytes)
        except jturnip.DoesNotFit as error:
            least = {"why": f"refused: at least {error.needed_bytes / peak:.1%} is needed"}
            figures.append(Figure(f"{budget:.0%}", (), "", None, {**least}))
            continue
        for load, share in _LOADS.items():
            rate = nbytes / (compute * share)
            steps = {
                name: jturnip.jit(
                    train_step(model),
                    gpu_bytes,
                    strategy=name,
                    link=jturnip.SimulatedLink(rate, rate, 20e-6),
                    donate_argnums=0,
                )
                for name in names
            }
            found = _in_turn(training, steps, rate, rounds)
            figures += [
                _figure(f"{budget:.0%}, {load}, {name}", steps[name], training, found[name])
                for name in names
            ]
    about = (
        f"A Llama's training step ({model.layers} layers of width {model.width},"
        f" {model.batch} x {model.length} tokens) with its state in host memory, at shares"
        f" of the {peak / 2**20:.0f} MiB that `jax.jit` needs. `link = compute`: the rate"
        " at which the bytes of strategy turnip take as long, the busier way, as the"
        " computing of a run over a free link; `half`: twice that rate. The figure is a"
        " run's seconds over max(compute, bytes over the link), with the computing measured"
        " in that very run; beside it the same over the plan's `lower_bound_seconds`, whose"
        " task times were measured on zeros, the median of a few calls."
    )
    return Section("(e) Over a simulated link", about, tuple(figures))


def _balance(
    model: llama.LlamaConfig, training: Training, gpu_bytes: int
) -> tuple[float, int]:
    """Seconds of computing, and bytes the busier way, of strategy turnip."""
    step = jturnip.jit(train_step(model), gpu_bytes, strategy="turnip", donate_argnums=0)
    training.step = step
    reports = []
    for _ in range(4):
        jax.block_until_ready(training())
        reports.append(step.last_run)
    compute = float(np.median([report.compute_seconds for report in reports[1:]]))
    return compute, max(reports[-1].h2d_bytes, reports[-1].d2h_bytes)


def _in_turn(
    training: Training, steps: dict[str, Any], rate: float, rounds: int
) -> dict[str, list[tuple[float, jturnip.RunReport]]]:
    """For each strategy (seconds over the bound, report), one a round."""
    found: dict[str, list[tuple[float, jturnip.RunReport]]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            training.step = step
            jax.block_until_ready(training())
            report: jturnip.RunReport = step.last_run
            moving = max(report.h2d_bytes, report.d2h_bytes) / rate
            bound = max(report.compute_seconds, moving)
            if number:
                found[name].append((report.seconds / bound, report))
    return found


def _figure(
    name: str,
    step: Any,
    training: Training,
    found: Sequence[tuple[float, jturnip.RunReport]],
) -> Figure:
    plan = step.lower(training.state, training.batch).compile().plan
    reports = [report for _, report in found]
    seconds = float(np.median([report.seconds for report in reports]))
    stall = float(np.median([report.stall_seconds / report.seconds for report in reports]))
    more: dict[str, float | str] = {
        "over lower_bound_seconds": seconds / plan.lower_bound_seconds,
        "predicted": plan.predicted_seconds / plan.lower_bound_seconds,
        "stalled": f"{stall:.0%}",
        "seconds": seconds,
        "MiB in, out": f"{reports[-1].h2d_bytes >> 20}, {reports[-1].d2h_bytes >> 20}",
    }
    if reports[-1].strategy != name.rsplit(", ")[-1]:
        more["ran"] = reports[-1].strategy
    return Figure(name, tuple(ratio for ratio, _ in found), "", None, more)
