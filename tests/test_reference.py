"""The oracles themselves: bytes that are lost must show."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from support import (
    GraphBuilder,
    PlanBuilder,
    simple_plan,
    smallest_budget,
    taskgraphs,
    with_instance,
    with_op,
    without_dep,
)

from jturnip.graph.memgraph import InstanceId, MemGraph, OpId
from jturnip.graph.reference import (
    POISON,
    naive_peak,
    random_order,
    run_memgraph,
    run_taskgraph,
    symbolic_inputs,
)
from jturnip.graph.taskgraph import TaskGraph, TaskId


RUN_0, OFFLOAD_X, DROP_X, RUN_1, DROP_Y, RELOAD_X = range(6)
X, X_HOST, Y, X_AGAIN = range(4)


def two_in_turn() -> tuple[TaskGraph, MemGraph]:
    """x leaves so that y may have its bytes, and comes back when y is gone."""
    graph = GraphBuilder()
    (x,) = graph.task([], 4)
    graph.task([], 4)
    built = graph.build([x])
    plan = PlanBuilder(built, gpu_bytes=4)
    _, (device_x,) = plan.run(TaskId(0), [], [((0, 4),)])
    offload, host_x = plan.offload(device_x)
    drop_x = plan.drop(device_x, after=[offload])
    _, (device_y,) = plan.run(TaskId(1), [], [((0, 4),)], after=[drop_x])
    drop_y = plan.drop(device_y)
    _, again = plan.reload(host_x, ((0, 4),), after=[drop_y])
    return built, plan.build([again])


def outputs(graph: TaskGraph, plan: MemGraph, *order: int) -> list[str]:
    ids = [OpId(op) for op in order] or [op.id for op in plan.ops]
    return run_memgraph(graph, plan, symbolic_inputs(graph), ids)


def expected(graph: TaskGraph) -> list[str]:
    values = run_taskgraph(graph, symbolic_inputs(graph))
    return [values[b] for b in graph.outputs]


def test_the_serial_order_of_a_right_plan_gives_the_right_outputs() -> None:
    graph, plan = two_in_turn()
    assert outputs(graph, plan) == expected(graph)
    assert POISON not in expected(graph)


def test_every_task_and_every_output_has_its_own_value() -> None:
    graph = GraphBuilder()
    graph.task([], 1, 1)
    graph.task([], 1, 1)
    values = run_taskgraph(graph.build([]), {})
    assert len(set(values.values())) == 4


def test_a_value_depends_on_what_was_read_and_in_which_order() -> None:
    graph = GraphBuilder()
    x = graph.input(1)
    y = graph.input(1)
    (z,) = graph.task([x, y], 1)
    built = graph.build([z])
    assert run_taskgraph(built, {x: "1", y: "2"}) != run_taskgraph(built, {x: "2", y: "1"})
    one = run_taskgraph(built, {x: "1", y: "2"})[z]
    assert run_taskgraph(built, {x: "2", y: "1"})[z] != one
    assert run_taskgraph(built, {x: "1", y: "2"})[z] == one


def test_bytes_overwritten_too_early_are_another_value() -> None:
    graph, plan = two_in_turn()
    early = (RUN_0, RUN_1, OFFLOAD_X, DROP_X, DROP_Y, RELOAD_X)
    (found,) = outputs(graph, plan, *early)
    assert found not in (POISON, *expected(graph))


def test_dropped_bytes_are_lost() -> None:
    graph, plan = two_in_turn()
    early = (RUN_0, DROP_X, OFFLOAD_X, RUN_1, DROP_Y, RELOAD_X)
    assert outputs(graph, plan, *early) == [POISON]


def test_a_late_drop_spoils_the_next_owner() -> None:
    graph, plan = two_in_turn()
    late = (RUN_0, OFFLOAD_X, RUN_1, DROP_Y, RELOAD_X, DROP_X)
    assert outputs(graph, plan, *late) == [POISON]


def test_a_reload_before_its_offload_has_nothing() -> None:
    graph, plan = two_in_turn()
    early = (RUN_0, RUN_1, DROP_Y, RELOAD_X, OFFLOAD_X, DROP_X)
    assert outputs(graph, plan, *early) == [POISON]


def test_one_shared_byte_is_enough_to_poison() -> None:
    graph, plan = two_in_turn()
    plan = replace(with_instance(plan, Y, ranges=((3, 4),)), gpu_bytes=7)
    early = (RUN_0, RUN_1, OFFLOAD_X, DROP_X, DROP_Y, RELOAD_X)
    assert outputs(graph, plan, *early) == [POISON]
    plan = with_instance(plan, Y, ranges=((4, 3),))
    assert outputs(graph, replace(plan, gpu_bytes=8), *early) == expected(graph)


def test_a_workspace_is_scribbled_on() -> None:
    graph, plan = two_in_turn()
    plan = replace(with_instance(plan, Y, ranges=((4, 4),)), gpu_bytes=8)
    early = (RUN_0, RUN_1, OFFLOAD_X, DROP_X, DROP_Y, RELOAD_X)
    assert outputs(graph, plan, *early) == expected(graph)
    plan = with_op(plan, RUN_1, workspace=((2, 1),))
    assert outputs(graph, plan, *early) == [POISON]


def test_bytes_outside_the_budget_hold_nothing() -> None:
    graph, plan = two_in_turn()
    assert outputs(graph, plan) == expected(graph)
    assert outputs(graph, with_instance(plan, X_AGAIN, ranges=((1, 4),))) == [POISON]


def test_a_slot_too_small_holds_nothing() -> None:
    graph, plan = two_in_turn()
    assert outputs(graph, with_instance(plan, X_AGAIN, ranges=((0, 3),))) == [POISON]


def test_a_value_in_pieces_is_read_in_their_order() -> None:
    graph, plan = two_in_turn()
    pieces = with_instance(plan, X, ranges=((0, 1), (1, 3)))
    assert outputs(graph, pieces) == expected(graph)


def test_a_random_order_keeps_every_edge_and_is_the_same_for_a_seed() -> None:
    graph, plan = two_in_turn()
    free = replace(plan, ops=tuple(replace(op, deps=op.deps[:1]) for op in plan.ops))
    seen: set[tuple[OpId, ...]] = set()
    for seed in range(50):
        order = random_order(free, seed)
        place = {op: k for k, op in enumerate(order)}
        for op in free.ops:
            assert all(place[dep.op] < place[op.id] for dep in op.deps)
        assert order == random_order(free, seed)
        seen.add(tuple(order))
    assert len(seen) > 1
    assert graph.outputs


def test_a_cycle_has_no_order() -> None:
    _, plan = two_in_turn()
    deps = (plan.ops[OFFLOAD_X].deps[0]._replace(op=OpId(RELOAD_X)),)
    with pytest.raises(ValueError, match="0 of 6 ops"):
        random_order(with_op(plan, RUN_0, deps=deps), 0)


def test_some_order_shows_a_missing_dependency() -> None:
    graph, plan = two_in_turn()
    wrong = without_dep(plan, RUN_1, DROP_X)
    orders = [random_order(wrong, seed) for seed in range(30)]
    found = [run_memgraph(graph, wrong, {}, order) for order in orders]
    assert expected(graph) in found
    assert any(values != expected(graph) for values in found)


def test_the_naive_peak_counts_slots_and_workspaces() -> None:
    _, plan = two_in_turn()
    assert naive_peak(plan, [op.id for op in plan.ops]) == 4
    early = [OpId(op) for op in (RUN_0, RUN_1, OFFLOAD_X, DROP_X, DROP_Y, RELOAD_X)]
    assert naive_peak(plan, early) == 8
    larger = with_op(plan, RUN_1, workspace=((4, 3),))
    assert naive_peak(larger, [op.id for op in larger.ops]) == 7


def test_a_buffer_of_no_bytes_is_still_lost_by_a_drop() -> None:
    graph = GraphBuilder()
    (x,) = graph.task([], 0)
    built = graph.build([x])
    plan = PlanBuilder(built, gpu_bytes=0)
    _, (device_x,) = plan.run(TaskId(0), [], [()])
    assert outputs(built, plan.build([device_x])) == expected(built)
    plan.drop(device_x)
    assert outputs(built, plan.build([InstanceId(0)])) == [POISON]


@given(taskgraphs(), st.integers(0, 20), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_any_order_of_a_right_plan_gives_the_right_outputs(
    graph: TaskGraph, slack: int, seed: int
) -> None:
    plan = simple_plan(graph, smallest_budget(graph) + slack, seed)
    order = random_order(plan, seed)
    assert run_memgraph(graph, plan, symbolic_inputs(graph), order) == expected(graph)
    assert naive_peak(plan, order) <= plan.gpu_bytes
