"""Figures of a plan that follow from its MemGraph alone."""

from collections.abc import Collection

from jturnip.graph.memgraph import MemGraph, OpKind
from jturnip.graph.taskgraph import BufferId, TaskGraph, TaskId


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


def liveness_peak(graph: TaskGraph, donated: Collection[BufferId] = ()) -> int:
    """Device bytes if nothing ever left: all inputs, and results while they are needed.

    An estimate of what the whole function needs as one executable, before compiling it.
    Inputs that are donated are counted until they were last read.
    """
    last_use: dict[BufferId, TaskId] = {}
    for task in graph.tasks:
        for b in (*task.outputs, *task.inputs):
            last_use[b] = task.id
    kept = set(graph.outputs)
    kept.update(b.id for b in graph.buffers if b.start is not None and b.id not in donated)
    live = peak = sum(b.nbytes for b in graph.buffers if b.start is not None)
    for task in graph.tasks:
        live += sum(graph.buffers[b].nbytes for b in task.outputs)
        peak = max(peak, live)
        for b in (*task.inputs, *task.outputs):
            if last_use[b] == task.id and b not in kept:
                live -= graph.buffers[b].nbytes
    return peak
