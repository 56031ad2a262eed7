"""Loops of unknown length and branches, too large for a task: planned pieces, driven."""

import functools
import logging
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import (
    Holdings,
    assert_same,
    layers,
    memory_kinds,
    on_device,
    on_host,
    smallest_budget,
    unconstrained_peak,
)
from jax import lax
from jax.experimental import io_callback
from large_intermediates import centres_that_settle, sequences_that_are_aligned
from watch import Watch

import jturnip
from jturnip.frontend.inline import Condition
from jturnip.frontend.loops import iterations
from jturnip.models import llama
from jturnip.planner import figures
from jturnip.programs import driven as driven_programs, splitting, tries
from jturnip.programs.records import Chain, Loop, Straight, expected_seconds, straight_parts
from jturnip.programs.setting import Function
from jturnip.runtime import hoststacks
from jturnip.runtime.report import Gathered


pytestmark = pytest.mark.usefixtures("quick_compilation")


WEIGHTS = layers(6)
LAYER = WEIGHTS[0].nbytes
X = np.random.default_rng(0).normal(size=(8, 128)).astype(np.float32)


def tower(weights: Any, x: Any) -> Any:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def until_large(weights: Any, x: Any) -> Any:
    def goes_on(state: Any) -> Any:
        step, x, _ = state
        return (step < 5) & (jnp.abs(x).max() < 10)

    def body(state: Any) -> Any:
        step, x, log = state
        x = tower(weights, x)
        return step + 1, x, log.at[step].set(x[0])

    return lax.while_loop(goes_on, body, (0, x, jnp.zeros((5, 128))))


def counted(weights: Any, x: Any) -> Any:
    """A loop between two other pieces, with values that wait for its end."""
    before = jnp.sin(x) @ weights[0]
    x = lax.fori_loop(0, jnp.int32(3), lambda i, x: tower(weights, x) + i, before)
    return x @ weights[1] + before, before


def weights_in_the_carry(weights: Any, x: Any) -> Any:
    body = lambda state: (state[0] + 1, state[1], tower(state[1], state[2]))
    return lax.while_loop(lambda state: state[0] < 3, body, (0, weights, x))[2]


def carried_by_turns(weights: Any, x: Any) -> Any:
    """What is carried changes its place in every iteration."""

    def body(state: Any) -> Any:
        step, one, other = state
        return step + 1, other, jnp.tanh(one @ weights[0] + other @ weights[1])

    return lax.while_loop(lambda state: state[0] < 4, body, (0, x, x * 2))


def condition_with_weights(weights: Any, x: Any) -> Any:
    goes_on = lambda x: jnp.abs(tower(weights, x)).sum() > 1e-3
    return lax.while_loop(goes_on, lambda x: x * 0.25, x)


def inside_each_other(weights: Any, x: Any) -> Any:
    def outer(state: Any) -> Any:
        step, x = state
        x = lax.fori_loop(0, step + 1, lambda _, x: tower(weights, x), x)
        return step + 1, x * 2

    return lax.while_loop(lambda state: state[0] < 3, outer, (0, x))


def branches(weights: Any, x: Any) -> Any:
    x = lax.cond(x[0, 0] > 100, lambda x: x * 2, lambda x: tower(weights, x), x)
    choices = [lambda x: x + 1, lambda x: tower(weights[::-1], x), lambda x: x]
    return lax.switch((x[0, 0] > -2).astype(jnp.int32), choices, x) @ weights[2]


def branch_in_a_loop(weights: Any, x: Any) -> Any:
    def body(i: Any, x: Any) -> Any:
        even = functools.partial(tower, weights)
        return lax.cond(i % 2 == 0, even, lambda x: x @ weights[3], x)

    return lax.fori_loop(0, jnp.int32(3), body, x)


def scan_in_a_loop(weights: Any, x: Any) -> Any:
    stack = jnp.stack(weights)
    step = lambda x, weight: (jnp.tanh(x @ weight), None)
    return lax.fori_loop(0, jnp.int32(3), lambda _, x: lax.scan(step, x, stack)[0], x)


def loop_in_a_scan(weights: Any, x: Any) -> Any:
    def step(x: Any, weight: Any) -> Any:
        return lax.fori_loop(0, jnp.int32(3), lambda _, x: jnp.tanh(x @ weight), x), x[0]

    return lax.scan(step, x, jnp.stack(weights))


def the_same_twice(weights: Any, x: Any) -> Any:
    """An array that is a constant of the loop, what it begins with, and carried twice."""
    before = jnp.sin(x) * 2
    body = lambda s: (s[0] + 1, tower(weights, s[1]) + before, s[2] - s[1])
    return lax.while_loop(lambda s: s[0] < 2, body, (0, before, before))


def many_times(weights: Any, x: Any) -> Any:
    """A scan with too many large iterations to have a task for each."""

    def step(x: Any, row: Any) -> Any:
        x = tower(weights, x) + row
        return x, x[0, :3]

    rows = jnp.arange(3000, dtype=jnp.float32) / 3000
    return lax.scan(step, x, rows, reverse=True)


def never(weights: Any, x: Any) -> Any:
    return lax.while_loop(lambda x: x[0, 0] > 100, lambda x: tower(weights, x), x)


