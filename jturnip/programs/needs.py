"""What XLA has shown of single equations: that a task with one of them needs too much.

A function is cut in one way after the other until one fits. What is in the way is often
the same loop in all of them, which is compiled once then.
"""

from dataclasses import dataclass, field
from typing import Any

from jturnip.errors import DoesNotFit
from jturnip.frontend.partition import Partitioner
from jturnip.frontend.values import Equation, FlatJaxpr
from jturnip.placement import Budget
from jturnip.planner.planner import refusal_of_budget


@dataclass(frozen=True, slots=True)
class _Shown:
    """A task with an equation needs at least so much, and was refused for it."""

    # Whose id is the key, so that it stays its own.
    origin: Any
    nbytes: int
    refusal: DoesNotFit
    # What others held meanwhile.
    taken: int


@dataclass(slots=True)
class Needs:
    """Of the equations of one function."""

    _known: dict[int, _Shown] = field(default_factory=dict)

    def know(
        self, equation: Equation, nbytes: int, refusal: DoesNotFit, budget: Budget
    ) -> None:
        """A task with an equation needs so many bytes beside what is on the device anyway,
        whatever it writes over, and was refused."""
        known = self._known.get(id(equation.origin))
        if known is None or known.nbytes < nbytes:
            shown = _Shown(equation.origin, nbytes, refusal, budget.taken)
            self._known[id(equation.origin)] = shown

    def refuse(
        self, flat: FlatJaxpr, partitioner: Partitioner, budget: Budget, left: int
    ) -> None:
        """Refuses a function with an equation that is known to need more than is left
        beside what is on the device anyway.

        Raises:
          DoesNotFit: the refusal of before, of this budget.
        """
        for e, equation in enumerate(flat.equations):
            known = self._known.get(id(equation.origin))
            if known is not None and known.nbytes - partitioner.there(e) > left:
                needed = known.refusal.needed_bytes + budget.taken - known.taken
                needed = max(budget.gpu_bytes + 1, needed)
                raise refusal_of_budget(known.refusal, budget.gpu_bytes, needed)

    def clear(self) -> None:
        """Forgets all."""
        self._known.clear()
