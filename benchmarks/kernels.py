"""What ran on a GPU during a call, kernel by kernel, by JAX's own profiler."""

import collections
import glob
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Kernels:
    """Kernels of one call on all streams of the device; copies from and to it left out."""

    # From the first one's begin to the last one's end; and with one at least running.
    span: float  # seconds
    busy: float  # seconds
    launches: int
    # Seconds of each name, longest first.
    seconds: dict[str, float]


def kernels_of(call: Callable[[], Any]) -> Kernels | None:
    """Calls once; None where the profiler shows no streams, as on a CPU."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(call())
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        profile = jax.profiler.ProfileData.from_file(path)
        events = [
            (event.start_ns, event.end_ns, event.name)
            for plane in profile.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
            if not event.name.startswith(("Memcpy", "Memset"))
        ]
    if not events:
        return None
    total: collections.Counter[str] = collections.Counter()
    for begin, end, name in events:
        total[name] += (end - begin) * 1e-9
    span = max(end for _, end, _ in events) - min(begin for begin, _, _ in events)
    busy = _covered((begin, end) for begin, end, _ in events)
    return Kernels(span * 1e-9, busy * 1e-9, len(events), dict(total.most_common()))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of a line some spans cover together."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered
