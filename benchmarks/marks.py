"""What a mark costs, and how soon the loop hears of a finished executable.

Run with `python -m benchmarks.marks [--repeats=200] [--json=out.json]`. All ways take turns
in one process, so that they share whatever else the machine does.
"""

import functools
import json
import os
import queue as std_queue
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.measure import commit
from jturnip.native import marks, queue


_REPEATS = flags.DEFINE_integer("repeats", 200, "Measurements of each way.", lower_bound=2)
_MILLISECONDS = flags.DEFINE_float("milliseconds", 5.0, "Length of the executable.")
_JSON = flags.DEFINE_string("json", None, "Where to write the figures as one JSON line.")

_WIDTH = 384  # of the square matrices multiplied
_POLL_SECONDS = 50e-6
_CALLS = 200  # timed together, where calls are timed
_TIMEOUT = 60.0

Figures = dict[str, list[float]]  # way → microseconds, one per repeat


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    if not marks.load():
        raise SystemExit(marks.status().reason)
    work, seconds = make_work(_MILLISECONDS.value * 1e-3)
    record = {"benchmark": "marks", "environment": environment(), "seconds": seconds}
    print(f"{record['environment']}\nexecutable: {seconds * 1e3:.2f} ms")
    for title, figures in (
        ("end of the executable → loop awake, alone", measure_latency(work, 0)),
        ("the same, with the next one queued behind", measure_latency(work, 1)),
        ("one Compiled call, 8x8 f32", measure_calls()),
        ("one call on a queue", measure_queues()),
    ):
        record[title] = show(title, figures)
    if _JSON.value:
        with open(_JSON.value, "w", encoding="utf-8") as file:
            print(json.dumps(record), file=file)


def environment() -> dict[str, Any]:
    return {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "ffi": marks.running_api_version(),
        "commit": commit(),
        "repeats": _REPEATS.value,
    }


def show(title: str, figures: Figures) -> dict[str, dict[str, float]]:
    """Prints one table in µs, and returns what it printed."""
    print(f"\n{title + ', µs':<56}{'median':>9}{'25%':>9}{'75%':>9}{'95%':>9}")
    shown = {}
    for way, values in figures.items():
        cuts = statistics.quantiles(values, n=20, method="inclusive")
        row = {"median": cuts[9], "25%": cuts[4], "75%": cuts[14], "95%": cuts[18]}
        print(f"  {way:<54}" + "".join(f"{value:9.2f}" for value in row.values()))
        shown[way] = row
    return shown


# How soon the loop hears of it


def make_work(seconds: float) -> tuple[Callable[..., Any], float]:
    """A compiled function (x, slot) → (y, mark) of about this length, and its length."""

    def chain(count: int, x: jax.Array, slot: jax.Array):
        y = x
        for _ in range(count):
            y = jnp.tanh(y @ x)
        return y, marks.mark(y, slot)

    x, slot = jnp.eye(_WIDTH, dtype=jnp.float32), jnp.int32(-1)

    def build(count: int) -> tuple[Callable[..., Any], float]:
        work = jax.jit(functools.partial(chain, count)).lower(x, slot).compile()
        took = statistics.median(timed(work, x, slot) for _ in range(20))
        return functools.partial(work, x), took

    _, took = build(guess := 8)
    return build(max(1, round(guess * seconds / took)))


