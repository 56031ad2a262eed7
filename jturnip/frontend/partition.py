"""Equations to tasks: one heavy equation, with the cheap ones around it.

Per equation would be too fine (XLA's fusion is lost, Python pays per launch) and the whole
function too coarse (nothing to overlap). Equations are put in an order in which those that
belong together stand together (`order.py`), and that order is cut: groups are contiguous,
so the graph of groups has no cycle.

1. A cut between each two heavy equations, where the fewest bytes cross it.
2. Neighbours too small for a launch of their own are joined.
3. Groups that hold more than a share of the budget are cut again.

An equation that only blows something small up (a broadcast, a mask) is never cut from its
readers: each group that reads it repeats it. So it is with one that changes a little what
others read later anyway (less its mean, times a factor), and of which readers only make
little: they read the same bytes, and nothing is written down.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jturnip.frontend.costs import (
    ELEMENTWISE,
    REDUCTIONS,
    RENAMING,
    WRITTEN,
    DeviceRates,
    has_one_of,
)
from jturnip.frontend.memory_model import Model, Segment
from jturnip.frontend.order import order_equations
from jturnip.frontend.values import FlatJaxpr
from jturnip.units import padded


# Equations that a reader may repeat: nothing in them but memory traffic.
_TRIVIAL = frozenset(
    "broadcast_in_dim iota convert_element_type reshape squeeze expand_dims transpose"
    " lt le gt ge eq ne and or not add sub mul neg select_n copy pad concatenate slice"
    " rev".split()
)
_LAYOUT = frozenset(
    "transpose reshape squeeze expand_dims convert_element_type rev".split()
)
# Row-major arrays keep their bytes under these, if none are added.
_RENAMING = RENAMING | {"broadcast_in_dim"}
SMALL = 4096  # bytes of a value that is not worth a thought
_LITTLE = 8  # what reads so many times what it writes makes little of much
_BLOWN_UP = 4  # a broadcast that grows its operand this much is repeated
_WORTH_CUTTING = 0.7  # a cut helps if no half holds more than this share
_DEEPEST = 12  # equations that one reader may have to repeat
# In a task XLA may hold so many copies of what an equation reads: a product of transposed
# operands has two.
_COPIES = 2
# So many small equations are one task at most: XLA took 34 s for one of 4,222, which had to
# be cut afterwards, and one for 467 of them.
_MOST_TOGETHER = 500
# So many lookups follow one another in a task at most, each at places that the last one
# gives. A binary search has more, and is a loop in a whole function. Of one that is taken
# apart, with rows at what it finds, XLA for the CPU makes each lookup anew for each of the
# next ones: of 6, 8 and 15 it took 0.1, 1.7 and 108 s to compile that.
_LOOKUPS = 4


@dataclass(frozen=True, slots=True)
class Group:
    """The equations of one task, in order, and the values that enter and leave it."""

    equations: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    # (output, input), by position: the one is to be written over the other.
    overwrites: tuple[tuple[int, int], ...] = ()


class Partitioner:
    """Cuts one function; remembers what every cut of it needs to know."""

    def __init__(self, flat: FlatJaxpr, rates: DeviceRates, staying: Collection[int] = ()):
        """Of a function.

        Args:
          flat: the function.
          rates: of the device, as far as they are known.
          staying: values that are on the device anyway: no task holds them.
        """
        self._flat = flat
        self._rates = rates
        self._nbytes = [t.nbytes for t in flat.types]
        # The equation that writes each value.
        self._writer: dict[int, int] = {
            v: e for e, equation in enumerate(flat.equations) for v in equation.outputs
        }
        self._results = frozenset(flat.result_values)
        self._repeated = self._find_repeated()
        # What each equation really reads: through repeated equations, to what they read.
        self._reads = [self._read_through(e) for e in range(len(flat.equations))]
        operands = [
            () if e in self._repeated else self._operands(e)
            for e in range(len(flat.equations))
        ]
        heavy = [e.name in WRITTEN for e in flat.equations]
        ordered = order_equations(
            heavy,
            self._glued(heavy, operands),
            operands,
            self._reduces(),
            [self._arguments(e) for e in range(len(flat.equations))],
        )
        # Repeated equations have no place of their own.
        self._order: list[int] = []
        self._cuts: set[int] = set()
        for at, e in enumerate(ordered.equations):
            if at in ordered.cuts:
                self._cuts.add(len(self._order))
            if e not in self._repeated:
                self._order.append(e)
        self._position = {e: at for at, e in enumerate(self._order)}
        self._lookups = [
            at for at, e in enumerate(self._order) if flat.equations[e].name == "gather"
        ]
        self._model = Model(flat, self._order, self._reads, staying)
        self._last_use = self._model.last_use

    # -- equations that readers repeat -------------------------------------------------

    def _find_repeated(self) -> dict[int, tuple[int, ...]]:
        """Each equation to be repeated, with all that repeating it takes, in order.

        What blows something small up, what only names the same bytes otherwise, and what
        is quickly made of small values and of one that is there longer, if it is only
        reduced.
        """
        flat = self._flat
        repeated: dict[int, tuple[int, ...]] = {}
        made_of: dict[int, frozenset[int]] = {}  # what is repeated → what that reads
        last_read = {
            v: e for e, equation in enumerate(flat.equations) for v in equation.reads
        }
        last_read.update(dict.fromkeys(self._results, len(flat.equations)))
        only_reduced = self._only_reduced()
        for e, equation in enumerate(flat.equations):
            written = sum(self._nbytes[v] for v in equation.outputs)
            if (
                equation.name not in _TRIVIAL
                or written <= SMALL
                or not self._results.isdisjoint(equation.outputs)
            ):
                continue
            (out,), values = equation.outputs, equation.reads
            small = all(
                self._nbytes[v] <= SMALL or self._writer.get(v) in repeated for v in values
            )
            blown_up = equation.name == "broadcast_in_dim" and all(
                self._nbytes[v] * _BLOWN_UP <= written for v in values
            )
            renamed = equation.name in _RENAMING and all(
                self._nbytes[v] == written for v in values
            )
            of = frozenset[int]().union(*(made_of.get(v, {v}) for v in values))
            large = [v for v in of if self._nbytes[v] * _BLOWN_UP > written]
            reduced = (
                out in only_reduced
                and equation.name in ELEMENTWISE
                and [self._nbytes[v] for v in large] == [written]
                and last_read[large[0]] > last_read[out]
            )
            before = dict.fromkeys(
                itertools.chain.from_iterable(
                    repeated.get(self._writer.get(v, -1), ()) for v in values
                )
            )
            if (small or blown_up or renamed or reduced) and len(before) < _DEEPEST:
                repeated[e] = (*sorted(before), e)
                made_of[out] = of
        return repeated

    def _only_reduced(self) -> set[int]:
        """Values of which all readers make little, along with what is fused between."""
        flat = self._flat
        kept = {*self._results}  # what is read otherwise
        for equation in reversed(flat.equations):
            written = sum(self._nbytes[v] for v in equation.outputs)
            for v in equation.reads:
                little = _LITTLE * written <= self._nbytes[v]
                fused = equation.name in ELEMENTWISE and kept.isdisjoint(equation.outputs)
                if not (fused or (little and equation.name in REDUCTIONS)):
                    kept.add(v)
        return {v for e in flat.equations for v in e.outputs} - kept

    def _repeats(self, e: int) -> tuple[int, ...]:
        """What a group must repeat to hold equation `e`, in order."""
        repeats = dict.fromkeys(
            itertools.chain.from_iterable(
                self._repeated.get(self._writer.get(v, -1), ())
                for v in self._flat.equations[e].inputs
                if isinstance(v, int)
            )
        )
        return tuple(sorted(repeats))

    def _read_through(self, e: int) -> tuple[int, ...]:
        values: dict[int, None] = {}
        for r in (*self._repeats(e), e):
            for v in self._flat.equations[r].inputs:
                if isinstance(v, int) and self._writer.get(v) not in self._repeated:
                    values[v] = None
        return tuple(values)

    def _operands(self, e: int) -> tuple[int, ...]:
        found = {self._writer[v]: None for v in self._reads[e] if v in self._writer}
        return tuple(found)

    def _glued(
        self, heavy: Sequence[bool], operands: Sequence[Sequence[int]]
    ) -> list[bool]:
        """Whether each only gives the result of heavy work another layout or dtype."""
        glued: list[bool] = []
        for e, equation in enumerate(self._flat.equations):
            of = operands[e]
            follows = len(of) == 1 and (heavy[of[0]] or glued[of[0]])
            glued.append(follows and equation.name in _LAYOUT and len(self._reads[e]) == 1)
        return glued

    def _arguments(self, e: int) -> list[int]:
        if e in self._repeated:
            return []
        return [v for v in self._reads[e] if v not in self._writer]

    def _reduces(self) -> list[bool]:
        """Whether each makes little of much: a slice is no less for its reader to do."""
        total = lambda values: sum(self._nbytes[v] for v in values)
        return [
            equation.name in REDUCTIONS
            and total(reads) > SMALL
            and _LITTLE * total(equation.outputs) <= total(reads)
            for e, (equation, reads) in enumerate(
                zip(self._flat.equations, self._reads, strict=True)
            )
        ]

    # -- cutting -----------------------------------------------------------------------

    def partition(self, largest: int) -> list[Group]:
        """Groups that hold at most `largest` bytes at once, by estimate, where possible; of
        single equations where that is zero."""
        segments = self._joined(self._natural_segments(), largest)
        pieces = itertools.chain.from_iterable(self._split(s, largest) for s in segments)
        return self._groups(list(pieces))

    def least_bytes(self) -> int:
        """What no cut needs less than, by estimate (`memory_model.Model.least_bytes`)."""
        return self._model.least_bytes()

    def refine(
        self, groups: Sequence[Group], too_large: Collection[int], cuts: int = 1
    ) -> list[Group]:
        """Cuts the groups at these indices, where they can be cut: in two, or around what
        holds most by itself, which no other cut makes less; and so on what that gives, so
        many times."""
        pieces: list[tuple[int, int]] = []
        for index, group in enumerate(groups):
            own = [e for e in group.equations if e in self._position]
            begin = min(self._position[e] for e in own)
            segment = (begin, begin + len(own))
            cut = [segment]
            for _ in range(cuts if index in too_large else 0):
                cut = [piece for each in cut for piece in self._cut_up(each)]
            pieces += cut
        return self._groups(pieces)

    def hungriest(self, groups: Sequence[Group], more: int) -> list[Group]:
        """Groups with an equation that is expected to need more bytes than so many, by what
        it reads and writes and what it holds meanwhile."""
        needed = [
            self._padded(self._touched(e)) + self._model.inner[e]
            for e in range(len(self._flat.equations))
        ]
        return [g for g in groups if max(needed[e] for e in g.equations) > more]

    def too_large_alone(self, groups: Sequence[Group], most: int) -> int:
        """How many equations of some groups read and write more bytes than so many."""
        own = (e for group in groups for e in group.equations if e in self._position)
        return sum(self._padded(self._touched(e)) > most for e in own)

    def neediest(self, group: Group, nbytes: int) -> tuple[int, int]:
        """The equation of a group that needs most, and what a task with it needs at least,
        however the group is cut, where the whole needs so many bytes by XLA's own figure:
        less what the others hold, what they touch with all copies of it, and what it may
        write over by itself."""
        touched = {e: self._touched(e) for e in group.equations if e in self._position}
        inner = {e: self._model.inner[e] for e in touched}
        readers = Counter(itertools.chain.from_iterable(touched.values()))
        copied = 1 + _COPIES
        everything = copied * self._padded(readers) + sum(inner.values())

        def least(e: int) -> int:
            shared = _COPIES * self._padded(v for v in touched[e] if readers[v] > 1)
            own = copied * self._padded(touched[e]) + inner[e]
            return nbytes - (everything - own + shared) - self._written_over(e, group)

        most = max(touched, key=least)
        return most, least(most)

    def only(self, group: Group) -> int:
        """The equation of a group of one, beside those that it repeats."""
        (e,) = (e for e in group.equations if e in self._position)
        return e

    def there(self, e: int) -> int:
        """Bytes of what an equation reads that are on the device anyway."""
        return self._padded(self._model.staying.intersection(self._reads[e]))

    def _touched(self, e: int) -> set[int]:
        """What an equation reads and writes, beside what is on the device anyway."""
        values = {*self._reads[e], *self._flat.equations[e].outputs}
        return values - self._model.staying

    def _written_over(self, e: int, group: Group) -> int:
        """Bytes that an equation may at most write over, of what it reads, elsewhere rather
        than in this group."""
        written = self._touched(e).intersection(self._flat.equations[e].outputs)
        most = min(self._padded(written), self._padded(self._touched(e) - written))
        here = self._padded(group.outputs[o] for o, _ in group.overwrites)
        return max(0, most - here)

    def _padded(self, values: Iterable[int]) -> int:
        return sum(padded(self._nbytes[v]) for v in values)

    def _natural_segments(self) -> list[tuple[int, int]]:
        """Positions [begin, end) with one heavy equation each, where there is one."""
        heavy = [
            at
            for at, e in enumerate(self._order)
            if self._flat.equations[e].name in WRITTEN
        ]
        cuts = self._cuts | {0, len(self._order)}
        fixed = sorted(self._cuts)
        for one, other in itertools.pairwise(heavy):
            lowest, highest = one + 1, other
            inner = _between(fixed, lowest, highest)
            cuts.add(self._cheapest_cut(one, inner[-1] if inner else lowest, highest))
        ordered = sorted(cuts)
        segments = [(a, b) for a, b in itertools.pairwise(ordered) if a < b]
        return list(itertools.chain.from_iterable(map(self._in_short_chains, segments)))

    def _in_short_chains(self, segment: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """A segment, cut where a chain of lookups is too long for one task."""
        begin, end = segment
        while begin < end:
            cut = self._end_of_short_chains(begin, end)
            yield begin, cut
            begin = cut

    def _end_of_short_chains(self, begin: int, end: int) -> int:
        """Where a chain of lookups in a segment is too long for one task; else its end."""
        count = bisect.bisect_left(self._lookups, end)
        count -= bisect.bisect_left(self._lookups, begin)
        if count <= _LOOKUPS:
            return end
        depths = enumerate(self._depths(begin, end), begin)
        return next((at for at, depth in depths if depth > _LOOKUPS), end)

    def _depths(self, begin: int, end: int) -> Iterator[int]:
        """Of each equation of a segment, how many lookups follow one another up to it, each
        at places that depend on the last one."""
        depth: dict[int, int] = {}
        for e in self._order[begin:end]:
            equation = self._flat.equations[e]
            deepest = max((depth.get(v, 0) for v in self._reads[e]), default=0)
            if equation.name == "gather":
                _, places = equation.inputs
                behind = self._behind(places) if isinstance(places, int) else ()
                places_depth = max((depth.get(v, 0) for v in behind), default=0)
                deepest = max(deepest, places_depth + 1)
            yield deepest
            if equation.name not in WRITTEN:
                depth.update(dict.fromkeys(equation.outputs, deepest))

    def _behind(self, value: int) -> Collection[int]:
        """A value; or what repeating it takes, if it is repeated."""
        writer = self._writer.get(value, -1)
        return self._reads[writer] if writer in self._repeated else (value,)

    def _cheapest_cut(self, begin: int, lowest: int, highest: int) -> int:
        """The position in [lowest, highest] that the fewest bytes written since `begin`
        cross; the last of equals, which keeps a chain with what it began with."""
        best, best_bytes = highest, None
        crossing, ending = 0, {}
        for at in range(begin, highest + 1):
            crossing -= ending.pop(at, 0)
            if at >= lowest and (best_bytes is None or crossing <= best_bytes):
                best, best_bytes = at, crossing
            if at == highest:
                break
            for v in self._flat.equations[self._order[at]].outputs:
                last = self._last_use.get(v, -1)
                if last > at:
                    crossing += self._nbytes[v]
                    ending[last + 1] = ending.get(last + 1, 0) + self._nbytes[v]
        return best

    def _joined(
        self, segments: list[tuple[int, int]], largest: int
    ) -> list[tuple[int, int]]:
        """Joins neighbours of which one is too small for a launch of its own.

        What begins something new is left for what comes next, unless that goes on with what
        was before: a task with the end of one batch and the beginning of another would
        make the one wait for the other. What was itself too small is joined in any case.
        """
        most = largest * self._rates.joined_share
        joined: list[tuple[int, int]] = []
        before: Segment | None = None
        small_before = alone_before = False
        for (begin, end), after in itertools.zip_longest(segments, segments[1:]):
            own = Segment(self._model, begin, end)
            small, alone = self._is_small(own), self._is_alone(begin, end)
            begins = False
            if small and before is not None and after is not None:
                ended = before.begin, begin
                begins = not self._reads_from(ended, (begin, end)) and (
                    self._reads_from((begin, end), after)
                    or not self._reads_from(ended, after)
                )
            small_enough = small_before or (small and not begins)
            if before is not None and small_enough:
                small_enough = self._end_of_short_chains(before.begin, end) == end
            if before is not None and small_enough and not alone_before & alone:
                before.grow(end)
                alone_before |= alone
                if before.shared <= most and end - before.begin <= _MOST_TOGETHER:
                    joined[-1] = (before.begin, end)
                    small_before = self._is_small(before)
                    continue
            joined.append((begin, end))
            before, small_before, alone_before = own, small, alone
        return joined

    def _reads_from(self, earlier: tuple[int, int], later: tuple[int, int]) -> bool:
        """Whether some equation reads what an earlier one of another segment writes."""
        begin, end = earlier
        return any(
            begin <= self._position.get(self._writer.get(v, -1), -1) < end
            for e in self._order[slice(*later)]
            for v in self._reads[e]
        )

    def _is_alone(self, begin: int, end: int) -> bool:
        """Whether it has work of which a task may have only one."""
        alone = self._rates.one_a_task
        return bool(alone) and any(
            has_one_of(alone, self._flat.equations[e].origin)
            for e in self._order[begin:end]
        )

    def _is_small(self, segment: Segment) -> bool:
        seconds = self._rates.seconds(segment.flops, segment.crossing)
        return seconds < self._rates.launch_seconds

    def _held(self, segment: tuple[int, int]) -> int:
        return Segment(self._model, *segment).shared

    def _split(self, segment: tuple[int, int], largest: int) -> list[tuple[int, int]]:
        """Cuts a segment until every piece has few equations and holds little enough, or is
        one equation, or holds hardly less in pieces."""
        pieces, todo = [], [segment]
        while todo:
            piece = todo.pop()
            held = self._held(piece)
            is_long = piece[1] - piece[0] > _MOST_TOGETHER
            halves = self._cut_up(piece) if held > largest or is_long else [piece]
            if is_long or (
                len(halves) > 1 and self._is_worth_cutting(piece, held, halves, largest)
            ):
                todo += reversed(halves)
            else:
                pieces.append(piece)
        return pieces

    def _is_worth_cutting(
        self,
        piece: tuple[int, int],
        held: int,
        halves: Sequence[tuple[int, int]],
        largest: int,
    ) -> bool:
        """Whether the halves of a piece hold much less than it does: those of a fused chain
        do not. Of a piece that is much too large also whether smaller pieces might: not if
        one equation holds nearly as much by itself. More would be written down for
        nothing."""
        much_less = _WORTH_CUTTING * held
        if not largest or max(map(self._held, halves)) <= much_less:
            return True
        return held > 2 * largest and all(
            self._held((at, at + 1)) <= much_less for at in range(*piece)
        )

    def _cut_up(self, segment: tuple[int, int]) -> list[tuple[int, int]]:
        begin, end = segment
        if end - begin <= 1:
            return [segment]
        own = [self._model.inner[e] for e in self._order[begin:end]]
        if most := max(own):
            at = begin + own.index(most)
            around = [(begin, at), (at, at + 1), (at + 1, end)]
            return [(a, b) for a, b in around if a < b]
        quarter = (end - begin) // 4
        lowest, highest = begin + max(1, quarter), max(begin + 1, end - max(1, quarter))
        cut = self._cheapest_cut(begin, min(lowest, highest), highest)
        return [(begin, cut), (cut, end)]

    # -- groups ------------------------------------------------------------------------

    def _groups(self, segments: Sequence[tuple[int, int]]) -> list[Group]:
        groups = []
        for begin, end in segments:
            equations: dict[int, None] = {}
            entering: dict[int, None] = {}
            inside: set[int] = set()
            leaving = []
            for e in self._order[begin:end]:
                equations.update(dict.fromkeys((*self._repeats(e), e)))
                for v in self._reads[e]:
                    if v not in inside:
                        entering[v] = None
                inside.update(self._flat.equations[e].outputs)
                leaving += [
                    v
                    for v in self._flat.equations[e].outputs
                    if self._last_use.get(v, -1) >= end
                ]
            groups.append(Group(tuple(equations), tuple(entering), tuple(leaving)))
        return groups


def _between(ordered: Sequence[int], lowest: int, highest: int) -> Sequence[int]:
    """The elements of a sorted sequence in [lowest, highest]."""
    return ordered[
        bisect.bisect_left(ordered, lowest) : bisect.bisect_right(ordered, highest)
    ]
