"""Tasks to XLA executables: one for each distinct task, compiled in parallel.

Two tasks share an executable when they are the same up to the names of their variables. An
executable takes device arrays and gives device arrays; nothing in it moves data between
memories. It gives one more result than its task, a number that is ready when all its work
is over. Where completion marks are there, it takes one more argument, a mark's slot, and
that last result is the mark's.
"""

import concurrent.futures
import functools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jturnip.compat import Device
from jturnip.errors import PlanningError
from jturnip.frontend import costs
from jturnip.frontend.jaxpr import Constant, FlatJaxpr
from jturnip.frontend.partition import Group
from jturnip.native import marks
from jturnip.native.queue import make_queue


@dataclass(slots=True)
class Executable:
    """A compiled task. All fields but `seconds` never change."""

    # Called with device arrays, in the order of the task's inputs (then the mark's slot).
    call: Callable[..., Sequence[jax.Array]]
    marked: bool
    workspace: int
    flops: float
    bytes_accessed: float
    # What its arguments look like, to try it out.
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    # Whether it may be run on zeros: no loop that might not end, no call out of XLA, and
    # no argument that cannot be made from numpy's zeros.
    may_be_tried: bool
    # Time of one call as measured, or None.
    seconds: float | None = field(default=None)


# Least recently used last; shared by all functions of the process.
_CACHE: OrderedDict[Hashable, Executable] = OrderedDict()
_CACHE_SIZE = 4096
# An executable is tried out a few times more while that takes no longer than this.
_TRIAL_SECONDS = 0.01
_LOCK = threading.Lock()
# Slots of a context that are not settings but how it applies them.
_CONTEXT_MACHINERY = frozenset(("configs", "manager", "_managers", "__weakref__"))
_NOT_TRIED = frozenset(("while", "pure_callback", "io_callback", "ffi_call", "pallas_call"))


@dataclass(frozen=True, slots=True)
class Compiled:
    """The executables of some groups."""

    # Distinct executables, and for each group the index of its own.
    executables: tuple[Executable, ...]
    of_group: tuple[int, ...]
    # How many of the distinct ones were compiled just now, and how many were there.
    compiled: int
    reused: int


def compile_groups(
    flat: FlatJaxpr, groups: Sequence[Group], device: Device | None, context: Hashable
) -> Compiled:
    """Compiles the distinct tasks among `groups`.

    Args:
      flat: the function the groups are cut from.
      groups: the tasks.
      device: where they will run; None for JAX's default device.
      context: what else decides how a function traces (`compat.trace_context`).

    Raises:
      PlanningError: XLA refuses a task; the cause is attached.
    """
    marked = marks.load()
    indices: dict[Hashable, int] = {}
    of_group = []
    found: list[concurrent.futures.Future[Executable] | Executable] = []
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        for group in groups:
            key = (group_key(flat, group), device, context, marked)
            if key not in indices:
                indices[key] = len(found)
                known = _cached(key)
                if known is None:
                    jitted, lowered = _lower(flat, group, device, marked)
                    known = pool.submit(_compile, flat, group, jitted, lowered, marked)
                found.append(known)
            of_group.append(indices[key])
        executables = [e if isinstance(e, Executable) else e.result() for e in found]
    finally:
        pool.shutdown(cancel_futures=True)
    compiled = sum(not isinstance(e, Executable) for e in found)
    with _LOCK:
        for key, index in indices.items():
            _CACHE[key] = executables[index]
        while len(_CACHE) > _CACHE_SIZE:
            _CACHE.popitem(last=False)
    return Compiled(
        tuple(executables), tuple(of_group), compiled, len(executables) - compiled
    )


def _cached(key: Hashable) -> Executable | None:
    with _LOCK:
        known = _CACHE.get(key)
        if known is not None:
            _CACHE.move_to_end(key)
    return known


def clear_cache() -> None:
    """Forgets every executable."""
    with _LOCK:
        _CACHE.clear()


