"""The stages of a jturnip function, after `jax.stages`: Traced, Lowered, Compiled.

| stage | holds | allocates |
| --- | --- | --- |
| Traced | the jaxpr | nothing |
| Lowered | the flat function; `plan` when first asked for | nothing |
| Compiled | a program that can be called | what measuring its tasks takes, for a moment |
"""

import dataclasses
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer

from jturnip import lowering, placement
from jturnip.compat import Device
from jturnip.compiler.executables import compile_whole
from jturnip.compiler.report import CompileReport
from jturnip.errors import ArgumentError, DoesNotFit, UnsupportedError
from jturnip.frontend.hints import names_a_place
from jturnip.frontend.jaxpr import flatten
from jturnip.frontend.partition import Partitioner
from jturnip.frontend.values import FlatJaxpr, Type
from jturnip.graph.plan import Plan
from jturnip.pieces import PieceRunner, make_piece
from jturnip.placement import Arguments, Wanted, Whose
from jturnip.planner.strategies import STRATEGIES
from jturnip.programs import How, Program, make_program, remeasured, smallest_refusal
from jturnip.runners import (
    Runner,
    WholeRunner,
    moves_of,
    whole_bytes,
    whole_plan,
)
from jturnip.runtime.link import SimulatedLink
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
    # Trees of shardings and None, or None.
    in_shardings: Any = None
    out_shardings: Any = None

    def __post_init__(self) -> None:
        known = ("auto", "whole", *STRATEGIES)
        if self.strategy not in known:
            raise ValueError(
                f"strategy={self.strategy!r} is not known; choose one of {', '.join(known)}"
            )


def place(call: Call, options: Options) -> Call:
    """A call with its arguments where `in_shardings` says they are.

    Raises:
      ValueError: `in_shardings` does not fit the arguments.
    """
    if options.in_shardings is None:
        return call
    dynamic, named = jax.tree.unflatten(call.tree, call.leaves)
    if named:
        raise ValueError("in_shardings does not go with keyword arguments")
    shardings = placement.broadcast_shardings(options.in_shardings, dynamic, "in_shardings")
    leaves = list(map(placement.placed, call.leaves, shardings))
    return dataclasses.replace(call, leaves=leaves)


def _wanted(out_info: Any, leaves: Sequence[Any], options: Options) -> Wanted:
    """Where the results of a call are to lie."""
    mesh = placement.mesh_of(leaves)
    if options.out_shardings is None:
        return Wanted(mesh=mesh)
    found = placement.broadcast_shardings(options.out_shardings, out_info, "out_shardings")
    return Wanted(tuple(found), mesh)


class Traced:
    """A function traced for one signature."""

    def __init__(self, jitted: Any, statics: Statics, call: Call, options: Options):
        self._options = options
        self._call = call
        device, committed = placement.common_device(
            [*call.leaves, *placement.structs_of(options.out_shardings)]
        )
        self._traced = _trace(jitted, statics, call, device if committed else None)
        jaxpr = self._traced.jaxpr
        committed = committed or names_a_place(jaxpr)
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
        self._wanted = _wanted(self._traced.out_info, call.leaves, options)

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

    @property
    def fun_name(self) -> str:
        """The name of the function."""
        return self._traced.fun_name

    def lower(self, **exporting: Any) -> Any:
        """Takes the function apart; returns a `Lowered`.

        Args:
          exporting: what `jax.export` asks of `jax.jit`. It gets what `jax.jit` would give:
            what is exported is one executable, without a budget.
        """
        if exporting:
            return self._traced.lower(**exporting)
        return Lowered(
            self._traced, self._call, self._arguments, self._options, self._wanted
        )