PROGRAMS = [
    until_large,
    counted,
    weights_in_the_carry,
    carried_by_turns,
    condition_with_weights,
    inside_each_other,
    branches,
    branch_in_a_loop,
    scan_in_a_loop,
    loop_in_a_scan,
    the_same_twice,
    never,
]
LIKE_OTHERS = (scan_in_a_loop, loop_in_a_scan, the_same_twice)


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=[pytest.mark.slow] * (p in LIKE_OTHERS)) for p in PROGRAMS],
    ids=lambda p: p.__name__,
)
def test_loops_and_branches_in_less_than_they_need(program):
    expected = jax.jit(program)(WEIGHTS, X)
    smallest = smallest_budget(program, WEIGHTS, X)
    third = max(smallest, unconstrained_peak(program, WEIGHTS, X) // 3)
    for gpu_bytes in {smallest, third}:
        for arguments in ((WEIGHTS, X), jturnip.host((WEIGHTS, X))):
            fn = jturnip.jit(program, gpu_bytes, strategy="turnip")
            for _ in range(2):
                assert_same(fn(*arguments), expected)
            assert fn.last_run.peak_bytes <= gpu_bytes
    assert smallest < unconstrained_peak(program, WEIGHTS, X)


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("program", [never, until_large, weights_in_the_carry, branches])
def test_what_the_caller_keeps_is_not_used_up(program, where):
    place = on_device() if where == "device" else on_host()
    x: Any = jax.device_put(X, place)
    weights: Any = jturnip.host(WEIGHTS)
    gpu_bytes = smallest_budget(program, weights, x)
    fn = jturnip.jit(program, gpu_bytes, strategy="turnip")
    first = fn(weights, x)
    assert not x.is_deleted()
    assert not any(w.is_deleted() for w in weights)
    for result in jax.tree.leaves(first):
        assert result is not x
    assert_same(fn(weights, x), jax.jit(program)(WEIGHTS, X))


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("program", [never, until_large, counted, branches])
def test_what_is_donated_is_given_up(program, where):
    place = on_device() if where == "device" else on_host()
    x: Any = jax.device_put(X.copy(), place, may_alias=False)
    weights = jturnip.host(WEIGHTS)
    gpu_bytes = smallest_budget(program, weights, x, donate_argnums=1)
    fn = jturnip.jit(program, gpu_bytes, strategy="turnip", donate_argnums=1)
    result = fn(weights, x)
    assert_same(result, jax.jit(program)(WEIGHTS, X))
    assert x.is_deleted() or any(leaf is x for leaf in jax.tree.leaves(result))


@pytest.mark.long
def test_a_long_scan_of_large_iterations_is_driven():
    gpu_bytes = 4 * LAYER
    fn = jturnip.jit(many_times, gpu_bytes)
    assert_same(fn(WEIGHTS, X), jax.jit(many_times)(WEIGHTS, X))
    assert fn.last_run.strategy == "driven"
    assert fn.last_run.peak_bytes <= gpu_bytes


def test_a_large_carry_stays_in_host_memory():
    def program(weights, x):
        def body(state):
            step, cache, x = state
            x = tower(weights, x)
            return step + 1, [c + x.sum() for c in cache], x

        cache = [jnp.zeros((256, 256)) + k for k in range(4)]
        return lax.while_loop(lambda state: state[0] < 3, body, (0, cache, x))

    gpu_bytes = 12 * LAYER
    fn = jturnip.jit(program, gpu_bytes, strategy="turnip")
    _, cache, _ = result = fn(WEIGHTS, X)
    assert_same(result, jax.jit(program)(WEIGHTS, X))
    assert fn.last_run.peak_bytes <= gpu_bytes
    assert "pinned_host" in memory_kinds(cache)


def pooled(weight: Any, x: Any, turns: Any, copies: int) -> Any:
    """Eight arrays are changed a little by what all of `x` is; there may be two of each."""

    def body(state: Any) -> Any:
        step, kept, x = state
        changed = []
        for each in kept:
            x = jnp.tanh(x @ weight)
            changed.append(each * 0.5 + x.mean())
        return step + 1, changed, x

    kept = [jnp.full((256, 256), float(k)) for k in range(8 // copies)] * copies
    return lax.while_loop(lambda state: state[0] < turns, body, (0, kept, x))


@pytest.mark.long
@pytest.mark.parametrize("copies", [1, 2])
def test_what_a_loop_carries_stays_as_far_as_there_is_room(copies: int):
    """All of it went to host memory and back in each iteration, half of the budget
    unused. Where the loop begins with arrays that come twice, which need room for a copy,
    these leave the device first; else the loop was taken apart as far as can be."""
    fn = functools.partial(pooled, copies=copies)
    weight = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32) / 16
    x = np.ones((64, 256), np.float32)
    gpu_bytes = 8 * weight.nbytes
    # So slow that what moves is what counts, also where others use the cores.
    f = jturnip.jit(fn, gpu_bytes, link=jturnip.SimulatedLink(2e7, 2e7))
    moved: list[tuple[int, int]] = []
    for turns in (2, 6):
        result = f(jturnip.host(weight), x, turns)
        moved.append((f.last_run.h2d_bytes, f.last_run.d2h_bytes))
        assert f.last_run.peak_bytes <= gpu_bytes
    assert f.last_run.strategy == "driven"
    assert_same(result, jax.jit(fn)(weight, x, 6), ulps=16)
    # Beside the weight, and what a task reads and writes, with room for the next one.
    away = 4 * weight.nbytes + 1024
    assert all((later - earlier) / 4 <= away for earlier, later in zip(*moved, strict=True))
    assert sum(len(p.taskgraph.tasks) for p in f.last_run.plan.pieces[-1].pieces) <= 20


def attended(weight: Any, x: Any, turns: Any) -> Any:
    """A few tokens of a decoder whose sequences know of each other."""

    def body(state: Any) -> Any:
        step, caches, x = state
        longer = []
        for cache in caches:
            cache = lax.dynamic_update_slice(cache, (x @ weight)[:, None], (0, step, 0))
            scores = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x, cache))
            x = x + jnp.einsum("bs,bsd->bd", scores, cache)
            x = x - x.mean(0)
            longer.append(cache)
        return step + 1, longer, x

    caches = [jnp.full((8, 64, 64), k / 8) for k in range(4)] * 2
    return lax.while_loop(lambda state: state[0] < turns, body, (0, caches, x))


@pytest.mark.long
def test_what_a_loop_carries_is_cut_into_no_more_rows_than_are_worth_it():
    """Where a row of each cache could be a task's, there were eight times the tasks."""
    weight = np.eye(64, dtype=np.float32) / 2
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    cache_bytes = 8 * 64 * 64 * 4
    # Over a slow link rows would be worth it, and so they are where tasks of a few
    # microseconds are measured on a busy machine: so the plan is of what they should take.
    fast = jturnip.SimulatedLink(1e11, 1e11)
    f = jturnip.jit(attended, 3 * cache_bytes, link=fast)
    plan = f.lower(weight, x, 6).plan
    assert not plan.measured
    assert sum(len(p.taskgraph.tasks) for p in plan.pieces[-1].pieces) <= 40
    assert_same(f(weight, x, 6), jax.jit(attended)(weight, x, 6), ulps=64)
    assert f.last_run.peak_bytes <= 3 * cache_bytes
    assert f.last_run.strategy == "driven"


def fitted_to_data(w: Any, x: Any, y: Any, turns: Any) -> Any:
    """A descent whose gradient writes down more than the data it reads."""

    def loss(w: Any) -> Any:
        logits = x @ w
        misses = jax.nn.softplus(-y[:, None] * logits)
        return jnp.mean(misses) + jnp.mean(jax.nn.softmax(logits, axis=1)[:, 0])

    def body(state: Any) -> Any:
        turn, w = state
        return turn + 1, w - jax.grad(loss)(w)

    return lax.while_loop(lambda state: state[0] < turns, body, (0, w))[1]


@pytest.mark.long
def test_data_that_does_not_fit_is_read_once_in_an_iteration():
    """Some rows at a time, forwards and backwards. Done one operation after the other, an
    iteration moved 4.7 times as much."""
    random = np.random.default_rng(0)
    x, w = (random.normal(size=n).astype(np.float32) for n in ((8192, 64), (64, 16)))
    y = np.sign(x[:, 0])
    # So slow that what moves is what counts, also where others use the cores.
    f = jturnip.jit(
        fitted_to_data, int(0.7 * x.nbytes), link=jturnip.SimulatedLink(1e8, 1e8)
    )
    moved: list[int] = []
    for turns in (2, 6):
        result = f(w, jturnip.host(x), y, turns)
        moved.append(f.last_run.h2d_bytes + f.last_run.d2h_bytes)
        assert f.last_run.peak_bytes <= 0.7 * x.nbytes
    # Sums over 8192 rows, in another order, six times after one another.
    assert_same(result, jax.jit(fitted_to_data)(w, x, y, 6), ulps=64)
    assert f.last_run.strategy == "driven"
    assert (moved[1] - moved[0]) / 4 <= 1.1 * x.nbytes


def weights_read_again(weights: Any, table: Any, tokens: Any, turns: Any) -> Any:
    def body(state: Any) -> Any:
        turn, tokens = state
        x = tower(weights, table[tokens])
        return turn + 1, (tokens + jnp.argmax(jnp.abs(x), axis=1)) % table.shape[0]

    return lax.while_loop(lambda state: state[0] < turns, body, (0, tokens))[1]


