"""What records look like: timelines, pictures, pages, traces."""

import dataclasses
import gzip
import html.parser
import itertools
import json
import pathlib
import pickle
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import GraphBuilder, streaming_chain

import jturnip
from jturnip.graph.report import RunReport
from jturnip.planner.planner import plan as plan_tasks, smallest_budget
from jturnip.runtime.schedule import Link, schedule
from jturnip.runtime.simulated import simulate
from jturnip.show import explain, pages, pictures, slots, timeline, trace
from jturnip.show.timeline import Lane
from jturnip.units import format_bytes


WIDTH, LAYERS = 128, 6


def loss(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def ran() -> RunReport:
    weights = jturnip.host([np.ones((WIDTH, WIDTH), np.float32) / WIDTH] * LAYERS)
    link = jturnip.SimulatedLink(2e9, 2e9)
    f = jturnip.jit(jax.grad(loss), "320KiB", link=link)
    for _ in range(2):  # the first also moves what then stays
        jax.block_until_ready(f(weights, np.ones((8, WIDTH), np.float32)))
    report = f.last_run
    assert report is not None
    assert report.plan is not None
    assert report.h2d_bytes > 0
    return report


@pytest.fixture(scope="module")
def driven() -> RunReport:
    """Of a loop whose length is not known, with too large a body for one task."""

    def until(weights: Any, x: Any) -> Any:
        step = lambda x: loss(weights, x) + x
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e4, step, x)

    weights = jturnip.host([np.ones((WIDTH, WIDTH), np.float32)] * LAYERS)
    f = jturnip.jit(until, "200KiB")
    jax.block_until_ready(f(weights, np.ones((8, WIDTH), np.float32)))
    report = f.last_run
    assert report is not None
    assert report.plan is not None
    assert report.plan.strategy == "driven"
    return report


# -- timelines -------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["ran", "driven"])
def test_a_timeline_has_what_the_report_has(which: str, request: pytest.FixtureRequest):
    report: RunReport = request.getfixturevalue(which)
    run = timeline.of_run(report)
    assert len(run.events) == len(report.order)
    moved = {
        lane: sum(e.nbytes for e in run.events if e.lane is lane)
        for lane in (Lane.H2D, Lane.D2H)
    }
    if which == "ran":  # a loop holds some arguments from before its first operation
        assert moved == {Lane.H2D: report.h2d_bytes, Lane.D2H: report.d2h_bytes}
    assert max(nbytes for _, nbytes in run.memory) <= report.peak_bytes
    assert all(0 <= e.start <= e.end <= run.seconds for e in run.events)
    times = [when for when, _ in run.memory]
    assert times == sorted(times)


@pytest.mark.parametrize("which", ["ran", "driven"])
def test_an_engine_does_one_thing_at_a_time(which: str, request: pytest.FixtureRequest):
    run = timeline.of_run(request.getfixturevalue(which))
    for lane in Lane:
        events = run.lane(lane)
        for one, other in itertools.pairwise(events):
            assert other.start >= one.end


def test_events_have_names_and_lines(ran: RunReport):
    run = timeline.of_run(ran)
    sources = {e.source for e in run.lane(Lane.COMPUTE)}
    assert all("test_show.py" in source for source in sources)
    assert any("weights" in e.name for e in run.lane(Lane.H2D))


def test_a_task_knows_the_reloads_that_it_is_the_first_to_read(ran: RunReport):
    run = timeline.of_run(ran)
    arrows = [at for e in run.events for at in e.reloads]
    assert len(arrows) == len(set(arrows)) > 0
    for e in run.events:
        for at in e.reloads:
            assert run.events[at].lane is Lane.H2D
            assert run.events[at].end <= e.end


def test_copies_may_end_in_another_order_than_they_were_issued():
    events = [
        timeline.Event(Lane.H2D, start, end, "", 1, "", number, ())
        for number, (start, end) in enumerate([(0.0, 5.0), (1.0, 2.0), (1.5, 6.0)])
    ]
    drawn = timeline._one_at_a_time(events)
    assert [(e.start, e.end) for e in drawn] == [(2.0, 5.0), (1.0, 2.0), (5.0, 6.0)]


