"""Partitions of tasks, and who is on the device while one of them computes."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st
from support import (
    GraphBuilder,
    assert_plan_is_right,
    on_device_before_runs,
    streaming_chain,
    taskgraphs,
)

from jturnip.graph.memgraph import OpKind
from jturnip.graph.taskgraph import BufferId, Place, TaskGraph
from jturnip.planner.planner import plan, smallest_budget
from jturnip.planner.strategies import STRATEGIES
from jturnip.planner.windows import Window, every_task, of_resident, returned_after_use
from jturnip.units import padded


PIPELINES = (STRATEGIES["superpipeline"], *STRATEGIES["superpipeline"].variants)
PAIRS = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (5, 3), (8, 4)])


@given(taskgraphs(), PAIRS, st.integers(0, 8192))
def test_partitions_are_consecutive_and_fill_no_more_than_their_share(
    graph: TaskGraph, pair: tuple[int, int], more: int
):
    budget = smallest_budget(graph) + more
    window = of_resident(graph, budget, *pair)
    numbers = window.partitions
    assert not numbers or numbers[0] == 0
    assert all(b - a in (0, 1) for a, b in itertools.pairwise(numbers))
    assert [numbers.index(p) for p in range(len(window.firsts))] == list(window.firsts)
    for p, first in enumerate(window.firsts):
        tasks = [t for t in graph.tasks if numbers[t.id] == p]
        touched = {b for t in tasks for b in (*t.inputs, *t.outputs)}
        nbytes = sum(padded(graph.buffers[b].nbytes) for b in touched)
        assert tasks[0].id == first
        assert len(tasks) == 1 or nbytes <= budget // pair[0]


@given(st.integers(1, 30), PAIRS)
def test_what_may_be_loaded_is_what_waits_for_nothing_more(
    tasks: int, pair: tuple[int, int]
):
    every = tuple(range(tasks))
    window = Window(every, every, *pair)
    for executed, position in itertools.product(every, every):
        # Before a task is next, those before it are over.
        is_over = window.loads_after(position) < executed
        assert window.may_load(position, executed) == is_over
    for executed in every:
        there = [p for p in every if window.may_load(p, executed)]
        assert executed in there  # k' is no more than k
        ahead = [p for p in there if p > executed]
        assert len(ahead) < pair[0]


def test_of_two_partitions_one_loads_while_the_other_computes():
    window = Window((0, 0, 1, 2, 2), (0, 2, 3))
    assert [window.may_load(p, 1) for p in range(5)] == [True, True, True, False, False]
    assert [window.loads_after(p) for p in range(5)] == [-1, -1, -1, 1, 1]
    assert [window.ends(p) for p in range(5)] == [False, True, True, False, False]


def test_two_of_four_partitions_make_room_together():
    every = tuple(range(8))
    window = Window(every, every, resident=4, returned=2)
    assert [window.ends(p) for p in every] == [False, True] * 3 + [False, False]
    assert [window.loads_after(p) for p in every] == [-1, -1, -1, -1, 1, 1, 3, 3]


def test_every_task_alone_loads_nothing_ahead():
    window = every_task(streaming_chain(5), 0)
    assert [window.loads_after(p) for p in range(5)] == [-1, 0, 1, 2, 3]


def test_a_partition_returns_what_no_one_there_reads_next():
    g = GraphBuilder()
    again = g.input(1024)  # read by the first and the last
    soon = g.input(1024)  # and by the first and the second
    at_start = g.input(1024, Place.DEVICE)  # by the last
    kept = g.input(1024, Place.DEVICE, pinned=True)  # too, and the caller's
    x = g.input(1024)
    (x,) = g.task([x, again, soon], 1024)
    (x,) = g.task([x, soon], 1024)
    (x,) = g.task([x], 1024)
    (x,) = g.task([x, again, at_start, kept], 1024)
    graph = g.build([x])
    every = tuple(range(4))
    leave = returned_after_use(graph, Window(every, every)).leave
    assert {t: tuple(b) for t, b in leave.items() if b} == {-1: (at_start,), 0: (again,)}


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: str(PIPELINES.index(p)))
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_only_what_resident_partitions_read_is_on_the_device(pipeline, data):
    graph = data.draw(taskgraphs())
    budget = smallest_budget(graph) + data.draw(st.integers(0, 16384))
    memgraph = plan(graph, budget, pipeline)
    assert_plan_is_right(graph, memgraph, orders=3)
    window = pipeline.window(graph, budget)
    readers = [[t.id for t in graph.tasks if b.id in t.inputs] for b in graph.buffers]
    may_stay = {b.id for b in graph.buffers if b.pinned}
    for position, there in enumerate(on_device_before_runs(memgraph)):
        if position and not window.ends(position - 1):
            continue
        for b in there - may_stay:
            later = [t for t in readers[b] if t >= position]
            assert not later or window.may_load(later[0], position)


def test_weights_that_come_again_leave_after_each_use_though_there_is_room():
    g = GraphBuilder()
    weights = [g.input(4096) for _ in range(6)]
    x = g.input(256)
    for w in weights * 2:
        (x,) = g.task([x, w], 256)
    graph = g.build([x])
    comes = {}
    for name in ("layerwise", "superpipeline"):
        memgraph = plan(graph, 5 * 4096, name)
        reloads = [
            memgraph.instances[op.reads[0]].buffer
            for op in memgraph.ops
            if op.kind is OpKind.RELOAD
        ]
        comes[name] = [reloads.count(BufferId(w)) for w in weights]
    assert comes["superpipeline"] == [2] * 6
    assert sum(comes["layerwise"]) < 12