def _lower(
    flat: FlatJaxpr, group: Group, device: Device | None, marked: bool
) -> tuple[Any, Any]:
    """Lowers in the caller's thread, whose JAX configuration counts."""
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
    structs = [flat.types[v].struct(sharding) for v in group.inputs]
    if marked:
        structs.append(jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding))
    function = _as_function(flat, group, marked)
    try:
        jitted = jax.jit(function, keep_unused=True)
        return jitted, jitted.lower(*structs)
    except Exception as error:
        raise PlanningError(
            f"task {function.__name__} cannot be lowered: {error}"
        ) from error


def _as_function(flat: FlatJaxpr, group: Group, marked: bool) -> Callable[..., Any]:
    def task(*arguments: Any) -> list[Any]:
        values: dict[int, Any] = dict(zip(group.inputs, arguments, strict=False))
        for e in group.equations:
            equation = flat.equations[e]
            operands = [
                v.value if isinstance(v, Constant) else values[v] for v in equation.inputs
            ]
            values.update(zip(equation.outputs, equation.bind(operands), strict=True))
        results = [values[v] for v in group.outputs]
        # XLA makes all results of an executable ready together, so any small one will do.
        done = _mark(results, arguments[-1]) if marked else jnp.int32(0)
        return [*results, done]

    task.__name__ = f"jturnip_{lead(flat, group)}"
    return task


def lead(flat: FlatJaxpr, group: Group) -> str:
    """The name of the primitive that a group is there for."""
    return flat.equations[lead_equation(flat, group)].name


def lead_equation(flat: FlatJaxpr, group: Group) -> int:
    """The equation that does most of the work."""
    return max(group.equations, key=lambda e: costs.flops(flat.equations[e], flat))


def _mark(results: Sequence[Any], slot: Any) -> Any:
    """A mark that fires after all results are written."""
    plain = [jax.random.key_data(r) if _is_key(r.dtype) else r for r in results]
    return marks.mark(*(plain[:1] or [slot]), slot, *plain[1:])


def _compile(
    flat: FlatJaxpr, group: Group, jitted: Any, lowered: Any, marked: bool
) -> Executable:
    try:
        compiled = lowered.compile()
    except Exception as error:
        raise PlanningError(f"XLA cannot compile a task: {error}") from error
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    packed = any(_is_packed(flat.types[v].dtype) for v in group.inputs)
    return Executable(
        # jax 0.10's Compiled refuses an array of packed numbers that was in host memory.
        call=jitted if packed else compiled,
        marked=marked,
        workspace=int(memory.temp_size_in_bytes) if memory is not None else 0,
        flops=float(cost.get("flops", 0.0)),
        bytes_accessed=float(cost.get("bytes accessed", 0.0)),
        arguments=tuple(flat.types[v].struct() for v in group.inputs),
        may_be_tried=all(_may_be_tried(flat.equations[e].origin) for e in group.equations)
        and all(_can_be_made_up(flat.types[v].dtype) for v in group.inputs),
    )


def _can_be_made_up(dtype: Any) -> bool:
    return not _is_key(dtype) and not _is_packed(dtype)


def _is_packed(dtype: Any) -> bool:
    """Numbers of less than a byte, which XLA packs and numpy does not."""
    if _is_key(dtype) or not jnp.issubdtype(dtype, jnp.number):
        return False
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return info(dtype).bits < 8


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def _may_be_tried(eqn: Any) -> bool:
    if eqn.primitive.name in _NOT_TRIED:
        return False
    for param in eqn.params.values():
        for closed in param if isinstance(param, tuple) else (param,):
            body = getattr(closed, "jaxpr", closed)
            if not all(_may_be_tried(e) for e in getattr(body, "eqns", ())):
                return False
    return True


