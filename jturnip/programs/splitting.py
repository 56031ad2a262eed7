"""A flat function to tasks that fit in a budget, compiled."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jturnip import compat
from jturnip.compat import Device
from jturnip.compiler import executables as compiler
from jturnip.compiler.report import Spent
from jturnip.errors import DoesNotFit
from jturnip.frontend.overwriting import with_overwriting
from jturnip.frontend.partition import Group, Partitioner
from jturnip.frontend.values import FlatJaxpr, nbytes_of
from jturnip.graph.taskgraph import BufferId, Place, Task, TaskGraph
from jturnip.hardware import Accelerator
from jturnip.placement import Arguments, Budget, Whose
from jturnip.planner.planner import (
    does_not_fit,
    resident_bytes,
    smallest_budget,
    task_bytes,
)
from jturnip.programs.graphs import build
from jturnip.programs.needs import Needs
from jturnip.programs.places import (
    at_home,
    bytes_at_start,
    kept,
    leaving,
    reuses,
    values_that_stay,
)
from jturnip.programs.records import Split
from jturnip.programs.setting import WAYS, Setting
from jturnip.units import padded


# A task may hold this share of the budget, where it can be cut: two can then be resident
# while the transfers of two more are under way.
_SHARE = 4
# So often tasks that XLA shows to be too large are cut once. What is too large then is cut
# finer each time: the one equation that needs most may be at its end.
_CUT_ONCE = 2
# Tasks that are expected to need more than one over so much of the budget are compiled
# first: where one of them does not fit, the others need not be compiled yet, or at all.
_HUNGRY = 2
# Where XLA finds tasks too large, and more than one in so many of all equations would be
# too large alone, no finer tasks are likely to fit: of 28 such tries, with 18 functions in
# a half to an eighth of what they need, none of 20 did, and four of eight with fewer.
_TOO_LARGE_ALONE = 10


def split(
    flat: FlatJaxpr,
    setting: Setting,
    to_host: Collection[int] = (),
    most: float = math.inf,
) -> Split:
    """Cuts a function into tasks that fit in a budget, and compiles them.

    Where an equation needs too much, that is the end, unless all is to be cut as fine as it
    can be then, and the refusal to ask for what that takes (`How.thorough`).

    Args:
      flat: the function.
      setting: what it is cut for. If it runs many times with the same arrays in host
        memory, no task writes over the device's copies of these, which may stay for the
        next run. Results that are to lie in one memory go to host memory where there is no
        room for them on the device.
      to_host: positions of results that must end in host memory.
      most: so many executables may be compiled for it.

    Raises:
      TooManyTasks: more would have to be.
      DoesNotFit: where a single equation, or the caller's own arrays, need more.
    """
    arguments, how = kept(setting.arguments, flat), setting.how
    arena = setting.arena
    there = values_that_stay(flat, arguments)
    partitioner = Partitioner(flat, setting.rates, there)
    left = arena - nbytes_of(flat, there)
    tasks = _Tasks(flat, partitioner, arguments, setting, there, left, most)
    tasks.refuse_early()
    groups = partitioner.partition(0 if how.finest else max(0, left) // _SHARE)
    staying = _not_to_be_lost(flat, arguments, how.repeated)
    while True:
        groups = with_overwriting(flat, groups, staying)
        seen = tasks.first_too_large(groups)
        if seen is None:
            graph, buffers = tasks.build(groups, to_host, how.accelerator, most)
            if smallest_budget(graph) <= arena:
                break
            seen = _Seen(groups, _too_large(graph, arena), graph)
        groups = tasks.finer(groups, seen)
    compiled = tasks.compiled
    assert compiled is not None
    least = lambda there: _least_when_cut(flat, partitioner, arguments, graph, arena, there)
    away = leaving(flat, arguments, to_host, how.returned, arena, least)
    to_host = away.union(to_host)
    to_host |= at_home(flat, arguments, to_host)
    if away:
        graph, buffers = build(flat, groups, arguments, compiled, to_host, how.accelerator)
    return Split(
        flat=flat,
        groups=tuple(groups),
        graph=graph,
        executables=compiled.executables,
        numbers=compiled.numbers,
        compile_report=compiled.report,
        arguments=arguments,
        buffers=buffers,
        reuses=reuses(flat, arguments, to_host),
        to_host=to_host,
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """Some tasks, and which of them need too much: by XLA's figures, or where there are
    none yet by what they read and write."""

    groups: Sequence[Group]
    too_large: Sequence[int]
    graph: TaskGraph | None


class _Tasks:
    """Compiles tasks of one function, which is cut in one way after the other until all
    fit.

    Args:
      flat: the function.
      partitioner: of it.
      arguments: of it.
      setting: what it is cut for.
      there: what is on the device all the time.
      left: bytes beside that.
      most: so many executables may be compiled.
    """

    def __init__(
        self,
        flat: FlatJaxpr,
        partitioner: Partitioner,
        arguments: Arguments,
        setting: Setting,
        there: Collection[int],
        left: int,
        most: float,
    ):
        self._flat = flat
        self._partitioner = partitioner
        self._arguments = arguments
        self._setting = setting
        self._there = there
        self._left = left
        self._most = most
        # What is known to need too much; None where all is to be cut as fine as it can be
        # before it is refused.
        how = setting.how
        self._needs: Needs | None = None if how.thorough else how.needs
        self.compiled: compiler.Compiled | None = None
        # How often tasks were cut: by whether XLA's figures showed that, and for all.
        self._rounds = collections.Counter[tuple[bool, bool]]()

    def build(
        self,
        groups: Sequence[Group],
        to_host: Collection[int] = (),
        accelerator: Accelerator | None = None,
        most: float = math.inf,
    ) -> tuple[TaskGraph, dict[int, BufferId]]:
        """Some tasks as `graphs.build` gives them, compiled; in all no more executables
        than so many."""
        how = self._setting.how
        self.compiled = _compile(
            self._flat, groups, self._arguments, self.compiled, most, how.spent
        )
        how.executables.extend(self.compiled.executables)
        asked = self._flat, groups, self._arguments, self.compiled
        return build(*asked, to_host, accelerator)

    def first_too_large(self, groups: Sequence[Group]) -> _Seen | None:
        """Tasks that need too much, if that shows before all are compiled: by what they
        read and write, else among those that are expected to need most."""
        if self._needs is None:
            return None
        too_large = _too_large_as_read(self._flat, groups, self._there, self._left)
        if too_large:
            return _Seen(groups, too_large, None)
        arena = self._setting.arena
        hungry = self._partitioner.hungriest(groups, arena // _HUNGRY)
        if not 0 < len(hungry) < len(groups):
            return None
        graph, _ = self.build(hungry, most=self._most)
        too_large = _too_large(graph, arena)
        return _Seen(hungry, too_large, graph) if too_large else None

    def finer(self, groups: Sequence[Group], seen: _Seen) -> list[Group]:
        """The tasks with those cut that need too much.

        Raises:
          DoesNotFit: they cannot be cut, or that is not likely to help.
        """
        too_large = [seen.groups[t] for t in seen.too_large]
        by_xla, of_all = seen.graph is not None, len(seen.groups) == len(groups)
        self._rounds[by_xla, of_all] += 1
        cuts = max(1, self._rounds[by_xla, of_all] - _CUT_ONCE + 1)
        ids = set(map(id, too_large))
        at = [t for t, group in enumerate(groups) if id(group) in ids]
        finer = self._partitioner.refine(groups, at, cuts)
        is_over = len(finer) == len(groups)
        if self._setting.how.hasty:
            alone = self._partitioner.too_large_alone(too_large, self._left)
            is_over |= alone * _TOO_LARGE_ALONE > len(self._flat.equations)
        if seen.graph is not None:
            self._refuse(seen.groups, seen.graph)
        if is_over:
            graph = seen.graph
            if graph is None:  # to say what they need
                graph, _ = self.build(too_large)
                self._refuse(too_large, graph)
            raise _refusal(graph, self._setting.budget, self._setting.device)
        return finer

    def _refuse(self, groups: Sequence[Group], graph: TaskGraph) -> None:
        """Refuses a function of which an equation needs too much however its task is cut,
        as XLA's figures for some of its tasks show; `needs` grows by that."""
        flat, partitioner, needs = self._flat, self._partitioner, self._needs
        budget, device = self._setting.budget, self._setting.device
        arena = self._setting.arena
        too_large, free = _too_large(graph, arena), arena - resident_bytes(graph)
        if not too_large or needs is None:
            return
        sizes = {t: task_bytes(graph, graph.tasks[t]) for t in too_large}
        neediest = (partitioner.neediest(groups[t], size) for t, size in sizes.items())
        e, least = max(neediest, key=lambda found: found[1])
        if least > free:
            refusal = _refusal(graph, budget, device)
            needs.know(flat.equations[e], least, refusal, budget)
            raise refusal
        uncut = [t for t in too_large if len(partitioner.refine([groups[t]], {0})) == 1]
        if uncut:
            t = max(uncut, key=lambda t: sizes[t])
            refusal = _refusal(graph, budget, device)
            needs.know_alone(flat, partitioner, groups[t], sizes[t], refusal, budget)
            raise refusal

    def refuse_early(self) -> None:
        """Refuses what is known to need too much; and a hopeless budget after compiling the
        largest equations only. `needs` grows by the largest of all: they are not compiled
        again where it is in the way in another form of the function."""
        flat, partitioner, needs = self._flat, self._partitioner, self._needs
        budget, device, left = self._setting.budget, self._setting.device, self._left
        smallest = lambda: _finest(flat, partitioner, self._arguments)
        if needs is not None:
            needs.refuse(flat, partitioner, budget, left, smallest)
        arena, at_start = self._setting.arena, bytes_at_start(flat, self._arguments)
        # Whatever its tasks need.
        surely = at_start > arena or (needs is not None and _joins_too_much(flat, left))
        if partitioner.least_bytes() <= left and not surely:
            return
        finest = smallest()
        bare, _ = build(flat, finest, self._arguments)
        if smallest_budget(bare) <= arena:
            return
        if surely:
            raise _refusal(bare, budget, device)
        sizes = [task_bytes(bare, t) for t in bare.tasks]
        # Workspace adds to what a task needs: the hungriest with it is likely among these.
        most = max(sizes)
        hungry = [g for g, size in zip(finest, sizes, strict=True) if size * 3 >= most]
        graph, _ = self.build(hungry)
        refusal = _refusal(graph, budget, device)
        if needs is not None:
            sizes = [task_bytes(graph, task) for task in graph.tasks]
            group, nbytes = max(zip(hungry, sizes, strict=True), key=lambda each: each[1])
            needs.know_alone(flat, partitioner, group, nbytes, refusal, budget)
        raise refusal


