"""A pass: what a scan reads row by row, and is large, is made row by row inside it.

Examples are shuffled and a scan goes over batches of them, tokens become vectors and a scan
goes over those, noise is drawn for all steps of a walk: made before the loop, all rows are
there at once. An iteration reads one of them, and can make it itself. Then only what they
are made of must be there. Each is still made once, unless others read it as well and it is
cheap to make again.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jturnip.frontend import parts
from jturnip.frontend.anew import Large
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.builder import Builder
from jturnip.frontend.costs import HEAVY, VIEWS
from jturnip.frontend.hints import gives_the_same_bits_again
from jturnip.frontend.loops import other_loop, scan_counts, with_body
from jturnip.frontend.results import live
from jturnip.frontend.stretches import Stretch, Stretches
from jturnip.frontend.values import Atom, Equation, FlatJaxpr, Type, entering, nbytes_of


# A row of these takes no longer than its share of what all rows take. A barrier is where
# the user wants it.
_BY_ROWS = frozenset(["gather", "random_bits", "threefry2x32"])
_NEVER = HEAVY - _BY_ROWS | {"optimization_barrier"}
# What takes more than this share of what there is is large.
_LARGE = 1 / 16
# What rows are made of may take so many times what the rows take.
_HARDLY_MORE = 1.1


def made_by_rows(
    flat: FlatJaxpr, arena: int, large: Large, staying: Collection[int], known: Known
) -> FlatJaxpr:
    """The function with what its scans read row by row made inside them, where what it is
    made of is not more than it is, or hardly.

    Args:
      flat: the function.
      arena: bytes on the device.
      large: what it costs to keep what others read too.
      staying: values that are there all the time.
      known: rules of equations; grows.
    """
    large = dataclasses.replace(large, nbytes=int(arena * _LARGE))
    scans = {i: _rows_read(e, flat, large.nbytes) for i, e in enumerate(flat.equations)}
    scans = {i: rows for i, rows in scans.items() if rows}
    if not scans:
        return flat
    search = _Search(Stretches(flat, rules(flat, parts.works, known)), large, scans)
    found = {i: _found(search, rows) for i, rows in scans.items()}
    worth_it = {i: _is_worth_it(flat.equations[i], found[i], staying, flat) for i in found}
    builder = Builder.of(flat)
    builder.equations.clear()
    changed = False
    for i, e in enumerate(flat.equations):
        readers = search.stretches.readers
        made = {
            v: rows
            for v, rows in found.get(i, {}).items()
            if all(worth_it[reader] for reader in readers[v])
        }
        other = _with_rows(e, flat, made, builder) if made else None
        builder.equations.append(other or e)
        changed |= other is not None
    if not changed:
        return flat
    types, equations = tuple(builder.types), tuple(builder.equations)
    return live(dataclasses.replace(flat, types=types, equations=equations))


def _found(search: "_Search", values: Sequence[int]) -> dict[int, "_Rows"]:
    """Of some values those of which rows can be made, with how."""
    found = {v: search.rows_of(v) for v in values}
    return {v: rows for v, rows in found.items() if rows is not None}


def _is_worth_it(
    e: Equation, made: Mapping[int, "_Rows"], staying: Collection[int], flat: FlatJaxpr
) -> bool:
    """Whether what rows are made of takes no more than the rows do that need not be there
    then, or hardly."""
    reads = {x for rows in made.values() for x in rows.reads}
    there = {v for v in e.reads if v not in made}.union(staying)
    gone = nbytes_of(flat, made.keys() - reads)
    return gone > 0 and nbytes_of(flat, reads - there) <= _HARDLY_MORE * gone


def _rows_read(e: Equation, flat: FlatJaxpr, least: int) -> list[int]:
    """What a scan reads row by row, and nothing else of it, of more than so many bytes."""
    if e.name != "scan" or e.driven or e.effects or e.origin.effects:
        return []
    consts, carry, _ = scan_counts(e.origin)
    otherwise = {v for v in e.inputs[: consts + carry] if isinstance(v, int)}
    return [
        v
        for v in dict.fromkeys(v for v in e.inputs[consts + carry :] if isinstance(v, int))
        if v not in otherwise and flat.types[v].nbytes > least
    ]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a value, the equations that make one of them, and what these read of
    others."""

    value: int
    stretch: Stretch
    steps: tuple[int, ...]
    reads: tuple[int, ...]

    def row(self, flat: FlatJaxpr, values: Mapping[int, Any], n: Any) -> Any:
        """Row `n` of the value, of what the equations read."""
        made = parts.at_position(flat, self.stretch, self.steps, values, n)
        return lax.squeeze(made[self.value], (0,))


