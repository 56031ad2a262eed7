"""A run as a trace that Perfetto opens.

Trace Event Format (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU):
one process, a thread for each lane, times in microseconds.
"""

import gzip
import json
import os
from collections.abc import Iterator
from typing import Any

from jturnip.graph.report import RunReport
from jturnip.show import timeline
from jturnip.show.timeline import Lane, Timeline


_PROCESS = 1
_WITHIN = 0.99  # of a slice: an arrow that leaves at its very end would leave the next


def save(report: RunReport, path: str | os.PathLike[str]) -> None:
    """Writes a run's trace; compressed where the name ends in ".gz"."""
    text = json.dumps(to_dict(timeline.of_run(report)), separators=(",", ":"))
    name = os.fspath(path)
    data = text.encode("utf-8")
    with open(name, "wb") as file:
        file.write(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)


def to_dict(run: Timeline) -> dict[str, Any]:
    """The trace as plain data."""
    events = [*_names(), *_slices(run), *_flows(run), *_memory(run), *_rates(run)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"gpu_bytes": run.gpu_bytes, "peak_bytes": run.peak_bytes},
    }


def _event(phase: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": _PROCESS, "ts": 1e6 * seconds, **more}


def _names() -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "jturnip"}}
    for lane in Lane:
        thread = {"ph": "M", "pid": _PROCESS, "tid": int(lane) + 1}
        yield {**thread, "name": "thread_name", "args": {"name": lane.title}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": int(lane)}}


def _slices(run: Timeline) -> Iterator[dict[str, Any]]:
    for e in run.events:
        args: dict[str, Any] = {"op": e.number, "bytes": e.nbytes}
        if e.source:
            args["source"] = e.source
        yield _event(
            "X",
            e.start,
            dur=1e6 * e.seconds,
            tid=int(e.lane) + 1,
            name=e.name,
            cat=e.lane.title,
            args=args,
        )


def _flows(run: Timeline) -> Iterator[dict[str, Any]]:
    """An arrow from each reload to the first task that reads it."""
    for e in run.events:
        for at in e.reloads:
            source = run.events[at]
            common: dict[str, Any] = {"id": at, "name": "reload", "cat": "reload"}
            # Within the slices that they join: near the one's end, at the other's begin.
            leaves = source.start + _WITHIN * source.seconds
            yield _event("s", leaves, tid=int(source.lane) + 1, **common)
            yield _event("f", e.start, tid=int(e.lane) + 1, bp="e", **common)


def _memory(run: Timeline) -> Iterator[dict[str, Any]]:
    for when, in_use in run.memory:
        yield _event("C", when, name="device memory", args={"bytes in use": in_use})


def _rates(run: Timeline) -> Iterator[dict[str, Any]]:
    """Bytes per second of each direction of the link, one copy after the other."""
    for lane in (Lane.H2D, Lane.D2H):
        name = f"link {lane.title}"
        for e in run.lane(lane):
            if e.seconds > 0:
                rate = e.nbytes / e.seconds
                yield _event("C", e.start, name=name, args={"bytes per second": rate})
                yield _event("C", e.end, name=name, args={"bytes per second": 0.0})
