"""A plan as JSON and back, versioned, so that anyone can verify a plan from its file alone.

The dictionaries hold only what JSON has: the caller chooses how to write them. Reading one
back gives equal records.
"""

from typing import Any

from jturnip.graph.memgraph import (
    Dep,
    DepKind,
    Instance,
    InstanceId,
    MemGraph,
    Op,
    OpId,
    OpKind,
    Ranges,
)
from jturnip.graph.taskgraph import Buffer, BufferId, Place, Role, Task, TaskGraph, TaskId


# Schema 2 is schema 1 with tasks that write over what they read; a plan without any is
# written as schema 1.
SCHEMAS = (1, 2)

# A JSON object.
Json = dict[str, Any]


def memgraph_to_json_dict(graph: TaskGraph, memgraph: MemGraph) -> Json:
    """The whole plan; `ops` stand in a valid serial order."""
    return {
        "schema": 2 if any(task.overwrites for task in graph.tasks) else 1,
        "gpu_bytes": memgraph.gpu_bytes,
        "buffers": [_buffer_to_json(buffer) for buffer in graph.buffers],
        "tasks": [_task_to_json(task) for task in graph.tasks],
        "outputs": list(graph.outputs),
        "instances": [_instance_to_json(instance) for instance in memgraph.instances],
        "inputs_at_start": list(memgraph.inputs_at_start),
        "outputs_at_end": list(memgraph.outputs_at_end),
        "ops": [_op_to_json(op) for op in memgraph.ops],
    }


def memgraph_from_json_dict(plan: Json) -> tuple[TaskGraph, MemGraph]:
    """The records of a plan written by `memgraph_to_json_dict`.

    Raises:
      ValueError: the schema is not one this version knows, or something is missing.
    """
    schema = plan.get("schema")
    if schema not in SCHEMAS:
        known = " and ".join(map(str, SCHEMAS))
        raise ValueError(f"the plan has schema {schema!r}; this version reads {known}")
    try:
        graph = TaskGraph(
            buffers=tuple(_buffer_from_json(buffer) for buffer in plan["buffers"]),
            tasks=tuple(_task_from_json(task) for task in plan["tasks"]),
            outputs=_buffer_ids(plan["outputs"]),
        )
        memgraph = MemGraph(
            gpu_bytes=plan["gpu_bytes"],
            ops=tuple(_op_from_json(op) for op in plan["ops"]),
            instances=tuple(_instance_from_json(i) for i in plan["instances"]),
            inputs_at_start=_instance_ids(plan["inputs_at_start"]),
            outputs_at_end=_instance_ids(plan["outputs_at_end"]),
        )
    except KeyError as error:
        raise ValueError(f"the plan lacks {error.args[0]!r}") from error
    return graph, memgraph


def _buffer_to_json(buffer: Buffer) -> Json:
    return {
        "id": buffer.id,
        "nbytes": buffer.nbytes,
        "role": buffer.role.value,
        "start": None if buffer.start is None else buffer.start.value,
        "pinned": buffer.pinned,
        "end_on_host": buffer.end_on_host,
        "name": buffer.name,
    }


def _buffer_from_json(buffer: Json) -> Buffer:
    return Buffer(
        id=BufferId(buffer["id"]),
        nbytes=buffer["nbytes"],
        role=Role(buffer["role"]),
        start=None if buffer["start"] is None else Place(buffer["start"]),
        pinned=buffer["pinned"],
        end_on_host=buffer["end_on_host"],
        name=buffer["name"],
    )


def _task_to_json(task: Task) -> Json:
    plain: Json = {
        "id": task.id,
        "inputs": list(task.inputs),
        "outputs": list(task.outputs),
        "workspace": task.workspace,
        "flops": task.flops,
        "bytes_accessed": task.bytes_accessed,
        "seconds": task.seconds,
        "dispatch_seconds": task.dispatch_seconds,
        "name": task.name,
        "source": task.source,
        "executable": task.executable,
    }
    if task.overwrites:
        plain["overwrites"] = [list(pair) for pair in task.overwrites]
    return plain


def _task_from_json(task: Json) -> Task:
    return Task(
        id=TaskId(task["id"]),
        inputs=_buffer_ids(task["inputs"]),
        outputs=_buffer_ids(task["outputs"]),
        workspace=task["workspace"],
        flops=task["flops"],
        bytes_accessed=task["bytes_accessed"],
        seconds=task["seconds"],
        dispatch_seconds=task.get("dispatch_seconds", 0.0),
        name=task["name"],
        source=task["source"],
        executable=task["executable"],
        overwrites=tuple((o, i) for o, i in task.get("overwrites", ())),
    )


def _instance_to_json(instance: Instance) -> Json:
    return {
        "id": instance.id,
        "buffer": instance.buffer,
        "ranges": _ranges_to_json(instance.ranges),
        "on_host": instance.on_host,
    }


def _instance_from_json(instance: Json) -> Instance:
    return Instance(
        id=InstanceId(instance["id"]),
        buffer=BufferId(instance["buffer"]),
        ranges=_ranges_from_json(instance["ranges"]),
        on_host=instance["on_host"],
    )


def _op_to_json(op: Op) -> Json:
    plain: Json = {
        "id": op.id,
        "kind": op.kind.value,
        "task": op.task,
        "reads": list(op.reads),
        "writes": list(op.writes),
        "workspace": _ranges_to_json(op.workspace) if op.workspace else None,
        "deps": [[dep.op, dep.kind.value] for dep in op.deps],
        # Beside `deps`, one for one.
        "why": [dep.why for dep in op.deps],
    }
    if op.overwrites:
        # [written, read]: the first instance takes over the second's ranges.
        plain["overwrites"] = [list(pair) for pair in op.overwrites]
    return plain


def _op_from_json(op: Json) -> Op:
    return Op(
        id=OpId(op["id"]),
        kind=OpKind(op["kind"]),
        task=op["task"],
        reads=_instance_ids(op["reads"]),
        writes=_instance_ids(op["writes"]),
        workspace=_ranges_from_json(op["workspace"] or []),
        deps=tuple(
            Dep(OpId(earlier), DepKind(kind), why)
            for (earlier, kind), why in zip(op["deps"], op["why"], strict=True)
        ),
        overwrites=tuple(
            (InstanceId(written), InstanceId(read))
            for written, read in op.get("overwrites", ())
        ),
    )


def _ranges_to_json(ranges: Ranges) -> list[list[int]]:
    return [[offset, nbytes] for offset, nbytes in ranges]


def _ranges_from_json(ranges: list[list[int]]) -> Ranges:
    return tuple((offset, nbytes) for offset, nbytes in ranges)


def _buffer_ids(ids: list[int]) -> tuple[BufferId, ...]:
    return tuple(BufferId(i) for i in ids)


def _instance_ids(ids: list[int]) -> tuple[InstanceId, ...]:
    return tuple(InstanceId(i) for i in ids)
