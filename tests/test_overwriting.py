"""Tasks that write a result over an operand that nobody reads any more."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import assert_same, refused, whole_bytes
from jax import lax

import jturnip
from jturnip.frontend.costs import DeviceRates
from jturnip.frontend.flatten import flatten
from jturnip.frontend.overwriting import with_overwriting
from jturnip.frontend.partition import Partitioner


N = 64
ARRAY = 4 * N * N
# A device so fast that no launch is worth it: the function is one task.
FAST = DeviceRates(1e30, 1e30, 1.0)


def array(*shape: int, seed: int = 0) -> np.ndarray:
    found = np.random.default_rng(seed).normal(size=shape or (N, N))
    return found.astype(np.float32)


def pairs(fn: Callable[..., Any], *args: Any, finest: bool = False) -> list[list[str]]:
    """For each task of a function what it writes over what, by their names."""
    flat = flatten(jax.jit(fn).trace(*args).jaxpr, ())
    groups = Partitioner(flat, FAST).partition(0 if finest else 1 << 40)
    names = {v: "abcdefgh"[i] for i, v in enumerate(flat.inputs)}
    names.update((v, f"result {i}") for i, v in enumerate(flat.result_values))
    return [
        [
            f"{names.get(g.outputs[o], 'between')} over {names.get(g.inputs[i], 'between')}"
            for o, i in g.overwrites
        ]
        for g in with_overwriting(flat, groups, ())
    ]


def adam(p: Any, m: Any, v: Any, g: Any) -> Any:
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g * g
    return p - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v


def stencil(u: Any) -> Any:
    def body(state: Any) -> Any:
        i, u = state
        around = jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1)
        return i + 1, 0.25 * (around + jnp.roll(u, -1, 1))

    return lax.while_loop(lambda state: state[0] < 5, body, (0, u))[1]


def damped(u: Any, f: Any) -> Any:
    step = lambda state: (state[0] + 1, state[1] * 0.9 + f * 0.1)
    return lax.while_loop(lambda state: state[0] < 5, step, (0, u))[1]


def test_an_update_is_written_over_what_it_updates():
    (found,) = pairs(adam, *[array()] * 4)
    assert sorted(found) == ["result 0 over a", "result 1 over b", "result 2 over c"]


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (lambda a, b: a + b, (array(), array()), ["result 0 over a"]),
        (lambda a: (a.reshape(-1) * 2).reshape(N, N), (array(),), ["result 0 over a"]),
        (
            lambda a, b: lax.dynamic_update_slice(a, b, (0, 0)),
            (array(), array(1, N)),
            ["result 0 over a"],
        ),
        (lambda a, b: a.at[3].add(b), (array(), array(N)), ["result 0 over a"]),
        (lambda a, b: damped(a, b), (array(), array()), ["result 0 over a"]),
        (
            lambda a: lax.fori_loop(0, 5, lambda i, x: x * 2, a),
            (array(),),
            ["result 0 over a"],
        ),
        # All that a loop carries, whatever it is made of there.
        (
            lambda a, b: lax.fori_loop(0, 5, lambda i, s: (s[1] * 2, s[0] + s[1]), (a, b)),
            (array(), array()),
            ["result 0 over a", "result 1 over b"],
        ),
        # Only what is as large, of the same dtype, and not small.
        (lambda a, b: a + b[0], (array(), array()), ["result 0 over a"]),
        (lambda a: a.astype(jnp.bfloat16), (array(),), []),
        (lambda a: a + 1, (array(4, 4),), []),
        # Not what is read elsewhere than where it is written, or comes of a part.
        (lambda a, b: a @ b, (array(), array()), []),
        (lambda a: jnp.cumsum(a, 0), (array(),), []),
        (lambda a: a.T * 2, (array(),), []),
        (lambda a: a[::-1], (array(),), []),
        # Not both, where each result is made of what the other would be written over.
        (lambda a, b: (a + b, a - b), (array(), array()), ["result 0 over a"]),
        # One is, if all else is made first.
        (lambda a, b: (a @ b, a * 2 + b), (array(), array()), ["result 1 over b"]),
    ],
)
def test_what_may_be_written_over(fn: Any, args: tuple[Any, ...], expected: list[str]):
    assert [pair for task in pairs(fn, *args) for pair in task] == expected


def test_what_is_returned_stays():
    flat = flatten(jax.jit(lambda a: (a, jnp.sin(a))).trace(array()).jaxpr, (0,))
    groups = Partitioner(flat, FAST).partition(1 << 40)
    assert not any(g.overwrites for g in with_overwriting(flat, groups, ()))


def test_only_the_last_to_read_an_operand_writes_over_it():
    def twice(a: Any, b: Any) -> Any:
        return jnp.sin(a) @ b, jnp.cos(a)

    found = pairs(twice, array(), array(), finest=True)
    over_a = [at for at, task in enumerate(found) if any("over a" in p for p in task)]
    assert len(over_a) <= 1


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...], float]] = {
    # Name: function, arguments, donated ones, arrays that its smallest budget is at most.
    "adam": (
        lambda *each: [adam(*leaves) for leaves in zip(*each, strict=True)],
        ([array(seed=k) for k in range(2)],) * 4,
        (0, 1, 2),
        4,
    ),
    "a stencil": (stencil, (array(),), (0,), 2),
    "a loop of updates": (damped, (array(), array(seed=1)), (0,), 2),
    "a row of a cache": (
        lambda cache, row: lax.dynamic_update_slice(cache, row, (3, 0)),
        (array(), array(1, N)),
        (0,),
        1.1,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_smallest_budget_is_that_much_smaller(name: str):
    fn, args, donated, most = CASES[name]
    needed, _ = refused(fn, *jturnip.host(args), donate_argnums=donated)
    assert needed <= most * ARRAY + 4096 + 1024
    f = jturnip.jit(fn, needed, strategy="turnip", donate_argnums=donated)
    found = f(*jturnip.host(args))
    assert f.last_run.peak_bytes <= needed
    assert_same(found, jax.jit(fn)(*args))
    # Again, with results as arguments.
    if len(donated) == 1:
        once = fn(*args)
        assert_same(f(found, *jturnip.host(args[1:])), jax.jit(fn)(once, *args[1:]))


def test_xla_writes_them_in_place():
    """What a task is said to need is what XLA's analysis says it holds."""
    args = jturnip.host(tuple(array(256, 256, seed=k) for k in range(4)))
    f = jturnip.jit(adam, 1 << 20 << 4, strategy="turnip", donate_argnums=(0, 1, 2))
    (task,) = f.lower(*args).plan.taskgraph.tasks
    assert len(task.overwrites) == 3
    assert task.workspace < 4096


