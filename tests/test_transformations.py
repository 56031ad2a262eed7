"""Calls under JAX's traces and transformations: what `jax.jit` gives, in the budget."""

import copy
import functools
import gc
import pickle
import re
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import assert_same, layers, memory_kinds, tower
from jax.experimental import checkify
from watch import Watch

import jturnip
from jturnip.transformations import Later


pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDTH, LAYERS = 128, 8
MATRIX = WIDTH * WIDTH * 4


def loss(weights: Any, x: Any) -> jax.Array:
    return (tower(x, weights) ** 2).sum()


@pytest.fixture
def weights() -> list[Any]:
    return jturnip.host(layers(LAYERS, WIDTH))


@pytest.fixture
def x() -> jax.Array:
    return jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


def stock(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


# What JAX itself holds while it computes a hessian: the basis of 16 vectors, and the like.
BASIS = 2048


def within(gpu_bytes: int, f: Any, call: Callable[[], Any], *mine: Any) -> Any:
    """The result of a call during which no more was alive on the device."""
    with Watch(mine) as watch:
        result = jax.block_until_ready(call())
    assert watch.peak_bytes <= gpu_bytes
    assert f.last_run is not None
    return result


# A trace that stages


def test_a_call_with_concrete_arguments_is_staged():
    f = jturnip.jit(lambda x: jnp.log(x))
    with pytest.warns(jturnip.InlinedWarning, match="lambda"):
        jaxpr = jax.make_jaxpr(lambda: f(jnp.float32(-1)))()
    assert [e.primitive.name for e in jaxpr.jaxpr.eqns] == ["jit"]


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: jax.jit(lambda y: f(y) + 1)(x),
        lambda f, x: jax.jit(jax.grad(f))(x),
        lambda f, x: jax.jit(f)(x),
        lambda f, x: jax.lax.scan(lambda c, y: (c, f(y)), 0.0, x[None]),
    ],
)
def test_a_warning_has_the_users_line(call: Callable[..., Any]):
    """It was that of a file of JAX where that calls in between."""
    with pytest.warns(jturnip.InlinedWarning) as heard:
        call(jturnip.jit(lambda x: jnp.log(x)), jnp.float32(2))
    assert {w.filename for w in heard} == {__file__}


def test_checkify_sees_into_a_call():
    f = jturnip.jit(lambda x: jnp.log(x))
    with pytest.warns(jturnip.InlinedWarning):
        error, _ = checkify.checkify(f, errors=checkify.float_checks)(jnp.float32(-1))
    assert "nan" in str(error.get())


def test_a_print_in_a_call_is_heard_whenever_the_outer_function_runs(capfd: Any):
    f = jturnip.jit(lambda x: jax.debug.print("x is {}", x))

    @jax.jit
    def outer(y: Any) -> Any:
        f(jnp.float32(2))
        return y

    with pytest.warns(jturnip.InlinedWarning):
        outer(1.0)
    outer(2.0)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("x is 2.0") == 2


def test_host_arrays_under_an_outer_jit(weights: Any, x: Any):
    f = jturnip.jit(loss, 4 * MATRIX)
    with pytest.warns(jturnip.InlinedWarning):
        found = jax.jit(lambda y: f(weights, x) + y)(1.0)
    assert_same(found, loss(stock(weights), x) + 1.0, ulps=64)
    with warnings.catch_warnings():  # it has been said
        warnings.simplefilter("error")
        ys = jnp.arange(2.0)
        found = jax.lax.scan(lambda c, y: (c, f(weights, x) + y), 0.0, ys)[1]
    assert_same(found, loss(stock(weights), x) + jnp.arange(2.0), ulps=64)


def test_shapes_are_evaluated_and_nothing_else(weights: Any, x: Any):
    calls = []

    def fn(weights: Any, x: Any) -> Any:
        jax.debug.callback(lambda: calls.append(1))
        return loss(weights, x)

    f = jturnip.jit(fn, 4 * MATRIX)
    with pytest.warns(jturnip.InlinedWarning):
        shape = jax.eval_shape(lambda: f(weights, x))
    assert (shape.shape, shape.dtype) == ((), np.float32)
    assert f.eval_shape(weights, x).shape == ()
    jax.effects_barrier()
    assert not calls


