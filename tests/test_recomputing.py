"""Tasks that run a second time: the same is computed, less is moved, and only where that is
faster."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same
from hypothesis import given, settings, strategies as st
from support import GraphBuilder, taskgraphs, with_overwrites

import jturnip
from jturnip import placement
from jturnip.frontend.values import Equation
from jturnip.graph.taskgraph import BufferId, Place, TaskGraph
from jturnip.planner import figures
from jturnip.planner.bound import least_seconds
from jturnip.planner.orders import as_given, reordered
from jturnip.planner.planner import plan as make_memgraph, smallest_budget
from jturnip.planner.rates import Rates
from jturnip.planner.recomputing import repeating
from jturnip.planner.verify import verify
from jturnip.programs import ways
from jturnip.programs.fastest import fastest
from jturnip.programs.planning import gives_the_same_again
from jturnip.runtime.schedule import Link


KIB = 1024
RATES = Rates(1e6, 1e6)


def results(graph: TaskGraph, what: list[int]) -> list[Any]:
    """What a graph computes, as nested records; `what[t]` stands for what task t does."""
    found: dict[BufferId, Any] = {
        b.id: ("given", b.id) for b in graph.buffers if b.start is not None
    }
    for task in graph.tasks:
        read = hash(tuple(found[b] for b in task.inputs))
        for b in task.overwritten:
            del found[b]
        for at, b in enumerate(task.outputs):
            found[b] = hash((what[task.id], at, read))
    return [found[b] for b in graph.outputs]


@pytest.mark.long
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_same_is_computed(data: st.DataObject):
    graph = data.draw(taskgraphs())
    budget = smallest_budget(graph) + data.draw(st.integers(0, 2048))
    tasks = range(len(graph.tasks))
    may_repeat = data.draw(st.sets(st.sampled_from(tasks))) if tasks else set()
    memgraph = make_memgraph(graph, budget)
    for again in repeating(graph, memgraph, tasks, RATES, may_repeat):
        assert {t for t in tasks if again.count(t) > 1} <= may_repeat
        longer = reordered(graph, again)
        longer.check()
        assert results(longer, list(again)) == results(graph, list(tasks))
        verify(longer, make_memgraph(longer, budget))
        where, back = as_given(longer, again)
        assert back == graph
        assert [again[t] for t in where] == list(tasks)


def early_and_late(seconds: float) -> TaskGraph:
    """A large value made at the begin of what is small, read at the end; in between, tasks
    that need the room."""
    g = GraphBuilder()
    small = g.input(KIB, Place.DEVICE, pinned=True)
    (large,) = g.task([small], 64 * KIB, seconds=seconds)
    (x,) = g.task([large], KIB, seconds=1e-3)
    for _ in range(3):
        (wide,) = g.task([x], 64 * KIB, seconds=1e-3)
        (x,) = g.task([wide], KIB, seconds=1e-3)
    (end,) = g.task([large, x, small], KIB, seconds=1e-3)
    return g.build([end])


BUDGET = 80 * KIB
EVERY = range(100)


def moved(found: Any) -> int:
    return sum(figures.moved_bytes(found.graph, found.memgraph))


def test_what_is_quick_to_make_is_made_again_rather_than_moved():
    graph, link = early_and_late(seconds=1e-3), Link(1e7, 1e7)
    kept = fastest(graph, BUDGET, link)
    assert moved(kept) == 2 * 64 * KIB
    found = fastest(graph, BUDGET, link, EVERY)
    assert moved(found) == 0
    # Just before it is read.
    assert list(found.tasks) == [*range(8), 0, 8]
    assert found.taken.seconds < 0.97 * kept.taken.seconds


@pytest.mark.parametrize(
    ("graph", "rate", "may_repeat"),
    [
        (early_and_late(seconds=1.0), 1e7, EVERY),
        (early_and_late(seconds=1e-3), 1e12, EVERY),
        (early_and_late(seconds=1e-3), 1e7, [1, 2, 3]),
    ],
    ids=["slow to make", "quick to move", "may not run again"],
)
def test_what_is_not_worth_it_is_moved(graph: TaskGraph, rate: float, may_repeat: Any):
    found = fastest(graph, BUDGET, Link(rate, rate), may_repeat)
    assert list(found.tasks) == list(range(9))
    assert moved(found) == 2 * 64 * KIB


def test_what_it_was_made_of_may_have_been_written_over():
    g = GraphBuilder()
    given = g.input(64 * KIB, Place.DEVICE)
    (large,) = g.task([given], 64 * KIB, seconds=1e-6)
    (x,) = g.task([given, large], 64 * KIB, seconds=1e-3, overwrites=[(0, 0)])
    for _ in range(3):
        (wide,) = g.task([x], 128 * KIB, seconds=1e-3)
        (x,) = g.task([wide], 64 * KIB, seconds=1e-3)
    (end,) = g.task([large, x], KIB, seconds=1e-3)
    graph = g.build([end])
    memgraph = make_memgraph(graph, 3 * 64 * KIB)
    assert figures.moved_bytes(graph, memgraph) == (64 * KIB, 64 * KIB)
    orders = list(repeating(graph, memgraph, range(len(graph.tasks)), RATES, EVERY))
    assert all(again.count(0) == 1 for again in orders)


def test_what_is_made_again_of_what_is_made_again():
    """Two layers of activations: the second is made of the first."""
    g = GraphBuilder()
    small = g.input(KIB, Place.DEVICE, pinned=True)
    (one,) = g.task([small], 64 * KIB, seconds=1e-4)
    (two,) = g.task([one], 64 * KIB, seconds=1e-4)
    (x,) = g.task([two], KIB, seconds=1e-4)
    for _ in range(4):
        (wide,) = g.task([x], 128 * KIB, seconds=1e-3)
        (x,) = g.task([wide], KIB, seconds=1e-3)
    (x,) = g.task([two, x], KIB, seconds=1e-4)
    (end,) = g.task([one, x, small], KIB, seconds=1e-4)
    graph, link = g.build([end]), Link(1e7, 1e7)
    found = fastest(graph, 140 * KIB, link, EVERY)
    assert found.tasks.count(0) > 1
    assert found.tasks.count(1) > 1
    assert moved(found) == 0


def training(rng: random.Random) -> TaskGraph:
    """Activations that are quick to make and read late, updates that may write over them,
    and between them what needs the room."""
    g = GraphBuilder()
    weights = [g.input(KIB, Place.DEVICE, pinned=True) for _ in range(2)]
    made = [g.input(64 * KIB, Place.HOST)]

    def need_room(x: BufferId) -> BufferId:
        (wide,) = g.task([x], rng.choice([128, 192]) * KIB, seconds=1e-3)
        return g.task([wide], KIB, seconds=1e-3)[0]

    for _ in range(rng.randint(3, 7)):
        read = rng.sample(made[-3:], min(len(made), rng.choice([1, 1, 2])))
        quick = 10 ** rng.uniform(-6, -4)
        made += g.task([rng.choice(weights), *read], 64 * KIB, seconds=quick)
    x = need_room(g.task([made[-1]], KIB, seconds=1e-4)[0])
    outputs = []
    for _ in range(rng.randint(3, 10)):
        late = rng.sample(made[1:], min(len(made) - 1, rng.choice([1, 1, 2])))
        x, update = g.task([x, *late], KIB, rng.choice([1, 64]) * KIB, seconds=1e-4)
        (outputs if rng.random() < 0.4 else made).append(update)
        if rng.random() < 0.4:
            x = need_room(x)
    return with_overwrites(rng, g.build([*outputs, x]))


@pytest.mark.long
def test_what_is_made_again_thrice_is_the_same_still():
    """In later rounds operands are copies themselves, and those may be written over."""
    repeated = 0
    for seed in range(150):
        rng = random.Random(seed)
        graph, rate = training(rng), 10 ** rng.uniform(6.5, 8.5)
        arena = smallest_budget(graph) + rng.choice([0, 64, 128]) * KIB
        found = fastest(graph, arena, Link(rate, rate), EVERY)
        found.graph.check()
        verify(found.graph, found.memgraph)
        tasks = list(range(len(graph.tasks)))
        assert results(found.graph, list(found.tasks)) == results(graph, tasks)
        assert as_given(found.graph, found.tasks)[1] == graph
        repeated += max(map(found.tasks.count, found.tasks)) > 1
    assert repeated > 30


def test_a_bound_for_plans_that_move_is_none_for_those_that_compute_again():
    g = GraphBuilder()
    x = g.input(KIB, Place.DEVICE)
    small = g.input(KIB, Place.DEVICE, pinned=True)
    activations = []
    for _ in range(60):
        activations += g.task([small], 64 * KIB, seconds=1e-4)
        (x,) = g.task([activations[-1], x], KIB, seconds=1e-5)
    for a in reversed(activations):
        (x,) = g.task([a, x], KIB, seconds=1e-6)
    graph, arena, link = g.build([x]), 8 * 64 * KIB, Link(1e6, 1e12)
    least = least_seconds(graph, arena, 1e6, 1e12)
    assert fastest(graph, arena, link).taken.seconds > least
    assert fastest(graph, arena, link, EVERY).taken.seconds < least / 10


def test_the_host_has_less_to_hold():
    """Where it has no memory for what every other plan moves."""
    graph, link = early_and_late(seconds=1e-3), Link(1e7, 1e7)
    away = lambda found: figures.host_peak_bytes(found.graph, found.memgraph)
    assert away(fastest(graph, BUDGET, link, host_bytes=KIB)) == 64 * KIB
    assert away(fastest(graph, BUDGET, link, EVERY, host_bytes=KIB)) == 0


# --- In functions.

WIDTH, LAYERS = 128, 6
# So slow that nothing else matters, whatever the machine does meanwhile.
LINK = jturnip.SimulatedLink(2e7, 2e7)


def loss(weights: list[Any], x: Any) -> Any:
    """Its activations are much larger than its weights."""
    for w in weights:
        x = jnp.sin(x) * jnp.cos(x @ w)
    return jnp.mean(x**2)


def data() -> tuple[list[Any], Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    weights = [jturnip.host(normal(WIDTH, WIDTH) / WIDTH) for _ in range(LAYERS)]
    return weights, normal(2048, WIDTH)


@pytest.fixture
def without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where activations are made in blocks, none are moved or made by tasks again."""
    monkeypatch.setattr(ways, "_WAYS_BESIDE", 0)


