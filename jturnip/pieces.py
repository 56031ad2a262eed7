"""Programs that are driven: loops that repeat a plan, branches that choose one, chains."""

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jturnip import compat, placement
from jturnip.frontend import tables
from jturnip.frontend.values import Parts
from jturnip.graph.plan import Plan
from jturnip.placement import Wanted
from jturnip.programs import Chain, Choice, Loop, Program, Rows, Stage, Straight
from jturnip.runners import SplitRunner, let_go
from jturnip.runtime import hoststacks
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.report import RunReport


class Piece(Protocol):
    """What takes flat arguments and gives flat results."""

    @property
    def plan(self) -> Plan:
        """The plan of it."""
        ...

    @property
    def last_run(self) -> RunReport | None:
        """What the last finished run did."""
        ...

    def run(self, leaves: Sequence[Any], keep: frozenset[int] = frozenset()) -> list[Any]:
        """Runs once. Arguments at `keep` are not given up, even where the plan says so."""
        ...


def make_piece(program: Program, link: SimulatedLink | None) -> Piece:
    """What runs a program."""
    if isinstance(program, Straight):
        return SplitRunner(program, link)
    if isinstance(program, Loop):
        return LoopRunner(program, link)
    if isinstance(program, Choice):
        return ChoiceRunner(program, link)
    if isinstance(program, Rows):
        return RowsRunner(program)
    return ChainRunner(program, link)