def test_a_function_in_another_one_says_nothing(weights: Any, x: Any):
    inner = jturnip.jit(loss, 4 * MATRIX)
    outer = jturnip.jit(lambda w, x: inner(w, x) + 1, 4 * MATRIX)
    assert_same(outer(weights, x), loss(stock(weights), x) + 1, ulps=64)


def test_without_jit_host_arrays_are_brought_to_the_device(weights: Any, x: Any):
    f = jturnip.jit(loss, 4 * MATRIX)
    with jax.disable_jit():
        assert_same(f(weights, x), loss(stock(weights), x), ulps=64)


# Transformations that evaluate


TRANSFORMED: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "grad": lambda f: jax.grad(f),
    "value_and_grad": lambda f: jax.value_and_grad(f, argnums=(0, 1)),
    "vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](jnp.float32(2)),
    "jvp": lambda f: lambda w, x: jax.jvp(lambda x: f(w, x), (x,), (x,)),
    "linearize": lambda f: lambda w, x: jax.linearize(lambda x: f(w, x), x)[1](x),
    "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[:, None]),
    "gradients of each": lambda f: (
        lambda w, x: jax.vmap(jax.grad(f, argnums=1), (None, 0))(w, x[:, None])
    ),
    "hessian": lambda f: (
        lambda w, x: jax.hessian(lambda y: f(w, x * y.repeat(8)))(jnp.ones(WIDTH // 8))
    ),
    "checkpoint": lambda f: lambda w, x: jax.checkpoint(f)(w, x),
    "gradient of a checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("strategy", ["auto", "turnip"])
def test_transformations_keep_the_budget(name: str, strategy: str, weights: Any, x: Any):
    gpu_bytes = 6 * MATRIX
    f = jturnip.jit(loss, gpu_bytes, strategy=strategy)
    transformed, given = TRANSFORMED[name], stock(weights)
    expected = transformed(jax.jit(loss))(given, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", jturnip.InlinedWarning)
        allowed = gpu_bytes + BASIS * (name == "hessian")
        found = within(allowed, f, lambda: transformed(f)(weights, x), weights, x)
    assert f.last_run.peak_bytes <= gpu_bytes
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Other sums in another order: of the size of the largest, not of each.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * scale)


def test_gradients_lie_with_their_arguments_and_come_back(weights: Any, x: Any):
    """Some were on the device and some on the host, which no stock operation takes."""
    f = jturnip.jit(loss, 6 * MATRIX)
    gradients, of_x = jax.grad(f, argnums=(0, 1))(weights, x)
    assert set(memory_kinds(gradients)) == {"pinned_host"}
    assert memory_kinds(of_x) == ["device"]
    expected = jax.grad(loss)(stock(weights), x)
    gradients = jturnip.device(gradients)
    assert set(memory_kinds(gradients)) == {"device"}
    assert_same(optax.tree.norm(gradients), optax.tree.norm(expected), ulps=64)


def test_gradients_stay_where_there_is_room(x: Any):
    weights = layers(2, WIDTH)
    f = jturnip.jit(loss, 64 * MATRIX)
    gradients = jax.grad(f)(weights, x)
    assert set(memory_kinds(gradients)) == {"device"}
    updates, _ = optax.adam(1e-3).update(gradients, optax.adam(1e-3).init(weights))
    optax.apply_updates(weights, updates)


def test_gradients_for_which_there_is_no_room_are_refused(x: Any):
    weights = list(map(jnp.asarray, layers(LAYERS, WIDTH)))
    f = jturnip.jit(loss, (LAYERS + 6) * MATRIX)
    with pytest.raises(jturnip.DoesNotFit, match=r"gradients .* jturnip\.host"):
        jax.grad(f)(weights, x)
    assert jax.grad(jturnip.jit(loss, "2MiB"))(weights, x)[0].shape == (WIDTH, WIDTH)


def test_residuals_wait_in_host_memory_where_they_leave_no_room(weights: Any):
    """The forward part fits whole with all of them, the backward part does not."""
    x = jnp.ones((4 * WIDTH, WIDTH)) / WIDTH
    gpu_bytes = 24 * MATRIX
    f = jturnip.jit(loss, gpu_bytes)
    found = within(gpu_bytes, f, lambda: jax.grad(f)(weights, x), weights, x)
    expected = jax.grad(jax.jit(loss))(stock(weights), x)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_what_is_only_asked_for_a_plan_looks_for_no_budget(
    weights: Any, monkeypatch: pytest.MonkeyPatch
):
    """Of where residuals may stay, some leave the backward part no room."""
    asked: list[float | None] = []

    def seconds(later: Later, *given: Any, real: Any = Later.seconds) -> float | None:
        asked.append(real(later, *given))
        return asked[-1]

    monkeypatch.setattr(Later, "seconds", seconds)
    unwanted = lambda *_: pytest.fail("a budget that works was looked for")
    monkeypatch.setattr("jturnip.stages.budgeted.refusal_that_is_true", unwanted)
    f = jturnip.jit(loss, 12 * MATRIX)
    jax.grad(f)(weights, jnp.ones((4 * WIDTH, WIDTH)) / WIDTH)
    assert asked[0] is None
    assert asked[-1] is not None


def test_a_transformed_function_is_compiled_once(weights: Any, x: Any):
    traced = []

    def fn(weights: Any, x: Any) -> Any:
        traced.append(1)
        return loss(weights, x)

    f = jturnip.jit(fn, 6 * MATRIX)
    for _ in range(3):
        jax.grad(f)(weights, x)
    assert len(traced) == 1


def test_integers_have_no_gradient():
    table = jnp.arange(12.0).reshape(4, 3)

    def fn(table: Any, rows: Any) -> Any:
        return table[rows].sum(), rows + 1

    f = jturnip.jit(fn, 1 << 20)
    found = jax.grad(lambda t, r: f(t, r)[0], argnums=(0, 1), allow_int=True)
    expected = jax.grad(lambda t, r: fn(t, r)[0], argnums=(0, 1), allow_int=True)
    rows = jnp.array([0, 2])
    assert_same(found(table, rows)[0], expected(table, rows)[0])
    assert found(table, rows)[1].dtype == jax.dtypes.float0


def test_what_a_transformation_closes_over():
    """The inner function closes over a value that is being differentiated."""

    def outer(wrap: Any) -> Any:
        def fn(w: Any, x: Any) -> Any:
            return wrap(lambda x: jnp.sin(w * x).sum())(x)

        return jax.grad(fn, argnums=(0, 1))

    x = jnp.linspace(0, 1, 8)
    found = outer(lambda fn: jturnip.jit(fn, 1 << 20))(2.0, x)
    assert_same(found, outer(jax.jit)(2.0, x))


def test_an_axis_that_vmap_names():
    fn = lambda x: x - jax.lax.pmean(x, "batch")
    f = jturnip.jit(fn, 1 << 20)
    x = jnp.arange(4.0)
    with pytest.warns(jturnip.InlinedWarning, match="axis"):
        found = jax.vmap(f, axis_name="batch")(x)
    assert_same(found, jax.vmap(jax.jit(fn), axis_name="batch")(x))


@pytest.mark.filterwarnings("ignore::jturnip.InlinedWarning")
def test_the_index_of_an_axis_in_a_loop_that_is_not_batched():
    def fn(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x < jax.lax.axis_index("i"), lambda x: x + 2, x)

    f = jturnip.jit(fn, strategy="turnip")
    found = jax.vmap(lambda _, x: f(x), axis_name="i", in_axes=(0, None))(jnp.ones(4), 0)
    np.testing.assert_array_equal(found, [0, 2, 2, 4])


def test_custom_rules_are_kept():
    @jax.custom_vjp
    def double(x: Any) -> Any:
        return x * 2

    double.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 100,))
    f = jturnip.jit(lambda x: double(x).sum(), 1 << 20)
    assert_same(jax.grad(f)(jnp.ones(3)), jnp.full(3, 100.0, jnp.float32))


