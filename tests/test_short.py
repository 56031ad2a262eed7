"""Arrays of many short dimensions, as the states of qubits are."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_bitwise, assert_runs_in, assert_same, unconstrained_peak
from flat import evaluated, flat_of
from hypothesis import given, settings
from jax import lax

from jturnip.frontend.axes import Known
from jturnip.frontend.choosing import Where
from jturnip.frontend.grids import _part_with, in_grids
from jturnip.frontend.short import points_as_choices


QUBITS = 9
SHAPE = (2,) * QUBITS
RANDOM = np.random.default_rng(0)
ANGLES = RANDOM.normal(size=(1, QUBITS)).astype(np.float32)
STATE = (RANDOM.normal(size=SHAPE) + 1j * RANDOM.normal(size=SHAPE)).astype(np.complex64)


def turned(angle: Any) -> Any:
    c, s = jnp.cos(angle / 2), jnp.sin(angle / 2)
    return jnp.array([[c, -s], [s, c]]).astype(jnp.complex64)


def of_one(state: Any, gate: Any, q: int) -> Any:
    return jnp.moveaxis(jnp.tensordot(gate, state, [[1], [q]]), 0, q)


def of_two(state: Any, gate: Any, p: int, q: int) -> Any:
    both = jnp.tensordot(gate, state, [[2, 3], [p, q]])
    return jnp.moveaxis(both, [0, 1], [p, q])


NEGATED = np.diag([1, 1, 1, -1]).reshape(2, 2, 2, 2).astype(np.complex64)


def circuit(angles: Any, state: Any) -> Any:
    n = state.ndim
    for layer in angles:
        for q in range(n):
            state = of_one(state, turned(layer[q]), q)
        for q in range(n - 1):
            state = of_two(state, NEGATED, q, q + 1)
    return state


def likelihoods(angles: Any) -> Any:
    n = angles.shape[1]
    state = jnp.zeros((2,) * n, jnp.complex64).at[(0,) * n].set(1)
    return jnp.abs(circuit(angles, state)).reshape(-1) ** 2


def of_rows(angles: Any, state: Any) -> Any:
    return circuit(angles, state.reshape(SHAPE)).reshape(-1)


def expectation(angles: Any, state: Any) -> Any:
    p = jnp.abs(circuit(angles, state)) ** 2
    return sum(jnp.sum(jnp.take(p, 0, axis=q)) for q in range(p.ndim))


def energy(angles: Any, state: Any) -> Any:
    state = circuit(angles, state.reshape(SHAPE))
    return jnp.vdot(state, of_two(state, NEGATED, 2, 5)).real


def by_slices(angles: Any, state: Any) -> Any:
    """Phases, swaps and choices, each on a half of a state."""
    for q in range(QUBITS):
        zero, one = (jnp.take(state, k, axis=q) for k in range(2))
        zero, one = zero, one * jnp.exp(1j * angles[0, q])
        state = jnp.stack([zero, one], axis=q)
    state = jnp.flip(state, (1, 4))
    turned = lax.slice_in_dim(state, 1, 2, axis=3) * 1j
    return jnp.concatenate([lax.slice_in_dim(state, 0, 1, axis=3), turned], axis=3)


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "a circuit": (circuit, [ANGLES, STATE]),
    "likelihoods": (likelihoods, [ANGLES]),
    "by slices": (by_slices, [ANGLES, STATE]),
    "a state in a row": (of_rows, [ANGLES, STATE.reshape(-1)]),
    "an expectation": (expectation, [ANGLES, STATE]),
    "gradients of an energy": (jax.grad(energy), [ANGLES, STATE.reshape(-1)]),
    "three levels each": (
        lambda x: jnp.tensordot(x, x[:, ::-1, 0, 0, 0, 0], [[4, 1], [0, 1]]),
        [RANDOM.normal(size=(3,) * 6).astype(np.float32)],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("tiles", [4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tiles_of_single_positions_give_the_same(name: str, tiles: int):
    fn, args = FUNCTIONS[name]
    flat = flat_of(fn, *args)
    arena = 16 * max(t.nbytes for t in flat.types) // tiles
    flat = points_as_choices(flat, 64)
    made = next(in_grids(flat, Where(frozenset(flat.inputs)), arena, Known()))
    assert len(made.equations) > len(flat.equations)
    largest = max(made.types[v].nbytes for e in made.equations for v in e.outputs)
    assert largest <= 2 * arena // 16  # two may be read together
    # Sums of up to 512 numbers, in another order.
    assert_same(evaluated(made, *args), jax.tree.leaves(jax.jit(fn)(*args)), ulps=64)


# So many qubits that jturnip's own bytes do not count.
MORE = RANDOM.normal(size=(1, 12)).astype(np.float32)
MANY = np.full((2,) * 12, 2**-6, np.complex64)
IN_A_BUDGET: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "a circuit": (circuit, [MORE, MANY]),
    "likelihoods": (likelihoods, [MORE]),
    "an expectation": (expectation, [MORE, MANY]),
    "gradients of an expectation": (jax.grad(expectation), [MORE, MANY]),
}


@pytest.mark.long
@pytest.mark.parametrize("share", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "name",
    [pytest.param(k, marks=[pytest.mark.slow] * (k != "a circuit")) for k in IN_A_BUDGET],
)
def test_states_of_qubits_in_a_part_of_their_peak(name: str, share: int):
    """All were refused."""
    fn, args = IN_A_BUDGET[name]
    # Sums of up to 4096 numbers, in another order.
    assert_runs_in(fn, args, unconstrained_peak(fn, *args) // share, ulps=256)


@pytest.mark.parametrize("mode", ["clip", "drop", "promise_in_bounds"])
@pytest.mark.parametrize("add", [False, True])
def test_a_number_that_is_set_is_one_of_a_choice(add: bool, mode: str):
    """Wherever its index points, or a dimension has one position only."""

    def fn(x: Any, at: Any) -> Any:
        where = x.at[(at[0], *(at[d] for d in range(1, x.ndim)))]
        return where.add(3, mode=mode) if add else where.set(3, mode=mode)

    x = RANDOM.normal(size=(2, 3, 1, 2, 4, 2, 3)).astype(np.float32)
    inside, outside = (1, 2, 0, 0, 3, 1, 0), (1, 2, 0, 0, 5, 1, 0)
    places = (inside, outside)[: 1 if mode == "promise_in_bounds" else 2]
    for at, dtype in itertools.product(places, (np.int32, np.uint8)):
        args = x, np.asarray(at, dtype)
        flat = flat_of(fn, *args)
        made = points_as_choices(flat, 64)
        assert any("scatter" in e.name for e in flat.equations)
        assert not any("scatter" in e.name for e in made.equations)
        assert_bitwise(evaluated(made, *args), [jax.jit(fn)(*args)])


def test_other_scatters_are_left():
    x = np.zeros((2,) * 7, np.float32)
    for fn in (
        lambda x: x.at[0, 0, 0, 0, 0, 0].set(1),  # a row
        lambda x: x.at[(np.arange(2),) * 7].set(1),  # two
        lambda x: x.at[(0,) * 7].multiply(2),
        lambda x: x.reshape(-1).at[3].set(1),  # of one dimension
    ):
        flat = flat_of(fn, x)
        assert points_as_choices(flat, 64) is flat


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_a_part_has_what_lies_next_to_one_another(shape: list[int], data: Any):
    """And no more rows than it must."""
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(begin + 1, size))
    window, skipped = _part_with(shape, begin, end)
    numbers = np.arange(size).reshape(shape)[window.index].reshape(-1)
    np.testing.assert_array_equal(
        numbers[skipped : skipped + end - begin], np.arange(begin, end)
    )
    lengths = [b - a for a, b in window.bounds]
    first = next((d for d, n in enumerate(lengths) if n > 1), len(shape) - 1)
    assert lengths[first + 1 :] == shape[first + 1 :]
    row = math.prod(shape[first + 1 :])
    assert numbers.size - (end - begin) < 2 * row


def test_one_that_is_read_from_both_ends_of_the_function():
    """What begins in a row, or ends in one, is no equation more than its tiles."""
    fn = lambda x: lax.neg(x.reshape(SHAPE)).reshape(-1)
    x = np.arange(2.0**QUBITS, dtype=np.float32)
    flat = flat_of(fn, x)
    made = next(in_grids(flat, Where(frozenset(flat.inputs)), 4 * x.nbytes, Known()))
    assert [e.name for e in made.equations].count("neg") == 4
    assert_bitwise(evaluated(made, x), [fn(x)])
