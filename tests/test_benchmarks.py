"""The benchmarks run, on sizes that measure nothing."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import (
    gpu_fields,
    gpu_models,
    gpu_probes,
    kernels,
    layers,
    link,
    measure,
    planning,
    steps,
)
from benchmarks.graphs import total_bytes, training_graph
from benchmarks.measure import Figure
from jturnip.models import llama
from jturnip.planner.planner import smallest_budget


TINIEST = llama.config("tiny", layers=1, length=8, width=16, heads=2, kv_heads=1)


def plain_step(model: llama.LlamaConfig) -> Callable[..., Any]:
    """No gradients, which take seconds to compile: the loss, and some new state."""

    def step(state: Any, batch: jax.Array) -> Any:
        changed = jax.tree.map(lambda leaf: leaf + 1, state)
        return changed, llama.loss(model, state.params, batch)

    return step


@pytest.fixture(autouse=True)
def _without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "train_step", plain_step)
    monkeypatch.setattr(link, "train_step", plain_step)


def run_program(module: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=measure.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_way_is_first_in_turn_and_warm_up_is_left_out():
    order: list[str] = []

    def way(name: str) -> Callable[[], float]:
        return lambda: float(len(order.append(name) or order))

    taken = measure.in_turn([way("a"), way("b")], rounds=2, warm_up=1)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert taken == [(4.0, 3.0), (5.0, 6.0)]


def test_a_figure_passes_at_its_target_and_misses_above_it():
    assert Figure("f", (1.0, 2.0, 9.0), target=2.0).verdict == "pass"
    assert Figure("f", (1.0, 2.0, 9.0), target=1.9).verdict == "MISS"
    assert Figure("f", (1.0,)).verdict == ""
    assert Figure("f", (), target=1.0).verdict == ""


def test_figures_survive_json_and_a_table_has_a_line_for_each():
    figures = (
        Figure("one", (1.0, 2.0), "s", 3.0, {"note": "x"}),
        Figure("none", (), more={"why": "skipped"}),
    )
    plain = measure.Section("title", "text", figures).to_json_dict()
    text = json.dumps(plain, allow_nan=False)
    assert measure.figures_of(json.loads(text)) == figures
    lines = measure.table(figures)
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("tasks", [100, 1000])
def test_a_training_graph_has_about_the_tasks_asked_for_and_needs_a_budget(tasks: int):
    graph = training_graph(tasks)
    graph.check()
    assert math.isclose(len(graph.tasks), tasks, rel_tol=0.1)
    assert smallest_budget(graph) < total_bytes(graph) / 2


@pytest.mark.slow
def test_calls_side_by_side():
    section = steps.fits(TINIEST, pairs=2)
    assert [figure.target for figure in section.figures] == [1.02, None, None, 1.02]
    assert len(steps.split(TINIEST, pairs=2).figures) == 2
    costs = steps.loop(tasks=4, pairs=2).figures
    assert all(figure.more["tasks"] == "4" for figure in costs)


def test_planning():
    figures = planning.planning((400, 800), rounds=1).figures
    assert [len(figure.samples) for figure in figures] == [3, 1, 1]


@pytest.mark.slow
def test_link_runs_every_strategy_or_says_why_not():
    figures = link.link(TINIEST, (0.5, 0.001), rounds=1).figures
    assert all(figure.median > 0 for figure in figures[:-1])
    assert not figures[-1].samples
    assert "refused" in str(figures[-1].more["why"])


@pytest.mark.slow
def test_layers():
    def model_of(count: int) -> llama.LlamaConfig:
        return dataclasses.replace(TINIEST, layers=count)

    distinct, first, later = layers.layers(model_of, 1, 2, 1, plain_step).figures
    assert distinct.target == first.target == later.target == 1.0
    assert later.samples


@pytest.mark.parametrize(
    "name", ["link", "sync_rule", "completion", "aliasing", "host_parts"]
)
def test_gpu_probe(name: str):
    scale = dataclasses.replace(gpu_probes.TINY, repeats=1, kernel_seconds=0.0)
    assert all(figure.samples for figure in gpu_probes.PROBES[name](scale))


@pytest.mark.slow
def test_a_model_in_a_budget_agrees_with_its_baseline():
    problem = gpu_models.problem("llama", "forward", "tiny", {"layers": 1, "length": 8})
    left: dict[str, Any] = {}
    list(gpu_models.baseline(problem, 1, left.update))
    figures = list(gpu_models.budgeted(problem, 0.5, left, 1, ["turnip", "fixed_order"]))
    verdicts = {figure.name: figure.verdict for figure in figures}
    assert verdicts["differs from jax.jit by"] == "pass"
    assert verdicts["the run's own account / gpu_bytes"] == "pass"


@pytest.mark.long
def test_the_cpu_program_keeps_other_sections_and_other_text(tmp_path: pathlib.Path):
    results, docs = tmp_path / "cpu.json", tmp_path / "benchmarks.md"
    flags = (f"--json={results}", f"--docs={docs}", "--tiny")
    run_program("benchmarks.cpu", "--only=planning,fits", *flags)
    docs.write_text("mine\n" + docs.read_text() + "and mine\n")
    run_program("benchmarks.cpu", "--only=loop", *flags)
    text = docs.read_text()
    assert text.startswith("mine\n")
    assert text.endswith("and mine\n")
    assert "## (d) Planning" in text
    assert "## (c) The loop" in text
    assert set(json.loads(results.read_text())) == {"planning", "fits", "loop"}


@pytest.mark.long
def test_the_gpu_program_writes_what_it_has_when_time_runs_out(tmp_path: pathlib.Path):
    out = tmp_path / "gpu.json"
    words = ("--tiny", "--only=pair forward", "--seconds=0", f"--out={out}")
    shown = run_program("benchmarks.gpu", *words)
    record = json.loads(out.read_text())
    assert record["environment"]["jax"] == jax.__version__
    assert record["settings"]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    sections = record["sections"]
    assert sections
    assert all("no time left" in each["error"] for each in sections.values())
    assert "skipped" in shown


def test_a_difference_is_one_over_the_largest_number_of_its_array():
    found, expected = [np.array([1.0, 9.0])], [np.array([2.0, 10.0])]
    assert measure.difference(found, expected) == 0.1
    assert measure.difference(found, expected, least=20.0) == 0.05
    assert measure.difference([np.zeros(0), np.zeros(2)], [np.zeros(0), np.zeros(2)]) == 0.0
    assert measure.difference([np.array([np.nan])], [np.ones(1)]) == math.inf


def test_a_function_of_another_field_agrees_with_stock_jit():
    figures = {f.name: f for f in gpu_fields.field("causal attention", 1)}
    assert figures["differs from jax.jit by"].verdict == "pass"


def test_on_a_cpu_no_kernels_are_seen():
    assert kernels.kernels_of(lambda: jax.numpy.ones(8)) is None
