"""Functions of the user's that the host calls itself, where what they give is large."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, on_device

import jturnip


N = 256
STRUCT = jax.ShapeDtypeStruct((N, N), np.float32)
NBYTES = 4 * N * N
X = np.random.default_rng(0).normal(size=(N, N)).astype(np.float32)


def scaled(by: Any) -> np.ndarray:
    return np.linspace(-1, 1, N * N, dtype=np.float32).reshape(N, N) * float(by)


def with_a_call(x: Any, by: Any) -> Any:
    return jnp.cos(jnp.sin(x) * jax.pure_callback(scaled, STRUCT, by)).sum()


def checked(x: Any, wrong: Any) -> Any:
    """As `eqx.error_if`, and so each solve of diffrax."""

    def fail(number: Any) -> Any:
        raise ValueError(f"there are {int(number)}")

    y = jnp.sin(x)
    asked = lambda: jax.pure_callback(fail, STRUCT, wrong)
    return jnp.cos(jax.lax.cond(wrong > 0, asked, lambda: y)).sum()


@pytest.mark.parametrize("fn", [with_a_call, checked])
@pytest.mark.parametrize("share", [2, 1, 0.25])
def test_what_it_gives_may_be_larger_than_the_budget(fn: Any, share: float):
    budget = int(share * NBYTES)
    f = jturnip.jit(fn, budget)
    for _ in range(2):
        assert_same(f(jturnip.host(X), 0), jax.jit(fn)(X, 0))
        assert 0 < f.last_run.peak_bytes <= budget
    assert f.last_run.strategy == "driven"


def test_of_64_bits_none_is_lost():
    """Under `jax.jit` they are, where XLA calls it in a thread that has the other mode."""
    struct = jax.ShapeDtypeStruct((N, N), np.float64)
    doubled = lambda x: jax.pure_callback(lambda y: 2 * np.asarray(y), struct, jnp.sin(x))
    fn = lambda x: doubled(x) + 1
    with jax.enable_x64(True):
        x = X.astype(np.float64)
        found = jturnip.jit(fn, NBYTES)(jturnip.host(x))
        assert found.dtype == np.float64
        np.testing.assert_allclose(np.asarray(found), 2 * np.sin(x) + 1, rtol=1e-14)


def test_it_is_called_once_a_call():
    called: list[int] = []

    def counted(number: Any) -> np.ndarray:
        called.append(int(number))
        return scaled(number)

    fn = lambda x, n: jnp.cos(x * jax.pure_callback(counted, STRUCT, n)).sum()
    f = jturnip.jit(fn, NBYTES)
    f(jturnip.host(X), 3)
    f(jturnip.host(X), 4)
    assert called == [3, 4]


def test_what_is_raised_is_told_with_the_line():
    f = jturnip.jit(checked, NBYTES)
    x = jturnip.host(X)
    with pytest.raises(jturnip.ExecutionError, match=r"test_calls.py:\d+.*there are 7"):
        f(x, 7)
    gc.collect()
    assert_same(f(x, 0), jax.jit(checked)(X, 0))


def test_it_may_call_another_but_not_the_function_that_it_is_part_of():
    another = jturnip.jit(lambda x: jnp.sin(x) * 2, NBYTES)
    functions: list[Any] = [another]

    def calls(number: Any) -> np.ndarray:
        return np.asarray(jax.device_get(functions[0](jturnip.host(X))))

    fn = lambda x: jnp.cos(x * jax.pure_callback(calls, STRUCT, x[0, 0])).sum()
    f = jturnip.jit(fn, NBYTES // 2)
    assert_same(f(jturnip.host(X)), jax.jit(fn)(X))
    functions[0] = f
    with pytest.raises(jturnip.ExecutionError, match="called by a callback while it runs"):
        f(jturnip.host(X))


def test_what_is_not_as_it_was_said_is_told():
    fn = lambda x: x + jax.pure_callback(lambda y: np.zeros(3), STRUCT, x[0])
    with pytest.raises(jturnip.ExecutionError, match=r"test_calls.py:\d+.*was to give"):
        jturnip.jit(fn, NBYTES)(jturnip.host(X))


@pytest.mark.parametrize("share", [1, 0.25])
def test_what_it_is_called_with_may_be_larger_than_the_budget(share: float):
    """It gets arrays of the CPU, with which it may compute, as under `jax.jit`."""

    def doubled(x: Any) -> Any:
        return jax.pure_callback(lambda y, z: 2 * y + z, STRUCT, jnp.sin(x), x) + 1

    found = jturnip.jit(doubled, int(share * NBYTES))(jturnip.host(X))
    assert_same(jax.device_put(found, on_device()), jax.jit(doubled)(X))