class PieceRunner:
    """A piece with the tree of a function's results around it, in their places."""

    def __init__(self, piece: Piece, out_tree: Any, wanted: Wanted, weak: Sequence[bool]):
        self.piece = piece
        self.plan = piece.plan
        self._out_tree = out_tree
        self._wanted = wanted
        # Whether each result is weakly typed: what was in numpy's hands no longer is.
        self._weak = tuple(weak)
        # One run at a time: the budget is for all of them.
        self._lock = threading.Lock()

    @property
    def last_run(self) -> RunReport | None:
        """What the last finished run did."""
        report = self.piece.last_run
        if report is None or not self._wanted.back:
            return report
        moved = report.h2d_bytes + self._wanted.back_bytes
        return dataclasses.replace(report, h2d_bytes=moved)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs once."""
        try:
            with self._lock:
                results = self.piece.run(leaves)
                results = list(map(compat.weakly_typed, results, self._weak))
                results = self._wanted.finish(results)
        except BaseException as error:
            let_go(error)
            raise
        return jax.tree.unflatten(self._out_tree, results)


class LoopRunner:
    """Repeats the body while it says so. What it says is in host memory when it ends, so
    reading it waits for nothing."""

    def __init__(self, loop: Loop, link: SimulatedLink | None):
        self.plan = loop.plan
        self.last_run: RunReport | None = None
        self._loop = loop
        self._condition = make_piece(loop.condition, link)
        self._body = make_piece(loop.body, link)

    def run(self, leaves: Sequence[Any], keep: frozenset[int] = frozenset()) -> list[Any]:
        loop = self._loop
        constants = list(leaves[: loop.of_condition + loop.of_body])
        carried = list(leaves[len(constants) :])
        kept = {i for i in range(len(carried)) if i + len(constants) in keep}
        for i, (array, on_host) in enumerate(zip(carried, loop.on_host, strict=True)):
            carried[i], ours = self._entering(array, on_host, i in kept, loop.used_up[i])
            if ours:
                kept.discard(i)
        asked = [*constants[: loop.of_condition], *carried]
        (goes_on,) = self._condition.run(asked)
        total = together([self._condition.last_run])
        del asked
        body, resident = self._body, 0
        try:
            if isinstance(body, SplitRunner) and bool(np.asarray(goes_on)):
                body.hold([*constants, *carried])
                resident = body.resident_bytes
            while bool(np.asarray(goes_on)):
                arguments = [*constants, *carried]
                carried.clear()
                stay = frozenset(i + len(constants) for i in kept)
                goes_on, *carried = body.run(arguments, stay)
                total = together([total, body.last_run])
                # What came back as it was is still the caller's.
                kept = {i for i in kept if carried[i] is arguments[i + len(constants)]}
                del arguments
        finally:
            if isinstance(body, SplitRunner):
                body.let_go()
        moved = total.h2d_bytes + resident
        self.last_run = dataclasses.replace(total, h2d_bytes=moved)
        return carried

    def _entering(
        self, array: Any, on_host: bool, kept: bool, used_up: bool
    ) -> tuple[Any, bool]:
        """A carried array in its place, and whether the loop may use it up."""
        if placement.is_on_host(array) != on_host:
            moved = compat.copy_to(
                array, placement.sharding(placement.device_of(array), on_host)
            )
            if not kept:
                jax.block_until_ready(moved)
                array.delete()
            return moved, True
        if kept and used_up and not on_host:
            return placement.copy(array), True
        return array, not kept


class ChoiceRunner:
    """Runs the branch that an argument names."""

    def __init__(self, choice: Choice, link: SimulatedLink | None):
        self.plan = choice.plan
        self.last_run: RunReport | None = None
        self._branches = [make_piece(branch, link) for branch in choice.branches]

    def run(self, leaves: Sequence[Any], keep: frozenset[int] = frozenset()) -> list[Any]:
        index, *operands = leaves
        chosen = min(max(int(np.asarray(index)), 0), len(self._branches) - 1)
        branch = self._branches[chosen]
        results = branch.run(operands, frozenset(i - 1 for i in keep))
        self.last_run = branch.last_run
        return results


class RowsRunner:
    """Takes rows out of a table in host memory, or adds some to it."""

    def __init__(self, rows: Rows):
        self.plan = rows.plan
        self.last_run: RunReport | None = None
        self._rows = rows

    def run(self, leaves: Sequence[Any], keep: frozenset[int] = frozenset()) -> list[Any]:
        table, *others = leaves
        began = time.perf_counter()
        moved = sum(a.nbytes for a in others if not placement.is_on_host(a))
        arrays = [np.asarray(a) for a in others]
        host = placement.sharding(placement.device_of(table), on_host=True)
        if self._rows.writes:
            taken, memory = hoststacks.taken_over(table, copied=0 in keep)
            tables.add_rows(self._rows.eqn, memory, *arrays)
            result = jax.device_put(memory, host) if taken is None else taken
        else:
            read = tables.read_rows(self._rows.eqn, hoststacks.view(table), *arrays)
            result = jax.device_put(np.ascontiguousarray(read), host)
            if 0 not in keep:
                table.delete()
        for i, array in enumerate(others, start=1):
            if i not in keep:
                array.delete()
        seconds = time.perf_counter() - began
        self.last_run = RunReport("driven", seconds, 0.0, 0, moved, 0)
        return [jax.block_until_ready(result)]


class ChainRunner:
    """Runs programs one after the other, and holds what goes from one to the next."""

    def __init__(self, chain: Chain, link: SimulatedLink | None):
        self.plan = chain.plan
        self.last_run: RunReport | None = None
        self._chain = chain
        self._device = chain.arguments.device
        self._constants = [
            (v, placement.placed_for_good(array, self._device))
            for v, array in chain.constants
        ]
        self._stages = [(s, make_piece(s.program, link)) for s in chain.stages]

    def run(self, leaves: Sequence[Any], keep: frozenset[int] = frozenset()) -> list[Any]:
        chain = self._chain
        values: dict[int, Any] = {}
        # The caller's arrays: nothing may use them up.
        theirs: set[int] = set()
        # Arrays that may share memory with the caller's numpy: no result may be one.
        shared: set[int] = set()
        for i, (v, leaf) in enumerate(zip(chain.flat.inputs, leaves, strict=True)):
            whose = chain.arguments.whose[i]
            values[v] = placement.in_its_place(leaf, whose, self._device)
            if i in keep or not (whose.donated or whose.ours):
                theirs.add(id(values[v]))
            elif whose.ours:
                shared.add(id(values[v]))
        for v, array in self._constants:
            values[v] = array
            theirs.add(id(array))
        reports = []
        for stage, piece in self._stages:
            self._run_stage(stage, piece, values, theirs)
            report = piece.last_run
            assert report is not None
            peak = report.peak_bytes + stage.waiting
            reports.append(dataclasses.replace(report, peak_bytes=peak))
        self.last_run = together(reports)
        return [
            self._result(at, output, values, theirs | shared)
            for at, output in enumerate(chain.flat.outputs)
        ]

    def _run_stage(
        self, stage: Stage, piece: Piece, values: dict[int, Any], theirs: set[int]
    ) -> None:
        arguments = [values[v] for v in stage.reads]
        over = frozenset(stage.over)
        keep = frozenset(
            i
            for i, v in enumerate(stage.reads)
            if v not in over or stage.reads.count(v) > 1 or id(values[v]) in theirs
        )
        results = piece.run(arguments, keep)
        for v in over:
            values.pop(v, None)
        there = {id(array) for array in values.values()}
        for v, array in zip(stage.writes, results, strict=True):
            if v in stage.unread:
                continue
            # A loop that never ran gives back what it was given.
            values[v] = placement.copy(array) if id(array) in there else array
            there.add(id(values[v]))

    def _result(
        self, at: int, output: int | Parts, values: dict[int, Any], theirs: set[int]
    ) -> Any:
        host = placement.sharding(self._device, on_host=True)
        if isinstance(output, Parts):
            parts = [hoststacks.view(values.pop(v)) for v in output.values]
            return jax.device_put(np.concatenate(parts), host)
        array = values[output]
        if output in self._chain.flat.inputs:
            return array
        if id(array) in theirs:
            array = placement.copy(array)
        if at in self._chain.to_host and not placement.is_on_host(array):
            array = compat.copy_to(array, host)
        committed = placement.is_on_host(array) or self._chain.arguments.committed
        return compat.settled(array, committed)


def together(reports: Sequence[RunReport | None]) -> RunReport:
    """What several runs did, one after the other."""
    done = [r for r in reports if r is not None]
    return RunReport(
        strategy="driven",
        seconds=sum(r.seconds for r in done),
        stall_seconds=sum(r.stall_seconds for r in done),
        h2d_bytes=sum(r.h2d_bytes for r in done),
        d2h_bytes=sum(r.d2h_bytes for r in done),
        peak_bytes=max((r.peak_bytes for r in done), default=0),
        compute_seconds=sum(r.compute_seconds for r in done),
    )
