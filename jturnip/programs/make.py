"""A traced function to a program in a budget: flatten, split, plan; again if it must be."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jturnip import compat
from jturnip.compiler.executables import TooManyTasks
from jturnip.errors import DoesNotFit, PlanningError
from jturnip.frontend import costs
from jturnip.frontend.blocks import (
    Ways,
    cut_along_axes,
    has_loops_with_axes,
    large_for,
)
from jturnip.frontend.bodies import with_bodies_in_blocks
from jturnip.frontend.flatten import flatten
from jturnip.frontend.inline import Condition, argument_avals
from jturnip.frontend.loops import LOOPS_AND_BRANCHES, bytes_for_one_branch
from jturnip.frontend.memory_model import inner_bytes
from jturnip.frontend.streaming import Seen
from jturnip.frontend.tables import loops_read_rows
from jturnip.frontend.values import Equation, FlatJaxpr, called
from jturnip.graph.plan import Plan
from jturnip.placement import Arguments, Budget, Returned, Whose
from jturnip.programs import attempts, places, planning, splitting
from jturnip.programs.bounds import read_whole_bytes
from jturnip.programs.chains import Held, arguments_of, chain
from jturnip.programs.devices import link_of, rates
from jturnip.programs.driven import driven
from jturnip.programs.records import Chain, How, Loop, Program, Straight
from jturnip.units import padded


# There must be room for so many of the results that stay on the device in a next call.
_TIMES = 3


# Where a function that is cut moves more than so many times what goes in and comes out, so
# many ways to cut it are planned, while together they have no more tasks than so many.
_MUCH = 4
_SOME_WAYS = 4
_SOME_TASKS = 1000
# What has so many times the equations of another way that fits takes long to plan, and was
# not faster in any of the six functions of which several ways were compared.
_TIMES_FEWEST = 2
# Of another way than one with nothing much to gain, as many executables as of that may be
# compiled, or so many; and none of one with as many equations, that differs in the number
# of blocks.
_FEW_EXECUTABLES = 32
# XLA accesses so many times the bytes that tasks read and write where they copy a lot: 2.1
# of a network of convolutions that took three times as long as cut otherwise, 0.9 and 1.2
# of others that could not be cut much better.
_COPIES = 1.6
# Where a plan as it is takes so many times what its tasks do by themselves, so many ways to
# cut it are looked at.
_WAITS = 1.5
_WAYS_BESIDE = 3
# So many loops are driven only so that what an iteration makes can be cut, into so many
# parts about: each takes seconds.
_MOST_LOOPS = 4
_MOST_PARTS = 16
# Ways that are looked at before a function is taken apart into more equations than so many.
_FIRST_WAYS = 8
# What is to be cut has no Fourier transform over several dimensions at once that gives more
# than one over so many of the budget.
_OF_ONE_FFT = 4
_MOST_EQUATIONS = 1000


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
    refusals: list[DoesNotFit] = []
    by_rows = read_whole_bytes(closed) <= budget.arena(arguments.device)
    if how.axes and by_rows:  # only what cannot be planned otherwise is cut along its axes
        uncut = dataclasses.replace(how, axes=False)
        try:
            return make_program(
                closed, forwarded, arguments, budget, uncut, to_host, condition
            )
        except DoesNotFit as error:
            refusals.append(error.with_traceback(None))
    for make in _tries(closed, forwarded, arguments, budget, how, condition):
        if how.axes and refusals and how.effort.is_enough:
            break
        try:
            made = _for_any_call(make, budget, how, to_host)
        except DoesNotFit as error:
            refusals.append(error.with_traceback(None))
        else:
            if made is not None:
                return made
    refusal = min(refusals, key=lambda refusal: refusal.needed_bytes)
    return refusal.with_traceback(None)


# Makes a program, of the results that end in host memory; None where others may be better.
_Try: TypeAlias = Callable[[frozenset[int]], "Straight | Chain | None"]


def _tries(
    closed: Any,
    forwarded: Collection[int] | Mapping[int, int],
    arguments: Arguments,
    budget: Budget,
    how: How,
    condition: Condition | None,
) -> Iterator[_Try]:
    """What is tried for a function, one after the other until something fits."""
    device = arguments.device
    arena, expected = budget.arena(device), rates(device, how.accelerator)
    largest_fft = arena // _OF_ONE_FFT if how.axes else math.inf
    seen = how.passes.seen(compat.lowering_platform(device), largest_fft)
    flat = flatten(closed, forwarded, None, condition, seen)
    loops_stay = takes_apart = how.streams and not how.finest
    in_blocks = iter(())
    if loops_stay:
        large = large_for(arena, expected, _seconds_per_byte(arguments, how))
        in_blocks = with_bodies_in_blocks(flat, arena, expected, large, seen)
    if how.axes and loops_stay:
        if has_loops_with_axes(flat, arena):
            yield functools.partial(_cut_along_axes, flat, arguments, budget, how)
        for cut in in_blocks:
            yield functools.partial(_cut_along_axes, cut, arguments, budget, how)
    avals = argument_avals(closed, condition)

    def streamed(attempt: int, drive_all: bool = False) -> FlatJaxpr:
        streaming = attempts.streaming(avals, arguments, budget, attempt)
        # What is between loops is cut along axes, which may be others than the rows.
        streaming = dataclasses.replace(
            streaming, rates=expected, drive_all=drive_all, cut_arrays=not how.axes
        )
        return flatten(closed, forwarded, streaming, condition, seen)

    hosted = places.where(flat, arguments).hosted
    for attempt in how.attempts if not (how.axes and how.finest) else ():
        tried = streamed(attempt) if how.streams else flat
        has_loops = any(e.name in LOOPS_AND_BRANCHES for e in tried.equations)
        if has_loops or any(e.driven for e in tried.equations) or not how.axes:
            if loops_stay and _takes_loops_apart(tried, flat, hosted, arena):
                loops_stay = False  # it is the same for every attempt
                whole = _with_whole_loops(
                    flat, tried, in_blocks, seen, arguments, budget, how
                )
                yield from whole
        else:  # what was cut along rows is to be cut along any axis instead
            tried = flat
        yield functools.partial(_of_flat, tried, arguments, budget, how, attempt)
        if not has_loops or not how.streams:
            break
    if how.axes and takes_apart:
        yield from _driving_all(streamed, arguments, budget, how)


def _driving_all(
    streamed: Callable[[int, bool], FlatJaxpr],
    arguments: Arguments,
    budget: Budget,
    how: How,
) -> Iterator[_Try]:
    """What is tried last: loops of known length are driven, and what they do is cut."""
    arena = budget.arena(arguments.device)
    for attempt in dict.fromkeys((how.attempts[0], how.attempts[-1])):
        tried = streamed(attempt, True)
        if _is_worth_driving(tried, arena):
            yield functools.partial(_of_flat, tried, arguments, budget, how, attempt)


def _is_worth_driving(flat: FlatJaxpr, arena: int) -> bool:
    """Whether there are loops to be driven so that what an iteration makes can be cut, and
    neither so many nor so large that it would take minutes."""
    loops = [e.origin for e in flat.equations if e.name == "while" and e.driven]
    return 0 < len(loops) <= _MOST_LOOPS and all(
        inner_bytes(e) <= _MOST_PARTS * arena for e in loops
    )


def _with_whole_loops(
    flat: FlatJaxpr,
    tried: FlatJaxpr,
    in_blocks: Iterator[FlatJaxpr],
    seen: Seen,
    arguments: Arguments,
    budget: Budget,
    how: How,
) -> Iterator[_Try]:
    """What is tried rather than taking loops apart."""
    arena, hosted = budget.arena(arguments.device), places.where(flat, arguments).hosted
    # A loop is done for a part of the positions along an axis, rather than driven.
    has_axes = has_loops_with_axes(flat, arena, "while")
    if has_axes and not loops_read_rows(flat, hosted, seen.inline):
        yield functools.partial(_cut_along_axes, flat, arguments, budget, how)
    # It is one task.
    for cut in in_blocks:
        yield functools.partial(_straight, cut, arguments, budget, how)
    # It becomes a few tasks, rather than very many.
    many = len(tried.equations) > max(_MOST_EQUATIONS, len(flat.equations))
    if many and has_loops_with_axes(flat, arena):
        yield functools.partial(_moving_once, flat, arguments, budget, how)


def _takes_loops_apart(
    tried: FlatJaxpr, flat: FlatJaxpr, hosted: Collection[int], arena: int
) -> bool:
    """Whether a function has loops that are driven, or cut, when it is so streamed, and no
    branches that it is better to drive."""
    chosen = (bytes_for_one_branch(e, e.inputs, flat.types, hosted) for e in flat.equations)
    if max(chosen, default=0) > arena * attempts.LARGEST:
        return False
    loops = [sum(e.name == "scan" for e in each.equations) for each in (flat, tried)]
    return any(e.driven for e in tried.equations) or loops[0] != loops[1]


def _for_any_call(
    make: _Try,
    budget: Budget,
    how: How,
    to_host: frozenset[int],
) -> "Straight | Chain | None":
    """A program, of the results that end in host memory, that surely has room for a next
    call: with more of them there if it must be."""
    made = make(to_host)
    if made is None or _may_be_called_again(made, budget, how.returned):
        return made
    return make(to_host.union(*how.returned.groups))


def _of_flat(
    flat: FlatJaxpr,
    arguments: Arguments,
    budget: Budget,
    how: How,
    attempt: int,
    to_host: frozenset[int],
) -> "Straight | Chain":
    if any(e.driven for e in flat.equations):
        inner = dataclasses.replace(how, attempts=(attempt,))
        make_piece = functools.partial(_piece, arguments)
        return chain(flat, arguments, budget, inner, to_host, make_piece)
    if how.axes:
        return _cut_along_axes(flat, arguments, budget, how, to_host)
    return _straight(flat, arguments, budget, how, to_host)


def _piece(
    arguments: Arguments,
    work: FlatJaxpr | Equation,
    held: Sequence[Held],
    budget: Budget,
    how: How,
    to_host: frozenset[int],
) -> Program:
    """The program of a piece of a chain."""
    if isinstance(work, Equation):
        return driven(work, held, arguments, budget, how, make_program)
    return _tasks_between(work, arguments_of(arguments, held), budget, how, to_host)


def or_in_blocks(
    made: Program,
    closed: Any,
    forwarded: Collection[int] | Mapping[int, int],
    arguments: Arguments,
    budget: Budget,
    how: How,
    to_host: frozenset[int] = frozenset(),
) -> Program:
    """A program of few tasks that wait for what is moved, or of scans that were taken
    apart; or one of the same function with what is between arguments and results done in
    blocks, so that it need not be moved, or with scans cut along their axes instead, if
    that is predicted to be faster.

    Args:
      made: of the other arguments, as for `make_program`.
    """
    if not isinstance(made, Straight) or how.any_plan or how.finest or not how.axes:
        return made
    if how.strategy != "auto":  # others are compared with one another, of the same tasks
        return made
    tasks = made.split.graph.tasks
    computing = sum(task.seconds for task in tasks)
    waits = made.plan.predicted_seconds > _WAITS * computing
    waits = waits and not _moves_little(made.plan, made.flat)
    if len(tasks) > _SOME_TASKS or not (waits or _has_bodies(closed)):
        return made
    seen = how.passes.seen(compat.lowering_platform(arguments.device))
    flat = flatten(closed, forwarded, None, None, seen)
    loops = [e for e in flat.equations if any(True for _ in costs.nested(e.origin))]
    apart = bool(loops) and len(made.flat.equations) > len(flat.equations)
    scans = apart and has_loops_with_axes(flat, budget.arena(arguments.device))
    if not (scans or (waits and not loops)):
        return made
    found = [made]
    for ways in itertools.islice(_ways(flat, arguments, budget, how), _WAYS_BESIDE):
        for cut in () if ways.doubtful else ways.cut:
            if len(cut.equations) > len(flat.equations) and not scans:
                continue  # over more tasks: it would be moved as well
            with contextlib.suppress(PlanningError):
                found.append(_straight(cut, arguments, budget, how, to_host))
    found = [m for m in found if m is made or _may_be_called_again(m, budget, how.returned)]
    return min(found, key=lambda made: made.plan.predicted_seconds)


def _has_bodies(closed: Any) -> bool:
    """Whether something of a jaxpr is a loop, a branch or the like."""
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        bodies = list(costs.nested(eqn))
        if bodies and (called(eqn) is None or any(map(_has_bodies, bodies))):
            return True
    return False


def _may_be_called_again(
    made: "Straight | Chain", budget: Budget, returned: Returned
) -> bool:
    """Whether there is surely room for a call with results that are left on the device.

    For a plan of tasks that read their arguments whole, `places.leaving` knows. A loop
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
        s.program.plan.peak_bytes + s.waiting - _bytes_kept_in_a_loop(s.program)
        for s in made.stages
    )


