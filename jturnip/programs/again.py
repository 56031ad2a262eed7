"""Whether a program has room for its own results in a next call."""

from collections.abc import Callable
from typing import TypeVar

from jturnip.placement import Budget, Returned, Whose
from jturnip.programs.records import Chain, Loop, Program, Straight
from jturnip.programs.setting import Setting
from jturnip.units import padded


# A program; None where there may be none.
Made = TypeVar("Made", bound=Straight | Chain | None)

# There must be room for so many of the results that stay on the device in a next call.
_TIMES = 3


def may_be_called_again(made: Straight | Chain, budget: Budget, returned: Returned) -> bool:
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


def for_any_call(
    make: Callable[[frozenset[int]], Made], setting: Setting, to_host: frozenset[int]
) -> Made:
    """A program, of the results that end in host memory, that surely has room for a next
    call: with more of them there if it must be."""
    made, returned = make(to_host), setting.how.returned
    if made is None or may_be_called_again(made, setting.budget, returned):
        return made
    return make(to_host.union(*returned.groups))


def _peak_without_residents(made: Straight | Chain) -> int:
    """The peak, where loops keep nothing on the device that they could also stream."""
    if isinstance(made, Straight):
        return made.plan.peak_bytes
    return max(
        s.program.plan.peak_bytes + s.waiting - _bytes_kept_in_a_loop(s.program)
        for s in made.stages
    )


def _bytes_kept_in_a_loop(program: Program) -> int:
    return program.body.plan.kept_bytes if isinstance(program, Loop) else 0
