"""What compiling reports, shows while it lasts, and finds in JAX's persistent cache."""

import concurrent.futures
import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import Holdings, assert_same, layers, tower, unconstrained_peak
from flat import flat_of

import jturnip
from jturnip import compat
from jturnip.compiler import executables, origin, profiles, progress
from jturnip.compiler.origin import Origin
from jturnip.compiler.report import CompileReport
from jturnip.frontend.partition import Partitioner
from jturnip.programs.devices import rates


X = np.ones((128, 128), np.float32)
TIGHT = 350_000  # five matrices of `layers`, and a little more


@pytest.fixture(autouse=True)
def no_executables():
    executables.clear_cache()


def several(x: Any, weights: Any) -> Any:
    """A tower of layers that all differ, in more than a number."""
    for number, weight in enumerate(weights):
        x = jnp.roll(x @ weight, number + 1, axis=0)
    return x


def lowered(fn: Callable[..., Any] = several, gpu_bytes: int = TIGHT) -> Any:
    afresh = lambda x, weights: fn(x, weights)  # JAX remembers what it compiled for `fn`
    return jturnip.jit(afresh, gpu_bytes).lower(X, layers(8))


# The report


def test_the_first_to_need_an_executable_compiles_it_and_the_next_re_uses_it():
    compiled = lowered().compile()  # executables live as long as somebody has them
    first, again = compiled.compile_report, lowered().compile().compile_report
    assert first.distinct >= 8
    assert (first.compiled, first.reused, first.cached) == (first.distinct, 0, 0)
    assert (again.compiled, again.reused, again.cached) == (0, first.distinct, 0)
    assert 0 < again.seconds < first.seconds


def test_equal_layers_are_compiled_once():
    compiled = lowered(tower).compile()
    assert compiled.compile_report.compiled < len(compiled.plan.taskgraph.tasks)


def test_a_function_that_fits_is_one_executable():
    report = lowered(gpu_bytes=2**30).compile().compile_report
    assert (report.distinct, report.compiled, report.reused, report.cached) == (1, 1, 0, 0)
    assert report.seconds > 0


def test_a_function_that_fits_and_that_jax_has_compiled_is_re_used():
    function = jturnip.jit(lambda x: x + 1, 2**30)
    assert function.lower(X).compile().compile_report.compiled == 1
    report = function.lower(X).compile().compile_report
    assert (report.distinct, report.compiled, report.reused, report.cached) == (1, 0, 1, 0)


def test_a_whole_that_was_tried_and_does_not_fit_counts_as_compiled():
    compiled = lowered(gpu_bytes=unconstrained_peak(several, X, layers(8)) - 1).compile()
    assert compiled.plan.strategy != "whole"
    report = compiled.compile_report
    assert report.compiled == report.distinct + 1


def test_tasks_that_were_cut_again_count_as_compiled():
    flat: Any = lowered()._budgeted.flattened.flat
    partitioner = Partitioner(flat, rates(jax.devices()[0]))

    def compile_groups(most_bytes: int, earlier: Any = None) -> Any:
        groups = partitioner.partition(most_bytes)
        context = compat.trace_context()
        return executables.compile_groups(
            flat, groups, executables.How(None, context), earlier
        )

    coarse = compile_groups(10**9)
    fine = compile_groups(0, coarse)
    assert coarse.report.distinct < fine.report.distinct
    assert fine.report.compiled == coarse.report.distinct + fine.report.distinct
    assert fine.report.seconds > coarse.report.seconds
    # What was compiled for this very function is not re-used when it is cut as before.
    assert compile_groups(10**9, fine).report == dataclasses.replace(
        fine.report, distinct=coarse.report.distinct, seconds=pytest.approx(0, abs=60)
    )
    # What was compiled for another is.
    other = compile_groups(0).report
    assert (other.compiled, other.reused) == (0, other.distinct)


