"""The budget is what is really alive, call after call, thread beside thread."""

import functools
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import (
    Holdings,
    assert_bitwise,
    assert_same,
    device_bytes,
    layers,
    memory_kinds,
    on_host,
    smallest_budget,
    tower,
    unconstrained_peak,
)

import jturnip
from jturnip import placement, units
from jturnip.compiler import executables
from jturnip.models import llama
from jturnip.placement import Returned
from jturnip.planner.strategies import STRATEGIES
from jturnip.programs import attempts, bounds, planning, tries
from jturnip.stages import budgeted


X = np.ones((128, 128), np.float32)
TIGHT = 350_000  # five matrices of `layers`, and a little more


def backward(x: Any, weights: Any) -> Any:
    """Needs its activations again: some must leave and come back."""
    loss = lambda x, weights: (tower(x, weights) ** 2).mean()
    return jax.value_and_grad(loss, argnums=1)(x, weights)


def while_sampling(
    call: Callable[[], Any], look: Callable[[list[jax.Array]], Any]
) -> tuple[Any, list[Any]]:
    """Calls in this thread, while another one looks at all live arrays over and over."""
    over, samples = threading.Event(), []

    def sample() -> None:
        while not over.is_set():
            samples.append(look(jax.live_arrays()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        return call(), samples
    finally:
        over.set()
        thread.join()


# What is really alive


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_live_device_arrays_never_pass_the_budget(strategy: str):
    # Over this link the transfers take about half a second, so that there is time to look.
    link = jturnip.SimulatedLink(5e6, 5e6)
    weights = jturnip.host(layers(8))
    f = jturnip.jit(backward, TIGHT, strategy=strategy, link=link)
    compiled = f.lower(X, weights).compile()
    assert compiled.plan.d2h_bytes > 0
    gc.collect()
    callers = {id(a) for a in jax.live_arrays()}

    def ours(arrays: list[jax.Array]) -> int:
        return device_bytes([a for a in arrays if id(a) not in callers])

    results, samples = while_sampling(lambda: compiled(X, weights), ours)
    assert len(samples) > 20
    # More than half, or the samples tell nothing.
    assert TIGHT / 2 < max(samples) <= TIGHT
    del results


@pytest.mark.long
def test_the_callers_device_arrays_count_against_the_budget():
    link = jturnip.SimulatedLink(5e6, 5e6)
    x, weights = jnp.asarray(X), jturnip.host(layers(8))
    compiled = jturnip.jit(backward, TIGHT, link=link).lower(x, weights).compile()
    gc.collect()
    others = {id(a) for a in jax.live_arrays()} - {id(x)}

    def all_but_others(arrays: list[jax.Array]) -> int:
        return device_bytes([a for a in arrays if id(a) not in others])

    _, samples = while_sampling(lambda: compiled(x, weights), all_but_others)
    assert x.nbytes < max(samples) <= TIGHT


def test_a_donated_device_array_makes_room_while_the_call_runs():
    link = jturnip.SimulatedLink(5e6, 5e6)
    x, weights = jnp.asarray(X), jturnip.host(layers(8))
    f = jturnip.jit(tower, smallest_budget(tower, X, weights), link=link, donate_argnums=0)
    compiled = f.lower(x, weights).compile()
    _, samples = while_sampling(lambda: compiled(x, weights), lambda _: x.is_deleted())
    assert samples[-2:] == [True, True]
    assert samples.count(True) > samples.count(False)


def test_host_copies_of_numpy_arguments_are_gone_after_the_call():
    f = jturnip.jit(tower, TIGHT)
    result = f(X, layers(8))
    before = Holdings()
    del before.arrays[id(result)]
    for _ in range(3):
        f(X, layers(8))
    assert before.new_arrays(1) == [f"float32[128, 128] in {memory_kinds(result)[0]}"]


# Nothing is left behind


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
@pytest.mark.slow
def test_a_thousand_calls_leave_nothing_behind():
    weights = jturnip.host(layers(2, width=64))
    x = np.ones((64, 64), np.float32)
    f = jturnip.jit(backward, smallest_budget(backward, x, weights), strategy="turnip")
    # Threads start, pools fill and Python's own heap finds its size.
    for _ in range(100):
        f(x, weights)
    assert f.last_run.d2h_bytes > 0
    before, resident = Holdings(), resident_bytes()
    numbers = len(jax.live_arrays())
    for _ in range(1000):
        f(x, weights)
    gc.collect()
    assert before.new_arrays() == []
    assert len(jax.live_arrays()) == numbers
    assert before.new_threads() == []
    # Each call moves some 100 kB. Had each lost as little as one array of 16 KiB, there
    # would be 16 MiB more; the heap's own ups and downs stay well below half of that.
    assert resident_bytes() - resident < 8 * 2**20


def test_calls_over_a_link_leave_no_threads_behind():
    link = jturnip.SimulatedLink(1e9, 1e9)
    f, weights = jturnip.jit(tower, TIGHT, link=link), jturnip.host(layers(8))
    f(X, weights)
    before = Holdings()
    for _ in range(50):
        f(X, weights)
    assert before.new_threads() == []


def test_a_forgotten_function_holds_nothing():
    before = Holdings()
    f, weights = jturnip.jit(tower, TIGHT), jturnip.host(layers(8))
    f(X, weights)
    del f, weights
    assert before.new_arrays() == []


def test_planning_and_compiling_leave_no_arrays():
    weights = jturnip.host(layers(8))
    before = Holdings()
    compiled = jturnip.jit(tower, TIGHT).lower(X, weights).compile()
    assert before.new_arrays() == []
    del compiled


# Threads


@pytest.mark.long
@pytest.mark.parametrize("gpu_bytes", [2**30, TIGHT], ids=["whole", "split"])
def test_threads_may_call_the_same_function_at_once(gpu_bytes: int):
    f = jturnip.jit(backward, gpu_bytes)
    inputs = [(X * k, layers(8, seed=k)) for k in range(4)]
    expected = [jax.jit(backward)(*args) for args in inputs]
    wrong: list[BaseException] = []
    together = threading.Barrier(len(inputs))

    def call(k: int) -> None:
        try:
            together.wait()
            for _ in range(5):
                assert_same(f(*jturnip.host(inputs[k])), expected[k])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(k,)) for k in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_that_call_at_once_compile_once(monkeypatch: pytest.MonkeyPatch):
    plans = []
    make_plan = planning.make_plan
    monkeypatch.setattr(
        planning, "make_plan", lambda *args: plans.append(1) or make_plan(*args)
    )
    weights = jturnip.host(layers(8))
    jturnip.jit(tower, TIGHT)(X, weights)
    once = len(plans)  # for one call, and for calls after that
    f = jturnip.jit(tower, TIGHT)
    threads = [threading.Thread(target=f, args=(X, weights)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(plans) == 2 * once


def test_calls_at_once_share_one_budget():
    link = jturnip.SimulatedLink(2e7, 2e7)
    f, weights = jturnip.jit(tower, TIGHT, link=link), jturnip.host(layers(8))
    f(X, weights)
    gc.collect()
    callers = {id(a) for a in jax.live_arrays()}
    results: list[Any] = []

    def call_twice() -> None:
        threads = [
            threading.Thread(target=lambda: results.append(f(X, weights))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def ours(arrays: list[jax.Array]) -> int:
        return device_bytes([a for a in arrays if id(a) not in callers])

    _, samples = while_sampling(call_twice, ours)
    # The first call's result is the caller's by the time that the second one runs.
    assert max(samples) <= TIGHT + results[0].nbytes


@pytest.mark.long
def test_two_functions_may_run_at_once():
    f, g = jturnip.jit(tower, TIGHT), jturnip.jit(backward, TIGHT)
    weights = jturnip.host(layers(8))
    expected = f(X, weights), g(X, weights)
    wrong: list[BaseException] = []

    def call(fn: Any, result: Any) -> None:
        try:
            for _ in range(10):
                assert_bitwise(fn(X, weights), result)
        except BaseException as error:
            wrong.append(error)

    threads = [
        threading.Thread(target=call, args=pair)
        for pair in zip((f, g), expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Fits or not


def test_what_fits_runs_as_one_executable():
    f = jturnip.jit(backward, unconstrained_peak(backward, X, layers(4)))
    f(X, layers(4))
    plan = f.lower(X, layers(4)).plan
    assert (f.last_run.strategy, plan.strategy) == ("whole", "whole")
    assert 0 < f.last_run.peak_bytes == plan.peak_bytes <= plan.gpu_bytes


def test_what_fits_runs_as_one_executable_with_its_state_on_the_host_too():
    step = lambda weights, x: [
        w - 0.1 * g for w, g in zip(weights, backward(x, weights)[1], strict=True)
    ]
    peak = unconstrained_peak(step, layers(4), X, donate_argnums=0)
    f = jturnip.jit(step, peak, donate_argnums=0)
    f(jturnip.host(layers(4)), X)
    assert f.last_run.strategy == "whole"


def test_one_byte_less_than_the_whole_needs_does_not_run_whole():
    f = jturnip.jit(backward, unconstrained_peak(backward, X, layers(4)) - 1)
    f(X, layers(4))
    assert f.last_run.strategy != "whole"


def test_the_whole_gives_the_bits_of_stock_jit():
    f = jturnip.jit(backward, 2**30)
    assert_bitwise(f(X, layers(4)), jax.jit(backward)(X, layers(4)))


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each whole function that is compiled."""
    seen: list[int] = []

    def whole_bytes(*about: Any, real: Any = bounds.whole_bytes) -> int:
        seen.append(1)
        return real(*about)

    monkeypatch.setattr(budgeted, "whole_bytes", whole_bytes)
    return seen


def test_the_whole_is_not_compiled_where_it_cannot_fit(wholes: list[int]):
    weights = jturnip.host(layers(8))
    jturnip.jit(backward, TIGHT)(X, weights)
    assert wholes == []
    jturnip.jit(backward, 2**30)(X, weights)
    assert wholes != []


# Thirty-two layers compile no more than four


def llama_split(count: int, fn: Callable[..., Any], budget_of: Callable[[int], int]) -> Any:
    """A narrow model with `count` layers, split within a budget for its weights' bytes."""
    config = llama.config("tiny", layers=count, length=8, batch=1, vocabulary=64)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host()),
        llama.abstract_params(config),
    )
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    nbytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    bound = functools.partial(fn, config)
    lowered = jturnip.jit(bound, budget_of(nbytes)).lower(params, tokens)
    return lowered._budgeted.program.split


def llama_gradient(config: Any, params: Any, tokens: Any) -> Any:
    return jax.grad(lambda params: llama.loss(config, params, tokens))(params)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fn", "budget_of"),
    [
        pytest.param(
            llama_gradient,
            lambda nbytes: 150_000,
            marks=pytest.mark.slow,
            id="gradient in the same budget",
        ),
        pytest.param(
            llama.forward, lambda nbytes: nbytes // 4, id="forward in a quarter of weights"
        ),
    ],
)
def test_many_layers_need_no_more_executables_than_few(
    quick_compilation: None, fn: Callable[..., Any], budget_of: Callable[[int], int]
):
    few, many = llama_split(4, fn, budget_of), llama_split(32, fn, budget_of)
    assert len(many.executables) <= len(few.executables)


def test_a_second_function_of_the_same_layers_compiles_nothing(quick_compilation: None):
    # Executables are kept as long as something has them.
    compiled = jturnip.jit(tower, TIGHT).lower(X, layers(8)).compile()
    first = compiled.compile_report
    assert first.compiled + first.reused == first.distinct
    fn = jturnip.jit(lambda x, weights: tower(x, weights), TIGHT)
    again = fn.lower(X, layers(8)).compile().compile_report
    assert (again.compiled, again.reused) == (0, first.distinct)


def test_a_cleared_cache_of_executables_compiles_again(quick_compilation: None):
    jturnip.jit(tower, TIGHT).lower(X, layers(8)).plan.summary()
    executables.clear_cache()
    again = jturnip.jit(tower, TIGHT).lower(X, layers(8)).compile().compile_report
    assert again.compiled == again.distinct


# Hopeless budgets


@pytest.mark.long
def test_nothing_is_cut_for_a_hopeless_budget(monkeypatch: pytest.MonkeyPatch):
    """Pieces for a budget of a byte were so many that to refuse it took minutes."""
    model = llama.config("small", layers=1)
    tokens = jax.ShapeDtypeStruct((2, model.length + 1), jnp.int32)
    step = lambda w, tokens: jax.value_and_grad(llama.loss, argnums=1)(model, w, tokens)
    weights = llama.abstract_params(model)
    seen = []
    real = attempts.streaming

    def streaming(avals: Any, arguments: Any, budget: Any, attempt: int) -> Any:
        seen.append(budget.gpu_bytes)
        return real(avals, arguments, budget, attempt)

    monkeypatch.setattr(attempts, "streaming", streaming)
    with pytest.raises(jturnip.DoesNotFit) as refusal:
        _ = jturnip.jit(step, 1).lower(weights, tokens).plan
    largest = model.width * model.hidden * 4
    assert min(seen) >= largest
    error = refusal.value
    assert error.gpu_bytes == 1
    assert "gpu_bytes is 1 (1 B)" in str(error)
    assert str(error).count("gpu_bytes is") == 1  # it does not speak of another budget
    plan = jturnip.jit(step, error.needed_bytes).lower(weights, tokens).plan
    assert plan.peak_bytes <= error.needed_bytes


def test_very_many_equations_are_the_last_that_is_tried(monkeypatch: pytest.MonkeyPatch):
    """Loops taken apart into twelve thousand took four times as long as cut along axes, to
    plan and to run; where nothing else fits they are planned all the same."""
    monkeypatch.setattr(tries, "_VERY_MANY", 0)
    shares = attempts._SHARES_OF_LOOPS  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(attempts, "_SHARES_OF_LOOPS", ((4.0, 4.0), *shares[1:]))
    tried = []
    real = tries._of_flat  # pyright: ignore[reportPrivateUsage]

    def of_flat(make: Any, flat: Any, setting: Any, attempt: int, to_host: Any) -> Any:
        tried.append((setting.how.axes, setting.how.few, attempt))
        return real(make, flat, setting, attempt, to_host)

    monkeypatch.setattr(tries, "_of_flat", of_flat)

    def repeated(n: Any, x: Any, *weights: Any) -> Any:
        layers = lambda _, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x)
        return jax.lax.fori_loop(0, n, layers, x)

    squares = np.random.default_rng(0).normal(size=(7, 128, 128)).astype(np.float32) / 8
    args = 3, squares[0, :32], *squares[1:]
    f = jturnip.jit(repeated, jturnip.peak_bytes(repeated, *args) // 2)
    assert_same(f(*jturnip.host(args)), jax.jit(repeated)(*args))
    first, *others = dict.fromkeys(tried)
    assert first == (False, True, 0)
    assert (False, False, 1) in others
    assert (False, True, 1) not in others
    assert any(axes for axes, *_ in others[: others.index((False, False, 1))])


WIDE = jax.ShapeDtypeStruct((512, 64), np.float32)
SQUARE = jax.ShapeDtypeStruct((64, 64), np.float32)
STACK = jax.ShapeDtypeStruct((16, 64, 64), np.float32)


def scanned(x: Any, stack: Any) -> Any:
    return jax.lax.scan(lambda h, w: (h @ w, None), x, stack)[0]


@pytest.mark.parametrize(
    ("fn", "args", "whole"),
    [
        (lambda x, w: x @ w, (WIDE, SQUARE), SQUARE),
        (lambda x, w: jax.jit(lambda a: a @ w)(x), (WIDE, SQUARE), SQUARE),
        (lambda x, w: w.T @ x.T, (WIDE, SQUARE), None),
        (scanned, (WIDE, STACK), SQUARE),
        (lambda x, s: jnp.einsum("bij,bjk->bik", s, s) + x[:64], (WIDE, STACK), None),
        (lambda x, s: (x * 2, s.sum(0)), (WIDE, STACK), None),
    ],
)
def test_what_is_read_whole_is_no_more_than_what_is_needed(fn: Any, args: Any, whole: Any):
    least = bounds.read_whole_bytes(jax.jit(fn).trace(*args).jaxpr)
    assert least == (0 if whole is None else whole.size * 4)
    assert least <= smallest_budget(fn, *args)


def test_a_hopeless_budget_is_told_of_even_where_the_host_is_short(
    monkeypatch: pytest.MonkeyPatch,
):
    """To find the smallest budget that would do ended in an error about the host."""

    def fn(x: Any) -> Any:
        layers = [jnp.tanh(x @ x) + i for i in range(16)]
        return functools.reduce(jnp.matmul, reversed(layers))

    needed = smallest_budget(fn, SQUARE)
    monkeypatch.setattr(placement, "host_memory_available", lambda: 1024)
    with pytest.raises(jturnip.HostMemoryError):
        _ = jturnip.jit(fn, needed).lower(SQUARE).plan
    assert smallest_budget(fn, SQUARE) <= needed


def test_a_training_state_of_many_leaves_is_recognised_at_once():
    """Each result was once compared with each argument, and both with all pairs so far."""
    state = {str(k): jax.ShapeDtypeStruct((k % 5 + 1,), jnp.float32) for k in range(20_000)}
    # The state comes back behind something else, and its leaves one by one as well.
    for results in ((jax.ShapeDtypeStruct((), jnp.int32), state), list(state.values())):
        returned = Returned.of(results, ((state,), {}), ())
        first = 1 if isinstance(results, tuple) else 0
        assert len(returned.again) == len(state)
        types = [*jax.tree.leaves(results)], [*jax.tree.leaves(state)]
        assert all(types[0][at].shape == types[1][i].shape for at, i in returned.again)
        assert min(at for at, _ in returned.again) == first


def test_a_few_numbers_that_are_closed_over_are_part_of_the_executable():
    """They would be what XLA's own figure is exceeded by: and what fits, XLA says."""
    x = np.random.default_rng(0).normal(size=4000).astype(np.float32)
    fn = lambda x: jnp.quantile(x, jnp.asarray([0.1, 0.5, 0.9]))
    f = jturnip.jit(fn, jturnip.peak_bytes(fn, x))
    np.testing.assert_array_equal(f(jturnip.host(x)), jax.jit(fn)(x))
    assert f.last_run.strategy == "whole"
    large = jnp.asarray(x)
    g = lambda x: jnp.tanh(x) + large
    needed = jturnip.peak_bytes(g, x) + 2 * units.padded(x.nbytes)
    assert jturnip.jit(g, needed).lower(x).plan.strategy == "whole"
    with pytest.raises(jturnip.DoesNotFit):
        _ = jturnip.jit(g, needed - x.nbytes, strategy="whole").lower(x).plan
