"""What the benchmarks reach for inside jturnip, where its public side has no way to it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jturnip.compiler import executables
from jturnip.graph.taskgraph import TaskGraph
from jturnip.programs import calibration
from jturnip.programs.planning import in_program_order
from jturnip.programs.records import Straight
from jturnip.stages import Compiled, Lowered


def one_task_per_equation(lowered: Lowered) -> Compiled:
    """Compiles a function so that nothing is grouped; its strategy must be named."""
    asked = dataclasses.replace(lowered._asked, finest=True, keeps=False)
    return Lowered(asked).compile()


def keeping_nothing(lowered: Lowered) -> Lowered:
    """The same, that keeps nothing on the device between calls."""
    return Lowered(dataclasses.replace(lowered._asked, keeps=False))


def split_runner(compiled: Compiled) -> Any:
    """What runs the loop of a function that is split."""
    runner: Any = compiled._runner
    return runner.piece


def runs(compiled: Compiled, leaves: Sequence[Any]) -> Callable[[], Any]:
    """One run of the loop of a split function, with nothing around it."""
    piece = split_runner(compiled)
    return lambda: piece.run(leaves)


def executable_count(lowered: Lowered) -> int:
    """How many distinct executables the tasks of a split function have."""
    program: Any = lowered._budgeted.program
    return len(program.split.executables)


def measured_graph(lowered: Lowered) -> tuple[TaskGraph, int] | None:
    """The tasks of a function that is one plan, with measured times, in the order of the
    program and each once, and the bytes it has for them; None of a function in pieces."""
    budgeted = lowered._budgeted
    program = budgeted.measured_program(budgeted.trials())
    if not isinstance(program, Straight):
        return None
    return in_program_order(program.split).graph, program.plan.memgraph.gpu_bytes


def forget_times(lowered: Lowered) -> None:
    """Has the tasks of a split function measured again when it is next asked for."""
    programs: list[Any] = [lowered._budgeted.program]
    while programs:
        program = programs.pop()
        if hasattr(program, "split"):
            for executable in program.split.executables:
                executable.seconds = None
        programs += [stage.program for stage in getattr(program, "stages", ())]
        programs += getattr(program, "branches", ())
        for part in ("condition", "body"):
            if hasattr(program, part):
                programs.append(getattr(program, part))


@dataclasses.dataclass(frozen=True, slots=True)
class BareCalls:
    """The calls of executables that one run makes, in order.

    Each has the executable and its operands: an array, or the number of a call and the
    position of one of its results; and the results that nobody needs after it.
    """

    calls: tuple[tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]], ...]

    def __call__(self) -> Any:
        """Makes them; lets go of each result after its last reader, as a run does."""
        there: dict[tuple[int, int], Any] = {}
        results: Sequence[Any] = ()
        for number, (call, operands, over) in enumerate(self.calls):
            read = [there[x] if type(x) is tuple else x for x in operands]
            results = call(*read)
            del read
            there.update(((number, at), r) for at, r in enumerate(results))
            for x in over:
                del there[x]
        return results


def bare_calls(compiled: Compiled, leaves: Sequence[Any]) -> BareCalls:
    """The calls of one run, with its arguments, which it holds. None may be donated."""
    runner = split_runner(compiled)
    program = runner._program
    made: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    of_array: dict[int, Any] = {}
    kept: list[Any] = []  # so that ids are not used again

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*operands: jax.Array) -> Any:
            made.append((call, tuple(of_array.get(id(x), x) for x in operands)))
            results = call(*operands)
            number = len(made) - 1
            of_array.update((id(r), (number, at)) for at, r in enumerate(results))
            kept.extend((*operands, *results))
            return results

        return noted

    steps = tuple(
        step if step.call is None else step._replace(call=noting(step.call))
        for step in program.steps
    )
    runner._program = dataclasses.replace(program, steps=steps)
    try:
        jax.block_until_ready(runner.run(leaves))
    finally:
        runner._program = program
    last = {x: k for k, (_, read) in enumerate(made) for x in read if type(x) is tuple}
    calls = [
        (call, read, tuple({x for x in read if type(x) is tuple and last[x] == k}))
        for k, (call, read) in enumerate(made)
    ]
    return BareCalls(tuple(calls))


def forget_everything() -> None:
    """Empties the caches of jax and of jturnip, so that the next call compiles."""
    executables.clear_cache()
    jax.clear_caches()


def forget_link() -> None:
    """Has the link to each device measured again when it is next asked for."""
    calibration._links.clear()
