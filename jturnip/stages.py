"""The stages of a jturnip function, after `jax.stages`: Traced, Lowered, Compiled.

| stage | holds | allocates |
| --- | --- | --- |
| Traced | the jaxpr | nothing |
| Lowered | the flat function; `plan` when first asked for | nothing |
| Compiled | a program that can be called | what measuring its tasks takes, for a moment |
"""

import collections
import dataclasses
import functools
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.core import Tracer

from jturnip import lowering, placement
from jturnip.compat import Device
from jturnip.errors import ArgumentError, DoesNotFit, ExecutionError, UnsupportedError
from jturnip.frontend.jaxpr import FlatJaxpr, Type, flatten
from jturnip.frontend.partition import Partitioner
from jturnip.graph.memgraph import MemGraph
from jturnip.graph.plan import Plan
from jturnip.graph.taskgraph import TaskGraph
from jturnip.placement import Arguments, Whose
from jturnip.planner.strategies import STRATEGIES
from jturnip.runtime.engines import (
    DeviceEngines,
    Program,
    borrow_marks,
    make_program,
    return_marks,
)
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.loop import run
from jturnip.runtime.report import RunReport
from jturnip.signature import Call, Statics
from jturnip.units import format_bytes


@dataclass(frozen=True)
class Options:
    """What the user chose, beside the function."""

    # None: what the device has free when a signature is first compiled, less a reserve.
    gpu_bytes: int | None
    strategy: str = "auto"
    link: SimulatedLink | None = None

    def __post_init__(self) -> None:
        known = ("auto", "whole", *STRATEGIES)
        if self.strategy not in known:
            raise ValueError(
                f"strategy={self.strategy!r} is not known; choose one of {', '.join(known)}"
            )


class Traced:
    """A function traced for one signature."""

    def __init__(self, jitted: Any, statics: Statics, call: Call, options: Options):
        self._options = options
        self._call = call
        device, committed = placement.common_device(call.leaves)
        self._traced = _trace(jitted, statics, call, device if committed else None)
        jaxpr = self._traced.jaxpr
        # Whether the function closes over values of an outer transformation.
        self.closes_over_tracers = len(jaxpr.in_avals) != len(call.leaves) or any(
            isinstance(c, Tracer) for c in getattr(jaxpr, "consts", ())
        )
        donated = [info.donated for info in jax.tree.leaves(self._traced.args_info)]
        self._arguments = Arguments(
            tuple(map(placement.whose, call.leaves, donated)),
            statics.names(call),
            device,
            committed,
        )

    @property
    def jaxpr(self) -> Any:
        """The jaxpr, as `jax.jit(fn).trace(...).jaxpr`."""
        return self._traced.jaxpr

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results, in their tree."""
        return self._traced.out_info

    @property
    def args_info(self) -> Any:
        """Shapes, dtypes and donation of the arguments, in their tree."""
        return self._traced.args_info

    def lower(self) -> "Lowered":
        """Takes the function apart."""
        return Lowered(self._traced, self._call, self._arguments, self._options)


class Lowered:
    """A function taken apart for one signature; its `plan` is made when first asked for."""

    def __init__(self, traced: Any, call: Call, arguments: Arguments, options: Options):
        self._traced = traced
        self._call = call
        self._options = options
        self.gpu_bytes = (
            options.gpu_bytes
            if options.gpu_bytes is not None
            else placement.free_device_bytes(arguments.device)
        )
        arguments = _with_room(arguments, traced, self.gpu_bytes)
        self._refusal: UnsupportedError | None = None
        self._flat: FlatJaxpr | None = None
        try:
            self._flat = flatten(traced.jaxpr, _forwardable(arguments))
        except UnsupportedError as error:
            self._refusal = error
        self._arguments = arguments if self._flat is None else _kept(arguments, self._flat)
        self._lock = threading.RLock()

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results, in their tree."""
        return self._traced.out_info

    def as_text(self) -> str:
        """The jaxpr."""
        return str(self._traced.jaxpr)

    @property
    def plan(self) -> Plan:
        """The plan, with estimated times. Compiles tasks to know their workspace.

        Raises:
          DoesNotFit, HostMemoryError, UnsupportedError: as `jturnip.jit` says.
        """
        return self._planned[0]

    @functools.cached_property
    def _planned(self) -> tuple[Plan, Any]:
        with self._lock:
            if self._whole is not None:
                moves = _moves(self._arguments, self._traced)
                return _whole_plan(self._whole, moves, self.gpu_bytes), None
            return self._make_plan(self._split)

    def _make_plan(self, candidate: lowering.Split) -> tuple[Plan, Any]:
        strategy, link = self._options.strategy, self._options.link
        return lowering.make_plan(candidate, self.gpu_bytes, strategy, link)

    @functools.cached_property
    def _partitioner(self) -> Partitioner:
        if self._flat is None:
            assert self._refusal is not None
            raise self._refusal
        return Partitioner(self._flat, lowering.rates(self._arguments.device))

    @functools.cached_property
    def _whole(self) -> Any | None:
        """The function as one XLA executable if it fits and may run so, else None."""
        strategy = self._options.strategy
        if strategy not in ("auto", "whole"):
            return None
        if strategy == "auto" and self._flat is not None:
            if not lowering.may_fit(
                self._flat, self._partitioner, self._arguments, self.gpu_bytes
            ):
                return None
        whole = self._traced.lower().compile()
        needed = _whole_bytes(whole)
        if needed <= self.gpu_bytes:
            return whole
        if strategy == "whole":
            raise DoesNotFit(
                f"the whole function needs {format_bytes(needed)}; gpu_bytes is"
                f' {format_bytes(self.gpu_bytes)}. Use strategy="auto".',
                needed_bytes=needed,
                gpu_bytes=self.gpu_bytes,
            )
        if self._refusal is not None:
            self._refusal.add_note(
                f"As one executable it needs {format_bytes(needed)}; gpu_bytes is"
                f" {format_bytes(self.gpu_bytes)}."
            )
        return None

    @functools.cached_property
    def _split(self) -> lowering.Split:
        partitioner = self._partitioner
        assert self._flat is not None
        return lowering.split(self._flat, partitioner, self._arguments, self.gpu_bytes)

    def compile(self) -> "Compiled":
        """Compiles what is not compiled yet, measures the tasks, and plans with that."""
        with self._lock:
            if self._whole is not None:
                moves = _moves(self._arguments, self._traced)
                plan = _whole_plan(self._whole, moves, self.gpu_bytes)
                runner: Runner = _WholeRunner(
                    self._whole, self._call, self._arguments, plan, moves
                )
            else:
                candidate = lowering.measure(self._split, self.gpu_bytes)
                plan, schedule = self._make_plan(candidate)
                program = make_program(
                    candidate.graph,
                    plan.memgraph,
                    schedule,
                    candidate.executables,
                    candidate.arguments.device,
                )
                runner = _SplitRunner(
                    program, candidate, plan, self._options.link, self._traced.out_tree
                )
        return Compiled(runner, self._call, self._arguments, self._traced)


