"""Stretches: equations that can be done part by part along one axis.

From a dimension of one value, what is cut spreads to all values that equations connect with
it, by their rules (`axes.py`). What does not agree stays outside: an equation that needs a
value whole reads it whole, before or after.
"""

import collections
import heapq
import math
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, TypeVar

from jturnip.frontend.costs import HEAVY, REDUCTIONS, DeviceRates, has_one_of
from jturnip.frontend.memory_model import inner_bytes
from jturnip.frontend.rules import SCATTERS, Along, Halo, Rule
from jturnip.frontend.sets import Joined
from jturnip.frontend.values import Constant, Equation, FlatJaxpr, touched


# A stretch has so many ends at most, found one after the other.
_MOST_ENDS = 8
# So many values that nothing in parts connects are cut together; of what is whole inside a
# stretch, what is a larger share of its largest value.
_MOST_SEEDS = 64
_SMALL_BESIDE = 16
# What is put together of more pieces than so many is large although none of them is.
_JOINS = frozenset(["concatenate", "stack"])
_FEW_PIECES = 4

Some = TypeVar("Some")


@dataclass(frozen=True, slots=True)
class Pass:
    """One way through all parts."""

    # Equations that are done once before it, those that are done for each part, and the
    # values that those are for: reduced ones, and what leaves in parts.
    once: tuple[int, ...]
    steps: tuple[int, ...]
    wanted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Equations to be done part by part along one axis."""

    # All of them, in order, and those that work on parts; the others read no part.
    equations: tuple[int, ...]
    working: frozenset[int]
    # Value that is written in parts → the dimension along which it is cut.
    dims: Mapping[int, int]
    # (equation, operand) → the dimension along which that is cut there.
    uses: Mapping[tuple[int, int], int]
    # Equation whose windows slide along the axis → what it reads of its first operand,
    # which enters.
    halos: Mapping[int, Halo]
    # Value of which each part gives all positions → how these are combined.
    reduced: Mapping[int, str]
    # Equation → the loop over parts that it is in, or that it precedes. What reads a
    # reduced value comes in a later loop.
    loop: Mapping[int, int]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    # Positions along the axis; one is several along a dimension that is a multiple.
    length: int

    @property
    def key(self) -> Any:
        """The same for the same stretch of the same function."""
        cut = tuple(sorted(self.dims.items())), tuple(sorted(self.uses.items()))
        return self.equations, self.length, *cut

    @property
    def ends(self) -> frozenset[int]:
        """What is there at once for any part: what enters, what leaves, what is reduced."""
        return frozenset({*self.entering, *self.leaving, *self.reduced})

    @property
    def loops(self) -> int:
        """How many loops there are."""
        return 1 + max(self.loop.values())

    def passes(self, flat: FlatJaxpr, materialized: Collection[int] = ()) -> Iterator[Pass]:
        """What is done for each part, loop by loop. What a later loop needs of a part that
        does not leave it does anew, but for values that are written down for it."""
        there = set(self.entering)
        in_loop: dict[int, list[int]] = {}
        for i in self.equations:
            in_loop.setdefault(self.loop[i], []).append(i)
        makes = {v: i for i in self.working for v in flat.equations[i].outputs}
        ends = {*self.leaving, *materialized}
        for number in range(self.loops):
            mine = in_loop.get(number, ())
            once = tuple(i for i in mine if i not in self.working)
            there.update(v for i in once for v in flat.equations[i].outputs)
            wanted = tuple(
                v
                for i in mine
                if i in self.working
                for v in flat.equations[i].outputs
                if v in self.reduced or (v in self.dims and v in ends)
            )
            yield Pass(once, _steps(flat, makes, wanted, there), wanted)
            there.update(wanted)

    def accumulated(self, flat: FlatJaxpr) -> dict[int, Equation]:
        """Of what is reduced, what a scatter makes of some of its updates, with the
        scatter: what there is of earlier parts is the operand of the next."""
        equations = (flat.equations[i] for i in self.working)
        scatters = (e for e in equations if e.name in SCATTERS)
        return {v: e for e in scatters for v in e.outputs if v in self.reduced}

    def one_after_the_other(
        self, flat: FlatJaxpr, names: frozenset[str], materialized: Collection[int] = ()
    ) -> bool:
        """Whether, of what is done for a part, each of some primitives needs what the one
        before it gives."""
        alone = {i for i in self.working if has_one_of(names, flat.equations[i].origin)}
        if len(alone) < 2:
            return True
        for each in self.passes(flat, materialized):
            before: set[int] = set()
            after: dict[int, frozenset[int]] = {}  # value → those of them that it needs
            for i in each.steps:
                e = flat.equations[i]
                needs = frozenset[int]().union(*(after.get(v, ()) for v in e.reads))
                if i in alone:
                    if needs != before:
                        return False
                    before.add(i)
                    needs |= {i}
                after.update(dict.fromkeys(e.outputs, needs))
        return True

    def scale(self, flat: FlatJaxpr, v: int, dim: int) -> int:
        """How many positions along a dimension are one along the axis."""
        return flat.types[v].shape[dim] // self.length

    def reads(self, flat: FlatJaxpr, i: int) -> int:
        """What an equation whose windows slide along the axis reads with a halo."""
        v = flat.equations[i].inputs[0]
        assert not isinstance(v, Constant)
        return v

    def halo(self, i: int, low: int, length: int) -> tuple[int, int, tuple[int, int]]:
        """What an equation whose windows slide along the axis reads for some positions of
        that: of its first operand the first position, and how many; and the padding."""
        halo = self.halos[i]
        scale = halo.positions // self.length
        return halo.of(low * scale, length * scale)

    def along(self, flat: FlatJaxpr, i: int, low: int, length: int) -> Along:
        """Where an equation is cut, for some positions along the axis."""
        e = flat.equations[i]

        def cut(v: int | Constant, dim: int | None) -> tuple[int, int] | None:
            if dim is None or isinstance(v, Constant):
                return None
            return dim, self.scale(flat, v, dim)

        return Along(
            tuple(cut(v, self.uses.get((i, at))) for at, v in enumerate(e.inputs)),
            cut(e.outputs[0], self.dims.get(e.outputs[0])),
            (self.halos[i].at, self.halo(i, low, length)[-1]) if i in self.halos else None,
        )

    def shape(self, flat: FlatJaxpr, v: int, length: int) -> tuple[int, ...]:
        """The shape of so much of a value."""
        shape = flat.types[v].shape
        dim = self.dims.get(v)
        if dim is None:
            return shape
        return (*shape[:dim], length * self.scale(flat, v, dim), *shape[dim + 1 :])

    def read_in_parts(self, flat: FlatJaxpr) -> set[int]:
        """What its equations read in parts."""
        read = (flat.equations[i].inputs[at] for i, at in self.uses)
        return {v for v in read if not isinstance(v, Constant)}

    def fused(self, flat: FlatJaxpr) -> set[int]:
        """What is made element by element for one equation, which does with it what it may
        do while it is made."""
        readers = collections.Counter(
            v for i in self.equations for v in flat.equations[i].reads
        )
        never = HEAVY | REDUCTIONS
        light = {
            v
            for i in self.working
            if flat.equations[i].name not in never
            for v in flat.equations[i].outputs
            if readers[v] == 1
        }
        heavy = (i for i in self.equations if flat.equations[i].name in HEAVY)
        return light.difference(*(flat.equations[i].reads for i in heavy))


def _of_each(flat: FlatJaxpr, asked: Callable[[Any], Some]) -> list[Some]:
    """What is asked of the origin of each equation: once where parts share it."""
    origins = {id(e.origin): e.origin for e in flat.equations}
    answers = {key: asked(origin) for key, origin in origins.items()}
    return [answers[id(e.origin)] for e in flat.equations]


def _steps(
    flat: FlatJaxpr, makes: Mapping[int, int], wanted: Iterable[int], there: Container[int]
) -> tuple[int, ...]:
    """The equations that make some values, of what is there; `makes` has for each value
    that is made in parts its equation."""
    steps: set[int] = set()
    agenda = list(wanted)
    while agenda:
        i = makes.get(agenda.pop())
        if i is not None and i not in steps:
            steps.add(i)
            agenda += (v for v in flat.equations[i].reads if v not in there)
    return tuple(sorted(steps))


def _sides(e: Equation, rule: Rule) -> Iterator[tuple[int, tuple[int | None, ...]]]:
    """The values that an equation reads and writes, with their labels."""
    for v, labels in zip(e.inputs, rule.operands, strict=True):
        if not isinstance(v, Constant):
            yield v, labels
    yield from zip(e.outputs, rule.results, strict=True)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Value → the dimension along which it is cut; values that must stay whole."""

    dims: dict[int, int]
    whole: set[int]


