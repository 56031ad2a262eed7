"""How true `lowered.predict()` is for the machine at hand."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import jturnip
from benchmarks.measure import Figure, Section
from benchmarks.steps import Training, batch_of, numbers, train_step
from jturnip.models import llama, pair


# Bytes a second each way: one that transfers bind, and one that computing does.
_RATES = (0.4e9, 2e9)


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
      rounds: runs of each that count, after one that warms up.
    """
    figures: list[Figure] = []
    for name, fn, state, batch, donated in _functions(language, residues):
        peak = jturnip.peak_bytes(jax.jit(fn, donate_argnums=donated), state, batch)
        there = jturnip.host(state)
        for budget in budgets:
            for rate in _RATES:
                link = jturnip.SimulatedLink(rate, rate, 20e-6)
                step = jturnip.jit(
                    fn, int(budget * peak), link=link, donate_argnums=donated
                )
                title = f"{name}, {budget:.0%}, {rate / 1e9:g} GB/s"
                try:
                    predicted = step.lower(there, batch).predict()
                except jturnip.DoesNotFit as error:
                    least = error.needed_bytes / peak
                    why = {"why": f"refused: at least {least:.1%} is needed"}
                    figures.append(Figure(title, (), "", None, {**why}))
                    continue
                there, runs = _runs(step, there, batch, bool(donated), rounds)
                figures.append(_figure(title, predicted, runs))
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


def _functions(
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


def _runs(
    step: Any, state: Any, batch: Any, donated: bool, rounds: int
) -> tuple[Any, list[jturnip.RunReport]]:
    """The state after some calls, and their reports but the first one's."""
    reports: list[jturnip.RunReport] = []
    training = Training(step, state, batch)
    for _ in range(rounds + 1):
        jax.block_until_ready(training() if donated else step(state, batch))
        reports.append(step.last_run)
    return training.state, reports[1:]


def _figure(
    title: str, predicted: jturnip.Prediction, runs: Sequence[jturnip.RunReport]
) -> Figure:
    ratios = [predicted.seconds / run.seconds for run in runs]
    middle = sorted(ratios)[len(ratios) // 2]
    more: dict[str, float | str] = {
        "predicted over measured": middle,
        "predicted, s": predicted.seconds,
        "computing, predicted over measured": predicted.compute_seconds
        / sorted(run.compute_seconds for run in runs)[len(runs) // 2],
        "strategy": predicted.strategy,
    }
    return Figure(title, tuple(max(r, 1 / r) for r in ratios), "", 1.2, more)
