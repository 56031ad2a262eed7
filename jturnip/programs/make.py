"""A traced function to a program in a budget: flatten, split, plan; again if it must be."""

import contextlib
import dataclasses
import itertools
from typing import Any

from jturnip.errors import DoesNotFit, HostMemoryError, PlanningError
from jturnip.frontend.effort import Effort
from jturnip.frontend.unrolling import carries_more
from jturnip.placement import Budget
from jturnip.programs import planning
from jturnip.programs.bounds import read_whole_bytes
from jturnip.programs.records import Program, Straight, expected_seconds
from jturnip.programs.setting import Function, How, Setting
from jturnip.programs.tries import (
    OF_STENCILS,
    first_that_fits,
    large_for_cutting,
    tries_of,
    with_other_bodies,
)
from jturnip.programs.ways import (
    moves_little,
    or_in_tiles,
    straight,
    surely_in_tiles,
)


def make_program(
    function: Function, setting: Setting, to_host: frozenset[int] = frozenset()
) -> Program:
    """Takes a function apart, compiles its tasks and plans them.

    Args:
      function: what is to be computed.
      setting: what it is made for.
      to_host: positions of results that must end in host memory.

    Raises:
      DoesNotFit: where a single equation, or the caller's own arrays, need more.
      HostMemoryError: where the host cannot hold what must leave the device.
      UnsupportedError: for what cannot be taken apart.
    """
    known, key = setting.how.known, (function.key, setting, to_host)
    if key not in known:
        # Kept with what it was made of, so that the ids stay theirs.
        known[key] = function, _made(function, setting, to_host)
    made = known[key][-1]
    if isinstance(made, DoesNotFit):
        raise made
    return made


def _made(
    function: Function, setting: Setting, to_host: frozenset[int]
) -> Program | DoesNotFit:
    if function.condition is not None:  # of a loop that is driven
        in_tiles = surely_in_tiles(function.flat(setting.seen()), setting, to_host)
        if in_tiles is not None:
            return in_tiles
    refusals: list[DoesNotFit] = []
    by_rows = read_whole_bytes(function.closed) <= setting.arena
    # Only what cannot be planned otherwise is cut along its axes.
    if setting.how.axes and by_rows:
        # The body of a driven loop is not tried again at last.
        is_body = function.condition is not None
        as_it_is = setting.how.as_it_is(may_be_hasty=not is_body)
        uncut = dataclasses.replace(setting, how=as_it_is)
        try:
            made = make_program(function, uncut, to_host)
            return or_in_tiles(made, function, uncut, to_host)
        except DoesNotFit as error:
            refusals.append(error.with_traceback(None))
    tries = tries_of(function, setting, make_program)
    made = first_that_fits(tries, setting, to_host, refusals)
    if made is not None:
        return made
    refusal = min(refusals, key=lambda refusal: refusal.needed_bytes)
    return refusal.with_traceback(None)


def or_unrolled(
    made: Program,
    function: Function,
    setting: Setting,
    to_host: frozenset[int],
    unrolled: Program | None = None,
) -> Program:
    """A program; or one of the same function in which what windows slide over is done in
    tiles, for several iterations of a loop at once, if that is predicted to be faster.

    Args:
      made: of the other arguments, as for `make_program`.
      unrolled: such a program, if one is there.
    """
    if not setting.how.compares_ways or not setting.how.axes:
        return made
    if isinstance(made, Straight) and moves_little(made.plan, made.flat):
        return made
    loops = _unrolled_loops(function, setting)
    # What a `while` takes cannot be predicted: nobody knows how often it runs.
    if not loops or any(e.primitive.name == "while" for each in loops for e in each.eqns):
        return or_in_tiles(made, function, setting, to_host)
    other = unrolled or _unrolled(function, setting, to_host)
    return made if other is None else min(made, other, key=expected_seconds)


def unrolled_first(
    function: Function, setting: Setting, to_host: frozenset[int]
) -> Program | None:
    """A program in which several iterations of a loop are one, in tiles, where what a loop
    carries does not fit beside what it becomes, or what is in between does not, in blocks
    either: done one by one, each iteration would move all of it. None where there is none,
    or it fits."""
    if not setting.how.is_free or not setting.how.axes:
        return None
    if not _unrolled_loops(function, setting):
        return None
    fits = not carries_more(function.closed, setting.arena)
    if fits and _fits_whole(function, setting, to_host):
        return None
    # What is looked at for it does not count where it is done one by one after all.
    return _unrolled(function, setting.otherwise(effort=Effort()), to_host)


def may_be_slower(unrolled: Program, setting: Setting) -> bool:
    """Whether another program may be faster than one of `unrolled_first`."""
    moves_much = isinstance(unrolled, Straight) and not moves_little(
        unrolled.plan, unrolled.flat
    )
    return moves_much and not setting.how.any_plan


def _unrolled_loops(function: Function, setting: Setting) -> list[Any]:
    """The jaxprs in which several iterations of a loop are one where a function is cut."""
    if not carries_more(function.closed, setting.arena * OF_STENCILS):
        return []
    seen = setting.seen(**large_for_cutting(setting))
    function.flat(seen)
    return seen.unrolled


def _fits_whole(function: Function, setting: Setting, to_host: frozenset[int]) -> bool:
    """Whether a function fits with its loops in one piece."""
    # It is only asked: no task is timed, and what is looked at does not count.
    setting = setting.otherwise(effort=Effort(), trials=None, any_plan=True)
    seen = setting.seen()
    flat = function.flat(seen)
    others = (other.flat for other in with_other_bodies(flat, setting, seen))
    for cut in itertools.chain((flat,), others):
        with contextlib.suppress(PlanningError):
            straight(cut, setting, to_host)
            return True
    return False


def _unrolled(
    function: Function, setting: Setting, to_host: frozenset[int]
) -> Program | None:
    """A program in which several iterations of a loop that is a stencil are one, if the
    host has room for what such a program moves."""
    with contextlib.suppress(HostMemoryError):
        tries = tries_of(function, setting, make_program)
        return first_that_fits(tries, setting, to_host, [])
    return None


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
