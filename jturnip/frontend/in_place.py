"""Loops whose iterations write what they carry over itself.

An elimination, the shortest paths of Floyd and Warshall, a rank-one update: an iteration
reads a row and a column of a matrix, and then changes all of it, element by element. What
is read otherwise than element by element must be read before the matrix is written over,
and of several values that change, each by the others, one comes before the other. XLA does
not look for such an order, and copies what changes. So the order is written down here, with
barriers: what is little is made first, then one value changes after the other. For paths
between 300 points and their next stops XLA takes 4 kB that way, beside what is carried, and
720 as it is written, and less than half of the time.
"""

import dataclasses
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import jax
from jax import lax

from jturnip.frontend.builder import Builder
from jturnip.frontend.costs import ELEMENTWISE, UPDATES, WRITTEN
from jturnip.frontend.results import live
from jturnip.frontend.values import Equation, FlatJaxpr, is_key, needs_x64


# A value is little beside another of which it takes one over so much.
_LITTLE = 8
# So many equations are done again at most for each value that changes.
_MOST_AGAIN = 64


def in_place(
    flat: FlatJaxpr, carried: Sequence[tuple[int, int]], least: int
) -> FlatJaxpr | None:
    """The body of a loop in which what is carried is changed where it is; None where it
    cannot be, or XLA does so anyway.

    Args:
      flat: the body.
      carried: what is carried, and what takes its place in the next iteration.
      least: only values of so many bytes and more are looked at.
    """
    if any(e.effects or e.driven for e in flat.equations) or needs_x64(flat.types):
        return None
    body = _Body.of(flat, carried, least)
    changes = body.changes()
    while changes:
        plan = _Plan.of(body, changes)
        if plan.order is not None:
            return plan.written() if any(plan.first) else None
        changes = plan.without_worst()
    return None