def test_idle_is_between_tasks(ran: RunReport):
    run = timeline.of_run(ran)
    busy = sum(e.seconds for e in run.lane(Lane.COMPUTE))
    idle = sum(i.end - i.start for i in run.idle)
    assert busy == pytest.approx(ran.compute_seconds)
    last = max(e.end for e in run.lane(Lane.COMPUTE))
    assert busy + idle == pytest.approx(last)


def test_what_ran_whole_has_no_timeline():
    f = jturnip.jit(lambda x: x + 1, "1MiB")
    f(jnp.ones(4))
    assert f.last_run is not None
    with pytest.raises(ValueError, match="one executable"):
        timeline.of_run(f.last_run)
    assert "one executable" in f.last_run._repr_html_()


# -- slots -----------------------------------------------------------------------------


def test_slots_do_not_overlap_and_stay_within_the_budget(ran: RunReport):
    """At no moment two of them have the same byte: the picture of a verified plan."""
    plan = ran.plan
    assert plan is not None
    stays = slots.of_plan(plan)
    assert {s.kind for s in stays} >= {"argument", "intermediate", "result"}
    for stay in stays:
        assert 0 <= stay.start <= stay.end
        assert all(0 <= o and o + n <= plan.gpu_bytes for o, n in stay.ranges)
    held = [(s.start, s.end, o, o + n) for s in stays for o, n in s.ranges]
    for k, (start, end, low, high) in enumerate(held):
        for start_2, end_2, low_2, high_2 in held[k + 1 :]:
            apart = high <= low_2 or high_2 <= low
            assert apart or start_2 >= end - 1e-9 or start >= end_2 - 1e-9


def test_a_plan_in_pieces_has_no_slots_of_its_own(driven: RunReport):
    assert driven.plan is not None
    with pytest.raises(ValueError, match="pieces"):
        slots.of_plan(driven.plan)


# -- HTML ------------------------------------------------------------------------------


