"""Which stretches of a function are cut, along which axis, in how many parts.

Follows EinDecomp (arXiv 2410.02682): as few parts as fit, with little written down. All of
it is an estimate, which orders what is tried.
"""

import bisect
import dataclasses
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

from jturnip.frontend import costs, parts
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.cutting import (
    Blocks,
    Made,
    Tasks,
    one_after_the_other,
    with_cuttings,
)
from jturnip.frontend.effort import Effort, Sofar
from jturnip.frontend.halos import along_channels
from jturnip.frontend.materializing import (
    Again,
    Kept,
    made_again,
    worth_keeping,
    worth_materializing,
)
from jturnip.frontend.sets import Joined
from jturnip.frontend.stretches import Stretch, Stretches
from jturnip.frontend.values import (
    Constant,
    FlatJaxpr,
    nbytes_of,
    touched,
)


# What is between stretches stays in parts from this share of the budget on.
_APART = 1 / 8
_MOST_BLOCKS = 256
_MOST_TASKS = 256
# So many times more may there be, if they are all of one length then; if they are not, the
# length is a multiple of what a vector holds: XLA made random bits of an odd number of
# positions in six times the time of an even one.
_MORE_BLOCKS = 2
_MORE_TASKS = 1.5
_ALIGNED = 16
# More equations than so many take long to plan; what stays apart needs many.
_MOST_EQUATIONS = 1500
_MOST_EQUATIONS_APART = 10_000
# So many equations are looked at, each once for every axis of its neighbours: some seconds;
# and so many more for what stays apart.
_MOST_VISITED = 400_000
_MOST_VISITED_APART = 150_000
# The share of the budget that what one of several tasks reads and writes may take; and what
# it takes so that the next one's can be on its way meanwhile, where that asks for no more
# than so many times the tasks.
_OF_TASK = 0.8
_WITH_NEXT = 0.4
_TIMES_AHEAD = 4
# The share that what is cut along the first of several axes takes.
_OF_AXIS = 0.55
# An operand that stays while the others' parts pass is cut into so many times the parts
# that it must be, and as many of them stay together: when they are exchanged, one goes as
# soon as its last task is over, and the next comes in its place. Not where a part of a
# part, of which there are about so many (a guess), would be too little work for a task.
_FINER = 2
_PARTS_OF_A_PART = 16
# What reads an array of more than the budget over so much is cut in one pass, if it can be;
# of more than so many readers not all.
_MANY_READ = 2
_MOST_READERS = 8
# Where values are written down between the loops of a stretch, a block takes one over so
# much of the budget.
_ROOM_FOR_BLOCKS = 8
# What takes less than one over so much of the budget is little.
_LITTLE = 16
# Blocks of fewer positions than so many are hardly worth what it takes to begin with each.
_THIN = 16
# Axes of so many of the largest values are looked at.
_SEEDS = 3
# Of more equations than so many, each once for every loop, it is not looked at what each
# loop holds, but at what all hold together.
_MOST_PASSED = 100_000


_Cutting: TypeAlias = Blocks | Tasks


@dataclass(frozen=True, slots=True)
class Where:
    """Of a function's arguments and closed-over arrays, the values that are in host memory,
    and those that stay on the device from the start to the end."""

    hosted: frozenset[int]
    staying: frozenset[int] = frozenset()


@dataclass(slots=True)
class Search:
    """What is known of a function's equations, and how many were looked at."""

    rules: Known = field(default_factory=Known)
    effort: Effort = field(default_factory=Effort)
    sofar: Sofar = field(default_factory=Sofar)
    # What was not cut (`_Choice._signature`), and whether it need not be; what the keys
    # name by their ids.
    uncut: dict[Any, bool] = field(default_factory=dict)
    named: dict[int, Any] = field(default_factory=dict)
    # What was made of equations for parts.
    made: Made = field(default_factory=Made)
    # What a function (by its id) becomes by being cut so; and what was found for it where
    # the same is large (`Room.key`).
    cut: dict[Any, FlatJaxpr] = field(default_factory=dict)
    found: dict[Any, "Found"] = field(default_factory=dict)
    # What a stretch (by its id) had better keep, with the stretch.
    worth_keeping: dict[Any, tuple[Stretch, Kept | None]] = field(default_factory=dict)
    # Of a function (by its id, which it keeps), what finds its stretches.
    stretches: dict[int, Stretches] = field(default_factory=dict)
    visited: int = 0
    apart: int = 0
    # How often there were more parts than need be, so that stretches can be side by side;
    # and how often they were.
    finer: int = 0
    abreast: int = 0
    # How often something that loops make anew might be kept.
    kept: int = 0

    def stretches_of(self, flat: FlatJaxpr) -> Stretches:
        """What finds the stretches of a function, and keeps it."""
        if id(flat) not in self.stretches:
            self.stretches[id(flat)] = Stretches(flat, rules(flat, parts.works, self.rules))
        return self.stretches[id(flat)]

    def see(self, count: int, apart: bool) -> bool:
        """Counts equations that are looked at; whether these are not too many."""
        if apart:
            self.apart += count
        else:
            self.visited += count
        return not self.is_over(apart)

    def is_over(self, apart: bool) -> bool:
        """Whether it takes too long, of what stays apart or of all else."""
        if apart:
            return self.apart > _MOST_VISITED_APART
        return self.visited > _MOST_VISITED


