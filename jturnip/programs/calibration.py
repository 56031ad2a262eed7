"""What a link does, and what its copies cost the computing beside them: measured.

Once in a process for each device, when tasks are first tried out on it. A CPU copies with
the cores that also compute, so the time that copies take from them is time that tasks lose.
An accelerator has engines for copies, which take a hundredth or so of its memory's
bandwidth: that is not measured.
"""

import os
import statistics
import threading
import time
from dataclasses import dataclass

import jax
import numpy as np

from jturnip import memory, placement
from jturnip.compat import Device
from jturnip.compiler.executables import Trials
from jturnip.runtime import waiters
from jturnip.runtime.schedule import Link
from jturnip.units import GRANULE


_SMALL_BYTES = 4096
# Of a copy whose rate is measured: the size of a larger weight, or the least that tells
# anything, where there is no room for more.
_LARGE_BYTES = 4 << 20
_LEAST_BYTES = 256 << 10
# How many are on the device at once: small and large, the one before and the next.
_ARRAYS = 4
# Copies of each kind; the first ones do not count.
_COPIES = 15
_WARM_UP = 4

_links: dict[Device, Link] = {}
_measuring = threading.Lock()


def measured_link(device: Device) -> Link | None:
    """What was measured; None before `calibrate`, or where there was no room for it."""
    return _links.get(device)


def calibrate(device: Device, trials: Trials) -> None:
    """Measures the link to a device, unless that has been done or there is no room."""
    nbytes = min(_LARGE_BYTES, trials.room // _ARRAYS // GRANULE * GRANULE)
    if device in _links or nbytes < _LEAST_BYTES:
        return
    with trials.alone(), _measuring, jax.transfer_guard("allow"):
        if device not in _links:
            _links[device] = _measured(device, nbytes)
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
    latency = max(copies.seconds for copies in small)
    issue = statistics.mean(copies.issue_seconds for copies in small)
    if device.platform != "cpu":
        return Link(h2d, d2h, latency, issue)
    each = statistics.mean(copies.busy_seconds for copies in small) / _cores()
    of_large = statistics.mean(copies.busy_seconds for copies in large) / _cores()
    return Link(h2d, d2h, latency, issue, each, max(0.0, of_large - each) / nbytes)


def _copies(
    nbytes: int, source: jax.sharding.Sharding, target: jax.sharding.Sharding
) -> _Copies:
    """Copies one after the other, each waited for by a thread, as in a run."""
    array = memory.zeros(jax.ShapeDtypeStruct((nbytes // 4,), np.float32), source)
    jax.block_until_ready(array)
    over = threading.Semaphore(0)
    seconds, issue, busy = [], [], []
    for _ in range(_COPIES):
        began, busy_before = time.perf_counter(), time.process_time()
        copy = memory.transferred(array, target)
        waiters.submit(waiters.Job([copy], lambda error, ready: over.release()))
        issue.append(time.perf_counter() - began)
        over.acquire()
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - busy_before)
    # A quarter of them is not disturbed, and finds memory that need not be made first.
    first_quarter = lambda times: statistics.quantiles(times[_WARM_UP:], n=4)[0]
    return _Copies(first_quarter(seconds), first_quarter(issue), first_quarter(busy))


def _cores() -> int:
    """How many cores this process may compute on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
