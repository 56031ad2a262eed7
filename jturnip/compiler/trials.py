"""Executables tried out on zeros: what a call of each takes.

What a run does is what is measured: operands that lie in no cache since they were made, and
the end of a task as its mark tells it, before any thread that waits for it has woken up.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jturnip import memory
from jturnip.compiler import profiles
from jturnip.compiler.nans import unheard
from jturnip.frontend.hints import CALLS_OUT, nested
from jturnip.native import marks
from jturnip.native.queue import make_queue
from jturnip.units import GRANULE


if TYPE_CHECKING:
    from jturnip.compiler.executables import Executable


# What has to be known before it is run on zeros: that it ends, and calls nobody.
_NOT_TRIED = CALLS_OUT | {"while"}
# How often executables are tried out after their first call, which is slow; all of them
# before the first one's next turn, since what disturbs the machine for a while must not
# spoil all that is measured of one. After so many seconds of one it is enough.
_TURNS = 5
_TRIAL_SECONDS = 0.1
# The first call alone says what a long one takes only where all of these take longer
# together: it may be three times as slow as those after it.
_FIRST_SECONDS = 0.5
# Operands of so many bytes are made before the first of the tasks that read them is called.
_TOGETHER_BYTES = 128 << 20
# Calls of an empty executable that say what a call takes beside the device's work, and how
# long a mark is waited for after its results.
_EMPTY_CALLS = 7
_LATEST_SECONDS = 0.01
# By the device, once known.
_own_seconds: dict[jax.sharding.Sharding, float] = {}
# What is kept of an executable for other processes.
_TIMES = ("seconds", "dispatch_seconds")


class Trials:
    """What trying executables out may take on the device, and what it took.

    Attributes:
      there: bytes that are in use meanwhile.
      room: bytes that a trial may use.
      alone: a context in which nothing else of the function runs.
      peak_bytes: the most that was in use; zero while nothing was tried.
    """

    def __init__(
        self,
        there: int,
        room: int,
        alone: Callable[[], contextlib.AbstractContextManager[None]],
    ):
        self.alone = alone
        self.there = there
        self.room = room
        self.peak_bytes = 0


def may_be_tried(eqns: Iterable[Any]) -> bool:
    """Whether equations may be run on zeros: it is known that they end and call nobody."""
    return all(map(_may_be_tried, eqns))


def _may_be_tried(eqn: Any) -> bool:
    if eqn.effects or eqn.primitive.name in _NOT_TRIED:
        return False
    bodies = (getattr(closed, "jaxpr", closed) for closed in nested(eqn))
    return all(_may_be_tried(e) for body in bodies for e in body.eqns)


def try_out(
    executables: "Sequence[tuple[Executable, int]]",
    sharding: jax.sharding.Sharding,
    trials: Trials,
) -> None:
    """Warms executables and measures each, the median of a few calls on zeros.

    Args:
      executables: each with the bytes that a call takes, operands and all; one that was
        measured before, that must not be tried, or that takes too much is left alone.
      sharding: the device.
      trials: what there is room for.
    """
    needs = {
        executable: nbytes
        for executable, nbytes in executables
        if executable.may_be_tried and executable.seconds is None and nbytes <= trials.room
    }
    if not needs:
        return
    tried = [_Trial(executable) for executable in needs]
    loads_code = not memory.is_on_cpu(sharding)
    # Zeros make NaNs that are nobody's.
    with trials.alone(), unheard(), _clock(sharding) as clock:
        for turn in range(1 + _TURNS):
            first_seconds = sum(t.seconds[0] for t in tried) if turn else 0.0
            in_haste = not loads_code and first_seconds > _FIRST_SECONDS
            going = [t for t in tried if not t.is_enough(turn, in_haste)]
            for together, nbytes in _batches(going, needs, trials.room):
                trials.peak_bytes = max(trials.peak_bytes, trials.there + nbytes)
                for trial in together:
                    trial.make_operands(sharding)
                for trial in together:
                    trial.call(clock)
    for trial in tried:
        seconds, dispatched = trial.seconds, trial.dispatch_seconds
        executable = trial.executable
        took = statistics.median(seconds[1:] or seconds)
        executable.seconds = max(took - clock.own_seconds, took / 10)
        executable.dispatch_seconds = statistics.median(dispatched[1:] or dispatched)
        if executable.profile:
            times = (executable.seconds, executable.dispatch_seconds)
            profiles.write(executable.profile, dict(zip(_TIMES, times, strict=True)))


def known_times(profile: str) -> tuple[float, float] | None:
    """Seconds of a call, and until it returns, as an earlier process has measured them
    (`profiles.py`)."""
    found = profiles.read(profile, _TIMES) if profile else None
    return None if found is None else (found[0], found[1])


def _batches(
    tried: "Sequence[_Trial]", needs: "Mapping[Executable, int]", room: int
) -> "Iterator[tuple[list[_Trial], int]]":
    """Those whose operands are made together, with what they take, and the mark's slot."""
    most = min(room, _TOGETHER_BYTES)
    together, taken = list[_Trial](), 0
    for trial in tried:
        nbytes = needs[trial.executable]
        if together and taken + nbytes > most:
            yield together, taken + 2 * GRANULE
            together, taken = [], 0
        together.append(trial)
        taken += nbytes
    yield together, taken + 2 * GRANULE


