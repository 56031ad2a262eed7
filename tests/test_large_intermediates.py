"""What XLA fits is not refused, and a refusal asks for no more than XLA needs."""

from collections.abc import Iterable
from typing import Any

import jax
import pytest
from checks import assert_same, whole_bytes
from large_intermediates import CASES, Case, pair

import jturnip


# What is tried in every run; the others are quick enough only all together.
QUICK = (
    "attention masked by positions",
    "a kernel times a vector",
    "nearest neighbours",
    "cross entropy over a vocabulary",
    "a stack of convolutions",
    "a product of matrices",
    "channels filtered along time",
)
# The same for what tries many budgets; where much can be cut, that takes minutes, and is
# done for some.
VERY_QUICK = ("channels filtered along time",)
SEARCHED = (
    *VERY_QUICK,
    "filtered by ffts",
    "a gaussian process",
    "a product of matrices",
    "a stack of convolutions",
)


def on_all(
    quick: tuple[str, ...], names: Iterable[str] = tuple(CASES)
) -> pytest.MarkDecorator:
    """For each of some functions; slow but for a few."""
    params = [
        name if name in quick else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]
    return pytest.mark.parametrize("case", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def stock(case: Case) -> tuple[Any, int]:
    """The result of `jax.jit`, and what it needs by XLA's own analysis."""
    args = case.make()
    compiled = jax.jit(case.fn).lower(*args).compile()
    return compiled(*args), whole_bytes(compiled)


@on_all(QUICK)
def test_it_runs_in_what_xla_needs(case: Case, stock: tuple[Any, int]):
    expected, peak = stock
    fn = jturnip.jit(case.fn, peak)
    assert_same(fn(*jturnip.host(case.make())), expected)
    assert fn.last_run is not None
    assert fn.last_run.strategy == "whole"
    assert fn.last_run.peak_bytes <= peak


@pytest.mark.long
@on_all(QUICK)
@pytest.mark.parametrize("share", [2, 4, 8])
def test_it_is_right_in_less_or_refused(case: Case, stock: tuple[Any, int], share: int):
    """A refusal asks for no more than XLA needs, and for what is enough."""
    expected, peak = stock
    args = jturnip.host(case.make())
    found = pair(case, args, peak // share)
    if isinstance(found, jturnip.DoesNotFit):
        assert found.needed_bytes <= peak
        assert f"at least {found.needed_bytes}" in str(found)
        found = jturnip.jit(case.fn, found.needed_bytes)(*args)
    # Sums in another order, of up to thousands of numbers.
    assert_same(found, expected, ulps=64)


@pytest.mark.long
@on_all(VERY_QUICK, SEARCHED)
def test_the_minimum_is_one(case: Case, stock: tuple[Any, int]):
    """It runs there, and not in 3% less."""
    expected, peak = stock
    args = jturnip.host(case.make())
    least = jturnip.jit(case.fn).lower(*args).minimum_gpu_bytes
    assert least <= peak
    fn = jturnip.jit(case.fn, least)
    assert_same(fn(*args), expected, ulps=64)
    assert fn.last_run is not None
    assert fn.last_run.peak_bytes <= least
    with pytest.raises(jturnip.DoesNotFit) as refusal:
        _ = jturnip.jit(case.fn, least - 3 * least // 100).lower(*args).plan
    assert refusal.value.needed_bytes <= peak
