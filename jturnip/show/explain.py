"""A plan in words: what limits it, what is large, what left the device and why."""

from collections.abc import Iterator

from jturnip.errors import DoesNotFit
from jturnip.graph.memgraph import InstanceId, Op, OpKind, ranges_bytes
from jturnip.graph.plan import Plan
from jturnip.graph.report import RunReport
from jturnip.graph.taskgraph import BufferId, Role, Task
from jturnip.show.pictures import format_seconds
from jturnip.units import format_bytes


_NAMED = 5  # of each kind, the largest
_PIECES = 3
_MORE = (1.25, 1.5, 2.0, 4.0)  # budgets to look at, over the plan's own
_GUESSED = " Times of tasks are expected from their shapes; `compile()` measures them."
# Orders of the tasks (`planner.orders.ORDERS`).
IN_WORDS = {
    "": "",
    "reuse": " Its tasks run in an order of their own: what is on the device is read as"
    " often as possible before anything else comes.",
    "search": " Its tasks run in an order of their own, which a search found to be faster.",
    "lean": " Its tasks run in an order of their own: what needs the fewest bytes more goes"
    " first.",
}
_NEAR = 1.1  # what is predicted within this of the least possible is limited by that


def of_plan(plan: Plan) -> str:
    """Some paragraphs on a plan."""
    if plan.strategy == "whole":
        return (
            f"The function fits: it runs as one executable, as under jax.jit, in"
            f" {format_bytes(plan.peak_bytes)} of {format_bytes(plan.gpu_bytes)}."
        )
    if plan.pieces:
        return "\n\n".join(_of_pieces(plan))
    assert plan.predicted_run is not None
    guessed = "" if plan.measured else _GUESSED
    parts = [
        _limits(plan, plan.predicted_run) + _order(plan) + guessed,
        "\n".join(_at_the_peak(plan)),
        "\n".join(_moved(plan)),
        "\n".join(_other_budgets(plan)),
    ]
    return "\n\n".join(part for part in parts if part)


def _of_pieces(plan: Plan) -> Iterator[str]:
    yield (
        f"The function runs in {len(plan.pieces)} pieces, one after the other; a loop or a"
        " branch that is too large for one task is driven from the host."
    )
    slowest = sorted(plan.pieces, key=lambda p: -p.predicted_seconds)[:_PIECES]
    for piece in slowest:
        if piece.pieces or piece.predicted_run is not None:
            yield f"{piece.name or 'A piece'}:\n{of_plan(piece)}"


def _order(plan: Plan) -> str:
    again = plan.repeated_tasks
    if not again:
        return IN_WORDS[plan.task_order]
    many = "Once a task runs" if again == 1 else f"{again} times a task runs"
    return (
        f"{IN_WORDS[plan.task_order]} {many} that has run before, since to move its results"
        " would take longer."
    )


def _limits(plan: Plan, run: RunReport) -> str:
    compute, bound = run.compute_seconds, plan.lower_bound_seconds
    predicted = format_seconds(plan.predicted_seconds)
    moved = f"{format_bytes(plan.h2d_bytes)} to the device and"
    moved += f" {format_bytes(plan.d2h_bytes)} to the host"
    tasks = f"the tasks take {format_seconds(compute)}"
    if plan.predicted_seconds <= _NEAR * compute:
        return f"Compute limits it: {tasks}; {predicted} are predicted for a call."
    after = _seconds_after_tasks(plan, run)
    idle = run.stall_seconds + after
    held_up = max(0.0, plan.predicted_seconds - compute - idle)
    waits = (
        f"for {format_seconds(run.stall_seconds)} no task can run: what it reads is still"
        f" on its way, and there was no room for it earlier ({moved})"
    )
    if after > 0:
        waits += f", and copies take {format_seconds(after)} after the last task"
    beside = (
        f"copies beside the tasks, and starting both, hold them up for"
        f" {format_seconds(held_up)}"
    )
    if held_up > idle:
        return (
            "What copies take from the tasks limits it: the tasks alone would take"
            f" {format_seconds(compute)}, and {predicted} are predicted, because {beside};"
            f" {waits}."
        )
    if plan.predicted_seconds <= _NEAR * bound:
        return (
            f"The link limits it: with {moved} a call takes {format_seconds(bound)} at"
            f" least, {tasks}; {predicted} are predicted for a call."
        )
    return (
        "Memory limits it: tasks and copies, each as early as can be, would take"
        f" {format_seconds(bound)}, and {predicted} are predicted, because {waits};"
        f" {beside}."
    )


def _seconds_after_tasks(plan: Plan, run: RunReport) -> float:
    """How long copies take in a run after its last task."""
    ops = plan.memgraph.ops
    ends = [(ops[op].kind, end) for op, end in zip(run.order, run.ends, strict=True)]
    last = max((end for kind, end in ends if kind is OpKind.RUN), default=0.0)
    return max((end for _, end in ends), default=last) - last


# -- what is there at the peak ---------------------------------------------------------


def _at_the_peak(plan: Plan) -> Iterator[str]:
    peak_op, nbytes, there = peak_of(plan)
    graph = plan.taskgraph
    yield (
        f"The most in use, {format_bytes(nbytes)} of {format_bytes(plan.gpu_bytes)}, is at"
        f" {_op_in_words(plan, peak_op)}. The largest then:"
    )
    sizes = {i: graph.buffers[plan.memgraph.instances[i].buffer].nbytes for i in there}
    for i in sorted(there, key=lambda i: -sizes[i])[:_NAMED]:
        what = describe(plan, plan.memgraph.instances[i].buffer)
        yield f"- {format_bytes(sizes[i])}: {what}"
    if peak_op is not None and peak_op.workspace:
        workspace = ranges_bytes(peak_op.workspace)
        yield f"- {format_bytes(workspace)}: workspace of that task"


