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


def scanned(fn: Callable[..., Any]) -> list[int]:
    """How many arrays the scans of a function read by rows."""
    flat = flat_of(fn, ROWS, X)
    scans = [e for e in flat.equations if e.name == "scan"]
    return [scan_counts(e.origin)[2] for e in scans]


@pytest.mark.parametrize("name", SCANS)
def test_rows_are_scanned(name: str):
    fn, count = SCANS[name]
    assert scanned(fn) == [count]
    assert_bitwise(evaluated(flat_of(fn, ROWS, X), ROWS, X), [jax.jit(fn)(ROWS, X)])


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
