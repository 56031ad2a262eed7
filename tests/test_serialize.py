"""A plan as JSON says everything, and comes back equal."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support import (
    GraphBuilder,
    random_taskgraph,
    simple_plan,
    smallest_budget,
    taskgraphs,
)

from jturnip.graph.memgraph import MemGraph
from jturnip.graph.serialize import memgraph_from_json_dict, memgraph_to_json_dict
from jturnip.graph.taskgraph import TaskGraph
from jturnip.planner.planner import plan as make_plan
from jturnip.planner.verify import verify


def some_plan() -> tuple[TaskGraph, MemGraph]:
    """One in which nothing is written over."""
    graph = random_taskgraph(random.Random(3), tasks=30)
    graph = replace(graph, tasks=tuple(replace(t, overwrites=()) for t in graph.tasks))
    return graph, simple_plan(graph, smallest_budget(graph))


def through_text(plan: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(plan, allow_nan=False))


@given(taskgraphs(), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_plan_comes_back_from_text_equal(graph: TaskGraph, seed: int) -> None:
    plan = simple_plan(graph, smallest_budget(graph), seed)
    text = through_text(memgraph_to_json_dict(graph, plan))
    assert memgraph_from_json_dict(text) == (graph, plan)


def test_a_plan_can_be_verified_from_its_file_alone() -> None:
    verify(*memgraph_from_json_dict(through_text(memgraph_to_json_dict(*some_plan()))))


def test_the_keys_are_those_of_the_schema() -> None:
    plan = memgraph_to_json_dict(*some_plan())
    assert plan["schema"] == 1
    assert {"gpu_bytes", "buffers", "tasks", "outputs", "instances"} <= set(plan)
    assert {"inputs_at_start", "outputs_at_end", "ops"} <= set(plan)
    assert {"id", "nbytes", "role"} <= set(plan["buffers"][0])
    assert {"id", "buffer", "ranges", "on_host"} == set(plan["instances"][0])
    assert {"id", "inputs", "outputs", "workspace", "name", "source"} <= set(
        plan["tasks"][0]
    )
    assert set(plan["ops"][0]) == {
        *("id", "kind", "task", "reads", "writes", "workspace", "deps", "why"),
    }


def test_only_a_plan_that_writes_over_what_it_reads_is_of_the_second_schema() -> None:
    builder = GraphBuilder()
    (y,) = builder.task([builder.input(4)], 4, overwrites=[(0, 0)])
    graph = builder.build([y])
    memgraph = make_plan(graph, 4096)
    plan = memgraph_to_json_dict(graph, memgraph)
    (run,) = [op for op in plan["ops"] if op["kind"] == "run"]
    assert plan["schema"] == 2
    assert plan["tasks"][0]["overwrites"] == [[0, 0]]
    assert run["overwrites"] == [[run["writes"][0], run["reads"][0]]]
    assert memgraph_from_json_dict(through_text(plan)) == (graph, memgraph)


def test_ops_say_their_kind_ranges_and_reasons_in_plain_json() -> None:
    graph, memgraph = some_plan()
    ops = memgraph_to_json_dict(graph, memgraph)["ops"]
    assert {op["kind"] for op in ops} == {"run", "offload", "reload", "drop"}
    for op, record in zip(ops, memgraph.ops, strict=True):
        assert (op["workspace"] is None) == (not record.workspace)
        assert len(op["why"]) == len(op["deps"])
        assert all(kind in ("data", "memory", "order") for _, kind in op["deps"])
    assert any(op["workspace"] for op in ops)
    assert any("bytes" in op["why"] for op in ops)


def test_another_schema_is_refused() -> None:
    plan = memgraph_to_json_dict(*some_plan())
    for schema in (3, None, "1"):
        with pytest.raises(ValueError, match=r"schema .*this version reads 1 and 2"):
            memgraph_from_json_dict(plan | {"schema": schema})
    with pytest.raises(ValueError, match="schema None"):
        memgraph_from_json_dict({})


def test_a_plan_with_something_missing_is_refused_by_name() -> None:
    plan = memgraph_to_json_dict(*some_plan())
    del plan["instances"]
    with pytest.raises(ValueError, match="lacks 'instances'"):
        memgraph_from_json_dict(plan)
    plan = memgraph_to_json_dict(*some_plan())
    del plan["ops"][0]["deps"]
    with pytest.raises(ValueError, match="lacks 'deps'"):
        memgraph_from_json_dict(plan)
