"""A plan: the MemGraph with its figures, as the user sees it."""

import json
import textwrap
from dataclasses import dataclass, field
from typing import Any, Protocol

from jturnip.graph.memgraph import MemGraph, Op, OpKind
from jturnip.graph.report import RunReport
from jturnip.graph.serialize import memgraph_to_json_dict
from jturnip.graph.taskgraph import TaskGraph
from jturnip.units import format_bytes


class OtherBudgets(Protocol):
    """What the tasks of a plan would take in another budget."""

    @property
    def least_bytes(self) -> int:
        """The smallest budget in which they can be planned."""
        ...

    def seconds_in(self, gpu_bytes: int) -> float:
        """What the simulator predicts.

        Raises:
          DoesNotFit: it is less than that.
        """
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run, in how many bytes, and how long it should take.

    A function that fits runs as one executable: its `strategy` is "whole", it has no ops,
    and its figures are XLA's.
    """

    # What the user asked for; the plan's arena is a little smaller.
    gpu_bytes: int
    # The most device bytes in use at any moment of the planned order.
    peak_bytes: int
    # Bytes over the link, each way.
    h2d_bytes: int
    d2h_bytes: int
    # The most host bytes that offloaded copies take, beside the arguments' own.
    host_bytes: int
    # By the simulator, with the runtime's own state machine.
    predicted_seconds: float
    # Of compute with what copies take from it, and bytes over the link, the larger, or more
    # (`planner/bound.py`): no order of these ops can be faster.
    lower_bound_seconds: float
    strategy: str
    taskgraph: TaskGraph = field(repr=False)
    memgraph: MemGraph = field(repr=False)
    # Where a loop or a branch is driven (`strategy` "driven"): the plans of its pieces. The
    # figures then count each piece once.
    pieces: "tuple[Plan, ...]" = field(default=(), repr=False)
    # Whether the times of its tasks were measured, and not only expected from their shapes.
    measured: bool = False
    # The order of its tasks, a key of `planner.orders.ORDERS`; "" is the program's own.
    task_order: str = ""
    # How many runs of its tasks are not their first, so that less need be moved.
    repeated_tasks: int = 0
    # The run that the simulator predicts; None where the function runs whole or in pieces.
    predicted_run: RunReport | None = field(default=None, repr=False)
    # What a larger budget would buy; None as above.
    others: OtherBudgets | None = field(default=None, repr=False, compare=False)
    # Bytes of arrays in host memory that stay on the device between calls: the figures are
    # those of a call that finds them there.
    kept_bytes: int = 0
    # Of a piece, what it is: "body", "branch 0", an operation with the user's line.
    name: str = ""

    @property
    def op_count(self) -> int:
        """How many numbers its ops take in the order of a run: those of its pieces come one
        after the other, and a piece without ops counts as one."""
        if self.pieces:
            return sum(piece.op_count for piece in self.pieces)
        return max(1, len(self.memgraph.ops))

    def locate(self, number: int) -> "tuple[tuple[str, ...], Plan, Op | None]":
        """Where a number in `last_run.order` is: the names of the pieces around it, the
        plan of the innermost, and its op there; None for a piece without ops.

        Raises:
          IndexError: the plan has no such number.
        """
        if not 0 <= number < self.op_count:
            raise IndexError(f"op {number} of a plan with {self.op_count}")
        for piece in self.pieces:
            if number < piece.op_count:
                names, plan, op = piece.locate(number)
                return (piece.name, *names), plan, op
            number -= piece.op_count
        return (), self, self.memgraph.ops[number] if self.memgraph.ops else None

    def to_json_dict(self) -> dict[str, Any]:
        """The plan as plain data, schema 1, complete enough for another verifier."""
        figures = {
            name: getattr(self, name)
            for name in (
                "peak_bytes",
                "h2d_bytes",
                "d2h_bytes",
                "host_bytes",
                "kept_bytes",
                "predicted_seconds",
                "lower_bound_seconds",
                "strategy",
                "task_order",
                "repeated_tasks",
            )
        }
        plain = memgraph_to_json_dict(self.taskgraph, self.memgraph)
        figures["pieces"] = [piece.to_json_dict() for piece in self.pieces]
        return {**plain, "name": self.name, "gpu_bytes": self.gpu_bytes, **figures}

    def to_json(self) -> str:
        """`to_json_dict` as text."""
        return json.dumps(self.to_json_dict())

    def explain(self) -> str:
        """In words: what limits it, what is largest at the peak, what leaves the device and
        why, and what other budgets would bring."""
        from jturnip.show import explain

        return explain.of_plan(self)

    def _repr_html_(self) -> str:
        from jturnip.show import pages

        return pages.of_plan(self)

    def summary(self) -> str:
        """A few lines for people."""
        if self.pieces:
            pieces = "\n".join(
                f"{p.name}:\n{textwrap.indent(p.summary(), '  ')}" for p in self.pieces
            )
            return f"{len(self.pieces)} pieces, driven:\n" + textwrap.indent(pieces, "  ")
        kinds = [op.kind for op in self.memgraph.ops]
        lines = [
            f"strategy {self.strategy}, {kinds.count(OpKind.RUN)} tasks,"
            f" {kinds.count(OpKind.OFFLOAD)} offloads,"
            f" {kinds.count(OpKind.RELOAD)} reloads",
            f"device: peak {format_bytes(self.peak_bytes)}"
            f" of {format_bytes(self.gpu_bytes)}",
            f"link: {format_bytes(self.h2d_bytes)} to the device,"
            f" {format_bytes(self.d2h_bytes)} to the host;"
            f" host copies take {format_bytes(self.host_bytes)}",
            f"time: {self.predicted_seconds:.3f} s predicted,"
            f" at least {self.lower_bound_seconds:.3f} s",
        ]
        if self.kept_bytes:
            lines.insert(2, f"kept there between calls: {format_bytes(self.kept_bytes)}")
        return "\n".join(lines)
