"""Stretches that do not fit, part by part: over several tasks, and in loops within tasks.

What is between the operands and the results of a stretch is often many times as large as
both: the scores of an attention, the distances between all pairs. Along an axis on which
all of its equations work (`stretches.py`), a loop within one task has only one block of
that at once. Where operands or results do not fit either, each part is made of tasks of its
own: they read their parts of what lies in host memory, and results are put together there,
or combined by what the reduction combines with. Which axis, and how many parts, follows
EinDecomp (arXiv 2410.02682): as few as fit, with little written down.
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax

from jturnip.frontend import parts
from jturnip.frontend.axes import Known, Rule, rules
from jturnip.frontend.stretches import Stretch, Stretches, read_by
from jturnip.frontend.values import (
    Constant,
    Equation,
    FlatJaxpr,
    Parts,
    Slice,
    Type,
    Window,
)
from jturnip.units import format_bytes, padded


# Values are large from these shares of the budget on, in the order in which they are tried.
_SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
# What is tried: as for so many times less than there is, and with XLA holding so much of a
# block at once, in values of the widest equation. Few large blocks come first: they are
# fast, and XLA may fuse what is between. Where they do not fit after all, each stretch that
# needs tasks has them, whatever else could be done in blocks.
_TRIES = (
    (1, 0.5, False, False),
    (1, 1, False, False),
    (1, 2, False, False),
    (1, 2, True, False),
    (2, 2, True, False),
    (4, 2, True, False),
    (1, 2, True, True),
    (2, 2, True, True),
)
# The shares for what is between stretches and stays apart: what is small is in parts too.
_SHARES_APART = (0.5, 0.125)
# What is between stretches stays in parts from this share of the budget on.
_APART = 1 / 8
# The CPU's XLA runs gradients of convolutions twenty times slower in a loop.
_SLOW_IN_LOOPS = {"cpu": frozenset(["conv_general_dilated"])}
_MOST_BLOCKS = 256
_MOST_TASKS = 256
_MOST_EQUATIONS = 1500
# So many equations are looked at, each once for every axis of its neighbours: some seconds.
_MOST_VISITED = 400_000
# How often what is cut into tasks may be cut again, along another axis.
_AXES = 3
# The share of the budget that what one of several tasks reads and writes may take; and what
# it takes so that the next one's can be on its way meanwhile, where that asks for no more
# than so many times the tasks.
_OF_TASK = 0.8
_WITH_NEXT = 0.4
_TIMES_AHEAD = 4
# The share that what is cut along the first of several axes takes.
_OF_AXIS = 0.55
# Axes of so many of the largest values are looked at.
_SEEDS = 3


def _tries() -> Iterator[tuple[int, float, bool, bool, float]]:
    for tighter, at_once, eager, apart in _TRIES:
        for share in _SHARES_APART if apart else _SHARES:
            yield tighter, at_once, eager, apart, share


@dataclass(frozen=True, slots=True)
class Where:
    """Of a function's arguments and closed-over arrays, the values that are in host memory,
    and those that stay on the device from the start to the end."""

    hosted: frozenset[int]
    staying: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Search:
    """What is known of a function's equations, and how many were looked at."""

    rules: Known = field(default_factory=Known)
    # What was not cut (`_Choice._signature`), and whether it need not be; what the keys
    # name by their ids.
    uncut: dict[Any, bool] = field(default_factory=dict)
    named: dict[int, Any] = field(default_factory=dict)
    # What a function (kept for its id) becomes by being cut so.
    cut: dict[Any, tuple[FlatJaxpr, FlatJaxpr]] = field(default_factory=dict)
    visited: int = 0

    @property
    def is_over(self) -> bool:
        """Whether it takes too long."""
        return self.visited > _MOST_VISITED