@pytest.mark.long
@pytest.mark.parametrize("place", [on_host, on_device], ids=["pieces", "tasks"])
def test_weights_that_fit_stay_on_the_device_while_the_loop_runs(place: Any):
    """What does not fit travels in each iteration, and no more, also where rows of a table
    make pieces of the body."""
    rows = np.random.default_rng(0).normal(size=(4096, 128)).astype(np.float32)
    weights, table = jturnip.host(layers(16)), jax.device_put(rows, place())
    tokens = np.arange(8)
    beside = table.nbytes if place is on_device else 0
    gpu_bytes = 10 * LAYER + beside
    fn = jturnip.jit(weights_read_again, gpu_bytes, link=jturnip.SimulatedLink(1e7, 1e7))
    moved: list[int] = []
    with Watch(weights, table) as watch:
        for turns in (2, 12):
            result = fn(weights, table, tokens, turns)
            moved.append(fn.last_run.h2d_bytes + fn.last_run.d2h_bytes)
    assert fn.last_run.strategy == "driven"
    assert_same(result, jax.jit(weights_read_again)(layers(16), rows, tokens, 12))
    assert max(watch.peak_bytes, fn.last_run.peak_bytes) <= gpu_bytes
    working = 3 * LAYER  # what a task reads, and room for the next one
    assert (moved[1] - moved[0]) / 10 <= 1.02 * (16 * LAYER - (10 * LAYER - working))


def test_room_is_left_for_what_a_loop_may_take_in_any_order():
    """It carries an array that the caller keeps on the device, and copies it; then come
    tasks whose weights could stay there between calls."""
    normal = lambda *shape: np.random.default_rng(0).normal(size=shape).astype("f4") / 8

    def fn(carry, in_loop, after, turns):
        def body(state):
            i, total, x = state
            for w in in_loop:
                x = jnp.sin(x @ w)
            return i + 1, total + x * 1e-3, x

        start = 0, carry, carry * 2
        _, total, x = lax.while_loop(lambda state: state[0] < turns, body, start)
        x = x[:64]
        for w in after:
            x = jnp.sin((x @ w) @ w.T)
        return total.sum() + x.sum()

    carry = jax.device_put(normal(256, 256))
    in_loop = [normal(256, 256) for _ in range(8)]  # not kept for the next call
    after = [jturnip.host(normal(256, 64)) for _ in range(12)]
    budget = 1677721
    lowered = jturnip.jit(fn, budget).lower(carry, in_loop, after, 5)
    program = lowered._budgeted.with_kept(lowered._budgeted.program)
    (stage,) = [s for s in program.stages if isinstance(s.program, Loop)]
    reach = max(figures.reach_bytes(p.plan.memgraph) for p in straight_parts(stage.program))
    kept = program.plan.kept_bytes
    assert kept > 0
    assert stage.program.plan.peak_bytes < reach + carry.nbytes
    assert kept + stage.waiting + carry.nbytes + reach <= budget


def test_nothing_is_left_after_a_loop():
    fn = jturnip.jit(until_large, smallest_budget(until_large, WEIGHTS, X))
    fn(WEIGHTS, X)
    holdings = Holdings()
    for _ in range(3):
        fn(WEIGHTS, X)
    assert holdings.new_arrays() == []
    assert holdings.new_threads() == []


def test_effects_in_driven_loops_are_in_order():
    log: list[Any] = []
    note = lambda name, k: log.append((name, int(k)))

    def program(weights, x):
        io_callback(functools.partial(note, "before"), None, 0, ordered=True)

        def body(i, x):
            io_callback(functools.partial(note, "in"), None, i, ordered=True)
            x = tower(weights, x)
            jax.debug.callback(functools.partial(note, "end"), i, ordered=True)
            return x

        lax.fori_loop(0, jnp.int32(3), body, x)  # nobody reads its result
        io_callback(functools.partial(note, "after"), None, 9, ordered=True)
        return x * 2

    jax.block_until_ready(jax.jit(program)(WEIGHTS, X))
    jax.effects_barrier()
    wanted, log[:] = list(log), []
    fn = jturnip.jit(program, smallest_budget(program, WEIGHTS, X), strategy="turnip")
    log.clear()
    fn(WEIGHTS, X)
    jax.effects_barrier()
    assert fn.last_run.strategy == "driven"
    assert log == wanted


def test_an_error_in_a_driven_body_leaves_nothing(caplog):
    def fails(x):
        raise RuntimeError("no such file")

    def program(weights, x):
        def body(state):
            step, x = state
            x = tower(weights, x)
            return step + 1, x + jax.pure_callback(fails, jax.typeof(x), x)

        return lax.while_loop(lambda state: state[0] < 3, body, (0, x))

    fn = jturnip.jit(program, smallest_budget(program, WEIGHTS, X), strategy="turnip")
    arguments = jturnip.host((WEIGHTS, X))
    holdings = Holdings()
    # JAX logs the error, and with it the frames that hold its arguments.
    caplog.set_level(logging.CRITICAL + 1)
    with pytest.raises(jturnip.ExecutionError, match="no such file"):
        fn(*arguments)
    assert holdings.new_arrays() == []
    assert not any(a.is_deleted() for a in jax.tree.leaves(arguments))


def test_the_plan_of_a_driven_function_has_its_pieces():
    lowered = jturnip.jit(counted, smallest_budget(counted, WEIGHTS, X)).lower(WEIGHTS, X)
    plan = lowered.plan
    assert plan.strategy == "driven"
    assert len(plan.pieces) == 3
    assert "3 pieces, driven" in plan.summary()
    assert len(plan.to_json_dict()["pieces"]) == 3
    assert plan.peak_bytes <= lowered.gpu_bytes


def random_program(seed: int) -> Any:
    """Products, branches and loops in and after each other, by chance."""
    rng = random.Random(seed)

    def grow(depth: int) -> Any:
        kind = rng.choice(["product", "loop", "branch", "sequence"][: 4 if depth else 1])
        k, count = rng.randrange(len(WEIGHTS)), rng.randrange(3)
        if kind == "product":
            return lambda w, x: jnp.tanh(x @ w[k])
        inner, other = grow(depth - 1), grow(depth - 1)
        if kind == "sequence":
            return lambda w, x: other(w, inner(w, x))
        if kind == "branch":
            one, two = functools.partial, functools.partial
            return lambda w, x: lax.cond(x[0, 0] > 0, one(inner, w), two(other, w), x)
        body = lambda w: lambda _, x: inner(w, x)
        return lambda w, x: lax.fori_loop(0, jnp.int32(count), body(w), x) + x

    return grow(3)


@pytest.mark.parametrize("where", ["device", "host", "numpy"])
@pytest.mark.parametrize("donated", [(), (0, 1, 2)], ids=["kept", "donated"])
@pytest.mark.parametrize("layers", [3.3, 4.5, 6.0])
def test_carried_values_that_change_places(where, donated, layers):
    """What the body returns in another place is no constant of the loop."""

    def program(a, b, c):
        body = lambda _, s: (s[1], s[2], jnp.tanh(s[0] * 0.5 + s[1]))
        return lax.fori_loop(0, jnp.int32(5) + jnp.int32(a[0, 0] * 0), body, (a, b, c))

    generator = np.random.default_rng(0)
    values = [generator.normal(size=(512, 128)).astype(np.float32) for _ in range(3)]
    places = {"device": on_device(), "host": on_host()}
    nbytes = values[0].nbytes
    fn = jturnip.jit(
        program, int(layers * nbytes), strategy="turnip", donate_argnums=donated
    )
    expected = jax.jit(program)(*values)
    for _ in range(2):
        given: Any = [v.copy() for v in values]
        if where != "numpy":
            given = [jax.device_put(v, places[where], may_alias=False) for v in given]
        if where == "device" and not donated and layers < 6:
            given = [jax.device_put(v, on_host()) for v in given]
        result = fn(*given)
        assert_same(result, expected)
        for before, array in zip(values, given, strict=True):
            if not donated or where == "numpy":
                assert_same(jnp.asarray(array), jnp.asarray(before), ulps=0)
            assert not any(r is array for r in result) or donated