def _bytes_kept_in_a_loop(program: Program) -> int:
    return program.body.plan.kept_bytes if isinstance(program, Loop) else 0


def remeasured(program: Program, gpu_bytes: int, how: How) -> Program | None:
    """The same with measured times, where that changes nothing else; else None."""
    if not isinstance(program, Straight):
        return None
    assert how.trials is not None
    budget = Budget(gpu_bytes)
    split = planning.measure(program.split, how.trials)
    return searched(planning.planned(split, budget, how), budget, how)


def searched(program: Program, budget: Budget, how: How) -> Program:
    """The same with its tasks in a better order, if a search finds one."""
    if isinstance(program, Straight):
        return planning.searched(program, budget, how)
    return program


def _cut_along_axes(
    flat: FlatJaxpr,
    arguments: Arguments,
    budget: Budget,
    how: How,
    to_host: Collection[int],
) -> Straight:
    """One plan for all tasks, with large stretches cut in the first way that fits; where
    that moves much, or makes something anew, in the fastest of some, as predicted."""
    make = lambda cut, *most: _straight(cut, arguments, budget, how, to_host, *most)
    # With other results in host memory what was found before is the first to be tried.
    key = "cut", id(flat), arguments, budget, how
    if key in how.known:
        with contextlib.suppress(DoesNotFit):
            return make(how.known[key][-1])
    compared = _Compared(flat, make, how.any_plan)
    if places.bytes_at_start(flat, arguments) <= budget.arena(arguments.device):
        has_copies = compared.look(_ways(flat, arguments, budget, how))
        if has_copies and not how.any_plan:
            compared.look(_ways(flat, arguments, budget, how, anew=False))
    if compared.found:
        made = min(compared.found, key=lambda made: made.plan.predicted_seconds)
        how.known[key] = flat, made.flat  # the one that has the id is kept
        return made
    if not compared.refusals:  # there is no way: so it says what it needs as it is
        return make(flat)
    raise min(compared.refusals, key=lambda refusal: refusal.needed_bytes)


