"""Fourier transforms over several dimensions, one after the other; those of long rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_runs_in, unconstrained_peak
from flat import evaluated, flat_of

from jturnip.frontend import blocks, parts
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.costs import DeviceRates
from jturnip.frontend.flatten import flatten
from jturnip.frontend.streaming import Seen
from jturnip.frontend.stretches import Stretches


def array(*shape: int, dtype: Any = np.complex64) -> jax.Array:
    random = np.random.default_rng(0)
    real, imaginary = random.normal(size=(2, *shape))
    return jnp.asarray(real + 1j * imaginary if dtype == np.complex64 else real, dtype)


def real(*shape: int) -> jax.Array:
    return array(*shape, dtype=np.float32)


TRANSFORMS = [
    (jnp.fft.fft2, array(7, 12)),
    (jnp.fft.ifft2, array(3, 8, 5)),
    (jnp.fft.fftn, array(2, 6, 5, 4)),
    (jnp.fft.rfft2, real(6, 9)),
    (jnp.fft.rfftn, real(2, 5, 8, 3)),
    (jnp.fft.irfft2, array(6, 5)),
    (lambda x: jnp.fft.irfftn(x, (4, 6, 7)), array(2, 4, 6, 4)),
    (lambda x: jnp.fft.fft2(x, axes=(0, 2)), array(5, 3, 4)),
]


@pytest.mark.parametrize(("fn", "x"), TRANSFORMS)
def test_one_dimension_after_the_other_is_the_same(fn: Callable[..., Any], x: jax.Array):
    flat = flatten(jax.jit(fn).trace(x).jaxpr, (), seen=Seen(largest_fft=0))
    lengths = [
        len(e.origin.params["fft_lengths"]) for e in flat.equations if e.name == "fft"
    ]
    assert len(lengths) > 1
    assert set(lengths) == {1}
    (found,) = evaluated(flat, x)
    expected = fn(x)
    # Each dimension rounds once more: a few units of the largest number.
    tolerance = 8 * float(np.finfo(np.float32).eps) * float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("fn", "x"), TRANSFORMS[:1])
def test_what_is_not_too_large_is_left_as_it_is(fn: Callable[..., Any], x: jax.Array):
    jaxpr, nbytes = jax.jit(fn).trace(x).jaxpr, x.nbytes
    counts = [
        sum(e.name == "fft" for e in flatten(jaxpr, (), seen=seen).equations)
        for seen in (Seen(), Seen(largest_fft=nbytes), Seen(largest_fft=nbytes - 1))
    ]
    assert counts == [1, 1, 2]
    assert [e.name for e in flat_of(fn, x).equations].count("fft") == 1


@pytest.mark.parametrize("n", [64, 720, 2 * 3 * 5 * 7 * 11 * 13, 8 * 997, 1 << 16])
@pytest.mark.parametrize("fn", [jnp.fft.fft, jnp.fft.ifft, jnp.fft.rfft])
def test_a_long_row_is_several(fn: Callable[..., Any], n: int):
    """As exact as XLA's: both are a few roundings away from what it is in 64 bits."""
    x = real(2, n) if fn is jnp.fft.rfft else array(2, n)
    with jax.numpy_rank_promotion("raise"):  # as a user may have set it
        flat = flatten(jax.jit(fn).trace(x).jaxpr, (), seen=Seen(largest_fft=4 * n))
    lengths = [e.origin.params["fft_lengths"] for e in flat.equations if e.name == "fft"]
    assert len(lengths) == 2
    assert lengths[0][0] * lengths[1][0] == n
    (found,) = evaluated(flat, x)
    wide = np.float64 if fn is jnp.fft.rfft else np.complex128
    exact = getattr(np.fft, fn.__name__)(np.asarray(x, wide))
    tolerance = 4 * float(np.finfo(np.float32).eps) * float(np.max(np.abs(exact)))
    np.testing.assert_allclose(found, exact, rtol=0, atol=tolerance)


