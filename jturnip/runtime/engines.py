"""The engines over JAX: compute by executables, transfers by `device_put`.

A run's completion comes from the mark at the end of its executable. For transfers, and
where marks are not built, a waiter thread sleeps in `block_until_ready` and says so; for a
GPU, which is not slower where a core is busy, the loop looks itself whether they are over:
a thread that wakes up for each would hold it up for longer.
Completions steer the order only. Data dependencies are JAX's own, so a wrong guess stalls
and never corrupts.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jturnip import compat, memory, placement
from jturnip.compat import Device
from jturnip.compiler import nans
from jturnip.compiler.executables import Executable
from jturnip.errors import ExecutionError
from jturnip.graph.memgraph import MemGraph
from jturnip.graph.taskgraph import Buffer, Task, TaskGraph
from jturnip.native.queue import CompletionQueue, make_queue
from jturnip.runtime import waiters
from jturnip.runtime.hoststacks import Assembly
from jturnip.runtime.link import LinkClock, SimulatedLink
from jturnip.runtime.schedule import COMPUTE, D2H, H2D, NONE, Schedule
from jturnip.runtime.state import Limits
from jturnip.units import GRANULE


# How long the loop sleeps before it looks for failures that push nothing, in seconds.
_LOOK_AGAIN = 0.2
# And before it looks at what no thread waits for: half of what a thread takes to say so.
_LOOK_SOON = 5e-5
# So many numbers of one program stay on a GPU.
_MOST_NUMBERS = 160


class Step(NamedTuple):
    """What performing one op takes, found once per plan."""

    engine: int
    call: Callable[..., Sequence[jax.Array]] | None
    marked: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    # Of a run, what it reads and writes over.
    used_up: tuple[int, ...] = ()
    numbers: tuple[np.ndarray | jax.Array, ...] = ()
    # In the profiler: the task, or what a transfer moves.
    name: str = ""


@dataclass(frozen=True, slots=True)
class Program:
    """A plan with its executables: all that a run needs but the arguments."""

    graph: TaskGraph
    memgraph: MemGraph
    schedule: Schedule
    steps: tuple[Step, ...]
    # For each instance, how many reloads read it; 0 for device instances.
    host_readers: tuple[int, ...]
    device_sharding: jax.sharding.Sharding
    host_sharding: jax.sharding.Sharding
    # The error for a task that made a NaN of these operands.
    blame: Callable[[int, Sequence[Any], nans.Kinds], FloatingPointError]


def make_program(
    graph: TaskGraph,
    memgraph: MemGraph,
    schedule: Schedule,
    executables: Sequence[Executable],
    numbers: Sequence[tuple[np.ndarray, ...]],
    device: Device,
    blame: Callable[[int, Sequence[Any], nans.Kinds], FloatingPointError],
) -> Program:
    """Binds a plan to executables (indexed by `Task.executable`), to the numbers that each
    task passes to its own, and to a device."""
    waiters.start()
    there = placement.sharding(device, on_host=False)
    placed = functools.partial(_in_reach, there, {})
    host_readers = [0] * len(memgraph.instances)
    written = {b: task for task in graph.tasks for b in task.outputs}
    steps = []
    for op, engine in zip(memgraph.ops, schedule.engines, strict=True):
        call, marked, passed, name = None, False, (), ""
        if engine == COMPUTE:
            assert op.task is not None
            executable = executables[graph.tasks[op.task].executable]
            call, marked = executable.call, executable.marked
            passed = placed(numbers[op.task])
            task = graph.tasks[op.task]
            name = f"jturnip task {task.id} {task.name} ({task.source})"
        elif engine == H2D:
            host_readers[op.reads[0]] += 1
        if engine in (H2D, D2H):
            buffer = graph.buffers[memgraph.instances[op.reads[0]].buffer]
            verb = "reload" if engine == H2D else "offload"
            name = f"jturnip {verb} {_name(buffer, written.get(buffer.id))}"
        used_up = tuple(read for _, read in op.overwrites)
        steps.append(Step(engine, call, marked, op.reads, op.writes, used_up, passed, name))
    return Program(
        graph,
        memgraph,
        schedule,
        tuple(steps),
        tuple(host_readers),
        there,
        placement.sharding(device, on_host=True),
        blame,
    )


def _in_reach(
    there: jax.sharding.Sharding,
    known: dict[Any, jax.Array],
    numbers: tuple[np.ndarray, ...],
) -> tuple[np.ndarray | jax.Array, ...]:
    """Numbers as a device's executables take them without delay.

    A GPU would have each copied by every call, behind what is being copied already. So the
    first ones stay on it, a granule each of the bytes that are our own there.
    """
    if memory.is_on_cpu(there):
        return numbers
    passed: list[np.ndarray | jax.Array] = []
    for number in numbers:
        key = number.dtype.str, number.shape, number.tobytes()
        if key not in known and len(known) < _MOST_NUMBERS:
            known[key] = memory.from_numpy(number, there)
        passed.append(known.get(key, number))
    return tuple(passed)


def _name(buffer: Buffer, written_by: Task | None) -> str:
    if buffer.name or written_by is None:
        return buffer.name or "an array"
    return f"a result of task {written_by.id} {written_by.name}"


def looks_itself(device: jax.sharding.Sharding) -> bool:
    """Whether the loop looks for the ends of transfers, rather than leave it to threads."""
    return not memory.is_on_cpu(device)


class DeviceEngines:
    """One run's engines.

    Invariants: `arrays[i]` is the array of instance i while it lives, else None; an op is
    in `_in_flight` from its start to its completion.
    """

    def __init__(
        self,
        program: Program,
        arrays: list[jax.Array | None],
        donated: frozenset[int],
        marks: "MarkSlots",
        assembly: Assembly,
        link: SimulatedLink | None = None,
        looked_for: nans.Kinds = (),
    ):
        self._program = program
        self.arrays = arrays
        # Instances at the start that are the caller's and were given up.
        self._donated = donated
        self._host_readers = list(program.host_readers)
        self._assembly = assembly
        # What is put together elsewhere need not stay.
        self._kept = frozenset(program.memgraph.outputs_at_end) - assembly.instances
        self._marks = marks
        self._queue = marks.queue
        self._slot_of: dict[int, int] = {}
        # The array whose readiness is the op's completion.
        self._in_flight: dict[int, Any] = {}
        self._errors: dict[int, BaseException] = {}
        # What `jax_debug_nans` looks for, until it is found; the error if a result has it.
        self._looked_for = looked_for
        self.suspect: FloatingPointError | None = None
        # What waiter threads are doing for this run.
        self._waiting: dict[int, waiters.Job] = {}
        # What neither a mark nor a thread tells of, oldest first, by engine.
        self._looked_at: dict[int, dict[int, Any]] = {COMPUTE: {}, H2D: {}, D2H: {}}
        self._looks_itself = link is None and looks_itself(program.device_sharding)
        self._link = None if link is None else LinkClock(link, self._queue.push)

    # -- the Engines protocol ----------------------------------------------------------

    now = staticmethod(time.perf_counter)

    def start(self, op: int) -> None:
        step = self._program.steps[op]
        try:
            if step.engine == COMPUTE:
                self._run(op, step)
            elif step.engine == NONE:
                self._release(step.reads[0])
            else:
                self._transfer(op, step)
        except Exception as error:
            raise self._failure(op, error) from error

    def wait(self, few_runs: int) -> list[tuple[int, float]]:
        look_again = time.perf_counter() + _LOOK_AGAIN
        while True:
            over = self._look_what_is_over()
            pause = 0.0 if over else self._pause
            events = self._queue.drain(pause, few_runs) + over
            if not events and time.perf_counter() >= look_again:
                events = self._silent_failures()
                look_again += _LOOK_AGAIN
            if events:
                return self._heard(events)

    def poll(self) -> list[tuple[int, float]]:
        """What `wait` would say, if anything, without sleeping."""
        return self._heard(self._queue.drain(0.0) + self._look_what_is_over())

    @property
    def _pause(self) -> float:
        return _LOOK_SOON if any(self._looked_at.values()) else _LOOK_AGAIN

    def _look_what_is_over(self) -> list[tuple[int, float]]:
        """Of what nobody else tells of. An engine is a queue: what came later is not over
        before what came first."""
        over: list[tuple[int, float]] = []
        for ops in self._looked_at.values():
            while ops:
                op, array = next(iter(ops.items()))
                if not array.is_ready():
                    break
                del ops[op]
                error = _failure_of(array)
                if error is not None:
                    self._errors[op] = error
                over.append((op, time.perf_counter()))
        return over

    def _heard(self, events: list[tuple[int, float]]) -> list[tuple[int, float]]:
        for op, _ in events:
            self._in_flight.pop(op, None)
            job = self._waiting.pop(op, None)
            slot = self._slot_of.pop(op, None)
            if slot is not None:
                self._marks.give_back(slot)
            elif self._program.steps[op].engine == H2D:
                self._let_go_of_source(op)
            if op in self._errors:
                error = self._errors[op]
                if job is not None:
                    job.give_up()  # its thread may still hold what it was for
                raise self._failure(op, error) from error
        return events

    def drain(self) -> None:
        """Waits for what is in flight, then lets go of every array."""
        for array in self._in_flight.values():
            with contextlib.suppress(Exception):
                array.block_until_ready()
        for job in self._waiting.values():
            job.give_up()
        if self._link is not None:
            self._link.close()
        for slot in self._slot_of.values():
            self._marks.retire(slot)
        self._in_flight.clear()
        self._slot_of.clear()
        self._looked_at.clear()
        self.arrays.clear()

    def close(self) -> None:
        """After a run that went well."""
        if self._link is not None:
            self._link.close()
        self._delete_donated()

    def let_go(self) -> None:
        """When all ops have been started, and those in flight are runs and offloads: lets
        go of every array, and of the caller's for good. XLA has what it still needs."""
        self._delete_donated()
        self.arrays.clear()
        # Of marks their own small results stay: they tell of runs that fail.
        for op in self._in_flight.keys() - self._slot_of.keys():
            del self._in_flight[op]
        # Nobody may look for long: a thread does, and lets go of them when they are over.
        for ops in self._looked_at.values():
            for op, array in ops.items():
                self._leave_to_a_thread(op, array, None)
            ops.clear()

    def _delete_donated(self) -> None:
        for instance in self._donated:
            # Inputs that nothing read, or that were copied to the device for good; others
            # are gone already, or will be dropped with what is in flight.
            array = self.arrays[instance]
            if array is not None and instance not in self._kept:
                array.delete()

    # -- performing --------------------------------------------------------------------

    def _run(self, op: int, step: Step) -> None:
        arrays = self.arrays
        operands = [arrays[i] for i in step.reads]
        looked_at = self._kept_to_look_at(step) if self._looked_for else []
        if step.marked:
            slot, token = self._marks.take()
            self._queue.arm(slot, op, True)
            self._slot_of[op] = slot
            *results, done = _called(step, operands, token)
        else:
            *results, done = _called(step, operands)
            self._wait_for(op, done)
        # Only the last result is kept until the run is over: the others' bytes may be
        # needed by then.
        self._in_flight[op] = done
        for i in step.used_up:
            arrays[i] = None
        for i, result in zip(step.writes, results, strict=True):
            arrays[i] = result
        if self._looked_for:
            self._look(op, step, looked_at)

    def _kept_to_look_at(self, step: Step) -> list[Any]:
        """What a run reads; of what it writes over, copies in the process's own memory."""
        return [
            np.array(self.arrays[i]) if i in step.used_up else self.arrays[i]
            for i in step.reads
        ]

    def _look(self, op: int, step: Step, operands: list[Any]) -> None:
        """Looks for NaNs in what a task wrote. The first that made one is to blame if a
        result has one, as under `jax.jit`; else nobody hears of it."""
        task = self._program.memgraph.ops[op].task
        assert task is not None
        if any(nans.is_bad(self.arrays[i], self._looked_for) for i in step.writes):
            self.suspect = self._program.blame(task, operands, self._looked_for)
            self._looked_for = ()

    def _transfer(self, op: int, step: Step) -> None:
        program = self._program
        to_host = step.engine == D2H
        target = program.host_sharding if to_host else program.device_sharding
        source, written = self.arrays[step.reads[0]], step.writes[0]
        with jax.profiler.TraceAnnotation(step.name):
            array = memory.transferred(source, target)
        self.arrays[written] = array
        self._in_flight[op] = array
        put = None
        if to_host and written in self._assembly.instances:
            put = self._assembly.putting(written, array, self._is_unread)
            if not self._is_unread(written):
                self.arrays[written] = None
        if self._link is None:
            self._wait_for(op, array, put)
        else:
            self._wait_for_link(op, source if to_host else None, array, put)

    def _is_unread(self, host_instance: int) -> bool:
        return self._host_readers[host_instance] > 0

    def _wait_for(self, op: int, array: Any, put: Callable[[], None] | None = None) -> None:
        """Has `op` heard of when `array` is ready, and put where it belongs."""
        if put is None and _is_ready(array):
            self._queue.push(op)  # a small copy is over before a thread could look
        elif put is None and self._looks_itself and type(array) is compat.array_type():
            self._looked_at[self._program.steps[op].engine][op] = array
        else:
            self._leave_to_a_thread(op, array, put)

    def _leave_to_a_thread(
        self, op: int, array: Any, put: Callable[[], None] | None
    ) -> None:
        """Lets a thread put `array` where it belongs when it is ready, and push `op`."""

        def over(error: BaseException | None, ready: float) -> None:
            self._note(op, error, put)
            self._queue.push(op)

        self._submit(op, waiters.Job([array], over))

    def _note(
        self, op: int, error: BaseException | None, put: Callable[[], None] | None
    ) -> None:
        """Keeps what went wrong; if nothing did, puts a part of a result in its place."""
        try:
            if error is None and put is not None:
                put()
        except BaseException as failure:
            error = failure
        if error is not None:
            self._errors[op] = error

    def _wait_for_link(
        self, op: int, source: Any, array: Any, put: Callable[[], None] | None
    ) -> None:
        """Like `_wait_for`; the simulated link then decides when the copy is over.

        A copy to the device can begin now, one to the host once its source is computed.
        """
        link, nbytes = self._link, self._program.schedule.moves[op]
        assert link is not None
        to_host, now = source is not None, time.perf_counter()
        arrays = [source, array] if to_host else [array]

        def deliver(error: BaseException | None, ready: float) -> None:
            self._note(op, error, put)
            link.deliver(op, nbytes, to_host, ready if to_host else now)

        if put is None and all(map(_is_ready, arrays)):
            deliver(_failure_of(array), now)
        else:
            self._submit(op, waiters.Job(arrays, deliver))

    def _submit(self, op: int, job: waiters.Job) -> None:
        self._waiting[op] = job
        waiters.submit(job)

    def _release(self, instance: int) -> None:
        array = self.arrays[instance]
        self.arrays[instance] = None
        if instance in self._donated and array is not None:
            array.delete()

    def _let_go_of_source(self, reload: int) -> None:
        """Frees a host copy after its last reader."""
        instance = self._program.steps[reload].reads[0]
        self._host_readers[instance] -= 1
        if self._host_readers[instance] == 0 and instance not in self._kept:
            self._release(instance)

    # -- failures ----------------------------------------------------------------------

    def _silent_failures(self) -> list[tuple[int, float]]:
        """Runs that are over although their mark never fired: they failed."""
        now = time.perf_counter()
        over = []
        for op, array in self._in_flight.items():
            if op in self._slot_of and array.is_ready():
                try:
                    array.block_until_ready()
                except Exception as error:
                    self._errors[op] = error
                over.append((op, now))
        # One may have fired in the meantime; then it is in the queue as well. A mark that
        # comes after all must not be taken for another's.
        fired = {op for op, _ in self._queue.drain(0.0)}
        for op, _ in over:
            if op not in fired:
                self._marks.retire(self._slot_of.pop(op))
        return [*over, *((op, now) for op in fired.difference(op for op, _ in over))]

    def _failure(self, op: int, error: BaseException) -> ExecutionError:
        op, error = self._cause(op, error)
        node = self._program.memgraph.ops[op]
        if node.task is not None:
            task = self._program.graph.tasks[node.task]
            what = f'task {task.id} "{task.name}" ({task.source or "unknown line"})'
        else:
            buffer = self._program.graph.buffers[
                self._program.memgraph.instances[node.reads[0]].buffer
            ]
            what = f"the {node.kind.value} of {buffer.name or f'buffer {buffer.id}'}"
            what += f" ({buffer.nbytes} bytes)"
        return ExecutionError(f"{what} failed: {error}")

    def _cause(self, op: int, error: BaseException) -> tuple[int, BaseException]:
        """What failed first, and how: what reads the results of a run that failed fails as
        well, and may be heard of before it."""
        steps = self._program.steps
        for instance in steps[op].reads if self.arrays else ():  # not let go of
            array = self.arrays[instance]
            if array is None or array.is_deleted():
                continue
            failure = _failure_of(array)
            wrote = (k for k, step in enumerate(steps) if instance in step.writes)
            writer = next(wrote, None)
            if failure is not None and writer is not None:
                return self._cause(writer, failure)
        return op, error


