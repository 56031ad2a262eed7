"""Decompositions of tall matrices by blocks of their rows, against those of all rows."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_runs_in, assert_same, unconstrained_peak
from flat import evaluated, flat_of

from jturnip.frontend.tall import tall_as_blocks


RANDOM = np.random.default_rng(0)


def tall(rows: int, columns: int, dtype: Any = np.float32) -> Any:
    """Of singular values that are far from one another."""
    real, imaginary = RANDOM.normal(size=(2, rows, columns))
    a = real + 1j * imaginary if dtype == np.complex64 else real
    return (a * 1.5 ** np.arange(columns) / rows**0.5).astype(dtype)


def singular_values(a: Any) -> Any:
    return jnp.linalg.svd(a, compute_uv=False)


def decomposed(a: Any) -> Any:
    return tuple(jnp.linalg.svd(a, full_matrices=False))


FUNCTIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "qr": (jnp.linalg.qr, tall(100, 7)),
    "qr of complex numbers": (jnp.linalg.qr, tall(100, 7, np.complex64)),
    "qr of one block and a little": (jnp.linalg.qr, tall(22, 7)),
    "its triangle": (lambda a: jnp.linalg.qr(a, mode="r"), tall(100, 7)),
    "qr of one column": (jnp.linalg.qr, tall(100, 1)),
    "svd": (decomposed, tall(100, 7)),
    "svd of complex numbers": (decomposed, tall(100, 7, np.complex64)),
    "svd of a wide one": (decomposed, tall(100, 7).T),
    "svd of a wide one of complex numbers": (decomposed, tall(100, 7, np.complex64).T),
    "singular values": (singular_values, tall(100, 7)),
    "singular values of a wide one": (singular_values, tall(100, 7).T),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_give_the_same(name: str):
    """Signs and all, as LAPACK has them: rounded otherwise, and of vectors as far as the
    values are from one another, which are half as large again each."""
    fn, a = FUNCTIONS[name]
    flat = flat_of(fn, a)
    made = tall_as_blocks(flat, a.nbytes)
    assert len(made.equations) > len(flat.equations)
    assert_same(evaluated(made, a), evaluated(flat, a), ulps=64)


def test_triangles_that_are_large_too_are_made_by_blocks():
    a = tall(1000, 4)
    flat = flat_of(jnp.linalg.qr, a)
    made = tall_as_blocks(flat, 4 * 4 * 4 * 40)
    sizes = [made.operand_types(e)[0].shape for e in made.equations if e.name == "qr"]
    assert all(len(shape) == 3 or shape[0] <= 40 for shape in sizes)
    assert_same(evaluated(made, a), evaluated(flat, a), ulps=64)


def test_what_is_triangular_stays_so():
    """LAPACK turns nothing where nothing is below the diagonal."""
    a = np.zeros((100, 7), np.float32)
    a[:7] = np.triu(tall(7, 7))
    flat = flat_of(jnp.linalg.qr, a)
    found = evaluated(tall_as_blocks(flat, a.nbytes), a)
    for got, want in zip(found, evaluated(flat, a), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (jnp.linalg.qr, (20, 7)),
        (jnp.linalg.qr, (7, 100)),
        (jnp.linalg.qr, (3, 100, 7)),
        (lambda a: jnp.linalg.qr(a, mode="complete"), (100, 7)),
        (jnp.linalg.svd, (100, 7)),
        (decomposed, (20, 20)),
        (jnp.linalg.eigvals, (20, 20)),
    ],
)
def test_what_has_no_small_triangles_stays_as_it_is(
    fn: Callable[..., Any], shape: tuple[int, ...]
):
    flat = flat_of(fn, np.ones(shape, np.float32))
    assert tall_as_blocks(flat, 4) is flat


def test_what_fits_stays_as_it_is():
    flat = flat_of(jnp.linalg.qr, np.ones((100, 7), np.float32))
    assert tall_as_blocks(flat, 4 * 4 * 700) is flat
    assert tall_as_blocks(flat, 4 * 4 * 700 - 4) is not flat


def least_squares(a: Any) -> Any:
    a = a / jnp.max(a, axis=0)
    return jnp.linalg.lstsq(a, jnp.sum(a, axis=1))[0]


def components(a: Any) -> Any:
    """The two principal ones."""
    centred = a - jnp.mean(a, axis=0)
    return centred @ jnp.linalg.svd(centred, full_matrices=False)[2][:2].T


@pytest.mark.long
@pytest.mark.parametrize(
    "share", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (4, 8))]
)
@pytest.mark.parametrize("fn", [jnp.linalg.qr, least_squares, components])
def test_a_tall_matrix_is_decomposed_in_a_part_of_its_peak(
    fn: Callable[..., Any], share: int
):
    """All were refused."""
    a = tall(8192, 16)
    assert_runs_in(fn, [a], unconstrained_peak(fn, a) // share, ulps=256)