def test_shardings_are_kept_under_a_transformation(x: Any):
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    weights = layers(LAYERS, WIDTH)
    f = jturnip.jit(loss, 6 * MATRIX, in_shardings=(host, None))
    found = within(6 * MATRIX, f, lambda: jax.grad(f, argnums=1)(weights, x), x)
    assert_same(found, jax.grad(jax.jit(loss), argnums=1)(weights, x), ulps=4096)


# Arrays in host memory that a function closes over


@pytest.mark.parametrize("strategy", ["auto", "turnip", "whole"])
def test_closed_over_arrays_in_host_memory(strategy: str, weights: Any, x: Any):
    """JAX refuses to multiply by them, which our own advice led to."""
    f = jturnip.jit(lambda x: loss(weights, x), 16 * MATRIX, strategy=strategy)
    assert_same(f(x), loss(stock(weights), x), ulps=64)
    types = {jax.typeof(w).memory_space for w in weights}
    assert types == {jax.memory.Space.Host}


def test_closed_over_arrays_in_host_memory_in_a_tight_budget(weights: Any, x: Any):
    gpu_bytes = 4 * MATRIX
    f = jturnip.jit(lambda x: loss(weights, x), gpu_bytes)
    expected = loss(stock(weights), x)
    found = within(gpu_bytes, f, lambda: f(x), x)
    assert f.last_run.strategy != "whole"
    assert_same(found, expected, ulps=64)
    found = within(gpu_bytes, f, lambda: jax.grad(f)(x), x)
    assert_same(found, jax.grad(jax.jit(loss), argnums=1)(stock(weights), x), ulps=4096)


