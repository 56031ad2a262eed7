"""How far plans are from the best there is: writes docs/optimum.md.

    python -m tests.optimum [graphs of a kind]

Small graphs of four kinds, each planned as `auto` does, beside what a solver finds that
tries everything (`tests/exact.py`). Needs OR-tools.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jturnip.graph.taskgraph import Place, TaskGraph
from jturnip.planner import figures
from jturnip.planner.bound import least_seconds
from jturnip.planner.planner import plan, smallest_budget
from jturnip.planner.strategies import STRATEGIES
from jturnip.planner.verify import verify
from jturnip.programs.fastest import fastest
from jturnip.programs.found import Found, Given
from jturnip.programs.searching import better_order
from jturnip.runtime.schedule import Link, schedule
from jturnip.runtime.simulated import simulate
from jturnip.units import padded
from tests import exact
from tests.support import GraphBuilder, random_taskgraph


PAGE = Path(__file__).parents[1] / "docs" / "optimum.md"
# Sizes are in these, and the link moves one in a unit of time each way.
UNIT = 256
LINK = Link(UNIT, UNIT)
# Where in what is between the smallest budget and one for everything the budget is.
SHARES = (0.0, 0.1, 0.2, 0.35, 0.5)


def mixture(rng: random.Random) -> TaskGraph:
    """Chains, trees, diamonds, with every kind of buffer."""
    graph = random_taskgraph(rng, rng.randint(4, 12))
    return in_units(graph, rng.choice([1, 2, 4, 8]))


def in_units(graph: TaskGraph, longer: int = 1) -> TaskGraph:
    """The same with sizes in units, and tasks that take whole units of time."""
    return replace(
        graph,
        buffers=tuple(replace(b, nbytes=b.nbytes * UNIT) for b in graph.buffers),
        tasks=tuple(
            replace(
                t,
                seconds=float(max(1, round(t.seconds * longer))),
                workspace=t.workspace * UNIT,
            )
            for t in graph.tasks
        ),
    )


def forward(rng: random.Random) -> TaskGraph:
    """Layers one after the other, some of which share their weights."""
    g = GraphBuilder()
    x = g.input(UNIT * rng.choice([1, 2, 4]))
    sizes = [UNIT * rng.choice([2, 4, 8, 16]) for _ in range(rng.randint(2, 6))]
    weights = [g.input(size) for size in sizes]
    for at in range(rng.randint(4, 12)):
        weight = rng.choice(weights) if rng.random() < 0.4 else weights[at % len(weights)]
        seconds = rng.choice([1, 2, 4, 8, 16])
        (x,) = g.task([x, weight], UNIT * rng.choice([1, 2, 4]), seconds=seconds)
    return g.build([x], [x] if rng.random() < 0.5 else [])


def training(rng: random.Random) -> TaskGraph:
    """Layers there and back; the new weights end in host memory."""
    g = GraphBuilder()
    layers = rng.randint(2, 6)
    sizes = rng.choice([(4, 8), (2, 4, 8, 16)])
    values = [g.input(UNIT * rng.choice([1, 2, 4]), start=Place.DEVICE)]
    weights = [g.input(UNIT * rng.choice(sizes)) for _ in range(layers)]
    seconds, size = rng.choice([2, 4, 8]), UNIT * rng.choice([1, 2, 4])
    for weight in weights:
        values += g.task([values[-1], weight], size, seconds=seconds)
    gradient, results = values.pop(), []
    for weight, value in zip(reversed(weights), reversed(values), strict=True):
        changed = g.buffers[weight].nbytes
        gradient, new = g.task(
            [gradient, value, weight], size, changed, seconds=2 * seconds
        )
        results.append(new)
    return g.build(results, results)


def batches(rng: random.Random) -> TaskGraph:
    """Several batches, each through the same layers."""
    g = GraphBuilder()
    layers = rng.randint(2, 4)
    weights = [g.input(UNIT * rng.choice([4, 8, 16])) for _ in range(layers)]
    seconds, results = rng.choice([2, 4, 8]), []
    for _ in range(rng.randint(2, 12 // layers)):
        x = g.input(UNIT * rng.choice([1, 2]))
        for weight in weights:
            (x,) = g.task([x, weight], UNIT * rng.choice([1, 2]), seconds=seconds)
        results.append(x)
    return g.build(results, results)


KINDS: dict[str, Callable[[random.Random], TaskGraph]] = {
    "mixtures of chains, trees and diamonds": mixture,
    "layers one after the other": forward,
    "training steps": training,
    "several batches through the same layers": batches,
}


def instance(kind: str, seed: int) -> tuple[TaskGraph, int]:
    """A graph and a budget for it."""
    rng = random.Random(f"{kind} {seed}")
    graph = KINDS[kind](rng)
    least = smallest_budget(graph)
    everything = sum(padded(b.nbytes) for b in graph.buffers)
    budget = least + rng.choice(SHARES) * everything
    return graph, int(budget) // UNIT * UNIT


@dataclass(frozen=True, slots=True)
class Row:
    """One graph; times in units, bytes both ways."""

    auto: float
    # The fastest in the order of the program.
    in_order: float
    shortest: exact.Optimum
    bound: float
    # The fewest of the strategies and orders, and of all plans.
    moved: int
    fewest: exact.Optimum


def planned(graph: TaskGraph, budget: int) -> Found:
    """A graph as `auto` plans it."""
    found = fastest(graph, budget, LINK)
    strategy, allowed = found.strategy, lambda found: True
    return better_order(Given(found.graph, budget, LINK), strategy, allowed) or found


def compared(kind: str, seed: int, seconds: float = 20.0, workers: int = 2) -> Row:
    """A graph as `auto` plans it, and as the solver does.

    Args:
      kind: a key of `KINDS`.
      seed: of the graph and its budget.
      seconds: how long the solver may take for each of its two answers.
      workers: on how many threads.

    Raises:
      AssertionError: a plan is better than what is proven to be the best.
    """
    graph, budget = instance(kind, seed)
    found = planned(graph, budget)
    verify(found.graph, found.memgraph)
    plans = [plan(graph, budget, name) for name in STRATEGIES]
    in_order = min(
        simulate(schedule(graph, p, LINK), name, LINK).seconds
        for p, name in zip(plans, STRATEGIES, strict=True)
    )
    every = [*plans, found.memgraph]
    moved = min(sum(figures.moved_bytes(graph, p)) for p in every)
    most = int(min(found.taken.seconds, in_order))
    try:
        shortest = exact.shortest_time(graph, budget, UNIT, most, seconds, workers)
        fewest = exact.fewest_bytes(graph, budget, moved, seconds, workers)
    except ValueError as error:
        raise AssertionError(
            f"{kind} {seed}: no plan of {most}, or of any time, in {budget} B"
        ) from error
    bound = least_seconds(graph, budget, UNIT, UNIT)
    assert bound <= shortest.found * (1 + 1e-9), f"{kind} {seed}: the bound is no bound"
    assert fewest.least <= moved, f"{kind} {seed}: a plan moves less than possible"
    return Row(found.taken.seconds, in_order, shortest, bound, moved, fewest)


_HEAD = """# How far plans are from the best there is