@dataclass(slots=True)
class _Compared:
    """What a function becomes in different ways to cut it."""

    flat: FlatJaxpr
    make: Callable[..., Straight]
    # Whether any plan will do.
    any_plan: bool
    found: list[Straight] = field(default_factory=list)
    refusals: list[DoesNotFit] = field(default_factory=list)

    def look(self, ways: Iterator[Ways]) -> bool:
        """Makes some of these until one moves little, or enough is known; whether one of
        those that fit makes something anew."""
        found: list[Straight] = []
        anew, looked = False, 0
        for together in ways:
            if found and together.doubtful:
                break
            fit = self._of(together.cut, found)
            if not fit:
                continue
            looked += fit
            anew |= together.anew
            tasks = sum(len(made.split.graph.tasks) for made in found)
            enough = self.any_plan or looked >= _SOME_WAYS or tasks > _SOME_TASKS
            if enough or any(_moves_little(made.plan, self.flat) for made in found):
                break
        self.found += found
        return anew

    def _of(self, ways: Sequence[FlatJaxpr], found: list[Straight]) -> int:
        """Makes those that may be faster than what was found, which grows; how many fit,
        or are not made."""
        count = 0
        for cut in ways:
            fewest = min((len(made.flat.equations) for made in found), default=math.inf)
            if self.any_plan and count:
                break
            most = _most_executables([*self.found, *found], cut)
            if len(cut.equations) > _TIMES_FEWEST * fewest or not most:
                count += 1
                continue
            try:
                found.append(self.make(cut, most))
            except DoesNotFit as error:
                self.refusals.append(error.with_traceback(None))
            except TooManyTasks:
                count += 1
            else:
                count += 1
        return count


