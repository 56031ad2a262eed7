"""A pass: what is read in several ways is several values.

`a @ a` reads rows of `a` for each part of its result, and columns of it. Where `a` does not
fit, both are to be parts, and a stretch (`stretches.py`) has a value in parts along one
dimension only. An array in host memory is named twice: slices of it are free. What is
computed is copied, which is done part by part as it is made.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from jturnip.frontend import stacks
from jturnip.frontend.builder import Builder
from jturnip.frontend.rules import Rule
from jturnip.frontend.values import Constant, FlatJaxpr, Slice, Window


def read_apart(
    flat: FlatJaxpr,
    of_equation: Sequence[Rule | None],
    hosted: Collection[int],
    least: int,
) -> FlatJaxpr:
    """A function in which each product and the like reads large values of its own.

    Args:
      flat: the function.
      of_equation: the rule of each of its equations.
      hosted: arguments and closed-over arrays that lie in host memory.
      least: a value is large from so many bytes on.

    Returns:
      The same function, where no other reads what such an equation does.
    """
    written = {v for e in flat.equations for v in e.outputs}
    of_slice = {s.value: s for s in flat.slices}
    may_be_named = {*written, *hosted, *of_slice}
    # By value the ways in which it is read: the first reads the value itself.
    ways: dict[int, list[object]] = {}
    # Equation and position → which of the ways that is.
    nth: dict[tuple[int, int], int] = {}
    for v, way, i, at in _readings(flat, of_equation, least):
        if v in may_be_named:
            known = ways.setdefault(v, [])
            if way not in known:
                known.append(way)
            nth[i, at] = known.index(way)
    names = {v: [v] for v, known in ways.items() if len(known) > 1}
    if not names:
        return flat
    builder = Builder.of(flat)
    builder.equations.clear()
    slices = list(flat.slices)
    for v in sorted(names.keys() - written):
        t = flat.types[v]
        whole = of_slice.get(v, Slice(v, v, Window.of(t.shape)))
        for _ in ways[v][1:]:
            names[v].append(builder.value(t))
            slices.append(dataclasses.replace(whole, value=names[v][-1]))
    for i, e in enumerate(flat.equations):
        inputs = list(e.inputs)
        for at, v in enumerate(e.inputs):
            if not isinstance(v, Constant) and v in names:
                inputs[at] = names[v][nth.get((i, at), 0)]
        builder.equations.append(dataclasses.replace(e, inputs=tuple(inputs)))
        for v in filter(names.__contains__, e.outputs):
            for _ in ways[v][1:]:
                names[v] += builder.ours(stacks.copying(flat.types[v]), (v,), e.within)
    return builder.finish(flat.inputs, flat.outputs, slices)


def _readings(
    flat: FlatJaxpr, of_equation: Sequence[Rule | None], least: int
) -> Iterator[tuple[int, object, int, int]]:
    """Where large values are read: each with the way, the equation and the position.
    Equations that do the same to each position read in the same way; one that combines
    positions in ways of its own, one for each of the axes it reads a value along."""
    for i, (e, rule) in enumerate(zip(flat.equations, of_equation, strict=True)):
        if rule is None or e.driven or e.effects:
            continue
        for at, (v, labels) in enumerate(zip(e.inputs, rule.operands, strict=True)):
            if not isinstance(v, Constant) and flat.types[v].nbytes >= least:
                combines = rule.reduced and len(e.reads) > 1
                yield v, (i, labels) if combines else None, i, at
