"""The completion queues, native and Python, and the marks that executables carry."""

import contextlib
import gc
import math
import pathlib
import queue as std_queue
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jturnip.native
from jturnip.errors import InternalError
from jturnip.inbox import Inbox
from jturnip.native import marks, queue


LONG = 20.0  # seconds; only ever waited for when a test is about to fail

needs_native = pytest.mark.skipif(not marks.load(), reason=marks.status().reason)
both_queues = pytest.mark.parametrize(
    "make",
    [
        pytest.param(queue.make_queue, marks=needs_native, id="native"),
        pytest.param(queue.PythonQueue, id="python"),
    ],
)
every_device = pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def device_of(platform):
    try:
        return jax.local_devices(backend=platform)[0]
    except RuntimeError as error:
        pytest.skip(f"no {platform} device: {error}")


def ids(pairs):
    return [id for id, _ in pairs]


def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


# Queues


@both_queues
def test_drain_gives_everything_oldest_first(make):
    q = make()
    for id in (3, 1, 2, -(2**63), 2**63 - 1):
        q.push(id)
    assert ids(q.drain(0)) == [3, 1, 2, -(2**63), 2**63 - 1]
    assert q.drain(0) == []


@both_queues
def test_times_are_on_the_clock_of_perf_counter(make):
    q = make()
    before = time.perf_counter()
    for id in range(100):
        q.push(id)
    after = time.perf_counter()
    times = [time for _, time in q.drain(0)]
    assert times == sorted(times)
    microsecond = 1e-6  # for the rounding of large floats
    assert before - microsecond <= times[0] <= times[-1] <= after + microsecond


@both_queues
def test_drain_sleeps_until_the_timeout_when_nothing_comes(make):
    q = make()
    start = time.perf_counter()
    assert q.drain(0.03) == []
    assert time.perf_counter() - start >= 0.03


@both_queues
def test_drain_with_something_queued_never_sleeps(make):
    q = make()
    q.push(1)
    assert ids(q.drain(math.inf)) == [1]


@both_queues
@pytest.mark.parametrize("timeout", [-1.0, -math.inf, math.nan])
def test_drain_refuses_a_timeout_below_zero(make, timeout):
    with pytest.raises(ValueError, match="zero or more"):
        make().drain(timeout)


@both_queues
def test_a_sleeping_drain_is_woken_by_another_thread(make):
    # A thread that sent a ball sleeps until it comes back, so nearly every drain sleeps,
    # and all of them would block for ever if sleeping kept the GIL.
    there, back = make(), make()

    def answer():
        for _ in range(300):
            for id, _ in there.drain(LONG):
                back.push(id)

    thread = in_thread(answer)
    for id in range(300):
        there.push(id)
        assert ids(back.drain(math.inf if id % 2 else LONG)) == [id]
    thread.join(LONG)
    assert not thread.is_alive()


@both_queues
def test_several_threads_may_drain_and_each_id_comes_once(make):
    q, taken = make(), queue.PythonQueue()

    def take():
        while True:
            new = ids(q.drain(LONG))
            for id in new:
                taken.push(id)
            if -1 in new:
                q.push(-1)  # for the next thread
                break

    threads = [in_thread(take) for _ in range(3)]
    for id in [*range(200), -1]:
        q.push(id)
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert sorted(ids(taken.drain(0))) == [-1, -1, -1, *range(200)]


