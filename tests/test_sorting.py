"""Rows that are sorted in tiles, and what takes positions of what is in tiles."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_bitwise, assert_runs_in, assert_same, unconstrained_peak
from flat import evaluated, flat_of
from hypothesis import given, settings, strategies as st
from jax import lax

from jturnip.frontend.axes import Known
from jturnip.frontend.choosing import Where
from jturnip.frontend.grids import in_grids
from jturnip.frontend.sorting import SORT, network
from jturnip.frontend.values import FlatJaxpr


RANDOM = np.random.default_rng(0)


def array(*shape: int) -> Any:
    return RANDOM.normal(size=shape).astype(np.float32)


def few(*shape: int) -> Any:
    """Numbers of which many are the same."""
    return RANDOM.integers(0, 5, shape).astype(np.float32)


def odd(n: int) -> Any:
    """With what is not finite, and zeros of either sign."""
    x = array(n)
    x[::7], x[3::11], x[5::13], x[2::17], x[::5] = np.nan, np.inf, -np.inf, -0.0, 0.0
    return x


def in_tiles(fn: Callable[..., Any], args: Sequence[Any], arena: int) -> FlatJaxpr:
    flat = flat_of(fn, *args)
    return next(in_grids(flat, Where(frozenset(flat.inputs)), arena, Known()))


def longest_sorted(flat: FlatJaxpr) -> int:
    sorts = (e for e in flat.equations if e.name == SORT)
    return max(flat.operand_types(e)[0].shape[e.origin.params["dimension"]] for e in sorts)


@pytest.mark.parametrize("count", range(1, 13))
def test_what_is_compared_sorts_all_there_is(count: int):
    """All zeros and ones, which suffices (Knuth, volume 3, theorem 5.3.4 Z)."""
    for numbers in itertools.product((0, 1), repeat=count):
        tiles = list(numbers)
        for low, high in network(count):
            assert low < high
            tiles[low], tiles[high] = sorted((tiles[low], tiles[high]))
        assert tiles == sorted(numbers)


def sorted_with(x: Any, y: Any) -> Any:
    """By two keys; the third has no order of its own."""
    return lax.sort((x, y, x * 2 + y * 3 + jnp.arange(x.size) % 7), num_keys=2)


SORTS: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
    "numbers": (jnp.sort, [array(900)]),
    "an odd number of them": (jnp.sort, [array(997)]),
    "equal ones": (jnp.sort, [few(900)]),
    "whole numbers": (jnp.sort, [RANDOM.integers(-9, 9, 900).astype(np.int8)]),
    "downwards": (lambda x: jnp.sort(x, descending=True), [array(900)]),
    "places of equal ones": (jnp.argsort, [few(900)]),
    "places downwards": (lambda x: jnp.argsort(x, descending=True), [few(900)]),
    "with others": (sorted_with, [few(900), few(900)]),
    "by two": (lambda x, y: jnp.lexsort((x, y)), [array(900), few(900)]),
    "several rows": (jnp.argsort, [few(3, 900)]),
    "several columns": (lambda x: jnp.sort(x, axis=0), [array(700, 5)]),
    "of sixteen bits": (lambda x: jnp.sort(x.astype(jnp.bfloat16)), [array(900)]),
    "complex ones": (lambda x: jnp.sort(lax.complex(x, x * x)), [few(900)]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SORTS)
def test_sorts_in_tiles_are_the_same(name: str):
    """Bit for bit: what is equal stays in its order."""
    fn, args = SORTS[name]
    arena = max(max(a.shape) * a.itemsize for a in args)
    made = in_tiles(fn, args, arena)
    assert longest_sorted(made) < longest_sorted(flat_of(fn, *args))
    found = evaluated(made, *args)
    assert_bitwise(found, jax.tree.leaves(jax.jit(fn)(*args)))


ONES = jnp.ones(900, np.float32)
NUMBERS = jnp.asarray(RANDOM.permutation(900), np.float32)
TIED: dict[str, Callable[..., Any]] = {
    "numbers that begin again": lambda x: lax.sort(
        (x, lax.iota(np.int8, 900), NUMBERS), num_keys=1
    ),
    "rounded ones": lambda x: lax.sort(
        (x, lax.iota(jnp.bfloat16, 900), NUMBERS), num_keys=1
    ),
    "numbers from the end": lambda x: lax.sort(
        (x, lax.iota(np.int32, 900)[::-1], NUMBERS), num_keys=1
    ),
}


@pytest.mark.parametrize("name", TIED)
def test_what_tells_no_positions_orders_nothing(name: str):
    fn, args = TIED[name], [ONES]
    made = in_tiles(fn, args, 7200)
    assert longest_sorted(made) < 900
    assert_bitwise(evaluated(made, *args), jax.tree.leaves(jax.jit(fn)(*args)))


def test_a_sort_that_is_called_twice_is_told_positions_each_time():
    """Of one equation, the operand that tells them is another in each call."""
    by = jax.jit(lambda x, p, q: lax.sort((x, p, q), num_keys=1))
    i = lambda: lax.iota(np.int32, 900)
    fn = lambda x, p: (by(x, i(), p), by(x * 2, p, i()))
    args = [ONES, RANDOM.permutation(900).astype(np.int32)]
    made = in_tiles(fn, args, 7200)
    assert_bitwise(evaluated(made, *args), jax.tree.leaves(jax.jit(fn)(*args)))


def test_what_is_not_finite_is_sorted_to_the_ends():
    x = odd(900)
    (found,) = evaluated(in_tiles(jnp.sort, [x], 2 * x.nbytes), x)
    np.testing.assert_array_equal(found, np.sort(x))  # zeros of either sign are the same


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(st.integers(50, 400), st.integers(150, 800), st.integers(1, 50))
def test_any_number_of_tiles_sorts(n: int, arena: int, different: int):
    x = np.random.default_rng(n).integers(0, different, n).astype(np.int32)
    flat = flat_of(jnp.argsort, x)
    made = next(in_grids(flat, Where(frozenset(flat.inputs)), arena, Known()), None)
    if made is not None:  # else there would be too many tiles
        assert_bitwise(evaluated(made, x), [jnp.argsort(x)])
    assert made is not None or n * 8 > 64 * arena // 100


def pieces(x: Any, y: Any) -> Any:
    """What takes positions of what is in tiles, or puts it together."""
    x, y = jnp.tanh(x), jnp.tanh(y)
    turned = jnp.flip(jnp.concatenate([x[5:], y, x[:7]]))
    folded = turned.reshape(-1, 4) * 2
    return jnp.sort(turned)[3:-3], folded.sum(), x[-1], jnp.sort(folded.reshape(-1))[:10]


def test_positions_of_what_is_in_tiles_are_windows():
    args = array(500), array(398)
    made = in_tiles(pieces, args, 2 * args[0].nbytes)
    assert longest_sorted(made) < 500
    of_tiles = [
        flat_type.shape for flat_type in made.types[len(flat_of(pieces, *args).types) :]
    ]
    assert max(np.prod(shape) for shape in of_tiles) < 500
    assert_same(evaluated(made, *args), jax.tree.leaves(jax.jit(pieces)(*args)))


RESULTS: dict[str, Callable[..., Any]] = {
    "a part of what is given": lambda x: (x[1:-1], jnp.sort(x)),
    "what is given, put together": lambda x: (jnp.concatenate([x, x[:5]]), jnp.sort(x)),
    "the same twice": lambda x: jnp.concatenate([jnp.sort(x)] * 2),
    "and half of it": lambda x: (s := jnp.sort(x), s[: x.size // 2]),
    "turned by nothing": lambda x: (s := jnp.sort(x), jnp.roll(s, 0)),
    "what is given, turned by nothing": lambda x: (jnp.roll(x, 0), x, jnp.sort(x)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_values_of_their_own(name: str):
    """What is read from host memory, or is a part of another result, too."""
    fn, x = RESULTS[name], array(40_000)
    f = assert_runs_in(fn, [x], unconstrained_peak(fn, x) // 3)
    assert f.last_run.strategy != "whole"


@pytest.mark.parametrize("of", [slice(0), slice(None, None, 2)])
def test_what_is_no_window_is_taken_of_the_whole(of: slice):
    fn, x = lambda x: (jnp.sort(x), jnp.tanh(x)[of]), array(900)
    made = in_tiles(fn, [x], 7200)
    assert_same(evaluated(made, x), list(jax.jit(fn)(x)))


def test_columns_one_after_the_other_are_transposed_first():
    fn = lambda x: (
        jnp.sort(jnp.tanh(x).ravel(order="F")[:700]) + jnp.tanh(x).ravel("F")[-700:]
    )
    x = array(30, 40)
    made = in_tiles(fn, [x], 2 * 700 * 4)
    assert_same(evaluated(made, x), [jax.jit(fn)(x)])


def clipped(x: Any) -> Any:
    low, high = jnp.percentile(x, 1), jnp.percentile(x, 99)
    return jnp.clip(x, low, high)


def ranks(x: Any, y: Any) -> Any:
    """Spearman's correlation."""
    of = lambda x: jnp.argsort(jnp.argsort(x))
    return jnp.corrcoef(of(x), of(y))[0, 1]


