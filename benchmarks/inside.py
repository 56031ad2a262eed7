"""What the benchmarks reach for inside jturnip, where its public side has no way to it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jturnip.compiler import executables
from jturnip.stages import Compiled, Lowered


def one_task_per_equation(lowered: Lowered) -> Compiled:
    """Compiles a function so that nothing is grouped; its strategy must be named."""
    lowered._finest = True
    return lowered.compile()


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
    program: Any = lowered._program
    return len(program.split.executables)


def bare_calls(compiled: Compiled, leaves: Sequence[Any]) -> list[Callable[[], Any]]:
    """The calls of executables that one run makes, with their arguments, in order.

    They hold every argument alive. Nothing may be donated.
    """
    runner = split_runner(compiled)
    program = runner._program
    calls: list[Callable[[], Any]] = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*operands: jax.Array) -> Any:
            calls.append(lambda: call(*operands))
            return call(*operands)

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
    return calls


def forget_everything() -> None:
    """Empties the caches of jax and of jturnip, so that the next call compiles."""
    executables.clear_cache()
    jax.clear_caches()
