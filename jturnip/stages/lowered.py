"""The second stage: a function taken apart, and its plan when first asked for."""

import collections
import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from jturnip import compat, memory, placement
from jturnip.compiler.executables import compile_whole
from jturnip.compiler.report import CompileReport, Spent
from jturnip.compiler.trials import Trials
from jturnip.errors import DoesNotFit, HostMemoryError, UnsupportedError
from jturnip.frontend.effort import Effort
from jturnip.frontend.flatten import flatten
from jturnip.frontend.inline import pruned_arguments
from jturnip.frontend.loops import LOOPS_AND_BRANCHES
from jturnip.frontend.streaming import Passes
from jturnip.frontend.values import FlatJaxpr, Type
from jturnip.graph.plan import Plan
from jturnip.hardware import Accelerator, HostLink, accelerator, host_link
from jturnip.placement import Arguments, Budget, Returned, Wanted, Whose
from jturnip.planner.planner import refusal_of_budget
from jturnip.programs import bounds, places
from jturnip.programs.bounds import least_whole_bytes, whole_bytes
from jturnip.programs.calibration import calibrate
from jturnip.programs.devices import link_of, rates
from jturnip.programs.keeping import bytes_at_end, keeping
from jturnip.programs.make import make_program, or_in_blocks, remeasured, searched
from jturnip.programs.records import Chain, How, Program, Straight
from jturnip.programs.refusals import explained, refusal_that_is_true
from jturnip.programs.smallest import smallest
from jturnip.runners.function import Outermost, ProgramRunner, Runner
from jturnip.runners.pieces import make_outermost
from jturnip.runners.whole import Moves, WholeRunner, moves_of, whole_plan
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.schedule import Link
from jturnip.runtime.turns import Turn
from jturnip.stages import prediction, residuals
from jturnip.stages.compiled import Compiled, avals, cost_of, donated
from jturnip.stages.options import Options, Part
from jturnip.stages.prediction import Prediction
from jturnip.units import format_bytes, padded