def test_a_timeout_that_is_over_at_once_ends_the_wait():
    """`queue.SimpleQueue` sleeps for ever here, within some hundred turns."""
    inbox = Inbox[int]()

    def turns():
        for turn in range(20_000):
            inbox.put(turn)
            assert inbox.get() == turn
            with pytest.raises(std_queue.Empty):
                inbox.get(timeout=1e-6)

    thread = threading.Thread(target=turns, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_what_is_put_while_one_waits_is_there_at_once():
    inbox, back = Inbox[int](), Inbox[int]()

    def echo():
        while (item := inbox.get(timeout=60)) >= 0:
            back.put(item)

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    for item in range(5_000):
        inbox.put(item)
        assert back.get(timeout=60) == item
    inbox.put(-1)
    thread.join(60)
    assert not thread.is_alive()


@both_queues
def test_a_signal_handler_may_end_a_sleeping_drain(make):
    class Interrupted(Exception):
        pass

    def handler(*_):
        raise Interrupted

    q = make()
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(Interrupted):
            q.drain(LONG)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    q.push(5)
    assert ids(q.drain(LONG)) == [5]


@both_queues
def test_pushes_of_many_threads_all_arrive_each_thread_in_its_order(make):
    q, count, threads = make(), 2000, 4

    def push(start):
        for id in range(start, start + count):
            q.push(id)

    running = [in_thread(push, n * count) for n in range(threads)]
    pairs = []
    while len(pairs) < threads * count:
        new = q.drain(LONG)
        assert new
        pairs += new
    for thread in running:
        thread.join()
    assert [time for _, time in pairs] == sorted(time for _, time in pairs)
    for n in range(threads):
        wanted = range(n * count, (n + 1) * count)
        assert [id for id in ids(pairs) if id in wanted] == list(wanted)


@needs_native
def test_a_native_queue_is_small_change():
    q = queue.make_queue()
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        for id in range(100):
            q.push(id)
            q.drain(0)
        best = min(best, (time.perf_counter() - start) / 100)
    assert best < 5e-6  # about 0.3 µs on an idle machine


def test_the_python_queue_has_no_slots():
    q = queue.PythonQueue()
    assert not q.has_marks
    for use in (q.open_slot, lambda: q.arm(0, 1), lambda: q.close_slot(0)):
        with pytest.raises(InternalError, match="without marks"):
            use()


# Marks


def square_and_mark(x, slot):
    y = x * x
    return y, marks.mark(y, slot)


@pytest.fixture
def q():
    assert marks.load()
    made = queue.make_queue()
    assert made.has_marks
    return made


class Model:
    """What slots and marks do, in plain Python: the reference of the FFI handlers."""

    def __init__(self):
        self.armed = {}
        self.queued = []

    def mark(self, slot):
        if slot in self.armed:
            self.queued.append(self.armed.pop(slot))
        return np.int32(slot)

    def drain(self):
        taken, self.queued = self.queued, []
        return taken


@needs_native
@every_device
def test_marks_do_what_the_model_does(q, platform):
    device = device_of(platform)
    model, rng, open_slots, ever = Model(), random.Random(7), [], [0]
    x = jax.device_put(np.arange(8, dtype=np.float32), device)
    compiled = jax.jit(square_and_mark).lower(x, jnp.int32(0)).compile()
    for id in range(400):
        match rng.choice(("open", "arm", "arm", "mark", "mark", "mark", "close", "drain")):
            case "open":
                open_slots.append(q.open_slot())
                ever.append(open_slots[-1])
            case "arm" if open_slots:
                slot = rng.choice(open_slots)
                q.arm(slot, id)
                model.armed[slot] = id
            case "mark":
                slot = rng.choice([*ever, -1, 2**31 - 1])
                y, result = compiled(x, jax.device_put(np.int32(slot), device))
                jax.block_until_ready(result)
                np.testing.assert_array_equal(y, np.arange(8, dtype=np.float32) ** 2)
                assert result.dtype == np.int32
                assert result.shape == ()
                assert result == model.mark(slot)
            case "close" if open_slots:
                slot = open_slots.pop(rng.randrange(len(open_slots)))
                q.close_slot(slot)
                model.armed.pop(slot, None)
            case "drain":
                expected = model.drain()
                there = ids(q.drain(0))
                while len(there) < len(expected):  # a GPU's results come before their mark
                    there += ids(q.drain(LONG))
                assert there == expected
    assert len(ever) > 20


@needs_native
@every_device
def test_a_slot_is_known_to_what_the_same_thread_calls_next(q, platform):
    device = device_of(platform)
    slots = [q.open_slot() for _ in range(3)]
    x, *tokens = jax.device_put([np.ones(8, np.float32), *map(np.int32, slots)], device)
    compiled = jax.jit(square_and_mark).lower(x, tokens[0]).compile()
    for id, (slot, token) in enumerate(zip(slots, tokens, strict=True)):
        q.arm(slot, id, True)
        _, result = compiled(x, token)
        assert int(result) == slot
        assert ids(q.drain(LONG)) == [id]
    # One that is armed for another thread's call is none of this one's.
    call_elsewhere = threading.Thread(target=compiled, args=(x, tokens[0]))
    q.arm(slots[0], 7)
    call_elsewhere.start()
    assert ids(q.drain(LONG)) == [7]
    call_elsewhere.join()


DTYPES = (
    "bool int2 uint2 int4 uint4 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bfloat16 "
    "float16 float32 float64 float8_e4m3fn float8_e5m2 float4_e2m1fn complex64 complex128"
).split()


@needs_native
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 4), (257, 129)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mark_takes_any_dtype_and_shape(q, dtype, shape):
    check_mark_on(q, dtype, shape, device_of("cpu"))


