"""How long planning takes: one plan, its schedule, its simulation and its verification."""

import math
import time
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from benchmarks.graphs import total_bytes, training_graph
from benchmarks.measure import Figure, Section
from jturnip.graph.taskgraph import TaskGraph
from jturnip.programs.planning import make_plan


LARGEST_SECONDS = 20.0  # wanted of the largest graph


def planning(sizes: tuple[int, ...], rounds: int, budget: float = 0.1) -> Section:
    """Times `planning.make_plan` on training graphs of growing size.

    Args:
      sizes: numbers of tasks, the target's last.
      rounds: how often the largest is planned; the others more often.
      budget: as a share of all bytes of the graph.
    """
    graphs = [training_graph(size) for size in sizes]
    seconds: list[list[float]] = [[] for _ in graphs]
    moved = [""] * len(graphs)
    _planned(graphs[0], budget)
    for _ in range(rounds):
        for at, graph in enumerate(graphs):
            for _ in range(1 if at == len(graphs) - 1 else 3):
                begin = time.perf_counter()
                plan = _planned(graph, budget)
                seconds[at].append(time.perf_counter() - begin)
                moved[at] = str(len(plan.memgraph.ops))
    figures = [
        Figure(
            f"{len(graph.tasks):,} tasks",
            tuple(taken),
            "s",
            LARGEST_SECONDS if at == len(graphs) - 1 else None,
            {
                "ops": moved[at],
                "µs a task": float(np.median(taken)) * 1e6 / len(graph.tasks),
            },
        )
        for at, (graph, taken) in enumerate(zip(graphs, seconds, strict=True))
    ]
    growth = _growth(graphs, seconds)
    name = f"growth, {sizes[0]:,} to {sizes[-1]:,} tasks, over n log n"
    figures.append(Figure(name, (growth,), "", 1.0))
    about = (
        "Synthetic training steps: weights and moments on the host, activations kept for"
        f" the backward pass, one update per weight; budget {budget:.0%} of all bytes,"
        " strategy turnip. Plan, schedule, simulation, verification and figures, garbage"
        " collection as `jturnip.jit` has it. Growth is time over time, divided by what"
        " n log n allows."
    )
    return Section("(d) Planning", about, tuple(figures))


def _planned(graph: TaskGraph, budget: float) -> Any:
    stub: Any = SimpleNamespace(
        graph=graph, arguments=SimpleNamespace(device=jax.devices()[0])
    )
    gpu_bytes = int(budget * total_bytes(graph))
    return make_plan(stub, gpu_bytes, "turnip", None)[1]


def _growth(graphs: list[TaskGraph], seconds: list[list[float]]) -> float:
    counts = [len(graph.tasks) for graph in (graphs[0], graphs[-1])]
    small, large = (float(np.median(taken)) for taken in (seconds[0], seconds[-1]))
    allowed = (counts[1] * math.log(counts[1])) / (counts[0] * math.log(counts[0]))
    return large / small / allowed
