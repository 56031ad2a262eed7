"""Stretches that do not fit, part by part: over several tasks, and in loops within tasks.

What is between the operands and the results of a stretch is often many times as large as
both: the scores of an attention, the distances between all pairs. Along an axis on which
all of its equations work (`stretches.py`), a loop within one task has only one block of
that at once. Where operands or results do not fit either, each part is made of tasks of its
own: they read their parts of what lies in host memory, and results are put together there,
or combined by what the reduction combines with. Which axis, and how many parts, follows
EinDecomp (arXiv 2410.02682): as few as fit, with little written down.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jturnip.frontend import parts
from jturnip.frontend.anew import Large, made_anew
from jturnip.frontend.apart import read_apart
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.choosing import Room, Search, Where as Where, cut_once
from jturnip.frontend.costs import WRITTEN, DeviceRates
from jturnip.frontend.effort import Effort, Sofar
from jturnip.frontend.factors import of_panel
from jturnip.frontend.grids import OF_ONE, have_short_dims, in_grids
from jturnip.frontend.in_order import IN_ORDER, has_in_order, rule_in_order
from jturnip.frontend.largest import largest_as_blocks
from jturnip.frontend.materializing import Again
from jturnip.frontend.repeats import repeated
from jturnip.frontend.rules import Rule
from jturnip.frontend.running import rows_as_blocks
from jturnip.frontend.shifting import shifted
from jturnip.frontend.short import points_as_choices
from jturnip.frontend.slices import sliced_on_host
from jturnip.frontend.tall import tall_as_blocks
from jturnip.frontend.tiling import in_tiles, of_each_example
from jturnip.frontend.values import (
    Constant,
    Equation,
    FlatJaxpr,
    nbytes_of,
    touched,
)
from jturnip.units import format_bytes


# How often what is cut into tasks may be cut again, along another axis.
_AXES = 3
# Values are large from these shares of the budget on, in the order in which they are tried.
_SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
# What is tried: as for so many times less than there is, and with XLA holding so much of a
# block at once, in values of the widest equation. Few large blocks come first: they are
# fast, and XLA may fuse what is between. Where they do not fit after all, each stretch that
# needs tasks has them, whatever else could be done in blocks, along so many axes; then what
# is between stretches may stay in parts too, and so may what their loops would make anew.
_TRIES = (
    (1, 0.5, 0, False, False),
    (1, 1, 0, False, False),
    (1, 2, 0, False, False),
    (1, 2, _AXES, False, False),
    (2, 2, _AXES, False, False),
    (4, 2, _AXES, False, False),
    (1, 2, _AXES, True, True),
    (1, 2, _AXES, True, False),
    (1, 2, 1, True, True),
    (1, 2, 1, True, False),
    (2, 2, _AXES, True, True),
    (2, 2, _AXES, True, False),
    (2, 2, 1, True, True),
    (2, 2, 1, True, False),
)
# Where blocks need so many times what there is by XLA's figures, smaller ones are tried
# before those of other stretches: of 14 such, two would have fitted.
_TOO_LARGE_BLOCKS = 1.1
# From what two of them needed follows how small blocks must be to need so much of what is
# there, but no more than so many times smaller than the last. If blocks that small are cut
# just as before (lengths are whole numbers), so many times smaller ones are tried.
_FULL = 0.95
_MUCH_SMALLER = 4
_NEXT = 1.25
_MOST_AT_ONCE = max(at_once for _, at_once, *_ in _TRIES)
# The shares for what is between stretches and stays apart: what is small is in parts too.
_SHARES_APART = (0.5, 0.125)
# What takes this share of the budget is made anew for each stretch that reads it, where
# that takes at most so many times what it takes to move it there and back: parts that are
# moved are tasks of their own.
_LARGE = 1 / 2
_CHEAPER = 32
# One in tiles along all axes is tried after so many ways that do not fit, and before one of
# more tasks than so many, if it has fewer.
_DO_NOT_FIT = 4
_MANY_TASKS = 200
# One of many equations is tried after up to so many ways: once these had so large a share
# of as many.
_DO_NOT_FIT_EITHER = 12
_OF_A_GRID = 1 / 16
_TASKS = WRITTEN.union("dynamic_slice concatenate copy".split())
# What takes this share of the budget is not read whole beside a part of itself.
_WHOLE = 1 / 2


@dataclass(frozen=True, slots=True)
class Ways:
    """Ways to cut a function that come together: the faster is to be taken."""

    cut: tuple[FlatJaxpr, ...]
    # Whether more is put together of parts than there is room for. Only where XLA fuses
    # that with what reads it, it fits.
    doubtful: bool = False
    # Whether something large is made anew for each that reads it, rather than kept; what
    # is made anew in loops over blocks; and whether tasks keep what others would make anew.
    anew: bool = False
    again: Again | None = None
    keeps: bool = False
    # Whether blocks have few positions.
    thin: bool = False
    # Whether windows slide over tiles that overlap: what is between does not move; and
    # whether all that does not fit is in tiles, each done once.
    in_tiles: bool = False
    in_all: bool = False
    # Whether all that is large is in tiles of one size, along all of its dimensions.
    in_grids: bool = False
    # How many were left out, since they would have had too many equations.
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class _Try:
    """How a function is to be cut."""

    # Whether channels of images are cut, which are little work for all that a part reads.
    narrow: bool
    # How much less there is, how much of a block XLA holds at once, along how many axes
    # tasks are made although blocks may do, whether what is between may stay apart, whether
    # what loops make anew is kept, and what is large.
    tighter: int
    at_once: float
    eager: int
    apart: bool
    keeps: bool
    share: float

    @property
    def with_any_blocks(self) -> "_Try":
        """The same for tries that differ in the blocks alone."""
        return dataclasses.replace(self, at_once=0)

    @property
    def with_nothing_kept(self) -> "_Try":
        """The same for tries that differ in what is kept alone."""
        return dataclasses.replace(self, keeps=False)


def _tries(keep: bool, convolves: bool) -> Iterator[_Try]:
    """What is tried.

    Args:
      keep: whether only tries in which what loops make anew is kept.
      convolves: whether there are convolutions: all channels of images come first then.
    """
    for narrow in (False, True) if convolves else (True,):
        for tighter, at_once, eager, apart, keeps in _TRIES:
            if keeps or not keep:
                for share in _SHARES_APART if apart else _SHARES:
                    yield _Try(narrow, tighter, at_once, eager, apart, keeps, share)


def cut_along_axes(
    flat: FlatJaxpr,
    where: Where,
    arena: int,
    rates: DeviceRates,
    seconds_per_byte: float,
    anew: bool = True,
    effort: Effort | None = None,
    keep: bool = False,
    sofar: Sofar | None = None,
) -> Iterator[Ways]:
    """The function with its large stretches cut, in some ways that are worth trying; the
    doubtful ones last.

    Args:
      flat: a function of which something does not fit.
      where: where its arguments are.
      arena: bytes on the device; where none are left, there is no way.
      rates: what the device is expected to do.
      seconds_per_byte: what it takes to move a byte to host memory and back.
      anew: whether there are ways in which what is large is made anew rather than kept;
        they come before those without.
      effort: what was looked at before, for the same function; grows. No way is looked for
        once that is enough.
      keep: whether there are only ways in which what loops over blocks would make anew is
        kept, in parts.
      sofar: what is found of them, by who makes tasks of each before asking for the next.
    """
    effort, sofar = effort or Effort(), sofar or Sofar()
    arena -= nbytes_of(flat, where.staying)
    known = Known()
    if arena <= 0:
        return
    flat = _as_blocks(repeated(flat, arena), arena)
    search = where, arena, rates, keep
    of_search = known, effort, sofar
    rest: list[Ways] = []
    for form in _together_and_apart(flat, where, arena, known):
        for ways in ways_in_tiles(form, where, arena, known):
            if ways.in_all:
                yield ways
            else:
                rest.append(ways)
    whole, flat = flat, sliced_on_host(flat, where.hosted)
    if flat is not whole and not keep and _fits(flat, arena, where):
        yield Ways((flat,))
    large = large_for(arena, rates, seconds_per_byte)
    may_be_cut = _may_be_cut(flat, arena, where, known)
    forms = _forms(flat, arena, where, large, known, sofar) if may_be_cut else ()
    forms = ((form, has_copies) for form, has_copies in forms if anew or not has_copies)
    in_some_ways = lambda form: _in_some_ways(form, *search, Search(*of_search))
    others = _along_axes(forms, rest, arena, in_some_ways)
    if keep:
        yield from others
        return
    grids = _ways_in_grids(flat, where, arena, known, effort, sofar)
    of_one = arena // OF_ONE
    best_in_tiles = has_in_order(flat, of_one) or have_short_dims(flat, of_one)
    if best_in_tiles and not sofar.fits:
        for ways in grids:
            yield ways
            if sofar.fits:
                yield from others if sofar.waits else ()
                return
    yield from _with_grids(others, grids, sofar)


def _as_blocks(flat: FlatJaxpr, arena: int) -> FlatJaxpr:
    """The function with what is done along all of a row or a column done by blocks, and
    with what is done at one position done at each."""
    flat = points_as_choices(flat, arena // OF_ONE)
    flat = largest_as_blocks(rows_as_blocks(flat, arena), arena)
    return tall_as_blocks(flat, arena)


def _along_axes(
    forms: Iterable[tuple[FlatJaxpr, bool]],
    in_tiles: Sequence[Ways],
    arena: int,
    in_some_ways: Callable[[FlatJaxpr], Iterator[Ways]],
) -> Iterator[Ways]:
    """Ways to cut a function along one axis after the other: in some forms, each with
    whether something is made anew; then with some in tiles, and what is left over cut as
    well; the doubtful ones last."""
    doubtful: list[Ways] = []
    for form, has_copies in forms:
        for ways in in_some_ways(form):
            ways = dataclasses.replace(ways, anew=has_copies)
            sure = tuple(cut for cut in ways.cut if not _joins_too_much(cut, arena))
            if sure or not ways.cut:
                yield dataclasses.replace(ways, cut=sure)
            else:
                doubtful.append(dataclasses.replace(ways, doubtful=True))
    for ways in in_tiles:
        yield ways
        yield from in_some_ways(ways.cut[0])
    yield from doubtful


def _with_grids(
    others: Iterator[Ways], grids: Iterator[Ways], sofar: Sofar
) -> Iterator[Ways]:
    """Ways along one axis after the other; and one in tiles along all of them: before one
    of many and more tasks, after the first that fits, if that waits for what it moves, or
    after some that do not fit. More of these at last, if there must be."""
    grid, is_asked, tried = None, False, 0
    for number, each in enumerate(others):
        tasks, is_late = _tasks(each), number >= _DO_NOT_FIT
        if not is_asked and (is_late or tasks > _MANY_TASKS):
            grid, is_asked = next(grids, None), True
        if grid is not None:
            is_much = tried >= _OF_A_GRID * _equations(grid)
            is_late &= is_much or number >= _DO_NOT_FIT_EITHER
            if is_late or _tasks(grid) < tasks:
                yield grid
                grid = None
        tried += _equations(each)
        yield each
        if sofar.fits:
            break
    if sofar.waits:
        grid = grid if is_asked else next(grids, None)
    if grid is not None and (sofar.waits or not sofar.fits):
        yield grid
    yield from others
    if not sofar.fits:
        yield from grids


def _tasks(ways: Ways) -> int:
    """About how many tasks a function has at least, if it is cut so: of heavy equations,
    and of what copies parts of values."""
    of = lambda cut: sum(e.name in _TASKS for e in cut.equations)
    return min(map(of, ways.cut), default=0)


def _equations(ways: Ways) -> int:
    """How many equations a function has at least, if it is cut so."""
    return min((len(cut.equations) for cut in ways.cut), default=0)


def _ways_in_grids(
    flat: FlatJaxpr,
    where: Where,
    arena: int,
    known: Known,
    effort: Effort,
    sofar: Sofar,
) -> Iterator[Ways]:
    """The function with all that is large in tiles of one size; in smaller ones after that,
    unless what needs too much is not in tiles."""
    grids = in_grids(flat, where, arena, known)
    while not sofar.loop_is_too_large and (cut := next(grids, None)) is not None:
        effort.looked_at(len(cut.equations))
        if not effort.is_too_much_for(len(cut.equations)) and _fits(cut, arena, where):
            yield Ways((cut,), in_grids=True)


def _together_and_apart(
    flat: FlatJaxpr, where: Where, arena: int, known: Known
) -> Iterator[FlatJaxpr]:
    """The function, and if it must be with one of several examples after the other."""
    yield flat
    apart = of_each_example(flat, where, arena, known)
    if apart is not None:
        yield apart


def ways_in_tiles(
    flat: FlatJaxpr, where: Where, arena: int, known: Known
) -> Iterator[Ways]:
    """The function with what windows slide over in tiles, if there is anything."""
    # A tile reads what it needs of an array once, whatever parts that is put together of.
    flat = sliced_on_host(flat, where.hosted, overlapping=False)
    for tiled in in_tiles(flat, where, arena, known):
        in_all = tiled.loops == 1 and _fits(tiled.flat, arena, where)
        yield Ways((tiled.flat,), in_tiles=True, in_all=in_all)


def _forms(
    flat: FlatJaxpr, arena: int, where: Where, large: Large, known: Known, sofar: Sofar
) -> Iterator[tuple[FlatJaxpr, bool]]:
    """The function as it is written and otherwise, and whether something is made anew in
    each. If nothing fits by then: with what later loops of a stretch make anew made apart
    from it, so that they may be stretches of their own; with what products read and others
    read too, and is too large to be whole, as several values."""
    yield from _written_otherwise(flat, arena, large, known)
    if sofar.fits:
        return
    loops_apart = made_anew(flat, dataclasses.replace(large, arena=arena), known)
    if len(loops_apart.equations) > len(made_anew(flat, large, known).equations):
        yield loops_apart, True
        if sofar.fits:
            return
    of_equation = rules(flat, parts.works, known)
    apart = read_apart(flat, of_equation, where.hosted, int(arena * _WHOLE))
    if apart is not flat:
        yield apart, False


def _written_otherwise(
    flat: FlatJaxpr, arena: int, large: Large, known: Known
) -> Iterator[tuple[FlatJaxpr, bool]]:
    """The function in forms in which more of it can be cut, then as it is; and whether
    something is made anew in each."""
    seen: list[FlatJaxpr] = []
    for form in (shifted(flat, arena), flat):
        for each in (made_anew(form, large, known), form):
            if all(each is not before for before in seen):
                seen.append(each)
                yield each, each is not form


def large_for(arena: int, rates: DeviceRates, seconds_per_byte: float) -> Large:
    """What is made anew rather than kept, of so many bytes."""
    return Large(int(arena * _LARGE), _CHEAPER * seconds_per_byte, rates)


def _in_some_ways(
    flat: FlatJaxpr,
    where: Where,
    arena: int,
    rates: DeviceRates,
    keep: bool,
    search: Search,
) -> Iterator[Ways]:
    sofar, tried = search.sofar, _Tried()
    convolves = any(e.name == "conv_general_dilated" for e in flat.equations)
    for each in _tries(keep, convolves):
        if search.effort.is_enough:
            return
        if search.is_over(each.apart) or tried.is_for_nothing(each):
            continue
        kept = search.kept
        room = Room(
            arena=arena // each.tighter,
            least=max(1, int(arena / each.tighter * each.share)),
            at_once=each.at_once,
            fused=False,
            narrow=each.narrow,
            eager=False,
            apart=each.apart,
            keep=each.keeps,
            side_by_side=True,
            rates=rates,
            where=where,
        )
        ways = _ways_in(flat, arena, room, each.eager, search, tried.seen)
        if each.keeps and search.kept == kept:
            tried.nothing_kept.add(each.with_nothing_kept)
        if ways is None:
            continue
        sofar.times = 1.0
        yield ways
        tried.note(each, sofar.times)
        for smaller in tried.smaller(each):
            room = dataclasses.replace(room, at_once=smaller)
            ways = _ways_in(flat, arena, room, each.eager, search, tried.seen)
            if ways is not None:  # blocks that differ
                tried.expected_to_fit[each.with_any_blocks] = smaller
                yield ways
                break


@dataclass(slots=True)
class _Tried:
    """What was tried of one function, and what came of it."""

    # How it was cut.
    seen: set[Any] = field(default_factory=set)
    # Tries in which nothing was kept.
    nothing_kept: set[_Try] = field(default_factory=set)
    # Blocks that needed too much, of whatever stretches.
    too_large: set[tuple[bool, float]] = field(default_factory=set)
    # Of the same stretches: what blocks needed, and how small they must be to fit.
    needed: dict[_Try, list[tuple[float, float]]] = field(default_factory=dict)
    expected_to_fit: dict[_Try, float] = field(default_factory=dict)

    def is_for_nothing(self, each: _Try) -> bool:
        """Whether it would be the same again, or blocks that are too large again."""
        return (
            each.with_nothing_kept in self.nothing_kept
            or (each.narrow, each.at_once) in self.too_large
            or each.at_once < self.expected_to_fit.get(each.with_any_blocks, 0)
        )

    def note(self, each: _Try, times: float) -> None:
        """What was tried needed so many times what there is for its blocks; 1 where they
        fit, or nobody knows."""
        if times > 1:
            self.needed.setdefault(each.with_any_blocks, []).append((each.at_once, times))
        if each.at_once < _MOST_AT_ONCE and times > _TOO_LARGE_BLOCKS:
            self.too_large.add((each.narrow, each.at_once))

    def smaller(self, each: _Try) -> Iterator[float]:
        """How much of a block is to be there at once, so that blocks of the same stretches
        are expected to fit; nothing where nobody knows."""
        return _smaller_that_fit(self.needed.get(each.with_any_blocks, ()))


def _smaller_that_fit(needed: Sequence[tuple[float, float]]) -> Iterator[float]:
    """How much of a block is to be there at once, so that blocks fit, by what others of the
    same stretches needed: a part is the same for all blocks, the rest as large as they are.

    Args:
      needed: how much of a block was to be there at once, and how many times what there is
        it needed by XLA's figures.
    """
    if len(needed) < 2:
        return
    (first, before), (last, times) = needed[-2:]
    if not (first < last and before > times):
        return
    block = (before - times) / (1 / first - 1 / last)
    room = _FULL - (times - block / last)
    found = block / room if room > 0 else math.inf
    while found <= _MUCH_SMALLER * last:
        yield found
        found *= _NEXT


def _ways_in(
    flat: FlatJaxpr,
    arena: int,
    room: Room,
    eager: int,
    search: Search,
    seen: set[Any],
) -> Ways | None:
    """The ways that are tried in a room, with all bytes that there are on the device; None
    where there are none but those that were `seen`, which grow."""

    def is_worth_it(form: FlatJaxpr) -> bool:
        much = search.effort.is_too_much_for(len(form.equations))
        return not much and _may_fit(form, arena, room.where)

    forms: list[_Forms] = []
    left_out = 0
    for each in _fine_and_coarse(flat, room, eager, search):
        if any(each.how) and each.how not in seen:
            seen.add(each.how)
            left_out += not each.forms
            fit = tuple(filter(is_worth_it, each.forms))
            forms.append(dataclasses.replace(each, forms=fit))
    forms = [each for each in forms if each.forms and not search.is_over(room.apart)]
    if not forms and not left_out:
        return None
    return Ways(
        tuple(form for each in forms for form in each.forms),
        again=next((each.again for each in forms if each.again), None),
        keeps=any(each.keeps for each in forms),
        thin=any(each.thin for each in forms),
        left_out=left_out,
    )


@dataclass(frozen=True, slots=True)
class _Forms:
    """What a function becomes: one form or two, or none where these would have too many
    equations; what was cut how, what loops over blocks make anew in it, whether tasks keep
    such, and whether blocks have few positions."""

    forms: tuple[FlatJaxpr, ...]
    how: tuple[tuple[Any, ...], ...]
    again: Again | None
    keeps: bool
    thin: bool = False

    @property
    def equations(self) -> float:
        """How many the first form has."""
        return len(self.forms[0].equations) if self.forms else math.inf


def _cut(flat: FlatJaxpr, room: Room, eager: int, search: Search) -> _Forms:
    """A function cut over tasks along some axes, so many eagerly, then in blocks."""
    cut, how, keeps, slides = flat, [], False, False
    most = room.most_equations + len(flat.equations)
    for axis in range(_AXES):
        # Parts that are read with their halos hang together: along more axes all would be
        # cut, whatever fits.
        eagerly = dataclasses.replace(room, eager=axis < eager and not slides)
        again = cut_once(cut, eagerly, True, search)
        if again.too_many:
            return _Forms((), (*how, again.how), None, keeps)
        if not again.how or len(again.cut.equations) > most:
            break
        cut, keeps, slides = again.cut, keeps or again.keeps, slides or again.slides
        how.append(again.how)
    found = cut_once(cut, room, False, search)
    forms = (found.cut,) if found.materialized is None else (found.materialized, found.cut)
    return _Forms(forms, (*how, found.how), found.again, keeps, found.thin)


def _fine_and_coarse(
    flat: FlatJaxpr, room: Room, eager: int, search: Search
) -> Iterator[_Forms]:
    """A function cut into more parts, so that some can be side by side, and into as few as
    there must be. Where none can, more are for nothing unless they need fewer tasks: along
    another axis, what they read may find room beside them."""
    finer, abreast = search.finer, search.abreast
    fine = _cut(flat, room, eager, search)
    finer, abreast = search.finer - finer, search.abreast - abreast
    if abreast or not finer:
        yield fine
    if abreast or finer:
        coarse = _cut(flat, dataclasses.replace(room, side_by_side=False), eager, search)
        if not abreast and fine.equations < coarse.equations:
            yield fine
        yield coarse


def name_of(e: Equation) -> str:
    """What an equation is called: its primitive, that of a stretch done in blocks, or what
    is done with a panel."""
    name = str(e.origin.params.get("name", ""))
    if name.startswith(parts.IN_BLOCKS):
        return f"{name.removeprefix(parts.IN_BLOCKS)}{_IN_BLOCKS}"
    return of_panel(e) or e.name


_IN_BLOCKS = " in blocks"


def are_blocks(name: str) -> bool:
    """Whether a name of `name_of` is that of a stretch done in blocks."""
    return name.endswith(_IN_BLOCKS)


# Of more axes than so many it is only said how many there are of each length.
_MANY_AXES = 6
# How a sentence on what was cut begins.
CUT = "In parts along its axes"


def in_the_way(flat: FlatJaxpr, arena: int) -> str:
    """A sentence on the equation that is not done in less than there is, or "": one that
    has no axis, else one that is made in order, in tiles, else the largest."""
    flat = _as_blocks(flat, arena)
    large = {i: nbytes_of(flat, touched(e)) for i, e in enumerate(flat.equations)}
    among = [i for i, nbytes in large.items() if nbytes > arena > 0]
    if not among:
        return ""
    some = dataclasses.replace(flat, equations=tuple(flat.equations[i] for i in among))
    axes = dict(zip(among, rules(some, parts.works, Known()), strict=True))
    in_order = [i for i in among if flat.equations[i].name in IN_ORDER]
    for i in in_order:  # they have axes, in tiles
        e = flat.equations[i]
        axes[i] = axes[i] or rule_in_order(e, flat.operand_types(e))
    i = max(among, key=lambda i: (axes[i] is None, i in in_order, large[i]))
    e = flat.equations[i]
    said = f'"{e.name}" ({e.source or "unknown line"})'
    if axes[i] is None:
        needed = format_bytes(large[i])
        return f"{said} needs {needed}, and has no axis along which to do it in parts."
    lengths = list(map(str, _lengths(flat, e, axes[i])))
    if len(lengths) > _MANY_AXES:
        counts = collections.Counter(lengths)
        lengths = [f"{n} times {length}" for length, n in counts.items()]
    return f"{CUT} (of {', '.join(lengths)}) {said} needs too much as well."


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


def has_loops_with_axes(
    flat: FlatJaxpr, arena: int, names: Collection[str] = frozenset(["scan"])
) -> bool:
    """Whether there are loops that can be done in parts without being taken apart, with
    room for what all parts read."""
    loops = tuple(e for e in flat.equations if e.name in names)
    some = dataclasses.replace(flat, equations=loops)
    of_loops = zip(loops, rules(some, parts.works, Known()), strict=True)
    return any(
        rule is not None and _least_whole_bytes(flat, e, rule) <= arena
        for e, rule in of_loops
    )


def _least_whole_bytes(flat: FlatJaxpr, e: Equation, rule: Rule) -> int:
    """Bytes of what an equation reads and writes whole, along the axis where these are
    fewest."""
    labels = (*rule.operands, *rule.results)
    sides = [
        (v, each)
        for v, each in zip((*e.inputs, *e.outputs), labels, strict=True)
        if not isinstance(v, Constant)
    ]
    along = {x for _, each in sides for x in each if x is not None}
    return min(nbytes_of(flat, {v for v, each in sides if x not in each}) for x in along)


def _may_be_cut(flat: FlatJaxpr, arena: int, where: Where, known: Known) -> bool:
    """Whether what has no axis may fit as it is."""
    axes = rules(flat, parts.works, known)
    whole = [e for e, rule in zip(flat.equations, axes, strict=True) if rule is None]
    return _may_fit(dataclasses.replace(flat, equations=tuple(whole)), arena, where)


def _joins_too_much(flat: FlatJaxpr, arena: int) -> bool:
    """Whether parts and what they are put together to take more than there is."""
    return any(
        e.ours and e.name == "concatenate" and nbytes_of(flat, touched(e)) > arena
        for e in flat.equations
    )


def _fits(flat: FlatJaxpr, arena: int, where: Where, times: int = 1) -> bool:
    """Whether what each equation reads and writes, beside what stays, is not more than so
    many times what there is."""
    most = times * arena
    return all(nbytes_of(flat, touched(e) - where.staying) <= most for e in flat.equations)


def _may_fit(flat: FlatJaxpr, arena: int, where: Where) -> bool:
    """Whether it is worth trying."""
    return _fits(flat, arena, where, times=2)