@needs_native
@pytest.mark.gpu
def test_a_mark_on_a_gpu_takes_any_dtype_and_shape(q):
    device = device_of("cuda")
    for dtype in ("bool", "int4", "int32", "bfloat16", "float32", "complex64"):
        for shape in ((), (0, 4), (257, 129)):
            check_mark_on(q, dtype, shape, device)


def check_mark_on(q, dtype, shape, device):
    def flip(x, slot):
        y = jnp.flip(x)
        return y, marks.mark(y, slot)

    slot = q.open_slot()
    q.arm(slot, 1)
    with jax.enable_x64(True), jax.default_device(device):
        x = jnp.ones(shape, dtype)
        y, result = jax.jit(flip)(x, jnp.int32(slot))
    assert ids(q.drain(LONG)) == [1]
    assert result == slot
    assert y.dtype == x.dtype
    assert y.shape == shape


@needs_native
@every_device
def test_a_mark_fires_after_what_it_marks_and_more(q, platform):
    device = device_of(platform)

    def slow_and_fast(x, slot):
        slow = x
        for _ in range(8):
            slow = slow @ x
        fast = x + 1
        return slow, fast, marks.mark(fast, slot, slow)

    slot = q.open_slot()
    x = jax.device_put(np.eye(256, dtype=np.float32), device)
    compiled = jax.jit(slow_and_fast).lower(x, jnp.int32(0)).compile()
    operand = jax.device_put(np.int32(slot), device)
    for id in range(5):
        q.arm(slot, id)
        start = time.perf_counter()
        slow, fast, _ = compiled(x, operand)
        [(seen, marked)] = q.drain(LONG)
        assert seen == id
        assert marked > start
        jax.block_until_ready((slow, fast))


@needs_native
def test_of_many_marks_the_sleeper_hears_when_few_are_left(q):
    slots = [q.open_slot() for _ in range(4)]
    fire = jax.jit(square_and_mark)
    mark = lambda slot: jax.block_until_ready(fire(jnp.ones(2), jnp.int32(slot)))
    for slot in slots:
        q.arm(slot, slot)
        q.arm(slot, slot)  # again: one mark is expected of it, not two
    heard = queue.PythonQueue()

    def sleep(timeout=LONG, few=1):
        for id, _ in q.drain(timeout, few):
            heard.push(id)

    def is_over_within(seconds):
        sleeper.join(seconds)
        return not sleeper.is_alive()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    mark(slots[0])
    mark(slots[1])
    assert not is_over_within(0.05)  # two are still to come
    q.close_slot(slots[2])  # and this never will
    assert is_over_within(LONG)
    assert ids(heard.drain(0)) == slots[:2]
    # What is no mark is heard of at once, and so is what is there already.
    q.close_slot(slots[3])
    q.arm(slots[0], 10)
    q.arm(slots[1], 11)
    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    q.push(12)
    assert is_over_within(LONG)
    assert ids(heard.drain(0)) == [12]
    mark(slots[0])
    sleep()
    assert ids(heard.drain(0)) == [10]
    # Nor does it stay there when the timeout has passed.
    q.arm(slots[0], 13)
    sleeper = threading.Thread(target=sleep, args=(0.05, 0))
    sleeper.start()
    mark(slots[1])
    assert is_over_within(LONG)
    assert ids(heard.drain(0)) == [11]


