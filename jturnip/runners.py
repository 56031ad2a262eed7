"""What a compiled function is when called: one executable, or the loop over a plan."""

import collections
import contextlib
import enum
import functools
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jturnip import compat, placement
from jturnip.compiler import nans
from jturnip.errors import ArgumentError, ExecutionError
from jturnip.frontend.values import FlatJaxpr, Parts, Slice, Type
from jturnip.graph.memgraph import MemGraph
from jturnip.graph.plan import Plan
from jturnip.graph.taskgraph import TaskGraph
from jturnip.lowering import Split
from jturnip.placement import Arguments, Wanted, Whose
from jturnip.programs import Straight
from jturnip.runtime.engines import (
    DeviceEngines,
    MarkSlots,
    borrow_marks,
    make_program,
    return_marks,
)
from jturnip.runtime.hoststacks import Assembled, Assembly, rows_of
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.loop import run
from jturnip.runtime.report import RunReport
from jturnip.signature import Call


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
        call: Call,
        arguments: Arguments,
        plan: Plan,
        moves: "Moves",
        flat: FlatJaxpr | None,
        wanted: Wanted,
    ):
        self.whole = whole
        self.plan = plan
        self._seconds: float | None = None
        self._tree = call.tree
        # To find an equation that made a NaN; None for what cannot be flattened.
        self._flat = flat
        self._wanted = wanted
        self._is_plain = wanted.is_nothing and not moves.arguments
        device = arguments.device
        self._device = placement.sharding(device, on_host=False)
        self._host = placement.sharding(device, on_host=True)
        self._moves = moves
        self._given_up = tuple(
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
        began = time.perf_counter()
        try:
            if self._is_plain:
                args, kwargs = jax.tree.unflatten(self._tree, leaves)
                results = self.whole(*args, **kwargs)
            else:
                results = self._run_with_moves(leaves)
        except Exception as error:
            if compat.is_nan_error(error) and self._flat is not None:
                everything = range(len(self._flat.equations))
                alive = [
                    leaf
                    if isinstance(leaf, jax.Array) and leaf.is_deleted()
                    else jax.device_put(leaf, self._device)
                    for leaf in leaves
                ]
                raise nans.blame(
                    self._flat, everything, self._flat.inputs, alive, nans.looked_for()
                ) from None
            raise
        self._seconds = time.perf_counter() - began
        return results

    def _run_with_moves(self, leaves: Sequence[Any]) -> Any:
        placed = list(leaves)
        for i in self._moves.arguments:
            placed[i] = jax.device_put(leaves[i], self._device)
        args, kwargs = jax.tree.unflatten(self._tree, placed)
        placed.clear()
        results, tree = jax.tree.flatten(self.whole(*args, **kwargs))
        for i in self._moves.results:
            results[i] = jax.device_put(results[i], self._host)
        for i in self._given_up:
            leaves[i].delete()
        return jax.tree.unflatten(tree, self._wanted.finish(results))


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
        self._constants = tuple(
            (start[buffers[v]], placement.placed_for_good(array, self._device))
            for v, array in flat.constants
        )
        self._donated = frozenset(i for i, w in self._arguments if w.donated)
        self._cut = _cut_arrays(split, start)
        ends: dict[int, int] = dict(
            zip(program.graph.outputs, memgraph.outputs_at_end, strict=True)
        )
        self._results, self._assembled = _results(split, start, ends)
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
        held = {i: compat.copy_to(arrays[i], device) for i in self._resident}
        self._held = jax.block_until_ready(held)

    def let_go(self) -> None:
        """Lets go of what `hold` put on the device."""
        self._held = {}

    def run(self, leaves: Sequence[Any], keep: frozenset[int] = frozenset()) -> list[Any]:
        """Runs once; returns the flat results.

        Args:
          leaves: the flat arguments.
          keep: positions of donated arguments that are not given up for once.
        """
        program = self._program
        marks: MarkSlots | None = None
        arrays: list[Any] = [None] * len(program.memgraph.instances)
        results: list[Any] = []
        try:
            self._check_donated_once(leaves, keep)
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
            with nans.unheard() if looked_for else contextlib.nullcontext():
                report = run(program.schedule, engines, self.plan.strategy)
            of = {
                Origin.ARGUMENT: leaves,
                Origin.INSTANCE: arrays,
                Origin.ASSEMBLED: assembly.finish(program.host_sharding),
            }
            for origin, at in self._results:
                results.append(self._settled(of[origin][at], origin))
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
            let_go(error)
            if not isinstance(error, KeyboardInterrupt) and _is_interrupt(error):
                raise KeyboardInterrupt from error
            raise
        return_marks(marks)
        self.last_run = report
        return results

    def _settled(self, array: Any, origin: "Origin") -> Any:
        """A result as `jax.jit` would give it out; what is in host memory is committed."""
        if origin is Origin.ARGUMENT:
            return array
        committed = placement.is_on_host(array) or self._committed
        return compat.settled(array, committed)

    def _check_donated_once(self, leaves: Sequence[Any], keep: frozenset[int]) -> None:
        """Raises ArgumentError for an array that is donated and passed a second time."""
        if not self._donated or len({id(leaf) for leaf in leaves}) == len(leaves):
            return
        places = collections.Counter(id(leaf) for leaf in leaves)
        for i, (instance, _) in enumerate(self._arguments):
            given_up = instance in self._donated and i not in keep
            if given_up and places[id(leaves[i])] > 1:
                raise ArgumentError(
                    f"argument {self._names[i]} is donated and passed a second time. Pass a"
                    " copy, or do not donate it."
                )

    def _place(self, leaves: Sequence[Any], arrays: list[Any]) -> None:
        for (instance, whose), leaf in zip(self._arguments, leaves, strict=True):
            arrays[instance] = placement.in_its_place(leaf, whose, self._device)
        for instance, array in self._constants:
            arrays[instance] = array
        for source, instances, cuts, keep in self._cut:
            rows = rows_of(arrays[source], cuts, keep)
            for instance, array in zip(instances, rows, strict=True):
                arrays[instance] = array
        for instance, array in self._held.items():
            arrays[instance] = array


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


def _cut_arrays(
    split: Split, start: dict[int, int]
) -> tuple[tuple[int, tuple[int, ...], tuple[tuple[int, int], ...], bool], ...]:
    """Arrays in host memory that are read in rows: instance of the array, instances of
    the rows, first and past last row of each, whether the array is there next time."""
    donated = {
        v
        for v, w in zip(split.flat.inputs, split.arguments.whose, strict=True)
        if w is not Whose.CALLER_HOST
    }
    of_source: dict[int, list[Slice]] = {}
    for cut in split.flat.slices:
        of_source.setdefault(cut.source, []).append(cut)
    at = lambda value: start[split.buffers[value]]
    return tuple(
        (
            at(source),
            tuple(at(c.value) for c in cuts),
            tuple((c.start, c.stop) for c in cuts),
            source not in donated,
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
    parts, row = [], 0
    for v in output.values:
        rows = flat.types[v].shape[0]
        parts.append((ends[buffers[v]], row, row + rows))
        row += rows
    argument = split.reuses.get(position)
    readers: tuple[tuple[int, ...], ...] = ()
    if argument is not None:
        source = flat.inputs[argument]
        cuts = [c for c in flat.slices if c.source == source]
        readers = tuple(
            (
                start[buffers[source]],
                *(
                    start[buffers[c.value]]
                    for c in cuts
                    if c.start < end and begin < c.stop
                ),
            )
            for _, begin, end in parts
        )
    return Assembled(output.type, tuple(parts), argument, readers)


def _raise_failures(results: Sequence[Any]) -> None:
    try:
        jax.block_until_ready(results)
    except Exception as error:
        raise ExecutionError(f"a result could not be computed: {error}") from error


def let_go(error: BaseException | None) -> None:
    """Clears the finished frames that an error would keep alive, and our arrays in them.

    Notebooks keep the last error, and with it every local variable on its way.
    """
    while error is not None:
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


def moves_of(arguments: Arguments, traced: Any, wanted: Wanted) -> Moves:
    """Host arguments go to the device; results that re-use donated ones come back, unless
    they are wanted elsewhere."""
    types, results = (
        [Type.of(a) for a in jax.tree.leaves(infos)]
        for infos in (traced.args_info, traced.out_info)
    )
    inward = tuple(
        i
        for i, w in enumerate(arguments.whose)
        if w in (Whose.CALLER_HOST, Whose.DONATED_HOST)
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


def whole_bytes(whole: Any) -> int:
    """Device bytes of a whole executable, by XLA's own analysis."""
    memory = whole.memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def whole_plan(whole: Any, moves: Moves, gpu_bytes: int) -> Plan:
    return Plan(
        gpu_bytes=gpu_bytes,
        peak_bytes=whole_bytes(whole),
        h2d_bytes=moves.h2d_bytes,
        d2h_bytes=moves.d2h_bytes,
        host_bytes=0,
        predicted_seconds=0.0,
        lower_bound_seconds=0.0,
        strategy="whole",
        taskgraph=TaskGraph((), (), ()),
        memgraph=MemGraph(gpu_bytes, (), (), (), ()),
    )