class Stretches:
    """Finds the stretches of one function."""

    def __init__(self, flat: FlatJaxpr, of_equation: Sequence[Rule | None]):
        self.flat = flat
        self._rules = of_equation
        self.results = frozenset(flat.result_values)
        # Bytes that each equation holds beside what it reads and writes.
        self.inner = _of_each(flat, inner_bytes)
        # How large its values are, and what its equations hold, in order.
        self.sizes = sorted({*(t.nbytes for t in flat.types), *self.inner})
        self.writer = {v: i for i, e in enumerate(flat.equations) for v in e.outputs}
        self.readers: dict[int, list[int]] = {}
        for i, e in enumerate(flat.equations):
            for v in e.reads:
                self.readers.setdefault(v, []).append(i)
        # Of every equation, those that write what it reads, and read what it writes.
        self._writers_for = [
            frozenset(self.writer[v] for v in e.reads if v in self.writer)
            for e in flat.equations
        ]
        self._readers_of = [
            frozenset(i for v in e.outputs for i in self.readers.get(v, ()))
            for e in flat.equations
        ]
        self._sides = [
            () if rule is None else tuple(_sides(e, rule))
            for e, rule in zip(flat.equations, of_equation, strict=True)
        ]
        # The many pieces of which a value is put together, and its bytes.
        self._joins = [
            (e.reads, max(flat.types[v].nbytes for v in e.outputs))
            for e in flat.equations
            if e.name in _JOINS and len(e.inputs) > _FEW_PIECES
        ]
        self._computing: dict[DeviceRates, Sequence[float]] = {}
        # What was found before: it depends on nothing but what is asked.
        self._sets: dict[tuple[tuple[int, ...], int], list[list[int]]] = {}
        self._stretches: dict[tuple[tuple[int, ...], int, int], Stretch | None] = {}

    def computing(self, rates: DeviceRates) -> Sequence[float]:
        """Seconds that each equation takes by its arithmetic."""
        if rates not in self._computing:
            self._computing[rates] = _of_each(self.flat, rates.computing)
        return self._computing[rates]

    def widest_bytes(self, stretch: Stretch, fused: bool = False) -> int:
        """Bytes of what of a stretch is cut and never leaves, at the equation where that is
        most; if it is to be `fused`, of what XLA is sure to write down only, beside what
        enters and leaves in parts."""
        flat, types = self.flat, self.flat.types
        inner = set(stretch.dims).difference(stretch.entering, stretch.leaving)
        ends = 0
        if fused:
            inner -= stretch.fused(flat)
            entering = stretch.read_in_parts(flat).intersection(stretch.entering)
            there = entering | (stretch.dims.keys() & {*stretch.leaving})
            ends = sum(types[v].nbytes for v in there)

        def held(i: int) -> int:
            values = inner.intersection(touched(flat.equations[i]))
            return sum(types[v].nbytes for v in values) + self.inner[i]

        return ends + max(map(held, stretch.working))

    def ruled(self) -> list[int]:
        """The equations that have a rule."""
        return [i for i, rule in enumerate(self._rules) if rule is not None]

    def slid(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """Of the largest result of windows among some equations, the first of those, the
        dimensions along which these slide."""
        found = [
            (-self.flat.types[v].nbytes, i, v, dim)
            for i in members
            if (rule := self._rules[i]) is not None and rule.halos
            for v, labels in zip(self.flat.equations[i].outputs, rule.results, strict=True)
            for dim, label in enumerate(labels)
            if label in rule.halos
        ]
        first = min(found, default=None)
        return [] if first is None else [(v, d) for *_, v, d in found if v == first[2]]

    def together(self, among: Sequence[int], least: int) -> list[list[int]]:
        """Equations that read, write or hold more than `least`, in sets: those that pass
        such values to one another are in one, with all that is on the way between them. So
        are those that pass the many pieces of which such a value is put together."""
        key = tuple(among), least
        if key not in self._sets:
            self._sets[key] = self._together(among, least)
        return self._sets[key]

    def _together(self, among: Sequence[int], least: int) -> list[list[int]]:
        types, inside = self.flat.types, set(among)
        joined = Joined[int]()
        small = set[int]()  # what is large together
        for pieces, nbytes in self._joins:
            if nbytes > least:
                small.update(pieces)
        is_large = lambda v: types[v].nbytes > least or v in small
        for i in sorted(among):
            e = self.flat.equations[i]
            if self.inner[i] > least or any(map(is_large, (*e.reads, *e.outputs))):
                joined.find(i)
            for v in e.outputs:
                if is_large(v):
                    for reader in self.readers.get(v, ()):
                        if reader in inside:
                            joined.join(i, reader)
        found = (self.between(self._with_spread(each, inside)) for each in joined.sets())
        return self._apart([[i for i in each if i in inside] for each in found], inside)

    def _apart(self, sets: list[list[int]], inside: Collection[int]) -> list[list[int]]:
        """Sets of equations, with one for those that have some in common: what stands
        between some of one set may be of another."""
        joined = Joined[int]()
        for each in sets:
            for i in each:
                joined.join(each[0], i)
        together = joined.sets()
        if len(together) == len(sets):
            return sets
        return [[i for i in self.between(each) if i in inside] for each in together]

    def _with_spread(self, members: Sequence[int], among: Collection[int]) -> list[int]:
        """With what is made for these only, of less than it is: masks, what is spread out.

        To do that anew for each part is little work; to hold it is much.
        """
        types, found = self.flat.types, set(members)
        read = {v for i in members for v in self.flat.equations[i].reads}
        for v in sorted(read, key=lambda v: (-types[v].nbytes, v)):
            made = self._made_only_for(v, found, among)
            needed = {x for i in made for x in self.flat.equations[i].reads}
            needed = {x for x in needed if self.writer.get(x) not in made}
            if made and sum(types[x].nbytes for x in needed) < types[v].nbytes:
                found |= made
        return sorted(found)

    def _made_only_for(self, v: int, readers: set[int], among: Collection[int]) -> set[int]:
        """The light equations that lead to a value, and to nothing else but it and some
        readers."""
        found: set[int] = set()
        agenda = [-self.writer.get(v, -1)]  # the last first: what reads comes before
        while agenda:
            i = -heapq.heappop(agenda)
            if i not in among or i in found or i in readers:
                continue
            e = self.flat.equations[i]
            outside = {r for x in e.outputs for r in self.readers.get(x, ())}
            if (
                e.name not in HEAVY
                and self.results.isdisjoint(e.outputs)
                and outside <= readers | found
            ):
                found.add(i)
                for x in e.reads:
                    heapq.heappush(agenda, -self.writer.get(x, -1))
        return found

    def along(self, members: Sequence[int], value: int, dim: int) -> Stretch | None:
        """The stretch among `members` along a dimension of a value, if there is one.

        An equation that reads the value along two axes, or needs all of it, ends the
        stretch: what is before it, or what is after it, is left out.

        What is large and would stand in the stretch whole, between two loops over parts of
        others, is cut along an axis of the same length, if it has one: so are the layers
        between the first layer and its gradients, if each passes on sums only.
        """
        key = tuple(members), value, dim
        if key not in self._stretches:
            self._stretches[key] = self._widest(members, {value: dim})
        return self._stretches[key]

    def around(self, members: Sequence[int], value: int, dim: int) -> Stretch | None:
        """The same, with what else among `members` reads the same positions of what the
        stretch reads."""
        found = self.along(members, value, dim)
        if found is None:
            return None
        dims: dict[int, set[int]] = {}
        for (i, at), d in found.uses.items():
            v = self.flat.equations[i].inputs[at]
            if not isinstance(v, Constant) and v in found.entering:
                dims.setdefault(v, set()).add(d)
        seeds = {v: d for v, (d, *others) in sorted(dims.items()) if not others}
        wider = self._along(members, {value: dim, **seeds})
        if wider is None or not wider.working > found.working:
            return found
        return wider

    def _widest(self, members: Sequence[int], seeds: Mapping[int, int]) -> Stretch | None:
        """The stretch along dimensions of some values, and of what would stand in it whole
        along others as long."""
        found = self._along(members, seeds)
        for _ in range(_MOST_SEEDS):
            if found is None or (more := self._whole_inside(found)) is None:
                break
            seeds = {**seeds, **more}
            wider = self._along(members, seeds)
            if wider is None or len(wider.working) <= len(found.working):
                break
            found = wider
        return found

    def _whole_inside(self, stretch: Stretch) -> dict[int, int] | None:
        """The largest value that a stretch has inside whole, and a dimension of it that is
        as long as the stretch; None where all is small."""
        flat, types, length = self.flat, self.flat.types, stretch.length
        cut = {*stretch.dims, *stretch.read_in_parts(flat)}
        least = max(types[v].nbytes for v in cut) // _SMALL_BESIDE
        found = [
            (types[v].nbytes, -v, dim)
            for i in stretch.equations
            if i not in stretch.working
            for v, labels in self._sides[i]
            if self.writer.get(v) == i and types[v].nbytes > least
            for dim, label in enumerate(labels)
            if label is not None and types[v].shape[dim] == length
        ]
        if not found:
            return None
        _, v, dim = max(found)
        return {-v: dim}

    def _along(self, members: Sequence[int], seeds: Mapping[int, int]) -> Stretch | None:
        """The stretch along dimensions of some values."""
        value = next(iter(seeds))
        for _ in range(_MOST_ENDS):
            cut = self._spread(members, seeds)
            labels = {i: self._label(i, cut) for i in members}
            working = {i: label for i, label in labels.items() if label is not None}
            if not working:
                return None
            equations = self.between(working)
            dims = {
                v: cut.dims[v]
                for i in working
                for v in self.flat.equations[i].outputs
                if v in cut.dims
            }
            ends = [i for i in equations if i not in working and self._ends(i, dims)]
            if not ends:
                return self._found(equations, working, dims)
            members = self._one_side(members, ends, value)
        return None

    def _ends(self, i: int, cut: Collection[int]) -> bool:
        """Whether an equation that is not done in parts cannot stand in a stretch."""
        e = self.flat.equations[i]
        return e.effects or e.driven or any(v in cut for v in e.reads)

    def _one_side(
        self, members: Sequence[int], ends: Sequence[int], value: int
    ) -> list[int]:
        """Those of `members` that are on one side of all `ends`: that which writes more,
        if the value is there."""
        equations = self.flat.equations
        after = self._after(ends, range(min(ends), max(members) + 1))
        before = self._before(ends, range(min(members), max(ends) + 1))
        sides = [[i for i in members if i not in gone] for gone in (after, before)]
        there = [
            side
            for side in sides
            if any(value in (*equations[i].reads, *equations[i].outputs) for i in side)
        ]
        return max(there, key=self._written_bytes, default=[])

    def _written_bytes(self, members: Sequence[int]) -> int:
        types = self.flat.types
        return sum(types[v].nbytes for i in members for v in self.flat.equations[i].outputs)

    def _spread(self, members: Sequence[int], seeds: Mapping[int, int]) -> "_Cut":
        """Where all values are cut that `members` connect with some, the largest first:
        what is read whole beside them is not cut."""
        types = self.flat.types
        cut = _Cut(dict(seeds), set())
        agenda = sorted((-types[v].nbytes, v) for v in seeds)
        inside = set(members)
        while agenda:
            _, v = heapq.heappop(agenda)
            for i in (self.writer.get(v), *self.readers.get(v, ())):
                label = self._label(i, cut) if i in inside else None
                if label is None:
                    continue
                assert i is not None
                for other, labels in self._sides[i]:
                    # What enters may be cut otherwise by another reader.
                    if self.writer.get(other) not in inside or other in cut.dims:
                        continue
                    if label not in labels:
                        cut.whole.add(other)
                    elif other not in cut.whole:
                        cut.dims[other] = labels.index(label)
                        heapq.heappush(agenda, (-types[other].nbytes, other))
        return cut

    def _labelled(self, i: int, label: int) -> Iterator[tuple[int, int]]:
        """Values with a label, and where they have it."""
        return ((v, each.index(label)) for v, each in self._sides[i] if label in each)

    def _label(self, i: int, cut: "_Cut") -> int | None:
        """The label along which an equation is cut, if it is and can be."""
        if self._rules[i] is None:
            return None
        dims, label = cut.dims, None
        for v, labels in self._sides[i]:
            if v in dims:
                here = labels[dims[v]]
                if here is None or label not in (None, here):
                    return None
                label = here
        if label is None:
            return None
        for v, dim in self._labelled(i, label):
            if dims.get(v, dim) != dim or v in cut.whole:
                return None
        return label

    def between(self, working: Collection[int]) -> tuple[int, ...]:
        """Some equations, with all equations on a way from one of these to another."""
        among = range(min(working), max(working) + 1)
        return tuple(sorted(self._after(working, among) & self._before(working, among)))

    def leads_to(self, i: int, j: int) -> bool:
        """Whether an equation needs what another gives, however indirectly."""
        return j in self._after([i], range(i + 1, j + 1))

    def _after(self, equations: Collection[int], among: range) -> set[int]:
        """Some equations, with all of a range that need what they give."""
        after = set(equations)
        for i in among:
            if not after.isdisjoint(self._writers_for[i]):
                after.add(i)
        return after

    def _before(self, equations: Collection[int], among: range) -> set[int]:
        """Some equations, with all of a range that give what they need."""
        before = set(equations)
        for i in reversed(among):
            if not before.isdisjoint(self._readers_of[i]):
                before.add(i)
        return before

    def _found(
        self, equations: tuple[int, ...], working: Mapping[int, int], dims: dict[int, int]
    ) -> Stretch:
        flat, inside = self.flat, frozenset(equations)
        reduced: dict[int, str] = {}
        reducing: set[int] = set()
        uses: dict[tuple[int, int], int] = {}
        halos: dict[int, Halo] = {}
        loop: dict[int, int] = {}
        lengths: set[int] = set()
        for i in equations:
            e, rule = flat.equations[i], self._rules[i]
            writers = {self.writer.get(v) for v in e.reads} & inside
            loop[i] = max(
                (loop[w] + (w in reducing) for w in writers if w is not None), default=0
            )
            if i not in working:
                continue
            assert rule is not None
            label = working[i]
            if label in rule.halos:
                halos[i] = rule.halos[label]
            hows = rule.reduced.get(label, ())
            for v, how in zip(e.outputs, hows, strict=bool(hows)):
                if how is not None and (v in self.results or v in self.readers):
                    reduced[v] = how
                    reducing.add(i)
            for position, (v, each) in enumerate(zip(e.inputs, rule.operands, strict=True)):
                if label in each and not isinstance(v, Constant):
                    uses[i, position] = each.index(label)
            lengths.update(flat.types[v].shape[dim] for v, dim in self._labelled(i, label))
        entering = {v for i in equations for v in flat.equations[i].reads}
        leaving = [
            v
            for i in equations
            for v in flat.equations[i].outputs
            if v in self.results or not inside.issuperset(self.readers.get(v, ()))
        ]
        return Stretch(
            equations=equations,
            working=frozenset(working),
            dims=dims,
            uses=uses,
            halos=halos,
            reduced=reduced,
            loop=loop,
            entering=tuple(sorted(v for v in entering if self.writer.get(v) not in inside)),
            leaving=tuple(leaving),
            length=math.gcd(*lengths),
        )
