"""A function as programs: pieces that are planned whole, and what chooses among them.

Most functions are one `Straight` program: one plan for all tasks. A loop of unknown length
or a branch that is too large to be a task cannot be in a plan, since nobody knows how often
it will run. Then the function is a `Chain`: straight programs with a `Loop` or a `Choice`
between them, whose bodies are programs again. Arrays are handed over where they lie: the
place in which each piece leaves its results is where the next is planned to find them.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jturnip import lowering, placement
from jturnip.compat import Device
from jturnip.compiler.executables import Trials
from jturnip.compiler.report import CompileReport
from jturnip.errors import DoesNotFit, HostMemoryError
from jturnip.frontend import tables
from jturnip.frontend.blocks import cut_along_axes, in_the_way
from jturnip.frontend.jaxpr import Condition, argument_avals, flatten
from jturnip.frontend.loops import SMALL
from jturnip.frontend.values import Equation, FlatJaxpr, Parts, values_of
from jturnip.graph.memgraph import MemGraph
from jturnip.graph.plan import Plan
from jturnip.graph.taskgraph import TaskGraph
from jturnip.lowering import Split
from jturnip.placement import Arguments, Budget, Returned, Whose
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.schedule import Schedule
from jturnip.units import format_bytes, padded


# What a loop carries is on the device if together it takes no more than this share of the
# budget; what only waits for a loop to end, if it is no larger than this.
_CARRIED = 4
_WAITING = 16
# Of what is jturnip's own in a budget (`placement.BOOKKEEPING`), the bytes that may be
# numbers which bodies of loops and branches close over.
_INNER = 2048
# There must be room for so many of the results that stay on the device in a next call.
_TIMES = 3
# How often the budget that a refusal asks for is tried, to find what comes after it; and
# where stretches are cut for each budget.
_TRIES = 12
_TRIES_CUT = 2
# Where a function that is cut moves more than so many times what goes in and comes out, so
# many ways to cut it are planned.
_MUCH = 4
_SOME_WAYS = 4
# A refusal asks for what needs no cutting unless cutting makes do with this share of it.
_WORTH = 0.9


@dataclass(frozen=True, slots=True)
class How:
    """How programs are made, beside the budget."""

    strategy: str
    link: SimulatedLink | None
    # Where tasks are run on zeros first, to know their times: what that may take.
    trials: Trials | None
    # Whether every equation is a task of its own.
    finest: bool = False
    # Whether it is for the body of a loop, run many times with the same constants.
    repeated: bool = False
    # Whether arrays in host memory and loops are cut along rows first.
    streams: bool = True
    # Whether what does not fit is cut along its axes.
    axes: bool = True
    # Which attempts are made (`lowering.streaming`): those inside a loop are its own.
    attempts: tuple[int, ...] = tuple(range(lowering.ATTEMPTS))
    # What was made before, of the same in the same room; and all that was compiled.
    known: dict[Any, Any] = field(default_factory=dict, compare=False, hash=False)
    executables: list[Any] = field(default_factory=list, compare=False, hash=False)

    # How the function's results belong together; of what is inside it, nothing is known.
    returned: Returned = lowering.NOTHING_KNOWN

    @property
    def tight(self) -> bool:
        """Whether whatever is between pieces goes to host memory."""
        return self.attempts == (lowering.ATTEMPTS - 1,)


# Closed-over arrays that are on the device while a function runs, and between its runs:
# id → bytes. Who has the record has the arrays.
Constants: TypeAlias = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Straight:
    """Tasks under one plan.

    Every kind of program has these: `plan`; `report`, of what was compiled; `ends_on_host`,
    whether each result is in host memory at the end; and `constants`.
    """

    split: Split
    plan: Plan
    schedule: Schedule

    @property
    def ends_on_host(self) -> tuple[bool, ...]:
        split, memgraph = self.split, self.plan.memgraph
        ends = dict(zip(split.graph.outputs, memgraph.outputs_at_end, strict=True))
        held = dict(zip(split.flat.inputs, split.arguments.whose, strict=True))
        return tuple(
            isinstance(o, Parts)
            or (
                held[o].on_host
                if o in held
                else memgraph.instances[ends[split.buffers[o]]].on_host
            )
            for o in split.flat.outputs
        )

    @property
    def resident_bytes(self) -> int:
        """Bytes that are put on the device before many runs."""
        buffers = self.split.graph.buffers
        return sum(buffers[b].nbytes for b in self.split.resident)

    @property
    def to_host(self) -> frozenset[int]:
        return self.split.to_host

    @property
    def given(self) -> Arguments:
        return self.split.arguments

    @property
    def flat(self) -> FlatJaxpr:
        return self.split.flat

    @property
    def constants(self) -> Constants:
        return lowering.constants_on_device(self.split.flat)

    @property
    def report(self) -> CompileReport:
        return self.split.compile_report


@dataclass(frozen=True, slots=True)
class Loop:
    """A `while`: its arguments are the condition's constants, the body's, and what is
    carried."""

    plan: Plan
    # Numbers of constants.
    of_condition: int
    of_body: int
    # Of the condition's constants and what is carried: whether to begin.
    condition: "Program"
    # Of everything: whether to go on, and what is carried on.
    body: "Program"
    # Whether each carried value is in host memory between iterations, and whether the body
    # uses up the array it is given.
    on_host: tuple[bool, ...]
    used_up: tuple[bool, ...]

    @property
    def ends_on_host(self) -> tuple[bool, ...]:
        return self.on_host

    @property
    def constants(self) -> Constants:
        return _all_constants((self.condition, self.body))

    @property
    def report(self) -> CompileReport:
        return self.condition.report.beside(self.body.report)


@dataclass(frozen=True, slots=True)
class Choice:
    """A `cond`: its arguments are the number of the branch, and the branches' arguments."""

    plan: Plan
    branches: tuple["Program", ...]
    ends_on_host: tuple[bool, ...]

    @property
    def constants(self) -> Constants:
        return _all_constants(self.branches)

    @property
    def report(self) -> CompileReport:
        return functools.reduce(CompileReport.beside, (b.report for b in self.branches))