def area(x: Any) -> Any:
    """Under the curve of a classifier: what is sorted is counted on."""
    is_true = jnp.arange(x.size) % 3 == 0
    hits = is_true[jnp.argsort(x)]
    return jnp.sum(jnp.where(hits, jnp.cumsum(~hits), 0))


IN_A_BUDGET: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
    "a median": (jnp.median, [array(40_000)]),
    "quantiles": (lambda x: jnp.quantile(x, jnp.array([0.1, 0.9])), [array(40_000)]),
    "clipped at percentiles": (clipped, [array(40_000)]),
    "places": (jnp.argsort, [few(40_000)]),
    "a correlation of ranks": (ranks, [array(20_000), array(20_000)]),
    "an area under a curve": (area, [array(40_000)]),
    "the mean of the lowest": (
        lambda x: jnp.sort(x)[: x.size // 20].mean(),
        [array(40_000)],
    ),
    "a permutation": (
        lambda x: jax.random.permutation(jax.random.key(0), x),
        [array(30_000)],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("share", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(k, marks=[pytest.mark.slow] * (k == "an area under a curve"))
        for k in IN_A_BUDGET
    ],
)
def test_what_sorts_one_long_row_runs_in_a_part_of_its_peak(name: str, share: int):
    """All were refused."""
    fn, args = IN_A_BUDGET[name]
    assert_runs_in(fn, args, unconstrained_peak(fn, *args) // share)
