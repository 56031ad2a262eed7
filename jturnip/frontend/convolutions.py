"""Convolutions within loops and branches, as XLA's fast ones for the CPU have them.

XLA brings the dimensions of a convolution into the order of the library that it calls, but
only outside of loops and branches (`ConvCanonicalization` in
xla/service/cpu/conv_canonicalization.cc goes through the entry computation). Within one, a
convolution in another order is done number by number: there gradients of convolutions took
ten to fifty times as long. So they have that order before XLA sees them, with transposes
around them.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jturnip.frontend.loops import INSIDE, LOOPS_AND_BRANCHES
from jturnip.frontend.values import Equation, bind


_NAME = "conv_general_dilated"
# Primitive → the parameters that hold jaxprs.
_HOLDING = {**INSIDE, **dict.fromkeys(["jit", "pjit", "checkpoint", "remat2"], ("jaxpr",))}


def bound(e: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Applies an equation, with the convolutions in loops and branches in that order."""
    if e.effects:
        return e.bind(operands)
    return bind(e.origin, operands, **_inside(e.origin, inner=False))


def _inside(eqn: Any, inner: bool) -> dict[str, Any]:
    """The parameters of an equation that hold convolutions in another order, within loops
    and branches or all, with these in that order; `inner` if it is within one itself."""
    inner |= eqn.primitive.name in LOOPS_AND_BRANCHES
    changed = {}
    for name in _HOLDING.get(eqn.primitive.name, ()):
        param = eqn.params[name]
        if isinstance(param, tuple):
            made: Any = tuple(_reordered(each, inner) for each in param)
            same = all(a is b for a, b in zip(made, param, strict=True))
        else:
            made = _reordered(param, inner)
            same = made is param
        if not same:
            changed[name] = made
    return changed


def _reordered(holder: Any, inner: bool) -> Any:
    """A jaxpr, closed or not, with its convolutions in that order; itself if it has none in
    another."""
    jaxpr = getattr(holder, "jaxpr", holder)
    consts = getattr(holder, "consts", ())
    if jaxpr.effects or not _has_some(jaxpr, inner):
        return holder

    def function(*operands: Any) -> list[Any]:
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, operands, strict=True))
        read = lambda v: v.val if hasattr(v, "val") else values[v]
        for eqn in jaxpr.eqns:
            given = list(map(read, eqn.invars))
            if inner and _is_other(eqn):
                results: Sequence[Any] = [_in_order(eqn, *given)]
            else:
                results = bind(eqn, given, **_inside(eqn, inner))
            values.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    avals = (v.aval for v in jaxpr.invars)
    structs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in avals
    ]
    made = jax.make_jaxpr(function)(*structs)
    if holder is not jaxpr:
        return made
    return made.jaxpr if not made.consts else holder


def _has_some(jaxpr: Any, inner: bool) -> bool:
    """Whether something of a jaxpr is in another order, within a loop or a branch."""
    for eqn in jaxpr.eqns:
        if inner and _is_other(eqn):
            return True
        inside = inner or eqn.primitive.name in LOOPS_AND_BRANCHES
        for name in _HOLDING.get(eqn.primitive.name, ()):
            param = eqn.params[name]
            holders = param if isinstance(param, tuple) else (param,)
            if any(_has_some(getattr(each, "jaxpr", each), inside) for each in holders):
                return True
    return False


def _is_other(eqn: Any) -> bool:
    """Whether it is a convolution in another order."""
    if eqn.primitive.name != _NAME:
        return False
    numbers = eqn.params["dimension_numbers"]
    return numbers != _order(len(numbers.lhs_spec))


def _order(rank: int) -> lax.ConvDimensionNumbers:
    """Images of examples, positions and channels, and windows of positions, channels read
    and channels written."""
    last, between = rank - 1, tuple(range(1, rank - 1))
    image = (0, last, *between)
    window = (last, last - 1, *(d - 1 for d in between))
    return lax.ConvDimensionNumbers(image, window, image)


def _in_order(eqn: Any, image: Any, window: Any) -> Any:
    """What a convolution gives, done in that order."""
    numbers = eqn.params["dimension_numbers"]
    order = _order(len(numbers.lhs_spec))
    (result,) = bind(
        eqn,
        (
            _turned(image, numbers.lhs_spec, order.lhs_spec),
            _turned(window, numbers.rhs_spec, order.rhs_spec),
        ),
        dimension_numbers=order,
    )
    return _turned(result, order.out_spec, numbers.out_spec)


def _turned(array: Any, old: Sequence[int], new: Sequence[int]) -> Any:
    """An array whose dimensions are these of its kinds, with others for the same kinds."""
    at = dict(zip(new, old, strict=True))
    return lax.transpose(array, [at[dim] for dim in range(len(old))])
