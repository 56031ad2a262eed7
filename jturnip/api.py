"""`jturnip.jit`: `jax.jit` in a byte budget."""

import contextlib
import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from jturnip import compat
from jturnip.errors import UnsupportedError
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.report import RunReport
from jturnip.runtime.turns import Turn
from jturnip.signature import Call, Statics
from jturnip.stages import Compiled, Lowered, Options, Traced, placed
from jturnip.units import parse_bytes


# Signatures that one function keeps; then the least recently used is forgotten.
_SIGNATURES = 256


def jit(
    fn: Callable[..., Any] | None = None,
    gpu_bytes: int | float | str | None = None,
    *,
    strategy: str = "auto",
    link: SimulatedLink | None = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    keep_unused: bool = False,
    inline: bool = False,
    **unsupported: Any,
) -> Any:
    """Like `jax.jit`, within `gpu_bytes` of device memory.

    A function that fits runs as one XLA executable, as under `jax.jit`. One that does not
    is split into tasks; buffers that are not needed for a while wait in pinned host memory,
    and the order of the tasks adapts to when transfers finish.

    Example:
      >>> import jax.numpy as jnp, jturnip
      >>> f = jturnip.jit(lambda x: jnp.tanh(x @ x).sum(), gpu_bytes="1GiB")
      >>> float(f(jnp.zeros((8, 8))))
      0.0

    Args:
      fn: the function; without it, `jit` returns a decorator.
      gpu_bytes: the budget: bytes, or a string such as "8GiB" or "500MB". It covers live
        arrays (the arguments and closed-over arrays on the device too), workspace, and
        transfers in flight, of all calls of the function together. None: what the device
        has free when a signature is first compiled, less a reserve.
      strategy: "auto", or one strategy by name ("turnip", "fixed_order", "layerwise",
        "on_demand"), which is then used even where the function fits, or "whole", which
        never splits.
      link: a simulated link to the device, for experiments.
      in_shardings, out_shardings: as in `jax.jit`, on one device: a tree of shardings and
        None whose leaves stand for all below them. Their memory kinds say what is held in
        host memory and streamed from there, and which results go there.
      static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused, inline:
        as in `jax.jit`.

    Returns:
      A `Wrapped` function. Each element of a tuple that it returns, or all of what it
      returns otherwise, lies in one memory: on the device where there is room for it and
      for a call with it, else in `pinned_host`. A result that re-uses a donated
      `pinned_host` argument comes back in `pinned_host`.

    Raises:
      BudgetError: `gpu_bytes` is not a size.
      ValueError: the strategy is not known.
      UnsupportedError: a keyword of `jax.jit` that jturnip does not take.

    Calls raise DoesNotFit, HostMemoryError, UnsupportedError, ArgumentError or
    ExecutionError; see `jturnip.errors`.
    """
    asked = [k for k, v in unsupported.items() if v is not None]
    if asked:
        raise UnsupportedError(
            f"jturnip.jit does not take {', '.join(asked)}. Place the arguments with"
            " jax.device_put or jturnip.host instead."
        )
    options = Options(
        None if gpu_bytes is None else parse_bytes(gpu_bytes),
        strategy,
        link,
        _said(in_shardings),
        _said(out_shardings),
        keep_unused,
    )
    keywords = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "inline": inline,
    }
    if fn is None:
        return lambda fn: Wrapped(fn, options, keywords)
    return Wrapped(fn, options, keywords)


def _said(shardings: Any) -> Any:
    """None for what `jax.jit` takes for nothing said."""
    return None if type(shardings).__name__ == "UnspecifiedValue" else shardings


class Wrapped:
    """A function under `jturnip.jit`."""

    def __init__(self, fn: Callable[..., Any], options: Options, keywords: dict[str, Any]):
        functools.update_wrapper(self, fn)
        # For tracing, where arrays lie does not count; under a transformation it does.
        self._jitted: Any = jax.jit(fn, **keywords)
        self._inlined: Any = self._jitted
        shardings = {
            name: getattr(options, name)
            for name in ("in_shardings", "out_shardings")
            if getattr(options, name) is not None
        }
        if shardings:
            self._inlined = jax.jit(fn, **keywords, **shardings)
        self._options = options
        self._statics = Statics(fn, keywords["static_argnums"], keywords["static_argnames"])
        # The most recently used last.
        self._compiled: OrderedDict[Hashable, Compiled] = OrderedDict()
        # The budget is for all signatures, and all threads.
        self._turn = Turn()
        self._compiling = threading.RLock()
        # What was called last; what it did, if it has been forgotten since.
        self._last: Compiled | None = None
        self._before: RunReport | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `fn`; under a transformation of JAX it is inlined as `jax.jit`'s is."""
        call = self._statics.call(args, kwargs)
        if call.traced or compat.jit_is_disabled():
            return self._inlined(*args, **kwargs)
        call.check_alive(lambda: self._statics.names(call))
        compiled = self._find(placed(call, self._options)[0])
        if compiled is None:
            return self._inlined(*args, **kwargs)
        results = compiled.call_flat(call.leaves)
        self._last = compiled
        return results

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _find(self, call: Call) -> Compiled | None:
        """The program for a call; None if `fn` closes over values that are traced."""
        key = call.key()
        try:
            compiled = self._compiled.get(key)
        except TypeError:
            # A static argument without a hash: jax.jit says so better.
            self._jitted.trace(*call.args, **call.kwargs)
            raise
        if compiled is not None:
            with contextlib.suppress(KeyError):  # another thread may have forgotten it
                self._compiled.move_to_end(key)
            return compiled
        with self._compiling:
            compiled = self._compiled.get(key)
            if compiled is None:
                traced = self._trace(call)
                if traced.closes_over_tracers:
                    return None
                compiled = traced.lower().compile()
                self._compiled[key] = compiled
                if len(self._compiled) > _SIGNATURES:
                    self._compiled.popitem(last=False)
        return compiled

    def _trace(self, call: Call) -> Traced:
        return Traced(self._jitted, self._statics, call, self._options, self._turn)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces for arguments, or `jax.ShapeDtypeStruct`s like them.

        A struct with a sharding is taken to lie in its memory kind; one without is taken
        for a numpy array.
        """
        return self._trace(self._statics.call(args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and takes apart; allocates no arrays."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the results."""
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets every compiled signature."""
        with self._compiling:
            self._compiled.clear()
            self._before, self._last = self.last_run, None
        self._jitted.clear_cache()

    @property
    def last_run(self) -> RunReport | None:
        """What the last finished call did; None before the first."""
        return self._before if self._last is None else self._last.last_run

    def __repr__(self) -> str:
        return f"<jturnip.jit of {getattr(self, '__name__', 'a function')}>"
