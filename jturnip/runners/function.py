"""A compiled function that is split: a program with the tree of its results around it."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from jturnip import compat, memory
from jturnip.graph.plan import Plan
from jturnip.graph.report import RunReport
from jturnip.memory import device_bytes
from jturnip.placement import Wanted
from jturnip.runners.failures import let_go
from jturnip.runners.pieces import Piece
from jturnip.runners.tasks import Rest, SplitRunner
from jturnip.runtime.turns import Turn


class Runner(Protocol):
    """What takes flat arguments and gives results in their tree."""

    plan: Plan

    @property
    def last_run(self) -> RunReport | None:
        """What the last finished run did."""
        ...

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs once."""
        ...


class ProgramRunner:
    """A piece with the tree of a function's results around it, in their places."""

    def __init__(
        self,
        piece: Piece,
        out_tree: Any,
        wanted: Wanted,
        weak: Sequence[bool],
        turn: Turn,
        staying: Sequence[int],
        constants: int,
        tried: int,
        in_places: Sequence[Any],
    ):
        """Of a piece.

        Args:
          piece: what runs the program.
          out_tree: the tree of the function's results.
          wanted: where results are to lie.
          weak: whether each is weakly typed: what was in numpy's hands no longer is.
          turn: of the function.
          staying: positions of the arguments that the caller keeps on the device.
          constants: bytes there of closed-over arrays.
          tried: bytes that were there when tasks were tried out.
          in_places: where the user says that each argument is, or None.
        """
        self.piece = piece
        self.plan = piece.plan
        self._out_tree = out_tree
        self._wanted = wanted
        self._weak = tuple(weak)
        self._turn = turn
        self._staying = tuple(staying)
        self._constants = constants
        self._in_places = tuple(in_places)
        # Counted with the first run, whose call it was that had tasks tried out.
        self._tried = tried
        # What the last call that is known to be over did; of one that may not be, what is
        # left of it and `_bytes_at_rest`.
        self._over: RunReport | None = None
        self._not_over: tuple[Rest, int] | None = None

    @property
    def last_run(self) -> RunReport | None:
        """What the last call did that went well. Waits for the end of it."""
        over, not_over = self._over, self._not_over
        if not_over is None:
            return over
        rest, at_rest = not_over
        return self._with(rest.finish(), at_rest) or over

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs once."""
        outer = sys.exc_info()[1]
        try:
            self._turn.check()
            with self._turn.lock:
                self._turn.alone(self)
                if any(self._in_places):
                    leaves = list(map(memory.placed, leaves, self._in_places))
                results, rest = self._begin(leaves)
                results = list(map(compat.weakly_typed, results, self._weak))
                results = memory.finished(results, self._wanted)
                at_rest = self._bytes_at_rest(leaves, results)
                self._over = (
                    self._with(self.piece.last_run, at_rest)
                    if rest is None
                    else self.last_run  # of the call before, which is over
                )
                self._not_over = None if rest is None else (rest, at_rest)
        except BaseException as error:
            let_go(error, outer)
            raise
        return jax.tree.unflatten(self._out_tree, results)

    def leave(self) -> None:
        """Lets go of what stays on the device between runs."""
        self.piece.leave()

    def _begin(self, leaves: Sequence[Any]) -> tuple[list[Any], Rest | None]:
        """The results, and what the turn has to wait for before it is another's."""
        if not isinstance(self.piece, SplitRunner):
            return self.piece.run(leaves), None
        results, rest = self.piece.begin(leaves)
        if rest is not None:
            self._turn.left(rest)
        return results, rest

    def _bytes_at_rest(self, leaves: Sequence[Any], results: Sequence[Any]) -> int:
        """What was on the device before and after the run: when tasks were tried out, and
        when results had been brought where they are wanted."""
        wanted, tried = self._wanted, self._tried
        self._tried = 0
        if wanted.is_nothing and not wanted.back and not tried:
            return 0
        there = device_bytes([*(leaves[i] for i in self._staying), *results])
        return max(there + self._constants, tried)

    def _with(self, report: RunReport | None, at_rest: int) -> RunReport | None:
        if report is None:
            return None
        return dataclasses.replace(
            report,
            h2d_bytes=report.h2d_bytes + (self._wanted.back_bytes if at_rest else 0),
            peak_bytes=max(report.peak_bytes, at_rest),
            plan=self.plan,
        )
