"""Values that depend on nothing: what they are is known before a function runs."""

import math
from collections.abc import Mapping

import jax
import numpy as np

from jturnip.frontend.hints import CALLS_OUT, nested
from jturnip.frontend.values import Atom, Constant, Equation, FlatJaxpr, carry_out


# The numbers of more positions than so many, or made by more equations, are not looked at.
_MOST_POSITIONS = 1 << 20
_MOST_EQUATIONS = 32


def known(
    value: Atom, flat: FlatJaxpr, written: Mapping[int, Equation]
) -> np.ndarray | None:
    """What a value is, if it depends on nothing and is soon made.

    Args:
      value: what is asked about.
      flat: the function.
      written: value → the equation that writes it.
    """
    if isinstance(value, Constant):
        return np.asarray(value.value)
    if math.prod(flat.types[value].shape) > _MOST_POSITIONS:
        return None
    steps: dict[int, Equation] = {}  # the last first
    agenda = [value]
    while agenda:
        e = written.get(agenda.pop())
        if e is None or not _is_plain(e) or len(steps) > _MOST_EQUATIONS:
            return None
        steps.pop(id(e), None)  # what reads it may have come after it
        steps[id(e)] = e
        agenda += e.reads
    values: dict[int, np.ndarray] = {}
    with jax.ensure_compile_time_eval():
        carry_out([*reversed(steps.values())], values)
    return np.asarray(values[value])


def _is_plain(e: Equation) -> bool:
    """Whether an equation calls nobody, and surely ends."""
    calls = e.name in CALLS_OUT or any(True for _ in nested(e.origin))
    return not (calls or e.effects or e.origin.effects)
