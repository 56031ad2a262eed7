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
    writer = {v: e for e in flat.equations for v in e.outputs}
    of_slice = {s.value: s for s in flat.slices}
    # Of each value the readings, by what names them; those by the first name are of it.
    readings = list(_readings(flat, of_equation, least))
    names: dict[int, dict[object, int]] = {}
    for v, name, *_ in readings:
        if v in writer or v in hosted or v in of_slice:
            known = names.setdefault(v, {})
            known.setdefault(name, len(known))
    others = {v: [v] * len(known) for v, known in names.items() if len(known) > 1}
    if not others:
        return flat
    builder = Builder.of(flat)
    builder.equations.clear()
    slices = list(flat.slices)
    for v in others:
        if v not in writer:
            t = flat.types[v]
            whole = of_slice.get(v, Slice(v, v, Window.of(t.shape)))
            for at in range(1, len(others[v])):
                others[v][at] = builder.value(t)
                slices.append(dataclasses.replace(whole, value=others[v][at]))
    instead = {(i, at): (v, names[v][name]) for v, name, i, at in readings if v in others}
    for i, e in enumerate(flat.equations):
        inputs = list(e.inputs)
        for at in range(len(inputs)):
            if (i, at) in instead:
                v, nth = instead[i, at]
                inputs[at] = others[v][nth]
        builder.equations.append(dataclasses.replace(e, inputs=tuple(inputs)))
        for v in e.outputs:
            for at in range(1, len(others.get(v, ()))):
                copying = stacks.copying(flat.types[v])
                (others[v][at],) = builder.ours(copying, (v,), e.within)
    return builder.finish(flat.inputs, flat.outputs, slices)


def _readings(
    flat: FlatJaxpr, of_equation: Sequence[Rule | None], least: int
) -> Iterator[tuple[int, object, int, int]]:
    """Where large values are read: each with what names the reading, its equation and its
    position. Equations that do the same to each position share a name; one that combines
    positions has one of its own, for each way in which it reads a value."""
    for i, (e, rule) in enumerate(zip(flat.equations, of_equation, strict=True)):
        if rule is None or e.driven or e.effects:
            continue
        for at, (v, labels) in enumerate(zip(e.inputs, rule.operands, strict=True)):
            if not isinstance(v, Constant) and flat.types[v].nbytes >= least:
                combines = rule.reduced and len(e.reads) > 1
                yield v, (i, labels) if combines else None, i, at
