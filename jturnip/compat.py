"""The only module that touches private JAX API; each use has a public fallback.

| private | what for | without it |
| --- | --- | --- |
| `jax._src.source_info_util.summarize` | the user's file and line | no line |
| `jax._src.config.trace_context` | what changes how a function traces | the x64 mode |
| `batched_copy_array_to_devices_with_sharding` | copies quickly | `device_put` |

It also reads what JAX offers publicly but does not describe to type checkers.
"""

import functools
from collections.abc import Hashable
from typing import Any, TypeAlias

import jax
import numpy as np


# `jax.Device`, which is a variable to type checkers.
Device: TypeAlias = Any

# The state of `jax.config`, whose attributes are made at run time.
_config: Any = jax.config

try:
    from jax._src.source_info_util import summarize as _summarize
except ImportError:  # pragma: no cover - depends on the jax version
    _summarize = None

try:
    from jax._src.config import trace_context as _trace_context
except ImportError:  # pragma: no cover - depends on the jax version
    _trace_context = None


try:
    from jax._src.lib import xla_client as _xla_client  # pyright: ignore

    _batched_copy: Any = _xla_client.batched_copy_array_to_devices_with_sharding
    _REUSE: Any = _xla_client.ArrayCopySemantics.REUSE_INPUT
except (ImportError, AttributeError):  # pragma: no cover - depends on the jax version
    _batched_copy = None


def copy_to(array: Any, sharding: Any) -> Any:
    """`jax.device_put` of an array on one device to another memory of that device."""
    global _batched_copy
    if _batched_copy is not None and type(array) is array_type():
        try:
            devices = sharding._internal_device_list
            return _batched_copy([array], [devices], [sharding], [_REUSE])[0]
        except (AttributeError, TypeError):  # another signature than the one we know
            _batched_copy = None
    return jax.device_put(array, sharding)


@functools.cache
def array_type() -> type:
    """The class of concrete arrays; PRNG keys have another."""
    return type(jax.device_put(np.int32(0)))


def source_line(equation: Any) -> str:
    """The user's "file:line (function)" of a jaxpr equation, or ""."""
    if _summarize is None:
        return ""
    try:
        line = _summarize(equation.source_info)
    except Exception:  # the private function may change its mind about its argument
        return ""
    return "" if line == "unknown" else line


def trace_context() -> Hashable:
    """What, besides the arguments, decides how a function traces in this thread."""
    if _trace_context is not None:
        try:
            return _trace_context()
        except Exception:  # as above
            pass
    return (_config.jax_enable_x64, _config.jax_default_matmul_precision)


def jit_is_disabled() -> bool:
    """Whether the user runs under `jax.disable_jit`."""
    return bool(_config.jax_disable_jit)


def default_device() -> Device:
    """The device that `jax.jit` would use for uncommitted arguments."""
    chosen = _config.jax_default_device
    if isinstance(chosen, str):
        return jax.devices(chosen)[0]
    return chosen if chosen is not None else jax.devices()[0]