class Compiled:
    """A program for one signature. Calls take the dynamic arguments only."""

    def __init__(self, runner: "Runner", call: Call, arguments: Arguments, traced: Any):
        self._runner = runner
        self._in_tree = call.tree
        self._arguments = arguments
        self._types = [
            (tuple(info.shape), info.dtype) for info in jax.tree.leaves(traced.args_info)
        ]
        self.out_info = traced.out_info

    @property
    def plan(self) -> Plan:
        """The plan that calls run."""
        return self._runner.plan

    @property
    def last_run(self) -> RunReport | None:
        """What the last finished call did; None before the first."""
        return self._runner.last_run

    def memory_analysis(self) -> Any:
        """XLA's analysis of the whole function where it runs whole, else the plan."""
        whole = getattr(self._runner, "whole", None)
        return whole.memory_analysis() if whole is not None else self.plan

    def as_text(self) -> str:
        """The plan in a few lines."""
        return self.plan.summary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self._in_tree:
            raise TypeError(
                f"compiled for arguments in the tree {self._in_tree}, called with {tree}"
            )
        for leaf, (shape, dtype), whose, name in zip(
            leaves, self._types, self._arguments.whose, self._arguments.names, strict=True
        ):
            found = leaf if isinstance(leaf, jax.Array) else jax.typeof(leaf)
            if (tuple(found.shape), found.dtype) != (shape, dtype):
                raise TypeError(
                    f"{name} was compiled as {dtype}{list(shape)}, not"
                    f" {found.dtype}{list(found.shape)}"
                )
            is_array = isinstance(leaf, jax.Array) and whose not in _OURS
            if is_array and placement.whose(leaf, False).on_host != whose.on_host:
                there = "in host memory" if whose.on_host else "on the device"
                raise ArgumentError(
                    f"{name} was compiled to be {there}, and is not. Move it with"
                    " jturnip.host or jax.device_put, or lower with an array like it."
                )
        Call(args, kwargs, leaves, tree, ()).check_alive(lambda: self._arguments.names)
        return self.call_flat(leaves)

    def call_flat(self, leaves: Sequence[Any]) -> Any:
        """Calls with leaves that are known to be right."""
        return self._runner.run(leaves)


