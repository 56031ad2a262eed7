"""What XLA fits is not refused, and a refusal asks for no more than XLA needs."""

from typing import Any

import jax
import pytest
from checks import assert_same, whole_bytes
from large_intermediates import CASES, Case

import jturnip


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def stock(case: Case) -> tuple[Any, int]:
    """The result of `jax.jit`, and what it needs by XLA's own analysis."""
    args = case.make()
    compiled = jax.jit(case.fn).lower(*args).compile()
    return compiled(*args), whole_bytes(compiled)


def test_it_runs_in_what_xla_needs(case: Case, stock: tuple[Any, int]):
    expected, peak = stock
    fn = jturnip.jit(case.fn, peak)
    assert_same(fn(*jturnip.host(case.make())), expected)
    assert fn.last_run is not None
    assert fn.last_run.strategy == "whole"
    assert fn.last_run.peak_bytes <= peak


def test_a_refusal_asks_for_no_more_than_xla_needs(case: Case, stock: tuple[Any, int]):
    expected, peak = stock
    args = jturnip.host(case.make())
    for share in (2, 8):
        found = tried(case, args, peak // share)
        if isinstance(found, jturnip.DoesNotFit):
            assert found.needed_bytes <= peak
            assert f"at least {found.needed_bytes}" in str(found)
            found = jturnip.jit(case.fn, found.needed_bytes)(*args)
        assert_same(found, expected)


def test_the_minimum_is_one(case: Case, stock: tuple[Any, int]):
    """It runs there, and not in 3% less."""
    expected, peak = stock
    args = jturnip.host(case.make())
    least = jturnip.jit(case.fn).lower(*args).minimum_gpu_bytes
    assert least <= peak
    fn = jturnip.jit(case.fn, least)
    assert_same(fn(*args), expected)
    assert fn.last_run is not None
    assert fn.last_run.peak_bytes <= least
    with pytest.raises(jturnip.DoesNotFit) as refusal:
        _ = jturnip.jit(case.fn, least - 3 * least // 100).lower(*args).plan
    assert refusal.value.needed_bytes <= peak


def tried(case: Case, args: Any, gpu_bytes: int) -> Any:
    """The result, or the refusal."""
    try:
        return jturnip.jit(case.fn, gpu_bytes)(*args)
    except jturnip.DoesNotFit as refusal:
        return refusal