@dataclass(frozen=True, slots=True)
class _Change:
    """A value that is made, element by element, of another, whose place it takes."""

    before: int
    after: int
    # What makes it, in order, and what these read.
    equations: tuple[int, ...]
    reads: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Body:
    """The body of a loop, with who writes and who reads each value."""

    flat: FlatJaxpr
    # What takes the place of a large carried value, or of what it was changed to before →
    # that.
    large: Mapping[int, int]
    writer: Mapping[int, int]
    readers: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, flat: FlatJaxpr, carried: Sequence[tuple[int, int]], least: int) -> "_Body":
        """Of the arguments of `in_place`."""
        writer = {v: i for i, e in enumerate(flat.equations) for v in e.outputs}
        readers: dict[int, list[int]] = {}
        for i, e in enumerate(flat.equations):
            for v in dict.fromkeys(e.reads):
                readers.setdefault(v, []).append(i)
        times = Counter(after for _, after in carried)
        large = {
            after: before
            for before, after in carried
            if flat.types[before].nbytes >= least
            and after in writer
            and times[after] == 1
            and before not in flat.result_values
        }
        body = cls(flat, large, writer, readers)
        chains = (body._chain(before, after) for after, before in large.items())
        steps = {b: a for chain in chains for a, b in pairwise(chain)}
        return dataclasses.replace(body, large=steps)

    def _chain(self, before: int, after: int) -> list[int]:
        """What a carried value becomes one after the other. It is changed in a few places
        and all over in turn, since XLA copies for both at once; and what it is in between
        may be read by something else than what comes next."""
        types, found, v = self.flat.types, [after], after
        while v != before and v in self.writer:
            e = self.flat.equations[self.writer[v]]
            alike = [w for w in e.reads if types[w] == types[before]]
            if not alike:
                break
            if e.name in UPDATES and v != after and len(self.readers[v]) > 1:
                found.append(v)
            w = alike[0]
            turns = self._updates(w) != (e.name in UPDATES)
            if turns and w != before and w in self.writer:
                found.append(w)
            v = w
        return [before, *reversed(dict.fromkeys(found))]

    def _updates(self, v: int) -> bool:
        """Whether a value is another that is changed in a few places."""
        i = self.writer.get(v, -1)
        return i >= 0 and self.flat.equations[i].name in UPDATES

    def is_little(self, v: int, beside: int) -> bool:
        """Whether a value takes little beside another."""
        return self.flat.types[v].nbytes * _LITTLE <= self.flat.types[beside].nbytes

    def is_written(self, v: int) -> bool:
        """Whether XLA writes a value down for its readers, or it is there."""
        return v not in self.writer or self.flat.equations[self.writer[v]].name in WRITTEN

    def changes(self) -> list[_Change]:
        """The large values that are made of what they take the place of."""
        found = (self._change(before, after) for after, before in self.large.items())
        return [change for change in found if change is not None]

    def _change(self, before: int, after: int) -> _Change | None:
        inside, reads, agenda = set[int](), set[int](), [after]
        while agenda and len(inside) <= _MOST_AGAIN:
            v = agenda.pop()
            e = self._made_there(v, before, after)
            if e is None:
                reads.add(v)
                continue
            inside.add(self.writer[v])
            if e.name not in UPDATES:
                agenda += e.reads
                continue
            changed, *places = e.inputs
            agenda += [changed] if isinstance(changed, int) else []
            others = {w for w in places if isinstance(w, int)}
            if not all(self.is_little(w, before) for w in others):
                return None
            reads |= others
        may_be_read = lambda v: (
            v in self.large or self.is_written(v) or self.is_little(v, before)
        )
        if agenda or before not in reads or not all(map(may_be_read, reads)):
            return None
        return _Change(before, after, tuple(sorted(inside)), frozenset(reads))

    def _made_there(self, v: int, before: int, after: int) -> Equation | None:
        """What makes a value where it is read, in place of another; None for one that is
        read from memory."""
        if v not in self.writer or (v in self.large and v != after):
            return None
        flat, e = self.flat, self.flat.equations[self.writer[v]]
        if flat.types[v].shape != flat.types[before].shape:
            return None
        of_little = all(self.is_little(w, before) for w in e.reads)
        spread = e.name in ("iota", "broadcast_in_dim") and of_little
        return e if spread or e.name in UPDATES or e.name in ELEMENTWISE else None


