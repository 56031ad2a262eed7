"""What each iteration of a driven loop would make anew, made once before it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same
from jax import lax
from jax.extend.core import jaxpr_as_fun

import jturnip
from jturnip.frontend import hoisting


N = 256


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, np.float32)


def until_settled(step: Any, x: Any) -> Any:
    """Until hardly anything changes, or forty times."""

    def goes_on(state: Any) -> Any:
        _, change, count = state
        return (change > 1e-6) & (count < 40)

    def again(state: Any) -> Any:
        x, _, count = state
        new = step(x)
        return new, jnp.abs(new - x).max(), count + 1

    return lax.while_loop(goes_on, again, (x, jnp.float32(1), 0))[0]


def scaled(a: Any, x: Any) -> Any:
    return until_settled(lambda x: (0.9 / N * a) @ x + 1, x)


def with_a_diagonal(a: Any, x: Any) -> Any:
    return until_settled(lambda x: (a + 0.1 * jnp.eye(N)) @ x / N, x)


def with_norms(a: Any, x: Any) -> Any:
    """Small, so that it may be beside what it is made of, which is read again."""
    return until_settled(lambda x: (a @ x - (a * a).sum(1) * x) / N**2, x)


def in_half_as_many_bytes(a: Any, x: Any) -> Any:
    half = jnp.bfloat16
    step = lambda x: (a.astype(half) @ x.astype(half)).astype(jnp.float32) / N
    return until_settled(step, x)


def read_otherwise(a: Any, x: Any) -> Any:
    return until_settled(lambda x: (2 * a) @ x / N**2 + a.T @ x / N**2, x)


def turned(a: Any, x: Any) -> Any:
    return until_settled(lambda x: a.T @ x / N, x)


def of_little(a: Any, x: Any) -> Any:
    of = a[0]
    return until_settled(lambda x: jnp.exp(-jnp.abs(of[:, None] - of)) @ x / N, x)


def with_a_barrier(a: Any, x: Any) -> Any:
    step = lambda x: (0.9 / N * lax.optimization_barrier(a)) @ x
    return until_settled(step, x)


def with_a_loop_inside(a: Any, x: Any) -> Any:
    """That would be a loop of its own, and driven."""
    halved = jax.jit(lambda a: lax.while_loop(lambda a: a.max() > 0.1, lambda a: a / 2, a))
    return until_settled(lambda x: halved(a) @ x / N, x)


def twice(a: Any, x: Any) -> Any:
    again = lambda state: (state[0] + 1, (0.9 / N * a) @ state[1])
    return lax.while_loop(lambda state: state[0] < 2, again, (0, x))[1]


MADE_BEFORE = [scaled, with_a_diagonal, with_norms, in_half_as_many_bytes]
LEFT = [read_otherwise, turned, of_little, with_a_barrier, with_a_loop_inside, twice]


def loop_of(fn: Any) -> Any:
    a, x = numbers(N, N), numbers(N)
    loops = [e for e in jax.make_jaxpr(fn)(a, x).eqns if e.primitive.name == "while"]
    return loops[0]


@pytest.mark.parametrize("fn", MADE_BEFORE)
def test_what_is_the_same_in_each_iteration_is_made_before_them(fn):
    loop = loop_of(fn)
    before, left = (made := hoisting.hoisted(loop)).jaxpr.eqns[:-1], made.jaxpr.eqns[-1]
    assert before
    shape_of = lambda e: [v.aval.shape for v in e.outvars]
    whole = [e for e in left.params["body_jaxpr"].jaxpr.eqns if (N, N) in shape_of(e)]
    assert [e.primitive.name for e in whole] == []
    operands = [numbers(*v.aval.shape).astype(v.aval.dtype) for v in loop.invars]
    as_it_was = lambda *operands: loop.primitive.bind(*operands, **loop.params)
    for ours, theirs in zip(
        jax.jit(jaxpr_as_fun(made))(*operands), jax.jit(as_it_was)(*operands), strict=True
    ):
        assert_same(ours, theirs)


@pytest.mark.parametrize("fn", LEFT)
def test_what_takes_more_room_is_left_where_it_is(fn):
    assert hoisting.hoisted(loop_of(fn)) is None


def test_a_driven_loop_does_not_make_it_again():
    a, x = numbers(512, 512), numbers(512)
    fn = lambda a, x: until_settled(lambda x: (0.9 / 512 * a) @ x + 1, x)
    gpu_bytes = int(0.9 * a.nbytes)
    f = jturnip.jit(fn, gpu_bytes)
    assert_same(f(*jturnip.host((a, x))), jax.jit(fn)(a, x))
    *_, loop = f.last_run.plan.pieces
    body = next(piece for piece in loop.pieces if piece.name == "body")
    assert "mul" not in {task.name for task in body.taskgraph.tasks}
    assert f.last_run.peak_bytes <= gpu_bytes


def test_parts_are_small_where_more_of_what_is_read_stays_then():
    """A matrix that nearly fits, of which each iteration moves what does not stay."""
    a, x = numbers(2048, 2048), numbers(2048)
    fn = lambda a, x: until_settled(lambda x: a @ x / 2048, x)
    # So slow that what moves is what counts.
    f = jturnip.jit(fn, int(0.95 * a.nbytes), link=jturnip.SimulatedLink(1e9, 1e9))
    assert_same(f(*jturnip.host((a, x))), jax.jit(fn)(a, x))
    (loop,) = (piece for piece in f.last_run.plan.pieces if piece.pieces)
    body = next(piece for piece in loop.pieces if piece.name == "body")
    assert body.h2d_bytes < a.nbytes / 4
