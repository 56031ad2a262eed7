"""Programs that run again and again with the same arrays in host memory: a function that is
called many times, the body of a loop.

As many of these as there is room for stay on the device between the runs, where that is
predicted to pay.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jturnip.errors import DoesNotFit, HostMemoryError
from jturnip.placement import Budget, Whose
from jturnip.programs.chains import together
from jturnip.programs.places import argument_bytes
from jturnip.programs.planning import planned
from jturnip.programs.records import Chain, Choice, KeptParts, Loop, Program, Straight
from jturnip.programs.setting import How
from jturnip.programs.staying import At, Reader, Way, readers_of, ways
from jturnip.units import padded


# Of plans that take so much longer at most, the one that moves least is taken.
_AS_FAST = 1.01


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
    readers = readers_of(program, frozenset(not_these))
    arena = budget.arena(program.given.device)
    room = arena - bytes_at_end(program, on_device)
    found: list[Program] = [program]
    for way in ways(program, readers, room, arena, not_these):
        with contextlib.suppress(DoesNotFit, HostMemoryError):
            made = {at: _planned(readers[at], way, at, budget, how) for at in way.tasks}
            if any(made[at].ends_on_host != readers[at].before.ends_on_host for at in made):
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


def _planned(reader: Reader, way: Way, at: At, budget: Budget, how: How) -> Straight:
    """Tasks under their plan, in what they and the others leave them."""
    # The times and the order of its tasks are what they were.
    before = reader.before.plan
    how = dataclasses.replace(how, strategy=before.strategy)
    made = planned(way.tasks[at].split, budget.beside(reader.beside + way.beside(at)), how)
    return _with_figures(
        made,
        measured=before.measured,
        task_order=before.task_order,
        repeated_tasks=before.repeated_tasks,
    )


def _with_figures(made: Straight, **fields: Any) -> Straight:
    return dataclasses.replace(made, plan=dataclasses.replace(made.plan, **fields))


def _chain_of(chain: Chain, made: Mapping[At, Straight], way: Way) -> Chain:
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
