"""TaskGraph and budget to MemGraph: TURNIP's two horizons (sections 5 and 6 of the paper).

The serial order of the tasks is simulated once. The *allocation horizon* runs ahead,
reserving slots and issuing reloads as long as nothing must leave; the *execution horizon*
emits runs and frees what is used up. Where the two meet and memory is short, victims are
evicted; the strategy `ahead` lets copies go a task before that. Every re-use of bytes
becomes an edge to the op that freed them, so that any order of the result that keeps its
edges is correct and fits, and the simulated one can finish.

Where it differs from the paper: a buffer that still has its host copy is dropped without a
write; a slot is a set of ranges, so nothing is ever compacted; a task's workspace has a
slot; reloads are issued when the allocation horizon passes their first reader, as in the
authors' first implementation. A strategy that is *late* gives results their bytes when
their task is emitted, not when the allocation horizon passes it. A strategy may say who
leaves and who comes when, and whose reloads may not be issued yet. And a clock, where the
link's rates are known, says which of the free bytes are expected to be free first: those
are taken first.
"""

import heapq
import re
from collections import deque
from collections.abc import Sequence

from jturnip.errors import DoesNotFit
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
from jturnip.graph.taskgraph import BufferId, Place, Task, TaskGraph, TaskId
from jturnip.planner.allocator import Arena
from jturnip.planner.rates import Rates
from jturnip.planner.strategies import STRATEGIES, Strategy
from jturnip.planner.transfers import Transfers
from jturnip.units import format_bytes, padded


_NEVER = 1 << 60  # the next use of a buffer that no task will read again
_FEW = 64  # buffers are looked at for one that may leave ahead of time


def plan(
    graph: TaskGraph,
    gpu_bytes: int,
    strategy: str | Strategy = "turnip",
    rates: Rates | None = None,
) -> MemGraph:
    """Plans `graph` in `gpu_bytes` of device memory.

    Args:
      graph: what to compute; its order is the one simulated.
      gpu_bytes: size of the arena, in bytes.
      strategy: a key of `STRATEGIES`, or one with numbers of its own.
      rates: of the link. With them what is freed first is what is expected to be free
        first; without them what the simulated order frees first.

    Returns:
      A MemGraph. It is not verified here: `verify` shares nothing with this module.

    Raises:
      DoesNotFit: where one task, or the arrays the caller keeps, need more.
    """
    check_budget(graph, gpu_bytes)
    if isinstance(strategy, str):
        strategy = STRATEGIES[strategy]
    builder = _Builder(graph, gpu_bytes, strategy, rates)
    reserved = executed = 0
    while executed < len(graph.tasks):
        if reserved < len(graph.tasks) and builder.reserve(reserved, executed):
            reserved += 1
        elif reserved == executed:
            builder.make_room(executed)
        elif builder.make_room_ahead(reserved, executed):
            pass  # then it is reserved
        else:
            builder.let_come(executed)
            builder.execute(executed)
            executed += 1
    return builder.build()


def resident_bytes(graph: TaskGraph) -> int:
    """Device bytes of arrays that the caller keeps during the whole call."""
    return sum(padded(b.nbytes) for b in graph.buffers if b.pinned)


def task_bytes(graph: TaskGraph, task: Task) -> int:
    """Device bytes that `task` needs at once, beside the arrays the caller keeps."""
    buffers = (graph.buffers[b] for b in task.inputs + task.new)
    return padded(task.workspace) + sum(padded(b.nbytes) for b in buffers if not b.pinned)


def smallest_budget(graph: TaskGraph) -> int:
    """The fewest arena bytes in which `plan` succeeds."""
    largest = max((task_bytes(graph, t) for t in graph.tasks), default=0)
    return max(resident_bytes(graph) + largest, _bytes_at_start(graph))