@needs_native
def test_a_mark_waits_for_the_computation_before_it(q):
    entered, gate = threading.Event(), threading.Event()
    slot = q.open_slot()
    q.arm(slot, 1)
    running = run_gated(slot, entered, gate)
    assert entered.wait(LONG)
    assert q.drain(0) == []
    gate.set()
    assert ids(q.drain(LONG)) == [1]
    running.join(LONG)


def run_gated(slot, entered, gate):
    """Runs, in a thread, an executable that waits at `gate` and then comes to its mark."""

    def wait(x):
        entered.set()
        assert gate.wait(LONG)
        return np.asarray(x)

    @jax.jit
    def gated(x, slot):
        y = jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return y, marks.mark(y, slot)

    def run():
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            jax.block_until_ready(gated(np.ones(4, np.float32), np.int32(slot)))

    return in_thread(run)


@needs_native
def test_a_queue_may_be_dropped_while_its_mark_is_pending(q):
    entered, gate = threading.Event(), threading.Event()
    dropped = queue.make_queue()
    slot = dropped.open_slot()
    dropped.arm(slot, 1)
    running = run_gated(slot, entered, gate)
    assert entered.wait(LONG)
    del dropped
    gc.collect()
    gate.set()
    running.join(LONG)
    assert not running.is_alive()
    assert q.drain(0) == []


@needs_native
def test_a_late_mark_does_not_reach_the_next_owner_of_its_place(q):
    entered, gate = threading.Event(), threading.Event()
    before = queue.make_queue()
    slot = before.open_slot()
    before.arm(slot, 1)
    running = run_gated(slot, entered, gate)
    assert entered.wait(LONG)
    before.close_slot(slot)
    while (again := q.open_slot()) % 4096 != slot % 4096:
        q.close_slot(again)
    assert again != slot
    q.arm(again, 2)
    gate.set()
    running.join(LONG)
    assert q.drain(0) == []
    assert before.drain(0) == []


@needs_native
def test_only_one_mark_fires_each_time_a_slot_is_armed(q):
    slot, call = q.open_slot(), jax.jit(square_and_mark)
    for id in range(50):
        q.arm(slot, -1)
        q.arm(slot, id)  # takes the place of the id before
        for _ in range(2):
            jax.block_until_ready(call(jnp.ones(3), jnp.int32(slot)))
        assert ids(q.drain(LONG)) == [id]
        assert q.drain(0) == []


@needs_native
def test_slots_belong_to_the_queue_that_opened_them(q):
    slot, other = q.open_slot(), queue.make_queue()
    for wrong in (lambda: other.arm(slot, 1), lambda: other.close_slot(slot)):
        with pytest.raises(ValueError, match=f"slot {slot} is not open on this queue"):
            wrong()
    q.close_slot(slot)
    for late in (lambda: q.arm(slot, 1), lambda: q.close_slot(slot)):
        with pytest.raises(ValueError, match="is not open on this queue"):
            late()


def open_slots(q):
    """Opens slots until there are no more."""
    with contextlib.suppress(RuntimeError):
        while True:
            yield q.open_slot()


@pytest.mark.long
@needs_native
def test_open_slots_are_many_and_come_back_with_their_queue():
    counts = set()
    for _ in range(3):
        q = queue.make_queue()
        # Other queues of the process, idle ones of earlier runs, have a few of the 4096.
        slots = list(open_slots(q))
        with pytest.raises(RuntimeError, match="all 4096 mark slots are open"):
            q.open_slot()
        assert len(set(slots)) == len(slots) > 4000
        assert all(0 <= slot < 2**31 for slot in slots)
        counts.add(len(slots))
        del q
        gc.collect()
    assert len(counts) == 1


