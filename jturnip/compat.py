"""The only module that touches private JAX API; each use has a public fallback.

| private | what for | without it |
| --- | --- | --- |
| `jax._src.source_info_util` | the user's file and line | no line |
| `jax._src.config.trace_context` | what changes how a function traces | the x64 mode |
| `persistent_cache_min_compile_time_secs` | stores what compiles quickly | does not |
| `jax._src.array.ArrayImpl` | results not committed, or weakly typed | the other |
| `batched_copy_array_to_devices_with_sharding` | copies quickly | `device_put` |
| `jax._src.interpreters.pxla.batched_device_put` | the same for numpy's | `device_put` |
| `jax._src.dispatch.runtime_tokens` | ordered effects after one failed | they fail too |
| `jax._src.state.discharge` | functions of references are split | one task, inlined |
| `jax.Ref._refs._buf` | references change in place | are read, and written |
| `jax._src.traceback_util` | hides frames that are not the user's | shows them |
| `to_lojax` of `call_hi_primitive` | what it does is split | one task |
| `impl` of `random_gamma` | the same | the same |
| `_bcoo_dot_general_impl` and its like | the same | the same |
| `jax._src.interpreters.mlir._lowerings` | what others lower theirs to | its `impl` |
| `callback` of `pure_callback` | the host calls it itself | a task of its own does |
| `jax._src.core.trace_state_clean` | no trace is going on, quickly | asks each time |
| `jax._src.core.trace_ctx` | `jax.checkpoint` keeps the budget | it is inlined there |
| `jax._src.core.pytype_aval_mappings` | closed-over arrays in host memory | JAX refuses |

It also reads what JAX offers publicly but does not describe to type checkers.
"""

import contextlib
import functools
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.extend
import numpy as np


_Function = TypeVar("_Function", bound=Callable[..., Any])

# `jax.Device`, which is a variable to type checkers.
Device: TypeAlias = Any

# The state of `jax.config`, whose attributes are made at run time.
_config: Any = jax.config