def test_a_loop_that_never_runs_shares_nothing_with_numpy():
    def program(count, a, b):
        body = lambda s: (s[0] + 1, jnp.sin(s[1] + s[2]), s[2])
        return lax.while_loop(lambda s: s[0] < count, body, (0, a, b))

    memory = np.zeros(512 * 128 + 16, np.float32)
    begin = (-memory.ctypes.data % 64) // 4
    a = memory[begin : begin + 512 * 128].reshape(512, 128)
    fn = jturnip.jit(program, 3 * a.nbytes // 2, strategy="turnip")
    result = fn(np.int32(0), a, a + 1)
    a[:] = 7
    assert_same(result, jax.jit(program)(np.int32(0), 0 * a, 0 * a + 1))


@pytest.mark.parametrize("seed", range(8))
def test_programs_made_by_chance(seed):
    program = random_program(seed)
    gpu_bytes = smallest_budget(program, WEIGHTS, X)
    fn = jturnip.jit(program, gpu_bytes, strategy="turnip")
    assert_same(fn(WEIGHTS, X), jax.jit(program)(WEIGHTS, X))
    assert fn.last_run.peak_bytes <= gpu_bytes


# Generation.


MODEL = llama.config("tiny", layers=4, width=64, hidden=192, vocabulary=64, heads=4)
LENGTH = 12


def generate(params: Any, prompt: Any, wanted: Any) -> Any:
    """Greedy continuation, a token at a time, until the end token or the length."""

    def goes_on(state: Any) -> Any:
        at, tokens = state
        return (at < wanted) & (tokens[0, at - 1] != 63)

    def body(state: Any) -> Any:
        at, tokens = state
        logits = llama.forward(MODEL, params, tokens)
        chosen = jnp.argmax(logits[:, at - 1], axis=-1).astype(tokens.dtype)
        return at + 1, tokens.at[:, at].set(chosen)

    tokens = jnp.zeros((1, LENGTH), jnp.int32).at[:, : prompt.shape[1]].set(prompt)
    return lax.while_loop(goes_on, body, (prompt.shape[1], tokens))


@pytest.mark.long
@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacks"])
def test_generating_with_streamed_weights(stacked):
    params = llama.init(MODEL, jax.random.key(0))
    params = llama.stacked(params) if stacked else params
    prompt = jnp.asarray([[5, 3, 8]], jnp.int32)
    expected = jax.jit(generate)(params, prompt, 10)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    held = jturnip.host(params)
    fn = jturnip.jit(generate, nbytes // 3)
    at, tokens = fn(held, prompt, 10)
    assert fn.last_run.strategy == "driven"
    assert_same((at, tokens), expected)
    assert fn.last_run.peak_bytes <= nbytes // 3


# What a driven run did


def test_a_driven_run_is_seen_as_any_other():
    """Its plan had no ops, its pieces no names, and nothing told what ran when."""

    def fn(table: Any, rows: Any, weights: Any) -> Any:
        x = table[rows]
        for w in weights:
            x = jnp.tanh(x @ w)
        body = lambda state: (state[0] + 1, tower(weights, state[1]))
        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]

    table, weights = jturnip.host(jnp.ones((512, 128))), jturnip.host(layers(6))
    f = jturnip.jit(fn, 400_000, strategy="turnip")
    f(table, jnp.arange(16), weights)
    report, plan = f.last_run, f.lower(table, jnp.arange(16), weights).compile().plan
    assert report is not None
    assert report.strategy == "driven"
    assert len(report.order) == len(report.starts) == len(report.ends)
    assert all(b <= e for b, e in zip(report.starts, report.ends, strict=True))
    found = [plan.locate(number) for number in report.order]
    names = [path[0] for path, _, _ in found]
    assert any('"gather"' in name and "test_driven.py" in name for name in names)
    assert {path[1] for path, _, _ in found if '"while"' in path[0]} == {
        "condition",
        "body",
    }
    tasks = [
        inner.taskgraph.tasks[op.task].name
        for path, inner, op in found
        if path[-1] == "body" and op is not None and op.task is not None
    ]
    assert len(tasks) % 3 == 0  # the same in each turn
    assert tasks[: len(tasks) // 3] * 3 == tasks
    assert names[0] in plan.summary()
    with pytest.raises(IndexError):
        plan.locate(plan.op_count)


def test_very_many_turns_of_a_loop_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Gathered, "MOST_OPS", 10)

    def fn(w: Any, n: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda _, y: jnp.tanh(y @ y @ w), w)

    f = jturnip.jit(fn, 260_000, strategy="turnip")
    w = jturnip.host(layers(1)[0])
    f(w, 50)
    report = f.last_run
    assert report is not None
    assert len(report.order) == 10
    assert report.not_in_order >= 40


# --- What passes in and out of loops and branches.


def test_a_loop_whose_condition_vmap_made_many_goes_on_while_one_does():
    scales = np.logspace(-2, 1, 8, dtype=np.float32)[:, None, None]
    xs = np.random.default_rng(0).normal(size=(8, 8, 128)).astype(np.float32) * scales

    def fn(weights: Any, xs: Any) -> Any:
        goes_on = lambda x: jnp.abs(x).max() > 1e-4
        one = lambda x: lax.while_loop(goes_on, lambda x: tower(weights, x) / 16, x)
        return jax.vmap(one)(xs)

    f = jturnip.jit(fn, 5 * LAYER)
    assert_same(f(*jturnip.host((WEIGHTS, xs))), jax.jit(fn)(WEIGHTS, xs), ulps=64)
    assert f.last_run.strategy == "driven"


@pytest.mark.long
def test_what_a_loop_that_never_runs_was_given_twice_are_two_arrays():
    x = np.random.default_rng(0).normal(size=(512, 128)).astype(np.float32)

    def fn(n: Any, x: Any) -> Any:
        mixed = lambda a: jnp.sort(a.ravel()).reshape(a.shape)
        body = lambda s: (s[0] + 1, jnp.tanh(mixed(s[1]) / 2 + s[2]), s[2] - s[1])
        y = jnp.sin(x) * 2
        _, a, b = lax.while_loop(lambda s: s[0] < n, body, (0, y, y))
        return a * 2 + b

    for n in (2, 0):
        f = jturnip.jit(fn, int(3.3 * x.nbytes))
        assert_same(f(np.int32(n), jturnip.host(x)), jax.jit(fn)(n, x), ulps=64)
        assert f.last_run.strategy == "driven"


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_branch_may_return_what_another_has_in_host_memory():
    z = np.random.default_rng(0).normal(size=(512, 128)).astype(np.float32)

    def fn(p: Any, weights: Any, z: Any) -> Any:
        y = jnp.tanh(z @ weights[0])
        deep = lambda y, z: tower([*weights] * 3, y + z)
        x = lax.cond(p > 0, lambda y, z: y, deep, y, z)
        return jnp.tanh(x @ weights[1]).sum(0), jnp.cos(x @ weights[2]).sum(0)

    for p in (0, 1):
        f = jturnip.jit(fn, 5 * z.nbytes, donate_argnums=2)
        found = f(p, jturnip.host(WEIGHTS), jturnip.host(z))
        assert_same(found, jax.jit(fn)(p, WEIGHTS, z), ulps=256)  # sums of 512


def generated(k: float) -> Any:
    """A branch that reads nothing."""

    def branch() -> Any:
        at = lambda *shape: lax.iota(jnp.float32, shape[0] * shape[1]).reshape(shape)
        x = made = jnp.sin(at(512, 128) * k)
        for n in range(8):
            x = jnp.tanh(x @ (jnp.cos(at(128, 128) * (n + k)) / 128)) + made
        return x

    return branch


def test_branches_without_operands_may_share_their_number():
    def fn(x: Any) -> Any:
        k = jnp.argmax(x).astype(jnp.int32)
        a = lax.switch(k, [generated(0.1), generated(0.2)])
        return a.sum(0) + lax.switch(k, [generated(0.3), generated(0.4)]).sum(0)

    x = np.array([0, 1, 0], np.float32)
    f = jturnip.jit(fn, 4 * 512 * 128 * 4)
    assert_same(f(x), jax.jit(fn)(x), ulps=1024)  # sums, of cosines of large numbers
    assert f.last_run.strategy == "driven"


def test_what_a_branch_does_not_read_is_in_the_account():
    x, z = np.random.default_rng(0).normal(size=(2, 512, 128)).astype(np.float32)

    def fn(p: Any, weights: Any, x: Any, z: Any) -> Any:
        def deep(ys: Any, z: Any) -> Any:  # reads none of `ys`
            steps = []
            for w in weights:
                z = jnp.tanh(z @ w)
                steps.append(z)
            for w, step in zip(weights, reversed(steps), strict=True):
                z = jnp.sin((z * step) @ w)
            return z

        ys = [jnp.tanh(x @ w) for w in weights[:3]]
        return lax.cond(p > 0, deep, lambda ys, z: ys[0] + ys[1] * ys[2], ys, z).sum(0)

    hosted = 1, *jturnip.host((WEIGHTS, x, z))
    f = jturnip.jit(fn, 6 * x.nbytes)
    with Watch() as watch:
        f(*hosted)
    assert max(watch.peak_bytes, f.last_run.peak_bytes) <= 6 * x.nbytes


def test_what_a_body_only_writes_is_in_the_account():
    def fn(n: Any, weights: Any, x: Any) -> Any:
        def body(state: Any) -> Any:
            i, x, _ = state
            x = tower(weights, x)
            return i + 1, x, jnp.outer(x[0], jnp.arange(512.0)) + 1

        begin = 0, x, jnp.zeros((128, 512))
        return lax.while_loop(lambda state: state[0] < n, body, begin)[1:]

    budget = 750_000
    hosted = np.int32(3), *jturnip.host(([*WEIGHTS] * 4, X))
    f = jturnip.jit(fn, budget)
    with Watch() as watch:
        found = f(*hosted)
    assert f.last_run.strategy == "driven"
    assert_same(found, jax.jit(fn)(3, [*WEIGHTS] * 4, X), ulps=64)
    assert max(watch.peak_bytes, f.last_run.peak_bytes) <= budget


@pytest.mark.long
def test_keys_pass_through_branches_within_loops():
    """What a branch hands on as it is may come back as another object of the same bytes."""

    def fn(weights: Any, x: Any, y: Any, key: Any) -> Any:
        def body(state: Any) -> Any:
            n, x, y, key = state

            def noisy(x: Any, y: Any, key: Any) -> Any:
                key, one = jax.random.split(key)
                return tower(weights, x) + jax.random.normal(one, x.shape), y, key

            quiet = lambda x, y, key: (tower(weights[::-1], x), y, key)
            return n + 1, *lax.cond(n % 4 == 3, noisy, quiet, x, y, key)

        return lax.while_loop(lambda state: state[0] < 8, body, (0, x, y, key))

    y, key = X[:1] + 1, jax.random.key(0)
    for budget in (4 * LAYER, 5 * LAYER):
        found = jturnip.jit(fn, budget, strategy="turnip")(WEIGHTS, X, y, key)
        expected = jax.jit(fn)(WEIGHTS, X, y, key)
        assert_same(found[:3], expected[:3], ulps=64)
        assert (jax.random.key_data(found[3]) == jax.random.key_data(expected[3])).all()


def test_a_loop_that_begins_with_rows_of_what_is_in_host_memory():
    x = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)

    def fn(weights: Any, x: Any) -> Any:
        body = lambda s: (s[0] + 1, tower(weights, s[1]))
        return lax.while_loop(lambda s: s[0] < 3, body, (0, x[8:16].repeat(2, 1)))

    def of_rows(weights: Any, x: Any) -> Any:
        body = lambda s: (s[0] + 1, tower(weights, s[1]))
        return lax.while_loop(lambda s: s[0] < 3, body, (0, x[8:16]))

    for each, given in ((fn, x), (of_rows, x.repeat(2, 1))):
        f = jturnip.jit(each, 3 * LAYER)
        found = f(*jturnip.host((WEIGHTS, given)))
        assert_same(found, jax.jit(each)(WEIGHTS, given), ulps=64)
        assert f.last_run.strategy == "driven"
        assert f.last_run.peak_bytes <= 3 * LAYER


