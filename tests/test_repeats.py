"""Images that are enlarged by whole numbers: a pass makes broadcasts of their gathers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, whole_bytes

import jturnip
from jturnip.frontend.flatten import flatten
from jturnip.frontend.repeats import repeated
from jturnip.frontend.values import carry_out


def enlarged(x: Any, times: int = 2, method: str = "nearest") -> Any:
    shape = x.shape[0], times * x.shape[1], times * x.shape[2], x.shape[3]
    return jax.image.resize(x, shape, method)


def gradients(x: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(jnp.sin(enlarged(x))))(x)


def names_in(fn: Callable[..., Any], x: Any, arena: int = 0) -> tuple[list[str], Any]:
    """The equations after the pass, and what these give."""
    flat = repeated(flatten(jax.jit(fn).trace(x).jaxpr), arena)
    values = dict(zip(flat.inputs, [x], strict=True))
    values.update(flat.constants)
    carry_out(flat.equations, values)
    (result,) = flat.result_values
    return [e.name for e in flat.equations], values[result]


IMAGE = np.random.default_rng(0).normal(size=(1, 5, 7, 3)).astype(np.float32)


@pytest.mark.parametrize("times", [2, 3])
def test_what_is_enlarged_is_spread(times: int):
    fn = lambda x: enlarged(x, times)
    names, found = names_in(fn, IMAGE)
    assert "gather" not in names
    assert names.count("broadcast_in_dim") == 2
    np.testing.assert_array_equal(found, jax.jit(fn)(IMAGE))


def test_its_gradients_are_sums():
    names, found = names_in(gradients, IMAGE)
    assert "scatter-add" not in names
    assert names.count("reduce_sum") == 2
    assert_same(found, jax.jit(gradients)(IMAGE), ulps=4)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[:, jnp.array([0, 0, 1, 1, 3, 2, 3, 3, 4, 4])],
        lambda x: jax.image.resize(x, (1, 8, 7, 3), "nearest"),
        lambda x: x[:, x[0, :, 0, 0].astype(int)],
        lambda x: jnp.take(x, jnp.int32(2), axis=3),
        lambda x: jnp.take(x, jnp.zeros((2, 3), int), axis=1),
    ],
    ids=[
        "in another order",
        "not by a whole number",
        "that are read",
        "one",
        "as a matrix",
    ],
)
def test_other_rows_are_read_as_they_were(fn: Callable[..., Any]):
    names, found = names_in(fn, IMAGE)
    assert "gather" in names
    np.testing.assert_array_equal(found, jax.jit(fn)(IMAGE))


def test_what_is_small_stays_as_it_is():
    flat = flatten(jax.jit(enlarged).trace(IMAGE).jaxpr)
    assert repeated(flat, 1 << 20) is flat


@pytest.mark.parametrize(
    "fn", [lambda x: jnp.sin(enlarged(jnp.sin(x))).sum((1, 2)), gradients]
)
def test_an_enlarged_image_is_never_whole(fn: Callable[..., Any]):
    x = np.random.default_rng(1).normal(size=(1, 128, 128, 8)).astype(np.float32)
    compiled = jax.jit(fn).lower(x).compile()
    gpu_bytes = min(whole_bytes(compiled), enlarged(x).nbytes) // 2
    f = jturnip.jit(fn, gpu_bytes)
    assert_same(f(jturnip.host(x)), compiled(x), ulps=64)
    assert f.last_run.peak_bytes <= gpu_bytes