@pytest.mark.long
def test_what_was_compiled_to_cut_a_function_otherwise_counts(
    monkeypatch: pytest.MonkeyPatch,
):
    compiled: list[int] = []
    real = executables._compile_in_parallel

    def compile_in_parallel(tasks: Any, how: Any) -> Any:
        compiled.append(len(tasks))
        return real(tasks, how)

    monkeypatch.setattr(executables, "_compile_in_parallel", compile_in_parallel)

    def kernel(x: Any, v: Any) -> Any:
        return jnp.exp(-jnp.sum(jnp.square(x[:, None] - x[None]), axis=-1)) @ v

    x, v = np.ones((512, 3), np.float32), np.ones((512, 64), np.float32)
    gpu_bytes = unconstrained_peak(kernel, x, v) // 3
    report = jturnip.jit(kernel, gpu_bytes).lower(x, v).compile().compile_report
    assert report.compiled == sum(compiled)
    assert report.reused == 0
    assert report.compiled > report.distinct  # as it is, it does not fit


def test_a_report_is_one_line():
    report = CompileReport(distinct=42, compiled=17, reused=20, cached=5, seconds=1.25)
    assert report.summary() == (
        "42 executables: 17 compiled, 20 re-used, 5 from JAX's persistent cache; 1.250 s"
    )


def test_more_than_is_allowed_is_not_compiled():
    flat = flat_of(several, X, layers(8))
    groups = Partitioner(flat, rates(jax.devices()[0])).partition(0)
    how = executables.How(None, compat.trace_context())
    distinct = executables.compile_groups(flat, groups, how).report.compiled
    executables.clear_cache()
    with pytest.raises(executables.TooManyTasks):
        executables.compile_groups(flat, groups, how, most=distinct - 1)
    made = executables.compile_groups(flat, groups, how, most=distinct)
    assert made.report.compiled == len(made.executables) == distinct
    # What is there already is not compiled.
    executables.compile_groups(flat, groups, how, most=0)


# JAX's persistent cache

PROGRAM = """
import dataclasses, json
import jax, jax.numpy as jnp, numpy as np
import jturnip
from jturnip.compiler import trials
from jturnip.programs import calibration

tried = []
make_operands = trials._Trial.make_operands
trials._Trial.make_operands = lambda *given: (tried.append(given), make_operands(*given))

def fn(x, weights):
    noise = jax.random.normal(jax.random.key(0), x.shape)
    for number, weight in enumerate(weights):
        x = jnp.roll(jnp.where(x > 0, x, noise) @ weight, number + 1, axis=0)
    return jax.lax.scan(lambda c, row: (c + row, c.sum()), x[0], x)

x, weights = np.ones((256, 256), np.float32), [np.eye(256, dtype=np.float32)] * 8
for strategy, gpu_bytes in ("turnip", 2_000_000), ("whole", 2**30):
    compiled = jturnip.jit(fn, gpu_bytes, strategy=strategy).lower(x, weights).compile()
    values = [float(leaf.sum()) for leaf in jax.tree.leaves(compiled(x, weights))]
    tasks = compiled.plan.taskgraph.tasks
    workspaces = [task.workspace for task in tasks]
    times = [[task.seconds, task.dispatch_seconds] for task in tasks]
    link = calibration.measured_link(jax.devices()[0])
    measured = [len(tried), times, dataclasses.asdict(link)]
    report = dataclasses.asdict(compiled.compile_report)
    print(json.dumps([report, measured, values, workspaces]))
"""