class Lowered:
    """A function taken apart for one signature; its `plan` is made when first asked for."""

    def __init__(
        self,
        traced: Any,
        call: Call,
        arguments: Arguments,
        options: Options,
        wanted: Wanted,
    ):
        self._traced = traced
        self._call = call
        self._options = options
        self._wanted = wanted
        self.gpu_bytes = (
            options.gpu_bytes
            if options.gpu_bytes is not None
            else placement.free_device_bytes(arguments.device)
        )
        arguments = _with_room(arguments, traced, self.gpu_bytes)
        self._refusal: UnsupportedError | None = None
        self._flat: FlatJaxpr | None = None
        # Of the whole function, also where it does not fit.
        self._whole_report: CompileReport | None = None
        try:
            self._flat = flatten(traced.jaxpr, _forwardable(arguments))
        except UnsupportedError as error:
            self._refusal = error
        self._given = arguments
        self._arguments = (
            arguments if self._flat is None else lowering.kept(arguments, self._flat)
        )
        # Whether every equation is to be a task of its own, for study.
        self._finest = False
        self._lock = threading.RLock()
        self._result_types = list(map(Type.of, jax.tree.leaves(traced.out_info)))
        self._check_results_fit()

    def _check_results_fit(self) -> None:
        places = self._wanted.places(on_host=False)
        asked = sum(self._result_types[i].nbytes for i in places)
        if asked > self.gpu_bytes:
            raise DoesNotFit(
                f"results that out_shardings places on the device take"
                f" {format_bytes(asked)}; gpu_bytes is {format_bytes(self.gpu_bytes)}."
                ' Give them a sharding with memory_kind="pinned_host", or none.',
                needed_bytes=asked,
                gpu_bytes=self.gpu_bytes,
            )

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results, in their tree."""
        return self._traced.out_info

    @property
    def args_info(self) -> Any:
        """Shapes, dtypes and donation of the arguments, in their tree."""
        return self._traced.args_info

    @property
    def in_tree(self) -> Any:
        """The tree of the arguments: (positional, by name)."""
        return jax.tree.structure(self._traced.args_info)

    @property
    def out_tree(self) -> Any:
        """The tree of the results."""
        return self._traced.out_tree

    def cost_analysis(self) -> dict[str, float]:
        """Floating-point operations and bytes accessed, of all tasks together."""
        return _cost_of(self._whole, self.plan)

    def as_text(self) -> str:
        """The jaxpr."""
        return str(self._traced.jaxpr)

    @property
    def plan(self) -> Plan:
        """The plan, with estimated times. Compiles tasks to know their workspace.

        Raises:
          DoesNotFit, HostMemoryError, UnsupportedError: as `jturnip.jit` says.
        """
        return self._planned

    @functools.cached_property
    def _planned(self) -> Plan:
        with self._lock:
            if self._whole is not None:
                moves = moves_of(self._arguments, self._traced, self._wanted)
                return whole_plan(self._whole, moves, self.gpu_bytes)
            return self._program.plan

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
        whole, self._whole_report = compile_whole(self._traced)
        needed = whole_bytes(whole)
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
    def _program(self) -> Program:
        return self._make_program(measured=False)

    def _make_program(self, measured: bool) -> Program:
        if self._refusal is not None:
            raise self._refusal
        made = functools.partial(
            make_program,
            self._traced.jaxpr,
            _forwardable(self._given),
            to_host=self._wanted.places(on_host=True),
        )
        how = self._how(measured)
        try:
            return made(self._given, self.gpu_bytes, how)
        except DoesNotFit:
            self._given = _on_host_all(self._given)
        try:
            return made(self._given, self.gpu_bytes, how)
        except DoesNotFit as refusal:
            make = functools.partial(made, self._given, how=how)
            raise smallest_refusal(make, refusal) from None

    def _how(self, measured: bool) -> How:
        return How(self._options.strategy, self._options.link, measured, self._finest)

    def _measured_program(self) -> Program:
        """The program with measured times; what was planned before them is used again."""
        if "_program" in self.__dict__:
            again = remeasured(self._program, self.gpu_bytes, self._how(True))
            if again is not None:
                return again
        return self._make_program(measured=True)

    def compile(self) -> "Compiled":
        """Compiles what is not compiled yet, measures the tasks, and plans with that."""
        with self._lock:
            program = None
            if self._whole is not None:
                moves = moves_of(self._arguments, self._traced, self._wanted)
                plan = whole_plan(self._whole, moves, self.gpu_bytes)
                runner: Runner = WholeRunner(
                    self._whole,
                    self._call,
                    self._arguments,
                    plan,
                    moves,
                    self._flat,
                    self._wanted,
                )
            else:
                program = self._measured_program()
                piece = make_piece(program, self._options.link)
                back = self._coming_back(program)
                wanted = dataclasses.replace(
                    self._wanted,
                    back=back,
                    back_bytes=sum(self._result_types[i].nbytes for i in back),
                    committed=self._arguments.committed,
                )
                weak = [t.weak_type for t in self._result_types]
                runner = PieceRunner(piece, self._traced.out_tree, wanted, weak)
            report = self._compile_report(program)
        return Compiled(
            runner, self._call, self._arguments, self._traced, self._options, report
        )

    def _coming_back(self, program: Program) -> tuple[int, ...]:
        """Results that a program leaves in host memory and the device has room for: all of
        those that nobody asked for there, or none."""
        results = self._result_types
        infos = jax.tree.leaves(self._traced.args_info)
        pairs = list(zip(map(Type.of, infos), self._arguments.whose, strict=True))
        asked = placement.reused_arguments(pairs, results).keys()
        asked |= self._wanted.places(on_host=True)
        ends = program.ends_on_host
        back = tuple(i for i, away in enumerate(ends) if away and i not in asked)
        staying = sum(t.nbytes for t, w in pairs if w is Whose.CALLER_DEVICE)
        there = sum(t.nbytes for i, t in enumerate(results) if not ends[i] or i in back)
        arena = placement.arena_bytes(self.gpu_bytes, self._arguments.device)
        return back if staying + there <= arena else ()

    def _compile_report(self, program: Program | None) -> CompileReport:
        whole = self._whole_report
        if program is None:
            assert whole is not None
            return whole
        return program.report if whole is None else program.report.after(whole)


class Compiled:
    """A program for one signature. Calls take the dynamic arguments only."""

    def __init__(
        self,
        runner: Runner,
        call: Call,
        arguments: Arguments,
        traced: Any,
        options: Options,
        compile_report: CompileReport,
    ):
        self._runner = runner
        # What was compiled for it, and what was there.
        self.compile_report = compile_report
        self._in_tree = call.tree
        self._options = options
        self._arguments = arguments
        self._types = [
            (tuple(info.shape), info.dtype) for info in jax.tree.leaves(traced.args_info)
        ]
        self.out_info = traced.out_info

    @property
    def in_tree(self) -> Any:
        """The tree of the arguments: (positional, by name)."""
        return self._in_tree

    @property
    def out_tree(self) -> Any:
        """The tree of the results."""
        return jax.tree.structure(self.out_info)

    @property
    def input_shardings(self) -> Any:
        """Where each argument is taken to lie, in the arguments' tree."""
        device = self._arguments.device
        places = [placement.sharding(device, w.on_host) for w in self._arguments.whose]
        return jax.tree.unflatten(self._in_tree, places)

    def cost_analysis(self) -> dict[str, float]:
        """Floating-point operations and bytes accessed, of all tasks together."""
        return _cost_of(getattr(self._runner, "whole", None), self.plan)

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
        call = place(Call(args, kwargs, leaves, tree, ()), self._options)
        leaves = call.leaves
        for leaf, (shape, dtype), whose, name in zip(
            leaves, self._types, self._arguments.whose, self._arguments.names, strict=True
        ):
            found = leaf if isinstance(leaf, jax.Array) else jax.typeof(leaf)
            if (tuple(found.shape), found.dtype) != (shape, dtype):
                raise TypeError(
                    f"{name} was compiled as {dtype}{list(shape)}, not"
                    f" {found.dtype}{list(found.shape)}"
                )
            is_array = isinstance(leaf, jax.Array) and not whose.ours
            if is_array and placement.whose(leaf, False).on_host != whose.on_host:
                there = "in host memory" if whose.on_host else "on the device"
                raise ArgumentError(
                    f"{name} was compiled to be {there}, and is not. Move it with"
                    " jturnip.host or jax.device_put, or lower with an array like it."
                )
        call.check_alive(lambda: self._arguments.names)
        return self.call_flat(leaves)

    def call_flat(self, leaves: Sequence[Any]) -> Any:
        """Calls with leaves that are known to be right."""
        return self._runner.run(leaves)


def _cost_of(whole: Any | None, plan: Plan) -> dict[str, float]:
    if whole is not None:
        return dict(whole.cost_analysis() or {})
    costs = [_cost_of(None, piece) for piece in plan.pieces]
    tasks = plan.taskgraph.tasks
    costs.append(
        {
            "flops": sum(t.flops for t in tasks),
            "bytes accessed": sum(t.bytes_accessed for t in tasks),
        }
    )
    return {name: sum(c[name] for c in costs) for name in costs[-1]}


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
    return arguments if small <= gpu_bytes // 16 else _on_host_all(arguments)


def _on_host_all(arguments: Arguments) -> Arguments:
    """The same with small arguments in host memory too, until they are needed."""
    whose = tuple(Whose.OURS_HOST if w is Whose.OURS_DEVICE else w for w in arguments.whose)
    return dataclasses.replace(arguments, whose=whose)
