"""A pass: work that a function does twice on the same values is done once, as XLA does it.

Two losses that share a network each compute it; a kernel that is written as a function is
made anew for every product with it. In one executable XLA finds such pairs. Between tasks
nobody would.

What `jax.checkpoint` computes again stays apart: that is what it is for.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any

from jturnip.frontend.costs import HEAVY, REDUCTIONS
from jturnip.frontend.hints import gives_the_same_again
from jturnip.frontend.keys import constant_key, context_key, params_key
from jturnip.frontend.values import Constant, Equation, FlatJaxpr


_REMATERIALISED = frozenset(("remat2", "checkpoint"))


def merged(flat: FlatJaxpr) -> FlatJaxpr:
    """The program with one equation for all that give the same.

    Light ones that are made of arguments only, or of less than they are, stay as they are
    written (a transposed weight, a mask of two counters): to do that again is nothing, and
    to hold it for several is much.
    """
    number: dict[int, int] = {}  # value → the first that is the same
    instead: dict[int, int] = {}  # value → the one that takes its place
    alike: dict[Hashable, list[Equation]] = {}
    written = {v for e in flat.equations for v in e.outputs}
    nbytes = [t.nbytes for t in flat.types]
    # Value that is quickly made → bytes of what it is made of.
    quick = {v: n for v, n in enumerate(nbytes) if v not in written}
    equations = []
    for e in flat.equations:
        first = _first_like(e, number, alike)
        same = dict(zip(e.outputs, first.outputs, strict=True)) if first else {}
        number.update(same)
        values = e.reads
        little = sum(quick.get(v, nbytes[v]) for v in values)
        is_quick = all(v in quick for v in values) or little < sum(
            nbytes[v] for v in e.outputs
        )
        if is_quick and _is_light(e):
            quick.update(dict.fromkeys(e.outputs, little))
        elif first is not None:
            instead.update(same)
            continue
        equations.append(dataclasses.replace(e, inputs=e.reading(instead)))
    if not instead:
        return flat
    outputs = tuple(instead.get(v, v) for v in flat.result_values)
    return dataclasses.replace(flat, equations=tuple(equations), outputs=outputs)


def _is_light(e: Equation) -> bool:
    """Whether it is done along with what reads it; a reduction is a pass by itself."""
    return e.name not in HEAVY and e.name not in REDUCTIONS


def _first_like(
    e: Equation, number: dict[int, int], alike: dict[Hashable, list[Equation]]
) -> Equation | None:
    """The first equation that gives the same; this one is the first of its kind where there
    is none."""
    if e.name == "optimization_barrier" or not gives_the_same_again(e.origin):
        return None
    read = tuple(
        constant_key(v) if isinstance(v, Constant) else v for v in e.reading(number)
    )
    # Parameters are compared only where all else is the same.
    others = alike.setdefault((e.origin.primitive, read, _behind(e)), [])
    for other in others:
        if _means(other.origin) == _means(e.origin):
            return other
    others.append(e)
    return None


def _means(eqn: Any) -> Hashable:
    return params_key(eqn.params), context_key(eqn.ctx)


def _behind(e: Equation) -> tuple[int, ...]:
    """Which call of what is to be computed again it belongs to, if to any."""
    ids = tuple(map(id, e.calls))
    for at in reversed(range(len(e.calls))):
        call = e.calls[at]
        again = call.primitive.name in _REMATERIALISED
        if again and call.params.get("differentiated", True):
            return ids[: at + 1]
    return ()
