"""Orders of the tasks: valid, what they are for, and that the answers stay the same."""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same
from hypothesis import given, settings, strategies as st
from support import GraphBuilder, smallest_budget, taskgraphs

import jturnip
from jturnip.graph.taskgraph import Place, TaskGraph, TaskId
from jturnip.planner import figures
from jturnip.planner.orders import ORDERS, as_given, order, reordered
from jturnip.planner.planner import plan
from jturnip.programs.fastest import fastest
from jturnip.runtime.schedule import Link
from jturnip.show import explain


KIB = 1024


@pytest.mark.parametrize("name", ORDERS)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_every_order_is_valid_and_has_every_task_once(name: str, data: st.DataObject):
    graph = data.draw(taskgraphs())
    budget = smallest_budget(graph) + data.draw(st.integers(0, 64))
    found = reordered(graph, order(graph, budget, name))
    found.check()
    as_they_are = lambda graph: Counter(replace(t, id=TaskId(0)) for t in graph.tasks)
    assert as_they_are(found) == as_they_are(graph)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_there_is_a_way_back(data: st.DataObject):
    graph = data.draw(taskgraphs())
    tasks = order(graph, smallest_budget(graph), data.draw(st.sampled_from(list(ORDERS))))
    where, back = as_given(reordered(graph, tasks), tasks)
    assert back == graph
    assert [tasks[t] for t in where] == list(range(len(graph.tasks)))


def test_there_is_a_way_back_from_a_second_run_before_the_first():
    """An order that a search finds may swap the two."""
    g = GraphBuilder()
    x = g.input(KIB)
    (large,) = g.task([x], 64 * KIB)
    (small,) = g.task([x], KIB)
    (end,) = g.task([large, small], KIB)
    graph = g.build([end])
    twice = (0, 1, 0, 2)
    swapped = (1, 2, 0, 3)  # of the tasks of that
    tasks = [twice[t] for t in swapped]
    where, back = as_given(reordered(reordered(graph, twice), swapped), tasks)
    back.check()
    assert back == graph
    assert [tasks[t] for t in where] == [0, 1, 2]


def microbatches(layers: int, batches: int, nbytes: int = KIB) -> TaskGraph:
    """Each batch goes through all layers; their weights are larger than its values."""
    g = GraphBuilder()
    weights = [g.input(64 * KIB) for _ in range(layers)]
    results = []
    for _ in range(batches):
        x = g.input(nbytes)
        for weight in weights:
            (x,) = g.task([x, weight], nbytes, seconds=1e-6)
        results.append(x)
    return g.build(results)


def test_what_is_on_the_device_is_read_by_all_before_it_leaves():
    """Three layers, two at a time: layer by layer, and not batch by batch."""
    graph = microbatches(layers=3, batches=3)
    assert order(graph, 2 * 64 * KIB + 8 * KIB, "reuse") == (0, 3, 6, 1, 4, 7, 2, 5, 8)


def test_results_are_used_up_soon():
    """An update frees a gradient as large as what it reads, the next gradient does not."""
    g = GraphBuilder()
    x = g.input(KIB)
    gradients = [g.task([x], 16 * KIB)[0] for _ in range(3)]
    updates = [g.task([gradient], KIB)[0] for gradient in gradients]
    graph = g.build(updates)
    assert order(graph, 64 * KIB, "lean") == (0, 3, 1, 4, 2, 5)
    assert order(graph, 64 * KIB, "reuse") == (0, 1, 2, 3, 4, 5)


def test_what_is_written_over_frees_nothing():
    """Both tasks need nothing more; the second frees what only it reads."""
    g = GraphBuilder()
    large, small = g.input(64 * KIB, Place.DEVICE), g.input(15 * KIB, Place.DEVICE)
    (over,) = g.task([large], 64 * KIB, overwrites=[(0, 0)])
    (freeing,) = g.task([small], KIB)
    assert order(g.build([over, freeing]), 128 * KIB, "lean") == (1, 0)


def test_there_is_a_word_for_every_order():
    assert {"", "search", *ORDERS} == set(explain.IN_WORDS)


def test_the_fastest_order_is_taken_and_the_programs_own_where_it_is_as_good():
    graph, link = microbatches(layers=4, batches=6), Link(1e9, 1e9)
    budget = 2 * 64 * KIB + 16 * KIB
    found = fastest(graph, budget, link)
    assert found.order == "reuse"
    weights = 4 * 64 * KIB + 6 * KIB
    assert figures.moved_bytes(found.graph, found.memgraph) == (weights, 0)
    moved, _ = figures.moved_bytes(graph, plan(graph, budget))
    assert moved > 4 * weights
    # A link so fast that only the tasks' time counts.
    assert fastest(graph, budget, Link(1e15, 1e15)).order == ""


