"""Loops without what nobody reads of what they give, and what they do not read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_bitwise, assert_same, unconstrained_peak
from flat import evaluated, flat_of
from jax import lax

import jturnip
from jturnip.frontend import parts
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.loops import LOOPS, loop_counts
from jturnip.frontend.values import Equation, FlatJaxpr


ROWS, WIDTH, STEPS = 8, 4, 6
NUMBERS = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
SERIES = np.random.default_rng(1).normal(size=(STEPS, ROWS, WIDTH)).astype(np.float32)


def told(x: Any, series: Any) -> Any:
    """A step tells more than is asked for, and counts for that alone."""

    def step(state: Any, row: Any) -> Any:
        x, count, largest = state
        x = jnp.sin(x + row)
        count, largest = count + 1, jnp.maximum(largest, x.max())
        return (x, count, largest), (x.sum(), x @ x.T, largest / count)

    (x, _, _), (sums, _, _) = lax.scan(step, (x, 0, -jnp.inf), series)
    return x, sums


def told_in_turn(x: Any, series: Any) -> Any:
    """What the first gives is read by what nobody reads of the second."""

    def first(x: Any, row: Any) -> Any:
        return jnp.sin(x + row), (row * 2, row @ row.T)

    def second(x: Any, rows: Any) -> Any:
        row, square = rows
        return x + row, square.sum()

    x, rows = lax.scan(first, x, series)
    return lax.scan(second, x, rows)[0]


def told_inside(x: Any, series: Any) -> Any:
    """A loop in a loop gives what only its results, which nobody reads, are made of."""

    def step(state: Any, row: Any) -> Any:
        x, seen = state

        def inner(i: Any, both: Any) -> Any:
            x, seen = both
            return jnp.sin(x + row), seen + x @ x.T

        return lax.fori_loop(0, 3, inner, (x, seen)), None

    return lax.scan(step, (x, jnp.zeros((ROWS, ROWS))), series)[0][0]


def counted(x: Any, series: Any) -> Any:
    """A `while`: its counter goes on, what else it carries is for nobody."""

    def body(state: Any) -> Any:
        i, x, path, others = state
        return i + 1, jnp.sin(x + series[i]), path + x.sum(), others * 2

    limit = (series.sum() > -1e9) * STEPS
    start = 0, x, 0.0, jnp.ones((64, 64))
    _, x, path, _ = lax.while_loop(lambda state: state[0] < limit, body, start)
    return x, path


def loops_of(flat: FlatJaxpr) -> list[Equation]:
    return [e for e in flat.equations if e.name in LOOPS]


@pytest.mark.parametrize(
    ("fn", "given"),
    [(told, [2]), (told_in_turn, [2, 1]), (told_inside, [1]), (counted, [3])],
    ids=lambda p: getattr(p, "__name__", None),
)
def test_a_loop_gives_what_is_read(fn: Any, given: list[int]):
    flat = flat_of(fn, NUMBERS, SERIES)
    assert [len(e.outputs) for e in loops_of(flat)] == given
    assert all(e.source for e in loops_of(flat))
    expected = jax.tree.leaves(jax.jit(fn)(NUMBERS, SERIES))
    assert_bitwise(evaluated(flat, NUMBERS, SERIES), expected)


def test_all_that_is_read_stays():
    all_of = lambda x, series: lax.scan(lambda x, r: (x + r, (x.sum(), r * 2)), x, series)
    (loop,) = loops_of(flat_of(all_of, NUMBERS, SERIES))
    assert loop_counts(loop.origin) == (0, 1, 1)
    assert len(loop.outputs) == 3


def test_a_loop_that_cannot_be_taken_apart_stays_as_it_is():
    def fn(x: Any, series: Any) -> Any:
        def step(x: Any, row: Any) -> Any:
            jax.lax.create_token()
            return x + row, x @ x.T

        return lax.scan(step, x, series)[0]

    (loop,) = loops_of(flat_of(fn, NUMBERS, SERIES))
    assert len(loop.outputs) == 2


def scanned_in_64_bits(x: Any) -> Any:
    with jax.enable_x64(True):
        start = x[0].astype(jnp.float64)
        body = lambda c, _: ((c[0] * 0.5, c[1] + c[0]), None)
        v = lax.scan(body, (start, start), None, length=5)[0][0].astype(jnp.float32)
    return v


def repeated_in_64_bits(x: Any) -> Any:
    with jax.enable_x64(True):
        start = x[0].astype(jnp.float64)
        body = lambda c: (c[0] * 0.5, c[1] + c[0])
        v = lax.while_loop(lambda c: c[0].max() > 0.1, body, (start, start))[0]
        v = v.astype(jnp.float32)
    return v


@pytest.mark.parametrize("fn", [scanned_in_64_bits, repeated_in_64_bits])
def test_loops_in_other_types_than_what_is_around_them_stay_as_they_are(fn: Any):
    """They cannot be traced again without these types."""

    def around(x: Any) -> Any:
        v = fn(x)
        for _ in range(4):
            x = jnp.sin(x @ x) / 9 + v
        return x

    x = np.random.default_rng(0).normal(size=(320, 320)).astype(np.float32)
    f = jturnip.jit(around, int(0.8 * unconstrained_peak(around, x)))
    # Products of 320 numbers, four times after one another.
    assert_same(f(x), jax.jit(around)(x), ulps=256)
    assert f.last_run.strategy != "whole"


def test_what_a_loop_does_besides_is_done():
    """Nobody reads what it gives, but it tells the host."""
    seen: list[float] = []

    def fn(x: Any, series: Any) -> Any:
        def step(x: Any, row: Any) -> Any:
            jax.debug.callback(lambda total: seen.append(float(total)), row.sum())
            return x + row, x @ x.T

        return lax.scan(step, x, series)[0]

    series = np.random.default_rng(0).normal(size=(STEPS, 64, 64)).astype(np.float32)
    (loop,) = loops_of(flat_of(fn, series[0], series))
    assert len(loop.origin.outvars) == 2
    peak = unconstrained_peak(fn, series[0], series)
    jax.block_until_ready(jturnip.jit(fn, int(0.9 * peak))(series[0], series))
    jax.effects_barrier()
    # Sums of 4096 numbers in another order.
    np.testing.assert_allclose(sorted(seen), sorted(series.sum((1, 2))), rtol=1e-4)


def searched(x: Any, table: Any) -> Any:
    """A search for each row, as of trees: what one changes and another does not is handed
    on to each of its loops, which do not read it."""

    def search(x: Any, table: Any) -> Any:
        def body(state: Any) -> Any:
            x, table, i = state
            return jnp.sin(x * 0.9), table, i + 1

        going_on = lambda state: (state[0].max() > 0.1) & (state[2] < 20)
        return lax.while_loop(going_on, body, (x, table, 0))

    def step(state: Any, _: Any) -> Any:
        x, table = state
        x, table, i = jax.vmap(search)(x, table)
        square = jnp.tanh(x[:, :, None] * table[:, None]).sum(2)
        return (x + square / 8, table * 0.9 + i[:, None]), None

    return lax.scan(step, (x, table), None, length=3)[0]


def test_what_a_loop_does_not_read_is_not_in_the_way_of_an_axis():
    flat = flat_of(searched, NUMBERS, NUMBERS)
    (scan,) = loops_of(flat)
    (rule,) = rules(FlatJaxpr(**_only(flat, scan)), parts.works, Known())
    assert rule is not None
    assert {label[0] for label in rule.results} == {0}


def _only(flat: FlatJaxpr, e: Equation) -> dict[str, Any]:
    """A function that is only this equation."""
    return {
        "types": flat.types,
        "equations": (e,),
        "inputs": e.reads,
        "constants": (),
        "outputs": e.outputs,
    }


@pytest.mark.long
def test_searches_are_made_for_some_rows_at_a_time():
    """They were driven: 42 times as slow as `jax.jit`, for a library's tree search."""
    x, table = np.random.default_rng(0).normal(size=(2, 256, 96)).astype(np.float32)
    gpu_bytes = unconstrained_peak(searched, x, table) // 2
    f = jturnip.jit(searched, gpu_bytes)
    # Sums of 96 numbers, three times after one another.
    assert_same(f(x, table), jax.jit(searched)(x, table), ulps=256)
    assert f.last_run.strategy != "driven"
    assert f.last_run.peak_bytes <= gpu_bytes