def in_a_process(program: str, **environment: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
def test_a_second_process_compiles_and_measures_nothing(tmp_path: Path):
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    first = in_a_process(PROGRAM, PYTHONHASHSEED="1", **environment)
    # The same program, all its lines moved.
    again = in_a_process("\n\n" + PROGRAM, PYTHONHASHSEED="2", **environment)
    for (before, measured, *same), (after, known, *found) in zip(first, again, strict=True):
        assert before["compiled"] >= before["distinct"] > 0
        assert (after["compiled"], after["cached"]) == (0, before["compiled"])
        assert found == same
        assert (known[0], known[2]) == (0, measured[2])
    (split, measured, *_), (whole, *_) = first
    assert split["distinct"] > 8
    assert whole["distinct"] == 1
    assert measured[0] > 8
    # Every task's time, as it was measured; the whole is not measured.
    assert again[0][1][1] == measured[1]


def test_profiles_are_kept_where_the_user_keeps_a_cache_and_only_there(tmp_path: Path):
    name = profiles.key(None, "a task")
    set_to = lambda value: jax.config.update("jax_compilation_cache_dir", value)
    usual = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009
    try:
        for nowhere in (None, "", "gs://bucket/cache"):
            set_to(nowhere)
            assert profiles.directory() is None
            profiles.write(name, {"seconds": 1.0})
            assert profiles.read(name, ["seconds"]) is None
        set_to(str(tmp_path))
        assert profiles.read(name, ["seconds"]) is None
        profiles.write(name, {"seconds": 1.0, "more": 2.0})
        assert profiles.read(name, ["more", "seconds"]) == (2.0, 1.0)
        assert profiles.read(name, ["another"]) is None
        assert profiles.read(profiles.key(None, "another task"), ["seconds"]) is None
        (file,) = (tmp_path / "jturnip").iterdir()  # and no temporary one is left
        file.write_text('{"seconds": 1.')
        assert profiles.read(name, ["seconds"]) is None
        shutil.rmtree(tmp_path)
        tmp_path.write_text("a file where the cache was")
        profiles.write(name, {"seconds": 1.0})
        assert profiles.read(name, ["seconds"]) is None
    finally:
        set_to(usual)


def test_the_tasks_of_a_function_share_the_limit_below_which_nothing_is_stored(
    monkeypatch: pytest.MonkeyPatch,
):
    limits = []

    def compile_lowered(
        lowered: Any, stored_from: float, real: Any = origin.compile_lowered
    ) -> Any:
        limits.append(stored_from)
        return real(lowered, stored_from)

    monkeypatch.setattr(executables, "compile_lowered", compile_lowered)
    set_by_user = compat.stored_from()
    report = lowered().compile().compile_report
    assert len(limits) == report.distinct
    assert sum(limits) == pytest.approx(set_by_user)


def compile_lowered(compile: Callable[..., Any], *limit: Any) -> tuple[Any, Origin]:
    """Of something that `compile` compiles."""
    return origin.compile_lowered(types.SimpleNamespace(compile=compile), *limit)


def in_a_thread(function: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_the_limit_is_set_in_the_compiling_thread_for_as_long_as_it_compiles():
    usual = compat.stored_from()
    look = lambda: (compat.stored_from(), in_a_thread(compat.stored_from))
    assert compile_lowered(look, 0.125)[0] == (0.125, usual)
    assert compile_lowered(look)[0] == (usual, usual)
    assert compat.stored_from() == usual


def test_a_jax_without_such_a_limit_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "_min_stored", None)
    assert compile_lowered(compat.stored_from, 0.125)[0] == compat.stored_from()


def test_an_event_counts_for_the_thread_that_it_happens_in():
    hit = lambda: jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    found = [
        compile_lowered(compile)[1]
        for compile in (hit, lambda: in_a_thread(hit), hit, lambda: None)
    ]
    assert found == [Origin.CACHED, Origin.REUSED, Origin.CACHED, Origin.REUSED]


# The progress bar


class Terminal(io.StringIO):
    """A stderr that is a terminal, and a clock to go with it."""

    now = 100.0

    def isatty(self) -> bool:
        return True

    @property
    def line(self) -> str:
        """What is to be read on its only line."""
        shown: list[str] = []
        for part in self.getvalue().split("\r"):
            assert "\n" not in part
            shown[: len(part)] = part
        return "".join(shown).strip()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr("tqdm.std.time", lambda: terminal.now)
    return terminal


def test_a_bar_appears_after_two_seconds_and_is_gone_when_all_is_done(terminal: Terminal):
    with redirect_stderr(terminal), progress.progress_bar(42) as show:
        terminal.now += 1.9
        show(16)
        assert terminal.getvalue() == ""
        terminal.now += 0.2
        show(17)
        assert terminal.line.startswith("jturnip: compiling 17 of 42 tasks")
        assert terminal.line.endswith("00:02")
        terminal.now += 60
        show(17)  # nothing new but the time
        assert terminal.line.endswith("01:02")
    assert terminal.line == ""


def test_quick_compiling_shows_nothing(terminal: Terminal):
    with redirect_stderr(terminal), progress.progress_bar(2) as show:
        show(2)
    assert terminal.getvalue() == ""


def test_no_bar_where_stderr_is_no_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with redirect_stderr(terminal), progress.progress_bar(2) as show:
        terminal.now += 10
        show(1)
    assert terminal.getvalue() == ""


def test_no_bar_without_tqdm(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with redirect_stderr(terminal), progress.progress_bar(2) as show:
        terminal.now += 10
        show(1)
    assert terminal.getvalue() == ""


def test_no_bar_without_a_stderr(terminal: Terminal):
    with redirect_stderr(None), progress.progress_bar(2) as show:
        terminal.now += 10
        show(1)


def test_ctrl_c_while_the_bar_is_drawn_leaves_no_bar_and_no_lock(
    terminal: Terminal,
):
    class Stopped(Terminal):
        stops = 1

        def write(self, text: str) -> int:
            written = super().write(text)
            if text.strip() and self.stops:
                self.stops -= 1
                raise KeyboardInterrupt
            return written

    def draw(on: Terminal) -> None:
        with redirect_stderr(on), progress.progress_bar(2) as show:
            terminal.now += 10
            show(1)

    stopped = Stopped()
    with pytest.raises(KeyboardInterrupt):
        draw(stopped)
    assert "compiling 1 of 2" in stopped.getvalue()
    assert stopped.line == ""
    in_a_thread(lambda: draw(terminal))  # would wait for a lock forever
    assert "compiling 1 of 2" in terminal.getvalue()


def test_a_bar_has_no_thread(terminal: Terminal):
    holdings = Holdings()
    with redirect_stderr(terminal), progress.progress_bar(2) as show:
        terminal.now += 10
        show(1)
        assert holdings.new_threads() == []


def test_the_bar_counts_the_tasks_that_are_compiled(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    clock = iter(range(10**9))  # a second passes whenever somebody looks
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    with redirect_stderr(terminal):
        report = lowered().compile().compile_report
    shown = re.findall(r"compiling (\d+) of (\d+) tasks", terminal.getvalue())
    assert {int(total) for _, total in shown} == {report.distinct}
    counts = [int(count) for count, _ in shown]
    assert counts == sorted(counts)
    assert terminal.line == ""


def test_ctrl_c_leaves_no_thread_no_bar_and_no_half_compiled_function(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    started, cancelled = [], threading.Event()

    def compile_slowly(*args: Any, real: Any = executables._compile) -> Any:
        started.append(args)
        assert cancelled.wait(60)
        return real(*args)

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            cancelled.set()
            super().shutdown(wait=wait)

    @contextmanager
    def bar_with_ctrl_c(total: int) -> Iterator[Callable[[int], None]]:
        calls = []

        def show_until_ctrl_c(done: int) -> None:
            show(done)
            calls.append(done)
            if len(calls) > total:  # all are lowered, and it waits for the first
                assert "compiling 0 of" in terminal.line
                raise KeyboardInterrupt

        with progress.progress_bar(total) as show:
            terminal.now += 10
            yield show_until_ctrl_c

    holdings = Holdings()
    with monkeypatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 2)
        patch.setattr(concurrent.futures, "ThreadPoolExecutor", Pool)
        patch.setattr(executables, "_compile", compile_slowly)
        patch.setattr(executables, "progress_bar", bar_with_ctrl_c)
        patch.setattr(executables, "_REFRESH_SECONDS", 0.01)
        with redirect_stderr(terminal), pytest.raises(KeyboardInterrupt):
            lowered().compile()
    assert len(started) == 2
    assert holdings.new_threads() == []
    assert terminal.line == ""
    compiled = lowered().compile()
    assert compiled.compile_report.compiled == compiled.compile_report.distinct
    assert_same(compiled(X, layers(8)), jax.jit(several)(X, layers(8)))
