"""What jturnip costs beside the work itself: compilations, memory kept, time per call."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, layers, on_device, tower

import jturnip
from jturnip import compat, memory
from jturnip.compiler import executables
from jturnip.frontend.flatten import flatten
from jturnip.frontend.memory_model import Segment
from jturnip.frontend.partition import Partitioner
from jturnip.programs.devices import rates


X = np.ones((128, 128), np.float32)
TIGHT = 350_000


# Executables


@pytest.fixture
def no_executables():
    executables.clear_cache()


def with_noise(x: Any, weights: Any) -> Any:
    key = jax.random.key(0)
    for k, w in enumerate(weights):
        x = jnp.tanh(x @ w + jax.random.normal(jax.random.fold_in(key, k), x.shape))
    return x


def decaying(x: Any, weights: Any) -> Any:
    for k, w in enumerate(weights):
        x = jnp.tanh(x @ w) * 0.99**k
    return x


def powers(x: Any, weights: Any) -> Any:
    for k, w in enumerate(weights):
        x = jnp.abs(x @ w) ** (0.5 + k / 8) / (k + 1) - k
    return x


def decaying_alike(x: Any, weights: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w) * 0.99
    return x


def compiled_for(fn: Callable[..., Any], *args: Any) -> int:
    executables.clear_cache()
    report = jturnip.jit(fn, TIGHT, strategy="turnip").lower(*args).compile().compile_report
    return report.compiled


@pytest.mark.long
def test_layers_that_differ_in_a_number_compile_no_more_than_equal_ones():
    weights = jturnip.host(layers(24))
    alike = compiled_for(decaying_alike, X, weights)
    assert compiled_for(decaying, X, weights) <= alike < 8
    fewer = compiled_for(with_noise, X, weights[:12])
    assert compiled_for(with_noise, X, weights) <= fewer < 12


@pytest.mark.parametrize("fn", [with_noise, decaying, powers])
def test_numbers_that_are_operands_change_no_answer(fn: Callable[..., Any]):
    expected = jax.jit(fn)(X, layers(12))
    f = jturnip.jit(fn, TIGHT, strategy="turnip")
    for _ in range(2):
        found = f(X, jturnip.host(layers(12)))
        assert_same(jax.device_put(found, on_device()), expected)
    assert f.last_run.peak_bytes <= TIGHT


def test_a_number_that_is_the_same_everywhere_stays_in_the_program():
    fn = lambda x, weights: [x := jnp.tanh(x @ w) * 0.5 for w in weights][-1]
    lowered = jturnip.jit(fn, TIGHT, strategy="turnip").lower(X, jturnip.host(layers(8)))
    assert all(numbers == () for numbers in lowered._budgeted.program.split.numbers)


def test_numbers_of_64_bits_pass_whatever_the_setting_is_then():
    def fn(x: Any) -> Any:
        for k in range(6):
            x = jnp.tanh(x @ x) * 0.99**k
        return x

    with jax.enable_x64(True):
        x = jnp.asarray(np.eye(64))
        compiled = jturnip.jit(fn, 150_000, strategy="turnip").lower(x).compile()
        expected = np.asarray(jax.jit(fn)(x))
    np.testing.assert_allclose(np.asarray(compiled(x)), expected, rtol=1e-12)


def test_numbers_pass_where_transfers_are_forbidden():
    weights, x = jturnip.host(layers(8)), jnp.asarray(X)
    f = jturnip.jit(decaying, TIGHT, strategy="turnip")
    expected = f(x, weights)
    with jax.transfer_guard("disallow"):
        found = f(x, weights)
    assert_same(found, expected, ulps=0)


def test_executables_die_with_the_last_program_that_uses_them(no_executables: None):
    f = jturnip.jit(tower, TIGHT)
    f(X, jturnip.host(layers(4)))
    assert len(executables._CACHE) > 0
    again = jturnip.jit(lambda x, weights: tower(x, weights), TIGHT)
    again(X, jturnip.host(layers(4)))
    f.clear_cache()
    del f
    gc.collect()
    assert len(executables._CACHE) > 0
    again.clear_cache()
    gc.collect()
    assert len(executables._CACHE) == 0


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
@pytest.mark.slow
def test_many_shapes_leave_no_more_than_jax_jit():
    """In processes of their own: what else ran would blur how much a heap keeps."""
    program = """
        import gc, os, sys
        import jax, jax.numpy as jnp, numpy as np, jturnip

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        def fn(x, ws):
            for w in ws:
                x = jnp.tanh(x @ w)
            return x

        ours = lambda: jturnip.jit(fn, 60_000, strategy="turnip")
        make = ours if sys.argv[1] == "jturnip" else lambda: jax.jit(fn)

        def shapes(first, count):
            f = make()
            for n in range(first, first + count):
                ws = [np.ones((32, 32), np.float32)] * 4
                jax.block_until_ready(f(np.ones((n, 32), np.float32), ws))
            f.clear_cache()

        shapes(1, 20)
        gc.collect(); jax.clear_caches(); gc.collect()
        before = resident()
        shapes(100, int(sys.argv[2]))
        gc.collect(); jax.clear_caches(); gc.collect()
        print(resident() - before)
    """
    count = 25
    left = {}
    for way in ("jturnip", "jax"):
        command = [sys.executable, "-c", textwrap.dedent(program), way, str(count)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        left[way] = int(done.stdout)
    # A program of ours is several executables, which fragment the heap of LLVM and Python.
    assert left["jturnip"] <= 2 * max(left["jax"], 0) + (24 << 20), left


# What stages and caches keep


def test_stages_do_not_keep_the_arguments():
    weights, x = jturnip.host(layers(4)), jnp.asarray(X)
    alive = [weakref.ref(w) for w in (*weights, x)]
    for budget in (TIGHT, 1 << 30):
        f = jturnip.jit(tower, budget)
        traced = f.trace(x, weights)
        lowered = traced.lower()
        kept = traced, lowered, lowered.compile()
        f(x, weights)
    del weights, x
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5
    del kept


def test_the_signature_that_was_used_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("jturnip.dispatch._SIGNATURES", 3)
    f = jturnip.jit(lambda x: x + 1, 1 << 20)
    traced = []
    real = f._dispatch.trace
    monkeypatch.setattr(f._dispatch, "trace", lambda call: traced.append(1) or real(call))
    for n in (1, 2, 3, 1, 4, 1, 1):
        f(np.ones(n, np.float32))
    assert len(traced) == 4
    f(np.ones(2, np.float32))
    assert len(traced) == 5


# Copies


def test_host_holds_an_array_once():
    """No second copy for a moment: an array of numpy's is copied into what stays."""
    array = np.ones((4096, 1024), np.float32)  # 16 MiB
    peak = 0
    before = _anonymous_bytes()

    def look() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, _anonymous_bytes() - before)

    over = threading.Event()
    thread = threading.Thread(target=look)
    thread.start()
    hosted = [jturnip.host(array) for _ in range(4)]
    over.set()
    thread.join()
    assert peak <= 4 * array.nbytes + array.nbytes // 2
    array[:] = 2
    assert all(float(h[0, 0]) == 1 for h in hosted)