def check_budget(graph: TaskGraph, gpu_bytes: int) -> None:
    """Raises DoesNotFit, with the numbers, where no plan can exist."""
    needed = smallest_budget(graph)
    if needed > gpu_bytes:
        raise does_not_fit(graph, gpu_bytes, needed)


def does_not_fit(
    graph: TaskGraph,
    gpu_bytes: int,
    needed_bytes: int,
    reserve_bytes: int = 0,
    taken_bytes: int = 0,
) -> DoesNotFit:
    """The error for a budget of `gpu_bytes` where `needed_bytes` are needed.

    Args:
      graph: what was to be planned.
      gpu_bytes: the budget, in bytes.
      needed_bytes: the smallest budget that would do, in bytes.
      reserve_bytes: the part of that which no plan may use.
      taken_bytes: the part of it that others take meanwhile.
    """
    asked = f"gpu_bytes is {gpu_bytes} ({format_bytes(gpu_bytes)})"
    advice = f"raise gpu_bytes to at least {needed_bytes} ({format_bytes(needed_bytes)})"
    at_start, kept = _bytes_at_start(graph), resident_bytes(graph)
    largest = max(graph.tasks, key=lambda t: task_bytes(graph, t), default=None)
    others = f", while other values take {format_bytes(taken_bytes)}" if taken_bytes else ""
    room = gpu_bytes - taken_bytes
    if largest is None or at_start > max(room, kept + task_bytes(graph, largest)):
        task = ""
        message = (
            f"arguments that already lie on the device take {format_bytes(at_start)}"
            f"{others}; {asked}. Hold them in host memory with jturnip.host(tree), or"
            f" {advice}."
        )
    else:
        there = f"{format_bytes(kept)} of arguments and closed-over arrays on the device"
        beside = (f", beside {there}" if kept else "") + others
        if reserve_bytes:
            beside += f", and {format_bytes(reserve_bytes)} are jturnip's own"
        # A few bytes there are not what is in the way.
        worth = 16 * kept > needed_bytes
        remedy = "Hold those with jturnip.host(tree), or " if worth else ""
        advice = f"{remedy}{advice}" if remedy else f"R{advice[1:]}"
        task = largest.name
        message = (
            f'task {largest.id} "{largest.name}" ({largest.source or "unknown line"}) needs'
            f" {format_bytes(task_bytes(graph, largest))} at once{beside}; {asked}."
            f" {advice}."
        )
    return DoesNotFit(message, needed_bytes=needed_bytes, gpu_bytes=gpu_bytes, task=task)


def refusal_of_budget(refusal: DoesNotFit, gpu_bytes: int, needed_bytes: int) -> DoesNotFit:
    """The same refusal as the answer to a budget, which is to be at least so much."""
    message = str(refusal)
    for what, before, now in (
        ("gpu_bytes is", refusal.gpu_bytes, gpu_bytes),
        ("at least", refusal.needed_bytes, needed_bytes),
    ):
        said = rf"{what} {before}( \([^)]*\))?"
        message = re.sub(said, f"{what} {now} ({format_bytes(now)})", message)
    return refusal.saying(message, needed_bytes=needed_bytes, gpu_bytes=gpu_bytes)


def _bytes_at_start(graph: TaskGraph) -> int:
    return sum(padded(b.nbytes) for b in graph.buffers if b.start is Place.DEVICE)


class _Clock:
    """When each op is expected to be over: as the simulator says it, without what the loop
    costs."""

    def __init__(self, graph: TaskGraph, rates: Rates | None):
        self.ends: list[float] = []
        self._graph = graph
        self._rates = rates
        # Until when compute, and the link to the device and from it, are busy.
        self._busy = {OpKind.RUN: 0.0, OpKind.RELOAD: 0.0, OpKind.OFFLOAD: 0.0}

    def add(self, kind: OpKind, deps: Sequence[Dep], of: int) -> None:
        """The next op, of a task or of a buffer."""
        if self._rates is None:
            self.ends.append(float(len(self.ends)))
            return
        begin = 0.0
        for dep in deps:
            end = self.ends[dep[0]]
            if end > begin:
                begin = end
        if kind is not OpKind.DROP:
            begin = max(begin, self._busy[kind])
            if kind is OpKind.RUN:
                begin += self._graph.tasks[of].seconds
            else:
                nbytes = self._graph.buffers[of].nbytes
                begin += nbytes / self._rates[kind is OpKind.OFFLOAD]
            self._busy[kind] = begin
        self.ends.append(begin)


