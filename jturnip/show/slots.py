"""A plan as rectangles: who has which bytes of the arena, from when to when."""

from dataclasses import dataclass

from jturnip.graph.memgraph import OpKind, Ranges, ranges_bytes
from jturnip.graph.plan import Plan
from jturnip.graph.taskgraph import Role
from jturnip.show.timeline import buffer_name


@dataclass(frozen=True, slots=True)
class Stay:
    """A buffer in its slot, or a task's workspace."""

    # Seconds of the predicted run.
    start: float
    end: float
    # Each part's offset and bytes in the arena.
    ranges: Ranges
    # "argument", "intermediate", "result" or "workspace".
    kind: str
    name: str
    source: str = ""

    @property
    def nbytes(self) -> int:
        """Its bytes, all parts together."""
        return ranges_bytes(self.ranges)


_KINDS = {
    Role.INPUT: "argument",
    Role.CONSTANT: "argument",
    Role.INTERMEDIATE: "intermediate",
    Role.OUTPUT: "result",
}


def of_plan(plan: Plan) -> list[Stay]:
    """Every stay of a plan, by start, in the times of its predicted run.

    Raises:
      ValueError: the plan has no predicted run: a function that runs whole or in pieces.
    """
    run = plan.predicted_run
    if run is None:
        raise ValueError(
            "the plan is of several pieces, or of one executable: it has no slots"
        )
    graph, memgraph = plan.taskgraph, plan.memgraph
    starts: dict[int, float] = dict(zip(run.order, run.starts, strict=True))
    ends: dict[int, float] = dict(zip(run.order, run.ends, strict=True))
    # When all that an op's bytes were needed for is over.
    over_at: list[float] = []
    written_by = {b: task for task in graph.tasks for b in task.outputs}
    began: dict[int, float] = dict.fromkeys(memgraph.inputs_at_start, 0.0)
    stays: list[Stay] = []

    def over(i: int, when: float) -> None:
        instance = memgraph.instances[i]
        if instance.on_host or not instance.ranges:
            return
        buffer = graph.buffers[instance.buffer]
        task = written_by.get(buffer.id)
        name = buffer_name(plan, buffer.id)
        if task is not None and not buffer.name:
            name = f"a result of task {task.id} {task.name}"
        source = task.source if task is not None else ""
        kind = _KINDS[buffer.role]
        stays.append(Stay(began.pop(i), when, instance.ranges, kind, name, source))

    for op in memgraph.ops:
        waited = max((over_at[dep.op] for dep in op.deps), default=0.0)
        if op.kind is OpKind.DROP:
            over_at.append(waited)
            over(op.reads[0], waited)
            continue
        over_at.append(ends[op.id])
        # A copy may be issued before the bytes that it goes to are free.
        begin = max(starts[op.id], waited)
        for _, read in op.overwrites:
            over(read, begin)
        began.update(dict.fromkeys(op.writes, begin))
        if op.workspace:
            assert op.task is not None
            task = graph.tasks[op.task]
            what = f"workspace of task {task.id} {task.name}"
            end = ends[op.id]
            stays.append(Stay(begin, end, op.workspace, "workspace", what, task.source))
    for i in list(began):
        over(i, run.seconds)
    return sorted(stays, key=lambda s: (s.start, s.end))
