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


SMALLEST_SECONDS, LARGEST_SECONDS = 0.2, 20.0  # wanted of the ends


def planning(sizes: tuple[int, ...], rounds: int, budget: float = 0.1) -> Section:
    """Times `planning.make_plan` on training graphs of growing size.

    Args:
      sizes: numbers of tasks, those with a target first and last.
      rounds: how often the largest is planned; the others more often.
      budget: as a share of all bytes of the graph.
    """
    graphs = [training_graph(size) for size in sizes]
    seconds: list[list[float]] = [[] for _ in graphs]
    ops, strategies = [""] * len(graphs), [""] * len(graphs)
    _planned(graphs[0], budget)
    for _ in range(rounds):
        for at, graph in enumerate(graphs):
            for _ in range(1 if at == len(graphs) - 1 else 3):
                begin = time.perf_counter()
                plan = _planned(graph, budget)
                seconds[at].append(time.perf_counter() - begin)
                ops[at] = str(len(plan.memgraph.ops))
                strategies[at] = plan.strategy
    figures = [
        Figure(
            f"{len(graph.tasks):,} tasks",
            tuple(taken),
            "s",
            {0: SMALLEST_SECONDS, len(graphs) - 1: LARGEST_SECONDS}.get(at),
            {
                "ops": ops[at],
                "strategy": strategies[at],
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
        " strategy auto, which plans and simulates some strategies and orders, and may"
        " compute all tasks again; of more than 20,000 tasks only the first. And schedule,"
        " verification and figures of the one that is taken, garbage collection as"
        " `jturnip.jit` has it. Growth is time over time, divided by what n log n allows."
    )
    return Section("(d) Planning", about, tuple(figures))


def _planned(graph: TaskGraph, budget: float) -> Any:
    # Tasks of no equations, which give the same again.
    nothing = SimpleNamespace(equations=())
    stub: Any = SimpleNamespace(
        graph=graph,
        arguments=SimpleNamespace(device=jax.devices()[0]),
        flat=nothing,
        groups=[nothing] * len(graph.tasks),
    )
    gpu_bytes = int(budget * total_bytes(graph))
    return make_plan(stub, gpu_bytes, "auto", None)[1]


def _growth(graphs: list[TaskGraph], seconds: list[list[float]]) -> float:
    counts = [len(graph.tasks) for graph in (graphs[0], graphs[-1])]
    small, large = (float(np.median(taken)) for taken in (seconds[0], seconds[-1]))
    allowed = (counts[1] * math.log(counts[1])) / (counts[0] * math.log(counts[0]))
    return large / small / allowed