def refuse_alone(flat: FlatJaxpr, setting: Setting, among: Collection[int]) -> None:
    """Refuses a function with an equation that needs too much by itself, whatever is done
    with the others, as XLA's figures show.

    In a task with the equations that make what it reads, XLA may never write that down: so
    it counts only what is read of arguments and the like, and what is made.

    Args:
      flat: the function.
      setting: what it is cut for.
      among: the equations that are looked at, if they are expected to need much.

    Raises:
      DoesNotFit: with what the one needs that needs most.
    """
    arguments, how = kept(setting.arguments, flat), setting.how
    if how.thorough or not among:
        return
    there = values_that_stay(flat, arguments)
    partitioner = Partitioner(flat, setting.rates, there)
    finest = _finest(flat, partitioner, arguments, how.repeated)
    alone = [group for group in finest if partitioner.only(group) in among]
    alone = partitioner.hungriest(alone, setting.arena // _HUNGRY)
    if not alone:
        return
    compiled = _compile(flat, alone, arguments, spent=how.spent)
    how.executables.extend(compiled.executables)
    graph, _ = build(flat, alone, arguments, compiled)
    free = setting.arena - resident_bytes(graph)
    made = {v for e in flat.equations for v in e.outputs}
    for group, task in zip(alone, graph.tasks, strict=True):
        e = partitioner.only(group)
        of_others = made.intersection(flat.equations[e].reads)
        hidden = nbytes_of(flat, of_others)
        _, least = partitioner.neediest(group, task_bytes(graph, task))
        if least - hidden > free:
            raise _refusal(graph, setting.budget, setting.device)


def are_in_the_way(flat: FlatJaxpr, setting: Setting, among: Collection[int]) -> bool:
    """Whether some equations, which are as they are in whatever way a function is cut, are
    known to be too large by what was compiled before: then no way is likely to fit. Where
    all ways are looked for (`How.every_way`), only what is too large whatever it writes
    over counts: then none does."""
    arguments, how = kept(setting.arguments, flat), setting.how
    if how.thorough or not among:
        return False
    there = values_that_stay(flat, arguments)
    partitioner = Partitioner(flat, setting.rates, there)
    left = setting.arena - nbytes_of(flat, there)

    def finest() -> list[Group]:
        every = how.every_way
        return [] if every else _finest(flat, partitioner, arguments, how.repeated)

    try:
        how.needs.refuse(flat, partitioner, setting.budget, left, finest, among)
    except DoesNotFit:
        if not how.every_way:
            how.left_out.add(WAYS)
        return True
    return False


def with_resident(split: Split, chosen: Collection[BufferId]) -> Split:
    """The same with more arrays in host memory that are on the device while it runs again
    and again, since they are the same each time.

    Args:
      split: what runs.
      chosen: of `same_each_time`.
    """
    there = frozenset(chosen)
    buffers = tuple(
        dataclasses.replace(b, start=Place.DEVICE, pinned=True) if b.id in there else b
        for b in split.graph.buffers
    )
    graph = dataclasses.replace(split.graph, buffers=buffers)
    return dataclasses.replace(split, graph=graph, resident=(*split.resident, *chosen))


def spread(split: Split, room: int, choice: Collection[BufferId]) -> tuple[BufferId, ...]:
    """Some of the buffers that may be on the device while it runs again and again.

    As many bytes as there is room for, spread evenly over the order in which they are first
    read, so that the link has always something to do; the first is among them, so that
    nothing waits when a run begins.

    Args:
      split: what runs.
      room: bytes for them.
      choice: of `same_each_time`, in its order.
    """
    sizes = [padded(split.graph.buffers[b].nbytes) for b in choice]
    return tuple(itertools.compress(choice, spread_evenly(sizes, room)))


def spread_evenly(sizes: Sequence[int], room: int) -> list[bool]:
    """Which of some sizes there is room for, spread evenly over their order, the first
    among them."""
    total = sum(sizes)
    share = min(1.0, room / total) if total else 0.0
    chosen: list[bool] = []
    due, taken = 1.0, 0
    for size in sizes:
        due += share * size
        chosen.append(taken + size <= room and taken < due)
        taken += size * chosen[-1]
    return chosen


def same_each_time(split: Split, not_these: Collection[int]) -> list[BufferId]:
    """Buffers in host memory that may be the same in each run, in the order in which they
    are first read.

    Args:
      split: what runs.
      not_these: positions of arguments that are not.

    Returns:
      None that is given up, made for one call, or written over.
    """
    flat, graph = split.flat, split.graph
    held = enumerate(zip(flat.inputs, split.arguments.whose, strict=True))
    lost = {v for at, (v, w) in held if w.donated or w.ours or at in not_these}
    lost.update(s.value for s in flat.slices if s.source in lost)
    lost_buffers = {split.buffers[v] for v in lost if v in split.buffers}
    lost_buffers.update(b for task in graph.tasks for b in task.overwritten)
    read = dict.fromkeys(b for task in graph.tasks for b in task.inputs)
    on_host = [b for b in read if graph.buffers[b].start is Place.HOST]
    return [b for b in on_host if b not in lost_buffers]


def _not_to_be_lost(
    flat: FlatJaxpr, arguments: Arguments, repeated: bool
) -> frozenset[int]:
    """Values that no task may write over: they are the caller's, or for the next run."""
    given, same = zip(flat.inputs, arguments.whose, strict=True), Whose.CALLER_HOST
    staying = {v for v, w in given if w is Whose.CALLER_DEVICE or (repeated and w is same)}
    staying.update(v for v, _ in flat.constants)
    if repeated:
        staying.update(s.value for s in flat.slices)
    return frozenset(staying)


def _finest(
    flat: FlatJaxpr,
    partitioner: Partitioner,
    arguments: Arguments,
    repeated: bool = False,
) -> list[Group]:
    """The smallest tasks there can be, in a single run or one of many."""
    staying = _not_to_be_lost(flat, arguments, repeated)
    return with_overwriting(flat, partitioner.partition(0), staying)


def _least_bytes(graph: TaskGraph, there: Collection[BufferId]) -> int:
    """What a plan needs at least if some more buffers are on the device all the time."""
    bytes_of = [padded(b.nbytes) for b in graph.buffers]
    staying = {b.id for b in graph.buffers if b.pinned}.union(there)

    def needed(task: Task) -> int:
        # What stays cannot be written over: the result has bytes of its own then.
        kept = [task.outputs[o] for o, i in task.overwrites if task.inputs[i] in staying]
        used = (*task.inputs, *task.new, *kept)
        return padded(task.workspace) + sum(bytes_of[b] for b in used if b not in staying)

    largest = max(map(needed, graph.tasks), default=0)
    return sum(bytes_of[b] for b in staying) + largest


def _least_when_cut(
    flat: FlatJaxpr,
    partitioner: Partitioner,
    arguments: Arguments,
    graph: TaskGraph,
    arena: int,
    there: Collection[BufferId],
) -> int:
    """What a plan needs at least if some more buffers are on the device all the time, and
    tasks are cut as fine as that takes."""
    least = _least_bytes(graph, there)
    if least <= arena:
        return least
    finest, _ = build(flat, _finest(flat, partitioner, arguments), arguments)
    workspace = max((padded(t.workspace) for t in graph.tasks), default=0)
    return min(least, _least_bytes(finest, there) + workspace)


def _too_large(graph: TaskGraph, arena: int) -> list[int]:
    """Tasks that need more than there is, beside what is on the device all the time."""
    free = arena - resident_bytes(graph)
    return [t for t, task in enumerate(graph.tasks) if task_bytes(graph, task) > free]


def _too_large_as_read(
    flat: FlatJaxpr, groups: Sequence[Group], there: Collection[int], left: int
) -> list[int]:
    """Tasks that read and write more than is left beside what is there all the time."""

    def nbytes(group: Group) -> int:
        over = {o for o, _ in group.overwrites}
        new = (v for o, v in enumerate(group.outputs) if o not in over)
        read = (v for v in group.inputs if v not in there)
        return nbytes_of(flat, [*read, *new])

    return [t for t, group in enumerate(groups) if nbytes(group) > left]


def _joins_too_much(flat: FlatJaxpr, left: int) -> bool:
    """Whether a result takes more than is left, and parts are put together on the device to
    more than that as well. It takes XLA seconds to compile that, and shows nothing else."""
    nbytes = lambda values: max((padded(flat.types[v].nbytes) for v in values), default=0)
    results = {o for o in flat.outputs if isinstance(o, int)}.difference(flat.inputs)
    joins = (e for e in flat.equations if e.name == "concatenate" and e.ours)
    joined = (e.outputs[0] for e in joins)
    return nbytes(results) > left and nbytes(joined) > left


def _refusal(graph: TaskGraph, budget: Budget, device: Device) -> DoesNotFit:
    """The planner's error in terms of the budget that the user gives."""
    arena = smallest_budget(graph)
    needed = budget.needed(arena, device)
    reserve = needed - arena - budget.taken
    return does_not_fit(graph, budget.gpu_bytes, needed, reserve, budget.taken)


def _compile(
    flat: FlatJaxpr,
    groups: Sequence[Group],
    arguments: Arguments,
    earlier: compiler.Compiled | None = None,
    most: float = math.inf,
    spent: Spent | None = None,
) -> compiler.Compiled:
    device = arguments.device if arguments.committed else None
    how = compiler.How(device, compat.trace_context(), arguments.compiler_options)
    return compiler.compile_groups(flat, groups, how, earlier, most, spent)