class Runner(Protocol):
    """A program that takes flat arguments and gives results in their tree."""

    plan: Plan

    @property
    def last_run(self) -> RunReport | None:
        """What the last finished run did."""
        ...

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs once."""
        ...


class _WholeRunner:
    """Plain `jax.jit`, for a function that fits."""

    def __init__(
        self, whole: Any, call: Call, arguments: Arguments, plan: Plan, moves: "_Moves"
    ):
        self.whole = whole
        self.plan = plan
        self._seconds: float | None = None
        self._tree = call.tree
        device = arguments.device
        self._device = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
        self._host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self._moves = moves
        self._given_up = tuple(
            i for i, w in enumerate(arguments.whose) if w is Whose.DONATED_HOST
        )

    @property
    def last_run(self) -> RunReport | None:
        if self._seconds is None:
            return None
        plan = self.plan
        moved = plan.h2d_bytes, plan.d2h_bytes
        return RunReport("whole", self._seconds, 0.0, *moved, plan.peak_bytes)

    def run(self, leaves: Sequence[Any]) -> Any:
        began = time.perf_counter()
        if self._moves.arguments:
            results = self._run_with_moves(leaves)
        else:
            args, kwargs = jax.tree.unflatten(self._tree, leaves)
            results = self.whole(*args, **kwargs)
        self._seconds = time.perf_counter() - began
        return results

    def _run_with_moves(self, leaves: Sequence[Any]) -> Any:
        placed = list(leaves)
        for i in self._moves.arguments:
            placed[i] = jax.device_put(leaves[i], self._device)
        args, kwargs = jax.tree.unflatten(self._tree, placed)
        placed.clear()
        results, tree = jax.tree.flatten(self.whole(*args, **kwargs))
        for i in self._moves.results:
            results[i] = jax.device_put(results[i], self._host)
        for i in self._given_up:
            leaves[i].delete()
        return jax.tree.unflatten(tree, results)


class _SplitRunner:
    """The event loop over a plan. One run at a time: the budget is for all of them."""

    def __init__(
        self,
        program: Program,
        candidate: lowering.Split,
        plan: Plan,
        link: SimulatedLink | None,
        out_tree: Any,
    ):
        self.plan = plan
        self._out_tree = out_tree
        self.last_run: RunReport | None = None
        self._program = program
        self._link = link
        self._lock = threading.Lock()
        whose = candidate.arguments.whose
        self._names = candidate.arguments.names
        memgraph = program.memgraph
        at_start: dict[int, int] = {
            memgraph.instances[i].buffer: i for i in memgraph.inputs_at_start
        }
        # The flat arguments' buffers come first, then the constants'.
        self._arguments = tuple((at_start[i], w) for i, w in enumerate(whose))
        self._constants = tuple(
            (at_start[len(whose) + k], placement.whose(array, False), array)
            for k, (_, array) in enumerate(candidate.flat.constants)
        )
        self._donated = frozenset(i for i, w in self._arguments if w.donated)
        ends = dict(zip(program.graph.outputs, memgraph.outputs_at_end, strict=True))
        # For each result the instance that holds it, or the argument that is returned,
        # whose buffer has the argument's number.
        self._results = tuple(
            (False, ends[b]) if b in ends else (True, int(b))
            for b in candidate.result_buffers
        )

    def run(self, leaves: Sequence[Any]) -> Any:
        program = self._program
        with self._lock:
            marks = borrow_marks(program.device_sharding)
            arrays: list[Any] = [None] * len(program.memgraph.instances)
            try:
                self._check_donated_once(leaves)
                self._place(leaves, arrays)
                engines = DeviceEngines(program, arrays, self._donated, marks, self._link)
                report = run(program.schedule, engines, self.plan.strategy)
                results = [
                    leaves[at] if returned else arrays[at] for returned, at in self._results
                ]
                _raise_failures(results)
                engines.close()
            except BaseException as error:
                arrays.clear()
                marks.close()
                _let_go(error)
                if not isinstance(error, KeyboardInterrupt) and _is_interrupt(error):
                    raise KeyboardInterrupt from error
                raise
            return_marks(marks)
            self.last_run = report
        return jax.tree.unflatten(self._out_tree, results)

    def _check_donated_once(self, leaves: Sequence[Any]) -> None:
        """Raises ArgumentError for an array that is donated and passed a second time."""
        if not self._donated or len({id(leaf) for leaf in leaves}) == len(leaves):
            return
        places = collections.Counter(id(leaf) for leaf in leaves)
        for (instance, _), leaf, name in zip(
            self._arguments, leaves, self._names, strict=True
        ):
            if instance in self._donated and places[id(leaf)] > 1:
                raise ArgumentError(
                    f"argument {name} is donated and passed a second time. Pass a copy, or"
                    " do not donate it."
                )

    def _place(self, leaves: Sequence[Any], arrays: list[Any]) -> None:
        for (instance, whose), leaf in zip(self._arguments, leaves, strict=True):
            arrays[instance] = self._placed(leaf, whose)
        for instance, whose, array in self._constants:
            arrays[instance] = self._placed(array, whose)

    def _placed(self, leaf: Any, whose: Whose) -> jax.Array:
        if isinstance(leaf, jax.Array) and whose not in _OURS:
            return leaf
        program = self._program
        sharding = program.host_sharding if whose.on_host else program.device_sharding
        return jax.device_put(leaf, sharding)


_OURS = (Whose.OURS_DEVICE, Whose.OURS_HOST)
_HOST_ARRAYS = (Whose.CALLER_HOST, Whose.DONATED_HOST)


def _raise_failures(results: Sequence[Any]) -> None:
    try:
        jax.block_until_ready(results)
    except Exception as error:
        raise ExecutionError(f"a result could not be computed: {error}") from error


def _let_go(error: BaseException | None) -> None:
    """Clears the finished frames that an error would keep alive, and our arrays in them.

    Notebooks keep the last error, and with it every local variable on its way.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C came inside JAX's C++, which makes other errors of it."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or "KeyboardInterrupt" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _trace(jitted: Any, statics: Statics, call: Call, device: Device | None) -> Any:
    """Traces as if all arrays were on the device: where they lie is the plan's matter."""
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)

    def strip(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, weak_type=weak, sharding=sharding
        )

    args, kwargs = statics.with_leaves(call, list(map(strip, call.leaves)))
    return jitted.trace(*args, **kwargs)


