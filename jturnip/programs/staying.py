"""Which arrays in host memory stay on the device between runs of the same program: what may
be tried.

A program may be tasks under one plan, or a chain of pieces in which what stays for one is
beside the others while they run.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jturnip.graph.taskgraph import BufferId, TaskId
from jturnip.placement import Whose
from jturnip.planner import figures
from jturnip.planner.planner import resident_bytes, smallest_budget, task_bytes
from jturnip.programs.records import (
    Chain,
    Choice,
    KeptParts,
    Loop,
    Part,
    Program,
    Straight,
    as_read,
    kept_by_stage,
)
from jturnip.programs.splitting import same_each_time, spread, with_resident
from jturnip.units import padded


# What is not kept between runs goes through at least this share of the budget, or less if
# that is predicted to be better.
_STREAMED = 4
# With more tasks than so many, only one other plan is made.
_SOME_TASKS = 1000

# Where tasks are in a program: nothing for all of it; the number of a stage, and of its
# branch.
At: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reader:
    """Tasks of a program, with arrays that may stay between runs."""

    # As it is planned for one run.
    before: Straight
    # Device bytes that others take while it runs.
    beside: int
    # Buffers that may stay, in the order in which they are first read.
    choice: tuple[BufferId, ...]
    # What names a part that it reads by the value of the chain.
    outside: Callable[[Part], Part] = lambda part: part

    @property
    def choice_bytes(self) -> int:
        """Device bytes of all that may stay."""
        buffers = self.before.split.graph.buffers
        return sum(padded(buffers[b].nbytes) for b in self.choice)

    def needs(self) -> tuple[int, int]:
        """Device bytes that are taken while it runs, beside what stays and its tasks; and
        that the largest of its tasks needs beside all that is there."""
        graph = self.before.split.graph
        there = resident_bytes(graph)
        taken = self.beside + there - device_bytes(self.before.kept_parts)
        return taken, smallest_budget(graph) - there

    def keeping(self, chosen: Collection[BufferId]) -> Straight:
        """The same, not yet planned again, with some of its choice on the device."""
        split = with_resident(self.before.split, chosen)
        return dataclasses.replace(self.before, split=split)

    def kept(self, made: Straight) -> KeptParts:
        """What stays for it, by the values of the chain."""
        return {self.outside(part): n for part, n in made.kept_parts.items()}


@dataclass(frozen=True)
class Way:
    """What stays between runs."""

    readers: Mapping[At, Reader]
    # Tasks that are to be planned again, with what stays for them.
    tasks: Mapping[At, Straight]
    # What loops keep anyway while they run.
    loops: Mapping[At, KeptParts]

    @functools.cached_property
    def by_part(self) -> dict[At, KeptParts]:
        """What stays for each of them."""
        tasks = {at: self.readers[at].kept(made) for at, made in self.tasks.items()}
        return {**tasks, **self.loops}

    @functools.cached_property
    def all(self) -> KeptParts:
        """All that stays; stages share copies."""
        return {part: n for kept in self.by_part.values() for part, n in kept.items()}

    def beside(self, at: At) -> int:
        """Device bytes of what stays for others than this one."""
        return device_bytes(self.all) - device_bytes(self.by_part.get(at, {}))


def ways(
    program: Straight | Chain,
    readers: Mapping[At, Reader],
    room: int,
    arena: int,
    not_these: Collection[int],
) -> Iterator[Way]:
    """What may stay: what loops keep while they run, for all stages that read it; or else
    some of what the tasks read, more of it first.

    Args:
      program: of one run.
      readers: its tasks.
      room: device bytes for what stays.
      arena: device bytes for all.
      not_these: positions of arguments that are not the same each time.
    """
    if isinstance(program, Straight):
        yield from _spread(readers, room, arena)
        return
    most = _most_of_others(program, readers)
    loops = _kept_by_loops(program, not_these)
    if loops:
        way = Way(readers, _sharing(readers, loops), loops)
        fits = all(nbytes + way.beside(at) <= arena for at, nbytes in most.items())
        if fits and device_bytes(way.all) <= room:
            yield way
    yield from _spread(readers, min(room, arena - max(most.values(), default=0)), arena)


def _kept_by_loops(chain: Chain, not_these: Collection[int]) -> dict[At, KeptParts]:
    """What loops keep while they run, if it may be the same in each run of the chain."""
    same = _same_values(chain, not_these)
    loops = {
        (at,): kept_by_stage(stage)
        for at, stage in enumerate(chain.stages)
        if isinstance(stage.program, Loop)
    }
    return {
        at: kept for at, kept in loops.items() if kept and all(v in same for v, _ in kept)
    }


def _sharing(
    readers: Mapping[At, Reader], loops: Mapping[At, KeptParts]
) -> dict[At, Straight]:
    """Tasks that find on the device what loops keep there."""
    kept = {part for of_loop in loops.values() for part in of_loop}
    return {at: reader.before for at, reader in _finding(readers, kept).items()}


def _finding(readers: Mapping[At, Reader], kept: Collection[Part]) -> dict[At, Reader]:
    """The same where the tasks find these on the device in any case."""
    found: dict[At, Reader] = {}
    for at, reader in readers.items():
        starts = reader.before.split.starts
        chosen: dict[bool, list[BufferId]] = {True: [], False: []}
        for b in reader.choice:
            chosen[reader.outside(starts[b]) in kept].append(b)
        before = reader.keeping(chosen[True])
        found[at] = dataclasses.replace(reader, before=before, choice=tuple(chosen[False]))
    return found


def _spread(readers: Mapping[At, Reader], most: int, arena: int) -> Iterator[Way]:
    """Tasks that find some of what they read on the device, no more than `most` bytes: what
    the largest read first, where there is room for more then, since the others need less
    beside it; and spread evenly over all."""
    if not any(reader.choice for reader in readers.values()):
        return
    kinds = [readers, *_with_largest(readers, most)]
    firm = [device_bytes(_kept(kind)) for kind in kinds]
    needs = [[reader.needs() for reader in kind.values()] for kind in kinds]
    many = sum(len(r.before.split.graph.tasks) for r in readers.values()) > _SOME_TASKS
    tried: list[KeptParts] = []
    for reserve in _reserves(arena):
        rooms = [
            min(most, *(arena - taken - reserve(largest) for taken, largest in of))
            for of in needs
        ]
        fit = [n for n, room in enumerate(rooms) if firm[n] <= room]
        best = max(fit, key=rooms.__getitem__, default=0)  # the first of equal ones
        for n in dict.fromkeys((best, 0)):
            if rooms[n] <= 0:
                continue
            way = Way(readers, _dividing(kinds[n], rooms[n]), {})
            if way.all and way.all not in tried:
                tried.append(way.all)
                yield way
            if many:
                return


def _reserves(arena: int) -> tuple[Callable[[int], int], ...]:
    """How much of what there is may be left for what does not stay, of what the largest
    task needs."""
    return (
        lambda largest: largest * 5 // 4,
        lambda largest: largest * 2,
        lambda largest: max(largest * 2, arena // _STREAMED),
        lambda largest: largest,
    )


def rooms_beside(program: Straight | Chain, arena: int) -> list[int]:
    """Device bytes that may stay between runs of a program beside what it needs: for some
    amounts of room for what does not stay, the largest first.

    Args:
      program: of one run, without what may stay.
      arena: device bytes for all.
    """
    readers = readers_of(program, frozenset())
    others = max(_most_of_others(program, readers).values(), default=0)
    needs = [reader.needs() for reader in readers.values()]
    rooms = {
        min([arena - others, *(arena - taken - reserve(most) for taken, most in needs)])
        for reserve in _reserves(arena)
    }
    return sorted((room for room in rooms if room > 0), reverse=True)


def _most_of_others(chain: Straight | Chain, readers: Collection[At]) -> dict[At, int]:
    """Of what is left as it is in a chain, what there may be on the device meanwhile,
    whatever the order of the ops."""
    if isinstance(chain, Straight):
        return {}
    return {
        at: figures.most_bytes(made.plan) + beside
        for at, (made, beside, _) in pieces_of(chain).items()
        if at not in readers
    }


def _with_largest(readers: Mapping[At, Reader], most: int) -> Iterator[dict[At, Reader]]:
    """The same where one, two, four and so on of the largest tasks find what they read on
    the device if it may stay there, as long as that is no more than `most` bytes."""
    needs: list[tuple[int, At, TaskId]] = []
    for at, reader in readers.items():
        graph = reader.before.split.graph
        beside = reader.beside + resident_bytes(graph)
        needs += [(beside + task_bytes(graph, t), at, t.id) for t in graph.tasks]
    needs.sort(key=lambda need: -need[0])
    choices = {at: frozenset(reader.choice) for at, reader in readers.items()}
    kept: set[Part] = set()
    number = 1
    while number <= len(needs):
        for _, at, task in needs[number // 2 : number]:
            reader = readers[at]
            read = reader.before.split.graph.tasks[task].inputs
            names = reader.before.split.starts
            kept |= {reader.outside(names[b]) for b in read if b in choices[at]}
        found = _finding(readers, kept)
        if device_bytes(_kept(found)) > most:
            return
        if kept:
            yield found
        number *= 2


def _kept(readers: Mapping[At, Reader]) -> KeptParts:
    """What they find on the device in any case, which they may share."""
    kept: KeptParts = {}
    for reader in readers.values():
        kept.update(reader.kept(reader.before))
    return kept


def _dividing(readers: Mapping[At, Reader], room: int) -> dict[At, Straight]:
    """Tasks that find some of what they read on the device, beside what they find there in
    any case, in so many bytes. Of what is left each has a share: a branch less, since it
    runs less often."""
    branches = Counter(at[:1] for at in readers)
    shares = {at: reader.choice_bytes / branches[at[:1]] for at, reader in readers.items()}
    total = sum(shares.values()) or 1
    room -= device_bytes(_kept(readers))
    owns = {at: int(room * share / total) for at, share in shares.items()}
    tasks: dict[At, Straight] = {}
    left_over = 0
    # What one part leaves of its share the others may have, and what runs each time last.
    order = sorted(readers, key=len, reverse=True)
    for at in (*order, *order):
        own, reader = owns[at] + left_over, readers[at]
        tasks[at] = reader.keeping(spread(reader.before.split, own, reader.choice))
        firm = device_bytes(reader.before.kept_parts)
        owns[at] = device_bytes(tasks[at].kept_parts) - firm
        left_over = own - owns[at]
    return tasks


def readers_of(program: Straight | Chain, not_these: frozenset[int]) -> dict[At, Reader]:
    """The tasks that can be planned beside what stays."""
    if isinstance(program, Straight):
        return {(): Reader(program, 0, tuple(same_each_time(program.split, not_these)))}
    same = _same_values(program, not_these)
    found: dict[At, Reader] = {}
    for at, (made, beside, reads) in pieces_of(program).items():
        if isinstance(made, Straight):
            others = [i for i, v in enumerate(reads) if v not in same]
            choice = tuple(same_each_time(made.split, others))
            found[at] = Reader(made, beside, choice)
            if len(at) > 1:  # the values of a branch are its own
                outside = as_read(made.flat, reads)
                found[at] = dataclasses.replace(found[at], outside=outside)
    return found


def pieces_of(chain: Chain) -> dict[At, tuple[Program, int, tuple[int, ...]]]:
    """What the stages of a chain run, branch by branch; the device bytes that others take
    meanwhile, and the chain's values that it reads."""
    found: dict[At, tuple[Program, int, tuple[int, ...]]] = {}
    for at, stage in enumerate(chain.stages):
        choice = stage.program
        if not isinstance(choice, Choice):
            found[at,] = choice, stage.waiting, stage.reads
            continue
        taken = [stage.waiting + choice.number + nbytes for nbytes in choice.beside]
        branches = zip(choice.branches, taken, strict=True)
        for b, (made, beside) in enumerate(branches):
            found[at, b] = made, beside, stage.reads[1:]
    return found


def _same_values(chain: Chain, not_these: Collection[int]) -> frozenset[int]:
    """The arguments of a chain that may be the same in each run."""
    held = enumerate(zip(chain.flat.inputs, chain.arguments.whose, strict=True))
    same = (v for i, (v, w) in held if w is Whose.CALLER_HOST and i not in not_these)
    return frozenset(same)


def device_bytes(kept: KeptParts) -> int:
    return sum(map(padded, kept.values()))
