"""Tasks to XLA executables: one for each distinct task, compiled in parallel.

Two tasks share an executable when they are the same up to the names of their variables, and
to numbers written in the program: where tasks of one function differ in such numbers alone,
these are operands (`key 3` of a layer, `0.9 ** 3`). An executable takes device arrays, then
those numbers, and gives device arrays; nothing in it moves data between memories. It gives
one more result than its task, a number that is ready when all its work is over. Where
completion marks are there, it takes one more argument, a mark's slot, and that last result
is the mark's. Operands that it writes over are donated to it.

An executable lives as long as a program that uses it.
"""

import concurrent.futures
import math
import os
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jturnip import compat
from jturnip.compat import Device
from jturnip.compiler import profiles
from jturnip.compiler.origin import Origin, compile_lowered
from jturnip.compiler.progress import progress_bar
from jturnip.compiler.report import CompileReport, Spent
from jturnip.compiler.trials import known_times, may_be_tried
from jturnip.frontend import convolutions, costs
from jturnip.frontend.hints import calls_out
from jturnip.frontend.keys import constant_key, context_key, params_key, type_key
from jturnip.frontend.partition import Group
from jturnip.frontend.values import (
    Constant,
    Equation,
    FlatJaxpr,
    Type,
    is_key,
    is_packed,
)
from jturnip.native import marks
from jturnip.units import GRANULE


@dataclass(slots=True, weakref_slot=True, eq=False)
class Executable:
    """A compiled task. All fields but the two last never change."""

    # Called with device arrays, in the order of the task's inputs (then its numbers, then
    # the mark's slot).
    call: Callable[..., Sequence[jax.Array]]
    marked: bool
    workspace: int
    flops: float
    bytes_accessed: float
    # What its arguments look like, to try it out.
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    # Whether it may be run on zeros: no loop that might not end, no call out of XLA.
    may_be_tried: bool
    # (result, argument), by position: the one is written over the other, which is used up.
    overwrites: tuple[tuple[int, int], ...] = ()
    # Under what name its times are kept for other processes; none where they are not.
    profile: str = ""
    # Time of one call as measured, or None; and of it, until the call returns.
    seconds: float | None = field(default=None)
    dispatch_seconds: float = field(default=0.0)


# Shared by all functions of the process, while one of them has it.
_CACHE: "weakref.WeakValueDictionary[Hashable, Executable]" = weakref.WeakValueDictionary()
# How often the progress bar is drawn anew while nothing gets done.
_REFRESH_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Compiled:
    """The executables of some groups."""

    # Distinct executables, and for each group the index of its own.
    executables: tuple[Executable, ...]
    of_group: tuple[int, ...]
    # For each group the numbers that are operands of it.
    numbers: tuple[tuple[np.ndarray, ...], ...]
    # What was made for them, and for earlier groups of the same function.
    made: tuple[Executable, ...]
    # Which numbers are operands, also of earlier groups.
    lifted: "Lifted"
    report: CompileReport


# Where a number is written in a task: which of its equations, which operand of that.
Place: TypeAlias = tuple[int, int]
# A task without its numbers → the places of those that are operands.
Lifted: TypeAlias = Mapping[Hashable, frozenset[Place]]


class TooManyTasks(Exception):
    """More would have to be compiled than was allowed."""


@dataclass(frozen=True, slots=True)
class How:
    """What decides, beside a task itself, what it becomes."""

    # Where it will run; None for JAX's default device.
    device: Device | None
    # What else decides how a function traces (`compat.trace_context`).
    context: Hashable
    # Options of XLA's compiler, by name.
    options: tuple[tuple[str, Any], ...] = ()


