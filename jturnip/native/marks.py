"""Marks: a custom call in an executable that says when it has come so far.

`mark(x, slot)` inside a traced function pushes the id that `slot` is armed with onto its
queue (see `queue.py`) as soon as `x` is computed. The C++ half is optional: `load()` says
whether it can be used, `status()` says why not.
"""

import functools
import importlib.metadata
import pathlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np


_TARGET = "jturnip_mark"
_SLOT = jax.ShapeDtypeStruct((), np.dtype(np.int32))
_REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall ."
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """Whether the C++ extension is in use.

    Attributes:
      loaded: marks and the native queue can be used.
      reason: why not and what to do, in a sentence; empty when loaded.
      api_version: (major, minor) of the XLA FFI headers the extension was built with; None
        when there is no extension.
    """

    loaded: bool
    reason: str
    api_version: tuple[int, int] | None


def load() -> bool:
    """Loads the extension and registers its FFI targets once; False if it is of no use."""
    return status().loaded


def status() -> NativeStatus:
    """Loads the extension if that was not tried yet, and says how it went."""
    with _lock:
        return _load_once()


def mark(x: jax.Array, slot: jax.Array, *more: jax.Array) -> jax.Array:
    """A mark that fires when `x`, and `more` where given, are computed.

    To be called in a function that is traced, and after `load()` returned True. The result
    must be an output of the executable: that is what keeps the mark alive, since it
    declares no effect (an effect would cost a call JAX's fast path).

    Args:
      x: an array of any shape and any dtype but the extended ones (PRNG keys).
      slot: a scalar int32, a slot number from `CompletionQueue.open_slot`.
      *more: arrays to wait for as well, like `x`.

    Returns:
      The slot number, a scalar int32.
    """
    call = jax.ffi.ffi_call(_TARGET, _SLOT)
    return call(x, slot, *more)


def mark_passing(
    passed: Sequence[jax.Array], slot: jax.Array, *more: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """Like `mark`, for arrays of which some pass through it, in their own memory.

    A custom call takes arrays in row-major order. Where an array is made in another, XLA
    writes it down twice: for the call, and for who else wants it. What passes through the
    call is written once.

    Args:
      passed: arrays of which the caller uses only what is returned.
      slot: as for `mark`.
      *more: arrays to wait for as well.

    Returns:
      The slot number, and `passed`.
    """
    if not passed:
        return mark(*(more[:1] or [slot]), slot, *more[1:]), []
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in passed]
    # The slot is the second argument, its number the first result.
    places = [0, *range(2, len(passed) + 1)]
    aliases = {place: at + 1 for at, place in enumerate(places)}
    call = jax.ffi.ffi_call(_TARGET, [_SLOT, *types], input_output_aliases=aliases)
    done, *results = call(passed[0], slot, *passed[1:], *more)
    return done, results


@functools.cache
def _load_once() -> NativeStatus:
    try:
        from jturnip.native import _native
    except ImportError as error:
        reason = (
            f"The C++ extension is not built for this Python ({error}); to build it, run "
            f"`{_REBUILD}` in the source of jturnip."
        )
        return NativeStatus(False, reason, None)
    built = _native.api_version()
    reason = refusal(built, running_api_version())
    if not reason:
        jax.ffi.register_ffi_target(_TARGET, _native.mark_cpu(), platform="cpu")
        jax.ffi.register_ffi_target(_TARGET, _native.mark_cuda(), platform="CUDA")
    return NativeStatus(not reason, reason, built)


def refusal(built: tuple[int, int], running: tuple[int, int] | None) -> str:
    """Why an extension must not be registered; empty if it may be.

    jaxlib takes handlers of its own FFI version and of earlier ones. One later handler and
    its backend does not start at all, so in doubt nothing is registered.

    Args:
      built: FFI version of the headers the extension was built with.
      running: FFI version of the jaxlib in use, None if unknown.
    """
    have = f"jaxlib {importlib.metadata.version('jaxlib')}"
    wants = f"The C++ extension was built for XLA's FFI version {built[0]}.{built[1]}"
    if running is None:
        return f"{wants}, and {have} does not say which version it has."
    if built[0] == running[0] and built <= running:
        return ""
    return (
        f"{wants}, but {have} has {running[0]}.{running[1]}; to build it for this jaxlib, "
        f"run `{_REBUILD}` in the source of jturnip."
    )


def running_api_version() -> tuple[int, int] | None:
    """(major, minor) of the FFI in the jaxlib in use, from its headers; None if unknown.

    jaxlib tells it nowhere else. The headers come in the same wheel as the library.
    """
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    major, minor = (
        re.search(rf"^#define XLA_FFI_API_{part} (\d+)", text, re.MULTILINE)
        for part in ("MAJOR", "MINOR")
    )
    if major is None or minor is None:
        return None
    return int(major[1]), int(minor[1])
