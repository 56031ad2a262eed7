"""The search for the smallest budget, on pretended functions."""

import pytest
from hypothesis import given, strategies as st

from jturnip.errors import DoesNotFit
from jturnip.programs.smallest import smallest


class Function:
    """Runs in `least` bytes and more. Refused, it asks for `least`, or at most for what it
    needs without being cut."""

    def __init__(self, least, uncut, asks_for_the_least=True):
        self.least, self.uncut = least, uncut
        self.asks_for_the_least = asks_for_the_least
        self.asked = []
        self.refused = []

    def refusal_in(self, gpu_bytes):
        self.asked.append(gpu_bytes)
        if gpu_bytes >= self.least:
            return None
        self.refused.append(gpu_bytes)
        # Far from what works nothing better is found than not to cut.
        is_near = self.asks_for_the_least and gpu_bytes >= self.least // 4
        needed = self.least if is_near else self.uncut
        return DoesNotFit("", needed_bytes=needed, gpu_bytes=gpu_bytes)


def _is_smallest(found, function):
    assert function.least <= found
    assert any(found * 0.97 - 1 <= nbytes < function.least for nbytes in function.refused)


@given(
    least=st.integers(2, 10**12),
    more=st.floats(1, 2000),
    asks_for_the_least=st.booleans(),
)
def test_what_it_finds_works_and_less_is_refused(least, more, asks_for_the_least):
    function = Function(least, int(least * more), asks_for_the_least)
    found = smallest(function.refusal_in)
    assert len(set(function.asked)) == len(function.asked)
    if found > 40:  # of fewer bytes, 3% is none
        _is_smallest(found, function)


@pytest.mark.parametrize("more", [1, 1.5, 10, 1000])
def test_little_is_refused_meanwhile(more):
    function = Function(10**9, int(10**9 * more))
    _is_smallest(smallest(function.refusal_in), function)
    # The first byte, perhaps one too far below, and one just below.
    assert len(function.refused) <= 3


def test_a_refusal_that_asks_for_too_little_is_asked_again():
    function = Function(10**6, 10**6 - 10**5)
    _is_smallest(smallest(function.refusal_in), function)


def test_one_byte_may_do():
    assert smallest(Function(1, 1).refusal_in) == 1