def timed(function: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - start


def measure_latency(work: Callable[..., Any], behind: int) -> Figures:
    """From the mark at the end of an executable to the loop running again.

    Every way runs the same marked executable: where the loop does not sleep on the mark's
    own queue, that queue only tells when the end was.

    Args:
      work: takes a slot; see `make_work`.
      behind: how many more executables are queued behind the one waited for.
    """
    native = queue.make_queue()
    ways = {
        "mark → native queue": wait_for_mark,
        "waiter thread → SimpleQueue": Waiter(std_queue.SimpleQueue()).wait,
        "waiter thread → native queue": Waiter(queue.make_queue()).wait,
        "waiter thread → PythonQueue": Waiter(queue.PythonQueue()).wait,
        f"loop polls is_ready every {_POLL_SECONDS * 1e6:.0f} µs": poll,
        "loop in block_until_ready (cannot wait for any)": block,
    }
    number = native.open_slot()
    slot, unarmed = jnp.int32(number), jnp.int32(-1)
    figures: Figures = {way: [] for way in ways}
    for repeat in range(_REPEATS.value + 3):  # the first three warm up
        for way, wait in ways.items():
            native.arm(number, repeat, True)
            first, *rest = [work(s) for s in (slot, *[unarmed] * behind)]
            seen, awake = wait(first[0], native)
            [(id, end)] = seen or native.drain(_TIMEOUT)
            assert id == repeat
            if repeat >= 3:
                figures[way].append((awake - end) * 1e6)
            jax.block_until_ready(rest)
    native.close_slot(number)
    return figures


Seen = tuple[list[tuple[int, float]], float]  # what the mark's queue gave, time awake


def wait_for_mark(array: jax.Array, native: queue.CompletionQueue) -> Seen:
    pairs = native.drain(_TIMEOUT)
    return pairs, time.perf_counter()


def poll(array: Any, native: queue.CompletionQueue) -> Seen:
    while not array.is_ready():
        time.sleep(_POLL_SECONDS)
    return [], time.perf_counter()


def block(array: jax.Array, native: queue.CompletionQueue) -> Seen:
    array.block_until_ready()
    return [], time.perf_counter()


class Waiter:
    """A thread that blocks until an array is ready and then wakes the loop."""

    def __init__(self, wake: Any):
        simple = isinstance(wake, std_queue.SimpleQueue)
        self._push = wake.put if simple else wake.push
        self._sleep = wake.get if simple else functools.partial(wake.drain, _TIMEOUT)
        self._arrays: std_queue.SimpleQueue[jax.Array] = std_queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, array: jax.Array, native: queue.CompletionQueue) -> Seen:
        self._arrays.put(array)
        self._sleep()
        return [], time.perf_counter()

    def _run(self) -> None:
        while True:
            self._arrays.get().block_until_ready()
            self._push(0)


# What a call costs


def measure_calls() -> Figures:
    """One call of a tiny executable, with and without a mark."""
    marked_with_effect = jax.ffi.ffi_call(
        "jturnip_mark", jax.ShapeDtypeStruct((), np.dtype(np.int32)), has_side_effect=True
    )

    def with_effect(x: jax.Array, slot: jax.Array):
        return x * 2, marked_with_effect(x, slot)

    x, slot = jnp.ones((8, 8), jnp.float32), jnp.int32(-1)
    return interleave(
        {
            "no mark": lower(lambda x: x * 2, x),
            "no mark, but one more int32 in and out": lower(
                lambda x, s: (x * 2, s + 1), x, slot
            ),
            "mark": lower(lambda x, s: (y := x * 2, marks.mark(y, s)), x, slot),
            "mark that declares a side effect": lower(with_effect, x, slot),
        }
    )


def lower(function: Callable[..., Any], *args: jax.Array) -> Callable[[], Any]:
    return functools.partial(jax.jit(function).lower(*args).compile(), *args)


def measure_queues() -> Figures:
    native, plain = queue.make_queue(), queue.PythonQueue()
    slot = native.open_slot()

    def push_and_drain(q: queue.CompletionQueue) -> None:
        q.push(1)
        q.drain(0)

    figures = interleave(
        {
            "native: push, then drain": lambda: push_and_drain(native),
            "PythonQueue: push, then drain": lambda: push_and_drain(plain),
            "native: arm a slot": lambda: native.arm(slot, 1),
        }
    )
    native.close_slot(slot)
    return figures


def interleave(ways: dict[str, Callable[[], Any]]) -> Figures:
    """Times every way in turn, `_CALLS` calls at a time."""
    figures: Figures = {way: [] for way in ways}
    for repeat in range(_REPEATS.value + 1):  # the first warms up
        for way, call in ways.items():
            last = call()
            start = time.perf_counter()
            for _ in range(_CALLS):
                last = call()
            jax.block_until_ready(last)
            if repeat:
                figures[way].append((time.perf_counter() - start) / _CALLS * 1e6)
    return figures


if __name__ == "__main__":
    app.run(main)