@dataclass(frozen=True, slots=True)
class Room:
    """What there is for a function, and what is tried with it."""

    # Bytes beside what stays on the device; from what size on a value is large.
    arena: int
    least: int
    # What XLA is expected to hold of a block, in values of the widest equation; of those
    # that it is sure to write down only, if others are to be fused.
    at_once: float
    fused: bool
    # Whether convolutions may be done for some of their channels at a time.
    narrow: bool
    # Whether tasks are made although blocks along another axis may do.
    eager: bool
    # Whether what is between two stretches may stay in parts; and whether what loops over
    # blocks would make anew does so, too.
    apart: bool
    keep: bool
    # Whether stretches that read the same parts may be done side by side.
    side_by_side: bool
    rates: costs.DeviceRates
    where: Where

    @property
    def most_equations(self) -> int:
        """How many equations what is cut may become."""
        return _MOST_EQUATIONS_APART if self.apart else _MOST_EQUATIONS

    def key(self, sizes: Sequence[int]) -> Any:
        """The same for rooms in which the same is found for a function of which something
        has these sizes, in order: what is large matters only by which values are so, at
        first and where less is (`_Choice.cut`)."""
        larger, least = [], self.least
        while True:
            count = len(sizes) - bisect.bisect_right(sizes, least)
            if larger[-1:] != [count]:
                larger.append(count)
            if not count or least >= self.arena:
                return tuple(larger), dataclasses.replace(self, least=0)
            least *= 2

    def may_be_in_blocks(
        self, flat: FlatJaxpr, stretch: Stretch, written: Collection[int] = ()
    ) -> bool:
        """Whether a stretch may be a loop over blocks, and does not wait for itself, if
        these values are written down for later loops."""
        if stretch.halos:  # parts at the borders read less than others
            return False
        alone = self.rates.one_a_task
        return not alone or stretch.one_after_the_other(flat, alone, written)


def cut_once(
    flat: FlatJaxpr,
    room: Room,
    tasks: bool,
    search: Search,
) -> "Found":
    """A function cut over tasks or in blocks."""
    stretches = search.stretches_of(flat)
    key = id(flat), tasks, room.key(stretches.sizes)
    if key in search.found:
        found = search.found[key]
        search.finer += found.finer
        search.abreast += found.abreast
        search.kept += found.kept
        return found
    before = search.finer, search.abreast, search.kept
    found = _cut_anew(stretches, room, tasks, search)
    found = dataclasses.replace(
        found,
        finer=search.finer - before[0],
        abreast=search.abreast - before[1],
        kept=search.kept - before[2],
    )
    search.found[key] = found
    return found


@dataclass(frozen=True, slots=True)
class Found:
    """What a function becomes, and what was cut how: nothing where nothing was."""

    cut: FlatJaxpr
    how: tuple[Any, ...] = ()
    # The same with values written down between the loops of a stretch, where there is room.
    materialized: FlatJaxpr | None = None
    # What stretches in blocks make anew; None where none has several loops.
    again: Again | None = None
    # Whether parts of something are kept that would be made anew; and whether parts are
    # read with their halos.
    keeps: bool = False
    slides: bool = False
    # Whether blocks have few positions.
    thin: bool = False
    # Whether it would become too many equations to be looked at; it is as it was then.
    too_many: bool = False
    # What `Search` counts.
    finer: int = 0
    abreast: int = 0
    kept: int = 0


