"""The simulator on graphs small enough to time by hand, and against the state machine."""

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st
from support import GraphBuilder, streaming_chain, taskgraphs

from jturnip.graph.memgraph import OpKind
from jturnip.graph.report import RunReport
from jturnip.graph.taskgraph import Place, TaskGraph
from jturnip.planner.planner import plan, smallest_budget
from jturnip.planner.strategies import STRATEGIES
from jturnip.runtime.schedule import COMPUTE, D2H, H2D, Link, Schedule, schedule
from jturnip.runtime.simulated import simulate
from jturnip.runtime.state import Limits, RunState


# One byte takes one second, so that sizes are times.
LINK = Link(1.0, 1.0)


def a_schedule(
    ops: Sequence[tuple[int, float]],
    deps: dict[int, Sequence[int]] | None = None,
    dispatch: Sequence[float] = (),
) -> Schedule:
    """Ops as (engine, seconds), each of which waits for some; what their starts take."""
    count, deps = len(ops), deps or {}
    zeros = (0,) * count
    return Schedule(
        engines=tuple(engine for engine, _ in ops),
        waits=tuple(len(deps.get(op, ())) for op in range(count)),
        successors=tuple(
            tuple(o for o in range(count) if op in deps.get(o, ())) for op in range(count)
        ),
        ranks=tuple(range(count)),
        by_rank=tuple(range(count)),
        seconds=tuple(seconds for _, seconds in ops),
        dispatch_seconds=tuple(dispatch) or zeros,
        takes=zeros,
        gives_back=zeros,
        frees=zeros,
        moves=tuple(int(engine in (H2D, D2H)) for engine, _ in ops),
        bytes_at_start=0,
    )


def test_runs_take_their_time_one_after_the_other():
    report = simulate(a_schedule([(COMPUTE, 2.0), (COMPUTE, 3.0)]))
    assert (report.seconds, report.compute_seconds, report.stall_seconds) == (5.0, 5.0, 0.0)


def test_compute_and_both_directions_overlap():
    report = simulate(a_schedule([(COMPUTE, 4.0), (H2D, 3.0), (D2H, 2.0)]))
    assert report.seconds == 4.0


def test_transfers_of_one_direction_take_turns():
    report = simulate(a_schedule([(H2D, 3.0), (H2D, 4.0)]))
    assert report.seconds == 7.0
    assert report.ends == (3.0, 7.0)


def test_a_run_waits_for_the_transfer_it_needs():
    report = simulate(a_schedule([(H2D, 3.0), (COMPUTE, 2.0)], {1: [0]}))
    assert (report.seconds, report.stall_seconds) == (5.0, 3.0)
    assert (report.starts, report.ends) == ((0.0, 3.0), (3.0, 5.0))


def test_a_transfer_behind_a_run_costs_no_stall():
    # The reload of the second run's weight hides behind the first run.
    ops = [(COMPUTE, 4.0), (H2D, 3.0), (COMPUTE, 4.0)]
    report = simulate(a_schedule(ops, {2: [1]}))
    assert (report.seconds, report.stall_seconds) == (8.0, 0.0)


def test_a_stall_is_the_time_in_which_compute_has_nothing():
    ops = [(COMPUTE, 4.0), (H2D, 7.0), (COMPUTE, 4.0)]
    report = simulate(a_schedule(ops, {2: [1]}))
    assert (report.seconds, report.stall_seconds) == (11.0, 3.0)


def test_waiting_for_the_last_offload_is_no_stall():
    report = simulate(a_schedule([(COMPUTE, 1.0), (D2H, 5.0)], {1: [0]}))
    assert (report.seconds, report.stall_seconds) == (6.0, 0.0)


def test_latency_delays_a_completion_and_does_not_occupy_the_link():
    ops = [(H2D, 3.0), (H2D, 3.0), (COMPUTE, 1.0)]
    report = simulate(a_schedule(ops, {2: [1]}), link=Link(1.0, 1.0, 2.0))
    assert report.ends == (5.0, 8.0, 9.0)


def test_on_a_gpu_a_copy_waits_for_the_computing_before_it():
    ops = [(H2D, 1.0), (COMPUTE, 4.0), (COMPUTE, 2.0), (H2D, 3.0), (D2H, 3.0)]
    after: dict[int, Sequence[int]] = {3: [0], 4: [0]}  # when both tasks have been started
    here = simulate(a_schedule(ops, after), link=Link(1.0, 1.0))
    there = simulate(a_schedule(ops, after), link=Link(1.0, 1.0, after_compute=True))
    ends = [dict(zip(run.order, run.ends, strict=True)) for run in (here, there)]
    assert ends[0] == {0: 1.0, 1: 4.0, 2: 6.0, 3: 4.0, 4: 4.0}
    assert ends[1] == {0: 1.0, 1: 4.0, 2: 6.0, 3: 9.0, 4: 9.0}