@pytest.mark.long
def test_activations_are_computed_again_over_a_slow_link(without_blocks: None):
    weights, x = data()
    gradient = jax.grad(loss)
    want = jax.jit(gradient)([np.asarray(w) for w in weights], x)
    budget = jturnip.peak_bytes(gradient, weights, x) // 2
    paper = jturnip.jit(gradient, budget, link=LINK, strategy="turnip")
    moved = paper(weights, x)
    assert paper.last_run.plan.repeated_tasks == 0
    f = jturnip.jit(gradient, budget, link=LINK)
    tasks = len(paper.last_run.plan.taskgraph.tasks)
    for _ in range(3):
        found = f(weights, x)
        assert_same(found, want, ulps=64)
        for ours, theirs in zip(found, moved, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert f.last_run.peak_bytes <= budget
        assert f.last_run.d2h_bytes < 0.7 * paper.last_run.d2h_bytes
        plan = f.last_run.plan
        assert 0 < plan.repeated_tasks == len(plan.taskgraph.tasks) - tasks
        assert "that has run before" in plan.explain()
        assert plan.to_json_dict()["repeated_tasks"] == plan.repeated_tasks


@pytest.mark.long
def test_what_was_planned_before_it_is_measured_is_planned_from_the_program_again(
    without_blocks: None,
):
    weights, x = data()
    gradient = jax.grad(loss)
    budget = jturnip.peak_bytes(gradient, weights, x) // 2
    lowered = jturnip.jit(gradient, budget, link=LINK).lower(weights, x)
    expected = lowered.plan
    compiled = lowered.compile()
    compiled(weights, x)
    measured = compiled.last_run.plan
    for found in (expected, measured):
        tasks = len(found.taskgraph.tasks) - found.repeated_tasks
        assert found.repeated_tasks > 0
        assert tasks == len(expected.taskgraph.tasks) - expected.repeated_tasks


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.pure_callback(lambda v: np.asarray(v), x, x),
        lambda x: jax.lax.rng_uniform(0.0, 1.0, (4,)),
        lambda x: x.at[jnp.zeros(4, int)].subtract(x),
        lambda x: jax.lax.fori_loop(
            0, x[0].astype(int), lambda i, c: c + jax.lax.rng_uniform(0.0, 1.0, (4,)), x
        ),
        lambda x: jax.lax.cond(
            x[0] > 0, lambda c: jax.pure_callback(lambda v: np.asarray(v), c, c), jnp.sin, x
        ),
    ],
    ids=["a callback", "random numbers", "a scatter", "in a loop", "in a branch"],
)
def test_what_may_be_another_the_next_time_runs_once(fn: Any):
    eqns = jax.make_jaxpr(fn)(jnp.zeros(4)).eqns
    again = [gives_the_same_again(Equation(eqn, (), ())) for eqn in eqns]
    assert not all(again)
    fine = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c * i, x))
    assert all(
        gives_the_same_again(Equation(eqn, (), ())) for eqn in fine(jnp.zeros(4)).eqns
    )