# --- Loops that need not be driven.


def rows_until_small(x: Any, scale: Any) -> Any:
    """Each row goes on by itself, as `vmap` makes it."""

    def one(x: Any, scale: Any) -> Any:
        body = lambda s: (jnp.sin(s[0]) * scale, s[1] + 1)
        return lax.while_loop(
            lambda s: (jnp.abs(s[0]).max() > 1e-2) & (s[1] < 40), body, (x, 0)
        )

    return jax.vmap(one)(x, scale)


def rows_so_often(x: Any, scale: Any) -> Any:
    """How often is the same for all rows, whose sum is carried too."""

    def body(_: Any, s: Any) -> Any:
        x, total = s
        x = jnp.tanh(x * scale[:, None])
        return x, total + x.sum(0)

    return lax.fori_loop(0, scale.shape[0] // 100, body, (x, jnp.zeros(x.shape[1])))


def rows_of_loops_in_loops(x: Any, scale: Any) -> Any:
    """A scan in a loop, both of which each row does by itself."""

    def one(x: Any, scale: Any) -> Any:
        step = lambda x, n: (jnp.sin(x + n) * scale, x.sum())
        body = lambda s: (*lax.scan(step, s[0], jnp.arange(3.0)), s[2] + 1)
        goes_on = lambda s: (s[1][0] > -5) & (s[2] < 9)
        return lax.while_loop(goes_on, body, (x, jnp.zeros(3), 0))

    return jax.vmap(one)(x, scale)


def decoded(weights: Any, x: Any) -> Any:
    """Tokens of a decoder, each sequence by itself, with the weights of all layers in one
    array."""

    def token(caches: Any, at: Any) -> Any:
        caches, x = caches
        longer = []
        for layer, cache in enumerate(caches):
            new = x @ weights[layer, 0]
            cache = lax.dynamic_update_slice(cache, new[:, None], (0, at, 0))
            scores = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x, cache))
            x = jnp.tanh(x + jnp.einsum("bs,bsd->bd", scores, cache) @ weights[layer, 1])
            longer.append(cache)
        return (longer, x), x

    caches = [jnp.zeros((8, 128, 32)) for _ in range(4)]
    return lax.scan(token, (caches, x), jnp.arange(400))[1]


