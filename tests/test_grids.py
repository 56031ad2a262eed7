"""What is large in tiles of one size: products of products, factors, triangular systems."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_runs_in, assert_same, unconstrained_peak
from flat import evaluated, flat_of
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.scipy.linalg import cho_solve, solve_triangular

import jturnip
from jturnip.frontend import blocks
from jturnip.frontend.axes import Known
from jturnip.frontend.blocks import name_of
from jturnip.frontend.choosing import Where
from jturnip.frontend.effort import Sofar
from jturnip.frontend.grids import in_grids
from jturnip.frontend.values import Constant, FlatJaxpr, Parts


RANDOM = np.random.default_rng(0)
_FIRST = RANDOM.bit_generator.state


@pytest.fixture(autouse=True)
def same_numbers():
    """Each test has the same numbers, whichever ran before it in its process."""
    RANDOM.bit_generator.state = _FIRST


def array(*shape: int, dtype: Any = np.float32) -> Any:
    real, imaginary = RANDOM.normal(size=(2, *shape))
    return (real + 1j * imaginary if dtype == np.complex64 else real).astype(dtype)


def definite(n: int, dtype: Any = np.float32) -> Any:
    a = array(n, n, dtype=dtype)
    return (a @ a.conj().T / n + np.eye(n)).astype(dtype)


def distinct(n: int) -> Any:
    """As good to decompose as a matrix can be, with its rows in some order."""
    return triangle(n)[RANDOM.permutation(n)]


def triangle(n: int, dtype: Any = np.float32) -> Any:
    """As good to solve with as a matrix can be."""
    return (array(n, n, dtype=dtype) / n + 2 * np.eye(n)).astype(dtype)


def tiled(flat: FlatJaxpr, tiles: int, n: int, hosted: bool = True) -> FlatJaxpr:
    """A function with matrices of `n` rows in about `tiles` tiles along each side."""
    inputs = frozenset(flat.inputs)
    where = Where(inputs) if hosted else Where(frozenset(), inputs)
    side = -(-n // tiles)
    return next(in_grids(flat, where, 16 * 4 * side * side, Known()))


def numbers_of(parts: Parts) -> np.ndarray:
    """How often each position of a result is in one of its parts."""
    count = np.zeros(parts.type.shape, int)
    for window in parts.windows:
        count[window.index] += 1
    return count


# -- functions ---------------------------------------------------------------------------


def kernel(x: Any, scale: Any = 1.0) -> Any:
    squares = jnp.sum(x**2, 1)
    distances = squares[:, None] + squares - 2 * x @ x.T
    return jnp.exp(-0.5 * scale * distances) + 0.1 * jnp.eye(x.shape[0])


def likelihood(x: Any, y: Any, scale: Any = 1.0) -> Any:
    """Of observations under a Gaussian process."""
    lower = jnp.linalg.cholesky(kernel(x, scale))
    z = solve_triangular(lower, y, lower=True)
    return 0.5 * z @ z + jnp.sum(jnp.log(jnp.diagonal(lower)))


def posterior(x: Any, y: Any, new: Any) -> Any:
    """Mean and variance at new points."""
    lower = jnp.linalg.cholesky(kernel(x))
    across = jnp.exp(-jnp.sum((new[:, None] - x) ** 2, -1))
    half = solve_triangular(lower, across.T, lower=True)
    return across @ cho_solve((lower, True), y), 1 - jnp.sum(half * half, 0)


def step_of_newton_and_schulz(x: Any) -> Any:
    gram = x @ x.T
    return 3.4 * x + (-4.8 * gram + 2.0 * gram @ gram) @ x


def correlations(x: Any) -> Any:
    centred = x - x.mean(0)
    found = centred.T @ centred
    scales = jnp.sqrt(jnp.diagonal(found))
    return found / scales[:, None] / scales


def attention_twice(q: Any, v: Any) -> Any:
    scores = jax.nn.softmax(q @ q.T, axis=-1)
    return scores @ (scores @ v)


def several(a: Any) -> Any:
    return jnp.linalg.cholesky(a), solve_triangular(a, a[:, :, :1], lower=True)


def masked(a: Any) -> Any:
    return jnp.triu(a) @ jnp.tril(a, -1), a[::-1].T, jnp.argmax(a, 1), jnp.sort(a, 0)


def rows_in_another_order(a: Any) -> Any:
    """Some of which are nowhere, with zeros of either sign."""
    rows = jnp.array([5, -1, 17, 20])
    a = jnp.where(abs(a) < 0.1, -0.0, a)
    return tuple(
        a.at[rows, :].get(mode=how, fill_value=fill)
        for how, fill in (("fill", None), ("fill", 7.0), ("clip", None))
    )


def looked_up(a: Any) -> Any:
    rows = jnp.arange(a.shape[0])
    return a[rows, rows[::-1]], a[rows % 7], a.at[rows, rows].add(1.0)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
    "factor": (jnp.linalg.cholesky, [definite(48)]),
    "factor of uneven tiles": (jnp.linalg.cholesky, [definite(53)]),
    "factor of complex numbers": (jnp.linalg.cholesky, [definite(48, np.complex64)]),
    "factors of several": (several, [np.stack([definite(48), definite(48)])]),
    "decomposition": (lax.linalg.lu, [array(48, 48)]),
    "decomposition of uneven panels": (lax.linalg.lu, [array(53, 53)]),
    "decomposition of more rows": (lax.linalg.lu, [array(61, 48)]),
    "decomposition of complex numbers": (
        lax.linalg.lu,
        [array(48, 48, dtype=np.complex64)],
    ),
    "decomposition of what is made": (
        lambda a: lax.linalg.lu(jnp.sin(a)),
        [array(64, 64)],
    ),
    "decompositions of several": (lax.linalg.lu, [array(2, 48, 48)]),
    "inverse": (jnp.linalg.inv, [distinct(48)]),
    "gradient of a determinant": (
        jax.grad(lambda a: jnp.linalg.slogdet(a)[1]),
        [distinct(48)],
    ),
    "likelihood": (likelihood, [array(48, 3), array(48)]),
    "its gradient": (
        jax.grad(likelihood, (0, 2)),
        [array(48, 3), array(48), np.float32(1)],
    ),
    "posterior": (posterior, [array(48, 3), array(48), array(33, 3)]),
    "product of products": (step_of_newton_and_schulz, [array(48, 48) / 7]),
    "its gradient, too": (
        jax.grad(lambda x: jnp.sum(step_of_newton_and_schulz(x) ** 2)),
        [array(48, 48) / 7],
    ),
    "correlations": (correlations, [array(48, 48)]),
    "attention twice": (attention_twice, [array(48, 5), array(48, 5)]),
    "products of 16 bits": (lambda a: a @ (a @ a), [array(48, 48).astype(jnp.bfloat16)]),
    "masks, and what sorts": (masked, [array(48, 48)]),
    "what is looked up": (looked_up, [array(48, 48)]),
    "rows in another order": (rows_in_another_order, [array(18, 4)]),
    "a batch through a loop": (
        lambda a: lax.scan(lambda c, x: (jnp.tanh(c + x), c.sum(0)), a, a[:3])[0],
        [array(48, 48)],
    ),
}


# Where more panels than one are in a tile, and where all rows do not fit beside one.
TILES = {"decomposition of what is made": 6, "rows in another order": 24}


@pytest.mark.long
@pytest.mark.parametrize("hosted", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tiles_give_the_same(name: str, hosted: bool):
    """Sums are of other parts of a row: some roundings of the largest number."""
    fn, args = FUNCTIONS[name]
    flat = flat_of(fn, *args)
    made = tiled(flat, TILES.get(name, 3), 48, hosted)
    assert len(made.equations) > len(flat.equations)
    expected = evaluated(flat, *args)
    assert_same(evaluated(made, *args), expected, ulps=64)
    for output in made.outputs:
        if isinstance(output, Parts):
            assert (numbers_of(output) == 1).all()


SIDES = list(itertools.product([True, False], repeat=4))


@pytest.mark.long
@pytest.mark.parametrize(("left_side", "lower", "transpose", "unit"), SIDES)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_systems_are_solved_tile_by_tile(
    left_side: bool, lower: bool, transpose: bool, unit: bool, dtype: Any
):
    """Of any kind, and with a right side that is cut or not."""
    n, m = 12, 9
    how = {
        "left_side": left_side,
        "lower": lower,
        "transpose_a": transpose,
        "conjugate_a": transpose and dtype == np.complex64,
        "unit_diagonal": unit,
    }
    solve = lambda a, b: lax.linalg.triangular_solve(a, b, **how)
    a = triangle(n, dtype)
    right = array(n, m, dtype=dtype) if left_side else array(m, n, dtype=dtype)
    for b in (right, right[:, :1] if left_side else right[:1]):
        flat = flat_of(solve, a, b)
        made = tiled(flat, 3 if dtype == np.float32 else 2, n)
        assert len(made.equations) > 3
        assert_same(evaluated(made, a, b), [solve(a, b)], ulps=64)


@pytest.mark.long
def test_panels_of_a_singular_matrix_have_the_same_pivots():
    """Where a column has nothing left, the next row is its pivot."""
    a = array(48, 48)
    a[:, [5, 20, 21, 47]] = 0
    flat = flat_of(lax.linalg.lu, a)
    factors, pivots, order = evaluated(tiled(flat, 3, 48), a)
    assert_same([pivots, order], lax.linalg.lu(a)[1:])
    lower = jnp.tril(factors, -1) + jnp.eye(48)
    assert_same(lower @ jnp.triu(factors), jnp.asarray(a)[order], ulps=256)


@pytest.mark.long
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("at", [(0, 0), (20, 30), (47, 3), (9, 40), (47, 47)])
def test_what_is_not_finite_is_seen_in_all_that_is_solved(
    at: tuple[int, int], number: float
):
    # How far an infinite number goes within a tile of a triangle is BLAS's: of one in 25
    # orders of the rows it goes further in tiles than it does in all.
    a, b = distinct(48), array(48, 3)
    a[at] = number
    found = evaluated(tiled(flat_of(jnp.linalg.solve, a, b), 3, 48), a, b)
    assert_same(found, [jnp.linalg.solve(a, b)])


@pytest.mark.long
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_of_what_is_not_finite_no_row_is_a_pivot_twice(number: float):
    """LAPACK takes the rows above, which are zeros to it, for pivots after a NaN."""
    made = tiled(flat_of(lax.linalg.lu, array(48, 48)), 3, 48)
    for at in ((5, 20), (30, 20), (40, 47), (20, 36)):
        a = array(48, 48)
        a[at] = number
        factors, pivots, order = evaluated(made, a)
        assert (np.asarray(pivots) < 48).all()
        assert sorted(np.asarray(order).tolist()) == [*range(48)]
        permutation = lax.linalg.lu_pivots_to_permutation(pivots, 48)
        np.testing.assert_array_equal(order, permutation)
        before = at[1] // 16 * 16
        expected = lax.linalg.lu(a)
        np.testing.assert_array_equal(pivots[:before], expected[1][:before])
        assert not np.isfinite(factors).all()


def test_an_infinite_number_stays_in_its_column():
    """Rows that are pivots already are left as they are."""
    a = np.eye(48, dtype=np.float32)
    a[20, 40] = np.inf
    factors, _, _ = evaluated(tiled(flat_of(lax.linalg.lu, a), 4, 48), a)
    np.testing.assert_array_equal(factors[:12], lax.linalg.lu(a)[0][:12])


@pytest.mark.long
def test_a_batch_is_cut_along_its_examples():
    """Each fits, though all do not."""
    a = np.stack([distinct(64)] * 16)
    budget = unconstrained_peak(jnp.linalg.inv, a) // 3
    within = jturnip.jit(jnp.linalg.inv, budget)
    assert_same(within(jturnip.host(a)), jax.jit(jnp.linalg.inv)(a))
    tasks = within.lower(jturnip.host(a)).plan.taskgraph.tasks
    assert not [t.name for t in tasks if t.name.startswith("lu_panel")]


def test_a_matrix_of_more_columns_than_rows_is_decomposed_whole():
    flat = flat_of(lambda a: lax.linalg.lu(jnp.sin(a)), array(48, 61))
    made = tiled(flat, 3, 48)
    (lu,) = (e for e in made.equations if e.name == "lu")
    assert made.operand_types(lu)[0].shape == (48, 61)


def test_tiles_of_one_size_are_few_different_tasks():
    flat = flat_of(jnp.linalg.cholesky, definite(64))
    made = tiled(flat, 4, 64)
    heavy = {"cholesky", "triangular_solve", "dot_general"}
    kinds = collections.Counter(
        (e.name, *map(made.type_of, e.inputs)) for e in made.equations if e.name in heavy
    )
    assert sorted(kinds.values()) == [4, 6, 10]
    made = tiled(flat_of(lax.linalg.lu, array(64, 64)), 4, 64)
    kinds = collections.Counter(name_of(e) for e in made.equations if e.name == "jit")
    assert sorted(kinds.values()) == [4, 4, 6]


def test_a_dimension_a_little_longer_than_a_tile_is_cut_in_two():
    """Sums of 16 bits were left in 32 where it was not."""
    args = array(64, 13).astype(jnp.bfloat16), array(13, 64).astype(jnp.bfloat16)
    flat = flat_of(jnp.matmul, *args)
    where = Where(frozenset(flat.inputs))
    made = next(in_grids(flat, where, 16 * 2 * 12 * 12, Known()))
    assert_same(evaluated(made, *args), evaluated(flat, *args), ulps=1)


def test_right_of_the_diagonal_nothing_is_read():
    factor = lambda a: lax.linalg.cholesky(a, symmetrize_input=False)
    made = tiled(flat_of(factor, definite(64)), 4, 64)
    assert len(made.slices) == 10
    assert all(s.window.bounds[0][0] >= s.window.bounds[1][0] for s in made.slices)


def test_an_array_on_the_device_is_cut_there():
    made = tiled(flat_of(jnp.linalg.cholesky, definite(64)), 4, 64, hosted=False)
    assert not made.slices
    cuts = [e for e in made.equations if e.name == "dynamic_slice"]
    assert all(isinstance(v, Constant) for e in cuts for v in e.inputs[1:])


def test_what_would_be_too_many_tiles_is_left():
    flat = flat_of(lambda x: jnp.cumsum(jnp.sin(x)), array(1 << 16))
    where = Where(frozenset(flat.inputs))
    assert not [*in_grids(flat, where, 1 << 13, Known())]


def test_what_has_no_axis_stays_whole():
    flat = flat_of(lambda a: jnp.linalg.eigh(a @ a.T)[0], array(48, 48))
    made = tiled(flat, 3, 48)
    (eigh,) = (e for e in made.equations if e.name == "eigh")
    assert made.operand_types(eigh)[0].shape == (48, 48)


@pytest.mark.long
@settings(max_examples=4, deadline=None)
@given(st.integers(3, 40), st.integers(4, 17), st.integers(1, 20), st.booleans())
def test_tiles_of_any_size_give_the_same(n: int, side: int, m: int, hosted: bool):
    def fn(a: Any, b: Any) -> Any:
        lower = jnp.linalg.cholesky(a)
        return lower, solve_triangular(lower, b, lower=True, trans=1), b.T @ lower

    args = definite(n), array(n, m)
    flat = flat_of(fn, *args)
    inputs = frozenset(flat.inputs)
    where = Where(inputs) if hosted else Where(frozenset(), inputs)
    for made in in_grids(flat, where, 64 * side * side, Known()):
        assert_same(evaluated(made, *args), evaluated(flat, *args), ulps=64)


# -- when ------------------------------------------------------------------------------


def ways_of(*counts: int, **how: Any) -> list[blocks.Ways]:
    """Ways to cut a function into so many tasks."""
    flat = flat_of(jnp.dot, np.eye(2), np.eye(2))
    cut = lambda n: dataclasses.replace(flat, equations=flat.equations * n)
    return [blocks.Ways((cut(n),), **how) for n in counts]


def order(*counts: int, fits_at: int | None = None, waits: bool = False) -> str:
    """In which order ways along one axis (a) and in tiles along all (g) come, of which one
    fits, if any."""
    sofar, found = Sofar(), ""
    grids = ways_of(300, 400, in_grids=True)
    for number, each in enumerate(
        blocks._with_grids(iter(ways_of(*counts)), iter(grids), sofar)
    ):
        found += "g" if each.in_grids else "a"
        if number == fits_at:
            sofar.fits, sofar.waits = True, waits
    return found


def test_tiles_come_where_what_fits_waits_or_nothing_does():
    assert order(10, 10, 10) == "aaagg"
    assert order(10, 10, 10, 10, 10, 10) == "aaaagaag"
    assert order(10, 250, 350, 350) == "aagaag"
    assert order(10, 10, 10, 10, 350) == "aaaagag"
    assert order(10, 10, 10, fits_at=0) == "aaa"
    assert order(10, 10, 10, fits_at=0, waits=True) == "agaa"
    assert order(10, 250) == "aagg"
    assert order(10, 350, fits_at=1) == "aga"
    assert order(10, 250, fits_at=1, waits=True) == "aag"


def test_many_tiles_come_once_as_much_was_tried_otherwise():
    assert order(*[4] * 8) == "aaaaagaaag"
    assert order(*[1] * 14) == "aaaaaaaaaaaagaag"
    assert order(*[1] * 8, fits_at=5) == "aaaaaaaa"


# -- in a budget -----------------------------------------------------------------------


def host(args: Sequence[Any]) -> list[Any]:
    return [jturnip.host(x) for x in args]


IN_A_BUDGET = {
    "factor": (jnp.linalg.cholesky, [definite(256)]),
    "likelihood": (likelihood, [array(256, 3), array(256)]),
    "product of products": (step_of_newton_and_schulz, [array(256, 256) / 16]),
    "system": (jnp.linalg.solve, [distinct(256), array(256, 3)]),
    "definite system": (
        lambda a, b: jax.scipy.linalg.solve(a, b, assume_a="pos"),
        [definite(256), array(256)],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("share", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "name",
    [pytest.param(k, marks=[pytest.mark.slow] * (k == "likelihood")) for k in IN_A_BUDGET],
)
def test_what_is_read_from_both_sides_runs_in_a_part_of_its_peak(name: str, share: int):
    """All but the product were refused."""
    fn, args = IN_A_BUDGET[name]
    # Sums of 256 terms, in another order.
    assert_runs_in(fn, args, unconstrained_peak(fn, *args) // share, ulps=256)


@pytest.mark.long
def test_a_gradient_of_a_likelihood_runs_in_a_part_of_its_peak():
    args = array(256, 3), array(256), np.float32(1)
    gradient = jax.grad(likelihood, 2)
    budget = unconstrained_peak(gradient, *args) // 4
    found = jturnip.jit(gradient, budget)(*host(args))
    assert_same(found, jax.jit(gradient)(*args), ulps=4096)  # of differences of large terms


@pytest.mark.long
def test_what_is_not_positive_definite_is_seen_in_what_follows():
    """A factor is NaN from the tile on in which that is seen, and so is what is made of
    it; `jax.jit` has NaN in all of the factor."""
    args = np.diag(np.r_[np.ones(200), -1, np.ones(55)]).astype(np.float32), array(256)

    def fn(a: Any, y: Any) -> Any:
        lower = jnp.linalg.cholesky(a)
        return lower, jnp.sum(jnp.log(jnp.diagonal(lower))), cho_solve((lower, True), y)

    budget = unconstrained_peak(fn, *args) // 3
    lower, logarithm, solved = jturnip.jit(fn, budget)(*host(args))
    assert jnp.isnan(lower).any()
    assert jnp.isnan(logarithm)
    assert jnp.isnan(solved).all()


@pytest.mark.long
def test_narrow_systems_of_which_the_other_side_is_long():
    """The matrix is hardly longer than a tile."""
    a, b = triangle(11), array(11, 100)
    fn = lambda a, b: solve_triangular(a, b, lower=True)
    for arena in (6500, 7040, 8000):
        made = next(in_grids(flat_of(fn, a, b), Where(frozenset([0, 1])), arena, Known()))
        assert_same(evaluated(made, a, b), [jax.jit(fn)(a, b)])
