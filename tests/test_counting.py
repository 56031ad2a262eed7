"""Indices that count rows, and what they pick or write."""

from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat import evaluated, flat_of
from hypothesis import strategies as st
from jax import lax

import jturnip
from jturnip.frontend.axes import rules_by
from jturnip.frontend.iterations import body_of
from jturnip.frontend.parts import works
from jturnip.frontend.values import Equation, Type


ROWS, COLUMNS, DEPTH = 6, 5, 4
X = np.arange(ROWS * COLUMNS * DEPTH, dtype=np.float32).reshape(ROWS, COLUMNS, DEPTH)
AT = np.array([0, 4, -1, 2, 2, 9])  # of which one is negative, and one is nowhere
CLOSED_OVER, COUNTED = np.arange(ROWS), jnp.arange(ROWS)


def rows() -> Any:
    return jnp.arange(ROWS)


# A function of an array and indices, and whether the dimension numbers come to say that
# its rows do not mix.
FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "picked": (lambda x, at: x[rows(), at], True),
    "closed over": (lambda x, at: x[CLOSED_OVER, at], True),
    "closed over, of jax": (lambda x, at: x[COUNTED, at], True),
    "in another order": (lambda x, at: x.swapaxes(0, 1)[at, rows()], True),
    "filled": (lambda x, at: x.at[rows(), at].get(mode="fill", fill_value=-3), True),
    "clipped": (lambda x, at: x.at[rows(), at].get(mode="clip"), True),
    "two in each row": (lambda x, at: x[rows()[:, None], at[None, :2]], True),
    "all of what is behind": (lambda x, at: x[rows(), :, at % DEPTH], True),
    "three columns": (lambda x, at: x[rows(), at, at % DEPTH], True),
    "unsigned": (lambda x, at: x[rows().astype(jnp.uint8), at], True),
    "added": (lambda x, at: x.at[rows(), at].add(2.5), True),
    "multiplied": (lambda x, at: x.at[rows(), at].mul(0.5), True),
    "written": (lambda x, at: x.at[rows(), at].set(7.0), True),
    "often added": (lambda x, at: x.at[rows()[:, None], at[None]].add(1.5), True),
    "fewer rows": (lambda x, at: x[jnp.arange(ROWS - 1), at[1:]], False),
    "later rows": (lambda x, at: x[rows() + 1, at], False),
    "squeezed": (lambda x, at: x[rows()[:, None].squeeze(1), at], True),
    "rows from the end": (lambda x, at: x[-1 - rows(), at], False),
    "of both, the same": (lambda x, at: x[at, at % COLUMNS], False),
    "no column but one": (lambda x, at: x[rows()] + at[:, None, None], False),
    "flat": (lambda x, at: x.ravel()[rows() * COLUMNS + at], False),
}


