"""`jturnip demo`: trains a small Llama twice, with stock `jax.jit` and in a fraction of the
memory that one needs, and shows both side by side.

`run_demo` measures and gives a record, `render` makes its table. The optimizer and the
progress bar come from optional packages, imported where they are used.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import jturnip
from jturnip.models import llama, text
from jturnip.show.text import aligned
from jturnip.stock import executable_bytes as peak_bytes
from jturnip.units import format_bytes


AGREE_WITHIN = 1e-3  # nats; XLA rounds differently in pieces, and steps add that up


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to train, in how much memory."""

    steps: int = 8
    size: str = "demo"  # of llama.SIZES
    budget_fraction: float = 0.25  # of the peak of stock jax.jit
    link_gbps: float | None = None  # gigabytes per second of a simulated link

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if self.budget_fraction <= 0:
            raise ValueError(f"budget_fraction must be above 0, not {self.budget_fraction}")
        if self.link_gbps is not None and self.link_gbps <= 0:
            raise ValueError(f"link_gbps must be above 0, not {self.link_gbps}")


@dataclass(frozen=True, slots=True)
class Training:
    """One way's losses and costs; seconds and bytes are the median step's."""

    losses: tuple[float, ...]
    peak_bytes: int  # on the device
    seconds: float
    setup_seconds: float  # to trace, plan and compile
    h2d_bytes: int | None = None  # None where nothing counts them
    d2h_bytes: int | None = None
    stall_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both ways, and what they did."""

    options: DemoOptions
    model: llama.LlamaConfig
    parameters: int
    device: str
    gpu_bytes: int
    strategy: str
    stock: Training
    budgeted: Training

    @property
    def differences(self) -> tuple[float, ...]:
        """How far apart the losses of each step are."""
        pairs = zip(self.stock.losses, self.budgeted.losses, strict=True)
        return tuple(abs(one - other) for one, other in pairs)

    @property
    def agrees(self) -> bool:
        """Whether the losses are the same to rounding; never true of a NaN."""
        return all(difference <= AGREE_WITHIN for difference in self.differences)


# A GPU's own choice of matmul precision is coarse enough to hide a wrong answer.
@jax.default_matmul_precision("highest")
def run_demo(options: DemoOptions) -> DemoResult:
    """Trains both ways on the same data from the same weights."""
    tqdm = _tqdm()
    model = llama.config(options.size)
    optimizer = llama.adamw()
    train_step = functools.partial(llama.train_step, model, optimizer)
    stream = text.batches(model.batch, model.length)
    batches = [next(stream) for _ in range(options.steps)]
    state = llama.init_state(model, optimizer, jax.random.key(0))
    on_host = jturnip.host(state)  # before stock jax.jit, which is given the state to eat

    with tqdm(total=2 * options.steps, disable=None, unit="step") as bar:
        bar.set_description("compiling for jax.jit")
        stock = _Way(lambda: jax.jit(train_step, donate_argnums=0), state, batches[0])
        gpu_bytes = int(options.budget_fraction * peak_bytes(stock.compiled))
        link = _link(options.link_gbps)
        ours = lambda: jturnip.jit(
            train_step, gpu_bytes=gpu_bytes, donate_argnums=(0,), link=link
        )
        bar.set_description("compiling for jturnip.jit")
        budgeted = _Way(ours, on_host, batches[0])
        del state, on_host
        bar.set_description("training")
        # In turn, so that what else the machine does slows both.
        for batch in batches:
            for way in (stock, budgeted):
                way.step(batch)
                bar.update()

    reports = budgeted.reports
    return DemoResult(
        options=options,
        model=model,
        parameters=llama.param_count(model),
        device=jax.devices()[0].device_kind,
        gpu_bytes=gpu_bytes,
        strategy=reports[-1].strategy,
        stock=stock.training(peak_bytes(stock.compiled)),
        budgeted=budgeted.training(max(r.peak_bytes for r in reports)),
    )


def render(result: DemoResult) -> str:
    """The result as a table of three columns."""
    model, stock, budgeted = result.model, result.stock, result.budgeted
    fraction = result.options.budget_fraction
    rows = [("", "jax.jit", "jturnip.jit", "")]
    for number, (one, other, difference) in enumerate(
        zip(stock.losses, budgeted.losses, result.differences, strict=True), start=1
    ):
        apart = f"differ by {difference:.1e}"
        rows.append((f"loss of step {number}", f"{one:.6f}", f"{other:.6f}", apart))
    rows += [
        _row("peak bytes on the device", format_bytes, stock, budgeted, "peak_bytes"),
        _row("moved to the device, a step", format_bytes, stock, budgeted, "h2d_bytes"),
        _row("moved to the host, a step", format_bytes, stock, budgeted, "d2h_bytes"),
        _row("seconds, a step", _seconds, stock, budgeted, "seconds"),
        _row("waiting for transfers, a step", _seconds, stock, budgeted, "stall_seconds"),
        _row("setting up, once", _seconds, stock, budgeted, "setup_seconds"),
    ]
    titles = (
        f"A Llama of {result.parameters:,} parameters learns {model.batch} x "
        f"{model.length} bytes a step on {result.device}.",
        f"jturnip.jit has {format_bytes(result.gpu_bytes)}, {fraction:.0%} of what jax.jit "
        f"needs, and plans with strategy {result.strategy}.",
    )
    verdict = "agree" if result.agrees else "DO NOT agree"
    most = np.max(result.differences)  # NaN if any is
    end = f"The losses {verdict}: they differ by at most {most:.1e}."
    return "\n".join([*titles, "", *aligned(rows), "", end])


class _Way:
    """One way to train: compiled at once, then a step at a time."""

    def __init__(self, jitted: Callable[[], Any], state: Any, batch: Any):
        begin = time.perf_counter()
        self.compiled = jitted().lower(state, batch).compile()
        self._setup_seconds = time.perf_counter() - begin
        self._state = state
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self.reports: list[jturnip.RunReport] = []

    def step(self, batch: np.ndarray) -> None:
        begin = time.perf_counter()
        self._state, loss = jax.block_until_ready(self.compiled(self._state, batch))
        self._seconds.append(time.perf_counter() - begin)
        self._losses.append(float(loss))
        report = getattr(self.compiled, "last_run", None)
        if report is not None:
            self.reports.append(report)

    def training(self, peak: int) -> Training:
        """What it did, and what it cost: the first step, which warms up, left out."""
        reports = self.reports
        middle = lambda field: _middle([getattr(r, field) for r in reports])
        return Training(
            losses=tuple(self._losses),
            peak_bytes=peak,
            seconds=_middle(self._seconds[1:] or self._seconds),
            setup_seconds=self._setup_seconds,
            h2d_bytes=int(middle("h2d_bytes")) if reports else None,
            d2h_bytes=int(middle("d2h_bytes")) if reports else None,
            stall_seconds=middle("stall_seconds") if reports else None,
        )


def _link(gbps: float | None) -> Any:
    if gbps is None:
        return None
    return jturnip.SimulatedLink(
        h2d_bytes_per_second=gbps * 1e9,
        d2h_bytes_per_second=gbps * 1e9,
        latency_seconds=10e-6,
        jitter=0.0,
        seed=0,
    )


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def _row(
    name: str,
    form: Callable[[float], str],
    stock: Training,
    budgeted: Training,
    field: str,
) -> tuple[str, str, str, str]:
    one, other = getattr(stock, field), getattr(budgeted, field)
    ratio = f"x {other / one:.2f}" if one and other is not None else ""
    left, right = ("-" if value is None else form(value) for value in (one, other))
    return name, left, right, ratio


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}"


def _tqdm() -> Callable[..., AbstractContextManager[Any]]:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            'the demo needs tqdm, which is not installed: pip install "jturnip[demo]"'
        ) from error
    return tqdm