def smoothed(weights: Any, noise: Any, seen: Any) -> Any:
    """A smoother of many series, whose covariances are the same for all."""

    def forward(state: Any, y: Any) -> Any:
        mean, cov = state
        innovation = cov + noise
        gain = jnp.linalg.solve(innovation, cov)
        mean = mean + (y - mean) @ gain
        cov = weights @ (cov - cov @ gain) @ weights.T + noise
        return (mean @ weights.T, cov), (mean, cov, -((y - mean) ** 2).sum(1))

    def backward(mean: Any, rows: Any) -> Any:
        before, cov = rows
        gain = jnp.linalg.solve(cov + noise, weights @ cov)
        mean = before + (mean - before @ weights.T) @ gain
        return mean, (mean, mean[:, :, None] * mean[:, None])

    count, width = seen.shape[1:]
    start = jnp.zeros((count, width)), jnp.eye(width)
    (mean, _), (means, covs, _) = lax.scan(forward, start, seen)
    return lax.scan(backward, mean, (means, covs), reverse=True)[1][0].swapaxes(0, 1)


@pytest.mark.long
@pytest.mark.parametrize("share", [2, 4])
def test_series_are_smoothed_in_a_part_of_what_they_need(share: int):
    """In a quarter it was refused, in a half its scans became a thousand tasks."""
    random = np.random.default_rng(0)
    weights = np.eye(8, dtype=np.float32) * 0.9
    noise = np.eye(8, dtype=np.float32)
    seen = random.normal(size=(400, 64, 8)).astype(np.float32)
    gpu_bytes = unconstrained_peak(smoothed, weights, noise, seen) // share
    f = jturnip.jit(smoothed, gpu_bytes)
    result, expected = f(weights, noise, seen), jax.jit(smoothed)(weights, noise, seen)
    # Each is a sum over all steps before and after, with weights that fall.
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    assert f.last_run.peak_bytes <= gpu_bytes
    assert f.last_run.strategy != "driven"
    assert len(f.last_run.plan.taskgraph.tasks) <= 100