def _forwardable(arguments: Arguments) -> frozenset[int]:
    """Arguments that may be returned as they are: the caller has given them up."""
    return frozenset(i for i, w in enumerate(arguments.whose) if w.donated)


def _with_room(arguments: Arguments, traced: Any, gpu_bytes: int) -> Arguments:
    """Small arguments start on the device as long as they are next to nothing together."""
    small = sum(
        info.size * getattr(info.dtype, "itemsize", 4)
        for info, w in zip(jax.tree.leaves(traced.in_avals), arguments.whose, strict=True)
        if w is Whose.OURS_DEVICE
    )
    if small <= gpu_bytes // 16:
        return arguments
    whose = tuple(Whose.OURS_HOST if w is Whose.OURS_DEVICE else w for w in arguments.whose)
    return dataclasses.replace(arguments, whose=whose)


def _kept(arguments: Arguments, flat: FlatJaxpr) -> Arguments:
    """A donated argument that is returned as it is stays where it is."""
    returned = frozenset(flat.outputs)
    alive = {
        Whose.DONATED_DEVICE: Whose.CALLER_DEVICE,
        Whose.DONATED_HOST: Whose.CALLER_HOST,
    }
    whose = tuple(
        alive.get(w, w) if v in returned else w
        for v, w in zip(flat.inputs, arguments.whose, strict=True)
    )
    return dataclasses.replace(arguments, whose=whose)


@dataclass(frozen=True)
class _Moves:
    """What a call of a whole function moves: positions of arguments and results."""

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    h2d_bytes: int
    d2h_bytes: int


def _moves(arguments: Arguments, traced: Any) -> _Moves:
    """Host arguments go to the device; results that re-use donated ones come back."""
    types, results = (
        [Type(tuple(a.shape), a.dtype, False) for a in jax.tree.leaves(infos)]
        for infos in (traced.args_info, traced.out_info)
    )
    inward = tuple(i for i, w in enumerate(arguments.whose) if w in _HOST_ARRAYS)
    offers = [types[i] for i in inward if arguments.whose[i] is Whose.DONATED_HOST]
    outward = []
    for i, result in enumerate(results):
        if result in offers:
            offers.remove(result)
            outward.append(i)
    return _Moves(
        inward,
        tuple(outward),
        sum(types[i].nbytes for i in inward),
        sum(results[i].nbytes for i in outward),
    )


def _whole_bytes(whole: Any) -> int:
    """Device bytes of a whole executable, by XLA's own analysis."""
    memory = whole.memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def _whole_plan(whole: Any, moves: _Moves, gpu_bytes: int) -> Plan:
    return Plan(
        gpu_bytes=gpu_bytes,
        peak_bytes=_whole_bytes(whole),
        h2d_bytes=moves.h2d_bytes,
        d2h_bytes=moves.d2h_bytes,
        host_bytes=0,
        predicted_seconds=0.0,
        lower_bound_seconds=0.0,
        strategy="whole",
        taskgraph=TaskGraph((), (), ()),
        memgraph=MemGraph(gpu_bytes, (), (), (), ()),
    )
