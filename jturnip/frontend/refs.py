"""Mutable references: each with all that touches it becomes one equation.

A reference's reads and writes happen in the order of the program, and its bytes change in
place; neither can be taken apart. So everything that touches one, and everything on a way
from one such equation to another, is drawn together. From outside that is a function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jturnip import compat
from jturnip.frontend.hints import nested
from jturnip.frontend.values import bind


@dataclass(frozen=True, slots=True)
class Region:
    """Equations of one jaxpr that are one for us."""

    eqns: tuple[Any, ...]
    # Variables from outside that it reads; those of its own that are read outside.
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]

    @property
    def lead(self) -> Any:
        """An equation that stands for it towards the user."""
        return next(e for e in self.eqns if _touches(e))

    def function(self) -> Callable[..., list[Any]]:
        """What it computes: its equations, one after the other."""

        def region(*arguments: Any) -> list[Any]:
            values = dict(zip(self.invars, arguments, strict=True))
            read = lambda atom: atom.val if hasattr(atom, "val") else values[atom]
            for eqn in self.eqns:
                results = bind(eqn, list(map(read, eqn.invars)))
                values.update(zip(eqn.outvars, results, strict=True))
            return [values[v] for v in self.outvars]

        return region


def _touches(eqn: Any) -> bool:
    return any(compat.is_reference(v.aval) for v in (*eqn.invars, *eqn.outvars))


def are_in(jaxpr: Any) -> bool:
    """Whether references are made or touched anywhere in a jaxpr."""
    return any(
        _touches(eqn) or any(are_in(getattr(c, "jaxpr", c)) for c in nested(eqn))
        for eqn in jaxpr.eqns
    )


def draw_together(jaxpr: Any) -> Sequence[Any]:
    """The equations of a jaxpr in a valid order, those around references as `Region`s."""
    eqns = jaxpr.eqns
    touching = [i for i, e in enumerate(eqns) if _touches(e)]
    if not touching:
        return eqns
    operands = _operands(eqns)
    sets = [_between(group, operands) for group in _by_reference(eqns, touching)]
    order = _order(_merged(sets), operands)
    if order is None:  # two that wait for each other are one
        order = _order([_between(touching, operands)], operands)
    assert order is not None
    return [
        eqns[members[0]] if len(members) == 1 else _region(jaxpr, members)
        for members in order
    ]


def _operands(eqns: Sequence[Any]) -> list[set[int]]:
    writer: dict[Any, int] = {}
    operands: list[set[int]] = []
    for i, eqn in enumerate(eqns):
        read = (v for v in eqn.invars if not hasattr(v, "val"))
        operands.append({writer[v] for v in read if v in writer})
        writer.update(dict.fromkeys(eqn.outvars, i))
    return operands


def _by_reference(eqns: Sequence[Any], touching: Sequence[int]) -> list[list[int]]:
    """Equations that touch the same references, directly or through others."""
    groups: list[tuple[set[Any], list[int]]] = []
    for i in touching:
        atoms = (*eqns[i].invars, *eqns[i].outvars)
        mine = {v for v in atoms if compat.is_reference(v.aval)}
        members = [i]
        others = []
        for refs, group in groups:
            if refs.isdisjoint(mine):
                others.append((refs, group))
            else:
                mine, members = mine | refs, group + members
        groups = [*others, (mine, members)]
    return [sorted(members) for _, members in groups]


def _between(members: Sequence[int], operands: Sequence[set[int]]) -> set[int]:
    """`members`, and what depends on one of them and leads to another."""
    after = set(members)
    for i in range(min(members), max(members) + 1):
        if not after.isdisjoint(operands[i]):
            after.add(i)
    leading = set(members)
    for i in range(max(members), min(members) - 1, -1):
        if i in leading:
            leading |= operands[i]
    return (after & leading) | set(members)


def _merged(sets: Sequence[set[int]]) -> list[set[int]]:
    merged: list[set[int]] = []
    for one in sets:
        others = []
        for other in merged:
            if one.isdisjoint(other):
                others.append(other)
            else:
                one = one | other
        merged = [*others, one]
    return merged


def _order(
    sets: Sequence[set[int]], operands: Sequence[set[int]]
) -> list[list[int]] | None:
    """Every equation once, each set in one piece; None where no order has that."""
    of = {i: k for k, one in enumerate(sets) for i in one}
    placed: set[int] = set()
    order: list[list[int]] = []
    waiting = list(range(len(operands)))
    while waiting:
        left = []
        for i in waiting:
            if i in placed:
                continue
            members = sorted(sets[of[i]]) if i in of else [i]
            needs = set().union(*(operands[m] for m in members)) - set(members)
            if needs <= placed:
                order.append(members)
                placed.update(members)
            else:
                left.append(i)
        if len(left) == len(waiting):
            return None
        waiting = left
    return order


def _region(jaxpr: Any, members: Sequence[int]) -> Region:
    eqns = tuple(jaxpr.eqns[i] for i in members)
    inside = {v for e in eqns for v in e.outvars}
    entering = {
        v: None for e in eqns for v in e.invars if not hasattr(v, "val") and v not in inside
    }
    chosen = frozenset(members)
    outside = {
        v
        for i, e in enumerate(jaxpr.eqns)
        if i not in chosen
        for v in e.invars
        if not hasattr(v, "val")
    }
    outside.update(v for v in jaxpr.outvars if not hasattr(v, "val"))
    leaving = tuple(v for e in eqns for v in e.outvars if v in outside)
    return Region(eqns, tuple(entering), leaving)
