"""What a compiled function is when called: one executable, or the loop over a plan."""

import collections
import contextlib
import dataclasses
import enum
import functools
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from jturnip import compat, memory, placement
from jturnip.compiler import nans
from jturnip.errors import ArgumentError, ExecutionError
from jturnip.frontend.hints import calls_out
from jturnip.frontend.values import FlatJaxpr, Parts, Slice, Type, Window, is_packed
from jturnip.graph.memgraph import MemGraph, OpKind
from jturnip.graph.plan import Plan
from jturnip.graph.taskgraph import TaskGraph
from jturnip.lowering import Split, unread
from jturnip.placement import Arguments, Wanted, Whose
from jturnip.programs import Straight
from jturnip.runtime.engines import (
    DeviceEngines,
    MarkSlots,
    borrow_marks,
    has_idle_marks,
    make_program,
    return_marks,
)
from jturnip.runtime.hoststacks import Assembled, Assembly, parts_of
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.loop import Running
from jturnip.runtime.report import RunReport
from jturnip.runtime.turns import Turn


class Runner(Protocol):
    """What takes flat arguments and gives results in their tree."""

    plan: Plan

    @property
    def last_run(self) -> RunReport | None:
        """What the last finished run did."""
        ...

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs once."""
        ...


class WholeRunner:
    """Plain `jax.jit`, for a function that fits."""

    def __init__(
        self,
        whole: Any,
        in_tree: Any,
        arguments: Arguments,
        plan: Plan,
        moves: "Moves",
        flat: FlatJaxpr | None,
        wanted: Wanted,
        turn: Turn,
        in_places: Sequence[Any],
    ):
        self.whole = whole
        self._turn = turn
        # Where the user says that each argument is, or None.
        self._in_places = tuple(in_places)
        self.plan = plan
        self._seconds: float | None = None
        self._tree = in_tree
        # To find an equation that made a NaN; None for what cannot be flattened.
        self._flat = flat
        self._wanted = wanted
        self._copies = bool(moves.arguments) or any(self._in_places)
        self._is_plain = wanted.is_nothing and not self._copies
        device = arguments.device
        self._device = placement.sharding(device, on_host=False)
        self._moves = moves
        self._has_effects = flat is None or any(e.effects for e in flat.equations)
        self._names = arguments.names
        self._given_up = frozenset(
            i for i, w in enumerate(arguments.whose) if w is Whose.DONATED_HOST
        )

    @property
    def last_run(self) -> RunReport | None:
        if self._seconds is None:
            return None
        plan = self.plan
        moved = plan.h2d_bytes, plan.d2h_bytes
        return RunReport("whole", self._seconds, 0.0, *moved, plan.peak_bytes)

    def run(self, leaves: Sequence[Any]) -> Any:
        began, outer = time.perf_counter(), sys.exc_info()[1]
        try:
            if self._has_effects:
                compat.forget_failed_tokens()
            if self._is_plain:
                args, kwargs = jax.tree.unflatten(self._tree, leaves)
                self._turn.leave()
                results = self.whole(*args, **kwargs)
                self._turn.dispatched(results)
            else:
                results = self._run_with_moves(leaves)
        except Exception as error:
            let_go(error, outer)
            if compat.is_nan_error(error) and self._flat is not None:
                raise self._blame(leaves) from None
            raise
        self._seconds = time.perf_counter() - began
        return results

    def _blame(self, leaves: Sequence[Any]) -> FloatingPointError:
        assert self._flat is not None
        alive = [
            leaf
            if isinstance(leaf, jax.Array) and leaf.is_deleted()
            else memory.placed(leaf, self._device)
            for leaf in leaves
        ]
        everything, inputs = range(len(self._flat.equations)), self._flat.inputs
        return nans.blame(self._flat, everything, inputs, alive, nans.looked_for())

    def _run_with_moves(self, leaves: Sequence[Any]) -> Any:
        check_donated_once(leaves, self._given_up, self._names)
        plan, turn, moves = self.plan, self._turn, self._moves
        turn.check()
        with turn.lock:
            turn.leave()
            turn.make_room(plan.gpu_bytes - plan.peak_bytes)
            placed = list(map(memory.placed, leaves, self._in_places))
            for i in moves.arguments:
                placed[i] = memory.moved(placed[i], on_host=False)
            args, kwargs = jax.tree.unflatten(self._tree, placed)
            placed.clear()
            results, tree = jax.tree.flatten(self.whole(*args, **kwargs))
            del args, kwargs
            if self._copies and results:
                turn.copied(plan.peak_bytes, min(results, key=lambda r: r.nbytes))
            turn.dispatched(results)
            for i in moves.results:
                results[i] = memory.moved(results[i], on_host=True)
            results = memory.finished(results, self._wanted)
        for i in self._given_up:
            leaves[i].delete()
        return jax.tree.unflatten(tree, results)


class SplitRunner:
    """The event loop over a plan; one run at a time."""

    def __init__(self, straight: Straight, link: SimulatedLink | None):
        self.plan = straight.plan
        self.last_run: RunReport | None = None
        split = straight.split
        self._program = program = make_program(
            split.graph,
            straight.plan.memgraph,
            straight.schedule,
            split.executables,
            split.numbers,
            split.arguments.device,
            functools.partial(_blame, split),
        )
        self._link = link
        self._names = split.arguments.names
        self._committed = split.arguments.committed
        self._device = split.arguments.device
        memgraph = program.memgraph
        start: dict[int, int] = {
            int(memgraph.instances[i].buffer): i for i in memgraph.inputs_at_start
        }
        buffers, flat = split.buffers, split.flat
        # Which instance each argument is at the start.
        self._arguments = tuple(
            (start[buffers[v]], w)
            for v, w in zip(flat.inputs, split.arguments.whose, strict=True)
        )
        # Which instances closed-over arrays are.
        self._closed_over = tuple(
            (start[buffers[v]], memory.closed_over(array, self._device))
            for v, array in flat.constants
        )
        self._ignored = frozenset(start[buffers[v]] for v in unread(flat))
        self._donated = frozenset(i for i, w in self._arguments if w.donated)
        self._given_up = frozenset(
            i for i, (_, w) in enumerate(self._arguments) if w.donated
        )
        self._cut = _cut_arrays(split, start)
        ends: dict[int, int] = dict(
            zip(program.graph.outputs, memgraph.outputs_at_end, strict=True)
        )
        self._results, self._assembled = _results(split, start, ends)
        self._ends_in_python = (
            link is not None or bool(self._assembled) or _ends_in_python(split, memgraph)
        )
        # Instances that are put on the device for many runs; their arrays, while they are.
        self._resident = tuple(start[b] for b in split.resident)
        self._held: dict[int, Any] = {}
        self.resident_bytes = straight.resident_bytes

    def hold(self, leaves: Sequence[Any]) -> None:
        """Puts on the device what the plan takes to be there, for runs with the same
        arrays in host memory, until `let_go`."""
        if not self._resident:
            return
        arrays: list[Any] = [None] * len(self._program.memgraph.instances)
        self._place(leaves, arrays)
        device = self._program.device_sharding
        with jax.transfer_guard("allow"):
            held = {i: memory.transferred(arrays[i], device) for i in self._resident}
        self._held = jax.block_until_ready(held)

    def let_go(self) -> None:
        """Lets go of what `hold` put on the device."""
        self._held = {}

    def leave(self) -> None:
        """Lets go of closed-over arrays; a run puts them in their places again."""
        for _, closed_over in self._closed_over:
            closed_over.leave()

    def run(self, leaves: Sequence[Any], keep: frozenset[int] = frozenset()) -> list[Any]:
        """Runs once, to the end; returns the flat results.

        Args:
          leaves: the flat arguments.
          keep: positions of donated arguments that are not given up for once.
        """
        results, _ = self._run(leaves, keep, to_the_end=True)
        return results

    def begin(self, leaves: Sequence[Any]) -> tuple[list[Any], "Rest | None"]:
        """Runs until nothing needs Python any more.

        Returns:
          The flat results, which may not be ready; and the rest of the run, None if it is
          over. It is to be finished before anything else is put on the device.
        """
        return self._run(leaves, frozenset(), to_the_end=not self._leaves_a_rest(leaves))

    def _leaves_a_rest(self, leaves: Sequence[Any]) -> bool:
        """Whether the last runs and offloads may be left to XLA: not where the host has to
        look at them, nor where they may read memory that the caller can change."""
        if self._ends_in_python or nans.looked_for():
            return False
        return not any(
            w.ours and not w.on_host and isinstance(leaf, np.ndarray)
            for leaf, (_, w) in zip(leaves, self._arguments, strict=True)
        )

    def _run(
        self, leaves: Sequence[Any], keep: frozenset[int], to_the_end: bool
    ) -> tuple[list[Any], "Rest | None"]:
        program = self._program
        marks: MarkSlots | None = None
        arrays: list[Any] = [None] * len(program.memgraph.instances)
        results: list[Any] = []
        outer = sys.exc_info()[1]
        try:
            given_up = self._given_up - keep
            check_donated_once(leaves, given_up, self._names)
            if not has_idle_marks(program.device_sharding):
                Rest.finish_some()
            marks = borrow_marks(program.device_sharding)
            assembly = Assembly(self._assembled)
            leaves = assembly.take_over(leaves, keep)
            staying = {self._arguments[i][0] for i in (*assembly.arguments, *keep)}
            self._place(leaves, arrays)
            donated = self._donated - staying
            looked_for = nans.looked_for()
            engines = DeviceEngines(
                program, arrays, donated, marks, assembly, self._link, looked_for
            )
            with contextlib.ExitStack() as ours:
                # What the plan moves is what the user asked for with a budget.
                ours.enter_context(jax.transfer_guard("allow"))
                if looked_for:
                    ours.enter_context(nans.unheard())
                running = Running(program.schedule, engines, self.plan.strategy)
                running.start_all()
                report = running.finish() if to_the_end else None
            of = {
                Origin.ARGUMENT: leaves,
                Origin.INSTANCE: arrays,
                Origin.ASSEMBLED: assembly.finish(program.host_sharding),
            }
            for origin, at in self._results:
                results.append(self._settled(of[origin][at], origin))
            # The marks' own few bytes, and what is kept for once although donated.
            once = keep & self._given_up
            beside = marks.nbytes + memory.device_bytes(leaves[i] for i in once)
            if report is None:
                engines.let_go()
                return results, Rest(running, engines, marks, beside)
            _raise_failures(results)
            if engines.suspect is not None:
                if any(nans.is_bad(result, looked_for) for result in results):
                    raise engines.suspect
            engines.close()
        except BaseException as error:
            arrays.clear()
            results.clear()
            if marks is not None:
                marks.close()
            compat.forget_failed_tokens()
            let_go(error, outer)
            if not isinstance(error, KeyboardInterrupt) and _is_interrupt(error):
                raise KeyboardInterrupt from error
            raise
        return_marks(marks)
        self.last_run = _with_bytes(report, beside)
        return results, None

    def _settled(self, array: Any, origin: "Origin") -> Any:
        """A result as `jax.jit` would give it out; what is in host memory is committed."""
        if origin is Origin.ARGUMENT:
            return array
        if not isinstance(array, jax.Array):  # JAX's zeros of no type, a constant
            return array
        committed = placement.is_on_host(array) or self._committed
        return compat.settled(array, committed)

    def _place(self, leaves: Sequence[Any], arrays: list[Any]) -> None:
        read = [i for i, (at, _) in enumerate(self._arguments) if at not in self._ignored]
        placed = memory.in_their_places(
            [leaves[i] for i in read], [self._arguments[i][1] for i in read], self._device
        )
        for i, array in zip(read, placed, strict=True):
            arrays[self._arguments[i][0]] = array
        for instance, closed_over in self._closed_over:
            arrays[instance] = closed_over.array
        for source, instances, cuts in self._cut:
            rows = parts_of(arrays[source], cuts)
            for instance, array in zip(instances, rows, strict=True):
                arrays[instance] = array
        for instance, array in self._held.items():
            arrays[instance] = array


class Rest:
    """What is left of a run that has given its results: XLA computes them without Python.

    Who next puts something on the device for the same function finishes it first. Its marks
    are lent to other runs once it is over. Thread-safe.
    """

    # No more than so many are left unfinished: each has slots of its own.
    MOST = 32
    _all: ClassVar[list["weakref.ref[Rest]"]] = []

    def __init__(
        self,
        running: Running,
        engines: DeviceEngines,
        marks: MarkSlots,
        beside_bytes: int,
    ):
        # None once it is over: nothing of the program is kept then.
        self._unfinished: tuple[Running, DeviceEngines] | None = running, engines
        self._marks = marks
        self._beside_bytes = beside_bytes
        self._report: RunReport | None = None
        self._lock = threading.Lock()
        self._all.append(weakref.ref(self))

    @classmethod
    def finish_some(cls) -> None:
        """Finishes those that are over, and the oldest of too many."""
        refs = list(cls._all)
        for at, ref in enumerate(refs):
            rest = ref()
            if rest is not None:
                rest.finish(wait=at < len(refs) - cls.MOST)
            if rest is None or rest._unfinished is None:
                with contextlib.suppress(ValueError):  # another thread may be at it too
                    cls._all.remove(ref)

    def finish(self, wait: bool = True) -> RunReport | None:
        """Waits for the end, or without that only looks whether it has come.

        Returns:
          What the run did; None if it failed, which its results say to whoever looks at
          them, or if it is not known to be over.
        """
        with self._lock:
            if self._unfinished is not None:
                self._finish(*self._unfinished, wait)
        return self._report

    def _finish(self, running: Running, engines: DeviceEngines, wait: bool) -> None:
        outer = sys.exc_info()[1]
        try:
            if not wait and not running.tell(engines.poll()):
                return
            report = running.finish()
        except BaseException as error:
            self._unfinished = None
            self._marks.close()
            let_go(error, outer)
            if isinstance(error, Exception) and not _is_interrupt(error):
                return
            raise
        self._unfinished = None
        return_marks(self._marks)
        self._report = _with_bytes(report, self._beside_bytes)


def _with_bytes(report: RunReport, more: int) -> RunReport:
    return dataclasses.replace(report, peak_bytes=report.peak_bytes + more)


def check_donated_once(
    leaves: Sequence[Any], given_up: Collection[int], names: Sequence[str]
) -> None:
    """Raises ArgumentError for an array that is donated and passed a second time.

    Args:
      leaves: the flat arguments.
      given_up: positions of those that are donated.
      names: what to call each.
    """
    if not given_up or len({id(leaf) for leaf in leaves}) == len(leaves):
        return
    places = collections.Counter(id(leaf) for leaf in leaves)
    for i in given_up:
        if places[id(leaves[i])] > 1:
            raise ArgumentError(
                f"argument {names[i]} is donated and passed a second time. Pass a copy, or"
                " do not donate it."
            )


def _blame(
    split: Split, task: int, operands: Sequence[Any], kinds: nans.Kinds
) -> FloatingPointError:
    group = split.groups[task]
    return nans.blame(split.flat, group.equations, group.inputs, operands, kinds)


class Origin(enum.Enum):
    """Where a result comes from."""

    # An argument that is returned as it is, by its position.
    ARGUMENT = "argument"
    # An instance of the plan.
    INSTANCE = "instance"
    # One that is put together in host memory.
    ASSEMBLED = "assembled"


def _ends_in_python(split: Split, memgraph: MemGraph) -> bool:
    """Whether a run is not over for Python when all of its ops have been started: it calls
    code whose errors we tell of, or reloads a result, whose copy on the host is dropped."""
    ends = set(memgraph.outputs_at_end)
    return any(e.effects or calls_out(e.origin) for e in split.flat.equations) or any(
        op.kind is OpKind.RELOAD and not ends.isdisjoint(op.writes) for op in memgraph.ops
    )


def _cut_arrays(
    split: Split, start: dict[int, int]
) -> tuple[tuple[int, tuple[int, ...], tuple[Window, ...]], ...]:
    """Arrays in host memory that are read in parts: instance of the array, instances of
    the parts, and where each is."""
    of_source: dict[int, list[Slice]] = {}
    for cut in split.flat.slices:
        of_source.setdefault(cut.source, []).append(cut)
    at = lambda value: start[split.buffers[value]]
    return tuple(
        (
            at(source),
            tuple(at(c.value) for c in cuts),
            tuple(c.window for c in cuts),
        )
        for source, cuts in of_source.items()
    )


def _results(
    split: Split, start: dict[int, int], ends: dict[int, int]
) -> tuple[tuple[tuple[Origin, int], ...], tuple[Assembled, ...]]:
    """Where each result comes from, and those that are put together."""
    flat, buffers = split.flat, split.buffers
    places = {v: i for i, v in enumerate(flat.inputs)}
    results: list[tuple[Origin, int]] = []
    assembled: list[Assembled] = []
    for position, output in enumerate(flat.outputs):
        if isinstance(output, Parts):
            results.append((Origin.ASSEMBLED, len(assembled)))
            assembled.append(_assembled(split, position, output, start, ends))
        elif output in places:
            results.append((Origin.ARGUMENT, places[output]))
        else:
            results.append((Origin.INSTANCE, ends[buffers[output]]))
    return tuple(results), tuple(assembled)


def _assembled(
    split: Split,
    position: int,
    output: Parts,
    start: dict[int, int],
    ends: dict[int, int],
) -> Assembled:
    flat, buffers = split.flat, split.buffers
    parts = tuple(
        (ends[buffers[v]], window)
        for v, window in zip(output.values, output.windows, strict=True)
    )
    argument = split.reuses.get(position)
    readers: tuple[tuple[int, ...], ...] = ()
    if argument is not None:
        source = flat.inputs[argument]
        cuts = [c for c in flat.slices if c.source == source]
        readers = tuple(
            (
                start[buffers[source]],
                *(start[buffers[c.value]] for c in cuts if c.window.meets(window)),
            )
            for _, window in parts
        )
    return Assembled(output.type, parts, argument, readers)


def _raise_failures(results: Sequence[Any]) -> None:
    try:
        jax.block_until_ready(results)
    except Exception as error:
        raise ExecutionError(f"a result could not be computed: {error}") from error


def let_go(error: BaseException | None, outer: BaseException | None) -> None:
    """Clears the finished frames that an error would keep alive, and our arrays in them.

    Notebooks keep the last error, and with it every local variable on its way.

    Args:
      error: what was raised.
      outer: what the caller was handling already, whose frames are not ours.
    """
    seen: set[int] = set()
    while error is not None and error is not outer and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C came inside JAX's C++, which makes other errors of it."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or "KeyboardInterrupt" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True)
class Moves:
    """What a call of a whole function moves: positions of arguments and results."""

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    h2d_bytes: int
    d2h_bytes: int


def moves_of(
    arguments: Arguments, traced: Any, wanted: Wanted, pruned: Collection[int]
) -> Moves:
    """Host arguments go to the device, but those that XLA prunes; results that re-use
    donated ones come back, unless they are wanted elsewhere."""
    types, results = (
        [Type.of(a) for a in jax.tree.leaves(infos)]
        for infos in (traced.args_info, traced.out_info)
    )
    inward = tuple(
        i
        for i, w in enumerate(arguments.whose)
        if w in (Whose.CALLER_HOST, Whose.DONATED_HOST) and i not in pruned
    )
    pairs = list(zip(types, arguments.whose, strict=True))
    outward = tuple(
        sorted(
            (
                placement.reused_arguments(pairs, results).keys()
                | wanted.places(on_host=True)
            )
            - wanted.places(on_host=False)
        )
    )
    return Moves(
        inward,
        outward,
        sum(types[i].nbytes for i in inward),
        sum(results[i].nbytes for i in outward),
    )


def whole_bytes(whole: Any, closed_over: Sequence[Any]) -> int:
    """Device bytes of a whole executable, by XLA's own analysis.

    That leaves out what is closed over: a copy is part of the executable, and the array
    itself may be on the device too.
    """
    sizes = whole.memory_analysis()
    return int(
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.temp_size_in_bytes
        + sum(Type.of(array).nbytes for array in closed_over)
        + memory.device_bytes(closed_over)
    )


def least_whole_bytes(
    flat: FlatJaxpr,
    arguments: Arguments,
    pruned: Collection[int],
    closed_over: Sequence[Any],
) -> int:
    """Device bytes that a function surely needs as one executable: its arguments, its
    results but those that may take the memory of donated arguments, and, as `whole_bytes`
    counts it, what it closes over.

    What is between them, fusion may never write down, so nothing is said of it.
    """
    inputs = [(i, _least_bytes(flat.types[v])) for i, v in enumerate(flat.inputs)]
    read = sum(nbytes for i, nbytes in inputs if i not in pruned)
    donated = sum(nbytes for i, nbytes in inputs if arguments.whose[i].donated)
    by_equations = {v for e in flat.equations for v in e.outputs}
    results = by_equations.intersection(flat.written_outputs)
    written = sum(_least_bytes(flat.types[v]) for v in results)
    constants = sum(Type.of(array).nbytes for array in closed_over)
    return read + max(0, written - donated) + constants + memory.device_bytes(closed_over)


def _least_bytes(t: Type) -> int:
    """Bytes of a value as XLA may pack it."""
    return t.nbytes // 8 if is_packed(t.dtype) else t.nbytes


def whole_plan(nbytes: int, moves: Moves, gpu_bytes: int) -> Plan:
    return Plan(
        gpu_bytes=gpu_bytes,
        peak_bytes=nbytes,
        h2d_bytes=moves.h2d_bytes,
        d2h_bytes=moves.d2h_bytes,
        host_bytes=0,
        predicted_seconds=0.0,
        lower_bound_seconds=0.0,
        strategy="whole",
        taskgraph=TaskGraph((), (), ()),
        memgraph=MemGraph(gpu_bytes, (), (), (), ()),
    )