@pytest.mark.slow
def test_the_least_where_the_host_has_little_memory(
    without_blocks: None, monkeypatch: pytest.MonkeyPatch
):
    """Only what is computed again, or in another order, leaves the host enough."""
    weights, x = data()
    gradient = jax.grad(loss)
    budget = 3 * jturnip.peak_bytes(gradient, weights, x) // 10
    away = [
        jturnip.jit(gradient, budget, link=LINK, strategy=s).lower(weights, x).plan
        for s in ("auto", "turnip")
    ]
    limit = sum(plan.host_bytes for plan in away) // 2
    assert away[0].host_bytes < limit < away[1].host_bytes
    room = limit, "what the host can hold"
    monkeypatch.setattr(placement, "host_bytes_limit", lambda *args: room)
    lowered = jturnip.jit(gradient, budget, link=LINK).lower(weights, x)
    assert lowered.plan.host_bytes <= limit
    least = lowered.minimum_gpu_bytes
    assert least <= budget
    plan = jturnip.jit(gradient, least, link=LINK).lower(weights, x).plan
    assert plan.host_bytes <= limit


def test_there_is_no_least_where_the_host_never_holds_the_results(
    monkeypatch: pytest.MonkeyPatch,
):
    x = np.ones((256, 256), np.float32)
    on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    f = jturnip.jit(lambda x: jnp.tanh(x @ x), strategy="turnip", out_shardings=on_host)
    lowered = f.lower(x)
    monkeypatch.setattr(placement, "host_bytes_limit", lambda *args: (1000, "little"))
    with pytest.raises(jturnip.HostMemoryError, match="little"):
        _ = lowered.minimum_gpu_bytes


@pytest.mark.long
def test_what_has_effects_runs_once():
    weights, x = data()
    seen: list[int] = []

    def told(weights: list[Any], x: Any) -> Any:
        for at, w in enumerate(weights):
            x = jnp.sin(x) * jnp.cos(x @ w)
            jax.debug.callback(lambda _, at=at: seen.append(at), x[0, 0])
        return jnp.mean(x**2)

    gradient = jax.grad(told)
    budget = jturnip.peak_bytes(gradient, weights, x) // 2
    f = jturnip.jit(gradient, budget, link=LINK)
    jax.block_until_ready(f(weights, x))
    jax.effects_barrier()
    assert sorted(seen) == list(range(LAYERS))