def test_a_copy_costs_the_computing_beside_it():
    ops = [(COMPUTE, 4.0), (H2D, 3.0), (COMPUTE, 4.0)]
    link = Link(1.0, 1.0, compute_seconds_per_copy=0.5, compute_seconds_per_byte=0.25)
    assert link.lost_seconds(4) == 1.5
    report = simulate(a_schedule(ops, {2: [1]}), link=link)
    assert (report.seconds, report.compute_seconds) == (8.75, 8.75)  # one byte is moved


def test_a_copy_that_begins_beside_a_task_delays_it_and_what_waits_for_it():
    ops = [(COMPUTE, 4.0), (H2D, 1.0), (H2D, 2.0), (COMPUTE, 4.0), (D2H, 2.0)]
    link = Link(1.0, 1.0, compute_seconds_per_copy=0.5)
    report = simulate(a_schedule(ops, {2: [1], 3: [2], 4: [0]}), link=link)
    ends = dict(zip(report.order, report.ends, strict=True))
    # The first copy begins before the first task, the second beside it, and the third when
    # it is over, before the next one begins.
    assert ends == {0: 5.0, 1: 1.0, 2: 3.0, 4: 7.0, 3: 9.5}
    assert report.compute_seconds == 8 + 3 * 0.5


def test_a_copy_costs_nothing_where_no_task_could_run():
    link = Link(1.0, 1.0, compute_seconds_per_copy=2.0)
    report = simulate(a_schedule([(H2D, 3.0), (COMPUTE, 2.0)], {1: [0]}), link=link)
    assert (report.seconds, report.compute_seconds) == (5.0, 2.0)


def test_the_loop_takes_its_time_to_start_a_copy():
    ops = [(H2D, 3.0), (D2H, 3.0)]
    report = simulate(a_schedule(ops, dispatch=[0.5, 0.5]))
    assert report.ends == (3.5, 4.0)  # those to the host are started first


def test_the_loop_hears_of_a_copy_later_while_its_cores_compute():
    ops = [(COMPUTE, 4.0), (H2D, 1.0), (H2D, 3.0), (D2H, 1.0), (D2H, 1.0)]
    late = Link(1.0, 1.0, late_seconds=0.5)
    # One copy waits for another that is over meanwhile, one for one that is over after all.
    report = simulate(a_schedule(ops, {3: [1], 4: [2]}), link=late)
    ends = dict(zip(report.order, report.ends, strict=True))
    assert ends == {0: 4.0, 1: 1.0, 2: 4.0, 3: 2.5, 4: 5.0}
    # It is not later than the computing is over.
    later = simulate(a_schedule(ops, {3: [1], 4: [2]}), link=Link(1.0, 1.0, late_seconds=9))
    ends = dict(zip(later.order, later.ends, strict=True))
    assert ends == {0: 4.0, 1: 1.0, 2: 4.0, 3: 5.0, 4: 6.0}


def test_what_runs_in_the_loop_lets_nothing_else_begin():
    ops = [(COMPUTE, 4.0), (H2D, 1.0), (H2D, 1.0), (COMPUTE, 1.0)]
    deps: dict[int, Sequence[int]] = {2: [1], 3: [2]}
    assert simulate(a_schedule(ops, deps)).seconds == 5.0
    # The second copy begins when the task is over, not when the first copy is.
    held = simulate(a_schedule(ops, deps, [4.0, 0.0, 0.0, 0.0]))
    assert held.seconds == 6.0


def test_the_loop_takes_its_time_to_start_a_task_behind_another():
    ops = [(COMPUTE, 4.0), (COMPUTE, 4.0), (H2D, 1.0), (H2D, 1.0)]
    report = simulate(a_schedule(ops, {3: [2]}, [1.5, 1.5, 0.0, 0.0]))
    # It hears of the first copy when both calls have returned.
    ends = dict(zip(report.order, report.ends, strict=True))
    assert ends == {0: 4.0, 1: 8.0, 2: 1.0, 3: 4.0}


def test_time_does_not_run_backwards():
    ops = [(COMPUTE, 1.0), (H2D, 0.25), (H2D, 0.25), (COMPUTE, 1.0)]
    report = simulate(a_schedule(ops, {3: [0]}, [0.0, 1.0, 1.0, 0.0]))
    # The loop starts both copies first, and hears of neither meanwhile.
    assert report.order == (1, 2, 0, 3)
    assert report.ends == (1.25, 2.25, 3.0, 4.0)


def test_an_offload_begins_when_the_run_that_wrote_is_over():
    # The state machine may issue it as soon as the run is dispatched.
    report = simulate(a_schedule([(COMPUTE, 4.0), (D2H, 2.0)], {1: [0]}))
    assert report.ends == (4.0, 6.0)


