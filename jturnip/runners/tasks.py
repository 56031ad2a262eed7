"""Tasks under one plan, run by the event loop."""

import contextlib
import dataclasses
import enum
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from jturnip import compat, memory, placement
from jturnip.compiler import nans
from jturnip.frontend.hints import calls_out
from jturnip.frontend.values import Parts, Slice, Window
from jturnip.graph.memgraph import MemGraph, OpKind
from jturnip.graph.report import RunReport
from jturnip.programs.places import unread
from jturnip.programs.records import Split, Straight
from jturnip.runners.failures import (
    check_donated_once,
    is_interrupt,
    let_go,
    raise_failures,
)
from jturnip.runtime.engines import (
    DeviceEngines,
    MarkSlots,
    borrow_marks,
    has_idle_marks,
    make_program,
    return_marks,
)
from jturnip.runtime.hoststacks import Assembled, Assembly, Views, parts_of
from jturnip.runtime.kept import Kept, Source
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.loop import Running
from jturnip.runtime.state import Limits


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
        # Instances that are put on the device for many runs, and what they are copies of.
        self._resident = _residents(split, start, self._closed_over)
        # Positions of the arguments among them.
        self.resident_arguments = frozenset(
            r.argument for r in self._resident if r.argument is not None
        )

    @property
    def holds(self) -> bool:
        """Whether the plan takes something to be on the device: then `hold` comes first."""
        return bool(self._resident)

    def sources(self, leaves: Sequence[Any]) -> list[Source]:
        """What the arrays are copies of that the plan takes to be on the device.

        Args:
          leaves: the flat arguments; others than `resident_arguments` may be None.
        """
        return [r.source(leaves) for r in self._resident]

    def hold(self, leaves: Sequence[Any], kept: Kept) -> "Held":
        """Puts on the device what the plan takes to be there, for runs with the same
        arrays in host memory. The copies may not be there yet: tasks wait.

        Args:
          leaves: the flat arguments; others than `resident_arguments` may be None.
          kept: what is there already, and stays.
        """
        sources = {r.instance: r.source(leaves) for r in self._resident}
        copies = {i: kept.copy_of(source) for i, source in sources.items()}
        # Without a closure over the copies: until Python 3.12 it outlives Ctrl-C.
        pairs = zip(self._resident, copies.values(), strict=True)
        missing = [r for r, copy in pairs if copy is None]
        on_host, moved = self._on_host(missing, leaves), 0
        with jax.transfer_guard("allow"):
            for r in missing:
                array = on_host[r.instance]
                copy = memory.transferred(array, self._program.device_sharding)
                kept.keep(sources[r.instance], copy)
                copies[r.instance] = copy
                moved += array.nbytes
        return Held(copies, moved)

    def _on_host(
        self, residents: Sequence["_Resident"], leaves: Sequence[Any]
    ) -> dict[int, Any]:
        """Arrays in host memory, or parts of them, of which there are to be copies; by
        instance. Each array is looked at once for all of its parts."""
        of_source: dict[tuple[int | None, int], list[_Resident]] = {}
        for r in residents:
            of_source.setdefault((r.argument, id(r.closed_over)), []).append(r)
        arrays: dict[int, Any] = {}
        for same in of_source.values():
            whole = self._whole(same[0], leaves)
            cuts = {r.instance: r.window for r in same if r.window is not None}
            arrays.update((r.instance, whole) for r in same if r.window is None)
            if cuts:
                arrays.update(zip(cuts, parts_of(whole, list(cuts.values())), strict=True))
        return arrays

    def _whole(self, resident: "_Resident", leaves: Sequence[Any]) -> Any:
        """The array in host memory that is copied, or of which parts are."""
        at = resident.argument
        if at is None:
            assert resident.closed_over is not None
            return resident.closed_over.array
        _, whose = self._arguments[at]
        return memory.in_their_places([leaves[at]], [whose], self._device)[0]

    def leave(self) -> None:
        """Lets go of closed-over arrays; a run puts them in their places again."""
        for _, closed_over in self._closed_over:
            closed_over.leave()

    def run(
        self,
        leaves: Sequence[Any],
        keep: frozenset[int] = frozenset(),
        held: "Held | None" = None,
        views: Views | None = None,
    ) -> list[Any]:
        """Runs once, to the end; returns the flat results.

        Args:
          leaves: the flat arguments.
          keep: positions of donated arguments that are not given up for once.
          held: what `hold` put on the device; not needed where the plan has nothing there.
          views: in a loop, parts of what is the same in all iterations.
        """
        results, _ = self._run(
            leaves, keep, held, to_the_end=True, views=views or Views(())
        )
        return results

    def begin(self, leaves: Sequence[Any], held: "Held") -> tuple[list[Any], "Rest | None"]:
        """Runs until nothing needs Python any more.

        Args:
          leaves: the flat arguments.
          held: what `hold` put on the device.

        Returns:
          The flat results, which may not be ready; and the rest of the run, None if it is
          over. It is to be finished before anything else is put on the device.
        """
        to_the_end = not self._leaves_a_rest(leaves)
        return self._run(leaves, frozenset(), held, to_the_end, Views(()))

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
        self,
        leaves: Sequence[Any],
        keep: frozenset[int],
        held: "Held | None",
        to_the_end: bool,
        views: Views,
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
            self._place(leaves, arrays, views)
            for instance, copy in held.copies.items() if held is not None else ():
                arrays[instance] = copy
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
                limits = Limits.on(self._device.platform)
                running = Running(program.schedule, engines, self.plan.strategy, limits)
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
            raise_failures(results)
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
            if not isinstance(error, KeyboardInterrupt) and is_interrupt(error):
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

    def _place(self, leaves: Sequence[Any], arrays: list[Any], views: Views) -> None:
        read = [i for i, (at, _) in enumerate(self._arguments) if at not in self._ignored]
        placed = memory.in_their_places(
            [leaves[i] for i in read], [self._arguments[i][1] for i in read], self._device
        )
        for i, array in zip(read, placed, strict=True):
            arrays[self._arguments[i][0]] = array
        closed_over = dict(self._closed_over)
        for instance, held in closed_over.items():
            arrays[instance] = held.array
        for source, instances, cuts in self._cut:
            rows = views.parts_of(arrays[source], cuts, same=source in closed_over)
            for instance, array in zip(instances, rows, strict=True):
                arrays[instance] = array


