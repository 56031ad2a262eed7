"""What a function becomes: programs, which are plans and what chooses among them.

Most functions are one `Straight` program: one plan for all tasks. A loop of unknown length
or a branch that is too large to be a task cannot be in a plan, since nobody knows how often
it will run. Then the function is a `Chain`: straight programs with a `Loop` or a `Choice`
between them, whose bodies are programs again. Arrays are handed over where they lie: the
place in which each piece leaves its results is where the next is planned to find them.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from jturnip.compat import Device
from jturnip.compiler.executables import Executable
from jturnip.compiler.report import CompileReport
from jturnip.frontend import tables
from jturnip.frontend.partition import Group
from jturnip.frontend.values import FlatJaxpr, Parts, Window
from jturnip.graph.plan import Plan
from jturnip.graph.taskgraph import BufferId, TaskGraph
from jturnip.placement import Arguments
from jturnip.programs import places
from jturnip.runtime.schedule import Schedule


# A value, and which part of it; None for all.
Part: TypeAlias = tuple[int, Window | None]
# What is on the device for many runs of a program: bytes by the part.
KeptParts: TypeAlias = Mapping[Part, int]


@dataclass(frozen=True, slots=True)
class Split:
    """A function as tasks with their executables, not yet planned."""

    flat: FlatJaxpr
    # The equations of each task of the graph.
    groups: tuple[Group, ...]
    graph: TaskGraph
    executables: tuple[Executable, ...]
    # The numbers that each task passes to its executable.
    numbers: tuple[tuple[np.ndarray, ...], ...]
    compile_report: CompileReport
    arguments: Arguments
    # The buffer of each value that has one.
    buffers: Mapping[int, BufferId]
    # Result → the donated host argument whose memory it takes over; by position.
    reuses: Mapping[int, int]
    # Results that must end in host memory, by position.
    to_host: frozenset[int]
    # Buffers that start in host memory, and are put on the device for many runs.
    resident: tuple[BufferId, ...] = ()
    # Where each task stands in the program: what runs again, where it ran first. Empty
    # where each stands in its own place.
    program_order: tuple[int, ...] = ()

    @property
    def starts(self) -> dict[BufferId, "Part"]:
        """What each buffer is that is there before the first task."""
        flat = self.flat
        whole = (*(v for v, _ in flat.constants), *flat.inputs)
        of_buffer = {self.buffers[v]: (v, None) for v in whole}
        parts = {self.buffers[s.value]: (s.source, s.window) for s in flat.slices}
        return {**of_buffer, **parts}


# Closed-over arrays that are on the device while a function runs, and between its runs:
# id → bytes. Who has the record has the arrays.
Constants: TypeAlias = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Straight:
    """Tasks under one plan.

    Every kind of program has these: `plan`; `report`, of what was compiled; `ends_on_host`,
    whether each result is in host memory at the end; and `constants`.
    """

    split: Split
    plan: Plan
    schedule: Schedule

    @property
    def ends_on_host(self) -> tuple[bool, ...]:
        split, memgraph = self.split, self.plan.memgraph
        ends = dict(zip(split.graph.outputs, memgraph.outputs_at_end, strict=True))
        held = dict(zip(split.flat.inputs, split.arguments.whose, strict=True))
        return tuple(
            isinstance(o, Parts)
            or (
                held[o].on_host
                if o in held
                else memgraph.instances[ends[split.buffers[o]]].on_host
            )
            for o in split.flat.outputs
        )

    @property
    def kept_parts(self) -> KeptParts:
        """What is put on the device before many runs."""
        starts, buffers = self.split.starts, self.split.graph.buffers
        return {starts[b]: buffers[b].nbytes for b in self.split.resident}

    @property
    def to_host(self) -> frozenset[int]:
        return self.split.to_host

    @property
    def given(self) -> Arguments:
        return self.split.arguments

    @property
    def flat(self) -> FlatJaxpr:
        return self.split.flat

    @property
    def constants(self) -> Constants:
        return places.constants_on_device(self.split.flat)

    @property
    def report(self) -> CompileReport:
        return self.split.compile_report


@dataclass(frozen=True, slots=True)
class Loop:
    """A `while`: its arguments are the condition's constants, the body's, and what is
    carried."""

    plan: Plan
    # Numbers of constants.
    of_condition: int
    of_body: int
    # Of the condition's constants and what is carried: whether to begin.
    condition: "Program"
    # Of everything: whether to go on, and what is carried on.
    body: "Program"
    # Whether each carried value is in host memory between iterations, and whether the body
    # uses up the array it is given.
    on_host: tuple[bool, ...]
    used_up: tuple[bool, ...]
    # Device bytes of what is carried that the condition, and the body, do not read; and
    # which carried values the body neither reads nor hands on.
    unread: tuple[int, int]
    replaced: frozenset[int]
    # Whether what the body keeps on the device stays there after the loop.
    stays: bool = False
    # How often it is expected to run, where that is known.
    iterations: int | None = None

    @property
    def ends_on_host(self) -> tuple[bool, ...]:
        return self.on_host

    @property
    def constants(self) -> Constants:
        return all_constants((self.condition, self.body))

    @property
    def report(self) -> CompileReport:
        return self.condition.report.beside(self.body.report)


@dataclass(frozen=True, slots=True)
class Choice:
    """A `cond`: its arguments are the number of the branch, and the branches' arguments."""

    plan: Plan
    branches: tuple["Program", ...]
    ends_on_host: tuple[bool, ...]
    # Device bytes of the arguments that each branch does not read, and of the number.
    unread: tuple[int, ...]
    number: int

    @property
    def constants(self) -> Constants:
        return all_constants(self.branches)

    @property
    def beside(self) -> list[int]:
        """Device bytes of what is there beside each branch and the number: what it does not
        read, and what the others close over."""
        everything = sum(self.constants.values())
        return [
            everything - sum(branch.constants.values()) + unread
            for branch, unread in zip(self.branches, self.unread, strict=True)
        ]

    @property
    def report(self) -> CompileReport:
        return functools.reduce(CompileReport.beside, (b.report for b in self.branches))


