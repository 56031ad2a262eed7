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

from jturnip import compat
from jturnip.compat import Device
from jturnip.compiler.nans import unheard
from jturnip.compiler.origin import Origin, compile_lowered
from jturnip.compiler.progress import progress_bar
from jturnip.compiler.report import CompileReport
from jturnip.errors import PlanningError
from jturnip.frontend import costs
from jturnip.frontend.hints import nested
from jturnip.frontend.partition import Group
from jturnip.frontend.values import Constant, FlatJaxpr, is_key, is_packed
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
# How often the progress bar is drawn anew while nothing gets done.
_REFRESH_SECONDS = 0.25
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
    # What was made for them, and for earlier groups of the same function.
    made: tuple[Executable, ...]
    report: CompileReport


def compile_groups(
    flat: FlatJaxpr,
    groups: Sequence[Group],
    device: Device | None,
    context: Hashable,
    earlier: Compiled | None = None,
) -> Compiled:
    """Compiles the distinct tasks among `groups`.

    Args:
      flat: the function the groups are cut from.
      groups: the tasks.
      device: where they will run; None for JAX's default device.
      context: what else decides how a function traces (`compat.trace_context`).
      earlier: what was compiled before for the same function, cut otherwise.

    Raises:
      PlanningError: XLA refuses a task; the cause is attached.
    """
    began = time.perf_counter()
    marked = marks.load()
    indices: dict[Hashable, int] = {}
    distinct: list[Group] = []
    of_group = []
    for group in groups:
        key = (group_key(flat, group), device, context, marked)
        if key not in indices:
            indices[key] = len(distinct)
            distinct.append(group)
        of_group.append(indices[key])
    known = [_cached(key) for key in indices]
    missing = [g for g, e in zip(distinct, known, strict=True) if e is None]
    new, cached = _compile_in_parallel(flat, missing, device, marked)
    remaining = iter(new)
    executables = tuple(next(remaining) if e is None else e for e in known)
    with _LOCK:
        for key, index in indices.items():
            _CACHE[key] = executables[index]
        while len(_CACHE) > _CACHE_SIZE:
            _CACHE.popitem(last=False)
    made = (*(earlier.made if earlier is not None else ()), *new)
    ours = set(map(id, made))
    report = CompileReport(
        distinct=len(executables),
        compiled=len(new) - cached,
        reused=sum(id(e) not in ours for e in executables),
        cached=cached,
        seconds=time.perf_counter() - began,
    )
    if earlier is not None:
        report = report.after(earlier.report)
    return Compiled(executables, tuple(of_group), made, report)


def compile_whole(traced: Any) -> tuple[Any, CompileReport]:
    """A `jax.stages.Traced` as one executable, just as `jax.jit` would compile it."""
    began = time.perf_counter()
    compiled, origin = compile_lowered(traced.lower())
    return compiled, CompileReport(
        distinct=1,
        compiled=int(origin is Origin.COMPILED),
        reused=int(origin is Origin.REUSED),
        cached=int(origin is Origin.CACHED),
        seconds=time.perf_counter() - began,
    )


def _compile_in_parallel(
    flat: FlatJaxpr, groups: Sequence[Group], device: Device | None, marked: bool
) -> tuple[list[Executable], int]:
    """An executable for each group, and how many were in JAX's persistent cache."""
    if not groups:
        return [], 0
    # The user says which compilations are worth storing by the seconds that a function
    # takes. This one is in pieces: what they leave unstored takes no longer in all.
    stored_from = compat.stored_from() / len(groups)
    futures: list[concurrent.futures.Future[tuple[Executable, Origin]]] = []
    done: list[Any] = []
    with progress_bar(len(groups)) as show:
        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)
        try:
            for group in groups:
                jitted, lowered = _lower(flat, group, device, marked)
                futures.append(
                    pool.submit(_compile, flat, group, jitted, lowered, marked, stored_from)
                )
                futures[-1].add_done_callback(done.append)
                show(len(done))
            for future in futures:
                while not future.done():
                    concurrent.futures.wait([future], _REFRESH_SECONDS)
                    show(len(done))
            results = [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)
    cached = sum(origin is Origin.CACHED for _, origin in results)
    return [executable for executable, _ in results], cached


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
    return max(group.equations, key=lambda e: costs.flops(flat.equations[e].origin))


def _mark(results: Sequence[Any], slot: Any) -> Any:
    """A mark that fires after all results are written."""
    plain = [jax.random.key_data(r) if is_key(r.dtype) else r for r in results]
    return marks.mark(*(plain[:1] or [slot]), slot, *plain[1:])


def _compile(
    flat: FlatJaxpr,
    group: Group,
    jitted: Any,
    lowered: Any,
    marked: bool,
    stored_from: float,
) -> tuple[Executable, Origin]:
    try:
        compiled, origin = compile_lowered(lowered, stored_from)
    except Exception as error:
        raise PlanningError(f"XLA cannot compile a task: {error}") from error
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    packed = any(is_packed(flat.types[v].dtype) for v in group.inputs)
    executable = Executable(
        # jax 0.10's Compiled refuses an array of packed numbers that was in host memory.
        call=_settling(jitted) if packed else compiled,
        marked=marked,
        workspace=int(memory.temp_size_in_bytes) if memory is not None else 0,
        flops=float(cost.get("flops", 0.0)),
        bytes_accessed=float(cost.get("bytes accessed", 0.0)),
        arguments=tuple(flat.types[v].struct() for v in group.inputs),
        may_be_tried=all(_may_be_tried(flat.equations[e].origin) for e in group.equations)
        and all(_can_be_made_up(flat.types[v].dtype) for v in group.inputs),
    )
    return executable, origin


def _settling(jitted: Any) -> Callable[..., Sequence[jax.Array]]:
    """`jitted`, for arrays that do not know which memory they came to."""
    return lambda *operands: jitted(*(compat.settled(o, True) for o in operands))


def _can_be_made_up(dtype: Any) -> bool:
    return not is_key(dtype) and not is_packed(dtype)


def _may_be_tried(eqn: Any) -> bool:
    if eqn.effects or eqn.primitive.name in _NOT_TRIED:
        return False
    bodies = (getattr(closed, "jaxpr", closed) for closed in nested(eqn))
    return all(_may_be_tried(e) for body in bodies for e in body.eqns)


def try_out(executables: Sequence[Executable], sharding: jax.sharding.Sharding) -> None:
    """Warms executables and measures each, the best of a few calls on zeros."""
    with unheard():  # zeros make NaNs that are nobody's
        _try_out(executables, sharding)


def _try_out(executables: Sequence[Executable], sharding: jax.sharding.Sharding) -> None:
    queue = make_queue()
    slot = queue.open_slot() if queue.has_marks else -1
    token = jax.device_put(np.asarray(slot, np.int32), sharding)
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
