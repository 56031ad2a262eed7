"""The last passes: each result a value of its own, and nothing that nobody needs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from jturnip.frontend import stacks
from jturnip.frontend.builder import Builder
from jturnip.frontend.values import Atom, Equation, FlatJaxpr, Parts, values_of


# Positions of arguments that may be returned as they are, once; or for positions of results
# the only argument that each may be.
Forwarded: TypeAlias = Collection[int] | Mapping[int, int]


def may_be(flat: FlatJaxpr, forwarded: Forwarded) -> list[frozenset[int]]:
    """For each result, the arguments' values that it may be as they are."""
    results = range(len(flat.outputs))
    if isinstance(forwarded, Mapping):
        only = {r: frozenset([flat.inputs[i]]) for r, i in forwarded.items()}
        return [only.get(r, frozenset()) for r in results]
    return [frozenset(flat.inputs[i] for i in forwarded)] * len(results)


def written_once(flat: FlatJaxpr, forwarded: Forwarded) -> FlatJaxpr:
    """The program with results that are each written by an equation for this purpose only:
    a copy where there is none. Arguments are returned where that is allowed."""
    builder = Builder.of(flat)
    taken = set(range(len(flat.types))).difference(*(e.outputs for e in flat.equations))
    outputs: list[int | Parts] = []

    def own(value: int) -> int:
        """A value that is not taken: itself, or a copy. Takes it."""
        if value in taken:
            (value,) = builder.ours(stacks.copying(flat.types[value]), (value,), ())
        taken.add(value)
        return value

    for output, allowed in zip(flat.outputs, may_be(flat, forwarded), strict=True):
        if isinstance(output, Parts):
            values = tuple(map(own, output.values))
            outputs.append(replace(output, values=values))
        elif output in allowed and output not in outputs:
            outputs.append(output)
        else:
            outputs.append(own(output))
    return builder.finish(flat.inputs, outputs, flat.slices)


def with_others(
    flat: FlatJaxpr, instead: Sequence[tuple[Sequence[Atom], Any] | None]
) -> FlatJaxpr:
    """The program with other equations in the place of some: for each equation what is
    read, and a jaxpr of that, or None; itself where all are None."""
    if not any(instead):
        return flat
    builder = Builder.of(replace(flat, equations=()))
    for e, other in zip(flat.equations, instead, strict=True):
        if other is None:
            builder.equations.append(e)
        else:
            builder.instead(e, *other)
    return live(builder.finish(flat.inputs, flat.outputs, flat.slices))


def live(flat: FlatJaxpr) -> FlatJaxpr:
    """The program without what no result and no effect needs."""
    wanted = {v for output in flat.outputs for v in values_of(output)}
    wanted.update(e.outputs[-1] for e in flat.equations if e.effects)  # tokens
    equations = _live(flat.equations, wanted)
    used = {v for e in equations for v in e.inputs if isinstance(v, int)}
    slices = tuple(s for s in flat.slices if s.value in used)
    used.update(s.source for s in slices)
    constants = tuple((v, array) for v, array in flat.constants if v in used)
    return replace(flat, equations=equations, constants=constants, slices=slices)


def _live(equations: Sequence[Equation], wanted: set[int]) -> tuple[Equation, ...]:
    """Equations that a wanted value needs, in their order."""
    kept = []
    for equation in reversed(equations):
        acts = equation.driven and equation.origin.effects
        if wanted.isdisjoint(equation.outputs) and not acts:
            continue
        kept.append(equation)
        wanted.update(v for v in equation.inputs if isinstance(v, int))
    return tuple(reversed(kept))
