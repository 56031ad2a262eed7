"""Plans and what they take, by the twin in C++ and by the planner and the simulator."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support import GraphBuilder, random_taskgraph, taskgraphs

from jturnip.errors import DoesNotFit
from jturnip.graph.taskgraph import Place, TaskGraph
from jturnip.planner import orders
from jturnip.planner.planner import smallest_budget
from jturnip.planner.strategies import STRATEGIES, Strategy
from jturnip.planner.verify import verify
from jturnip.programs import twin
from jturnip.programs.found import Found, Given
from jturnip.runtime.schedule import Link


needs_native = pytest.mark.skipif(not twin.is_there(), reason="no C++ extension")

WAYS = [way for s in STRATEGIES.values() for way in (s, *s.variants)]

small = lambda *seconds: st.sampled_from([0.0, *seconds])
LINKS = st.builds(
    Link,
    *[st.sampled_from([1e2, 1e3, 1e4, 3e6])] * 2,
    small(0.3),
    small(0.01, 0.2),
    small(0.02),
    small(0.5),
    small(0.1),
    small(1e-5),
    after_compute=st.booleans(),
)


def some_again(graph: TaskGraph, rng: random.Random) -> list[int]:
    """An order of the tasks in which some come again before others."""
    tasks: list[int] = []
    for task in graph.tasks:
        earlier = [t for t in set(tasks) if not graph.tasks[t].overwrites]
        # What it reads is still there: nobody has written over it.
        gone = {b for t in tasks for b in graph.tasks[t].overwritten}
        may = [t for t in earlier if not gone.intersection(graph.tasks[t].inputs)]
        if may and rng.random() < 0.3:
            tasks.append(rng.choice(may))
        tasks.append(task.id)
    return tasks


def assert_the_same(
    graph: TaskGraph, arena: int, link: Link, tasks: Sequence[int], way: Strategy
):
    """Both make the same plan, if there is one, and say the same of it to the last bit."""
    by_twin = Found(Given(graph, arena, link), tasks, "", way)
    by_planner = Found(without_twin(graph, arena, link), tasks, "", way)
    assert by_twin.given.twin is not None
    assert _answer(lambda: by_twin.taken) == _answer(lambda: by_planner.taken)
    assert _answer(lambda: by_twin.memgraph) == _answer(lambda: by_planner.memgraph)


def _answer(ask: Callable[[], Any]) -> Any:
    """What is found, or the words of a refusal."""
    try:
        return ask()
    except DoesNotFit as error:
        return str(error)


def without_twin(graph: TaskGraph, arena: int, link: Link) -> Given:
    given = Given(graph, arena, link)
    given.__dict__["twin"] = None
    return given


@pytest.mark.long
@needs_native
@given(taskgraphs(), LINKS, st.integers(-300, 8192), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_twin_and_planner_are_the_same(
    graph: TaskGraph, link: Link, more: int, rng: random.Random
):
    # A task takes some time to start, more or less than it runs.
    tasks = tuple(
        dataclasses.replace(task, dispatch_seconds=rng.choice([0.0, 0.05, 2.0]))
        for task in graph.tasks
    )
    graph = dataclasses.replace(graph, tasks=tasks)
    arena = max(1, smallest_budget(graph) + more)
    program = range(len(graph.tasks))
    named = [orders.order(graph, arena, name) for name in orders.ORDERS]
    assert [Given(graph, arena, link).in_order(name) for name in orders.ORDERS] == named
    for order in (program, *named, some_again(graph, rng)):
        assert_the_same(graph, arena, link, order, rng.choice(WAYS))


@needs_native
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_they_are_for_larger_graphs(way: Strategy):
    for seed in range(4):
        graph = random_taskgraph(random.Random(seed), 200)
        total = sum(b.nbytes for b in graph.buffers)
        arena = max(smallest_budget(graph), total // (3 + 4 * seed))
        link = Link(3e3, 2e3, 0.01, 1e-3, 1e-3, 5e-3, after_compute=seed % 2 == 1)
        assert_the_same(graph, arena, link, range(len(graph.tasks)), way)
        for name in orders.ORDERS:
            named = orders.order(graph, arena, name)
            assert Given(graph, arena, link).in_order(name) == named


def test_without_the_extension_there_is_no_twin(monkeypatch: pytest.MonkeyPatch):
    graph = random_taskgraph(random.Random(1), 12)
    arena, link = smallest_budget(graph) + 2048, Link(1e3, 1e3)
    monkeypatch.setattr(twin, "is_there", lambda: False)
    given = Given(graph, arena, link)
    assert given.twin is None
    found = Found(given, range(12), "", STRATEGIES["ours"])
    assert verify(found.graph, found.memgraph) <= arena
    assert found.taken.seconds > 0


@needs_native
def test_numbers_that_name_nothing_are_refused():
    from jturnip.native import _native

    buffer = (256, 256, 2, False, False)
    for task, outputs in (
        (([1], [], [], 0, 1.0, 0.0), []),
        (([0], [-1], [], 0, 1.0, 0.0), []),
        (([0], [], [(0, 0)], 0, 1.0, 0.0), []),
        (([0], [], [], 0, 1.0, 0.0), [7]),
    ):
        with pytest.raises(ValueError, match="no such buffer"):
            _native.TaskGraph([buffer], [task], outputs)
    graph = _native.TaskGraph([buffer], [([0], [], [], 0, 1.0, 0.0)], [])
    with pytest.raises(ValueError, match="no such task"):
        graph.reordered([1])


@needs_native
def test_what_is_read_before_it_is_written_ends_nothing():
    """A graph that breaks its own rules: the planner is to say so, not to crash."""
    g = GraphBuilder()
    x = g.input(1024, Place.HOST)
    (y,) = g.task([x], 1024, seconds=1.0)
    (z,) = g.task([y], 1024, seconds=1.0)
    found = Found(Given(g.build([z]), 8192, Link(1e3, 1e3)), [1, 0], "", WAYS[0])
    assert found.given.twin is not None
    way = found._way_in_twin
    assert found.given.twin.taken([1, 0], 8192, way, found.given.link) is None
    assert found.given.twin.plan([1, 0], found.graph, 8192, way, found.given.rates) is None
