"""Functions of other fields than language, at sizes of a GPU, each in a quarter of XLA's
peak: whether they run there, whether the answers are `jax.jit`'s, and how long it takes.

They are the functions of `tests/large_intermediates.py`, with longer long dimensions.
"""

import functools
import sys
import time
from collections.abc import Iterator

import jax
import numpy as np

import jturnip
from benchmarks.measure import (
    ROOT,
    Figure,
    difference,
    in_turn,
    peak_in_use,
    ratios,
    seconds_of,
)
from jturnip.demo import peak_bytes


sys.path.append(str(ROOT / "tests"))  # where its modules find each other
from tests import large_intermediates


# By how much the long dimensions grow, so that a GPU has some milliseconds of work; what
# differs most from the models comes first.
TIMES = {
    "a product of matrices": 16,
    "causal attention": 32,
    "one image through a network": 256,
    "gradients of cross entropy": 32,
    "kernel ridge by conjugate gradients": 16,
    "gradients of a residual network": 512,
    "a kernel times a matrix": 16,
    "gradients of a transformer block": 32,
    "filtered by ffts": 512,
    "a transport plan by sinkhorn": 32,
    "triangles of a pair representation": 8,
    "sorted along the long axis": 256,
    "gradients of a small unet": 256,
    "an outer product mean": 8,
    "gradients of a unet of one image": 64,
    "a gaussian process": 16,
}
# Of the largest number of a result. GPUs multiply float32 coarsely, in other blocks where
# the shapes are others.
_AGREE_WITHIN = 1e-2
_ROUNDS = 5


def field(name: str, times: int) -> Iterator[Figure]:
    """One of them, its arguments in pinned host memory; `jax.jit`'s are on the device."""
    case = large_intermediates.CASES[name]
    args = case.make(times)
    stock = jax.jit(case.fn)
    peak = peak_bytes(stock.lower(*args).compile())
    ours = jturnip.jit(case.fn, peak // 4)
    hosted = jturnip.host(args)
    before = peak_in_use()
    begin = time.perf_counter()
    try:
        found = jax.device_get(ours(*hosted))
    except jturnip.DoesNotFit as refusal:
        yield Figure("refused; asked for, of XLA's peak", (refusal.needed_bytes / peak,))
        return
    first = time.perf_counter() - begin
    call = functools.partial(ours, *hosted)
    second = seconds_of(call)
    used, report = peak_in_use(), ours.last_run
    here = jax.device_put(args)
    apart = difference(found, stock(*here))
    yield Figure("differs from jax.jit by", (apart,), "", _AGREE_WITHIN)
    if used is not None and before is not None and used > before:
        yield Figure("peak_bytes_in_use / gpu_bytes", (used / (peak // 4),), "", 1.0)
    ways = [functools.partial(seconds_of, way) for way in (call, lambda: stock(*here))]
    taken = in_turn(ways, _ROUNDS)
    nbytes = sum(a.nbytes for a in jax.tree.leaves(args))
    more = {
        "jax.jit, ms": float(np.median([row[1] for row in taken])) * 1e3,
        "first, s": first,
        "second, s": second,
        "peak, MiB": peak / 2**20,
        "arguments, MiB": nbytes / 2**20,
        "computing, ms": report.compute_seconds * 1e3,
        "stalled, ms": report.stall_seconds * 1e3,
        "MB in": report.h2d_bytes / 1e6,
        "MB out": report.d2h_bytes / 1e6,
        "ran": report.strategy,
    }
    yield Figure(
        "over jax.jit with its arguments on the device", ratios(taken), "", None, {**more}
    )