@dataclass(frozen=True, slots=True)
class Rows:
    """A `gather` from a table in host memory, or a `scatter-add` to one, by the host."""

    plan: Plan
    eqn: Any
    ends_on_host: tuple[bool, ...] = (True,)
    constants: Constants = field(default_factory=dict)

    @property
    def writes(self) -> bool:
        """Whether rows are added to the table."""
        return self.eqn.primitive.name in tables.HOST_WRITES

    @property
    def report(self) -> CompileReport:
        return CompileReport(0, 0, 0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function of the user's (`jax.pure_callback`), by the host."""

    plan: Plan
    eqn: Any
    # On which the function runs that calls it.
    device: Device
    # The user's file and line, or "".
    source: str
    ends_on_host: tuple[bool, ...]
    constants: Constants = field(default_factory=dict)

    @property
    def report(self) -> CompileReport:
        return CompileReport(0, 0, 0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Stage:
    """A program in a chain, with the values it reads and writes."""

    program: "Program"
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    # Values that nothing needs any more after it, and those it writes for nobody.
    over: tuple[int, ...]
    unread: frozenset[int]
    # Device bytes that others take while it runs, and those of them that are closed over.
    waiting: int
    constants: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Programs one after the other."""

    plan: Plan
    flat: FlatJaxpr
    arguments: Arguments
    # Closed-over arrays that loops and branches read.
    read_over: tuple[tuple[int, Any], ...]
    stages: tuple[Stage, ...]
    # Results that must end in host memory, by position.
    to_host: frozenset[int]
    ends_on_host: tuple[bool, ...]

    @property
    def given(self) -> Arguments:
        return self.arguments

    @property
    def kept_parts(self) -> KeptParts:
        """What is put on the device before many runs."""
        staying = (kept_by_stage(s) for s in self.stages if not _lets_go(s.program))
        return {part: nbytes for kept in staying for part, nbytes in kept.items()}

    @property
    def constants(self) -> Constants:
        own = places.constants_on_device(self.flat)
        return {**own, **all_constants([s.program for s in self.stages])}

    @property
    def report(self) -> CompileReport:
        reports = (s.program.report for s in self.stages)
        return functools.reduce(CompileReport.beside, reports)


Program: TypeAlias = Straight | Loop | Choice | Rows | Call | Chain


def kept_by_stage(stage: Stage) -> KeptParts:
    """What tasks, the body of a loop, or branches find on the device; values are the
    chain's."""
    program = stage.program
    if isinstance(program, Straight):
        return program.kept_parts
    inside: Sequence[Program] = ()
    reads = stage.reads
    if isinstance(program, Loop):
        inside = (program.body,)
    elif isinstance(program, Choice):
        inside, reads = program.branches, reads[1:]
    found: dict[Part, int] = {}
    for each in inside:
        if isinstance(each, Straight | Chain):
            outside = as_read(each.flat, reads)
            found.update((outside(part), n) for part, n in each.kept_parts.items())
    return found


def as_read(flat: FlatJaxpr, reads: Sequence[int]) -> Callable[[Part], Part]:
    """What names a part of what a body or a branch reads by the value of the chain that is
    its argument; what it closes over is not the chain's."""
    value = dict(zip(flat.inputs, reads, strict=True))
    return lambda part: (value.get(part[0], -1), part[1])


def _lets_go(program: Program) -> bool:
    """Whether a loop keeps something only while it runs."""
    return isinstance(program, Loop) and not program.stays


def expected_seconds(program: Program) -> float:
    """What a call is predicted to take: each loop as often as it is expected to run, once
    where nobody knows; of branches the slowest."""
    match program:
        case Chain():
            return sum(expected_seconds(stage.program) for stage in program.stages)
        case Loop():
            times = 1 if program.iterations is None else program.iterations
            once = expected_seconds(program.condition)
            return once + times * expected_seconds(program.body)
        case Choice():
            return max(map(expected_seconds, program.branches))
        case _:
            return program.plan.predicted_seconds


def straight_parts(program: Program) -> list[Straight]:
    """All plans of tasks in a program, however deep."""
    if isinstance(program, Straight):
        return [program]
    inside: tuple[Program, ...] = ()
    if isinstance(program, Loop):
        inside = program.condition, program.body
    elif isinstance(program, Choice):
        inside = program.branches
    elif isinstance(program, Chain):
        inside = tuple(stage.program for stage in program.stages)
    return [part for each in inside for part in straight_parts(each)]


def all_constants(programs: Iterable[Program]) -> dict[int, int]:
    return {key: nbytes for p in programs for key, nbytes in p.constants.items()}