def try_out(executables: Sequence[Executable], sharding: jax.sharding.Sharding) -> None:
    """Warms executables and measures each, the best of a few calls on zeros."""
    queue = make_queue()
    slot = queue.open_slot() if queue.has_marks else -1
    token = jax.device_put(jnp.asarray(slot, jnp.int32), sharding)
    for executable in executables:
        if not executable.may_be_tried or executable.seconds is not None:
            continue
        arguments = [
            jax.device_put(np.zeros(a.shape, a.dtype), sharding)
            for a in executable.arguments
        ]
        arguments += [token] if executable.marked else []
        seconds = []
        while len(seconds) < 3 or (len(seconds) < 8 and sum(seconds) < _TRIAL_SECONDS):
            began = time.perf_counter()
            jax.block_until_ready(executable.call(*arguments))
            seconds.append(time.perf_counter() - began)
        executable.seconds = min(seconds)  # the first is slow, the others are disturbed
    if queue.has_marks:
        queue.close_slot(slot)


# -- keys ------------------------------------------------------------------------------


def group_key(flat: FlatJaxpr, group: Group) -> Hashable:
    """Equal for groups that compile to the same executable."""
    numbers: dict[int, int] = {}
    for v in group.inputs:
        numbers[v] = len(numbers)
    equations = []
    for e in group.equations:
        equation = flat.equations[e]
        operands = tuple(
            _constant_key(v) if isinstance(v, Constant) else numbers[v]
            for v in equation.inputs
        )
        for v in equation.outputs:
            numbers[v] = len(numbers)
        origin = equation.origin
        equations.append(
            (
                origin.primitive,
                _params_key(origin.params),
                _context_key(origin.ctx),
                operands,
            )
        )
    return (
        tuple(_type_key(flat.types[v]) for v in group.inputs),
        tuple(equations),
        tuple(numbers[v] for v in group.outputs),
    )


def _type_key(t: Any) -> Hashable:
    return (t.shape, t.dtype, t.weak_type)


def _constant_key(constant: Constant) -> Hashable:
    value = np.asarray(constant.value)
    return (value.dtype.str, value.tobytes(), _type_key(constant.type))


@functools.lru_cache(maxsize=4096)
def _context_key(context: Any) -> Hashable:
    """What of an equation's context changes how it lowers."""
    names = (n for n in type(context).__slots__ if n not in _CONTEXT_MACHINERY)
    return tuple(_key(getattr(context, n)) for n in names)


def _params_key(params: dict[str, Any]) -> Hashable:
    return tuple((name, _key(params[name])) for name in sorted(params))


def _key(value: Any) -> Hashable:
    """Equal for parameters that mean the same; an object it does not know is itself."""
    body = getattr(value, "jaxpr", value)
    if hasattr(body, "eqns"):
        return _jaxpr_key(body, getattr(value, "consts", ()))
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple(sorted((k, _key(v)) for k, v in value.items()))
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return (type(value), value)


def _jaxpr_key(jaxpr: Any, consts: Sequence[Any]) -> Hashable:
    numbers: dict[Any, int] = {}

    def atom(a: Any) -> Hashable:
        if hasattr(a, "val"):
            value = np.asarray(a.val)
            return (value.dtype.str, value.tobytes(), str(a.aval))
        return numbers[a]

    for v in (*jaxpr.constvars, *jaxpr.invars):
        numbers[v] = len(numbers)
    equations = []
    for eqn in jaxpr.eqns:
        operands = tuple(map(atom, eqn.invars))
        for v in eqn.outvars:
            numbers[v] = len(numbers)
        equations.append(
            (eqn.primitive, _params_key(eqn.params), _context_key(eqn.ctx), operands)
        )
    return (
        tuple(str(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)),
        tuple(map(_Same, consts)),
        tuple(equations),
        tuple(map(atom, jaxpr.outvars)),
    )


class _Same:
    """Equal to itself only; keeps its object alive, so that its id stays its own."""

    __slots__ = ("_object",)

    def __init__(self, thing: Any):
        self._object = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._object is self._object

    def __hash__(self) -> int:
        return id(self._object)
