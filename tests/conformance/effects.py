"""Callbacks, prints, and arrays that change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from .registry import Case, Script, area, normal, one_task, weights


program = area("effects")
_ROW = jax.ShapeDtypeStruct((64,), jnp.float32)


@program()
def a_pure_callback():
    def fn(x, w):
        y = jnp.tanh(x @ w)
        sums = jax.pure_callback(lambda y: np.asarray(y).cumsum(0)[-1], _ROW, y)
        return y @ w + sums

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def a_pure_callback_under_vmap():
    def fn(x, w):
        total = lambda r: jax.pure_callback(
            lambda r: np.asarray(r).sum(-1),
            jax.ShapeDtypeStruct((), "float32"),
            r,
            vmap_method="expand_dims",
        )
        return jax.vmap(total)(x @ w)

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def a_pure_callback_with_a_derivative():
    @jax.custom_jvp
    def sine(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.sin(np.asarray(x)), shape, x)

    sine.defjvp(
        lambda primals, tangents: (sine(*primals), jnp.cos(primals[0]) * tangents[0])
    )

    def fn(w, x):
        return jax.value_and_grad(lambda w: jnp.sum(sine(x @ w)))(w)

    return Case(fn, (weights(1)[0], normal(64, 64)))


@program()
def a_pure_callback_whose_result_nobody_needs():
    log = []

    def fn(x):
        jax.pure_callback(
            lambda x: log.append("called") or np.float32(0),
            jax.ShapeDtypeStruct((), jnp.float32),
            x,
        )
        return x @ x, jnp.sin(x)

    return Case(fn, (normal(64, 64),), log=log)


@program()
def a_print():
    log = []

    def fn(x, w):
        y = x @ w
        jax.debug.callback(lambda v: log.append(float(v)), jnp.round(y[0, 0]))
        return jnp.tanh(y) @ w

    return Case(fn, (normal(64, 64), weights(1)[0]), log=log)


@program()
def ordered_callbacks():
    log = []

    def fn(x, w):
        for i in range(4):
            x = jnp.tanh(x @ w)
            jax.debug.callback(
                lambda i, s: log.append((int(i), s.shape)), i, x, ordered=True
            )
        return x

    return Case(fn, (normal(64, 64), weights(1)[0]), log=log)


@program()
def unordered_callbacks():
    log = []

    def fn(x, w):
        for i in range(4):
            x = jnp.tanh(x @ w)
            jax.debug.callback(
                lambda i: log.append(int(i)), jnp.int32(i) + 0 * x[0, 0].astype(int)
            )
        return x

    return Case(fn, (normal(64, 64), weights(1)[0]), log=log, ordered=False)


@program()
def prints_with_a_format():
    def fn(x, w):
        y = x @ w
        jax.debug.print("the first is {first:.1f}", first=y[0, 0])
        return y @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def an_ordered_io_callback_with_a_result():
    log = []

    def draw(x):
        log.append(len(log))
        return np.float32(len(log))

    def fn(x, w):
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        a = io_callback(draw, scalar, x[0, 0], ordered=True)
        y = jnp.tanh(x @ w) * a
        return y @ w + io_callback(draw, scalar, y[0, 0], ordered=True)

    return Case(fn, (normal(64, 64), weights(1)[0]), log=log)


@program()
def an_unordered_io_callback():
    log = []

    def fn(x, w):
        y = x @ w
        io_callback(lambda s: log.append(np.asarray(s).shape), None, y)
        return y @ w

    return Case(fn, (normal(64, 64), weights(1)[0]), log=log, ordered=False)


@program()
def numbers_from_the_host_one_by_one():
    log = []

    def following(_):
        log.append("next")
        return np.full(64, len(log), np.float32)

    def fn(x, w):
        for _ in range(3):
            x = jnp.tanh(x @ w) + io_callback(following, _ROW, 0, ordered=True)
        return x

    return Case(fn, (normal(64, 64), weights(1)[0]), log=log)


@program()
def callbacks_in_a_scan():
    log = []

    def fn(x, stacked):
        def step(h, w):
            h = jnp.tanh(h @ w)
            jax.debug.callback(lambda: log.append("step"), ordered=True)
            return h, None

        return lax.scan(step, x @ x, stacked)[0]

    return Case(fn, (normal(64, 64), jnp.stack(weights(3))), log=log)


@program()
def callbacks_in_a_branch():
    log = []

    def fn(x, flag):
        def shout(y):
            jax.debug.callback(lambda: log.append("shout"))
            return y * 2

        return lax.cond(flag, shout, lambda y: y, x @ x) @ x

    return Case(fn, (normal(64, 64), True), log=log)


@program()
def callbacks_in_a_while_loop():
    log = []

    def fn(x):
        def step(s):
            jax.debug.callback(lambda i: log.append(int(i)), s[0], ordered=True)
            return s[0] + 1, jnp.tanh(s[1] @ x)

        return lax.while_loop(lambda s: s[0] < 3, step, (0, x))

    return Case(fn, (normal(64, 64),), log=log)


@program()
def callbacks_while_differentiating():
    log = []

    def fn(w, x):
        def loss(w):
            y = jnp.tanh(x @ w)
            jax.debug.callback(lambda: log.append("forwards"), ordered=True)
            return jnp.sum(y**2)

        return jax.value_and_grad(loss)(w)

    return Case(fn, (weights(1)[0], normal(64, 64)), log=log)


@program()
def a_gradient_that_is_logged():
    log = []

    @jax.custom_vjp
    def watched(x):
        return x

    def backward(_, g):
        jax.debug.callback(lambda g: log.append(np.asarray(g).shape), g)
        return (g,)

    watched.defvjp(lambda x: (x, None), backward)

    def fn(w, x):
        return jax.grad(lambda w: jnp.sum(watched(x @ w) ** 2))(w)

    return Case(fn, (weights(1)[0], normal(64, 64)), log=log)


@program()
def nothing_but_an_effect():
    log = []

    def fn(x):
        y = x @ x
        jax.debug.callback(lambda y: log.append(y.shape), y)

    return Case(fn, (normal(64, 64),), log=log)


@program()
def a_log_in_jit_inside():
    log = []

    @jax.jit
    def layer(x, w):
        jax.debug.callback(lambda: log.append("layer"), ordered=True)
        return jnp.tanh(x @ w)

    def fn(x, layers):
        return functools.reduce(layer, layers, x)

    return Case(fn, (normal(64, 64), weights(3)), log=log)


@program(one_task("new_ref"), needs="jax.new_ref")
def an_array_that_changes_inside():
    def fn(x, w):
        ref = jax.new_ref(jnp.zeros((64, 64)))
        ref[...] = x @ w
        ref[0] += 1.0
        return ref[...] @ w, ref[:2]

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program(one_task("new_ref"), needs="jax.new_ref")
def an_array_that_changes_in_a_loop():
    def fn(x):
        ref = jax.new_ref(jnp.zeros((64, 64)))

        def step(i, _):
            ref[i] = x[i] * i
            return _

        lax.fori_loop(0, 8, step, None)
        return jax.freeze(ref) @ x if hasattr(jax, "freeze") else ref[...] @ x

    return Case(fn, (normal(64, 64),))


@program(needs="jax.new_ref")
def an_array_that_is_passed_and_changes():
    def run(jit):
        ref = jax.new_ref(jnp.asarray(normal(64, 64)))

        @jit
        def add(ref, x):
            ref[...] += x @ x
            return ref[0].sum()

        return add(ref, normal(64, 64)), add(ref, normal(64, 64)), ref[...]

    return Script(run)


@program(needs="jax.new_ref")
def an_array_that_is_closed_over_and_changes():
    def run(jit):
        ref = jax.new_ref(jnp.zeros((64, 64)))

        @jit
        def add(x):
            ref[...] += x @ x

        add(normal(64, 64))
        add(normal(64, 64))
        return ref[...]

    return Script(run)


@program()
def a_global_that_is_read_while_tracing():
    def run(jit):
        scale = [2.0]
        f = jit(lambda x: x @ x * scale[0])
        before = f(normal(64, 64))
        scale[0] = 3.0
        return before, f(normal(64, 64)), f(normal(32, 32))

    return Script(run)


@program()
def state_that_is_handed_on():
    def run(jit):
        @jit
        def count(state, x):
            return {"n": state["n"] + 1, "sum": state["sum"] + x @ x}, state["n"] * 2

        state, seen = {"n": 0, "sum": jnp.zeros((64, 64))}, []
        for seed in range(3):
            state, n = count(state, normal(64, 64, seed=seed))
            seen.append(n)
        return state, seen

    return Script(run)


@program(one_task("while"))
def a_pure_callback_in_a_while_loop():
    def fn(x):
        def step(s):
            y = jax.pure_callback(lambda y: np.asarray(y) * 2, _ROW, s[1])
            return s[0] + 1, y

        return lax.while_loop(lambda s: s[0] < 3, step, (0, x[0])), x @ x

    return Case(fn, (normal(64, 64),))
