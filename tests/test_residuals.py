"""Which residuals stay on the device for the backward part."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat import flat_of

from jturnip.frontend.values import Type
from jturnip.placement import Arguments, Whose, is_on_host
from jturnip.programs import places
from jturnip.stages import residuals
from jturnip.stages.options import Part


ARENA = 1600 * 4096
# Of the result, and of five residuals, in hundreds of granules.
SIZES = (1, 2, 3, 5, 6, 1)
TYPES = [Type((hundreds * 100 * 1024,), np.dtype(np.float32), False) for hundreds in SIZES]


@dataclasses.dataclass
class Later:
    """A backward part, by what it takes with residuals on the device of so many hundreds of
    granules, as it is and cut along axes; it is refused with others."""

    takes: Mapping[int, float]
    takes_cut: Mapping[int, float] = dataclasses.field(default_factory=dict)
    most: int = 2 * ARENA
    asked: list[int] = dataclasses.field(default_factory=list)
    asked_cut: list[int] = dataclasses.field(default_factory=list)

    def seconds(
        self, arguments: Sequence[Any], results: Sequence[Any], beside_bytes: int, cut: bool
    ) -> float | None:
        there = [
            size
            for size, result in zip(SIZES[1:], results[1:], strict=True)
            if not is_on_host(result)
        ]
        asked, takes = (self.asked_cut, self.takes_cut) if cut else (self.asked, self.takes)
        asked.append(sum(there))
        return takes.get(sum(there))

    def most_bytes(self, arguments: Sequence[Any]) -> int:
        return self.most


def staying(later: Later | None, residual_bytes: int = 0) -> list[int]:
    groups = 0, None, None, None, None, None
    part = Part(groups, later=later, residual_bytes=residual_bytes)
    away = residuals.away(part, TYPES, [], jax.devices()[0], ARENA)
    return sorted(SIZES[i] for i in part.residuals if i not in away)


def test_all_stay_where_all_that_comes_after_fits_with_them():
    later = Later({}, most=ARENA)
    assert staying(later) == [1, 2, 3, 5, 6]
    assert not later.asked


@pytest.mark.parametrize(
    ("takes", "found", "asked"),
    [
        # Of 7/8 of the budget, a half, a quarter and nothing: 11, 6, 3 and 0.
        ({11: 1.0, 6: 1.0}, [1, 2, 3, 5], [11, 6]),
        ({11: 1.0, 6: 0.98}, [1, 2, 3, 5], [11, 6]),
        ({11: 1.0, 6: 0.9, 3: 0.9}, [1, 2, 3], [11, 6, 3]),
        ({11: 1.0, 6: 0.9, 3: 0.8, 0: 0.7}, [], [11, 6, 3, 0]),
        ({3: 1.0, 0: 2.0}, [1, 2], [11, 6, 3, 0]),
        ({3: 1.0}, [1, 2], [11, 6, 3, 0]),
        ({}, [], [11, 6, 3, 0]),  # there is nothing else to do
    ],
)
def test_as_many_stay_as_the_part_after_it_is_fastest_with(
    takes: Mapping[int, float], found: list[int], asked: list[int]
):
    later = Later(takes)
    assert staying(later) == found
    assert later.asked == asked
    assert later.asked_cut == ([11, 6, 3] if not takes else [])


@pytest.mark.parametrize(
    ("takes_cut", "found"), [({6: 1.0, 3: 1.0}, [1, 2, 3]), ({3: 1.0, 0: 0.5}, [])]
)
def test_the_part_after_it_is_cut_only_where_it_must_be(
    takes_cut: Mapping[int, float], found: list[int]
):
    later = Later({}, takes_cut)
    assert staying(later) == found
    later = Later({3: 5.0}, takes_cut)
    assert staying(later) == [1, 2]
    assert not later.asked_cut


def test_a_quarter_stays_where_nothing_is_known_of_what_comes_after():
    assert staying(None) == [1, 2]


def test_others_take_their_room():
    assert staying(Later({3: 1.0}), residual_bytes=1000 * 4096) == [1, 2]
    assert staying(None, residual_bytes=ARENA) == []


def test_what_is_returned_has_room_before_residuals():
    """A loss that lay in host memory could not be differentiated: JAX has its cotangent on
    the device."""
    flat = flat_of(lambda x: (jnp.sum(x), jnp.tanh(x)), np.ones(1024, np.float32))
    device = jax.devices()[0]
    given = Arguments((Whose.CALLER_DEVICE,), ("x",), device, False)
    returned = Part((0, None)).returned(())
    arena = 2 * 4096 + 128  # for the argument, and one of the results
    assert places.leaving(flat, given, (), returned, arena) == frozenset()
    both = Part((0, 1)).returned(())
    assert places.leaving(flat, given, (), both, arena) == {1}
