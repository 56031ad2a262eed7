"""A function as one flat list of equations, and what its arguments take."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax

from jturnip import compat, memory, placement
from jturnip.errors import UnsupportedError
from jturnip.frontend.inline import pruned_arguments
from jturnip.frontend.streaming import Passes
from jturnip.frontend.values import FlatJaxpr, Type
from jturnip.placement import Arguments, Whose
from jturnip.programs import places
from jturnip.programs.setting import Function
from jturnip.stages.asked import Asked
from jturnip.units import padded


class Flattened:
    """A function flattened for one signature; also one that cannot be."""

    def __init__(self, asked: Asked, gpu_bytes: int):
        self._traced = asked.traced
        # As a program is given them, and without what nothing reads.
        self.given = _with_room(asked.arguments, asked.traced, gpu_bytes)
        self.arguments = self.given
        self.result_types = list(map(Type.of, jax.tree.leaves(asked.traced.out_info)))
        self.passes = Passes()
        # The equations; None where the function cannot be split, and why.
        self.flat: FlatJaxpr | None = None
        self.unsupported: UnsupportedError | None = None
        seen = self.passes.seen(compat.lowering_platform(self.given.device))
        try:
            self.flat = Function(self._traced.jaxpr, forwardable(self.given)).flat(seen)
        except UnsupportedError as error:
            self.unsupported = error
        else:
            self.arguments = places.kept(self.given, self.flat)

    @property
    def closed_over(self) -> list[Any]:
        """Arrays that are no arguments."""
        if self.flat is None:
            return list(getattr(self._traced.jaxpr, "consts", ()))
        return [array for _, array in self.flat.constants]

    @functools.cached_property
    def unread(self) -> frozenset[int]:
        """Positions of arguments that nothing reads and that are not returned."""
        if self.flat is None:
            return pruned_arguments(self._traced.jaxpr)
        ignored = places.unread(self.flat)
        return frozenset(i for i, v in enumerate(self.flat.inputs) if v in ignored)

    def held(self, whose: Collection[Whose]) -> list[int]:
        """Positions of the arguments that are held so, and read or returned."""
        of_all = enumerate(self.arguments.whose)
        return [i for i, w in of_all if w in whose and i not in self.unread]

    def held_bytes(self, whose: Collection[Whose]) -> int:
        """Bytes of the arguments that are held so."""
        infos = jax.tree.leaves(self._traced.args_info)
        return sum(padded(Type.of(infos[i]).nbytes) for i in self.held(whose))

    @property
    def staying_bytes(self) -> int:
        """Device bytes that are in use when a call is over, beside its results."""
        return self.held_bytes((Whose.CALLER_DEVICE,)) + sum(
            padded(Type.of(array).nbytes)
            for array in self.closed_over
            if not places.constant_whose(array).on_host
        )

    @property
    def there_bytes(self) -> int:
        """Device bytes in use before a call, wherever its plan has them later."""
        caller = [w for w in Whose if not w.on_host and not w.ours]
        return self.held_bytes(caller) + memory.device_bytes(self.closed_over)

    def structs_given(self) -> list[jax.ShapeDtypeStruct]:
        """The arguments, with where they lie; without that, what is made for a call."""
        infos = jax.tree.leaves(self._traced.args_info)
        where = (
            None if w.ours else placement.sharding(self.given.device, w.on_host)
            for w in self.given.whose
        )
        return [Type.of(info).struct(s) for info, s in zip(infos, where, strict=True)]


def forwardable(arguments: Arguments) -> frozenset[int]:
    """Arguments that may be returned as they are: the caller has given them up."""
    return frozenset(i for i, w in enumerate(arguments.whose) if w.donated)


def _with_room(arguments: Arguments, traced: Any, gpu_bytes: int) -> Arguments:
    """Small arguments start on the device as long as they are next to nothing together."""
    small = sum(
        Type.of(info).nbytes
        for info, w in zip(jax.tree.leaves(traced.in_avals), arguments.whose, strict=True)
        if w is Whose.OURS_DEVICE
    )
    return arguments if small <= gpu_bytes // 16 else on_host_all(arguments)


def on_host_all(arguments: Arguments) -> Arguments:
    """The same with small arguments in host memory too, until they are needed."""
    whose = tuple(Whose.OURS_HOST if w is Whose.OURS_DEVICE else w for w in arguments.whose)
    return dataclasses.replace(arguments, whose=whose)
