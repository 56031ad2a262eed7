"""What is read in several ways is several values, where nothing else fits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same
from flat import evaluated, flat_of

import jturnip
from jturnip.frontend.apart import read_apart
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.parts import works
from jturnip.frontend.values import FlatJaxpr


SIZE = 256
X = np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype(np.float32)


def apart(fn: Callable[..., Any], hosted: bool, least: int = 1) -> tuple[FlatJaxpr, bool]:
    flat = flat_of(fn, X)
    of_equation = rules(flat, works, Known())
    made = read_apart(flat, of_equation, flat.inputs if hosted else (), least)
    return made, made is not flat


def squared_sine(x: Any) -> Any:
    y = jnp.sin(x)
    return y @ y


def orthogonalised(x: Any) -> Any:
    """A step of Newton and Schulz."""
    gram = x @ x.T
    return 3.4 * x + (-4.8 * gram + 2.0 * gram @ gram) @ x


def test_an_array_in_host_memory_has_another_name_for_each_way():
    flat, changed = apart(lambda x: x @ x, hosted=True)
    assert changed
    (product,) = flat.equations
    (other,) = flat.slices
    assert product.inputs == (flat.inputs[0], other.value)
    assert other.source == flat.inputs[0]
    assert flat.types[other.value] == flat.types[flat.inputs[0]]
    assert other.window.bounds == ((0, SIZE), (0, SIZE))


def test_what_is_computed_is_copied_once_for_each_way():
    flat, changed = apart(squared_sine, hosted=False)
    assert changed
    assert [e.name for e in flat.equations] == ["sin", "copy", "dot_general"]
    assert len(set(flat.equations[-1].inputs)) == 2


def test_a_product_reads_what_nothing_else_does():
    """Not what is read element by element for what it is multiplied with."""
    flat, changed = apart(lambda x: (lambda y: (2 * y) @ y)(jnp.sin(x)), hosted=False)
    assert changed
    assert [e.name for e in flat.equations] == ["sin", "copy", "mul", "dot_general"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * x + jnp.tanh(x),
        lambda x: jnp.sin(x) @ jnp.cos(x),
        lambda x: jnp.sum(x, 0) * jnp.max(x, 0),
    ],
)
def test_all_else_stays_as_it_is(fn: Callable[..., Any]):
    assert not apart(fn, hosted=True)[1]


def test_what_is_small_stays_as_it_is():
    assert not apart(lambda x: x @ x, hosted=True, least=X.nbytes + 1)[1]


@pytest.mark.parametrize("fn", [lambda x: x @ x, squared_sine, orthogonalised])
@pytest.mark.parametrize("hosted", [False, True])
def test_it_changes_nothing_that_is_computed(fn: Callable[..., Any], hosted: bool):
    flat, _ = apart(fn, hosted)
    np.testing.assert_array_equal(evaluated(flat, X)[0], jax.jit(fn)(X))


def test_an_array_on_the_device_stays_as_it_is():
    assert not apart(lambda x: x @ x, hosted=False)[1]


@pytest.mark.parametrize(
    ("fn", "share"),
    [
        (lambda x: x @ x, 0.9),
        (lambda x: x @ x, 0.6),
        (squared_sine, 0.9),
        pytest.param(orthogonalised, 1.5, marks=pytest.mark.slow),
    ],
    ids=["square", "square of which little fits", "square of what is computed", "a step"],
)
def test_products_of_a_matrix_with_itself_in_less_than_it_takes(
    fn: Callable[..., Any], share: float
):
    x = X / np.float32(np.linalg.norm(X, 2))
    gpu_bytes = int(share * x.nbytes)
    f = jturnip.jit(fn, gpu_bytes)
    # Sums of as many products in another order.
    assert_same(f(jturnip.host(x)), jax.jit(fn)(x), ulps=SIZE)
    assert f.last_run is not None
    assert f.last_run.peak_bytes <= gpu_bytes
