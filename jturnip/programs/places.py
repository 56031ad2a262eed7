"""Where a function's arguments, closed-over arrays and results lie, and their bytes."""

import collections
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from jturnip import placement
from jturnip.frontend.blocks import Where
from jturnip.frontend.values import FlatJaxpr, is_key
from jturnip.graph.taskgraph import BufferId
from jturnip.placement import Arguments, Returned, Whose
from jturnip.units import padded


def kept(arguments: Arguments, flat: FlatJaxpr) -> Arguments:
    """A donated argument that is returned as it is, or that nothing reads, stays."""
    read = {v for e in flat.equations for v in e.inputs if isinstance(v, int)}
    read.update(s.source for s in flat.slices)
    returned = {*flat.result_values, *(v for v in flat.inputs if v not in read)}
    alive = {
        Whose.DONATED_DEVICE: Whose.CALLER_DEVICE,
        Whose.DONATED_HOST: Whose.CALLER_HOST,
    }
    whose = tuple(
        alive.get(w, w) if v in returned else w
        for v, w in zip(flat.inputs, arguments.whose, strict=True)
    )
    return dataclasses.replace(arguments, whose=whose)


def unread(flat: FlatJaxpr) -> frozenset[int]:
    """Values of arguments that nothing reads and that are not returned: they are the
    caller's matter, wherever they lie."""
    used = {v for e in flat.equations for v in e.inputs if isinstance(v, int)}
    used.update(s.source for s in flat.slices)
    used.update(flat.result_values)
    return frozenset(flat.inputs) - used


def in_order_of_reading(flat: FlatJaxpr) -> list[int]:
    """Positions of the arguments that are read, in the order in which they first are."""
    source = {s.value: s.source for s in flat.slices}
    reads = (v for e in flat.equations for v in e.inputs if isinstance(v, int))
    order = dict.fromkeys(source.get(v, v) for v in reads)
    position = {v: at for at, v in enumerate(flat.inputs)}
    return [position[v] for v in order if v in position]


def where(flat: FlatJaxpr, arguments: Arguments) -> Where:
    """Where arguments and closed-over arrays are. Keys are not read in parts from there."""
    arguments, ignored = kept(arguments, flat), unread(flat)
    held = [
        *zip(flat.inputs, arguments.whose, strict=True),
        *((v, constant_whose(array)) for v, array in flat.constants),
    ]
    return Where(
        hosted=frozenset(
            v for v, w in held if w.on_host and not is_key(flat.types[v].dtype)
        ),
        staying=frozenset(
            v for v, w in held if w is Whose.CALLER_DEVICE and v not in ignored
        ),
    )


def constant_whose(array: Any) -> Whose:
    """Who holds a closed-over array: small ones are put on the device once, for good."""
    whose = placement.whose(array, False)
    return Whose.CALLER_DEVICE if whose is Whose.OURS_DEVICE else whose


def constants_on_device(flat: FlatJaxpr) -> dict[int, int]:
    """Closed-over arrays that are on the device: id → bytes."""
    return {
        id(array): padded(flat.types[v].nbytes)
        for v, array in flat.constants
        if not constant_whose(array).on_host
    }


def values_that_stay(flat: FlatJaxpr, arguments: Arguments) -> frozenset[int]:
    """Arguments and closed-over arrays that are on the device during the whole call, and
    that something reads."""
    given, ignored = zip(flat.inputs, arguments.whose, strict=True), unread(flat)
    kept = {v for v, w in given if w is Whose.CALLER_DEVICE and v not in ignored}
    closed_over = {v for v, a in flat.constants if not constant_whose(a).on_host}
    return frozenset(kept | closed_over)


def bytes_at_start(flat: FlatJaxpr, arguments: Arguments) -> int:
    """Device bytes of arguments and closed-over arrays when a call begins."""
    there = [w for w in Whose if not w.on_host]
    constants = sum(constants_on_device(flat).values())
    return argument_bytes(flat, arguments, there) + constants


def argument_bytes(flat: FlatJaxpr, arguments: Arguments, held: Collection[Whose]) -> int:
    """Bytes of the arguments that are held in one of these ways, and not left unread."""
    ignored = unread(flat)
    return sum(
        padded(flat.types[v].nbytes)
        for v, whose in zip(flat.inputs, arguments.whose, strict=True)
        if whose in held and v not in ignored
    )


def reuses(
    flat: FlatJaxpr, arguments: Arguments, to_host: Collection[int]
) -> dict[int, int]:
    """Result → the donated host argument whose place it takes, by their positions. Those
    that must end in host memory have the first choice."""
    returned = frozenset(flat.inputs)
    types = [flat.types[v] for v in flat.inputs]
    results = [None if o in returned else flat.type_of(o) for o in flat.outputs]
    pairs = list(zip(types, arguments.whose, strict=True))
    return placement.reused_arguments(pairs, results, to_host)


def at_home(
    flat: FlatJaxpr, arguments: Arguments, to_host: Collection[int]
) -> frozenset[int]:
    """Results in the place of an argument in host memory, which is returned or re-used; of
    which some must end in host memory anyway, by their positions."""
    on_host = {v for v, w in zip(flat.inputs, arguments.whose, strict=True) if w.on_host}
    returned = {at for at, output in enumerate(flat.outputs) if output in on_host}
    return frozenset(returned.union(reuses(flat, arguments, to_host)))


def leaving(
    flat: FlatJaxpr,
    arguments: Arguments,
    to_host: Collection[int],
    returned: Returned,
    arena: int,
    least: Callable[[Collection[BufferId]], int] = lambda there: 0,
) -> frozenset[int]:
    """Results that go to host memory, since there is no room for them on the device, or
    none would be left for the function to be called with them.

    Args:
      flat: the function.
      arguments: how its arguments are held.
      to_host: results that go there anyway, by position.
      returned: of which results all go or none does, and which may lie anywhere; the
        others stay.
      arena: bytes on the device.
      least: bytes that a call needs if some more arguments are on the device.
    """
    away = at_home(flat, arguments, to_host).union(to_host)
    as_they_are = frozenset(flat.inputs)
    sizes = {
        at: padded(flat.type_of(output).nbytes)
        for at, output in enumerate(flat.outputs)
        if at not in away.union(returned.anywhere) and output not in as_they_are
    }
    # At rest a result has the place of an argument like it that was given up.
    room = arena - argument_bytes(flat, arguments, (Whose.CALLER_DEVICE,))
    room -= sum(constants_on_device(flat).values())
    offers = collections.Counter(
        (flat.types[v].shape, flat.types[v].dtype)
        for v, w in zip(flat.inputs, arguments.whose, strict=True)
        if w is Whose.DONATED_DEVICE
    )
    for at in sizes:
        t = flat.type_of(flat.outputs[at])
        if offers[t.shape, t.dtype]:
            offers[t.shape, t.dtype] -= 1
            room -= sizes[at]
            sizes[at] = 0
    groups = sorted(
        map(sorted, returned.groups), key=lambda g: sum(sizes.get(i, 0) for i in g)
    )
    staying = set(sizes).difference(*groups)
    for group in groups:
        wanted = staying.union(at for at in group if at in sizes)
        # The arguments' buffers come first, in order.
        again = frozenset(BufferId(i) for at, i in returned.again if at in wanted)
        if sum(sizes[at] for at in wanted) <= room and least(again) <= arena:
            staying = wanted
    return frozenset(set(sizes) - staying)
