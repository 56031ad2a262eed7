"""A function in its budget: as one executable where XLA fits it, else as tasks."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jturnip import placement
from jturnip.compiler.executables import compile_whole, pruned
from jturnip.compiler.report import CompileReport, Spent
from jturnip.compiler.trials import Trials
from jturnip.errors import DoesNotFit, HostMemoryError
from jturnip.frontend.effort import Effort
from jturnip.frontend.loops import LOOPS_AND_BRANCHES
from jturnip.graph.plan import Plan
from jturnip.placement import Budget, Returned, Wanted
from jturnip.planner.planner import refusal_of_budget
from jturnip.programs import bounds
from jturnip.programs.bounds import least_whole_bytes, whole_bytes
from jturnip.programs.calibration import calibrate
from jturnip.programs.keeping import keeping
from jturnip.programs.make import (
    make_program,
    may_be_slower,
    or_unrolled,
    remeasured,
    searched,
    unrolled_first,
)
from jturnip.programs.records import Program
from jturnip.programs.refusals import explained, refusal_that_is_true
from jturnip.programs.setting import WAYS, Function, How, Setting
from jturnip.programs.ways import or_in_blocks, surely_in_tiles
from jturnip.runners.whole import Moves, moves_of, whole_plan
from jturnip.stages import residuals
from jturnip.stages.asked import Asked
from jturnip.stages.flattened import Flattened, forwardable, on_host_all
from jturnip.units import format_bytes, padded


# How long is looked for a plan where it is only asked what a part would take, as a share of
# what is usual.
_PATIENCE = 0.06
# Loops are taken apart where an array that one product reads whole takes no more than so
# many times the budget: it is cut into as many parts, in each iteration.
_TIMES_CUT = 16
_OTHER_SHARDINGS = 'Give them a sharding with memory_kind="pinned_host", or none'
_GRADIENTS = "gradients of arguments that are not in pinned host memory"
_HOLD = "JAX has them on the device: hold the arguments with jturnip.host(tree)"


class Budgeted:
    """A function in its budget. What it compiles and plans, it does when first asked.

    Raises:
      DoesNotFit: the results that belong on the device have no room there.
    """

    def __init__(self, asked: Asked):
        self.asked = asked
        device, own = asked.arguments.device, asked.options.gpu_bytes
        self.gpu_bytes = placement.free_device_bytes(device) if own is None else own
        self.arena = placement.arena_bytes(self.gpu_bytes, device.platform)
        self.flattened = Flattened(asked, self.gpu_bytes)
        self.wanted = self._with_residuals_away()
        # The arguments; small ones in host memory too once there was no room for them.
        self._given = self.flattened.given
        # Of the whole function, also where it does not fit.
        self._whole_report: CompileReport | None = None
        # What was compiled for it, in whichever ways it was cut, and before a refusal.
        self._spent = Spent()
        self._of_refusal: list[Any] = []
        self._refuse_results_without_room()

    # --- Results.

    def _with_residuals_away(self) -> Wanted:
        """What is wanted, with the residuals for which no room is left in host memory."""
        wanted, part, flattened = self.asked.wanted, self.asked.options.part, self.flattened
        if part is None:
            return wanted
        types, device = flattened.result_types, flattened.given.device
        given = flattened.structs_given()
        away = residuals.away(part, types, given, device, self.arena)
        if not away:
            return wanted
        on_host = list(wanted.on_host) or [None] * len(types)
        for i in away:
            on_host[i] = True
        return dataclasses.replace(wanted, on_host=tuple(on_host))

    def _refuse_results_without_room(self) -> None:
        flattened = self.flattened
        places = self.wanted.places(on_host=False)
        results = sum(padded(flattened.result_types[i].nbytes) for i in places)
        if not results:
            return
        staying, platform = flattened.staying_bytes, flattened.given.device.platform
        needed = placement.gpu_bytes_for(results + staying, platform)
        if needed > self.gpu_bytes:
            if not self.asked.is_asked:
                needed = self._works_from(needed)
            beside = (
                f", beside {format_bytes(staying)} of arguments and closed-over arrays"
                " there"
            )
            what, otherwise = (
                ("results that out_shardings places on the device", _OTHER_SHARDINGS)
                if self.wanted.shardings
                else (_GRADIENTS, _HOLD)
            )
            raise DoesNotFit(
                f"{what} take {format_bytes(results)}{beside if staying else ''}; gpu_bytes"
                f" is {self.gpu_bytes} ({format_bytes(self.gpu_bytes)}). {otherwise}, or"
                f" raise gpu_bytes to at least {needed} ({format_bytes(needed)}).",
                needed_bytes=needed,
                gpu_bytes=self.gpu_bytes,
            )

    def _works_from(self, gpu_bytes: int) -> int:
        """The first budget of at least so many bytes in which there is a plan: what the
        results leave must do for the rest."""
        kept: list[Any] = []
        while (refusal := refused_in(self.asked, gpu_bytes, kept)) is not None:
            gpu_bytes = max(gpu_bytes + 1, refusal.needed_bytes)
        return gpu_bytes

    # --- The whole function as one executable.

    @functools.cached_property
    def whole(self) -> Any | None:
        """The function as one XLA executable if it fits and may run so, else None."""
        strategy = self.asked.options.strategy
        if strategy not in ("auto", "whole"):
            return None
        if strategy == "auto" and self._least_whole_bytes > self.gpu_bytes:
            return None
        whole, needed = self.compiled_whole
        if whole is not None:
            return whole
        if strategy == "whole":
            raise DoesNotFit(
                f"the whole function needs {format_bytes(needed)}; gpu_bytes is"
                f' {format_bytes(self.gpu_bytes)}. Use strategy="auto".',
                needed_bytes=needed,
                gpu_bytes=self.gpu_bytes,
            )
        if self.flattened.unsupported is not None:
            self.flattened.unsupported.add_note(
                f"As one executable it needs {format_bytes(needed)}; gpu_bytes is"
                f" {format_bytes(self.gpu_bytes)}."
            )
        return None

    @functools.cached_property
    def compiled_whole(self) -> tuple[Any | None, int]:
        """The function as one XLA executable, if it fits, and the bytes that XLA says it
        needs."""
        asked = self.asked
        whole, report = compile_whole(asked.traced, asked.options.compiler_options)
        self._whole_report = report
        needed = whole_bytes(whole, self.flattened.closed_over)
        return whole if needed <= self.gpu_bytes else None, needed

    def take_whole(self, other: "Budgeted") -> None:
        """Takes what another compiled of the same function in the same budget."""
        self.compiled_whole, self._whole_report = other.compiled_whole, other._whole_report

    @functools.cached_property
    def whole_plan(self) -> tuple[Moves, Plan]:
        """What a call of the whole moves, and its figures."""
        asked, arguments = self.asked, self.flattened.arguments
        whole, nbytes = self.compiled_whole
        moves = moves_of(arguments, asked.traced, self.wanted, pruned(whole), asked.keeps)
        return moves, whole_plan(nbytes, moves, self.gpu_bytes)

    @functools.cached_property
    def _least_whole_bytes(self) -> int:
        """What the whole needs surely, known before it is compiled."""
        flattened = self.flattened
        if flattened.flat is None:
            return 0
        unread = () if self.asked.options.keep_unused else flattened.unread
        arguments, closed_over = flattened.arguments, flattened.closed_over
        return least_whole_bytes(flattened.flat, arguments, unread, closed_over)

    def _runs_whole_in(self, nbytes: int) -> bool:
        """Whether XLA fits the whole function in so many bytes, and it may run so. It is
        compiled only where that is possible."""
        is_auto, least = self.asked.options.strategy == "auto", self._least_whole_bytes
        return is_auto and nbytes > least and nbytes >= self.compiled_whole[1]

    def _at_most_whole(self, refusal: DoesNotFit) -> DoesNotFit:
        """A refusal that asks for no more than the whole function needs."""
        needed = refusal.needed_bytes
        if self.asked.options.strategy != "auto" or needed <= self._least_whole_bytes:
            return refusal
        whole = self.compiled_whole[1]
        if needed <= whole:
            return refusal
        refusal = refusal_of_budget(refusal, refusal.gpu_bytes, whole)
        return refusal.saying(
            f"{refusal} In that XLA fits the whole function: fused, it writes less down."
        )

    # --- The function as a program of tasks.

    @functools.cached_property
    def program(self) -> Program:
        """The program, with times that are expected of its tasks."""
        return self.made()

    def measured_program(self, trials: Trials, used: list[Any] | None = None) -> Program:
        """The program with measured times; what was planned before them is used again.
        `used` grows by the executables."""
        flattened = self.flattened
        if flattened.unsupported is None:  # it decides what is moved, and what is made anew
            calibrate(flattened.given.device, trials)
        if "program" in self.__dict__:
            again = remeasured(self.program, self.gpu_bytes, self.how(trials))
            if again is not None:
                return again
        return self.made(trials, used)

    def made(self, trials: Trials | None = None, used: list[Any] | None = None) -> Program:
        """A new program; `used` grows by the executables.

        Raises:
          DoesNotFit, HostMemoryError, UnsupportedError: as `jturnip.jit` says.
        """
        if self.flattened.unsupported is not None:
            raise self.flattened.unsupported
        how = self.how(trials)
        if used is not None:
            how = dataclasses.replace(how, executables=used)
        try:
            program = self._in_tiles(how) or self._with_loops(how)
            return searched(program, Budget(self.gpu_bytes), how)
        except DoesNotFit as refusal:
            # Who is refused asks for more, and needs most of them again.
            self._of_refusal = how.executables
            raise self._at_most_whole(refusal) from None
        finally:
            self.flattened.passes.clear()
            how.known.clear()  # it knows itself, and by the trials this function
            how.needs.clear()

    def _in_tiles(self, how: How) -> Program | None:
        """In tiles, if windows slide over all that does not fit."""
        flat, to_host = self.flattened.flat, self.wanted.places(on_host=True)
        assert flat is not None
        return surely_in_tiles(flat, self._setting(self.gpu_bytes, how), to_host)

    def _with_loops(self, how: How) -> Program:
        """With several iterations of a loop done at once, in tiles, or in another way; if
        that may be faster, but is none, so after all."""
        setting = self._setting(self.gpu_bytes, how)
        to_host = self.wanted.places(on_host=True)
        unrolled = unrolled_first(self._function, setting, to_host)
        if unrolled is not None and not may_be_slower(unrolled, setting):
            return unrolled
        try:
            return self._in_some_way(how, unrolled)
        except DoesNotFit:
            if unrolled is None:
                raise
            return unrolled

    @property
    def _function(self) -> Function:
        return Function(self.asked.traced.jaxpr, forwardable(self._given))

    def _setting(self, nbytes: int, how: How) -> Setting:
        return Setting(self._given, Budget(nbytes), how)

    def _in_some_way(self, how: How, unrolled: Program | None) -> Program:
        """As it is; then with what is ours in host memory; then cut along axes, with loops
        in one piece first; then with loops taken apart into very many equations."""
        function = self._function
        to_host = self.wanted.places(on_host=True)
        without_rows = self._without_rows()
        here = how if without_rows is None else dataclasses.replace(how, streams=False)

        def made(nbytes: int, how: How) -> Program:
            return make_program(function, self._setting(nbytes, how), to_host)

        def uncut(thorough: bool = False, few: bool = True) -> Program:
            program = made(self.gpu_bytes, here.as_it_is(thorough, few))
            asked = function, self._setting(self.gpu_bytes, here), to_host
            return or_unrolled(or_in_blocks(program, *asked), *asked, unrolled)

        try:
            return uncut()
        except DoesNotFit:
            self._given = on_host_all(self._given)
        if not how.axes:
            return uncut()
        with contextlib.suppress(DoesNotFit):
            return uncut()
        try:
            return _first_that_fits(self._cut_somehow(made, uncut, how, without_rows))
        except DoesNotFit as error:
            cut = error.with_traceback(None)
        if self.asked.is_asked:
            raise cut
        by_rows = without_rows
        if by_rows is None:  # what was hopeless is cut, to know what it needs then
            try:
                return uncut(thorough=True, few=False)
            except DoesNotFit as error:
                by_rows = error.with_traceback(None)
        refusal = refusal_that_is_true(made, how, cut, by_rows, self._runs_whole_in)
        raise explained(refusal, self.flattened.flat, self._given.device) from None

    def _cut_somehow(
        self,
        made: Callable[[int, How], Program],
        uncut: Callable[..., Program],
        how: How,
        without_rows: DoesNotFit | None,
    ) -> Iterator[Callable[[], Program]]:
        """Programs cut along axes; then what is left out before the others."""
        here = how if without_rows is None else dataclasses.replace(how, streams=False)
        yield functools.partial(made, self.gpu_bytes, here)
        if without_rows is not None and self._may_take_loops_apart(without_rows):
            yield functools.partial(made, self.gpu_bytes, how)
        if how.left_out - {WAYS}:
            yield functools.partial(uncut, few=False)
        if WAYS in how.left_out:
            more = dataclasses.replace(how, every_way=True)
            yield functools.partial(made, self.gpu_bytes, more)

    def _may_take_loops_apart(self, refusal: DoesNotFit) -> bool:
        """Whether what cannot be cut along rows may do with loops that are driven, and cut
        along axes inside."""
        flat = self.flattened.flat
        return (
            flat is not None
            and any(e.name in LOOPS_AND_BRANCHES for e in flat.equations)
            and refusal.needed_bytes <= _TIMES_CUT * self.gpu_bytes
        )

    def _without_rows(self) -> DoesNotFit | None:
        """The refusal of a budget that is surely too small to cut arrays by their rows
        only: into pieces so small, that would take long."""
        least = bounds.read_whole_bytes(self.asked.traced.jaxpr)
        platform = self.flattened.given.device.platform
        needed = placement.gpu_bytes_for(padded(least), platform)
        if self.gpu_bytes >= needed:
            return None
        what = f"an array that one product reads whole takes {format_bytes(least)}"
        if not least:
            what = f"{format_bytes(needed)} are jturnip's own"
        return DoesNotFit(
            f"{what};"
            f" gpu_bytes is {self.gpu_bytes} ({format_bytes(self.gpu_bytes)}). Raise it to"
            f" at least {needed} ({format_bytes(needed)}).",
            needed_bytes=needed,
            gpu_bytes=self.gpu_bytes,
        )

    def how(self, trials: Trials | None = None) -> How:
        """How programs of it are to be made."""
        asked, part, wanted = self.asked, self.asked.options.part, self.wanted
        placed = wanted.places(on_host=False) | wanted.places(on_host=True)
        if part is not None:
            returned = part.returned(placed)
        else:
            infos = asked.traced.out_info, asked.traced.args_info
            returned = Returned.of(*infos, placed)
        return How(
            asked.options.strategy,
            asked.link,
            trials,
            asked.finest,
            returned=returned,
            accelerator=asked.accelerator,
            any_plan=asked.any_plan or asked.is_asked,
            spent=self._spent,
            passes=self.flattened.passes,
            effort=Effort(patience=_PATIENCE if asked.is_asked else 1.0),
            axes=part is None or part.may_be_cut,
        )

    def with_kept(
        self, program: Program, not_kept: frozenset[int] = frozenset()
    ) -> Program:
        """The program of a call after others with the same arrays in host memory.

        Args:
          program: of one call alone.
          not_kept: positions of arguments that are not to stay on the device.
        """
        if not self.asked.keeps:
            return program
        own, there = Budget(self.gpu_bytes), self.wanted.places(on_host=False)
        return keeping(program, own, self.how(), there, not_kept)

    def trials(self) -> Trials:
        """What trying tasks out may take while nothing of the function runs."""
        there = self.flattened.there_bytes
        return Trials(there, self.arena - there, self._alone)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        turn = self.asked.turn
        turn.check()
        with turn.lock:
            turn.alone(None)
            yield

    # --- Of either.

    @property
    def plan(self) -> Plan:
        """The plan of a call, with times that are expected."""
        if self.whole is not None:
            return self.whole_plan[1]
        return self.with_kept(self.program).plan

    def compile_report(self, program: Program | None) -> CompileReport:
        """What was compiled for it; None as the program is for the whole."""
        whole = self._whole_report
        if program is None:
            assert whole is not None
            return whole
        report = self._spent.in_all(program.report)
        return report if whole is None else report.after(whole)

    @property
    def is_seen_whole(self) -> bool:
        """Whether XLA has compiled the whole function."""
        return self._whole_report is not None


def _first_that_fits(ways: Iterable[Callable[[], Program]]) -> Program:
    """The program of the first way that is not refused; else raises the refusal that asks
    for least."""
    refusals: list[DoesNotFit] = []
    for make in ways:
        try:
            return make()
        except DoesNotFit as error:
            refusals.append(error.with_traceback(None))
    raise min(refusals, key=lambda refusal: refusal.needed_bytes)


def refused_in(asked: Asked, gpu_bytes: int, kept: list[Any]) -> DoesNotFit | None:
    """The refusal of a budget, if it is refused. Compiles tasks, and runs none.

    Args:
      asked: a function in any budget.
      gpu_bytes: the budget.
      kept: grows by what is compiled for it.
    """
    asked = dataclasses.replace(asked.in_budget(gpu_bytes), any_plan=True)
    try:
        other = Budgeted(asked)
    except DoesNotFit as refusal:
        return refusal.with_traceback(None)
    kept.append(other)
    try:
        _ = other.whole is not None or other.program
    except DoesNotFit as refusal:
        return refusal.with_traceback(None)
    except HostMemoryError as error:
        # Which budget leaves the host enough nobody knows; none does where not even
        # that of all values at once does.
        flat = other.flattened.flat
        types = () if flat is None else flat.types
        if gpu_bytes > 2 * sum(padded(t.nbytes) for t in types):
            raise
        more = 3 * gpu_bytes // 2 + 1
        return DoesNotFit(str(error), needed_bytes=more, gpu_bytes=gpu_bytes)
    return None
