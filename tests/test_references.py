"""References from outside: read and written in place, as under `jax.jit`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, layers
from watch import Watch

import jturnip
from jturnip import compat


pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDTH = 64
MATRIX = WIDTH * WIDTH * 4

WAYS = pytest.mark.parametrize(
    "keywords", [{}, {"strategy": "turnip"}, {"gpu_bytes": 8 * MATRIX}], ids=str
)


def matrix(seed: int = 0) -> Any:
    return layers(1, WIDTH, seed)[0]


@WAYS
def test_an_argument(keywords: Any):
    def fn(r: Any, x: Any) -> Any:
        before = r[...]
        r[...] = jnp.tanh(before @ before) + x
        r[0] += 1
        return r[1].sum(), before.sum()

    ours, stock = jax.new_ref(matrix()), jax.new_ref(matrix())
    f, g = jturnip.jit(fn, **keywords), jax.jit(fn)
    for x in (0.5, 1.5, 2.5):
        assert_same(f(ours, x), g(stock, x), ulps=64)
        assert_same(ours[...], stock[...], ulps=64)
    assert f.last_run is not None


@WAYS
def test_one_that_is_closed_over(keywords: Any):
    def make(r: Any) -> Any:
        def fn(x: Any) -> Any:
            r[...] = r[...] * 2 + x
            return r[0, 0]

        return fn

    ours, stock = jax.new_ref(matrix()), jax.new_ref(matrix())
    f, g = jturnip.jit(make(ours), **keywords), jax.jit(make(stock))
    for x in (0.5, 1.5):
        assert_same(f(x), g(x))
        assert_same(ours[...], stock[...])


@WAYS
def test_in_a_loop_and_a_branch(keywords: Any):
    def fn(r: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            r[...] += x
            return total + r[0, 0], r[1, 1]

        total, seen = jax.lax.scan(body, 0.0, xs)
        jax.lax.cond(total > 0, lambda: r.__setitem__(0, jnp.zeros(WIDTH)), lambda: None)
        return total, seen

    ours, stock = jax.new_ref(matrix()), jax.new_ref(matrix())
    f, g, xs = jturnip.jit(fn, **keywords), jax.jit(fn), jnp.arange(3.0)
    assert_same(f(ours, xs), g(stock, xs), ulps=64)
    assert_same(ours[...], stock[...], ulps=64)


def through_all(refs: Any, x: Any) -> Any:
    """A tower of them, each of which then changes."""
    for r in refs:
        x = jnp.tanh(x @ r[...])
    for r in refs:
        r[...] = r[...] * 0.9 + x.mean()
    return x


def test_a_function_of_many_is_split():
    """They were drawn together into one task, or refused."""
    count = 12

    weights = layers(count, WIDTH)
    ours, stock = [list(map(jax.new_ref, weights)) for _ in range(2)]
    x = jnp.ones((8, WIDTH))
    f = jturnip.jit(through_all, (count + 3) * MATRIX, strategy="turnip")
    with Watch((ours, x), [compat.value_of(r) for r in ours]) as watch:
        found = jax.block_until_ready(f(ours, x))
    assert watch.peak_bytes <= (count + 3) * MATRIX
    assert f.last_run is not None
    assert len(f.last_run.order) > 6
    assert_same(found, jax.jit(through_all)(stock, x), ulps=64)
    for a, b in zip(ours, stock, strict=True):
        assert_same(a[...], b[...], ulps=64)


def test_in_host_memory():
    space = jax.memory.Space.Host
    count = 12
    weights = layers(count, WIDTH)
    try:
        ours = [jax.new_ref(jturnip.host(w), memory_space=space) for w in weights]
    except NotImplementedError as error:
        pytest.skip(f"this jax has none outside of jit: {error}")

    stock = list(map(jax.new_ref, weights))
    x = jnp.ones((8, WIDTH))
    f = jturnip.jit(through_all, 5 * MATRIX)
    with Watch(x) as watch:
        found = jax.block_until_ready(f(ours, x))
    assert watch.peak_bytes <= 5 * MATRIX
    assert_same(found, jax.jit(through_all)(stock, x), ulps=64)
    for a, b in zip(ours, stock, strict=True):
        assert a.sharding.memory_kind == "pinned_host"
        kept = compat.value_of(a)
        np.testing.assert_allclose(np.asarray(kept), np.asarray(b[...]), rtol=1e-5)


def test_the_same_one_twice_is_refused_as_by_jit():
    r = jax.new_ref(matrix())
    with pytest.raises(ValueError, match="only one reference"):
        jturnip.jit(lambda a, b: a[...] + b[...], strategy="turnip")(r, r)


def test_under_a_gradient_they_are_those_of_jit():
    def fn(x: Any) -> Any:
        r = jax.new_ref(jnp.zeros(()))
        r[...] = jnp.sin(x)
        return r[...] * x

    x = jnp.float32(0.5)
    with pytest.warns(jturnip.InlinedWarning, match="references"):
        found = jax.grad(jturnip.jit(fn, strategy="turnip"))(x)
    assert_same(found, jax.grad(jax.jit(fn))(x))


def test_lowered_ahead_of_time_they_are_those_of_jit():
    def fn(r: Any, x: Any) -> Any:
        r[...] += x
        return r[0, 0]

    r = jax.new_ref(matrix())
    before = np.asarray(r[...])
    with pytest.warns(jturnip.InlinedWarning, match="ahead of time"):
        compiled = jturnip.jit(fn).lower(r, 1.0).compile()
    compiled(r, 1.0)
    np.testing.assert_array_equal(r[...], before + 1)


@pytest.mark.parametrize("transform", [jax.vmap, jax.grad])
def test_no_tracer_stays_in_a_reference_that_was_called_plainly_before(transform: Any):
    def put(ref: Any, x: Any) -> Any:
        ref[...] = x * 2
        return jnp.sum(x)

    f, ref = jturnip.jit(put, "1MiB"), jax.new_ref(jnp.zeros(4))
    f(ref, jnp.ones(4))
    x = jnp.ones((3, 4)) if transform is jax.vmap else jnp.ones(4)
    with (
        pytest.warns(jturnip.InlinedWarning),
        pytest.raises(Exception, match="set/swap operation"),
    ):
        transform(lambda x: f(ref, x))(x)
    np.testing.assert_array_equal(ref[...], [2, 2, 2, 2])
