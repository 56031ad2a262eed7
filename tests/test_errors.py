"""Bad input gets a clear error; no byte is lost by it, and the next call works."""

import dis
import functools
import logging
import math
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import Holdings, assert_same, layers, memory_kinds, tower

import jturnip
from jturnip import placement
from jturnip.runtime.engines import DeviceEngines


HERE = Path(__file__).name
X = np.ones((128, 128), np.float32)
# Five matrices of `layers`, and a little more: too few for eight of them at once.
TIGHT = 350_000
# Too few for any of them, or for parts of them.
TINY = 5_000


@pytest.fixture(autouse=True)
def nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After whatever a test does, what jturnip held is free."""
    # JAX logs a failing callback's traceback, and pytest keeps all that is logged.
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)
    before = Holdings()
    yield
    assert before.new_arrays() == []
    assert before.new_threads() == []


def line_of(fn: Callable[..., Any], text: str) -> str:
    """This file and the line of `fn` that holds `text`, as messages name them."""
    code = fn.__code__
    lines = Path(code.co_filename).read_text(encoding="utf-8").splitlines()
    first = code.co_firstlineno - 1
    offset = next(k for k, line in enumerate(lines[first:]) if text in line)
    return f"{HERE}:{first + offset + 1}"


# Budgets


@pytest.mark.parametrize(
    "gpu_bytes",
    ["8 gigs", "", "GiB", "-1GiB", "nan", "1e400", -1, 0, 0.5, float("nan"), float("inf")],
)
def test_a_budget_that_is_no_size_is_refused(gpu_bytes: Any):
    with pytest.raises(jturnip.BudgetError, match="is not a size") as refusal:
        jturnip.jit(tower, gpu_bytes=gpu_bytes)
    assert repr(gpu_bytes) in str(refusal.value)
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize("gpu_bytes", [True, type(None), [8], b"8GiB", 8j], ids=repr)
def test_a_budget_of_the_wrong_type_is_refused_with_its_type(gpu_bytes: Any):
    with pytest.raises(jturnip.BudgetError, match=f"a {type(gpu_bytes).__name__}"):
        jturnip.jit(tower, gpu_bytes=gpu_bytes)


@pytest.mark.parametrize(
    "gpu_bytes", [2**20, "1MiB", "1024 KiB", 1048576.0, np.int64(2**20)]
)
def test_a_size_may_be_written_in_many_ways(gpu_bytes: Any):
    assert jturnip.jit(tower, gpu_bytes).lower(X, layers(1)).plan.gpu_bytes == 2**20


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    y = jnp.tanh(x)
    return y @ w  # the largest


def refusal_of(
    fn: Callable[..., Any], gpu_bytes: int, *args: Any, **keywords: Any
) -> jturnip.DoesNotFit:
    with pytest.raises(jturnip.DoesNotFit) as refusal:
        jturnip.jit(fn, gpu_bytes, **keywords)(*args)
    return refusal.value


def test_a_budget_below_one_task_names_the_task_and_its_line():
    message = str(refusal_of(product, TINY, X, jturnip.host(X)))
    assert '"dot_general"' in message
    assert line_of(product, "# the largest") in message


def test_a_budget_below_what_is_ours_says_so():
    error = refusal_of(lambda x: jnp.tanh(x) + 1, 1, jturnip.host(jnp.ones(8)))
    assert "4096 B are jturnip's own; gpu_bytes is 1 (1 B)" in str(error)
    assert "takes 0 B" not in str(error)


def test_a_budget_below_one_task_tells_the_bytes():
    error = refusal_of(product, TINY, X, jturnip.host(X))
    # Two operands and a result of 64 KiB; a little more for our own bookkeeping.
    assert "needs 192 KiB at once" in str(error)
    assert f"gpu_bytes is {TINY} (5000 B)" in str(error)
    assert str(error.needed_bytes) in str(error)
    assert error.gpu_bytes == TINY


def test_what_cannot_be_done_in_parts_is_named():
    def values(x):
        return jnp.linalg.eigvalsh(x)  # whole

    refusal = refusal_of(values, 40_000, jturnip.host(X))
    message, line = str(refusal), line_of(values, "# whole")
    assert refusal.task == "eigh"
    assert pickle.loads(pickle.dumps(refusal)).task == refusal.task
    assert refusal.beside(1000).task == refusal.task
    assert "has no axis along which to do it in parts" in message
    assert message.index("has no axis") > message.index(line)
    # Where all can be done in parts, it says so: in tiles, too.
    factor = lambda x: jax.lax.linalg.cholesky(x, symmetrize_input=False)
    message = str(refusal_of(factor, 5_000, jturnip.host(X)))
    assert 'In parts along its axes (of 128, 128) "cholesky"' in message
    message = str(refusal_of(lambda x: x @ x, 6_000, jturnip.host(X)))
    assert 'In parts along its axes (of 128, 128, 128) "dot_general"' in message


@pytest.mark.parametrize("hosted", [True, False])
def test_the_smallest_budget_that_is_named_plans_and_runs(hosted: bool):
    args = (jnp.asarray(X), list(map(jnp.asarray, layers(4))))
    args = jturnip.host(args) if hosted else args
    error = refusal_of(tower, TINY, *args)
    f = jturnip.jit(tower, error.needed_bytes)
    assert_same(f(*args), jax.jit(tower)(X, layers(4)))
    assert f.last_run.peak_bytes <= error.needed_bytes


def test_the_smallest_budget_counts_the_workspace_of_a_task():
    # A sort needs memory of its own beside what it reads and writes.
    fn = lambda x, y: (jnp.sort(x @ y, axis=0), jnp.argsort(x, axis=1).T)
    args = jturnip.host((X, X.T))
    error = refusal_of(fn, 1000, *args)
    assert_same(jturnip.jit(fn, error.needed_bytes)(*args), jax.jit(fn)(X, X.T))


def test_a_line_inside_jax_is_told_as_the_users_line_that_called_it():
    def fn(x):
        return jax.nn.softmax(x, axis=0)  # here

    message = str(refusal_of(fn, 1000, jturnip.host(X)))
    assert line_of(fn, "# here") in message


def test_device_arguments_larger_than_the_budget_are_refused_with_their_bytes():
    args = (jnp.asarray(X), list(map(jnp.asarray, layers(4))))
    message = str(refusal_of(tower, 200_000, *args))
    assert "jturnip.host" in message
    assert "320 KiB" in message
    assert "195 KiB" in message


def test_arguments_that_nothing_reads_are_the_callers_matter():
    """As under `jax.jit`, which makes no parameters of them unless asked to."""
    fn = lambda x, unused: x + 1
    args = (jnp.ones(4), jnp.asarray(X))
    for strategy in ("auto", "turnip"):
        jturnip.jit(fn, 30_000, strategy=strategy)(*args)
    refusal = refusal_of(fn, 30_000, *args, strategy="whole", keep_unused=True)
    assert re.search(r"64(\.\d)? KiB", str(refusal))


def test_a_refused_call_leaves_donated_arguments_alone():
    x = jnp.asarray(X)
    with pytest.raises(jturnip.DoesNotFit):
        jturnip.jit(lambda x: x @ x, 1000, donate_argnums=0)(x)
    assert not x.is_deleted()


def test_a_whole_function_that_does_not_fit_is_refused_with_its_bytes():
    with pytest.raises(jturnip.DoesNotFit, match="the whole function needs 256 KiB"):
        jturnip.jit(product, 1000, strategy="whole")(X, X)


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'fastest' is not known; choose one of auto"):
        jturnip.jit(tower, strategy="fastest")


def test_a_link_without_a_rate_is_refused():
    with pytest.raises(ValueError, match="d2h_bytes_per_second=0 must be positive"):
        jturnip.SimulatedLink(1e9, 0)


# Arguments


@pytest.fixture(params=["whole", "split"])
def gpu_bytes(request: pytest.FixtureRequest) -> int:
    return {"whole": 2**30, "split": TIGHT}[request.param]


def test_an_array_that_was_donated_before_is_named(gpu_bytes: int):
    f = jturnip.jit(tower, gpu_bytes, donate_argnums=0)
    x, weights = jnp.asarray(X), jturnip.host(layers(8))
    f(x, weights)
    with pytest.raises(jturnip.ArgumentError, match=r"argument x, float32\[128, 128"):
        f(x, weights)
    assert_same(f(jnp.asarray(X), weights), jax.jit(tower)(X, layers(8)))


def test_an_array_that_was_deleted_is_named_by_its_path(gpu_bytes: int):
    weights: list[Any] = jturnip.host(layers(8))
    weights[3].delete()
    f = jturnip.jit(tower, gpu_bytes)
    total = lambda x, weights: jnp.sum(f(x, weights))
    for call in (f, jax.grad(total), lambda x, w: jax.vmap(f, (0, None))(x[None], w)):
        with pytest.raises(jturnip.ArgumentError, match=r"argument weights\[3\]"):
            call(jnp.asarray(X), weights)


def test_a_compiled_function_names_deleted_arrays_too(gpu_bytes: int):
    x, weights = jnp.asarray(X), jturnip.host(layers(8))
    compiled = jturnip.jit(tower, gpu_bytes, donate_argnums=0).lower(x, weights).compile()
    compiled(x, weights)
    with pytest.raises(jturnip.ArgumentError, match="argument x"):
        compiled(x, weights)


def test_the_same_array_given_and_kept_is_refused_or_right(gpu_bytes: int):
    # jax.jit refuses to donate a buffer that is also another argument.
    x = jnp.asarray(X)
    f = jturnip.jit(lambda x, y: x + y, gpu_bytes, donate_argnums=0)
    try:
        result = f(x, x)
    except (ValueError, RuntimeError):
        assert_same(f(jnp.asarray(X), jnp.asarray(X)), jnp.asarray(X) * 2)
    else:
        assert_same(result, jnp.asarray(X) * 2)


def in_a_process_with_two_devices(code: str) -> None:
    header = """
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax, jax.numpy as jnp, jturnip, pytest
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        one, two = jax.devices()
    """
    program = textwrap.dedent(header) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_arrays_of_several_devices_are_refused_plainly():
    in_a_process_with_two_devices(
        """
        spread = jax.device_put(
            jnp.ones((4, 4)), NamedSharding(Mesh(jax.devices(), "d"), PartitionSpec("d"))
        )
        f = jturnip.jit(lambda x, y: x + y, "1MiB")
        with pytest.raises(jturnip.UnsupportedError, match="spread over 2 devices"):
            f(spread, 1.0)
        with pytest.raises(jturnip.UnsupportedError, match="spread over 2 devices"):
            jturnip.host(spread)
        with pytest.raises(jturnip.UnsupportedError, match="lie on different devices"):
            f(jax.device_put(1.0, one), jax.device_put(1.0, two))
        assert float(f(1.0, 2.0)) == 3.0
        """
    )


@pytest.mark.long
def test_the_device_of_the_arguments_is_the_device_of_the_results():
    in_a_process_with_two_devices(
        """
        for keywords in ({"strategy": "turnip"}, {}):
            f = jturnip.jit(lambda x, y: jnp.tanh(x @ y), "1MiB", **keywords)
            x = jnp.ones((128, 128))
            assert f(jax.device_put(x, two), x).devices() == {two}
            assert f(jax.device_put(x, one), x).devices() == {one}
            with jax.default_device(two):
                assert f(jnp.ones((128, 128)), 1 * jnp.ones((128, 128))).devices() == {two}
            assert f(x, jturnip.host(jax.device_put(x, two))).devices() == {two}
        """
    )


# Functions


def test_a_function_with_effects_runs_whole_where_it_fits(
    capfd: pytest.CaptureFixture[str],
):
    def fn(x):
        jax.debug.print("sum {}", x.sum())
        return x + 1

    f = jturnip.jit(fn, "1MiB")
    assert_same(f(X), jnp.asarray(X) + 1)
    jax.effects_barrier()
    assert f.last_run.strategy == "whole"
    assert "sum 16384.0" in capfd.readouterr().out


@pytest.mark.long
def test_a_value_put_on_another_device_is_refused_with_its_line():
    in_a_process_with_two_devices(
        """
        def fn(x):
            there = jax.device_put(x @ x, two)
            return jax.device_put(there, one) + 1

        x = jax.device_put(jnp.ones((128, 128)), one)
        with pytest.raises(jturnip.UnsupportedError, match="(?s)device_put.*fn.*another"):
            jturnip.jit(fn, "1MiB", strategy="turnip")(x)
        """
    )


# Host memory


def test_a_host_that_cannot_hold_what_must_leave_is_told(monkeypatch: pytest.MonkeyPatch):
    def fn(x, weights):
        return [jnp.tanh(x @ w) for w in weights]

    args = (X, jturnip.host(layers(8)))
    f = jturnip.jit(fn, TIGHT)
    monkeypatch.setattr(placement, "host_memory_available", lambda: 1000)
    with pytest.raises(
        jturnip.HostMemoryError, match=r"available is 1000 B.*Raise gpu_bytes"
    ):
        f(*args)
    monkeypatch.undo()
    assert_same([numpy(r) for r in f(*args)], [numpy(r) for r in jax.jit(fn)(X, layers(8))])


def numpy(array: Any) -> jax.Array:
    return jnp.asarray(np.asarray(array))


# While it runs


def failing_on(value: float) -> Callable[..., Any]:
    def check(x: np.ndarray) -> np.ndarray:
        if x[0, 0] == value:
            raise ValueError("seven is not allowed")
        return np.asarray(x)

    def fn(x, weights):
        y = tower(x, weights)
        z = jax.pure_callback(check, x, x)  # the callback
        return y + tower(z, weights[::-1])

    return fn


def test_a_task_that_fails_is_named_with_its_line(gpu_bytes: int):
    if gpu_bytes > TIGHT:
        pytest.skip("a whole executable raises what jax.jit raises")
    fn = failing_on(7.0)
    f, weights = jturnip.jit(fn, gpu_bytes), jturnip.host(layers(8))
    with pytest.raises(jturnip.ExecutionError) as failure:
        f(X * 7, weights)
    message = str(failure.value)
    assert '"pure_callback"' in message
    assert line_of(fn, "# the callback") in message
    assert "seven is not allowed" in message
    assert failure.value.__cause__ is not None


class Failed:
    """An array that could not be computed."""

    def is_deleted(self) -> bool:
        return False

    def block_until_ready(self) -> None:
        raise ValueError("seven is not allowed")


def test_the_first_that_failed_is_named_whichever_is_heard_of_first():
    """An offload of what a task failed to give was heard of before the task, on a busy
    machine."""
    steps = [(), (0, 1)], [(1,), (2,)], [(2,), (3,)]
    engines: Any = object.__new__(DeviceEngines)
    engines.arrays = [jnp.ones(2), Failed(), Failed(), Failed()]
    engines._program = types.SimpleNamespace(
        steps=[types.SimpleNamespace(reads=reads, writes=writes) for reads, writes in steps]
    )
    error = ValueError("copied")
    op, cause = engines._cause(2, error)
    assert op == 0
    assert "seven" in str(cause)
    engines.arrays[1] = None  # dropped: what is there still tells as much as it can
    assert engines._cause(2, error)[0] == 1
    engines.arrays[2] = jnp.ones(2)
    assert engines._cause(2, error) == (2, error)


def test_after_a_failure_the_next_call_works(gpu_bytes: int):
    fn = failing_on(7.0)
    f, weights = jturnip.jit(fn, gpu_bytes), jturnip.host(layers(8))
    f(X, weights)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            jax.block_until_ready(f(X * 7, weights))
        assert_same(f(X, weights), jax.jit(fn)(X, layers(8)))


def test_after_a_failure_nothing_is_held(gpu_bytes: int):
    f, weights = jturnip.jit(failing_on(7.0), gpu_bytes), jturnip.host(layers(8))
    f(X, weights)
    before = Holdings()
    with pytest.raises(RuntimeError):
        jax.block_until_ready(f(X * 7, weights))
    assert before.new_arrays() == []
    assert before.new_threads() == []


def test_a_failure_leaves_the_callers_arguments_alone():
    f, weights = jturnip.jit(failing_on(7.0), TIGHT), jturnip.host(layers(8))
    with pytest.raises(jturnip.ExecutionError):
        f(X * 7, weights)
    assert memory_kinds(weights) == ["pinned_host"] * 8
    assert_same([numpy(w) for w in weights], [jnp.asarray(w) for w in layers(8)])


def test_the_last_run_stays_that_of_the_last_call_that_worked():
    f, weights = jturnip.jit(failing_on(7.0), TIGHT), jturnip.host(layers(8))
    f(X, weights)
    report = f.last_run
    with pytest.raises(jturnip.ExecutionError):
        f(X * 7, weights)
    assert f.last_run is report


def test_an_error_of_the_loop_itself_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    f, weights = jturnip.jit(tower, TIGHT), jturnip.host(layers(8))
    f(X, weights)
    before = Holdings()
    for patience in range(4):
        waits = iter(range(100))
        real = DeviceEngines.wait

        def wait(self: Any, few: int, waits=waits, patience=patience, real=real) -> Any:
            if next(waits) == patience:
                raise KeyboardInterrupt
            return real(self, few)

        with monkeypatch.context() as patch:
            patch.setattr(DeviceEngines, "wait", wait)
            with pytest.raises(KeyboardInterrupt):
                f(X, weights)
        assert before.new_arrays() == []
        assert_same(f(X, weights), jax.jit(tower)(X, layers(8)))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
@pytest.mark.parametrize("linked", [True, False], ids=["link", "no link"])
def test_ctrl_c_in_the_middle_of_a_run(linked: bool):
    # Over this link the weights take three seconds; without one the loop takes some
    # milliseconds, and the signal comes wherever it comes.
    link = jturnip.SimulatedLink(2e5, 2e5) if linked else None
    slow = jturnip.jit(tower, TIGHT, link=link)
    weights = jturnip.host(layers(8))
    compiled = slow.lower(X, weights).compile()
    before = Holdings()
    interrupted = 0
    for delay in [0.1] if linked else np.geomspace(1e-4, 2e-2, 20):
        began = time.perf_counter()
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, float(delay))
            compiled(X, weights)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert time.perf_counter() - began < 2
        slow.clear_cache()  # a call that was over in time keeps weights for the next
        assert before.new_arrays() == []
        assert before.new_threads() == []
    assert interrupted > 0
    assert_same(jturnip.jit(tower, TIGHT)(X, weights), jax.jit(tower)(X, layers(8)))
    if not linked:
        assert_same(compiled(X, weights), jax.jit(tower)(X, layers(8)))
        slow.clear_cache()


class InterruptAt:
    """Raises KeyboardInterrupt at the nth step that jturnip's Python takes in this thread.

    The standard library's threading counts too: a lock of its own that is left locked would
    stop every later call.
    """

    _WATCHED = ("jturnip", "threading", "concurrent")

    def __init__(self, step: float):
        self.steps = 0
        self._at = step

    def __enter__(self) -> "InterruptAt":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_globals.get("__name__", "").split(".")[0] not in self._WATCHED:
            return None
        if event == "return":  # the frame would be in no traceback
            return self._trace
        if event == "line" and frame.f_lasti in ends_of_withs(frame.f_code):
            return self._trace
        self.steps += 1
        if self.steps == self._at:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._trace


@functools.cache
def ends_of_withs(code: CodeType) -> frozenset[int]:
    """Where the `with` statements of `code` begin to call `__exit__(None, None, None)`.

    Tracing tells of a line there, but no signal is handled: that is only after a call and
    at a jump, and either is still in the body, whose exceptions `__exit__` is called for.
    """
    steps = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    none = [i.opname == "LOAD_CONST" and i.argval is None for i in steps]
    return frozenset(
        first.offset
        for first, *three in zip(steps, none, none[1:], none[2:], strict=False)
        if all(three)
    )


def in_time(call: Callable[[], Any], seconds: float = 20) -> Any:
    """Calls, and fails where it takes forever."""

    def too_late(*_: object) -> None:
        raise TimeoutError("the call after an interrupted one hangs")

    previous = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
def test_ctrl_c_at_any_step_of_a_run():
    weights = jturnip.host(layers(8))
    f = jturnip.jit(tower, TIGHT)
    compiled = f.lower(X, weights).compile()
    expected = np.array(compiled(X, weights))
    with InterruptAt(math.inf) as counted:
        compiled(X, weights)
    f._turn.kept.clear()
    before = Holdings()
    for step in random.Random(0).sample(range(1, counted.steps), 100):
        interrupt = InterruptAt(step)
        try:
            with interrupt:
                compiled(X, weights)
        except KeyboardInterrupt:  # while it is handled it has its frames, as in notebooks
            f._turn.kept.clear()  # of a run that was over
            found = before.new_arrays()
        else:  # not all runs take equally many steps
            assert interrupt.steps < step, f"the one at step {step} was swallowed"
            found = []
        assert found == [], f"left by the one at step {step}"
        again = np.array(in_time(lambda: compiled(X, weights)))
        np.testing.assert_array_equal(again, expected, err_msg=f"step {step}")
    f._turn.kept.clear()
    assert before.new_arrays() == []


def test_an_error_in_one_thread_does_not_stop_another():
    fn = failing_on(7.0)
    f, weights = jturnip.jit(fn, TIGHT), jturnip.host(layers(8))
    expected, wrong = jax.jit(fn)(X, layers(8)), []

    def call(x: np.ndarray) -> None:
        for _ in range(10):
            try:
                result = f(x, weights)
            except jturnip.ExecutionError:
                wrong.extend([] if x[0, 0] == 7 else ["raised"])
            else:
                wrong.extend(["did not raise"] if x[0, 0] == 7 else [])
                assert_same(result, expected)

    threads = [threading.Thread(target=call, args=(X * factor,)) for factor in (1, 7, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
