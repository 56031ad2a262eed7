"""How everything here is measured and shown: paired samples, their medians, one table.

Two ways that are compared take turns in one process, so that they share whatever else the
machine does, and each ratio comes from two neighbours in time.
"""

import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jturnip.native import marks


ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity."""

    name: str
    # Empty where nothing could be measured; `more` then says why.
    samples: tuple[float, ...]
    unit: str = ""
    # At most this much is wanted; None: only reported.
    target: float | None = None
    # More columns of its table: title → number or text.
    more: dict[str, float | str] = field(default_factory=dict[str, float | str])

    @property
    def median(self) -> float:
        return statistics.median(self.samples) if self.samples else math.nan

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between these lies the middle half of the samples."""
        if len(self.samples) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    @property
    def verdict(self) -> str:
        if self.target is None or not self.samples:
            return ""
        return "pass" if self.median <= self.target else "MISS"

    def to_json_dict(self) -> dict[str, Any]:
        known = bool(self.samples)  # JSON has no NaN
        return {
            "name": self.name,
            "unit": self.unit,
            "target": self.target,
            "median": self.median if known else None,
            "quartiles": list(self.quartiles) if known else None,
            "samples": list(self.samples),
            "verdict": self.verdict,
            **({"more": self.more} if self.more else {}),
        }


@dataclass(frozen=True, slots=True)
class Section:
    """Figures that answer one question, and what to know when reading them."""

    title: str
    text: str
    figures: tuple[Figure, ...]

    def to_json_dict(self) -> dict[str, Any]:
        figures = [figure.to_json_dict() for figure in self.figures]
        return {"title": self.title, "text": self.text, "figures": figures}


def figures_of(record: dict[str, Any]) -> tuple[Figure, ...]:
    """The figures of a section's record."""
    return tuple(
        Figure(f["name"], tuple(f["samples"]), f["unit"], f["target"], f.get("more", {}))
        for f in record["figures"]
    )


# -- timing ----------------------------------------------------------------------------


def seconds_of(call: Callable[[], Any], calls: int = 1) -> float:
    """Wall time of one call, from several in a row, until the last result is there."""
    result = None
    begin = time.perf_counter()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / calls


def in_turn(
    ways: Sequence[Callable[[], float]], rounds: int, warm_up: int = 1
) -> list[tuple[float, ...]]:
    """Samples of all ways, one tuple a round; each round begins with another way."""
    taken: list[tuple[float, ...]] = []
    for number in range(rounds + warm_up):
        row = [0.0] * len(ways)
        for step in range(len(ways)):
            at = (number + step) % len(ways)
            row[at] = ways[at]()
        if number >= warm_up:
            taken.append(tuple(row))
    return taken


def ratios(pairs: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """First over second, pair by pair."""
    return tuple(pair[0] / pair[1] for pair in pairs)


def column(rows: Iterable[Sequence[float]], at: int) -> tuple[float, ...]:
    return tuple(row[at] for row in rows)


# -- results and memory ----------------------------------------------------------------


def difference(found: Any, expected: Any, least: float = 1e-30) -> float:
    """Of two trees of numbers, the largest difference over the largest number of its
    array, or over `least` where that is more; infinite where one is no number."""
    worst = 0.0
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, two = np.asarray(one, np.float64), np.asarray(two, np.float64)
        size = max(least, float(np.max(np.abs(two), initial=0.0)))
        apart = float(np.max(np.abs(one - two), initial=0.0)) / size
        worst = max(worst, apart if math.isfinite(apart) else math.inf)
    return worst


def peak_in_use() -> int | None:
    """The most bytes of the device that were in use in this process; None where the
    allocator gives no figures."""
    stats = jax.devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


# -- showing ---------------------------------------------------------------------------


def number(value: float | str, unit: str = "") -> str:
    """Three digits, with its unit."""
    if isinstance(value, str):
        return value
    if value == 0 or 0.001 <= abs(value) < 10_000:
        text = f"{value:.3f}" if abs(value) < 10 else f"{value:.3g}"
    else:
        text = f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines of Markdown's kind of table; the first is the header."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    header, *body = rows
    return [line(header), line(["-" * width for width in widths]), *map(line, body)]


def table(figures: Sequence[Figure]) -> list[str]:
    """Figures as lines of Markdown; columns that all leave empty are left out."""
    more = list(dict.fromkeys(title for f in figures for title in f.more))
    header = ["figure", "at most", "median", "middle half", "samples", "verdict", *more]
    rows = [header, *(_cells(figure, more) for figure in figures)]
    kept = [at for at in range(len(header)) if at == 0 or any(row[at] for row in rows[1:])]
    return aligned([[row[at] for at in kept] for row in rows])


def _cells(figure: Figure, more: Sequence[str]) -> list[str]:
    low, high = (number(value) for value in figure.quartiles)
    single = len(figure.samples) < 2
    return [
        figure.name,
        "" if figure.target is None else number(figure.target, figure.unit),
        number(figure.median, figure.unit) if figure.samples else "-",
        "" if single else f"{low} to {high}",
        str(len(figure.samples)),
        figure.verdict,
        *(number(figure.more.get(title, "")) for title in more),
    ]


def write_json(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Writes a file whole or not at all, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    half.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    half.replace(path)


# -- where it was measured -------------------------------------------------------------


def environment() -> dict[str, Any]:
    """The machine and the versions; starts JAX's backend."""
    device = jax.devices()[0]
    status = marks.status()
    marked = status.loaded
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("jax", "jaxlib", "numpy", "optax")},
        "xla_ext": "loaded" if marked else f"not loaded: {status.reason}",
        "commit": commit(),
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def in_words(where: dict[str, Any]) -> str:
    """One line on an `environment`."""
    return (
        f"{where['device']} ({where['processor']}), {where['cores']} cores, load"
        f" {where['load']} before; Python {where['python']}, jax {where['jax']},"
        f" jaxlib {where['jaxlib']}, xla_ext {where['xla_ext']}; commit {where['commit']}"
    )


def commit() -> str:
    """The commit that is checked out, with a + where files differ from it."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "jturnip")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+" if changed else head


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
