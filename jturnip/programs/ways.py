"""One plan for all tasks of a function, cut in the fastest of some ways."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jturnip.compiler.executables import TooManyTasks
from jturnip.errors import DoesNotFit, PlanningError
from jturnip.frontend import costs, parts
from jturnip.frontend.axes import rules
from jturnip.frontend.blocks import (
    Ways,
    are_blocks,
    cut_along_axes,
    has_loops_with_axes,
    ways_in_tiles,
)
from jturnip.frontend.costs import DeviceRates
from jturnip.frontend.effort import Effort, Sofar
from jturnip.frontend.loops import LOOPS_AND_BRANCHES
from jturnip.frontend.materializing import Again
from jturnip.frontend.values import FlatJaxpr, called, nbytes_of
from jturnip.graph.plan import Plan
from jturnip.graph.taskgraph import TaskGraph
from jturnip.programs import places, planning, splitting
from jturnip.programs.again import for_any_call
from jturnip.programs.records import Program, Straight
from jturnip.programs.setting import Function, Setting
from jturnip.runtime.schedule import Link


# Where a function that is cut moves more than so many times what goes in and comes out, so
# many ways to cut it are planned, of so many that are looked for after the first one, while
# together they have no more tasks than so many.
_MUCH = 4
_SOME_WAYS = 4
_MOST_WAYS = 8
_SOME_TASKS = 1000
# It is worth looking for other ways where these may take less than this share of the time.
CLEARLY = 2 / 3
# What is made anew is kept in no more equations than so many: with more, the tasks are as
# small as a launch.
_MOST_KEPT = 2000
# What has so many times the equations of another way that fits takes long to plan, and was
# not faster in any of the six functions of which several ways were compared.
_TIMES_FEWEST = 2
# Of another way than one with nothing much to gain, as many executables as of that may be
# compiled, or so many; and none of one with as many equations, that differs in the number
# of blocks.
_FEW_EXECUTABLES = 32
# XLA accesses so many times the bytes that tasks read and write where they copy a lot: 2.1
# of a network of convolutions that took three times as long as cut otherwise, 0.9 and 1.2
# of others that could not be cut much better.
_COPIES = 1.6
# Where a plan as it is takes so many times what its tasks do by themselves, so many ways to
# cut it are compared, of so many that are looked at: the first often do not fit, and others
# with smaller blocks come later.
_WAITS = 1.5
_WAYS_BESIDE = 3
_LOOKED_BESIDE = 12
# They are looked for with this share of the usual patience: thirteen that were faster were
# found with a two-hundred-and-fiftieth.
_LOOKING_BESIDE = 1 / 100
# Once one fits, no more are looked at after so many in a row that were no faster than the
# best, or did not fit.
_NO_BETTER = 2
# Nor after one that takes clearly less and moves little, of a function of more than so many
# equations: each way takes seconds to compile.
_LONG = 100
# The same where no more tasks than so many read and write much for one another: attention
# with a bias took twice as long over 39 tasks as in blocks.
_FEW_TASKS = 100
# That is expected to take this share of their time at least: three layers of convolutions
# with their activations (0.50) took 1.3 to 1.5 times as long over 82 tasks as in blocks,
# gradients of two layers of attention over a graph (0.38 to 0.42) 1.7 times over 31.
# Training steps of a small Llama, of convolutions and of an autoencoder (0.26 to 0.35) took
# as long in blocks as over tasks, and to compare them was most of what their first results
# took.
_OF_COMPUTING = 0.37
# What is cut so that less is written down gives no more than this share of the bytes: of a
# projection of an image from many sides only what is put together was cut at first, two
# equations of 140, and no other way was looked at after two that were no faster.
_WRITE_LESS = 0.8
# What goes in and comes out moves so many times if only borders of tiles move twice: of
# nine fields of 192 rows, 1.5 times in a half, where other ways moved six times as much.
_WITH_BORDERS = 1.6
# Tiles that move more are taken at once only if a plan takes no more than so many times
# what its tasks do by themselves: a scan by halves that did not fit took 1.6 to 3.9 times,
# and five times what it takes as it is; convolutions and their gradients at most 1.3.
_HARDLY_WAITS = 1.35
# Where blocks have few positions, and what is cut so takes so many seconds, other ways are
# compared: attention that was left four to eight rows of its scores at a time took 4 and 11
# times as long as over tasks in which its keys are cut, too. Those of so many times the
# equations took long to plan, and were not faster.
_LONG_IN_BLOCKS = 0.05
_TIMES_THIN = 32
# Where tiles along all dimensions are more tasks than so many, ways with one over so many
# of their equations are compared, though nothing waits: attention over 1,358 tasks took
# seven times as long as over 8, which were not looked at.
_MANY_TILES = 200
_TIMES_FEWER = 4
# So many ways are looked at for one in which nothing moves twice.
_FIRST_WAYS = 8


def straight(
    flat: FlatJaxpr,
    setting: Setting,
    to_host: Collection[int],
    most: float = math.inf,
) -> Straight:
    """One plan for all tasks, for which so many executables may be compiled."""
    how = setting.how
    how.effort.made_tasks(len(flat.equations))
    split = splitting.split(flat, setting, to_host, most)
    if how.trials is not None:
        split = planning.measure(split, how.trials)
    return planning.planned(split, setting.budget, how)


def in_fastest_way(flat: FlatJaxpr, setting: Setting, to_host: Collection[int]) -> Straight:
    """One plan for all tasks, with large stretches cut in the first way that fits; where
    that moves much, or makes something anew, in the fastest of some, as predicted."""
    how = setting.how
    make = lambda cut, *most: straight(cut, setting, to_host, *most)
    # With other results in host memory what was found before is the first to be tried.
    key = "cut", id(flat), setting
    if key in how.known:
        with contextlib.suppress(DoesNotFit):
            return make(how.known[key][-1])
    uncut = _uncut_loops(flat, setting)
    splitting.refuse_alone(flat, setting, uncut)
    hopeless = functools.partial(splitting.are_in_the_way, flat, setting, uncut)
    compared = _Compared(flat, make, how.any_plan, hopeless)
    if places.bytes_at_start(flat, setting.arguments) <= setting.arena:
        ways = functools.partial(_ways, flat, setting, compared.sofar)
        compared.look(ways())
        if compared.found and not how.any_plan:
            ways = functools.partial(ways, anew=False)
            compared.look_to_keep(ways, setting.link)
    if compared.found:
        made = compared.best
        how.known[key] = flat, made.flat  # the one that has the id is kept
        return made
    if not compared.refusals:  # there is no way: so it says what it needs as it is
        return make(flat)
    raise min(compared.refusals, key=lambda refusal: refusal.needed_bytes)


def or_in_blocks(
    made: Program, function: Function, setting: Setting, to_host: frozenset[int]
) -> Program:
    """A program of few tasks that wait for what is moved, or write down much for one
    another, or of scans that were taken apart; or one of the same function with what is
    between arguments and results done in blocks, so that it need not be moved or written
    down, or with scans cut along their axes instead, if that is predicted to be faster.

    Args:
      made: of the other arguments, as for `make_program`.
    """
    how = setting.how
    if not isinstance(made, Straight) or not how.compares_ways or not how.axes:
        return made
    # What each iteration of a loop moves twice it had better move once.
    times = _WITH_BORDERS if how.repeated else _MUCH
    may_gain = waits(made) and not moves_little(made.plan, made.flat, times)
    only_writes = not may_gain
    may_gain |= _writes_down_much(made, setting.rates)
    if len(made.split.graph.tasks) > _SOME_TASKS:
        return made
    if not (may_gain or _has_bodies(function.closed)):
        return made
    flat = function.flat(setting.seen())
    loops = _loops(flat)
    apart = bool(loops - _loops(made.flat))  # parts of a loop have all its iterations
    scans = apart and has_loops_with_axes(flat, setting.arena)
    if not (scans or (may_gain and not loops)):
        return made
    sofar, effort = Sofar(fits=True), Effort(patience=_LOOKING_BESIDE)
    setting = setting.otherwise(effort=effort)
    # Over more tasks it would be moved as well, but data that does not fit may be read once
    # in each iteration.
    most = math.inf if scans or how.repeated else len(flat.equations)
    same = len(made.flat.equations)  # as it is made already
    less = _WRITE_LESS * _written_bytes(flat) if only_writes and not scans else math.inf

    def is_worth_it(cut: FlatJaxpr) -> bool:
        return same != len(cut.equations) <= most and _written_bytes(cut) <= less

    others = (
        list(filter(is_worth_it, ways.cut)) if not ways.doubtful else []
        for ways in _ways(flat, setting, sofar)
        if not (ways.in_tiles or ways.in_grids)
    )

    def make(cut: FlatJaxpr) -> Straight:
        return for_any_call(functools.partial(straight, cut, setting), setting, to_host)

    enough = CLEARLY if len(flat.equations) > _LONG else 0.0
    found = _or_faster(made, others, make, sofar, enough)
    how.effort.looked_at(effort.equations)
    return found


def _or_faster(
    made: Straight,
    others: Iterator[Sequence[FlatJaxpr]],
    make: Callable[[FlatJaxpr], Straight],
    sofar: Sofar,
    enough: float = 0.0,
) -> Straight:
    """What is made, or the fastest of some of its function in other ways.

    Args:
      made: a plan for the function.
      others: the function in other ways, some of which come together.
      make: makes a plan for one, or raises.
      sofar: is told by how much blocks were too large.
      enough: the search ends with one that takes less than this share of the time and moves
        little; 0 for never.
    """
    seconds = enough * made.plan.predicted_seconds
    found, no_better = [made], 0
    for together in itertools.islice(others, _LOOKED_BESIDE):
        times: list[float] = []
        before = len(found)
        for cut in together:
            no_better += 1
            try:
                found.append(make(cut))
            except DoesNotFit as error:
                if are_blocks(error.task):
                    times.append(error.needed_bytes / error.gpu_bytes)
            except PlanningError:
                pass
            else:
                if _fastest(found) is found[-1]:
                    no_better = 0
        if times and len(found) == before:
            sofar.times = min(times)
        beside, best = len(found) - 1, _fastest(found)
        if beside >= _WAYS_BESIDE or (beside and no_better >= _NO_BETTER):
            break
        if best.plan.predicted_seconds < seconds and moves_little(best.plan, best.flat):
            break
    return _fastest(found)


def or_in_tiles(
    made: Program, function: Function, setting: Setting, to_host: frozenset[int]
) -> Program:
    """A program of tasks that move much; or one of the same function in which what windows
    slide over is done in tiles, if that is predicted to be faster.

    Args:
      made: of the other arguments, as for `make_program`.
    """
    if not isinstance(made, Straight) or not setting.how.compares_ways:
        return made
    if moves_little(made.plan, made.flat):
        return made
    for ways in _in_tiles(function.flat(setting.seen()), setting):
        with contextlib.suppress(PlanningError):
            return _fastest([made, _of_tiles(ways, setting, to_host)])
    return made


def surely_in_tiles(
    flat: FlatJaxpr, setting: Setting, to_host: frozenset[int]
) -> Straight | None:
    """One plan for all tasks, with what windows slide over done in tiles, where that is all
    that does not fit, and nothing but borders moves twice, or hardly anything waits for
    what moves; None where there is no such plan, and another may be faster.

    Few tasks that are alike compile in a part of the time of many that are not.
    """
    if not setting.how.is_free or not setting.how.axes:
        return None
    for ways in _in_tiles(flat, setting):
        if not ways.in_all:
            continue
        with contextlib.suppress(PlanningError):
            made = _of_tiles(ways, setting, to_host)
            once = moves_little(made.plan, flat, _WITH_BORDERS)
            will_do = once or setting.how.any_plan or not waits(made, _HARDLY_WAITS)
            return made if will_do else None
    return None


def _of_tiles(ways: Ways, setting: Setting, to_host: frozenset[int]) -> Straight:
    (cut,) = ways.cut
    make = functools.partial(straight, cut, setting)
    return for_any_call(make, setting, to_host)


def _in_tiles(flat: FlatJaxpr, setting: Setting) -> Iterator[Ways]:
    where = places.where(flat, setting.arguments)
    arena = setting.arena - nbytes_of(flat, where.staying)
    if arena > 0:
        yield from ways_in_tiles(flat, where, arena, setting.seen().rules)


def moving_once(
    flat: FlatJaxpr, setting: Setting, to_host: Collection[int]
) -> Straight | None:
    """The same, in one of the first ways in which nothing moves twice, or nothing waits for
    what moves; else None."""
    if places.bytes_at_start(flat, setting.arguments) > setting.arena:
        return None
    for together in itertools.islice(_ways(flat, setting), _FIRST_WAYS):
        for cut in together.cut:
            with contextlib.suppress(DoesNotFit):
                made = straight(cut, setting, to_host)
                if moves_little(made.plan, flat, 1) or not waits(made):
                    return made
    return None


@dataclass(slots=True)
class _Compared:
    """What a function becomes in different ways to cut it."""

    flat: FlatJaxpr
    make: Callable[..., Straight]
    # Whether any plan will do.
    any_plan: bool
    # Whether what was refused shows that no way is likely to fit.
    hopeless: Callable[[], bool] = lambda: False
    found: list[Straight] = field(default_factory=list)
    # Those of `found` that the last look found.
    new: list[Straight] = field(default_factory=list)
    sofar: Sofar = field(default_factory=Sofar)
    refusals: list[DoesNotFit] = field(default_factory=list)
    # Those of which something was found.
    fit: list[Ways] = field(default_factory=list)
    # Whether others may be much faster, since they keep what those found make anew.
    gains: bool = False
    # Whether all that was found is in blocks of few positions, and takes long.
    thin: bool = False
    # What was found first, if it is in many tiles along all dimensions, and takes long.
    tiles: Straight | None = None

    @property
    def best(self) -> Straight:
        """The fastest of what was found."""
        return _fastest(self.found)

    @property
    def only_in_tiles(self) -> bool:
        """Whether nothing was found but what is in many tiles."""
        return self.tiles is not None and len(self.found) == 1

    def look(self, ways: Iterator[Ways], most: float = 0.0) -> None:
        """Makes some of these until one moves little, or takes no more than so many
        seconds, or enough is known."""
        self.new = new = []
        looked, since = 0, 0
        self.sofar.most_equations = _MOST_KEPT if self.gains else math.inf
        for together in ways:
            since, before = since + bool(new), len(new)
            if new and (together.doubtful or since > _MOST_WAYS):
                break
            fit = self._of(together)
            if not fit:
                if not self.found and self.refusals and self.hopeless():
                    break
                continue
            looked += fit
            if together.cut:
                self.fit.append(together)
            others = (made for made in new if made is not self.tiles)
            tasks = sum(len(made.split.graph.tasks) for made in others)
            enough = self.any_plan or looked >= _SOME_WAYS or tasks > _SOME_TASKS
            # What is kept is waited for, or it is best not made anew; and what is in tiles
            # along all dimensions is waited for, or no other way is better.
            in_grids = together.in_grids and len(new) > before
            is_good = together.keeps or (in_grids and not self.only_in_tiles)
            enough |= is_good and bool(new) and not waits(_fastest(new))
            if enough or any(
                made.plan.predicted_seconds <= most
                or (moves_little(made.plan, self.flat) and not self.thin)
                for made in new
            ):
                break

    def look_to_keep(self, ways: Callable[..., Iterator[Ways]], link: Link) -> None:
        """Makes some in which what is made anew in those found is kept, if that may be
        faster.

        Args:
          ways: finds them; those that `keep` what loops make anew, or all.
          link: what it takes to move what is kept.
        """
        seconds = self.best.plan.predicted_seconds
        wastes = lambda ways: _may_rather_keep(ways.again, seconds, link)
        if any(map(wastes, self.fit)):
            self.gains = True
            kept = (each for each in ways(keep=True) if not wastes(each))
            self.look(kept, most=seconds)
        elif any(each.anew for each in self.fit):
            self.look(ways())

    def _of(self, together: Ways) -> int:
        """Makes those of some ways that may be faster than what was found, which grows; how
        many fit, or need too many executables."""
        count = together.left_out if self.gains else 0
        times: list[float] = []
        for cut in together.cut:
            if self.any_plan and count:
                break
            many = len(cut.equations) > self.sofar.most_equations
            many &= not together.in_grids
            if many and not self.gains:
                continue
            most = 0 if many else self._most_executables(cut)
            if not most:
                count += 1
                continue
            try:
                made = self.make(cut, most)
            except DoesNotFit as error:
                self.refusals.append(error.with_traceback(None))
                if are_blocks(error.task):
                    times.append(error.needed_bytes / error.gpu_bytes)
                is_loop = error.task in LOOPS_AND_BRANCHES
                self.sofar.loop_is_too_large |= together.in_grids and is_loop
            except PlanningError:
                if not self.found:
                    raise
            except TooManyTasks:
                count += 1
            else:
                self._take(made, together)
                count += 1
        if times and not count:
            self.sofar.times = min(times)
        return count

    def _take(self, made: Straight, ways: Ways) -> None:
        long = made.plan.predicted_seconds > _LONG_IN_BLOCKS
        many = ways.in_grids and len(made.split.graph.tasks) > _MANY_TILES
        first = not self.found
        self.thin = ways.thin and long and (first or self.thin or self.only_in_tiles)
        self.tiles = made if first and many and long else self.tiles
        self.found.append(made)
        self.new.append(made)
        self.sofar.fits, self.sofar.waits = True, waits(self.best)
        times = _TIMES_THIN if self.thin else _TIMES_FEWEST
        times = 1 / _TIMES_FEWER if self.only_in_tiles else times
        most = times * len(made.flat.equations)
        self.sofar.most_equations = min(most, self.sofar.most_equations)

    def _most_executables(self, cut: FlatJaxpr) -> float:
        """How many executables may be compiled for another way than those found."""
        if not self.found:
            return math.inf
        if self.gains:
            known = [len(made.flat.equations) for made in self.found]
            return 0 if len(cut.equations) in known else math.inf
        best = self.best
        if self.thin or self.only_in_tiles or _has_much_to_gain(best):
            return math.inf
        if len(cut.equations) == len(best.flat.equations):
            return 0
        return max(_FEW_EXECUTABLES, len(best.split.executables))


def _fastest(found: Sequence[Straight]) -> Straight:
    return min(found, key=lambda made: made.plan.predicted_seconds)


def _may_rather_keep(again: Again | None, seconds: float, link: Link) -> bool:
    """Whether it may be faster to move what loops over blocks make anew, where that takes
    so many seconds in all."""
    if again is None:
        return False
    moving = max(
        again.read_bytes / link.h2d_bytes_per_second,
        again.written_bytes / link.d2h_bytes_per_second,
    )
    return max(moving, (1 - again.share) * seconds) < CLEARLY * seconds


def _has_much_to_gain(made: Straight) -> bool:
    """Whether a plan waits much for what it moves, or its tasks copy a lot within."""
    graph = made.split.graph
    accessed = sum(task.bytes_accessed for task in graph.tasks)
    return waits(made) or accessed > _COPIES * _crossing_bytes(graph)


def waits(made: Straight, times: float = _WAITS) -> bool:
    """Whether a plan takes more than so many times what its tasks do by themselves."""
    computing = sum(task.seconds for task in made.split.graph.tasks)
    return made.plan.predicted_seconds > times * computing


def _writes_down_much(made: Straight, expected: DeviceRates) -> bool:
    """Whether few tasks read and write many times what goes in and comes out, and that is
    much of what they do."""
    graph = made.split.graph
    if len(graph.tasks) > _FEW_TASKS:
        return False
    crossing = _crossing_bytes(graph)
    computing = sum(task.seconds for task in graph.tasks)
    is_much = crossing / expected.bytes_per_second > _OF_COMPUTING * computing
    return is_much and crossing > _MUCH * _bytes_of_ends(made.flat)


def _written_bytes(flat: FlatJaxpr) -> int:
    """What its equations give."""
    return sum(flat.types[v].nbytes for e in flat.equations for v in e.outputs)


def _crossing_bytes(graph: TaskGraph) -> int:
    """What tasks read and write, each time that they do."""
    return sum(
        graph.buffers[b].nbytes for t in graph.tasks for b in (*t.inputs, *t.outputs)
    )


def _uncut_loops(flat: FlatJaxpr, setting: Setting) -> frozenset[int]:
    """The loops and branches that are done as they are in whatever way a function is cut:
    by their place among its equations."""
    may_stay = lambda e: e.name in LOOPS_AND_BRANCHES and not (e.driven or e.effects)
    at = [i for i, e in enumerate(flat.equations) if may_stay(e)]
    loops = dataclasses.replace(flat, equations=tuple(flat.equations[i] for i in at))
    found = zip(at, rules(loops, parts.works, setting.seen().rules), strict=True)
    return frozenset(i for i, rule in found if rule is None)


def _loops(flat: FlatJaxpr) -> collections.Counter[tuple[str, Any]]:
    """The loops, branches and the like of a function, by name and length."""
    origins = (e.origin for e in flat.equations)
    return collections.Counter(
        (origin.primitive.name, origin.params.get("length"))
        for origin in origins
        if any(True for _ in costs.nested(origin))
    )


def _has_bodies(closed: Any) -> bool:
    """Whether something of a jaxpr is a loop, a branch or the like."""
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        bodies = list(costs.nested(eqn))
        if bodies and (called(eqn) is None or any(map(_has_bodies, bodies))):
            return True
    return False


def moves_little(plan: Plan, flat: FlatJaxpr, times: float = _MUCH) -> bool:
    """Whether a plan moves no more than so many times what goes in and comes out."""
    return plan.h2d_bytes + plan.d2h_bytes <= times * _bytes_of_ends(flat)


def _bytes_of_ends(flat: FlatJaxpr) -> int:
    """What goes in and comes out."""
    ends = sum(flat.types[v].nbytes for v in flat.inputs)
    return ends + sum(flat.type_of(output).nbytes for output in flat.outputs)


def _ways(
    flat: FlatJaxpr,
    setting: Setting,
    sofar: Sofar | None = None,
    anew: bool = True,
    keep: bool = False,
) -> Iterator[Ways]:
    return cut_along_axes(
        flat,
        places.where(flat, setting.arguments),
        setting.arena,
        setting.rates,
        setting.seconds_per_byte,
        anew,
        setting.how.effort,
        keep,
        sofar,
    )
