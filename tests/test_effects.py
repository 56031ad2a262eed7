"""Effects happen once, in the order of the program, however the function is cut."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, layers, smallest_budget, unconstrained_peak
from jax import lax
from jax.experimental import checkify, io_callback

import jturnip
from jturnip.native import marks


X = np.random.default_rng(0).normal(size=(16, 128)).astype(np.float32)
WEIGHTS = layers(5)


def effects_of(call: Callable[[], Any], log: list[Any]) -> tuple[Any, list[Any]]:
    log.clear()
    result = jax.block_until_ready(call())
    jax.effects_barrier()
    return result, list(log)


def close(one: list[Any], other: list[Any]) -> bool:
    """The same entries in the same order, numbers to their rounding."""
    return len(one) == len(other) and all(
        a[:-1] == b[:-1] and np.isclose(a[-1], b[-1], rtol=1e-5, atol=1e-5)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("ordered", [True, False])
def test_callbacks_between_tasks(ordered):
    log: list[Any] = []

    def fn(x, weights):
        for k, weight in enumerate(weights):
            x = jnp.tanh(x @ weight)
            note = functools.partial(lambda k, total: log.append((k, float(total))), k)
            io_callback(note, None, x.sum(), ordered=ordered)
        return x

    expected, wanted = effects_of(lambda: jax.jit(fn)(X, WEIGHTS), log)
    f = jturnip.jit(fn, smallest_budget(fn, X, WEIGHTS), strategy="turnip")
    log.clear()
    f.lower(X, WEIGHTS).compile()
    assert log == []  # tasks with effects are not tried out
    for _ in range(3):
        result, seen = effects_of(lambda: f(X, WEIGHTS), log)
        assert_same(result, expected)
        assert close(seen, wanted if ordered else sorted(wanted))


def test_what_a_callback_returns_is_used():
    log: list[Any] = []

    def ask(x):
        log.append(("asked", float(x)))
        return np.float32(x * 2)

    def fn(x, weights):
        for weight in weights:
            scale = io_callback(ask, jax.ShapeDtypeStruct((), np.float32), x[0, 0])
            x = jnp.tanh(x @ weight) * scale
            pure = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            x = x + pure
        return x

    expected, wanted = effects_of(lambda: jax.jit(fn)(X, WEIGHTS), log)
    f = jturnip.jit(fn, smallest_budget(fn, X, WEIGHTS), strategy="turnip")
    result, seen = effects_of(lambda: f(X, WEIGHTS), log)
    assert_same(result, expected)
    assert close(seen, wanted)


def test_printing_in_order(capfd):
    def fn(x, weights):
        for k, weight in enumerate(weights):
            x = jnp.tanh(x @ weight)
            jax.debug.print("layer {} of {}", k, x.shape[1], ordered=True)
        return x

    f = jturnip.jit(fn, smallest_budget(fn, X, WEIGHTS), strategy="turnip")
    jax.block_until_ready(f(X, WEIGHTS))
    jax.effects_barrier()
    lines = [line for line in capfd.readouterr().out.splitlines() if "layer" in line]
    assert lines == [f"layer {k} of 128" for k in range(5)]


@pytest.mark.parametrize("loop", ["scan", "while", "cond"])
def test_effects_inside_loops(loop):
    log: list[Any] = []
    note = lambda k, total: log.append((int(k), float(total)))
    stack = np.stack(WEIGHTS)

    def body(k, x):
        x = jnp.tanh(x @ stack[k] if isinstance(k, int) else x @ jnp.asarray(stack)[k])
        io_callback(note, None, k, x.sum(), ordered=True)
        return x

    def fn(x):
        io_callback(note, None, -1, x.sum(), ordered=True)
        if loop == "scan":
            x, _ = lax.scan(lambda x, k: (body(k, x), None), x, jnp.arange(5))
        elif loop == "while":
            x = lax.fori_loop(0, jnp.int32(5), body, x)
        else:
            x = lax.cond(x[0, 0] > 100, lambda x: x, functools.partial(body, 2), x)
        io_callback(note, None, 9, x.sum(), ordered=True)
        return x

    expected, wanted = effects_of(lambda: jax.jit(fn)(X), log)
    f = jturnip.jit(fn, smallest_budget(fn, X), strategy="turnip")
    result, seen = effects_of(lambda: f(X), log)
    assert_same(result, expected)
    assert close(seen, wanted)


def test_an_effect_whose_value_nobody_needs_still_happens():
    log: list[Any] = []

    def fn(x):
        jax.debug.callback(lambda v: log.append(("seen", float(v))), (x @ x.T).sum())
        return x + 1

    f = jturnip.jit(fn, 1 << 20, strategy="turnip")
    _, seen = effects_of(lambda: f(X), log)
    assert [name for name, _ in seen] == ["seen"]


def test_an_error_in_a_callback_is_raised_and_nothing_is_left(recwarn):
    def fails(x):
        raise RuntimeError("no such file")

    def fn(x, weights):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x + jax.pure_callback(fails, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    f = jturnip.jit(fn, smallest_budget(fn, X, WEIGHTS), strategy="turnip")
    with pytest.raises(jturnip.ExecutionError, match="no such file"):
        f(X, WEIGHTS)


def test_checkify():
    def fn(x, weights):
        for weight in weights:
            x = jnp.tanh(x @ weight)
            checkify.check(jnp.all(x < 0.9), "too large: {}", x.max())
        return x

    checked = checkify.checkify(fn)
    f = jturnip.jit(checked, smallest_budget(checked, X, WEIGHTS), strategy="turnip")
    found, result = f(X, WEIGHTS)
    wanted, expected = jax.jit(checked)(X, WEIGHTS)
    assert_same(result, expected)
    assert found.get() is not None
    assert found.get()[:12] == wanted.get()[:12]


# References.


def counted(x, weights):
    total = jax.new_ref(jnp.zeros((16, 128)))
    for weight in weights:
        x = jnp.tanh(x @ weight)
    total[...] += x

    def add(k, _):
        total[k] = total[k] * 2 + 1

    lax.fori_loop(0, 4, add, None)
    return total[...] @ weights[0]


def two_that_wait_for_each_other(x, weights):
    one, other = jax.new_ref(x), jax.new_ref(x * 2)
    other[...] += one[...] @ weights[0]
    one[...] = jnp.sin(other[...])
    other[...] *= one[...]
    return other[...] @ weights[1], one[...]


def two_apart(x, weights):
    one = jax.new_ref(x)
    one[...] *= 2
    x = one[...]
    for weight in weights:
        x = jnp.tanh(x @ weight)
    other = jax.new_ref(x)
    other[0] = jnp.zeros(128)
    return other[...]


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no public references")
@pytest.mark.parametrize("fn", [counted, two_that_wait_for_each_other, two_apart])
def test_references_inside_a_function(fn):
    f = jturnip.jit(fn, smallest_budget(fn, X, WEIGHTS), strategy="turnip")
    assert_same(f(X, WEIGHTS), jax.jit(fn)(X, WEIGHTS))


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no public references")
def test_references_that_are_apart_are_not_drawn_together():
    assert smallest_budget(two_apart, X, WEIGHTS) < unconstrained_peak(
        lambda x, w: functools.reduce(lambda x, w: jnp.tanh(x @ w), w, x), X, WEIGHTS
    )


# NaNs.


@pytest.mark.parametrize("strategy", ["auto", "turnip"])
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_debugging_of_nans_names_the_line(strategy, kind):
    def fn(x, weights):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        bad = jnp.log(-jnp.abs(x)) if kind == "nan" else x / 0.0  # the culprit
        return bad * 2

    f = jturnip.jit(fn, 1 << 20, strategy=strategy)
    f(X, WEIGHTS)
    with getattr(jax, f"debug_{kind}s")(True):
        with pytest.raises(FloatingPointError, match=rf"{kind}.*test_effects\.py:\d+"):
            f(X, WEIGHTS)
        with pytest.raises(FloatingPointError):
            jax.jit(fn)(X, WEIGHTS)


@pytest.mark.parametrize("strategy", ["auto", "turnip"])
def test_a_nan_that_no_result_has_is_no_error(strategy):
    def fn(x, weights):
        for weight in weights:
            bad = jnp.log(-jnp.abs(x @ weight))
            x = jnp.where(jnp.isnan(bad), jnp.tanh(x @ weight), bad)
        return x

    f = jturnip.jit(fn, 1 << 20, strategy=strategy)
    with jax.debug_nans(True):
        assert_same(f(X, WEIGHTS), jax.jit(fn)(X, WEIGHTS))


# Effects that fail


@pytest.mark.parametrize("budget", [300_000, 1 << 30])
def test_an_ordered_callback_that_raises_spoils_no_later_one(budget: int):
    """JAX keeps the token of a failed call, and hands it to the next."""
    seen: list[float] = []
    fails = [True]

    def note(x: Any) -> None:
        if fails[0]:
            raise ValueError("not now")
        seen.append(float(x))

    def fn(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        io_callback(note, None, x.sum(), ordered=True)
        return x

    weights, x = jturnip.host([np.eye(128, dtype=np.float32)] * 8), jnp.ones((128, 128))
    f = jturnip.jit(fn, budget)
    for _ in range(2):
        fails[0] = True
        with pytest.raises(RuntimeError):
            jax.block_until_ready(f(weights, x))
        fails[0] = False
        seen.clear()
        jax.block_until_ready(f(weights, x))
        stock = jax.jit(lambda x: io_callback(note, None, x, ordered=True))
        stock(1.0)
        jax.effects_barrier()
        assert len(seen) == 2
        assert seen[1] == 1.0


def test_a_task_that_calls_out_is_over_when_its_callback_is():
    """A mark fires when results are written, which a callback without any may outlast: it
    would fail unheard."""

    def fn(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        io_callback(lambda x: None, None, x.sum(), ordered=True)
        return x

    weights, x = jturnip.host([np.eye(128, dtype=np.float32)] * 8), jnp.ones((128, 128))
    split = jturnip.jit(fn, 300_000).lower(weights, x)._budgeted.program.split
    for task, group in zip(split.graph.tasks, split.groups, strict=True):
        names = {split.flat.equations[e].name for e in group.equations}
        marked = split.executables[task.executable].marked
        assert marked == (marks.load() and "io_callback" not in names)


def test_callbacks_that_are_equal_are_called_each_for_itself():
    @dataclasses.dataclass(frozen=True)
    class Added:
        name: str
        rows: np.ndarray = dataclasses.field(compare=False)

        def __call__(self, x: Any) -> Any:
            return np.asarray(x) + self.rows

    like = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    tables = [Added("the same", np.full((64, 64), n, np.float32)) for n in (1, 100)]
    fns = [lambda x, t=t: jax.pure_callback(t, like, x) for t in tables]
    found = [jturnip.jit(fn, "1MiB", strategy="turnip")(jnp.ones((64, 64))) for fn in fns]
    assert [float(each[0, 0]) for each in found] == [2, 101]
