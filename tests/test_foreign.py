"""Operations of other libraries, which stand for what JAX lowers them to."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, whole_bytes
from flat import evaluated, flat_of
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jturnip


def primitive(name: str, lowered: Callable[..., Any], impl: Callable[..., Any]) -> Any:
    """One as libraries make them, of one result that is like its first operand."""
    made = Primitive(name)
    made.def_impl(impl)
    made.def_abstract_eval(lambda x, *others, **params: x)
    mlir.register_lowering(made, mlir.lower_fun(lowered, multiple_results=False))
    return made


def put(buffer: Any, x: Any, i: Any) -> Any:
    return buffer.at[i].set(x)


def times(x: Any, *, factor: float) -> Any:
    return jnp.sin(x) * factor


PUT = primitive("put", put, put)
TIMES = primitive("times", times, times)
NUMBERS = np.linspace(-1, 1, 64, dtype=np.float32)


def names(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [e.name for e in flat_of(fn, *args).equations]


def test_what_is_lowered_to_its_implementation_is_that():
    twice = lambda x: TIMES.bind(TIMES.bind(x, factor=2.0), factor=3.0)
    assert names(twice, NUMBERS) == ["sin", "mul", "sin", "mul"]
    (found,) = evaluated(flat_of(twice, NUMBERS), NUMBERS)
    np.testing.assert_array_equal(found, twice(NUMBERS))


def test_what_is_lowered_to_another_function_is_what_that_traces_to():
    """As a linear solve of lineax, which looks for more mistakes where it is evaluated."""
    other = primitive("other", lambda x: jnp.cos(x), lambda x: jnp.sin(x))
    assert names(lambda x: other.bind(x) + 1, NUMBERS) == ["cos", "add"]


def test_without_private_names_it_is_what_evaluates_it_or_stays(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("jturnip.compat._lowerings", {})
    other = primitive("other", lambda x: jnp.cos(x), lambda x: jnp.sin(x))
    assert names(lambda x: other.bind(x) + 1, NUMBERS) == ["other", "add"]
    assert names(lambda x: TIMES.bind(x, factor=2.0), NUMBERS) == ["sin", "mul"]


def test_what_is_lowered_in_another_way_stays():
    other = primitive("other", lambda x: jnp.sin(x), lambda x: jnp.sin(x))
    rule = mlir.lower_fun(jnp.cos, multiple_results=False)
    mlir.register_lowering(other, lambda *args: rule(*args))
    assert names(lambda x: other.bind(x) + 1, NUMBERS) == ["other", "add"]


def test_what_only_says_another_type_stays():
    narrowed = lambda x: x.astype(jnp.bfloat16)
    narrow = primitive("narrow", narrowed, narrowed)
    assert names(lambda x: narrow.bind(x) + 1, NUMBERS) == ["narrow", "add"]


def test_what_is_weakly_typed_only_inside_is_not_so_outside():
    """As the number of steps of a solver of lineax."""
    strong = primitive("strong", lambda x: jnp.asarray(2.0), lambda x: jnp.asarray(2.0))
    fn = lambda x: strong.bind(x[0]) * x
    flat = flat_of(fn, NUMBERS)
    assert "strong" not in [e.name for e in flat.equations]
    assert_same(evaluated(flat, NUMBERS)[0], jax.jit(fn)(NUMBERS))


def test_what_needs_numbers_stays():
    with_numbers = primitive("with_numbers", jnp.sin, lambda x: np.sin(np.asarray(x)))
    rule = mlir.lower_fun(jnp.sin, multiple_results=False)
    mlir.register_lowering(with_numbers, lambda *args: rule(*args))
    assert names(lambda x: with_numbers.bind(x) + 1, NUMBERS) == ["with_numbers", "add"]


def test_what_jax_does_itself_is_not_lowered_to_see(monkeypatch: pytest.MonkeyPatch):
    def traced(*args: Any) -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr("jturnip.frontend.foreign._written_out", traced)
    assert names(lambda x: jnp.sort(jnp.sin(x)) @ x, NUMBERS) == [
        "sin",
        "sort",
        "dot_general",
    ]


@pytest.mark.parametrize("share", [2, 4])
def test_a_loop_writes_its_buffer_in_place(share: int):
    """As the loops of equinox do, and so diffrax: in half of the peak of which the buffer
    is most, it was refused."""

    def solved(x: Any) -> Any:
        def step(i: Any, carried: Any) -> Any:
            x, buffer = carried
            x = x + 0.1 * (jnp.roll(x, 1, 0) - x)
            return x, PUT.bind(buffer, x, i)

        return jax.lax.fori_loop(0, 16, step, (x, jnp.zeros((16, *x.shape))))[1]

    x = np.random.default_rng(0).normal(size=(96, 96)).astype(np.float32)
    compiled = jax.jit(solved).lower(x).compile()
    budget = whole_bytes(compiled) // share
    f = jturnip.jit(solved, budget)
    assert_same(f(x), compiled(x))
    assert f.last_run.strategy != "whole"
    assert f.last_run.peak_bytes <= budget