class Held(NamedTuple):
    """What is on the device for many runs of a plan."""

    # By the instance.
    copies: dict[int, Any]
    # Bytes that had to be moved.
    moved_bytes: int

    @property
    def arrays(self) -> list[Any]:
        """All copies."""
        return list(self.copies.values())


class Rest:
    """What is left of a run that has given its results: XLA computes them without Python.

    Who next puts something on the device for the same function finishes it first. Its marks
    are lent to other runs once it is over. Thread-safe.
    """

    # No more than so many are left unfinished: each has slots of its own.
    MOST = 32
    _all: ClassVar[dict[int, "weakref.ref[Rest]"]] = {}
    _numbers: ClassVar[Iterator[int]] = itertools.count()

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
        self._number = number = next(self._numbers)
        self._all[number] = weakref.ref(self, lambda _: Rest._all.pop(number, None))

    @classmethod
    def finish_some(cls) -> None:
        """Finishes those that are over, and the oldest of too many."""
        refs = [ref for _, ref in sorted(cls._all.copy().items())]
        for at, ref in enumerate(refs):
            rest = ref()
            if rest is not None:
                rest.finish(wait=at < len(refs) - cls.MOST)

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
            self._over()
            self._marks.close()
            let_go(error, outer)
            if isinstance(error, Exception) and not is_interrupt(error):
                return
            raise
        self._over()
        return_marks(self._marks)
        self._report = _with_bytes(report, self._beside_bytes)

    def _over(self) -> None:
        self._unfinished = None
        self._all.pop(self._number, None)


def _with_bytes(report: RunReport, more: int) -> RunReport:
    return dataclasses.replace(
        report,
        peak_bytes=report.peak_bytes + more,
        in_use=tuple([nbytes + more for nbytes in report.in_use]),
    )


def _blame(
    split: Split, task: int, operands: Sequence[Any], kinds: nans.Kinds
) -> FloatingPointError:
    group = split.groups[task]
    return nans.blame(split.flat, group.equations, group.inputs, operands, kinds)


@dataclass(frozen=True, slots=True)
class _Resident:
    """An instance that is put on the device for many runs."""

    instance: int
    # Whose copy it is: an argument's, by its position, or else a closed-over array's; and
    # which part of it, None for all.
    argument: int | None
    closed_over: memory.ClosedOver | None
    window: Window | None

    def source(self, leaves: Sequence[Any]) -> Source:
        if self.argument is not None:
            return leaves[self.argument], self.window
        assert self.closed_over is not None
        return self.closed_over.array, self.window


def _residents(
    split: Split, start: dict[int, int], closed_over: Sequence[tuple[int, Any]]
) -> tuple[_Resident, ...]:
    flat = split.flat
    whole: dict[int, tuple[int | None, memory.ClosedOver | None]] = {
        v: (at, None) for at, v in enumerate(flat.inputs)
    }
    for (v, _), (_, array) in zip(flat.constants, closed_over, strict=True):
        whole[v] = None, array
    starts = split.starts
    return tuple(
        _Resident(start[b], *whole[source], window)
        for b in split.resident
        for source, window in [starts[b]]
    )


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
