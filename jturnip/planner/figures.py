"""Figures of a plan that follow from its MemGraph alone."""

import itertools
from collections.abc import Iterator

from jturnip.graph.memgraph import MemGraph, OpKind
from jturnip.graph.plan import Plan
from jturnip.graph.taskgraph import TaskGraph


def host_peak_bytes(graph: TaskGraph, memgraph: MemGraph) -> int:
    """The most bytes that offloaded copies take in the planned order.

    A copy lives from its offload to its last reload, or to the end for an output. The
    arguments' own host memory is not counted: it was there before.
    """
    last_read: dict[int, int] = {}
    for op in memgraph.ops:
        if op.kind is OpKind.RELOAD:
            last_read[op.reads[0]] = op.id
    kept = set(memgraph.outputs_at_end)
    live = peak = 0
    ours: set[int] = set()

    def size(instance: int) -> int:
        return graph.buffers[memgraph.instances[instance].buffer].nbytes

    for op in memgraph.ops:
        if op.kind is OpKind.OFFLOAD:
            ours.add(op.writes[0])
            live += size(op.writes[0])
            peak = max(peak, live)
        elif op.kind is OpKind.RELOAD:
            copy = op.reads[0]
            if copy in ours and copy not in kept and last_read[copy] == op.id:
                live -= size(copy)
    return peak


def moved_bytes(graph: TaskGraph, memgraph: MemGraph) -> tuple[int, int]:
    """Bytes over the link: to the device, to the host."""
    moved = {OpKind.RELOAD: 0, OpKind.OFFLOAD: 0}
    for op in memgraph.ops:
        if op.kind in moved:
            moved[op.kind] += graph.buffers[memgraph.instances[op.reads[0]].buffer].nbytes
    return moved[OpKind.RELOAD], moved[OpKind.OFFLOAD]


def most_bytes(plan: Plan) -> int:
    """The most a plan, or one in pieces, has in use in any order of its ops.

    That can be more than in the planned order.
    """
    more = (reach_bytes(p.memgraph) - p.peak_bytes for p in plans_of_tasks(plan))
    return max(plan.peak_bytes, min(plan.gpu_bytes, plan.peak_bytes + max(more, default=0)))


def plans_of_tasks(plan: Plan) -> Iterator[Plan]:
    """The plans of tasks in a plan, however deep."""
    if not plan.pieces:
        yield plan
    for piece in plan.pieces:
        yield from plans_of_tasks(piece)


def reach_bytes(memgraph: MemGraph) -> int:
    """Where the highest of its bytes end: no order of the ops has more in use at once."""
    slots = (i.ranges for i in memgraph.instances)
    workspaces = (op.workspace for op in memgraph.ops)
    ranges = itertools.chain.from_iterable((*slots, *workspaces))
    return max((begin + nbytes for begin, nbytes in ranges), default=0)