def test_partial_with_arrays_in_host_memory(weights: Any, x: Any):
    f = jturnip.jit(functools.partial(loss, weights), 4 * MATRIX)
    assert_same(f(x), loss(stock(weights), x), ulps=64)


def test_closed_over_arrays_in_a_loop(weights: Any, x: Any):
    def fn(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ weights[0]), x)

    expected = x
    for _ in range(3):
        expected = jnp.tanh(expected @ stock(weights[0]))
    assert_same(jturnip.jit(fn, 4 * MATRIX)(x), expected, ulps=64)


# As under jax.jit


def test_a_misspelt_keyword():
    with pytest.raises(TypeError, match="gpu_byte"):
        jturnip.jit(lambda x: x, gpu_byte=1)  # pyright: ignore


def test_compiler_options_and_the_device(weights: Any, x: Any):
    options = {"xla_cpu_enable_fast_min_max": True}
    device = jax.devices()[0]
    for strategy in ("whole", "turnip"):
        f = jturnip.jit(loss, strategy=strategy, compiler_options=options, device=device)
        assert_same(f(weights, x), loss(stock(weights), x), ulps=64)
        assert f(weights, x).committed
        f = jturnip.jit(loss, strategy=strategy, compiler_options={"no_such_option": 1})
        with pytest.raises(Exception, match="no_such_option"):
            f(weights, x)
        lowered = jturnip.jit(loss, strategy=strategy).lower(weights, x)
        with pytest.raises(Exception, match="no_such_option"):
            lowered.compile({"no_such_option": 1})
        assert_same(lowered.compile(options)(weights, x), f_of(weights, x), ulps=64)


def f_of(weights: Any, x: Any) -> Any:
    return loss(stock(weights), x)


def test_errors_and_functions_survive_pickling(weights: Any, x: Any):
    cloudpickle = pytest.importorskip("cloudpickle")
    f = jturnip.jit(loss, 5_000)
    with pytest.raises(jturnip.DoesNotFit) as refusal:
        f(weights, x)
    error = pickle.loads(pickle.dumps(refusal.value))
    assert type(error) is jturnip.DoesNotFit
    assert str(error) == str(refusal.value)
    assert (error.needed_bytes, error.gpu_bytes) == (refusal.value.needed_bytes, 5_000)
    f = jturnip.jit(loss, 6 * MATRIX, strategy="turnip")
    expected = f(weights, x)
    for other in (copy.deepcopy(f), cloudpickle.loads(cloudpickle.dumps(f))):
        assert_same(other(weights, x), expected)
        assert other.last_run.strategy == "turnip"


