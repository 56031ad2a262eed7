"""What each iteration of a loop makes anew of what all of them read, made once before it.

XLA does so with a loop that it has whole (`while_loop_invariant_code_motion.cc`). Of one
that is driven it never sees more than an iteration: data less their mean, or a matrix times
a factor, would be made in each.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Var, jaxpr_as_fun

from jturnip.frontend.costs import VIEWS, has_one_of
from jturnip.frontend.loops import SMALL, iterations
from jturnip.frontend.values import Type, bind


# A barrier is where the user wants it, and a loop is large.
_STAYS = frozenset(["optimization_barrier", "while", "scan"])
# It must be worth it: in so many iterations at least. And what is made takes no more room
# than what need not be read any more, and one over so many of what it is made of.
_TIMES = 3
_LITTLE = 8


def hoisted(loop: Any) -> Any:
    """A `while`, after what is made once for all of its iterations, as a jaxpr of its
    operands; None where nothing is, and for any other equation."""
    if loop.primitive.name != "while":
        return None
    times = iterations(loop)
    if times is not None and times < _TIMES:
        return None
    before, count = loop.params["cond_nconsts"], loop.params["body_nconsts"]
    closed = loop.params["body_jaxpr"]
    jaxpr = closed.jaxpr
    made = _Body.of(jaxpr, count).worth_making()
    if not made:
        return None
    consts, carried = jaxpr.invars[:count], jaxpr.invars[count:]
    first = _cone(jaxpr.eqns, made)
    making = jaxpr.replace(invars=consts, outvars=made, eqns=first)
    left = _live(jaxpr, made)
    used = _read(left, jaxpr.outvars)
    kept = [i for i, v in enumerate(consts) if v in used]
    own = [*made, *(consts[i] for i in kept)]
    body = jaxpr.replace(invars=[*own, *carried], eqns=left)
    changed = {"body_jaxpr": closed.replace(jaxpr=body), "body_nconsts": len(own)}

    def function(*operands: Any) -> Sequence[Any]:
        asked, read = operands[:before], operands[before : before + count]
        values = [
            *jaxpr_as_fun(closed.replace(jaxpr=making))(*read),
            *(read[i] for i in kept),
        ]
        return bind(loop, [*asked, *values, *operands[before + count :]], **changed)

    return jax.make_jaxpr(function)(*(Type.of(v.aval).struct() for v in loop.invars))


@dataclass(frozen=True, slots=True)
class _Body:
    """What a loop does in each iteration, and what of it is the same in each."""

    jaxpr: Any
    # Variables that are the same in each, and are read by what is not: some work has made
    # them, of arrays that are not small.
    made: tuple[Any, ...]
    # By such a variable: the arrays that it is made of.
    sources: dict[Any, frozenset[Any]]

    @classmethod
    def of(cls, jaxpr: Any, consts: int) -> "_Body":
        """Of a body that reads so many constants, first of all."""
        same = {*jaxpr.constvars, *jaxpr.invars[:consts]}
        sources = {v: frozenset([v] if _nbytes(v) > SMALL else ()) for v in same}
        worked, outside = set[Any](), set[Any]()
        for eqn in jaxpr.eqns:
            read = [v for v in eqn.invars if isinstance(v, Var)]
            stays = eqn.effects or has_one_of(_STAYS, eqn)
            if stays or not all(v in sources for v in read):
                outside.update(read)
                continue
            arrays = frozenset[Any]().union(*(sources[v] for v in read))
            sources.update((v, arrays) for v in eqn.outvars)
            if eqn.primitive.name not in VIEWS or not worked.isdisjoint(read):
                worked.update(eqn.outvars)
        outside.update(v for v in jaxpr.outvars if isinstance(v, Var))
        made = tuple(v for v in sources if sources[v] and v in worked and v in outside)
        return cls(jaxpr, made, sources)

    def worth_making(self) -> list[Any]:
        """Those of `made` that take no more room than what need not be read then."""
        chosen: list[Any] = []
        for some in self._together():
            if self._are_worth_it(some):
                chosen += some
                continue
            alone: list[Any] = []
            for v in sorted(some, key=_nbytes):
                if self._are_worth_it([*alone, v]):
                    alone.append(v)
            chosen += alone
        return [v for v in self.made if v in set(chosen)]

    def _together(self) -> list[list[Any]]:
        """What is made of the same arrays."""
        groups: list[tuple[set[Any], list[Any]]] = []
        for v in self.made:
            meeting = [g for g in groups if not g[0].isdisjoint(self.sources[v])]
            groups = [g for g in groups if g not in meeting]
            arrays = set(self.sources[v]).union(*(g[0] for g in meeting))
            groups.append((arrays, [*(w for g in meeting for w in g[1]), v]))
        return [made for _, made in groups]

    def _are_worth_it(self, made: Sequence[Any]) -> bool:
        arrays = frozenset[Any]().union(*(self.sources[v] for v in made))
        still = _read(_live(self.jaxpr, made), self.jaxpr.outvars)
        room = sum(_nbytes(v) for v in arrays if v not in still)
        little = sum(map(_nbytes, arrays)) // _LITTLE
        return sum(map(_nbytes, made)) <= room + little


def _live(jaxpr: Any, given: Collection[Any]) -> list[Any]:
    """The equations that are left where some variables are given."""
    needed = {v for v in jaxpr.outvars if isinstance(v, Var)}.difference(given)
    left = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            left.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, Var))
            needed.difference_update(given)
    return left[::-1]


def _cone(equations: Sequence[Any], results: Collection[Any]) -> list[Any]:
    """The equations that it takes to make some variables."""
    needed, found = set(results), []
    for eqn in reversed(equations):
        if not needed.isdisjoint(eqn.outvars):
            found.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, Var))
    return found[::-1]


def _read(equations: Sequence[Any], outvars: Sequence[Any]) -> set[Any]:
    read = {v for e in equations for v in e.invars if isinstance(v, Var)}
    return read.union(v for v in outvars if isinstance(v, Var))


def _nbytes(variable: Any) -> int:
    return Type.of(variable.aval).nbytes