def _most_executables(found: Sequence[Straight], cut: FlatJaxpr) -> float:
    """How many executables may be compiled for another way."""
    if not found:
        return math.inf
    best = min(found, key=lambda made: made.plan.predicted_seconds)
    if _has_much_to_gain(best):
        return math.inf
    if len(cut.equations) == len(best.flat.equations):
        return 0
    return max(_FEW_EXECUTABLES, len(best.split.executables))


def _has_much_to_gain(made: Straight) -> bool:
    """Whether a plan waits much for what it moves, or its tasks copy a lot within."""
    graph = made.split.graph
    computing = sum(task.seconds for task in graph.tasks)
    accessed = sum(task.bytes_accessed for task in graph.tasks)
    crossing = sum(
        graph.buffers[b].nbytes for t in graph.tasks for b in (*t.inputs, *t.outputs)
    )
    waits = made.plan.predicted_seconds > _WAITS * computing
    return waits or accessed > _COPIES * crossing


def _moving_once(
    flat: FlatJaxpr,
    arguments: Arguments,
    budget: Budget,
    how: How,
    to_host: Collection[int],
) -> Straight | None:
    """The same, in one of the first ways in which nothing moves twice; else None."""
    if places.bytes_at_start(flat, arguments) > budget.arena(arguments.device):
        return None
    for together in itertools.islice(_ways(flat, arguments, budget, how), _FIRST_WAYS):
        for cut in together.cut:
            with contextlib.suppress(DoesNotFit):
                made = _straight(cut, arguments, budget, how, to_host)
                if _moves_little(made.plan, flat, 1):
                    return made
    return None


