"""The largest of long rows, by blocks of these."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_bitwise, assert_runs_in, unconstrained_peak
from flat import evaluated, flat_of
from jax import lax

from jturnip.frontend.largest import largest_as_blocks


RANDOM = np.random.default_rng(0)


def few(*shape: int) -> Any:
    """Numbers of which many are the same."""
    return RANDOM.integers(0, 40, shape).astype(np.float32)


def not_finite(n: int) -> Any:
    x = few(n)
    x[n // 2 :: 50], x[n // 3], x[n // 5] = np.nan, np.inf, -np.inf
    return x


FUNCTIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "the largest": (lambda x: lax.top_k(x, 7), few(3, 1000)),
    "the largest of all that are no block": (lambda x: lax.top_k(x, 5), few(997)),
    "of whole numbers": (lambda x: lax.top_k(x, 3), few(500).astype(np.int32)),
    "of what is not finite": (lambda x: lax.top_k(x, 30), not_finite(900)),
    "place of the largest": (jnp.argmax, few(1000)),
    "of the smallest": (lambda x: jnp.argmin(x, 0), few(997, 3)),
    "in rows": (lambda x: jnp.argmax(x, 1), few(4, 1000)),
    "that is no number": (jnp.argmax, not_finite(1000)),
    "that is no number, of the smallest": (jnp.argmin, not_finite(1000)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_largest_of_blocks_are_those_of_rows(name: str):
    """With the first of equal ones, as XLA has it."""
    fn, x = FUNCTIONS[name]
    flat = flat_of(fn, x)
    made = largest_as_blocks(flat, 4 * max(x.shape))
    assert made is not flat
    assert_bitwise(evaluated(made, x), jax.tree.leaves(jax.jit(fn)(x)))


def test_what_fits_or_is_most_of_a_row_is_left():
    x = few(1000)
    flat = flat_of(lambda x: lax.top_k(x, 7), x)
    assert largest_as_blocks(flat, 1 << 20).equations == flat.equations
    most = flat_of(lambda x: lax.top_k(x, 600), x)
    assert largest_as_blocks(most, 1000).equations == most.equations


def test_places_that_have_too_few_bits_are_left():
    """They begin again, as XLA's do."""
    x = few(1000)
    flat = flat_of(lambda x: lax.argmax(x, 0, np.int8), x)
    assert largest_as_blocks(flat, 1000).equations == flat.equations


@pytest.mark.long
@pytest.mark.parametrize("share", [pytest.param(2, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("fn", [lambda x: lax.top_k(jnp.sin(x), 50), jnp.argmin])
def test_the_largest_of_one_long_row_run_in_a_part_of_its_peak(
    fn: Callable[..., Any], share: int
):
    """It was refused."""
    x = few(200_000) / 7
    assert_runs_in(fn, [x], unconstrained_peak(fn, x) // share)