Written by `python -m tests.optimum`.

Small graphs of up to 12 tasks, planned as `auto` does and timed by the simulator, beside
the shortest time in which any plan could be over, in any order of the tasks, with any
choice of what leaves and comes back when. A constraint solver (OR-tools' CP-SAT) finds that
time and proves it, for the same model of a device and its link (`tests/exact.py`); it does
not know that bytes are at addresses, so it may be out of reach by a little. Where it could
not prove within some seconds that nothing is shorter, the shortest it found is taken.
Budgets are between the smallest possible and half of what everything takes; the link is
about as fast as computing.

"""


def page(rows: dict[str, list[Row]]) -> str:
    """The page, as Markdown."""
    lines = [
        "| graphs | number | proven | `auto` over the shortest time: mean | 90% | worst |"
        " in the program's order: mean | worst | shortest over `lower_bound_seconds`: mean"
        " | fewest bytes of our plans over the fewest possible: mean |",
        "|" + " --- |" * 10,
    ]
    every = [row for of_kind in rows.values() for row in of_kind]
    for kind, of_kind in (*rows.items(), ("all", every)):
        lines.append(_line(kind, of_kind))
    ratios = [_ratio(row.auto, row.shortest.found) for row in every]
    lines += ["", "How many graphs take how much longer than the shortest time:", ""]
    lines += ["| longer by | graphs | |", "| --- | --- | --- |", *_histogram(ratios)]
    return _HEAD + "\n".join(lines) + "\n"


def _line(kind: str, rows: Sequence[Row]) -> str:
    auto = [_ratio(row.auto, row.shortest.found) for row in rows]
    in_order = [_ratio(row.in_order, row.shortest.found) for row in rows]
    bounds = [_ratio(row.shortest.found, row.bound) for row in rows]
    moved = [_ratio(row.moved, row.fewest.found) for row in rows]
    proven = sum(row.shortest.proven and row.fewest.proven for row in rows)
    figures = (
        statistics.mean(auto),
        sorted(auto)[len(auto) * 9 // 10],
        max(auto),
        statistics.mean(in_order),
        max(in_order),
        statistics.mean(bounds),
        statistics.mean(moved),
    )
    cells = " | ".join(f"{figure:.3f}" for figure in figures)
    return f"| {kind} | {len(rows)} | {proven} | {cells} |"


def _ratio(ours: float, best: float) -> float:
    return ours / best if best else 1.0 if not ours else float("inf")


def _histogram(ratios: Sequence[float]) -> list[str]:
    borders = [0.0, 0.01, 0.03, 0.05, 0.1, 0.15, 0.25, float("inf")]
    lines: list[str] = []
    for low, high in zip([-1.0, *borders[1:-1]], borders[1:], strict=True):
        count = sum(low < round(r - 1, 9) <= high for r in ratios)
        name = f"over {low:.0%}" if high == float("inf") else f"up to {high:.0%}"
        lines.append(f"| {name} | {count} | {'█' * round(40 * count / len(ratios))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graphs", nargs="?", type=int, default=100)
    number = parser.parse_args().graphs
    rows = {kind: [compared(kind, seed) for seed in range(number)] for kind in KINDS}
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