# How long is looked for a plan where it is only asked whether there is one, as a share of
# what is usual.
_PATIENCE = 0.1
# Loops are taken apart where an array that one product reads whole takes no more than so
# many times the budget: it is cut into as many parts, in each iteration.
_TIMES_CUT = 16
_OTHER_SHARDINGS = 'Give them a sharding with memory_kind="pinned_host", or none'
_GRADIENTS = "gradients of arguments that are not in pinned host memory"
_HOLD = "JAX has them on the device: hold the arguments with jturnip.host(tree)"


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
        self._asked = wanted
        if options.part is not None:
            self._wanted = self._with_residuals_away(options.part, arguments)
        self._refusal: UnsupportedError | None = None
        self._passes = Passes()
        self._flat: FlatJaxpr | None = None
        # Of the whole function, also where it does not fit.
        self._whole_report: CompileReport | None = None
        try:
            platform = compat.lowering_platform(arguments.device)
            self._flat = flatten(
                traced.jaxpr, _forwardable(arguments), seen=self._passes.seen(platform)
            )
        except UnsupportedError as error:
            self._refusal = error
        self._given = arguments
        self._arguments = (
            arguments if self._flat is None else places.kept(arguments, self._flat)
        )
        # Whether every equation is to be a task of its own, for study.
        self._finest = False
        # Whether it is only asked whether there is a plan.
        self._any_plan = False
        # Whether the user says how much memory is the function's.
        self._has_own_budget = options.gpu_bytes is not None
        # What it is planned for, where it is to be predicted and not to be run.
        self._accelerator: Accelerator | None = None
        self._link: SimulatedLink | Link | None = options.link
        # What was compiled for predictions: the next needs most of it again.
        self._of_prediction: list[Any] = []
        # What was compiled for it, in whichever ways it was cut.
        self._spent = Spent()
        # What was compiled before the function was refused.
        self._of_refusal: list[Any] = []
        self._lock = threading.RLock()
        self._check_results_fit()

    def _with_residuals_away(self, part: Part, arguments: Arguments) -> Wanted:
        """What is wanted, with the residuals for which no room is left in host memory."""
        device = arguments.device
        arena = placement.arena_bytes(self.gpu_bytes, device.platform)
        given = self._structs_of_arguments(arguments)
        away = residuals.away(part, self._result_types, given, device, arena)
        if not away:
            return self._wanted
        on_host = list(self._wanted.on_host) or [None] * len(self._result_types)
        for i in away:
            on_host[i] = True
        return dataclasses.replace(self._wanted, on_host=tuple(on_host))

    def _structs_of_arguments(self, arguments: Arguments) -> list[jax.ShapeDtypeStruct]:
        """The arguments, with where they lie; without that, what is made for a call."""
        infos = jax.tree.leaves(self._traced.args_info)
        where = (
            None if w.ours else placement.sharding(arguments.device, w.on_host)
            for w in arguments.whose
        )
        return [Type.of(info).struct(s) for info, s in zip(infos, where, strict=True)]

    def __repr__(self) -> str:
        name = getattr(self._traced, "fun_name", "a function")
        return f"<Lowered of {name} in {format_bytes(self.gpu_bytes)}>"

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
        ignored = places.unread(self._flat)
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
            if not places.constant_whose(array).on_host
        )

    @property
    def _is_asked(self) -> bool:
        return self._options.part is not None and self._options.part.is_asked

    def _check_results_fit(self) -> None:
        places = self._wanted.places(on_host=False)
        asked = sum(padded(self._result_types[i].nbytes) for i in places)
        if not asked:
            return
        staying = self._staying_bytes()
        device = self._arguments.device
        needed = placement.gpu_bytes_for(asked + staying, device.platform)
        if needed > self.gpu_bytes:
            if not self._is_asked:
                needed = self._works_from(needed)
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

    def _works_from(self, gpu_bytes: int) -> int:
        """The first budget of at least so many bytes in which there is a plan: what the
        results leave must do for the rest."""
        kept: list[Any] = []
        while (refusal := self._refused_in(gpu_bytes, kept)) is not None:
            gpu_bytes = max(gpu_bytes + 1, refusal.needed_bytes)
        return gpu_bytes

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
        return cost_of(self._whole, self.plan)

    @property
    def in_avals(self) -> Any:
        """Abstract values of the arguments, in their tree."""
        return avals(self._traced)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated arguments among all leaves."""
        return donated(self._traced.args_info)

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
        kept: list[Any] = []
        return smallest(functools.partial(self._refused_in, kept=kept))

    @functools.cached_property
    def refusal(self) -> DoesNotFit | None:
        """The refusal of the budget, if it is refused. Compiles tasks, and runs none; who
        is asked so has any plan, not the best."""
        self._any_plan = True
        try:
            _ = self._whole is not None or self._program
        except DoesNotFit as refusal:
            return refusal.with_traceback(None)
        except HostMemoryError as error:
            # Which budget leaves the host enough nobody knows; none does where not even
            # that of all values at once does.
            types = () if self._flat is None else self._flat.types
            if self.gpu_bytes > 2 * sum(padded(t.nbytes) for t in types):
                raise
            more = 3 * self.gpu_bytes // 2 + 1
            return DoesNotFit(str(error), needed_bytes=more, gpu_bytes=self.gpu_bytes)
        return None

    @functools.cached_property
    def seconds_asked(self) -> float | None:
        """Seconds of a call as expected, in any plan: none as one executable; None where it
        is refused. Compiles tasks, and runs none."""
        self._any_plan = True
        try:
            whole = self._whole is not None
            return 0.0 if whole else self._program.plan.predicted_seconds
        except (DoesNotFit, HostMemoryError, UnsupportedError):
            return None

    def _refused_in(self, gpu_bytes: int, kept: list[Any]) -> DoesNotFit | None:
        """The refusal of another budget, if it is; keeps what is compiled for it."""
        options = dataclasses.replace(self._options, gpu_bytes=gpu_bytes)
        try:
            other = self._with_options(options, self._in_any_budget)
        except DoesNotFit as refusal:
            return refusal.with_traceback(None)
        kept.append(other)
        return other.refusal

    @functools.cached_property
    def _planned(self) -> Plan:
        with self._lock:
            if self._whole is not None:
                return self._whole_plan[1]
            return self._with_kept(self._program).plan

    @functools.cached_property
    def _whole_plan(self) -> tuple[Moves, Plan]:
        """What a whole call moves, and its figures."""
        pruned = () if self._options.keep_unused else self._pruned
        moves = moves_of(self._arguments, self._traced, self._wanted, pruned, self._keeps)
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

    def _make_program(
        self, trials: Trials | None = None, used: list[Any] | None = None
    ) -> Program:
        """The program; `used` grows by the executables."""
        if self._refusal is not None:
            raise self._refusal
        how = self._how(trials)
        if used is not None:
            how = dataclasses.replace(how, executables=used)
        try:
            return searched(self._made(how), Budget(self.gpu_bytes), how)
        except DoesNotFit as refusal:
            # Who is refused asks for more, and needs most of them again.
            self._of_refusal = how.executables
            raise self._at_most_whole(refusal) from None
        finally:
            self._passes.clear()
            how.known.clear()  # it knows itself, and by the trials this function
            how.needs.clear()

    def _runs_whole_in(self, nbytes: int) -> bool:
        """Whether XLA fits the whole function in so many bytes, and it may run so. It is
        compiled only where that is possible."""
        is_auto, least = self._options.strategy == "auto", self._least_whole_bytes
        return is_auto and nbytes > least and nbytes >= self._compiled_whole[1]

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
        closed, forwarded = self._traced.jaxpr, _forwardable(self._given)
        to_host = self._wanted.places(on_host=True)
        made = functools.partial(make_program, closed, forwarded, to_host=to_host)
        without_rows = self._without_rows()
        here = how if without_rows is None else dataclasses.replace(how, streams=False)
        own = Budget(self.gpu_bytes)

        def uncut(thorough: bool = False) -> Program:
            as_it_is = dataclasses.replace(here, axes=False, thorough=thorough)
            program = made(self._given, own, as_it_is)
            return or_in_blocks(program, closed, forwarded, self._given, own, here, to_host)

        # As it is; then with what is ours in host memory; then cut along axes, with loops
        # in one piece first.
        try:
            return uncut()
        except DoesNotFit:
            self._given = _on_host_all(self._given)
        with contextlib.suppress(DoesNotFit):
            return uncut()
        ways = [here]
        if without_rows is not None and self._may_take_loops_apart(without_rows):
            ways.append(how)
        refusals: list[DoesNotFit] = []
        for way in ways:
            try:
                return made(self._given, own, way)
            except DoesNotFit as error:
                refusals.append(error.with_traceback(None))
        cut = min(refusals, key=lambda refusal: refusal.needed_bytes)
        if self._is_asked:
            raise cut
        by_rows = without_rows
        if by_rows is None:  # what was hopeless is cut, to know what it needs then
            try:
                return uncut(thorough=True)
            except DoesNotFit as error:
                by_rows = error.with_traceback(None)
        make = lambda nbytes, how: made(self._given, Budget(nbytes), how)
        refusal = refusal_that_is_true(make, how, cut, by_rows, self._runs_whole_in)
        raise explained(refusal, self._flat, self._arguments.device) from None

    def _may_take_loops_apart(self, refusal: DoesNotFit) -> bool:
        """Whether what cannot be cut along rows may do with loops that are driven, and cut
        along axes inside."""
        equations = () if self._flat is None else self._flat.equations
        return (
            any(e.name in LOOPS_AND_BRANCHES for e in equations)
            and refusal.needed_bytes <= _TIMES_CUT * self.gpu_bytes
        )

    def _without_rows(self) -> DoesNotFit | None:
        """The refusal of a budget that is surely too small to cut arrays by their rows
        only: into pieces so small, that would take long."""
        least = bounds.read_whole_bytes(self._traced.jaxpr)
        needed = placement.gpu_bytes_for(padded(least), self._arguments.device.platform)
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
            self._link,
            trials,
            self._finest,
            returned=returned,
            accelerator=self._accelerator,
            any_plan=self._any_plan,
            spent=self._spent,
            passes=self._passes,
            effort=Effort(patience=_PATIENCE if self._is_asked else 1.0),
        )

    @property
    def _keeps(self) -> bool:
        """Whether arrays in host memory may stay on the device between calls."""
        return self._has_own_budget and self._options.part is None and not self._finest

    def _with_kept(self, program: Program) -> Program:
        """The program of a call after others with the same arrays in host memory."""
        if not self._keeps:
            return program
        there = self._wanted.places(on_host=False)
        return keeping(program, Budget(self.gpu_bytes), self._how(None), there)

    def _trials(self) -> Trials:
        """What trying tasks out may take while nothing of the function runs.

        The arguments are there already, wherever the plan has them later.
        """
        there = self._argument_bytes([w for w in Whose if not w.on_host and not w.ours])
        there += memory.device_bytes(self._closed_over)
        arena = placement.arena_bytes(self.gpu_bytes, self._arguments.device.platform)
        return Trials(there, arena - there, self._alone)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._turn.check()
        with self._turn.lock:
            self._turn.alone(None)
            yield

    def _measured_program(self, trials: Trials, used: list[Any] | None = None) -> Program:
        """The program with measured times; what was planned before them is used again.
        `used` grows by the executables."""
        if self._refusal is None:  # it decides what is moved, and what is made anew
            calibrate(self._arguments.device, trials)
        if "_program" in self.__dict__:
            again = remeasured(self._program, self.gpu_bytes, self._how(trials))
            if again is not None:
                return again
        return self._make_program(trials, used)

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
                program = once = self._measured_program(trials)
                how, link = self._how(None), self._options.link
                again = None
                if self._keeps:
                    program = self._with_kept(once)
                    there = self._wanted.places(on_host=False)
                    budget = self.gpu_bytes
                    again = functools.partial(_again, once, budget, how, link, there)
                self._warn_of_useless_donations()
                piece = make_outermost(program, link)
                back = self._coming_back(program)
                wanted = dataclasses.replace(
                    self._wanted,
                    back=back,
                    back_bytes=sum(self._result_types[i].nbytes for i in back),
                    committed=self._arguments.committed,
                )
                runner = ProgramRunner(
                    piece,
                    self._traced.out_tree,
                    wanted,
                    [t.weak_type for t in self._result_types],
                    self._turn,
                    self._arguments.device,
                    self._arguments_there((Whose.CALLER_DEVICE,)),
                    sum(program.constants.values()) + placement.MARKS,
                    trials.peak_bytes,
                    bytes_at_end(program, self._wanted.places(on_host=False)),
                    self._in_places,
                    self._arguments_there((Whose.CALLER_HOST,)),
                    again,
                )
            report = self._compile_report(program)
        return Compiled(
            runner, self._in_tree, self._arguments, self._traced, self._options, report
        )

    @compat.api_boundary
    def predict(
        self, device: str | Accelerator | None = None, link: str | HostLink | None = None
    ) -> Prediction:
        """What a call would take on a device, over a link, in this budget.

        With a device named, nothing runs and no arrays are made: the time of each task is
        the larger of XLA's operations over the device's arithmetic and XLA's bytes over its
        memory, and one launch. With these and the link's rates the function is planned
        and simulated. The tasks are those a GPU would get, but compiled for the backend at
        hand: its workspace, its fusion and its counts are not quite a GPU's, and a GPU's
        plan leaves a fiftieth of the budget to the allocator. So take it for what is
        possible, not for a promise. Whether this machine's host memory could hold what
        leaves the device does not count.

        Without a device it is the machine at hand: tasks are measured, as `compile` does,
        which needs device memory for a moment.

        Args:
          device: a name in `jturnip.ACCELERATORS`, a record of your own, or None for the
            device at hand. Without a budget, the function has nine tenths of the memory of
            the device.
          link: a name in `jturnip.LINKS`, a record of your own, or None for what the
            device usually has; of the device at hand, for the function's own `link`, or
            what is expected of the link there.

        Raises:
          ValueError: the name is not known, or the budget is more than the device has.
          DoesNotFit, UnsupportedError: as `plan` does.
        """
        on = None if device is None else accelerator(device)
        over = None if link is None else host_link(link)
        if on is not None and over is None:
            over = host_link(on.link)
        with self._lock:
            made = self._elsewhere(on, over)
            name = on.name if on else f"{self._arguments.device.device_kind} as measured"
            simulated = self._options.link is not None
            at_hand = "a simulated link" if simulated else "the link at hand"
            names = name, over.name if over else at_hand
            if made._whole is not None:
                plan, seconds = made._whole_plan[1], made._whole_seconds(made._whole)
                expected = link_of(made._arguments.device, made._link)
                return prediction.of_whole(plan, seconds, expected, *names)
            if on is None:
                program = made._measured_program(made._trials(), self._of_prediction)
            else:
                program = made._make_program(used=self._of_prediction)
            return prediction.of_split(made._with_kept(program).plan, *names)

    def _elsewhere(self, on: Accelerator | None, over: HostLink | None) -> "Lowered":
        """The same function on an accelerator, over a link; None for what it has here."""
        if on is None and over is None:
            return self
        options = dataclasses.replace(self._options, gpu_bytes=self.gpu_bytes)
        if on is not None and on.memory_bytes is not None:
            if self._options.gpu_bytes is None:
                options = dataclasses.replace(options, gpu_bytes=on.memory_bytes * 9 // 10)
            elif self.gpu_bytes > on.memory_bytes:
                raise ValueError(
                    f"gpu_bytes is {format_bytes(self.gpu_bytes)};"
                    f" {on.name} has {format_bytes(on.memory_bytes)}"
                )
        made = self._with_options(options, self._in_any_budget)
        made._accelerator = on
        if over is not None:
            made._link = Link(
                over.h2d_bytes_per_second, over.d2h_bytes_per_second, over.latency_seconds
            )
        made._finest = self._finest
        made._has_own_budget = self._has_own_budget
        if made.gpu_bytes == self.gpu_bytes and self._whole is not None:
            made._compiled_whole, made._whole_report = (
                self._compiled_whole,
                self._whole_report,
            )
        return made

    def _whole_seconds(self, whole: Any) -> float:
        """Seconds of the function as one executable."""
        jaxpr = self._traced.jaxpr
        if self._accelerator is not None:
            return prediction.whole_seconds_on(self._accelerator, whole, jaxpr)
        device = self._arguments.device

        def call(leaves: Sequence[Any]) -> Any:
            args, kwargs = jax.tree.unflatten(self._in_tree, leaves)
            return whole(*args, **kwargs)

        measured = prediction.whole_seconds_here(
            whole,
            jaxpr,
            self._traced.args_info,
            call,
            self._compiled_whole[1],
            placement.sharding(device, on_host=False),
            self._trials(),
        )
        return measured or rates(device).seconds(*prediction.cost(whole))

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
            self._asked,
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
        report = self._spent.in_all(program.report)
        return report if whole is None else report.after(whole)


def _again(
    program: Program,
    gpu_bytes: int,
    how: How,
    link: SimulatedLink | None,
    on_device: frozenset[int],
    not_kept: frozenset[int],
) -> Outermost:
    """What runs a program that keeps some arguments between calls, but not these."""
    again = keeping(program, Budget(gpu_bytes), how, on_device, not_kept)
    return make_outermost(again, link)


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
