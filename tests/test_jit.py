"""`jturnip.jit` against `jax.jit`: the same calls, the same answers.

Most facts are checked twice: `whole`, where the function fits and is one executable, and
`split`, where a strategy asked for by name takes it apart.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checks import (
    Holdings,
    assert_bitwise,
    assert_same,
    layers,
    memory_kinds,
    on_device,
    smallest_budget,
    tower,
)

import jturnip
from jturnip.compiler import executables
from jturnip.graph.memgraph import OpKind
from jturnip.graph.serialize import memgraph_from_json_dict
from jturnip.planner.verify import verify
from jturnip.programs import planning


pytestmark = pytest.mark.usefixtures("quick_compilation")


Jit = Callable[..., Any]


@pytest.fixture(params=["whole", "split"])
def jit(request: pytest.FixtureRequest) -> Jit:
    """`jturnip.jit` with room for everything, which runs whole or is made to split."""
    strategy = {"whole": "auto", "split": "turnip"}[request.param]
    return functools.partial(jturnip.jit, gpu_bytes="1GiB", strategy=strategy)


# The side of matrices whose products are worth a task each.
LARGE = 192


def split(fn: Callable[..., Any], **keywords: Any) -> Any:
    return jturnip.jit(fn, gpu_bytes="1GiB", strategy="turnip", **keywords)


def squeezed(fn: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """In the smallest budget that plans."""
    return jturnip.jit(
        fn, smallest_budget(fn, *args, **keywords), strategy="turnip", **keywords
    )


def square(side: int = 128, seed: int = 0) -> jax.Array:
    random = np.random.default_rng(seed)
    return jnp.asarray(random.normal(size=(side, side)), jnp.float32)


# Trees and how functions are called


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: Any
    y: Any
    unit: str = dataclasses.field(default="m", metadata={"static": True})


def test_trees_of_every_kind_go_in_and_come_out(jit: Jit):
    def fn(pair, names, nothing):
        total = pair.first + names["a"][0] * names["a"][1].x
        return {"pair": Pair(total, [total * 2, ()]), "point": names["a"][1], "n": nothing}

    args = (Pair(square(), None), {"a": (square(seed=1), Point(2.0, square(seed=2)))}, None)
    assert_same(jit(fn)(*args), jax.jit(fn)(*args))


def test_keywords_may_come_in_any_order(jit: Jit):
    def fn(x, *, scale, shift=1.0):
        return x * scale - shift

    f = jit(fn)
    x = square()
    expected = jax.jit(fn)(x, scale=2.0, shift=3.0)
    assert_same(f(x, scale=2.0, shift=3.0), expected)
    assert_same(f(shift=3.0, scale=2.0, x=x), expected)
    assert_same(f(x, scale=2.0), jax.jit(fn)(x, scale=2.0))


def test_variable_arguments_are_passed_on(jit: Jit):
    def fn(*args, **kwargs):
        return sum(args) + kwargs["a"] - kwargs["b"]

    args, kwargs = (square(), 2.0, square(seed=1)), {"b": 1, "a": square(seed=2)}
    assert_same(jit(fn)(*args, **kwargs), jax.jit(fn)(*args, **kwargs))


@pytest.mark.parametrize("keywords", [{"static_argnums": 1}, {"static_argnames": "times"}])
def test_static_arguments_are_python_values(jit: Jit, keywords: dict[str, Any]):
    def fn(x, times, y):
        for _ in range(times):
            x = x + y
        return x

    x, y = square(), square(seed=1)
    for times in (0, 3):
        expected = jax.jit(fn, **keywords)(x, times, y)
        assert_same(jit(fn, **keywords)(x, times, y), expected)
        assert_same(jit(fn, **keywords)(x, times=times, y=y), expected)


def test_a_static_argument_may_be_counted_from_the_end(jit: Jit):
    def fn(x, times):
        return x * len(times)

    f = jit(fn, static_argnums=-1)
    assert_same(f(square(), "abc"), square() * 3)
    assert_same(f(square(), "ab"), square() * 2)


def test_equal_static_arguments_of_different_types_are_different(jit: Jit):
    def fn(x, factor):
        return x * factor

    f, stock = (j(fn, static_argnums=1) for j in (jit, jax.jit))
    x = jnp.arange(6, dtype=jnp.int32)
    for factor in (1, 1.0, True):
        assert_same(f(x, factor), stock(x, factor))


def test_a_static_argument_that_cannot_be_hashed_is_refused_as_jax_refuses_it(jit: Jit):
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        jit(lambda x, n: x, static_argnums=1)(square(), [1])


def test_what_is_no_array_is_refused_as_jax_refuses_it(jit: Jit):
    with pytest.raises(TypeError, match="as an abstract array"):
        jit(lambda x: x)("text")


def test_a_missing_argument_is_a_type_error(jit: Jit):
    with pytest.raises(TypeError, match="missing"):
        jit(lambda x, y: x + y)(square())


def test_the_functions_own_error_comes_through(jit: Jit):
    def fn(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jit(fn)(square())


def test_a_decorator_without_arguments():
    @jturnip.jit
    def fn(x):
        """Twice."""
        return x * 2

    assert_same(fn(square()), square() * 2)
    assert (fn.__name__, fn.__doc__) == ("fn", "Twice.")


def test_a_decorator_with_arguments():
    @jturnip.jit(gpu_bytes="1MiB", static_argnames="n")
    def fn(x, n):
        return x * n

    assert_same(fn(square(), n=3), square() * 3)


def test_a_decorator_through_partial():
    @functools.partial(jturnip.jit, gpu_bytes="1MiB")
    def fn(x):
        return x * 2

    assert_same(fn(square()), square() * 2)


def test_a_partial_function(jit: Jit):
    fn = functools.partial(lambda scale, x: x * scale, 2.0)
    assert_same(jit(fn)(square()), jax.jit(fn)(square()))


def test_a_method_with_a_static_self():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @functools.partial(jturnip.jit, gpu_bytes="1MiB", static_argnums=0)
        def apply(self, x):
            return x * self.scale

    assert_same(Model(2.0).apply(square()), square() * 2.0)
    assert_same(Model(3.0).apply(square()), square() * 3.0)


def test_a_method_whose_self_is_a_tree():
    @jax.tree_util.register_pytree_node_class
    class Model:
        def __init__(self, weight):
            self.weight = weight

        @jturnip.jit(gpu_bytes="1MiB")
        def apply(self, x):
            return x @ self.weight

        def tree_flatten(self):
            return (self.weight,), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

    assert_same(Model(square()).apply(square(seed=1)), square(seed=1) @ square())


def test_a_bound_method(jit: Jit):
    class Model:
        scale = 2.0

        def apply(self, x):
            return x * self.scale

    assert_same(jit(Model().apply)(square()), square() * 2.0)


# Values


def test_closed_over_arrays_of_jax_and_of_numpy(jit: Jit):
    on_jax, on_numpy = square(seed=1), np.asarray(square(seed=2))
    table = np.arange(3)

    def fn(x):
        return x @ on_jax + on_numpy, table, jnp.asarray(table)[x[0, :2].astype(int) % 3]

    assert_same(jit(fn)(square()), jax.jit(fn)(square()))


def test_literals_as_results(jit: Jit):
    def fn(x):
        return x + 1, 1, 2.5, True, 1j, jnp.float32(3), np.int8(4)

    assert_same(jit(fn)(square()), jax.jit(fn)(square()))


def test_a_function_of_nothing(jit: Jit):
    fn = lambda: (jnp.arange(10), 3)
    assert_same(jit(fn)(), jax.jit(fn)())


def test_a_function_that_returns_nothing(jit: Jit):
    assert jit(lambda x: None)(square()) is None


def test_an_argument_returned_as_it_is(jit: Jit):
    fn = lambda x, y, z: (x + 1, y, z)
    args = (square(), square(seed=1), np.asarray(square(seed=2)))
    assert_same(jit(fn)(*args), jax.jit(fn)(*args))


def test_a_result_does_not_share_the_fate_of_the_argument_it_is(jit: Jit):
    x = square()
    jit(lambda x: (x, x + 1))(x)[0].delete()
    assert not x.is_deleted()


def test_a_host_result_does_not_share_the_fate_of_the_argument_it_is(jit: Jit):
    x = jturnip.host(square())
    jit(lambda x: (x, x + 1))(x)[0].delete()
    assert not x.is_deleted()


def test_a_numpy_argument_changed_later_does_not_change_a_result(jit: Jit):
    x = np.zeros((256, 256), np.float32)
    results = jax.block_until_ready(jit(lambda x: (x, x + 1, x.T))(x))
    x[:] = 7
    assert [float(r.sum()) for r in results] == [0.0, 256.0 * 256.0, 0.0]


def test_the_same_value_returned_twice(jit: Jit):
    def fn(x):
        y = x + 1
        return y, y

    first, second = jit(fn)(square())
    first.delete()
    assert_same(second, square() + 1)


def test_an_argument_returned_twice(jit: Jit):
    fn = lambda x: (x, x)
    first, second = jit(fn)(square())
    first.delete()
    assert_same(second, square())


@pytest.mark.parametrize("keep_unused", [False, True])
def test_arguments_that_nothing_reads(jit: Jit, keep_unused: bool):
    fn = lambda x, unused, n: x * 2
    args = (square(), square(seed=1), 3)
    f = jit(fn, keep_unused=keep_unused)
    assert_same(f(*args), jax.jit(fn, keep_unused=keep_unused)(*args))


def test_arguments_that_only_what_is_never_used_reads(jit: Jit):
    """JAX does not look into such a call: its executable takes the argument."""

    @jax.custom_vjp
    def doubled(x: Any, mask: Any) -> Any:
        return x * 2

    doubled.defvjp(lambda x, mask: (x * 2, mask), lambda mask, g: (g * mask, None))
    x = jnp.ones((64, 64))
    assert_same(jit(doubled)(x, jturnip.host(x)), jax.jit(doubled)(x, x))


def test_arrays_of_no_bytes(jit: Jit):
    fn = lambda x, y: (x * 2, y @ x, jnp.concatenate([y, y]))
    args = (jnp.zeros((0, 3)), jnp.zeros((2, 0)))
    assert_same(jit(fn)(*args), jax.jit(fn)(*args))


def test_only_arrays_of_no_bytes(jit: Jit):
    fn = lambda x: x * 2
    assert_same(jit(fn)(jnp.zeros((0, 3))), jnp.zeros((0, 3)))


@pytest.mark.parametrize(
    "number", [True, 3, 2.5, 1 + 2j, np.float32(1.5), np.int64(3), np.bool_(True)], ids=repr
)
def test_numbers_keep_their_dtypes_and_weak_types(jit: Jit, number: Any):
    fn = lambda n: (n, n + n, n * jnp.ones(3, jnp.bfloat16), n * jnp.ones(3, jnp.int8))
    assert_same(jit(fn)(number), jax.jit(fn)(number))


def test_the_same_number_in_another_type_is_another_signature(jit: Jit):
    f = jit(lambda n: n * 2)
    for number in (1, 1.0, True, 1 + 0j, np.float32(1), np.int32(1), jnp.int8(1)):
        assert_same(f(number), jax.jit(lambda n: n * 2)(number))


def test_weak_types_of_arguments_and_results(jit: Jit):
    fn = lambda x, y: (x, x + y, jnp.full(3, 2.0), x.astype(x.dtype), x * 2)
    weak = jnp.asarray(3.0)
    assert weak.weak_type
    for args in ((weak, weak), (weak, jnp.bfloat16(1)), (square(), weak)):
        assert_same(jit(fn)(*args), jax.jit(fn)(*args))


def test_wide_numpy_arrays_become_what_jax_makes_of_them(jit: Jit):
    fn = lambda x, y: (x * 2, y + 1, x)
    args = (np.linspace(0, 1, 20_000), np.arange(20_000))
    assert_same(jit(fn)(*args), jax.jit(fn)(*args))


DTYPES = [
    *(jnp.bool_, jnp.int8, jnp.uint8, jnp.int16, jnp.int32, jnp.uint32),
    *(jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64, jnp.float8_e4m3fn, jnp.int4),
]


def of_dtype(dtype: Any, side: int = 128) -> jax.Array:
    whole_numbers = jnp.arange(side * side).reshape(side, side) % 7
    return (whole_numbers % 2 if dtype is jnp.bool_ else whole_numbers).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_every_dtype_goes_in_and_comes_out(jit: Jit, dtype: Any):
    fn = lambda x: (x.T, x[::2], x, jnp.where(x == x[0, 0], x, x[::-1]))
    assert_bitwise(jit(fn)(of_dtype(dtype)), jax.jit(fn)(of_dtype(dtype)))


def kept_aside(x: jax.Array, weights: Any, make: Any, use: Any) -> Any:
    """A value that is made first, used last, and in the way in between."""
    kept = make(x)
    return use(kept), tower(x, weights)


@pytest.mark.parametrize("dtype", [*DTYPES, "key"], ids=lambda d: getattr(d, "__name__", d))
def test_every_dtype_survives_the_trip_to_the_host(dtype: Any):
    bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32)
    if dtype == "key":
        make = lambda x: jax.random.wrap_key_data(bits(x).reshape(-1, 2))
        use = lambda keys: jax.random.key_data(keys).T
    else:
        # Of whatever dtype, as many bytes as a weight: the first that are evicted.
        size = jnp.dtype(dtype).itemsize
        rows, copies = min(128, 512 // size), max(1, 4 // size)
        make = lambda x: jnp.tile((bits(x[:rows]) % 7).astype(dtype), copies)
        use = lambda kept: kept.T
    fn = functools.partial(kept_aside, make=make, use=use)
    args = (np.asarray(square()), jturnip.host(layers(4)))
    f = squeezed(fn, *args)
    assert_same(f(*args), jax.jit(fn)(square(), layers(4)))
    assert f.last_run.d2h_bytes > 0


def test_keys_as_arguments_and_results(jit: Jit):
    def fn(key, keys):
        first, second = jax.random.split(key)
        return (
            first,
            keys[::-1],
            jax.random.normal(second, (4,)),
            jax.vmap(jax.random.uniform)(keys),
        )

    args = (jax.random.key(0), jax.random.split(jax.random.key(1), 5))
    assert_same(jit(fn)(*args), jax.jit(fn)(*args))


def test_keys_in_host_memory(jit: Jit):
    fn = lambda keys: (jax.vmap(jax.random.uniform)(keys), keys[::-1])
    keys = jax.random.split(jax.random.key(1), 5)
    assert_same(jit(fn)(jturnip.host(keys)), jax.jit(fn)(keys))


def test_keys_of_another_kind(jit: Jit):
    fn = lambda key: jax.random.split(key, 3)
    key = jax.random.key(0, impl="rbg")
    assert_same(jit(fn)(key), jax.jit(fn)(key))


def test_results_of_uncommitted_arguments_are_uncommitted(jit: Jit):
    x = square()
    assert not x.committed
    assert not jit(lambda x: x + 1)(x).committed


def test_results_of_committed_arguments_are_committed(jit: Jit):
    x = jax.device_put(square(), jax.devices()[0])
    assert jit(lambda x: x + 1)(x).committed


# What functions are made of


def test_custom_derivatives(jit: Jit):
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda x, t: (sine(*x), 2 * t[0]))

    @jax.custom_vjp
    def cosine(x):
        return jnp.cos(x)

    cosine.defvjp(lambda x: (cosine(x), None), lambda _, g: (3 * g,))
    fn = jax.value_and_grad(lambda x: (sine(x) * cosine(x)).sum())
    assert_same(jit(fn)(square()), jax.jit(fn)(square()))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_checkpoint(jit: Jit, policy: Any):
    block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w.T, policy=policy)
    fn = jax.grad(lambda ws, x: block(block(x, ws[0]), ws[1]).sum())
    args = ([square(seed=1), square(seed=2)], square())
    assert_same(jit(fn)(*args), jax.jit(fn)(*args))


def test_nested_jits_are_inlined():
    @jax.jit
    def inner(x):
        return jnp.tanh(x @ x)

    fn = lambda x: inner(inner(x)) + jturnip.jit(inner, 1)(x + 1)
    f, x = split(fn), square(LARGE)
    assert_same(f(x), jax.jit(fn)(x))
    names = [t.name for t in f.lower(x).plan.taskgraph.tasks]
    assert names.count("dot_general") == 3


def loop_fn(x):
    y, sums = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, jnp.stack([x] * 4))
    n, y = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ x), (0, y))
    z = jax.lax.cond(y.sum() > 0, lambda a: a @ a, lambda a: a - 1, y)
    return z, sums, n


def test_loops_and_branches(jit: Jit):
    # Sums of loops grow: a small matrix keeps rounding in what `assert_same` allows.
    x = square(64) / 16
    assert_same(jit(loop_fn)(x), jax.jit(loop_fn)(x))


def test_loops_and_branches_stay_one_task_each():
    plan = split(loop_fn).lower(square(LARGE)).plan
    names = [t.name for t in plan.taskgraph.tasks]
    assert [names.count(n) for n in ("scan", "while", "cond")] == [1, 1, 1]


def test_loops_and_branches_over_closed_over_arrays():
    table = square(64) / 16

    def fn(x):
        y, _ = jax.lax.scan(lambda c, _: (c @ table, None), x, length=3)
        return jax.lax.cond(y[0, 0] > 0, lambda: table, lambda: y)

    x = square(64, seed=1) / 16
    assert_same(split(fn)(x), jax.jit(fn)(x))


def test_sorting_and_indexing(jit: Jit):
    def fn(x, i):
        order = jnp.argsort(x[0])
        return x[order], x.at[i].set(0.0), jax.lax.top_k(x, 3), jnp.cumsum(x, 1)[i]

    args = (square(64), jnp.array([3, 1]))
    assert_same(jit(fn)(*args), jax.jit(fn)(*args))


def test_a_pure_callback(jit: Jit):
    def fn(x):
        twice = jax.pure_callback(
            lambda a: np.asarray(a) * 2, x, x, vmap_method="sequential"
        )
        return twice + 1

    assert_same(jit(fn)(square()), square() * 2 + 1)


# Donation


@pytest.mark.parametrize("keywords", [{"donate_argnums": 0}, {"donate_argnames": "state"}])
def test_a_donated_array_is_deleted_and_others_are_not(jit: Jit, keywords: dict[str, Any]):
    state, x = {"a": square(), "b": square(seed=1)}, square(seed=2)
    fn = lambda state, x: {"a": state["a"] + x, "b": state["b"] * x}
    expected = jax.jit(fn)(state, x)
    assert_same(jit(fn, **keywords)(state, x), expected)
    assert [a.is_deleted() for a in (*state.values(), x)] == [True, True, False]


def test_donated_host_arrays_are_deleted(jit: Jit):
    state = jturnip.host([square(), square(seed=1)])
    jit(lambda state, x: [state[0] + x, state[1] * x], donate_argnums=0)(state, square())
    assert [a.is_deleted() for a in state] == [True, True]


def test_donated_numpy_arrays_are_left_alone(jit: Jit):
    x = np.asarray(square()).copy()
    expected = x.copy()
    assert_same(jit(lambda x: x + 1, donate_argnums=0)(x), square() + 1)
    np.testing.assert_array_equal(x, expected)


def test_a_donated_argument_returned_as_it_is_lives_on_in_the_result(jit: Jit):
    expected = square()
    same, more = jit(lambda x: (x, x + 1), donate_argnums=0)(square())
    assert_same((same, more), (expected, expected + 1))


def test_static_and_donated_arguments_are_counted_together(jit: Jit):
    fn = lambda n, x, m, y: (x * n + m, y)
    keywords = {"static_argnums": (0, 2), "donate_argnums": 1}
    x, y = square(), square(seed=1)
    expected = jax.jit(fn, static_argnums=(0, 2))(2, x, 3, y)
    assert_same(jit(fn, **keywords)(2, x, 3, y), expected)
    assert (x.is_deleted(), y.is_deleted()) == (True, False)


def test_the_same_array_may_be_passed_twice(jit: Jit):
    x = square()
    assert_same(jit(lambda x, y: x @ y)(x, x), jax.jit(lambda x, y: x @ y)(x, x))


# Signatures


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts plans and rounds of compilation."""
    counts = {"plans": 0, "compilations": 0}

    def counted(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return fn(*args, **kwargs)

        return call

    monkeypatch.setattr(planning, "make_plan", counted("plans", planning.make_plan))
    compiling = counted("compilations", executables.compile_groups)
    monkeypatch.setattr(executables, "compile_groups", compiling)
    return counts


def test_a_second_call_neither_plans_nor_compiles(work: dict[str, int]):
    traces = []

    def fn(x):
        traces.append(x)
        return jnp.tanh(x @ x)

    f = split(fn)
    f(square())
    assert work["plans"] == 1
    assert work["compilations"] >= 1
    work.update(plans=0, compilations=0)
    f(square(seed=1))
    assert (work, len(traces)) == ({"plans": 0, "compilations": 0}, 1)


def other_arguments() -> dict[str, Any]:
    return {
        "shape": square(64),
        "dtype": square().astype(jnp.bfloat16),
        "memory": jturnip.host(square()),
        "numpy": np.asarray(square()),
    }


@pytest.mark.parametrize("other", other_arguments())
def test_another_signature_plans_anew(work: dict[str, int], other: str):
    f = split(lambda x: jnp.tanh(x @ x))
    f(square())
    f(other_arguments()[other])
    # What is in host memory is also planned to stay on the device between calls.
    plans = 3 if other == "memory" else 2
    assert work["plans"] == plans
    f(other_arguments()[other])
    f(square())
    assert work["plans"] == plans


def test_another_static_argument_plans_anew(work: dict[str, int]):
    f = split(lambda x, n: x * n, static_argnums=1)
    for n in (1, 2, 1, 2):
        f(square(), n)
    assert work["plans"] == 2


def test_a_cleared_cache_plans_anew(work: dict[str, int]):
    f = split(lambda x: x * 2)
    f(square())
    f.clear_cache()
    assert_same(f(square()), square() * 2)
    assert work["plans"] == 2


def test_double_precision_inside_its_context_only(jit: Jit):
    fn = lambda x, n: (x * n, x.sum(), jnp.arange(3), jnp.ones(2) / 3)
    f, x = jit(fn), np.linspace(0, 1, 10_000).reshape(100, 100)
    narrow = jax.jit(fn)(x, 2)
    assert_same(f(x, 2), narrow)
    with jax.enable_x64(True):
        assert_same(f(x, 2), jax.jit(fn)(x, 2))
        assert f(x, 2)[0].dtype == jnp.float64
    assert_same(f(x, 2), narrow)


def test_double_precision_intermediates_travel():
    with jax.enable_x64(True):
        make, use = (lambda x: x[:64].astype(jnp.float64) / 3), (lambda kept: kept.T)
        fn = functools.partial(kept_aside, make=make, use=use)
        args = (np.asarray(square()), jturnip.host(layers(4)))
        f = squeezed(fn, *args)
        assert_same(f(*args), jax.jit(fn)(square(), layers(4)))
        assert f.last_run.d2h_bytes > 0


# Under JAX's transformations


@pytest.mark.filterwarnings("ignore::jturnip.InlinedWarning")
def test_it_may_be_under_grad_vmap_and_jit(jit: Jit):
    fn = lambda x: jnp.tanh(x @ x).sum()
    f, x = jit(fn), square(32)
    xs = jnp.stack([x, x + 1])
    assert_same(jax.grad(f)(x), jax.grad(jax.jit(fn))(x))
    assert_same(jax.vmap(f)(xs), jax.vmap(jax.jit(fn))(xs))
    assert_same(jax.jit(f)(x), jax.jit(fn)(x))
    assert_same(jax.jvp(f, (x,), (x,)), jax.jvp(jax.jit(fn), (x,), (x,)))
    assert str(jax.make_jaxpr(f)(x)) == str(jax.make_jaxpr(jax.jit(fn))(x))


def test_it_is_inlined_where_only_a_closed_over_value_is_traced(jit: Jit):
    def outer(x):
        return jit(lambda y: (x * y).sum())(jnp.ones(3))

    expected = jax.grad(lambda x: (x * jnp.ones(3)).sum())(2.0)
    assert_same(jax.grad(outer)(2.0), expected)


def test_without_jit_it_runs_as_python(jit: Jit):
    calls = []

    def fn(x):
        calls.append(float(x[0, 0]))
        return x * 2

    f = jit(fn)
    with jax.disable_jit():
        assert_same(f(square()), square() * 2)
        f(square())
    assert len(calls) == 2


# Stages


def test_structs_are_planned_without_allocating():
    fn = lambda x, ws: tower(x, ws)
    structs = (
        jax.ShapeDtypeStruct((128, 128), jnp.float32),
        [jax.ShapeDtypeStruct((128, 128), jnp.float32) for _ in range(6)],
    )
    # Once before, for what JAX itself keeps.
    jturnip.jit(fn, 300_000).lower(*structs).plan.summary()
    jax.clear_caches()
    before = Holdings()
    lowered = jturnip.jit(fn, 310_000).trace(*structs).lower()
    assert 0 < lowered.plan.peak_bytes <= 310_000
    assert before.new_arrays() == []


def test_a_struct_lies_where_its_sharding_says():
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    struct = functools.partial(jax.ShapeDtypeStruct, (128, 128), jnp.float32)
    plan = (
        jturnip.jit(lambda x, y: x @ y, strategy="turnip")
        .lower(struct(sharding=on_device()), struct(sharding=host))
        .plan
    )
    starts = [(b.start.value, b.pinned) for b in plan.taskgraph.buffers[:2]]
    assert starts == [("device", True), ("host", False)]


def test_what_is_compiled_for_structs_takes_arrays(jit: Jit):
    struct = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    compiled = jit(lambda x, y: x @ y).lower(struct, y=struct).compile()
    x = np.asarray(square())
    assert_same(compiled(x, y=x), square() @ square())


def test_stages_tell_what_jax_stages_tell(jit: Jit):
    fn = lambda x, n: {"a": x @ x, "n": n}
    traced, stock = jit(fn).trace(square(), 2), jax.jit(fn).trace(square(), 2)
    assert str(traced.jaxpr) == str(stock.jaxpr)
    shapes = lambda tree: jax.tree.map(lambda o: (o.shape, o.dtype, o.weak_type), tree)
    for stage in (traced, traced.lower(), traced.lower().compile()):
        assert shapes(stage.out_info) == shapes(stock.out_info)
    assert jit(fn).eval_shape(square(), 2) == jax.jit(fn).eval_shape(square(), 2)


def test_a_compiled_function_refuses_other_arguments(jit: Jit):
    compiled = jit(lambda x, y: x + y).lower(square(), 1.0).compile()
    for args in ((square(64), 1.0), (square(), 1), (square(), "a"), (square(),)):
        with pytest.raises(TypeError):
            compiled(*args)


def test_a_compiled_function_takes_only_the_dynamic_arguments(jit: Jit):
    lowered = jit(lambda x, n: x * n, static_argnums=1).lower(square(), 3)
    assert_same(lowered.compile()(square()), square() * 3)


def test_the_compiled_plan_is_the_one_that_runs():
    f = split(tower)
    args = (square(), layers(3))
    compiled = f.lower(*args).compile()
    compiled(*args)
    order = compiled.last_run.order
    moving = [op.id for op in compiled.plan.memgraph.ops if op.kind is not OpKind.DROP]
    assert sorted(order) == moving
    assert compiled.plan.strategy == compiled.last_run.strategy == "turnip"


def test_before_the_first_call_there_is_no_last_run(jit: Jit):
    f = jit(lambda x: x * 2)
    before = f.last_run
    f(square())
    assert before is None
    assert f.last_run.strategy == f.lower(square()).plan.strategy


def test_a_plan_as_json_is_complete_enough_to_verify():
    plan = jturnip.jit(tower, 300_000).lower(np.asarray(square()), layers(6)).plan
    assert plan.strategy != "whole"
    again = plan.to_json_dict()
    graph, memgraph = memgraph_from_json_dict(
        {**again, "gpu_bytes": plan.memgraph.gpu_bytes}
    )
    verify(graph, memgraph)
    assert (graph, memgraph) == (plan.taskgraph, plan.memgraph)


def test_a_plan_read_back_from_json_verifies_in_the_budget_it_names():
    plan = jturnip.jit(tower, 300_000).lower(np.asarray(square()), layers(6)).plan
    graph, memgraph = memgraph_from_json_dict(json.loads(plan.to_json()))
    verify(graph, memgraph)
    assert memgraph.gpu_bytes == 300_000


# Where arrays lie


def test_numpy_arguments_larger_than_the_budget_stream_from_the_host():
    weights = layers(10)
    budget = 5 * weights[0].nbytes
    f = jturnip.jit(tower, budget)
    x = np.asarray(square())
    assert_same(f(x, weights), jax.jit(tower)(x, weights))
    assert f.last_run.h2d_bytes >= sum(w.nbytes for w in weights)
    assert f.last_run.peak_bytes <= budget


def test_many_small_numpy_arguments_stream_from_the_host_too():
    weights = layers(40, width=90)  # 32 kB each, of 1.3 MB
    x = np.asarray(square(90))
    f = jturnip.jit(tower, 300_000)
    assert_same(f(x, weights), jax.jit(tower)(x, weights))
    assert f.last_run.peak_bytes <= 300_000


def test_results_are_on_the_device_where_they_fit():
    weights = jturnip.host(layers(8))
    f = jturnip.jit(tower, 5 * weights[0].nbytes)
    result = f(np.asarray(square()), weights)
    assert f.last_run.strategy != "whole"
    assert memory_kinds(result) == ["device"]


def test_results_that_do_not_fit_are_in_host_memory():
    weights = jturnip.host(layers(8))
    fn = lambda x, ws: [jnp.tanh(x @ w) for w in ws]
    x = np.asarray(square())
    results = jturnip.jit(fn, 5 * weights[0].nbytes)(x, weights)
    assert "pinned_host" in memory_kinds(results)
    assert_same(jax.device_put(results, on_device()), jax.jit(fn)(x, layers(8)))


def test_host_arguments_are_read_where_they_are(jit: Jit):
    x, w = square(), jturnip.host(square(seed=1))
    assert_same(jit(jnp.matmul)(x, w), jax.jit(jnp.matmul)(x, square(seed=1)))
    assert memory_kinds(w) == ["pinned_host"]
    assert not w.is_deleted()


def test_a_donated_host_state_stays_on_the_host_step_after_step(jit: Jit):
    fn = lambda state, x: ([s - 0.1 * (s @ x) for s in state], state[0].sum())
    f, x = jit(fn, donate_argnums=0), square()
    state, expected = jturnip.host(layers(3)), layers(3)
    for _ in range(3):
        state, total = f(state, x)
        expected, expected_total = jax.jit(fn)(expected, x)
        assert memory_kinds((state, total)) == ["pinned_host"] * 3 + ["device"]
        assert_same((state, total), (expected, expected_total))


def test_a_donated_device_state_stays_on_the_device(jit: Jit):
    f = jit(lambda state: [s * 2 for s in state], donate_argnums=0)
    state = [square(), square(seed=1)]
    for _ in range(2):
        state = f(state)
    assert memory_kinds(state) == ["device", "device"]


def test_host_copies_share_nothing_with_what_was_given():
    x = np.zeros((100, 100), np.float32)
    copied = jturnip.host({"x": x, "n": 3})
    x[:] = 1
    assert memory_kinds(copied) == ["pinned_host", "pinned_host"]
    assert float(jnp.sum(jax.device_put(copied["x"], on_device()))) == 0.0


def test_what_else_a_module_has_stays_as_it_is():
    """A module of equinox has its activation function among its leaves."""
    tree = {"w": np.ones(3, np.float32), "name": "adam", "act": jnp.tanh}
    hosted = jturnip.host(tree)
    assert hosted["name"] == "adam"
    assert hosted["act"] is jnp.tanh
    assert memory_kinds([hosted["w"]]) == ["pinned_host"]
    there = jturnip.device(hosted)
    assert there["act"] is jnp.tanh
    assert memory_kinds([there["w"]]) == ["device"]


def test_a_host_copy_of_a_host_array_is_a_copy():
    first = jturnip.host(square())
    second = jturnip.host(first)
    first.delete()
    assert_same(second, square())


def test_a_simulated_link_changes_no_result():
    link = jturnip.SimulatedLink(1e9, 1e9, jitter=0.5, seed=3)
    args = (np.asarray(square()), jturnip.host(layers(5)))
    f = jturnip.jit(tower, 300_000, link=link)
    assert_same(f(*args), jax.jit(tower)(square(), layers(5)))


@pytest.mark.filterwarnings("ignore::jturnip.InlinedWarning")
def test_export_of_and_through_a_function():
    fn = jturnip.jit(lambda x: jnp.tanh(x @ x).sum(), "1MiB")
    x = jnp.linspace(0.0, 1.0, 64 * 64).reshape(64, 64)
    for exported in (jax.export.export(fn)(x), jax.export.export(jax.jit(fn))(x)):
        assert_same(exported.call(x), fn(x))


@pytest.mark.parametrize("strategy", ["turnip", "whole"])
def test_what_stages_tell(strategy):
    x = jnp.ones((64, 64))
    lowered = jturnip.jit(lambda x, *, y: {"a": x @ y}, "1MiB", strategy=strategy).lower(
        x, y=x
    )
    compiled = lowered.compile()
    stock = jax.jit(lambda x, *, y: {"a": x @ y}).lower(x, y=x)
    for stage, other in ((lowered, stock), (compiled, stock.compile())):
        assert stage.in_tree == other.in_tree
        assert stage.out_tree == other.out_tree
        assert stage.cost_analysis()["flops"] > 64**3
    assert lowered.args_info[1]["y"].shape == (64, 64)
    assert compiled.input_shardings[1]["y"].memory_kind == "device"


def test_a_callable_object_hides_nothing():
    class Scaled:
        def __init__(self) -> None:
            self._transform = self.lower = np.full(3, 2.0, np.float32)
            self.scale = 3

        def __call__(self, x: Any) -> Any:
            return jnp.sum(x * self._transform)

    f = jturnip.jit(Scaled(), "1MiB")
    assert f.scale == 3
    np.testing.assert_array_equal(jax.grad(f)(np.ones(3, np.float32)), [2, 2, 2])
    assert f.lower(np.ones(3, np.float32)).plan.strategy == "whole"


def test_a_number_may_be_donated_in_the_place_of_an_array_in_host_memory():
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    options = {"in_shardings": (host, host), "donate_argnums": (0, 1)}
    f = jturnip.jit(lambda x, s: (x * s, s + 1), "1MiB", **options)
    product, more = f(np.ones(8, np.float32), 2.0)
    assert (float(np.sum(product)), float(more)) == (16, 3)