def peak_of(plan: Plan) -> tuple[Op | None, int, list[InstanceId]]:
    """Where in the planned order most is in use: the op (None: at the start), the bytes,
    and the instances that are there."""
    memgraph = plan.memgraph
    sizes = [ranges_bytes(i.ranges) for i in memgraph.instances]
    there = dict.fromkeys(i for i in memgraph.inputs_at_start if sizes[i])
    occupied = sum(sizes[i] for i in there)
    best: tuple[Op | None, int, list[InstanceId]] = None, occupied, list(there)
    for op in memgraph.ops:
        gone = op.reads if op.kind is OpKind.DROP else [r for _, r in op.overwrites]
        for i in op.writes:
            there[i] = None
            occupied += sizes[i]
        for i in gone:
            there.pop(i, None)
            occupied -= sizes[i]
        workspace = ranges_bytes(op.workspace)
        if occupied + workspace > best[1]:
            best = op, occupied + workspace, [i for i in there if sizes[i]]
    return best


def _op_in_words(plan: Plan, op: Op | None) -> str:
    if op is None:
        return "the start"
    if op.task is not None:
        return _task_in_words(plan.taskgraph.tasks[op.task])
    return f"a {op.kind.value}"


def _task_in_words(task: Task) -> str:
    where = f" ({task.source})" if task.source else ""
    return f'task {task.id} "{task.name}"{where}'


def describe(plan: Plan, buffer: BufferId) -> str:
    """A buffer, for people: an argument by its name, else what wrote it, and where."""
    found = plan.taskgraph.buffers[buffer]
    if found.role in (Role.INPUT, Role.CONSTANT):
        kind = "argument" if found.role is Role.INPUT else "closed-over array"
        return f"{kind} {found.name}".rstrip()
    writer = next(t for t in plan.taskgraph.tasks if buffer in t.outputs)
    kind = "result" if found.role is Role.OUTPUT else "intermediate"
    return f"{kind} of {_task_in_words(writer)}"


# -- what moves ------------------------------------------------------------------------


def _moved(plan: Plan) -> Iterator[str]:
    """What left the device, why it could, and what comes more than once."""
    graph, memgraph = plan.taskgraph, plan.memgraph
    at = 0  # tasks that have run
    left: list[tuple[int, BufferId, int]] = []
    came: dict[BufferId, int] = {}
    for op in memgraph.ops:
        if op.kind is OpKind.RUN:
            at += 1
        elif op.kind is not OpKind.DROP:
            b = memgraph.instances[op.reads[0]].buffer
            if op.kind is OpKind.OFFLOAD:
                left.append((graph.buffers[b].nbytes, b, at))
            else:
                came[b] = came.get(b, 0) + 1
    if left:
        left.sort(key=lambda entry: -entry[0])
        total = format_bytes(sum(n for n, *_ in left))
        yield f"{total} leave the device, in {len(left)} copies. The largest:"
        uses = _uses(plan)
        for nbytes, b, when in left[:_NAMED]:
            why = _why(plan, b, when, uses)
            yield f"- {format_bytes(nbytes)}: {describe(plan, b)}; {why}"
    again = {b: n for b, n in came.items() if n > 1}
    if again:
        nbytes = sum((n - 1) * graph.buffers[b].nbytes for b, n in again.items())
        yield (
            f"{len(again)} buffers come to the device more than once,"
            f" {format_bytes(nbytes)} in all beyond the first time: between two uses their"
            " room was needed for something that is used sooner."
        )


def _uses(plan: Plan) -> dict[BufferId, list[int]]:
    uses: dict[BufferId, list[int]] = {}
    for task in plan.taskgraph.tasks:
        for b in task.inputs:
            uses.setdefault(b, []).append(task.id)
    return uses


def _why(plan: Plan, b: BufferId, when: int, uses: dict[BufferId, list[int]]) -> str:
    buffer = plan.taskgraph.buffers[b]
    later = [position for position in uses.get(b, ()) if position >= when]
    if later:
        return f"not read again for {later[0] - when + 1} tasks"
    if buffer.end_on_host:
        return "a result that is held in host memory"
    return "a result for which the device has no room to the end"


# -- other budgets ---------------------------------------------------------------------


def _other_budgets(plan: Plan) -> Iterator[str]:
    others = plan.others
    if others is None:
        return
    everything = sum(b.nbytes for b in plan.taskgraph.buffers)
    yield "The same tasks in other budgets, predicted:"
    least = others.least_bytes
    budgets = [least] if least < 0.95 * plan.gpu_bytes else []
    budgets.append(plan.gpu_bytes)
    for factor in _MORE:
        budgets.append(int(factor * plan.gpu_bytes))
        if budgets[-1] > everything:
            break
    for budget in budgets:
        try:
            seconds = others.seconds_in(budget)
        except DoesNotFit:
            continue
        what = " (the least these tasks need)" if budget == least else ""
        what = " (this plan)" if budget == plan.gpu_bytes else what
        share = seconds / plan.predicted_seconds if plan.predicted_seconds else 1.0
        yield f"- {format_bytes(budget)}: {format_seconds(seconds)}, x {share:.2f}{what}"
    yield (
        "Less may work with the function cut into smaller tasks:"
        " lowered.minimum_gpu_bytes looks for the least."
    )
