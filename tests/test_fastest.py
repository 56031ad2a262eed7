"""Which plan is taken of those that are promising."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same
from hypothesis import given, settings, strategies as st
from support import GraphBuilder, taskgraphs

import jturnip
from jturnip.graph.serialize import memgraph_from_json_dict
from jturnip.graph.taskgraph import TaskGraph
from jturnip.planner.planner import smallest_budget
from jturnip.planner.strategies import STRATEGIES
from jturnip.planner.verify import verify
from jturnip.programs import fastest as module
from jturnip.programs.fastest import CLEARLY, fastest, plan_by
from jturnip.programs.found import Given
from jturnip.programs.searching import better_order
from jturnip.runtime.schedule import Link


LINKS = st.builds(Link, *[st.sampled_from([1e2, 1e3, 1e4])] * 2)


@pytest.mark.long
@given(taskgraphs(), LINKS, st.integers(0, 8192))
@settings(max_examples=150, deadline=None)
def test_no_strategy_by_name_is_clearly_faster_than_auto(
    graph: TaskGraph, link: Link, more: int
):
    budget = smallest_budget(graph) + more
    taken = fastest(graph, budget, link)
    verify(taken.graph, taken.memgraph)
    for name in module.PROMISING:
        assert CLEARLY * taken.seconds <= plan_by(Given(graph, budget, link), name).seconds
    assert fastest(graph, budget, link).memgraph == taken.memgraph


def training(layers: int, kib: Sequence[int]) -> TaskGraph:
    """Weights, and what the forward pass keeps, are read backwards, where new weights are
    written. The tasks have one order only."""
    g = GraphBuilder()
    weights = [g.input(kib[at % len(kib)] * 1024) for at in range(layers)]
    x, kept, new = g.input(1024), [], []
    for w in weights:
        kept.append(x)
        (x,) = g.task([x, w], 2048, seconds=1.0)
    for w, x_before in zip(reversed(weights), reversed(kept), strict=True):
        x, changed = g.task([x, x_before, w], 2048, g.buffers[w].nbytes, seconds=2.0)
        new.append(changed)
    return g.build(new, end_on_host=new)


@pytest.mark.parametrize(
    ("name", "layers", "kib", "share", "rate"),
    [("tensile", 12, (1, 16), 8, 8192.0), ("superpipeline", 12, (4,), 4, 2048.0)],
)
def test_where_one_is_clearly_the_fastest_auto_takes_it(
    name: str, layers: int, kib: tuple[int, ...], share: int, rate: float
):
    graph, link = training(layers, kib), Link(rate, rate)
    budget = max(sum(b.nbytes for b in graph.buffers) // share, smallest_budget(graph))
    found = fastest(graph, budget, link)
    assert found.strategy == name
    for other in set(module.PROMISING) - {"tensile", "superpipeline"}:
        assert found.seconds < CLEARLY * plan_by(Given(graph, budget, link), other).seconds


def test_superpipeline_takes_the_fastest_of_its_partitions():
    ways = STRATEGIES["superpipeline"], *STRATEGIES["superpipeline"].variants
    chosen = set()
    for layers, share in itertools.product((6, 12), (2, 8)):
        graph, link = training(layers, (4,)), Link(2048.0, 2048.0)
        budget = max(sum(b.nbytes for b in graph.buffers) // share, smallest_budget(graph))
        given = Given(graph, budget, link)
        found = plan_by(given, "superpipeline")
        each = [plan_by(given, way) for way in ways]
        assert found.seconds == min(made.seconds for made in each)
        assert found.strategy == "superpipeline"
        chosen.add(ways.index(found.way))
        # A search stays with it.
        better = better_order(given, "superpipeline", lambda found: True)
        assert better is None or better.way == found.way
        # What the host can hold comes before what is fast.
        least = min(made.taken.host_peak_bytes for made in each)
        held = plan_by(given, "superpipeline", host_bytes=least)
        assert held.taken.host_peak_bytes == least
    assert len(chosen) > 1


def test_of_many_tasks_what_takes_several_plans_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
):
    graph, link = training(12, (4,)), Link(2048.0, 2048.0)
    tried = []
    monkeypatch.setattr(
        module, "plan_by", lambda *args: tried.append(args[1]) or plan_by(*args)
    )
    budget = sum(b.nbytes for b in graph.buffers) // 4
    fastest(graph, budget, link)
    assert "superpipeline" in tried
    tried.clear()
    monkeypatch.setattr(module, "are_many", lambda given: True)
    fastest(graph, budget, link)
    assert "superpipeline" not in tried
    assert "tensile" in tried


# --- In functions.

WIDTH, LAYERS = 128, 6
WEIGHT = WIDTH * WIDTH * 4


def step(weights: list[Any], x: Any) -> list[Any]:
    def loss(weights: list[Any]) -> Any:
        y = x
        for weight in weights:
            y = jnp.tanh(y @ weight)
        return jnp.mean(y**2)

    return [w - g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_by_every_strategy_the_answer_is_that_of_jit(strategy: str):
    normal = np.random.default_rng(0).standard_normal
    weights = [normal((WIDTH, WIDTH)).astype(np.float32) / 12 for _ in range(LAYERS)]
    x = normal((32, WIDTH)).astype(np.float32)
    f = jturnip.jit(step, 6 * WEIGHT, strategy=strategy)
    for _ in range(2):
        assert_same(f(jturnip.host(weights), x), jax.jit(step)(weights, x))
        assert f.last_run.strategy == f.last_run.plan.strategy == strategy
        assert f.last_run.peak_bytes <= 6 * WEIGHT
    plan = f.lower(jturnip.host(weights), x).plan
    assert plan.h2d_bytes >= LAYERS * WEIGHT
    graph, memgraph = memgraph_from_json_dict(plan.to_json_dict())
    assert (graph, memgraph.ops) == (plan.taskgraph, plan.memgraph.ops)
    verify(graph, memgraph)
    assert f.lower(jturnip.host(weights), x).plan.to_json() == plan.to_json()


def test_compare_takes_every_strategy():
    weights = [np.full((WIDTH, WIDTH), k / 1000, np.float32) for k in range(1, LAYERS)]
    x = np.ones((32, WIDTH), np.float32)
    budget = 6 * WEIGHT
    found = jturnip.compare(
        step, weights, x, gpu_bytes=[budget], strategies=list(STRATEGIES), rounds=1
    )
    assert found.agrees
    assert [row.strategy for row in found.rows[1:]] == list(STRATEGIES)
    assert all(row.seconds and not row.refused for row in found.rows)
