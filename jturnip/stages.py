"""The stages of a jturnip function, after `jax.stages`: Traced, Lowered, Compiled.

| stage | holds | allocates |
| --- | --- | --- |
| Traced | the jaxpr | nothing |
| Lowered | the flat function; `plan` when first asked for | nothing |
| Compiled | a program that can be called | what measuring its tasks takes, for a moment |
"""

import collections
import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.layout
from jax.core import Tracer

from jturnip import compat, lowering, memory, placement
from jturnip.compat import Device
from jturnip.compiler.executables import Trials, compile_whole
from jturnip.compiler.report import CompileReport
from jturnip.errors import ArgumentError, DoesNotFit, InlinedWarning, UnsupportedError
from jturnip.frontend.hints import names_a_place
from jturnip.frontend.jaxpr import flatten, pruned_arguments
from jturnip.frontend.values import FlatJaxpr, Type
from jturnip.graph.plan import Plan
from jturnip.pieces import PieceRunner, make_piece
from jturnip.placement import Arguments, Budget, Returned, Wanted, Whose
from jturnip.planner.strategies import STRATEGIES
from jturnip.programs import (
    Chain,
    How,
    Program,
    Straight,
    explained,
    make_program,
    refusal_of_budget,
    refusal_that_is_true,
    remeasured,
)
from jturnip.runners import (
    Moves,
    Runner,
    WholeRunner,
    least_whole_bytes,
    moves_of,
    whole_bytes,
    whole_plan,
)
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.report import RunReport
from jturnip.runtime.turns import Turn
from jturnip.signature import Call, Statics
from jturnip.units import format_bytes, padded


@dataclass(frozen=True)
class Part:
    """What is special about a part of a transformed function."""

    # Of each result the number of a group, which lies in one memory; None for a residual,
    # which stays on the device only if that leaves room for later parts.
    groups: tuple[int | None, ...]
    # Of each, whether it must be in host memory, or on the device, or None; or empty.
    on_host: tuple[bool | None, ...] = ()
    # Gives the function that will probably be called with the residuals, if one is known.
    later: Callable[[], Any] | None = None
    # Bytes of other residuals on the device, and those of them that are no arguments, for
    # which the budget was made smaller.
    residual_bytes: int = 0
    beside_bytes: int = 0

    @property
    def residuals(self) -> tuple[int, ...]:
        """Positions of results that may lie anywhere."""
        asked = self.on_host or (None,) * len(self.groups)
        both = enumerate(zip(self.groups, asked, strict=True))
        return tuple(i for i, of in both if of == (None, None))

    def returned(self, placed: Collection[int]) -> Returned:
        """How results belong together; those at `placed` do not."""
        numbers = {g for g in self.groups if g is not None}
        groups = (
            frozenset(i for i, g in enumerate(self.groups) if g == number)
            for number in sorted(numbers)
        )
        return Returned(tuple(group.difference(placed) for group in groups))


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
    # Whether arguments that nothing reads are parameters of the executable all the same.
    keep_unused: bool = False
    # The device to run on, or None, and options of XLA's compiler by name.
    device: Device | None = None
    compiler_options: tuple[tuple[str, Any], ...] = ()
    # Of a part of a transformed function.
    part: Part | None = None

    def __post_init__(self) -> None:
        known = ("auto", "whole", *STRATEGIES)
        if self.strategy not in known:
            raise ValueError(
                f"strategy={self.strategy!r} is not known; choose one of {', '.join(known)}"
            )


# Residuals stay on the device if together they take no more than this share of the budget,
# and more only if it is certain that there is room.
_RESIDUALS = 4


_OTHER_SHARDINGS = 'Give them a sharding with memory_kind="pinned_host", or none'
_GRADIENTS = "gradients of arguments that are not in pinned host memory"
_HOLD = "JAX has them on the device: hold the arguments with jturnip.host(tree)"