def _cut_anew(
    stretches: Stretches,
    room: Room,
    tasks: bool,
    search: Search,
) -> Found:
    flat = stretches.flat
    search.effort.looked_at(len(flat.equations))
    choice = _Choice(stretches, room, tasks, search)
    ruled = stretches.ruled()
    if tasks:
        choice.cut_in_one_pass(ruled)
    choice.cut([i for i in ruled if i not in choice.taken], room.least)
    cuttings = one_after_the_other(stretches, choice.cuttings)
    tasks_of = [c for c in cuttings if isinstance(c, Tasks)]
    many = sum(c.count * len(c.stretch.equations) for c in tasks_of)
    if not cuttings or many > room.most_equations:
        return Found(flat)
    # What does not work on parts is there once.
    least = sum(c.count * len(c.stretch.working) for c in tasks_of)
    if search.effort.is_too_much_for(least):
        search.effort.looked_at(least)  # as if it were made, and only then left out
        return Found(flat)
    if least > search.sofar.most_equations:
        return Found(flat, tuple(c.key for c in cuttings), too_many=True)
    cut, how = _with_cuttings(stretches, cuttings, search)
    written = [_materializing(stretches, room, c) for c in cuttings]
    each = [
        made_again(stretches, c.stretch, room.rates, c.share_made_anew)
        for c in written
        if _makes_again(c)
    ]
    again = functools.reduce(Again.__add__, each) if each else None
    keeps = any(isinstance(c, Tasks) and c.kept for c in cuttings)
    slides = any(c.stretch.halos for c in cuttings)
    thin = any(isinstance(c, Blocks) and c.size < _THIN for c in cuttings)
    found = Found(cut, how, again=again, keeps=keeps, slides=slides, thin=thin)
    if written == cuttings:
        return found
    materialized, _ = _with_cuttings(stretches, written, search)
    return dataclasses.replace(found, materialized=materialized)


def _makes_again(cutting: _Cutting) -> TypeGuard[Blocks]:
    """Whether a later loop over blocks makes anew what an earlier one made."""
    return isinstance(cutting, Blocks) and cutting.stretch.loops > 1


def _with_cuttings(
    stretches: Stretches, cuttings: Sequence[_Cutting], search: Search
) -> tuple[FlatJaxpr, tuple[Any, ...]]:
    """A function with these cuttings, and what is cut how."""
    how = tuple(c.key for c in cuttings)
    key = id(stretches.flat), how
    if key not in search.cut:
        search.cut[key] = with_cuttings(stretches, cuttings, search.made)
    return search.cut[key], how


