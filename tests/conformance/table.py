"""The registry as a page: what jturnip makes of each program."""

import collections
import pathlib
from collections.abc import Sequence

from .registry import Program, Status


# What JAX's own tests say, by `tests/against_jax.py`: written by hand.
_JAXS_OWN = pathlib.Path(__file__).with_name("jaxs_own_tests.md")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "conformance.md"

_HEAD = """\
# Conformance

Ordinary JAX programs, none written for jturnip, run under `jax.jit` and under `jturnip.jit`
in small budgets, and compared: trees, shapes, dtypes, weak types, values, places, the order
of side effects, and the types of errors. `python -m tests.conformance` writes this page
from the programs in `tests/conformance`; the tests there see for themselves what the last
column says.

| status | meaning | programs |
| --- | --- | --- |
"""
_MEANING = {
    Status.SUPPORTED: "taken apart into tasks, or traced through by JAX; the same results",
    Status.ONE_TASK: "the same results; the primitives named are each kept whole",
    Status.REFUSED: "`UnsupportedError` says why and where, unless the function fits",
}
_WRONG = "differs"


def page(programs: Sequence[Program]) -> str:
    """The page, as Markdown."""
    counts = collections.Counter(p.expected.status for p in programs if not p.known)
    lines = [f"| {s.value} | {_MEANING[s]} | {counts[s]} |" for s in Status]
    wrong = sum(bool(p.known) for p in programs)
    if wrong:
        lines.append(f"| {_WRONG} | not as `jax.jit` yet, and how | {wrong} |")
    lines += ["", "| area | program | status |", "| --- | --- | --- |"]
    lines += [f"| {p.area} | {p.name} | {_status(p)} |" for p in programs]
    return _HEAD + "\n".join(lines) + "\n" + _JAXS_OWN.read_text("utf-8")


def _status(program: Program) -> str:
    if program.known:
        return f"{_WRONG}: {program.known}"
    raises = f", the same `{program.raises}`" if program.raises else ""
    return f"{program.expected}{raises}"
