"""What the user chose, and what is special about parts of transformed functions."""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jturnip import placement
from jturnip.compat import Device
from jturnip.frontend.values import Type
from jturnip.placement import Returned
from jturnip.planner.strategies import STRATEGIES
from jturnip.runtime.link import SimulatedLink
from jturnip.signature import Call


class Later(Protocol):
    """What is called with the arguments and results of a part."""

    def seconds(
        self, arguments: Sequence[Any], results: Sequence[Any], beside_bytes: int, cut: bool
    ) -> float | None:
        """What that call is thought to take, with `jax.ShapeDtypeStruct`s of both and where
        they lie, cut along axes or not; None if it is refused."""
        ...

    def most_bytes(self, arguments: Sequence[Any]) -> int:
        """The most bytes of its values at once, where none is written over."""
        ...


@dataclass(frozen=True)
class Part:
    """What is special about a part of a transformed function."""

    # Of each result the number of a group, which lies in one memory; None for a residual,
    # which stays on the device only if that leaves room for later parts.
    groups: tuple[int | None, ...]
    # Of each, whether it must be in host memory, or on the device, or None; or empty.
    on_host: tuple[bool | None, ...] = ()
    # What will probably be called with the residuals, if it is known.
    later: Later | None = None
    # Bytes of other residuals on the device, and those of them that are no arguments, for
    # which the budget was made smaller.
    residual_bytes: int = 0
    beside_bytes: int = 0
    # Whether it is only asked what it would take: then any plan will do, after a short
    # search, and a refusal need not name a budget that works.
    is_asked: bool = False
    # Whether what does not fit may be cut along its axes.
    may_be_cut: bool = True

    @property
    def residuals(self) -> tuple[int, ...]:
        """Positions of results that may lie anywhere."""
        asked = self.on_host or (None,) * len(self.groups)
        both = enumerate(zip(self.groups, asked, strict=True))
        return tuple(i for i, of in both if of == (None, None))

    def returned(self, placed: Collection[int]) -> Returned:
        """How results belong together; those at `placed` do not."""
        numbers = {g for g in self.groups if g is not None}
        groups = (
            frozenset(i for i, g in enumerate(self.groups) if g == number)
            for number in sorted(numbers)
        )
        return Returned(
            tuple(group.difference(placed) for group in groups),
            anywhere=frozenset(self.residuals).difference(placed),
        )


@dataclass(frozen=True)
class Options:
    """What the user chose, beside the function."""

    # None: what the device has free when a signature is first compiled, less a reserve.
    gpu_bytes: int | None
    strategy: str = "auto"
    link: SimulatedLink | None = None
    # Trees of shardings and None, or None.
    in_shardings: Any = None
    out_shardings: Any = None
    # Whether arguments that nothing reads are parameters of the executable all the same.
    keep_unused: bool = False
    # The device to run on, or None, and options of XLA's compiler by name.
    device: Device | None = None
    compiler_options: tuple[tuple[str, Any], ...] = ()
    # Of a part of a transformed function.
    part: Part | None = None

    def __post_init__(self) -> None:
        known = ("auto", "whole", *STRATEGIES)
        if self.strategy not in known:
            raise ValueError(
                f"strategy={self.strategy!r} is not known; choose one of {', '.join(known)}"
            )


def placed(call: Call, options: Options) -> tuple[Call, tuple[Any, ...]]:
    """A call as `in_shardings` and `device` want it, and where each leaf is to be, or None.

    Leaves that it places are structs: they are put there when it is their turn.

    Raises:
      ValueError: `in_shardings` does not fit the arguments.
    """
    if options.in_shardings is None:
        if options.device is None:
            return call, (None,) * len(call.leaves)
        return _with_structs(call, [_moved(x, options.device) for x in call.leaves])
    dynamic, named = jax.tree.unflatten(call.tree, call.leaves)
    if named:
        raise ValueError("in_shardings does not go with keyword arguments")
    where = placement.broadcast_shardings(options.in_shardings, dynamic, "in_shardings")
    return _with_structs(call, where)


def _moved(leaf: Any, device: Device) -> Any:
    """Where a leaf is to be for a device, or None for where it is."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    if placement.device_of(leaf) in (device, None):
        return None
    return placement.sharding(device, placement.whose(leaf, False).on_host)


def _with_structs(call: Call, where: Sequence[Any]) -> tuple[Call, tuple[Any, ...]]:
    leaves = [
        leaf if s is None else Type.of(jax.typeof(leaf)).struct(s)
        for leaf, s in zip(call.leaves, where, strict=True)
    ]
    return dataclasses.replace(call, leaves=leaves), tuple(where)
