"""The state machine: events in, instructions out. And the loop around it."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st
from support import GraphBuilder, PlanBuilder, taskgraphs

from jturnip.errors import InternalError
from jturnip.graph.memgraph import MemGraph, OpKind
from jturnip.graph.reference import run_memgraph, run_taskgraph, symbolic_inputs
from jturnip.graph.taskgraph import TaskGraph
from jturnip.planner.planner import plan, smallest_budget
from jturnip.planner.strategies import STRATEGIES
from jturnip.runtime.loop import run
from jturnip.runtime.schedule import COMPUTE, D2H, H2D, NONE, Link, Schedule, schedule
from jturnip.runtime.state import Limits, RunState


LINK = Link(1e9, 1e9)


def a_schedule(engines: Sequence[int], deps: dict[int, Sequence[int]]) -> Schedule:
    """Ops on these engines, each of which waits for some; the first goes first."""
    count = len(engines)
    successors = [
        tuple(o for o in range(count) if op in deps.get(o, ())) for op in range(count)
    ]
    zeros = (0,) * count
    return Schedule(
        engines=tuple(engines),
        waits=tuple(len(deps.get(op, ())) for op in range(count)),
        successors=tuple(successors),
        ranks=tuple(range(count)),
        by_rank=tuple(range(count)),
        seconds=(1.0,) * count,
        dispatch_seconds=zeros,
        takes=zeros,
        gives_back=zeros,
        frees=zeros,
        moves=zeros,
        bytes_at_start=0,
    )


# Instructions


def test_everything_that_waits_for_nothing_starts_at_once():
    state = RunState(a_schedule([COMPUTE, H2D, D2H, NONE], {}))
    assert sorted(state.begin()) == [0, 1, 2, 3]


def test_drops_come_first_then_transfers_then_runs():
    state = RunState(a_schedule([COMPUTE, H2D, D2H, NONE], {}))
    assert state.begin() == [3, 2, 1, 0]


def test_a_run_satisfies_those_that_wait_for_it_when_it_is_started():
    # The compute engine is one queue in order: the second may be enqueued right away.
    state = RunState(a_schedule([COMPUTE, COMPUTE], {1: [0]}))
    assert state.begin() == [0, 1]


def test_a_reload_satisfies_those_that_wait_for_it_when_it_has_completed():
    state = RunState(a_schedule([H2D, COMPUTE], {1: [0]}))
    assert state.begin() == [0]
    assert state.handle([0]) == [1]


def test_an_offload_satisfies_those_that_wait_for_it_when_it_has_completed():
    state = RunState(a_schedule([D2H, NONE, H2D], {1: [0], 2: [1]}))
    assert state.begin() == [0]
    assert state.handle([0]) == [1, 2]


def test_a_drop_satisfies_those_that_wait_for_it_at_once():
    state = RunState(a_schedule([NONE, NONE, COMPUTE], {1: [0], 2: [1]}))
    assert state.begin() == [0, 1, 2]


def test_an_op_waits_for_all_it_depends_on():
    state = RunState(a_schedule([H2D, D2H, COMPUTE], {2: [0, 1]}))
    assert state.begin() == [1, 0]
    assert state.handle([0]) == []
    assert state.handle([1]) == [2]


def test_several_completions_at_once_start_all_they_allow():
    state = RunState(a_schedule([H2D, D2H, COMPUTE, NONE], {2: [0], 3: [1]}))
    state.begin()
    assert state.handle([1, 0]) == [3, 2]


@pytest.mark.parametrize(
    ("engine", "limits"),
    [(COMPUTE, Limits(compute=2)), (H2D, Limits(h2d=2)), (D2H, Limits(d2h=2))],
)
def test_an_engine_holds_no_more_than_its_limit(engine: int, limits: Limits):
    state = RunState(a_schedule([engine] * 4, {}), limits)
    assert state.begin() == [0, 1]
    assert state.handle([1]) == [2]
    assert state.handle([0, 2]) == [3]


def test_as_many_short_runs_are_in_flight_as_take_no_longer_than_said():
    limits = Limits(compute=2, short_runs=5, queue_seconds=1.0)
    a_row = a_schedule([COMPUTE] * 9, {})
    seconds = (0.1, 0.1, 0.6, 0.5, 0.25, 0.1, 0.1, 0.1, 0.1)
    state = RunState(dataclasses.replace(a_row, seconds=seconds), limits)
    assert state.begin() == [0, 1, 2]
    assert state.few_runs == 2
    assert state.handle([0]) == []
    assert state.handle([1]) == [3]
    assert state.handle([2]) == [4, 5, 6]
    assert state.few_runs == 2
    assert state.handle([3]) == [7, 8]
    long = RunState(dataclasses.replace(a_row, seconds=(9.0,) * 9), limits)
    assert long.begin() == [0, 1]
    assert long.few_runs == 1


def test_engines_do_not_take_each_others_places():
    state = RunState(a_schedule([COMPUTE, H2D, D2H], {}), Limits(1, 1, 1))
    assert sorted(state.begin()) == [0, 1, 2]


def test_the_lowest_rank_goes_first_among_the_ready():
    upside_down = dataclasses.replace(
        a_schedule([COMPUTE] * 3, {}), ranks=(2, 1, 0), by_rank=(2, 1, 0)
    )
    assert RunState(upside_down, Limits(compute=3)).begin() == [2, 1, 0]


def test_one_that_becomes_ready_later_may_go_before_one_that_waits_for_a_place():
    state = RunState(
        a_schedule([COMPUTE, H2D, COMPUTE, COMPUTE], {2: [1]}), Limits(compute=1)
    )
    assert state.begin() == [1, 0]
    assert state.handle([1]) == []
    assert state.handle([0]) == [2]
    assert state.handle([2]) == [3]


def test_a_transfer_that_a_run_allows_is_started_before_the_next_run():
    # A copy is issued before the run that it should hide behind.
    state = RunState(a_schedule([COMPUTE, D2H, COMPUTE], {1: [0]}), Limits(compute=2))
    assert state.begin() == [0, 1, 2]


def test_it_is_finished_when_all_have_completed():
    state = RunState(a_schedule([COMPUTE, H2D], {}))
    state.begin()
    assert not state.finished
    state.handle([0])
    assert not state.finished
    state.handle([1])
    assert state.finished


def test_nothing_to_do_is_finished_from_the_start():
    state = RunState(a_schedule([], {}))
    assert state.begin() == []
    assert state.finished


def test_only_drops_are_finished_from_the_start():
    state = RunState(a_schedule([NONE, NONE], {1: [0]}))
    assert state.begin() == [0, 1]
    assert state.finished


def test_it_is_stalled_while_runs_are_left_and_none_is_in_flight():
    state = RunState(a_schedule([H2D, COMPUTE, D2H], {1: [0], 2: [1]}))
    state.begin()
    assert state.stalled
    state.handle([0])
    assert not state.stalled
    state.handle([1])
    assert not state.stalled, "no runs are left to wait for the offload"


def test_blocked_ops_are_told_with_what_they_wait_for():
    state = RunState(a_schedule([H2D, COMPUTE, COMPUTE], {1: [0], 2: [0, 1]}))
    state.begin()
    assert state.blocked() == [(1, 1), (2, 2)]


# The loop


class ScriptedEngines:
    """Completes ops in a seeded order, one at a time; a clock that ticks once per look."""

    def __init__(self, schedule: Schedule, seed: int):
        self._engines = schedule.engines
        self._random = random.Random(seed)
        self._in_flight: list[int] = []
        self._time = 0.0
        self.log: list[tuple[str, int]] = []
        self.drained = False

    def now(self) -> float:
        self._time += 1.0
        return self._time

    def start(self, op: int) -> None:
        self.log.append(("start", op))
        if self._engines[op] != NONE:
            self._in_flight.append(op)

    def wait(self, few_runs: int) -> list[tuple[int, float]]:
        op = self._in_flight.pop(self._random.randrange(len(self._in_flight)))
        self.log.append(("done", op))
        return [(op, self.now())]

    def drain(self) -> None:
        self.drained = True


def test_ops_that_wait_for_each_other_are_an_internal_error_that_names_them():
    circle = a_schedule([COMPUTE, H2D, H2D], {1: [2], 2: [1]})
    engines = ScriptedEngines(circle, 0)
    with pytest.raises(InternalError, match=r"2 ops can never start.*op 1 waits for 1"):
        run(circle, engines, "")
    assert engines.drained


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_an_error_of_an_engine_drains_it_and_comes_through(error: BaseException):
    class Failing(ScriptedEngines):
        def wait(self, few_runs: int) -> list[tuple[int, float]]:
            raise error

    engines = Failing(a_schedule([COMPUTE, COMPUTE], {1: [0]}), 0)
    with pytest.raises(type(error)):
        run(a_schedule([COMPUTE, COMPUTE], {1: [0]}), engines, "")
    assert engines.drained


def test_after_an_error_nothing_new_is_started():
    class Failing(ScriptedEngines):
        def start(self, op: int) -> None:
            super().start(op)
            raise RuntimeError

    engines = Failing(a_schedule([COMPUTE, COMPUTE], {}), 0)
    with pytest.raises(RuntimeError):
        run(a_schedule([COMPUTE, COMPUTE], {}), engines, "")
    assert engines.log == [("start", 0)]


def test_a_run_that_goes_well_is_not_drained():
    engines = ScriptedEngines(a_schedule([COMPUTE], {}), 0)
    run(a_schedule([COMPUTE], {}), engines, "")
    assert not engines.drained


def test_the_report_tells_the_order_of_starts_without_drops():
    chain = a_schedule([H2D, COMPUTE, NONE, COMPUTE], {1: [0], 2: [1], 3: [2]})
    report = run(chain, ScriptedEngines(chain, 0), "turnip")
    assert (report.strategy, report.order) == ("turnip", (0, 1, 3))


def test_the_peak_of_a_report_counts_what_is_held_at_once():
    # 10 at the start; a run takes 7, of which 3 are workspace; a drop frees 10; a reload
    # takes 5.
    chain = dataclasses.replace(
        a_schedule([COMPUTE, NONE, H2D], {1: [0], 2: [1]}),
        takes=(7, 0, 5),
        gives_back=(3, 0, 0),
        frees=(0, 10, 0),
        bytes_at_start=10,
    )
    assert run(chain, ScriptedEngines(chain, 0), "").peak_bytes == 17


# Random plans, random completions


def drive(ready: Schedule, seed: int, limits: Limits) -> list[tuple[str, int]]:
    engines = ScriptedEngines(ready, seed)
    run(ready, engines, "", limits)
    return engines.log


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    some = st.integers(1, 4)
    return Limits(draw(some), draw(some), draw(some))


@st.composite
def plans(draw: st.DrawFn) -> tuple[TaskGraph, MemGraph]:
    graph = draw(taskgraphs())
    least = smallest_budget(graph)
    budget = least + draw(st.sampled_from([0, 256, 1024, 1 << 20]))
    return graph, plan(graph, budget, draw(st.sampled_from(sorted(STRATEGIES))))


@pytest.mark.long
@given(plans(), st.integers(0, 1 << 30), limits())
@settings(max_examples=150, deadline=None)
def test_every_plan_finishes_in_every_order_of_completions(
    planned: tuple[TaskGraph, MemGraph], seed: int, limits: Limits
):
    graph, memgraph = planned
    log = drive(schedule(graph, memgraph, LINK), seed, limits)
    started = [op for what, op in log if what == "start"]
    assert sorted(started) == [op.id for op in memgraph.ops]


@pytest.mark.long
@given(plans(), st.integers(0, 1 << 30), limits())
@settings(max_examples=150, deadline=None)
def test_nothing_starts_before_what_it_depends_on(
    planned: tuple[TaskGraph, MemGraph], seed: int, limits: Limits
):
    graph, memgraph = planned
    log = drive(schedule(graph, memgraph, LINK), seed, limits)
    at = {event: position for position, event in enumerate(log)}
    for op in memgraph.ops:
        for dep in op.deps:
            # A run or a drop is over, for those that wait, when it has been started.
            copies = memgraph.ops[dep.op].kind in (OpKind.OFFLOAD, OpKind.RELOAD)
            assert at["done" if copies else "start", dep.op] < at["start", op.id], f"{log}"


@pytest.mark.long
@given(plans(), st.integers(0, 1 << 30), limits())
@settings(max_examples=100, deadline=None)
def test_the_order_of_starts_computes_the_function(
    planned: tuple[TaskGraph, MemGraph], seed: int, limits: Limits
):
    graph, memgraph = planned
    log = drive(schedule(graph, memgraph, LINK), seed, limits)
    order = [memgraph.ops[op].id for what, op in log if what == "start"]
    inputs = symbolic_inputs(graph)
    values = run_taskgraph(graph, inputs)
    expected = [values[b] for b in graph.outputs]
    assert run_memgraph(graph, memgraph, inputs, order) == expected, f"{log}"


@given(plans(), st.integers(0, 1 << 30), limits())
@settings(max_examples=100, deadline=None)
def test_the_reported_peak_is_within_the_budget(
    planned: tuple[TaskGraph, MemGraph], seed: int, limits: Limits
):
    graph, memgraph = planned
    ready = schedule(graph, memgraph, LINK)
    report = run(ready, ScriptedEngines(ready, seed), "", limits)
    assert report.peak_bytes <= memgraph.gpu_bytes


# Schedules


def test_a_schedule_knows_who_waits_for_whom():
    g = GraphBuilder()
    x = g.input(256)
    (y,) = g.task([x], 256)
    graph = g.build(outputs=[y])
    p = PlanBuilder(graph, 1024)
    on_host = p.start(x)
    _, there = p.reload(on_host, ((0, 256),))
    op, (result,) = p.run(graph.tasks[0].id, [there], [((256, 256),)])
    p.drop(there, [op])
    ready = schedule(graph, p.build([result]), LINK)
    assert ready.engines == (H2D, COMPUTE, NONE)
    assert ready.waits == (0, 1, 2)
    assert ready.successors == ((1, 2), (2,), ())
    assert (ready.takes, ready.frees, ready.moves) == (
        (256, 256, 0),
        (0, 0, 256),
        (256, 0, 0),
    )


def test_the_planned_order_ranks_the_ops_of_each_engine():
    """Also where another order has a longer way to the end: it was chosen by its time."""
    g = GraphBuilder()
    x, y = g.input(256), g.input(256)
    (short,) = g.task([x], 256, seconds=1.0)
    (long,) = g.task([y], 256, seconds=1.0)
    (end,) = g.task([long], 256, seconds=5.0)
    graph = g.build(outputs=[short, end])
    memgraph = plan(graph, 1 << 20)
    ready = schedule(graph, memgraph, LINK)
    runs = [op.id for op in memgraph.ops if op.kind is OpKind.RUN]
    reloads = [op.id for op in memgraph.ops if op.kind is OpKind.RELOAD]
    assert sorted(reloads, key=ready.ranks.__getitem__) == reloads
    tasks = [memgraph.ops[op].task for op in sorted(runs, key=ready.ranks.__getitem__)]
    assert tasks == [0, 1, 2]
