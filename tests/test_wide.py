"""Functions of which a part is in 64 bits, in a process of 32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, unconstrained_peak
from jax import lax

import jturnip
from jturnip.frontend.wide import as_traced, has_wide_parts
from jturnip.graph.taskgraph import Role


X = np.random.default_rng(0).normal(size=(96, 96)).astype(np.float32)


def products(x: Any) -> Any:
    with jax.enable_x64(True):
        wide = x.astype("float64")
        found = jnp.sin(wide) @ jnp.cos(wide).T
        return (found * 2 + jnp.sum(wide, 1)).astype("float32").sum(1)


def kernel(x: Any) -> Any:
    with jax.enable_x64(True):
        wide = x.astype("float64")
        squares = (wide[:, None, :8] - wide[None, :, :8]) ** 2
        return (jnp.exp(-squares.sum(-1)) @ wide).astype("float32")


def loop(x: Any) -> Any:
    with jax.enable_x64(True):
        step = lambda carried, row: (jnp.tanh(carried @ carried.T / 8 + row), row.sum())
        carried, sums = lax.scan(step, x.astype("float64"), x.astype("float64")[:4])
        return carried.astype("float32"), sums.astype("float32")


def until(x: Any) -> Any:
    with jax.enable_x64(True):
        goes_on = lambda state: state[1] < 3
        step = lambda state: (jnp.tanh(state[0] @ state[0].T), state[1] + 1)
        return lax.while_loop(goes_on, step, (x.astype("float64"), 0))[0].astype("float32")


def wide_results(x: Any) -> Any:
    with jax.enable_x64(True):
        wide = x.astype("float64")
        return wide @ wide, jnp.arange(x.shape[0]) * 2**40


def factor(x: Any) -> Any:
    with jax.enable_x64(True):
        wide = x.astype("float64")
        lower = jnp.linalg.cholesky(wide @ wide.T / 96 + jnp.eye(96))
        return jnp.log(jnp.diagonal(lower)).astype("float32")


FUNCTIONS = [products, kernel, loop, until, wide_results, factor]
LIKE_OTHERS = (products, loop, until, factor)


@pytest.mark.long
@pytest.mark.parametrize(
    "fn",
    [pytest.param(f, marks=[pytest.mark.slow] * (f in LIKE_OTHERS)) for f in FUNCTIONS],
)
def test_it_runs_in_a_part_of_its_peak(fn: Callable[..., Any]):
    """Each raised a TypeError of JAX's, or an ExecutionError, where it did not fit."""
    within = jturnip.jit(fn, unconstrained_peak(fn, X) // 2)
    expected = jax.jit(fn)(X)
    for x in (jturnip.host(X), X.astype(np.float64)):
        assert_same(within(x), expected, ulps=64)
    assert within.last_run.strategy != "whole"
    assert jnp.result_type(float) == jnp.float32  # 32 bits again


def test_it_runs_whole_where_it_fits():
    within = jturnip.jit(products, unconstrained_peak(products, X))
    assert_same(within(X.astype(np.float64)), jax.jit(products)(X))
    assert within.last_run.strategy == "whole"


@pytest.mark.long
def test_its_plan_is_of_its_types():
    budget = unconstrained_peak(wide_results, X) // 2
    lowered = jturnip.jit(wide_results, budget).lower(jturnip.host(X))
    ends = [b.nbytes for b in lowered.plan.taskgraph.buffers if b.role is Role.OUTPUT]
    assert sum(ends) == 2 * X.nbytes + 8 * len(X)
    assert jnp.result_type(float) == jnp.float32  # 32 bits again


def test_wide_parts_are_seen_at_any_depth():
    seen = lambda fn: has_wide_parts(jax.jit(fn).trace(X).jaxpr)
    assert not seen(jnp.sin)
    assert all(map(seen, FUNCTIONS))
    with jax.enable_x64(True):  # they may be compiled and run without
        assert all(map(seen, FUNCTIONS))
        assert not seen(jnp.sin)


def test_arguments_have_the_types_that_are_traced():
    for leaf in (3, 2.5, True, 1j, np.float64(2), X.astype(np.float64), X):
        assert as_traced(leaf).dtype == jax.jit(jnp.copy).trace(leaf).out_info.dtype
    array = jnp.ones(3)
    assert as_traced(array) is array
    with pytest.raises(OverflowError):
        as_traced(2**40)


def test_it_is_lowered_in_64_bits_and_run_in_32():
    with jax.enable_x64(True):
        x = jnp.asarray(X, "float64")
        fn = lambda x: jnp.tanh(x @ x) @ x
        budget, expected = unconstrained_peak(fn, x) * 3 // 4, jax.jit(fn)(x)
        lowered = jturnip.jit(fn, budget).lower(jturnip.host(x))
    compiled = lowered.compile()
    assert compiled.plan.strategy != "whole"
    assert_same(compiled(jturnip.host(x)), expected, ulps=64)
