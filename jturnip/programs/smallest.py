"""The smallest budget in which a function runs."""

from collections.abc import Callable

from jturnip.errors import DoesNotFit


# A budget smaller by this share is refused.
_WITHIN = 0.03


def smallest(refusal_in: Callable[[int], DoesNotFit | None]) -> int:
    """The smallest budget that is not refused, in bytes: less than that by 3% is refused.

    To find that a budget is refused takes longest, since every way is tried in it. So the
    search goes down from what works by ever larger steps, and after a refusal to what that
    asks for.

    Args:
      refusal_in: the refusal of a budget, or None where it works.
    """
    asked, refused = 1, 0
    while (refusal := refusal_in(asked)) is not None:
        refused, asked = asked, max(asked + 1, refusal.needed_bytes)
    works, step = asked, _WITHIN
    while refused < (most := _less(works, _WITHIN)):
        asked_for = 0 if refusal is None else refusal.needed_bytes
        as_asked = refused < asked_for <= most
        if as_asked:
            asked = asked_for
        else:
            between = int((refused * works) ** 0.5)
            asked = max(refused + 1, min(between, most), _less(works, step))
        refusal = refusal_in(asked)
        if refusal is not None:
            refused, step = asked, _WITHIN
        else:  # what a refusal asks for is often the least: look just below that first
            works, step = asked, _WITHIN if as_asked else min(2 * step, 0.5)
    return works


def _less(nbytes: int, share: float) -> int:
    return int(nbytes * (1 - share))
