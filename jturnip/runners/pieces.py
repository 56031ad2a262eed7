"""What runs a program: a plan, a loop that repeats one, a branch that chooses, a chain."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from jturnip import compat, memory, placement
from jturnip.errors import ExecutionError
from jturnip.frontend import tables
from jturnip.frontend.values import Parts, Type
from jturnip.graph.plan import Plan
from jturnip.graph.report import RunReport
from jturnip.memory import device_bytes
from jturnip.programs import places
from jturnip.programs.records import (
    Call,
    Chain,
    Choice,
    Loop,
    Program,
    Rows,
    Stage,
    Straight,
)
from jturnip.runners.tasks import Held, SplitRunner
from jturnip.runtime import hoststacks
from jturnip.runtime.hoststacks import Views
from jturnip.runtime.kept import Kept, Source
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.report import Gathered
from jturnip.runtime.turns import Calling


class Piece(Protocol):
    """What takes flat arguments and gives flat results."""

    @property
    def plan(self) -> Plan:
        """The plan of it."""
        ...

    @property
    def last_run(self) -> RunReport | None:
        """What the last finished run did; its peak counts the arguments, and all that was
        made."""
        ...

    def run(
        self,
        leaves: Sequence[Any],
        keep: frozenset[int] = frozenset(),
        *,
        views: Views | None = None,
    ) -> list[Any]:
        """Runs once. Arguments at `keep` are not given up, even where the plan says so; in
        a loop, `views` has parts of what is the same in all iterations."""
        ...

    def leave(self) -> None:
        """Lets go of closed-over arrays that were put on the device; a run puts them
        there again."""
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
    if isinstance(program, Call):
        return CallRunner(program)
    return ChainRunner(program, link)


class LoopRunner:
    """Repeats the body while it says so. What it says is in host memory when it ends, so
    reading it waits for nothing."""

    def __init__(self, loop: Loop, link: SimulatedLink | None):
        self.plan = loop.plan
        self.last_run: RunReport | None = None
        self._loop = loop
        self._condition = make_piece(loop.condition, link)
        self._body = make_piece(loop.body, link)
        # Closed-over bytes that the one has on the device while the other runs.
        both = sum(loop.constants.values())
        self._beside_condition = both - sum(loop.condition.constants.values())
        self._beside_body = both - sum(loop.body.constants.values())
        self._beside_condition += loop.unread[0]
        self._beside_body += loop.unread[1]
        # The body, where it may find something on the device each time.
        self._holding = self._body if isinstance(self._body, Outermost) else None
        # Arguments of which there are copies on the device for many runs, by position.
        self.resident_arguments = frozenset[int]()
        if loop.stays and self._holding is not None:
            self.resident_arguments = self._holding.resident_arguments

    def leave(self) -> None:
        self._condition.leave()
        self._body.leave()

    @property
    def holds(self) -> bool:
        """Whether what the body keeps stays between runs: then `hold` comes first."""
        return self._loop.stays

    def sources(self, leaves: Sequence[Any]) -> list[Source]:
        """As of `SplitRunner`; of a loop that `holds`."""
        assert self._holding is not None
        return self._holding.sources(leaves)

    def hold(self, leaves: Sequence[Any], kept: Kept) -> "Held | HeldByStages":
        """As of `SplitRunner`; of a loop that `holds`."""
        assert self._holding is not None
        return self._holding.hold(leaves, kept)

    def run(
        self,
        leaves: Sequence[Any],
        keep: frozenset[int] = frozenset(),
        held: "Held | HeldByStages | None" = None,
        views: Views | None = None,
    ) -> list[Any]:
        loop, there = self._loop, device_bytes(held.arrays) if held is not None else 0
        constants = list(leaves[: loop.of_condition + loop.of_body])
        carried = list(leaves[len(constants) :])
        kept = {i for i in range(len(carried)) if i + len(constants) in keep}
        # What the loop has copied is still there, where it is not ours.
        theirs = [carried[i] for i in kept]
        peak = self._enter(constants, carried, kept)
        staying = device_bytes([a for a in theirs if all(a is not c for c in carried)])
        asked = [*constants[: loop.of_condition], *carried]
        (goes_on,) = self._condition.run(asked)
        beside = staying + self._beside_condition + there
        beside += device_bytes(constants[loop.of_condition :])
        gathered = Gathered()
        gathered.at_rest(peak + there)
        gathered.add(_ran(self._condition), 0, beside)
        del asked
        run_body, moved = self._body.run, 0
        views = Views(constants, views)
        first_of_body = self._condition.plan.op_count
        if self._holding is not None and bool(np.asarray(goes_on)):
            if held is None:
                held = self._holding.hold([*constants, *carried], Kept())
                moved = held.moved_bytes
            run_body = functools.partial(self._holding.run, held=held)
        while bool(np.asarray(goes_on)):
            arguments = [*constants, *carried]
            carried.clear()
            stay = frozenset(i + len(constants) for i in kept)
            goes_on, *carried = run_body(arguments, stay, views=views)
            gathered.add(_ran(self._body), first_of_body, staying + self._beside_body)
            before = arguments[len(constants) :]
            # What the body did not read nobody has let go of.
            for i in loop.replaced - kept:
                before[i].delete()
            # What came back as it was is still the caller's.
            kept = {i for i in kept if carried[i] is before[i]}
            del arguments, before
        self.last_run = gathered.report(moved)
        return carried

    def _enter(self, constants: list[Any], carried: list[Any], kept: set[int]) -> int:
        """Puts carried arrays in their places, and takes those out of `kept` that the loop
        may then use up; the most bytes that are on the device meanwhile."""
        there = peak = device_bytes([*constants, *carried])
        places = self._loop.on_host
        # What leaves the device makes room for what comes.
        for i in sorted(range(len(places)), key=lambda i: not places[i]):
            array, nbytes = carried[i], device_bytes([carried[i]])
            carried[i], ours = self._entering(
                array, places[i], i in kept, self._loop.used_up[i]
            )
            if ours:
                if carried[i] is not array:
                    there += device_bytes([carried[i]]) - (0 if i in kept else nbytes)
                kept.discard(i)
            peak = max(peak, there)
        return peak

    def _entering(
        self, array: Any, on_host: bool, kept: bool, used_up: bool
    ) -> tuple[Any, bool]:
        """A carried array in its place, and whether the loop may use it up."""
        if placement.is_on_host(array) != on_host:
            moved = memory.moved(array, on_host)
            if not kept:
                jax.block_until_ready(moved)
                array.delete()
            return moved, True
        if kept and used_up and not on_host:
            return memory.copy(array), True
        return array, not kept


class ChoiceRunner:
    """Runs the branch that an argument names."""

    def __init__(self, choice: Choice, link: SimulatedLink | None):
        self.plan = choice.plan
        self.last_run: RunReport | None = None
        self._branches = [make_piece(branch, link) for branch in choice.branches]
        self._beside = choice.beside
        # Branches that may find something on the device each time.
        self._holding = {
            at: branch
            for at, branch in enumerate(self._branches)
            if isinstance(branch, SplitRunner) and branch.holds
        }
        # Arguments of which there are copies on the device for many runs, by position.
        self.resident_arguments = frozenset(
            i + 1 for branch in self._holding.values() for i in branch.resident_arguments
        )

    def leave(self) -> None:
        for branch in self._branches:
            branch.leave()

    @property
    def holds(self) -> bool:
        """As of `SplitRunner`, of any branch."""
        return bool(self._holding)

    def sources(self, leaves: Sequence[Any]) -> list[Source]:
        """As of `SplitRunner`."""
        branches = self._holding.values()
        return [source for branch in branches for source in branch.sources(leaves[1:])]

    def hold(self, leaves: Sequence[Any], kept: Kept) -> "HeldByStages":
        """As of `SplitRunner`; by the number of the branch."""
        held = {at: b.hold(leaves[1:], kept) for at, b in self._holding.items()}
        return HeldByStages(held)

    def run(
        self,
        leaves: Sequence[Any],
        keep: frozenset[int] = frozenset(),
        held: "HeldByStages | None" = None,
        views: Views | None = None,
    ) -> list[Any]:
        index, *operands = leaves
        chosen = min(max(int(np.asarray(index)), 0), len(self._branches) - 1)
        branch = self._branches[chosen]
        run, beside = (held or HeldByStages({})).running(chosen, branch)
        results = run(operands, frozenset(i - 1 for i in keep if i), views=views)
        beside += self._beside[chosen] + device_bytes([index])
        gathered = Gathered()
        before = sum(b.plan.op_count for b in self._branches[:chosen])
        gathered.add(_ran(branch), before, beside)
        self.last_run = gathered.report()
        return results


class _ByHost:
    """What the host does itself: it reads no parts, and has nothing on the device."""

    def leave(self) -> None:
        pass

    def run(
        self,
        leaves: Sequence[Any],
        keep: frozenset[int] = frozenset(),
        *,
        views: Views | None = None,
    ) -> list[Any]:
        del views
        return self._run(leaves, keep)

    def _run(self, leaves: Sequence[Any], keep: frozenset[int]) -> list[Any]:
        raise NotImplementedError


class RowsRunner(_ByHost):
    """Takes rows out of a table in host memory, or adds some to it."""

    def __init__(self, rows: Rows):
        self.plan = rows.plan
        self.last_run: RunReport | None = None
        self._rows = rows

    def _run(self, leaves: Sequence[Any], keep: frozenset[int]) -> list[Any]:
        table, *others = leaves
        began = time.perf_counter()
        moved = sum(a.nbytes for a in others if not placement.is_on_host(a))
        there = device_bytes(leaves)
        arrays = [np.asarray(a) for a in others]
        host = placement.sharding(placement.device_of(table), on_host=True)
        if self._rows.writes:
            taken, contents = hoststacks.taken_over(table, copied=0 in keep)
            tables.add_rows(self._rows.eqn, contents, *arrays)
            result = memory.from_numpy(contents, host) if taken is None else taken
        else:
            read = tables.read_rows(self._rows.eqn, memory.view(table), *arrays)
            result = memory.from_numpy(np.require(read, requirements="C"), host)
            if 0 not in keep:
                table.delete()
        for i, array in enumerate(others, start=1):
            if i not in keep:
                array.delete()
        self.last_run = _by_host(began, moved, there)
        return [jax.block_until_ready(result)]


class CallRunner(_ByHost):
    """Calls a function of the user's, with arrays of the CPU, as `jax.pure_callback` does.

    Those that lie in host memory are not copied for it.
    """

    def __init__(self, call: Call):
        self.plan = call.plan
        self.last_run: RunReport | None = None
        self._call = call
        self._host = placement.sharding(call.device, on_host=True)
        self._types = [Type.of(v.aval) for v in call.eqn.outvars]

    def _run(self, leaves: Sequence[Any], keep: frozenset[int]) -> list[Any]:
        began = time.perf_counter()
        moved = sum(a.nbytes for a in leaves if not placement.is_on_host(a))
        there = device_bytes(leaves)
        try:
            x64 = jax.config.jax_enable_x64  # pyright: ignore  # made at run time
            results = Calling(functools.partial(self._called, leaves, x64)).result()
        except Exception as error:
            raise ExecutionError(f"{self._what} failed: {error}") from error
        for i, array in enumerate(leaves):
            if i not in keep:
                array.delete()
        self.last_run = _by_host(began, moved, there)
        return [jax.block_until_ready(memory.from_numpy(r, self._host)) for r in results]

    def _called(self, leaves: Sequence[Any], x64: bool) -> list[np.ndarray]:
        cpu = jax.local_devices(backend="cpu")[0]
        with (
            jax.enable_x64(x64),
            jax.transfer_guard("allow"),
            jax.default_device(cpu),
        ):
            there = placement.sharding(cpu, on_host=False)
            operands = [memory.lent(a, there) for a in leaves]
            results = [
                np.array(r, order="C") for r in compat.called_with(self._call.eqn, operands)
            ]
        given, asked = list(map(Type.of, results)), self._types
        if [(t.shape, t.dtype) for t in given] != [(t.shape, t.dtype) for t in asked]:
            raise TypeError(f"it gives {given}, and was to give {asked}")
        return results

    @property
    def _what(self) -> str:
        return f'"{self._call.eqn.primitive.name}" ({self._call.source or "unknown line"})'


def _by_host(began: float, moved: int, there: int) -> RunReport:
    """Of what the host has done alone: bytes it read of the device's, and those that were
    there."""
    seconds = time.perf_counter() - began
    return RunReport(
        "driven",
        seconds,
        0.0,
        0,
        moved,
        there,
        order=(0,),
        starts=(0.0,),
        ends=(seconds,),
        began=began,
    )


class ChainRunner:
    """Runs programs one after the other, and holds what goes from one to the next."""

    def __init__(self, chain: Chain, link: SimulatedLink | None):
        self.plan = chain.plan
        self.last_run: RunReport | None = None
        self._chain = chain
        self._device = chain.arguments.device
        self._closed_over = {
            v: memory.closed_over(array, self._device) for v, array in chain.read_over
        }
        self._stages = [(s, make_piece(s.program, link)) for s in chain.stages]
        # Arguments that no stage has to do with are the caller's matter.
        read = {v for s in chain.stages for v in s.reads}
        ignored = places.unread(chain.flat) - read
        self._arguments = [at for at, v in enumerate(chain.flat.inputs) if v not in ignored]
        # Positions of the arguments that each stage reads; None for its other operands.
        inputs = {v: at for at, v in enumerate(chain.flat.inputs)}
        self._read = [[inputs.get(v) for v in s.reads] for s in chain.stages]
        # Positions of the arguments of which there are copies for many runs.
        self.resident_arguments = frozenset(
            at
            for (_, piece), read in zip(self._stages, self._read, strict=True)
            if isinstance(piece, _Holding)
            for i in piece.resident_arguments
            if (at := read[i]) is not None
        )

    def leave(self) -> None:
        for closed_over in self._closed_over.values():
            closed_over.leave()
        for _, piece in self._stages:
            piece.leave()

    def sources(self, leaves: Sequence[Any]) -> list[Source]:
        """As of `SplitRunner`."""
        return [
            source
            for piece, given in self._holding(leaves).values()
            for source in piece.sources(given)
        ]

    def hold(self, leaves: Sequence[Any], kept: Kept) -> "HeldByStages":
        """As of `SplitRunner`."""
        holding = self._holding(leaves)
        return HeldByStages({at: p.hold(given, kept) for at, (p, given) in holding.items()})

    def _holding(
        self, leaves: Sequence[Any]
    ) -> dict[int, tuple["_Holding", Sequence[Any]]]:
        """The stages for which something stays on the device, with their arguments as far
        as they are the function's."""
        return {
            at: (piece, [None if i is None else leaves[i] for i in self._read[at]])
            for at, (_, piece) in enumerate(self._stages)
            if isinstance(piece, _Holding) and piece.holds
        }

    def run(
        self,
        leaves: Sequence[Any],
        keep: frozenset[int] = frozenset(),
        held: "HeldByStages | None" = None,
        views: Views | None = None,
    ) -> list[Any]:
        chain, held = self._chain, held or HeldByStages({})
        values = _Values({v: c.array for v, c in self._closed_over.items()})
        holders = [chain.arguments.whose[i] for i in self._arguments]
        placed = memory.in_their_places(
            [leaves[i] for i in self._arguments], holders, self._device
        )
        for i, whose, array in zip(self._arguments, holders, placed, strict=True):
            v = chain.flat.inputs[i]
            values.hold(v, array)
            if i in keep or not (whose.donated or whose.ours):
                values.theirs.add(v)
            elif whose.ours:
                values.may_share.add(v)
            del array
        del placed
        gathered, first_op = Gathered(), 0
        for at, (stage, piece) in enumerate(self._stages):
            run, beside = held.running(at, piece)
            run = functools.partial(run, views=views)
            beside += self._run_stage(stage, run, values)
            gathered.add(_ran(piece), first_op, beside)
            gathered.at_rest(stage.constants + values.bytes_beside(()) + held.nbytes)
            first_op += piece.plan.op_count
        self.last_run = gathered.report()
        return [
            self._result(at, output, values) for at, output in enumerate(chain.flat.outputs)
        ]

    def _run_stage(
        self,
        stage: Stage,
        run: Callable[[Sequence[Any], frozenset[int]], list[Any]],
        values: "_Values",
    ) -> int:
        """Runs a stage; the device bytes of what others held meanwhile."""
        beside = stage.constants + values.bytes_beside(stage.reads)
        over = frozenset(stage.over)
        keep = frozenset(
            i
            for i, v in enumerate(stage.reads)
            if v not in over or stage.reads.count(v) > 1 or v in values.theirs
        )
        arguments = [values.arrays[v] for v in stage.reads]
        results = run(arguments, keep)
        # A loop that never ran gives back what it was given.
        given = {id(a): v for a, v in zip(arguments, stage.reads, strict=True)}
        del arguments
        for v in over - values.theirs:
            values.arrays.pop(v, None)
        passed_on: set[int] = set()
        for v, array in zip(stage.writes, results, strict=True):
            before = given.get(id(array))
            if before is not None:
                if before in values.arrays or before in passed_on:
                    array = memory.copy(array)
                elif before in values.may_share:
                    values.may_share.add(v)
                passed_on.add(before)
            if v not in stage.unread:
                values.hold(v, array)
        return beside

    def _result(self, at: int, output: int | Parts, values: "_Values") -> Any:
        host = placement.sharding(self._device, on_host=True)
        if isinstance(output, Parts):
            parts = [memory.view(values.arrays.pop(v)) for v in output.values]
            whole = memory.room_for(output.type.struct())
            np.concatenate(parts, out=whole)
            return memory.with_contents(whole, output.type.dtype, host)
        array = values.arrays[output]
        if output in self._chain.flat.inputs:
            return array
        if not isinstance(array, jax.Array):  # JAX's zeros of no type, a constant
            return array
        if output in values.may_share:
            array = memory.copy(array)
        if at in self._chain.to_host and not placement.is_on_host(array):
            there, array = array, jax.block_until_ready(memory.moved(array, on_host=True))
            there.delete()  # it may be an argument that was given up
        committed = placement.is_on_host(array) or self._chain.arguments.committed
        return compat.settled(array, committed)


