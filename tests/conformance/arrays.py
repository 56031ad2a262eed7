"""Indexing, updating, ordering and reshaping arrays, as in the tutorials on jax.numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .registry import Case, area, normal, weights


program = area("arrays")


@program()
def updates_at_an_index():
    def fn(x, y):
        x = x.at[3].set(1.0).at[:, 5].add(y[0])
        return x.at[2:4, ::2].multiply(2.0) @ y, x.at[0, 0].get()

    return Case(fn, (normal(64, 64), normal(64, 64, seed=1)))


@program()
def updates_with_repeated_indices():
    def fn(x, y):
        at = jnp.array([1, 1, 3, 1])
        added, highest = x.at[at].add(y[:4]), x.at[at].max(y[:4])
        return added @ y, highest, x.at[at].apply(jnp.sin)

    return Case(fn, (normal(64, 64), normal(64, 64, seed=1)))


@program()
def updates_out_of_bounds():
    def fn(x, y):
        at = jnp.array([70, 2, -1])
        dropped = x.at[at].set(0.0, mode="drop")
        clipped = x.at[at].add(1.0, mode="clip")
        return dropped @ y, clipped, x.at[at].multiply(0.5)

    return Case(fn, (normal(64, 64), normal(64, 64, seed=1)))


@program()
def reads_out_of_bounds():
    def fn(x, y):
        at = jnp.array([70, 2, -70])
        z = x @ y
        return z[at], z.at[at].get(mode="fill", fill_value=jnp.nan), jnp.take(z, at, axis=1)

    return Case(fn, (normal(64, 64), normal(64, 64, seed=1)))


@program()
def dynamic_slices():
    def fn(x, i):
        piece = lax.dynamic_slice(x, (i, 0), (16, 64))
        put = lax.dynamic_update_slice(x @ x, piece * 2, (i + 40, i))
        return (
            put,
            lax.dynamic_index_in_dim(x, i, axis=1),
            lax.dynamic_slice_in_dim(x, 60, 8),
        )

    return Case(fn, (normal(64, 64), 5))


@program()
def sorting_and_the_largest():
    def fn(x, y):
        z = x @ y
        values, places = lax.top_k(z, 5)
        return jnp.sort(x, axis=0) @ y, jnp.argsort(y, descending=True), values, places

    return Case(fn, (normal(64, 64), normal(64, 64, seed=1)))


@program()
def segment_sums():
    def fn(rows, segments, y):
        total = jax.ops.segment_sum(rows, segments, num_segments=9)
        highest = jax.ops.segment_max(rows, segments, 9)
        return total @ y, highest, jax.ops.segment_prod(rows, segments, 9)

    return Case(fn, (normal(64, 64), np.arange(64) // 8, normal(64, 64, seed=1)))


@program()
def histograms_and_counts():
    def fn(x, y):
        z = x @ y
        counts = jnp.zeros(9, int).at[jnp.clip(z, 0, 8).astype(int)].add(1)
        return counts, jnp.bincount(jnp.abs(z).astype(int).ravel(), length=30)

    return Case(fn, (normal(64, 64), normal(64, 64, seed=1)))


@program(thorough=True)
def einsums():
    def fn(a, b, c):
        return (
            jnp.einsum("bij,bjk->bik", a, b),
            jnp.einsum("bij,bkj,kl->il", a, b, c),
            jnp.einsum("bii->bi", a),
        )

    return Case(fn, (normal(4, 64, 64), normal(4, 64, 64, seed=1), normal(64, 32, seed=2)))


@program()
def shapes_put_together_and_apart():
    def fn(x, y):
        tall = jnp.concatenate([x, y @ x, jnp.ones((3, 64))])
        a, b = jnp.split(tall, [70])
        return jnp.pad(a, ((1, 2), (0, 3)), mode="reflect"), jnp.roll(b, 2, 1), tall[::-1].T

    return Case(fn, (normal(64, 64), normal(64, 64, seed=1)))


@program()
def ragged_shapes():
    def fn(pieces):
        return [jnp.tanh(p @ p.T) for p in pieces], sum(p.sum() for p in pieces)

    return Case(fn, ([normal(n, 2 * n + 1) for n in (1, 7, 33, 64)],))


@program()
def arrays_without_elements():
    def fn(empty, x):
        y = jnp.concatenate([empty, x @ x])
        return y, empty @ x, empty.sum(0), x[:, :0], jnp.zeros((0,), jnp.int8)

    return Case(fn, (np.zeros((0, 64), np.float32), normal(64, 64)))


@program()
def only_arrays_without_elements_come_out():
    def fn(x):
        y = x @ x
        return y[:0] @ x, y[:, :0]

    return Case(fn, (normal(64, 64),))


@program()
def scalars():
    def fn(a, b, x):
        return a + b, a * 2, (x @ x).sum() * b, jnp.float32(3), jnp.hypot(a, b)

    return Case(fn, (np.float32(3), 4.0, normal(64, 64)))


@program()
def cumulative_operations():
    def fn(x, y):
        z = x @ y
        return (
            jnp.cumsum(z, 0),
            jnp.cumprod(1 + x / 99, 1),
            lax.cummax(z),
            jnp.diff(z, axis=1),
        )

    return Case(fn, (normal(64, 64), normal(64, 64, seed=1)))


@program()
def reductions_of_every_kind():
    def fn(x, y):
        z = x @ y
        largest = jnp.max(z, 0, initial=0.0, where=x > 0)
        return (
            jnp.mean(z, 1),
            jnp.var(z),
            largest,
            jnp.any(z > 9),
            z.argmax(1),
            jnp.prod(x[0]),
        )

    return Case(fn, (normal(64, 64), normal(64, 64, seed=1)))


@program()
def a_reduction_of_ones_own():
    def fn(x, y):
        z = x @ y
        smooth = lax.reduce(z, -jnp.inf, jnp.logaddexp, (1,))
        window = lax.reduce_window(z, 0.0, lax.add, (3, 3), (2, 2), "SAME")
        return smooth, window @ window.T

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def constants_closed_over():
    table = jnp.asarray(normal(64, 64, seed=3))
    kept = np.eye(64, dtype=np.float32)

    def fn(x):
        return jnp.tanh(x @ table) @ kept, table, kept

    return Case(fn, (normal(64, 64),))


@program()
def nothing_but_constants():
    def fn():
        x = jnp.arange(64.0)
        y = jnp.outer(x, x) / 4096
        return y @ y, 3, 2.5, True

    return Case(fn)
