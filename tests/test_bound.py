"""The time that no plan can beat: true for every plan, and reached by some."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support import GraphBuilder, taskgraphs

from jturnip.graph.memgraph import MemGraph
from jturnip.graph.taskgraph import Place, TaskGraph
from jturnip.planner import bound
from jturnip.planner.bound import least_seconds
from jturnip.planner.planner import plan, smallest_budget
from jturnip.planner.strategies import STRATEGIES
from jturnip.programs import planning
from jturnip.runtime.schedule import Link, schedule
from jturnip.runtime.simulated import simulate
from jturnip.runtime.state import Limits


# A byte a second each way, so that bytes are seconds.
RATE = 1.0


def simulated_seconds(graph: TaskGraph, gpu_bytes: int, strategy: str = "turnip") -> float:
    link = Link(RATE, RATE)
    ready = schedule(graph, plan(graph, gpu_bytes, strategy), link)
    return simulate(ready, strategy, link).seconds


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_plan_beats_it(strategy: str, data: st.DataObject):
    graph = data.draw(taskgraphs())
    least = smallest_budget(graph)
    everything = sum(b.nbytes for b in graph.buffers) + least
    budget = data.draw(st.integers(least, everything))
    rates = [data.draw(st.sampled_from([1e2, 1e4, 1e6])) for _ in range(2)]
    link = Link(*rates)
    ready = schedule(graph, plan(graph, budget, strategy), link)
    seconds = simulate(ready, strategy, link).seconds
    assert least_seconds(graph, budget, *rates) <= seconds * (1 + 1e-9)


@st.composite
def with_a_waist(draw: st.DrawFn) -> TaskGraph:
    """Values that are read after a task which waits for all that came before it."""
    g = GraphBuilder()
    x = g.input(draw(st.integers(1, 1024)))
    kib = st.integers(1, 8).map(lambda n: n * 1024)
    made = [
        g.task([x], draw(kib), 256, seconds=draw(st.floats(0, 2)))
        for _ in range(draw(st.integers(2, 6)))
    ]
    (y,) = g.task([token for _, token in made], 256)
    for value, _ in draw(st.permutations(made)):
        weights = [g.input(draw(kib)) for _ in range(draw(st.integers(0, 1)))]
        (y,) = g.task([y, value, *weights], 256, seconds=draw(st.floats(0, 2)))
    return g.build(outputs=[y], end_on_host=[y] if draw(st.booleans()) else [])


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_plan_beats_it_where_the_budget_is_less_than_what_waits(
    strategy: str, data: st.DataObject
):
    graph = data.draw(with_a_waist())
    budget = smallest_budget(graph) + data.draw(st.integers(0, 8 * 1024))
    link = Link(*[data.draw(st.sampled_from([1e3, 1e4])) for _ in range(2)])
    ready = schedule(graph, plan(graph, budget, strategy), link)
    seconds = simulate(ready, strategy, link).seconds
    rates = link.h2d_bytes_per_second, link.d2h_bytes_per_second
    assert least_seconds(graph, budget, *rates) <= seconds * (1 + 1e-9)


def slowed(graph: TaskGraph, memgraph: MemGraph, link: Link) -> tuple[float, float]:
    """The bound by what copies take from the tasks, and what a run takes."""
    ready = schedule(graph, memgraph, link)
    given = SimpleNamespace(link=link)
    found: Any = SimpleNamespace(schedule=ready, memgraph=memgraph, given=given)
    seconds = [
        simulate(ready, "turnip", link, limits).seconds
        for limits in (None, Limits.on("cpu"), Limits(compute=1))
    ]
    return planning._slowed_seconds(found), min(seconds)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_plan_beats_what_its_copies_take_from_its_tasks(
    strategy: str, data: st.DataObject
):
    graph = data.draw(st.one_of(taskgraphs(), with_a_waist()))
    least = smallest_budget(graph)
    budget = data.draw(st.integers(least, 2 * least + 8 * 1024))
    rate = st.sampled_from([1e3, 1e4])
    link = Link(
        data.draw(rate),
        data.draw(rate),
        compute_seconds_per_copy=data.draw(st.floats(0, 1)),
        compute_seconds_per_byte=data.draw(st.floats(0, 1e-3)),
    )
    at_least, seconds = slowed(graph, plan(graph, budget, strategy), link)
    assert at_least <= seconds * (1 + 1e-9)


def test_copies_beside_the_last_task_take_from_it():
    """Ten results go to the host, two at a time, while two tasks of a second run."""
    g = GraphBuilder()
    x = g.input(1)
    results = g.task([x], *([250] * 10), seconds=0.001)
    (a,) = g.task([x], 1, seconds=1.0)
    (b,) = g.task([x, a], 1, seconds=1.0)
    graph = g.build(outputs=[*results, b], end_on_host=[*results])
    link = Link(1e3, 1e3, compute_seconds_per_byte=0.5e-3)
    at_least, seconds = slowed(graph, plan(graph, 100_000, "turnip"), link)
    # Half of the 2.5 s that they take.
    assert at_least == pytest.approx(2.001 + 1.25 + 0.5e-3)
    assert at_least <= seconds <= at_least + 0.01


def test_copies_take_from_the_tasks_but_after_the_last():
    def slowed(*lost: float, late: Sequence[Sequence[tuple[float, float]]] = ()) -> float:
        return bound.slowed_seconds([3.0, 3.0, 3.0], lost, late) - 9

    # What a task waits for takes all that it takes.
    assert slowed(1, 1) == 2
    # What nothing waits for takes less from them than its own time afterwards.
    assert slowed(late=[[(6, 12)]]) == 6
    # What takes more from them than its own time had better come after them.
    assert slowed(late=[[(90, 12)]]) == 12
    assert slowed(late=[[(90, 12), (1, 2)]]) == 12 + 1
    # Both ways at once: each takes less, but both together more.
    assert slowed(late=[[(8, 12)], [(8, 12)]]) == 12
    assert slowed(late=[[(8, 12)], [(8, 6)]]) == 6 + 8 * 6 / 12
    assert slowed(1, late=[[], [(0, 0)], [(3, 0)]]) == 1
    assert bound.slowed_seconds([], [], []) == 0


def test_the_link_waits_for_the_first_result_and_computing_for_the_first_weight():
    # In: 4 s, three tasks of 1 s, out: 2 s each. The first result is there after 5 s.
    g = GraphBuilder()
    weight = g.input(4)
    results = [g.task([weight], 2, seconds=1.0)[0] for _ in range(3)]
    graph = g.build(outputs=results, end_on_host=results)
    assert least_seconds(graph, 100_000, RATE, RATE) == 4 + 1 + 3 * 2
    assert simulated_seconds(graph, 100_000) == 4 + 1 + 3 * 2


def test_computing_follows_the_last_weight():
    # A chain: each weight takes 3 s, its task 1 s. The last weight is there after 12 s.
    g = GraphBuilder()
    x = g.input(1, start=Place.DEVICE)
    for _ in range(4):
        (x,) = g.task([x, g.input(3)], 1, seconds=1.0)
    graph = g.build(outputs=[x])
    assert least_seconds(graph, 100_000, RATE, RATE) == 4 * 3 + 1
    assert simulated_seconds(graph, 100_000) == 4 * 3 + 1


def test_what_the_budget_cannot_hold_in_the_middle_crosses_again():
    """Four values are read after a task that waits for all of them, and reads none."""
    g = GraphBuilder()
    x = g.input(256, start=Place.DEVICE)
    made = [g.task([x], 1024, 256) for _ in range(4)]
    (middle,) = g.task([token for _, token in made], 256)
    (y,) = g.task([middle, made[0][0]], 256)
    for value, _ in made[1:]:
        (y,) = g.task([y, value], 256)
    graph = g.build(outputs=[y])
    assert least_seconds(graph, 4 * 1024 + 256, RATE, RATE) == 0
    # Room for two of the four, and for what the middle writes.
    assert least_seconds(graph, 2 * 1024 + 256, RATE, RATE) == 2 * 1024


def test_many_tasks_have_sums_only(monkeypatch: pytest.MonkeyPatch):
    g = GraphBuilder()
    weight = g.input(4)
    results = [g.task([weight], 2, seconds=1.0)[0] for _ in range(3)]
    graph = g.build(outputs=results, end_on_host=results)
    monkeypatch.setattr(bound, "_MOST", 2)
    assert least_seconds(graph, 100_000, RATE, RATE) == 6


def test_nothing_takes_no_time():
    assert least_seconds(TaskGraph((), (), ()), 0, RATE, RATE) == 0