def placed(call: Call, options: Options) -> tuple[Call, tuple[Any, ...]]:
    """A call as `in_shardings` and `device` want it, and where each leaf is to be, or None.

    Leaves that it places are structs: they are put there when it is their turn.

    Raises:
      ValueError: `in_shardings` does not fit the arguments.
    """
    if options.in_shardings is None:
        if options.device is None:
            return call, (None,) * len(call.leaves)
        return _with_structs(call, [_moved(x, options.device) for x in call.leaves])
    dynamic, named = jax.tree.unflatten(call.tree, call.leaves)
    if named:
        raise ValueError("in_shardings does not go with keyword arguments")
    where = placement.broadcast_shardings(options.in_shardings, dynamic, "in_shardings")
    return _with_structs(call, where)


def _moved(leaf: Any, device: Device) -> Any:
    """Where a leaf is to be for a device, or None for where it is."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    if placement.device_of(leaf) in (device, None):
        return None
    return placement.sharding(device, placement.whose(leaf, False).on_host)


def _with_structs(call: Call, where: Sequence[Any]) -> tuple[Call, tuple[Any, ...]]:
    leaves = [
        leaf if s is None else Type.of(jax.typeof(leaf)).struct(s)
        for leaf, s in zip(call.leaves, where, strict=True)
    ]
    return dataclasses.replace(call, leaves=leaves), tuple(where)


def _wanted(out_info: Any, leaves: Sequence[Any], options: Options) -> Wanted:
    """Where the results of a call are to lie."""
    mesh = placement.mesh_of(leaves)
    if options.out_shardings is None:
        on_host = () if options.part is None else options.part.on_host
        return Wanted(on_host=on_host, mesh=mesh)
    found = placement.broadcast_shardings(options.out_shardings, out_info, "out_shardings")
    return Wanted(tuple(found), mesh=mesh)


class Traced:
    """A function traced for one signature."""

    def __init__(
        self, jitted: Any, statics: Statics, call: Call, options: Options, turn: Turn
    ):
        call, self._in_places = placed(call, options)
        self._options = options
        self._turn = turn
        self._in_tree = call.tree
        device, committed = placement.common_device(
            [*call.leaves, *placement.structs_of(options.out_shardings)]
        )
        if options.device is not None:
            device, committed = options.device, True
        self._traced = _trace(jitted, statics, call, device if committed else None)
        jaxpr = self._traced.jaxpr
        committed = committed or names_a_place(jaxpr)
        # Whether the function closes over values of an outer transformation, reads
        # references from outside, names an axis of `vmap`, or takes or gives tokens.
        consts = getattr(jaxpr, "consts", ())
        self._has_references = any(map(compat.is_reference, jaxpr.in_avals)) or any(
            isinstance(c, jax.Ref) for c in consts
        )
        self.is_not_closed = (
            len(jaxpr.in_avals) != len(call.leaves)
            or self._has_references
            or any(isinstance(c, Tracer) for c in consts)
            or compat.names_an_axis(jaxpr)
            or not all(map(compat.has_type, (*jaxpr.in_avals, *jaxpr.out_avals)))
        )
        donated = [info.donated for info in jax.tree.leaves(self._traced.args_info)]
        self._arguments = Arguments(
            tuple(map(placement.whose, call.leaves, donated)),
            statics.names(call),
            device,
            committed,
            options.compiler_options,
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

    @compat.api_boundary
    def lower(self, **exporting: Any) -> Any:
        """Takes the function apart; returns a `Lowered`.

        Args:
          exporting: what `jax.export` asks of `jax.jit`. It gets what `jax.jit` would give:
            what is exported is one executable, without a budget.
        """
        if exporting:
            return self._traced.lower(**exporting)
        if self._has_references:
            warnings.warn(
                f"{self.fun_name} reads references from outside. A call of it runs in the"
                " budget; what is lowered ahead of time is jax.jit's, and does not.",
                InlinedWarning,
                stacklevel=4,
            )
            return self._traced.lower()
        return Lowered(
            self._traced,
            self._in_tree,
            self._arguments,
            self._options,
            self._wanted,
            self._turn,
            self._in_places,
        )


class Lowered:
    """A function taken apart for one signature; its `plan` is made when first asked for."""

    def __init__(
        self,
        traced: Any,
        in_tree: Any,
        arguments: Arguments,
        options: Options,
        wanted: Wanted,
        turn: Turn,
        in_places: tuple[Any, ...],
    ):
        self._in_places = in_places
        self._traced = traced
        self._in_tree = in_tree
        self._options = options
        self._turn = turn
        self._wanted = wanted
        self.gpu_bytes = (
            options.gpu_bytes
            if options.gpu_bytes is not None
            else placement.free_device_bytes(arguments.device)
        )
        self._in_any_budget = arguments
        arguments = _with_room(arguments, traced, self.gpu_bytes)
        self._result_types = list(map(Type.of, jax.tree.leaves(traced.out_info)))
        if options.part is not None:
            self._wanted = self._with_residuals_away(options.part, arguments.device)
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
        # What was compiled before the function was refused.
        self._of_refusal: list[Any] = []
        self._lock = threading.RLock()
        self._check_results_fit()

    def _with_residuals_away(self, part: Part, device: Device) -> Wanted:
        """What is wanted, with the residuals for which no room is left in host memory."""
        arena = placement.arena_bytes(self.gpu_bytes, device)
        sizes = {i: padded(self._result_types[i].nbytes) for i in part.residuals}
        room = (arena + part.beside_bytes) // _RESIDUALS - part.residual_bytes
        if sum(sizes.values()) <= room:
            return self._wanted
        if part.later is not None:
            if lowering.alive_at_most(flatten(part.later().closed)) <= arena:
                return self._wanted
        on_host = list(self._wanted.on_host) or [None] * len(self._result_types)
        for i in sorted(sizes, key=lambda i: sizes[i]):
            room -= sizes[i]
            if room < 0:
                on_host[i] = True
        return dataclasses.replace(self._wanted, on_host=tuple(on_host))

    @property
    def _closed_over(self) -> list[Any]:
        if self._flat is None:
            return list(getattr(self._traced.jaxpr, "consts", ()))
        return [array for _, array in self._flat.constants]

    @functools.cached_property
    def _pruned(self) -> frozenset[int]:
        """Positions of arguments that nothing reads and that are not returned."""
        if self._flat is None:
            return pruned_arguments(self._traced.jaxpr)
        ignored = lowering.unread(self._flat)
        return frozenset(i for i, v in enumerate(self._flat.inputs) if v in ignored)

    def _arguments_there(self, held: Collection[Whose]) -> list[int]:
        """Positions of the arguments that are held so, and read or returned."""
        whose = enumerate(self._arguments.whose)
        return [i for i, w in whose if w in held and i not in self._pruned]

    def _argument_bytes(self, held: Collection[Whose]) -> int:
        infos = jax.tree.leaves(self._traced.args_info)
        there = self._arguments_there(held)
        return sum(padded(Type.of(infos[i]).nbytes) for i in there)

    def _staying_bytes(self) -> int:
        """Device bytes that are in use when a call is over, beside its results."""
        return self._argument_bytes((Whose.CALLER_DEVICE,)) + sum(
            padded(Type.of(array).nbytes)
            for array in self._closed_over
            if not lowering.constant_whose(array).on_host
        )

    def _check_results_fit(self) -> None:
        places = self._wanted.places(on_host=False)
        asked = sum(padded(self._result_types[i].nbytes) for i in places)
        if not asked:
            return
        staying = self._staying_bytes()
        device = self._arguments.device
        needed = placement.gpu_bytes_for(asked + staying, device)
        if needed > self.gpu_bytes:
            beside = (
                f", beside {format_bytes(staying)} of arguments and closed-over arrays"
                " there"
            )
            what, otherwise = (
                ("results that out_shardings places on the device", _OTHER_SHARDINGS)
                if self._wanted.shardings
                else (_GRADIENTS, _HOLD)
            )
            raise DoesNotFit(
                f"{what} take {format_bytes(asked)}{beside if staying else ''}; gpu_bytes"
                f" is {self.gpu_bytes} ({format_bytes(self.gpu_bytes)}). {otherwise}, or"
                f" raise gpu_bytes to at least {needed} ({format_bytes(needed)}).",
                needed_bytes=needed,
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

    @property
    def in_avals(self) -> Any:
        """Abstract values of the arguments, in their tree."""
        return _avals(self._traced)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated arguments among all leaves."""
        return _donated(self._traced.args_info)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The whole function as text, in StableHLO or another dialect, as `jax.jit` has it:
        what is split has no module of its own."""
        return self._traced.lower().as_text(dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The whole function as a module of a dialect, as `jax.jit` has it."""
        return self._traced.lower().compiler_ir(dialect)

    @property
    @compat.api_boundary
    def plan(self) -> Plan:
        """The plan, with estimated times. Compiles tasks to know their workspace.

        Raises:
          DoesNotFit, HostMemoryError, UnsupportedError: as `jturnip.jit` says.
        """
        return self._planned

    @functools.cached_property
    def minimum_gpu_bytes(self) -> int:
        """The smallest budget in which the function runs with its strategy, in bytes: less
        than that by 3% is refused. Compiles what it takes to know that.

        Raises:
          HostMemoryError, UnsupportedError: as `plan` does.
        """
        kept, least = [], 1
        while True:  # a refusal asks for what it knows of
            refusal = self._refused_in(least, kept)
            if refusal is None:
                break
            least = max(least + 1, refusal.needed_bytes)
        # Down by ever larger steps, then from what is refused up to that, by halves.
        step = 0.03
        while True:
            refused = int(least * (1 - step))
            if self._refused_in(refused, kept) is not None:
                break
            least, step = refused, min(2 * step, 0.5)
        while refused < int(least * 0.97):
            middle = max(refused + 1, min(int((refused * least) ** 0.5), int(least * 0.97)))
            if self._refused_in(middle, kept) is None:
                least = middle
            else:
                refused = middle
        return least

    def _refused_in(self, gpu_bytes: int, kept: list[Any]) -> DoesNotFit | None:
        """The refusal of another budget, if it is; keeps what is compiled for it."""
        options = dataclasses.replace(self._options, gpu_bytes=gpu_bytes)
        try:
            other = self._with_options(options, self._in_any_budget)
            kept.append(other)
            _ = other.plan
        except DoesNotFit as refusal:
            return refusal.with_traceback(None)
        return None

    @functools.cached_property
    def _planned(self) -> Plan:
        with self._lock:
            if self._whole is not None:
                return self._whole_plan[1]
            return self._program.plan

    @functools.cached_property
    def _whole_plan(self) -> tuple[Moves, Plan]:
        """What a whole call moves, and its figures."""
        pruned = () if self._options.keep_unused else self._pruned
        moves = moves_of(self._arguments, self._traced, self._wanted, pruned)
        return moves, whole_plan(self._compiled_whole[1], moves, self.gpu_bytes)

    @functools.cached_property
    def _whole(self) -> Any | None:
        """The function as one XLA executable if it fits and may run so, else None."""
        strategy = self._options.strategy
        if strategy not in ("auto", "whole"):
            return None
        if strategy == "auto" and self._least_whole_bytes > self.gpu_bytes:
            return None
        whole, needed = self._compiled_whole
        if whole is not None:
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
    def _compiled_whole(self) -> tuple[Any | None, int]:
        """The function as one XLA executable, if it fits, and the bytes that XLA says it
        needs."""
        whole, self._whole_report = compile_whole(
            self._traced, self._options.compiler_options
        )
        needed = whole_bytes(whole, self._closed_over)
        return whole if needed <= self.gpu_bytes else None, needed

    @functools.cached_property
    def _least_whole_bytes(self) -> int:
        """What the whole needs surely, known before it is compiled."""
        if self._flat is None:
            return 0
        unread = () if self._options.keep_unused else self._pruned
        return least_whole_bytes(self._flat, self._arguments, unread, self._closed_over)

    @functools.cached_property
    def _program(self) -> Program:
        return self._make_program()

    def _make_program(self, trials: Trials | None = None) -> Program:
        if self._refusal is not None:
            raise self._refusal
        how = self._how(trials)
        try:
            return self._made(how)
        except DoesNotFit as refusal:
            # Who is refused asks for more, and needs most of them again.
            self._of_refusal = how.executables
            raise self._at_most_whole(refusal) from None
        finally:
            how.known.clear()  # it knows itself, and by the trials this function

    def _at_most_whole(self, refusal: DoesNotFit) -> DoesNotFit:
        """A refusal that asks for no more than the whole function needs."""
        needed = refusal.needed_bytes
        if self._options.strategy != "auto" or needed <= self._least_whole_bytes:
            return refusal
        whole = self._compiled_whole[1]
        if needed <= whole:
            return refusal
        refusal = refusal_of_budget(refusal, refusal.gpu_bytes, whole)
        return DoesNotFit(
            f"{refusal} In that XLA fits the whole function: fused, it writes less down.",
            needed_bytes=whole,
            gpu_bytes=refusal.gpu_bytes,
        )

    def _made(self, how: How) -> Program:
        made = functools.partial(
            make_program,
            self._traced.jaxpr,
            _forwardable(self._given),
            to_host=self._wanted.places(on_host=True),
        )
        without_rows = self._without_rows()
        here = how if without_rows is None else dataclasses.replace(how, streams=False)
        own = Budget(self.gpu_bytes)
        try:
            return made(self._given, own, here)
        except DoesNotFit:
            self._given = _on_host_all(self._given)
        try:
            return made(self._given, own, here)
        except DoesNotFit as error:
            cut = uncut = error.with_traceback(None)
        if without_rows is not None:
            uncut = without_rows
        else:
            try:
                made(self._given, own, dataclasses.replace(how, axes=False))
            except DoesNotFit as error:
                uncut = error.with_traceback(None)
        make = lambda nbytes, how: made(self._given, Budget(nbytes), how)
        refusal = refusal_that_is_true(make, how, cut, uncut)
        raise explained(refusal, self._flat, self._arguments.device) from None

    def _without_rows(self) -> DoesNotFit | None:
        """The refusal of a budget that is surely too small to cut arrays by their rows
        only: into pieces so small, that would take long."""
        least = lowering.read_whole_bytes(self._traced.jaxpr)
        needed = placement.gpu_bytes_for(padded(least), self._arguments.device)
        if self.gpu_bytes >= needed:
            return None
        return DoesNotFit(
            f"an array that one product reads whole takes {format_bytes(least)};"
            f" gpu_bytes is {self.gpu_bytes} ({format_bytes(self.gpu_bytes)}). Raise it to"
            f" at least {needed} ({format_bytes(needed)}).",
            needed_bytes=needed,
            gpu_bytes=self.gpu_bytes,
        )

    def _how(self, trials: Trials | None) -> How:
        placed = self._wanted.places(on_host=False) | self._wanted.places(on_host=True)
        if self._options.part is not None:
            returned = self._options.part.returned(placed)
        else:
            infos = self._traced.out_info, self._traced.args_info
            returned = Returned.of(*infos, placed)
        return How(
            self._options.strategy,
            self._options.link,
            trials,
            self._finest,
            returned=returned,
        )

    def _trials(self) -> Trials:
        """What trying tasks out may take while nothing of the function runs.

        The arguments are there already, wherever the plan has them later.
        """
        there = self._argument_bytes([w for w in Whose if not w.on_host and not w.ours])
        there += memory.device_bytes(self._closed_over)
        arena = placement.arena_bytes(self.gpu_bytes, self._arguments.device)
        return Trials(there, arena - there, self._alone)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._turn.check()
        with self._turn.lock:
            self._turn.alone(None)
            yield

    def _measured_program(self, trials: Trials) -> Program:
        """The program with measured times; what was planned before them is used again."""
        if "_program" in self.__dict__:
            again = remeasured(self._program, self.gpu_bytes, self._how(trials))
            if again is not None:
                return again
        return self._make_program(trials)

    @compat.api_boundary
    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        """Compiles what is not compiled yet, measures the tasks, and plans with that.

        Args:
          compiler_options: more of XLA's options, for every executable.
        """
        if compiler_options:
            return self._with(compiler_options).compile()
        with self._lock:
            program = None
            if self._whole is not None:
                moves, plan = self._whole_plan
                runner: Runner = WholeRunner(
                    self._whole,
                    self._in_tree,
                    self._arguments,
                    plan,
                    moves,
                    self._flat,
                    self._wanted,
                    self._turn,
                    self._in_places,
                )
            else:
                trials = self._trials()
                program = self._measured_program(trials)
                self._warn_of_useless_donations()
                piece = make_piece(program, self._options.link)
                back = self._coming_back(program)
                wanted = dataclasses.replace(
                    self._wanted,
                    back=back,
                    back_bytes=sum(self._result_types[i].nbytes for i in back),
                    committed=self._arguments.committed,
                )
                runner = PieceRunner(
                    piece,
                    self._traced.out_tree,
                    wanted,
                    [t.weak_type for t in self._result_types],
                    self._turn,
                    self._arguments_there((Whose.CALLER_DEVICE,)),
                    sum(program.constants.values()) + placement.MARKS,
                    trials.peak_bytes,
                    self._in_places,
                )
            report = self._compile_report(program)
        return Compiled(
            runner, self._in_tree, self._arguments, self._traced, self._options, report
        )

    def _warn_of_useless_donations(self) -> None:
        """As `jax.jit` does, where it did not see the function whole."""
        if self._whole_report is not None:
            return
        results = collections.Counter((t.shape, t.dtype) for t in self._result_types)
        useless = []
        for info in jax.tree.leaves(self._traced.args_info):
            if info.donated:
                kind = Type.of(info).shape, Type.of(info).dtype
                results[kind] -= 1
                if results[kind] < 0:
                    useless.append(f"{info.dtype}{list(info.shape)}")
        if useless:
            warnings.warn(
                f"Some donated buffers were not usable: {', '.join(useless)}.",
                UserWarning,
                stacklevel=4,
            )

    def _with(self, compiler_options: dict[str, Any]) -> "Lowered":
        """The same function, to be compiled with more options."""
        merged = {**dict(self._options.compiler_options), **compiler_options}
        options = dataclasses.replace(
            self._options, compiler_options=tuple(sorted(merged.items()))
        )
        arguments = dataclasses.replace(
            self._given, compiler_options=options.compiler_options
        )
        return self._with_options(options, arguments)

    def _with_options(self, options: Options, arguments: Arguments) -> "Lowered":
        return Lowered(
            self._traced,
            self._in_tree,
            arguments,
            options,
            self._wanted,
            self._turn,
            self._in_places,
        )

    def _coming_back(self, program: Program) -> tuple[int, ...]:
        """Results that a program leaves in host memory although there is room for them, and
        nobody asked for them there."""
        assert isinstance(program, Straight | Chain)
        ends = enumerate(program.ends_on_host)
        return tuple(i for i, away in ends if away and i not in program.to_host)

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
        in_tree: Any,
        arguments: Arguments,
        traced: Any,
        options: Options,
        compile_report: CompileReport,
    ):
        self._runner = runner
        # What was compiled for it, and what was there.
        self.compile_report = compile_report
        self._in_tree = in_tree
        self._options = options
        self._arguments = arguments
        self._types = list(map(Type.of, jax.tree.leaves(traced.args_info)))
        self.out_info = traced.out_info
        self.args_info = traced.args_info
        # Abstract values of the arguments, in their tree.
        self.in_avals = _avals(traced)

    @property
    def in_tree(self) -> Any:
        """The tree of the arguments: (positional, by name)."""
        return self._in_tree

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated arguments among all leaves."""
        return _donated(self.args_info)

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

    def __getattr__(self, name: str) -> Any:
        """What else `jax.stages.Compiled` has, of a function that runs whole."""
        whole = getattr(self.__dict__.get("_runner"), "whole", None)
        if whole is None or name.startswith("__"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
                + ("; the function is split, and is no one executable" * (whole is None))
            )
        return getattr(whole, name)

    @property
    def input_formats(self) -> Any:
        """The same with layouts, which are JAX's own choice."""
        places = jax.tree.leaves(self.input_shardings)
        formats = [jax.experimental.layout.Format(None, place) for place in places]
        return jax.tree.unflatten(self._in_tree, formats)

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
        """XLA's own text where the function runs whole, else the plan in a few lines."""
        whole = getattr(self._runner, "whole", None)
        return self.plan.summary() if whole is None else whole.as_text()

    def runtime_executable(self) -> Any:
        """XLA's executable where the function runs whole, else the plan."""
        whole = getattr(self._runner, "whole", None)
        return self.plan if whole is None else whole.runtime_executable()

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self._in_tree:
            raise TypeError(
                "Function compiled with input pytree does not match the input pytree it was"
                f" called with: compiled for {self._in_tree}, called with {tree}"
            )
        for leaf in leaves:
            if isinstance(leaf, Tracer):
                raise TypeError(
                    "Cannot apply JAX transformations to a function lowered and compiled"
                    " for a particular signature. Detected argument of Tracer type"
                    f" {type(leaf)}. Transform what jturnip.jit returned instead."
                )
        given = Call(args, kwargs, leaves, tree, ())
        call, _ = placed(given, self._options)
        self._check_types(call.leaves)
        for leaf, whose, name in zip(
            call.leaves, self._arguments.whose, self._arguments.names, strict=True
        ):
            is_array = isinstance(leaf, jax.Array) and not whose.ours
            if is_array and placement.whose(leaf, False).on_host != whose.on_host:
                there = "in host memory" if whose.on_host else "on the device"
                raise ArgumentError(
                    f"{name} was compiled to be {there}, and is not. Move it with"
                    " jturnip.host or jturnip.device, or lower with an array like it."
                )
        given.check_alive(lambda: self._arguments.names)
        return self.call_flat(leaves)

    def _check_types(self, leaves: Sequence[Any]) -> None:
        differing = []
        for leaf, t, name in zip(leaves, self._types, self._arguments.names, strict=True):
            has_type = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
            found = Type.of(leaf if has_type else jax.typeof(leaf))
            if (found.shape, found.dtype) != (t.shape, t.dtype):
                differing.append(
                    f"Argument '{name}' compiled with {t.dtype}{list(t.shape)} and called"
                    f" with {found.dtype}{list(found.shape)}"
                )
        if differing:
            raise TypeError(
                "Argument types differ from the types for which this computation was"
                " compiled. The mismatches are:\n" + "\n".join(differing)
            )

    def call_flat(self, leaves: Sequence[Any]) -> Any:
        """Calls with leaves that are known to be right."""
        return self._runner.run(leaves)