@pytest.mark.long
def test_sequences_are_generated_some_at_a_time_where_their_caches_do_not_fit():
    """In each iteration they went to host memory and back, as far as they did not fit:
    taken apart, tens of thousands of equations; driven, four times the time."""
    normal = lambda *shape: np.random.default_rng(0).normal(size=shape).astype("f4") / 8
    args = normal(4, 2, 32, 32), normal(8, 32)
    gpu_bytes = int(0.6 * jturnip.peak_bytes(decoded, *args))
    f = jturnip.jit(decoded, gpu_bytes)
    assert_same(f(*jturnip.host(args)), jax.jit(decoded)(*args), ulps=256)
    assert f.last_run.strategy != "driven"
    assert len(f.last_run.plan.taskgraph.tasks) < 100
    assert f.last_run.peak_bytes <= gpu_bytes


@pytest.mark.long
@pytest.mark.parametrize("share", [0.6, 0.3])
@pytest.mark.parametrize(
    "fn",
    [rows_until_small, rows_so_often, rows_of_loops_in_loops],
    ids=lambda f: f.__name__,
)
def test_what_each_position_does_by_itself_is_done_for_some_at_a_time(fn, share):
    x, scale = np.random.default_rng(0).uniform(0.3, 0.99, (2, 2000, 40)).astype("f4")
    scale = scale[:, 0]
    gpu_bytes = int(share * jturnip.peak_bytes(fn, x, scale))
    f = jturnip.jit(fn, gpu_bytes)
    assert_same(f(*jturnip.host((x, scale))), jax.jit(fn)(x, scale), ulps=16)
    assert f.last_run.strategy != "driven"
    assert f.last_run.peak_bytes <= gpu_bytes


@pytest.mark.long
def test_rows_of_scans_in_scans_are_not_taken_apart():
    """As sequences are aligned: thousands of steps, each of which is next to nothing."""

    a, b = np.random.default_rng(0).integers(0, 4, (2, 3000, 40), np.int32)
    fn = sequences_that_are_aligned
    gpu_bytes = jturnip.peak_bytes(fn, a, b) // 3
    f = jturnip.jit(fn, gpu_bytes)
    np.testing.assert_array_equal(f(*jturnip.host((a, b))), jax.jit(fn)(a, b))
    assert len(f.last_run.order) < 40  # some of the sequences at a time
    assert f.last_run.peak_bytes <= gpu_bytes


def largest_of_all(x: Any, scale: Any) -> Any:
    """Whether it goes on depends on all rows."""
    goes_on = lambda s: (s[0].max() > 0.2) & (s[1] < 30)
    body = lambda s: (jnp.sin(s[0]) * scale[:, None], s[1] + 1)
    return lax.while_loop(goes_on, body, (x, 0))


def sum_of_all(x: Any, scale: Any) -> Any:
    """The same, by a sum that is carried."""
    goes_on = lambda s: s[1] < 3000
    body = lambda s: (jnp.sin(s[0]) * scale[:, None], s[1] + jnp.abs(s[0]).sum())
    return lax.while_loop(goes_on, body, (x, jnp.float32(0)))


def rows_that_mix(x: Any, scale: Any) -> Any:
    def body(s: Any) -> Any:
        x = jnp.sin(s[0]) * scale[:, None]
        return x - x.mean(0), s[1] + 1

    return lax.while_loop(lambda s: s[1] < 9, body, (x, 0))


@pytest.mark.long
@pytest.mark.parametrize("share", [0.6, 0.3])
@pytest.mark.parametrize(
    "fn", [largest_of_all, sum_of_all, rows_that_mix], ids=lambda f: f.__name__
)
def test_what_all_positions_decide_is_not_done_for_some(fn, share):
    x, scale = np.random.default_rng(0).uniform(0.3, 0.99, (2, 2000, 40)).astype("f4")
    scale = scale[:, 0]
    gpu_bytes = int(share * jturnip.peak_bytes(fn, x, scale))
    f = jturnip.jit(fn, gpu_bytes)
    assert_same(f(*jturnip.host((x, scale))), jax.jit(fn)(x, scale), ulps=64)
    assert f.last_run.peak_bytes <= gpu_bytes


def fitted(x: Any) -> Any:
    """Gradient descent over all rows, a fixed number of times."""

    def loss(w: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2)

    step = lambda _, w: w - 0.1 * jax.grad(loss)(w)
    return lax.fori_loop(0, 9, step, jnp.eye(x.shape[1], 64))


@pytest.mark.parametrize("share", [0.5, 0.25])
@pytest.mark.parametrize("fn", [centres_that_settle, fitted], ids=lambda f: f.__name__)
def test_a_loop_is_one_task_with_a_body_in_blocks(fn, share):
    x = np.random.default_rng(0).normal(size=(4000, 8)).astype(np.float32)
    gpu_bytes = int(share * jturnip.peak_bytes(fn, x))
    f = jturnip.jit(fn, gpu_bytes)
    # Sums in another order, in each of nine iterations.
    assert_same(f(jturnip.host(x)), jax.jit(fn)(x), ulps=256)
    assert len(f.last_run.order) <= 3
    assert f.last_run.peak_bytes <= gpu_bytes


def eigenvector(x: Any) -> Any:
    """The kernel is made before the loop, and read in each iteration and after it."""
    kernel = jnp.exp(-((x[:, None] - x) ** 2).sum(-1))

    def body(s: Any) -> Any:
        new = kernel @ s[0]
        new = new / jnp.linalg.norm(new)
        return new, jnp.linalg.norm(new - s[0]), s[2] + 1

    goes_on = lambda s: (s[1] > 1e-3) & (s[2] < 8)
    found, _, count = lax.while_loop(goes_on, body, (jnp.ones(len(x)), jnp.inf, 0))
    return found, kernel @ found, count


def solved(x: Any) -> Any:
    """A system with the kernel as its matrix, by a solver of JAX."""
    kernel = jnp.exp(-((x[:, None] - x) ** 2).sum(-1)) + 30 * jnp.eye(len(x))
    return jax.scipy.sparse.linalg.cg(lambda v: kernel @ v, x, maxiter=4)[0]


def with_stacks(x: Any) -> Any:
    """A scan that reads the kernel, something else, and a stack."""
    kernel, small = jnp.exp(-((x[:, None] - x) ** 2).sum(-1)), jnp.sin(x[0])

    def step(carried: Any, row: Any) -> Any:
        carried = jnp.tanh(kernel @ carried * small / 99 + row)
        return carried, carried.sum(0)

    return lax.scan(step, x, jnp.arange(5.0)[:, None], reverse=True)


@pytest.mark.long
@pytest.mark.parametrize("share", [0.6, 0.2])
@pytest.mark.parametrize("fn", [eigenvector, solved, with_stacks], ids=lambda f: f.__name__)
def test_a_kernel_is_made_in_each_iteration_where_it_has_no_room(fn, share):
    x = np.random.default_rng(0).normal(size=(700, 3)).astype(np.float32)
    gpu_bytes = int(share * jturnip.peak_bytes(fn, x))
    # To move the kernel is no faster, whatever the tasks take on the machine at hand.
    f = jturnip.jit(fn, gpu_bytes, link=jturnip.SimulatedLink(5e7, 5e7))
    # Sums of 700 in another order, in each of some iterations.
    assert_same(f(jturnip.host(x)), jax.jit(fn)(x), ulps=512)
    assert f.last_run.peak_bytes <= gpu_bytes
    assert f.last_run.h2d_bytes < 4 * x.nbytes


