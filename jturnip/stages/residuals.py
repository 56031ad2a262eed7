"""Which residuals of a forward part wait in host memory for the backward part."""

import itertools
import math
from collections.abc import Sequence

import jax

from jturnip import placement
from jturnip.compat import Device
from jturnip.frontend.values import Type
from jturnip.programs.fastest import CLEARLY
from jturnip.stages.options import Part
from jturnip.units import padded


# Residuals that stay on the device take no more than these shares of the budget: the first
# with which the backward part is thought to be no slower than with the next. JAX holds them
# until that is over.
_SHARES = (7 / 8, 1 / 2, 1 / 4, 0)
# What it can surely do without where nothing is known of it.
_UNKNOWN = 1 / 4


def away(
    part: Part,
    types: Sequence[Type],
    given: Sequence[jax.ShapeDtypeStruct],
    device: Device,
    arena: int,
) -> frozenset[int]:
    """Positions of the residuals that must be in host memory: the largest ones.

    Args:
      part: the forward part.
      types: of its results.
      given: its arguments, with where they lie.
      device: where it runs.
      arena: device bytes for it, and for what comes after it.
    """
    everything = frozenset(part.residuals)
    later = part.later
    if not everything or (later is not None and later.most_bytes(given) <= arena):
        return frozenset()
    there, host = (placement.sharding(device, on_host) for on_host in (False, True))

    def without_room(share: float) -> frozenset[int]:
        room = int(share * (arena + part.beside_bytes)) - part.residual_bytes
        return _without_room(part.residuals, types, room)

    if later is None:
        return without_room(_UNKNOWN)
    # To look for a cut takes long, and beside fewer residuals none may be needed.
    for cut in (False, True):
        best, least = everything, math.inf
        for left in dict.fromkeys(map(without_room, _SHARES)):
            if cut and left == everything and least == math.inf:
                break
            results = [t.struct(host if i in left else there) for i, t in enumerate(types)]
            seconds = later.seconds(given, results, part.beside_bytes, cut)
            if seconds is not None and seconds >= CLEARLY * least:
                break
            if seconds is not None:
                best, least = left, seconds
        if least < math.inf:
            return best
    return everything


def _without_room(
    residuals: Sequence[int], types: Sequence[Type], room: int
) -> frozenset[int]:
    """Those that find no room where the smallest come first."""
    smallest_first = sorted(residuals, key=lambda i: types[i].nbytes)
    taken = itertools.accumulate(padded(types[i].nbytes) for i in smallest_first)
    return frozenset(i for i, n in zip(smallest_first, taken, strict=True) if n > room)
