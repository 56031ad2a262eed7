"""What a plan loses that was made with other times than the tasks take."""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence

import jax

import jturnip
from benchmarks import inside, predictions
from benchmarks.measure import Figure, Section
from jturnip.graph.taskgraph import Place, Task, TaskGraph
from jturnip.models import llama, pair
from jturnip.planner import orders
from jturnip.programs.fastest import fastest
from jturnip.programs.found import Found
from jturnip.runtime.schedule import Link, schedule
from jturnip.runtime.simulated import simulate


# What moving all state in once takes, over what computing takes.
_LINKS = (2.0, 1.0, 0.5)
_LATENCY_SECONDS = 2e-5
_SEEDS = 5

# The time that a task is thought to take.
Belief = Callable[[Task], float]


def mistaken(
    language: llama.LlamaConfig, residues: pair.PairConfig, budgets: Sequence[float]
) -> Section:
    """Plans of training steps and forward passes, made with wrong times and rates.

    Args:
      language: of the Llama.
      residues: of the pair model.
      budgets: shares of the peak of `jax.jit`.
    """
    lost: dict[str, list[float]] = {}
    for graph, arena in _graphs(language, residues, budgets):
        computing = sum(task.seconds for task in graph.tasks)
        state = sum(b.nbytes for b in graph.buffers if b.start is Place.HOST)
        for share in _LINKS:
            link = _link(state / (share * computing))
            true = _seconds_of(fastest(graph, arena, link), graph, link)
            for name, believed, at in _beliefs(graph, link):
                found = fastest(believed, arena, at)
                seconds = _seconds_of(found, graph, link)
                lost.setdefault(name, []).append(seconds / true)
    figures = [
        Figure(name, tuple(ratios), "", None, _ends(ratios))
        for name, ratios in lost.items()
    ]
    about = (
        "What a plan takes that was made with wrong times of tasks, or a wrong rate of the"
        " link, over what that takes which was made with the true ones; both simulated with"
        " these, so that nothing but the plan differs. Times as measured here, of the"
        " functions and budgets of (j), over links that move all state in"
        f" {_in_words(_LINKS)} times what computing takes. A wrong time is that of an"
        " executable, in all of its tasks. `auto` plans, without computing again and"
        " without the search for a better order."
    )
    return Section("(o) Planned with wrong times", about, tuple(figures))


def _graphs(
    language: llama.LlamaConfig, residues: pair.PairConfig, budgets: Sequence[float]
) -> Iterator[tuple[TaskGraph, int]]:
    """The tasks of each function in each budget that is one plan, with measured times, in
    the order of the program; and the bytes there are for them."""
    link = jturnip.SimulatedLink(1e9, 1e9, _LATENCY_SECONDS)
    for _, fn, state, batch, donated in predictions.functions(language, residues):
        peak = jturnip.peak_bytes(jax.jit(fn, donate_argnums=donated), state, batch)
        for budget in budgets:
            step = jturnip.jit(fn, int(budget * peak), link=link, donate_argnums=donated)
            try:
                found = inside.measured_graph(step.lower(jturnip.host(state), batch))
            except jturnip.DoesNotFit:
                continue
            if found is not None:
                yield found


def _beliefs(graph: TaskGraph, link: Link) -> Iterator[tuple[str, TaskGraph, Link]]:
    """What may be thought of the tasks and the link."""
    for factor in (1.3, 2.0, 5.0):
        for seed in range(_SEEDS):
            believed = _with_times(graph, _at_random(seed, factor))
            yield f"each up to {factor:g} times as long or short", believed, link
    mean = sum(task.seconds for task in graph.tasks) / len(graph.tasks)
    yield "all take the same", _with_times(graph, lambda _: mean), link
    for factor in (5.0, 0.2):
        longer = _with_times(graph, lambda task, by=factor: by * task.seconds)
        yield f"all take {factor:g} times as long", longer, link
    for factor in (2.0, 0.5):
        rate = factor * link.h2d_bytes_per_second
        yield f"the link has {factor:g} times its rate", graph, _link(rate)


def _at_random(seed: int, factor: float) -> Belief:
    """Each executable takes longer or shorter by up to a factor, evenly in logarithms."""
    draw, drawn = random.Random(seed), dict[int, float]()

    def seconds(task: Task) -> float:
        if task.executable not in drawn:
            drawn[task.executable] = factor ** draw.uniform(-1, 1)
        return drawn[task.executable] * task.seconds

    return seconds


def _with_times(graph: TaskGraph, seconds: Belief) -> TaskGraph:
    tasks = (dataclasses.replace(task, seconds=seconds(task)) for task in graph.tasks)
    return dataclasses.replace(graph, tasks=tuple(tasks))


def _seconds_of(found: Found, graph: TaskGraph, link: Link) -> float:
    """What a plan takes with the times of another graph of the same tasks, and a link."""
    ordered = orders.reordered(graph, found.tasks)
    ready = schedule(ordered, found.memgraph, link)
    return simulate(ready, found.strategy, link).seconds


def _link(rate: float) -> Link:
    return Link(rate, rate, _LATENCY_SECONDS)


def _ends(ratios: Sequence[float]) -> dict[str, float | str]:
    """The extremes: below one a plan was better than the one made with true times."""
    within = sum(ratio <= 1.01 for ratio in ratios)
    share = math.floor(100 * within / len(ratios))
    return {"worst": max(ratios), "best": min(ratios), "lose at most 1%": f"{share}%"}


def _in_words(numbers: Sequence[float]) -> str:
    *first, last = (f"{number:g}" for number in numbers)
    return f"{', '.join(first)} and {last}"
