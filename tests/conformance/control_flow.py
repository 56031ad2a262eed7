"""Python's control flow while tracing, and JAX's own."""

import jax
import jax.numpy as jnp
from jax import lax

from .registry import Case, Script, area, normal, one_task, weights


program = area("control flow")


@program(thorough=True)
def python_loop_over_a_list():
    def fn(x, layers):
        for w in layers:
            x = jnp.tanh(x @ w)
        return x

    return Case(fn, (normal(64, 64), weights(6)))


@program()
def python_branch_on_a_shape():
    def fn(x):
        if x.shape[0] > x.shape[1]:
            x = x.T
        return x @ x.T, x.ndim

    return Case(fn, (normal(96, 64),))


@program(thorough=True, long=True)
def scan_over_stacked_weights():
    def fn(x, stacked):
        def step(h, w):
            return jnp.tanh(h @ w), h.sum()

        return lax.scan(step, x @ x, stacked)

    return Case(fn, (normal(64, 64), jnp.stack(weights(6))))


@program()
def scan_backwards_and_unrolled():
    def fn(x, stacked):
        def step(total, row):
            return total * 0.9 + row, total

        last, rows = lax.scan(step, jnp.zeros(64), stacked, reverse=True, unroll=4)
        return (x @ x) * last, rows

    return Case(fn, (normal(64, 64), normal(16, 64, seed=1)))


@program(one_task("scan"), long=True)
def scan_without_inputs():
    def fn(x):
        step = lambda carry, _: ((carry[1], carry[0] + carry[1]), carry[0])
        _, fibonacci = lax.scan(step, (jnp.int32(0), jnp.int32(1)), None, length=12)
        return fibonacci, x @ x

    return Case(fn, (normal(64, 64),))


@program(one_task("scan"))
def scan_in_a_scan():
    def fn(x, rows):
        def outer(total, row):
            inner = lambda t, v: (t + v * row.sum(), t)
            return lax.scan(inner, total, row)

        total, seen = lax.scan(outer, jnp.float32(0), rows)
        return total, seen @ x

    return Case(fn, (normal(64, 64), normal(8, 64, seed=1)))


@program(one_task("scan"))
def scan_with_a_tree_for_a_carry():
    def fn(x, rows):
        def step(carry, row):
            mean, count = carry["mean"], carry["count"]
            mean = mean + (row - mean) / (count + 1)
            return {"mean": mean, "count": count + 1, "nothing": None}, None

        carry = {"mean": jnp.zeros(64), "count": 0.0, "nothing": None}
        carry, _ = lax.scan(step, carry, rows)
        return carry, x @ x

    return Case(fn, (normal(64, 64), normal(16, 64, seed=1)))


@program(one_task("while"), long=True)
def while_loop_with_a_data_dependent_end():
    def fn(x):
        return lax.while_loop(
            lambda s: jnp.abs(s[0]).max() < 1e3, lambda s: (s[0] * 2, s[1] + 1), (x @ x, 0)
        )

    return Case(fn, (normal(32, 32),))


@program(one_task("while"))
def while_loop_that_never_runs():
    def fn(x):
        y = lax.while_loop(lambda s: s[0, 0] > 1e9, lambda s: s @ s, x)
        return y @ x

    return Case(fn, (normal(64, 64),))


@program()
def while_loop_with_closed_over_values():
    def fn(x, w, n):
        return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] @ w), (0, x))

    return Case(fn, (normal(64, 64), weights(1)[0], 3))


@program()
def fori_loop_with_static_bounds():
    def fn(x, w):
        return lax.fori_loop(0, 5, lambda i, y: jnp.sin(y @ w) + i, x) @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def fori_loop_with_traced_bounds():
    def fn(x, w, n):
        return lax.fori_loop(1, n, lambda i, y: jnp.sin(y @ w) / i, x) @ w

    return Case(fn, (normal(64, 64), weights(1)[0], 4))


@program(long=True)
def fori_loop_that_fills_an_array():
    def fn(x):
        fill = lambda i, rows: rows.at[i].set(x[i] * i)
        return lax.fori_loop(0, 64, fill, jnp.zeros((64, 64))) @ x

    return Case(fn, (normal(64, 64),))


@program()
def cond_with_operands():
    def fn(flag, x, y):
        z = lax.cond(flag, lambda a, b: a @ b, lambda a, b: a - b, x, y)
        return z @ x

    return Case(fn, (True, normal(64, 64), normal(64, 64, seed=1)))


@program()
def cond_on_a_computed_value():
    def fn(x):
        y = x @ x
        return lax.cond(y.sum() > 0, lambda: {"y": y, "n": 1}, lambda: {"y": -y, "n": 2})

    return Case(fn, (normal(64, 64),))


@program()
def cond_in_a_cond():
    def fn(x, a, b):
        deep = lambda y: lax.cond(b, jnp.sin, jnp.cos, y)
        return lax.cond(a, deep, lambda y: y * 2, x @ x)

    return Case(fn, (normal(64, 64), True, False))


@program()
def switch_with_an_index_out_of_range():
    def fn(x, i):
        y = x @ x
        return lax.switch(i, [jnp.sin, jnp.cos, jnp.negative], y)

    return Case(fn, (normal(64, 64), 7))


@program()
def a_loop_while_jit_is_disabled():
    def run(jit):
        f = jit(lambda x: lax.fori_loop(0, 3, lambda i, y: y @ x + i, x))
        with jax.disable_jit():
            return f(normal(64, 64))

    return Script(run, inlined=True)


@program()
def where_with_a_safe_denominator():
    def fn(x):
        y = x @ x
        safe = jnp.where(y == 0, 1.0, y)
        return jnp.where(y == 0, 0.0, x / safe) @ x

    return Case(fn, (normal(64, 64),))


@program()
def associative_scan_of_products():
    def fn(x, rows):
        return lax.associative_scan(jnp.multiply, rows) @ x

    return Case(fn, (normal(64, 64), 1 + normal(32, 64, seed=1) / 10))


@program()
def map_over_rows():
    def fn(x, rows):
        return lax.map(lambda r: jnp.outer(r, r) @ x, rows)

    return Case(fn, (normal(64, 64), normal(4, 64, seed=1)))
