"""What a TaskGraph means, and what a MemGraph really does: slow, plain interpreters.

Values are symbols: a task's output is a digest of the task and of what it read, so two
runs agree only where every task read the right values. `run_memgraph` knows nothing of
edges or of slots being "in use". It has bytes, and performs ops in the order it is given;
bytes overwritten or freed too early give another value or `POISON`, and so a wrong output.
"""

import hashlib
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from jturnip.graph.memgraph import InstanceId, MemGraph, Op, OpId, OpKind, Ranges
from jturnip.graph.taskgraph import BufferId, Task, TaskGraph


# A symbol that stands for a buffer's contents.
Value = str

# What is read where bytes are not one whole value.
POISON: Value = "poison"


def symbolic_inputs(graph: TaskGraph) -> dict[BufferId, Value]:
    """A distinct symbol for each input and constant."""
    return {b.id: f"input {b.id}" for b in graph.buffers if b.start is not None}


def apply_task(task: Task, inputs: Sequence[Value]) -> list[Value]:
    """The symbols of a task's outputs."""
    call = f"{task.id} {list(inputs)}".encode()
    digest = hashlib.blake2b(call, digest_size=12).hexdigest()
    return [f"{digest}.{index}" for index in range(len(task.outputs))]


def run_taskgraph(
    graph: TaskGraph, inputs: Mapping[BufferId, Value]
) -> dict[BufferId, Value]:
    """Runs the tasks in their order, in unlimited memory.

    Args:
      graph: what to compute.
      inputs: the value of every input and constant.

    Returns:
      The value of every buffer.
    """
    values = dict(inputs)
    for task in graph.tasks:
        results = apply_task(task, [values[b] for b in task.inputs])
        values.update(zip(task.outputs, results, strict=True))
    return values


def run_memgraph(
    graph: TaskGraph,
    memgraph: MemGraph,
    inputs: Mapping[BufferId, Value],
    order: Sequence[OpId],
) -> list[Value]:
    """Runs the ops in any order, byte for byte.

    Args:
      graph: the tasks the runs refer to.
      memgraph: a plan, right or wrong, whose ids and kinds make sense.
      inputs: the value of every input and constant.
      order: every op once.

    Returns:
      What the instances in `outputs_at_end` hold after the last op.
    """
    assert sorted(order) == list(range(len(memgraph.ops))), "each op once"
    memory = _Memory(graph, memgraph)
    for i in memgraph.inputs_at_start:
        memory.write(i, inputs[memgraph.instances[i].buffer])
    for position in order:
        _perform(graph, memory, memgraph.ops[position])
    return [memory.read(i) for i in memgraph.outputs_at_end]


def random_order(memgraph: MemGraph, seed: int) -> list[OpId]:
    """An order the edges allow.

    Half of the seeds choose evenly among the ready ops at each step. The others give each
    op a fixed priority, so that an unlucky one waits as long as the edges let it.
    """
    rng = random.Random(seed)
    even = rng.random() < 0.5
    priority = [rng.random() for _ in memgraph.ops]
    waiting = [len({dep.op for dep in op.deps}) for op in memgraph.ops]
    followers: list[list[OpId]] = [[] for _ in memgraph.ops]
    for op in memgraph.ops:
        for earlier in {dep.op for dep in op.deps}:
            followers[earlier].append(op.id)
    ready = [op.id for op in memgraph.ops if not waiting[op.id]]
    order: list[OpId] = []
    while ready:
        chosen = rng.choice(ready) if even else min(ready, key=priority.__getitem__)
        ready.remove(chosen)
        order.append(chosen)
        for follower in followers[chosen]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    if len(order) < len(memgraph.ops):
        raise ValueError(f"only {len(order)} of {len(memgraph.ops)} ops can ever start")
    return order


