"""Compiles, and knows from JAX's own events whether there was anything to compile."""

import contextlib
import enum
import functools
import threading
from typing import Any

import jax

from jturnip import compat


class Origin(enum.Enum):
    """Where an executable came from."""

    COMPILED = enum.auto()
    # JAX had it in this process.
    REUSED = enum.auto()
    # JAX found it in its persistent cache.
    CACHED = enum.auto()


_ORIGINS = {
    "/jax/core/compile/backend_compile_duration": Origin.COMPILED,
    "/jax/compilation_cache/cache_hits": Origin.CACHED,
}
# `origins`: what JAX has told of in this thread since that was last emptied.
_thread = threading.local()


def compile_lowered(
    lowered: Any,
    stored_from: float | None = None,
    options: tuple[tuple[str, Any], ...] = (),
) -> tuple[Any, Origin]:
    """Compiles a `jax.stages.Lowered`.

    Args:
      lowered: what to compile.
      stored_from: what compiles in fewer seconds is not put into the persistent cache; None
        for what the user has set.
      options: of XLA's compiler, by name, beside those it was lowered with.

    Returns:
      The `jax.stages.Compiled`, and where its executable came from.
    """
    _listen()
    _thread.origins = heard = set()
    limit = contextlib.nullcontext()
    if stored_from is not None:
        limit = compat.storing_from(stored_from)
    with limit:
        compiled = lowered.compile(dict(options)) if options else lowered.compile()
    for origin in (Origin.CACHED, Origin.COMPILED):  # JAX tells of both where it is cached
        if origin in heard:
            return compiled, origin
    return compiled, Origin.REUSED


@functools.cache
def _listen() -> None:
    # Once and for good: JAX calls its listeners from any thread, and may skip one while
    # another is taken off the list.
    jax.monitoring.register_event_listener(_hear)
    jax.monitoring.register_event_duration_secs_listener(_hear)


def _hear(event: str, *_: Any, **__: Any) -> None:
    if event in _ORIGINS:
        getattr(_thread, "origins", set()).add(_ORIGINS[event])
