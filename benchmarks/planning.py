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
    figures: list[Figure] = []
    ends: list[tuple[int, float]] = []
    _planned(training_graph(sizes[0]), budget)
    for size in sizes:
        # Nothing else is there meanwhile, through which garbage would be looked for.
        graph, seconds, plan = training_graph(size), list[float](), None
        for _ in range(rounds * (1 if size == sizes[-1] else 3)):
            plan = None
            begin = time.perf_counter()
            plan = _planned(graph, budget)
            seconds.append(time.perf_counter() - begin)
        assert plan is not None
        count, median = len(graph.tasks), float(np.median(seconds))
        ends.append((count, median))
        more: dict[str, float | str] = {
            "ops": str(len(plan.memgraph.ops)),
            "strategy": plan.strategy,
            "µs a task": median * 1e6 / count,
        }
        most = {sizes[0]: SMALLEST_SECONDS, sizes[-1]: LARGEST_SECONDS}.get(size)
        figures.append(Figure(f"{count:,} tasks", tuple(seconds), "s", most, more))
    growth = _growth(*ends[0], *ends[-1])
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


def _growth(few: int, short: float, many: int, long: float) -> float:
    allowed = (many * math.log(many)) / (few * math.log(few))
    return long / short / allowed
