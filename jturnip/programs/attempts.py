"""What is taken apart before tasks are made: less in earlier attempts."""

import collections
from collections.abc import Sequence
from typing import Any

from jturnip import placement
from jturnip.frontend.loops import Streaming
from jturnip.placement import Arguments, Budget, Whose
from jturnip.programs.devices import rates


# A scan is cut, a loop of another kind or a branch driven, if it would hold more than these
# shares of the budget. The next pair is tried where no plan fits with loops so large.
_SHARES_OF_LOOPS = ((1 / 4, 1.0), (1 / 16, 1 / 2), (0.0, 1 / 8), (0.0, 0.0))
ATTEMPTS = len(_SHARES_OF_LOOPS)
# The share that counts as large in the first of them.
LARGEST, _ = _SHARES_OF_LOOPS[0]
# In so many of them a long scan that only repeats itself is driven.
_DRIVING = 2


def streaming(
    avals: Sequence[Any], arguments: Arguments, budget: Budget, attempt: int
) -> Streaming:
    """What is cut and driven in an attempt; later attempts cut more.

    Args:
      avals: abstract values of the arguments.
      arguments: how they are held.
      budget: what there is, and what others take of it.
      attempt: from 0 to `ATTEMPTS` - 1.
    """
    arena = budget.arena(arguments.device)
    scans, others = _SHARES_OF_LOOPS[attempt]
    donated = [
        (tuple(aval.shape), aval.dtype)
        for aval, w in zip(avals, arguments.whose, strict=True)
        if w is Whose.DONATED_HOST
    ]
    return Streaming(
        largest=int(arena * scans),
        arena=arena,
        rates=rates(arguments.device),
        drive=int(arena * others),
        drive_long=attempt < _DRIVING,
        on_host=frozenset(i for i, w in enumerate(arguments.whose) if w.on_host),
        is_on_host=lambda array: placement.whose(array, False).on_host,
        donated=collections.Counter(donated),
    )
