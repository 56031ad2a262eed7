"""A pass: loops that give and carry no more than somebody reads.

What a library's function gives is often more than its caller reads: what a sampler tells of
each step, the cross covariances of a smoother. Of a loop that it has whole XLA takes that
out, with all that is only made for it (`while_loop_simplifier.cc`). What is counted, taken
apart or driven must not have it either.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax

from jturnip.errors import UnsupportedError
from jturnip.frontend.loops import LOOPS, loop_counts, other_loop, scanned
from jturnip.frontend.results import live
from jturnip.frontend.values import Equation, FlatJaxpr, bind, evaluated, needs_x64


# Inlines a jaxpr, with none of its loops giving more than is read.
_Inline: TypeAlias = Callable[[Any], FlatJaxpr]


def without_unread(flat: FlatJaxpr, inline: _Inline) -> FlatJaxpr:
    """The program with loops that give only what is read of them, and carry only what that
    takes. Where that changes a loop, equations that nobody reads go too; else it is itself.
    Loops with effects stay as they are, and those that cannot be traced again.

    Args:
      flat: the program, without calls in it.
      inline: takes the calls out of what a loop does.
    """
    wanted = set(flat.result_values)
    equations: list[Equation] = []
    changed = False
    for e in reversed(flat.equations):
        is_read = [v in wanted for v in e.outputs]
        if not (any(is_read) or e.origin.effects):
            continue
        if not (all(is_read) or e.origin.effects) and e.name in LOOPS:
            other = _giving(e, flat, is_read, inline)
            changed |= other is not None
            e = other or e
        wanted.update(e.reads)
        equations.append(e)
    if not changed:
        return flat
    return dataclasses.replace(flat, equations=tuple(reversed(equations)))


def _giving(
    e: Equation, flat: FlatJaxpr, is_read: Sequence[bool], inline: _Inline
) -> Equation | None:
    """A loop that gives only what is read, and what that takes; None where that is all, or
    JAX has another form for it."""
    consts, carry, _ = loop_counts(e.origin)
    params = e.origin.params
    asked = None
    try:
        if e.name == "scan":
            body, first = inline(params["jaxpr"]), consts
        else:
            asked, body = inline(params["cond_jaxpr"]), inline(params["body_jaxpr"])
            first = params["body_nconsts"]
    except UnsupportedError:
        return None  # it may stay whole
    if needs_x64((*body.types, *(asked.types if asked else ()))):
        return None
    kept = {i for i, read in enumerate(is_read) if read}
    if asked is not None:
        kept |= _carried(asked, params["cond_nconsts"], carry)
    while True:
        outputs = tuple(body.outputs[i] for i in sorted(kept))
        part = live(without_unread(dataclasses.replace(body, outputs=outputs), inline))
        more = _carried(part, first, carry) - kept
        if not more:
            break
        kept |= more
    if len(kept) == len(is_read):
        return None
    carried = [i for i in range(carry) if i in kept]
    other = dataclasses.replace(e, outputs=tuple(e.outputs[i] for i in sorted(kept)))
    if asked is None:
        return _scan(other, flat, part, consts, carry, carried)
    return _while(other, flat, asked, part, carried)


def _carried(flat: FlatJaxpr, first: int, carry: int) -> set[int]:
    """Which carried values, after so many first arguments, are read."""
    read = _read(flat)
    return {i for i in range(carry) if flat.inputs[first + i] in read}


def _read(flat: FlatJaxpr) -> set[int]:
    """The values that are read, or returned."""
    return {v for e in flat.equations for v in e.reads}.union(flat.result_values)


def _scan(
    e: Equation,
    flat: FlatJaxpr,
    body: FlatJaxpr,
    consts: int,
    carry: int,
    carried: Sequence[int],
) -> Equation | None:
    """A scan with these carried values and this body, which has all of its arguments."""
    read = _read(body)
    same = [i for i in range(consts) if body.inputs[i] in read]
    stacked = range(consts + carry, len(body.inputs))
    rows = [i for i in stacked if body.inputs[i] in read]
    kept = [*same, *(consts + i for i in carried), *rows]
    function = functools.partial(evaluated, _of(body, kept))

    def scan(*operands: Any) -> Sequence[Any]:
        own, others = operands[: len(same)], operands[len(same) :]

        def step(state: Any, xs: Any) -> Any:
            results = function(*own, *state, *xs)
            return tuple(results[: len(state)]), tuple(results[len(state) :])

        return scanned(e.origin, step, others[: len(carried)], others[len(carried) :])

    return other_loop(e, flat, [e.inputs[i] for i in kept], scan)


def _while(
    e: Equation,
    flat: FlatJaxpr,
    asked: FlatJaxpr,
    body: FlatJaxpr,
    carried: Sequence[int],
) -> Equation | None:
    """A `while` with these carried values, this condition and this body."""
    params = e.origin.params
    counts = params["cond_nconsts"], params["body_nconsts"]
    changed, given = {}, []
    before = 0
    for name, of, count in zip(("cond", "body"), (asked, body), counts, strict=True):
        read = _read(of)
        same = [i for i in range(count) if of.inputs[i] in read]
        part = _of(of, [*same, *(count + i for i in carried)])
        structs = [part.types[v].struct() for v in part.inputs]
        function = functools.partial(evaluated, part)
        changed[f"{name}_jaxpr"] = jax.make_jaxpr(function)(*structs)
        changed[f"{name}_nconsts"] = len(same)
        given += [e.inputs[before + i] for i in same]
        before += count
    given += [e.inputs[before + i] for i in carried]
    loop = lambda *operands: bind(e.origin, operands, **changed)
    return other_loop(e, flat, given, loop)


def _of(flat: FlatJaxpr, arguments: Collection[int]) -> FlatJaxpr:
    """A function of some of its arguments, which are all that it reads."""
    return dataclasses.replace(flat, inputs=tuple(flat.inputs[i] for i in arguments))
