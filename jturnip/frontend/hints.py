"""Memory kinds that a function asks for inside itself, taken out.

A function may be written for XLA's own offloading: `device_put` to host memory, or a
checkpoint policy that offloads residuals. What lies where is the plan's matter here, so
such moves become nothing, at any depth. Values stay what they are.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jturnip.frontend.values import FlatJaxpr, Type, bind, called


# What `jax.jit` commits results for.
_NAME_A_PLACE = frozenset(("sharding_constraint", "shard_map", "call_exported"))
# What runs code that is not XLA's own.
CALLS_OUT = frozenset(("pure_callback", "io_callback", "ffi_call", "pallas_call"))
# What has no effects, and yet may give something else each time.
_DIFFERS = frozenset(("rng_uniform", "pure_callback", "io_callback"))


def is_move(eqn: Any) -> bool:
    """Whether an equation only moves values between memories of a device."""
    if eqn.primitive.name != "device_put":
        return False
    return all(map(_is_memory, eqn.params["devices"]))


def _is_memory(target: Any) -> bool:
    """Whether a target names a memory, or the only device there is."""
    if hasattr(target, "platform"):
        devices = {target}
    else:
        devices = getattr(target, "device_set", set())
    return not devices or (len(devices) == 1 and len(jax.local_devices()) == 1)


def names_a_place(closed: Any) -> bool:
    """Whether a function says at any depth where a value is: then `jax.jit` commits its
    results."""
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        if eqn.primitive.name in _NAME_A_PLACE:
            return True
        if eqn.primitive.name == "device_put" and any(map(_says, eqn.params["devices"])):
            return True
        if any(map(names_a_place, nested(eqn))):
            return True
    return False


def _says(target: Any) -> bool:
    """Whether a target is a sharding or a memory; for a device nothing is committed."""
    return target is not None and not hasattr(target, "platform")


def has_moves(eqn: Any) -> bool:
    """Whether a nested jaxpr of an equation moves values or holds some in host memory."""
    for closed in nested(eqn):
        jaxpr = getattr(closed, "jaxpr", closed)
        if any(on_host(v.aval) for v in (*jaxpr.invars, *jaxpr.outvars)):
            return True
        for inner in jaxpr.eqns:
            if inner.primitive.name == "device_put" or has_moves(inner):
                return True
    return False


def on_host(aval: Any) -> bool:
    """Whether an abstract value is in host memory by its type."""
    return "host" in str(getattr(aval, "memory_space", "")).lower()


def nested(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's params."""
    for param in eqn.params.values():
        for closed in param if isinstance(param, tuple | list) else (param,):
            if hasattr(getattr(closed, "jaxpr", closed), "eqns"):
                yield closed


def anywhere(eqn: Any, holds: Callable[[Any], bool]) -> bool:
    """Whether something holds of an equation or of one that is nested in it."""
    bodies = (getattr(closed, "jaxpr", closed) for closed in nested(eqn))
    return holds(eqn) or any(
        anywhere(inner, holds) for body in bodies for inner in body.eqns
    )


def calls_out(eqn: Any) -> bool:
    """Whether an equation, or one nested in it, calls code that is not XLA's own."""
    return anywhere(eqn, lambda each: each.primitive.name in CALLS_OUT)


def gives_the_same_again(eqn: Any) -> bool:
    """Whether an equation means the same each time, and nothing beside its results."""

    def differs(each: Any) -> bool:
        return bool(getattr(each, "effects", ())) or each.primitive.name in _DIFFERS

    return not anywhere(eqn, differs)


def gives_the_same_bits_again(eqn: Any) -> bool:
    """The same, in whatever order it is done: an accelerator does a scatter in any."""
    scatters = anywhere(eqn, lambda each: "scatter" in each.primitive.name)
    return not scatters and gives_the_same_again(eqn)


def still(flat: FlatJaxpr) -> FlatJaxpr:
    """A pass: the program with equations that move nothing inside them. What is driven is
    taken apart later."""
    # id of an equation → what it is without moves.
    cleaned: dict[int, Any] = {}
    equations = []
    for e in flat.equations:
        if not e.driven and has_moves(e.origin):
            if id(e.origin) not in cleaned:
                cleaned[id(e.origin)] = _without_moves(e.origin)
            origin = cleaned[id(e.origin)]
            e = dataclasses.replace(e, origin=origin, calls=e.within, ours=True)
        equations.append(e)
    return dataclasses.replace(flat, equations=tuple(equations))


def _without_moves(eqn: Any) -> Any:
    """The same equation with every move inside it taken out."""
    structs = [Type.of(v.aval).struct() for v in eqn.invars]
    params = _params_without_moves(eqn)
    made = jax.make_jaxpr(lambda *operands: bind(eqn, operands, **params))(*structs)
    (cleaned,) = getattr(made, "jaxpr", made).eqns
    return cleaned


def _params_without_moves(eqn: Any) -> dict[str, Any]:
    """The params of an equation that hold jaxprs, without moves in them."""
    changed: dict[str, Any] = {}
    for name, param in eqn.params.items():
        if isinstance(param, tuple) and any(hasattr(p, "jaxpr") for p in param):
            changed[name] = tuple(map(without_moves, param))
        elif hasattr(getattr(param, "jaxpr", param), "eqns"):
            changed[name] = without_moves(param)
    return changed


def without_moves(closed: Any) -> Any:
    """A jaxpr with every move in it taken out, at any depth."""
    jaxpr = getattr(closed, "jaxpr", closed)
    structs = [Type.of(v.aval).struct() for v in jaxpr.invars]
    return jax.make_jaxpr(_interpreted(closed))(*structs)


def _interpreted(closed: Any) -> Callable[..., Sequence[Any]]:
    jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())

    def run(*arguments: Any) -> Sequence[Any]:
        names = (*jaxpr.constvars, *jaxpr.invars)
        values = dict(zip(names, (*consts, *arguments), strict=True))
        read = lambda atom: atom.val if hasattr(atom, "val") else values[atom]
        for eqn in jaxpr.eqns:
            operands = list(map(read, eqn.invars))
            inner = called(eqn)
            if is_move(eqn):
                results: Sequence[Any] = operands
            elif not has_moves(eqn):
                results = bind(eqn, operands)
            elif inner is not None:
                results = _interpreted(inner)(*operands)
            else:
                results = bind(eqn, operands, **_params_without_moves(eqn))
            values.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    return run