def compile_groups(
    flat: FlatJaxpr,
    groups: Sequence[Group],
    how: How,
    earlier: Compiled | None = None,
    most: float = math.inf,
    spent: Spent | None = None,
) -> Compiled:
    """Compiles the distinct tasks among `groups`.

    Args:
      flat: the function the groups are cut from.
      groups: the tasks.
      how: for what, and in what way.
      earlier: what was compiled before for the same function, cut otherwise.
      most: so many new ones may be compiled, with those of `earlier`.
      spent: what was compiled for the same function in any way; grows.

    Raises:
      TooManyTasks: there would be more.
      Exception: what JAX or XLA say of a task, with a note that names it.
    """
    began = time.perf_counter()
    have_marks = marks.load()
    shapes = [group_key(flat, group) for group in groups]
    lifted = _lifted(shapes, {} if earlier is None else earlier.lifted)
    indices: dict[Hashable, int] = {}
    distinct: list[_Work] = []
    of_group = []
    for group, (bare, numbers) in zip(groups, shapes, strict=True):
        operands = lifted.get(bare, frozenset())
        written = tuple(n for place, n in numbers.items() if place not in operands)
        marked = have_marks and not _calls_out(flat, group)
        key = (bare, operands, written, how, marked)
        if key not in indices:
            indices[key] = len(distinct)
            distinct.append(_Work(flat, group, tuple(sorted(operands)), marked))
        of_group.append(indices[key])
    known = [_CACHE.get(key) for key in indices]
    missing = [w for w, e in zip(distinct, known, strict=True) if e is None]
    if len(missing) + (len(earlier.made) if earlier is not None else 0) > most:
        raise TooManyTasks
    new, cached = _compile_in_parallel(missing, how)
    remaining = iter(new)
    executables = tuple(next(remaining) if e is None else e for e in known)
    for key, index in indices.items():
        _CACHE[key] = executables[index]
    made = (*(earlier.made if earlier is not None else ()), *new)
    ours = set(map(id, made))
    seconds = time.perf_counter() - began
    if spent is not None:
        spent.add(new, cached, seconds)
        ours.update(map(id, spent.executables))
    report = CompileReport(
        distinct=len(executables),
        compiled=len(new) - cached,
        reused=sum(id(e) not in ours for e in executables),
        cached=cached,
        seconds=seconds,
    )
    if earlier is not None:
        report = report.after(earlier.report)
    numbers = tuple(
        _numbers(flat, group, sorted(lifted.get(bare, ())))
        for group, (bare, _) in zip(groups, shapes, strict=True)
    )
    return Compiled(executables, tuple(of_group), numbers, made, lifted, report)


@dataclass(frozen=True, slots=True)
class _Work:
    """A task to compile: a group, which of its numbers are operands, and whether a mark
    tells when it is over."""

    flat: FlatJaxpr
    group: Group
    lifted: tuple[Place, ...]
    marked: bool

    @property
    def types(self) -> list[Type]:
        """Types of the numbers that are operands."""
        constants = (_at(self.flat, self.group, place) for place in self.lifted)
        return [constant.type for constant in constants]


def _at(flat: FlatJaxpr, group: Group, place: Place) -> Constant:
    constant = flat.equations[group.equations[place[0]]].inputs[place[1]]
    assert isinstance(constant, Constant)
    return constant


def _numbers(
    flat: FlatJaxpr, group: Group, lifted: Sequence[Place]
) -> tuple[np.ndarray, ...]:
    constants = (_at(flat, group, place) for place in lifted)
    return tuple(np.asarray(c.value, c.type.dtype) for c in constants)


def _lifted(
    shapes: Sequence[tuple[Hashable, Mapping[Place, Hashable]]], earlier: Lifted
) -> dict[Hashable, frozenset[Place]]:
    """Places in which tasks that are the same but for their numbers differ."""
    first: dict[Hashable, Mapping[Place, Hashable]] = {}
    lifted: dict[Hashable, set[Place]] = {}
    for bare, numbers in shapes:
        before = first.setdefault(bare, numbers)
        if before is not numbers and before != numbers:
            differing = {place for place, n in numbers.items() if before[place] != n}
            lifted.setdefault(bare, set()).update(differing)
    found = {bare: frozenset(places) for bare, places in lifted.items()}
    return {**earlier, **{b: p | earlier.get(b, frozenset()) for b, p in found.items()}}


def compile_whole(
    traced: Any, options: tuple[tuple[str, Any], ...] = ()
) -> tuple[Any, CompileReport]:
    """A `jax.stages.Traced` as one executable, just as `jax.jit` would compile it."""
    began = time.perf_counter()
    compiled, origin = compile_lowered(traced.lower(), options=options)
    return compiled, CompileReport(
        distinct=1,
        compiled=int(origin is Origin.COMPILED),
        reused=int(origin is Origin.REUSED),
        cached=int(origin is Origin.CACHED),
        seconds=time.perf_counter() - began,
    )


def pruned(whole: Any) -> frozenset[int]:
    """Positions of the arguments of which a whole executable has no parameters, since
    nothing reads them: as JAX sees it, which looks into fewer calls than `frontend.inline`.
    """
    shardings = whole.in_tree.flatten_up_to(whole.input_shardings)
    return frozenset(i for i, sharding in enumerate(shardings) if sharding is None)


def _calls_out(flat: FlatJaxpr, group: Group) -> bool:
    """Whether a task calls code that is not XLA's own, which may fail after all results are
    written: a mark would have fired then."""
    return any(calls_out(flat.equations[e].origin) for e in group.equations)


