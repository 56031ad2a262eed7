"""What operations of other libraries stand for.

A library may have a primitive of its own, for the sake of a rule: of how it is
differentiated, or batched. Many are lowered to what a function traces to, mostly that which
also evaluates them: so the loops of equinox write into their buffers, and lineax solves.
Such a primitive is a call; as its equations it can be fused, cut and done in place. JAX
does not say of a primitive that it is one. So both are lowered: where they read the same,
they are the same.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jturnip import compat
from jturnip.frontend.keys import context_key, params_key, type_key
from jturnip.frontend.values import Type, bind


# Whose operations are known by what they do.
_KNOWN = ("jax", "jaxlib", "jturnip")


@dataclass(frozen=True, slots=True)
class Foreign:
    """Operations of other libraries, as they were met: a solver has hundreds, of few kinds,
    and is inlined again and again."""

    _found: dict[Hashable, Any | None] = field(default_factory=dict)

    def written_out(self, eqn: Any) -> Any | None:
        """What an equation of another library's primitive stands for, as a jaxpr of the
        same operands; None for one of JAX's, or where that is not known."""
        if eqn.effects or not _is_foreign(eqn.primitive.impl):
            return None
        types = [Type.of(v.aval) for v in eqn.invars]
        how = params_key(eqn.params), context_key(eqn.ctx)
        key = eqn.primitive, *how, *map(type_key, types)
        if key not in self._found:
            self._found[key] = _written_out(eqn, [t.struct() for t in types])
        return self._found[key]


def _is_foreign(impl: Any) -> bool:
    while isinstance(impl, functools.partial):
        impl = impl.func
    module = getattr(impl, "__module__", None) or ""
    return module.partition(".")[0] not in _KNOWN


def _written_out(eqn: Any, structs: Sequence[Any]) -> Any | None:
    asked = [Type.of(v.aval) for v in eqn.outvars]
    lowered = functools.partial(_lowered, structs=structs)
    for function in (compat.lowered_from(eqn.primitive), eqn.primitive.impl):
        if function is None:
            continue
        with contextlib.suppress(Exception):  # it cannot be traced, or only with numbers
            with eqn.ctx.manager:
                closed = jax.make_jaxpr(functools.partial(function, **eqn.params))(*structs)
            given = list(map(Type.of, closed.out_avals))
            if lowered(jaxpr_as_fun(closed)) == lowered(functools.partial(_bound, eqn)):
                return closed if given == asked else _typed(closed, asked, structs)
    return None


def _typed(closed: Any, types: Sequence[Type], structs: Sequence[Any]) -> Any | None:
    """A jaxpr with results that are not weakly typed where these types are not; None where
    they differ otherwise."""

    def typed(*operands: Any) -> list[Any]:
        results = jaxpr_as_fun(closed)(*operands)
        return [
            x if t.weak_type else lax.convert_element_type(x, t.dtype)
            for x, t in zip(results, types, strict=True)
        ]

    made = jax.make_jaxpr(typed)(*structs)
    return made if list(map(Type.of, made.out_avals)) == list(types) else None


def _bound(eqn: Any, *operands: Any) -> Sequence[Any]:
    return bind(eqn, operands)


def _lowered(function: Callable[..., Sequence[Any]], structs: Sequence[Any]) -> str:
    """The text of a function as it is given to XLA, whatever the function is called."""

    def lowered(*operands: Any) -> Sequence[Any]:
        return tuple(function(*operands))

    return jax.jit(lowered, keep_unused=True).lower(*structs).as_text()
