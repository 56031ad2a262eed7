"""A few of the random programs; `random_programs.py` runs any number of them."""

import pytest
from random_programs import check, random_program


pytestmark = pytest.mark.usefixtures("quick_compilation")


# Whose refusals try many ways to cut.
LONG = (16, 17, 18, 19, 20, 21)


# Whatever the steps, each kind of budget and of placement is among them.
@pytest.mark.long
@pytest.mark.parametrize(
    "seed",
    [pytest.param(s, marks=[pytest.mark.slow] if s in LONG else []) for s in range(24)],
)
def test_a_random_program_is_right_and_in_its_budget(seed: int):
    check(random_program(seed))


def test_seeds_differ_in_all_that_can_differ():
    programs = [random_program(seed) for seed in range(24)]
    assert len({step for p in programs for step in p.steps}) == 13
    assert {p.share for p in programs} == {1.0, 0.7, 0.5, 0.25, 0.0}
    assert {p.donated for p in programs} == {True, False}
    assert {place for p in programs for place in p.places} == {
        "device",
        "committed",
        "host",
        "numpy",
    }


def test_a_program_is_that_of_its_seed():
    one, other = random_program(7), random_program(7)
    assert (one.steps, one.places, one.share) == (other.steps, other.places, other.share)
