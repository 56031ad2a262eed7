"""The second stage: a function taken apart, and its plan when first asked for."""

import collections
import contextlib
import dataclasses
import functools
import threading
from typing import Any

import jax

from jturnip import compat, placement
from jturnip.errors import DoesNotFit, HostMemoryError, UnsupportedError
from jturnip.frontend.values import Type
from jturnip.frontend.wide import has_wide_parts, types_as_traced
from jturnip.graph.plan import Plan
from jturnip.hardware import Accelerator, HostLink, accelerator, host_link
from jturnip.placement import Whose
from jturnip.programs.keeping import bytes_at_end
from jturnip.programs.records import Chain, Program, Straight
from jturnip.programs.smallest import smallest
from jturnip.runners.function import Outermost, ProgramRunner, Runner
from jturnip.runners.pieces import make_outermost
from jturnip.runners.whole import WholeRunner
from jturnip.stages import prediction
from jturnip.stages.asked import Asked
from jturnip.stages.budgeted import Budgeted, refused_in
from jturnip.stages.compiled import Compiled, avals, cost_of, donated
from jturnip.stages.prediction import Prediction
from jturnip.units import format_bytes


class Lowered:
    """A function taken apart for one signature; its `plan` is made when first asked for."""

    def __init__(self, asked: Asked):
        self._asked = asked
        self._traced = asked.traced
        self._has_wide_parts = has_wide_parts(asked.traced.jaxpr)
        with self._types:
            self._budgeted = Budgeted(asked)
        # What was compiled for predictions: the next needs most of it again.
        self._of_prediction: list[Any] = []
        self._lock = threading.RLock()

    @property
    def _types(self) -> contextlib.AbstractContextManager[None]:
        """In which all is done with what the function is made of."""
        return types_as_traced(self._has_wide_parts)

    def __repr__(self) -> str:
        name = getattr(self._traced, "fun_name", "a function")
        return f"<Lowered of {name} in {format_bytes(self.gpu_bytes)}>"

    @property
    def gpu_bytes(self) -> int:
        """The budget, in bytes."""
        return self._budgeted.gpu_bytes

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
        return cost_of(self._budgeted.whole, self.plan)

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
        return self._plan

    @functools.cached_property
    def _plan(self) -> Plan:
        with self._lock, self._types:
            return self._budgeted.plan

    @functools.cached_property
    def minimum_gpu_bytes(self) -> int:
        """The smallest budget in which the function runs with its strategy, in bytes: less
        than that by 3% is refused. Compiles what it takes to know that.

        Raises:
          HostMemoryError, UnsupportedError: as `plan` does.
        """
        kept: list[Any] = []
        with self._types:
            return smallest(functools.partial(refused_in, self._asked, kept=kept))

    @functools.cached_property
    def seconds_asked(self) -> float | None:
        """Seconds of a call as expected: none as one executable; None where it is refused.
        Compiles tasks, and runs none."""
        try:
            with self._types:
                whole = self._budgeted.whole is not None
                return 0.0 if whole else self._budgeted.program.plan.predicted_seconds
        except (DoesNotFit, HostMemoryError, UnsupportedError):
            return None

    @compat.api_boundary
    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """Compiles what is not compiled yet, measures the tasks, and plans with that.

        Args:
          compiler_options: more of XLA's options, for every executable.
        """
        asked = self._asked
        if compiler_options:
            return Lowered(asked.compiled_with(compiler_options)).compile()
        with self._lock, self._types:
            budgeted = self._budgeted
            if budgeted.whole is not None:
                program, runner = None, self._runner_of_whole()
            else:
                trials = budgeted.trials()
                program = budgeted.measured_program(trials)
                runner = self._runner_of_program(program, trials.peak_bytes)
            report = budgeted.compile_report(program)
        arguments = budgeted.flattened.arguments
        return Compiled(
            runner, asked.in_tree, arguments, self._traced, asked.options, report
        )

    def _runner_of_whole(self) -> Runner:
        asked, budgeted = self._asked, self._budgeted
        moves, plan = budgeted.whole_plan
        return WholeRunner(
            budgeted.whole,
            asked.in_tree,
            budgeted.flattened.arguments,
            plan,
            moves,
            budgeted.flattened.flat,
            budgeted.wanted,
            asked.turn,
            asked.in_places,
        )

    def _runner_of_program(self, once: Program, trials_peak_bytes: int) -> Runner:
        """What runs a program of one call alone, and keeps what may stay."""
        asked, budgeted, link = self._asked, self._budgeted, self._asked.options.link
        flattened, there = budgeted.flattened, budgeted.wanted.places(on_host=False)
        types = flattened.result_types
        program = budgeted.with_kept(once)

        def keeping_less(not_kept: frozenset[int]) -> Outermost:
            return make_outermost(budgeted.with_kept(once, not_kept), link)

        if not budgeted.is_seen_whole:
            _warn_of_useless_donations(types, self._traced.args_info)
        back = _coming_back(program)
        wanted = dataclasses.replace(
            budgeted.wanted,
            back=back,
            back_bytes=sum(types[i].nbytes for i in back),
            committed=flattened.arguments.committed,
        )
        return ProgramRunner(
            make_outermost(program, link),
            self._traced.out_tree,
            wanted,
            [t.weak_type for t in types],
            asked.turn,
            flattened.arguments.device,
            flattened.held((Whose.CALLER_DEVICE,)),
            sum(program.constants.values()) + placement.MARKS,
            trials_peak_bytes,
            bytes_at_end(program, there),
            asked.in_places,
            flattened.held((Whose.CALLER_HOST,)),
            keeping_less if asked.keeps else None,
            self._has_wide_parts,
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
        plan leaves an eighth of the budget to the allocator. So take it for what is
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
        with self._lock, self._types:
            return prediction.predicted(self._budgeted, on, over, self._of_prediction)


def _warn_of_useless_donations(results: list[Type], args_info: Any) -> None:
    """As `jax.jit` does, where it did not see the function whole."""
    unused = collections.Counter((t.shape, t.dtype) for t in results)
    useless = []
    for info in jax.tree.leaves(args_info):
        if info.donated:
            kind = Type.of(info).shape, Type.of(info).dtype
            unused[kind] -= 1
            if unused[kind] < 0:
                useless.append(f"{info.dtype}{list(info.shape)}")
    if useless:
        compat.warn(
            f"Some donated buffers were not usable: {', '.join(useless)}.", UserWarning
        )


def _coming_back(program: Program) -> tuple[int, ...]:
    """Results that a program leaves in host memory although there is room for them, and
    nobody asked for them there."""
    assert isinstance(program, Straight | Chain)
    ends = enumerate(program.ends_on_host)
    return tuple(i for i, away in ends if away and i not in program.to_host)