def test_rows_that_are_not_several_are_left():
    """Prime ones, and those that are given back as real numbers."""
    for fn, x in ((jnp.fft.fft, array(2, 1009)), (jnp.fft.irfft, array(2, 513))):
        flat = flatten(jax.jit(fn).trace(x).jaxpr, (), seen=Seen(largest_fft=0))
        assert [e.name for e in flat.equations].count("fft") == 1


def smoothed(x: Any) -> Any:
    return jnp.fft.ifft(jnp.fft.fft(x) * jnp.exp(-jnp.arange(x.size) / 1e3))


@pytest.mark.long
@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.slow), 0.25])
@pytest.mark.parametrize(
    "fn", [jnp.fft.fft, pytest.param(smoothed, marks=pytest.mark.slow)]
)
def test_a_transform_of_one_long_row(fn: Callable[..., Any], share: float):
    """It was refused."""
    x = array(60_000)
    assert_runs_in(fn, [x], int(share * unconstrained_peak(fn, x)), ulps=16)


def filtered(x: Any) -> Any:
    spectrum = jnp.fft.fft2(x)
    return jnp.abs(jnp.fft.ifft2(spectrum / (1 + jnp.abs(spectrum)))) ** 2


def steps(x: Any) -> Any:
    """A wave that moves, as a split-step solver has it."""
    phase = jnp.exp(1j * jnp.linspace(0, 1, x.shape[1]))[None]
    step = lambda x, _: (jnp.fft.ifft2(jnp.fft.fft2(x) * phase), None)
    return jax.lax.scan(step, x, None, length=3)[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fn", "share"),
    [
        (filtered, 0.5),
        (filtered, 0.25),
        pytest.param(steps, 0.4, marks=pytest.mark.slow),
    ],
)
def test_a_transform_larger_than_the_budget(fn: Callable[..., Any], share: float):
    x = array(256, 300)
    assert_runs_in(fn, [x], int(share * unconstrained_peak(fn, x)), ulps=32)


def chained(x: jax.Array) -> jax.Array:
    return jnp.abs(jnp.fft.fft(jnp.tanh(jnp.fft.fft(x).real))).sum(1)


def side_by_side(x: jax.Array) -> jax.Array:
    return (jnp.abs(jnp.fft.fft(x)) * jnp.abs(jnp.fft.fft(jnp.tanh(x)))).sum(1)


def after_a_sum(x: jax.Array) -> jax.Array:
    """In the second loop over rows, the one that is made anew and the other."""
    first = jnp.abs(jnp.fft.fft(x))
    return (first * jnp.abs(jnp.fft.fft(jnp.tanh(x * first.sum(0))))).sum(1)


@pytest.mark.parametrize(
    ("fn", "expected"), [(chained, True), (side_by_side, False), (after_a_sum, False)]
)
def test_transforms_that_wait_for_threads_are_one_after_the_other(
    fn: Callable[..., Any], expected: bool
):
    """Where two at once may never end, no loop over blocks has two at once."""
    x = real(64, 32)
    flat = flat_of(fn, x)
    stretches = Stretches(flat, rules(flat, parts.works, Known()))
    stretch = stretches.along(range(len(flat.equations)), flat.inputs[0], 0)
    assert stretch is not None
    assert stretch.one_after_the_other(flat, frozenset(["fft"])) is expected
    assert stretch.one_after_the_other(flat, frozenset(["sort"]))


@pytest.mark.parametrize("alone", [True, False])
def test_those_that_may_wait_are_not_done_in_blocks(alone: bool):
    x = real(64, 32)
    flat = flat_of(side_by_side, x)
    expected = DeviceRates(1e9, 1e9, 1e-4, frozenset(["fft"] if alone else []))
    where = blocks.Where(frozenset(flat.inputs))
    ways = blocks.cut_along_axes(flat, where, 2 * x.nbytes, expected, 1e-9)
    in_blocks = [
        any(parts.IN_BLOCKS in str(e.origin.params.get("name")) for e in cut.equations)
        for way in ways
        for cut in way.cut
    ]
    assert in_blocks
    assert any(in_blocks) is not alone