def _compile_in_parallel(tasks: Sequence[_Work], how: How) -> tuple[list[Executable], int]:
    """An executable for each task, and how many were in JAX's persistent cache."""
    if not tasks:
        return [], 0
    # The user says which compilations are worth storing by the seconds that a function
    # takes. This one is in pieces: what they leave unstored takes no longer in all.
    stored_from = compat.stored_from() / len(tasks)
    futures: list[concurrent.futures.Future[tuple[Executable, Origin]]] = []
    done: list[Any] = []
    with progress_bar(len(tasks)) as show:
        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)
        try:
            for task in tasks:
                jitted, lowered = _lower(task, how)
                futures.append(
                    pool.submit(_compile, task, how, jitted, lowered, stored_from)
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


def clear_cache() -> None:
    """Forgets every executable; programs keep those that they use."""
    _CACHE.clear()


def _lower(task: _Work, how: How) -> tuple[Any, Any]:
    """Lowers in the caller's thread, whose JAX configuration counts."""
    sharding = None
    if how.device is not None:
        sharding = jax.sharding.SingleDeviceSharding(how.device)
    types = [*(task.flat.types[v] for v in task.group.inputs), *task.types]
    structs = [t.struct(sharding) for t in types]
    if task.marked:
        structs.append(jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding))
    function = _as_function(task, _bind_on(how))
    try:
        options = dict(how.options) or None
        jitted = jax.jit(
            function,
            keep_unused=True,
            donate_argnums=[i for _, i in task.group.overwrites],
            compiler_options=options,
        )
        return jitted, jitted.lower(*structs)
    except Exception as error:
        error.add_note(f"This was said of {_described(task)}, a part of the function.")
        raise


# Applies an equation to what it reads.
_Bind: TypeAlias = Callable[[Equation, Sequence[Any]], Sequence[Any]]


def _bind_on(how: How) -> _Bind:
    """How equations are applied for a device."""
    platform = how.device.platform if how.device is not None else jax.default_backend()
    if platform != "cpu":
        return Equation.bind
    return convolutions.bound


def _as_function(work: _Work, bind: _Bind) -> Callable[..., Any]:
    flat, group = work.flat, work.group
    made_turned = _turned(flat, group)
    turned = [at for at, v in enumerate(group.outputs) if v in made_turned]

    def task(*arguments: Any) -> list[Any]:
        read = len(group.inputs)
        values: dict[int, Any] = dict(zip(group.inputs, arguments[:read], strict=True))
        numbers = dict(zip(work.lifted, arguments[read:], strict=False))
        for k, e in enumerate(group.equations):
            equation = flat.equations[e]
            operands = [
                numbers.get((k, i), v.value) if isinstance(v, Constant) else values[v]
                for i, v in enumerate(equation.inputs)
            ]
            values.update(zip(equation.outputs, bind(equation, operands), strict=True))
        results = [values[v] for v in group.outputs]
        # XLA makes all results of an executable ready together, so any small one will do.
        done = jnp.int32(0)
        if work.marked:
            done, results = _marked(results, turned, arguments[-1])
        return [*results, done]

    task.__name__ = f"jturnip_{lead(flat, group)}"
    return task


def _described(work: _Work) -> str:
    equation = work.flat.equations[lead_equation(work.flat, work.group)]
    return f'"{equation.name}" ({equation.source or "unknown line"})'


def lead(flat: FlatJaxpr, group: Group) -> str:
    """The name of the primitive that a group is there for."""
    return flat.equations[lead_equation(flat, group)].name


def lead_equation(flat: FlatJaxpr, group: Group) -> int:
    """The equation that does most of the work."""
    return max(group.equations, key=lambda e: costs.flops(flat.equations[e].origin))


def _turned(flat: FlatJaxpr, group: Group) -> set[int]:
    """Values that XLA may make in another order than the row-major one that they leave in:
    transposed ones, and what is made of them element by element."""
    turned: set[int] = set()
    for i in group.equations:
        e = flat.equations[i]
        follows = e.name in costs.ELEMENTWISE and not turned.isdisjoint(e.reads)
        if e.name == "transpose" or follows:
            turned.update(e.outputs)
    return turned


def _marked(
    results: Sequence[Any], turned: Sequence[int], slot: Any
) -> tuple[Any, list[Any]]:
    """A mark that fires after all results are written, and the results.

    Args:
      results: what the task writes.
      turned: positions of those that pass through the mark.
      slot: the mark's.
    """
    plain = [jax.random.key_data(r) if is_key(r.dtype) else r for r in results]
    through = [at for at in turned if plain[at] is results[at]]
    waited = [r for at, r in enumerate(plain) if at not in through]
    done, passed = marks.mark_passing([plain[at] for at in through], slot, *waited)
    written = list(results)
    for at, result in zip(through, passed, strict=True):
        written[at] = result
    return done, written