# Where jturnip itself is, without what could be a user's, and installed libraries.
_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = tuple(
    os.path.join(_HERE, name)
    for name in os.listdir(_HERE)
    if name not in ("models", "demo.py", "__pycache__")
)
_NOT_THE_USERS = _PACKAGE + tuple(
    {sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")}
)

# Up to jaxlib 0.10, batched linear algebra on the CPU waits, in a thread of XLA's pool, for
# other threads of it, and in 0.11 so do Fourier transforms; as many such operations at once
# as there are threads never end.
_version: str = jax.lib.__version__  # pyright: ignore
_jaxlib = tuple(map(int, _version.split(".")[:2]))
LAPACK_MAY_HANG = _jaxlib < (0, 11)
FFT_MAY_HANG = _jaxlib == (0, 11)

try:
    from jax._src import source_info_util as _lines
except ImportError:  # pragma: no cover - depends on the jax version
    _lines: Any = None

try:
    from jax._src import core as _core
except ImportError:  # pragma: no cover - depends on the jax version
    _core: Any = None

try:
    from jax._src.state import discharge as _discharge
except ImportError:  # pragma: no cover - depends on the jax version
    _discharge: Any = None

try:
    from jax._src import traceback_util as _frames
except ImportError:  # pragma: no cover - depends on the jax version
    _frames: Any = None

try:
    from jax._src.config import trace_context as _trace_context
except ImportError:  # pragma: no cover - depends on the jax version
    _trace_context = None


try:
    from jax._src.config import persistent_cache_min_compile_time_secs as _min_stored
except ImportError:  # pragma: no cover - depends on the jax version
    _min_stored = None

try:
    from jax._src.array import ArrayImpl as _Array
except ImportError:  # pragma: no cover - depends on the jax version
    _Array: Any = None

try:
    from jax._src.lib import xla_client as _xla_client  # pyright: ignore

    _batched_copy: Any = _xla_client.batched_copy_array_to_devices_with_sharding
    _REUSE: Any = _xla_client.ArrayCopySemantics.REUSE_INPUT
except (ImportError, AttributeError):  # pragma: no cover - depends on the jax version
    _batched_copy = None

try:
    from jax._src.interpreters.pxla import batched_device_put as _put
except ImportError:  # pragma: no cover - depends on the jax version
    _put: Any = None

try:
    from jax._src.dispatch import runtime_tokens as _tokens
except ImportError:  # pragma: no cover - depends on the jax version
    _tokens: Any = None


try:
    from jax._src.interpreters.mlir import _lowerings
except ImportError:  # pragma: no cover - depends on the jax version
    _lowerings: Any = {}


def _boundary() -> Callable[[_Function], _Function]:
    try:
        for path in _PACKAGE:
            _frames.register_exclusion(path)
            _lines.register_exclusion(path)
        return _frames.api_boundary
    except AttributeError:  # no such module, or other names in it
        return lambda fn: fn


# Decorates what users call: tracebacks of errors do not show the frames below it that are
# jturnip's or JAX's, but as `jax_traceback_filtering` says.
api_boundary = _boundary()


class _Staged(Exception):
    """Says that an operation was to become part of a jaxpr."""


_probe = jax.extend.core.Primitive("jturnip_probe")
_probe.multiple_results = True
_probe.def_impl(lambda: [])


@_probe.def_abstract_eval
def _say_staged() -> Any:
    raise _Staged


def is_staging() -> bool:
    """Whether an operation would now become part of a jaxpr, instead of being evaluated:
    under `jax.jit`, not under `jax.grad` or `jax.vmap` alone."""
    if _core is not None:
        try:
            if _core.trace_state_clean():
                return False
        except AttributeError:  # another name in this version
            pass
    try:
        _probe.bind()
    except _Staged:
        return True
    return False


def is_for_checkpoint() -> bool:
    """Whether that jaxpr is one that `jax.checkpoint` evaluates."""
    try:
        trace = _core.trace_ctx.trace
        while not hasattr(trace, "frame"):
            trace = trace.parent_trace
        return trace.frame.debug_info.traced_for.startswith("checkpoint")
    except AttributeError:  # no trace of the kind, or another structure
        return False


class _Tracing(threading.local):
    """How many functions are traced by jturnip in this thread, one inside the other."""

    depth = 0


_tracing = _Tracing()
_tracing_lock = threading.Lock()
_tracing_threads = 0


def is_tracing() -> bool:
    """Whether jturnip traces a function in this thread."""
    return _tracing.depth > 0


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """A context in which functions are traced as if all arrays were on the device, also
    those that they close over: JAX refuses to mix memories in one operation."""
    if not _tracing.depth:
        _change_types(1)
    _tracing.depth += 1
    try:
        yield
    finally:
        _tracing.depth -= 1
        if not _tracing.depth:
            _change_types(-1)


def _change_types(threads: int) -> None:
    """Exchanges what tells JAX the type of an array while any thread is tracing."""
    global _tracing_threads
    types = getattr(_core, "pytype_aval_mappings", None)
    if not isinstance(types, dict) or _Array not in types:
        return
    with _tracing_lock:
        _tracing_threads += threads
        if types[_Array] is not _type_while_tracing and _tracing_threads:
            _type_while_tracing.stock = types[_Array]
            types[_Array] = _type_while_tracing
        elif not _tracing_threads:
            types[_Array] = _type_while_tracing.stock


class _TypeWhileTracing:
    stock: Any = None

    def __call__(self, array: Any) -> Any:
        aval = self.stock(array)
        if _tracing.depth and aval.memory_space == jax.memory.Space.Host:
            return aval.update(memory_space=jax.memory.Space.Device)
        return aval


_type_while_tracing = _TypeWhileTracing()


def put(array: Any, sharding: Any) -> Any:
    """Puts what is no JAX array on one device, as `jax.jit` does with arguments: a guard
    against transfers sees it."""
    global _put
    if _put is not None and type(array) is np.ndarray:
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        if dtype == array.dtype:
            try:
                on_host = sharding.memory_kind != "device"
                aval = _abstract(array.shape, dtype, on_host)
                return _put(aval, sharding, [array], list(sharding.device_set))
            except (AttributeError, TypeError):  # another signature than the one we know
                _put = None
    return jax.device_put(array, sharding)


@functools.lru_cache(maxsize=1024)
def _abstract(shape: tuple[int, ...], dtype: Any, on_host: bool) -> Any:
    space = jax.memory.Space.Host if on_host else jax.memory.Space.Device
    made: Any = jax.typeof(jax.ShapeDtypeStruct(shape, dtype))
    return made.update(memory_space=space)


def forget_failed_tokens() -> None:
    """Lets ordered effects of this thread begin anew after one of them failed.

    JAX hands a token from one to the next, and keeps the one of a failed call. Waits for
    none.
    """
    tokens = getattr(_tokens, "current_tokens", None)
    if not isinstance(tokens, dict):
        return
    for effect, token in list(tokens.items()):
        try:
            if token._buf.is_ready():
                token.block_until_ready()
        except Exception:
            tokens.pop(effect, None)


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
    """The user's "file:line:column (function)" of a jaxpr equation, or "".

    The innermost line that is in no installed library, and not in jturnip itself; where all
    are, the innermost.
    """
    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    if _lines is None or traceback is None:
        return ""
    try:
        return _line_in(traceback)
    except Exception:  # the private function may change its mind about its argument
        return ""


@functools.lru_cache(maxsize=4096)
def _line_in(traceback: Any) -> str:
    frames = list(_lines.user_frames(traceback))
    users = [f for f in frames if not f.file_name.startswith(_NOT_THE_USERS)]
    others = [f for f in frames if not f.file_name.startswith(_PACKAGE)]
    for frame in (users or others)[:1]:
        place = f"{frame.file_name}:{frame.start_line}:{frame.start_column}"
        return f"{place} ({frame.function_name})"
    return ""


def settled(array: Any, committed: bool) -> Any:
    """The same array as `jax.jit` would give it out: with the memory that it is in as part
    of its type, which `copy_to` leaves as it was, and committed to its device or not."""
    try:
        if _Array is not None and type(array) is array_type():
            return _settled(array, committed)
        if _Array is not None and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            return type(array)(array._impl, _settled(array._base_array, committed))
    except (AttributeError, TypeError):  # another signature than the one we know
        pass
    return array


def _settled(array: Any, committed: bool) -> Any:
    on_host = array.sharding.memory_kind != "device"
    space = jax.memory.Space.Host if on_host else jax.memory.Space.Device
    if array.committed == committed and array.aval.memory_space == space:
        return array
    aval = array.aval.update(memory_space=space)
    return _Array(aval, array.sharding, [array], committed, _skip_checks=True)


def weakly_typed(array: Any, weak: bool) -> Any:
    """The same array, of a weak type or not; of the one it is where that cannot be had."""
    if _Array is None or type(array) is not array_type() or array.weak_type == weak:
        return array
    try:
        aval = array.aval.update(weak_type=weak)
        committed = array.committed
        return _Array(aval, array.sharding, [array], committed, _skip_checks=True)
    except (AttributeError, TypeError):  # another signature than the one we know
        return array


def nans_are_looked_for() -> bool:
    """Whether `jax_debug_nans` or `jax_debug_infs` is set, here and now."""
    return any(getattr(jax.config, f"jax_debug_{what}") for what in ("nans", "infs"))


def is_nan_error(error: BaseException) -> bool:
    """Whether `jax_debug_nans` or `jax_debug_infs` found something."""
    internal = type(error).__name__ == "InternalFloatingPointError"
    return internal or isinstance(error, FloatingPointError)


# What operations on sparse arrays begin with, that JAX writes with those on dense ones.
_SPARSE = ("bcoo_", "bcsr_")


def expanded(eqn: Any) -> Any:
    """What an equation stands for, as a jaxpr of the operations that JAX writes it with;
    None for one that is an operation itself, or where this jax cannot say.

    `jax.random.gamma` is one, those of `jax.experimental.sparse` are, and since JAX 0.12
    `jnp.searchsorted` and others.
    """
    try:
        if eqn.primitive.name == "call_hi_primitive":
            function = functools.partial(eqn.primitive.to_lojax, **eqn.params)
        elif eqn.primitive.name == "random_gamma":  # as it is lowered
            function = functools.partial(eqn.primitive.impl, use_vmap=True, **eqn.params)
        elif eqn.primitive.name.startswith(_SPARSE):  # as they are lowered
            module = sys.modules[f"jax.experimental.sparse.{eqn.primitive.name[:4]}"]
            impl: Any = getattr(module, f"_{eqn.primitive.name}_impl")
            function = functools.partial(impl, **eqn.params)
        else:
            return None
        with _lines.user_context(eqn.source_info.traceback), eqn.ctx.manager:
            return jax.make_jaxpr(function)(*(v.aval for v in eqn.invars))
    except (AttributeError, KeyError, TypeError):  # other names or signatures here
        return None


def at_line_of(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """What is traced in it has the user's line of an equation."""
    try:
        return _lines.user_context(eqn.source_info.traceback)
    except AttributeError:  # another name here
        return contextlib.nullcontext()


# Where files are that are not the user's.
_OWN = tuple(os.path.dirname(file) + os.sep for file in (__file__, jax.__file__))


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the user's line: that of the first frame not of jturnip or JAX."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def called_with(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """What the function of a `jax.pure_callback` gives for arrays of the CPU."""
    try:
        call = eqn.params["callback"]
    except KeyError:  # another name than the one we know
        return eqn.primitive.bind(*operands, **eqn.params)
    return call(*operands)


def lowered_from(primitive: Any) -> Any:
    """The function to whose equations a primitive is lowered (`mlir.lower_fun`); None for
    one that is lowered in another way, or where this jax cannot say."""
    try:
        rule = _lowerings[primitive].rule
        inside = zip(rule.__code__.co_freevars, rule.__closure__ or (), strict=True)
        return dict(inside)["fun"].cell_contents
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def discharged(closed: Any) -> Any:
    """A jaxpr of references as a pure one: of their values, with their last values as
    further results. None where this jax cannot say."""
    if _discharge is None:
        return None
    try:
        return _discharge.discharge_state(closed)
    except (AttributeError, TypeError):  # another signature than the one we know
        return None


def value_of(reference: Any) -> Any:
    """The array that a reference holds now."""
    try:
        return reference._refs._buf
    except AttributeError:  # another structure than the one we know
        return reference[...]


def set_value(reference: Any, value: Any) -> None:
    """Lets a reference hold an array, whose memory is then its own."""
    try:
        reference._refs._buf = value
    except AttributeError:  # another structure than the one we know
        reference[...] = value


def is_reference(aval: Any) -> bool:
    """Whether an abstract value is of a mutable reference; no public name says so."""
    return any(cls.__name__ == "AbstractRef" for cls in type(aval).__mro__)


def has_type(aval: Any) -> bool:
    """Whether an abstract value is one of arrays or keys, and not a token."""
    return hasattr(type(aval), "shape") or hasattr(aval, "shape")


def names_an_axis(closed: Any) -> bool:
    """Whether a jaxpr speaks of an axis that `jax.vmap` named; no public name says so."""
    return any(type(effect).__name__ == "NamedAxisEffect" for effect in closed.effects)


def trace_context() -> Hashable:
    """What, besides the arguments, decides how a function traces in this thread."""
    if _trace_context is not None:
        try:
            return _trace_context()
        except Exception:  # as above
            pass
    return (_config.jax_enable_x64, _config.jax_default_matmul_precision)


def stored_from() -> float:
    """What compiles in fewer seconds is not put into JAX's persistent cache."""
    return float(_config.jax_persistent_cache_min_compile_time_secs)


def storing_from(seconds: float) -> contextlib.AbstractContextManager[Any]:
    """A context in which that is `seconds`, in this thread only."""
    if _min_stored is not None:
        try:
            return _min_stored(seconds)
        except Exception:  # as above
            pass
    return contextlib.nullcontext()


def jit_is_disabled() -> bool:
    """Whether the user runs under `jax.disable_jit`."""
    return bool(_config.jax_disable_jit)


def default_device() -> Device:
    """The device that `jax.jit` would use for uncommitted arguments."""
    chosen = _config.jax_default_device
    if isinstance(chosen, str):
        return jax.devices(chosen)[0]
    return chosen if chosen is not None else jax.devices()[0]


def lowering_platform(device: Device) -> str:
    """What `jax.lax.platform_dependent` calls the platform of a device."""
    raw = getattr(device.client, "_raw_platform", device.platform)
    if raw != "gpu":
        return raw
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