@dataclass(frozen=True, slots=True)
class Rows:
    """A `gather` from a table in host memory, or a `scatter-add` to one, by the host."""

    plan: Plan
    eqn: Any
    ends_on_host: tuple[bool, ...] = (True,)
    constants: Constants = field(default_factory=dict)

    @property
    def writes(self) -> bool:
        """Whether rows are added to the table."""
        return self.eqn.primitive.name in tables.HOST_WRITES

    @property
    def report(self) -> CompileReport:
        return CompileReport(0, 0, 0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Stage:
    """A program in a chain, with the values it reads and writes."""

    program: "Program"
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    # Values that nothing needs any more after it, and those it writes for nobody.
    over: tuple[int, ...]
    unread: frozenset[int]
    # Device bytes that others take while it runs, and those of them that are closed over.
    waiting: int
    constants: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Programs one after the other."""

    plan: Plan
    flat: FlatJaxpr
    arguments: Arguments
    # Closed-over arrays that loops and branches read.
    read_over: tuple[tuple[int, Any], ...]
    stages: tuple[Stage, ...]
    # Results that must end in host memory, by position.
    to_host: frozenset[int]
    ends_on_host: tuple[bool, ...]

    @property
    def given(self) -> Arguments:
        return self.arguments

    @property
    def constants(self) -> Constants:
        own = lowering.constants_on_device(self.flat)
        return {**own, **_all_constants([s.program for s in self.stages])}

    @property
    def report(self) -> CompileReport:
        reports = (s.program.report for s in self.stages)
        return functools.reduce(CompileReport.beside, reports)


Program: TypeAlias = Straight | Loop | Choice | Rows | Chain


def _all_constants(programs: Iterable[Program]) -> dict[int, int]:
    return {key: nbytes for p in programs for key, nbytes in p.constants.items()}


def make_program(
    closed: Any,
    forwarded: Collection[int] | Mapping[int, int],
    arguments: Arguments,
    budget: Budget,
    how: How,
    to_host: frozenset[int] = frozenset(),
    condition: Condition | None = None,
) -> Program:
    """Takes a function apart, compiles its tasks and plans them.

    Args:
      closed: the function's jaxpr.
      forwarded: arguments that may be returned as they are, as for `flatten`.
      arguments: how the arguments are held.
      budget: what there is, and what others take of it.
      how: the user's choices.
      to_host: positions of results that must end in host memory.
      condition: for the body of a loop; its constants come first among the arguments, and
        what it says first among the results.

    Raises:
      DoesNotFit: where a single equation, or the caller's own arrays, need more.
      HostMemoryError: where the host cannot hold what must leave the device.
      UnsupportedError: for what cannot be taken apart.
    """
    pairs = forwarded.items() if isinstance(forwarded, Mapping) else forwarded
    forwards = tuple(sorted(pairs))
    key = (id(closed), forwards, arguments, budget, how, to_host, id(condition))
    if key not in how.known:
        # Kept with what it was made of, so that the ids stay theirs.
        how.known[key] = (
            closed,
            condition,
            _made(closed, forwarded, arguments, budget, how, to_host, condition),
        )
    made = how.known[key][-1]
    if isinstance(made, DoesNotFit):
        raise made
    return made


def _made(
    closed: Any,
    forwarded: Collection[int] | Mapping[int, int],
    arguments: Arguments,
    budget: Budget,
    how: How,
    to_host: frozenset[int],
    condition: Condition | None,
) -> Program | DoesNotFit:
    avals = argument_avals(closed, condition)
    refusals: list[DoesNotFit] = []
    # Only what cannot be planned otherwise is cut along its axes.
    for axes in (False, True) if how.axes and not how.finest else (False,):
        for attempt in how.attempts:
            streaming = None
            if how.streams:
                streaming = lowering.streaming(avals, arguments, budget, attempt)
            flat = flatten(closed, forwarded, streaming, condition)
            has_loops = any(e.name in ("scan", "while", "cond") for e in flat.equations)
            if axes and streaming is not None and not has_loops:
                # What was cut along rows is to be cut along any axis instead.
                flat = flatten(closed, forwarded, None, condition)
            inner = dataclasses.replace(how, axes=axes)
            make = functools.partial(_of_flat, flat, arguments, budget, inner, attempt)
            try:
                made = make(to_host)
                if _may_be_called_again(made, budget, how.returned):
                    return made
                return make(to_host.union(*how.returned.groups))
            except DoesNotFit as error:
                refusals.append(error)
                if not has_loops or streaming is None:
                    break
    refusal = min(refusals, key=lambda refusal: refusal.needed_bytes)
    return refusal.with_traceback(None)


def _of_flat(
    flat: FlatJaxpr,
    arguments: Arguments,
    budget: Budget,
    how: How,
    attempt: int,
    to_host: frozenset[int],
) -> "Straight | Chain":
    if any(e.driven for e in flat.equations):
        inner = dataclasses.replace(how, repeated=False, attempts=(attempt,))
        return _chain(flat, arguments, budget, inner, to_host)
    if how.axes:
        return _cut_along_axes(flat, arguments, budget, how, to_host)
    return _straight(flat, arguments, budget, how, to_host)


def _may_be_called_again(
    made: "Straight | Chain", budget: Budget, returned: Returned
) -> bool:
    """Whether there is surely room for a call with results that are left on the device.

    For a plan of tasks that read their arguments whole, `lowering.leaving` knows. A loop
    copies what it carries of the caller's, and what was cut in host memory will be whole:
    so there must be room for such results three times.
    """
    given, flat = made.given, made.flat
    if isinstance(made, Straight) and not flat.slices:
        return True
    newly = [
        padded(flat.type_of(flat.outputs[at]).nbytes)
        for at, i in returned.again
        if at not in made.to_host and given.whose[i] is not Whose.CALLER_DEVICE
    ]
    needed = _peak_without_residents(made) + _TIMES * sum(newly)
    return not newly or needed <= budget.arena(given.device)


def _peak_without_residents(made: "Straight | Chain") -> int:
    """The peak, where loops keep nothing on the device that they could also stream."""
    if isinstance(made, Straight):
        return made.plan.peak_bytes
    return max(
        s.program.plan.peak_bytes + s.waiting - _resident_bytes(s.program)
        for s in made.stages
    )


def _resident_bytes(program: Program) -> int:
    if isinstance(program, Loop) and isinstance(program.body, Straight):
        return program.body.resident_bytes
    return 0


def refusal_that_is_true(
    make: Callable[[int, How], Program], how: How, cut: DoesNotFit, uncut: DoesNotFit
) -> DoesNotFit:
    """The refusal with a budget that works.

    What is cut for one budget is cut otherwise for another, so what it asks for may not be
    enough; then it is what the function needs without being cut along its axes.

    Args:
      make: makes the program in a budget.
      how: how the function is made.
      cut, uncut: the refusals of a budget, with and without that.
    """
    uncut = _of_all_pieces(
        lambda budget: make(budget, dataclasses.replace(how, axes=False)), uncut
    )
    for _ in range(_TRIES_CUT):
        if cut.needed_bytes > _WORTH * uncut.needed_bytes:
            break
        try:
            make(cut.needed_bytes, how)
        except DoesNotFit as error:
            least = max(error.needed_bytes, cut.needed_bytes + 1)
            cut = refusal_of_budget(error, cut.gpu_bytes, least)
        except HostMemoryError:
            return cut  # on the device there is room
        else:
            return cut
    return uncut


def _of_all_pieces(make: Callable[[int], Program], refusal: DoesNotFit) -> DoesNotFit:
    """The refusal with the budget in which all pieces of a chain can be planned.

    A piece that does not fit hides those after it: so the budget it asks for is tried.
    """
    budget = refusal.needed_bytes
    for attempt in range(_TRIES):
        try:
            make(budget)
        except DoesNotFit as error:
            # What is asked for next is exact, unless the pieces ask in turns for a little.
            least = budget + 1 if attempt < _TRIES // 2 else budget + budget // 4
            budget = max(error.needed_bytes, least)
            refusal = refusal_of_budget(error, refusal.gpu_bytes, budget)
        except HostMemoryError:
            break  # on the device there is room
        else:
            break
    return refusal


def explained(refusal: DoesNotFit, flat: FlatJaxpr | None, device: Device) -> DoesNotFit:
    """The same refusal, with what cannot be done in parts and why."""
    arena = placement.arena_bytes(refusal.gpu_bytes, device)
    reason = in_the_way(flat, arena) if flat is not None else ""
    if not reason:
        return refusal
    message = str(refusal).replace(". Raise gpu_bytes", f". {reason} Raise gpu_bytes", 1)
    return DoesNotFit(
        message, needed_bytes=refusal.needed_bytes, gpu_bytes=refusal.gpu_bytes
    )


def refusal_of_budget(refusal: DoesNotFit, gpu_bytes: int, needed_bytes: int) -> DoesNotFit:
    """The same refusal as the answer to a budget, which is to be at least so much."""
    message = str(refusal)
    for what, before, now in (
        ("gpu_bytes is", refusal.gpu_bytes, gpu_bytes),
        ("at least", refusal.needed_bytes, needed_bytes),
    ):
        said = rf"{what} {before}( \([^)]*\))?"
        message = re.sub(said, f"{what} {now} ({format_bytes(now)})", message)
    return DoesNotFit(message, needed_bytes=needed_bytes, gpu_bytes=gpu_bytes)


def remeasured(program: Program, gpu_bytes: int, how: How) -> Program | None:
    """The same with measured times, where that changes nothing else; else None."""
    if not isinstance(program, Straight):
        return None
    assert how.trials is not None
    budget = Budget(gpu_bytes)
    return _planned(lowering.measure(program.split, how.trials), budget, how)


def _cut_along_axes(
    flat: FlatJaxpr,
    arguments: Arguments,
    budget: Budget,
    how: How,
    to_host: Collection[int],
) -> Straight:
    """One plan for all tasks, with large stretches cut in the first way that fits; where
    that moves much, in the fastest of some, as predicted."""
    refusal: DoesNotFit | None = None
    found: list[Straight] = []
    arena = budget.arena(arguments.device)
    where, platform = lowering.where(flat, arguments), arguments.device.platform
    if lowering.bytes_at_start(flat, arguments) <= arena:
        for cut in cut_along_axes(flat, where, arena, platform):
            try:
                found.append(_straight(cut, arguments, budget, how, to_host))
            except DoesNotFit as error:
                if refusal is None or error.needed_bytes < refusal.needed_bytes:
                    refusal = error.with_traceback(None)
                continue
            if _moves_little(found[-1].plan, flat) or len(found) == _SOME_WAYS:
                break
    if found:
        return min(found, key=lambda made: made.plan.predicted_seconds)
    if refusal is None:  # there is no way: so it says what it needs as it is
        return _straight(flat, arguments, budget, how, to_host)
    raise refusal


def _moves_little(plan: Plan, flat: FlatJaxpr) -> bool:
    """Whether a plan moves no more than some times what goes in and comes out."""
    ends = sum(flat.types[v].nbytes for v in flat.inputs)
    ends += sum(flat.type_of(output).nbytes for output in flat.outputs)
    return plan.h2d_bytes + plan.d2h_bytes <= _MUCH * ends


def _tasks_between(
    flat: FlatJaxpr,
    arguments: Arguments,
    budget: Budget,
    how: How,
    to_host: Collection[int],
) -> Straight:
    """One plan for the tasks between two loops or branches, cut if it must be."""
    try:
        return _straight(flat, arguments, budget, how, to_host)
    except DoesNotFit as error:
        if not how.axes:
            raise
        refusal = error.with_traceback(None)
    try:
        return _cut_along_axes(flat, arguments, budget, how, to_host)
    except DoesNotFit as error:
        raise min(error, refusal, key=lambda e: e.needed_bytes) from None


def _straight(
    flat: FlatJaxpr,
    arguments: Arguments,
    budget: Budget,
    how: How,
    to_host: Collection[int],
) -> Straight:
    """One plan for all tasks."""
    split = lowering.split(
        flat,
        arguments,
        budget,
        to_host,
        how.finest,
        how.repeated,
        how.returned,
        how.executables,
    )
    if how.trials is not None:
        split = lowering.measure(split, how.trials)
    return _planned(split, budget, how)


def _planned(split: Split, budget: Budget, how: How) -> Straight:
    plan, schedule = lowering.make_plan(split, budget.room, how.strategy, how.link)
    return Straight(split, plan, schedule)


# -- chains ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """Where a value is between stages."""

    on_host: bool
    # Whether it may be used up; else the caller keeps it.
    ours: bool
    nbytes: int
    name: str

    @property
    def whose(self) -> Whose:
        if self.on_host:
            return Whose.DONATED_HOST if self.ours else Whose.CALLER_HOST
        return Whose.DONATED_DEVICE if self.ours else Whose.CALLER_DEVICE

    def kept(self) -> "_Held":
        return dataclasses.replace(self, ours=False)


def _chain(
    flat: FlatJaxpr,
    arguments: Arguments,
    budget: Budget,
    how: How,
    to_host: frozenset[int],
) -> Chain:
    """Programs one after the other, for which there is room beside all closed-over arrays
    that any of them has on the device, and whose results leave room for the next call."""
    arguments = lowering.kept(arguments, flat)
    to_host |= lowering.at_home(flat, arguments)
    returned = how.returned
    how = dataclasses.replace(how, returned=lowering.NOTHING_KNOWN)
    device, reserve = arguments.device, 0
    _refuse_what_is_there(flat, arguments, budget)
    while True:
        chain = _chain_beside(flat, arguments, budget, how, to_host, reserve)
        arena = budget.arena(device)
        lacking = chain.plan.peak_bytes - arena - _INNER
        if lacking > 0:
            reserve += lacking
            continue
        away = lowering.leaving(flat, arguments, to_host, returned, arena)
        if away <= to_host:
            return chain
        to_host |= away


def _refuse_what_is_there(flat: FlatJaxpr, arguments: Arguments, budget: Budget) -> None:
    """Refuses a budget that device arguments and closed-over arrays alone exceed."""
    device = arguments.device
    there = lowering.bytes_at_start(flat, arguments)
    if there > budget.arena(device):
        needed = budget.needed(there, device)
        raise DoesNotFit(
            f"arguments and closed-over arrays on the device take {format_bytes(there)};"
            f" gpu_bytes is {budget.gpu_bytes} ({format_bytes(budget.gpu_bytes)})."
            " Hold them in host memory with jturnip.host(tree), or raise gpu_bytes to at"
            f" least {needed} ({format_bytes(needed)}).",
            needed_bytes=needed,
            gpu_bytes=budget.gpu_bytes,
        )


def _chain_beside(
    flat: FlatJaxpr,
    arguments: Arguments,
    budget: Budget,
    how: How,
    to_host: frozenset[int],
    reserve: int,
) -> Chain:
    """A chain in a budget of which `reserve` bytes are for what bodies close over."""
    pieces = list(_pieces(flat))
    last_use = _last_uses(flat, pieces)
    read_over = _read_by_driven(flat, pieces)
    always = lowering.constants_on_device(flat)
    held = _held_at_start(flat, arguments, read_over)
    stages: list[Stage] = []
    for k, piece in enumerate(pieces):
        there = {v: held[v] for v in piece.reads}
        mine = {
            v: h if last_use[v] == k and piece.reads.count(v) == 1 else h.kept()
            for v, h in there.items()
        }
        waiting = _on_device(
            h
            for v, h in held.items()
            if v not in mine
            and v not in read_over
            and (not h.ours or last_use.get(v, -1) >= k)
        )
        others = sum(always.values()) - sum(
            always.get(id(a), 0) for a in _closed_over(flat, piece)
        )
        left = budget.beside(waiting + others + reserve)
        ahead = pieces[k + 1] if k + 1 < len(pieces) else None
        away = _away(flat, piece, ahead, 0 if how.tight else budget.room, to_host)
        if isinstance(piece.work, Equation):
            made = _driven(piece.work, mine, arguments, left, how)
        else:
            own = _arguments(arguments, mine.values())
            made = _tasks_between(piece.work, own, left, how, away)
        for v, on_host in zip(piece.writes, made.ends_on_host, strict=True):
            nbytes = flat.types[v].nbytes
            held[v] = _Held(on_host, True, nbytes, f"a result of {_name(piece)}")
        over = tuple(v for v in piece.reads if last_use[v] == k and held[v].ours)
        unread = frozenset(v for v in piece.writes if last_use[v] == k)
        stages.append(Stage(made, piece.reads, piece.writes, over, unread, waiting, 0))
    everything = {**always, **_all_constants([s.program for s in stages])}
    for k, (stage, piece) in enumerate(zip(stages, pieces, strict=True)):
        own = {*stage.program.constants, *map(id, _closed_over(flat, piece))}
        others = sum(n for key, n in everything.items() if key not in own)
        stages[k] = dataclasses.replace(
            stage, waiting=stage.waiting + others, constants=others
        )
    ends = tuple(
        isinstance(o, Parts) or at in to_host or held[o].on_host
        for at, o in enumerate(flat.outputs)
    )
    plan = _together(
        [(_name(p), s.program.plan) for s, p in zip(stages, pieces, strict=True)],
        budget.room,
    )
    peak = max(s.program.plan.peak_bytes + s.waiting for s in stages)
    plan = dataclasses.replace(plan, peak_bytes=peak)
    used = tuple((v, a) for v, a in flat.constants if v in read_over)
    return Chain(plan, flat, arguments, used, tuple(stages), to_host, ends)


def _closed_over(flat: FlatJaxpr, piece: "_Piece") -> list[Any]:
    """The closed-over arrays that a piece has, or is given."""
    if isinstance(piece.work, FlatJaxpr):
        return [a for _, a in piece.work.constants]
    return [a for v, a in flat.constants if v in piece.reads]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some equations of a chain as a function, or a driven one."""

    work: FlatJaxpr | Equation
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def _name(piece: _Piece) -> str:
    if isinstance(piece.work, Equation):
        return f'"{piece.work.name}" ({piece.work.source or "unknown line"})'
    first = piece.work.equations[0]
    return f'tasks from "{first.name}" ({first.source or "unknown line"})'


def _pieces(flat: FlatJaxpr) -> Iterator[_Piece]:
    runs: list[list[Equation]] = [[]]
    driven: list[Equation] = []
    for equation in flat.equations:
        if equation.driven:
            driven.append(equation)
            runs.append([])
        else:
            runs[-1].append(equation)
    needed: list[set[int]] = []  # after each run
    later = set(flat.result_values)
    for k in range(len(runs) - 1, -1, -1):
        needed.append(set(later))
        later.update(v for e in runs[k] for v in e.inputs if isinstance(v, int))
        if k:
            later.update(v for v in driven[k - 1].inputs if isinstance(v, int))
    needed.reverse()
    for k, run in enumerate(runs):
        if run:
            yield _run(flat, run, needed[k])
        if k < len(driven):
            reads = tuple(v for v in driven[k].inputs if isinstance(v, int))
            yield _Piece(driven[k], reads, driven[k].outputs)


def _run(flat: FlatJaxpr, run: Sequence[Equation], needed: set[int]) -> _Piece:
    written = {v for e in run for v in e.outputs}
    entering = {
        v: None for e in run for v in e.inputs if isinstance(v, int) and v not in written
    }
    slices = [s for s in flat.slices if s.value in entering]
    cut = {s.value for s in slices}
    needs = dict.fromkeys((*entering, *(s.source for s in slices)))
    constants = tuple((v, a) for v, a in flat.constants if v in needs)
    closed_over = {v for v, _ in constants}
    reads = tuple(v for v in needs if v not in cut and v not in closed_over)
    writes = tuple(v for e in run for v in e.outputs if v in needed)
    work = FlatJaxpr(flat.types, tuple(run), reads, constants, writes, tuple(slices))
    return _Piece(work, reads, writes)


def _last_uses(flat: FlatJaxpr, pieces: Sequence[_Piece]) -> dict[int, int]:
    last: dict[int, int] = {}
    for k, piece in enumerate(pieces):
        last.update(dict.fromkeys((*piece.writes, *piece.reads), k))
    last.update(dict.fromkeys(flat.result_values, len(pieces)))
    return last


def _read_by_driven(flat: FlatJaxpr, pieces: Sequence[_Piece]) -> frozenset[int]:
    read = {v for p in pieces if isinstance(p.work, Equation) for v in p.reads}
    return frozenset(v for v, _ in flat.constants if v in read)


def _held_at_start(
    flat: FlatJaxpr, arguments: Arguments, constants: Collection[int]
) -> dict[int, _Held]:
    held: dict[int, _Held] = {}
    unread = lowering.unread(flat)
    for v, w, name in zip(flat.inputs, arguments.whose, arguments.names, strict=True):
        if v not in unread:
            held[v] = _Held(w.on_host, w.donated or w.ours, flat.types[v].nbytes, name)
    for number, (v, array) in enumerate(flat.constants):
        if v in constants:
            on_host = lowering.constant_whose(array).on_host
            name = f"closed-over array {number}"
            held[v] = _Held(on_host, False, flat.types[v].nbytes, name)
    return held


def _arguments(like: Arguments, held: Iterable[_Held]) -> Arguments:
    held = list(held)
    return dataclasses.replace(
        like,
        whose=tuple(h.whose for h in held),
        names=tuple(h.name for h in held),
    )


def _away(
    flat: FlatJaxpr,
    piece: _Piece,
    ahead: _Piece | None,
    gpu_bytes: int,
    to_host: Collection[int],
) -> frozenset[int]:
    """Results of a straight piece that go to host memory, by position: results of the
    function that must, what only waits for the loop ahead to end, and what is large."""
    ending = {
        v
        for at, output in enumerate(flat.outputs)
        if isinstance(output, Parts) or at in to_host
        for v in values_of(output)
    }
    away = set()
    for at, v in enumerate(piece.writes):
        nbytes = flat.types[v].nbytes
        waits = ahead is not None and v not in ahead.reads
        share = _WAITING if waits else _CARRIED
        large = nbytes > min(SMALL, gpu_bytes) and nbytes > gpu_bytes // share
        if v in ending or large:
            away.add(at)
    return frozenset(away)


# -- loops and branches ----------------------------------------------------------------


def _driven(
    equation: Equation,
    held: Mapping[int, _Held],
    arguments: Arguments,
    budget: Budget,
    how: How,
) -> Program:
    operands = [held[v] for v in equation.inputs if isinstance(v, int)]
    if equation.name in tables.HOST_READS | tables.HOST_WRITES:
        away = sum(h.nbytes for h in operands if not h.on_host)
        plan = dataclasses.replace(
            _together([], budget.room), d2h_bytes=away, peak_bytes=_on_device(operands)
        )
        return Rows(plan, equation.origin)
    make = _loop if equation.name == "while" else _choice
    return make(equation, operands, arguments, budget, how)


def _loop(
    equation: Equation,
    operands: Sequence[_Held],
    arguments: Arguments,
    budget: Budget,
    how: How,
) -> Loop:
    params = equation.origin.params
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    constants = [h.kept() for h in operands[: of_condition + of_body]]
    carried = operands[of_condition + of_body :]
    # A carried array that the caller keeps on the device is copied: it stays there.
    staying = _on_device(h for h in carried if not h.ours)
    budget = budget.beside(staying)
    on_host = _carried_on_host(carried, budget.room)
    condition = Condition(params["cond_jaxpr"], of_condition)
    # What the body returns as it is stays in its own place: so it is the loop's for good.
    given = {i + 1: len(constants) + i for i in range(len(carried))}
    often = dataclasses.replace(how, repeated=True)
    while True:
        state = [
            dataclasses.replace(h, on_host=away, ours=True)
            for h, away in zip(carried, on_host, strict=True)
        ]
        own = _arguments(arguments, [*constants, *state])
        to_host = frozenset([0, *(i + 1 for i, away in enumerate(on_host) if away)])
        try:
            body = make_program(
                params["body_jaxpr"], given, own, budget, often, to_host, condition
            )
        except DoesNotFit:
            if all(on_host):
                raise
            _send_larger_half(carried, on_host)
            continue
        moved = [
            i for i, away in enumerate(body.ends_on_host[1:]) if away and not on_host[i]
        ]
        if not moved:
            break
        for i in moved:
            on_host[i] = True
    asked = _arguments(arguments, [*constants[:of_condition], *(h.kept() for h in state)])
    beside = _on_device(constants[of_condition:])
    left = budget.beside(beside)
    begin = make_program(params["cond_jaxpr"], (), asked, left, how, frozenset([0]))
    used_up = _used_up(body)[of_condition + of_body :]
    plan = _together([("condition", begin.plan), ("body", body.plan)], budget.room)
    everything = sum(_all_constants((begin, body)).values())
    lacking = lambda program: everything - sum(program.constants.values())
    peak = max(
        _on_device([*constants, *carried]),  # before any is put in its place
        begin.plan.peak_bytes + beside + staying + lacking(begin),
        body.plan.peak_bytes + staying + lacking(body),
    )
    plan = dataclasses.replace(plan, peak_bytes=peak)
    if isinstance(body, Straight):
        plan = dataclasses.replace(plan, h2d_bytes=plan.h2d_bytes + body.resident_bytes)
    return Loop(plan, of_condition, of_body, begin, body, tuple(on_host), used_up)


def _on_device(held: Iterable[_Held]) -> int:
    """Bytes of those that are on the device."""
    return sum(padded(h.nbytes) for h in held if not h.on_host)


def _carried_on_host(carried: Sequence[_Held], room: int) -> list[bool]:
    """The smallest stay on the device, up to a share of the budget."""
    on_host = [True] * len(carried)
    total = 0
    for i in sorted(range(len(carried)), key=lambda i: carried[i].nbytes):
        total += carried[i].nbytes
        if total > room // _CARRIED:
            break
        on_host[i] = False
    return on_host


def _send_larger_half(carried: Sequence[_Held], on_host: list[bool]) -> None:
    there = [i for i, away in enumerate(on_host) if not away]
    there.sort(key=lambda i: carried[i].nbytes)
    for i in there[len(there) // 2 :]:
        on_host[i] = True


def _used_up(program: Program) -> tuple[bool, ...]:
    if isinstance(program, Straight):
        return tuple(w.donated for w in program.split.arguments.whose)
    assert isinstance(program, Chain)
    return tuple(w.donated for w in program.arguments.whose)


def _choice(
    equation: Equation,
    operands: Sequence[_Held],
    arguments: Arguments,
    budget: Budget,
    how: How,
) -> Choice:
    index, *operands = operands
    beside = _on_device([index])
    own = _arguments(arguments, operands)
    given = [i for i, h in enumerate(operands) if h.ours]
    to_host: frozenset[int] = frozenset()
    while True:
        branches = tuple(
            make_program(branch, given, own, budget.beside(beside), how, to_host)
            for branch in equation.origin.params["branches"]
        )
        ends = [b.ends_on_host for b in branches]
        away = frozenset(i for one in ends for i, on_host in enumerate(one) if on_host)
        if away == to_host:
            break
        to_host = away
    places = tuple(i in to_host for i in range(len(equation.origin.outvars)))
    plan = _together([(f"branch {i}", b.plan) for i, b in enumerate(branches)], budget.room)
    everything = sum(_all_constants(branches).values()) + beside
    peak = max(b.plan.peak_bytes + everything - sum(b.constants.values()) for b in branches)
    return Choice(dataclasses.replace(plan, peak_bytes=peak), branches, places)


def _together(named: Sequence[tuple[str, Plan]], gpu_bytes: int) -> Plan:
    """The plan of pieces that run one after the other, each once."""
    plans = tuple(dataclasses.replace(plan, name=name) for name, plan in named)
    total: Callable[[str], Any] = lambda name: sum(getattr(p, name) for p in plans)
    return Plan(
        gpu_bytes=gpu_bytes,
        peak_bytes=max((p.peak_bytes for p in plans), default=0),
        h2d_bytes=total("h2d_bytes"),
        d2h_bytes=total("d2h_bytes"),
        host_bytes=max((p.host_bytes for p in plans), default=0),
        predicted_seconds=total("predicted_seconds"),
        lower_bound_seconds=total("lower_bound_seconds"),
        strategy="driven",
        taskgraph=TaskGraph((), (), ()),
        memgraph=MemGraph(gpu_bytes, (), (), (), ()),
        pieces=plans,
    )