class Checker(html.parser.HTMLParser):
    """Every element is closed, in order; nothing comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: Counter[str] = Counter()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag not in ("script", "link", "iframe", "img", "image", "use")
        for name, value in attrs:
            assert not name.startswith("on")
            if name != "xmlns":
                assert "://" not in (value or "")
        self.count[tag] += 1
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert not checker.open
    return checker


def test_stages_say_what_they_are_of():
    def doubled(x):
        return 2 * x

    traced = jturnip.jit(doubled, "1MiB").trace(jnp.ones(8))
    lowered = traced.lower()
    assert repr(traced) == "<Traced of doubled>"
    assert repr(lowered) == "<Lowered of doubled in 1 MiB>"
    assert repr(lowered.compile()) == "<Compiled in 1 MiB, strategy whole>"


def test_objects_show_themselves(ran: RunReport, driven: RunReport):
    for report in (ran, driven):
        plan = report.plan
        assert plan is not None
        for shown in (report, plan, plan.taskgraph):
            page = shown._repr_html_()
            assert checked(page).count["div"] > 0
            assert "\n" not in repr(shown)
    titles = re.findall(r"<title>(.*?)</title>", ran._repr_html_(), re.DOTALL)
    assert any("test_show.py" in t for t in titles)  # what one points at, with its line


def test_a_function_shows_itself():
    f = jturnip.jit(lambda x: x * 2, "1MiB")
    assert "not run yet" in "".join(checked(f._repr_html_()).texts)
    f(jnp.ones(4))
    assert "A run" in checked(f._repr_html_()).texts


def test_names_cannot_be_markup():
    assert checked(pages.paragraph("<b>&</b>")).texts == ["<b>&</b>"]
    assert "<b>" not in pages.table(["<b>"], [["<b>"]])


def long_run(tasks: int) -> tuple[RunReport, Any]:
    """The simulated run of a chain that streams its arguments, and its plan."""
    graph = streaming_chain(tasks)
    gpu_bytes = 2 * smallest_budget(graph)
    memgraph = plan_tasks(graph, gpu_bytes)
    run = simulate(schedule(graph, memgraph, Link(1e9, 1e9)))
    figures = (0, 0, 0, 0, run.seconds, 0.0, "turnip")
    return run, jturnip.Plan(gpu_bytes, *figures, graph, memgraph, predicted_run=run)


def test_a_long_run_is_a_small_page():
    run, plan = long_run(2500)
    assert len(run.order) >= 5000
    page = pages.picture_of_run(run, plan) + pages.of_plan(plan)
    assert checked(page).count["svg"] == 3
    assert len(page.encode()) < 2_000_000


# -- traces ----------------------------------------------------------------------------


def test_a_trace_says_what_the_report_says(ran: RunReport, tmp_path: pathlib.Path):
    path = tmp_path / "run.json.gz"
    ran.save_trace(path)
    found = json.loads(gzip.decompress(path.read_bytes()))
    ran.save_trace(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text()) == found
    events = found["traceEvents"]
    lanes = {
        e["tid"]: e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert list(lanes.values()) == ["compute", "to the device", "to the host"]
    moved: Counter[str] = Counter()
    for e in events:
        if e["ph"] == "X":
            moved[lanes[e["tid"]]] += e["args"]["bytes"]
    assert moved["to the device"] == ran.h2d_bytes
    assert moved["to the host"] == ran.d2h_bytes
    slices = [e for e in events if e["ph"] == "X"]
    compute = sum(e["dur"] for e in slices if lanes[e["tid"]] == "compute")
    assert compute == pytest.approx(1e6 * ran.compute_seconds)
    memory = [e["args"]["bytes in use"] for e in events if e["name"] == "device memory"]
    assert max(memory) <= ran.peak_bytes
    assert len(memory) == len(ran.order)


def test_arrows_join_slices(ran: RunReport):
    """Each begins within a reload and ends where a task begins; slices of a lane do not
    overlap, without which no viewer takes them for a row."""
    events = trace.to_dict(timeline.of_run(ran))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() != set()
    for key, start in starts.items():
        assert any(
            s["tid"] == start["tid"] and s["ts"] <= start["ts"] <= s["ts"] + s["dur"]
            for s in slices
        )
        assert any(
            s["tid"] == ends[key]["tid"] and s["ts"] == ends[key]["ts"] for s in slices
        )
    for lane in (1, 2, 3):
        row = sorted((s["ts"], s["ts"] + s["dur"]) for s in slices if s["tid"] == lane)
        for (_, end), (start, _) in itertools.pairwise(row):
            assert start >= end - 1e-6


def test_what_ran_whole_has_no_trace(tmp_path: pathlib.Path):
    f = jturnip.jit(lambda x: x + 1, "1MiB")
    f(jnp.ones(4))
    assert f.last_run is not None
    with pytest.raises(ValueError, match=r"jax\.profiler"):
        f.last_run.save_trace(tmp_path / "run.json")
    assert not list(tmp_path.iterdir())


# -- words -----------------------------------------------------------------------------


def test_a_plan_is_explained(ran: RunReport):
    plan = ran.plan
    assert plan is not None
    text = plan.explain()
    assert "limits it" in text
    assert f"of {format_bytes(plan.gpu_bytes)}, is at" in text
    assert "test_show.py" in text
    assert "argument weights" in text
    left, budgets = text.split("\n\n")[2:4]
    assert left.startswith(f"{format_bytes(plan.d2h_bytes)} leave the device")
    assert "(the least these tasks need)" in budgets
    assert "x 1.00 (this plan)" in budgets


@pytest.mark.parametrize(
    ("predicted", "computing", "stalled", "at_least", "what"),
    [
        (1.05, 1.0, 0.0, 1.0, "Compute limits it: the tasks take 1 s"),
        (2.0, 1.0, 0.8, 1.9, "The link limits it"),
        (2.0, 1.0, 0.8, 1.5, "Memory limits it: tasks and copies"),
        (2.0, 1.0, 0.1, 1.9, "What copies take from the tasks limits it: the tasks alone"),
        (2.0, 1.0, 0.1, 1.0, "What copies take from the tasks limits it: the tasks alone"),
    ],
)
def test_it_says_what_limits_a_plan(
    ran: RunReport,
    predicted: float,
    computing: float,
    stalled: float,
    at_least: float,
    what: str,
):
    assert ran.plan is not None
    plan = dataclasses.replace(
        ran.plan, predicted_seconds=predicted, lower_bound_seconds=at_least
    )
    run = dataclasses.replace(
        ran, compute_seconds=computing, stall_seconds=stalled, order=(), ends=()
    )
    assert explain._limits(plan, run).startswith(what)


def test_the_link_limits_what_copies_follow(ran: RunReport):
    """Results that go to the host after the last task hold up none."""
    g = GraphBuilder()
    x = g.input(100)
    (y,) = g.task([x], 5000, seconds=1.0)
    graph = g.build(outputs=[y], end_on_host=[y])
    memgraph = plan_tasks(graph, 10_000, "turnip")
    run = simulate(schedule(graph, memgraph, Link(1e3, 1e3)))
    assert ran.plan is not None
    plan = dataclasses.replace(
        ran.plan,
        memgraph=memgraph,
        taskgraph=graph,
        predicted_seconds=run.seconds,
        lower_bound_seconds=run.seconds,
    )
    assert explain._seconds_after_tasks(plan, run) == pytest.approx(5)
    assert explain._limits(plan, run).startswith("The link limits it")


def test_it_says_whether_times_were_measured(ran: RunReport):
    assert ran.plan is not None
    assert ran.plan.measured
    assert "expected from their shapes" not in ran.plan.explain()
    weights = [np.ones((WIDTH, WIDTH), np.float32)] * LAYERS
    lowered = jturnip.jit(loss, "200KiB").lower(weights, np.ones((8, WIDTH), np.float32))
    assert not lowered.plan.measured
    assert "expected from their shapes" in lowered.plan.explain()


def test_the_peak_that_is_explained_is_the_plans(ran: RunReport):
    plan = ran.plan
    assert plan is not None
    op, nbytes, there = explain.peak_of(plan)
    assert nbytes == plan.peak_bytes
    sizes = [sum(n for _, n in plan.memgraph.instances[i].ranges) for i in there]
    workspace = sum(n for _, n in op.workspace) if op is not None else 0
    assert sum(sizes) + workspace == nbytes


def test_other_budgets_are_what_they_say(ran: RunReport):
    """The least works, a little less does not, and more is never slower by much."""
    plan = ran.plan
    assert plan is not None
    others = plan.others
    assert others is not None
    assert others.seconds_in(plan.gpu_bytes) == plan.predicted_seconds
    others.seconds_in(others.least_bytes)
    with pytest.raises(jturnip.DoesNotFit):
        others.seconds_in(others.least_bytes - 256)


def test_what_is_driven_or_fits_is_explained_too(driven: RunReport):
    assert driven.plan is not None
    assert "pieces" in driven.plan.explain()
    assert "limits it" in driven.plan.explain()
    f = jturnip.jit(lambda x: x + 1, "1MiB")
    assert "fits" in f.lower(jnp.ones(4)).plan.explain()


def test_a_plan_can_be_pickled(ran: RunReport):
    assert pickle.loads(pickle.dumps(ran.plan)).explain() == ran.plan.explain()  # pyright: ignore


# -- small things ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0"), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (3e-6, "3 µs"), (12, "12 s")],
)
def test_seconds_are_in_the_unit_that_suits_them(seconds: float, said: str):
    assert pictures.format_seconds(seconds) == said


@pytest.mark.parametrize(("span", "step"), [(8, 1), (9, 2), (0.8, 0.1), (33, 5), (64, 10)])
def test_steps_of_an_axis_are_round(span: float, step: float):
    assert pictures.nice_step(span, 8) == pytest.approx(step)
