"""Programs that run again and again with the same arrays in host memory: a function that is
called many times, the body of a loop.

As many of these as there is room for stay on the device between the runs, where that is
predicted to pay.
"""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jturnip.errors import DoesNotFit, HostMemoryError
from jturnip.graph.taskgraph import BufferId
from jturnip.placement import Budget, Whose
from jturnip.planner import figures
from jturnip.planner.planner import resident_bytes, smallest_budget
from jturnip.programs.chains import together
from jturnip.programs.places import argument_bytes
from jturnip.programs.planning import planned
from jturnip.programs.records import (
    Chain,
    Choice,
    How,
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
# that is predicted to be better; of plans that take so much longer at most, the one that
# moves least.
_STREAMED = 4
_AS_FAST = 1.01
# With more tasks than so many, only one other plan is made.
_SOME_TASKS = 1000

# Where tasks are in a program: nothing for all of it; the number of a stage, and of its
# branch.
_At: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
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

    def keeping(self, chosen: Collection[BufferId]) -> Straight:
        """The same, not yet planned again, with some of its choice on the device."""
        split = with_resident(self.before.split, chosen)
        return dataclasses.replace(self.before, split=split)

    def kept(self, made: Straight) -> KeptParts:
        """What stays for it, by the values of the chain."""
        return {self.outside(part): n for part, n in made.kept_parts.items()}


@dataclass(frozen=True)
class _Way:
    """What stays between runs."""

    parts: Mapping[_At, _Part]
    # Tasks that are to be planned again, with what stays for them.
    tasks: Mapping[_At, Straight]
    # What loops keep anyway while they run.
    loops: Mapping[_At, KeptParts]

    @functools.cached_property
    def by_part(self) -> dict[_At, KeptParts]:
        """What stays for each of them."""
        tasks = {at: self.parts[at].kept(made) for at, made in self.tasks.items()}
        return {**tasks, **self.loops}

    @functools.cached_property
    def all(self) -> KeptParts:
        """All that stays; stages share copies."""
        return {part: n for kept in self.by_part.values() for part, n in kept.items()}

    def beside(self, at: _At) -> int:
        """Device bytes of what stays for others than this one."""
        return _device_bytes(self.all) - _device_bytes(self.by_part.get(at, {}))


def keeping(
    program: Program,
    budget: Budget,
    how: How,
    on_device: Collection[int] = (),
    not_these: Collection[int] = (),
) -> Program:
    """The same for runs one after the other with the same arrays in host memory: some of
    these stay on the device between runs, where that is predicted to pay.

    Args:
      program: planned for one run.
      budget: what there is, and what others take of it.
      how: the user's choices.
      on_device: positions of results that are wanted there, wherever the program has them.
      not_these: positions of arguments that are not the same each time.
    """
    if not isinstance(program, Straight | Chain) or how.any_plan:
        return program
    parts = _parts(program, frozenset(not_these))
    arena = budget.arena(program.given.device)
    room = arena - bytes_at_end(program, on_device)
    found: list[Program] = [program]
    for way in _ways(program, parts, room, arena, not_these):
        with contextlib.suppress(DoesNotFit, HostMemoryError):
            made = {at: _planned(parts[at], way, at, budget, how) for at in way.tasks}
            if any(made[at].ends_on_host != parts[at].before.ends_on_host for at in made):
                continue  # results that stayed on the device would be in host memory
            again = (
                _chain_of(program, made, way)
                if isinstance(program, Chain)
                else _with_figures(made[()], kept_bytes=sum(way.all.values()))
            )
            if again.plan.peak_bytes <= max(arena, program.plan.peak_bytes):
                found.append(again)
    fastest = min(made.plan.predicted_seconds for made in found)
    fast = [p for p in found if p.plan.predicted_seconds <= fastest * _AS_FAST]
    return min(fast, key=lambda made: made.plan.h2d_bytes + made.plan.d2h_bytes)


def _parts(program: Straight | Chain, not_these: frozenset[int]) -> dict[_At, _Part]:
    """The tasks that can be planned beside what stays."""
    if isinstance(program, Straight):
        return {(): _Part(program, 0, tuple(same_each_time(program.split, not_these)))}
    same = _same_values(program, not_these)
    parts: dict[_At, _Part] = {}
    for at, (made, beside, reads) in _pieces(program).items():
        if isinstance(made, Straight):
            others = [i for i, v in enumerate(reads) if v not in same]
            choice = tuple(same_each_time(made.split, others))
            parts[at] = _Part(made, beside, choice)
            if len(at) > 1:  # the values of a branch are its own
                outside = as_read(made.flat, reads)
                parts[at] = dataclasses.replace(parts[at], outside=outside)
    return parts


def _pieces(chain: Chain) -> dict[_At, tuple[Program, int, tuple[int, ...]]]:
    """What the stages of a chain run, branch by branch; the device bytes that others take
    meanwhile, and the chain's values that it reads."""
    found: dict[_At, tuple[Program, int, tuple[int, ...]]] = {}
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


def with_branches(
    choice: Choice, branches: Sequence[Program], kept: Sequence[int] | None = None
) -> Choice:
    """The same with other programs for its branches.

    Args:
      choice: with branches that read and write the same.
      branches: what they are to be.
      kept: device bytes of what stays for others while each of them runs.
    """
    choice = dataclasses.replace(choice, branches=tuple(branches))
    named = [(f"branch {i}", b.plan) for i, b in enumerate(branches)]
    plan = together(named, choice.plan.gpu_bytes)
    peak = max(
        b.plan.peak_bytes + choice.number + beside + others
        for b, beside, others in zip(
            branches, choice.beside, kept or [0] * len(branches), strict=True
        )
    )
    return dataclasses.replace(choice, plan=dataclasses.replace(plan, peak_bytes=peak))


def _same_values(chain: Chain, not_these: Collection[int]) -> frozenset[int]:
    """The arguments of a chain that may be the same in each run."""
    held = enumerate(zip(chain.flat.inputs, chain.arguments.whose, strict=True))
    same = (v for i, (v, w) in held if w is Whose.CALLER_HOST and i not in not_these)
    return frozenset(same)


def bytes_at_end(program: Program, on_device: Collection[int]) -> int:
    """What is on the device after a call beside what stays: what the caller has there, what
    is closed over, and results, also those that only come back after the last task.

    Args:
      program: of the call.
      on_device: positions of results that are wanted there.
    """
    if not isinstance(program, Straight | Chain):
        return 0
    flat = program.flat
    there = argument_bytes(flat, program.given, (Whose.CALLER_DEVICE,))
    there += sum(program.constants.values())
    given = set(flat.inputs)
    return there + sum(
        padded(flat.type_of(output).nbytes)
        for at, output in enumerate(flat.outputs)
        if (at not in program.to_host or at in on_device) and output not in given
    )


def _ways(
    program: Straight | Chain,
    parts: Mapping[_At, _Part],
    room: int,
    arena: int,
    not_these: Collection[int],
) -> Iterator[_Way]:
    """What may stay: what loops keep while they run, for all stages that read it; or else
    some of what the tasks read, more of it first.

    Args:
      program: of one run.
      parts: its tasks.
      room: device bytes for what stays.
      arena: device bytes for all.
      not_these: positions of arguments that are not the same each time.
    """
    if isinstance(program, Straight):
        yield from _spread(parts, room, arena)
        return
    # What there may be on the device in any order of the ops of what is left as it is.
    most = {
        at: figures.most_bytes(made.plan) + beside
        for at, (made, beside, _) in _pieces(program).items()
        if at not in parts
    }
    loops = _kept_by_loops(program, not_these)
    if loops:
        way = _Way(parts, _sharing(parts, loops), loops)
        fits = all(nbytes + way.beside(at) <= arena for at, nbytes in most.items())
        if fits and _device_bytes(way.all) <= room:
            yield way
    yield from _spread(parts, min(room, arena - max(most.values(), default=0)), arena)


def _kept_by_loops(chain: Chain, not_these: Collection[int]) -> dict[_At, KeptParts]:
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
    parts: Mapping[_At, _Part], loops: Mapping[_At, KeptParts]
) -> dict[_At, Straight]:
    """Tasks that find on the device what loops keep there."""
    kept = {part for of_loop in loops.values() for part in of_loop}
    found: dict[_At, Straight] = {}
    for at, part in parts.items():
        starts = part.before.split.starts
        found[at] = part.keeping(
            [b for b in part.choice if part.outside(starts[b]) in kept]
        )
    return found


