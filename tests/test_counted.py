"""Loops that read rows by their counter are scans over these rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_bitwise, assert_same, whole_bytes
from flat import evaluated, flat_of
from jax import lax

import jturnip
from jturnip.frontend.loops import scan_counts


RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(9, 5, 4)).astype(np.float32)
X = RANDOM.normal(size=(5, 4)).astype(np.float32)


def over(f: Callable[..., Any], begin: int = 0, end: int = 9) -> Callable[..., Any]:
    return lambda rows, x: lax.fori_loop(begin, end, lambda i, s: f(rows, i, s), x)


# Name → a loop, and how many arrays of rows its scan reads.
SCANS = {
    "a row": (over(lambda w, i, s: jnp.tanh(s + w[i])), 1),
    "some of the rows": (over(lambda w, i, s: jnp.tanh(s + w[i]), 2, 7), 1),
    "the row after": (over(lambda w, i, s: jnp.tanh(s + w[i + 1] - w[i]), 0, 8), 2),
    "the row before": (over(lambda w, i, s: jnp.tanh(s + w[i - 1]), 1), 1),
    "a part of a row": (over(lambda w, i, s: s + w[i, 2]), 1),
    "a part at another index": (over(lambda w, i, s: s + w[i, 4 - i // 2, None]), 1),
    "taken": (over(lambda w, i, s: s + jnp.take(w, i, 0)), 1),
    "by name": (over(lambda w, i, s: s + lax.dynamic_index_in_dim(w, i, 0, False)), 1),
    "in a function": (over(lambda w, i, s: jax.jit(lambda w, i: w[i] * 2)(w, i) + s), 1),
    "beside what is carried": (over(lambda w, i, s: s + w[i] * s[i % 5]), 1),
}


def along(f: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """A scan over positions."""

    def fn(rows: Any, x: Any) -> Any:
        step = lambda s, i: (f(rows, i, s), s[0])
        return lax.scan(step, x, jnp.arange(len(rows)), **how)

    return fn


SCANS |= {
    "over positions": (along(lambda w, i, s: jnp.tanh(s + w[i])), 2),
    "over positions, backwards": (along(lambda w, i, s: s * w[i], reverse=True), 2),
}
# Loops that read more of an array than rows by the counter.
OTHERS = {
    "all": over(lambda w, i, s: s + w[i] + w.sum(0)),
    "the last row first": over(lambda w, i, s: jnp.tanh(s + w[i - 1])),
    "in another order": over(lambda w, i, s: jnp.tanh(s + w[8 - i])),
    "past the end": over(lambda w, i, s: s * 0.5 + w[i + 1]),
    "two steps at a time": over(lambda w, i, s: s + w[2 * i], 0, 4),
    "by a column": over(lambda w, i, s: s + w[:, i % 5].sum(0), 0, 4),
    "in a branch": over(lambda w, i, s: lax.cond(i > 3, lambda: w[i] + s, lambda: s)),
}


def filling(f: Callable[..., Any], begin: int = 0, end: int = 9) -> Callable[..., Any]:
    """A loop whose first carried array is as long as the rows."""

    def fn(rows: Any, x: Any) -> Any:
        step = lambda i, state: f(rows, i, *state)
        return lax.fori_loop(begin, end, step, (rows * 0.5, x))

    return fn


def backwards(f: Callable[..., Any]) -> Callable[..., Any]:
    """The same from the last row to the first."""

    def fn(rows: Any, x: Any) -> Any:
        step = lambda state, i: (f(state[0], i, state[1]), None)
        return lax.scan(step, (rows, x), jnp.arange(len(rows)), reverse=True)[0]

    return fn


row_of = lambda w, i, s: jnp.tanh(s + w[i])
# Name → a loop, how many arrays of rows its scan reads, and whether it carries all rows.
FILLS = {
    "set": (filling(lambda w, i, o, s: (o.at[i].set(row_of(w, i, s)), s)), 1, False),
    "some": (
        filling(lambda w, i, o, s: (o.at[i].set(s * 2), row_of(w, i, s)), 2, 7),
        1,
        False,
    ),
    "added to": (filling(lambda w, i, o, s: (o.at[i].add(row_of(w, i, s)), s)), 2, False),
    "changed": (
        filling(lambda w, i, o, s: (o.at[i].set(o[i] * s + o[i]), s + 1)),
        1,
        False,
    ),
    "before the next": (
        filling(lambda w, i, o, s: (o.at[i].set(o[i + 1]), s), 0, 8),
        1,
        False,
    ),
    "the row after": (
        filling(lambda w, i, o, s: (o.at[i + 1].set(s), s + 1), 0, 8),
        0,
        False,
    ),
    "in place": (
        filling(lambda w, i, o, s: (lax.dynamic_update_index_in_dim(o, s, i, 0), s + 1)),
        0,
        False,
    ),
    "backwards": (backwards(lambda o, i, s: (o.at[i].set(o[i] + s), s + 1)), 2, False),
    "before the last": (backwards(lambda o, i, s: (o.at[i].add(o[i - 1]), s)), 1, True),
    # What else is done with an array needs all of it.
    "after the next": (backwards(lambda o, i, s: (o.at[i].add(o[i + 1]), s)), 1, True),
    "after the last": (
        filling(lambda w, i, o, s: (o.at[i].set(o[i - 1] + s), s), 1),
        0,
        True,
    ),
    "read when written": (
        filling(lambda w, i, o, s: ((o := o.at[i].set(s)), s + o[i])),
        0,
        True,
    ),
    "twice": (filling(lambda w, i, o, s: (o.at[i].set(s).at[i].add(s), s + 1)), 0, True),
    "a part of a row": (filling(lambda w, i, o, s: (o.at[i, 0].set(s[0]), s + 1)), 0, True),
    "all changed": (filling(lambda w, i, o, s: (o + 1, s + o[i])), 0, True),
}


@pytest.mark.parametrize("name", FILLS)
def test_rows_are_stacked(name: str):
    fn, read, carries = FILLS[name]
    flat = flat_of(fn, ROWS, X)
    (scan,) = (e for e in flat.equations if e.name == "scan")
    consts, carry, count = scan_counts(scan.origin)
    carried = scan.origin.invars[consts : consts + carry]
    assert (count, ROWS.shape in [v.aval.shape for v in carried]) == (read, carries)
    assert_bitwise(evaluated(flat, ROWS, X), jax.tree.leaves(jax.jit(fn)(ROWS, X)))


def scanned(fn: Callable[..., Any]) -> list[int]:
    """How many arrays the scans of a function read by rows."""
    flat = flat_of(fn, ROWS, X)
    scans = [e for e in flat.equations if e.name == "scan"]
    return [scan_counts(e.origin)[2] for e in scans]


@pytest.mark.parametrize("name", SCANS)
def test_rows_are_scanned(name: str):
    fn, count = SCANS[name]
    assert scanned(fn) == [count]
    found = evaluated(flat_of(fn, ROWS, X), ROWS, X)
    assert_bitwise(found, jax.tree.leaves(jax.jit(fn)(ROWS, X)))


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_read_as_before(name: str):
    fn = OTHERS[name]
    assert scanned(fn) == [0]
    assert_bitwise(evaluated(flat_of(fn, ROWS, X), ROWS, X), [jax.jit(fn)(ROWS, X)])


def test_a_counter_that_is_not_one_is_not():
    """It goes up by two, or begins with what nobody knows."""
    by_two = lambda rows, x: lax.scan(
        lambda c, _: ((c[0] + 2, c[1] + rows[c[0]]), None), (0, x), length=4
    )[0]
    unknown = lambda rows, x: lax.scan(
        lambda c, _: ((c[0] + 1, c[1] + rows[c[0]]), None),
        (x[0, 0].astype(int), x),
        length=4,
    )[0]
    assert scanned(by_two) == scanned(unknown) == [0]


def test_layers_read_by_their_number_stream_as_in_a_scan():
    weights = (RANDOM.normal(size=(12, 128, 128)) / 12).astype(np.float32)
    by_number = lambda w, x: lax.fori_loop(0, 12, lambda i, s: jnp.tanh(s @ w[i]), x)
    x = weights[0]
    expected = jax.jit(by_number)(weights, x)
    f = jturnip.jit(by_number, weights.nbytes // 2)
    assert_bitwise(f(jturnip.host(weights), x), expected)
    assert f.last_run.strategy != "driven"
    assert f.last_run.h2d_bytes <= 1.02 * (weights.nbytes + x.nbytes)


def test_rows_of_what_is_made_are_made_once():
    """A product of all pairs was made anew in each of the iterations."""

    def fn(x: Any) -> Any:
        pairs = x @ x.T
        return lax.fori_loop(
            0, len(x), lambda i, s: jnp.tanh(s + pairs[i] * s[i]), jnp.ones(len(x))
        )

    x = RANDOM.normal(size=(400, 4)).astype(np.float32)
    f = jturnip.jit(fn, whole_bytes(jax.jit(fn).lower(x).compile()) // 2)
    assert_same(f(jturnip.host(x)), jax.jit(fn)(x), ulps=64)  # products of other shapes
    products = sum(task.flops for task in f.last_run.plan.taskgraph.tasks)
    assert products < 10 * 2 * 400 * 400 * 4


def test_an_array_that_a_loop_fills_does_not_move_in_each_iteration():
    """It moved in each of them, 200 times as much as there and back."""
    x = RANDOM.normal(size=(60, 64, 64)).astype(np.float32) / 8

    def fn(x: Any) -> Any:
        step = lambda i, o: o.at[i].set(jnp.tanh(x[i] @ x[i].T))
        return lax.fori_loop(0, len(x), step, jnp.zeros_like(x))

    f = jturnip.jit(fn, whole_bytes(jax.jit(fn).lower(x).compile()) // 4)
    assert_bitwise(f(jturnip.host(x)), jax.jit(fn)(x))
    assert f.last_run.h2d_bytes + f.last_run.d2h_bytes <= 2.02 * x.nbytes
