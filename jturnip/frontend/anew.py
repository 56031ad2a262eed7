"""A pass: what is large, and quickly made of little, is made anew for who cannot share it.

The kernel of a few points is multiplied with one vector after the other, and each is made
of the product before: no stretch has two of these products in it, so the whole kernel would
have to be kept, or moved. A stretch that makes it for itself has one block of it at once.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jturnip.frontend import costs, parts
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.hints import gives_the_same_bits_again
from jturnip.frontend.stretches import Stretch, Stretches
from jturnip.frontend.values import Equation, FlatJaxpr, nbytes_of


# So often something is made anew at most.
_MOST_COPIES = 64


@dataclass(frozen=True, slots=True)
class Large:
    """What is large, and what it costs to keep it."""

    # From how many bytes on.
    nbytes: int
    # To write down a byte elsewhere and read it again.
    seconds_per_byte: float
    rates: costs.DeviceRates
    # What a stretch may pass on from loop to loop.
    arena: float = math.inf


def made_anew(flat: FlatJaxpr, large: Large, known: Known) -> FlatJaxpr:
    """The function with more equations that make the same, where that takes no longer than
    to keep it.

    Args:
      flat: the function.
      large: what is large.
      known: rules of equations; grows.
    """
    settled: set[int] = set()
    for _ in range(_MOST_COPIES):
        again = _with_one_more(flat, large, known, settled)
        if again is None:
            break
        flat = again
    return flat


def _with_one_more(
    flat: FlatJaxpr, large: Large, known: Known, settled: set[int]
) -> FlatJaxpr | None:
    """With one more value made anew; None where there is none. Those that are `settled`
    are not looked at, and grow."""
    stretches: Stretches | None = None
    results = frozenset(flat.result_values)
    writer = {v: i for i, e in enumerate(flat.equations) for v in e.outputs}
    readers = Counter(v for e in flat.equations for v in set(e.reads))
    for v in writer:
        if flat.types[v].nbytes <= large.nbytes or readers[v] < 2:
            continue
        if v in settled or v in results:
            continue
        settled.add(v)
        steps = making(flat, writer, v, large)
        if not steps:
            continue
        stretches = stretches or Stretches(flat, rules(flat, parts.works, known))
        inside = _together(stretches, v, large)
        outside = frozenset(stretches.readers.get(v, ())) - inside
        if inside and outside:
            return _with_copy(flat, steps, v, outside)
    return None


def making(flat: FlatJaxpr, writer: dict[int, int], v: int, large: Large) -> Sequence[int]:
    """The equations that make a large value of small ones, in order; none where it is not
    made of less than it is, or not quickly."""
    seconds = large.seconds_per_byte * flat.types[v].nbytes
    found: set[int] = set()
    needed: set[int] = set()
    agenda = [v]
    while agenda:
        value = agenda.pop()
        i = writer.get(value)
        if i in found:
            continue
        if i is None or flat.types[value].nbytes <= large.nbytes:
            needed.add(value)
            continue
        e = flat.equations[i]
        seconds -= large.rates.computing(e.origin)
        if seconds < 0 or e.effects or e.driven or not gives_the_same_bits_again(e.origin):
            return ()
        found.add(i)
        agenda += e.reads
    if 2 * sum(flat.types[x].nbytes for x in needed) > flat.types[v].nbytes:
        return ()
    return sorted(found)


def _together(stretches: Stretches, v: int, large: Large) -> frozenset[int]:
    """The most readers of a value that are in one stretch with what writes it, and make
    nothing large there that others read. Of a stretch that passes on more from loop to loop
    than there is, those in the same loop: the others make it anew in any case."""
    types, writer = stretches.flat.types, stretches.writer[v]
    sets = stretches.together(stretches.ruled(), large.nbytes)
    members = next((each for each in sets if writer in each), ())
    found: list[frozenset[int]] = []
    for dim, size in enumerate(types[v].shape if members else ()):
        stretch = stretches.along(members, v, dim) if size > 1 else None
        if stretch is not None and writer in stretch.working:
            inside = stretch.working.intersection(stretches.readers[v])
            if nbytes_of(stretches.flat, stretch.ends - {v}) > large.arena:
                loop = stretch.loop[writer]
                inside = frozenset(i for i in inside if stretch.loop[i] == loop)
            found.append(inside - _leading_out(stretches, stretch, v, large.nbytes))
    return max(found, key=len, default=frozenset())


def _leading_out(
    stretches: Stretches, stretch: Stretch, v: int, least: int
) -> frozenset[int]:
    """The equations of a stretch that lead to another large value that leaves it."""
    flat = stretches.flat
    needed = {x for x in stretch.leaving if x != v and flat.types[x].nbytes > least}
    leading: set[int] = set()
    for i in reversed(stretch.equations):
        if not needed.isdisjoint(flat.equations[i].outputs):
            leading.add(i)
            needed.update(flat.equations[i].reads)
    return frozenset(leading)


def _with_copy(
    flat: FlatJaxpr, making: Sequence[int], v: int, readers: Collection[int]
) -> FlatJaxpr:
    """With a value that some of its readers have for themselves, made before the first of
    them."""
    types = list(flat.types)
    instead: dict[int, int] = {}
    copies = []
    for i in making:
        e = flat.equations[i]
        inputs = e.reading(instead)
        for value in e.outputs:
            instead[value] = len(types)
            types.append(flat.types[value])
        outputs = tuple(instead[value] for value in e.outputs)
        copies.append(dataclasses.replace(e, inputs=inputs, outputs=outputs))
    instead, first = {v: instead[v]}, min(readers)
    equations: list[Equation] = []
    for i, e in enumerate(flat.equations):
        if i == first:
            equations += copies
        if i in readers:
            e = dataclasses.replace(e, inputs=e.reading(instead))
        equations.append(e)
    return dataclasses.replace(flat, types=tuple(types), equations=tuple(equations))
