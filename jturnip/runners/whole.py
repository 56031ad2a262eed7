"""A function that fits, run as `jax.jit` does."""

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jturnip import compat, memory, placement
from jturnip.compiler import nans
from jturnip.frontend.values import FlatJaxpr, Type
from jturnip.graph.memgraph import MemGraph
from jturnip.graph.plan import Plan
from jturnip.graph.report import RunReport
from jturnip.graph.taskgraph import TaskGraph
from jturnip.placement import Arguments, Wanted, Whose
from jturnip.runners.failures import check_donated_once, let_go
from jturnip.runtime.turns import Turn


class WholeRunner:
    """Plain `jax.jit`, for a function that fits."""

    def __init__(
        self,
        whole: Any,
        in_tree: Any,
        arguments: Arguments,
        plan: Plan,
        moves: "Moves",
        flat: FlatJaxpr | None,
        wanted: Wanted,
        turn: Turn,
        in_places: Sequence[Any],
    ):
        self.whole = whole
        self._turn = turn
        # Where the user says that each argument is, or None.
        self._in_places = tuple(in_places)
        self.plan = plan
        self._seconds: float | None = None
        self._tree = in_tree
        # To find an equation that made a NaN; None for what cannot be flattened.
        self._flat = flat
        self._wanted = wanted
        self._copies = bool(moves.arguments) or any(self._in_places)
        self._is_plain = wanted.is_nothing and not self._copies
        device = arguments.device
        self._there = placement.sharding(device, on_host=False)
        self._device = device
        self._moves = moves
        self._kept = frozenset(moves.kept)
        self._room = plan.gpu_bytes - plan.peak_bytes
        # Bytes that the last call moved to the device, and that stay there; and of what
        # other calls keep there, what stayed meanwhile.
        self._h2d_bytes = self._kept_bytes = self._beside_bytes = 0
        self._has_effects = flat is None or any(e.effects for e in flat.equations)
        self._names = arguments.names
        self._given_up = frozenset(
            i for i, w in enumerate(arguments.whose) if w is Whose.DONATED_HOST
        )

    @property
    def last_run(self) -> RunReport | None:
        if self._seconds is None:
            return None
        plan = self.plan
        return RunReport(
            "whole",
            self._seconds,
            0.0,
            self._h2d_bytes,
            plan.d2h_bytes,
            plan.peak_bytes + self._beside_bytes,
            kept_bytes=self._kept_bytes,
            plan=plan,
        )

    def run(self, leaves: Sequence[Any]) -> Any:
        began, outer = time.perf_counter(), sys.exc_info()[1]
        try:
            if self._has_effects:
                compat.forget_failed_tokens()
            if self._is_plain:
                args, kwargs = jax.tree.unflatten(self._tree, leaves)
                self._turn.leave(room=self._room)
                results = self.whole(*args, **kwargs)
                self._turn.dispatched(results)
            else:
                results = self._run_with_moves(leaves)
        except Exception as error:
            self._turn.kept.clear()
            let_go(error, outer)
            if compat.is_nan_error(error) and self._flat is not None:
                raise self._blame(leaves) from None
            raise
        self._seconds = time.perf_counter() - began
        return results

    def _blame(self, leaves: Sequence[Any]) -> FloatingPointError:
        assert self._flat is not None
        alive = [
            leaf
            if isinstance(leaf, jax.Array) and leaf.is_deleted()
            else memory.placed(leaf, self._there)
            for leaf in leaves
        ]
        everything, inputs = range(len(self._flat.equations)), self._flat.inputs
        return nans.blame(self._flat, everything, inputs, alive, nans.looked_for())

    def _run_with_moves(self, leaves: Sequence[Any]) -> Any:
        check_donated_once(leaves, self._given_up, self._names)
        plan, turn, moves = self.plan, self._turn, self._moves
        turn.check()
        with turn.lock:
            placed, moved = self._placed(leaves)
            args, kwargs = jax.tree.unflatten(self._tree, placed)
            placed.clear()
            results, tree = jax.tree.flatten(self.whole(*args, **kwargs))
            del args, kwargs
            turn.dispatched(results)
            for i in moves.results:
                results[i] = memory.moved(results[i], on_host=True)
            if (moved or any(self._in_places)) and results:
                # What goes to the host takes device memory until it is there.
                on_their_way = [results[i] for i in moves.results]
                smallest = min(results, key=lambda r: r.nbytes)
                turn.copied(plan.peak_bytes, on_their_way or [smallest])
            results = memory.finished(results, self._wanted)
            self._h2d_bytes, self._kept_bytes = moved, turn.kept.nbytes
        for i in self._given_up:
            if isinstance(
                leaves[i], jax.Array
            ):  # numpy's are put where arrays were expected
                leaves[i].delete()
        return jax.tree.unflatten(tree, results)

    def _placed(self, leaves: Sequence[Any]) -> tuple[list[Any], int]:
        """The arguments in their places, on the device those that the user has in host
        memory, if they are not there from a call before; and the bytes that took."""
        turn, kept, moved = self._turn, self._turn.kept, 0
        sources = {i: (leaves[i], None) for i in self._kept}
        kept.make_way(self._device, self.plan.gpu_bytes)
        turn.leave(sources.values(), self._room)
        self._beside_bytes = kept.nbytes_beside(sources.values())
        copies = {i: kept.copy_of(source) for i, source in sources.items()}
        all_there = all(copies.get(i) is not None for i in self._moves.arguments)
        if not all_there or any(self._in_places):
            turn.make_room(self._room - self._beside_bytes)
        placed = list(map(memory.placed, leaves, self._in_places))
        for i in self._moves.arguments:
            copy = copies.get(i)
            if copy is None:
                copy = self._moved(placed[i])
                moved += copy.nbytes
                if i in sources:
                    kept.keep(sources[i], copy)
            placed[i] = copy
        return placed, moved

    def _moved(self, leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return memory.moved(leaf, on_host=False)
        return memory.placed(leaf, self._there)  # given in the place of an array


@dataclass(frozen=True)
class Moves:
    """What a call of a whole function moves: positions of arguments and results.

    `h2d_bytes` are those of a call that finds on the device what is kept between calls.
    """

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    h2d_bytes: int
    d2h_bytes: int
    # Arguments that stay on the device between calls.
    kept: tuple[int, ...] = ()
    kept_bytes: int = 0


def moves_of(
    arguments: Arguments, traced: Any, wanted: Wanted, pruned: Collection[int], keeps: bool
) -> Moves:
    """Host arguments go to the device, but those that XLA prunes; those that are not given
    up stay there if `keeps`. Results that re-use donated ones come back, unless they are
    wanted elsewhere."""
    types, results = (
        [Type.of(a) for a in jax.tree.leaves(infos)]
        for infos in (traced.args_info, traced.out_info)
    )
    inward = tuple(
        i
        for i, w in enumerate(arguments.whose)
        if w in (Whose.CALLER_HOST, Whose.DONATED_HOST) and i not in pruned
    )
    pairs = list(zip(types, arguments.whose, strict=True))
    outward = tuple(
        sorted(
            (
                placement.reused_arguments(pairs, results).keys()
                | wanted.places(on_host=True)
            )
            - wanted.places(on_host=False)
        )
    )
    kept = tuple(i for i in inward if keeps and arguments.whose[i] is Whose.CALLER_HOST)
    kept_bytes = sum(types[i].nbytes for i in kept)
    return Moves(
        inward,
        outward,
        sum(types[i].nbytes for i in inward) - kept_bytes,
        sum(results[i].nbytes for i in outward),
        kept,
        kept_bytes,
    )


def whole_plan(nbytes: int, moves: Moves, gpu_bytes: int) -> Plan:
    return Plan(
        gpu_bytes=gpu_bytes,
        peak_bytes=nbytes,
        h2d_bytes=moves.h2d_bytes,
        d2h_bytes=moves.d2h_bytes,
        host_bytes=0,
        predicted_seconds=0.0,
        lower_bound_seconds=0.0,
        strategy="whole",
        taskgraph=TaskGraph((), (), ()),
        memgraph=MemGraph(gpu_bytes, (), (), (), ()),
        kept_bytes=moves.kept_bytes,
    )