@pytest.mark.long
@pytest.mark.parametrize("faster", [Chain, pytest.param(Straight, marks=pytest.mark.slow)])
def test_a_kernel_is_moved_where_that_is_faster_than_to_make_it(
    faster: type, monkeypatch: pytest.MonkeyPatch
):
    """Both are predicted: the loop as often as it runs, its kernel in all iterations."""

    def fn(x: Any) -> Any:
        kernel = jnp.exp(-((x[:, None] - x) ** 2).sum(-1))
        apply = lambda _, v: jnp.tanh(kernel @ v)
        return kernel @ lax.fori_loop(0, 400, apply, x)

    predicted = lambda program: 1.0 if isinstance(program, faster) else 2.0
    monkeypatch.setattr(tries, "expected_seconds", predicted)
    x = np.random.default_rng(0).normal(size=(700, 3)).astype(np.float32)
    gpu_bytes = int(0.4 * jturnip.peak_bytes(fn, x))
    f = jturnip.jit(fn, gpu_bytes)
    assert_same(f(jturnip.host(x)), jax.jit(fn)(x), ulps=512)
    assert f.last_run.peak_bytes <= gpu_bytes
    assert (f.last_run.strategy == "driven") == (faster is Chain)


def test_a_loop_is_expected_to_take_as_long_as_all_its_iterations():
    weights = [np.full((64, 64), 1 / 64, np.float32) for _ in range(6)]

    def fn(x: Any, weights: Any) -> Any:
        apply = lambda _, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x)
        x = lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + 1, apply(0, s[1])), (0, x))
        return x[1]

    f = jturnip.jit(fn, 80_000)
    x = np.ones((8, 64), np.float32)
    program: Any = f.lower(x, jturnip.host(weights))._budgeted.program
    assert isinstance(program, Chain)
    (loop,) = (s.program for s in program.stages if isinstance(s.program, Loop))
    assert loop.iterations == 9
    seconds = [p.plan.predicted_seconds for p in (loop.condition, loop.body)]
    assert expected_seconds(loop) == pytest.approx(seconds[0] + 9 * seconds[1])
    assert expected_seconds(program) == sum(
        expected_seconds(s.program) for s in program.stages
    )


@pytest.mark.parametrize(
    ("goes_on", "count"),
    [
        (lambda s: s[0] < 7, 7),
        (lambda s: (s[0] < 7) & (s[1] < 9.0), None),
        (lambda s: s[1] < 0.5, None),  # no number of iterations
        (lambda s: s[1] < jnp.inf, None),
    ],
)
def test_how_often_a_loop_runs(goes_on, count):
    step = lambda s: (s[0] + 1, s[1] * 2)
    (e,) = jax.make_jaxpr(lambda x: lax.while_loop(goes_on, step, (0, x)))(1.0).eqns
    assert iterations(e) == count
    (e,) = jax.make_jaxpr(lambda x: lax.scan(lambda c, r: (c + r, r), 0.0, x))(
        np.ones(5, np.float32)
    ).eqns
    assert iterations(e) == 5


FACTS = np.random.default_rng(1).normal(size=(4000, 100)).astype(np.float32)
LABELS = (FACTS[:, 0] > 0).astype(np.float32)


def misfit(facts: Any, labels: Any, weights: Any) -> Any:
    found = facts @ weights
    return jnp.mean(jnp.logaddexp(0, found) - labels * found) + 0.05 * weights @ weights


def descended(facts: Any, labels: Any, weights: Any) -> Any:
    slope = jax.grad(misfit, argnums=2)
    step = lambda _, weights: weights - 0.1 * slope(facts, labels, weights)
    return lax.fori_loop(0, 5, step, weights)


def descended_until_flat(facts: Any, labels: Any, weights: Any) -> Any:
    slope = jax.grad(misfit, argnums=2)

    def step(state: Any) -> Any:
        count, weights, _ = state
        change = slope(facts, labels, weights)
        return count + 1, weights - 0.1 * change, jnp.abs(change).max()

    goes_on = lambda state: (state[0] < 5) & (state[2] > 1e-6)
    return lax.while_loop(goes_on, step, (0, weights, jnp.float32(1)))[1]


def searched_along_lines(facts: Any, labels: Any, weights: Any) -> Any:
    """Two loops and a branch inside each other, all of which read all facts."""
    at = functools.partial(misfit, facts, labels)

    def step(_: Any, weights: Any) -> Any:
        value, change = jax.value_and_grad(at)(weights)
        is_worse = lambda length: at(weights - length * change) > value
        length = lax.while_loop(is_worse, lambda length: length / 2, jnp.float32(4))
        shorter = lambda length: length - 0.1 * at(weights)
        length = lax.cond(value > 0.5, shorter, lambda length: length, length)
        return weights - length * change

    return lax.fori_loop(0, 3, step, weights)


@pytest.mark.long
@pytest.mark.parametrize("share", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "fn",
    [descended, descended_until_flat, searched_along_lines],
    ids=lambda fn: fn.__name__,
)
def test_a_loop_over_what_is_read_along_two_axes(fn, share):
    args = FACTS, LABELS, np.zeros(100, np.float32)
    gpu_bytes = FACTS.nbytes // share
    f = jturnip.jit(fn, gpu_bytes)
    want = jax.jit(fn)(*args)
    hosted = jturnip.host(args[:2])
    for _ in range(2):
        with Watch(hosted) as watch:
            assert_same(f(*hosted, args[2]), want, ulps=256)
        assert max(watch.peak_bytes, f.last_run.peak_bytes) <= gpu_bytes
    assert f.last_run.strategy == "driven"


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "count", "strategy"),
    [((8, 1, 32, 32), 2, "ours"), ((1, 1, 64, 64), 1, "driven")],
)
def test_what_an_iteration_makes_is_cut_in_a_loop_of_known_length(
    shape: tuple[int, ...], count: int, strategy: str
):
    """Of several images in blocks, and the loop is one task; of one over tasks, since
    windows slide over it."""

    def denoised(kernels: Any, x: Any) -> Any:
        def step(_: Any, x: Any) -> Any:
            wide = x
            for kernel in kernels:
                wide = lax.conv(wide, kernel, (1, 1), "SAME")
                groups = wide.reshape(len(x), 4, -1)
                groups -= groups.mean(2, keepdims=True)
                wide = jax.nn.silu(groups.reshape(wide.shape))
            # Of all images: the loop cannot be done for some of them at a time.
            return x - 0.1 * wide.mean(1, keepdims=True) - wide.mean((0, 1))

        return lax.fori_loop(0, 3, step, x)

    rng = np.random.default_rng(0)
    kernels = [
        rng.normal(size=s).astype(np.float32) / 9 for s in ((16, 1, 3, 3), (16, 16, 3, 3))
    ]
    kernels, x = kernels[:count], rng.normal(size=shape).astype(np.float32)
    gpu_bytes = jturnip.peak_bytes(denoised, kernels, x) // 2
    f = jturnip.jit(denoised, gpu_bytes)
    with Watch([kernels, x]) as watch:
        assert_same(f(kernels, x), jax.jit(denoised)(kernels, x), ulps=256)
    assert max(watch.peak_bytes, f.last_run.peak_bytes) <= gpu_bytes
    assert f.last_run.strategy == strategy