def _avals(traced: Any) -> Any:
    tree = jax.tree.structure(traced.args_info)
    return jax.tree.unflatten(tree, traced.jaxpr.in_avals)


def _donated(args_info: Any) -> tuple[int, ...]:
    infos = enumerate(jax.tree.leaves(args_info))
    return tuple(i for i, info in infos if info.donated)


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
    args, kwargs = statics.with_leaves(call, anywhere(call.leaves, sharding))
    with compat.tracing():
        return jitted.trace(*args, **kwargs)


def anywhere(leaves: Sequence[Any], sharding: Any = None) -> list[Any]:
    """Leaves of a call, with structs in the place of arrays, on one device or on any."""

    def strip(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, weak_type=weak, sharding=sharding
        )

    return list(map(strip, leaves))


def _forwardable(arguments: Arguments) -> frozenset[int]:
    """Arguments that may be returned as they are: the caller has given them up."""
    return frozenset(i for i, w in enumerate(arguments.whose) if w.donated)


def _with_room(arguments: Arguments, traced: Any, gpu_bytes: int) -> Arguments:
    """Small arguments start on the device as long as they are next to nothing together."""
    small = sum(
        Type.of(info).nbytes
        for info, w in zip(jax.tree.leaves(traced.in_avals), arguments.whose, strict=True)
        if w is Whose.OURS_DEVICE
    )
    return arguments if small <= gpu_bytes // 16 else _on_host_all(arguments)


def _on_host_all(arguments: Arguments) -> Arguments:
    """The same with small arguments in host memory too, until they are needed."""
    whose = tuple(Whose.OURS_HOST if w is Whose.OURS_DEVICE else w for w in arguments.whose)
    return dataclasses.replace(arguments, whose=whose)
