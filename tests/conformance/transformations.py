"""vmap, and jturnip functions inside JAX's transformations and the other way round."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from .registry import Case, Script, area, normal, one_task, weights


program = area("transformations")


@program()
def vmap_of_a_matrix_by_a_vector():
    def fn(w, xs):
        return jax.vmap(lambda x: jnp.tanh(w @ x))(xs), jax.vmap(jnp.dot, (None, 0))(w, xs)

    return Case(fn, (weights(1)[0], normal(32, 64)))


@program()
def vmap_over_chosen_axes():
    def fn(a, b):
        f = lambda x, y: {"dot": x @ y, "sum": x + y}
        return jax.vmap(f, in_axes=(1, 0), out_axes={"dot": 0, "sum": 1})(a, b)

    return Case(fn, (normal(64, 32), normal(32, 64, seed=1)))


@program()
def vmap_with_a_named_axis():
    def fn(xs, w):
        centre = lambda x: (x - lax.pmean(x, "batch")) / lax.psum(1, "batch")
        return jax.vmap(centre, axis_name="batch")(xs) @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def vmap_of_a_tree():
    def fn(tree, x):
        return jax.vmap(lambda t: t["w"] @ x + t["b"])(tree)

    tree = {"w": jnp.stack(weights(3)), "b": normal(3, 64)}
    return Case(fn, (tree, normal(64, 64)))


@program()
def vmap_of_a_while_loop():
    def fn(xs, w):
        far = lambda s: jnp.abs(s).max() > 0.1
        return jax.vmap(lambda x: lax.while_loop(far, lambda s: s * 0.5, x))(xs) @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def vmap_of_a_cond_is_a_select():
    def fn(xs, w):
        f = lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
        return jax.vmap(f)(xs @ w)

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def vmap_of_a_scan():
    def fn(xs, w):
        step = lambda c, x: (c * 0.9 + x, c)
        return jax.vmap(lambda x: lax.scan(step, 0.0, x))(xs @ w)

    return Case(fn, (normal(32, 64), weights(1)[0]))


@program(one_task("custom_vmap_call"))
def a_custom_rule_for_vmap():
    @jax.custom_batching.custom_vmap
    def f(x, w):
        return jnp.tanh(x @ w)

    @f.def_vmap
    def _(axis_size, in_batched, x, w):
        return jnp.tanh(x @ w) + axis_size, True

    def fn(xs, w):
        return jax.vmap(lambda x: f(x, w))(xs), f(xs, w)

    return Case(fn, (normal(8, 64), weights(1)[0]))


@program()
def jit_inside():
    inner = jax.jit(lambda x, w: {"y": jnp.tanh(x @ w)})

    def fn(x, layers):
        for w in layers:
            x = inner(x, w)["y"]
        return x

    return Case(fn, (normal(64, 64), weights(4)))


@program()
def named_calls_and_scopes():
    def fn(x, w):
        with jax.named_scope("first"):
            y = jax.named_call(lambda x: jnp.tanh(x @ w), name="layer")(x)
        return jax.named_scope("second")(lambda y: y @ w)(y)

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def a_jturnip_function_inside_another():
    def run(jit):
        inner = jit(lambda x, w: jnp.tanh(x @ w))
        outer = jit(lambda x, layers: functools.reduce(inner, layers, x))
        return outer(normal(64, 64), weights(3))

    return Script(run)


@program()
def a_gradient_of_a_jturnip_function_inside_another():
    def run(jit):
        inner = jit(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
        return jit(jax.value_and_grad(inner))(weights(1)[0], normal(64, 64))

    return Script(run)


@program()
def a_vmap_of_a_jturnip_function_inside_another():
    def run(jit):
        inner = jit(lambda x, w: jnp.tanh(x @ w))
        return jit(jax.vmap(inner, (0, None)))(normal(16, 64), weights(1)[0])

    return Script(run)


@program(one_task("scan"))
def a_jturnip_function_in_a_scan_of_another():
    def run(jit):
        inner = jit(lambda x, w: jnp.tanh(x @ w))
        f = jit(lambda x, ws: lax.scan(lambda h, w: (inner(h, w), h.sum()), x @ x, ws))
        return f(normal(64, 64), jnp.stack(weights(4)))

    return Script(run)


@program()
def inside_jax_jit():
    def run(jit):
        inner = jit(lambda x, w: jnp.tanh(x @ w))
        return jax.jit(lambda x, w: inner(x, w) @ w)(normal(64, 64), weights(1)[0])

    return Script(run, inlined=True)


@program()
def inside_grad():
    def run(jit):
        f = jit(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
        return jax.grad(f)(weights(1)[0], normal(64, 64))

    return Script(run)


@program()
def inside_vmap():
    def run(jit):
        f = jit(lambda x, w: jnp.tanh(x @ w))
        return jax.vmap(f, (0, None))(normal(16, 64), weights(1)[0])

    return Script(run)


@program()
def inside_jvp_and_vjp():
    def run(jit):
        f = jit(lambda x: jnp.tanh(x @ x))
        x = normal(64, 64)
        return jax.jvp(f, (x,), (x,)), jax.vjp(f, x)[1](x)

    return Script(run)


@program()
def inside_linearize_and_jacrev():
    def run(jit):
        x = normal(16)
        f = jit(lambda x: jnp.sum(jnp.sin(jnp.outer(x, x))))
        return jax.linearize(f, x)[1](x), jax.jacrev(f)(x)

    return Script(run)


@program()
def inside_checkpoint():
    def run(jit):
        f = jit(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
        return jax.grad(jax.checkpoint(f))(weights(1)[0], normal(64, 64))

    return Script(run)


@program()
def inside_scan():
    def run(jit):
        step = jit(lambda h, w: (jnp.tanh(h @ w), h.sum()))
        return lax.scan(step, normal(64, 64), jnp.stack(weights(3)))

    return Script(run, inlined=True)


@program()
def inside_a_custom_vjp():
    def run(jit):
        f = jax.custom_vjp(jit(lambda x: jnp.sin(x @ x)))
        f.defvjp(lambda x: (f(x), x), lambda x, g: (jit(lambda g: g @ x * 2)(g),))
        return jax.grad(lambda x: f(x).sum())(normal(64, 64))

    return Script(run)


@program()
def inside_make_jaxpr():
    def run(jit):
        closed = jax.make_jaxpr(jit(lambda x: jnp.tanh(x @ x)))(normal(64, 64))
        return jaxpr_as_fun(closed)(normal(64, 64)), len(closed.eqns)

    return Script(run, inlined=True)


@program()
def grad_of_a_function_that_calls_it_outside():
    def run(jit):
        normalise = jit(lambda x: x / jnp.sqrt((x @ x.T).sum() ** 2 + 1))
        x = normalise(normal(64, 64))
        return jit(jax.grad(lambda y: jnp.sum(normalise(y) * x)))(x)

    return Script(run)


@program()
def a_function_that_closes_over_traced_values():
    def run(jit):
        def outer(w, x):
            return jit(lambda x: jnp.tanh(x @ w))(x).sum()

        return jax.grad(outer)(weights(1)[0], normal(64, 64))

    return Script(run)


@program()
def a_function_that_only_closes_over_traced_values():
    def run(jit):
        def outer(w):
            return jit(lambda: jnp.tanh(w @ w))().sum()

        return jax.grad(outer)(weights(1)[0])

    return Script(run)


@program()
def compile_time_evaluation():
    def fn(x):
        with jax.ensure_compile_time_eval():
            n = int(jnp.sum(jnp.arange(4)))
        return x @ x * n, jnp.ones((n, 64)) @ x

    return Case(fn, (normal(64, 64),))


@program()
def an_optimization_barrier():
    def fn(x, w):
        y, w = lax.optimization_barrier((x @ w, w))
        return y @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program(one_task("composite"))
def a_composite():
    scaled = lax.composite(lambda x, *, by: jnp.tanh(x) * by, name="mine.scaled")

    def fn(x, w):
        return scaled(x @ w, by=2.0) @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))