class _Ahead:
    """Bytes in use while each of the tasks runs that are reserved and not executed, and
    after the last of them, where outputs get their bytes late."""

    def __init__(self) -> None:
        # Numbers of the first of these tasks, and of the one after the last.
        self._first = self._end = 0
        # (number, bytes) of those with more than all after them, the largest first; what is
        # to be added to all bytes here; and what is in use after the last.
        self._most: deque[tuple[int, int]] = deque()
        self._more = self._after = 0

    def __bool__(self) -> bool:
        return self._first < self._end

    @property
    def most(self) -> int:
        """Of any of the tasks."""
        return self._most[0][1] + self._more

    @property
    def after(self) -> int:
        """After the last of them."""
        return self._after + self._more

    def add(self, during: int, after: int) -> None:
        """One task more."""
        nbytes = during - self._more
        while self._most and self._most[-1][1] <= nbytes:
            self._most.pop()
        self._most.append((self._end, nbytes))
        self._after = after - self._more
        self._end += 1

    def executed(self) -> None:
        """The first of them is executed."""
        self._first += 1
        if self._most[0][0] < self._first:
            self._most.popleft()

    def come(self, nbytes: int) -> None:
        """So much more is in use while all of them run."""
        self._more += nbytes


class _Builder:
    """The state of the simulation; lives as long as one call of `plan`.

    Each buffer is in at most one slot (`_device`) and has at most one host copy (`_host`),
    which, once made, stays valid: buffers are immutable.
    """

    def __init__(
        self,
        graph: TaskGraph,
        gpu_bytes: int,
        strategy: Strategy,
        rates: Rates | None = None,
    ):
        self._clock = _Clock(graph, rates)
        self._graph = graph
        self._strategy = strategy
        self._arena = Arena(gpu_bytes)
        self._ops: list[Op] = []
        self._instances: list[Instance] = []
        self._sizes = [padded(b.nbytes) for b in graph.buffers]
        # Present device instance and host instance of each buffer.
        self._device: dict[BufferId, InstanceId] = {}
        self._host: dict[BufferId, InstanceId] = {}
        # The op that wrote an instance (absent: there at the start), and its readers.
        self._writer: dict[InstanceId, OpId] = {}
        self._readers: dict[InstanceId, list[OpId]] = {}
        # Slots of outputs that the allocation horizon has passed and no run has written;
        # empty where they get their bytes when the run is emitted.
        self._reserved: dict[BufferId, tuple[Ranges, tuple[OpId, ...]]] = {}
        # Positions that still read each buffer, the next one last.
        self._uses: list[list[int]] = [[] for _ in graph.buffers]
        for task in reversed(graph.tasks):
            for b in task.inputs:
                self._uses[b].append(task.id)
        self._outputs = frozenset(graph.outputs)
        # Workspace that the reserved, unexecuted tasks will want: (position, bytes), the
        # largest first, so that a window's maximum is at the front.
        self._workspaces: deque[tuple[int, int]] = deque()
        # Used where outputs get their bytes late.
        self._ahead = _Ahead()
        # Victims, best first, as (key, buffer); stale entries are skipped.
        self._victims: list[tuple[tuple[bool, int], BufferId]] = []
        # What is smaller than this leaves last: it frees next to nothing.
        self._trifle = gpu_bytes // 4096
        self._last_use: dict[BufferId, int] = {}
        self._window = strategy.window(graph, gpu_bytes) if strategy.window else None
        # Who leaves after which task; who comes from which task on, and who could come by
        # now and has not found room.
        self._transfers = Transfers()
        if strategy.transfers:
            self._transfers = strategy.transfers(graph, gpu_bytes, rates)
        self._from = {
            move: t for t, moves in self._transfers.come.items() for move in moves
        }
        self._coming: deque[tuple[BufferId, TaskId]] = deque()
        # The run op of each executed task.
        self._runs: list[OpId] = []
        self._inputs_at_start = self._place_inputs()

    # -- the start and the end ---------------------------------------------------------

    def _place_inputs(self) -> tuple[InstanceId, ...]:
        start = []
        for buffer in self._graph.buffers:
            if buffer.start is None:
                continue
            on_host = buffer.start is Place.HOST
            ranges: Ranges = ()
            if not on_host:
                ranges, _ = self._arena.take(self._sizes[buffer.id])
            instance = self._add_instance(buffer.id, ranges, on_host)
            start.append(instance)
        for buffer in self._graph.buffers:
            if buffer.start is Place.DEVICE:
                if not self._uses[buffer.id]:
                    self._drop_used_up(buffer.id)
                else:
                    self._offer_as_victim(buffer.id)
        self._let_leave(-1)
        return tuple(start)

    def build(self) -> MemGraph:
        """Brings outputs back to the device where all fit, and closes the MemGraph."""
        graph = self._graph
        wanted = [b for b in graph.outputs if not graph.buffers[b].end_on_host]
        away = [b for b in wanted if b not in self._device]
        if sum(self._sizes[b] for b in away) <= self._arena.free_bytes:
            for b in away:
                self._reload(b, len(graph.tasks))
        ends = tuple(
            self._host[b] if graph.buffers[b].end_on_host else self._where(b)
            for b in graph.outputs
        )
        return MemGraph(
            self._arena.nbytes,
            tuple(self._ops),
            tuple(self._instances),
            self._inputs_at_start,
            ends,
        )

    def _where(self, b: BufferId) -> InstanceId:
        return self._device[b] if b in self._device else self._host[b]

    # -- the allocation horizon --------------------------------------------------------

    def reserve(self, position: int, executed: int) -> bool:
        """Reserves what task `position` needs if nothing must leave for it."""
        if position > executed and not self._may_look_ahead(position, executed):
            return False
        if self._short_of(position, executed) > 0:
            return False
        task = self._graph.tasks[position]
        reloads, nbytes = self._missing(task)
        if self._strategy.late:
            self._reserved.update((b, ((), ())) for b in task.outputs)
            self._will_be_used(task, sum(self._sizes[b] for b in reloads), nbytes)
        for b in reloads:
            self._reload(b, position)
        if self._strategy.late:
            return True
        for b in task.new:
            self._reserved[b] = self._arena.take(self._sizes[b])
        if task.overwrites:  # these have the slots of inputs
            self._reserved.update((task.outputs[o], ((), ())) for o, _ in task.overwrites)
        workspace = padded(task.workspace)
        while self._workspaces and self._workspaces[-1][1] <= workspace:
            self._workspaces.pop()
        self._workspaces.append((position, workspace))
        return True

    def _short_of(self, position: int, executed: int) -> int:
        """Bytes that must leave before task `position` can be reserved, if any."""
        task = self._graph.tasks[position]
        _, nbytes = self._missing(task)
        if position > executed:
            nbytes += int(self._strategy.spare * self._arena.nbytes)
        if not self._strategy.late:
            nbytes += self._workspace_after(position, executed)
            return nbytes - self._arena.free_bytes
        most = self._used_before() + nbytes + padded(task.workspace)
        if self._ahead:  # what is reloaded is there while these run
            arriving = nbytes - sum(self._sizes[b] for b in task.new)
            most = max(most, arriving + self._ahead.most)
        return most - self._arena.nbytes

    def _used_before(self) -> int:
        """Bytes in use before the next task that is reserved."""
        if self._ahead:
            return self._ahead.after
        return self._arena.nbytes - self._arena.free_bytes

    def _will_be_used(self, task: Task, arriving: int, nbytes: int) -> None:
        """Notes what a task that is to be reserved adds to what is in use: what it reloads
        at once, and all that it takes while it runs."""
        used = self._used_before() + nbytes
        self._ahead.come(arriving)
        wanted = lambda b: b in self._outputs and not self._graph.buffers[b].end_on_host
        last_read = (
            b
            for b in dict.fromkeys(task.inputs)
            if self._uses[b][0] == task.id and b not in task.overwritten
        )
        never_read = (b for b in task.outputs if not self._uses[b])
        freed = sum(
            self._sizes[b]
            for b in (*last_read, *never_read)
            if not self._graph.buffers[b].pinned and not wanted(b)
        )
        self._ahead.add(used + padded(task.workspace), used - freed)

    def _may_look_ahead(self, position: int, executed: int) -> bool:
        if self._window is not None:
            return self._window.may_load(position, executed)
        if not self._from:
            return True
        task = self._graph.tasks[position]
        return all(self._from.get((b, task.id), 0) <= executed for b in task.inputs)

    def _missing(self, task: Task) -> tuple[list[BufferId], int]:
        """Inputs to reload, and all bytes that reserving `task` takes but workspace."""
        reloads = [
            b for b in task.inputs if b not in self._device and b not in self._reserved
        ]
        return reloads, sum(self._sizes[b] for b in (*reloads, *task.new))

    def _workspace_after(self, position: int, executed: int) -> int:
        """The largest workspace among the unexecuted tasks up to `position`."""
        while self._workspaces and self._workspaces[0][0] < executed:
            self._workspaces.popleft()
        largest = self._workspaces[0][1] if self._workspaces else 0
        return max(largest, padded(self._graph.tasks[position].workspace))

    def make_room(self, position: int) -> None:
        """Evicts until task `position`, the next to execute, can be reserved."""
        task = self._graph.tasks[position]
        keep = frozenset(task.inputs)
        _, nbytes = self._missing(task)
        nbytes += padded(task.workspace)
        kept: list[tuple[tuple[bool, int], BufferId]] = []
        while self._arena.free_bytes < nbytes:
            entry = heapq.heappop(self._victims)
            if self._is_stale(entry):
                continue
            if entry[1] in keep:
                kept.append(entry)
            else:
                self._evict(entry[1], position)
        for entry in kept:
            heapq.heappush(self._victims, entry)

    def make_room_ahead(self, position: int, executed: int) -> bool:
        """Lets what has a copy on the host leave for a task that comes soon, if a few such
        will do: its reloads are then on their way while those before it run."""
        tasks = self._graph.tasks
        if position >= min(len(tasks), executed + 1 + self._strategy.ahead):
            return False
        if not self._may_look_ahead(position, executed):
            return False
        keep = frozenset(b for task in tasks[executed : position + 1] for b in task.inputs)
        short = self._short_of(position, executed)
        popped: list[tuple[tuple[bool, int], BufferId]] = []
        chosen: dict[BufferId, None] = {}
        freed = 0
        while freed < short and self._victims and len(popped) < _FEW:
            entry = heapq.heappop(self._victims)
            if self._is_stale(entry):
                continue
            popped.append(entry)
            b = entry[1]
            if b in self._host and b not in keep and b not in chosen:
                chosen[b] = None
                freed += self._sizes[b]
        for entry in popped:
            heapq.heappush(self._victims, entry)
        if freed < short:
            return False
        for b in chosen:
            self._evict(b, position)
        self._ahead.come(-freed)
        return True

    def let_come(self, executed: int) -> None:
        """Issues reloads that are to begin while task `executed`, which has its room, runs,
        as far as there is room beside it."""
        self._coming.extend(self._transfers.come.get(executed, ()))
        while self._coming:
            b, reader = self._coming[0]
            if b not in self._device and self._uses[b][-1:] == [reader]:
                if self._ahead.most + self._sizes[b] > self._arena.nbytes:
                    return  # after this task, perhaps
                self._ahead.come(self._sizes[b])
                self._reload(b, reader)
            self._coming.popleft()

    # -- the execution horizon ---------------------------------------------------------

    def execute(self, position: int) -> None:
        """Emits the run of task `position` and frees what no later task reads."""
        task = self._graph.tasks[position]
        op = OpId(len(self._ops))
        deps = [
            Dep(self._writer[i], DepKind.DATA)
            for i in (self._device[b] for b in task.inputs)
            if i in self._writer
        ]
        reads = tuple(self._device[b] for b in task.inputs)
        over = dict(task.overwrites)
        late = self._strategy.late
        if late:
            self._ahead.executed()
        writes = []
        for o, b in enumerate(task.outputs):
            ranges, freers = self._reserved.pop(b)
            if o in over:
                ranges, freers = self._given_up(task.inputs[over[o]])
            elif late:
                ranges, freers = self._arena.take(self._sizes[b])
            deps += self._memory_deps(freers, "writes", b)
            writes.append(self._add_instance(b, ranges, on_host=False))
        workspace, freers = self._arena.take(padded(task.workspace))
        deps += [Dep(f, DepKind.MEMORY, "uses bytes for workspace") for f in freers]
        if self._strategy.serial and self._runs:
            deps.append(Dep(self._runs[-1], DepKind.ORDER, "keeps the simulated order"))
        overwrites = tuple((writes[o], reads[i]) for o, i in task.overwrites)
        self._emit(OpKind.RUN, deps, reads, tuple(writes), task.id, workspace, overwrites)
        self._runs.append(op)
        self._arena.free(workspace, op, self._clock.ends[op])
        overwritten = task.overwritten
        for b in task.inputs:
            self._uses[b].pop()
            if b not in overwritten:
                self._after_use(b, position)
        for b in task.outputs:
            if self._graph.buffers[b].end_on_host:
                self._offload(b, position)
            self._after_use(b, position)
        self._let_leave(position)

    def _let_leave(self, position: int) -> None:
        """Evicts who is to leave after task `position`."""
        for b in self._transfers.leave.get(position, ()):
            if b in self._device:
                self._evict(b, position)
                self._ahead.come(-self._sizes[b])

    def _after_use(self, b: BufferId, position: int) -> None:
        self._last_use[b] = position
        if self._uses[b]:
            self._offer_as_victim(b)
        elif b not in self._outputs or self._graph.buffers[b].end_on_host:
            self._drop_used_up(b)
        else:
            self._offer_as_victim(b)

    def _given_up(self, b: BufferId) -> tuple[Ranges, tuple[OpId, ...]]:
        """The slot of what is written over, and the ops that must be over before."""
        instance = self._device.pop(b)
        return self._instances[instance].ranges, tuple(self._readers.pop(instance, ()))

    def _drop_used_up(self, b: BufferId) -> None:
        if not self._graph.buffers[b].pinned:
            self._drop(b, "frees its bytes after the last reader")

    # -- moving buffers ----------------------------------------------------------------

    def _evict(self, b: BufferId, position: int) -> None:
        """Lets `b` leave the device, keeping a host copy; free where it has one."""
        if b not in self._host:
            self._offload(b, position)
        self._drop(b, "frees its bytes for others once its copy is safe")

    def _offload(self, b: BufferId, position: int) -> None:
        source = self._device[b]
        deps = [Dep(self._writer[source], DepKind.DATA)] if source in self._writer else []
        deps += self._order_deps(position)
        target = self._add_instance(b, (), on_host=True)
        self._emit(OpKind.OFFLOAD, deps, (source,), (target,))

    def _reload(self, b: BufferId, position: int) -> None:
        """Emits the reload of `b` that task `position` is the first to read."""
        source = self._host[b]
        deps = [Dep(self._writer[source], DepKind.DATA)] if source in self._writer else []
        ranges, freers = self._arena.take(self._sizes[b])
        deps += self._memory_deps(freers, "reloads", b)
        deps += self._order_deps(position)
        target = self._add_instance(b, ranges, on_host=False)
        self._emit(OpKind.RELOAD, deps, (source,), (target,))
        self._offer_as_victim(b)

    def _drop(self, b: BufferId, why: str) -> None:
        instance = self._device.pop(b)
        waits = dict.fromkeys(self._readers.pop(instance, ()))
        if not waits and instance in self._writer:
            waits[self._writer[instance]] = None
        deps = [Dep(w, DepKind.MEMORY, why) for w in waits]
        op = self._emit(OpKind.DROP, deps, (instance,), ())
        self._arena.free(self._instances[instance].ranges, op, self._clock.ends[op])

    def _order_deps(self, position: int) -> list[Dep]:
        """What a window makes a transfer for task `position` wait for."""
        if self._window is None or not self._runs:
            return []
        last = len(self._runs) - 1
        if position < len(self._graph.tasks):
            last = self._window.loads_after(position)
        if not 0 <= last < len(self._runs):
            return []
        return [Dep(self._runs[last], DepKind.ORDER, "waits until its partition may come")]

    # -- records -----------------------------------------------------------------------

    def _emit(
        self,
        kind: OpKind,
        deps: list[Dep],
        reads: tuple[InstanceId, ...],
        writes: tuple[InstanceId, ...],
        task: TaskId | None = None,
        workspace: Ranges = (),
        overwrites: tuple[tuple[InstanceId, InstanceId], ...] = (),
    ) -> OpId:
        op = OpId(len(self._ops))
        if len(deps) > 1:  # one for each op, the first
            distinct = {d[0]: d for d in reversed(deps)}
            deps = [distinct[o] for o in sorted(distinct)]
        kept = tuple(deps)
        moved = 0 if kind is OpKind.RUN else self._instances[reads[0]].buffer
        self._clock.add(kind, kept, task if task is not None else moved)
        self._ops.append(Op(op, kind, task, reads, writes, workspace, kept, overwrites))
        if kind is not OpKind.DROP:
            for i in reads:
                if not self._instances[i].on_host:
                    self._readers.setdefault(i, []).append(op)
        for i in writes:
            self._writer[i] = op
        return op

    def _add_instance(self, b: BufferId, ranges: Ranges, on_host: bool) -> InstanceId:
        instance = InstanceId(len(self._instances))
        self._instances.append(Instance(instance, b, ranges, on_host))
        (self._host if on_host else self._device)[b] = instance
        return instance

    def _memory_deps(self, freers: tuple[OpId, ...], verb: str, b: BufferId) -> list[Dep]:
        why = f"{verb} buffer {b} into bytes it freed"
        return [Dep(f, DepKind.MEMORY, why) for f in freers]

    def _offer_as_victim(self, b: BufferId) -> None:
        if not self._graph.buffers[b].pinned:
            heapq.heappush(self._victims, (self._victim_key(b), b))

    def _is_stale(self, victim: tuple[tuple[bool, int], BufferId]) -> bool:
        key, b = victim
        return b not in self._device or key != self._victim_key(b)

    def _victim_key(self, b: BufferId) -> tuple[bool, int]:
        """Smallest leaves first."""
        trifle = self._sizes[b] < self._trifle
        if not self._strategy.belady:
            return trifle, self._last_use.get(b, -1)
        return trifle, -(self._uses[b][-1] if self._uses[b] else _NEVER)
