"""A compiled function that is split: a program with the tree of its results around it."""

import dataclasses
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax

from jturnip import compat, memory, placement
from jturnip.compat import Device
from jturnip.frontend.wide import as_traced, types_as_traced
from jturnip.graph.plan import Plan
from jturnip.graph.report import RunReport
from jturnip.memory import device_bytes
from jturnip.placement import Wanted
from jturnip.planner import figures
from jturnip.runners.failures import let_go
from jturnip.runners.pieces import ChainRunner, HeldByStages, Outermost
from jturnip.runners.tasks import Held, Rest
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


# Makes such a piece that does not keep the arguments at these positions.
Keeping: TypeAlias = Callable[[frozenset[int]], Outermost]


class ProgramRunner:
    """A piece with the tree of a function's results around it, in their places."""

    def __init__(
        self,
        piece: Outermost,
        out_tree: Any,
        wanted: Wanted,
        weak: Sequence[bool],
        turn: Turn,
        device: Device,
        staying: Sequence[int],
        constants: int,
        tried: int,
        at_end: int,
        in_places: Sequence[Any],
        on_host: Sequence[int] = (),
        keeping: Keeping | None = None,
        has_wide_parts: bool = False,
    ):
        """Of a piece.

        Args:
          piece: what runs the program.
          out_tree: the tree of the function's results.
          wanted: where results are to lie.
          weak: whether each is weakly typed: what was in numpy's hands no longer is.
          turn: of the function.
          device: where it runs.
          staying: positions of the arguments that the caller keeps on the device.
          constants: bytes there of closed-over arrays.
          tried: bytes that were there when tasks were tried out.
          at_end: bytes there after a call, beside what is kept.
          in_places: where the user says that each argument is, or None.
          on_host: positions of the arguments that the caller keeps in host memory.
          keeping: makes the piece again, to keep other arrays between calls; None where
            none are kept.
          has_wide_parts: whether a part of the function is in 64 bits, in a process of 32.
        """
        self.piece = piece
        self.plan = piece.plan
        self._at_end = at_end
        self._most_bytes = self._most_bytes_of(self.plan)
        self._out_tree = out_tree
        self._wanted = wanted
        self._weak = tuple(weak)
        self._turn = turn
        self._device = device
        self._staying = tuple(staying)
        self._constants = constants
        self._in_places = tuple(in_places)
        # Counted with the first run, whose call it was that had tasks tried out.
        self._tried = tried
        self._keeping = keeping
        self._has_wide_parts = has_wide_parts
        # What the last call had at positions whose arguments may be kept; where that was
        # not what the call before had; and positions whose arguments are not kept any more.
        self._on_host = tuple(on_host)
        self._came: dict[int, weakref.ref[Any]] = {}
        self._changed: set[int] = set()
        self._not_kept: frozenset[int] = frozenset()
        # What the last call that is known to be over did; of one that may not be, what is
        # left of it and what was beside it.
        self._over: RunReport | None = None
        self._not_over: tuple[Rest, _Beside] | None = None

    @property
    def last_run(self) -> RunReport | None:
        """What the last call did that went well. Waits for the end of it."""
        over, not_over = self._over, self._not_over
        if not_over is None:
            return over
        rest, beside = not_over
        return self._with(rest.finish(), beside) or over

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs once."""
        outer = sys.exc_info()[1]
        try:
            self._turn.check()
            if self._has_wide_parts:
                leaves = list(map(as_traced, leaves))
            with self._turn.lock, types_as_traced(self._has_wide_parts):
                return self._run(leaves)
        except BaseException as error:
            self._turn.kept.clear()
            let_go(error, outer)
            raise

    def _run(self, leaves: Sequence[Any]) -> Any:
        """The same, for who has the lock. Nothing is held by `run` itself, whose frame an
        error keeps."""
        self._turn.alone(self)
        self._make_room(leaves)
        if any(self._in_places):
            leaves = list(map(memory.placed, leaves, self._in_places))
        kept, sources = self._turn.kept, self.piece.sources(leaves)
        held, others = self.piece.hold(leaves, kept), kept.nbytes_beside(sources)
        results, rest = self._begin(leaves, held)
        results = list(map(compat.weakly_typed, results, self._weak))
        results = memory.finished(results, self._wanted)
        kept = self._turn.kept.nbytes
        at_rest = self._bytes_at_rest(leaves, results, kept)
        beside = _Beside(at_rest, held.moved_bytes, kept, others)
        if rest is None:
            self._over = self._with(self.piece.last_run, beside)
            self._not_over = None
        else:
            self._over = self.last_run  # of the call before, which is over
            self._not_over = rest, beside
        return jax.tree.unflatten(self._out_tree, results)

    def leave(self) -> None:
        """Lets go of what stays on the device between runs."""
        self.piece.leave()

    def _begin(
        self, leaves: Sequence[Any], held: Held | HeldByStages
    ) -> tuple[list[Any], Rest | None]:
        """The results, and what the turn has to wait for before it is another's."""
        if isinstance(self.piece, ChainRunner):
            assert isinstance(held, HeldByStages)
            return self.piece.run(leaves, held=held), None
        assert isinstance(held, Held)
        results, rest = self.piece.begin(leaves, held)
        if rest is not None:
            self._turn.left(rest)
        return results, rest

    def _make_room(self, leaves: Sequence[Any]) -> None:
        """Lets go of what other calls keep on the device, where this one needs its room."""
        turn = self._turn
        self._keep_what_comes_again(leaves)
        turn.kept.make_way(self._device, self.plan.gpu_bytes)
        arena = placement.arena_bytes(self.plan.gpu_bytes, self._device.platform)
        turn.kept.keep_only(self.piece.sources(leaves), arena - self._most_bytes)

    def _keep_what_comes_again(self, leaves: Sequence[Any]) -> None:
        """Keeps others where an argument that is kept has not been the last call's twice
        in a row."""
        if self._keeping is None:
            return
        # What is yet to be brought to its place is another array each time.
        new = {
            i
            for i in self._on_host
            if not isinstance(leaves[i], jax.Array)
            or self._in_places[i] not in (None, leaves[i].sharding)
        }
        came = self._came
        changed = new.union(i for i, ref in came.items() if ref() is not leaves[i])
        not_kept = self._not_kept | (changed & self._changed)
        if not self.piece.resident_arguments.isdisjoint(not_kept):
            self.piece = self._keeping(not_kept)
            self.plan = self.piece.plan
            self._most_bytes = self._most_bytes_of(self.plan)
        self._changed, self._not_kept = changed, not_kept
        self._came = {i: weakref.ref(leaves[i]) for i in self._on_host if i not in new}

    def _most_bytes_of(self, plan: Plan) -> int:
        """What a call may have on the device, with results that come back at its end."""
        return max(figures.most_bytes(plan), self._at_end)

    def _bytes_at_rest(
        self, leaves: Sequence[Any], results: Sequence[Any], kept: int
    ) -> int:
        """What was on the device before and after the run: when tasks were tried out, and
        when results had been brought where they are wanted."""
        wanted, tried = self._wanted, self._tried
        self._tried = 0
        if wanted.is_nothing and not wanted.back and not tried:
            return 0
        there = device_bytes([*(leaves[i] for i in self._staying), *results])
        return max(there + self._constants + kept, tried)

    def _with(self, report: RunReport | None, beside: "_Beside") -> RunReport | None:
        if report is None:
            return None
        back = self._wanted.back_bytes if beside.at_rest else 0
        return dataclasses.replace(
            report,
            h2d_bytes=report.h2d_bytes + back + beside.moved,
            peak_bytes=max(report.peak_bytes + beside.others, beside.at_rest),
            kept_bytes=beside.kept,
            plan=self.plan,
        )


@dataclass(frozen=True, slots=True)
class _Beside:
    """What a call did beside the run of its program, in bytes."""

    # On the device before and after the run.
    at_rest: int
    # Moved to the device to be kept there.
    moved: int
    # Kept in all, and what of that is other calls'.
    kept: int
    others: int
