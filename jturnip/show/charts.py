"""Charts with matplotlib, which is imported where one is asked for."""

import itertools
from typing import Any

from jturnip.show.pictures import COLOURS, IDLE, unit_of
from jturnip.show.timeline import Lane


def of_comparison(comparison: Any, axes: Any = None) -> Any:
    """Time, and bytes over the link, against the budget; returns the figure.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "a plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    if axes is None:
        figure, axes = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
    else:
        figure = axes[0].figure
    rows = [row for row in comparison.rows if row.gpu_bytes is not None]
    unit, name = unit_of(max((row.gpu_bytes for row in rows), default=1))
    _times(axes[0], comparison, rows, unit)
    _bytes(axes[1], rows, unit, name)
    for ax in axes:
        peak = comparison.stock_peak_bytes / unit
        ax.axvline(peak, color="grey", linestyle=":", label="peak of jax.jit")
        ax.set_xlabel(f"budget ({name})")
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
        # Below, where it hides nothing.
        ax.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize="small"
        )
    return figure


def _times(ax: Any, comparison: Any, rows: Any, unit: int) -> None:
    scale, name = _seconds([r.median_seconds for r in comparison.rows if r.seconds])
    strategies = list(dict.fromkeys(row.strategy for row in rows if row.seconds))
    markers = "osD^vP"
    for k, strategy in enumerate(strategies):
        own = sorted((r for r in rows if r.seconds and r.strategy == strategy), key=_budget)
        x = [r.gpu_bytes / unit for r in own]
        y = [r.median_seconds / scale for r in own]
        style = {"color": COLOURS[Lane.COMPUTE], "marker": markers[k % len(markers)]}
        ax.plot(x, y, label=f"jturnip, {strategy}", **style)
        bounds = [(r.lower_bound_seconds or 0) / scale for r in own]
        if any(bounds):
            ax.plot(x, bounds, color=COLOURS[Lane.COMPUTE], linestyle="--", alpha=0.7,
                    label="least possible" if k == 0 else None)  # fmt: skip
    others = [row for row in comparison.rows if row.gpu_bytes is None and row.seconds]
    for row, marker in zip(others, itertools.cycle("*x+1234|"), strict=False):
        x, y = row.peak_bytes / unit, row.median_seconds / scale
        style = {"color": "grey" if marker == "*" else IDLE, "linestyle": ""}
        ax.plot([x], [y], marker=marker, markersize=10, label=row.name, **style)
    refused = [r.gpu_bytes / unit for r in rows if not r.seconds]
    if refused:
        ax.plot(refused, [0] * len(refused), "x", color="grey", label="refused")
    ax.set_ylabel(f"time of a call ({name})")
    ax.set_title("time")


def _bytes(ax: Any, rows: Any, unit: int, name: str) -> None:
    own = sorted((r for r in rows if r.seconds), key=_budget)
    x = [r.gpu_bytes / unit for r in own]
    for lane, field in ((Lane.H2D, "h2d_bytes"), (Lane.D2H, "d2h_bytes")):
        y = [getattr(r, field) / unit for r in own]
        ax.plot(x, y, marker="o", color=COLOURS[lane], label=lane.title)
    ax.set_ylabel(f"bytes over the link ({name})")
    ax.set_title("bytes over the link, a call")


def _budget(row: Any) -> int:
    return row.gpu_bytes


def _seconds(times: list[float]) -> tuple[float, str]:
    most = max(times, default=1.0)
    return (1.0, "s") if most >= 1 else (1e-3, "ms")
