"""The solver that tries everything is right, and plans are held against it."""

import heapq
import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from support import GraphBuilder, random_taskgraph, smallest_budget

from jturnip.graph.taskgraph import BufferId, Place, TaskGraph
from jturnip.units import padded


pytest.importorskip("ortools", reason="the solver is OR-tools'")
from tests import exact, optimum


SECONDS, WORKERS = 20.0, 1
# More than any plan here takes or moves.
MANY = 1 << 30


def shortest(graph: TaskGraph, gpu_bytes: int, most: int = 1000) -> int:
    found = exact.shortest_time(graph, gpu_bytes, 1, most, SECONDS, WORKERS)
    assert found.proven
    return found.found


def test_the_link_waits_for_the_first_result_and_computing_for_the_first_weight():
    # In: 4, three tasks of 1, out: 2 each. The first result is there after 5.
    g = GraphBuilder()
    weight = g.input(4)
    results = [g.task([weight], 2, seconds=1)[0] for _ in range(3)]
    graph = g.build(outputs=results, end_on_host=results)
    assert shortest(graph, 1 << 20) == 4 + 1 + 3 * 2


def test_what_there_is_no_room_for_comes_again():
    # Two weights of 1024, room for one and the values: the first is needed again.
    g = GraphBuilder()
    x = g.input(256, start=Place.DEVICE)
    first, second = g.input(1024), g.input(1024)
    for weight in (first, second, first):
        (x,) = g.task([x, weight], 256, seconds=100)
    graph = g.build([x])
    # Each of three reloads, and its task after it; with room for both, two before the last.
    assert shortest(graph, 1024 + 512, 10_000) == 3 * (1024 + 100)
    assert shortest(graph, 2048 + 512, 10_000) == 2 * 1024 + 2 * 100
    least = lambda gpu_bytes: (
        exact.fewest_bytes(graph, gpu_bytes, MANY, SECONDS, WORKERS).found
    )
    assert least(1024 + 512) == 3 * 1024
    assert least(2048 + 512) == 2 * 1024


def test_a_budget_too_small_has_no_plan():
    g = GraphBuilder()
    (x,) = g.task([g.input(1024)], 256)
    with pytest.raises(ValueError, match="no plan"):
        exact.fewest_bytes(g.build([x]), 1024, MANY, SECONDS, WORKERS)


class State(NamedTuple):
    """Tasks that have run, and the buffers in each memory."""

    done: frozenset[int]
    there: frozenset[BufferId]
    away: frozenset[BufferId]


def steps(graph: TaskGraph, gpu_bytes: int, state: State) -> Iterator[tuple[int, State]]:
    """What can be done: run a task, reload, offload or drop a buffer; with bytes moved."""
    sizes = [padded(b.nbytes) for b in graph.buffers]
    done, there, away = state
    room = gpu_bytes - sum(sizes[b] for b in there)
    left = [task for task in graph.tasks if task.id not in done]
    for task in left:
        later = {b for other in left if other is not task for b in other.inputs}
        needed = sum(sizes[b] for b in task.new) + padded(task.workspace)
        if there.issuperset(task.inputs) and later.isdisjoint(task.overwritten):
            if needed <= room:
                after = there.union(task.outputs).difference(task.overwritten)
                yield 0, State(done | {task.id}, after, away)
    for b in there:
        if not graph.buffers[b].pinned:
            yield 0, State(done, there - {b}, away)
        if b not in away:
            yield graph.buffers[b].nbytes, State(done, there, away | {b})
    for b in away - there:
        if sizes[b] <= room:
            yield graph.buffers[b].nbytes, State(done, there | {b}, away)


def is_over(graph: TaskGraph, gpu_bytes: int, state: State) -> bool:
    """Whether all has been done, and results are where they must be."""
    at_home = {b for b in graph.outputs if graph.buffers[b].end_on_host}
    others = set(graph.outputs) - at_home
    staying = others.union(b.id for b in graph.buffers if b.pinned)
    all_fit = sum(padded(graph.buffers[b].nbytes) for b in staying) <= gpu_bytes
    places = state.there if all_fit else state.there | state.away
    return (
        len(state.done) == len(graph.tasks) and at_home <= state.away and others <= places
    )


def fewest_by_search(graph: TaskGraph, gpu_bytes: int) -> int:
    """The fewest bytes over the link, by Dijkstra's algorithm over all that can be done."""
    start = {p: frozenset(b.id for b in graph.buffers if b.start is p) for p in Place}
    count = itertools.count()
    first = State(frozenset(), start[Place.DEVICE], start[Place.HOST])
    heap = [(0, next(count), first)]
    known: set[State] = set()
    while heap:
        moved, _, state = heapq.heappop(heap)
        if is_over(graph, gpu_bytes, state):
            return moved
        if state not in known:
            known.add(state)
            for nbytes, after in steps(graph, gpu_bytes, state):
                heapq.heappush(heap, (moved + nbytes, next(count), after))
    raise AssertionError("there is no plan")


@pytest.mark.long
@given(st.integers(0, 10**6))
@settings(max_examples=6, deadline=None)
def test_the_fewest_bytes_are_those_of_a_plain_search(seed: int):
    rng = random.Random(seed)
    graph = random_taskgraph(rng, rng.randint(1, 2))
    graph = optimum.in_units(graph)
    budget = smallest_budget(graph) + optimum.UNIT * rng.choice([0, 1, 2, 4, 8])
    found = exact.fewest_bytes(graph, budget, MANY, SECONDS, WORKERS)
    assert found.proven
    assert found.found == fewest_by_search(graph, budget)


@pytest.mark.long
@pytest.mark.parametrize("kind", optimum.KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_no_plan_is_better_than_the_best_and_few_are_far_from_it(kind: str, seed: int):
    row = optimum.compared(kind, seed, SECONDS, WORKERS)
    assert row.shortest.least <= row.auto <= 1.3 * row.shortest.found