def _compile(
    task: _Work,
    how: How,
    jitted: Any,
    lowered: Any,
    stored_from: float,
) -> tuple[Executable, Origin]:
    try:
        compiled, origin = compile_lowered(lowered, stored_from)
    except Exception as error:
        error.add_note(f"This was said of {_described(task)}, a part of the function.")
        raise
    flat, group = task.flat, task.group
    eqns = [flat.equations[e].origin for e in group.equations]
    may_try = may_be_tried(eqns)
    profile = _profile(lowered, how) if may_try else ""
    seconds, dispatch_seconds = known_times(profile) or (None, 0.0)
    nbytes = sum(flat.types[v].nbytes for v in (*group.inputs, *group.outputs))
    flops, accessed = work_of(compiled, eqns, nbytes, how.device)
    sizes = compiled.memory_analysis()
    packed = any(is_packed(flat.types[v].dtype) for v in group.inputs)
    executable = Executable(
        # jax 0.10's Compiled refuses an array of packed numbers that was in host memory.
        call=_settling(jitted) if packed else compiled,
        marked=task.marked,
        # The numbers that are operands are put on the device by each call.
        workspace=(int(sizes.temp_size_in_bytes) if sizes is not None else 0)
        + GRANULE * len(task.lifted),
        flops=flops,
        bytes_accessed=accessed,
        arguments=(
            *(flat.types[v].struct() for v in group.inputs),
            *(t.struct() for t in task.types),
        ),
        may_be_tried=may_try,
        overwrites=group.overwrites,
        profile=profile,
        seconds=seconds,
        dispatch_seconds=dispatch_seconds,
    )
    return executable, origin


def work_of(
    compiled: Any, eqns: Iterable[Any], nbytes: int, device: Device | None
) -> tuple[float, float]:
    """Floating-point operations of an executable and the bytes that it reads and writes, by
    XLA.

    For a GPU XLA has products done by a library, of whose work its analysis says that it is
    unknown, -1 for each call (`HloCostAnalysis::HandleCustomCall`): then shapes say it.

    Args:
      compiled: a `jax.stages.Compiled`.
      eqns: the jaxpr equations that it was compiled from.
      nbytes: of its operands and results.
      device: that it is for; None for JAX's default device.
    """
    found = compiled.cost_analysis() or {}
    flops, accessed = (float(found.get(key, 0.0)) for key in ("flops", "bytes accessed"))
    if (device.platform if device else jax.default_backend()) == "cpu":
        return flops, accessed
    return max(flops, sum(map(costs.flops, eqns))), max(accessed, float(nbytes))


def _profile(lowered: Any, how: How) -> str:
    """The name of what is measured of it; none where nothing is kept."""
    if profiles.directory() is None:
        return ""
    options = repr(how.options), os.environ.get("XLA_FLAGS", "")
    return profiles.key(how.device, "executable", lowered.as_text(), *options)


def _settling(jitted: Any) -> Callable[..., Sequence[jax.Array]]:
    """`jitted`, for arrays that do not know which memory they came to."""
    return lambda *operands: jitted(*(compat.settled(o, True) for o in operands))


# -- keys ------------------------------------------------------------------------------


def group_key(flat: FlatJaxpr, group: Group) -> tuple[Hashable, dict[Place, Hashable]]:
    """What decides which executable a group has: all but its numbers, and its numbers."""
    names: dict[int, int] = {}
    for v in group.inputs:
        names[v] = len(names)
    equations = []
    written: dict[Place, Hashable] = {}
    for k, e in enumerate(group.equations):
        equation = flat.equations[e]
        operands: list[Hashable] = []
        for i, v in enumerate(equation.inputs):
            if isinstance(v, Constant) and _may_be_operand(v.type.dtype):
                operands.append(type_key(v.type))
                written[k, i] = constant_key(v)
            elif isinstance(v, Constant):
                operands.append(constant_key(v))
            else:
                operands.append(names[v])
        for v in equation.outputs:
            names[v] = len(names)
        origin = equation.origin
        equations.append(
            (
                origin.primitive,
                params_key(origin.params),
                context_key(origin.ctx),
                tuple(operands),
            )
        )
    bare = (
        tuple(type_key(flat.types[v]) for v in group.inputs),
        tuple(equations),
        tuple(names[v] for v in group.outputs),
        group.overwrites,
    )
    return bare, written


def _may_be_operand(dtype: Any) -> bool:
    """Whether a number can be passed whatever the caller's setting of x64 is then."""
    return dtype == jax.dtypes.canonicalize_dtype(dtype) and dtype.itemsize < 8
