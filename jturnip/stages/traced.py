"""The first stage: a jaxpr."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from jturnip import compat, placement
from jturnip.compat import Device
from jturnip.errors import InlinedWarning
from jturnip.frontend.hints import names_a_place
from jturnip.placement import Arguments, Wanted
from jturnip.runtime.turns import Turn
from jturnip.signature import Call, Statics
from jturnip.stages.asked import Asked
from jturnip.stages.lowered import Lowered
from jturnip.stages.options import Options, placed


def _wanted(out_info: Any, leaves: Sequence[Any], options: Options) -> Wanted:
    """Where the results of a call are to lie."""
    mesh = placement.mesh_of(leaves)
    if options.out_shardings is None:
        on_host = () if options.part is None else options.part.on_host
        return Wanted(on_host=on_host, mesh=mesh)
    found = placement.broadcast_shardings(options.out_shardings, out_info, "out_shardings")
    return Wanted(tuple(found), mesh=mesh)


class Traced:
    """A function traced for one signature."""

    def __init__(
        self, jitted: Any, statics: Statics, call: Call, options: Options, turn: Turn
    ):
        call, self._in_places = placed(call, options)
        self._options = options
        self._turn = turn
        self._in_tree = call.tree
        device, committed = placement.common_device(
            [*call.leaves, *placement.structs_of(options.out_shardings)]
        )
        if options.device is not None:
            device, committed = options.device, True
        self._traced = _trace(jitted, statics, call, device if committed else None)
        jaxpr = self._traced.jaxpr
        committed = committed or names_a_place(jaxpr)
        # Whether the function closes over values of an outer transformation, reads
        # references from outside, names an axis of `vmap`, or takes or gives tokens.
        consts = getattr(jaxpr, "consts", ())
        self._has_references = any(map(compat.is_reference, jaxpr.in_avals)) or any(
            isinstance(c, jax.Ref) for c in consts
        )
        self.is_not_closed = (
            len(jaxpr.in_avals) != len(call.leaves)
            or self._has_references
            or any(isinstance(c, Tracer) for c in consts)
            or compat.names_an_axis(jaxpr)
            or not all(map(compat.has_type, (*jaxpr.in_avals, *jaxpr.out_avals)))
        )
        donated = [info.donated for info in jax.tree.leaves(self._traced.args_info)]
        self._arguments = Arguments(
            tuple(map(placement.whose, call.leaves, donated)),
            statics.names(call),
            device,
            committed,
            options.compiler_options,
        )
        self._wanted = _wanted(self._traced.out_info, call.leaves, options)

    def __repr__(self) -> str:
        return f"<Traced of {getattr(self._traced, 'fun_name', 'a function')}>"

    @property
    def jaxpr(self) -> Any:
        """The jaxpr, as `jax.jit(fn).trace(...).jaxpr`."""
        return self._traced.jaxpr

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results, in their tree."""
        return self._traced.out_info

    @property
    def args_info(self) -> Any:
        """Shapes, dtypes and donation of the arguments, in their tree."""
        return self._traced.args_info

    @property
    def fun_name(self) -> str:
        """The name of the function."""
        return self._traced.fun_name

    @compat.api_boundary
    def lower(self, **exporting: Any) -> Any:
        """Takes the function apart; returns a `Lowered`.

        Args:
          exporting: what `jax.export` asks of `jax.jit`. It gets what `jax.jit` would give:
            what is exported is one executable, without a budget.
        """
        if exporting:
            return self._traced.lower(**exporting)
        if self._has_references:
            compat.warn(
                f"{self.fun_name} reads references from outside. A call of it runs in the"
                " budget; what is lowered ahead of time is jax.jit's, and does not.",
                InlinedWarning,
            )
            return self._traced.lower()
        asked = Asked(
            self._traced,
            self._in_tree,
            self._arguments,
            self._wanted,
            self._options,
            self._turn,
            self._in_places,
            keeps=self._options.gpu_bytes is not None and self._options.part is None,
        )
        return Lowered(asked)


def _trace(jitted: Any, statics: Statics, call: Call, device: Device | None) -> Any:
    """Traces as if all arrays were on the device: where they lie is the plan's matter."""
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
    args, kwargs = statics.with_leaves(call, anywhere(call.leaves, sharding))
    with compat.tracing():
        return jitted.trace(*args, **kwargs)


def anywhere(leaves: Sequence[Any], sharding: Any = None) -> list[Any]:
    """Leaves of a call, with structs in the place of arrays, on one device or on any."""

    def strip(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, weak_type=weak, sharding=sharding
        )

    return list(map(strip, leaves))
