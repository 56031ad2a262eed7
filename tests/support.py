"""Builders of small graphs and plans, and oracles for whole plans."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

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
from jturnip.graph.reference import (
    naive_peak,
    random_order,
    run_memgraph,
    run_taskgraph,
    symbolic_inputs,
)
from jturnip.graph.taskgraph import Buffer, BufferId, Place, Role, Task, TaskGraph, TaskId
from jturnip.planner.verify import peak_bytes, verify


# --- TaskGraphs.


@dataclass
class GraphBuilder:
    """Builds a TaskGraph by hand; ids are given in the order of the calls."""

    buffers: list[Buffer] = field(default_factory=list[Buffer])
    tasks: list[Task] = field(default_factory=list[Task])

    def input(
        self,
        nbytes: int,
        start: Place = Place.HOST,
        *,
        role: Role = Role.INPUT,
        pinned: bool = False,
        name: str = "",
    ) -> BufferId:
        b = BufferId(len(self.buffers))
        self.buffers.append(Buffer(b, nbytes, role, start, pinned=pinned, name=name))
        return b

    def task(
        self,
        inputs: Sequence[BufferId],
        *sizes: int,
        workspace: int = 0,
        seconds: float = 0,
        overwrites: Sequence[tuple[int, int]] = (),
    ) -> tuple[BufferId, ...]:
        """Adds a task that writes one buffer per size; returns these."""
        outputs = tuple(BufferId(len(self.buffers) + k) for k in range(len(sizes)))
        for b, nbytes in zip(outputs, sizes, strict=True):
            self.buffers.append(Buffer(b, nbytes, Role.INTERMEDIATE))
        t = TaskId(len(self.tasks))
        task = Task(t, tuple(inputs), outputs, workspace, seconds=seconds, name=f"t{t}")
        self.tasks.append(replace(task, executable=t, overwrites=tuple(overwrites)))
        return outputs

    def build(
        self, outputs: Sequence[BufferId], end_on_host: Sequence[BufferId] = ()
    ) -> TaskGraph:
        for b in outputs:
            on_host = b in end_on_host
            self.buffers[b] = replace(
                self.buffers[b], role=Role.OUTPUT, end_on_host=on_host
            )
        graph = TaskGraph(tuple(self.buffers), tuple(self.tasks), tuple(outputs))
        graph.check()
        return graph


def streaming_chain(tasks: int, sizes: Sequence[int] = (4,)) -> TaskGraph:
    """x = t(x, w) over and over; each w starts on the host, and is one of `sizes`."""
    builder = GraphBuilder()
    x = builder.input(sizes[0], Place.DEVICE)
    for t in range(tasks):
        w = builder.input(sizes[t % len(sizes)])
        (x,) = builder.task([x, w], sizes[t * 7 % len(sizes)], workspace=2)
    return builder.build([x])


def random_taskgraph(rng: random.Random, tasks: int) -> TaskGraph:
    """Chains, trees, diamonds and mixtures of them, with every kind of buffer."""
    builder = GraphBuilder()
    shape = rng.choice(["chain", "tree", "dag", "mixture"])
    unread: list[BufferId] = []
    for _ in range(rng.randint(1, 5)):
        unread.append(_random_input(rng, builder))
    for _ in range(tasks):
        inputs = _random_inputs(rng, builder, shape, unread)
        sizes = [rng.choice(_SIZES) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        seconds = rng.choice([0.1, 1.0, 5.0])
        unread = [b for b in unread if b not in inputs]
        unread += builder.task(
            inputs, *sizes, workspace=rng.choice([0, 0, 1, 4]), seconds=seconds
        )
    written = [b for task in builder.tasks for b in task.outputs]
    # Nearly always what nobody read; sometimes also what somebody did.
    outputs = [b for b in written if rng.random() < (0.9 if b in unread else 0.1)]
    rng.shuffle(outputs)
    on_host = [b for b in outputs if rng.random() < 0.3]
    return with_overwrites(rng, builder.build(outputs, on_host))


def with_overwrites(rng: random.Random, graph: TaskGraph) -> TaskGraph:
    """Some tasks write over inputs that they are the last to read."""
    last = {b: task.id for task in graph.tasks for b in task.inputs}
    kept = {b.id for b in graph.buffers if b.pinned}.union(graph.outputs)
    size = [b.nbytes for b in graph.buffers]
    tasks: list[Task] = []
    for task in graph.tasks:
        pairs: list[tuple[int, int]] = []
        for o, written in enumerate(task.outputs):
            taken = {i for _, i in pairs}
            over = [
                i
                for i, b in enumerate(task.inputs)
                if last[b] == task.id and b not in kept and size[b] == size[written]
                if i not in taken
            ]
            if over and rng.random() < 0.6:
                pairs.append((o, rng.choice(over)))
        tasks.append(replace(task, overwrites=tuple(pairs)))
    graph = replace(graph, tasks=tuple(tasks))
    graph.check()
    return graph


_SIZES = (0, 1, 2, 3, 4, 4, 4, 8, 16)


def _random_input(rng: random.Random, builder: GraphBuilder) -> BufferId:
    start = rng.choice([Place.HOST, Place.HOST, Place.DEVICE])
    return builder.input(
        rng.choice(_SIZES),
        start,
        role=rng.choice([Role.INPUT, Role.INPUT, Role.CONSTANT]),
        pinned=start is Place.DEVICE and rng.random() < 0.4,
    )


def _random_inputs(
    rng: random.Random, builder: GraphBuilder, shape: str, unread: list[BufferId]
) -> list[BufferId]:
    if shape == "mixture":
        shape = rng.choice(["chain", "tree", "dag"])
    existing = [b.id for b in builder.buffers]
    chosen: list[BufferId] = []
    if shape == "chain":
        chosen = existing[-1:]
        if rng.random() < 0.5:
            chosen.append(_random_input(rng, builder))
    elif shape == "tree":
        chosen = rng.sample(unread, min(len(unread), 2))
    if shape == "dag" or rng.random() < 0.2:
        chosen += rng.sample(existing, min(len(existing), rng.randint(0, 3)))
    return list(dict.fromkeys(chosen))


@st.composite
def taskgraphs(draw: st.DrawFn, max_tasks: int = 15) -> TaskGraph:
    """Random TaskGraphs; shrinks towards few tasks."""
    tasks = draw(st.integers(1, max_tasks))
    rng = draw(st.randoms(use_true_random=False))
    return random_taskgraph(rng, tasks)


def smallest_budget(graph: TaskGraph) -> int:
    """The bytes below which no plan exists: the largest task beside what is pinned.

    Also what is on the device when the call starts.
    """
    size = [b.nbytes for b in graph.buffers]
    pinned = {b.id for b in graph.buffers if b.pinned}
    needs = [sum(b.nbytes for b in graph.buffers if b.start is Place.DEVICE)]
    for task in graph.tasks:
        used = pinned.union(task.inputs, task.new)
        needs.append(sum(size[b] for b in used) + task.workspace)
    return max(needs)


# --- MemGraphs by hand.


@dataclass
class PlanBuilder:
    """Builds a MemGraph op by op.

    An op waits for the writers of what it reads by itself. All it must wait for because of
    bytes is said with `after`.
    """

    graph: TaskGraph
    gpu_bytes: int
    ops: list[Op] = field(default_factory=list[Op])
    instances: list[Instance] = field(default_factory=list[Instance])
    at_start: list[InstanceId] = field(default_factory=list[InstanceId])
    writers: dict[InstanceId, OpId] = field(default_factory=dict[InstanceId, OpId])

    def start(self, buffer: BufferId, *ranges: tuple[int, int]) -> InstanceId:
        """An input where it begins: on the host where no ranges are given."""
        on_host = self.graph.buffers[buffer].start is Place.HOST
        i = self.instance(buffer, ranges, on_host)
        self.at_start.append(i)
        return i

    def run(
        self,
        task: TaskId,
        reads: Sequence[InstanceId],
        slots: Sequence[Ranges],
        workspace: Ranges = (),
        after: Sequence[OpId] = (),
    ) -> tuple[OpId, tuple[InstanceId, ...]]:
        outputs = self.graph.tasks[task].outputs
        writes = tuple(
            self.instance(b, slot) for b, slot in zip(outputs, slots, strict=True)
        )
        op = self.op(OpKind.RUN, reads, writes, after, task=task, workspace=workspace)
        pairs = self.graph.tasks[task].overwrites
        over = tuple((writes[o], reads[i]) for o, i in pairs)
        self.ops[op] = replace(self.ops[op], overwrites=over)
        return op, writes

    def offload(
        self, read: InstanceId, after: Sequence[OpId] = ()
    ) -> tuple[OpId, InstanceId]:
        written = self.instance(self.instances[read].buffer, (), on_host=True)
        return self.op(OpKind.OFFLOAD, [read], [written], after), written

    def reload(
        self, read: InstanceId, ranges: Ranges, after: Sequence[OpId] = ()
    ) -> tuple[OpId, InstanceId]:
        written = self.instance(self.instances[read].buffer, ranges)
        return self.op(OpKind.RELOAD, [read], [written], after), written

    def drop(self, read: InstanceId, after: Sequence[OpId] = ()) -> OpId:
        return self.op(OpKind.DROP, [read], [], after)

    def build(self, outputs: Sequence[InstanceId]) -> MemGraph:
        return MemGraph(
            self.gpu_bytes,
            tuple(self.ops),
            tuple(self.instances),
            tuple(self.at_start),
            tuple(outputs),
        )

    def instance(
        self, buffer: BufferId, ranges: Ranges, on_host: bool = False
    ) -> InstanceId:
        i = InstanceId(len(self.instances))
        self.instances.append(Instance(i, buffer, ranges, on_host))
        return i

    def op(
        self,
        kind: OpKind,
        reads: Sequence[InstanceId],
        writes: Sequence[InstanceId],
        after: Sequence[OpId],
        task: TaskId | None = None,
        workspace: Ranges = (),
    ) -> OpId:
        op = OpId(len(self.ops))
        data = [self.writers[i] for i in reads if i in self.writers]
        data = sorted(set(data) - set(after))
        deps = [Dep(d, DepKind.DATA) for d in data]
        deps += [Dep(d, DepKind.MEMORY, "bytes") for d in sorted(set(after))]
        self.ops.append(
            Op(op, kind, task, tuple(reads), tuple(writes), workspace, tuple(deps))
        )
        self.writers.update(dict.fromkeys(writes, op))
        return op


def with_op(memgraph: MemGraph, op: int, **changes: Any) -> MemGraph:
    """The same plan, but for some fields of one op."""
    ops = list(memgraph.ops)
    ops[op] = replace(ops[op], **changes)
    return replace(memgraph, ops=tuple(ops))


def with_instance(memgraph: MemGraph, instance: int, **changes: Any) -> MemGraph:
    """The same plan, but for some fields of one instance."""
    instances = list(memgraph.instances)
    instances[instance] = replace(instances[instance], **changes)
    return replace(memgraph, instances=tuple(instances))


def without_dep(memgraph: MemGraph, op: int, earlier: int) -> MemGraph:
    """The same plan, but `op` does not wait for `earlier`."""
    deps = tuple(dep for dep in memgraph.ops[op].deps if dep.op != earlier)
    assert deps != memgraph.ops[op].deps, f"op {op} does not wait for op {earlier} anyway"
    return with_op(memgraph, op, deps=deps)


def without_op(memgraph: MemGraph, op: int) -> MemGraph:
    """The same plan with one op left out; who waited for it waits for what it awaited."""
    moved = {o.id: OpId(o.id - (o.id > op)) for o in memgraph.ops}
    inherited = memgraph.ops[op].deps
    ops: list[Op] = []
    for o in memgraph.ops:
        deps = list(o.deps)
        if any(dep.op == op for dep in deps):
            deps = [dep for dep in deps if dep.op != op] + list(inherited)
        kept = tuple(dep._replace(op=moved[dep.op]) for dep in deps)
        if o.id != op:
            ops.append(replace(o, id=moved[o.id], deps=kept))
    return replace(memgraph, ops=tuple(ops))


# --- A planner simple enough to believe in.


def simple_plan(graph: TaskGraph, gpu_bytes: int, seed: int = 0) -> MemGraph:
    """A right plan, by a random choice of victims; needs `smallest_budget(graph)` bytes."""
    return _SimplePlanner(graph, gpu_bytes, random.Random(seed)).plan()


class _SimplePlanner:
    def __init__(self, graph: TaskGraph, gpu_bytes: int, rng: random.Random):
        self.graph = graph
        self.rng = rng
        self.builder = PlanBuilder(graph, gpu_bytes)
        # Blocks nobody holds: offset, bytes, and the op that freed them.
        self.free: list[tuple[int, int, OpId | None]] = [(0, gpu_bytes, None)]
        self.free_bytes = gpu_bytes
        self.on_device: dict[BufferId, InstanceId] = {}
        self.on_host: dict[BufferId, InstanceId] = {}
        self.readers: dict[InstanceId, list[OpId]] = {}
        self.uses_left = [0] * len(graph.buffers)
        for task in graph.tasks:
            for b in task.inputs:
                self.uses_left[b] += 1
        for b in graph.outputs:
            self.uses_left[b] += 1

    def plan(self) -> MemGraph:
        for buffer in self.graph.buffers:
            if buffer.start is Place.HOST:
                self.on_host[buffer.id] = self.builder.start(buffer.id)
            elif buffer.start is Place.DEVICE:
                ranges, _ = self.take(buffer.nbytes)
                self.on_device[buffer.id] = self.builder.start(buffer.id, *ranges)
        for task in self.graph.tasks:
            self.run(task)
        ends: list[InstanceId] = []
        for b in self.graph.outputs:
            if self.graph.buffers[b].end_on_host and b not in self.on_host:
                self.offload(b)
            on_host = b not in self.on_device or self.graph.buffers[b].end_on_host
            ends.append(self.on_host[b] if on_host else self.on_device[b])
        return self.builder.build(ends)

    def run(self, task: Task) -> None:
        used = {*task.inputs, *task.outputs}
        absent = [b for b in task.inputs if b not in self.on_device]
        new = [self.graph.buffers[b].nbytes for b in [*absent, *task.new]]
        self.make_room(sum(new) + task.workspace, used)
        for b in absent:
            ranges, freers = self.take(self.graph.buffers[b].nbytes)
            op, self.on_device[b] = self.builder.reload(self.on_host[b], ranges, freers)
            self.readers[self.on_device[b]] = [op]
        reads = [self.on_device[b] for b in task.inputs]
        over = {task.outputs[o]: reads[i] for o, i in task.overwrites}
        slots: list[Ranges] = []
        after: list[OpId] = []
        for b in task.outputs:
            if b in over:
                slots.append(self.builder.instances[over[b]].ranges)
                after += self.readers.pop(over[b], [])
                continue
            ranges, freers = self.take(self.graph.buffers[b].nbytes)
            slots.append(ranges)
            after += freers
        workspace, freers = self.take(task.workspace)
        op, writes = self.builder.run(task.id, reads, slots, workspace, [*after, *freers])
        self.give(workspace, op)
        for b, i in zip(task.outputs, writes, strict=True):
            self.on_device[b] = i
            self.readers[i] = [op]
        for b in task.inputs:
            self.uses_left[b] -= 1
            if b in task.overwritten:
                del self.on_device[b]
            else:
                self.readers.setdefault(self.on_device[b], []).append(op)
        for b in [*task.inputs, *task.outputs]:
            used_up = not self.uses_left[b] and b in self.on_device
            if used_up and not self.graph.buffers[b].pinned:
                self.drop(b)

    def make_room(self, nbytes: int, keep: set[BufferId]) -> None:
        if self.free_bytes >= nbytes:
            return
        buffers = self.graph.buffers
        victims = [b for b in self.on_device if b not in keep and not buffers[b].pinned]
        self.rng.shuffle(victims)
        while self.free_bytes < nbytes:
            victim = victims.pop()
            if self.uses_left[victim] and victim not in self.on_host:
                self.offload(victim)
            self.drop(victim)

    def offload(self, b: BufferId) -> None:
        op, self.on_host[b] = self.builder.offload(self.on_device[b])
        self.readers.setdefault(self.on_device[b], []).append(op)

    def drop(self, b: BufferId) -> None:
        i = self.on_device.pop(b)
        op = self.builder.drop(i, self.readers.pop(i, []))
        self.give(self.builder.instances[i].ranges, op)

    def give(self, ranges: Ranges, op: OpId) -> None:
        self.free += [(offset, nbytes, op) for offset, nbytes in ranges]
        self.free_bytes += sum(nbytes for _, nbytes in ranges)

    def take(self, nbytes: int) -> tuple[Ranges, list[OpId]]:
        """Bytes for a new occupant: a block of just this size, else the oldest."""
        self.free_bytes -= nbytes
        self.free.sort(key=lambda block: block[1] != nbytes)
        taken: list[tuple[int, int]] = []
        freers: list[OpId] = []
        while nbytes:
            offset, size, freer = self.free.pop(0)
            if size > nbytes:
                self.free.insert(0, (offset + nbytes, size - nbytes, freer))
                size = nbytes
            taken.append((offset, size))
            freers += [] if freer is None else [freer]
            nbytes -= size
        return _tidy(taken), freers


def _tidy(ranges: list[tuple[int, int]]) -> Ranges:
    """Sorted, and adjacent ranges made one."""
    tidy: list[tuple[int, int]] = []
    for offset, nbytes in sorted(ranges):
        if tidy and sum(tidy[-1]) == offset:
            tidy[-1] = (tidy[-1][0], tidy[-1][1] + nbytes)
        else:
            tidy.append((offset, nbytes))
    return tuple(tidy)


# --- Oracles.


def assert_plan_is_right(
    graph: TaskGraph, memgraph: MemGraph, orders: int = 20, seed: int = 0
) -> None:
    """Verifies a plan, and runs it in many orders against the TaskGraph's own meaning."""
    verify(graph, memgraph)
    serial = [op.id for op in memgraph.ops]
    assert peak_bytes(memgraph) <= memgraph.gpu_bytes
    inputs = symbolic_inputs(graph)
    values = run_taskgraph(graph, inputs)
    expected = [values[b] for b in graph.outputs]
    assert run_memgraph(graph, memgraph, inputs, serial) == expected, "the serial order"
    for k in range(seed, seed + orders):
        order = random_order(memgraph, k)
        found = run_memgraph(graph, memgraph, inputs, order)
        assert found == expected, f"random_order(memgraph, {k}) gives wrong outputs"
        if len(memgraph.ops) <= 500:
            assert naive_peak(memgraph, order) <= memgraph.gpu_bytes, f"seed {k}"