def _is_ready(array: Any) -> bool:
    """Whether an array is known to be there, or to have failed."""
    return type(array) is compat.array_type() and array.is_ready()


def _failure_of(ready: jax.Array) -> Exception | None:
    """What went wrong with an array that is ready."""
    try:
        ready.block_until_ready()
    except Exception as error:
        return error
    return None


def _called(step: Step, operands: Sequence[Any], *token: jax.Array) -> Sequence[Any]:
    assert step.call is not None
    with jax.profiler.TraceAnnotation(step.name):
        return step.call(*operands, *step.numbers, *token)


class MarkSlots:
    """A queue and the slots its marks fire on, for one run at a time."""

    def __init__(self, sharding: jax.sharding.Sharding):
        self.queue: CompletionQueue = make_queue()
        self.sharding = sharding
        # Each slot's number as a device array.
        self._tokens: dict[int, jax.Array] = {}
        self._free: list[tuple[int, jax.Array]] = []
        if self.queue.has_marks:
            (device,) = sharding.device_set
            for _ in range(Limits.on(device.platform).compute):
                self._free.append(self._open())

    def _open(self) -> tuple[int, jax.Array]:
        slot = self.queue.open_slot()
        self._tokens[slot] = memory.from_numpy(np.asarray(slot, np.int32), self.sharding)
        return slot, self._tokens[slot]

    @property
    def nbytes(self) -> int:
        """Device bytes of the slots' numbers, and of as many results of marks."""
        each = memory.ALIGNMENT if memory.is_on_cpu(self.sharding) else GRANULE
        return 2 * len(self._tokens) * each

    def take(self) -> tuple[int, jax.Array]:
        """A slot, and its number as a device array."""
        return self._free.pop() if self._free else self._open()

    def give_back(self, slot: int) -> None:
        """The slot's mark has fired."""
        self._free.append((slot, self._tokens[slot]))

    def retire(self, slot: int) -> None:
        """The slot's mark may never fire, or may fire later: never use it again."""
        self.queue.close_slot(slot)
        del self._tokens[slot]

    def close(self) -> None:
        """Gives every slot back to the process."""
        for slot in list(self._tokens):
            self.retire(slot)
        self._free.clear()


# Sets of slots that no run uses, by device; a run that went well returns its own.
_IDLE: dict[jax.sharding.Sharding, list[MarkSlots]] = {}


def has_idle_marks(sharding: jax.sharding.Sharding) -> bool:
    """Whether a set of slots on a device is there that no run uses."""
    return bool(_IDLE.get(sharding))


def borrow_marks(sharding: jax.sharding.Sharding) -> MarkSlots:
    """A set of slots on a device for one run."""
    # One call into C takes it, so that Ctrl-C and other threads find all or nothing done.
    try:
        return _IDLE[sharding].pop()
    except (KeyError, IndexError):
        return MarkSlots(sharding)


def return_marks(marks: MarkSlots) -> None:
    """After a run that went well, when none of its marks is still to fire."""
    _IDLE.setdefault(marks.sharding, []).append(marks)
