"""What is tried for a function, one after the other until something fits: as it is, with
more and more of it taken apart, with its loops in blocks or driven, and cut along axes."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from jturnip.errors import DoesNotFit, PlanningError
from jturnip.frontend import costs
from jturnip.frontend.blocks import has_loops_with_axes, large_for
from jturnip.frontend.bodies import with_bodies_in_blocks, with_carried_in_place
from jturnip.frontend.effort import Effort
from jturnip.frontend.inline import argument_avals
from jturnip.frontend.loops import (
    LOOPS,
    LOOPS_AND_BRANCHES,
    bytes_for_one_branch,
    iterations,
    loop_counts,
)
from jturnip.frontend.memory_model import inner_bytes
from jturnip.frontend.rowwise import made_by_rows
from jturnip.frontend.sinking import sunk
from jturnip.frontend.streaming import Seen
from jturnip.frontend.tables import loops_read_rows
from jturnip.frontend.values import Equation, FlatJaxpr, Type
from jturnip.placement import Budget
from jturnip.programs import attempts, places
from jturnip.programs.again import for_any_call
from jturnip.programs.chains import Held, arguments_of, chain
from jturnip.programs.driven import Make, driven
from jturnip.programs.keeping import keeping
from jturnip.programs.records import Chain, Program, Straight, expected_seconds
from jturnip.programs.setting import Function, Setting
from jturnip.programs.ways import (
    CLEARLY,
    in_fastest_way,
    moving_once,
    straight,
    surely_in_tiles,
    waits,
)
from jturnip.runtime.schedule import Link


# So many loops are driven only so that what an iteration makes can be cut, into so many
# parts about: each takes seconds.
_MOST_LOOPS = 4
_MOST_PARTS = 16
# How to cut what is around loops that change what they carry where it is is looked for with
# this share of the usual patience: such loops can be driven as well.
_LITTLE_PATIENCE = 1 / 100
# What is to be cut has no Fourier transform over several dimensions at once, or of a row,
# that gives more than one over so many of the budget.
_OF_ONE_FFT = 4
# Loops are taken apart into no more equations than so many, if a few tasks do as well; and
# in later attempts than the first, into no more than so many before axes are tried.
_MOST_EQUATIONS = 1000
_VERY_MANY = 3000
# Arrays in host memory are cut at rows so that so many parts are no larger than a task.
# Where the last of these makes so many times as many equations as others, and 0, which
# leaves them whole, those are looked at first: an iteration of a decoder over a batch of 8
# became 1070 instead of 220 equations, and took 2.8 times as long.
_PARTS_AT_ONCE = (0, 1, 4)
_TIMES_FEWER = 1.5
# Of stencils that carry more than this share of what there is, in and out, several
# iterations are done at once.
OF_STENCILS = 1 / 2


# Makes a program, of the results that end in host memory; None where others may be better.
_Make: TypeAlias = Callable[[frozenset[int]], "Straight | Chain | None"]


@dataclass(frozen=True, slots=True)
class Try:
    """A way to make a program."""

    make: _Make
    # Of one in which loops make anew what they read, or do some positions after others:
    # bytes that they would move instead if they were driven.
    read_bytes: int | None = None
    # Whether loops are driven.
    drives: bool = False
    # What tells it from others, where nothing else counts that another try may change.
    key: Hashable = None


def first_that_fits(
    tries: Iterator[Try],
    setting: Setting,
    to_host: frozenset[int],
    refusals: list[DoesNotFit],
) -> "Straight | Chain | None":
    """The first program that fits; of one in which loops make anew what they read, and one
    in which they are driven and move it, the faster. `refusals` grow."""
    how = setting.how
    first: Straight | Chain | None = None
    refused: dict[Hashable, Try] = {}
    for each in tries:
        if how.axes and (refusals or first) and how.effort.is_enough:
            break
        if first and not each.drives:
            continue  # loops make the same anew, or hold it
        if each.key is not None and each.key in refused:
            continue
        try:
            made = for_any_call(each.make, setting, to_host)
        except DoesNotFit as error:
            refusals.append(error.with_traceback(None))
            refused[each.key] = each  # which keeps what it is told by
            continue
        except PlanningError:
            if first is None:
                raise
            continue
        if made is None:
            continue
        if first:
            return min(first, made, key=expected_seconds)
        first = made
        if how.any_plan or not _may_rather_move(made, each, setting.link):
            break
    return first


def _may_rather_move(made: Straight | Chain, tried: Try, link: Link) -> bool:
    """Whether it may be faster to move what loops make anew in a program."""
    if tried.read_bytes is None:
        return False
    moving = tried.read_bytes / link.h2d_bytes_per_second
    return moving < CLEARLY * expected_seconds(made)


def tries_of(function: Function, setting: Setting, make_program: Make) -> Iterator[Try]:
    """What is tried for a function, one after the other until something fits."""
    arguments, how = setting.arguments, setting.how
    arena, expected = setting.arena, setting.rates
    seen = setting.seen(**large_for_cutting(setting))
    flat = function.flat(seen)
    loops_stay = takes_apart = how.streams and not how.finest
    others = with_other_bodies(flat, setting, seen) if loops_stay else iter(())
    if how.axes and loops_stay:
        if has_loops_with_axes(flat, arena):
            yield Try(partial(in_fastest_way, flat, setting))
        for other in others:
            find = _in_a_way if other.in_place else in_fastest_way
            yield Try(partial(find, other.flat, setting), other.read_bytes)
    avals = argument_avals(function.closed, function.condition)

    # What is between loops is cut along axes, which may be others than the rows.
    *fewer, at_once = (0,) if how.axes else _PARTS_AT_ONCE

    def streamed(
        attempt: int, drive_all: bool = False, parts_at_once: int = at_once
    ) -> FlatJaxpr:
        streaming = attempts.streaming(avals, arguments, setting.budget, attempt)
        streaming = dataclasses.replace(
            streaming, rates=expected, drive_all=drive_all, parts_at_once=parts_at_once
        )
        return function.flat(seen, streaming)

    hosted = places.where(flat, arguments).hosted
    for attempt in how.attempts if not (how.axes and how.finest) else ():
        tried = streamed(attempt) if how.streams else flat
        has_loops = any(e.name in LOOPS_AND_BRANCHES for e in tried.equations)
        drives = any(e.driven for e in tried.equations)
        if has_loops or drives or not how.axes:
            if loops_stay and _takes_loops_apart(tried, flat, hosted, arena):
                loops_stay = False  # it is the same for every attempt
                in_one = (
                    Try(partial(straight, other.flat, setting), other.read_bytes)
                    for other in others
                )
                yield from _with_whole_loops(flat, tried, in_one, seen, setting)
        else:  # what was cut along rows is to be cut along any axis instead
            tried, drives = flat, False
        few = fewer if tried.slices and not (attempt or how.any_plan) else ()
        larger = [partial(streamed, attempt, parts_at_once=n) for n in few]
        make = partial(_in_fewest_parts, make_program, tried, larger, setting, attempt)
        if how.few and attempt and len(tried.equations) > _VERY_MANY:
            how.left_out.add(attempt)
            make = partial(_left_out, setting.budget)
        yield Try(make, drives=drives, key=_settled(tried) if how.axes else None)
        if not has_loops or not how.streams:
            break
    if how.axes and takes_apart:
        yield from _driving_all(streamed, setting, make_program)


def _driving_all(
    streamed: Callable[[int, bool], FlatJaxpr], setting: Setting, make_program: Make
) -> Iterator[Try]:
    """What is tried last: loops of known length are driven, and what they do is cut."""
    attempts = setting.how.attempts
    for attempt in dict.fromkeys((attempts[0], attempts[-1])):
        tried = streamed(attempt, True)
        if _is_worth_driving(tried, setting.arena):
            make = partial(_of_flat, make_program, tried, setting, attempt)
            yield Try(make, drives=True, key=_settled(tried))


def _settled(flat: FlatJaxpr) -> Hashable:
    """What tells functions apart whose loops and branches are all driven and hold none: an
    attempt that takes more apart makes the same of them. None for any other."""
    for e in flat.equations:
        inside = (eqn for body in costs.nested(e.origin) for eqn in body.eqns)
        if e.name in LOOPS_AND_BRANCHES and not e.driven:
            return None
        if any(costs.has_one_of(LOOPS_AND_BRANCHES, eqn) for eqn in inside):
            return None
    return tuple((id(e.origin), e.driven) for e in flat.equations), flat.slices


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
    in_one: Iterator[Try],
    seen: Seen,
    setting: Setting,
) -> Iterator[Try]:
    """What is tried rather than taking loops apart; `in_one` of these each is a task."""
    arena, hosted = setting.arena, places.where(flat, setting.arguments).hosted
    # A loop is done for a part of the positions along an axis, rather than driven.
    driven = [e.origin for e in tried.equations if e.driven and e.name == "while"]
    has_axes = has_loops_with_axes(flat, arena, LOOPS if driven else {"while"})
    if has_axes and not loops_read_rows(flat, hosted, seen.inline):
        yield Try(partial(in_fastest_way, flat, setting), _carried_bytes(driven))
    yield from in_one
    # It becomes a few tasks, rather than very many.
    many = len(tried.equations) > max(_MOST_EQUATIONS, len(flat.equations))
    if many and has_loops_with_axes(flat, arena):
        yield Try(partial(moving_once, flat, setting))


def _carried_bytes(loops: Sequence[Any]) -> int | None:
    """What loops carry, each in all of its iterations; None where there are none, or nobody
    knows how many iterations."""
    carried = 0
    for loop in loops:
        times, (consts, carry, _) = iterations(loop), loop_counts(loop)
        if times is None:
            return None
        types = (Type.of(v.aval) for v in loop.invars[consts : consts + carry])
        carried += times * sum(t.nbytes for t in types)
    return carried or None


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


def _left_out(budget: Budget, to_host: frozenset[int]) -> None:
    """What an attempt is that is not made yet: a refusal that none prefers."""
    del to_host
    raise DoesNotFit("", needed_bytes=sys.maxsize, gpu_bytes=budget.gpu_bytes)


def _in_a_way(flat: FlatJaxpr, setting: Setting, to_host: frozenset[int]) -> Straight:
    """One plan for all tasks, as of `in_fastest_way`, if not much must be looked at."""
    effort = Effort(patience=_LITTLE_PATIENCE)
    try:
        return in_fastest_way(flat, setting.otherwise(effort=effort), to_host)
    finally:
        setting.how.effort.looked_at(effort.equations)


@dataclass(frozen=True, slots=True)
class OtherBodies:
    """A function whose loops stay whole, and do otherwise what they do."""

    flat: FlatJaxpr
    # Bytes that they read where what is sunk into them is not made anew.
    read_bytes: int | None = None
    # Whether they change what they carry where it is; else they are in blocks.
    in_place: bool = False


def with_other_bodies(
    flat: FlatJaxpr, setting: Setting, seen: Seen
) -> Iterator[OtherBodies]:
    """A function with other bodies in its loops, which may fit: in some ways."""
    large = large_for(setting.arena, setting.rates, setting.seconds_per_byte)
    in_place = with_carried_in_place(flat, setting.arena, large, seen)
    if in_place is not None:
        yield OtherBodies(in_place, in_place=True)
    staying = places.where(flat, setting.arguments).staying
    by_rows = made_by_rows(flat, setting.arena, large, staying, seen.rules)
    inside = sunk(by_rows, large)
    if by_rows is not flat:
        yield OtherBodies(inside.flat, inside.read_bytes)
    for cut in with_bodies_in_blocks(inside.flat, setting.arena, large, seen):
        yield OtherBodies(cut, inside.read_bytes)


def large_for_cutting(setting: Setting) -> dict[str, float]:
    """What is too large to stay as it is where a function is cut, for `Passes.seen`."""
    if not setting.how.axes:
        return {}
    return {
        "largest_fft": setting.arena // _OF_ONE_FFT,
        "largest_carried": setting.arena * OF_STENCILS,
    }


def _of_flat(
    make_program: Make,
    flat: FlatJaxpr,
    setting: Setting,
    attempt: int,
    to_host: frozenset[int],
) -> "Straight | Chain":
    if any(e.driven for e in flat.equations):
        inner = setting.otherwise(attempts=(attempt,))
        return chain(flat, inner, to_host, partial(_piece, make_program))
    if setting.how.axes:
        return in_fastest_way(flat, setting, to_host)
    return straight(flat, setting, to_host)


def _in_fewest_parts(
    make_program: Make,
    flat: FlatJaxpr,
    larger: Sequence[Callable[[], FlatJaxpr]],
    setting: Setting,
    attempt: int,
    to_host: frozenset[int],
) -> "Straight | Chain":
    """A function of which arrays in host memory are in more and more parts: the first that
    fits and hardly waits for what moves, else the fastest, as predicted.

    Args:
      flat: the function in the smallest parts.
      larger: give it in larger ones. Only what has much fewer equations, and drives as
        many, is looked at: how often a loop runs that is driven, nobody may know.
      setting: of the other arguments, as for `_of_flat`.
    """
    equations = len(flat.equations)
    drives = lambda each: sum(e.driven for e in each.equations)
    found: list[Straight | Chain] = []
    for make in larger if equations <= _VERY_MANY else ():
        other = make()
        if len(other.equations) * _TIMES_FEWER > equations or drives(other) != drives(flat):
            continue
        with contextlib.suppress(PlanningError):
            found.append(_of_flat(make_program, other, setting, attempt, to_host))
            if isinstance(found[-1], Straight) and not waits(found[-1]):
                return found[-1]
    if not found:
        return _of_flat(make_program, flat, setting, attempt, to_host)
    times = [_expected_seconds(made, setting) for made in found]
    if times[-1] > times[0]:
        return found[0]  # and smaller parts would take longer still
    with contextlib.suppress(PlanningError):
        found.append(_of_flat(make_program, flat, setting, attempt, to_host))
        times.append(_expected_seconds(found[-1], setting))
    return found[times.index(min(times))]


def _expected_seconds(made: Straight | Chain, setting: Setting) -> float:
    """Seconds that a program is expected to take; of the body of a loop with some of what
    it reads in each iteration on the device, of which there is more where tasks are small.
    """
    if not setting.how.repeated:
        return expected_seconds(made)
    return expected_seconds(keeping(made, setting.budget, setting.how))


def _piece(
    make_program: Make,
    work: FlatJaxpr | Equation,
    held: Sequence[Held],
    setting: Setting,
    to_host: frozenset[int],
) -> Program:
    """The program of a piece of a chain, of which the setting has the arguments."""
    if isinstance(work, Equation):
        return driven(work, held, setting, make_program)
    own = dataclasses.replace(setting, arguments=arguments_of(setting.arguments, held))
    return _tasks_between(work, own, to_host)


def _tasks_between(flat: FlatJaxpr, setting: Setting, to_host: Collection[int]) -> Straight:
    """One plan for the tasks between two loops or branches, cut if it must be."""
    how = setting.how
    in_tiles = surely_in_tiles(flat, setting, frozenset(to_host))
    if in_tiles is not None:
        return in_tiles
    try:
        return straight(flat, setting, to_host)
    except DoesNotFit as error:
        if not how.axes or how.effort.is_enough:
            raise
        refusal = error.with_traceback(None)
    try:
        return in_fastest_way(flat, setting, to_host)
    except DoesNotFit as error:
        least = lambda refusal: refusal.needed_bytes
        refusal = min(error.with_traceback(None), refusal, key=least)
    raise refusal