def cut_along_axes(
    flat: FlatJaxpr, where: Where, arena: int, platform: str
) -> Iterator[FlatJaxpr]:
    """The function with its large stretches cut, in some ways that are worth trying.

    Args:
      flat: a function of which something does not fit.
      where: where its arguments are.
      arena: bytes on the device; where none are left, there is no way.
      platform: the device's.
    """
    arena -= sum(padded(flat.types[v].nbytes) for v in where.staying)
    search = _Search()
    if arena <= 0 or not _may_be_cut(flat, arena, where, search):
        return
    slow = _SLOW_IN_LOOPS.get(platform, frozenset())
    seen: set[Any] = set()
    for tighter, at_once, eager, apart, share in _tries():
        least = max(1, int(arena / tighter * share))
        room = _Room(arena // tighter, least, at_once, eager, apart, slow, where)
        cut, key = flat, []
        for _ in range(_AXES):
            again, how = _cut(cut, room, True, search)
            if search.is_over:
                return
            if not how or len(again.equations) > _MOST_EQUATIONS + len(flat.equations):
                break
            cut = again
            key.append(how)
        cut, how = _cut(cut, room, False, search)
        key.append(how)
        if any(key) and tuple(key) not in seen:
            seen.add(tuple(key))
            if _may_fit(cut, arena, where):
                yield cut


def name_of(e: Equation) -> str:
    """What an equation is called: its primitive, or that of a stretch done in blocks."""
    name = str(e.origin.params.get("name", ""))
    if not name.startswith(parts.IN_BLOCKS):
        return e.name
    return f"{name.removeprefix(parts.IN_BLOCKS)} in blocks"


def in_the_way(flat: FlatJaxpr, arena: int) -> str:
    """A sentence on the equation that is not done in less than there is, or "": one that
    has no axis, else the largest."""
    large = {i: _nbytes(flat, _touched(e)) for i, e in enumerate(flat.equations)}
    among = [i for i, nbytes in large.items() if nbytes > arena > 0]
    if not among:
        return ""
    some = dataclasses.replace(flat, equations=tuple(flat.equations[i] for i in among))
    axes = dict(zip(among, rules(some, parts.works, Known()), strict=True))
    i = max(among, key=lambda i: (axes[i] is None, large[i]))
    e = flat.equations[i]
    said = f'"{e.name}" ({e.source or "unknown line"})'
    if axes[i] is None:
        needed = format_bytes(large[i])
        return f"{said} needs {needed}, and has no axis along which to do it in parts."
    lengths = ", ".join(map(str, _lengths(flat, e, axes[i])))
    return f"In parts along its axes (of {lengths}) {said} needs too much as well."


def _lengths(flat: FlatJaxpr, e: Equation, rule: Rule | None) -> list[int]:
    """How long the axes are along which an equation can be cut."""
    assert rule is not None
    types = [*flat.operand_types(e), *(flat.types[v] for v in e.outputs)]
    found: dict[int, int] = {}
    for t, labels in zip(types, (*rule.operands, *rule.results), strict=True):
        for size, label in zip(t.shape, labels, strict=True):
            if label is not None:
                found.setdefault(label, size)
    return list(found.values())


def _may_be_cut(flat: FlatJaxpr, arena: int, where: Where, search: _Search) -> bool:
    """Whether what has no axis may fit as it is."""
    axes = rules(flat, parts.works, search.rules)
    whole = [e for e, rule in zip(flat.equations, axes, strict=True) if rule is None]
    return _may_fit(dataclasses.replace(flat, equations=tuple(whole)), arena, where)


def _may_fit(flat: FlatJaxpr, arena: int, where: Where) -> bool:
    """Whether it is worth trying: what each equation reads and writes, beside what stays,
    is not twice as much as there is."""
    return all(
        _nbytes(flat, _touched(e) - where.staying) <= 2 * arena for e in flat.equations
    )


def _touched(e: Equation) -> set[int]:
    """What an equation reads and writes."""
    return {*read_by(e), *e.outputs}


@dataclass(frozen=True, slots=True)
class _Room:
    """What there is beside what stays, from what size on a value is large, what XLA is
    expected to hold of a block, in values of the widest equation, whether tasks are made
    although blocks along another axis may do, which primitives are slow in loops, and where
    arguments are."""

    arena: int
    least: int
    at_once: float
    eager: bool
    apart: bool
    slow: frozenset[str]
    where: Where

    def is_slow_in_blocks(self, flat: FlatJaxpr, stretch: Stretch) -> bool:
        return any(flat.equations[i].name in self.slow for i in stretch.working)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A stretch as one task, in blocks of so many positions."""

    stretch: Stretch
    size: int
    nbytes: int

    @property
    def key(self) -> Any:
        """The same for the same cut of the same function."""
        return self.stretch.key, self.size


@dataclass(frozen=True, slots=True)
class _Tasks:
    """A stretch as tasks of so many positions."""

    stretch: Stretch
    size: int
    nbytes: int
    # Of what enters, that of which each task reads only its part, in host memory.
    sliced: frozenset[int]
    # Results whose parts are put together in host memory; a task joins others.
    left_in_parts: frozenset[int]
    # What others read of it piece by piece, and is never put together for them.
    apart: frozenset[int]

    @property
    def key(self) -> Any:
        """The same for the same cut of the same function."""
        return self.stretch.key, self.size, self.sliced, self.left_in_parts, self.apart


_Cutting: TypeAlias = _Blocks | _Tasks


def _cut(
    flat: FlatJaxpr,
    room: _Room,
    tasks: bool,
    search: _Search,
) -> tuple[FlatJaxpr, tuple[Any, ...]]:
    """A function cut over tasks or in blocks, and what was cut how; nothing where nothing
    was."""
    stretches = Stretches(flat, rules(flat, parts.works, search.rules))
    choice = _Choice(stretches, room, tasks, search)
    choice.cut(stretches.ruled(), room.least)
    many = sum(
        -(-c.stretch.length // c.size) * len(c.stretch.equations)
        for c in choice.cuttings
        if isinstance(c, _Tasks)
    )
    if not choice.cuttings or many > _MOST_EQUATIONS:
        return flat, ()
    how = tuple(c.key for c in choice.cuttings)
    key = id(flat), how
    if key not in search.cut:
        search.cut[key] = flat, _New(stretches, choice.cuttings).result()
    return search.cut[key][1], how


class _Choice:
    """Chooses what of a function is cut, and how."""

    def __init__(
        self,
        stretches: Stretches,
        room: _Room,
        tasks: bool,
        search: _Search,
    ):
        self._search = search
        self._stretches = stretches
        self._room = room
        self._tasks = tasks
        self._hosted = room.where.hosted.union(s.value for s in stretches.flat.slices)
        self.cuttings: list[_Cutting] = []
        self._taken: set[int] = set()

    def cut(self, among: Sequence[int], least: int) -> None:
        """Cuts what reads or writes values larger than `least`; where all that hangs
        together so cannot be, what hangs together by larger ones."""
        for members in self._stretches.together(among, least):
            before = len(self.cuttings)
            if not self._cut_together(members) and least < self._room.arena:
                self.cut(members, 2 * least)
            elif self._room.apart and len(self.cuttings) > before:
                self.cut([i for i in members if i not in self._taken], least)

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
        equations = self._stretches.flat.equations
        touched = set().union(*(_touched(equations[i]) for i in members))
        touched -= self._room.where.staying
        most = _nbytes(self._stretches.flat, touched) * max(1, self._room.at_once)
        return most <= self._room.arena

    def _signature(self, members: Sequence[int]) -> Any:
        """The same for equations that are the same but for the numbers of their values."""
        stretches, room = self._stretches, self._room
        flat, inside = stretches.flat, frozenset(members)
        numbers: dict[int, int] = {}
        found: list[Any] = [self._tasks, room.arena, room.at_once, room.eager, room.apart]
        for i in stretches.between(members):
            e = flat.equations[i]
            self._search.named[id(e.origin)] = e.origin
            found.append((id(e.origin), i in inside, i in self._taken))
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
        self._search.visited += len(members) * len(seeds)
        if self._search.is_over:
            return True
        found = [
            (stretch, dim)
            for value, dim in seeds
            if (stretch := self._stretches.along(members, value, dim)) is not None
            and self._taken.isdisjoint(stretch.equations)
        ]
        if self._tasks:
            tasks = [each for each in found if not self._fits_in_blocks(each[0])]
            if len(tasks) < len(found) and not self._room.eager:
                return True  # they need no tasks of their own
            found = tasks
        best: tuple[Any, _Cutting] | None = None
        for stretch, dim in found:
            cutting = self._cutting(stretch)
            if cutting is not None:
                cost = self._cost(members, cutting, dim)
                if best is None or cost < best[0]:
                    best = cost, cutting
        if best is not None:
            self.cuttings.append(best[1])
            self._taken.update(best[1].stretch.equations)
        return best is not None

    def _cutting(self, stretch: Stretch) -> _Cutting | None:
        if self._tasks:
            return _into_tasks(self._stretches, self._hosted, self._room, stretch)
        return _into_blocks(self._stretches.flat, self._room, stretch)

    def _fits_in_blocks(self, stretch: Stretch) -> bool:
        cutting = _into_blocks(self._stretches.flat, self._room, stretch)
        return cutting is not None and cutting.nbytes <= self._room.arena

    def _cost(self, members: Sequence[int], cutting: _Cutting, dim: int) -> tuple[Any, ...]:
        """What may fit is best, then what is not computed twice, then what leaves little
        uncut, then few tasks that need little, then what is contiguous."""
        stretch, equations = cutting.stretch, self._stretches.flat.equations
        left = {v for i in members for v in equations[i].outputs if v not in stretch.dims}
        uncut = _nbytes(self._stretches.flat, left)
        many = -(-stretch.length // cutting.size) if isinstance(cutting, _Tasks) else 1
        hopeless = cutting.nbytes > self._room.arena
        return hopeless, stretch.loops, uncut, many, cutting.nbytes, dim

    def _seeds(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """Dimensions of the largest values that some equations read or write."""
        types, equations = self._stretches.flat.types, self._stretches.flat.equations
        values = {
            v for i in members for v in (*equations[i].outputs, *read_by(equations[i]))
        }
        shapes: dict[Any, int] = {}
        for v in sorted(values, key=lambda v: (-types[v].nbytes, v)):
            shapes.setdefault(types[v].shape, v)
        return [
            (v, dim)
            for v in list(shapes.values())[:_SEEDS]
            for dim, size in enumerate(types[v].shape)
            if size > 1
        ]


def _nbytes(flat: FlatJaxpr, values: Collection[int]) -> int:
    return sum(padded(flat.types[v].nbytes) for v in values)


def _held(stretch: Stretch, room: _Room) -> set[int]:
    """What is there whatever the blocks, beside what stays."""
    return {*stretch.entering, *stretch.leaving, *stretch.reduced} - room.where.staying


def _partial_bytes(flat: FlatJaxpr, stretch: Stretch) -> int:
    """What one block adds to the largest of what is reduced."""
    return max((_nbytes(flat, [v]) for v in stretch.reduced), default=0)


def _into_blocks(flat: FlatJaxpr, room: _Room, stretch: Stretch) -> _Blocks | None:
    """The fewest blocks that are expected to fit in one task, or as many as there may be:
    XLA may need less than is expected. None where the whole is expected to fit."""
    whole = _nbytes(flat, _held(stretch, room)) + _partial_bytes(flat, stretch)
    block = int(room.at_once * stretch.widest_bytes(flat))
    free = room.arena - whole
    if free <= 0 or block <= free or room.is_slow_in_blocks(flat, stretch):
        return None
    blocks = min(_MOST_BLOCKS, stretch.length, max(2, -(-block // free)))
    return _Blocks(stretch, _size(stretch.length, blocks), whole + block // blocks)


def _into_tasks(
    stretches: Stretches, hosted: frozenset[int], room: _Room, stretch: Stretch
) -> _Tasks | None:
    """The fewest tasks of which each is expected to fit, perhaps in blocks; None where one
    does, or none are."""
    flat = stretches.flat
    block = int(room.at_once * stretch.widest_bytes(flat))
    if _nbytes(flat, _held(stretch, room)) + block <= room.arena:
        return None
    large = int(room.arena * _APART) if room.apart else room.arena
    between = {v for v in stretches.writer if flat.types[v].nbytes > large}
    in_pieces = {*hosted, *between} if room.apart else hosted
    sliced = frozenset(
        v for v in stretch.entering if _may_be_sliced(stretches, in_pieces, stretch, v)
    )
    left = frozenset(v for v in stretch.leaving if _may_be_left(stretches, stretch, v))
    cut = {v for v in stretch.leaving if v in stretch.dims}
    apart = frozenset(cut & between) if room.apart else frozenset[int]()
    rows = sliced | cut
    whole, in_parts = _nbytes(flat, _held(stretch, room) - rows), _nbytes(flat, rows)
    if 2 * _nbytes(flat, cut - left - apart) > room.arena:
        return None
    if not room.is_slow_in_blocks(flat, stretch):
        block //= _MOST_BLOCKS
    most = min(stretch.length, _MOST_TASKS)
    counts = [n for n in (2**k for k in range(1, 9)) if n <= most]
    held = {n: whole + in_parts // n for n in counts}
    needed = {n: held[n] + block // n for n in counts}
    fit = [n for n in counts if needed[n] <= room.arena * _OF_TASK]
    fit = fit or [n for n in counts if needed[n] <= room.arena]
    ahead = [n for n in fit if held[n] <= room.arena * _WITH_NEXT]
    if fit:
        tasks = ahead[0] if ahead and ahead[0] <= _TIMES_AHEAD * fit[0] else fit[0]
        size = _size(stretch.length, tasks)
        return _Tasks(stretch, size, held[tasks], sliced & hosted, left, apart)
    # The rest may be cut along another axis, results with it: a part of the operands stays
    # while the others' parts pass, once for each of it.
    staying, share = _nbytes(flat, sliced) or in_parts, room.arena * _OF_AXIS
    if room.eager:
        staying, share = in_parts, room.arena * _WITH_NEXT
    little = [n for n in counts if staying // n <= share < in_parts]
    if not little:
        return None
    size = _size(stretch.length, little[0])
    return _Tasks(stretch, size, room.arena + whole, sliced & hosted, left, apart)


def _may_be_sliced(
    stretches: Stretches, hosted: Collection[int], stretch: Stretch, v: int
) -> bool:
    """Whether tasks can read their parts of what enters, in host memory."""
    return v in hosted and all(
        (i, position) in stretch.uses
        for i in stretch.equations
        for position, read in enumerate(stretches.flat.equations[i].inputs)
        if not isinstance(read, Constant) and read == v
    )


def _may_be_left(stretches: Stretches, stretch: Stretch, v: int) -> bool:
    """Whether the parts of a value may be put together in host memory at the end."""
    inside = set(stretch.equations).issuperset(stretches.readers.get(v, ()))
    return v in stretch.dims and v in stretches.flat.result_values and inside


def _size(length: int, wanted: int) -> int:
    """The length of so many parts, or of some more that are all of one length."""
    for count in range(wanted, min(wanted + wanted // 2, length) + 1):
        if length % count == 0:
            return length // count
    return -(-length // wanted)


class _New:
    """The function with other equations in the place of each stretch."""

    def __init__(self, stretches: Stretches, cuttings: Sequence[_Cutting]):
        self._flat = stretches.flat
        self._writer = stretches.writer
        self._cuttings = cuttings
        self._types = list(self._flat.types)
        self._outputs = list(self._flat.outputs)
        self._slices = {s.value: s for s in self._flat.slices}
        self._windows: dict[tuple[int, Window], int] = {}
        # Value that is there in parts only → the dimension, and its parts by their first
        # positions. Pieces of such values that were made.
        self._apart = dict(_joined_before(self._flat))
        self._pieces: dict[tuple[int, int, int, int], int] = {}
        self._equations: list[Equation] = []
        # Equations made for one part, which others have too.
        self._known: dict[Any, Any] = {}

    def result(self) -> FlatJaxpr:
        flat = self._flat
        ends = {c.stretch.equations[-1]: c for c in self._cuttings}
        of = {i: last for last, c in ends.items() for i in c.stretch.equations}
        # What reads a stretch and stands among its equations comes after it.
        waiting = [i for i in range(len(flat.equations)) if of.get(i, i) == i]
        done: set[int] = set()
        while waiting:
            later = []
            for i in waiting:
                read = ends[i].stretch.entering if i in ends else read_by(flat.equations[i])
                if any(v in self._writer and self._writer[v] not in done for v in read):
                    later.append(i)
                    continue
                self._add(i, ends.get(i))
                done.update(ends[i].stretch.equations if i in ends else (i,))
            assert len(later) < len(waiting), "stretches that wait for one another"
            waiting = later
        self._whole(v for v in self._apart.copy() if v in self._outputs)
        used = {v for e in self._equations for v in read_by(e)}
        return dataclasses.replace(
            flat,
            types=tuple(self._types),
            equations=tuple(self._equations),
            outputs=tuple(self._outputs),
            slices=tuple(s for s in self._slices.values() if s.value in used),
        )

    def _add(self, i: int, cutting: _Cutting | None) -> None:
        if cutting is None:
            e = self._flat.equations[i]
            if e.outputs[0] not in self._apart:  # else it is put together when it is read
                self._whole(read_by(e))
                self._equations.append(e)
            return
        for i in cutting.stretch.equations:
            self._apart.pop(self._flat.equations[i].outputs[0], None)
        if isinstance(cutting, _Tasks):
            self._in_tasks(cutting)
        else:
            self._in_blocks(cutting)

    def _in_blocks(self, cutting: _Blocks) -> None:
        stretch = cutting.stretch
        self._whole(stretch.entering)
        key = self._key(stretch, cutting.size)
        if key not in self._known:
            self._known[key] = parts.in_blocks(self._flat, stretch, cutting.size)
        calls = _calls(parts.lead_equation(self._flat, stretch))
        self._equations.append(
            Equation(self._known[key], stretch.entering, stretch.leaving, calls, ours=True)
        )

    def _key(self, stretch: Stretch, size: int) -> Any:
        """The same for stretches that are the same but for the numbers of their values."""
        numbers: dict[int, int] = {}
        equations = []
        for i in stretch.equations:
            e = self._flat.equations[i]
            read = tuple(
                ("constant", np.asarray(v.value).tobytes(), v.type)
                if isinstance(v, Constant)
                else (numbers.setdefault(v, len(numbers)), self._flat.types[v])
                for v in e.inputs
            )
            written = tuple(numbers.setdefault(v, len(numbers)) for v in e.outputs)
            equations.append((id(e.origin), read, written, i in stretch.working))
        dims = tuple(sorted((numbers[v], dim) for v, dim in stretch.dims.items()))
        entering = tuple(numbers[v] for v in stretch.entering)
        leaving = tuple(numbers[v] for v in stretch.leaving)
        return tuple(equations), dims, entering, leaving, size

    # -- tasks -------------------------------------------------------------------------

    def _value(self, t: Type) -> int:
        self._types.append(t)
        return len(self._types) - 1

    def _in_tasks(self, cutting: _Tasks) -> None:
        flat, stretch = self._flat, cutting.stretch
        # What each part of a value is, by its first position.
        made: dict[int, dict[int, int]] = {low: {} for low in _lows(cutting)}
        sofar: dict[int, int] = {}
        for each in stretch.passes(flat):
            for i in each.once:
                self._whole(read_by(flat.equations[i]))
                self._equations.append(flat.equations[i])
            for low, before in made.items():
                part = self._part(cutting, each.steps, low, before)
                before.update((v, part[v]) for v in each.wanted if v in stretch.dims)
                for v in each.wanted:
                    if v in stretch.reduced:  # partial results are combined as they come
                        last = low == max(made)
                        sofar[v] = self._combined(stretch, v, sofar.get(v), part[v], last)
        for v in stretch.leaving:
            if v in stretch.dims:
                self._put_together(cutting, v, {low: part[v] for low, part in made.items()})

    def _put_together(self, cutting: _Tasks, v: int, parts: Mapping[int, int]) -> None:
        stretch, dim, values = cutting.stretch, cutting.stretch.dims[v], [*parts.values()]
        if v in cutting.left_in_parts or v in cutting.apart:
            made = Parts.along(dim, values, self._types, self._types[v])
            self._outputs = [_with_parts(o, v, made) for o in self._outputs]
        if v in cutting.apart:
            scale = stretch.scale(self._flat, v, dim)
            self._apart[v] = dim, {low * scale: part for low, part in parts.items()}
        elif v not in cutting.left_in_parts:
            self._joined(values, dim, v)

    def _joined(self, values: Sequence[int], dim: int, v: int | None = None) -> int:
        closed = _joining(tuple(self._types[p] for p in values), dim)
        if v is None:
            v = self._value(Type.of(closed.jaxpr.outvars[0].aval))
        self._ours(closed, values, (v,), ())
        return v

    def _whole(self, values: Iterable[int]) -> None:
        """Puts together what is there in parts only, for who reads it whole."""
        for v in values:
            if v in self._apart:
                dim, parts = self._apart.pop(v)
                self._whole(parts.values())
                self._joined([*parts.values()], dim, v)

    def _piece(self, v: int, dim: int, low: int, length: int) -> int:
        """Some positions of a value that is there in parts only."""
        key = v, dim, low, length
        if key not in self._pieces:
            of, parts = self._apart[v]
            found = []
            for first, part in parts.items():
                begin, end = low, low + length
                if of == dim:
                    begin = max(low - first, 0)
                    end = min(low + length - first, self._types[part].shape[dim])
                if begin < end:
                    found.append(self._part_of(part, dim, begin, end - begin))
            self._pieces[key] = found[0] if len(found) == 1 else self._joined(found, of)
        return self._pieces[key]

    def _part_of(self, v: int, dim: int, low: int, length: int) -> int:
        """Some positions of a value, wherever it is."""
        if v in self._apart:
            return self._piece(v, dim, low, length)
        if length == self._types[v].shape[dim]:
            return v
        closed = _cutting(self._types[v], dim, length)
        value = self._value(Type.of(closed.jaxpr.outvars[0].aval))
        self._ours(closed, (v, _position(low, np.uint32)), (value,), ())
        return value

    def _combined(
        self, stretch: Stretch, v: int, sofar: int | None, part: int, last: bool
    ) -> int:
        if sofar is None:
            return part
        name, t = self._flat.equations[stretch.reduced[v]].name, self._types[sofar]
        total = v if last else self._value(t)
        closed = _combining(name, t, self._types[total].dtype)
        self._ours(closed, (sofar, part), (total,), ())
        return total

    def _part(
        self, cutting: _Tasks, steps: Sequence[int], low: int, made: Mapping[int, int]
    ) -> Mapping[int, int]:
        """Adds some equations for one part; returns what each value is there.

        Args:
          made: what some values are there already.
        """
        flat, stretch = self._flat, cutting.stretch
        length = min(cutting.size, stretch.length - low)
        of_part: dict[int, int] = {**made}
        cut: dict[tuple[int, int], int] = {}

        def read(i: int, position: int, v: int | Constant) -> int | Constant:
            dim = stretch.uses.get((i, position))
            if isinstance(v, Constant):
                return v
            if v in of_part or dim is None:
                self._whole([] if v in of_part else [v])
                return of_part.get(v, v)
            if (v, dim) not in cut:
                make = self._window if v in cutting.sliced else self._cut
                cut[v, dim] = make(stretch, v, dim, low, length)
            return cut[v, dim]

        for i in steps:
            e = flat.equations[i]
            inputs = [read(i, position, v) for position, v in enumerate(e.inputs)]
            types = [v.type if isinstance(v, Constant) else self._types[v] for v in inputs]
            shapes = [stretch.shape(flat, v, length) for v in e.outputs]
            along = stretch.along(flat, i)
            key = (id(e.origin), along, tuple(types), tuple(shapes))
            if key not in self._known:
                self._known[key] = parts.on_part(e, types, shapes, along)
            closed = self._known[key]
            outputs = [self._value(Type.of(v.aval)) for v in closed.jaxpr.outvars]
            self._ours(closed, (_position(low), *inputs), outputs, _calls(e))
            of_part.update(zip(e.outputs, outputs, strict=True))
        return of_part

    def _window(self, stretch: Stretch, v: int, dim: int, low: int, length: int) -> int:
        """The part of an array in host memory that a task reads."""
        scale = stretch.scale(self._flat, v, dim)
        whole = Slice(v, v, Window.of(self._types[v].shape))
        before = self._slices.get(v, whole)
        window = before.window.part(dim, low * scale, (low + length) * scale)
        key = before.source, window
        if key not in self._windows:
            value = self._value(self._types[v].part(dim, length * scale))
            self._slices[value] = Slice(value, *key)
            self._windows[key] = value
        return self._windows[key]

    def _cut(self, stretch: Stretch, v: int, dim: int, low: int, length: int) -> int:
        scale = stretch.scale(self._flat, v, dim)
        return self._part_of(v, dim, low * scale, length * scale)

    def _ours(
        self,
        closed: Any,
        inputs: Sequence[int | Constant],
        outputs: Sequence[int],
        calls: tuple[Any, ...],
    ) -> None:
        """Adds the equations of a jaxpr of our own making."""
        jaxpr = closed.jaxpr
        assert not jaxpr.constvars
        values: dict[Any, int | Constant] = dict(zip(jaxpr.invars, inputs, strict=True))
        values.update(zip(jaxpr.outvars, outputs, strict=True))
        calls = calls or (self._equations[-1].calls if self._equations else ())
        for eqn in jaxpr.eqns:
            read = tuple(
                Constant(v.val, Type.of(v.aval)) if hasattr(v, "val") else values[v]
                for v in eqn.invars
            )
            for v in eqn.outvars:
                if v not in values:
                    values[v] = self._value(Type.of(v.aval))
            written = tuple(values[v] for v in eqn.outvars)
            assert all(isinstance(v, int) for v in written)
            self._equations.append(Equation(eqn, read, written, calls, ours=True))  # pyright: ignore[reportArgumentType]


def _joined_before(flat: FlatJaxpr) -> Iterator[tuple[int, tuple[int, dict[int, int]]]]:
    """Values that are put together of parts in order to be cut: with the dimension, and the
    parts by their first positions."""
    for e in flat.equations:
        if not e.ours or e.name != "concatenate":
            continue
        parts = [v for v in e.inputs if not isinstance(v, Constant)]
        if len(parts) == len(e.inputs):
            dim = e.origin.params["dimension"]
            lengths = (flat.types[v].shape[dim] for v in parts)
            lows = itertools.accumulate(lengths, initial=0)
            yield e.outputs[0], (dim, dict(zip(lows, parts, strict=False)))


def _lows(cutting: _Tasks) -> range:
    """The first position of each part."""
    return range(0, cutting.stretch.length, cutting.size)


def _with_parts(output: int | Parts, v: int, made: Parts) -> int | Parts:
    """A result that is a value, or has it as a part, with its parts instead."""
    if output == v:
        return made
    if not isinstance(output, Parts) or v not in output.values:
        return output
    at = output.values.index(v)
    window = output.windows[at]
    inside = tuple(w.within(window) for w in made.windows)
    return Parts(
        (*output.values[:at], *made.values, *output.values[at + 1 :]),
        (*output.windows[:at], *inside, *output.windows[at + 1 :]),
        output.type,
    )


def _calls(e: Equation) -> tuple[Any, ...]:
    return e.calls if e.ours else (*e.calls, e.origin)


def _position(at: int, dtype: Any = np.int32) -> Constant:
    position = np.asarray(at, dtype)
    return Constant(position, Type((), position.dtype))


@functools.lru_cache(maxsize=1024)
def _joining(types: tuple[Type, ...], dim: int) -> Any:
    """Parts to the whole."""
    join = lambda *arrays: lax.concatenate(arrays, dim)
    return jax.make_jaxpr(join)(*(t.struct() for t in types))


@functools.lru_cache(maxsize=1024)
def _cutting(t: Type, dim: int, length: int) -> Any:
    """The whole, and a first position, to a part of it; one equation, since no position is
    negative."""
    cut = lambda array, start: lax.dynamic_slice_in_dim(array, start, length, dim)
    return jax.make_jaxpr(cut)(t.struct(), jax.ShapeDtypeStruct((), np.uint32))


@functools.lru_cache(maxsize=1024)
def _combining(name: str, t: Type, dtype: Any) -> Any:
    """What a reduction has so far, and one more part, to what it has then."""

    def combine(sofar: Any, part: Any) -> Any:
        return lax.convert_element_type(parts.combined(name, sofar, part), dtype)

    return jax.make_jaxpr(combine)(t.struct(), t.struct())
