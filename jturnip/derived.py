"""What runs, in the budget of a user's function, one that is derived from it."""

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

import jax

from jturnip.dispatch import Dispatch, History
from jturnip.errors import DoesNotFit
from jturnip.runtime.turns import Turn
from jturnip.signature import Flat
from jturnip.stages import Lowered, Options, Part, Traced
from jturnip.transformations import Function


# What parts of a transformed function leave to each other of a budget, in how many steps.
_STEPS = 16


class DerivedRunner:
    """Runs a derived function beside what other parts left on the device."""

    def __init__(self, function: Function, options: Options, turn: Turn, history: History):
        """Of a derived function.

        Args:
          function: the derived one.
          options, turn, history: those of the function of the user.
        """
        fn = lambda *args: function.fn(*args)
        fn.__name__ = fn.__qualname__ = function.name
        self._jitted = jax.jit(
            fn,
            donate_argnums=function.donated,
            compiler_options=dict(options.compiler_options) or None,
        )
        self._statics = Flat(fn, function.names)
        self._part = Part(function.groups, function.on_host, function.later)
        self._function = function
        self._options, self._turn, self._history = options, turn, history
        self._dispatches: dict[tuple[int, int], Dispatch] = {}
        # What was planned before the first call: that needs the same executables.
        self._ahead: list[Lowered] = []

    def __call__(self, *args: Any) -> list[Any]:
        turn, part = self._turn, self._part
        call = self._statics.call(args, {})
        call.check_alive(lambda: self._statics.names(call))
        own, beside_bytes = self._dispatch(args)
        try:
            compiled = own.find(call)
        except DoesNotFit as error:
            raise error.beside(beside_bytes) from None
        self._ahead.clear()
        assert compiled is not None  # the function closes over nothing that is traced
        results = jax.tree.leaves(own.run(compiled, call, beside_bytes))
        turn.gave_out(results[i] for i in part.residuals)
        return results

    def seconds(self, leaves: Sequence[Any], beside_bytes: int, cut: bool) -> float | None:
        """What a call is thought to take: nothing as one executable; None if it is refused.
        Compiles its tasks, and runs none.

        Args:
          leaves: `jax.ShapeDtypeStruct`s of the arguments, with where they lie.
          beside_bytes: what other parts have on the device meanwhile.
          cut: whether what does not fit may be cut along its axes.
        """
        call = self._statics.call(tuple(leaves), {})
        options = self._beside(beside_bytes, 0, is_asked=True, may_be_cut=cut)
        try:
            lowered = Traced(self._jitted, self._statics, call, options, self._turn).lower()
        except DoesNotFit:
            return None
        self._ahead.append(lowered)
        return lowered.seconds_asked

    def _dispatch(self, args: Sequence[Any]) -> tuple[Dispatch, int]:
        """What calls beside as many residuals as there are now, and their bytes."""
        key = self._left(args)
        if any(key) and key not in self._dispatches:
            # To plan anew takes long, and what was traced may hold residuals in cycles.
            gc.collect()
            key = self._left(args)
        if key not in self._dispatches:
            own = self._beside(*key)
            new = Dispatch(self._jitted, self._statics, own, self._turn, self._history)
            self._dispatches.setdefault(key, new)
        return self._dispatches[key], key[0]

    def _left(self, args: Sequence[Any]) -> tuple[int, int]:
        """Bytes of the residuals that are there, but for those of some arguments that are
        read; and of all of them, which only what leaves residuals itself must know."""
        held = self._turn.residual_bytes(())
        if not held:
            return 0, 0
        read = (a for i, a in enumerate(args) if i not in self._function.unread)
        beside_bytes = self._in_steps(self._turn.residual_bytes(read))
        return beside_bytes, self._in_steps(held) if self._part.residuals else 0

    def _beside(self, beside_bytes: int, residual_bytes: int, **asked: bool) -> Options:
        """The function's options for what is left of the budget."""
        budget = self._options.gpu_bytes
        return dataclasses.replace(
            self._options,
            gpu_bytes=None if budget is None else budget - beside_bytes,
            in_shardings=None,
            out_shardings=None,
            part=dataclasses.replace(
                self._part,
                residual_bytes=residual_bytes,
                beside_bytes=beside_bytes,
                **asked,
            ),
        )

    def _in_steps(self, nbytes: int) -> int:  # since each is compiled for
        budget = self._options.gpu_bytes
        if budget is None:
            return 0
        step = max(1, budget // _STEPS)
        return -(-nbytes // step) * step
