"""Programs for calls one after the other with the same arrays in host memory.

As many of these as there is room for stay on the device between calls, where that is
predicted to pay.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jturnip import placement
from jturnip.errors import DoesNotFit, HostMemoryError
from jturnip.frontend.values import Window
from jturnip.placement import Budget, Whose
from jturnip.planner import figures
from jturnip.planner.planner import smallest_budget
from jturnip.programs.chains import together
from jturnip.programs.places import argument_bytes
from jturnip.programs.planning import planned
from jturnip.programs.records import Chain, How, Program, Split, Straight
from jturnip.programs.splitting import same_each_time, with_resident
from jturnip.units import padded


# What is not kept between calls goes through at least this share of the budget, or less if
# that is predicted to be better; of plans that take so much longer at most, the one that
# moves least.
_STREAMED = 4
_AS_FAST = 1.01
# With more tasks than so many, only one other plan is made.
_SOME_TASKS = 1000


@dataclass(frozen=True, slots=True)
class _Part:
    """Tasks of a program, with arrays that stay between calls."""

    # As it is planned for one call.
    before: Straight
    # With what stays.
    split: Split
    # Device bytes that others take while it runs.
    beside: int
    # Positions of arguments that are not the same each time.
    not_these: frozenset[int]

    @property
    def kept(self) -> dict[tuple[int, Window | None], int]:
        """Bytes of what stays, by the value and the part of it."""
        sizes = self.split.graph.buffers
        return {p: sizes[b].nbytes for b, p in self.split.resident_parts.items()}

    @property
    def kept_on_device(self) -> int:
        """The bytes it takes there."""
        return sum(map(padded, self.kept.values()))


def keeping(
    program: Program,
    gpu_bytes: int,
    how: How,
    on_device: Collection[int],
    not_these: Collection[int] = (),
) -> Program:
    """The same for calls one after the other with the same arrays in host memory: some of
    these stay on the device between calls, where that is predicted to pay.

    Args:
      program: planned for one call.
      gpu_bytes: the budget.
      how: the user's choices.
      on_device: positions of results that are wanted there, wherever the program has them.
      not_these: positions of arguments that are not the same each time.
    """
    if not isinstance(program, Straight | Chain):
        return program
    parts = _parts(program, frozenset(not_these))
    arena = placement.arena_bytes(gpu_bytes, program.given.device.platform)
    found: list[Program] = [program]
    most = arena - max(_fixed_bytes(program), bytes_at_end(program, on_device))
    for ways in _ways(parts, most, arena):
        with contextlib.suppress(DoesNotFit, HostMemoryError):
            made = {at: _planned(ways, at, gpu_bytes, how) for at in ways}
            if any(
                made[at].ends_on_host != p.before.ends_on_host for at, p in ways.items()
            ):
                continue  # results that stayed on the device would be in host memory
            again = (
                _chain_of(program, made, ways)
                if isinstance(program, Chain)
                else _with_figures(made[0], kept_bytes=sum(_all_kept(ways)))
            )
            if again.plan.peak_bytes <= max(arena, program.plan.peak_bytes):
                found.append(again)
    fastest = min(made.plan.predicted_seconds for made in found)
    fast = [p for p in found if p.plan.predicted_seconds <= fastest * _AS_FAST]
    return min(fast, key=lambda made: made.plan.h2d_bytes + made.plan.d2h_bytes)


def _parts(program: Straight | Chain, not_these: frozenset[int]) -> dict[int, _Part]:
    """The parts that can be planned beside what stays, by their stage."""
    if isinstance(program, Straight):
        return {0: _Part(program, program.split, 0, not_these)}
    held = enumerate(zip(program.flat.inputs, program.arguments.whose, strict=True))
    same = {v for i, (v, w) in held if w is Whose.CALLER_HOST and i not in not_these}
    others = lambda reads: frozenset(i for i, v in enumerate(reads) if v not in same)
    return {
        at: _Part(made, made.split, stage.waiting, others(stage.reads))
        for at, stage in enumerate(program.stages)
        if isinstance(made := stage.program, Straight)
    }


def _fixed_bytes(program: Straight | Chain) -> int:
    """What stages may take that are left as they are planned."""
    if isinstance(program, Straight):
        return 0
    left = [s for s in program.stages if not isinstance(s.program, Straight)]
    return max((figures.most_bytes(s.program.plan) + s.waiting for s in left), default=0)


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


def _ways(parts: dict[int, _Part], most: int, arena: int) -> Iterator[dict[int, _Part]]:
    """The same parts with arrays that stay: more first, and no more than `most` bytes."""
    sizes = {
        at: sum(
            padded(p.split.graph.buffers[b].nbytes)
            for b in same_each_time(p.split, p.not_these)
        )
        for at, p in parts.items()
    }
    total = sum(sizes.values())
    if not total:
        return
    needed = {at: smallest_budget(p.split.graph) for at, p in parts.items()}
    tried: list[Sequence[Sequence[int]]] = []
    for reserve in (
        lambda needed: needed * 5 // 4,
        lambda needed: needed * 2,
        lambda needed: max(needed * 2, arena // _STREAMED),
    ):
        left = (arena - p.beside - reserve(needed[at]) for at, p in parts.items())
        room = min([most, *left])
        if room <= 0:
            continue
        ways = {
            at: dataclasses.replace(
                p,
                split=with_resident(p.split, room * sizes[at] // total, p.not_these),
            )
            for at, p in parts.items()
        }
        kept = [p.split.resident for p in ways.values()]
        if any(kept) and kept not in tried:
            tried.append(kept)
            yield ways
        if sum(len(p.split.graph.tasks) for p in parts.values()) > _SOME_TASKS:
            break


def _planned(ways: dict[int, _Part], at: int, gpu_bytes: int, how: How) -> Straight:
    """A part under its plan, in what it and the others leave it."""
    part = ways[at]
    others = sum(map(padded, _all_kept(ways))) - part.kept_on_device
    budget = Budget(gpu_bytes).beside(part.beside + others)
    how = dataclasses.replace(how, strategy=part.before.plan.strategy)
    # The times and the order of its tasks are what they were.
    before = part.before.plan
    made = planned(part.split, budget, how)
    return _with_figures(
        made,
        measured=before.measured,
        task_order=before.task_order,
        repeated_tasks=before.repeated_tasks,
    )


def _all_kept(ways: dict[int, _Part]) -> list[int]:
    """Bytes of each array that stays for any of the parts; they share copies."""
    kept = {key: nbytes for part in ways.values() for key, nbytes in part.kept.items()}
    return list(kept.values())


def _with_figures(made: Straight, **fields: Any) -> Straight:
    return dataclasses.replace(made, plan=dataclasses.replace(made.plan, **fields))


def _chain_of(chain: Chain, made: dict[int, Straight], ways: dict[int, _Part]) -> Chain:
    """The chain with other programs in some of its stages."""
    kept = _all_kept(ways)
    kept_on_device = sum(map(padded, kept))
    stages = tuple(
        dataclasses.replace(stage, program=made.get(at, stage.program))
        for at, stage in enumerate(chain.stages)
    )
    own = [ways[at].kept_on_device if at in ways else 0 for at in range(len(stages))]
    names = [plan.name for plan in chain.plan.pieces]
    plans = [stage.program.plan for stage in stages]
    plan = dataclasses.replace(
        together(list(zip(names, plans, strict=True)), chain.plan.gpu_bytes),
        peak_bytes=max(
            stage.program.plan.peak_bytes + stage.waiting + kept_on_device - mine
            for stage, mine in zip(stages, own, strict=True)
        ),
        kept_bytes=sum(kept),
        measured=chain.plan.measured,
    )
    return dataclasses.replace(chain, plan=plan, stages=stages)
