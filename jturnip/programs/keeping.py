"""Programs that run again and again with the same arrays in host memory: a function that is
called many times, the body of a loop.

As many of these as there is room for stay on the device between the runs, where that is
predicted to pay.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    How,
    KeptParts,
    Loop,
    Program,
    Straight,
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


@dataclass(frozen=True, slots=True)
class _Part:
    """Tasks of a program, with arrays that may stay between runs."""

    # As it is planned for one run.
    before: Straight
    # Device bytes that others take while it runs.
    beside: int
    # Buffers that may stay, in the order in which they are first read.
    choice: tuple[BufferId, ...]

    @property
    def choice_bytes(self) -> int:
        """Device bytes of all that may stay."""
        buffers = self.before.split.graph.buffers
        return sum(padded(buffers[b].nbytes) for b in self.choice)

    def keeping(self, chosen: Collection[BufferId]) -> Straight:
        """The same, not yet planned again, with some of its choice on the device."""
        split = with_resident(self.before.split, chosen)
        return dataclasses.replace(self.before, split=split)


@dataclass(frozen=True)
class _Way:
    """What stays between runs, by the number of the stage."""

    # Tasks that are to be planned again, with what stays for them.
    tasks: Mapping[int, Straight]
    # What loops keep anyway while they run.
    loops: Mapping[int, KeptParts]

    @functools.cached_property
    def by_stage(self) -> dict[int, KeptParts]:
        """What stays for each of them."""
        return {**{at: made.kept_parts for at, made in self.tasks.items()}, **self.loops}

    @functools.cached_property
    def all(self) -> KeptParts:
        """All that stays; stages share copies."""
        return {part: n for kept in self.by_stage.values() for part, n in kept.items()}

    def beside(self, at: int) -> int:
        """Device bytes of what stays for other stages than this one."""
        return _device_bytes(self.all) - _device_bytes(self.by_stage.get(at, {}))


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
                else _with_figures(made[0], kept_bytes=sum(way.all.values()))
            )
            if again.plan.peak_bytes <= max(arena, program.plan.peak_bytes):
                found.append(again)
    fastest = min(made.plan.predicted_seconds for made in found)
    fast = [p for p in found if p.plan.predicted_seconds <= fastest * _AS_FAST]
    return min(fast, key=lambda made: made.plan.h2d_bytes + made.plan.d2h_bytes)


def _parts(program: Straight | Chain, not_these: frozenset[int]) -> dict[int, _Part]:
    """The tasks that can be planned beside what stays, by their stage."""
    if isinstance(program, Straight):
        return {0: _Part(program, 0, tuple(same_each_time(program.split, not_these)))}
    same = _same_values(program, not_these)
    parts: dict[int, _Part] = {}
    for at, stage in enumerate(program.stages):
        if isinstance(made := stage.program, Straight):
            others = [i for i, v in enumerate(stage.reads) if v not in same]
            choice = tuple(same_each_time(made.split, others))
            parts[at] = _Part(made, stage.waiting, choice)
    return parts


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
    parts: Mapping[int, _Part],
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
        at: figures.most_bytes(stage.program.plan) + stage.waiting
        for at, stage in enumerate(program.stages)
        if at not in parts
    }
    loops = _kept_by_loops(program, not_these)
    if loops:
        way = _Way(_sharing(parts, loops), loops)
        fits = all(nbytes + way.beside(at) <= arena for at, nbytes in most.items())
        if fits and _device_bytes(way.all) <= room:
            yield way
    yield from _spread(parts, min(room, arena - max(most.values(), default=0)), arena)


def _kept_by_loops(chain: Chain, not_these: Collection[int]) -> dict[int, KeptParts]:
    """What loops keep while they run, if it may be the same in each run of the chain."""
    same = _same_values(chain, not_these)
    loops = {
        at: kept_by_stage(stage)
        for at, stage in enumerate(chain.stages)
        if isinstance(stage.program, Loop)
    }
    return {
        at: kept for at, kept in loops.items() if kept and all(v in same for v, _ in kept)
    }


def _sharing(
    parts: Mapping[int, _Part], loops: Mapping[int, KeptParts]
) -> dict[int, Straight]:
    """Tasks that find on the device what loops keep there."""
    kept = {part for of_loop in loops.values() for part in of_loop}
    found: dict[int, Straight] = {}
    for at, part in parts.items():
        starts = part.before.split.starts
        found[at] = part.keeping([b for b in part.choice if starts[b] in kept])
    return found


def _spread(parts: Mapping[int, _Part], most: int, arena: int) -> Iterator[_Way]:
    """Tasks that find some of what they read on the device, no more than `most` bytes."""
    total = sum(part.choice_bytes for part in parts.values())
    if not total:
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
        chosen = {
            at: spread(p.before.split, room * p.choice_bytes // total, p.choice)
            for at, p in parts.items()
        }
        way = _Way({at: parts[at].keeping(these) for at, these in chosen.items()}, {})
        if way.all and way.all not in tried:
            tried.append(way.all)
            yield way
        if sum(len(graph.tasks) for graph in graphs.values()) > _SOME_TASKS:
            break


def _planned(part: _Part, way: _Way, at: int, budget: Budget, how: How) -> Straight:
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


def _chain_of(chain: Chain, made: Mapping[int, Straight], way: _Way) -> Chain:
    """The chain with other programs in some of its stages."""
    stages = list(chain.stages)
    for at, program in made.items():
        stages[at] = dataclasses.replace(stages[at], program=program)
    for at, kept in way.loops.items():
        loop = stages[at].program
        assert isinstance(loop, Loop)
        stages[at] = dataclasses.replace(stages[at], program=_staying(loop, kept))
    names = [plan.name for plan in chain.plan.pieces]
    plans = [stage.program.plan for stage in stages]
    plan = dataclasses.replace(
        together(list(zip(names, plans, strict=True)), chain.plan.gpu_bytes),
        peak_bytes=max(
            stage.program.plan.peak_bytes + stage.waiting + way.beside(at)
            for at, stage in enumerate(stages)
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
