"""From a call to the program that runs it."""

import contextlib
import dataclasses
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from jturnip.graph.report import RunReport
from jturnip.runtime.turns import Turn
from jturnip.signature import Call, Statics
from jturnip.stages import Compiled, Options, Traced, placed


# Signatures that one function keeps; then the least recently used is forgotten.
_SIGNATURES = 256


class History:
    """What the last finished call did, of a function and all that is derived from it."""

    def __init__(self) -> None:
        # What was called last; what it did, if it has been forgotten since.
        self.last: Compiled | None = None
        self._before: RunReport | None = None
        # What other parts of the function had on the device meanwhile.
        self.beside_bytes = 0

    @property
    def report(self) -> RunReport | None:
        """None before the first call."""
        report = self._before if self.last is None else self.last.last_run
        if report is None or self.last is None or not self.beside_bytes:
            return report
        peak_bytes = report.peak_bytes + self.beside_bytes
        return dataclasses.replace(report, peak_bytes=peak_bytes)

    def forget_program(self) -> None:
        """Lets go of the program that ran last."""
        self._before, self.last = self.report, None


class Dispatch:
    """The compiled programs of one function, by signature."""

    def __init__(
        self, jitted: Any, statics: Statics, options: Options, turn: Turn, history: History
    ):
        # For tracing only, where it does not count where arrays lie.
        self._jitted = jitted
        self._statics = statics
        self._options = options
        # The budget is for all signatures, and all threads.
        self._turn = turn
        self._history = history
        # The most recently used last.
        self._compiled: OrderedDict[Hashable, Compiled] = OrderedDict()
        # What was found last: it is at its place, and the hash of a key takes a while.
        self._found: weakref.ref[Compiled] | None = None
        self._compiling = threading.RLock()

    def find(self, call: Call) -> Compiled | None:
        """The program for a call; None if the function closes over traced values, reads
        references from outside, names an axis of `vmap`, or takes or gives tokens."""
        call, _ = placed(call, self._options)
        key = call.key()
        try:
            compiled = self._compiled.get(key)
        except Exception:
            # A static argument that has no hash, or cannot be compared: jax.jit says it.
            self._jitted.trace(*call.args, **call.kwargs)
            raise
        if compiled is not None:
            if self._found is None or self._found() is not compiled:
                with contextlib.suppress(KeyError):  # another thread may have forgotten it
                    self._compiled.move_to_end(key)
                self._found = weakref.ref(compiled)
            return compiled
        with self._compiling:
            compiled = self._compiled.get(key)
            if compiled is None:
                traced = self.trace(call)
                if traced.is_not_closed:
                    return None
                compiled = traced.lower().compile()
                self._compiled[key] = compiled
                if len(self._compiled) > _SIGNATURES:
                    self._compiled.popitem(last=False)
        return compiled

    def run(self, compiled: Compiled, call: Call, beside_bytes: int = 0) -> Any:
        """Runs what `find` found, while so much else of the function is on the device."""
        results = compiled.call_flat(call.leaves)
        self._history.last, self._history.beside_bytes = compiled, beside_bytes
        return results

    def trace(self, call: Call) -> Traced:
        """Traces the function for a call."""
        return Traced(self._jitted, self._statics, call, self._options, self._turn)

    def __len__(self) -> int:
        return len(self._compiled)

    def clear(self) -> None:
        """Forgets every signature, and lets go of what is kept on the device."""
        with self._compiling:
            self._compiled.clear()
        self._turn.kept.clear()
        self._jitted.clear_cache()