def test_the_callers_arrays_are_not_written_over():
    def chain(x: Any, w: Any) -> Any:
        return jnp.tanh(x * 2 + w) @ w + w

    x, w = jnp.asarray(array()), jnp.asarray(array(seed=1))
    before = np.array(x), np.array(w)
    f = jturnip.jit(chain, 6 * ARRAY, strategy="turnip")
    for held in ((x, w), jturnip.host((x, w)), before):
        assert_same(f(*held), jax.jit(chain)(x, w))
        for array_, was in zip(held, before, strict=True):
            np.testing.assert_array_equal(array_, was)


def test_a_host_array_that_is_read_again_is_not_changed_by_its_copy():
    """Its copy on the device is written over; a later call reads the host's again."""
    w = jturnip.host(array())
    f = jturnip.jit(lambda w: (w * 2 + 1) @ (w * 3), 4 * ARRAY, strategy="turnip")
    first = f(w)
    assert_same(f(w), first)
    np.testing.assert_array_equal(w, array())


def test_a_view_of_a_donated_array_keeps_its_numbers():
    """The caller looks at the bytes through numpy: then XLA must copy."""
    x = jnp.asarray(array())
    view = np.asarray(x)
    f = jturnip.jit(lambda x: x * 2, 4 * ARRAY, strategy="turnip", donate_argnums=0)
    assert_same(f(x), array() * 2)
    np.testing.assert_array_equal(view, array())


def test_a_nan_in_what_was_written_over_is_blamed():
    f = jturnip.jit(
        lambda x, y: jnp.log(x) + y, 8 * ARRAY, strategy="turnip", donate_argnums=0
    )
    args = jnp.full((N, N), -1.0), jnp.ones((N, N))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="log"):
        f(*args)


@pytest.mark.long
def test_a_step_of_optax_needs_four_arrays_for_each():
    tx = optax.adam(1e-3)
    params = {f"w{k}": array(256, 256, seed=k) for k in range(3)}
    grads = jax.tree.map(np.cos, params)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = params, jax.tree.map(np.asarray, tx.init(params)), grads
    peak = whole_bytes(jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile())
    needed, _ = refused(step, *jturnip.host(args), donate_argnums=(0, 1))
    assert needed <= 2.1 * 256 * 256 * 4 + 8192 < peak
    f = jturnip.jit(step, needed, donate_argnums=(0, 1))
    assert_same(f(*jturnip.host(args)), jax.jit(step)(*args))


def test_results_that_are_arguments_again_are_not_counted_as_written_over():
    """The first call writes over its copies; of its results, the caller's, it may not."""
    fn = lambda arrays: [x * 2 + 1 for x in arrays]
    arrays = [array(128, 128, seed=k) for k in range(6)]
    f = jturnip.jit(fn, 6 * arrays[0].nbytes + 4096, strategy="turnip")
    found = f(jturnip.host(arrays))
    assert_same(f(found), jax.jit(fn)(jax.jit(fn)(arrays)))
