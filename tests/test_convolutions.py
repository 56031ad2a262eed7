"""Convolutions in loops and branches, in the order of dimensions that is fast there."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same
from jax import lax

import jturnip
from jturnip.frontend import convolutions, costs
from jturnip.frontend.inline import inline
from jturnip.frontend.loops import LOOPS_AND_BRANCHES
from jturnip.frontend.values import FlatJaxpr


ORDERS = [
    ("NHWC", "HWIO", "NHWC"),
    ("NCHW", "OIHW", "NCHW"),
    ("NCHW", "HWIO", "NHWC"),
    ("CNHW", "IHWO", "HWNC"),
]
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(6, 2, 9, 8, 4)).astype(np.float32)
KERNEL = RANDOM.normal(size=(3, 2, 4, 4)).astype(np.float32)


def convolved(order: tuple[str, str, str], x: Any, w: Any) -> Any:
    """Images and a window, both in the first order, convolved in another one."""
    turned = lambda array, old, new: lax.transpose(array, [old.index(d) for d in new])
    image, window = turned(x, "NHWC", order[0]), turned(w, "HWIO", order[1])
    return lax.conv_general_dilated(
        image, window, (2, 1), [(1, 2), (0, 1)], dimension_numbers=order
    )


def loss(order: tuple[str, str, str], w: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(convolved(order, x, w)))


def mapped(fn: Callable[[Any, Any], Any], xs: Any, w: Any) -> Any:
    return lax.map(lambda x: fn(w, x), xs)


def while_some(fn: Callable[[Any, Any], Any], xs: Any, w: Any) -> Any:
    body = lambda i, w: w + 1e-4 * fn(w, xs[i])
    return lax.fori_loop(0, jnp.int32(xs.shape[0]), body, w)


def chosen(fn: Callable[[Any, Any], Any], xs: Any, w: Any) -> Any:
    each = lambda x: lax.cond(x[0, 0, 0, 0] > 0, fn, lambda w, x: w, w, x)
    return lax.map(each, xs)


def called(fn: Callable[[Any, Any], Any], xs: Any, w: Any) -> Any:
    return lax.map(lambda x: jax.checkpoint(jax.jit(fn))(w, x), xs)


def within(fn: Callable[[Any, Any], Any], xs: Any, w: Any) -> Any:
    return lax.map(lambda w: mapped(fn, xs, w), jnp.stack([w, 2 * w]))


def either(fn: Callable[[Any, Any], Any], xs: Any, w: Any) -> Any:
    return lax.cond(xs[0, 0, 0, 0, 0] > 0, fn, lambda w, x: -fn(w, x), w, xs[1])


INNER = [mapped, while_some, chosen, called, within, either]


def orders_of(jaxpr: Any, is_inner: bool = False) -> Iterator[tuple[Any, bool]]:
    """The order of each convolution, and whether it is in a loop or a branch."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            yield eqn.params["dimension_numbers"], is_inner
        inside = is_inner or eqn.primitive.name in LOOPS_AND_BRANCHES
        for inner in costs.nested(eqn):
            yield from orders_of(getattr(inner, "jaxpr", inner), inside)


def evaluated(flat: FlatJaxpr, *args: Any) -> list[Any]:
    values = dict(zip(flat.inputs, args, strict=True))
    values.update(flat.constants)
    for e in flat.equations:
        read = [values[v] if isinstance(v, int) else v.value for v in e.inputs]
        values.update(zip(e.outputs, convolutions.bound(e, read), strict=True))
    return [values[v] for v in flat.result_values]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("inner", INNER)
def test_all_in_loops_and_branches_have_the_fast_order(
    inner: Callable[..., Any], order: tuple[str, str, str]
):
    fn = functools.partial(inner, jax.grad(functools.partial(loss, order)))
    flat = inline(jax.make_jaxpr(fn)(IMAGES, KERNEL))
    made = jax.make_jaxpr(functools.partial(evaluated, flat))(IMAGES, KERNEL)
    found = list(orders_of(made.jaxpr))
    fast = lax.conv_dimension_numbers(IMAGES[0].shape, KERNEL.shape, ORDERS[0])
    assert found
    assert {each for each, is_inner in found if is_inner} == {fast}
    expected = jax.jit(fn)(IMAGES, KERNEL)
    assert_same(jax.jit(functools.partial(evaluated, flat))(IMAGES, KERNEL), [expected])


def test_what_is_in_neither_stays_as_it_is():
    """XLA brings it in order by itself."""
    fn = lambda x, w: jax.jit(functools.partial(convolved, ORDERS[1]))(x, w)
    flat = inline(jax.make_jaxpr(fn)(IMAGES[0], KERNEL))
    made = jax.make_jaxpr(functools.partial(evaluated, flat))(IMAGES[0], KERNEL)
    slow = lax.conv_dimension_numbers((2, 4, 9, 8), (4, 4, 3, 2), ORDERS[1])
    assert list(orders_of(made.jaxpr)) == [(slow, False)]


def test_other_loops_are_the_same():
    fn = lambda x, w: lax.map(lambda x: convolved(ORDERS[0], x, w), x)
    (eqn,) = jax.make_jaxpr(fn)(IMAGES, KERNEL).jaxpr.eqns
    assert not convolutions._inside(eqn, inner=False)


@pytest.mark.parametrize("dims", [1, 3])
def test_of_one_dimension_or_three(dims: int):
    x = RANDOM.normal(size=(3, 2, 4, *[6] * dims)).astype(np.float32)
    w = RANDOM.normal(size=(5, 4, *[3] * dims)).astype(np.float32)
    fn = lambda x, w: lax.map(lambda x: lax.conv(x, w, [1] * dims, "SAME"), x)
    flat = inline(jax.make_jaxpr(fn)(x, w))
    found = jax.jit(functools.partial(evaluated, flat))(x, w)
    assert_same(found, [jax.jit(fn)(x, w)])


def test_of_groups_of_channels_and_their_gradients():
    x = RANDOM.normal(size=(3, 2, 8, 8, 6)).astype(np.float32)
    w = RANDOM.normal(size=(3, 3, 1, 12)).astype(np.float32)

    def loss(w: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(
            x, w, (1, 2), "SAME", dimension_numbers=ORDERS[0], feature_group_count=6
        )
        return jnp.sum(jnp.sin(y))

    fn = functools.partial(mapped, jax.grad(loss, (0, 1)))
    flat = inline(jax.make_jaxpr(fn)(x, w))
    found = jax.jit(functools.partial(evaluated, flat))(x, w)
    assert_same(found, list(jax.jit(fn)(x, w)))


def test_gradients_over_microbatches_are_those_of_stock_jit():
    """As a task with its loop in one piece, of which the whole does not fit."""

    def fn(w: Any, xs: Any) -> Any:
        add = lambda total, x: (
            total + jax.grad(functools.partial(loss, ORDERS[1]))(w, x),
            x,
        )
        total, _ = lax.scan(add, jnp.zeros_like(w), xs)
        return total, jnp.sin(xs)

    xs = RANDOM.normal(size=(8, 4, 32, 32, 4)).astype(np.float32)
    split = jturnip.jit(fn, int(1.4 * xs.nbytes))
    found = split(jturnip.host(KERNEL), jturnip.host(xs))
    assert_same(found, jax.jit(fn)(KERNEL, xs))
    assert split.last_run.strategy != "whole"
