"""Tests of `jturnip.programs.chains`."""

from hypothesis import given, strategies as st

from jturnip.errors import DoesNotFit
from jturnip.programs.chains import with_reserve


def tried(needed: int, most: int, step: int, told: int) -> tuple[int | None, int]:
    """What is reserved, and how many were made to find it.

    Args:
      needed: where more than this is reserved it is enough; until then `told` are lacking.
      most: where more than this is reserved nothing fits.
      step: what is reserved counts in such steps.
      told: how much each says is lacking.
    """
    made: list[int] = []

    def make(reserve: int) -> int:
        made.append(reserve)
        if reserve > most:
            raise DoesNotFit("", needed_bytes=1, gpu_bytes=1)
        return reserve

    lacking = lambda reserve: told if reserve // step * step < needed else 0
    try:
        return with_reserve(make, lacking), len(made)
    except DoesNotFit:
        return None, len(made)


def test_what_is_lacking_is_reserved():
    assert tried(0, 0, 1, 256) == (0, 1)
    assert tried(1 << 20, 1 << 30, 1, 1 << 20) == (1 << 20, 2)


def test_what_changes_nothing_grows_fast():
    """A fixed point in its smallest budget was made hundreds of times, and took 16 s."""
    reserve, times = tried(1 << 20, 1 << 30, 1 << 16, 256)
    assert reserve is not None
    assert 1 << 20 <= reserve < 2 << 20
    assert times <= 14


@given(
    st.integers(0, 1 << 14),
    st.integers(0, 1 << 14),
    st.integers(1, 999),
    st.integers(1, 999),
)
def test_nothing_is_refused_that_fits(needed: int, room: int, step: int, told: int):
    enough = -(-needed // step) * step
    reserve, _ = tried(needed, enough + 256 + told + room, step, told)
    assert reserve is not None
    assert reserve >= needed
    assert tried(needed, enough - 1, step, told)[0] is None or not enough