def brute_force_verify(graph: TaskGraph, memgraph: MemGraph) -> list[str]:
    """All that is wrong with a small plan, pair by pair and byte by byte.

    Takes for granted what ids, reads and writes of each kind of op look like.
    """
    reach = [0] * len(memgraph.ops)
    for op in memgraph.ops:
        for dep in op.deps:
            if dep.op >= op.id:
                return [f"op {op.id} waits for op {dep.op}"]
            reach[op.id] |= reach[dep.op] | 1 << dep.op
    story = _Story(graph, memgraph, reach)
    return story.slots() + story.reads() + story.races() + story.ends()


# What holds bytes: its ranges, and the ops that begin and end it.
_Occupant = tuple[Ranges, Sequence[int], Sequence[int]]


class _Story:
    """Who writes, reads and drops each instance, and which op is over before which."""

    def __init__(self, graph: TaskGraph, memgraph: MemGraph, reach: list[int]):
        self.graph = graph
        self.memgraph = memgraph
        self.reach = reach
        count = range(len(memgraph.instances))
        ops = memgraph.ops
        self.writers = [[op.id for op in ops if i in op.writes] for i in count]
        self.readers = [[op.id for op in ops if i in op.reads] for i in count]
        # A run that writes over an instance ends it, as a drop does.
        self.drops = [
            [
                op.id
                for op in ops
                if (i in op.reads and op.kind is OpKind.DROP)
                or i in [read for _, read in op.overwrites]
            ]
            for i in count
        ]
        # (op, ranges): one occupant has them up to the op, the next from it on.
        self.passed_on = {
            (op.id, memgraph.instances[i].ranges)
            for op in ops
            for pair in op.overwrites
            for i in pair
        }

    def over(self, a: int, b: int) -> bool:
        return bool(self.reach[b] >> a & 1)

    def slots(self) -> list[str]:
        wrong: list[str] = []
        needs = [(i.ranges, self.graph.buffers[i.buffer].nbytes) for i in self.on_device()]
        needs += [(o.workspace, self.graph.tasks[o.task].workspace) for o in self.runs()]
        for ranges, nbytes in needs:
            held = [byte for start, n in ranges for byte in range(start, start + n)]
            if len(held) < nbytes or len(set(held)) < len(held):
                wrong.append(f"{ranges} is not {nbytes} bytes")
            if any(not 0 <= byte < self.memgraph.gpu_bytes for byte in held):
                wrong.append(f"{ranges} is not in the arena")
        slots = [i.ranges for i in self.memgraph.instances]
        for op in self.memgraph.ops:
            said = self.graph.tasks[op.task].overwrites if op.task is not None else ()
            expected = tuple((op.writes[o], op.reads[i]) for o, i in said)
            elsewhere = any(slots[written] != slots[read] for written, read in expected)
            if op.overwrites != expected or elsewhere:
                wrong.append(f"op {op.id} writes over {op.overwrites}")
        return wrong

    def on_device(self) -> list[Instance]:
        return [i for i in self.memgraph.instances if not i.on_host]

    def runs(self) -> list[Any]:
        return [op for op in self.memgraph.ops if op.kind is OpKind.RUN]

    def reads(self) -> list[str]:
        wrong: list[str] = []
        for i in range(len(self.memgraph.instances)):
            at_start = i in self.memgraph.inputs_at_start
            if len(self.writers[i]) != (0 if at_start else 1):
                wrong.append(f"instance {i} is written by {self.writers[i]}")
            if len(self.drops[i]) > (0 if self.is_pinned(i) else 1):
                wrong.append(f"instance {i} is dropped by {self.drops[i]}")
            for reader in self.readers[i]:
                before = all(self.over(writer, reader) for writer in self.writers[i])
                after = all(self.over(reader, d) for d in self.drops[i] if d != reader)
                if not (before and after):
                    wrong.append(f"op {reader} may read instance {i} when it is not there")
        return wrong

    def is_pinned(self, i: int) -> bool:
        buffer = self.graph.buffers[self.memgraph.instances[i].buffer]
        return buffer.pinned and i in self.memgraph.inputs_at_start

    def races(self) -> list[str]:
        occupants: list[_Occupant] = [
            (i.ranges, self.writers[i.id], self.drops[i.id]) for i in self.on_device()
        ]
        occupants += [(op.workspace, [op.id], [op.id]) for op in self.runs()]
        wrong: list[str] = []
        for k, first in enumerate(occupants):
            for second in occupants[:k]:
                shared = _bytes_of(first[0]) & _bytes_of(second[0])
                apart = self.follows(first, second) or self.follows(second, first)
                if shared and not apart:
                    wrong.append(f"{first} and {second} share {sorted(shared)}")
        return wrong

    def follows(self, first: _Occupant, second: _Occupant) -> bool:
        """Whether `first` is over before `second` begins, in every order."""
        passed_on = first[0] == second[0] and any(
            end == begin and (end, first[0]) in self.passed_on
            for end in first[2]
            for begin in second[1]
        )
        return passed_on or any(
            self.over(end, begin) for end in first[2] for begin in second[1]
        )

    def ends(self) -> list[str]:
        wrong: list[str] = []
        at_end = self.memgraph.outputs_at_end
        if len(at_end) != len(self.graph.outputs):
            return [f"{len(at_end)} outputs"]
        for b, i in zip(self.graph.outputs, at_end, strict=True):
            instance = self.memgraph.instances[i]
            must_be_on_host = self.graph.buffers[b].end_on_host
            if instance.buffer != b or self.drops[i]:
                wrong.append(f"output {b} is not there")
            if must_be_on_host and not instance.on_host:
                wrong.append(f"output {b} is on the device")
        return wrong


def _bytes_of(ranges: Ranges) -> set[int]:
    return {byte for start, n in ranges for byte in range(start, start + n)}


def on_device_before_runs(memgraph: MemGraph) -> list[set[BufferId]]:
    """The buffers that have a slot just before each run, in the planned order."""
    instances = memgraph.instances
    start = (instances[i] for i in memgraph.inputs_at_start)
    there = {i.buffer for i in start if not i.on_host}
    found: list[set[BufferId]] = []
    for op in memgraph.ops:
        if op.kind is OpKind.RUN:
            found.append(set(there))
        if op.kind is OpKind.DROP:
            there.discard(instances[op.reads[0]].buffer)
        elif op.kind is not OpKind.OFFLOAD:
            there.update(instances[i].buffer for i in op.writes)
    return found
