"""The only module that touches private JAX API; each use has a public fallback.

| what | private | without it |
| --- | --- | --- |
| the user's file and line of an equation | `jax._src.source_info_util.summarize` | no line |
| everything that changes how a function traces | `jax._src.config.trace_context` | x64 and matmul precision |
"""

from collections.abc import Hashable
from typing import Any

import jax


try:
    from jax._src.source_info_util import summarize as _summarize
except ImportError:  # pragma: no cover - depends on the jax version
    _summarize = None

try:
    from jax._src.config import trace_context as _trace_context
except ImportError:  # pragma: no cover - depends on the jax version
    _trace_context = None


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
    return (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)
