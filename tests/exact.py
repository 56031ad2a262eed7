"""The best plan of a small graph, by a solver that tries all: the fewest bytes, and the
shortest time in which any plan could be over.

It knows the model that plans are predicted by (`runtime/simulated.py`) and nothing of how
they are made: compute, and the link each way, do one thing at a time; a task's operands and
results have their bytes while it runs, a copy has its own from its beginning. It does not
know that bytes are at addresses, so what it finds may be out of reach by a little.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

from jturnip.graph.taskgraph import Buffer, BufferId, Place, TaskGraph
from jturnip.units import padded


@dataclass(frozen=True, slots=True)
class Optimum:
    """What a solver found out."""

    # Of the best plan it found, and what it has proven that none is below.
    found: int
    least: int

    @property
    def proven(self) -> bool:
        return self.found == self.least


def fewest_bytes(
    graph: TaskGraph, gpu_bytes: int, known: int, seconds: float, workers: int
) -> Optimum:
    """The fewest bytes over the link, both ways together, in any order of the tasks.

    Args:
      graph: what is to be computed.
      gpu_bytes: size of the arena.
      known: what some plan moves.
      seconds: how long the solver may take.
      workers: and on how many threads.

    Raises:
      ValueError: if there is no plan.
    """
    ones = [1] * len(graph.tasks)
    none = [0] * len(graph.buffers)
    model = _Model(graph, gpu_bytes, ones, none, none, len(graph.tasks))
    sizes = [b.nbytes for b in graph.buffers]
    model.cp.minimize(
        sum(sizes[b] * moved for b, moved in (*model.reloads, *model.offloads))
    )
    return _solved(model.cp, known, seconds, workers)


def shortest_time(
    graph: TaskGraph,
    gpu_bytes: int,
    bytes_per_unit: int,
    most: int,
    seconds: float,
    workers: int,
) -> Optimum:
    """The shortest time in which a plan could be over, in units of time.

    Args:
      graph: what is to be computed; its tasks take whole units.
      gpu_bytes: size of the arena.
      bytes_per_unit: what the link moves in a unit each way; sizes are multiples of it.
      most: the time that some plan takes.
      seconds: how long the solver may take.
      workers: and on how many threads.

    Raises:
      ValueError: if there is no plan.
    """
    takes = [round(task.seconds) for task in graph.tasks]
    assert all(t == task.seconds for t, task in zip(takes, graph.tasks, strict=True))
    moves = [b.nbytes // bytes_per_unit for b in graph.buffers]
    assert all(
        m * bytes_per_unit == b.nbytes for m, b in zip(moves, graph.buffers, strict=True)
    )
    model = _Model(graph, gpu_bytes, takes, moves, moves, most)
    model.cp.minimize(model.end)
    return _solved(model.cp, most, seconds, workers)


def _solved(cp: cp_model.CpModel, known: int, seconds: float, workers: int) -> Optimum:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 0
    status = solver.solve(cp)
    if status == cp_model.INFEASIBLE:
        raise ValueError("there is no plan")
    least = math.ceil(solver.best_objective_bound - 1e-6)
    if status == cp_model.UNKNOWN:
        return Optimum(known, least)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    return Optimum(min(round(solver.objective_value), known), least)


@dataclass(slots=True)
class _Stay:
    """A time that a buffer may be on the device for."""

    present: Any  # truth value
    begin: Any
    end: Any
    # From when it may be read.
    there: Any


class _Model:
    """A plan as a solver's variables. Times are whole numbers from 0 to `most`."""

    def __init__(
        self,
        graph: TaskGraph,
        gpu_bytes: int,
        takes: Sequence[int],
        into: Sequence[int],
        out: Sequence[int],
        most: int,
    ):
        self.cp = cp = cp_model.CpModel()
        self._graph, self._takes, self._into, self._out = graph, takes, into, out
        self._most = most
        self.end = self._time("end")
        self.starts = [self._time(f"task {t.id}") for t in graph.tasks]
        self._ends = [s + d for s, d in zip(self.starts, takes, strict=True)]
        # What moves: buffers, and truth values.
        self.reloads: list[tuple[BufferId, Any]] = []
        self.offloads: list[tuple[BufferId, Any]] = []
        runs = [
            cp.new_fixed_size_interval_var(s, d, "")
            for s, d in zip(self.starts, takes, strict=True)
        ]
        cp.add_no_overlap(runs)
        self._to_device: list[Any] = []
        self._to_host: list[Any] = []
        # What takes bytes, and how many.
        held: list[tuple[Any, int]] = [
            (run, padded(task.workspace))
            for run, task in zip(runs, graph.tasks, strict=True)
        ]
        self._readers: dict[BufferId, list[int]] = {}
        for task in graph.tasks:
            for b in task.inputs:
                self._readers.setdefault(b, []).append(task.id)
        self._writer = {b: task.id for task in graph.tasks for b in task.outputs}
        self._over = {b: task.id for task in graph.tasks for b in task.overwritten}
        pinned = sum(padded(b.nbytes) for b in graph.buffers if b.pinned)
        results = [graph.buffers[b] for b in graph.outputs]
        back = sum(padded(b.nbytes) for b in results if not b.end_on_host)
        self._all_come_back = pinned + back <= gpu_bytes
        for buffer in graph.buffers:
            if not buffer.pinned:
                for stay in self._stays(buffer):
                    length = cp.new_int_var(0, most, "")
                    interval = cp.new_optional_interval_var(
                        stay.begin, length, stay.end, stay.present, ""
                    )
                    held.append((interval, padded(buffer.nbytes)))
        cp.add_cumulative(
            [interval for interval, nbytes in held if nbytes],
            [nbytes for _, nbytes in held if nbytes],
            gpu_bytes - pinned,
        )
        cp.add_no_overlap(self._to_device)
        cp.add_no_overlap(self._to_host)
        for end in self._ends:
            cp.add(self.end >= end)

    def _time(self, name: str) -> Any:
        return self.cp.new_int_var(0, self._most, name)

    def _stays(self, buffer: Buffer) -> list[_Stay]:
        """The times at which it is on the device, with what reads it then."""
        cp, b = self.cp, buffer.id
        readers = self._readers.get(b, [])
        output = b in self._graph.outputs
        stays: list[_Stay] = []
        on_host: Any = 0  # when there is a copy that reloads may read
        if buffer.start is not Place.HOST:
            stay, on_host = self._first_stay(buffer)
            stays.append(stay)
        back = output and not buffer.end_on_host
        # A copy for each reader is the most that any plan makes, and one at the end.
        for _ in range(len(readers) + back):
            stays.append(self._reloaded(b, on_host, stays))
        for t in readers:
            chosen = [cp.new_bool_var("") for _ in stays]
            cp.add_exactly_one(chosen)
            # What is written over has the bytes of the result from then on.
            over = self.starts[t] if self._over.get(b) == t else self._ends[t]
            for choice, stay in zip(chosen, stays, strict=True):
                cp.add_implication(choice, stay.present)
                cp.add(self.starts[t] >= stay.there).only_enforce_if(choice)
                cp.add(stay.end >= over).only_enforce_if(choice)
            if b in self._over and t != self._over[b]:
                cp.add(self.starts[self._over[b]] >= self._ends[t])
        if back:
            # It is on the device at the end where all such are, else in either memory.
            offloaded = [moved for other, moved in self.offloads if other == b]
            last = [cp.new_bool_var("") for _ in stays]
            cp.add_bool_or([*([] if self._all_come_back else offloaded), *last])
            for choice, stay in zip(last, stays, strict=True):
                cp.add_implication(choice, stay.present)
                cp.add(stay.end >= self.end).only_enforce_if(choice)
                cp.add(self.end >= stay.there).only_enforce_if(choice)
        return stays

    def _first_stay(self, buffer: Buffer) -> tuple[_Stay, Any]:
        """That of what is written, or there from the beginning; and when there is a copy
        of it in host memory, if ever."""
        cp, b = self.cp, buffer.id
        end = self._time("")
        if buffer.start is Place.DEVICE:
            begin: Any = 0
            there: Any = 0
        else:
            writer = self._writer[b]
            begin, there = self.starts[writer], self._ends[writer]
        cp.add(end >= there)
        away, begins, ends = cp.new_bool_var(""), self._time(""), self._time("")
        copy = cp.new_optional_interval_var(begins, self._out[b], ends, away, "")
        self._to_host.append(copy)
        cp.add(begins >= there).only_enforce_if(away)
        cp.add(end >= ends).only_enforce_if(away)
        cp.add(self.end >= ends).only_enforce_if(away)
        if buffer.end_on_host:
            cp.add(away == 1)
        self.offloads.append((b, away))
        return _Stay(cp.new_constant(1), begin, end, there), (away, ends)

    def _reloaded(self, b: BufferId, on_host: Any, before: Sequence[_Stay]) -> _Stay:
        cp = self.cp
        present, begin, end = cp.new_bool_var(""), self._time(""), self._time("")
        there = self._time("")
        copy = cp.new_optional_interval_var(begin, self._into[b], there, present, "")
        self._to_device.append(copy)
        cp.add(end >= there).only_enforce_if(present)
        if before:
            cp.add_implication(present, before[-1].present)
            cp.add(begin >= before[-1].end).only_enforce_if(present)
        if on_host != 0:
            away, ends = on_host
            cp.add_implication(present, away)
            cp.add(begin >= ends).only_enforce_if(present)
        self.reloads.append((b, present))
        return _Stay(present, begin, end, there)
