"""A run as events in lanes, each with a name, bytes and the user's line."""

import dataclasses
import enum
from dataclasses import dataclass
from typing import NamedTuple

from jturnip.graph.memgraph import InstanceId, Op, OpKind
from jturnip.graph.plan import Plan
from jturnip.graph.report import RunReport
from jturnip.graph.taskgraph import BufferId


class Lane(enum.IntEnum):
    """What performs an op."""

    COMPUTE = 0
    H2D = 1
    D2H = 2

    @property
    def title(self) -> str:
        """As pictures name it."""
        return ("compute", "to the device", "to the host")[self]


_LANES = {OpKind.RUN: Lane.COMPUTE, OpKind.RELOAD: Lane.H2D, OpKind.OFFLOAD: Lane.D2H}


@dataclass(frozen=True, slots=True)
class Event:
    """One op of a run."""

    lane: Lane
    # Seconds since the run began. An engine does one thing at a time: what was issued while
    # another was under way begins with its end.
    start: float
    end: float
    # The task, or the buffer that is moved.
    name: str
    # Bytes moved, or written by a task.
    nbytes: int
    # The user's line, where there is one.
    source: str
    # Its number in `RunReport.order`, for `Plan.locate`.
    number: int
    # Positions, among the events, of the reloads that this task is the first to read.
    reloads: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Idle(NamedTuple):
    """Compute waited although tasks were left."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run: its events as they started, and between them."""

    events: tuple[Event, ...]
    idle: tuple[Idle, ...]
    # (when, device bytes in use from then on), by time.
    memory: tuple[tuple[float, int], ...]
    seconds: float
    gpu_bytes: int
    peak_bytes: int
    # How many ops more the run had, of which nothing is known.
    left_out: int = 0

    def lane(self, lane: Lane) -> list[Event]:
        """The events of one lane, by start."""
        return sorted((e for e in self.events if e.lane is lane), key=lambda e: e.start)


def of_run(report: RunReport, plan: Plan | None = None) -> Timeline:
    """The timeline of a run.

    Args:
      report: the run.
      plan: what ran, where the report does not say it, as a simulated one.

    Raises:
      ValueError: no plan is known, or it has no ops: a function that ran whole.
    """
    plan = plan or report.plan
    if plan is None or not report.order:
        raise ValueError(
            "the run has no operations to show: the function ran as one executable, which"
            " only jax.profiler sees into"
        )
    located = _Located(plan)
    events: list[Event] = []
    # Where the reload of an instance stands among the events, until a task reads it.
    reloaded: dict[tuple[int, InstanceId], int] = {}
    for number, start, end in zip(report.order, report.starts, report.ends, strict=True):
        found = located.find(number)
        if found.op is None:  # what the host does between pieces
            name = " / ".join((*found.names, found.plan.name))
            lane, nbytes, source, reloads = Lane.COMPUTE, 0, "", ()
        else:
            op, plan_id = found.op, id(found.plan)
            lane = _LANES[op.kind]
            name, nbytes, source = _described(found.plan, op)
            reloads = ()
            if op.kind is OpKind.RUN:
                at = (reloaded.pop((plan_id, i), None) for i in op.reads)
                reloads = tuple(sorted(a for a in at if a is not None))
            elif op.kind is OpKind.RELOAD:
                reloaded[plan_id, op.writes[0]] = len(events)
        events.append(Event(lane, start, end, name, nbytes, source, number, reloads))
    events = _one_at_a_time(events)
    return Timeline(
        tuple(events),
        tuple(_idle(events)),
        _memory(report),
        max([report.seconds, *(e.end for e in events)]),
        plan.gpu_bytes,
        report.peak_bytes,
        report.not_in_order,
    )


def _one_at_a_time(events: list[Event]) -> list[Event]:
    """The same with no two of a lane at once: what ended later begins when the other ended.
    Copies that were issued together may end in another order."""
    drawn, free = list(events), [0.0, 0.0, 0.0]
    for at in sorted(range(len(events)), key=lambda at: events[at].end):
        event = events[at]
        begin = max(event.start, free[event.lane])
        free[event.lane] = end = max(begin, event.end)
        drawn[at] = dataclasses.replace(event, start=begin, end=end)
    return drawn


class _Found(NamedTuple):
    names: tuple[str, ...]
    plan: Plan
    op: Op | None


class _Located:
    """`Plan.locate`, each number once: what a loop repeats comes again and again."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._known: dict[int, _Found] = {}

    def find(self, number: int) -> _Found:
        if not self._plan.pieces:
            return _Found((), self._plan, self._plan.memgraph.ops[number])
        if number not in self._known:
            self._known[number] = _Found(*self._plan.locate(number))
        return self._known[number]


def _described(plan: Plan, op: Op) -> tuple[str, int, str]:
    """An op's name, bytes, and the user's line."""
    graph = plan.taskgraph
    if op.task is not None:
        task = graph.tasks[op.task]
        nbytes = sum(graph.buffers[b].nbytes for b in task.outputs)
        return f"task {task.id} {task.name}", nbytes, task.source
    buffer = graph.buffers[plan.memgraph.instances[op.reads[0]].buffer]
    verb = "reload" if op.kind is OpKind.RELOAD else "offload"
    return f"{verb} {buffer_name(plan, buffer.id)}", buffer.nbytes, ""


def buffer_name(plan: Plan, buffer: BufferId) -> str:
    """How to speak of a buffer."""
    return plan.taskgraph.buffers[buffer].name or f"buffer {buffer}"


def _memory(report: RunReport) -> tuple[tuple[float, int], ...]:
    """Bytes are taken when an op is issued. Ops are told of in that order, but a task by
    when its turn comes in the queue: it was issued no later than what was issued next."""
    issued, earliest = [], report.seconds
    for start, in_use in zip(reversed(report.starts), reversed(report.in_use), strict=True):
        earliest = min(earliest, start)
        issued.append((earliest, in_use))
    return tuple(reversed(issued))


def _idle(events: list[Event]) -> list[Idle]:
    """The times between tasks; before the first, it waits for its reloads."""
    idle, free = [], 0.0
    for task in (e for e in events if e.lane is Lane.COMPUTE):
        if task.start > free:
            idle.append(Idle(free, task.start))
        free = task.end
    return idle
