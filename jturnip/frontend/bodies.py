"""A pass: loops and branches that stay whole, with what they do inside done in blocks.

What a loop reads and carries often fits where what one iteration makes in between does not.
Then the loop need not be taken apart, nor driven from outside: its body, cut as any other
function is (`choosing.py`), holds one block of that at once, and the loop is one task. Or
all that an iteration makes is what it carries, and that is changed where it is
(`in_place.py`).
"""

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from jturnip.errors import UnsupportedError
from jturnip.frontend.anew import Large
from jturnip.frontend.choosing import Room, Search, Where, cut_once
from jturnip.frontend.in_place import in_place
from jturnip.frontend.loops import INSIDE, LOOPS, loop_counts
from jturnip.frontend.rowwise import made_by_rows
from jturnip.frontend.shifting import shifted
from jturnip.frontend.streaming import Seen
from jturnip.frontend.values import (
    Equation,
    FlatJaxpr,
    bind,
    evaluated,
    nbytes_of,
)


# What is tried: as for so many times less than there is, with XLA holding so much of a
# block at once, in values of the widest equation, fused or not; and what is large.
_TRIES = (
    (1, 1, True, 0.5),
    (1, 1, False, 0.5),
    (1, 1, False, 0.125),
    (1, 2, False, 0.125),
    (2, 2, False, 0.125),
    (4, 2, False, 0.125),
    (16, 2, False, 0.125),
)


def with_bodies_in_blocks(
    flat: FlatJaxpr, arena: int, large: Large, seen: Seen
) -> Iterator[FlatJaxpr]:
    """The function with the bodies of its loops and branches in blocks, in some ways that
    are worth trying: those with the fewest blocks first.

    Args:
      flat: a function of which something does not fit.
      arena: bytes on the device.
      large: what is large, and what the device is expected to do.
      seen: what is known of the function; grows.
    """
    search, found = Search(seen.rules), set[Any]()
    for each in _TRIES:
        bodies = _Bodies(each, large, seen, search)
        cut, how = bodies.changed(flat, arena)
        if how and how not in found:
            found.add(how)
            yield cut


def with_carried_in_place(
    flat: FlatJaxpr, arena: int, large: Large, seen: Seen
) -> FlatJaxpr | None:
    """The function with loops that change what they carry where it is; None where none can,
    or all do anyway. Of the arguments of `with_bodies_in_blocks`."""
    changed, how = _Bodies(None, large, seen, Search(seen.rules)).changed(flat, arena)
    return changed if how else None


# The body of a loop, among what is done inside it; and from what share of what there is on
# what is carried changes where it is.
_BODIES = frozenset(["jaxpr", "body_jaxpr"])
_CHANGES = 1 / 32

# What was cut, and how; nothing where nothing was.
_How: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Bodies:
    """Bodies done in blocks, in one way; or that change what they carry where it is."""

    blocks: tuple[int, float, bool, float] | None
    large: Large
    seen: Seen
    search: Search

    def changed(self, flat: FlatJaxpr, arena: int) -> tuple[FlatJaxpr, _How]:
        """A function with its loops and branches so."""
        made = [self._equation(e, flat, arena) for e in flat.equations]
        how = tuple((i, each) for i, (_, each) in enumerate(made) if each)
        if not how:
            return flat, ()
        return dataclasses.replace(flat, equations=tuple(e for e, _ in made)), how

    def _equation(self, e: Equation, flat: FlatJaxpr, arena: int) -> tuple[Equation, _How]:
        inside = INSIDE.get(e.name, ())
        if not inside or e.driven or e.effects or e.origin.effects:
            return e, ()
        if self.seen.is_unrolled(e.origin):
            return e, ()
        free = (arena - _bytes_outside(e, flat)) // (self.blocks or (1,))[0]
        if free <= 0:
            return e, ()
        changed, how = {}, []
        for name in inside:
            param = e.origin.params[name]
            several = isinstance(param, tuple)
            carried = _carried(e.origin) if name in _BODIES else None
            made = [
                self._body(each, free, carried) for each in (param if several else (param,))
            ]
            changed[name] = tuple(body for body, _ in made) if several else made[0][0]
            how.append(tuple(each for _, each in made))
        if not any(map(any, how)):
            return e, ()
        structs = [t.struct() for t in flat.operand_types(e)]
        closed = jax.make_jaxpr(lambda *x: bind(e.origin, x, **changed))(*structs)
        (origin,) = closed.jaxpr.eqns
        return dataclasses.replace(e, origin=origin, calls=e.within, ours=True), tuple(how)

    def _body(self, closed: Any, free: int, carried: slice | None) -> tuple[Any, _How]:
        """What is done inside, of which so many bytes are free for what it makes.

        Args:
          closed: it, as a jaxpr.
          free: so many bytes.
          carried: which of its arguments its first results take the place of, in a loop.
        """
        try:
            flat = self.seen.inline(closed)
        except UnsupportedError:
            return closed, ()
        there = frozenset((*flat.inputs, *(v for v, _ in flat.constants)))
        with_all = free + nbytes_of(flat, there)
        if self.blocks is None:
            made, how = self._in_place(flat, with_all, carried)
        else:
            made, how = self._in_blocks(flat, free, with_all, there, *self.blocks[1:])
        if not how:
            return closed, ()
        structs = [flat.types[v].struct() for v in flat.inputs]
        return jax.make_jaxpr(functools.partial(evaluated, made))(*structs), how

    def _in_place(
        self, flat: FlatJaxpr, arena: int, carried: slice | None
    ) -> tuple[FlatJaxpr, _How]:
        made, deeper = self.changed(flat, arena)
        if carried is not None:
            pairs = zip(made.inputs[carried], made.result_values, strict=False)
            changing = in_place(made, list(pairs), int(arena * _CHANGES))
            if changing is not None:
                return changing, (deeper, True)
        return made, (deeper, False) if deeper else ()

    def _in_blocks(
        self,
        flat: FlatJaxpr,
        free: int,
        arena: int,
        there: frozenset[int],
        at_once: float,
        fused: bool,
        share: float,
    ) -> tuple[FlatJaxpr, _How]:
        by_rows = made_by_rows(flat, free, self.large, there, self.seen.rules)
        made, deeper = self.changed(by_rows, arena)
        made = shifted(made, free)
        room = Room(
            free,
            max(1, int(free * share)),
            at_once,
            fused,
            narrow=True,
            eager=False,
            apart=False,
            keep=False,
            side_by_side=False,
            rates=self.large.rates,
            where=Where(frozenset(), there),
        )
        found = cut_once(made, room, False, self.search)
        if not found.how and not deeper and by_rows is flat:
            return flat, ()
        return found.cut, (deeper, found.how, by_rows is not flat)


def _carried(loop: Any) -> slice:
    """Which arguments of a loop's body are carried."""
    consts, carry, _ = loop_counts(loop)
    consts = loop.params.get("body_nconsts", consts)
    return slice(consts, consts + carry)


def _bytes_outside(e: Equation, flat: FlatJaxpr) -> int:
    """What is there all the time: operands, and results that do not take their place."""
    carried = loop_counts(e.origin)[1] if e.name in LOOPS else 0
    return nbytes_of(flat, {*e.reads, *e.outputs[carried:]})