def naive_peak(memgraph: MemGraph, order: Sequence[OpId]) -> int:
    """The largest total of occupied device bytes when ops run one by one in `order`."""
    live = set(memgraph.inputs_at_start)
    peak = sum(_size(memgraph.instances[i].ranges) for i in live)
    for position in order:
        op = memgraph.ops[position]
        if op.kind is OpKind.DROP:
            live -= set(op.reads)
        live -= {read for _, read in op.overwrites}
        live |= set(op.writes)
        occupied = sum(_size(memgraph.instances[i].ranges) for i in live)
        peak = max(peak, occupied + _size(op.workspace))
    return peak


def _perform(graph: TaskGraph, memory: "_Memory", op: Op) -> None:
    match op.kind:
        case OpKind.RUN:
            assert op.task is not None
            # Temporaries and outputs may be written at any moment while the task reads.
            memory.scribble(op.workspace)
            slots = [i.ranges for i in memory.memgraph.instances]
            over = {w for w, r in op.overwrites if slots[w] == slots[r]}
            for i in op.writes:
                if i not in over:
                    memory.forget(i)
            results = apply_task(graph.tasks[op.task], [memory.read(i) for i in op.reads])
            for _, read in op.overwrites:
                memory.forget(read)
            for i, value in zip(op.writes, results, strict=True):
                memory.write(i, value)
            memory.scribble(op.workspace)
        case OpKind.OFFLOAD | OpKind.RELOAD:
            memory.forget(op.writes[0])
            memory.write(op.writes[0], memory.read(op.reads[0]))
        case OpKind.DROP:
            memory.forget(op.reads[0])


class _Memory:
    """Bytes in an arena, and what instances without ranges hold.

    The arena is cut at every boundary of the plan. A cell holds the value last written
    there and which of the value's bytes they are; a cell outside of `gpu_bytes` holds
    nothing.
    """

    def __init__(self, graph: TaskGraph, memgraph: MemGraph):
        self.graph = graph
        self.memgraph = memgraph
        slots = [i.ranges for i in memgraph.instances] + [o.workspace for o in memgraph.ops]
        edges = {e for slot in slots for start, n in slot for e in (start, start + n)}
        self.edges = sorted(edges | {memgraph.gpu_bytes})
        self.cells: dict[int, tuple[Value, int]] = {}
        self.rest: dict[InstanceId, Value] = {}

    def write(self, i: InstanceId, value: Value) -> None:
        instance = self.memgraph.instances[i]
        if instance.on_host or not instance.ranges:
            self.rest[i] = value if self.is_large_enough(i) else POISON
            return
        for byte, start in self.cells_of(instance.ranges):
            self.cells[start] = (value if self.is_large_enough(i) else POISON, byte)

    def read(self, i: InstanceId) -> Value:
        instance = self.memgraph.instances[i]
        if instance.on_host or not instance.ranges:
            return self.rest.get(i, POISON)
        values: set[Value] = set()
        for byte, start in self.cells_of(instance.ranges):
            value, found = self.cells.get(start, (POISON, 0))
            inside = start < self.memgraph.gpu_bytes
            values.add(value if found == byte and inside else POISON)
        return values.pop() if len(values) == 1 else POISON

    def forget(self, i: InstanceId) -> None:
        self.rest.pop(i, None)
        self.scribble(self.memgraph.instances[i].ranges)

    def scribble(self, ranges: Ranges) -> None:
        for _, start in self.cells_of(ranges):
            self.cells.pop(start, None)

    def cells_of(self, ranges: Ranges) -> list[tuple[int, int]]:
        """Each cell of a slot: which byte of the value it begins with, and where it is."""
        found: list[tuple[int, int]] = []
        byte = 0
        for offset, nbytes in ranges:
            low = bisect_left(self.edges, offset)
            high = bisect_left(self.edges, offset + nbytes)
            found += [(byte + start - offset, start) for start in self.edges[low:high]]
            byte += nbytes
        return found

    def is_large_enough(self, i: InstanceId) -> bool:
        instance = self.memgraph.instances[i]
        needed = self.graph.buffers[instance.buffer].nbytes
        return instance.on_host or _size(instance.ranges) >= needed


def _size(ranges: Ranges) -> int:
    return sum(nbytes for _, nbytes in ranges)