@needs_native
@pytest.mark.parametrize("slot", [np.float32(0), np.zeros(2, np.int32)], ids=repr)
def test_a_slot_that_is_no_scalar_int32_is_refused_by_name(q, slot):
    with pytest.raises(Exception, match=r"(?i)wrong buffer (dtype|rank)"):
        jax.block_until_ready(jax.jit(square_and_mark)(np.ones(3), slot))


@needs_native
def test_marks_slots_and_queues_of_many_threads_keep_apart():
    compiled = jax.jit(square_and_mark).lower(np.ones(4, np.float32), np.int32(0)).compile()
    wrong = queue.PythonQueue()

    def work(n):
        for round in range(20):
            own = queue.make_queue()
            slots = [own.open_slot() for _ in range(4)]
            for i, slot in enumerate(slots):
                own.arm(slot, 1000 * n + i)
                compiled(np.ones(4, np.float32), np.int32(slot))
            left = {1000 * n + i for i in range(4)}
            while left:
                new = own.drain(LONG)
                if not new or not left.issuperset(ids(new)):
                    wrong.push(n)
                    return
                left.difference_update(ids(new))
            if round % 2:
                for slot in slots:
                    own.close_slot(slot)

    threads = [in_thread(work, n) for n in range(4)]
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert wrong.drain(0) == []


# Loading


@needs_native
def test_loading_from_many_threads_registers_once():
    seen = queue.PythonQueue()
    threads = [in_thread(lambda: seen.push(int(marks.load()))) for _ in range(8)]
    for thread in threads:
        thread.join()
    assert ids(seen.drain(0)) == [1] * 8
    assert marks.status() is marks.status()


@needs_native
def test_the_extension_is_no_newer_than_jaxlib():
    status, running = marks.status(), marks.running_api_version()
    assert status.loaded
    assert status.reason == ""
    assert status.api_version is not None
    assert running is not None
    assert status.api_version <= running


@pytest.mark.parametrize(
    ("built", "running", "why"),
    [
        ((0, 3), (0, 3), ""),
        ((0, 3), (0, 5), ""),
        ((0, 4), (0, 3), r".* 0\.4, but jaxlib .* has 0\.3; .*pip install.*"),
        ((1, 0), (0, 9), r".* 1\.0, but jaxlib .*"),
        ((0, 9), (1, 0), r".* 0\.9, but jaxlib .*"),
        ((0, 3), None, r".* does not say .*"),
    ],
)
def test_an_extension_that_jaxlib_cannot_take_is_refused(built, running, why):
    assert re.fullmatch(why, marks.refusal(built, running))


def test_without_the_extension_the_reason_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "jturnip.native._native", None)
    monkeypatch.delattr(jturnip.native, "_native", raising=False)
    status = marks._load_once.__wrapped__()
    assert not status.loaded
    assert status.api_version is None
    assert "not built" in status.reason
    assert "pip install" in status.reason


def test_without_the_extension_there_is_still_a_queue(monkeypatch):
    monkeypatch.setattr(marks, "load", lambda: False)
    assert isinstance(queue.make_queue(), queue.PythonQueue)


# CUDA without a GPU


@pytest.mark.long
def test_cuda_marks_against_a_pretended_driver(tmp_path):
    compiler = shutil.which("c++")
    sources = pathlib.Path(__file__).parent.parent / "xla_ext"
    if compiler is None or not sources.exists():
        pytest.skip("needs a C++ compiler and the source of xla_ext")
    files = ["cuda_marks_test.cc", "cuda_marks.cc", "mark_slots.cc", "completion_queue.cc"]
    program = tmp_path / "cuda_marks_test"
    command = [compiler, "-std=c++17", "-o", program, *files, "-ldl", "-pthread"]
    subprocess.run(command, cwd=sources, check=True)
    subprocess.run([program], check=True)