def _spread(parts: Mapping[_At, _Part], most: int, arena: int) -> Iterator[_Way]:
    """Tasks that find some of what they read on the device, no more than `most` bytes."""
    if not any(part.choice for part in parts.values()):
        return
    graphs = {at: part.before.split.graph for at, part in parts.items()}
    # What is on the device anyway, and what the largest task has beside that.
    there = {at: resident_bytes(graph) for at, graph in graphs.items()}
    largest = {at: smallest_budget(graph) - there[at] for at, graph in graphs.items()}
    tried: list[KeptParts] = []
    for reserve in (
        lambda largest: largest * 5 // 4,
        lambda largest: largest * 2,
        lambda largest: max(largest * 2, arena // _STREAMED),
    ):
        left = (
            arena - part.beside - there[at] - reserve(largest[at])
            for at, part in parts.items()
        )
        room = min([most, *left])
        if room <= 0:
            continue
        way = _Way(parts, _dividing(parts, room), {})
        if way.all and way.all not in tried:
            tried.append(way.all)
            yield way
        if sum(len(graph.tasks) for graph in graphs.values()) > _SOME_TASKS:
            break


def _dividing(parts: Mapping[_At, _Part], room: int) -> dict[_At, Straight]:
    """Tasks that find some of what they read on the device, each a share of so many bytes:
    a branch less, since it runs less often."""
    branches = Counter(at[:1] for at in parts)
    shares = {at: part.choice_bytes / branches[at[:1]] for at, part in parts.items()}
    total = sum(shares.values())
    owns = {at: int(room * share / total) for at, share in shares.items()}
    tasks: dict[_At, Straight] = {}
    left_over = 0
    # What one part leaves of its share the others may have, and what runs each time last.
    order = sorted(parts, key=len, reverse=True)
    for at in (*order, *order):
        own, part = owns[at] + left_over, parts[at]
        tasks[at] = part.keeping(spread(part.before.split, own, part.choice))
        owns[at] = _device_bytes(tasks[at].kept_parts)
        left_over = own - owns[at]
    return tasks


def _planned(part: _Part, way: _Way, at: _At, budget: Budget, how: How) -> Straight:
    """A part under its plan, in what it and the others leave it."""
    # The times and the order of its tasks are what they were.
    before = part.before.plan
    how = dataclasses.replace(how, strategy=before.strategy)
    made = planned(way.tasks[at].split, budget.beside(part.beside + way.beside(at)), how)
    return _with_figures(
        made,
        measured=before.measured,
        task_order=before.task_order,
        repeated_tasks=before.repeated_tasks,
    )


def _device_bytes(kept: KeptParts) -> int:
    return sum(map(padded, kept.values()))


def _with_figures(made: Straight, **fields: Any) -> Straight:
    return dataclasses.replace(made, plan=dataclasses.replace(made.plan, **fields))


def _chain_of(chain: Chain, made: Mapping[_At, Straight], way: _Way) -> Chain:
    """The chain with other programs in some of its stages."""
    stages = list(chain.stages)
    # What stays is there beside all: of a choice it is in the peak already.
    beside = [way.beside((at,)) for at in range(len(stages))]
    for at, stage in enumerate(stages):
        program = made.get((at,), stage.program)
        if isinstance(program, Choice):
            branches = [made.get((at, b), x) for b, x in enumerate(program.branches)]
            others = [way.beside((at, b)) for b in range(len(branches))]
            program, beside[at] = with_branches(program, branches, others), 0
        elif (at,) in way.loops:
            assert isinstance(program, Loop)
            program = _staying(program, way.loops[at,])
        stages[at] = dataclasses.replace(stage, program=program)
    names = [plan.name for plan in chain.plan.pieces]
    plans = [stage.program.plan for stage in stages]
    plan = dataclasses.replace(
        together(list(zip(names, plans, strict=True)), chain.plan.gpu_bytes),
        peak_bytes=max(
            stage.program.plan.peak_bytes + stage.waiting + others
            for stage, others in zip(stages, beside, strict=True)
        ),
        kept_bytes=sum(way.all.values()),
        measured=chain.plan.measured,
    )
    return dataclasses.replace(chain, plan=plan, stages=tuple(stages))


def _staying(loop: Loop, kept: KeptParts) -> Loop:
    """A loop that finds on the device what it keeps there, and leaves it."""
    moved = loop.plan.h2d_bytes - sum(kept.values())
    plan = dataclasses.replace(loop.plan, h2d_bytes=moved)
    return dataclasses.replace(loop, plan=plan, stays=True)