def test_tracebacks_show_the_users_frames():
    """No more frames than under `jax.jit`, whose own this version of JAX may show."""
    code = """
import sys, jax, jax.numpy as jnp, jturnip
jax.config.update("jax_traceback_filtering", "quiet_remove_frames")
def users(x):
    return x @ jnp.ones(3)
jit = jax.jit if sys.argv[1] == "jax" else lambda f: jturnip.jit(f, 10_000)
jit(users)(jnp.ones(2))
"""

    def frames(way: str) -> list[str]:
        command = [sys.executable, "-c", code, way]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return re.findall(r'^  File "(.*)", line \d+, in (.*)$', done.stderr, re.MULTILINE)

    assert frames("jturnip") == frames("jax")
    assert ("<string>", "users") in frames("jax")


def test_the_profiler_names_tasks_and_transfers(weights: Any, x: Any, tmp_path: Path):
    f = jturnip.jit(loss, 4 * MATRIX)
    f(weights, x)
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(f(weights, x))
    (found,) = tmp_path.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(found))
    names = {e.name for plane in data.planes for line in plane.lines for e in line.events}
    # Which of them stay on the device between calls is for the plan to say.
    assert any(re.fullmatch(r"jturnip reload weights\[\d\]", name) for name in names)
    with_lines = re.compile(r"jturnip task \d+ dot_general \(.*\.py:\d+")
    assert any(map(with_lines.match, names))


def test_stages_have_what_those_of_jit_have(weights: Any, x: Any):
    f = jturnip.jit(loss, 4 * MATRIX, donate_argnums=1)
    lowered = f.lower(weights, x)
    with warnings.catch_warnings(action="ignore"):
        stages = jax.jit(loss, donate_argnums=1).lower(stock(weights), x)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        text = lowered.as_text()
    assert text.count("stablehlo.dot_general") == stages.as_text().count("dot_general")
    assert "loc(" in lowered.as_text(debug_info=True)
    assert "HloModule" in lowered.as_text("hlo")
    assert str(lowered.compiler_ir("stablehlo")) == text
    assert lowered.donate_argnums == stages.donate_argnums == (LAYERS,)
    assert lowered.in_avals == stages.in_avals
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        compiled = lowered.compile()
    assert compiled.in_avals == stages.in_avals
    assert compiled.args_info == lowered.args_info
    assert compiled.runtime_executable() is compiled.plan
    with pytest.raises(TypeError, match="compiled with input pytree does not match"):
        compiled(weights)
    with pytest.raises(TypeError, match="Argument types differ from the types"):
        compiled(weights, x[:1])
    with pytest.raises(TypeError, match="Cannot apply JAX transformations"):
        jax.grad(compiled, argnums=1)(weights, x)
    whole = jturnip.jit(loss).lower(weights, x).compile()
    assert "HloModule" in whole.as_text()
    assert whole.runtime_executable() is not None
    assert whole.output_shardings.memory_kind == "device"  # what JAX's own has beside
    with pytest.raises(AttributeError, match="the function is split"):
        _ = compiled.output_shardings
    assert compiled.input_formats[0][1].sharding.memory_kind == "device"


def test_tokens_are_arguments_and_results():
    token = jax.lax.create_token()
    for strategy in ("auto", "turnip"):
        f = jturnip.jit(lambda x, t: (x + 2, jax.lax.after_all(t)), strategy=strategy)
        with pytest.warns(jturnip.InlinedWarning, match="tokens"):
            found, after = f(jnp.ones(3), token)
        np.testing.assert_array_equal(found, [3, 3, 3])
        assert type(after) is type(token)


@pytest.fixture
def no_cycle_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_cycle_collection")
def test_a_closed_over_array_goes_with_the_function():
    giving = lambda x: lambda: x
    for strategy in ("whole", "turnip"):
        x = jnp.ones(10)
        f, held = jturnip.jit(giving(x), strategy=strategy), weakref.ref(x)
        del x
        f()
        assert held() is not None
        del f
        assert held() is None


