"""How functions are called: trees, static and donated arguments, aliases, methods."""

import collections
import concurrent.futures
import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .registry import Case, Script, area, normal, weights


program = area("calls")


class Layer(NamedTuple):
    weight: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    layers: list[Layer]
    scale: Any
    kind: str = dataclasses.field(default="tanh", metadata={"static": True})


@jax.tree_util.register_pytree_with_keys_class
class Bag:
    """A node of one's own."""

    def __init__(self, first, second):
        self.first, self.second = first, second

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("first"), self.first), (key("second"), self.second)), "a bag"

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def _layers(count):
    return [Layer(w, normal(64, seed=9)) for w in weights(count)]


@program(thorough=True)
def named_tuples_and_dataclasses():
    def fn(model, x):
        for weight, bias in model.layers:
            x = getattr(jnp, model.kind)(x @ weight + bias)
        return dataclasses.replace(model, scale=x.sum()), x * model.scale

    return Case(fn, (Model(_layers(3), 2.0), normal(64, 64)))


@program()
def dictionaries_of_all_kinds():
    def fn(plain, ordered, default):
        total = plain["b"] @ ordered["z"] + default["k"]
        return {"y": total, "x": ordered, "z": default}

    plain = {"b": normal(64, 64), "a": 1}
    ordered = collections.OrderedDict(z=normal(64, 64, seed=1), a=2.0)
    default = collections.defaultdict(float, k=3.0)
    return Case(fn, (plain, ordered, default))


@program()
def nones_and_empty_containers():
    def fn(tree):
        x = tree["x"] @ tree["x"]
        return {"none": None, "empty": (), "list": [x, [None]], "dict": {}}, None, x @ x.T

    return Case(fn, ({"x": normal(64, 64), "none": None, "empty": []},))


@program()
def nodes_of_ones_own():
    def fn(bag):
        return Bag(bag.second @ bag.first, Bag(bag.first.sum(), None))

    return Case(fn, (Bag(normal(64, 64), normal(64, 64, seed=1)),))


@program()
def partial_as_an_argument():
    def fn(f, x):
        return f(x @ x)

    power = jax.tree_util.Partial(jnp.power, jnp.float32(2.0))
    return Case(fn, (power, normal(64, 64) / 64))


@program()
def no_results():
    def run(jit):
        return jit(lambda x: None)(normal(64, 64)) is None

    return Script(run)


@program()
def static_arguments_by_position():
    def fn(x, n, kind, w):
        for _ in range(n):
            x = getattr(jnp, kind)(x @ w)
        return x

    args = (normal(64, 64), 3, "sin", weights(1)[0])
    return Case(fn, args, {"static_argnums": (1, 2)})


@program()
def static_arguments_by_name():
    def run(jit):
        @functools.partial(jit, static_argnames=("axis", "kind"))
        def fn(x, *, axis, kind="sum"):
            return getattr(jnp, kind)(x @ x, axis=axis)

        x = normal(64, 64)
        return fn(x, axis=0), fn(x, axis=1, kind="max"), fn(x, kind="mean", axis=None)

    return Script(run)


@program()
def keywords_and_defaults():
    def run(jit):
        @jit
        def fn(x, y=2.0, *rest, scale=1.0, **more):
            return (x @ x) * y + scale + sum(rest) + more.get("shift", 0.0)

        x = normal(64, 64)
        return fn(x), fn(x, 3), fn(x, 3, 4, scale=5, shift=x), fn(y=1, x=x)

    return Script(run)


@program()
def a_method_of_an_object():
    def run(jit):
        class Scaler:
            def __init__(self, scale):
                self.scale = scale

            @functools.partial(jit, static_argnums=0)
            def __call__(self, x):
                return (x @ x) * self.scale

        x = normal(64, 64)
        return Scaler(2.0)(x), Scaler(3.0)(x)

    return Script(run)


@program()
def arguments_that_are_returned():
    def fn(x, y, n):
        return x, y @ x, y, x, n

    return Case(fn, (normal(64, 64), normal(64, 64, seed=1), 3))


@program()
def nothing_but_arguments_returned():
    return Case(lambda x, y: (y, x, y), (normal(64, 64), normal(64, 64, seed=1)))


@program()
def a_result_returned_twice():
    def fn(x):
        y = x @ x
        return y, [y, y], y.T, y.T

    return Case(fn, (normal(64, 64),))


@program()
def arguments_that_are_not_used():
    def fn(x, unused, tree):
        return x @ tree["used"], jnp.sin(x)

    tree = {"used": normal(64, 64, seed=1), "unused": normal(200, 200)}
    return Case(fn, (normal(64, 64), normal(100, 100), tree))


@program()
def unused_arguments_that_are_kept():
    def fn(x, unused):
        return x @ x, jnp.cos(x)

    return Case(fn, (normal(64, 64), normal(8, 8)), {"keep_unused": True})


@program()
def the_same_array_passed_twice():
    def run(jit):
        x = jnp.asarray(normal(64, 64))
        f = jit(lambda a, b, c: (a @ b + c["k"], a))
        return f(x, x, {"k": x}), x + 0 * f(x, x, {"k": x})[0]

    return Script(run)


@program()
def donated_arguments():
    def run(jit):
        @functools.partial(jit, donate_argnums=0)
        def step(state, x):
            return {"w": state["w"] - 0.1 * (x @ state["w"]), "n": state["n"] + 1}

        state = {"w": jnp.asarray(weights(1)[0]), "n": jnp.int32(0)}
        given = jax.tree.leaves(state)
        for _ in range(3):
            state = step(state, normal(64, 64))
        return state, [leaf.is_deleted() for leaf in given]

    return Script(run)


