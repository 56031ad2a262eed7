"""What a link does, and what its copies cost the computing beside them: measured.

Once in a process for each device, when tasks are first tried out on it. A CPU copies with
the cores that also compute. A task is divided evenly among them and over when the last one
is through, and copies take its operands' place in the caches, so it loses more than the
seconds of the copy divided by the cores: what products lose is measured with copies beside
them. An accelerator has engines for copies, which take a hundredth or so of its memory's
bandwidth: that is not measured.
"""

import contextlib
import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jturnip import memory, placement
from jturnip.compat import Device
from jturnip.compiler import profiles
from jturnip.compiler.trials import Trials
from jturnip.runtime import waiters
from jturnip.runtime.schedule import Link
from jturnip.units import GRANULE


_SMALL_BYTES = 4096
# Of a copy whose rate is measured: the size of a larger weight, or the least that tells
# anything, where there is no room for more.
_LARGE_BYTES = 4 << 20
# On an accelerator, where a copy of that takes no longer than to start it.
_LARGER_BYTES = 64 << 20
_LEAST_BYTES = 256 << 10
# How many are on the device at once: small and large, the one before and the next, and the
# operand of a product with what that gives.
_ARRAYS = 5
# Copies of each kind, small and large; the first ones do not count.
_SMALL_COPIES = 60
_LARGE_COPIES = 15
_WARM_UP = 4
# What products lose to copies: so often measured, each time for so long, beside copies of
# so many bytes a second. What one round finds may be off by all of it.
_ROUNDS = 24
_SECONDS = 0.01
_BESIDE = 4e9
# No more than this times the seconds of the copy. The other cores wait for the one that
# copies, and products find less of what they read in the caches: these lose one and a half
# times as much, but the tasks of a training step lose less.
_MOST_LOST = 1.25
# Products beside which copies are started, the most one takes, and copies beside each.
_PRODUCTS = 24
_SHORT_BYTES = 1 << 20
_ISSUED = 2
# Sleeps while products are computed, each for so long.
_SLEEPS = 32
_SLEEP_SECONDS = 0.002

_Sharding: TypeAlias = jax.sharding.Sharding

_links: dict[Device, Link] = {}
_measuring = threading.Lock()


def measured_link(device: Device) -> Link | None:
    """What was measured; None before `calibrate`, or where there was no room for it."""
    return _links.get(device)