def test_a_limit_of_one_run_in_flight_still_keeps_compute_busy_in_virtual_time():
    ops = [(COMPUTE, 2.0)] * 3
    assert simulate(a_schedule(ops), limits=Limits(compute=1)).seconds == 6.0


def two_weights(nbytes: int, seconds: float) -> TaskGraph:
    g = GraphBuilder()
    x = g.input(0, Place.DEVICE)
    for _ in range(2):
        (x,) = g.task([x, g.input(nbytes)], 0, seconds=seconds)
    return g.build([x])


def test_with_room_for_two_weights_the_second_loads_while_the_first_is_used():
    graph = two_weights(256, seconds=256.0)
    report = simulate(schedule(graph, plan(graph, 512), LINK))
    assert report.seconds == 3 * 256.0


def test_with_room_for_one_weight_nothing_overlaps():
    graph = two_weights(256, seconds=256.0)
    report = simulate(schedule(graph, plan(graph, 256), LINK))
    assert report.seconds == 4 * 256.0
    assert report.stall_seconds == 2 * 256.0


def test_on_demand_never_loads_ahead():
    graph = two_weights(256, seconds=256.0)
    report = simulate(schedule(graph, plan(graph, 512, "on_demand"), LINK))
    assert report.seconds == 4 * 256.0


def test_bytes_moved_are_those_of_the_plan():
    graph = two_weights(300, seconds=1.0)
    report = simulate(schedule(graph, plan(graph, 512), LINK))
    assert (report.h2d_bytes, report.d2h_bytes) == (600, 0)


def test_the_same_schedule_gives_the_same_report():
    graph = streaming_chain(100, [300, 700])
    ready = schedule(graph, plan(graph, 4 * smallest_budget(graph)), LINK)
    assert simulate(ready) == simulate(ready)


# Against the state machine and what must hold


def replayed(ready: Schedule, report: RunReport) -> list[int]:
    """The starts that a RunState orders when it is told the simulator's completions."""
    ends = dict(zip(report.order, report.ends, strict=True))
    assert len(set(ends.values())) == len(ends), "no two completions fall together"
    state = RunState(ready)
    started = state.begin()
    for op in sorted(ends, key=ends.__getitem__):
        started += state.handle([op])
    assert state.finished
    return [op for op in started if op in ends]


def with_times(graph: TaskGraph, factor: float) -> TaskGraph:
    """Distinct times, so that no two completions fall together."""
    tasks = [dataclasses.replace(t, seconds=factor * (1 + t.id / 7.3)) for t in graph.tasks]
    return dataclasses.replace(graph, tasks=tuple(tasks))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("factor", [0.1, 10.0, 1000.0])
def test_the_simulated_order_is_the_state_machines(strategy: str, factor: float):
    graph = with_times(streaming_chain(40, [300, 700, 1100]), factor)
    memgraph = plan(graph, 2 * smallest_budget(graph), strategy)
    ready = schedule(graph, memgraph, Link(1.1, 1.3))
    report = simulate(ready)
    assert replayed(ready, report) == list(report.order)


@given(taskgraphs(), st.sampled_from(sorted(STRATEGIES)), st.sampled_from([0, 512, 4096]))
@settings(max_examples=100, deadline=None)
def test_a_run_is_never_faster_than_its_work(graph: TaskGraph, strategy: str, more: int):
    memgraph = plan(graph, smallest_budget(graph) + more, strategy)
    ready = schedule(graph, memgraph, LINK)
    report = simulate(ready, link=Link(1.0, 1.0, 0.5))
    compute = sum(t.seconds for t in graph.tasks)
    least = max(compute, float(report.h2d_bytes), float(report.d2h_bytes))
    # Sums are added up in another order.
    assert report.seconds >= least * (1 - 1e-9)
    assert report.compute_seconds == pytest.approx(compute)
    assert 0 <= report.stall_seconds <= report.seconds


@pytest.mark.long
@given(taskgraphs(), st.sampled_from(sorted(STRATEGIES)), st.sampled_from([0, 512, 4096]))
@settings(max_examples=100, deadline=None)
def test_no_op_begins_before_what_it_waits_for_is_over(
    graph: TaskGraph, strategy: str, more: int
):
    memgraph = plan(graph, smallest_budget(graph) + more, strategy)
    report = simulate(schedule(graph, memgraph, LINK))
    ends = dict(zip(report.order, report.ends, strict=True))
    for op in memgraph.ops:
        over = [ends.get(dep.op, 0.0) for dep in op.deps]
        if op.kind is OpKind.DROP:
            # It takes no time: it is over when the last of what it waits for is.
            ends[op.id] = max(over, default=0.0)
            continue
        begin = ends[op.id] - (
            graph.tasks[op.task].seconds
            if op.task is not None
            else float(graph.buffers[memgraph.instances[op.reads[0]].buffer].nbytes)
        )
        assert begin >= max(over, default=0.0) - 1e-9, f"op {op.id}"
