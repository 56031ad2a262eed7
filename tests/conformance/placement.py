"""Where arguments lie, and whether results are bound to a device."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from .registry import Case, Script, area, normal, weights


program = area("placement")
_MESH = "results have another sharding on the mesh, or none"


def _device():
    return jax.devices()[0]


def _fn(x, layers):
    y = x
    for w in layers:
        y = jnp.tanh(y @ w)
    return y, x + 1, y.sum()


@program(thorough=True)
def arrays_of_numpy():
    return Case(_fn, (normal(64, 64), weights(6)))


@program(thorough=True)
def large_arrays_of_numpy():
    return Case(_fn, (normal(192, 192), weights(5, 192)))


@program()
def arrays_on_no_device_in_particular():
    return Case(_fn, (jnp.asarray(normal(64, 64)), list(map(jnp.asarray, weights(3)))))


@program()
def arrays_bound_to_a_device():
    return Case(_fn, jax.device_put((normal(64, 64), weights(3)), _device()))


@program()
def one_array_bound_and_others_not():
    return Case(
        _fn, (normal(64, 64), [*weights(2), jax.device_put(weights(3)[2], _device())])
    )


@program()
def arrays_bound_to_a_device_that_are_evicted():
    def fn(x, layers):
        first = x @ layers[0]
        kept = [jnp.tanh(first @ w) for w in layers]
        return sum(k @ first for k in reversed(kept)), first

    return Case(fn, jax.device_put((normal(64, 64), weights(6)), _device()))


@program()
def results_that_are_evicted_and_come_back():
    def fn(x, layers):
        first = x @ layers[0]
        for w in layers[1:]:
            x = jnp.tanh(x @ w)
        return first, x @ first

    return Case(fn, (normal(192, 192), weights(6, 192)))


@program()
def arguments_returned_from_a_device():
    def fn(x, y):
        return x, y, x @ y

    return Case(
        fn, (jax.device_put(normal(64, 64), _device()), jnp.asarray(normal(64, 64)))
    )


@program()
def no_arguments():
    return Case(lambda: (jnp.ones((64, 64)) @ jnp.eye(64), jnp.arange(64.0) * 2))


@program(known=_MESH)
def a_mesh_of_one_device():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("rows"))
    return Case(_fn, (jax.device_put(normal(64, 64), place), weights(2)))


@program()
def the_sharding_of_results_on_a_mesh_of_one_device():
    def run(jit):
        mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
        place = NamedSharding(mesh, PartitionSpec("rows"))
        y = jit(lambda x: jnp.tanh(x @ x))(jax.device_put(normal(64, 64), place))
        return y, y.sharding.is_equivalent_to(place, 2), y.committed

    return Script(run)


@program()
def a_constraint_inside():
    def fn(x, w):
        y = jax.lax.with_sharding_constraint(x @ w, SingleDeviceSharding(_device()))
        return y @ w

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def a_device_put_inside():
    def fn(x, w):
        return jax.device_put(x @ w, _device()) @ w, jax.device_put(w)

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program()
def a_copy_inside():
    def fn(x, w):
        return jnp.array(x, copy=True) @ w, jnp.copy(x), jax.lax.stop_gradient(w)

    return Case(fn, (normal(64, 64), weights(1)[0]))


@program(context=lambda: jax.default_device(jax.devices()[0]))
def a_default_device():
    return Case(_fn, (normal(64, 64), weights(2)))


@program()
def donated_and_bound():
    def run(jit):
        x, w = jax.device_put((normal(64, 64), weights(1)[0]), _device())
        y = jit(lambda x, w: jnp.tanh(x @ w), donate_argnums=0)(x, w)
        return y, y.committed, x.is_deleted(), w.is_deleted()

    return Script(run)


@program()
def in_and_out_shardings():
    def run(jit):
        here = SingleDeviceSharding(_device())
        f = jit(lambda x, w: jnp.tanh(x @ w), in_shardings=here, out_shardings=here)
        y = f(normal(64, 64), weights(1)[0])
        return y, y.committed

    return Script(run)


@program()
def compiler_options():
    def run(jit):
        f = jit(lambda x: x @ x, compiler_options={"xla_cpu_enable_fast_min_max": False})
        return f(normal(64, 64))

    return Script(run)


@program()
def whether_results_are_bound():
    def run(jit):
        f = jit(lambda x, y: (x @ y, x, 1.0))
        free, bound = jnp.asarray(normal(64, 64)), jax.device_put(normal(64, 64), _device())
        calls = [(free, free), (free, bound), (normal(64, 64), normal(64, 64))]
        return [[leaf.committed for leaf in f(*args)] for args in calls]

    return Script(run)


@program()
def a_result_put_on_a_device_afterwards():
    def run(jit):
        y = jit(lambda x: x @ x)(normal(64, 64))
        there = jax.device_put(y, _device())
        return there, there.committed, np.asarray(y).dtype.name, y.__array__().shape

    return Script(run)


@program()
def arrays_that_are_views_of_memory():
    def run(jit):
        base = normal(128, 128)
        f = jit(lambda x: x @ x + 1)
        result = (
            f(base[::2, ::2]),
            f(base.T[:64, :64]),
            f(np.broadcast_to(base[0, 0], (9, 9))),
        )
        before = jax.tree.map(np.array, result)
        base[:] = 0
        return before

    return Script(run)


@program()
def arrays_that_are_changed_after_the_call():
    def run(jit):
        x = normal(300, 300)
        y = jax.block_until_ready(jit(lambda x: (x, x @ x))(x))
        x[:] = 0
        return y

    return Script(run)


@program()
def a_donated_array_that_is_not_used():
    def run(jit):
        x = jnp.asarray(normal(64, 64))
        y = jit(lambda unused, y: y @ y, donate_argnums=0)(x, normal(64, 64))
        return y, x.is_deleted()

    return Script(run)


@program(known=_MESH)
def a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = NamedSharding(mesh, PartitionSpec("rows"))
    return Case(_fn, (jax.device_put(normal(64, 64), place), weights(2)))


@program(known=_MESH)
def a_mesh_that_is_set():
    def run(jit):
        mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            x = jax.device_put(normal(64, 64), PartitionSpec("rows"))
            y = jit(lambda x: jnp.tanh(x @ x) @ x)(x)
        return y, str(jax.typeof(y)), str(y.sharding.spec)

    return Script(run)


@program(known=_MESH)
def jit_inside_with_out_shardings():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("rows"))
    inner = jax.jit(lambda x: x @ x, out_shardings=place)
    return Case(lambda x: inner(x) @ x, (normal(64, 64),))
