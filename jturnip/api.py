"""`jturnip.jit`: `jax.jit` in a byte budget."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jturnip import compat, memory, placement
from jturnip.derived import DerivedRunner
from jturnip.dispatch import Dispatch, History
from jturnip.errors import InlinedWarning
from jturnip.graph.report import RunReport
from jturnip.memory import on_device
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.turns import Turn
from jturnip.show import pages
from jturnip.signature import Call, Statics
from jturnip.stages import Lowered, Options, Traced, anywhere, placed
from jturnip.transformations import Functions
from jturnip.units import format_bytes, parse_bytes


# Why a call is not run in its budget.
_TRACED = (
    "was called inside another traced function (under jax.jit, for example), and is inlined"
    " there: its gpu_bytes do not count, the memory of the outer function does. Wrap that"
    " one in jturnip.jit instead."
)
_OTHER_RULES = (
    "has tokens, has references that are transformed, or names an axis of jax.vmap, and is"
    " left to jax.jit: its gpu_bytes do not count."
)


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
    device: Any = None,
    backend: str | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Like `jax.jit`, within `gpu_bytes` of device memory.

    A function that fits runs as one XLA executable, as under `jax.jit`. One that does not
    is split into tasks; buffers that are not needed for a while wait in pinned host memory,
    and the order of the tasks adapts to when transfers finish.

    Examples:
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
      strategy: "auto", or one strategy by name ("turnip", "ours", "ahead",
        "fixed_order", "layerwise", "superpipeline", "tensile", "on_demand"), which is then
        used even where the function fits, or "whole", which never splits.
      link: a simulated link to the device, for experiments.
      in_shardings, out_shardings: as in `jax.jit`, on one device: a tree of shardings and
        None whose leaves stand for all below them. Their memory kinds say what is held in
        host memory and streamed from there, and which results go there.
      device, backend: the device to run on, wherever the arguments are.
      compiler_options: XLA's, for every executable.
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

    Calls raise DoesNotFit, HostMemoryError, UnsupportedError, ArgumentError or
    ExecutionError; see `jturnip.errors`.
    """
    if backend is not None:
        device = jax.devices(backend)[0]
    options = Options(
        None if gpu_bytes is None else parse_bytes(gpu_bytes),
        strategy,
        link,
        _said(in_shardings),
        _said(out_shardings),
        keep_unused,
        device,
        tuple(sorted((compiler_options or {}).items())),
    )
    keywords = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "inline": inline,
        "compiler_options": compiler_options,
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
        # As `update_wrapper` does, but what a callable object has of its own hides nothing.
        own = getattr(fn, "__dict__", {}).items()
        self.__dict__.update((k, v) for k, v in own if not hasattr(Wrapped, k))
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._options, self._keywords = fn, options, keywords
        # For tracing, where arrays lie does not count; where it is inlined it does.
        self._jitted: Any = jax.jit(fn, **keywords)
        self._inlined: Any = self._jitted
        shardings = {
            name: getattr(options, name)
            for name in ("in_shardings", "out_shardings")
            if getattr(options, name) is not None
        }
        if shardings:
            self._inlined = jax.jit(fn, **keywords, **shardings)
        self._statics = Statics(fn, keywords["static_argnums"], keywords["static_argnames"])
        self._turn, self._history = Turn(), History()
        self._dispatch = Dispatch(
            self._jitted, self._statics, options, self._turn, self._history
        )
        runner = functools.partial(
            DerivedRunner, options=options, turn=self._turn, history=self._history
        )
        self._functions = Functions(self._jitted, self._statics, runner)
        self._has_warned = False

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `fn`; where the call becomes part of a larger jaxpr, it is inlined there."""
        call = self._statics.call(args, kwargs)
        if compat.jit_is_disabled():
            args, kwargs = self._statics.with_leaves(call, on_device(call.leaves))
            return self._jitted(*args, **kwargs)
        if compat.is_staging():
            in_budget = compat.is_for_checkpoint()
            return self._transform(call) if in_budget else self._inline(call)
        if not call.traced:
            call.check_alive(lambda: self._statics.names(call))
            compiled = self._dispatch.find(call)
            if compiled is not None:
                return self._dispatch.run(compiled, call)
        return self._transform(call)

    def _inline(self, call: Call, why: str = _TRACED) -> Any:
        """As `jax.jit` does it, with arrays in host memory brought to the device."""
        if not self._has_warned and not compat.is_tracing():
            self._has_warned = True
            compat.warn(f"{self!r} {why}", InlinedWarning)
        args, kwargs = self._statics.with_leaves(call, on_device(call.leaves))
        with compat.tracing():
            return self._inlined(*args, **kwargs)

    def _transform(self, call: Call) -> Any:
        """Under transformations that evaluate: as an operation with rules of its own."""
        if self._options.in_shardings is not None:
            leaves = list(map(memory.placed, call.leaves, placed(call, self._options)[1]))
            call = dataclasses.replace(call, leaves=leaves)
        made = self._functions.find(call)
        if made is None:
            return self._inline(call, _OTHER_RULES)
        results = made.run(call.leaves)
        if self._options.out_shardings is not None:
            tree = jax.tree.unflatten(made.out_tree, results)
            where = placement.broadcast_shardings(
                self._options.out_shardings, tree, "out_shardings"
            )
            results = map(memory.placed, results, where)
        return jax.tree.unflatten(made.out_tree, results)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @compat.api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces for arguments, or `jax.ShapeDtypeStruct`s like them.

        A struct with a sharding is taken to lie in its memory kind; one without is taken
        for a numpy array.
        """
        return self._dispatch.trace(self._statics.call(args, kwargs))

    @compat.api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and takes apart; allocates no arrays."""
        return self.trace(*args, **kwargs).lower()

    @compat.api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the results."""
        call = self._statics.call(args, kwargs)
        args, kwargs = self._statics.with_leaves(call, anywhere(call.leaves))
        with compat.tracing():
            return self._inlined.eval_shape(*args, **kwargs)

    def _cache_size(self) -> int:
        """How many signatures are compiled, as `jax.jit`'s functions say it."""
        return len(self._dispatch)

    def clear_cache(self) -> None:
        """Forgets every compiled signature."""
        self._history.forget_program()
        self._dispatch.clear()
        self._functions.clear()

    @property
    def last_run(self) -> RunReport | None:
        """What the last finished call did; None before the first.

        Under a transformation, such as `jax.grad`, the last of the function's parts.
        """
        return self._history.report

    def __reduce__(self) -> Any:
        return Wrapped, (self._fn, self._options, self._keywords)

    def _repr_html_(self) -> str:
        budget = self._options.gpu_bytes
        rows = [
            ("budget", "free memory" if budget is None else format_bytes(budget)),
            ("strategy", self._options.strategy),
            ("compiled signatures", str(self._cache_size())),
        ]
        return pages.of_wrapped(repr(self).strip("<>"), rows, self.last_run)

    def __repr__(self) -> str:
        return f"<jturnip.jit of {getattr(self, '__name__', 'a function')}>"