def calibrate(device: Device, trials: Trials) -> None:
    """Measures the link to a device, unless that has been done or there is no room."""
    large = _LARGE_BYTES if device.platform == "cpu" else _LARGER_BYTES
    nbytes = min(large, trials.room // _ARRAYS // GRANULE * GRANULE)
    if device in _links or nbytes < _LEAST_BYTES:
        return
    with trials.alone(), _measuring, jax.transfer_guard("allow"):
        if device not in _links:
            profile = profiles.key(device, "link", str(nbytes))
            numbers = [f.name for f in dataclasses.fields(Link) if not f.kw_only]
            earlier = profiles.read(profile, numbers)
            if earlier is not None:
                _links[device] = Link(*earlier, after_compute=device.platform != "cpu")
                return
            _links[device] = _measured(device, nbytes)
            profiles.write(profile, dataclasses.asdict(_links[device]))
    trials.peak_bytes = max(trials.peak_bytes, trials.there + _ARRAYS * nbytes)


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies of one size in one direction: seconds of each, of its start, of the cores."""

    seconds: float
    issue_seconds: float
    busy_seconds: float


def _measured(device: Device, nbytes: int) -> Link:
    waiters.start()
    there, away = (placement.sharding(device, on_host) for on_host in (False, True))
    ways = ((away, there), (there, away))
    small = [_copies(_SMALL_BYTES, *way) for way in ways]
    large = [_copies(nbytes, *way) for way in ways]
    # No copy is so fast that its rate cannot be told from its latency.
    h2d, d2h = (
        nbytes / max(many.seconds - few.seconds, many.seconds / 10)
        for few, many in zip(small, large, strict=True)
    )
    latency = max(copies.seconds - copies.issue_seconds for copies in small)
    issue = statistics.mean(copies.issue_seconds for copies in small)
    # To hear of one takes the loop some tens of calls too: 45 µs where this was 55.
    heard = issue
    if device.platform != "cpu":
        return Link(h2d, d2h, latency, issue, heard, after_compute=True)
    each, busy = (
        statistics.mean(copies.busy_seconds for copies in some) for some in (small, large)
    )
    each /= profiles.cores()
    # What a core does is often told only when it is interrupted; one copies all the while.
    busy = max(busy, statistics.mean(copies.seconds for copies in large))
    late, lost = 0.0, busy / profiles.cores()
    with contextlib.suppress(Exception):  # where the caller's settings allow no product
        issue = max(issue, _small_beside_products(nbytes, ways).issue_seconds)
        late = _late_beside_products(nbytes, there)
        lost = min(max(lost, _lost_to_a_copy(nbytes, ways)), _MOST_LOST * busy)
    per_byte = max(0.0, lost - each) / nbytes
    return Link(h2d, d2h, latency, issue, heard, late, each, per_byte)


def _copies(nbytes: int, source: _Sharding, target: _Sharding) -> _Copies:
    """Copies one after the other, each waited for by a thread, as in a run."""
    array = memory.zeros(jax.ShapeDtypeStruct((nbytes // 4,), np.float32), source)
    jax.block_until_ready(array)
    times = [
        _copy(array, target)
        for _ in range(_SMALL_COPIES if nbytes == _SMALL_BYTES else _LARGE_COPIES)
    ]
    # A quarter of them is not disturbed, and finds memory that need not be made first.
    first_quarter = lambda some: statistics.quantiles(some, n=4)[0]
    return _Copies(*map(first_quarter, zip(*times[_WARM_UP:], strict=True)))


def _operand(nbytes: int, sharding: _Sharding) -> jax.Array:
    """A square matrix that with its product takes about so many bytes."""
    n = math.isqrt(nbytes // 8)
    return memory.zeros(jax.ShapeDtypeStruct((n, n), np.float32), sharding)


def _product(nbytes: int, ways: Sequence[tuple[_Sharding, _Sharding]]) -> tuple[Any, Any]:
    """A product that with its result takes about so many bytes, and its operand."""
    operand = _operand(nbytes, ways[0][1])
    return jax.jit(jnp.matmul).lower(operand, operand).compile(), operand


def _small_beside_products(
    nbytes: int, ways: Sequence[tuple[_Sharding, _Sharding]]
) -> _Copies:
    """Small copies while the cores compute.

    Few beside each product: many one after the other find all that they need in the
    caches, as those of a run do not. Some wait for milliseconds until a core is free. That
    is none of the loop's time: where it held up the computing, a core would be free. So the
    median counts.
    """
    product, operand = _product(min(nbytes, _SHORT_BYTES), ways)
    arrays = [
        memory.zeros(jax.ShapeDtypeStruct((_SMALL_BYTES // 4,), np.float32), source)
        for source, _ in ways
    ]
    jax.block_until_ready((arrays, product(operand, operand)))
    times: list[tuple[float, float, float]] = []
    for at in range(_PRODUCTS):
        result = product(operand, operand)
        for _ in range(_ISSUED):
            if result.is_ready():
                break
            times.append(_copy(arrays[at % 2], ways[at % 2][1]))
        jax.block_until_ready(result)
    return _Copies(*map(statistics.median, zip(*times, strict=True)))


def _copy(array: jax.Array, target: _Sharding) -> tuple[float, float, float]:
    """One copy, waited for by a thread, as in a run: its seconds, of its start, of the
    cores."""
    over = threading.Semaphore(0)
    began, busy_before = time.perf_counter(), time.process_time()
    copy = memory.transferred(array, target)
    waiters.submit(waiters.Job([copy], lambda error, ready: over.release()))
    issued = time.perf_counter()
    over.acquire()
    ended, busy = time.perf_counter(), time.process_time()
    return ended - began, issued - began, busy - busy_before


def _late_beside_products(nbytes: int, sharding: _Sharding) -> float:
    """Seconds from the end of a sleep in one thread until another one, which waits for it,
    knows, while the cores compute.

    Most are short and a few long, and the waits of a run add up: their mean.
    """
    operand = _operand(min(nbytes, _SHORT_BYTES), sharding)
    products = jax.jit(lambda a, times: jax.lax.fori_loop(0, times, lambda i, b: a @ b, a))
    products = products.lower(operand, 0).compile()
    began = time.perf_counter()
    jax.block_until_ready(products(operand, _PRODUCTS))
    each = (time.perf_counter() - began) / _PRODUCTS
    late: list[float] = []
    for _ in range(_SLEEPS):
        over = threading.Semaphore(0)
        due = time.perf_counter() + _SLEEP_SECONDS

        def sleep(due: float = due, over: threading.Semaphore = over) -> None:
            time.sleep(max(0.0, due - time.perf_counter()))
            over.release()

        threading.Thread(target=sleep, daemon=True).start()
        result = products(operand, math.ceil(2 * _SLEEP_SECONDS / each))
        over.acquire()
        late.append(time.perf_counter() - due)
        jax.block_until_ready(result)
    return statistics.mean(late)


def _lost_to_a_copy(nbytes: int, ways: Sequence[tuple[_Sharding, _Sharding]]) -> float:
    """Seconds that products take longer for each copy beside them, of so many bytes."""
    product, operand = _product(nbytes, ways)

    def seconds_of(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            jax.block_until_ready(product(operand, operand))
        return time.perf_counter() - began

    seconds_of(1)  # the first one is not as quick
    times = max(1, round(_SECONDS / seconds_of(1)))
    lost = []
    for at in range(_ROUNDS):
        alone = seconds_of(times)
        with _copying(nbytes, *ways[at % len(ways)]) as done:
            beside = seconds_of(times)
        lost.append((beside - alone) / max(1, len(done)))
    return statistics.median(lost)


@contextlib.contextmanager
def _copying(nbytes: int, source: _Sharding, target: _Sharding) -> Iterator[list[int]]:
    """Copies in another thread meanwhile; one number more for each that is over."""
    array = memory.zeros(jax.ShapeDtypeStruct((nbytes // 4,), np.float32), source)
    jax.block_until_ready(array)
    enough, done = threading.Event(), list[int]()

    def copy() -> None:
        with jax.transfer_guard("allow"):
            while not enough.wait(nbytes / _BESIDE):
                jax.block_until_ready(memory.transferred(array, target))
                done.append(nbytes)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        enough.set()
        thread.join()