def indexing(fn: Callable[[Any, Any], Any], x: Any = X) -> list[Equation]:
    """The equations that pick or write by indices."""
    found = flat_of(fn, x, AT).equations
    return [e for e in found if e.name.startswith(("gather", "scatter"))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_are_a_batch_where_indices_count_them(name: str):
    fn, are_counted = FUNCTIONS[name]
    (e,) = indexing(fn)
    numbers = e.origin.params["dimension_numbers"]
    assert len(numbers.operand_batching_dims) == are_counted
    np.testing.assert_array_equal(
        evaluated(flat_of(fn, X, AT), X, AT)[0], jax.jit(fn)(X, AT)
    )


def test_a_column_that_is_too_narrow_to_count_does_not():
    x = np.zeros((300, 4), np.float32)
    narrow = lambda x, at: x[jnp.arange(300).astype(jnp.uint8), at[0]]
    (e,) = indexing(narrow, x)
    assert e.origin.params["dimension_numbers"].operand_batching_dims == ()


def test_columns_that_count_may_count_along_different_dimensions():
    fn = lambda x, at: x[rows()[:, None], jnp.arange(COLUMNS)[None], at[:, None] % DEPTH]
    flat = flat_of(fn, X, AT)
    np.testing.assert_array_equal(evaluated(flat, X, AT)[0], jax.jit(fn)(X, AT))


LOOPS: dict[str, Callable[[Any, Any], Any]] = {
    "scan": lambda x, at: lax.scan(
        lambda x, t: (x.at[COUNTED, (at + t) % COLUMNS].add(1.0), x[COUNTED, at % 3]),
        x,
        jnp.arange(4),
    ),
    "while": lambda x, at: lax.while_loop(
        lambda state: state[1] < at[1],
        lambda state: (state[0].at[COUNTED, at % COLUMNS].add(50.0), state[1] + 1),
        (x, 0),
    ),
    "a loop in a loop": lambda x, at: lax.fori_loop(
        0,
        3,
        lambda i, x: lax.fori_loop(
            0, i, lambda k, x: x.at[COUNTED, (at + k) % COLUMNS].mul(2.0), x
        ),
        x,
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_is_given_to_count_with_it_makes_itself(name: str):
    fn = LOOPS[name]
    flat = flat_of(fn, X, AT)
    (loop,) = (e for e in flat.equations if e.name in ("scan", "while"))
    assert not any(flat.types[v] == Type.of(COUNTED.aval) for v, _ in flat.constants)
    body = body_of(loop.origin, rules_by(works))
    assert body is not None
    assert body.axes  # along the rows
    found = evaluated(flat, X, AT)
    for mine, theirs in zip(found, jax.tree.leaves(jax.jit(fn)(X, AT)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.long
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=20, deadline=None)
def test_any_columns_in_any_order_give_the_same(data: st.DataObject):
    shape = data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    batch = data.draw(st.tuples(*[st.integers(1, 5)] * data.draw(st.integers(1, 2))))
    count = data.draw(st.integers(1, 3))
    kinds = [data.draw(st.integers(-1, len(batch) - 1)) for _ in range(count)]
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    given = random.integers(-7, 7, (count, *batch))
    mode = data.draw(st.sampled_from(["fill", "clip", "promise_in_bounds"]))
    if mode == "promise_in_bounds":  # which is kept
        given %= np.array(shape[:count]).reshape(-1, *(1 for _ in batch))
        if any(k >= 0 and batch[k] > n for k, n in zip(kinds, shape, strict=False)):
            mode = "fill"

    def index(given: Any) -> Any:
        return tuple(
            given[i] if d < 0 else lax.broadcasted_iota(np.int32, batch, d)
            for i, d in enumerate(kinds)
        )

    picks = lambda x, given: x.at[index(given)].get(mode=mode)
    adds = lambda x, given: x.at[index(given)].add(1.25, mode=mode)
    x = random.normal(size=shape).astype(np.float32)
    for fn in (picks, adds):
        flat = flat_of(fn, x, given)
        np.testing.assert_array_equal(evaluated(flat, x, given)[0], jax.jit(fn)(x, given))


def searched(root: Any) -> Any:
    """A tree in each row: a walk down it, whose length is its own, then a new leaf."""
    rows, nodes, moves = jnp.arange(len(root)), 16, 8

    def step(i: Any, trees: Any) -> Any:
        visits, worth, found = trees

        def walked(visits: Any, worth: Any) -> Any:
            def down(state: Any) -> Any:
                node, _ = state
                best = jnp.argmax(worth[node] - visits[node]).astype(jnp.int32)
                return node + 1 + 2 * jnp.int32(worth[node, best] > 0), best

            start = jnp.int32(0), jnp.int32(0)
            return lax.while_loop(lambda state: state[0] < i, down, start)

        node, move = jax.vmap(walked)(visits, worth)
        node = jnp.minimum(node, nodes - 1)
        leaf = jnp.tanh(found[rows, node] + root)
        return (
            visits.at[rows, node, move].add(1.0),
            worth.at[rows, node, move].add(leaf.mean(-1)),
            found.at[rows, i].set(leaf),
        )

    counts = jnp.zeros((len(root), nodes, moves))
    trees = counts, counts, jnp.zeros((len(root), nodes, root.shape[1]))
    return lax.fori_loop(1, nodes, step, trees)


@pytest.mark.long
def test_a_loop_over_rows_that_are_counted_is_cut_and_not_driven():
    root = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    budget = jturnip.peak_bytes(searched, root) // 2
    run = jturnip.jit(searched, gpu_bytes=budget)
    found, expected = run(root), jax.jit(searched)(root)
    assert run.last_run.strategy != "driven"
    assert run.last_run.peak_bytes <= budget
    # Each part of the rows goes through all iterations at once: driven, they would move in
    # and out in each.
    ends = root.nbytes + sum(tree.nbytes for tree in expected)
    assert run.last_run.h2d_bytes + run.last_run.d2h_bytes < 2 * ends
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