def _materializing(stretches: Stretches, room: Room, cutting: _Cutting) -> _Cutting:
    """The same in smaller blocks, with values written down that its loops make anew, if
    there is room for them and that is expected to be faster."""
    if not isinstance(cutting, Blocks) or not _makes_again(cutting):
        return cutting
    flat, stretch = stretches.flat, cutting.stretch
    share = max(1, room.arena // _ROOM_FOR_BLOCKS)
    widest = int(max(1, room.at_once) * stretches.widest_bytes(stretch, room.fused))
    blocks = max(-(-stretch.length // cutting.size), -(-widest // share))
    if blocks > min(_MOST_BLOCKS, stretch.length):
        return cutting
    size = _size(stretch.length, blocks, _MORE_BLOCKS)
    # XLA may hold twice as much of a block as is expected.
    free = room.arena - _whole_bytes(stretches, room, stretch) - 2 * share
    found = worth_materializing(stretches, stretch, size, free, room.rates)
    if found is None or not room.may_be_in_blocks(flat, stretch, found.values):
        return cutting
    return Blocks(stretch, size, room.arena, found)


class _Choice:
    """Chooses what of a function is cut, and how."""

    def __init__(
        self,
        stretches: Stretches,
        room: Room,
        tasks: bool,
        search: Search,
    ):
        self._search = search
        self._stretches = stretches
        self._room = room
        self._tasks = tasks
        self._hosted = room.where.hosted.union(s.value for s in stretches.flat.slices)
        self.cuttings: list[_Cutting] = []
        self.taken: set[int] = set()
        # Value that stays in parts → the dimension, and how many positions a part has.
        self._apart: dict[int, tuple[int, int]] = {}

    def cut(self, among: Sequence[int], least: int) -> None:
        """Cuts what reads or writes values larger than `least`; where all that hangs
        together so cannot be, what hangs together by larger ones."""
        for members in self._stretches.together(among, least):
            before = len(self.cuttings)
            if not self._cut_together(members) and least < self._room.arena:
                self.cut(members, 2 * least)
            elif self._leaves_others and len(self.cuttings) > before:
                self.cut([i for i in members if i not in self.taken], least)

    def cut_in_one_pass(self, among: Sequence[int]) -> None:
        """Cuts what reads the same large array in host memory several times, a reader
        after what others give, so that each part of the array comes once: the products
        of a gradient with all data, from both sides."""
        stretches, inside = self._stretches, set(among)
        types, large = stretches.flat.types, self._room.arena // _MANY_READ
        for v in sorted(self._hosted, key=lambda v: (-types[v].nbytes, v)):
            if types[v].nbytes <= large:
                return
            readers = [i for i in stretches.readers.get(v, ()) if i in inside]
            while len(readers) > 1:
                counts = range(min(len(readers), _MOST_READERS), 1, -1)
                tries = (n for n in counts if self._pass(v, readers[:n], inside))
                readers = readers[next(tries, 1) :]

    def _pass(self, v: int, readers: Sequence[int], among: Collection[int]) -> bool:
        """Cuts what is between some readers of a value, and what reads large values that
        are made there, along the best dimension; whether that can be done."""
        stretches, shape = self._stretches, self._stretches.flat.types[v].shape
        *earlier, last = readers
        if not all(stretches.leads_to(i, last) for i in earlier):
            return False
        members = self._with_readers(stretches.between(readers), among)
        if not self._search.see(len(members) * len(shape), self._room.apart):
            return False
        dims = range(len(shape))
        found = [(self._in_one_pass(members, v, dim, readers), dim) for dim in dims]
        return self._take_best(members, found)

    def _with_readers(self, members: Sequence[int], among: Collection[int]) -> list[int]:
        """With all that large values lead to which are written there."""
        flat, found = self._stretches.flat, set(members)
        agenda = sorted(found, reverse=True)
        while agenda:
            for v in flat.equations[agenda.pop()].outputs:
                if flat.types[v].nbytes > self._room.least:
                    readers = self._stretches.readers.get(v, ())
                    more = {i for i in readers if i in among and i not in found}
                    found |= more
                    agenda += more
        return [i for i in self._stretches.between(found) if i in among]

    def _in_one_pass(
        self, members: Sequence[int], v: int, dim: int, readers: Sequence[int]
    ) -> Tasks | None:
        """The stretch along a dimension of a value, if all its readers are in one loop over
        its parts, and one part is surely enough for a task."""
        stretch = self._stretches.along(members, v, dim)
        if (
            stretch is None
            or stretch.loops > 1
            or not stretch.working.issuperset(readers)
            or not self.taken.isdisjoint(stretch.equations)
        ):
            return None
        cutting = self._cutting(stretch)
        if not isinstance(cutting, Tasks) or cutting.nbytes > self._room.arena:
            return None
        return cutting if v in cutting.sliced else None

    @property
    def _leaves_others(self) -> bool:
        """Whether what one stretch leaves over is cut too: blocks are no more tasks."""
        return self._room.apart or not self._tasks

    def _cut_together(self, members: Sequence[int]) -> bool:
        """Cuts the best stretch among some equations; whether anything is done for them."""
        if self._fits(members):
            return True
        # Parts of a stretch are all alike: what is not cut in one is not in another.
        alike = self._signature(members)
        if alike not in self._search.uncut:
            before = len(self.cuttings)
            done = self._cut_best(members)
            if len(self.cuttings) > before:
                return True
            self._search.uncut[alike] = done
        return self._search.uncut[alike]

    def _fits(self, members: Sequence[int]) -> bool:
        """Whether no stretch among some equations need be cut, whichever it is."""
        values = self._touched_by(members) - self._room.where.staying
        held = nbytes_of(self._stretches.flat, values)
        held += max(self._stretches.inner[i] for i in members)
        most = held * max(1, self._room.at_once)
        return most <= self._room.arena

    def _touched_by(self, members: Sequence[int]) -> set[int]:
        equations = self._stretches.flat.equations
        return set().union(*(touched(equations[i]) for i in members))

    def _signature(self, members: Sequence[int]) -> Any:
        """The same for equations that are the same but for the numbers of their values."""
        stretches, room = self._stretches, self._room
        flat, inside = stretches.flat, frozenset(members)
        numbers: dict[int, int] = {}
        found: list[Any] = [self._tasks, room.arena, room.at_once, room.eager, room.apart]
        found += [room.keep, room.side_by_side, room.fused, room.narrow]
        for i in stretches.between(members):
            e = flat.equations[i]
            self._search.named[id(e.origin)] = e.origin
            found.append((id(e.origin), i in inside, i in self.taken))
            for v in (*e.inputs, *e.outputs):
                if isinstance(v, Constant):
                    found.append(v.type)
                elif v in numbers:
                    found.append(numbers[v])
                else:
                    numbers[v] = len(numbers)
                    at_home = inside.issuperset(stretches.readers.get(v, ()))
                    hosted, stays = v in self._hosted, v in room.where.staying
                    is_result = v in stretches.results
                    found.append((flat.types[v], hosted, stays, is_result, at_home))
        return tuple(found)

    def _cut_best(self, members: Sequence[int]) -> bool:
        seeds = self._seeds(members)
        if not self._search.see(len(members) * len(seeds), self._room.apart):
            return True
        found = [
            (stretch, dim)
            for value, dim in seeds
            if (stretch := self._stretches.along(members, value, dim)) is not None
            and self.taken.isdisjoint(stretch.equations)
            and (self._room.narrow or not self._is_narrow(stretch))
        ]
        if self._tasks:
            tasks = [each for each in found if not self._fits_in_blocks(each[0])]
            if len(tasks) < len(found) and not self._room.eager:
                return True  # they need no tasks of their own
            found = tasks
        cuttings = [(self._cutting(stretch), dim) for stretch, dim in found]
        return self._take_best(members, cuttings)

    def _is_narrow(self, stretch: Stretch) -> bool:
        """Whether convolutions of a stretch are done for some of their channels."""
        equations = self._stretches.flat.equations
        return any(
            along_channels(equations[i], stretch.uses.get((i, 0)))
            for i in stretch.working - stretch.halos.keys()
        )

    def _take_best(
        self, members: Sequence[int], found: Sequence[tuple[_Cutting | None, int]]
    ) -> bool:
        """Takes the cheapest of some cuttings, each with the dimension it begins with;
        whether there is one."""
        keeps = any(isinstance(cutting, Tasks) and cutting.kept for cutting, _ in found)
        costs = [
            (self._cost(members, cutting, dim, keeps), cutting)
            for cutting, dim in found
            if cutting is not None
        ]
        if not costs:
            return False
        _, best = min(costs, key=lambda each: each[0])
        self.cuttings.append(best)
        self.taken.update(best.stretch.equations)
        if self._room.apart and isinstance(best, Tasks):
            for v, grids in self._grids(best).items():
                if len(grids) == 1:
                    self._apart.setdefault(v, *grids)
        return True

    def _grids(self, cutting: Tasks) -> dict[int, set[tuple[int, int]]]:
        """Each large value that enters or leaves a stretch in parts → the dimensions along
        which it is cut there, with the positions of a part."""
        stretch, flat = cutting.stretch, self._stretches.flat
        grids: dict[int, set[tuple[int, int]]] = {}
        read = (
            (v, stretch.uses[i, at])
            for i in stretch.equations
            for at, v in enumerate(flat.equations[i].inputs)
            if (i, at) in stretch.uses and not isinstance(v, Constant)
        )
        around = ((stretch.reads(flat, i), halo.dim) for i, halo in stretch.halos.items())
        ends = {*stretch.entering, *stretch.leaving}
        for v, dim in (*read, *around, *stretch.dims.items()):
            if v in ends and flat.types[v].nbytes > self._room.arena * _APART:
                size = cutting.size * stretch.scale(flat, v, dim)
                grids.setdefault(v, set()).add((dim, size))
        return grids

    def _cutting(self, stretch: Stretch) -> _Cutting | None:
        if self._tasks:
            return _into_tasks(
                self._stretches, self._hosted, self._room, stretch, self._search
            )
        return _into_blocks(self._stretches, self._room, stretch)

    def _fits_in_blocks(self, stretch: Stretch) -> bool:
        """Whether a stretch fits in blocks, and none of it is to be kept elsewhere."""
        if _kept(self._stretches, self._room, stretch, self._search):
            return False
        cutting = _into_blocks(self._stretches, self._room, stretch)
        return cutting is not None and cutting.nbytes <= self._room.arena

    def _cost(
        self, members: Sequence[int], cutting: _Cutting, dim: int, keeps: bool
    ) -> tuple[Any, ...]:
        """What may fit is best, then what is not computed twice, then what leaves little
        uncut, or in other parts than its neighbours, then few tasks that need little, then
        what is contiguous where it is read often."""
        stretch, equations = cutting.stretch, self._stretches.flat.equations
        left = {v for i in members for v in equations[i].outputs if v not in stretch.dims}
        uncut = nbytes_of(self._stretches.flat, left)
        many, loops = 1, stretch.loops
        if isinstance(cutting, Tasks):
            many = cutting.count
            loops = 1 if cutting.kept else loops
            uncut += nbytes_of(self._stretches.flat, self._cut_again(cutting))
        if keeps:  # there is a task for each part in each loop
            uncut //= max(1, self._room.arena // _LITTLE)
        hopeless = cutting.nbytes > self._room.arena
        # Of several operands one stays, and is read once; parts of the others pass often.
        strided = -dim if hopeless else dim
        return hopeless, loops, uncut, many, cutting.nbytes, strided

    def _cut_again(self, cutting: Tasks) -> set[int]:
        """What neighbours have in other parts."""
        grids = self._grids(cutting).items() if self._apart else ()
        return {v for v, of in grids if v in self._apart and of != {self._apart[v]}}

    def _seeds(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """Dimensions of the largest values that some equations read or write."""
        types, values = self._stretches.flat.types, self._touched_by(members)
        shapes: dict[Any, int] = {}
        for v in sorted(values, key=lambda v: (-types[v].nbytes, v)):
            shapes.setdefault(types[v].shape, v)
        seeds = [
            (v, dim)
            for v in list(shapes.values())[:_SEEDS]
            for dim, size in enumerate(types[v].shape)
            if size > 1
        ]
        # Windows slide over a value that is whole: what is cut begins with their results.
        slid = self._stretches.slid(members)
        return list(dict.fromkeys([*seeds, *slid]))


def _held(stretches: Stretches, stretch: Stretch, room: Room) -> set[int]:
    """What is there whatever the blocks, beside what stays."""
    return {*stretch.ends} - _written_over(stretches, stretch) - room.where.staying


def _written_over(stretches: Stretches, stretch: Stretch) -> set[int]:
    """What the scatters of a stretch begin with, and nothing else reads, or is made of
    nothing."""
    flat, writer = stretches.flat, stretches.writer
    begun = [e.inputs[0] for e in stretch.accumulated(flat).values()]
    made_of_nothing = lambda v: v in writer and not flat.equations[writer[v]].reads
    return {
        v
        for v in begun
        if not isinstance(v, Constant)
        and (len(stretches.readers[v]) == 1 or made_of_nothing(v))
    }


def _partial_bytes(flat: FlatJaxpr, stretch: Stretch) -> int:
    """What one block adds to the largest of what is reduced; nothing to what a scatter
    makes of all blocks before it."""
    added = stretch.reduced.keys() - stretch.accumulated(flat).keys()
    return max((nbytes_of(flat, [v]) for v in added), default=0)


def _whole_bytes(stretches: Stretches, room: Room, stretch: Stretch) -> int:
    """What a stretch in blocks holds beside a block."""
    held = nbytes_of(stretches.flat, _held(stretches, stretch, room))
    return held + _partial_bytes(stretches.flat, stretch)


def _into_blocks(stretches: Stretches, room: Room, stretch: Stretch) -> Blocks | None:
    """The fewest blocks that are expected to fit in one task and in the caches, or as many
    as there may be: XLA may need less than is expected. None where the whole is expected to
    fit."""
    flat = stretches.flat
    whole = _whole_bytes(stretches, room, stretch)
    widest = stretches.widest_bytes(stretch, room.fused)
    block = int(room.at_once * widest)
    free = room.arena - whole
    if free <= 0 or block <= free or not room.may_be_in_blocks(flat, stretch):
        return None
    # What each block reads as a whole is in the caches no longer when the next one does.
    in_caches = max(room.rates.cache_bytes, _read_as_a_whole(stretches, stretch))
    blocks = max(2, -(-block // free), int(widest // in_caches))
    blocks = min(_MOST_BLOCKS, stretch.length, blocks)
    return Blocks(
        stretch, _size(stretch.length, blocks, _MORE_BLOCKS), whole + block // blocks
    )


def _into_tasks(
    stretches: Stretches,
    hosted: frozenset[int],
    room: Room,
    stretch: Stretch,
    search: Search,
) -> Tasks | None:
    """The fewest tasks of which each is expected to fit, perhaps in blocks; None where one
    does, or none are."""
    flat = stretches.flat
    block = int(room.at_once * stretches.widest_bytes(stretch, room.fused))
    kept = _kept(stretches, room, stretch, search)
    apiece = [held - room.where.staying for held in _held_apiece(stretches, stretch, kept)]
    if max(nbytes_of(flat, held) for held in apiece) + block <= room.arena:
        return None
    large = int(room.arena * _APART) if room.apart else room.arena
    crossing = stretches.writer.keys() & {*stretch.entering, *stretch.leaving}
    between = {v for v in crossing if flat.types[v].nbytes > large}
    in_pieces = {*hosted, *between} if room.apart else hosted
    inside = frozenset(stretch.equations)
    sliced = frozenset(
        v
        for v in stretch.entering
        if v in in_pieces and _is_read_in_parts(stretches, stretch, inside, v)
    )
    left = frozenset(
        v for v in stretch.leaving if _may_be_left(stretches, stretch, inside, v)
    )
    cut = {v for v in stretch.leaving if v in stretch.dims}
    apart = frozenset(cut & between) if room.apart else frozenset[int]()
    rows = sliced | cut | kept
    together = max(nbytes_of(flat, held & (cut - left - apart)) for held in apiece)
    if room.apart:  # else what is reduced may still be cut, with what combines it
        together = max(together, _partial_bytes(flat, stretch))
    if 2 * together > room.arena:
        return None
    if room.may_be_in_blocks(flat, stretch):
        block //= _MOST_BLOCKS
    most = min(stretch.length, _MOST_TASKS)
    counts = [n for n in (2**k for k in range(1, 9)) if n <= most]
    # What parts of others are beside a part that is read with its halo.
    around = {stretch.reads(flat, i) for i in stretch.halos} & sliced - hosted
    in_parts_of = lambda held: (
        nbytes_of(flat, held & rows) + 2 * nbytes_of(flat, held & around)
    )
    sizes = [(nbytes_of(flat, held - rows), in_parts_of(held)) for held in apiece]
    held = {n: max(whole + in_parts // n for whole, in_parts in sizes) for n in counts}
    needed = {n: held[n] + block // n for n in counts}
    fit = [n for n in counts if needed[n] <= room.arena * _OF_TASK]
    fit = fit or [n for n in counts if needed[n] <= room.arena]
    abreast = _abreast(stretches, stretch, room, max(each[0] for each in sizes), sliced)
    if abreast > 1:  # beside what each holds: the part that all read, and the next one
        side_by_side = {
            n: max(abreast * whole + 2 * in_parts // n for whole, in_parts in sizes)
            for n in counts
        }
        roomy = [
            n
            for n in fit
            if side_by_side[n] + block // n <= room.arena * _OF_TASK
            and _are_worth_it(flat, stretch, room, n)
        ]
        fit, abreast = (roomy, abreast) if roomy else (fit, 1)
        search.abreast += abreast > 1
    ahead = [n for n in fit if held[n] <= room.arena * _WITH_NEXT]
    if fit:
        tasks = ahead[0] if ahead and ahead[0] <= _TIMES_AHEAD * fit[0] else fit[0]
        size = _size(stretch.length, tasks, _MORE_TASKS)
        read = sliced & hosted
        return Tasks(stretch, size, held[tasks], read, left, apart, abreast, kept)
    # The rest may be cut along another axis, results with it: a part of the operands stays
    # while the others' parts pass, once for each of it.
    whole, in_parts = (max(each) for each in zip(*sizes, strict=True))
    operands = max(nbytes_of(flat, held & sliced) for held in apiece)
    staying, share = operands or in_parts, room.arena * _OF_AXIS
    if room.eager:
        staying, share = in_parts, room.arena * _WITH_NEXT
    little = [n for n in counts if staying // n <= share < in_parts]
    if not little:
        return None
    count, finer = little[0], _FINER * little[0]
    pieces = finer * _PARTS_OF_A_PART
    if room.side_by_side and finer in counts and _are_worth_it(flat, stretch, room, pieces):
        count = finer
        search.finer += 1
    size = _size(stretch.length, count, _MORE_TASKS)
    needed_bytes = room.arena + whole
    return Tasks(stretch, size, needed_bytes, sliced & hosted, left, apart, kept=kept)


def _kept(
    stretches: Stretches, room: Room, stretch: Stretch, search: Search
) -> frozenset[int]:
    """What the loops of a stretch hand on in parts, rather than make it anew."""
    if not room.keep or stretch.loops == 1:
        return frozenset()
    key = id(stretch), room.rates
    if key not in search.worth_keeping:
        found = worth_keeping(stretches, stretch, room.rates)
        search.worth_keeping[key] = stretch, found
    _, kept = search.worth_keeping[key]
    search.kept += kept is not None
    return frozenset() if kept is None else kept.values


def _abreast(
    stretches: Stretches, stretch: Stretch, room: Room, whole: int, sliced: frozenset[int]
) -> int:
    """How many stretches that read the same parts are done side by side: what each holds
    by itself stays meanwhile."""
    if not room.side_by_side or not whole or not sliced or stretch.reduced:
        return 1
    inside = frozenset(stretch.equations)
    readers = [frozenset(stretches.readers[v]) for v in sliced]
    alike = min(len(each) // len(inside.intersection(each)) for each in readers)
    return max(1, min(alike, int(room.arena * _OF_AXIS) // whole))


def _are_worth_it(flat: FlatJaxpr, stretch: Stretch, room: Room, count: int) -> bool:
    """Whether so many parts are each worth a launch."""
    flops = sum(costs.flops(flat.equations[i].origin) for i in stretch.working)
    seconds = flops / room.rates.flops_per_second
    return seconds >= count * room.rates.launch_seconds


def _held_apiece(
    stretches: Stretches, stretch: Stretch, kept: frozenset[int]
) -> list[set[int]]:
    """What must be there at once for one part of a stretch. Each of its loops goes through
    all parts, and may consist of pieces that share no value they write: for each piece what
    it reads of others, what leaves it, what is kept of it, and what is reduced."""
    ends = {*stretch.ends, *kept} - _written_over(stretches, stretch)
    loops = [stretch.equations]
    if stretch.loops > 1 and stretch.loops * len(stretch.equations) <= _MOST_PASSED:
        passes = stretch.passes(stretches.flat, kept)
        loops = [(*each.once, *each.steps) for each in passes]
    return [held for each in loops for held in _of_pieces(stretches, each, ends)]


def _of_pieces(
    stretches: Stretches, among: Sequence[int], ends: set[int]
) -> list[set[int]]:
    """Of some values, what is touched by each piece of some equations."""
    equations = stretches.flat.equations
    inside, pieces = frozenset(among), Joined[int]()
    for i in among:
        for v in equations[i].outputs:
            for reader in inside.intersection(stretches.readers.get(v, ())):
                pieces.join(i, reader)
    held: dict[int, set[int]] = {}
    for i in among:
        held.setdefault(pieces.find(i), set()).update(ends & touched(equations[i]))
    return list(held.values())


def _is_read_in_parts(
    stretches: Stretches, stretch: Stretch, inside: frozenset[int], v: int
) -> bool:
    """Whether all that read what enters, of the equations inside, read parts of it."""
    equations = stretches.flat.equations
    return all(
        (i, position) in stretch.uses or (i in stretch.halos and position == 0)
        for i in inside.intersection(stretches.readers.get(v, ()))
        for position, read in enumerate(equations[i].inputs)
        if not isinstance(read, Constant) and read == v
    )


def _read_as_a_whole(stretches: Stretches, stretch: Stretch) -> int:
    """Bytes of what enters and is read as a whole for each part."""
    inside = frozenset(stretch.equations)
    in_parts = lambda v: _is_read_in_parts(stretches, stretch, inside, v)
    return nbytes_of(stretches.flat, {v for v in stretch.entering if not in_parts(v)})


def _may_be_left(
    stretches: Stretches, stretch: Stretch, inside: frozenset[int], v: int
) -> bool:
    """Whether the parts of a value may be put together in host memory at the end."""
    readers = stretches.readers.get(v, ())
    return v in stretch.dims and v in stretches.results and inside.issuperset(readers)


def _size(length: int, wanted: int, times: float) -> int:
    """The length of so many parts, or of up to so many times more that are all of one
    length; else a multiple of what a vector holds, and one part is shorter."""
    for count in range(wanted, min(int(times * wanted), length) + 1):
        if length % count == 0:
            return length // count
    size = -(-length // wanted)
    return size - size % _ALIGNED if size >= 4 * _ALIGNED else size
