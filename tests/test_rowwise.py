"""What a scan reads row by row, made in its iterations."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_bitwise, assert_same, unconstrained_peak
from flat import evaluated, flat_of
from jax import lax

import jturnip
from jturnip.frontend.anew import Large
from jturnip.frontend.axes import Known
from jturnip.frontend.costs import DeviceRates
from jturnip.frontend.rowwise import made_by_rows
from jturnip.frontend.values import FlatJaxpr


STEPS, ROWS, WIDTH = 8, 32, 16
# What is computed costs nothing, what is kept a second for each byte.
LARGE = Large(0, 1.0, DeviceRates(1e30, 1e30, 0.0))
ARENA = 16 * 4 * STEPS * WIDTH


def summed(rows: Any, reverse: bool = False) -> Any:
    """Of which each iteration reads a row, and needs what the last one gave."""

    def step(total: Any, row: Any) -> Any:
        total = jnp.tanh(total + row)
        return total, total.sum()

    return lax.scan(step, jnp.zeros_like(rows[0]), rows, reverse=reverse)


def shuffled(x: Any, order: Any) -> Any:
    return summed(x[order].reshape(STEPS, ROWS, WIDTH))


def backwards(x: Any, order: Any) -> Any:
    return summed(x[order].reshape(STEPS, ROWS, WIDTH), reverse=True)


def turned(x: Any, order: Any) -> Any:
    """Time is the second axis of what the tokens become."""
    return summed(x[order.reshape(ROWS, STEPS) % WIDTH].swapaxes(0, 1))


def noise(x: Any, order: Any) -> Any:
    key = jax.random.wrap_key_data(order[:2].astype(np.uint32), impl="threefry2x32")
    return summed(x[0] + jax.random.normal(key, (STEPS, ROWS, WIDTH)))


def at_two_places(x: Any, order: Any) -> Any:
    """Gradients read backwards what the values were made of."""
    rows = x[order].reshape(STEPS, ROWS, WIDTH)
    return summed(rows), summed(rows, reverse=True)


def of_a_product(x: Any, order: Any) -> Any:
    """A product of few rows may take as long as one of many."""
    weights = jnp.sin(x[:WIDTH])
    return summed((x @ weights).reshape(STEPS, ROWS, WIDTH) + order[0])


def that_is_a_result(x: Any, order: Any) -> Any:
    rows = x[order].reshape(STEPS, ROWS, WIDTH)
    return summed(rows), rows


def read_as_a_whole_too(x: Any, order: Any) -> Any:
    rows = x[order].reshape(STEPS, ROWS, WIDTH)
    return lax.scan(lambda c, row: (c + rows[0], row.sum()), rows[1], rows)


def that_others_read_later(x: Any, order: Any) -> Any:
    rows = x[order].reshape(STEPS, ROWS, WIDTH)
    last, sums = summed(rows)
    return last, sums, jnp.sort(rows, axis=1)


def of_what_is_a_result(x: Any, order: Any) -> Any:
    """Made in the iterations it would be drawn twice."""
    del x
    key = jax.random.wrap_key_data(order[:2].astype(np.uint32), impl="threefry2x32")
    drawn = jax.random.normal(key, (STEPS, ROWS, WIDTH))
    return summed(jnp.sin(drawn)), drawn


def of_much_more(x: Any, order: Any) -> Any:
    """A few rows of a table: the table would have to be there all the time."""
    large = jnp.tile(jnp.exp(x), (8, 1))
    return summed(large[order].reshape(STEPS, ROWS, WIDTH))


def arguments() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.standard_normal((STEPS * ROWS, WIDTH), np.float32)
    return x, random.permutation(STEPS * ROWS).astype(np.int32)


X = arguments()[0]


def count(flat: FlatJaxpr, name: str) -> int:
    return sum(e.name == name for e in flat.equations)


def by_rows(flat: FlatJaxpr) -> FlatJaxpr:
    return made_by_rows(flat, ARENA, LARGE, (), Known())


def whole_rows(flat: FlatJaxpr) -> int:
    """How many values are all that a scan reads, or as large."""
    large = (v for e in flat.equations for v in e.outputs)
    return sum(flat.types[v].nbytes >= 4 * STEPS * ROWS * WIDTH for v in large)


@pytest.mark.parametrize("fn", [shuffled, backwards, turned, noise, at_two_places])
def test_rows_are_made_when_they_are_read(fn: Any):
    args = arguments()
    flat = flat_of(fn, *args)
    made = by_rows(flat)
    assert whole_rows(flat) >= 2
    assert whole_rows(made) == 0
    for ours, theirs in zip(evaluated(made, *args), evaluated(flat, *args), strict=True):
        assert_bitwise(ours, theirs)


@pytest.mark.parametrize(
    "fn",
    [
        that_is_a_result,
        read_as_a_whole_too,
        that_others_read_later,
        of_much_more,
    ],
)
def test_rows_that_are_better_made_at_once_are_left(fn: Any):
    args = arguments()
    flat = flat_of(fn, *args)
    assert by_rows(flat) is flat


def test_a_product_is_made_at_once():
    args = arguments()
    flat = flat_of(of_a_product, *args)
    made = by_rows(flat)
    assert [e.name for e in made.equations if e.name == "dot_general"]
    assert whole_rows(made) == 1
    for ours, theirs in zip(evaluated(made, *args), evaluated(flat, *args), strict=True):
        assert_bitwise(ours, theirs)


def test_what_takes_long_is_not_made_again():
    slow = dataclasses.replace(LARGE, seconds_per_byte=1e-30)
    flat = flat_of(of_what_is_a_result, *arguments())
    assert made_by_rows(flat, ARENA, slow, (), Known()) is flat


def test_a_softmax_of_rows_is_right_to_its_last_bits():
    """XLA adds up in another order where it has a row at a time."""
    args = arguments()
    flat = flat_of(
        lambda x, o: summed(jax.nn.softmax(x[o]).reshape(STEPS, ROWS, WIDTH)), *args
    )
    made = by_rows(flat)
    assert whole_rows(made) == 0
    for ours, theirs in zip(evaluated(made, *args), evaluated(flat, *args), strict=True):
        assert_same(ours, theirs)


def test_what_is_there_all_the_time_is_not_counted():
    """A table that is larger than the rows that are taken out of it."""
    x, order = arguments()
    fn = lambda table, order: summed(table[order].reshape(STEPS, ROWS, WIDTH))
    flat = flat_of(fn, np.tile(x, (8, 1)), order)
    assert whole_rows(by_rows(flat)) > 0
    made = made_by_rows(flat, ARENA, LARGE, flat.inputs, Known())
    assert whole_rows(made) == 0


def test_a_scan_of_numbers_in_the_text():
    flat = flat_of(lambda x: lax.scan(lambda n, row: (n + 1, n * row), 0.0, jnp.sin(x)), X)
    assert count(flat, "sin") == 1
    assert count(by_rows(flat), "sin") == 0


def test_no_rows_but_small_ones():
    flat = flat_of(shuffled, *arguments())
    assert made_by_rows(flat, 1 << 30, LARGE, (), Known()) is flat


def test_epochs_over_shuffled_batches_are_one_task():
    """A policy's training: each epoch goes over the same examples in another order."""

    def loss(weights: Any, examples: Any, targets: Any) -> Any:
        return jnp.mean((jnp.tanh(examples @ weights) - targets) ** 2)

    def fn(weights: Any, x: Any, y: Any, orders: Any) -> Any:
        def epoch(weights: Any, order: Any) -> Any:
            batches = jax.tree.map(lambda a: a[order].reshape(8, -1, a.shape[-1]), (x, y))

            def step(weights: Any, batch: Any) -> Any:
                value, slope = jax.value_and_grad(loss)(weights, *batch)
                return weights - 0.1 * slope, value

            return lax.scan(step, weights, batches)

        return lax.scan(epoch, weights, orders)

    random = np.random.default_rng(0)
    some = lambda *shape: random.standard_normal(shape, np.float32)
    orders = np.stack([random.permutation(8192) for _ in range(3)]).astype(np.int32)
    args = some(64, 8), some(8192, 64), some(8192, 8), orders
    gpu_bytes = int(0.7 * unconstrained_peak(fn, *args))
    f = jturnip.jit(fn, gpu_bytes)
    assert_same(f(*jturnip.host(args)), jax.jit(fn)(*args))
    assert len(f.last_run.plan.taskgraph.tasks) == 1
    assert f.last_run.peak_bytes <= gpu_bytes
