"""Runs one program under both, sees what jturnip did, and compares all that can be seen.

Nothing is taken from the registry on trust: the status is read from what jturnip made of
the function. A function that was to be split and ran whole is an error.
"""

import collections
import contextlib
import functools
import re
import signal
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from checks import assert_same, refused, unconstrained_peak

import jturnip
from jturnip.programs.records import Call, Choice, Loop, Straight
from jturnip.stages import Lowered, Traced
from jturnip.units import padded

from .registry import Case, Expected, Program, Script, Status


# Room for any program here.
AMPLE = "1GiB"
# What a function is taken apart into is seen in the smallest budget in which it runs, or in
# so many times that: in the smallest all, a loop may need least as one task.
_A_LITTLE_MORE = (1.1, 1.25, 1.5, 2)
# Equations that hold a jaxpr only to say how two elements are combined.
_COMBINERS = re.compile(r"(reduce|scatter|select_and_scatter|cum|argm|sort).*")
_ADVICE = re.compile(r"\b(raise|move|remove|put|place|pass|use|call|return|take)\b", re.I)


class UndeclaredStatus(AssertionError):
    """jturnip made something else of a program than the registry says."""


# Functions of JAX that Python calls where an error goes nowhere, and how soon after one of
# them was in the way a time limit is tried again.
_SWALLOWS = ("_xla_gc_callback",)
_AGAIN_SECONDS = 0.05
# A machine whose cores are busy takes so many times as long.
_BUSY = 4


@dataclass(frozen=True)
class Outcome:
    """What a call gave: a value or an error, and what its callbacks logged."""

    value: Any
    error: Exception | None
    log: list[Any]


def check(program: Program) -> None:
    """Fails unless a program does the same under both, in the way that is declared."""
    with program.context(), _limit(_BUSY * program.seconds):
        case = program.build()
        if isinstance(case, Script):
            _check_script(program, case)
        else:
            _check_case(program, case)


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(_: int, frame: types.FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_name in _SWALLOWS:
                return  # the next alarm comes soon
            frame = frame.f_back
        raise TimeoutError(f"not done in {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- functions -------------------------------------------------------------------------


def _check_case(program: Program, case: Case) -> None:
    expected = _outcome(jax.jit(case.fn, **case.keywords), case)
    if program.raises:
        _check_error(program, expected.error)
        return
    if expected.error is not None:
        raise expected.error
    try:
        smallest, executables = refused(case.fn, *case.args, **case.keywords)
    except jturnip.UnsupportedError as error:
        _assert_seen(_refusal(program, error), program)
        _compare(program, expected, AMPLE, "auto")
        return
    lowered = _compare(program, expected, smallest, "turnip", smallest)
    for share in _A_LITTLE_MORE:
        if _seen(lowered) == program.expected:
            break
        lowered = _compare(program, expected, int(share * smallest), "turnip", smallest)
    del executables
    _assert_seen(_seen(lowered), program)
    if program.thorough:
        half = unconstrained_peak(case.fn, *case.args, **case.keywords) // 2
        if half > smallest:
            lowered = _compare(program, expected, half, "auto", smallest)
            _assert_seen(_seen(lowered), program)
        _compare(program, expected, AMPLE, "auto")
    if program.known:  # also where there is room for results on the device
        room = smallest + 4 * _bytes(expected.value)
        _compare(program, expected, room, "turnip", smallest)


def _compare(
    program: Program,
    expected: Outcome,
    budget: int | str,
    strategy: str,
    smallest: int = 0,
) -> Lowered:
    """Runs a case afresh in a budget and compares; returns what it was taken apart into."""
    case = program.build()
    assert isinstance(case, Case)
    f = jturnip.jit(case.fn, budget, strategy=strategy, **case.keywords)
    with _lowerings() as lowerings:
        found = _outcome(f, case)
    if found.error is not None:
        raise found.error
    assert_same(found.value, expected.value, program.ulps)
    assert _logged(found, case.ordered) == _logged(expected, case.ordered)
    report = f.last_run
    assert (report.strategy == "whole") == (budget == AMPLE)
    (lowered,) = lowerings
    # Surely room for the results beside the next call, which may be given them.
    roomy = budget == AMPLE or smallest + 4 * _bytes(expected.value) <= int(budget)
    if budget != AMPLE:
        assert report.peak_bytes <= budget
    for at, want in jax.tree.leaves_with_path(expected.value):
        got = dict(jax.tree.leaves_with_path(found.value))[at]
        _assert_same_place(got, want, roomy, jax.tree_util.keystr(at))
    return lowered


def _outcome(f: Callable[..., Any], case: Case) -> Outcome:
    try:
        value = jax.block_until_ready(f(*case.args))
        jax.effects_barrier()
    except Exception as error:
        return Outcome(None, error, list(case.log))
    return Outcome(value, None, list(case.log))


def _logged(outcome: Outcome, ordered: bool) -> Any:
    return outcome.log if ordered else collections.Counter(map(repr, outcome.log))


def _place(array: jax.Array) -> dict[str, Any]:
    sharding = array.sharding
    return {
        "devices": sharding.device_set,
        "memory": sharding.memory_kind,
        "committed": array.committed,
        "mesh": getattr(sharding, "mesh", None),
        "spec": getattr(sharding, "spec", None),
        "type": str(jax.typeof(array)),
    }


def _assert_same_place(got: jax.Array, want: jax.Array, roomy: bool, where: str) -> None:
    """Also in host memory where there is no room, which binds an array to its device."""
    found, expected = _place(got), _place(want)
    if not roomy and found["memory"] == "pinned_host":
        found, expected = found["devices"], expected["devices"]
    assert found == expected, where


def _bytes(tree: Any) -> int:
    return sum(padded(getattr(leaf, "nbytes", 8)) for leaf in jax.tree.leaves(tree))


# -- programs that call jit themselves -------------------------------------------------


def _check_script(program: Program, script: Script) -> None:
    expected = _leaves(script.run(jax.jit))
    for strategy in ("turnip", "auto"):
        again = program.build()
        assert isinstance(again, Script)
        jit = functools.partial(jturnip.jit, gpu_bytes=AMPLE, strategy=strategy)
        with _lowerings() as lowerings, warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always", jturnip.InlinedWarning)
            try:
                found = _leaves(again.run(jit))
            except jturnip.UnsupportedError as error:
                _assert_seen(_refusal(program, error), program)
                continue
        assert script.inlined or not heard, heard
        _assert_leaves(found, expected, program.ulps)
        if script.inlined:
            assert lowerings == [], "a plan was made"
        elif strategy == "turnip":
            assert program.expected.status is not Status.REFUSED, "it is not refused"
            assert lowerings, "nothing was taken apart"
            for lowered in lowerings:
                _assert_seen(_seen(lowered, 0), program)
    if script.inlined:
        assert program.expected.status is Status.SUPPORTED


def _leaves(value: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(p), v) for p, v in jax.tree.leaves_with_path(value)]


def _assert_leaves(
    found: list[tuple[str, Any]], expected: list[tuple[str, Any]], ulps: int
) -> None:
    """As `assert_same`, where some leaves are no arrays of JAX."""
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (path, got), (_, want) in zip(found, expected, strict=True):
        if isinstance(want, jax.Array):
            assert_same({path: got}, {path: want}, ulps)
        else:
            assert type(got) is type(want), path
            np.testing.assert_equal(got, want, path)


# -- errors ----------------------------------------------------------------------------


def _check_error(program: Program, expected: Exception | None) -> None:
    """The same type; of an error while running, as the cause of an ExecutionError."""
    assert type(expected).__name__ == program.raises
    assert program.expected.status is Status.SUPPORTED
    for strategy in ("turnip", "auto"):
        case = program.build()
        assert isinstance(case, Case)
        f = jturnip.jit(case.fn, AMPLE, strategy=strategy, **case.keywords)
        found: BaseException | None = _outcome(f, case).error
        if isinstance(found, jturnip.ExecutionError):
            found = found.__cause__
        assert type(found) is type(expected), f"{found!r} instead of {expected!r}"


# -- what jturnip did ------------------------------------------------------------------


@contextlib.contextmanager
def _lowerings() -> Iterator[list[Lowered]]:
    """Every function that is taken apart meanwhile."""
    seen: list[Lowered] = []
    lower = Traced.lower

    def noted(traced: Traced) -> Lowered:
        seen.append(lower(traced))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traced, "lower", noted)
        yield seen