@program()
def donated_arguments_that_no_result_can_use():
    def run(jit):
        x = jnp.asarray(normal(64, 64))
        y = jit(lambda x: (x @ x).sum(), donate_argnums=0)(x)
        return y

    return Script(_without_warnings(run))


def _without_warnings(run):
    import warnings

    def quiet(jit):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers")
            return run(jit)

    return quiet


@program()
def a_donated_argument_that_is_returned():
    def run(jit):
        x = jnp.asarray(normal(64, 64))
        return jit(lambda x, y: (x, x @ y), donate_argnums=0)(x, normal(64, 64, seed=1))

    return Script(run)


@program()
def calls_with_other_shapes_and_dtypes():
    def run(jit):
        f = jit(lambda x: (x @ x, x.sum()))
        small = normal(32, 32)
        return f(small), f(normal(64, 64)), f(small.astype(np.int32)), f(small)

    return Script(run)


@program()
def python_numbers_and_numpy_numbers():
    def run(jit):
        f = jit(lambda x, y: (x @ x * y, y + 1))
        x = normal(64, 64)
        return (
            f(x, 2),
            f(x, 2.5),
            f(x, True),
            f(x, np.int16(3)),
            f(x, np.float32(2)),
            f(x, 1j),
        )

    return Script(run)


@program()
def weak_types():
    def fn(x, n):
        strong = jnp.asarray(n, jnp.float32)
        return n * 2, x @ x * n, strong + 1, jnp.where(x > 0, 1.0, 2.0), jnp.exp(n)

    return Case(fn, (normal(64, 64), 3.0))


@program()
def weakly_typed_arrays():
    def fn(x, y):
        z = jnp.full((64, 64), 2.0) @ jnp.full((64, 64), 3.0)
        return z, y * 2, y @ x, (y + 1) @ y

    return Case(fn, (normal(64, 64), jnp.broadcast_to(jnp.asarray(2.0), (64, 64)) * 1.5))


@program()
def side_effects_while_tracing():
    def run(jit):
        traces = []

        @jit
        def fn(x):
            traces.append(x.shape)
            return x @ x

        results = [fn(normal(n, n)) for n in (64, 64, 32, 64)]
        return results, traces

    return Script(run)


@program()
def a_decorated_recursion():
    def run(jit):
        @functools.partial(jit, static_argnums=1)
        def power(x, n):
            return x if n == 1 else power(x, n - 1) @ x

        return power(weights(1)[0], 4)

    return Script(run)


@program()
def lower_and_compile():
    def run(jit):
        x, w = normal(64, 64), weights(1)[0]
        lowered = jit(lambda x, w: jnp.tanh(x @ w) @ w).lower(x, w)
        info = lowered.out_info
        return lowered.compile()(x, w), info.shape, str(info.dtype)

    return Script(run)


@program()
def lower_from_shapes():
    def run(jit):
        struct = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        compiled = jit(lambda x, w: jnp.tanh(x @ w) @ w).lower(struct, struct).compile()
        return compiled(normal(64, 64), weights(1)[0])

    return Script(run)


@program()
def the_shapes_of_results():
    def run(jit):
        f = jit(lambda x, n: {"y": x @ x, "n": n})
        shapes = f.eval_shape(normal(64, 64), 3), jax.eval_shape(f, normal(64, 64), 3)
        return jax.tree.map(lambda s: (s.shape, str(s.dtype)), shapes)

    return Script(run, inlined=True)


@program()
def the_name_and_the_docstring():
    def run(jit):
        @jit
        def cubed(x):
            """The third power."""
            return x @ x @ x

        value = cubed(normal(64, 64))
        return value, cubed.__name__, cubed.__doc__, inspect.unwrap(cubed).__name__

    return Script(run)


@program()
def a_cleared_cache():
    def run(jit):
        f = jit(lambda x: x @ x + 1)
        before = f(normal(64, 64))
        f.clear_cache()
        return before, f(normal(64, 64))

    return Script(run)


@program()
def a_partial_and_a_lambda():
    def run(jit):
        f = jit(functools.partial(lambda w, x: jnp.tanh(x @ w), weights(1)[0]))
        return f(normal(64, 64)), f(x=normal(64, 64, seed=1))

    return Script(run)


@program()
def what_a_lowered_function_tells():
    def run(jit):
        lowered = jit(lambda x: x @ x).lower(normal(64, 64))
        names = "args_info as_text compile cost_analysis in_tree out_info out_tree"
        return [hasattr(lowered, name) for name in names.split()]

    return Script(run)


@program()
def what_a_compiled_function_tells():
    def run(jit):
        compiled = jit(lambda x: x @ x).lower(normal(64, 64)).compile()
        names = "as_text cost_analysis in_tree input_shardings memory_analysis out_tree"
        return [hasattr(compiled, name) for name in names.split()]

    return Script(run)


@program()
def a_function_of_jnp_and_a_builtin():
    def run(jit):
        x = normal(64, 64)
        return jit(jnp.matmul)(x, x), jit(sum)([x, x]), jit(jnp.add)(x, 1)

    return Script(run)


@program()
def a_function_wrapped_twice():
    def run(jit):
        return jit(jit(lambda x: x @ x))(normal(64, 64))

    return Script(run)


@program()
def several_threads():
    def run(jit):
        f = jit(lambda x: jnp.tanh(x @ x) @ x)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            return list(pool.map(f, [normal(64, 64, seed=k) for k in range(8)]))

    return Script(run)


@program()
def arrays_of_numpy_of_every_kind():
    def run(jit):
        f = jit(lambda x: (x @ x, x))
        x = normal(128, 128)
        kinds = [x.astype(t) for t in (float, complex, int, np.uint64)]
        return [
            f(x) for x in (*kinds, np.asfortranarray(x), np.broadcast_to(x[0, 0], x.shape))
        ]

    return Script(run)
