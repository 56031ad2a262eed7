"""The verifier against hand-made plans, right and wrong, and against brute force."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from support import (
    GraphBuilder,
    PlanBuilder,
    assert_plan_is_right,
    brute_force_verify,
    random_taskgraph,
    simple_plan,
    smallest_budget,
    streaming_chain,
    taskgraphs,
    with_instance,
    with_op,
    without_dep,
    without_op,
)

from jturnip.errors import InternalError
from jturnip.graph.memgraph import Dep, DepKind, InstanceId, MemGraph, OpId, OpKind
from jturnip.graph.taskgraph import Place, TaskGraph, TaskId
from jturnip.planner.verify import InvalidPlan, peak_bytes, verify


# The hand-made plan in 16 bytes: its instances and ops, by number.
P, D, W0_HOST, W1_HOST, W0, A, A_HOST, W1, B, A_AGAIN, C, C_HOST = range(12)
RELOAD_W0, RUN_0, OFFLOAD_A, DROP_A, DROP_W0, DROP_D, RELOAD_W1 = range(7)
RUN_1, DROP_W1, RELOAD_A, RUN_2, OFFLOAD_C, DROP_C, DROP_A_AGAIN = range(7, 14)


def small_graph() -> TaskGraph:
    """a = t0(w0, d); b = t1(a, w1, p); c = t2(a, b), of which b and c are wanted.

    p is the caller's; d may be dropped; the weights are on the host, and c must end there.
    """
    graph = GraphBuilder()
    p = graph.input(2, Place.DEVICE, pinned=True, name="p")
    d = graph.input(4, Place.DEVICE)
    w0 = graph.input(4)
    w1 = graph.input(4)
    (a,) = graph.task([w0, d], 4, workspace=2)
    (b,) = graph.task([w1, p], 4, workspace=4)
    (c,) = graph.task([a, b], 4)
    return graph.build([b, c], end_on_host=[c])


def small_plan() -> MemGraph:
    """t1 takes the bytes of a, which leaves for the host and comes back for t2."""
    plan = PlanBuilder(small_graph(), gpu_bytes=16)
    buffers = [b.id for b in plan.graph.buffers]
    p = plan.start(buffers[0], (0, 2))
    d = plan.start(buffers[1], (2, 4))
    w0_host = plan.start(buffers[2])
    w1_host = plan.start(buffers[3])
    reload_w0, w0 = plan.reload(w0_host, ((6, 4),))
    run_0, (a,) = plan.run(TaskId(0), [w0, d], [((10, 4),)], workspace=((14, 2),))
    offload_a, a_host = plan.offload(a)
    drop_a = plan.drop(a, after=[offload_a])
    drop_w0 = plan.drop(w0, after=[run_0])
    drop_d = plan.drop(d, after=[run_0])
    _, w1 = plan.reload(w1_host, ((10, 4),), after=[drop_a])
    # Its workspace also takes bytes 14 and 15 of the first run, over since drop_d.
    run_1, (b,) = plan.run(
        TaskId(1), [w1, p], [((2, 4),)], ((6, 2), (14, 2)), after=[drop_d, drop_w0]
    )
    drop_w1 = plan.drop(w1, after=[run_1])
    _, a_again = plan.reload(a_host, ((6, 4),), after=[run_1])
    run_2, (c,) = plan.run(TaskId(2), [a_again, b], [((10, 4),)], after=[drop_w1])
    offload_c, c_host = plan.offload(c)
    plan.drop(c, after=[offload_c])
    plan.drop(a_again, after=[run_2])
    assert (reload_w0, offload_a) == (RELOAD_W0, OFFLOAD_A)
    return plan.build([b, c_host])


def refused(memgraph: MemGraph, graph: TaskGraph | None = None) -> str:
    """The kind of fault the verifier finds."""
    with pytest.raises(InvalidPlan) as caught:
        verify(graph or small_graph(), memgraph)
    assert caught.value.kind in str(caught.value)
    return caught.value.kind


def waits(*ops: int) -> tuple[Dep, ...]:
    return tuple(Dep(OpId(op), DepKind.ORDER) for op in ops)


def test_a_right_plan_passes() -> None:
    assert_plan_is_right(small_graph(), small_plan())
    assert not brute_force_verify(small_graph(), small_plan())


def test_the_peak_is_the_most_bytes_held_at_once_in_the_serial_order() -> None:
    assert peak_bytes(small_plan()) == 16
    assert peak_bytes(MemGraph(8, (), (), (), ())) == 0


def test_an_empty_plan_of_an_empty_graph_passes() -> None:
    verify(TaskGraph((), (), ()), MemGraph(0, (), (), (), ()))


def test_an_invalid_plan_is_our_bug() -> None:
    assert issubclass(InvalidPlan, InternalError)


def test_the_message_names_ops_buffers_and_bytes() -> None:
    with pytest.raises(InvalidPlan) as caught:
        verify(small_graph(), without_dep(small_plan(), RELOAD_W1, DROP_A))
    message = str(caught.value)
    for part in ("instance 7", "instance 5", "buffer 3", "buffer 4", "[10, 14)", "op 3"):
        assert part in message


# --- Races on bytes.


def test_a_reload_must_wait_for_the_last_reader_of_its_slot() -> None:
    """It waits for the offload of what lay there, not for the drop."""
    plan = with_op(small_plan(), RELOAD_W1, deps=waits(OFFLOAD_A))
    assert refused(plan) == "race"


def test_a_task_output_must_wait_for_the_offload_of_its_slot() -> None:
    graph = GraphBuilder()
    (x,) = graph.task([], 4)
    (y,) = graph.task([], 4)
    built = graph.build([x, y])
    plan = PlanBuilder(built, gpu_bytes=4)
    _, (device_x,) = plan.run(TaskId(0), [], [((0, 4),)])
    offload, host_x = plan.offload(device_x)
    drop = plan.drop(device_x, after=[offload])
    _, (device_y,) = plan.run(TaskId(1), [], [((0, 4),)], after=[drop])
    right = plan.build([host_x, device_y])
    verify(built, right)
    assert refused(without_dep(right, 3, drop), built) == "race"
    assert refused(with_op(right, 3, deps=waits(offload)), built) == "race"


def test_a_workspace_must_not_lie_on_a_live_instance() -> None:
    assert refused(with_op(small_plan(), RUN_1, workspace=((8, 4),))) == "race"
    assert refused(with_op(small_plan(), RUN_0, workspace=((6, 2),))) == "race"


def test_a_workspace_must_not_lie_on_the_outputs_of_its_run() -> None:
    assert refused(with_op(small_plan(), RUN_0, workspace=((12, 2),))) == "race"


def test_a_slot_waits_for_the_run_that_had_its_bytes_as_workspace() -> None:
    plan = with_op(small_plan(), RELOAD_A, deps=waits(OFFLOAD_A, DROP_W0))
    assert refused(plan) == "race"


def test_two_outputs_of_a_run_must_not_overlap() -> None:
    graph = GraphBuilder()
    built = graph.build(graph.task([], 4, 4))
    plan = PlanBuilder(built, gpu_bytes=8)
    _, outputs = plan.run(TaskId(0), [], [((0, 4),), ((3, 4),)])
    assert refused(plan.build(outputs), built) == "race"


def test_an_output_must_not_lie_on_an_input_of_its_run() -> None:
    assert refused(with_instance(small_plan(), C, ranges=((2, 4),))) == "race"


def test_every_range_of_a_slot_is_looked_at() -> None:
    """The first is free; the second is of instance 2, and op 2 freed the first."""
    graph = GraphBuilder()
    graph.task([], 4)
    _, kept = graph.task([], 4, 4)
    (wanted,) = graph.task([], 8)
    built = graph.build([kept, wanted])
    plan = PlanBuilder(built, gpu_bytes=16)
    _, (unread,) = plan.run(TaskId(0), [], [((0, 4),)])
    _, (_, live) = plan.run(TaskId(1), [], [((4, 4),), ((8, 4),)])
    drop = plan.drop(unread, after=[OpId(0), OpId(1)])
    assert drop == live == 2
    _, (over,) = plan.run(TaskId(2), [], [((0, 4), (8, 4))], after=[drop])
    assert refused(plan.build([live, over]), built) == "race"


def test_two_inputs_must_not_overlap_at_the_start() -> None:
    assert refused(with_instance(small_plan(), D, ranges=((1, 4),))) == "race"


def test_bytes_of_an_instance_never_dropped_are_never_free() -> None:
    plan = without_op(small_plan(), DROP_A)
    assert refused(plan) == "race"


def test_one_shared_byte_is_a_race() -> None:
    plan = with_instance(small_plan(), W1, ranges=((9, 5),))
    assert refused(plan) == "race"


def test_the_serial_order_alone_is_no_reason_to_wait() -> None:
    plan = small_plan()
    deps = plan.ops[RUN_1].deps
    assert refused(with_op(plan, RUN_1, deps=deps[:1])) == "race"


def test_any_kind_of_dependency_counts() -> None:
    plan = small_plan()
    ops = tuple(
        replace(op, deps=tuple(Dep(dep.op, DepKind.ORDER) for dep in op.deps))
        for op in plan.ops
    )
    verify(small_graph(), replace(plan, ops=ops))


# --- Outputs written over inputs.


def overwriting_graph() -> TaskGraph:
    """a = t0(); b = t1(a); c = t2(a), over a; of which b and c are wanted."""
    graph = GraphBuilder()
    (a,) = graph.task([], 4)
    (b,) = graph.task([a], 4)
    (c,) = graph.task([a], 4, overwrites=[(0, 0)])
    return graph.build([b, c])


def overwriting_plan() -> MemGraph:
    plan = PlanBuilder(overwriting_graph(), gpu_bytes=8)
    _, (a,) = plan.run(TaskId(0), [], [((0, 4),)])
    run_1, (b,) = plan.run(TaskId(1), [a], [((4, 4),)])
    _, (c,) = plan.run(TaskId(2), [a], [((0, 4),)], after=[run_1])
    return plan.build([b, c])


def test_an_output_may_be_written_over_an_input() -> None:
    assert_plan_is_right(overwriting_graph(), overwriting_plan())
    assert not brute_force_verify(overwriting_graph(), overwriting_plan())
    assert peak_bytes(overwriting_plan()) == 8


def test_who_reads_it_must_be_over_before_it_is_written_over() -> None:
    plan = without_dep(overwriting_plan(), 2, 1)
    assert refused(plan, overwriting_graph()) == "read-after-drop"
    assert brute_force_verify(overwriting_graph(), plan)


def test_what_is_written_over_is_not_read_again() -> None:
    graph = overwriting_graph()
    first, second, third = graph.tasks
    tasks = first, replace(third, id=TaskId(1)), replace(second, id=TaskId(2))
    assert refused(overwriting_plan(), replace(graph, tasks=tasks)) == "graph"
    # The TaskGraph is right; the run of t1 comes after that of t2.
    plan = PlanBuilder(graph, gpu_bytes=8)
    _, (a,) = plan.run(TaskId(0), [], [((0, 4),)])
    run_2, (c,) = plan.run(TaskId(2), [a], [((0, 4),)])
    _, (b,) = plan.run(TaskId(1), [a], [((4, 4),)], after=[run_2])
    wrong = plan.build([b, c])
    assert refused(wrong, graph) == "read-after-drop"
    assert brute_force_verify(graph, wrong)


def test_a_copy_to_the_host_must_be_over_before_its_source_is_written_over() -> None:
    graph = overwriting_graph()
    plan = PlanBuilder(graph, gpu_bytes=8)
    _, (a,) = plan.run(TaskId(0), [], [((0, 4),)])
    run_1, (b,) = plan.run(TaskId(1), [a], [((4, 4),)])
    offload, _ = plan.offload(a)
    run_2, (c,) = plan.run(TaskId(2), [a], [((0, 4),)], after=[run_1, offload])
    right = plan.build([b, c])
    verify(graph, right)
    assert refused(without_dep(right, run_2, offload), graph) == "read-after-drop"


def test_a_task_writes_over_what_it_says_and_in_its_bytes() -> None:
    right = overwriting_plan()
    (pair,) = right.ops[2].overwrites
    written, read = pair
    for wrong in (
        with_op(right, 2, overwrites=()),
        with_op(right, 2, overwrites=((read, written),)),
        with_op(right, 2, overwrites=(pair, pair)),
        with_op(right, 1, overwrites=((InstanceId(1), read),)),
        with_instance(right, written, ranges=((4, 4),)),
        with_instance(right, written, ranges=((0, 2), (2, 2))),
    ):
        assert refused(wrong, overwriting_graph()) == "overwrite"


def test_only_a_run_writes_over() -> None:
    plan = with_op(small_plan(), DROP_A, overwrites=((InstanceId(A), InstanceId(A)),))
    assert refused(plan) == "shape"


def test_what_was_written_over_is_not_dropped_as_well() -> None:
    plan = PlanBuilder(overwriting_graph(), gpu_bytes=8)
    _, (a,) = plan.run(TaskId(0), [], [((0, 4),)])
    run_1, (b,) = plan.run(TaskId(1), [a], [((4, 4),)])
    run_2, (c,) = plan.run(TaskId(2), [a], [((0, 4),)], after=[run_1])
    plan.drop(a, after=[run_2])
    assert refused(plan.build([b, c]), overwriting_graph()) == "dropped-twice"


def test_an_output_that_was_written_over_is_not_there() -> None:
    graph = overwriting_graph()
    wanted = replace(graph, outputs=(*graph.outputs, graph.tasks[0].outputs[0]))
    assert refused(overwriting_plan(), wanted) == "graph"


def test_the_bytes_of_the_caller_are_not_written_over() -> None:
    for pinned in (False, True):
        builder = GraphBuilder()
        x = builder.input(4, Place.DEVICE, pinned=pinned)
        (y,) = builder.task([x], 4)
        graph = builder.build([y])
        task = replace(graph.tasks[0], overwrites=((0, 0),))
        graph = replace(graph, tasks=(task,))
        plan = PlanBuilder(graph, gpu_bytes=4)
        start = plan.start(x, (0, 4))
        _, (written,) = plan.run(TaskId(0), [start], [((0, 4),)])
        memgraph = plan.build([written])
        if pinned:
            assert refused(memgraph, graph) == "graph"
        else:
            verify(graph, memgraph)


def test_an_output_is_written_over_one_input_of_its_size() -> None:
    graph = overwriting_graph()
    for pairs in (((0, 0), (0, 0)), ((1, 0),), ((0, 1),)):
        task = replace(graph.tasks[2], overwrites=pairs)
        wrong = replace(graph, tasks=(*graph.tasks[:2], task))
        assert refused(overwriting_plan(), wrong) == "graph"
    buffers = list(graph.buffers)
    buffers[2] = replace(buffers[2], nbytes=2)
    assert refused(overwriting_plan(), replace(graph, buffers=tuple(buffers))) == "graph"


# --- Values that are not there.


def test_a_run_must_wait_for_the_reload_of_its_input() -> None:
    assert refused(without_dep(small_plan(), RUN_0, RELOAD_W0)) == "read-before-write"


def test_an_offload_must_wait_for_the_run_that_writes() -> None:
    assert refused(with_op(small_plan(), OFFLOAD_A, deps=())) == "read-before-write"


def test_a_reload_must_wait_for_its_offload() -> None:
    graph = GraphBuilder()
    (x,) = graph.task([], 1)
    built = graph.build([x])
    plan = PlanBuilder(built, gpu_bytes=2)
    _, (first,) = plan.run(TaskId(0), [], [((0, 1),)])
    offload, on_host = plan.offload(first)
    plan.drop(first, after=[offload])
    reload, second = plan.reload(on_host, ((1, 1),))
    right = plan.build([second])
    verify(built, right)
    assert refused(without_dep(right, reload, offload), built) == "read-before-write"


def test_a_reload_without_an_offload_has_nothing_to_read() -> None:
    assert refused(without_op(small_plan(), OFFLOAD_A)) == "never-written"


def test_a_run_cannot_read_what_was_dropped() -> None:
    """a is not reloaded: the run reads the instance that was there before."""
    plan = with_op(small_plan(), RUN_2, reads=(InstanceId(A), InstanceId(B)))
    assert refused(plan) == "read-after-drop"


def test_a_drop_must_wait_for_every_reader() -> None:
    assert refused(without_dep(small_plan(), DROP_A, OFFLOAD_A)) == "read-after-drop"
    assert refused(without_dep(small_plan(), DROP_W1, RUN_1)) == "read-after-drop"


def test_a_drop_of_what_nobody_reads_waits_for_its_writer() -> None:
    graph = GraphBuilder()
    unread, wanted = graph.task([], 4, 4)
    built = graph.build([wanted])
    assert unread == 0
    plan = PlanBuilder(built, gpu_bytes=8)
    run, (first, second) = plan.run(TaskId(0), [], [((0, 4),), ((4, 4),)])
    drop = plan.drop(first)
    right = plan.build([second])
    verify(built, right)
    assert refused(without_dep(right, drop, run), built) == "read-before-write"


def test_nothing_is_dropped_twice() -> None:
    plan = with_op(small_plan(), DROP_A_AGAIN, reads=(InstanceId(A),))
    assert refused(plan) == "dropped-twice"


def test_what_the_caller_keeps_is_not_dropped() -> None:
    plan = with_op(small_plan(), DROP_A_AGAIN, reads=(InstanceId(P),))
    assert refused(plan) == "pinned-dropped"


# --- Outputs.


def test_an_output_must_not_be_dropped() -> None:
    plan = with_op(small_plan(), DROP_A_AGAIN, reads=(InstanceId(B),))
    assert refused(plan) == "missing-output"


def test_every_output_has_an_instance_of_its_buffer() -> None:
    plan = small_plan()
    assert refused(replace(plan, outputs_at_end=(InstanceId(B),))) == "missing-output"
    wrong = (InstanceId(B), InstanceId(A_HOST))
    assert refused(replace(plan, outputs_at_end=wrong)) == "missing-output"


def test_an_output_must_end_on_the_host_where_that_is_asked_for() -> None:
    plan = without_op(small_plan(), DROP_C)
    on_device = (InstanceId(B), InstanceId(C))
    assert refused(replace(plan, outputs_at_end=on_device)) == "output-place"


def test_an_output_may_end_on_the_host_unasked() -> None:
    graph = small_graph()
    outputs = [replace(b, end_on_host=False) for b in graph.buffers]
    verify(replace(graph, buffers=tuple(outputs)), small_plan())


# --- Slots.


def test_ranges_must_lie_in_the_budget() -> None:
    plan = small_plan()
    assert refused(replace(plan, gpu_bytes=15)) == "budget"
    assert refused(with_instance(plan, C, ranges=((13, 4),))) == "budget"
    assert refused(with_instance(plan, C, ranges=((-1, 4),))) == "budget"
    assert refused(with_op(plan, RUN_0, workspace=((15, 2),))) == "budget"


def test_a_slot_must_hold_its_buffer() -> None:
    assert refused(with_instance(small_plan(), W1, ranges=((10, 3),))) == "too-small"
    assert refused(with_instance(small_plan(), W1, ranges=())) == "too-small"
    assert refused(with_op(small_plan(), RUN_0, workspace=((14, 1),))) == "too-small"
    assert refused(with_op(small_plan(), RUN_0, workspace=())) == "too-small"


def test_a_slot_may_be_larger_than_its_buffer_and_in_pieces() -> None:
    plan = with_instance(small_plan(), W1, ranges=((10, 1), (11, 2), (13, 1)))
    verify(small_graph(), plan)
    larger = with_instance(small_plan(), C, ranges=((10, 5),))
    verify(small_graph(), larger)


def test_ranges_are_sorted_disjoint_and_not_empty() -> None:
    for ranges in [((10, 2), (11, 2)), ((12, 2), (10, 2)), ((10, 4), (14, 0))]:
        assert refused(with_instance(small_plan(), W1, ranges=ranges)) == "ranges"


def test_a_host_instance_has_no_ranges() -> None:
    assert refused(with_instance(small_plan(), A_HOST, ranges=((10, 4),))) == "ranges"


def test_a_buffer_of_no_bytes_needs_no_slot_and_still_an_order() -> None:
    graph = GraphBuilder()
    (x,) = graph.task([], 0)
    (y,) = graph.task([x], 1)
    built = graph.build([y])
    plan = PlanBuilder(built, gpu_bytes=1)
    _, (device_x,) = plan.run(TaskId(0), [], [()])
    run, (device_y,) = plan.run(TaskId(1), [device_x], [((0, 1),)])
    drop = plan.drop(device_x, after=[run])
    right = plan.build([device_y])
    verify(built, right)
    assert refused(without_dep(right, run, 0), built) == "read-before-write"
    assert refused(without_dep(right, drop, run), built) == "read-after-drop"


# --- The records' own rules.


def test_an_op_cannot_wait_for_itself_or_for_a_later_one() -> None:
    assert refused(with_op(small_plan(), RUN_0, deps=waits(RUN_0))) == "cycle"
    assert refused(with_op(small_plan(), RUN_0, deps=waits(OFFLOAD_A))) == "cycle"


def test_ids_are_positions_and_refer_to_something() -> None:
    plan = small_plan()
    assert refused(with_op(plan, RUN_0, id=OpId(7))) == "ids"
    assert refused(with_op(plan, RUN_0, deps=waits(-1))) == "ids"
    assert refused(with_op(plan, RUN_0, deps=waits(99))) == "ids"
    assert refused(with_op(plan, RUN_0, reads=(InstanceId(99),))) == "ids"
    assert refused(with_op(plan, RUN_0, task=TaskId(3))) == "ids"
    assert refused(with_instance(plan, A, id=InstanceId(3))) == "ids"
    assert refused(with_instance(plan, A, buffer=99)) == "ids"
    assert refused(replace(plan, outputs_at_end=(InstanceId(-1),))) == "ids"


def test_a_broken_taskgraph_is_refused() -> None:
    graph = small_graph()
    reordered = replace(graph, tasks=graph.tasks[::-1])
    assert refused(small_plan(), reordered) == "graph"


def test_every_task_runs_once() -> None:
    plan = without_op(small_plan(), DROP_A_AGAIN)
    graph = small_graph()
    extra = replace(graph.tasks[2], id=TaskId(3), inputs=(), outputs=())
    assert refused(plan, replace(graph, tasks=(*graph.tasks, extra))) == "task-never"
    again = replace(plan.ops[RUN_2], id=OpId(len(plan.ops)))
    assert refused(replace(plan, ops=(*plan.ops, again))) == "task-twice"


def test_an_instance_is_written_once() -> None:
    plan = with_op(small_plan(), RELOAD_A, writes=(InstanceId(A),))
    assert refused(plan) == "written-twice"
    over_an_input = with_op(small_plan(), RELOAD_W0, writes=(InstanceId(D),))
    assert refused(over_an_input) == "wrong-buffer"
    instances = small_plan().instances
    unused = (*instances, replace(instances[A], id=InstanceId(12)))
    assert refused(replace(small_plan(), instances=unused)) == "never-written"


def test_a_reload_brings_back_the_same_buffer() -> None:
    plan = with_op(small_plan(), RELOAD_A, reads=(InstanceId(W1_HOST),))
    assert refused(plan) == "wrong-buffer"


def test_a_run_reads_and_writes_the_buffers_of_its_task_in_order() -> None:
    plan = small_plan()
    swapped = plan.ops[RUN_2].reads[::-1]
    assert refused(with_op(plan, RUN_2, reads=swapped)) == "wrong-buffer"
    assert refused(with_op(plan, RUN_2, reads=())) == "wrong-buffer"
    assert refused(with_op(plan, RUN_2, writes=(InstanceId(B),))) == "wrong-buffer"


def test_a_run_uses_device_instances_only() -> None:
    plan = with_op(small_plan(), RUN_2, reads=(InstanceId(A_HOST), InstanceId(B)))
    assert refused(plan) == "wrong-memory"


def test_a_copy_goes_from_one_memory_to_the_other() -> None:
    plan = small_plan()
    assert refused(with_op(plan, RELOAD_A, kind=OpKind.OFFLOAD)) == "wrong-memory"
    assert refused(with_op(plan, OFFLOAD_A, kind=OpKind.RELOAD)) == "wrong-memory"
    assert refused(with_op(plan, OFFLOAD_A, writes=(InstanceId(A),))) == "wrong-memory"
    assert refused(with_op(plan, DROP_A, reads=(InstanceId(A_HOST),))) == "wrong-memory"


def test_only_runs_have_tasks_and_workspaces() -> None:
    plan = small_plan()
    assert refused(with_op(plan, DROP_A, workspace=((0, 1),))) == "shape"
    assert refused(with_op(plan, DROP_A, task=TaskId(1))) == "shape"
    assert refused(with_op(plan, RUN_0, task=None)) == "shape"
    assert refused(with_op(plan, DROP_A, reads=())) == "shape"
    assert refused(with_op(plan, OFFLOAD_A, writes=())) == "shape"


def test_every_input_is_there_at_the_start_once_and_in_its_memory() -> None:
    plan = small_plan()
    start = plan.inputs_at_start
    assert refused(replace(plan, inputs_at_start=start[1:])) == "start"
    assert refused(replace(plan, inputs_at_start=(*start, start[0]))) == "start"
    assert refused(replace(plan, inputs_at_start=(*start, InstanceId(A)))) == "start"
    assert refused(with_instance(plan, P, ranges=(), on_host=True)) == "start"
    at_host = with_instance(plan, W0_HOST, ranges=((0, 4),), on_host=False)
    assert refused(at_host) == "start"


# --- Against brute force.


def agree(graph: TaskGraph, memgraph: MemGraph) -> bool:
    """Whether the plan is right, on which both verifiers must agree."""
    complaints = brute_force_verify(graph, memgraph)
    fault = None
    try:
        verify(graph, memgraph)
    except InvalidPlan as error:
        fault = str(error)
    assert (fault is None) == (not complaints), (fault, complaints)
    return fault is None


def test_without_any_one_dependency_both_verifiers_agree() -> None:
    plan = small_plan()
    needed = 0
    for op in plan.ops:
        for dep in op.deps:
            needed += not agree(small_graph(), without_dep(plan, op.id, dep.op))
    assert needed >= 15


@pytest.mark.parametrize("seed", range(12))
def test_without_any_one_dependency_of_a_random_plan_both_agree(seed: int) -> None:
    graph = random_taskgraph(random.Random(seed), tasks=8)
    plan = simple_plan(graph, smallest_budget(graph), seed)
    assert agree(graph, plan)
    for op in plan.ops:
        for dep in op.deps:
            agree(graph, without_dep(plan, op.id, dep.op))


@given(taskgraphs(max_tasks=8), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_after_random_changes_both_verifiers_agree(
    graph: TaskGraph, slack: int, rng: random.Random
) -> None:
    plan = simple_plan(graph, smallest_budget(graph) + slack, rng.randint(0, 99))
    for _ in range(rng.randint(0, 3)):
        plan = changed(plan, rng)
    agree(graph, plan)


def changed(plan: MemGraph, rng: random.Random) -> MemGraph:
    """A plan with one slot, dependency, read or output moved somewhere else."""
    op = rng.choice(plan.ops)
    instance = rng.choice(plan.instances)
    match rng.choice(["dep", "waits", "slot", "swap", "read", "workspace", "output"]):
        case "dep" if op.deps:
            return without_dep(plan, op.id, rng.choice(op.deps).op)
        case "waits" if op.id:
            return with_op(plan, op.id, deps=waits(rng.randrange(op.id)))
        case "slot" if instance.ranges:
            moved = tuple((max(0, o + rng.choice([-1, 1])), n) for o, n in instance.ranges)
            return with_instance(plan, instance.id, ranges=moved)
        case "swap" if instance.ranges:
            other = rng.choice([i for i in plan.instances if not i.on_host])
            plan = with_instance(plan, instance.id, ranges=other.ranges)
            return with_instance(plan, other.id, ranges=instance.ranges)
        case "read" if op.reads:
            reads = list(op.reads)
            k = rng.randrange(len(reads))
            old = plan.instances[reads[k]]
            same = [
                i.id
                for i in plan.instances
                if (i.buffer, i.on_host) == (old.buffer, old.on_host)
            ]
            reads[k] = rng.choice(same)
            return with_op(plan, op.id, reads=tuple(reads))
        case "workspace" if op.workspace:
            (offset, nbytes), *rest = op.workspace
            moved = tuple(sorted([(max(0, offset - 1), nbytes), *rest]))
            return with_op(plan, op.id, workspace=moved)
        case "output" if plan.outputs_at_end:
            ends = list(plan.outputs_at_end)
            ends[rng.randrange(len(ends))] = instance.id
            return replace(plan, outputs_at_end=tuple(ends))
        case _:
            return plan


@pytest.mark.long
@given(taskgraphs(max_tasks=40), st.integers(0, 30), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_the_simple_planner_is_right(graph: TaskGraph, slack: int, seed: int) -> None:
    plan = simple_plan(graph, smallest_budget(graph) + slack, seed)
    assert_plan_is_right(graph, plan, orders=4, seed=seed)


# --- Size.


def test_a_plan_of_ten_thousand_tasks_is_verified() -> None:
    graph = streaming_chain(10_000, sizes=(4, 6, 3))
    verify(graph, simple_plan(graph, smallest_budget(graph) + 20))


def test_a_path_through_a_long_chain_is_found() -> None:
    """All runs in one row; each drop waits for the last reader only."""
    graph = GraphBuilder()
    w = graph.input(1, Place.DEVICE)
    xs = [graph.task([w], 1)[0] for _ in range(3000)]
    built = graph.build(xs)
    plan = PlanBuilder(built, gpu_bytes=3001)
    device_w = plan.start(w, (0, 1))
    ends: list[InstanceId] = []
    last: list[OpId] = []
    for t, _ in enumerate(xs):
        run, writes = plan.run(TaskId(t), [device_w], [((t + 1, 1),)], after=last)
        last = [run]
        ends += writes
    plan.drop(device_w, after=last)
    right = plan.build(ends)
    verify(built, right)
    assert refused(without_dep(right, 1500, 1499), built) == "read-after-drop"
