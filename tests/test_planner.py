"""Every strategy, on random graphs: right, within the budget, and as economical as said."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st
from support import GraphBuilder, assert_plan_is_right, streaming_chain, taskgraphs

from jturnip.errors import DoesNotFit
from jturnip.graph.memgraph import DepKind, OpKind
from jturnip.graph.taskgraph import Place
from jturnip.planner import planner
from jturnip.planner.planner import plan, smallest_budget
from jturnip.planner.rates import Rates
from jturnip.planner.strategies import STRATEGIES
from jturnip.planner.verify import peak_bytes, verify
from jturnip.runtime.schedule import Link, schedule
from jturnip.runtime.simulated import simulate
from jturnip.units import padded


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_order_of_a_plan_computes_the_function(strategy, data):
    graph = data.draw(taskgraphs())
    least = smallest_budget(graph)
    everything = sum(-(-b.nbytes // 256) * 256 for b in graph.buffers) + least
    budget = data.draw(st.integers(least, everything + 1))
    rates = data.draw(st.sampled_from([None, Rates(1e2, 1e4), Rates(1e4, 1e2, 1.0)]))
    memgraph = plan(graph, budget, strategy, rates)
    assert_plan_is_right(graph, memgraph, orders=5)
    assert peak_bytes(memgraph) <= budget


@pytest.mark.long
@given(taskgraphs())
@settings(max_examples=100, deadline=None)
def test_one_byte_less_than_the_smallest_budget_is_refused(graph):
    least = smallest_budget(graph)
    for strategy in STRATEGIES:
        verify(graph, plan(graph, least, strategy))
        if least:
            with pytest.raises(DoesNotFit) as refusal:
                plan(graph, least - 1, strategy)
            assert refusal.value.needed_bytes == least
            assert refusal.value.gpu_bytes == least - 1


def test_the_same_input_gives_the_same_plan():
    graph = streaming_chain(200, [1000, 3000])
    budget = 2 * smallest_budget(graph)
    for strategy, rates in itertools.product(STRATEGIES, (None, Rates(1e3, 2e3))):
        first = plan(graph, budget, strategy, rates)
        assert plan(graph, budget, strategy, rates) == first


def test_a_buffer_with_a_host_copy_leaves_without_a_write():
    # One weight is read by the first and the last task; between them others need its room.
    g = GraphBuilder()
    weight = g.input(1024)
    others = [g.input(1024) for _ in range(4)]
    x = g.input(256)
    for w in (weight, *others, weight):
        (x,) = g.task([x, w], 256)
    graph = g.build(outputs=[x])
    memgraph = plan(graph, smallest_budget(graph))
    kinds = [op.kind for op in memgraph.ops]
    reloaded = [
        memgraph.instances[op.reads[0]].buffer
        for op in memgraph.ops
        if op.kind is OpKind.RELOAD
    ]
    assert kinds.count(OpKind.OFFLOAD) == 0
    assert reloaded.count(weight) == 2


def test_every_memory_dependency_says_why():
    graph = streaming_chain(50, [1000])
    for op in plan(graph, smallest_budget(graph)).ops:
        assert all(d.why for d in op.deps if d.kind is not DepKind.DATA)


def test_nothing_moves_when_everything_fits():
    g = GraphBuilder()
    x = g.input(1000, start=Place.DEVICE)
    for _ in range(10):
        (x,) = g.task([x], 1000)
    memgraph = plan(g.build(outputs=[x]), 1 << 20)
    assert not any(op.kind in (OpKind.OFFLOAD, OpKind.RELOAD) for op in memgraph.ops)


def test_ahead_the_next_operand_comes_while_a_task_runs():
    """Columns come round for every block of rows. The furthest next use is that of the one
    just used; so the next would always take its place, and wait for it."""
    builder = GraphBuilder()
    blocks = [builder.input(4096) for _ in range(3)]
    columns = [builder.input(1024) for _ in range(8)]
    outputs = [
        builder.task([block, column], 256, seconds=1.0)[0]
        for block in blocks
        for column in columns
    ]
    graph = builder.build(outputs, end_on_host=outputs)
    link = Link(1024.0, 1024.0)
    seconds = {}
    for strategy in ("turnip", "ahead"):
        memgraph = plan(graph, 4096 + 3 * 1024 + 2 * 256, strategy)
        verify(graph, memgraph)
        seconds[strategy] = simulate(schedule(graph, memgraph, link), strategy).seconds
    assert seconds["ahead"] < 0.85 * seconds["turnip"]


def test_fixed_order_holds_every_run_after_the_one_before():
    graph = streaming_chain(30, [1000])
    runs = [
        op
        for op in plan(graph, 2 * smallest_budget(graph), "fixed_order").ops
        if op.kind is OpKind.RUN
    ]
    for before, after in itertools.pairwise(runs):
        assert before.id in {d.op for d in after.deps}


@pytest.mark.parametrize(
    "strategy", ["ours", "ahead", "layerwise", "superpipeline", "tensile"]
)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_is_expected_to_be_in_use_is(strategy, data):
    """Where outputs get their bytes late, what is reserved ahead counts on that."""
    graph = data.draw(taskgraphs())
    least = smallest_budget(graph)
    seen = []

    class Builder(planner._Builder):
        def execute(self, position):
            task = self._graph.tasks[position]
            after = max(0, self._ahead.most - self._arena.nbytes)
            taken = self._arena.nbytes - self._arena.free_bytes
            taken += sum(self._sizes[b] for b in task.new) + padded(task.workspace)
            seen.append((after, self._ahead.most - taken))
            super().execute(position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_Builder", Builder)
        plan(graph, data.draw(st.integers(least, 3 * least)), strategy)
    # Never less than what is in use, nor more than there is.
    assert all(over == 0 and more >= 0 for over, more in seen)