def _anonymous_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def test_arguments_are_put_on_the_device_without_device_put(
    monkeypatch: pytest.MonkeyPatch,
):
    """Which takes longer than all else that a call does with a small array."""
    if compat._batched_copy is None or compat._put is None:
        pytest.skip("this jax has no quick way")
    numpy = [np.ones(64, np.float32) for _ in range(20)]
    hosted = jturnip.host(numpy)
    fn = lambda arrays: sum(a.sum() for a in arrays)
    fs = [jturnip.jit(fn, 1 << 20), jturnip.jit(fn, 100_000, strategy="turnip")]
    expected = float(fs[0](numpy))
    for f in fs:
        _ = f(hosted), f(numpy)
    slow = []
    real = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *a, **k: slow.append(a) or real(*a, **k))
    for f in fs:
        assert float(f(hosted)) == float(f(numpy)) == expected
    assert slow == []


# Time


def test_joining_small_tasks_looks_at_each_equation_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
):
    """Not again at all before it for every neighbour. A task has no more than 500."""

    def fn(x: Any) -> Any:
        for _ in range(1000):
            x = jnp.tanh(x @ x)
        return x

    looked = 0
    grow = Segment.grow

    def counting(self: Any, end: int) -> None:
        nonlocal looked
        looked += end - self._end
        grow(self, end)

    flat = flatten(jax.jit(fn).trace(jax.ShapeDtypeStruct((8, 8), jnp.float32)).jaxpr)
    partitioner = Partitioner(flat, rates(jax.devices()[0]))
    monkeypatch.setattr(Segment, "grow", counting)
    assert len(flat.equations) == 2000
    assert [len(g.equations) for g in partitioner.partition(1 << 20)] == [500] * 4
    assert looked <= 5 * len(flat.equations)


def test_what_a_growing_segment_holds_is_what_it_holds_made_at_once():
    def fn(x: Any, w: Any) -> Any:
        kept = []
        for k in range(12):
            x = jnp.tanh(x @ w) + jnp.sort(x, axis=0) * k
            kept.append(x.sum(0))
        return x, sum(kept), kept[3]

    struct = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    flat = flatten(jax.jit(fn).trace(struct, struct).jaxpr)
    partitioner = Partitioner(flat, rates(jax.devices()[0]))
    end = len(partitioner._order)
    for begin in range(0, end, 3):
        growing = Segment(partitioner._model, begin, begin)
        for upto in range(begin + 1, end + 1):
            growing.grow(upto)
            at_once = Segment(partitioner._model, begin, upto)
            assert (growing.held, growing.crossing) == (at_once.held, at_once.crossing)


def test_a_function_that_surely_fits_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Partitioner, "partition", None)
    f = jturnip.jit(tower, 1 << 30)
    assert_same(f(X, layers(4)), jax.jit(tower)(X, layers(4)))


# Threads


def test_interrupted_runs_leave_no_thread_of_the_link(monkeypatch: pytest.MonkeyPatch):
    link = jturnip.SimulatedLink(1e9, 1e9)
    f, weights = jturnip.jit(tower, TIGHT, link=link), jturnip.host(layers(8))
    expected = f(X, weights)
    before = {t.ident for t in threading.enumerate()}
    transferred, left = memory.transferred, [0]

    def interrupted(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return transferred(*args)

    monkeypatch.setattr(memory, "transferred", interrupted)
    for k in range(1, 7):
        left[0] = k
        with pytest.raises(KeyboardInterrupt):
            f(X, weights)
    monkeypatch.undo()
    assert {t.ident for t in threading.enumerate()} == before
    assert_same(f(X, weights), expected, ulps=0)


@pytest.mark.long
def test_a_call_at_the_end_of_the_process_returns():
    program = """
        import atexit
        import jax, numpy as np
        late = lambda: print("late", float(f(x, weights).sum()))
        atexit.register(late)
        import jturnip

        def fn(x, weights):
            for w in weights:
                x = x @ w
            return x

        x, weights = np.eye(128, dtype=np.float32), [np.eye(128, dtype=np.float32)] * 8
        f = jturnip.jit(fn, 350_000)
        f(x, weights)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "late 128.0"), done.stderr