def test_a_short_scan_that_looks_up_rows_is_planned_once():
    """Rows of the table, and then a product with all of it, in each iteration."""
    table = np.random.default_rng(0).normal(size=(2000, 64)).astype(np.float32)

    def spoken(table: Any, tokens: Any) -> Any:
        def step(tokens: Any, _: Any) -> Any:
            scores = jnp.sin(table[tokens]) @ table.T
            return jnp.argmax(scores, axis=1), scores.max(axis=1)

        return lax.scan(step, tokens, length=6)

    tokens = np.arange(8)
    gpu_bytes = table.nbytes // 2
    f = jturnip.jit(spoken, gpu_bytes)
    hosted = jturnip.host(table)
    assert_same(f(hosted, tokens), jax.jit(spoken)(table, tokens), ulps=256)
    assert f.last_run.peak_bytes <= gpu_bytes
    plan = f.last_run.plan
    assert len(plan.pieces) <= 3
    # The rows are taken out by the host: the table travels once in each iteration.
    assert f.last_run.h2d_bytes < 6 * 1.1 * table.nbytes


@pytest.mark.long
@pytest.mark.parametrize("length", [4, None], ids=["of a known length", "of any"])
def test_what_a_loop_carries_stays_where_its_body_may_write_over_it(length: int | None):
    """It is larger than a quarter of the budget, and there is no room for it twice."""

    def shortest(d: Any, count: Any) -> Any:
        through = lambda k, d: jnp.minimum(d, d[:, k][:, None] + d[k][None])
        return lax.fori_loop(0, length or count, through, d)

    d = np.random.default_rng(0).uniform(size=(256, 256)).astype(np.float32)
    f = jturnip.jit(shortest, int(1.4 * d.nbytes))
    for _ in range(2):
        assert_same(f(jturnip.host(d), 4), jax.jit(shortest)(d, 4))
        report = f.last_run
        assert report.peak_bytes <= 1.4 * d.nbytes
        assert max(report.h2d_bytes, report.d2h_bytes) <= d.nbytes + 1024


def test_a_loops_body_is_known_when_it_comes_again():
    """Its condition is told by what it is: a loop is planned beside this and that."""
    count = lambda x: lax.while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1,), (0,))
    (eqn,) = jax.make_jaxpr(count)(3).eqns[-1:]
    asks, does = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    key = lambda n: Function(does, (0,), Condition(asks, n)).key
    assert key(1) == key(1)
    assert len({key(1), key(2), Function(does, (0,)).key}) == 3


@pytest.mark.long
def test_a_body_that_never_fits_is_not_tried_for_each_carried_value(monkeypatch):
    """What its state takes is nothing beside what it lacks."""

    def fn(matrix: Any, state: Any) -> Any:
        def step(carried: Any) -> Any:
            count, *state = carried
            values = jnp.linalg.eigvalsh(matrix + count * jnp.eye(len(matrix)))
            return count + 1, *(values.sum() + s for s in state)

        return lax.while_loop(lambda carried: carried[0] < 3, step, (0, *state))

    sent: list[Any] = []
    send = driven_programs._send_larger_half
    spy = lambda *args: (sent.append(args), send(*args))
    monkeypatch.setattr(driven_programs, "_send_larger_half", spy)
    state = [np.full(n, 1.0, np.float32) for n in range(1, 9)]
    with pytest.raises(jturnip.DoesNotFit, match="eigh"):
        jturnip.jit(fn, 200_000)(np.eye(400, dtype=np.float32), state)
    assert not sent


@pytest.mark.long
def test_what_no_attempt_takes_further_apart_is_refused_once(monkeypatch):
    """All its loops are driven in the first attempt along axes."""

    def fn(b: Any, x: Any) -> Any:
        goes_on = lambda x: x[0, 0] < 5
        return lax.while_loop(goes_on, lambda x: jnp.linalg.eigh(x @ b)[1] + 6, x)

    tried: list[bool] = []
    drive = tries.driven
    spy = lambda *args: (tried.append(args[2].how.axes), drive(*args))[1]
    monkeypatch.setattr(tries, "driven", spy)
    with pytest.raises(jturnip.DoesNotFit, match="while"):
        jturnip.jit(fn, X.size * 64)(
            np.eye(256, dtype=np.float32), np.ones((256, 256), "f4")
        )
    assert tried.count(True) == 1


def _solved(x: Any, w: Any) -> Any:
    """Descends for some steps, each of which reads all of `x` from both sides."""
    return lax.fori_loop(0, 6, lambda _, w: w - 1e-3 * (x.T @ jnp.tanh(x @ w)), w)


def _solved_anew(x: Any, w: Any) -> Any:
    """The same, for data that are other ones each time."""

    def again(_: Any, state: Any) -> Any:
        x, w = state
        return x * 1.5, _solved(x, w)

    return lax.fori_loop(0, 3, again, (x, w))


@pytest.mark.long
@pytest.mark.parametrize(("fn", "loops"), [(_solved, 1), (_solved_anew, 3)])
def test_a_loop_looks_once_at_the_parts_of_what_it_reads_each_time(
    fn: Any, loops: int, monkeypatch: pytest.MonkeyPatch
):
    """Every iteration had made all parts of the data anew, a quarter of its time."""
    x = np.random.default_rng(0).normal(size=(2048, 64)).astype(np.float32) / 64
    w = np.ones(64, np.float32)
    split = jturnip.jit(fn, x.nbytes // 2)
    arguments = jturnip.host((x, w))
    assert_same(split(*arguments), jax.jit(fn)(x, w))
    looked: list[int] = []
    parts_of = hoststacks.parts_of

    def looked_at(array: Any, windows: Any) -> Any:
        looked.append(array.nbytes)
        return parts_of(array, windows)

    monkeypatch.setattr(hoststacks, "parts_of", looked_at)
    assert_same(split(*arguments), jax.jit(fn)(x, w))
    assert split.last_run.h2d_bytes > 3 * loops * x.nbytes
    assert 0 < looked.count(x.nbytes) <= 3 * loops


def test_what_is_surely_too_large_is_not_put_together_to_see_that(monkeypatch):
    """A matrix that is made in parts, and read as a whole by a loop, does not fit."""
    a = np.random.default_rng(0).random((512, 512), np.float32) + 0.01
    gpu_bytes, joined = a.nbytes // 2, list[int]()
    compile_groups = splitting._compile

    def watched(flat: Any, groups: Any, *rest: Any, **keywords: Any) -> Any:
        equations = [flat.equations[i] for group in groups for i in group.equations]
        joins = [e for e in equations if e.name == "concatenate" and e.ours]
        joined.extend(flat.types[e.outputs[0]].nbytes for e in joins)
        return compile_groups(flat, groups, *rest, **keywords)

    def fn(a: Any) -> Any:
        links = a / a.sum(0)
        going_on = lambda state: (state[0] < 9) & (state[1].max() > 0)
        spread = lambda state: (state[0] + 1, links @ state[1])
        return jax.lax.while_loop(going_on, spread, (0, jnp.ones(512) / 512))[1]

    monkeypatch.setattr(splitting, "_compile", watched)
    f = jturnip.jit(fn, gpu_bytes)
    assert_same(f(jturnip.host(a)), jax.jit(fn)(a))
    assert f.last_run.peak_bytes <= gpu_bytes
    assert max(joined, default=0) <= gpu_bytes