def test_an_order_that_the_host_has_no_memory_for_is_not_taken():
    graph, link = microbatches(layers=4, batches=6, nbytes=32 * KIB), Link(1e9, 1e9)
    budget = 2 * 64 * KIB + 8 * KIB
    away = lambda found: figures.host_peak_bytes(found.graph, found.memgraph)
    found = fastest(graph, budget, link)
    assert found.order == "reuse"
    limited = fastest(graph, budget, link, host_bytes=away(found) - 1)
    assert limited.order == ""
    assert away(limited) < away(found)
    assert limited.taken.seconds > found.taken.seconds
    # Where no plan keeps to it, there is one to speak of.
    assert fastest(graph, budget, link, host_bytes=-1).order == ""


# --- In functions.

WIDTH, LAYERS, BATCHES = 128, 6, 4
WEIGHT = WIDTH * WIDTH * 4


def batches(weights: list[Any], xs: list[Any]) -> list[Any]:
    results = []
    for x in xs:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        results.append(x)
    return results


# Where tasks took long when they were measured, a few of them in another place may gain.
OF_REUSE = ("reuse", "search")


def data() -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    weights = [jturnip.host(normal(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(LAYERS)]
    return weights, [normal(4, WIDTH) for _ in range(BATCHES)]


def test_several_batches_read_each_weight_once():
    weights, xs = data()
    # A link so slow that nothing else matters, whatever the machine does meanwhile.
    link = jturnip.SimulatedLink(2e7, 2e7)
    budget = 5 * WEIGHT // 2
    f = jturnip.jit(batches, budget, link=link)
    want = jax.jit(batches)([np.asarray(w) for w in weights], xs)
    report = None
    for _ in range(3):
        assert_same(f(weights, xs), want)
        report = f.last_run
        assert report is not None
        assert report.plan.task_order in OF_REUSE
        assert report.peak_bytes <= budget
        assert report.h2d_bytes <= 1.1 * LAYERS * WEIGHT
    assert report is not None
    assert "order of their own" in report.plan.explain()
    assert report.plan.to_json_dict()["task_order"] == report.plan.task_order
    paper = jturnip.jit(batches, budget, link=link, strategy="turnip")
    assert_same(paper(weights, xs), want)
    assert paper.last_run.plan.task_order == ""
    assert paper.last_run.h2d_bytes > 2 * report.h2d_bytes


@pytest.mark.long
def test_gradients_over_several_batches_are_the_same_in_any_order():
    weights, xs = data()

    def step(weights: list[Any], xs: list[Any]) -> list[Any]:
        loss = lambda weights, x: jnp.mean(batches(weights, [x])[0])
        gradients = [jax.grad(loss)(weights, x) for x in xs]
        return [
            w - sum(each)
            for w, each in zip(weights, zip(*gradients, strict=True), strict=True)
        ]

    want = jax.jit(step)([np.asarray(w) for w in weights], xs)
    link = jturnip.SimulatedLink(2e7, 2e7)
    found = {}
    for strategy in ("turnip", "auto"):
        f = jturnip.jit(step, 5 * WEIGHT, link=link, strategy=strategy)
        found[strategy] = f(weights, xs)
        assert f.last_run.peak_bytes <= 5 * WEIGHT
    assert f.last_run.plan.task_order != ""
    assert_same(found["turnip"], want)
    for ours, theirs in zip(found["auto"], found["turnip"], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_effects_keep_the_order_of_the_program():
    weights, xs = data()
    seen: list[int] = []

    def told(weights: list[Any], xs: list[Any]) -> list[Any]:
        results = []
        for at, x in enumerate(xs):
            for weight in weights:
                x = jnp.tanh(x @ weight)
            jax.debug.callback(lambda at=at: seen.append(at), ordered=True)
            results.append(x)
        return results

    link = jturnip.SimulatedLink(2e7, 2e7)
    f = jturnip.jit(told, 5 * WEIGHT // 2, link=link)
    jax.block_until_ready(f(weights, xs))
    assert f.last_run.plan.task_order in OF_REUSE
    assert seen == list(range(BATCHES))
