"""Refusals: that ask for a budget that works, and say what is in the way."""

import dataclasses
from collections.abc import Callable

from jturnip import placement
from jturnip.compat import Device
from jturnip.errors import DoesNotFit, HostMemoryError
from jturnip.frontend.blocks import CUT, in_the_way
from jturnip.frontend.values import FlatJaxpr
from jturnip.planner.planner import refusal_of_budget
from jturnip.programs.records import Program
from jturnip.programs.setting import How


# How often the budget that a refusal asks for is tried, to find what comes after it; in how
# many of these just what it asks for; and where stretches are cut for each budget.
_TRIES = 12
_EXACT = 2
_TRIES_CUT = 2


# A refusal asks for what needs no cutting unless cutting makes do with this share of it.
_WORTH = 0.9


def refusal_that_is_true(
    make: Callable[[int, How], Program],
    how: How,
    cut: DoesNotFit,
    uncut: DoesNotFit,
    runs_whole: Callable[[int], bool],
) -> DoesNotFit:
    """The refusal with a budget that works.

    What is cut for one budget is cut otherwise for another, so what it asks for may not be
    enough; then it is what the function needs without being cut along its axes.

    Args:
      make: makes the program in a budget.
      how: how the function is made.
      cut, uncut: the refusals of a budget, with and without that.
      runs_whole: whether the function runs as one executable in so many bytes; they are
        not tried then.
    """
    # Any plan shows that there is one, and none need be timed.
    how = dataclasses.replace(how, any_plan=True, trials=None)
    as_it_is = how.as_it_is(thorough=True)
    uncut = _of_all_pieces(lambda budget: make(budget, as_it_is), uncut, runs_whole)
    for _ in range(_TRIES_CUT):
        if cut.needed_bytes > _WORTH * uncut.needed_bytes:
            break
        if runs_whole(int(cut.needed_bytes / _WORTH)):
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


def _of_all_pieces(
    make: Callable[[int], Program], refusal: DoesNotFit, runs_whole: Callable[[int], bool]
) -> DoesNotFit:
    """The refusal with the budget in which all pieces of a chain can be planned.

    A piece that does not fit hides those after it: so the budget it asks for is tried.
    """
    budget = refusal.needed_bytes
    for attempt in range(_TRIES):
        if runs_whole(budget):
            break
        try:
            make(budget)
        except DoesNotFit as error:
            # What is asked for next is exact, unless the pieces ask in turns for a little.
            more = 1 if attempt < _EXACT else budget >> (6 if attempt < _TRIES // 2 else 2)
            least = budget + more
            budget = max(error.needed_bytes, least)
            refusal = refusal_of_budget(error, refusal.gpu_bytes, budget)
        except HostMemoryError:
            break  # on the device there is room
        else:
            break
    return refusal


def explained(refusal: DoesNotFit, flat: FlatJaxpr | None, device: Device) -> DoesNotFit:
    """The same refusal, with what cannot be done in parts and why."""
    arena = placement.arena_bytes(refusal.gpu_bytes, device.platform)
    reason = in_the_way(flat, arena) if flat is not None else ""
    if not reason:
        return refusal
    message = str(refusal).replace(". Raise gpu_bytes", f". {reason} Raise gpu_bytes", 1)
    if CUT in reason:
        message += " Less may do, cut otherwise: lowered.minimum_gpu_bytes looks for that."
    return refusal.saying(message)
