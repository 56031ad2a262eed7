"""Tables in host memory: only the rows that are used travel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, memory_kinds, unconstrained_peak
from flat import flat_of
from hypothesis import given, settings, strategies as st
from jax.scipy.ndimage import map_coordinates

import jturnip
from jturnip.frontend import tables
from jturnip.frontend.values import bind


ROWS, WIDTH = 4096, 128
NBYTES = ROWS * WIDTH * 4
TOKENS = np.random.default_rng(0).integers(0, ROWS, (4, 16), np.int32)
TOKENS[0, :3] = 7  # some more than once


def table(dtype: Any = np.float32) -> Any:
    return np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(dtype)


def head() -> Any:
    return np.random.default_rng(2).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 12


def forward(table: Any, head: Any, tokens: Any) -> Any:
    return jnp.tanh(table[tokens] @ head)


def loss(table: Any, head: Any, tokens: Any) -> Any:
    return (forward(table, head, tokens) ** 2).mean() * 100


def sgd(table: Any, head: Any, tokens: Any) -> Any:
    value, gradients = jax.value_and_grad(loss, (0, 1))(table, head, tokens)
    update = lambda weight, gradient: weight - 0.1 * gradient
    return (*jax.tree.map(update, (table, head), gradients), value)


def momentum(table: Any, head: Any, tokens: Any) -> Any:
    """An update that changes every row, used or not."""
    gradient = jax.grad(loss)(table, head, tokens)
    moment = 0.9 * (table * 0.01) + 0.1 * gradient
    return table - 0.1 * moment / (jnp.sqrt(moment**2) + 1e-3), moment


def accumulated(table: Any, head: Any, tokens: Any) -> Any:
    """Rows added to the table by hand."""
    return table.at[tokens].add(forward(table, head, tokens))


def layer_by_number(table: Any, head: Any, tokens: Any) -> Any:
    """A row at a time, whose number is only known while it runs."""
    add = lambda k, x: x + table[tokens[0, k]]
    return jax.lax.fori_loop(0, jnp.int32(3), add, jnp.zeros(WIDTH))


BUDGET = NBYTES // 4


@pytest.mark.parametrize("fn", [forward, sgd, momentum, accumulated, layer_by_number])
@pytest.mark.parametrize("hosted", [True, False], ids=["pinned", "numpy"])
def test_a_table_larger_than_the_device(fn, hosted):
    arguments = table(), head(), TOKENS
    expected = jax.jit(fn)(*arguments)
    f = jturnip.jit(fn, BUDGET)
    assert_same(f(*(jturnip.host(arguments) if hosted else arguments)), expected)
    assert f.last_run.peak_bytes <= BUDGET


@pytest.mark.parametrize("fn", [forward, sgd, accumulated, layer_by_number])
def test_only_the_rows_that_are_used_travel(fn):
    arguments = jturnip.host((table(), head(), TOKENS))
    f = jturnip.jit(fn, BUDGET)
    f(*arguments)
    used = TOKENS.size * WIDTH * 4
    moved = f.last_run.h2d_bytes + f.last_run.d2h_bytes
    assert moved <= 4 * used + 6 * head().nbytes
    assert moved < NBYTES // 2


@pytest.mark.long
def test_an_image_between_whose_pixels_values_are_read():
    """Gathers are fused: nothing is written down between the four of a part of the result,
    and only the image is there for all parts."""

    def fn(image: Any, at: Any) -> Any:
        down, across = jnp.meshgrid(*map(jnp.arange, image.shape), indexing="ij")
        places = [down + at[0], across + at[1]]
        return map_coordinates(image, places, order=1, mode="nearest")

    random = np.random.default_rng(0)
    image = random.random((1024, 1024), np.float32)
    at = 3 * random.random((2, *image.shape), np.float32)
    f = jturnip.jit(fn, unconstrained_peak(fn, image, at) // 2)
    hosted = jturnip.host((image, at))
    for _ in range(2):
        assert_same(f(*hosted), jax.jit(fn)(image, at))
    run = f.last_run
    assert run.h2d_bytes + run.d2h_bytes <= 1.05 * (2 * image.nbytes + at.nbytes)
    assert len(run.plan.taskgraph.tasks) <= 16


def test_lookups_of_several_batches_cut_nothing():
    """All rows first, then one plan; but rows whose numbers are computed in their turn."""

    def fn(table: Any, weights: list[Any], tokens: list[Any]) -> list[Any]:
        results = []
        for each in tokens:
            x = table[each]
            for weight in weights:
                x = jnp.tanh(x @ weight)
            results.append(x)
        return [*results, table[jnp.argmax(results[0], axis=-1)]]

    weights = [jturnip.host(head() * k) for k in range(1, 9)]
    tokens = [TOKENS, TOKENS + 1, TOKENS + 2]
    want = jax.jit(fn)(table(), [np.asarray(w) for w in weights], tokens)
    # So slow that the order of the program, in which weights come thrice, is surely slower.
    f = jturnip.jit(fn, BUDGET // 2, link=jturnip.SimulatedLink(1e7, 1e7))
    hosted = jturnip.host(table())
    for _ in range(2):
        assert_same(f(hosted, weights, tokens), want)
    pieces = [("gather" in piece.name, piece) for piece in f.last_run.plan.pieces]
    # The numbers of rows, three lookups, all layers, and the lookup after them.
    assert [by_host for by_host, _ in pieces] == [False, True, True, True, False, True]
    # Which of the other orders it is hangs on measured times.
    assert pieces[4][1].task_order
    assert pieces[4][1].h2d_bytes < 1.5 * sum(w.nbytes for w in weights)


def test_lookups_come_first_and_effects_in_their_order():
    seen: list[str] = []

    def fn(table: Any, weights: list[Any], tokens: Any) -> tuple[Any, Any]:
        note = lambda what, x: jax.debug.callback(
            lambda total: seen.append(what), x.sum(), ordered=True
        )
        x = table[tokens]
        for weight in weights:
            x = jnp.tanh(x @ weight)
        note("layers", x)
        y = table[tokens + 1]
        note("lookup", y)
        for weight in weights:
            y = jnp.tanh(y @ weight)
        note("layers again", y)
        return x, y

    weights = [jturnip.host(head()) for _ in range(8)]
    want = jax.jit(fn)(table(), [np.asarray(w) for w in weights], TOKENS)
    jax.effects_barrier()
    expected = list(seen)
    f = jturnip.jit(fn, BUDGET // 2, link=jturnip.SimulatedLink(1e8, 1e8))
    for _ in range(3):
        seen.clear()
        assert_same(f(jturnip.host(table()), weights, TOKENS), want)
        jax.effects_barrier()
        assert seen == expected


@pytest.mark.long
def test_rows_that_wait_are_no_more_than_the_budget():
    """Rows of a stack by numbers that come with the call, all of it together."""

    def fn(stack: Any, x: Any, start: Any) -> Any:
        for k in range(16):
            x = jnp.tanh(x @ jax.lax.dynamic_index_in_dim(stack, start + k, keepdims=False))
        return x

    stack = np.random.default_rng(3).normal(size=(16, WIDTH, WIDTH)).astype(np.float32) / 12
    x = np.ones((8, WIDTH), np.float32)
    f = jturnip.jit(fn, stack.nbytes // 4)
    result = f(jturnip.host(stack), x, jnp.int32(0))
    assert_same(result, jax.jit(fn)(stack, x, jnp.int32(0)))
    lookups = [k for k, p in enumerate(f.last_run.plan.pieces) if "dynamic_slice" in p.name]
    first = [k for at, k in enumerate(lookups) if k == lookups[0] + at]
    assert len(lookups) == 16
    assert len(first) * stack[0].nbytes <= stack.nbytes // 4


def test_a_donated_table_is_changed_in_place():
    f = jturnip.jit(sgd, BUDGET, donate_argnums=(0, 1))
    state: Any = f(*jturnip.host((table(), head())), TOKENS)[:2]
    expected = jax.jit(sgd)(table(), head(), TOKENS)[:2]
    place = state[0].unsafe_buffer_pointer()
    for _ in range(2):
        given = state
        *state, _ = f(*state, TOKENS)
        *expected, _ = jax.jit(sgd)(*expected, TOKENS)
        assert given[0].is_deleted()
        assert state[0].unsafe_buffer_pointer() == place
    assert memory_kinds(state[0]) == ["pinned_host"]
    assert_same(tuple(state), tuple(expected))


def test_a_table_that_is_kept_is_not_changed():
    given = jturnip.host(table())
    jturnip.jit(sgd, BUDGET)(given, head(), TOKENS)
    np.testing.assert_array_equal(np.asarray(given), table())


def test_bfloat16():
    arguments = table(jnp.bfloat16), head().astype(jnp.bfloat16), TOKENS
    f = jturnip.jit(sgd, NBYTES // 8)
    assert_same(f(*jturnip.host(arguments)), jax.jit(sgd)(*arguments), ulps=8)


ROW = np.asarray([1, 1, 1, 2], np.int32)


def halves_to_integers(table: Any, scale: Any) -> Any:
    added = jnp.zeros((ROWS, WIDTH)).at[ROW].add(0.5)
    return table.astype(jnp.int32) + added.astype(jnp.int32)


def integers_divided(table: Any, scale: Any) -> Any:
    added = jnp.zeros((ROWS, WIDTH), jnp.int32).at[ROW].add(1)
    return table.astype(jnp.int32) + jax.lax.div(added, 2)


def scaled(table: Any, scale: Any) -> Any:
    added = jnp.zeros((ROWS, WIDTH)).at[ROW].add(table[ROW])
    return table - added * scale, (table * 0.5) - added / scale


def narrow_gradients(table: Any, scale: Any) -> Any:
    added = jnp.zeros((ROWS, WIDTH), jnp.bfloat16).at[ROW[2:]].add(jnp.bfloat16(0.5))
    return table - 0.25 * added.astype(jnp.float32)


def returned_too(table: Any, scale: Any) -> Any:
    return table[ROW], table, table.at[ROW].add(scale)


@pytest.mark.parametrize("scale", [0.5, np.nan, 0.0, np.inf])
@pytest.mark.parametrize(
    "fn", [halves_to_integers, integers_divided, scaled, narrow_gradients, returned_too]
)
def test_what_rows_and_zeros_become(fn, scale):
    arguments = table(), np.float32(scale)
    expected = jax.jit(fn)(*arguments)
    result = jturnip.jit(fn, BUDGET)(*jturnip.host(arguments))
    assert_same(result, expected)


@pytest.mark.parametrize(("rows", "by_host"), [(ROWS // 2, True), (2 * ROWS, False)])
def test_what_gets_more_rows_than_it_has_is_added_whole(rows: int, by_host: bool):
    def gradient_step(table: Any, indices: Any) -> Any:
        return table - jnp.zeros_like(table).at[indices].add(jnp.ones((rows, WIDTH)))

    flat = flat_of(gradient_step, table(), np.zeros(rows, np.int32))
    driven = [
        e.name for e in tables.rows_by_host(flat, flat.inputs[:1]).equations if e.driven
    ]
    assert driven == (["scatter-add"] if by_host else [])


@pytest.mark.parametrize("donated", [(), (0,)])
def test_weak_types_survive_host_memory(donated):
    def program(weak, tokens):
        return weak[tokens], weak * 2, weak.at[tokens].add(1.0), weak

    weak = jnp.full((ROWS, WIDTH), 0.5)
    f = jturnip.jit(program, BUDGET, donate_argnums=donated)
    assert_same(f(jturnip.host(weak), TOKENS), jax.jit(program)(weak, TOKENS))


# What the host does, against what JAX does.


INDICES = st.lists(st.integers(-3, 14), min_size=1, max_size=8)
MODES = st.sampled_from(["clip", "fill", "promise_in_bounds"])


def equation(fn: Callable[..., Any], name: str, *args: Any) -> Any:
    jaxpr = jax.make_jaxpr(fn)(*args)
    found = list(_named(getattr(jaxpr, "jaxpr", jaxpr), name))
    assert len(found) == 1
    return found[0]


def _named(jaxpr: Any, name: str) -> Any:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield eqn
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from _named(inner, name)


@settings(max_examples=60, deadline=None)
@given(indices=INDICES, mode=MODES, dtype=st.sampled_from(["float32", "int32", "bool"]))
def test_rows_that_the_host_reads(indices, mode, dtype):
    if mode == "promise_in_bounds":
        indices = [i % 12 for i in indices]
    small = (np.arange(24 * 12).reshape(24, 12) % 7).astype(dtype)[:12]
    gather = lambda small, at: jax.lax.gather(
        small,
        at,
        jax.lax.GatherDimensionNumbers((1,), (0,), (0,)),
        (1, small.shape[1]),
        mode=mode,
    )
    at = np.asarray(indices, np.int32)[:, None]
    eqn = equation(gather, "gather", small, at)
    found = tables.read_rows(eqn, small, at)
    np.testing.assert_array_equal(found, np.asarray(gather(small, at)))


@settings(max_examples=60, deadline=None)
@given(indices=INDICES, mode=MODES)
def test_rows_that_the_host_adds(indices, mode):
    if mode == "promise_in_bounds":
        indices = [i % 12 for i in indices]
    small = np.arange(12 * 5, dtype=np.float32).reshape(12, 5)
    at = np.asarray(indices, np.int32)[:, None]
    rows = np.arange(len(indices) * 5, dtype=np.float32).reshape(-1, 5)
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    add = lambda small, at, rows: jax.lax.scatter_add(small, at, rows, numbers, mode=mode)
    eqn = equation(add, "scatter-add", small, at, rows)
    assert tables.adds_rows(eqn)
    found = small.copy()
    tables.add_rows(eqn, found, at, rows)
    np.testing.assert_allclose(found, np.asarray(add(small, at, rows)), rtol=1e-6)


@pytest.mark.parametrize("start", [-2, 0, 3, 40])
def test_a_slice_whose_start_is_not_known(start):
    small = np.arange(12 * 5).reshape(12, 5)
    cut = lambda small, at: jax.lax.dynamic_slice(small, (at, 0), (2, 5))
    eqn = equation(cut, "dynamic_slice", small, np.int32(start))
    found = tables.read_rows(eqn, small, np.asarray(start), np.asarray(0))
    (expected,) = bind(eqn, (jnp.asarray(small), jnp.int32(start), jnp.int32(0)))
    np.testing.assert_array_equal(found, np.asarray(expected))


@pytest.mark.parametrize("at", [5, 10**6])
@pytest.mark.parametrize("width", [(), (128,)])
def test_one_row_by_its_number(at: int, width: tuple[int, ...]):
    """Also one that is not there, and one number of a vector."""
    shape = (4096, *width) if width else (1 << 19,)
    table = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    fn = lambda table, i: jnp.take(table, i, axis=0) * jnp.arange(128.0) + 1
    found = jturnip.jit(fn, "512KiB")(jturnip.host(table), np.int32(at))
    np.testing.assert_array_equal(found, jax.jit(fn)(table, at))