@dataclass(frozen=True, slots=True)
class _Search:
    """Finds out of what rows can be made."""

    stretches: Stretches
    large: Large
    # Scan → what it reads row by row, and nothing else of it.
    scans: Mapping[int, Collection[int]]

    def rows_of(self, v: int) -> _Rows | None:
        """The rows of a value; None where they cannot be made one by one, or are better
        made at once, since others read them too."""
        flat, stretches = self.stretches.flat, self.stretches
        if v in stretches.results or v not in stretches.writer:
            return None
        if any(v not in self.scans.get(reader, ()) for reader in stretches.readers[v]):
            return None  # it is there for others
        members = self._light(v)
        stretch = stretches.along(members, v, 0) if members else None
        # One position of the axis is one row.
        if stretch is None or stretch.length != flat.types[v].shape[0]:
            return None
        steps = self._steps(v, stretch)
        made = {x for i in steps for x in flat.equations[i].outputs}
        if all(flat.equations[i].name in VIEWS for i in steps):
            return None
        if not (
            stretch.halos.keys().isdisjoint(steps) and made.isdisjoint(stretch.reduced)
        ):
            return None
        if self._is_made_again(v, steps, made) and self._takes_long(v, steps):
            return None
        in_order = tuple(sorted(steps))
        reads = entering([flat.equations[i] for i in in_order])
        return _Rows(v, stretch, in_order, reads)

    def _steps(self, v: int, stretch: Stretch) -> set[int]:
        """The equations of a stretch that make a value in parts."""
        steps, needed = set[int](), [v]
        while needed:
            x = needed.pop()
            i = self.stretches.writer.get(x)
            if i in stretch.working and x in stretch.dims and i not in steps:
                steps.add(i)
                needed += self.stretches.flat.equations[i].reads
        return steps

    def _is_made_again(self, v: int, steps: Collection[int], made: Collection[int]) -> bool:
        """Whether several loops make the rows, or others need what they are made of."""
        stretches = self.stretches
        others = {i for x in made if x != v for i in stretches.readers.get(x, ())}
        return (
            len(stretches.readers[v]) > 1
            or not others.issubset(steps)
            or not stretches.results.isdisjoint(made)
        )

    def _takes_long(self, v: int, steps: Collection[int]) -> bool:
        """Whether it takes longer to make all rows than to keep them."""
        flat, large = self.stretches.flat, self.large
        seconds = sum(large.rates.computing(flat.equations[i].origin) for i in steps)
        return seconds > large.seconds_per_byte * flat.types[v].nbytes

    def _light(self, v: int) -> Sequence[int]:
        """The light equations that lead to a value, by way of large ones."""
        flat, found, agenda = self.stretches.flat, set[int](), [v]
        while agenda:
            x = agenda.pop()
            i = self.stretches.writer.get(x)
            if i is None or i in found or flat.types[x].nbytes <= self.large.nbytes:
                continue
            e = flat.equations[i]
            if e.name in _NEVER or e.effects or e.driven:
                continue
            if gives_the_same_bits_again(e.origin):
                found.add(i)
                agenda += e.reads
        return sorted(found)


def _with_rows(
    e: Equation, flat: FlatJaxpr, made: Mapping[int, _Rows], builder: Builder
) -> Equation | None:
    """A scan that makes some of its rows; None where JAX has another form for it.

    Args:
      builder: gets what counts the iterations; nobody reads it where the result is None.
    """
    consts, carry, _ = scan_counts(e.origin)
    before = consts + carry
    own = tuple(dict.fromkeys(x for each in made.values() for x in each.reads))
    scanned = [v for v in e.inputs[before:] if isinstance(v, int)]  # a number has no rows
    kept = tuple(v for v in scanned if v not in made)
    closed = e.origin.params["jaxpr"]

    def function(*operands: Any) -> Any:
        values = dict(zip(own, operands, strict=False))
        rest = operands[len(own) :]
        *rows, n = rest[before:]
        others = iter(rows)
        all_rows = (
            made[v].row(flat, values, n) if v in made else next(others) for v in scanned
        )
        return jaxpr_as_fun(closed)(*rest[:before], *all_rows)

    given: tuple[Atom, ...] = (*own, *e.inputs[:before])
    types = [builder.type_of(v) for v in given]
    rows = zip(scanned, closed.in_avals[before:], strict=True)
    types += [Type.of(row) for v, row in rows if v not in made]
    types.append(Type((), np.dtype(np.int32)))
    body = jax.make_jaxpr(function)(*(t.struct() for t in types))
    length = e.origin.params["length"]
    numbers = jax.make_jaxpr(lambda: lax.iota(np.int32, length))()
    (count,) = builder.ours(numbers, (), e.within)
    flat = dataclasses.replace(flat, types=tuple(builder.types))
    other = with_body(e.origin, body, len(own) + consts)
    return other_loop(e, flat, (*given, *kept, count), other)
