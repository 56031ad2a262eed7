"""How true `lowered.predict()` is for the machine at hand."""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import jturnip
from benchmarks import inside
from benchmarks.measure import Figure, Section
from benchmarks.steps import Training, batch_of, numbers, train_step
from jturnip.models import llama, pair


# Bytes a second each way: one that transfers bind, and one that computing does.
_RATES = (0.4e9, 2e9)
# Runs with which a prediction is compared: the same plan takes up to 1.4 times as long from
# one to the next, where a product waits for one of the cores.
_RUNS = 7


def predictions(
    language: llama.LlamaConfig,
    residues: pair.PairConfig,
    budgets: Sequence[float],
    rounds: int,
) -> Section:
    """Training steps and forward passes in budgets over simulated links.

    Args:
      language: of the Llama.
      residues: of the pair model.
      budgets: shares of the peak of `jax.jit`.
      rounds: predictions of each, with tasks measured anew, and runs after it.
    """
    figures: list[Figure] = []
    for name, fn, state, batch, donated in functions(language, residues):
        peak = jturnip.peak_bytes(jax.jit(fn, donate_argnums=donated), state, batch)
        there = jturnip.host(state)
        for budget in budgets:
            for rate in _RATES:
                link = jturnip.SimulatedLink(rate, rate, 20e-6)
                step = jturnip.jit(
                    fn, int(budget * peak), link=link, donate_argnums=donated
                )
                title = f"{name}, {budget:.0%}, {rate / 1e9:g} GB/s"
                pairs: list[tuple[jturnip.Prediction, jturnip.RunReport]] = []
                try:
                    for _ in range(rounds):
                        lowered = step.lower(there, batch)
                        inside.forget_times(lowered)
                        predicted = lowered.predict()
                        compiled = lowered.compile()
                        there, run = _run(compiled, there, batch, bool(donated))
                        pairs.append((predicted, run))
                except jturnip.DoesNotFit as error:
                    least = error.needed_bytes / peak
                    why = {"why": f"refused: at least {least:.1%} is needed"}
                    figures.append(Figure(title, (), "", None, {**why}))
                    continue
                figures.append(_figure(title, pairs))
    about = (
        "What `lowered.predict()` says of the machine at hand before anything runs, and"
        " what then runs over a simulated link: the larger over the smaller, in seconds."
        f" A Llama ({language.layers} layers of width {language.width}, {language.batch} x"
        f" {language.length} tokens) and a pair model ({residues.blocks} blocks,"
        f" {residues.length} residues), with weights and state in host memory, at shares of"
        " the peak of `jax.jit`. Copies share the cores with the tasks, and a prediction"
        " knows what one takes from them."
    )
    return Section("(j) Predictions", about, tuple(figures))


def functions(
    language: llama.LlamaConfig, residues: pair.PairConfig
) -> Iterator[tuple[str, Callable[..., Any], Any, Any, tuple[int, ...]]]:
    """Name, function, state or weights, batch, and what is donated."""
    optimizer = llama.adamw()
    tokens, pairs = batch_of(language), next(pair.examples(residues))
    state = numbers(llama.abstract_state(language, optimizer))
    yield "Llama training", train_step(language), state, tokens, (0,)
    forward = functools.partial(llama.forward, language)
    yield "Llama forward", forward, state.params, tokens[:, :-1], ()
    init = functools.partial(pair.init_state, residues, optimizer)
    state = numbers(jax.eval_shape(init, jax.random.key(0)))
    step = functools.partial(pair.train_step, residues, optimizer)
    yield "pair training", step, state, pairs, (0,)
    forward = functools.partial(pair.forward, residues)
    yield "pair forward", forward, state.params, pairs.pair, ()


def _run(step: Any, state: Any, batch: Any, donated: bool) -> tuple[Any, jturnip.RunReport]:
    """The state after some calls, and what the middle one of those after the first did."""
    training = Training(step, state, batch)
    reports: list[jturnip.RunReport] = []
    for _ in range(1 + _RUNS):
        jax.block_until_ready(training() if donated else step(state, batch))
        reports.append(step.last_run)
    by_seconds = sorted(reports[1:], key=lambda run: run.seconds)
    return training.state, by_seconds[len(by_seconds) // 2]


def _figure(
    title: str, pairs: Sequence[tuple[jturnip.Prediction, jturnip.RunReport]]
) -> Figure:
    ratios = [predicted.seconds / run.seconds for predicted, run in pairs]
    computing = [
        predicted.compute_seconds / run.compute_seconds for predicted, run in pairs
    ]
    more: dict[str, float | str] = {
        "predicted over measured": statistics.median(ratios),
        "predicted, s": statistics.median(predicted.seconds for predicted, _ in pairs),
        "computing, predicted over measured": statistics.median(computing),
        "strategy": pairs[-1][1].strategy,
    }
    return Figure(title, tuple(max(r, 1 / r) for r in ratios), "", 1.2, more)