def _ways(
    flat: FlatJaxpr,
    arguments: Arguments,
    budget: Budget,
    how: How,
    anew: bool = True,
) -> Iterator[Ways]:
    device = arguments.device
    expected = rates(device, how.accelerator)
    return cut_along_axes(
        flat,
        places.where(flat, arguments),
        budget.arena(device),
        expected,
        device.platform,
        _seconds_per_byte(arguments, how),
        anew,
        how.effort,
    )


def _seconds_per_byte(arguments: Arguments, how: How) -> float:
    """What it takes to move a byte to host memory and back."""
    link = link_of(arguments.device, how.link)
    return 1 / link.h2d_bytes_per_second + 1 / link.d2h_bytes_per_second


def _moves_little(plan: Plan, flat: FlatJaxpr, times: float = _MUCH) -> bool:
    """Whether a plan moves no more than so many times what goes in and comes out."""
    ends = sum(flat.types[v].nbytes for v in flat.inputs)
    ends += sum(flat.type_of(output).nbytes for output in flat.outputs)
    return plan.h2d_bytes + plan.d2h_bytes <= times * ends


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
        if not how.axes or how.effort.is_enough:
            raise
        refusal = error.with_traceback(None)
    try:
        return _cut_along_axes(flat, arguments, budget, how, to_host)
    except DoesNotFit as error:
        least = lambda refusal: refusal.needed_bytes
        refusal = min(error.with_traceback(None), refusal, key=least)
    raise refusal


def _straight(
    flat: FlatJaxpr,
    arguments: Arguments,
    budget: Budget,
    how: How,
    to_host: Collection[int],
    most: float = math.inf,
) -> Straight:
    """One plan for all tasks, for which so many executables may be compiled."""
    how.effort.made_tasks(len(flat.equations))
    split = splitting.split(
        flat,
        arguments,
        budget,
        to_host,
        how.finest,
        how.repeated,
        how.returned,
        how.executables,
        how.accelerator,
        None if how.thorough else how.needs,
        most,
        how.spent,
    )
    if how.trials is not None:
        split = planning.measure(split, how.trials)
    return planning.planned(split, budget, how)