@dataclass(frozen=True)
class HeldByStages:
    """What is on the device for many runs of a chain, by the number of the stage, or of a
    branch."""

    stages: Mapping[int, "Held | HeldByStages"]

    @property
    def moved_bytes(self) -> int:
        """Bytes that had to be moved."""
        return sum(held.moved_bytes for held in self.stages.values())

    @property
    def arrays(self) -> list[Any]:
        """All copies."""
        return [copy for held in self.stages.values() for copy in held.arrays]

    @functools.cached_property
    def nbytes(self) -> int:
        """Device bytes of all copies, which stay while this does."""
        return device_bytes(self.arrays)

    def running(self, at: int, piece: Any) -> tuple[Callable[..., list[Any]], int]:
        """What runs a stage with what is there for it, and the device bytes of what is
        there for others."""
        if at not in self.stages:
            return piece.run, self.nbytes
        own = self.stages[at]
        run = functools.partial(piece.run, held=own)
        return run, self.nbytes - device_bytes(own.arrays)


# Stages of a chain that may have something on the device for many runs.
_Holding: TypeAlias = SplitRunner | LoopRunner | ChoiceRunner
# What runs a whole function: it may keep arrays on the device between its calls.
Outermost: TypeAlias = SplitRunner | ChainRunner


def make_outermost(program: Program, link: SimulatedLink | None) -> Outermost:
    """What runs the program of a whole function."""
    piece = make_piece(program, link)
    assert isinstance(piece, Outermost)
    return piece


class _Values:
    """What a chain holds between two stages.

    Invariant: no two values share an array that somebody may use up.
    """

    def __init__(self, constants: dict[int, Any]):
        self._constants = constants
        self.arrays: dict[int, Any] = dict(constants)
        # Device bytes of each but closed-over ones.
        self._nbytes: dict[int, int] = {}
        # Values whose arrays are the caller's: nothing may use them up.
        self.theirs = set(constants)
        # Those that may share memory with the caller's numpy: no result may be one.
        self.may_share: set[int] = set()

    def hold(self, v: int, array: Any) -> None:
        """Holds the array of a value from now on."""
        self.arrays[v] = array
        self._nbytes[v] = device_bytes([array])

    def bytes_beside(self, read: Sequence[int]) -> int:
        """Device bytes of all but some values, and but closed-over arrays."""
        left_out = {*read, *self._constants}
        mine = {id(self.arrays[v]) for v in left_out if v in self.arrays}
        others = {
            id(array): self._nbytes[v]
            for v, array in self.arrays.items()
            if v not in left_out
        }
        return sum(nbytes for at, nbytes in others.items() if at not in mine)


def _ran(piece: Piece) -> RunReport:
    """What a piece that has just run did."""
    assert piece.last_run is not None
    return piece.last_run
