"""A split call returns when nothing of the run needs Python any more."""

import functools
import gc
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import Holdings, assert_same, layers, tower

import jturnip
from jturnip.graph.report import RunReport
from jturnip.runners.tasks import Rest
from jturnip.runtime import engines, turns
from jturnip.runtime.loop import Running


# Of the last task, one large product: while it computes, a call has returned. (XLA's CPU
# client runs what looks cheap to it in the caller's thread, loops among them.)
WIDTH = 2048
BUDGET = 52 * 2**20


def long_tail(weights, x):
    x = tower(x, weights)
    wide = jnp.tile(x, (WIDTH // 128, WIDTH // 128))
    return wide @ wide


def square(seed: int = 0) -> jax.Array:
    return jnp.asarray(layers(1, seed=seed)[0])


@pytest.fixture(autouse=True, params=["threads", "the loop"])
def who_looks_for_ends(request, monkeypatch):
    """For a CPU threads do, for a GPU the loop."""
    monkeypatch.setattr(engines, "looks_itself", lambda device: request.param == "the loop")


@pytest.fixture(scope="module")
def fn():
    return jturnip.jit(long_tail, BUDGET, strategy="turnip")


@pytest.fixture(scope="module")
def weights():
    return jturnip.host(layers(16))


@pytest.mark.long
def test_the_call_returns_while_its_last_task_computes(fn, weights):
    x = square()
    fn(weights, x).block_until_ready()
    result = fn(weights, x)
    assert not result.is_ready()
    assert_same(result, jax.jit(long_tail)(layers(16), x))


def test_its_report_is_whole(fn, weights):
    result = fn(weights, square())
    report = fn.last_run  # waits
    jax.block_until_ready(result)
    assert len(report.ends) == len(report.order) > 0
    assert report.peak_bytes <= BUDGET
    assert report == fn.last_run


def test_the_next_call_waits_for_it(fn, weights):
    first = fn(weights, square())
    rest = fn._turn._rest
    second = fn(weights, square(1))
    # The marks of the first have fired. (That its result is ready is told a moment later.)
    of_first = rest.finish(wait=False)
    assert of_first.began + of_first.seconds <= fn.last_run.began
    assert_same(first, jax.jit(long_tail)(layers(16), square()))
    assert_same(second, jax.jit(long_tail)(layers(16), square(1)))


def test_nothing_is_held_but_the_results(fn, weights):
    x = square()
    fn(weights, x).block_until_ready()
    fn.last_run  # noqa: B018
    holdings = Holdings()
    result = fn(weights, x)
    del result
    assert holdings.new_arrays() == []


def test_donated_arguments_are_gone_when_it_returns(weights):
    def fn(x, weights):
        return long_tail(weights, x), 2 * x

    x = square()
    expected = jax.jit(fn)(x, layers(16))
    result = jturnip.jit(fn, BUDGET, strategy="turnip", donate_argnums=0)(x, weights)
    assert not result[0].is_ready()
    assert x.is_deleted()
    assert_same(result, expected)


def test_numpy_may_be_written_to_when_it_returns():
    """The device may share the memory of a small array of numpy's."""

    def fn(weights, small):
        x = tower(jnp.ones((128, 128)) * 0.1, weights)
        wide = jnp.tile(x, (WIDTH // 128, WIDTH // 128))
        return jax.lax.dot(wide, wide + jnp.tile(small, WIDTH // 128))

    small = jnp.arange(128, dtype=jnp.float32)
    expected = jax.jit(fn)(layers(16), small)
    small = np.asarray(small).copy()
    result = jturnip.jit(fn, BUDGET, strategy="turnip")(jturnip.host(layers(16)), small)
    small[:] = np.nan
    assert_same(result, expected)


def test_the_function_may_go_before_its_work_is_done(weights):
    x = square()
    result = jturnip.jit(long_tail, BUDGET, strategy="turnip")(weights, x)
    assert not result.is_ready()
    gc.collect()
    assert_same(result, jax.jit(long_tail)(layers(16), x))


@pytest.mark.long
@pytest.mark.parametrize("who_looks_for_ends", ["threads"], indirect=True)
def test_the_process_may_end_before_its_work_is_done():
    program = f"""
        import sys
        sys.path.insert(0, {str(__file__).rpartition("/")[0]!r})
        import jturnip, test_early_return as t
        fn = jturnip.jit(t.long_tail, t.BUDGET, strategy="turnip")
        result = fn(jturnip.host(t.layers(16)), t.square())
        print(result.is_ready())
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, ["False"], "")


def test_callbacks_are_over_when_it_returns(weights):
    """What they raise is told with the user's line."""
    seen = []

    def fn(weights, x):
        x = tower(x, weights)
        return jax.pure_callback(lambda x: seen.append(1) or np.asarray(x), x, x)

    result = jturnip.jit(fn, BUDGET, strategy="turnip")(weights, square())
    assert seen
    assert result.is_ready()


class Fails(Running):
    """A run whose last part fails."""

    def __init__(self):
        pass

    def finish(self):
        raise RuntimeError("the device is gone")


class Silent(engines.DeviceEngines):
    """Engines of which nothing is heard."""

    def __init__(self):
        pass

    def poll(self):
        return []


def test_a_rest_that_fails_gives_its_marks_back(monkeypatch):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    marks = engines.borrow_marks(sharding)
    closed = []
    monkeypatch.setattr(marks, "close", lambda: closed.append(1))
    rest = Rest(Fails(), Silent(), marks, 0)
    assert rest.finish() is None
    assert rest.finish() is None
    assert closed == [1]


def test_marks_are_lent_on_once_a_run_is_over(weights, monkeypatch):
    """Else each function that was called once would keep slots, of which there are 4096."""
    functions = [
        jturnip.jit(lambda w, x: tower(x, w), 450 * 1024, strategy="turnip")
        for _ in range(4)
    ]
    functions[0](weights, square()).block_until_ready()
    made, make = [], engines.MarkSlots
    monkeypatch.setattr(engines, "MarkSlots", lambda at: made.append(at) or make(at))
    for fn in functions[1:]:
        fn(weights, square()).block_until_ready()
    assert made == []


def test_not_too_many_runs_are_left_unfinished():
    class Unfinished(Running):
        def __init__(self):
            pass

        def tell(self, events):
            return False

        def finish(self):
            finished.append(self)
            return RunReport("turnip", 0.0, 0.0, 0, 0, 0)

    finished: list[Any] = []
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    Rest.finish_some()
    runs = [Unfinished() for _ in range(Rest.MOST + 2)]
    rests = [Rest(run, Silent(), engines.borrow_marks(sharding), 0) for run in runs]
    Rest.finish_some()
    assert finished == runs[:2]
    del rests


def test_room_is_made_by_waiting_for_the_rest():
    order = []

    class Slow:
        def finish(self):
            order.append("finished")

    turn = turns.Turn()
    with turn.lock:
        turn.left(Slow())
        turn.alone(None)
        turn.alone(None)
    assert order == ["finished"]


def test_runs_that_are_over_are_forgotten():
    weights = [jturnip.host(np.ones((128, 128), np.float32)) for _ in range(4)]
    f = jturnip.jit(lambda ws, x: functools.reduce(jnp.matmul, ws, x), 3 * 65536)
    x = jnp.ones((8, 128))
    for _ in range(3):
        jax.block_until_ready(f(weights, x))
    assert f.last_run.strategy != "whole"
    before = len(Rest._all)
    for _ in range(20):
        jax.block_until_ready(f(weights, x))
    _ = f.last_run
    assert len(Rest._all) <= before + 1
