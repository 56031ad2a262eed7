"""What operations of other libraries stand for.

A library may have a primitive of its own, for the sake of a rule: of how it is
differentiated, or batched. Many are lowered to what their implementation traces to: so the
loops of equinox write into their buffers, and lineax solves. Such a primitive is a call; as
its equations it can be fused, cut and done in place. Nothing says of a primitive that it is
one. So both are lowered: where they read the same, they are the same.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

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
    function = functools.partial(eqn.primitive.impl, **eqn.params)
    try:
        with eqn.ctx.manager:
            closed = jax.make_jaxpr(function)(*structs)
        if _types(closed.out_avals) == _types(v.aval for v in eqn.outvars):
            bound = functools.partial(_bound, eqn)
            if _lowered(jaxpr_as_fun(closed), structs) == _lowered(bound, structs):
                return closed
    except Exception:  # it cannot be traced, or only with numbers: it is what it is
        pass
    return None


def _types(avals: Iterable[Any]) -> list[Hashable]:
    return [type_key(Type.of(aval)) for aval in avals]


def _bound(eqn: Any, *operands: Any) -> Sequence[Any]:
    return bind(eqn, operands)


def _lowered(function: Callable[..., Sequence[Any]], structs: Sequence[Any]) -> str:
    """The text of a function as it is given to XLA, whatever the function is called."""

    def lowered(*operands: Any) -> Sequence[Any]:
        return tuple(function(*operands))

    return jax.jit(lowered, keep_unused=True).lower(*structs).as_text()
