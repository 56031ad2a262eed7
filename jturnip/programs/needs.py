"""What XLA has shown of single equations: that a task with one of them needs too much.

A function is cut in one way after the other until one fits. What is in the way is often
the same loop in all of them, which is compiled once then.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from jturnip.errors import DoesNotFit
from jturnip.frontend.partition import Group, Partitioner
from jturnip.frontend.values import Equation, FlatJaxpr
from jturnip.placement import Budget
from jturnip.planner.planner import refusal_of_budget
from jturnip.units import padded


@dataclass(frozen=True, slots=True)
class _Shown:
    """A task with an equation needs at least so much, and was refused for it."""

    # Whose id is the key, so that it stays its own.
    origin: Any
    nbytes: int
    refusal: DoesNotFit
    # What others held meanwhile.
    taken: int


@dataclass(frozen=True, slots=True)
class _Alone:
    """A task of nothing but an equation, and what it repeats, was refused."""

    shown: _Shown
    # What spared it bytes: what it wrote over, and what it read that was there anyway.
    written_over: int
    there: int


@dataclass(slots=True)
class Needs:
    """Of the equations of one function."""

    _known: dict[int, _Shown] = field(default_factory=dict)
    _alone: dict[int, _Alone] = field(default_factory=dict)

    def know(
        self, equation: Equation, nbytes: int, refusal: DoesNotFit, budget: Budget
    ) -> None:
        """A task with an equation needs so many bytes beside what is on the device anyway,
        whatever it writes over, and was refused."""
        known = self._known.get(id(equation.origin))
        if known is None or known.nbytes < nbytes:
            shown = _Shown(equation.origin, nbytes, refusal, budget.taken)
            self._known[id(equation.origin)] = shown

    def know_alone(
        self,
        flat: FlatJaxpr,
        partitioner: Partitioner,
        group: Group,
        nbytes: int,
        refusal: DoesNotFit,
        budget: Budget,
    ) -> None:
        """A task that cannot be cut needs so many bytes beside what is there anyway, and
        was refused."""
        e = partitioner.only(group)
        origin = flat.equations[e].origin
        shown = _Shown(origin, nbytes, refusal, budget.taken)
        there = partitioner.there(e)
        self._alone[id(origin)] = _Alone(shown, _written_over(flat, group), there)

    def refuse(
        self,
        flat: FlatJaxpr,
        partitioner: Partitioner,
        budget: Budget,
        left: int,
        finest: Callable[[], Sequence[Group]],
        among: Collection[int] | None = None,
    ) -> None:
        """Refuses a function with an equation, of some or all, that is known to need more
        than is left beside what is on the device anyway; `finest` gives the smallest tasks
        there can be.

        Raises:
          DoesNotFit: the refusal of before, of this budget.
        """
        alone: set[int] = set()
        for e in range(len(flat.equations)) if among is None else among:
            equation = flat.equations[e]
            known = self._known.get(id(equation.origin))
            if known is not None and known.nbytes - partitioner.there(e) > left:
                _refuse(known, budget)
            before = self._alone.get(id(equation.origin))
            if before is not None and before.shown.nbytes > left:
                alone.add(e)
        for group in finest() if alone else ():
            e = partitioner.only(group)
            if e not in alone:
                continue
            before = self._alone[id(flat.equations[e].origin)]
            # Nothing spares it more than before.
            written_over, there = _written_over(flat, group), partitioner.there(e)
            if written_over <= before.written_over and there <= before.there:
                _refuse(before.shown, budget)

    def clear(self) -> None:
        """Forgets all."""
        self._known.clear()
        self._alone.clear()


def _refuse(known: _Shown, budget: Budget) -> None:
    needed = known.refusal.needed_bytes + budget.taken - known.taken
    needed = max(budget.gpu_bytes + 1, needed)
    raise refusal_of_budget(known.refusal, budget.gpu_bytes, needed)


def _written_over(flat: FlatJaxpr, group: Group) -> int:
    return sum(padded(flat.types[group.outputs[o]].nbytes) for o, _ in group.overwrites)
