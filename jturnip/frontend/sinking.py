"""A pass: what a loop reads, is large, and quickly made of little, is made inside it.

A kernel of a few points is made once, and a solver multiplies with it in each iteration.
Where there is no room for it, the loop cannot hold it. But an iteration can make it again,
one block at a time if its body is done in blocks (`bodies.py`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jturnip.frontend.anew import Large, making
from jturnip.frontend.loops import (
    LOOPS,
    iterations,
    loop_counts,
    other_loop,
    scan_counts,
    with_body,
)
from jturnip.frontend.results import live
from jturnip.frontend.values import (
    Atom,
    Constant,
    Equation,
    FlatJaxpr,
    Type,
    bind,
    carry_out,
    entering,
)


@dataclass(frozen=True, slots=True)
class Sunk:
    """A function with loops that make for themselves what is large."""

    flat: FlatJaxpr
    # Bytes that they would read of it instead, in all iterations; None where nobody knows
    # how many there are, or where nothing is made inside.
    read_bytes: int | None


def sunk(flat: FlatJaxpr, large: Large) -> Sunk:
    """A function with what is large made inside the loops that read it.

    Args:
      flat: the function.
      large: what is large, and what it costs to keep it.
    """
    writer = {v: i for i, e in enumerate(flat.equations) for v in e.outputs}
    equations, read = [], list[int | None]()
    for e in flat.equations:
        made: dict[int, _Making] = {}
        for v in _only_read(e):
            if flat.types[v].nbytes > large.nbytes and v not in made:
                steps = making(flat, writer, v, large)
                if steps:
                    made[v] = _Making.of(flat, steps)
        inside = _made_inside(e, flat, made) if made else None
        equations.append(inside or e)
        if inside is not None:
            count, each = iterations(e.origin), sum(flat.types[v].nbytes for v in made)
            read.append(None if count is None else count * each)
    if not read:
        return Sunk(flat, None)
    known = [nbytes for nbytes in read if nbytes is not None]
    return Sunk(
        live(dataclasses.replace(flat, equations=tuple(equations))),
        sum(known) if len(known) == len(read) else None,
    )


@dataclass(frozen=True, slots=True)
class _Making:
    """The equations that make a value, and what these read of others."""

    steps: tuple[Equation, ...]
    needed: tuple[int, ...]

    @classmethod
    def of(cls, flat: FlatJaxpr, steps: Sequence[int]) -> "_Making":
        equations = tuple(flat.equations[i] for i in steps)
        return cls(equations, entering(equations))


def _only_read(e: Equation) -> list[int]:
    """What all iterations of a loop read, and none changes."""
    if e.name not in LOOPS or e.driven or e.effects or e.origin.effects:
        return []
    count = loop_counts(e.origin)[0]
    rest = {v for v in e.inputs[count:] if isinstance(v, int)}
    return [v for v in e.inputs[:count] if isinstance(v, int) and v not in rest]


def _made_inside(
    e: Equation, flat: FlatJaxpr, made: Mapping[int, _Making]
) -> Equation | None:
    """A loop that makes some of what it reads; None where JAX has another form for it."""
    params = e.origin.params
    if e.name == "scan":
        consts = scan_counts(e.origin)[0]
        body, given = _with_made(params["jaxpr"], e.inputs[:consts], flat, made)
        given = (*given, *e.inputs[consts:])
        function = with_body(e.origin, body, len(given) - len(e.inputs) + consts)
    else:
        first, second = params["cond_nconsts"], params["body_nconsts"]
        cond, of_cond = _with_made(params["cond_jaxpr"], e.inputs[:first], flat, made)
        read = e.inputs[first : first + second]
        body, of_body = _with_made(params["body_jaxpr"], read, flat, made)
        given = (*of_cond, *of_body, *e.inputs[first + second :])
        changed = {
            "cond_jaxpr": cond,
            "cond_nconsts": len(of_cond),
            "body_jaxpr": body,
            "body_nconsts": len(of_body),
        }
        function = lambda *operands: bind(e.origin, operands, **changed)
    return other_loop(e, flat, given, function)


def _with_made(
    closed: Any, consts: Sequence[Atom], flat: FlatJaxpr, made: Mapping[int, _Making]
) -> tuple[Any, tuple[Atom, ...]]:
    """What is done in an iteration with some constants made in it, and what it reads in
    their places, first of its operands."""
    sunk = [made[v] for v in consts if isinstance(v, int) and v in made]
    if not sunk:
        return closed, tuple(consts)
    needed = tuple(dict.fromkeys(v for each in sunk for v in each.needed))
    kept = [i for i, v in enumerate(consts) if isinstance(v, Constant) or v not in made]
    # In the order of the function, each once.
    steps = {e.outputs: e for each in sunk for e in each.steps}
    steps = [e for e in flat.equations if steps.get(e.outputs) is e]
    given = (*needed, *(consts[i] for i in kept))

    def function(*operands: Any) -> Any:
        values = dict(zip(needed, operands, strict=False))
        others = dict(zip(kept, operands[len(needed) :], strict=False))
        carry_out(steps, values)
        mine = (
            values[v] if isinstance(v, int) and i not in others else others[i]
            for i, v in enumerate(consts)
        )
        return jaxpr_as_fun(closed)(*mine, *operands[len(given) :])

    types = [v.type if isinstance(v, Constant) else flat.types[v] for v in given]
    types += [Type.of(t) for t in closed.in_avals[len(consts) :]]
    return jax.make_jaxpr(function)(*(t.struct() for t in types)), given