class _Trial:
    """Calls of one executable."""

    def __init__(self, executable: "Executable"):
        self.executable = executable
        # Of each call: until its results are there, and until it returned: a CPU does what
        # is small within the call.
        self.seconds: list[float] = []
        self.dispatch_seconds: list[float] = []
        # With the making of operands.
        self.spent_seconds = 0.0
        self._operands: list[jax.Array] = []

    def make_operands(self, sharding: jax.sharding.Sharding) -> None:
        began = time.perf_counter()
        given_up = {i for _, i in self.executable.overwrites}
        self._operands = [
            memory.zeros(a, sharding, given_up=i in given_up)
            for i, a in enumerate(self.executable.arguments)
        ]
        jax.block_until_ready(self._operands)
        self.spent_seconds += time.perf_counter() - began

    def is_enough(self, turn: int, in_haste: bool) -> bool:
        """Whether no turn is needed after these.

        Args:
          turn: how many there were.
          in_haste: whether the first call will do where it was long: unless it loads code,
            which takes any time, it is slow by some milliseconds, most often.
        """
        if turn <= 1:
            return turn == 1 and in_haste and self.seconds[0] >= _TRIAL_SECONDS
        return self.spent_seconds >= _TRIAL_SECONDS

    def call(self, clock: "_Clock") -> None:
        """Calls it, and lets go of its operands."""
        operands, self._operands = self._operands, []
        began, returned, over = clock.times(self.executable, operands)
        self.seconds.append(over - began)
        self.dispatch_seconds.append(returned - began)
        self.spent_seconds += over - began


class _Clock:
    """When a call of an executable begins, when it returns, and when it is over.

    Attributes:
      own_seconds: what of that an accelerator takes no part in: to dispatch a call, and to
        hear of its end. A run has other tasks on the device meanwhile.
    """

    def __init__(self, sharding: jax.sharding.Sharding):
        self._queue = make_queue()
        self._slot = self._queue.open_slot() if self._queue.has_marks else -1
        self._token = memory.from_numpy(np.asarray(self._slot, np.int32), sharding)
        if sharding not in _own_seconds:
            on_cpu = memory.is_on_cpu(sharding)
            _own_seconds[sharding] = 0.0 if on_cpu else self._of_an_empty_call(sharding)
        self.own_seconds = _own_seconds[sharding]

    def _of_an_empty_call(self, sharding: jax.sharding.Sharding) -> float:
        marked = self._queue.has_marks
        x = memory.zeros(jax.ShapeDtypeStruct((1,), np.float32), sharding)

        def empty(x: jax.Array, slot: jax.Array) -> list[jax.Array]:
            return [-x, marks.mark(x, slot)] if marked else [-x]

        call = jax.jit(empty, keep_unused=True).lower(x, self._token).compile()
        times = [self._times(call, (x, self._token), marked) for _ in range(_EMPTY_CALLS)]
        return statistics.median(over - began for began, _, over in times)

    def times(
        self, executable: "Executable", operands: Sequence[jax.Array]
    ) -> tuple[float, float, float]:
        """Seconds of `time.perf_counter`."""
        if executable.marked:
            operands = (*operands, self._token)
        return self._times(executable.call, operands, executable.marked)

    def _times(
        self, call: Callable[..., Any], operands: Sequence[jax.Array], marked: bool
    ) -> tuple[float, float, float]:
        if marked:
            self._queue.arm(self._slot, 0, True)
        began = time.perf_counter()
        results = call(*operands)
        returned = time.perf_counter()
        jax.block_until_ready(results)
        over = time.perf_counter()
        if marked:
            # On a GPU the results may be there before their mark.
            ends = [when for _, when in self._queue.drain(_LATEST_SECONDS)]
            over = max((end for end in ends if end >= began), default=over)
        return began, returned, over

    def close(self) -> None:
        if self._queue.has_marks:
            self._queue.close_slot(self._slot)


@contextlib.contextmanager
def _clock(sharding: jax.sharding.Sharding) -> Iterator[_Clock]:
    clock = _Clock(sharding)
    try:
        yield clock
    finally:
        clock.close()
