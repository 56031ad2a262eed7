"""What makes two equations the same: their primitive, params, context and what they read.

Names and numbers of variables do not count.
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jturnip.frontend.values import Constant


# Slots of a context that are not settings but how it applies them.
_CONTEXT_MACHINERY = frozenset(("configs", "manager", "_managers", "__weakref__"))


def type_key(t: Any) -> Hashable:
    return (t.shape, t.dtype, t.weak_type)


def constant_key(constant: Constant) -> Hashable:
    value = np.asarray(constant.value)
    return (value.dtype.str, value.tobytes(), type_key(constant.type))


@functools.lru_cache(maxsize=4096)
def context_key(context: Any) -> Hashable:
    """What of an equation's context changes how it lowers."""
    names = (n for n in type(context).__slots__ if n not in _CONTEXT_MACHINERY)
    return tuple(_key(getattr(context, n)) for n in names)


def params_key(params: dict[str, Any]) -> Hashable:
    return tuple((name, _key(params[name])) for name in sorted(params))


def _key(value: Any) -> Hashable:
    """Equal for parameters that mean the same; an object it does not know is itself."""
    body = getattr(value, "jaxpr", value)
    if hasattr(body, "eqns"):
        return _jaxpr_key(body, getattr(value, "consts", ()))
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple(sorted((k, _key(v)) for k, v in value.items()))
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, float | complex | np.generic):
        return (type(value), repr(value))  # 0.0 and -0.0 are equal, and not the same
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A callback is one: of two objects that are equal each is to be called for itself.
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return (type(value), *(_Same(f) if callable(f) else _key(f) for f in fields))
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return (type(value), value)


def _jaxpr_key(jaxpr: Any, consts: Sequence[Any]) -> Hashable:
    numbers: dict[Any, int] = {}

    def atom(a: Any) -> Hashable:
        if hasattr(a, "val"):
            value = np.asarray(a.val)
            return (value.dtype.str, value.tobytes(), str(a.aval))
        return numbers[a]

    for v in (*jaxpr.constvars, *jaxpr.invars):
        numbers[v] = len(numbers)
    equations = []
    for eqn in jaxpr.eqns:
        operands = tuple(map(atom, eqn.invars))
        for v in eqn.outvars:
            numbers[v] = len(numbers)
        equations.append(
            (eqn.primitive, params_key(eqn.params), context_key(eqn.ctx), operands)
        )
    return (
        tuple(str(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)),
        tuple(map(_Same, consts)),
        tuple(equations),
        tuple(map(atom, jaxpr.outvars)),
    )


class _Same:
    """Equal to itself only; keeps its object alive, so that its id stays its own."""

    __slots__ = ("_object",)

    def __init__(self, thing: Any):
        self._object = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._object is self._object

    def __hash__(self) -> int:
        return id(self._object)