@dataclass(frozen=True, slots=True)
class _Plan:
    """In which order a body is done so that some values change where they are."""

    body: _Body
    changes: Sequence[_Change]
    # For each change, the values that must be there before.
    first: Sequence[frozenset[int]]
    # Equations by their number, then changes by theirs from there on; None where each of
    # some waits for another.
    order: Sequence[int] | None
    # Those that do.
    waiting: frozenset[int]

    @classmethod
    def of(cls, body: _Body, changes: Sequence[_Change]) -> "_Plan":
        """For a body of which these are to change."""
        equations = body.flat.equations
        once = _done_once(body, changes)
        by = {v: i for i in once for v in equations[i].outputs}
        by.update((c.after, n) for n, c in enumerate(changes, len(equations)))
        first, impossible = list[frozenset[int]](), set[int]()
        needs = {i: {by[v] for v in equations[i].reads if v in by} for i in once}
        for number, change in enumerate(changes, len(equations)):
            through, values = _before(body, change, once)
            if values is None:
                impossible.add(number)
            others = (c for c in changes if c is not change)
            earlier = {c.after for c in others if change.before in c.reads}
            first.append(frozenset((values or set()) | earlier))
            needs[number] = {by[v] for v in {*change.reads, *first[-1]} if v in by}
            needs[number] |= through
        if impossible:
            return cls(body, changes, first, None, frozenset(impossible))
        # In the order in which they are written, where that may be: XLA copies less then.
        place = {n: body.writer[c.after] for n, c in enumerate(changes, len(equations))}
        sorter, ready, order = TopologicalSorter(needs), list[tuple[int, int]](), []
        try:
            sorter.prepare()
        except CycleError as error:
            return cls(body, changes, first, None, frozenset(error.args[1]))
        while sorter.is_active():
            for i in sorter.get_ready():
                heapq.heappush(ready, (place.get(i, i), i))
            _, i = heapq.heappop(ready)
            order.append(i)
            sorter.done(i)
        return cls(body, changes, first, order, frozenset())

    def without_worst(self) -> Sequence[_Change]:
        """The changes but one that cannot be, or waits for others: the smallest."""
        types, count = self.body.flat.types, len(self.body.flat.equations)
        some = [c for at, c in enumerate(self.changes) if count + at in self.waiting]
        worst = min(some, key=lambda c: types[c.before].nbytes)
        return [c for c in self.changes if c is not worst]

    def written(self) -> FlatJaxpr:
        """The body so."""
        assert self.order is not None
        flat = self.body.flat
        builder = Builder.of(dataclasses.replace(flat, equations=()))
        names: dict[int, int] = {}
        for i in self.order:
            if i < len(flat.equations):
                _again(builder, flat.equations[i], names)
                continue
            at = i - len(flat.equations)
            change, first = self.changes[at], self.first[at]
            little = {
                v
                for v in change.reads
                if v in self.body.writer and self.body.is_little(v, change.before)
            }
            together = [change.before, *sorted(first | little)]
            _wait_for(builder, together, names)
            inside = dict(names)
            for each in change.equations:
                _again(builder, flat.equations[each], inside)
            names[change.after] = inside[change.after]
        outputs = [names.get(v, v) for v in flat.result_values]
        return live(builder.finish(flat.inputs, outputs))


def _again(builder: Builder, e: Equation, names: dict[int, int]) -> None:
    """Adds an equation that reads, and gives, values under other names, which grow."""
    results = [builder.value(builder.types[v]) for v in e.outputs]
    again = dataclasses.replace(e, inputs=e.reading(names), outputs=tuple(results))
    builder.equations.append(again)
    names.update(zip(e.outputs, results, strict=True))


def _wait_for(builder: Builder, values: Sequence[int], names: dict[int, int]) -> None:
    """Adds a barrier: none of some values is read from there on before all are there."""
    values = [v for v in values if not is_key(builder.types[v].dtype)]
    structs = [builder.types[v].struct() for v in values]
    barrier = jax.make_jaxpr(lambda *x: lax.optimization_barrier(x))(*structs)
    results = builder.ours(barrier, [names.get(v, v) for v in values], ())
    names.update(zip(values, results, strict=True))


def _done_once(body: _Body, changes: Sequence[_Change]) -> set[int]:
    """The equations that make anything but what changes: those that something else needs,
    or a change reads."""
    after = {c.after for c in changes}
    agenda = [v for v in body.flat.result_values if v not in after]
    agenda += [v for c in changes for v in c.reads]
    found: set[int] = set()
    while agenda:
        v = agenda.pop()
        i = body.writer.get(v, -1)
        if i >= 0 and v not in after and i not in found:
            found.add(i)
            agenda += body.flat.equations[i].reads
    return found


def _before(
    body: _Body, change: _Change, once: set[int]
) -> tuple[set[int], set[int] | None]:
    """The equations that read what changes, and make what is not written down of it, and
    what is then: it must be there before. None where that is not little, or would have to
    be written down for it."""
    flat = body.flat
    through, values, agenda = set[int](), set[int](), [change.before]
    while agenda:
        for i in once.intersection(body.readers.get(agenda.pop(), ())) - through:
            through.add(i)
            for v in flat.equations[i].outputs:
                if body.is_little(v, change.before) or flat.equations[i].name in WRITTEN:
                    values.add(v)
                elif v in flat.result_values or v in body.large:
                    return through, None
                else:
                    agenda.append(v)
    return through, values
