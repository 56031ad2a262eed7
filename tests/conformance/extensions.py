"""Pallas, shard_map, sparse arrays, checkify, export, host memory, custom solvers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, pallas as pl, sparse
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from .registry import Case, Script, area, normal, one_task, weights


program = area("extensions")


@program(one_task("pallas_call"))
def a_pallas_kernel():
    def kernel(x, y, out):
        out[...] = x[...] * 2 + y[...]

    def fn(x, w):
        call = pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct((64, 64), x.dtype), interpret=True
        )
        return call(x @ w, w) @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program(one_task("pallas_call"))
def a_pallas_kernel_on_a_grid():
    def kernel(x, w, out):
        out[...] = jnp.tanh(x[...] @ w[...])

    def fn(x, w):
        call = pl.pallas_call(
            kernel,
            grid=(4,),
            in_specs=[
                pl.BlockSpec((16, 64), lambda i: (i, 0)),
                pl.BlockSpec((64, 64), lambda i: (0, 0)),
            ],
            out_specs=pl.BlockSpec((16, 64), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((64, 64), x.dtype),
            interpret=True,
        )
        return call(call(x, w), w)

    return Case(fn, (normal(64, 64), weights(1)[0]))


def _mesh():
    return jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


@program(one_task("shard_map"), known="results have no mesh in their sharding")
def shard_map_on_one_device():
    def fn(x, w):
        def each(x, w):
            return lax.psum(jnp.tanh(x @ w), "i")

        f = jax.shard_map(each, mesh=_mesh(), in_specs=(P("i"), P()), out_specs=P())
        return f(x, w) @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program(one_task("shard_map"), known="results have no mesh in their sharding")
def a_gradient_of_shard_map():
    def fn(w, x):
        each = lambda w, x: lax.pmean(jnp.sum(jnp.sin(x @ w)), "i")
        f = jax.shard_map(each, mesh=_mesh(), in_specs=(P(), P("i")), out_specs=P())
        return jax.grad(f)(w, x)

    return Case(fn, (weights(1)[0], normal(64, 64)))


@program()
def a_sparse_matrix():
    def fn(data, indices, x):
        matrix = sparse.BCOO((data, indices), shape=(64, 64))
        return matrix @ x, (matrix.T @ x), matrix.todense() @ x

    matrix = sparse.BCOO.fromdense(jnp.where(jnp.asarray(normal(64, 64)) > 1, 2.0, 0.0))
    return Case(fn, (matrix.data, matrix.indices, normal(64, 64, seed=1)))


@program()
def a_sparse_matrix_as_an_argument():
    def fn(matrix, x):
        doubled = matrix * 2
        return doubled @ x, doubled.data, doubled.indices

    matrix = sparse.BCOO.fromdense(jnp.where(jnp.asarray(normal(64, 64)) > 1, 2.0, 0.0))
    return Case(fn, (matrix, normal(64, 64, seed=1)))


@program()
def checks_that_hold():
    def fn(x):
        def checked(x):
            y = x @ x
            checkify.check(y.sum() < 1e9, "the sum is {s}", s=y.sum())
            return jnp.sin(y) @ x

        _, value = checkify.checkify(checked)(x)
        return value

    return Case(fn, (normal(64, 64),))


@program()
def checks_that_fail():
    def run(jit):
        def fn(x):
            y = x @ x
            checkify.check(jnp.all(y > 0), "not positive")
            return jnp.log(y)

        f = jit(checkify.checkify(fn, errors=checkify.user_checks | checkify.nan_checks))
        error, value = f(normal(64, 64))
        return error.get().partition(" (")[0], value

    return Script(run)


@program()
def checks_of_indices():
    def run(jit):
        f = jit(checkify.checkify(lambda x, i: (x @ x)[i], errors=checkify.index_checks))
        good, bad = f(normal(64, 64), 3), f(normal(64, 64), 99)
        return good[0].get(), good[1], bad[0].get().partition("(")[0]

    return Script(run)


@program()
def an_exported_function():
    struct = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: jnp.tanh(x @ x)))(struct)
    return Case(lambda x: exported.call(x) @ x @ x, (normal(64, 64),))


@program()
def a_call_out_of_xla():
    def fn(x):
        call = jax.ffi.ffi_call(
            "lapack_sgetrf_ffi",
            (
                jax.ShapeDtypeStruct((48, 48), jnp.float32),
                jax.ShapeDtypeStruct((48,), jnp.int32),
                jax.ShapeDtypeStruct((), jnp.int32),
            ),
            input_layouts=[(0, 1)],
            output_layouts=[(0, 1), (0,), ()],
        )
        lu, pivots, info = call(x @ x)
        return lu @ x, pivots, info

    return Case(fn, (normal(48, 48),))


@program(one_task("linear_call"))
def a_linear_call():
    def fn(x, w):
        solve = jax.custom_derivatives.linear_call(
            lambda w, x: x * 2 + 0 * w, lambda w, g: g * 2 + 0 * w, w, x @ w
        )
        return solve @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def a_linear_solve_of_ones_own():
    def fn(a, b):
        solve = lambda _, b: jnp.linalg.inv(jnp.eye(64) * 2) @ b
        return lax.custom_linear_solve(lambda x: 2 * x, b @ a, solve, symmetric=True) @ a

    return Case(fn, (weights(1)[0], normal(64, 64)))


@program(needs="jax.memory")
def values_placed_in_host_memory():
    def fn(x, w):
        there = jax.device_put(x @ w, jax.memory.Space.Host)
        return jax.device_put(there, jax.memory.Space.Device) @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def an_offloading_checkpoint():
    def fn(layers, x):
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["hidden"],
            offload_src="device",
            offload_dst="pinned_host",
        )

        def loss(layers):
            h = x
            for w in layers:
                h = checkpoint_name(jnp.tanh(h @ w), "hidden")
            return jnp.mean(jnp.sin(h))

        return jax.grad(jax.checkpoint(loss, policy=policy))(layers)

    return Case(fn, (weights(3), normal(64, 64)))


@program()
def a_flattened_tree_of_parameters():
    def fn(layers, x):
        flat, unravel = ravel_pytree(layers)
        grads = jax.grad(lambda f: jnp.sum(jnp.tanh(x @ unravel(f)[0]) @ unravel(f)[1]))(
            flat
        )
        return unravel(flat - 0.1 * grads)

    return Case(fn, (weights(2), normal(64, 64)))
