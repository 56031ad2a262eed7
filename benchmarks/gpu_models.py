"""The models in a budget, on a device that counts its bytes; one process each.

`baseline` is stock `jax.jit`, and what it leaves for the others to compare with. `budgeted`
runs before anything else has used the device, since its peak cannot be reset.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import jturnip
from benchmarks import inside, kernels, steps
from benchmarks.measure import (
    Figure,
    column,
    difference,
    in_turn,
    peak_in_use,
    ratios,
    seconds_of,
)
from jturnip.demo import peak_bytes
from jturnip.models import llama, pair
from jturnip.planner.figures import plans_of_tasks


AGREE_WITHIN = {
    "float32": 1e-2,
    "bfloat16": 3e-2,
}  # of a loss; GPUs multiply float32 coarsely
_LONGEST = 12  # kernels that are named
_SEEN = 512  # numbers of each result that are compared


@dataclass(frozen=True)
class Problem:
    """A function with its first arguments, as numpy arrays."""

    fn: Callable[..., Any]
    state: Any
    batch: Any
    # Whether the first result is the next call's first argument, which is donated.
    trains: bool
    tolerance: float

    @property
    def keywords(self) -> dict[str, Any]:
        return {"donate_argnums": 0} if self.trains else {}


def problem(model: str, mode: str, size: str, changes: dict[str, Any]) -> Problem:
    """`model` is llama or pair, `mode` forward or train."""
    kind: Any = {"llama": llama, "pair": pair}[model]
    config = kind.config(size, **changes)
    trains = mode == "train"
    optimizer = kind.adamw()
    state = steps.numbers(
        jax.eval_shape(lambda: kind.init_state(config, optimizer, jax.random.key(0)))
    )
    if model == "llama":
        batch = steps.batch_of(config)
    else:
        batch = next(pair.examples(config))
        batch = batch if trains else batch.pair
    if trains:
        fn = functools.partial(kind.train_step, config, optimizer)
    else:
        fn = functools.partial(kind.forward, config)
    first = state if trains else state.params
    return Problem(fn, first, batch, trains, AGREE_WITHIN[config.dtype])


def baseline(p: Problem, repeats: int, leave: Callable[[dict[str, Any]], None]) -> Any:
    """Stock `jax.jit`, then jturnip where everything fits, whole and split."""
    begin = time.perf_counter()
    stock = jax.jit(p.fn, **p.keywords).lower(p.state, p.batch).compile()
    compiling = time.perf_counter() - begin
    first = _Runner(p, stock, steps.on_device)
    seen = [first.seen() for _ in range(2)]
    seconds = tuple(first.seconds() for _ in range(repeats))
    needed, used = peak_bytes(stock), peak_in_use()
    # The allocator's granule makes of XLA's own figure a little more.
    leave(
        {
            "peak_bytes": max(needed, used or 0),
            "seconds": float(np.median(seconds)),
            "seen": seen,
        }
    )
    yield Figure("jax.jit compiles", (compiling,), "s")
    yield Figure("jax.jit, by call", seconds, "s")
    yield Figure("jax.jit needs, by XLA's analysis", (needed / 2**20,), "MiB")
    if used is not None:
        yield Figure("peak_bytes_in_use of jax.jit", (used / 2**20,), "MiB")
    for name, strategy, target in (
        ("jturnip.jit, whole, over jax.jit", "auto", 1.02),
        ("jturnip.jit, split, over jax.jit", "turnip", 1.10),
    ):
        ours = jturnip.jit(p.fn, gpu_bytes=steps.PLENTY, strategy=strategy, **p.keywords)
        second = _Runner(p, ours, steps.on_device)
        taken = in_turn([second.seconds, first.seconds], repeats, warm_up=2)
        more = {"jax.jit, ms": float(np.median(column(taken, 1))) * 1e3}
        plan = ours.last_run.plan
        yield Figure(name, ratios(taken), "", target, {**more, **_of_plan(plan)})
        if strategy != "auto" and not p.trains and not plan.pieces:
            # Queued all at once, without the loop: what is left is XLA's across tasks.
            compiled = ours.lower(*second.arguments).compile()
            bare = inside.bare_calls(compiled, jax.tree.leaves(second.arguments))
            calls = [functools.partial(seconds_of, bare), first.seconds]
            taken = in_turn(calls, repeats, warm_up=2)
            yield Figure("its executables, called bare, over jax.jit", ratios(taken))
        if strategy != "auto":
            yield from _kernels({"split": second, "jax.jit": first})
        del second, ours


def _kernels(ways: dict[str, Callable[[], Any]]) -> Iterator[Figure]:
    """What the device is busy with in a call, and the names of what takes longest."""
    for name, way in ways.items():
        seen = kernels.kernels_of(way)
        if seen is None:
            return
        longest = {n[:60]: 1e3 * s for n, s in list(seen.seconds.items())[:_LONGEST]}
        more = {"launches": str(seen.launches), "from first to last, ms": 1e3 * seen.span}
        yield Figure(
            f"kernels, {name}", (1e3 * seen.busy,), "ms", None, {**more, **longest}
        )


def budgeted(
    p: Problem,
    share: float,
    left: dict[str, Any],
    repeats: int,
    strategies: Sequence[str],
) -> Iterator[Figure]:
    """jturnip in a share of what `baseline` needed; arguments in pinned host memory."""
    gpu_bytes = int(share * left["peak_bytes"])
    begin = time.perf_counter()
    runner = _Runner(p, p.fn, jturnip.host)
    for _ in range(4):
        try:
            step = jturnip.jit(p.fn, gpu_bytes, **p.keywords)
            compiled = step.lower(*runner.arguments).compile()
            break
        except jturnip.DoesNotFit as error:
            gpu_bytes = error.needed_bytes
            least = gpu_bytes / left["peak_bytes"]
            yield Figure("refused; the smallest budget, over jax.jit's need", (least,))
    else:
        raise RuntimeError(
            f"the budget that the refusal named, {gpu_bytes}, is refused too"
        )
    runner.call = step
    after_compiling = peak_in_use()
    seen = [runner.seen() for _ in range(2)]
    yield Figure("to the second result", (time.perf_counter() - begin,), "s")
    seconds = tuple(runner.seconds() for _ in range(repeats))
    report, used = step.last_run, peak_in_use()
    yield from _memory(gpu_bytes, compiled.plan, report, used, after_compiling)
    ours, theirs = ([list(map(np.asarray, run)) for run in s] for s in (seen, left["seen"]))
    apart = difference(ours, theirs, least=1.0)
    yield Figure("differs from jax.jit by", (apart,), "", p.tolerance)
    yield Figure(
        "seconds over jax.jit's",
        tuple(s / left["seconds"] for s in seconds),
        "",
        None,
        _of_run(report, float(np.median(seconds))) | _of_plan(compiled.plan),
    )
    if strategies:
        yield from _strategies(p, gpu_bytes, runner, strategies, repeats)


def _strategies(
    p: Problem, gpu_bytes: int, runner: "_Runner", names: Sequence[str], repeats: int
) -> Iterator[Figure]:
    """Strategies by name, in turn, on the same state."""
    calls = {
        name: jturnip.jit(p.fn, gpu_bytes, strategy=name, **p.keywords) for name in names
    }

    def timed(name: str) -> float:
        runner.call = calls[name]
        return runner.seconds()

    taken = in_turn([functools.partial(timed, name) for name in names], repeats)
    for at, name in enumerate(names):
        seconds = column(taken, at)
        more = _of_run(calls[name].last_run, float(np.median(seconds)))
        yield Figure(f"strategy {name}", seconds, "s", None, more)
    for at, name in enumerate(names[1:], start=1):
        over = ratios((row[at], row[0]) for row in taken)
        yield Figure(f"{name} over {names[0]}", over)


def _memory(
    gpu_bytes: int, plan: Any, report: Any, used: int | None, compiling: int | None
) -> Iterator[Figure]:
    if used is None:
        why = {"why": "skipped: the allocator gives no figures (memory_stats is None)"}
        yield Figure("peak_bytes_in_use / gpu_bytes", (), "", 1.0, {**why})
    else:
        more = {"MiB": used / 2**20, "after compiling, MiB": (compiling or 0) / 2**20}
        yield Figure(
            "peak_bytes_in_use / gpu_bytes", (used / gpu_bytes,), "", 1.0, {**more}
        )
        over = used / max(1, report.peak_bytes)
        yield Figure("peak_bytes_in_use / the run's own account", (over,))
    accounted = report.peak_bytes / gpu_bytes
    yield Figure("the run's own account / gpu_bytes", (accounted,), "", 1.0)
    yield Figure("the plan's peak / gpu_bytes", (plan.peak_bytes / gpu_bytes,), "", 1.0)


def _of_run(report: Any, seconds: float) -> dict[str, float | str]:
    return {
        "ran": report.strategy,
        "seconds": seconds,
        "computing": report.compute_seconds,
        "stalled": report.stall_seconds,
        "GB in": report.h2d_bytes / 1e9,
        "GB out": report.d2h_bytes / 1e9,
    }


def _of_plan(plan: Any) -> dict[str, float | str]:
    """What was predicted; and what its tasks take by themselves, as they were measured."""
    tasks = [task for each in plans_of_tasks(plan) for task in each.taskgraph.tasks]
    return {
        "tasks": str(len(tasks)),
        "their own seconds": sum(task.seconds for task in tasks),
        "predicted": plan.predicted_seconds,
        "at least": plan.lower_bound_seconds,
    }


class _Runner:
    """Calls a function again and again; a training state is fed back."""

    def __init__(self, p: Problem, call: Callable[..., Any], place: Callable[[Any], Any]):
        self.call = call
        self._trains = p.trains
        self.arguments = [place(p.state), place(p.batch)]

    def __call__(self) -> Any:
        results = self.call(*self.arguments)
        if self._trains:
            self.arguments[0] = results[0]
            return results[1]
        return results

    def seconds(self) -> float:
        return seconds_of(self)

    def seen(self) -> list[list[float]]:
        """Some numbers of every result of one call, and of the weights if it trains."""
        results = self()
        some = [results, self.arguments[0].params] if self._trains else [results]
        return [
            np.asarray(leaf, np.float32).ravel()[:_SEEN].tolist()
            for leaf in jax.tree.leaves(jax.device_get(some))
        ]
