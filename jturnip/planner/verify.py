"""Proves a plan right from the definition, or says what is wrong with it.

Shares nothing with the planner: the TaskGraph and the MemGraph are all it looks at. Only
edges count. The serial order is a witness that they have no cycle, and gives the search a
direction; it is never a reason why one op would wait for another.

The idea, for bytes: *occupants* (device instances, and the workspaces of runs) whose ranges
overlap must be over, one before the other begins, in every order the edges allow. On one
byte the occupants stand in a row by the ops that begin them, and it is enough to prove each
neighbour: the one is written, then dropped, then the next is written, and so paths join up.
So one walk over the ops with a map "who had these bytes last" proves all pairs.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection
from typing import NamedTuple, NoReturn

from jturnip.errors import InternalError
from jturnip.graph.memgraph import MemGraph, Op, OpKind, Ranges, ranges_bytes
from jturnip.graph.taskgraph import Place, TaskGraph
from jturnip.planner.paths import Paths


class InvalidPlan(InternalError):
    """A MemGraph that some order of its ops could make wrong, or that is malformed.

    Attributes:
      kind: what is wrong, one of the words below.

    | kind | what is wrong |
    | --- | --- |
    | graph | the TaskGraph breaks its own rules |
    | ids | an id is not its position, or refers to nothing |
    | cycle | an op waits for itself or for a later op |
    | ranges | ranges overlap, are unsorted or empty, or a host instance has some |
    | budget | ranges lie outside the arena |
    | too-small | a slot or workspace holds fewer bytes than asked for |
    | overwrite | an output is not in the slot of the input that its task writes it over |
    | start | the instances at the start are not the inputs and constants, once each |
    | shape | an op reads, writes or carries what its kind does not |
    | wrong-buffer | an instance is of another buffer than it must be |
    | wrong-memory | an instance is on the host where the device is needed, or reversely |
    | task-twice, task-never | a task does not run exactly once |
    | written-twice, never-written | an instance is not written exactly once |
    | read-before-write | an op may start before what it reads is there |
    | read-after-drop | an op may still need an instance after its drop |
    | dropped-twice | an instance is dropped again |
    | pinned-dropped | an array that the caller keeps is dropped |
    | race | two occupants may hold the same bytes at once |
    | missing-output | an output is not there at the end |
    | output-place | an output ends in the wrong memory |
    """

    def __init__(self, kind: str, message: str):
        super().__init__(f"invalid plan ({kind}): {message}")
        self.kind = kind


def verify(graph: TaskGraph, memgraph: MemGraph) -> int:
    """Proves that every order the edges allow computes `graph` within `gpu_bytes`.

    Returns:
      `peak_bytes(memgraph)`.

    Raises:
      InvalidPlan: where that is not so, with the ops, instances and bytes concerned.
    """
    _check_graph(graph)
    _check_ids(graph, memgraph)
    _check_slots(graph, memgraph)
    _check_start(graph, memgraph)
    _check_ops(graph, memgraph)
    _check_each_task_runs_once(graph, memgraph)
    dropped = _Walk(graph, memgraph).walk()
    _check_outputs(graph, memgraph, dropped)
    peak = peak_bytes(memgraph)
    if peak > memgraph.gpu_bytes:
        raise InvalidPlan("budget", f"{peak} bytes at once of {memgraph.gpu_bytes}")
    return peak


def peak_bytes(memgraph: MemGraph) -> int:
    """The largest total of occupied device bytes over the serial order."""
    slot_bytes = [ranges_bytes(i.ranges) for i in memgraph.instances]
    occupied = sum([slot_bytes[i] for i in memgraph.inputs_at_start])
    peak = occupied
    for op in memgraph.ops:
        if op.kind is OpKind.DROP:
            occupied -= slot_bytes[op.reads[0]]
            continue
        for i in op.writes:
            occupied += slot_bytes[i]
        for _, read in op.overwrites:
            occupied -= slot_bytes[read]
        peak = max(peak, occupied + ranges_bytes(op.workspace))
    return peak


# --- What can be said without following an edge.


def _check_graph(graph: TaskGraph) -> None:
    try:
        graph.check()
    except (AssertionError, IndexError) as error:
        raise InvalidPlan("graph", str(error)) from error


def _check_ids(graph: TaskGraph, memgraph: MemGraph) -> None:
    for position, instance in enumerate(memgraph.instances):
        if instance.id != position:
            raise InvalidPlan("ids", f"instance {instance.id} stands at {position}")
        if not 0 <= instance.buffer < len(graph.buffers):
            raise InvalidPlan("ids", f"instance {position} is of no buffer")
    count = len(memgraph.instances)
    for i in memgraph.inputs_at_start + memgraph.outputs_at_end:
        if not 0 <= i < count:
            raise InvalidPlan("ids", f"start or end names instance {i}, which is none")
    for position, op in enumerate(memgraph.ops):
        if op.id != position:
            raise InvalidPlan("ids", f"op {op.id} stands at {position}")
        if op.task is not None and not 0 <= op.task < len(graph.tasks):
            raise InvalidPlan("ids", f"op {position} runs task {op.task}, which is none")
        _check_references(memgraph, op)


def _check_references(memgraph: MemGraph, op: Op) -> None:
    count = len(memgraph.instances)
    for i in op.reads + op.writes:
        if not 0 <= i < count:
            raise InvalidPlan("ids", f"op {op.id} uses instance {i}, which is none")
    for dep in op.deps:
        if 0 <= dep[0] < op.id:
            continue
        if not 0 <= dep[0] < len(memgraph.ops):
            raise InvalidPlan("ids", f"op {op.id} waits for op {dep[0]}, which is none")
        later = "itself" if dep[0] == op.id else f"op {dep[0]}, which stands after it"
        raise InvalidPlan("cycle", f"op {op.id} waits for {later}")


def _check_slots(graph: TaskGraph, memgraph: MemGraph) -> None:
    for i, instance in enumerate(memgraph.instances):
        if instance.on_host:
            if instance.ranges:
                name = _occupant_name(graph, memgraph, i)
                raise InvalidPlan("ranges", f"{name} is on the host and has ranges")
            continue
        needed = graph.buffers[instance.buffer].nbytes
        _check_ranges(graph, memgraph, i, instance.ranges, needed)
    for op in memgraph.ops:
        if op.kind is OpKind.RUN and op.task is not None:
            needed = graph.tasks[op.task].workspace
            _check_ranges(graph, memgraph, ~op.id, op.workspace, needed)


def _check_ranges(
    graph: TaskGraph, memgraph: MemGraph, occupant: int, ranges: Ranges, needed: int
) -> None:
    """Sorted, disjoint, in the arena and, together, at least the bytes needed."""
    end = total = 0
    for offset, nbytes in ranges:
        if offset < end or nbytes <= 0:
            name = _occupant_name(graph, memgraph, occupant)
            kind = "budget" if offset < 0 else "ranges"
            raise InvalidPlan(kind, f"{name}: ({offset}, {nbytes}) cannot follow {end}")
        end = offset + nbytes
        total += nbytes
    if end > memgraph.gpu_bytes:
        name = _occupant_name(graph, memgraph, occupant)
        raise InvalidPlan("budget", f"{name} ends at {end} of {memgraph.gpu_bytes}")
    if total < needed:
        name = _occupant_name(graph, memgraph, occupant)
        raise InvalidPlan("too-small", f"{name} has {total} bytes and needs {needed}")


def _check_start(graph: TaskGraph, memgraph: MemGraph) -> None:
    seen: set[int] = set()
    for i in memgraph.inputs_at_start:
        instance = memgraph.instances[i]
        start = graph.buffers[instance.buffer].start
        if start is None:
            what = "is at the start, but a task writes it"
        elif instance.on_host != (start is Place.HOST):
            what = f"should be on the {start.value} at the start"
        elif instance.buffer in seen:
            what = "is not the only one of its buffer at the start"
        else:
            seen.add(instance.buffer)
            continue
        raise InvalidPlan("start", f"{_occupant_name(graph, memgraph, i)} {what}")
    for buffer in graph.buffers:
        if buffer.start is not None and buffer.id not in seen:
            raise InvalidPlan("start", f"no instance of buffer {buffer.id} is there")


def _check_ops(graph: TaskGraph, memgraph: MemGraph) -> None:
    for op in memgraph.ops:
        if op.kind is OpKind.RUN:
            _check_run(graph, memgraph, op)
            continue
        writes = 0 if op.kind is OpKind.DROP else 1
        if len(op.reads) != 1 or len(op.writes) != writes:
            what = f"reads {len(op.reads)} and writes {len(op.writes)} instances"
            _fail_op(graph, "shape", op, what)
        if op.task is not None or op.workspace or op.overwrites:
            _fail_op(graph, "shape", op, "has a task, a workspace or overwrites")
        read = memgraph.instances[op.reads[0]]
        if read.on_host != (op.kind is OpKind.RELOAD):
            _fail_op(graph, "wrong-memory", op, f"reads instance {read.id}")
        if op.kind is OpKind.DROP:
            continue
        written = memgraph.instances[op.writes[0]]
        if written.on_host == read.on_host:
            _fail_op(graph, "wrong-memory", op, f"writes instance {written.id}")
        if written.buffer != read.buffer:
            what = f"reads buffer {read.buffer} and writes buffer {written.buffer}"
            _fail_op(graph, "wrong-buffer", op, what)


def _check_run(graph: TaskGraph, memgraph: MemGraph, op: Op) -> None:
    if op.task is None:
        _fail_op(graph, "shape", op, "has no task")
    task = graph.tasks[op.task]
    instances = memgraph.instances
    reads = tuple([instances[i].buffer for i in op.reads])
    writes = tuple([instances[i].buffer for i in op.writes])
    if reads != task.inputs:
        _fail_op(graph, "wrong-buffer", op, f"reads buffers {reads}, not {task.inputs}")
    if writes != task.outputs:
        _fail_op(graph, "wrong-buffer", op, f"writes buffers {writes}, not {task.outputs}")
    for i in op.reads + op.writes:
        if instances[i].on_host:
            _fail_op(graph, "wrong-memory", op, f"uses instance {i}, on the host")
    pairs = tuple([(op.writes[o], op.reads[i]) for o, i in task.overwrites])
    if op.overwrites != pairs:
        _fail_op(graph, "overwrite", op, f"overwrites {op.overwrites}, not {pairs}")
    for written, read in pairs:
        if instances[written].ranges != instances[read].ranges:
            what = f"writes instance {written} elsewhere than over instance {read}"
            _fail_op(graph, "overwrite", op, what)


def _check_each_task_runs_once(graph: TaskGraph, memgraph: MemGraph) -> None:
    run_of: dict[int, int] = {}
    for op in memgraph.ops:
        if op.task is None:
            continue
        if op.task in run_of:
            _fail_op(graph, "task-twice", op, f"comes after op {run_of[op.task]}")
        run_of[op.task] = op.id
    for task in graph.tasks:
        if task.id not in run_of:
            raise InvalidPlan("task-never", f'task {task.id} "{task.name}" never runs')


def _check_outputs(graph: TaskGraph, memgraph: MemGraph, dropped: list[int]) -> None:
    found = len(memgraph.outputs_at_end)
    if found != len(graph.outputs):
        message = f"{found} instances at the end for {len(graph.outputs)} outputs"
        raise InvalidPlan("missing-output", message)
    for buffer, i in zip(graph.outputs, memgraph.outputs_at_end, strict=True):
        instance = memgraph.instances[i]
        if instance.buffer != buffer:
            kind, what = "missing-output", f"stands for output {buffer}"
        elif dropped[i] != _NEVER:
            kind, what = "missing-output", f"is dropped by op {dropped[i]}"
        elif graph.buffers[buffer].end_on_host and not instance.on_host:
            kind, what = "output-place", "must end on the host"
        else:
            continue
        raise InvalidPlan(kind, f"{_occupant_name(graph, memgraph, i)} {what}")


# --- What the edges must prove.

# Stands for "before the first op" among writers, and for "not so far" among drops.
_NEVER = -1


class _Need(NamedTuple):
    """An op that must be over before the one at hand, which does not wait for it itself,
    and what goes wrong if nothing else makes it wait."""

    op: int
    kind: str
    # The instance or occupant concerned, and the one that wants its bytes.
    occupant: int
    taker: int | None = None


class _Walk:
    """Goes through the ops once and proves, for each, what must be over before it.

    An occupant is an instance's id, or `~op` for the workspace of a run.
    """

    def __init__(self, graph: TaskGraph, memgraph: MemGraph):
        self.graph = graph
        self.memgraph = memgraph
        self.paths = Paths(memgraph)
        # For each instance, the op that writes it.
        self.writers = _find_writers(graph, memgraph)
        # For each instance, the op that dropped it, so far.
        self.dropped = [_NEVER] * len(memgraph.instances)
        # For each device instance, the ops that read it, so far.
        self.readers: dict[int, list[int]] = {}
        self.arena = _Arena(memgraph.gpu_bytes)
        # What the op at hand waits for itself: needs of those ops are met.
        self.before: Collection[int] = ()

    def walk(self) -> list[int]:
        """Proves every op; returns the op that drops each instance."""
        self.begin()
        for op in self.memgraph.ops:
            before = self.paths.before[op.id]
            self.before = set(before) if len(before) > 8 else before
            missing = self.drop(op) if op.kind is OpKind.DROP else self.use(op)
            if missing:
                self.prove(op, missing)
        return self.dropped

    def begin(self) -> None:
        for i in self.memgraph.inputs_at_start:
            for offset, nbytes in self.memgraph.instances[i].ranges:
                for other in self.arena.take(offset, offset + nbytes, i):
                    if other is not None:
                        self.fail_race(i, other, "both are there at the start")

    def drop(self, op: Op) -> list[_Need]:
        """A drop waits for all who read the instance; those wait for its writer."""
        (i,) = op.reads
        return self.ends(op, i)

    def ends(self, op: Op, i: int) -> list[_Need]:
        """An instance is over with an op: those who read it before must be."""
        buffer = self.graph.buffers[self.memgraph.instances[i].buffer]
        if self.dropped[i] != _NEVER:
            self.fail(op, "dropped-twice", i, f"op {self.dropped[i]} dropped it before")
        if buffer.pinned and self.writers[i] == _NEVER:
            self.fail(op, "pinned-dropped", i, "the caller keeps this array")
        self.dropped[i] = op.id
        readers = self.readers.pop(i, None)
        if readers is None:
            return self.written_before(op, i)
        return [
            _Need(r, "read-after-drop", i)
            for r in readers
            if r != op.id and r not in self.before
        ]

    def use(self, op: Op) -> list[_Need]:
        """An op waits for the writers of what it reads, and for the bytes it takes."""
        needs: list[_Need] = []
        for i in op.reads:
            if self.dropped[i] != _NEVER:
                self.fail(op, "read-after-drop", i, f"op {self.dropped[i]} dropped it")
            needs += self.written_before(op, i)
            if not self.memgraph.instances[i].on_host:
                self.readers.setdefault(i, []).append(op.id)
        over = dict(op.overwrites)
        for i in over.values():
            needs += self.ends(op, i)
        for i in op.writes:
            ranges = self.memgraph.instances[i].ranges
            self.take(op, i, ranges, needs, over.get(i))
        if op.workspace:
            self.take(op, ~op.id, op.workspace, needs)
        return needs

    def written_before(self, op: Op, i: int) -> list[_Need]:
        writer = self.writers[i]
        if writer == _NEVER:
            return []
        if writer >= op.id:
            self.fail(op, "read-before-write", i, f"op {writer} writes it")
        if writer in self.before:
            return []
        return [_Need(writer, "read-before-write", i)]

    def take(
        self,
        op: Op,
        taker: int,
        ranges: Ranges,
        needs: list[_Need],
        overwritten: int | None = None,
    ) -> None:
        """Gives bytes to a new occupant; each that had them before must be over, but for
        the one that it is written over."""
        for offset, nbytes in ranges:
            for other in self.arena.take(offset, offset + nbytes, taker):
                if other is None or other == overwritten:
                    continue
                over = self.dropped[other] if other >= 0 else ~other
                if over in (_NEVER, op.id):
                    self.fail_race(taker, other, "which holds them at that point")
                if over not in self.before:
                    needs.append(_Need(over, "race", other, taker))

    def prove(self, op: Op, missing: list[_Need]) -> None:
        unproved = self.paths.unreached(op.id, {need.op for need in missing})
        for need in missing:
            if need.op not in unproved:
                continue
            last = _op_name(self.graph, self.memgraph.ops[need.op])
            if need.taker is not None:
                why = f"{_op_name(self.graph, op)} does not wait for {last}"
                self.fail_race(need.taker, need.occupant, why)
            self.fail(op, need.kind, need.occupant, f"nothing makes it wait for {last}")

    def fail(self, op: Op, kind: str, i: int, why: str) -> NoReturn:
        name = _occupant_name(self.graph, self.memgraph, i)
        _fail_op(self.graph, kind, op, f"uses {name}: {why}")

    def fail_race(self, taker: int, other: int, why: str) -> NoReturn:
        taker_name = _occupant_name(self.graph, self.memgraph, taker)
        other_name = _occupant_name(self.graph, self.memgraph, other)
        raise InvalidPlan("race", f"{taker_name} takes bytes of {other_name}: {why}")


def _find_writers(graph: TaskGraph, memgraph: MemGraph) -> list[int]:
    """The op that writes each instance; `_NEVER` for one that is there at the start."""
    writers: list[int | None] = [None] * len(memgraph.instances)
    for i in memgraph.inputs_at_start:
        writers[i] = _NEVER
    for op in memgraph.ops:
        for i in op.writes:
            if writers[i] is not None:
                what = f"writes {_occupant_name(graph, memgraph, i)} again"
                _fail_op(graph, "written-twice", op, what)
            writers[i] = op.id
    for i, writer in enumerate(writers):
        if writer is None:
            name = _occupant_name(graph, memgraph, i)
            raise InvalidPlan("never-written", f"nothing writes {name}")
    return [writer for writer in writers if writer is not None]


class _Arena:
    """Who had each byte last, as pieces that together cover the arena."""

    def __init__(self, nbytes: int):
        # Where pieces begin, sorted; and for each, where it ends and its last occupant.
        self.starts: list[int] = [0]
        self.ends: dict[int, int] = {0: nbytes}
        self.owners: dict[int, int | None] = {0: None}

    def take(self, start: int, end: int, owner: int) -> list[int | None]:
        """Gives [start, end) to `owner`; returns whose it was, None for nobody's."""
        if self.ends.get(start) == end:
            last = self.owners[start]
            self.owners[start] = owner
            return [last]
        low = bisect_right(self.starts, start) - 1
        high = bisect_left(self.starts, end, low)
        covered = self.starts[low:high]
        ends = [self.ends.pop(s) for s in covered]
        owners = [self.owners.pop(s) for s in covered]
        pieces: list[tuple[int, int, int | None]] = [(start, end, owner)]
        if covered[0] < start:
            pieces.insert(0, (covered[0], start, owners[0]))
        if end < ends[-1]:
            pieces.append((end, ends[-1], owners[-1]))
        self.starts[low:high] = [piece[0] for piece in pieces]
        for piece_start, piece_end, piece_owner in pieces:
            self.ends[piece_start] = piece_end
            self.owners[piece_start] = piece_owner
        return owners


# --- Names for messages.


def _fail_op(graph: TaskGraph, kind: str, op: Op, what: str) -> NoReturn:
    raise InvalidPlan(kind, f"{_op_name(graph, op)} {what}")


def _op_name(graph: TaskGraph, op: Op) -> str:
    if op.task is None:
        return f"op {op.id} ({op.kind.value})"
    return f'op {op.id} (run of task {op.task} "{graph.tasks[op.task].name}")'


def _occupant_name(graph: TaskGraph, memgraph: MemGraph, occupant: int) -> str:
    if occupant < 0:
        op = memgraph.ops[~occupant]
        return f"the workspace {_in_words(op.workspace)} of {_op_name(graph, op)}"
    instance = memgraph.instances[occupant]
    name = graph.buffers[instance.buffer].name
    where = "on the host" if instance.on_host else f"at {_in_words(instance.ranges)}"
    label = f'buffer {instance.buffer} "{name}"' if name else f"buffer {instance.buffer}"
    return f"instance {occupant} ({label}, {where})"


def _in_words(ranges: Ranges) -> str:
    if not ranges:
        return "no bytes"
    return "bytes " + ", ".join(f"[{start}, {start + n})" for start, n in ranges)