def _straight(program: Any) -> list[Straight]:
    """The pieces of a program that are tasks under one plan."""
    match program:
        case Straight():
            return [program]
        case Call():
            return []
        case Loop():
            pieces = [program.condition, program.body]
        case Choice():
            pieces = list(program.branches)
        case _:
            pieces = [stage.program for stage in program.stages]
    return [straight for piece in pieces for straight in _straight(piece)]


def _seen(lowered: Lowered, least: int = 2) -> Expected:
    """What a function was taken apart into: at least so many tasks."""
    assert lowered.plan.strategy != "whole"
    splits = [straight.split for straight in _straight(lowered._budgeted.program)]
    kept = {_cause(e) for s in splits for e in s.flat.equations if _is_kept_whole(e)}
    if kept:
        return Expected(Status.ONE_TASK, tuple(sorted(kept)))
    tasks = [t.name for s in splits for t in s.graph.tasks]
    assert len(tasks) >= least, f"only {tasks}"
    return Expected(Status.SUPPORTED)


def _assert_seen(seen: Expected, program: Program) -> None:
    if seen != program.expected:
        raise UndeclaredStatus(f"{seen}; declared as {program.expected}")


def _is_kept_whole(equation: Any) -> bool:
    """Whether it holds a program, and is no part that a loop was cut into, nor a stretch
    that is done in blocks."""
    if str(equation.origin.params.get("name")).startswith("blocks_of_"):
        return False
    if _COMBINERS.fullmatch(equation.name) or not _bodies(equation.origin):
        return False
    # A part is called by the loop, and is not what stands in it.
    return not any(
        call.primitive.name == equation.name
        and all(e is not equation.origin for body in _bodies(call) for e in body.eqns)
        for call in equation.calls[-1:]
    )


def _bodies(eqn: Any) -> list[Any]:
    """The jaxprs that a jaxpr's equation holds."""
    params = eqn.params.values()
    values = [v for p in params for v in (p if isinstance(p, tuple | list) else (p,))]
    return [b for b in (getattr(v, "jaxpr", v) for v in values) if hasattr(b, "eqns")]


def _cause(equation: Any) -> str:
    """The primitive that is to blame: what is drawn together is called by its first."""
    if equation.name in ("jit", "pjit"):
        return equation.calls[-1].primitive.name
    return equation.name


def _refusal(program: Program, error: jturnip.UnsupportedError) -> Expected:
    """What a refusal names; it must also say where in the program, and what to do."""
    message = str(error)
    assert _ADVICE.search(message.partition(". ")[2]), f"no advice: {message}"
    module = program.build.__module__.rpartition(".")[2]
    assert re.search(rf"\b{module}\.py:\d+", message), message
    primitive = re.search(r'primitive "(\w+)"', message)
    assert primitive is not None, message
    return Expected(Status.REFUSED, (primitive[1],))