def test_leaks_are_looked_for_and_not_found(weights: Any, x: Any):
    with jax.checking_leaks():
        jax.grad(jturnip.jit(loss, 6 * MATRIX))(weights, x)
        leaked = []
        with pytest.raises(Exception, match="Leaked"):
            jturnip.jit(lambda x: leaked.append(x) or x)(x)


def test_useless_donations_are_told_of(x: Any):
    f = jturnip.jit(lambda x: x.sum(), 1 << 20, strategy="turnip", donate_argnums=0)
    with pytest.warns(UserWarning, match=r"not usable: float32\[4, 128\]"):
        f(x)


def test_zeros_of_no_type_are_results():
    fn = jax.grad(lambda x, i: (x * i).sum(), argnums=(0, 1), allow_int=True)
    for strategy in ("auto", "turnip"):
        found = jturnip.jit(fn, strategy=strategy)(jnp.ones(3), jnp.arange(3))
        assert found[1].dtype == jax.dtypes.float0
        np.testing.assert_array_equal(found[0], [0, 1, 2])


def test_what_a_part_of_a_function_raises_is_raised_as_it_is():
    foo = jax.extend.core.Primitive("foo")
    foo.def_abstract_eval(lambda x: x)
    with pytest.raises(NotImplementedError, match="'foo'") as error:
        jturnip.jit(foo.bind, strategy="turnip")(jnp.ones(3))
    assert any('"foo" (' in note for note in error.value.__notes__)


def test_gradients_on_the_device_in_the_budget_that_a_refusal_asks_for(x: Any):
    """JAX has the gradients of numpy arrays on the device: residuals make way for them."""
    weights = [np.asarray(w) for w in layers(LAYERS, WIDTH)]
    with pytest.raises(jturnip.DoesNotFit, match="gradients of arguments") as refusal:
        jax.grad(jturnip.jit(loss, 4 * MATRIX))(weights, x)
    asked = refusal.value.needed_bytes
    assert asked < (LAYERS + 2) * MATRIX
    expected = jax.grad(loss)(weights, x)
    for budget in (asked, asked + MATRIX // 2, asked + MATRIX, asked + 2 * MATRIX):
        f = jturnip.jit(loss, budget)
        grads = within(budget, f, lambda f=f: jax.grad(f)(weights, x), x)
        assert memory_kinds(grads) == ["device"] * LAYERS
        assert_same(grads, stock(expected), ulps=64)


def test_residuals_that_only_cycles_hold_are_let_go_of(weights: list[Any], x: jax.Array):
    """Else a next call would be planned anew beside them."""
    f = jturnip.jit(loss, LAYERS * MATRIX // 2)
    jax.grad(f)(weights, x)
    gc.disable()
    try:
        _, pull = jax.vjp(f, weights, x)
        residuals = [weakref.ref(r) for r in jax.tree.leaves(pull) if r is not x]
        cycle: list[Any] = [pull]
        cycle.append(cycle)
        del pull, cycle
        assert any(r() is not None for r in residuals)
        jax.grad(f)(weights, x)
        alive = [r() for r in residuals]
        given = {id(each) for each in weights}
        assert all(a is None or id(a) in given for a in alive)
    finally:
        gc.enable()


def test_residuals_that_nothing_reads_count():
    """JAX hands on what `where` chose from, of which gradients need only which it was."""

    def chosen(weights: Any, x: Any) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return (x**2).sum()

    weights = jturnip.host(layers(4, WIDTH))
    x = jnp.linspace(-1, 1, 4 * WIDTH * WIDTH).reshape(4 * WIDTH, WIDTH)
    gpu_bytes = x.nbytes * 6
    f = jturnip.jit(chosen, gpu_bytes)
    expected = jax.grad(jax.jit(chosen))(stock(weights), x)
    for _ in range(2):
        found = within(gpu_bytes, f, lambda: jax.grad(f)(weights, x), weights, x)
        for a, b in zip(found, expected, strict=True):
            # Sums over 512 rows, in another order.
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.max(np.abs(b)))
