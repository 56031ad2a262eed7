"""Tests of `jturnip.compiler.trials`."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jturnip import memory, placement
from jturnip.compiler import trials
from jturnip.compiler.executables import Executable
from jturnip.compiler.trials import Trials, _Trial, try_out
from jturnip.units import GRANULE


MIB = 1 << 20
KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (3, 2)))


class Recorded:
    """What is called in which order, on operands of which age."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def executable(
        self, name: str, nbytes: int = MIB, may_be_tried: bool = True
    ) -> Executable:
        return Executable(
            call=functools.partial(self._call, name),
            marked=False,
            workspace=0,
            flops=0.0,
            bytes_accessed=0.0,
            arguments=(jax.ShapeDtypeStruct((nbytes // 4,), np.float32),),
            may_be_tried=may_be_tried,
        )

    def _call(self, name: str, operand: jax.Array) -> Sequence[jax.Array]:
        self.calls.append(name)
        return [operand]


def trials_in(room: int) -> Trials:
    return Trials(1000, room, contextlib.nullcontext)


def tried(executables: Sequence[Executable], trials: Trials, needs: int = MIB) -> None:
    where = placement.sharding(jax.devices()[0], on_host=False)
    try_out([(executable, needs) for executable in executables], where, trials)


def test_all_are_called_before_the_first_is_called_again():
    recorded, trials = Recorded(), trials_in(64 * MIB)
    executables = [recorded.executable(name) for name in "abc"]
    tried(executables, trials)
    assert recorded.calls == list("abc" * 6)
    for executable in executables:
        assert executable.seconds is not None
        assert executable.seconds >= executable.dispatch_seconds > 0


def test_operands_of_many_are_made_before_the_first_call(monkeypatch: pytest.MonkeyPatch):
    recorded, trials = Recorded(), trials_in(64 * MIB)
    make = "jturnip.compiler.trials._Trial.make_operands"
    made: list[int] = []

    def make_operands(trial: Any, sharding: jax.sharding.Sharding) -> None:
        made.append(len(recorded.calls))
        trial._operands = [jax.device_put(np.zeros(4, np.float32), sharding)]

    monkeypatch.setattr(make, make_operands)
    tried([recorded.executable(name) for name in "abc"], trials)
    assert made == [3 * (k // 3) for k in range(18)]
    assert trials.peak_bytes == 1000 + 3 * MIB + 2 * GRANULE


def test_operands_are_made_together_as_far_as_there_is_room():
    recorded, trials = Recorded(), trials_in(5 * MIB // 2)
    tried([recorded.executable(name) for name in "abc"], trials)
    assert recorded.calls == list("abc" * 6)
    assert trials.peak_bytes == 1000 + 2 * MIB + 2 * GRANULE


def test_what_has_no_room_or_must_not_be_tried_is_left_alone():
    recorded, trials = Recorded(), trials_in(MIB // 2)
    large = recorded.executable("large")
    tried([large], trials)
    assert (recorded.calls, large.seconds, trials.peak_bytes) == ([], None, 0)
    barred, trials = recorded.executable("barred", may_be_tried=False), trials_in(64 * MIB)
    tried([barred], trials)
    assert (recorded.calls, barred.seconds, trials.peak_bytes) == ([], None, 0)


def test_what_was_measured_is_not_tried_again():
    recorded = Recorded()
    executable = recorded.executable("a")
    tried([executable], trials_in(64 * MIB))
    before = executable.seconds, len(recorded.calls)
    tried([executable], trials := trials_in(64 * MIB))
    assert (executable.seconds, len(recorded.calls)) == before
    assert trials.peak_bytes == 0


def test_what_takes_long_has_a_first_call_and_one_more(monkeypatch: pytest.MonkeyPatch):
    recorded = Recorded()
    made = "jturnip.compiler.trials._Trial.make_operands"
    monkeypatch.setattr(made, functools.partialmethod(_made_in, 0.2))
    executables = [recorded.executable(name) for name in "ab"]
    tried(executables, trials_in(64 * MIB))
    assert recorded.calls == list("ab" * 2)
    for executable in executables:  # the making of operands is no part of a call
        assert executable.seconds is not None
        assert executable.seconds < 0.1


def _made_in(trial: Any, seconds: float, sharding: jax.sharding.Sharding) -> None:
    """As operands are made, in so many seconds."""
    trial._operands = [jax.device_put(np.zeros(4, np.float32), sharding)]
    trial.spent_seconds += seconds


@pytest.mark.parametrize(
    ("first_seconds", "in_haste", "enough"),
    [(0.2, True, True), (0.2, False, False), (0.02, True, False)],
)
def test_one_long_call_is_enough_in_haste(
    first_seconds: float, in_haste: bool, enough: bool
):
    trial = _Trial(Recorded().executable("a"))
    assert not trial.is_enough(0, in_haste)
    trial.seconds.append(first_seconds)
    trial.spent_seconds = first_seconds
    assert trial.is_enough(1, in_haste) is enough
    assert trial.is_enough(2, in_haste) is (first_seconds > 0.1)


@pytest.mark.parametrize(("count", "calls"), [(3, 2), (4, 1)])
def test_a_long_first_call_is_not_all_where_few_are_tried(
    count: int, calls: int, monkeypatch: pytest.MonkeyPatch
):
    """It may be a slow one. Where all take more than half a second together, it is."""
    called: list[Executable] = []

    def times(_: Any, executable: Executable, operands: Any) -> tuple[float, float, float]:
        called.append(executable)
        return 0.0, 0.0, 0.15

    monkeypatch.setattr("jturnip.compiler.trials._Clock.times", times)
    executables = [Recorded().executable(name) for name in "abcd"[:count]]
    tried(executables, trials_in(64 * MIB))
    assert called == executables * calls


def test_a_trial_that_fails_says_so_and_leaves_nothing_measured():
    def fails(operand: jax.Array) -> Sequence[jax.Array]:
        raise RuntimeError("no")

    recorded = Recorded()
    executable = recorded.executable("a")
    executable.call = fails
    with pytest.raises(RuntimeError, match="no"):
        tried([executable], trials_in(64 * MIB))
    assert executable.seconds is None


def test_what_a_task_writes_over_is_not_copied_first():
    """XLA copies a given-up operand that lies in numpy's memory, which no run has."""
    write = jax.jit(lambda x: x.at[3].set(1.0), donate_argnums=0)
    before, after = list[int](), list[int]()

    def call(operand: jax.Array) -> Sequence[jax.Array]:
        before.append(operand.unsafe_buffer_pointer())
        result = write(operand)
        after.append(result.unsafe_buffer_pointer())
        return [result]

    executable = Recorded().executable("a")
    executable.call, executable.overwrites = call, ((0, 0),)
    tried([executable], trials_in(64 * MIB))
    assert before == after
    assert len(before) > 1


@pytest.mark.parametrize("dtype", ["keys", "float32", "int4"])
def test_no_guard_of_the_users_sees_what_a_task_writes_over(dtype: str):
    struct = jax.ShapeDtypeStruct((3, 2), dtype) if dtype != "keys" else KEYS
    where = placement.sharding(jax.devices()[0], on_host=False)
    with jax.transfer_guard("disallow_explicit"):
        zeros = memory.zeros(struct, where, given_up=True)
    assert (zeros.shape, zeros.dtype, zeros.sharding) == (struct.shape, struct.dtype, where)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_a_device_makes_large_zeros_itself(dtype: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "is_on_cpu", lambda where: False)
    monkeypatch.setattr(memory, "from_numpy", None)  # not called
    struct = jax.ShapeDtypeStruct((1024, 1024), dtype)
    where = placement.sharding(jax.devices()[0], on_host=False)
    zeros = memory.zeros(struct, where)
    assert (zeros.shape, zeros.dtype) == (struct.shape, struct.dtype)
    assert zeros.sharding == where
    assert not np.asarray(zeros).any()


def test_an_accelerator_takes_no_part_in_what_an_empty_call_takes(
    monkeypatch: pytest.MonkeyPatch,
):
    where = placement.sharding(jax.devices()[0], on_host=False)
    monkeypatch.setattr(memory, "is_on_cpu", lambda where: False)
    monkeypatch.setattr(trials, "_own_seconds", known := {})
    executable = Recorded().executable("a", 4)
    tried([executable], trials_in(64 * MIB), needs=4)
    assert 0 < known[where] < 0.1
    assert executable.seconds is not None
    # A call that does nothing takes hardly anything less that.
    assert 0 < executable.seconds < known[where]


def test_large_zeros_in_host_memory_are_numpys(monkeypatch: pytest.MonkeyPatch):
    # A GPU's executables give results on the device only.
    monkeypatch.setattr(memory, "is_on_cpu", lambda where: False)
    monkeypatch.setattr(memory.jnp, "zeros", None)  # not called
    struct = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    where = placement.sharding(jax.devices()[0], on_host=True)
    zeros = memory.zeros(struct, where)
    assert zeros.sharding == where
    assert not np.asarray(zeros).any()


@pytest.mark.parametrize("dtype", ["keys", "int4", "float8_e4m3fn"])
def test_what_numpy_does_not_have_is_made_up_too(dtype: str):
    struct = jax.ShapeDtypeStruct((3, 2), dtype) if dtype != "keys" else KEYS
    zeros = memory.zeros(struct, placement.sharding(jax.devices()[0], on_host=False))
    assert (zeros.shape, zeros.dtype) == (struct.shape, struct.dtype)
    data = jax.random.key_data(zeros) if dtype == "keys" else zeros
    assert not np.asarray(data).astype(np.float32).any()
