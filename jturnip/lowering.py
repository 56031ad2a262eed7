"""A traced function to a plan that can run: partition, compile, plan, verify.

Each step is a function from one record to the next; `stages.py` shows them to the user.
"""

import collections
import contextlib
import dataclasses
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jturnip import compat, placement
from jturnip.compat import Device
from jturnip.compiler import executables as compiler
from jturnip.compiler.executables import Executable, Trials
from jturnip.compiler.report import CompileReport
from jturnip.errors import DoesNotFit, HostMemoryError
from jturnip.frontend.blocks import Where, name_of
from jturnip.frontend.costs import DeviceRates
from jturnip.frontend.hints import nested
from jturnip.frontend.loops import Streaming, scan_counts
from jturnip.frontend.overwriting import with_overwriting
from jturnip.frontend.partition import Group, Partitioner
from jturnip.frontend.values import FlatJaxpr, Parts, Type
from jturnip.graph.memgraph import MemGraph
from jturnip.graph.plan import Plan
from jturnip.graph.taskgraph import Buffer, BufferId, Place, Role, Task, TaskGraph, TaskId
from jturnip.placement import Arguments, Budget, Returned, Whose
from jturnip.planner import figures
from jturnip.planner.planner import (
    does_not_fit,
    plan as make_memgraph,
    resident_bytes,
    smallest_budget,
    task_bytes,
)
from jturnip.planner.verify import peak_bytes, verify
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.schedule import Link, Schedule, schedule
from jturnip.runtime.simulated import simulate
from jturnip.units import format_bytes, padded


# A task may hold this share of the budget, where it can be cut: two can then be resident
# while the transfers of two more are under way.
_SHARE = 4
# A scan is cut, a loop of another kind or a branch driven, if it would hold more than these
# shares of the budget. The next pair is tried where no plan fits with loops so large.
_SHARES_OF_LOOPS = ((1 / 4, 1.0), (1 / 16, 1 / 2), (0.0, 1 / 8), (0.0, 0.0))
ATTEMPTS = len(_SHARES_OF_LOOPS)
# What `auto` plans and simulates; the paper's alone beyond this many tasks, since there
# planning takes seconds.
_PROMISING = ("turnip", "layerwise", "fixed_order")
_MANY_TASKS = 20_000
# The paper's free order adapts to what really happens, which no prediction knows: another
# strategy must be predicted to take no more than this share of its time.
_CLEARLY = 0.97

# Guesses about a device, until its tasks are measured.
_RATES = {
    "cpu": DeviceRates(5e10, 1e10, 1e-4),
    "gpu": DeviceRates(5e13, 2e12, 5e-5),
}
_LINKS = {"cpu": Link(5e9, 5e9), "gpu": Link(2.5e10, 2.5e10)}


# Of results: that any may lie anywhere.
NOTHING_KNOWN = Returned()


@dataclass(frozen=True, slots=True)
class Split:
    """A function as tasks with their executables, not yet planned."""

    flat: FlatJaxpr
    # The equations of each task of the graph.
    groups: tuple[Group, ...]
    graph: TaskGraph
    executables: tuple[Executable, ...]
    # The numbers that each task passes to its executable.
    numbers: tuple[tuple[np.ndarray, ...], ...]
    compile_report: CompileReport
    arguments: Arguments
    # The buffer of each value that has one.
    buffers: Mapping[int, BufferId]
    # Result → the donated host argument whose memory it takes over; by position.
    reuses: Mapping[int, int]
    # Results that must end in host memory, by position.
    to_host: frozenset[int]
    # Buffers that start in host memory, and are put on the device for many runs.
    resident: tuple[BufferId, ...] = ()


def rates(device: Device) -> DeviceRates:
    """What is expected of a device's arithmetic and memory."""
    return _RATES["cpu" if device.platform == "cpu" else "gpu"]


def link_of(device: Device, simulated: SimulatedLink | None) -> Link:
    """What is expected of the link to a device."""
    if simulated is not None:
        return Link(
            simulated.h2d_bytes_per_second,
            simulated.d2h_bytes_per_second,
            simulated.latency_seconds,
        )
    return _LINKS["cpu" if device.platform == "cpu" else "gpu"]


def streaming(
    avals: Sequence[Any], arguments: Arguments, budget: Budget, attempt: int
) -> Streaming:
    """What is cut and driven in an attempt; later attempts cut more.

    Args:
      avals: abstract values of the arguments.
      arguments: how they are held.
      budget: what there is, and what others take of it.
      attempt: from 0 to `ATTEMPTS` - 1.
    """
    arena = budget.arena(arguments.device)
    scans, others = _SHARES_OF_LOOPS[attempt]
    donated = [
        (tuple(aval.shape), aval.dtype)
        for aval, w in zip(avals, arguments.whose, strict=True)
        if w is Whose.DONATED_HOST
    ]
    return Streaming(
        largest=int(arena * scans),
        arena=arena,
        rates=rates(arguments.device),
        drive=int(arena * others),
        on_host=frozenset(i for i, w in enumerate(arguments.whose) if w.on_host),
        is_on_host=lambda array: placement.whose(array, False).on_host,
        donated=collections.Counter(donated),
    )


def split(
    flat: FlatJaxpr,
    arguments: Arguments,
    budget: Budget,
    to_host: Collection[int] = (),
    finest: bool = False,
    repeated: bool = False,
    returned: Returned = NOTHING_KNOWN,
    used: list[Executable] | None = None,
) -> Split:
    """Cuts a function into tasks that fit in a budget, and compiles them.

    Args:
      flat: the function.
      arguments: how its arguments are held.
      budget: what there is, and what others take of it.
      to_host: positions of results that must end in host memory.
      finest: whether every equation is a task of its own.
      repeated: whether it runs many times with the same arrays in host memory: then those
        that there is room for are taken to be on the device.
      returned: which results are to lie in one memory; those for which there is no room on
        the device go to host memory.
      used: grows by the executables, so that they live until they can be used again.

    Raises:
      DoesNotFit: where a single equation, or the caller's own arrays, need more.
    """
    used = [] if used is None else used
    arguments = kept(arguments, flat)
    device = arguments.device
    arena = budget.arena(device)
    partitioner = Partitioner(flat, rates(device))
    _refuse_early(flat, partitioner, arguments, budget, used)
    groups = partitioner.partition(0 if finest else arena // _SHARE)
    staying = _not_to_be_lost(flat, arguments, repeated)
    compiled = None
    while True:
        groups = with_overwriting(flat, groups, staying)
        compiled = _compile(flat, groups, arguments, compiled)
        used += compiled.executables
        graph, buffers = _build(flat, groups, arguments, compiled, to_host)
        if smallest_budget(graph) <= arena:
            break
        kept_bytes = resident_bytes(graph)
        too_large = {t.id for t in graph.tasks if task_bytes(graph, t) + kept_bytes > arena}
        finer = partitioner.refine(groups, frozenset(too_large))
        if len(finer) == len(groups):
            raise _refusal(graph, budget, device)
        groups = finer
    least = lambda there: _least_when_cut(flat, partitioner, arguments, graph, arena, there)
    away = leaving(flat, arguments, to_host, returned, arena, least)
    to_host = frozenset(to_host).union(away, at_home(flat, arguments))
    if away:
        graph, buffers = _build(flat, groups, arguments, compiled, to_host)
    resident = _resident(flat, graph, buffers, arguments, arena) if repeated else ()
    return Split(
        flat=flat,
        groups=tuple(groups),
        graph=_with_resident(graph, resident),
        resident=resident,
        executables=compiled.executables,
        numbers=compiled.numbers,
        compile_report=compiled.report,
        arguments=arguments,
        buffers=buffers,
        reuses=reuses(flat, arguments),
        to_host=to_host,
    )


def _not_to_be_lost(
    flat: FlatJaxpr, arguments: Arguments, repeated: bool
) -> frozenset[int]:
    """Values that no task may write over: they are the caller's, or for the next run."""
    given = zip(flat.inputs, arguments.whose, strict=True)
    staying = {v for v, w in given if w is Whose.CALLER_DEVICE or (repeated and w.on_host)}
    staying.update(v for v, _ in flat.constants)
    if repeated:
        staying.update(s.value for s in flat.slices)
    return frozenset(staying)


def _finest(flat: FlatJaxpr, partitioner: Partitioner, arguments: Arguments) -> list[Group]:
    """The smallest tasks there can be, in a single run."""
    staying = _not_to_be_lost(flat, arguments, repeated=False)
    return with_overwriting(flat, partitioner.partition(0), staying)


def _least_bytes(graph: TaskGraph, there: Collection[BufferId]) -> int:
    """What a plan needs at least if some more buffers are on the device all the time."""
    bytes_of = [padded(b.nbytes) for b in graph.buffers]
    staying = {b.id for b in graph.buffers if b.pinned}.union(there)

    def needed(task: Task) -> int:
        # What stays cannot be written over: the result has bytes of its own then.
        kept = [task.outputs[o] for o, i in task.overwrites if task.inputs[i] in staying]
        used = (*task.inputs, *task.new, *kept)
        return padded(task.workspace) + sum(bytes_of[b] for b in used if b not in staying)

    largest = max(map(needed, graph.tasks), default=0)
    return sum(bytes_of[b] for b in staying) + largest


def _least_when_cut(
    flat: FlatJaxpr,
    partitioner: Partitioner,
    arguments: Arguments,
    graph: TaskGraph,
    arena: int,
    there: Collection[BufferId],
) -> int:
    """What a plan needs at least if some more buffers are on the device all the time, and
    tasks are cut as fine as that takes."""
    least = _least_bytes(graph, there)
    if least <= arena:
        return least
    finest, _ = _build(flat, _finest(flat, partitioner, arguments), arguments)
    workspace = max((padded(t.workspace) for t in graph.tasks), default=0)
    return min(least, _least_bytes(finest, there) + workspace)


def leaving(
    flat: FlatJaxpr,
    arguments: Arguments,
    to_host: Collection[int],
    returned: Returned,
    arena: int,
    least: Callable[[Collection[BufferId]], int] = lambda there: 0,
) -> frozenset[int]:
    """Results that go to host memory, since there is no room for them on the device, or
    none would be left for the function to be called with them.

    Args:
      flat: the function.
      arguments: how its arguments are held.
      to_host: results that go there anyway, by position.
      returned: of which results all go or none does; others stay.
      arena: bytes on the device.
      least: bytes that a call needs if some more arguments are on the device.
    """
    away = at_home(flat, arguments).union(to_host)
    as_they_are = frozenset(flat.inputs)
    sizes = {
        at: padded(flat.type_of(output).nbytes)
        for at, output in enumerate(flat.outputs)
        if at not in away and output not in as_they_are
    }
    # At rest a result may have the place of an argument that was given up.
    offers = collections.Counter(
        (flat.types[v].shape, flat.types[v].dtype)
        for v, w in zip(flat.inputs, arguments.whose, strict=True)
        if w is Whose.DONATED_DEVICE
    )
    for at in sizes:
        t = flat.type_of(flat.outputs[at])
        if offers[t.shape, t.dtype]:
            offers[t.shape, t.dtype] -= 1
            sizes[at] = 0
    room = arena - _argument_bytes(flat, arguments, (Whose.CALLER_DEVICE,))
    room -= sum(constants_on_device(flat).values())
    groups = sorted(
        map(sorted, returned.groups), key=lambda g: sum(sizes.get(i, 0) for i in g)
    )
    staying = set(sizes).difference(*groups)
    for group in groups:
        wanted = staying.union(at for at in group if at in sizes)
        # The arguments' buffers come first, in order.
        again = frozenset(BufferId(i) for at, i in returned.again if at in wanted)
        if sum(sizes[at] for at in wanted) <= room and least(again) <= arena:
            staying = wanted
    return frozenset(set(sizes) - staying)


def unread(flat: FlatJaxpr) -> frozenset[int]:
    """Values of arguments that nothing reads and that are not returned: they are the
    caller's matter, wherever they lie."""
    used = {v for e in flat.equations for v in e.inputs if isinstance(v, int)}
    used.update(s.source for s in flat.slices)
    used.update(flat.result_values)
    return frozenset(flat.inputs) - used


def where(flat: FlatJaxpr, arguments: Arguments) -> Where:
    """Where arguments and closed-over arrays are."""
    arguments, ignored = kept(arguments, flat), unread(flat)
    held = [
        *zip(flat.inputs, arguments.whose, strict=True),
        *((v, constant_whose(array)) for v, array in flat.constants),
    ]
    return Where(
        hosted=frozenset(v for v, w in held if w.on_host),
        staying=frozenset(
            v for v, w in held if w is Whose.CALLER_DEVICE and v not in ignored
        ),
    )


def constants_on_device(flat: FlatJaxpr) -> dict[int, int]:
    """Closed-over arrays that are on the device: id → bytes."""
    return {
        id(array): padded(flat.types[v].nbytes)
        for v, array in flat.constants
        if not constant_whose(array).on_host
    }


def bytes_at_start(flat: FlatJaxpr, arguments: Arguments) -> int:
    """Device bytes of arguments and closed-over arrays when a call begins."""
    there = [w for w in Whose if not w.on_host]
    constants = sum(constants_on_device(flat).values())
    return _argument_bytes(flat, arguments, there) + constants


def _resident(
    flat: FlatJaxpr,
    graph: TaskGraph,
    buffers: Mapping[int, BufferId],
    arguments: Arguments,
    arena: int,
) -> tuple[BufferId, ...]:
    """Which arrays in host memory are best kept on the device while a plan is repeated.

    As many bytes as leave room for two of the largest tasks, spread evenly over the order
    in which they are first read, so that the link has always something to do; the first is
    among them, so that nothing waits when a run begins.
    """
    needed = smallest_budget(graph)
    room = arena - max(2 * needed, arena // _SHARE)
    given_up = {v for v, w in zip(flat.inputs, arguments.whose, strict=True) if w.donated}
    given_up.update(s.value for s in flat.slices if s.source in given_up)
    lost = {buffers[v] for v in given_up}
    read = dict.fromkeys(b for t in graph.tasks for b in t.inputs)
    choice = [b for b in read if graph.buffers[b].start is Place.HOST and b not in lost]
    total = sum(padded(graph.buffers[b].nbytes) for b in choice)
    share = room / total if total else 0.0
    chosen: list[BufferId] = []
    due, taken = 1.0, 0
    for b in choice:
        nbytes = padded(graph.buffers[b].nbytes)
        due += min(share, 1.0) * nbytes
        if taken + nbytes <= room and taken < due:
            chosen.append(b)
            taken += nbytes
    return tuple(chosen)


def _with_resident(graph: TaskGraph, resident: Collection[BufferId]) -> TaskGraph:
    buffers = tuple(
        dataclasses.replace(b, start=Place.DEVICE, pinned=True) if b.id in resident else b
        for b in graph.buffers
    )
    return dataclasses.replace(graph, buffers=buffers)


def kept(arguments: Arguments, flat: FlatJaxpr) -> Arguments:
    """A donated argument that is returned as it is, or that nothing reads, stays."""
    read = {v for e in flat.equations for v in e.inputs if isinstance(v, int)}
    read.update(s.source for s in flat.slices)
    returned = {*flat.result_values, *(v for v in flat.inputs if v not in read)}
    alive = {
        Whose.DONATED_DEVICE: Whose.CALLER_DEVICE,
        Whose.DONATED_HOST: Whose.CALLER_HOST,
    }
    whose = tuple(
        alive.get(w, w) if v in returned else w
        for v, w in zip(flat.inputs, arguments.whose, strict=True)
    )
    return dataclasses.replace(arguments, whose=whose)


def alive_at_most(flat: FlatJaxpr) -> int:
    """The most bytes of values at once, if each is written down and lives no longer than it
    is needed; arguments live to the end."""
    nbytes = [t.nbytes for t in flat.types]
    ending: list[list[int]] = [[] for _ in flat.equations]
    last: dict[int, int] = {}
    for at, equation in enumerate(flat.equations):
        read = (v for v in equation.inputs if isinstance(v, int))
        last.update((v, at) for v in (*equation.outputs, *read))
    there = {*flat.inputs, *(v for v, _ in flat.constants)}.difference(unread(flat))
    kept = there.union(flat.result_values)
    for v, at in last.items():
        if v not in kept:
            ending[at].append(nbytes[v])
    alive = most = sum(nbytes[v] for v in there)
    for equation, ends in zip(flat.equations, ending, strict=True):
        alive += sum(nbytes[v] for v in equation.outputs)
        most = max(most, alive)
        alive -= sum(ends)
    return most


def read_whole_bytes(closed: Any) -> int:
    """The largest of the arguments and closed-over arrays that some product reads whole,
    however the function is cut: no smaller budget need be tried.

    Products are cut along rows of their first operand only (`frontend.stacks`).
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    return _read_whole(jaxpr, {*jaxpr.invars, *jaxpr.constvars})


def _read_whole(jaxpr: Any, arrays: Collection[Any]) -> int:
    """The same where some variables of a jaxpr are such arrays, or rows of them."""
    most = 0
    for eqn in jaxpr.eqns:
        params, read = eqn.params, eqn.invars
        if eqn.primitive.name == "dot_general" and not params["dimension_numbers"][1][0]:
            if not hasattr(read[1], "val") and read[1] in arrays:
                most = max(most, Type.of(read[1].aval).nbytes)
            continue
        begin = 0
        if eqn.primitive.name == "scan":
            consts, carries, _ = scan_counts(eqn)
            carried = range(consts, consts + carries)
            read = [None if i in carried else v for i, v in enumerate(read)]
        elif eqn.primitive.name == "while":
            begin = params["cond_nconsts"]
            read = read[: begin + params["body_nconsts"]]
        for inner in nested(eqn):
            body = getattr(inner, "jaxpr", inner)
            if inner is params.get("cond_jaxpr") or len(body.invars) < len(read) - begin:
                continue
            given = zip(body.invars, read[begin:], strict=False)
            mine = {a for a, v in given if not hasattr(v, "val") and v in arrays}
            most = max(most, _read_whole(body, {*mine, *body.constvars}))
    return most


def _refuse_early(
    flat: FlatJaxpr,
    partitioner: Partitioner,
    arguments: Arguments,
    budget: Budget,
    used: list[Executable],
) -> None:
    """Refuses a hopeless budget after compiling the largest equations only."""
    arena = budget.arena(arguments.device)
    staying = {
        v
        for v, w in zip(flat.inputs, arguments.whose, strict=True)
        if w is Whose.CALLER_DEVICE
    }
    kept = _argument_bytes(flat, arguments, (Whose.CALLER_DEVICE,))
    least = partitioner.least_bytes(staying) + kept
    if max(least, bytes_at_start(flat, arguments)) <= arena:
        return
    finest = _finest(flat, partitioner, arguments)
    bare, _ = _build(flat, finest, arguments)
    if smallest_budget(bare) <= arena:
        return
    sizes = [task_bytes(bare, t) for t in bare.tasks]
    # Workspace adds to what a task needs: the hungriest with it is likely among these.
    most = max(sizes)
    hungry = [g for g, size in zip(finest, sizes, strict=True) if size * 3 >= most]
    compiled = _compile(flat, hungry, arguments)
    used += compiled.executables
    graph, _ = _build(flat, hungry, arguments, compiled)
    raise _refusal(graph, budget, arguments.device)


def _refusal(graph: TaskGraph, budget: Budget, device: Device) -> DoesNotFit:
    """The planner's error in terms of the budget that the user gives."""
    arena = smallest_budget(graph)
    needed = budget.needed(arena, device)
    reserve = needed - arena - budget.taken
    return does_not_fit(graph, budget.gpu_bytes, needed, reserve, budget.taken)


def _argument_bytes(flat: FlatJaxpr, arguments: Arguments, held: Collection[Whose]) -> int:
    """Bytes of the arguments that are held in one of these ways, and not left unread."""
    ignored = unread(flat)
    return sum(
        padded(flat.types[v].nbytes)
        for v, whose in zip(flat.inputs, arguments.whose, strict=True)
        if whose in held and v not in ignored
    )


def _compile(
    flat: FlatJaxpr,
    groups: Sequence[Group],
    arguments: Arguments,
    earlier: compiler.Compiled | None = None,
) -> compiler.Compiled:
    device = arguments.device if arguments.committed else None
    how = compiler.How(device, compat.trace_context(), arguments.compiler_options)
    return compiler.compile_groups(flat, groups, how, earlier)


def _build(
    flat: FlatJaxpr,
    groups: Sequence[Group],
    arguments: Arguments,
    compiled: compiler.Compiled | None = None,
    to_host: Collection[int] = (),
) -> tuple[TaskGraph, dict[int, BufferId]]:
    """The TaskGraph of some groups, and the buffer of each value.

    Buffers of the flat arguments come first, in order, then those of the constants, then
    those of slices of either.
    """
    buffers: list[Buffer] = []
    of_value: dict[int, BufferId] = {}

    def add(value: int, role: Role, **fields: Any) -> None:
        of_value[value] = BufferId(len(buffers))
        nbytes = flat.types[value].nbytes
        buffers.append(Buffer(of_value[value], nbytes, role, **fields))

    ignored = unread(flat)
    for value, whose, name in zip(
        flat.inputs, arguments.whose, arguments.names, strict=True
    ):
        # What nothing reads takes no slot: as if it were elsewhere.
        start = _start(Whose.CALLER_HOST if value in ignored else whose)
        add(value, Role.INPUT, name=name, **start)
    for number, (value, array) in enumerate(flat.constants):
        name = f"closed-over array {number}"
        add(value, Role.CONSTANT, name=name, **_start(constant_whose(array)))
    for cut in flat.slices:
        part = cut.window.text(flat.types[cut.source].shape)
        name = f"{buffers[of_value[cut.source]].name}{part}"
        add(cut.value, Role.INPUT, name=name, start=Place.HOST)
    written = flat.written_outputs
    results = frozenset(written)
    ending = _ending_on_host(flat, arguments, to_host)
    tasks = []
    for index, group in enumerate(groups):
        for value in group.inputs:
            if value not in of_value:  # only where `groups` are not all of the function
                add(value, Role.INTERMEDIATE)
        for value in group.outputs:
            if value in results:
                add(value, Role.OUTPUT, end_on_host=value in ending)
            else:
                add(value, Role.INTERMEDIATE)
        tasks.append(_task(flat, group, index, of_value, arguments.device, compiled))
    graph = TaskGraph(
        tuple(buffers),
        tuple(tasks),
        tuple(of_value[v] for v in written if v in of_value),
    )
    return graph, of_value


def constant_whose(array: Any) -> Whose:
    """Who holds a closed-over array: small ones are put on the device once, for good."""
    whose = placement.whose(array, False)
    return Whose.CALLER_DEVICE if whose is Whose.OURS_DEVICE else whose


def _start(whose: Whose) -> dict[str, Any]:
    place = Place.HOST if whose.on_host else Place.DEVICE
    return {"start": place, "pinned": whose is Whose.CALLER_DEVICE}


def reuses(flat: FlatJaxpr, arguments: Arguments) -> dict[int, int]:
    """Result → the donated host argument whose place it takes, by their positions."""
    returned = frozenset(flat.inputs)
    types = [flat.types[v] for v in flat.inputs]
    results = [None if o in returned else flat.type_of(o) for o in flat.outputs]
    pairs = list(zip(types, arguments.whose, strict=True))
    return placement.reused_arguments(pairs, results)


def at_home(flat: FlatJaxpr, arguments: Arguments) -> frozenset[int]:
    """Results in the place of an argument in host memory, which is returned or re-used."""
    on_host = {v for v, w in zip(flat.inputs, arguments.whose, strict=True) if w.on_host}
    returned = {at for at, output in enumerate(flat.outputs) if output in on_host}
    return frozenset(returned.union(reuses(flat, arguments)))


def _ending_on_host(
    flat: FlatJaxpr, arguments: Arguments, to_host: Collection[int]
) -> frozenset[int]:
    """Values of results that are put together in host memory, that re-use an argument's,
    or that are asked for there by their positions."""
    reusing = reuses(flat, arguments)
    ending: set[int] = set()
    for at, output in enumerate(flat.outputs):
        if isinstance(output, Parts):
            ending.update(output.values)
        elif at in reusing or at in to_host:
            ending.add(output)
    return frozenset(ending)


def _task(
    flat: FlatJaxpr,
    group: Group,
    index: int,
    of_value: dict[int, BufferId],
    device: Device,
    compiled: compiler.Compiled | None,
) -> Task:
    lead = flat.equations[compiler.lead_equation(flat, group)]
    fields: dict[str, Any] = {}
    if compiled is not None:
        number = compiled.of_group[index]
        executable = compiled.executables[number]
        fields = {
            "executable": number,
            "workspace": executable.workspace,
            "flops": executable.flops,
            "bytes_accessed": executable.bytes_accessed,
            "seconds": executable.seconds
            or rates(device).seconds(executable.flops, executable.bytes_accessed),
        }
    return Task(
        id=TaskId(index),
        inputs=tuple(of_value[v] for v in group.inputs),
        outputs=tuple(of_value[v] for v in group.outputs),
        name=name_of(lead),
        source=lead.source,
        overwrites=group.overwrites,
        **fields,
    )


def measure(candidate: Split, trials: Trials) -> Split:
    """Runs each new executable on zeros, where there is room for that.

    Returns:
      The same with measured seconds in its tasks.
    """
    graph = candidate.graph
    largest = [0] * len(candidate.executables)
    for task in graph.tasks:
        # All of its operands are made anew, also where the caller has them already.
        arrays = (graph.buffers[b] for b in (*task.inputs, *task.outputs))
        needs = padded(task.workspace) + sum(padded(b.nbytes) for b in arrays)
        largest[task.executable] = max(needs, largest[task.executable])
    compiler.try_out(
        list(zip(candidate.executables, largest, strict=True)),
        placement.sharding(candidate.arguments.device, on_host=False),
        trials,
    )
    tasks = tuple(
        dataclasses.replace(
            t, seconds=candidate.executables[t.executable].seconds or t.seconds
        )
        for t in graph.tasks
    )
    return dataclasses.replace(candidate, graph=dataclasses.replace(graph, tasks=tasks))


def make_plan(
    candidate: Split, gpu_bytes: int, strategy: str, simulated: SimulatedLink | None
) -> tuple[Plan, Schedule]:
    """Plans by one strategy, or by the one that the simulator finds fastest; verifies.

    Raises:
      HostMemoryError: where the host cannot hold what must leave the device.
    """
    graph, device = candidate.graph, candidate.arguments.device
    link = link_of(device, simulated)
    names = (strategy,) if strategy != "auto" else _promising(graph)
    best: tuple[float, str, MemGraph, Schedule] | None = None
    with _without_cycle_collection():
        for name in names:
            memgraph = make_memgraph(graph, placement.arena_bytes(gpu_bytes, device), name)
            ready = schedule(graph, memgraph, link)
            seconds = simulate(ready, name, link.latency_seconds).seconds
            if best is None or seconds < _CLEARLY * best[0]:
                best = seconds, name, memgraph, ready
        assert best is not None
        seconds, name, memgraph, ready = best
        verify(graph, memgraph)
        plan = _figures(graph, memgraph, gpu_bytes, name, seconds, link)
    _check_host(plan, candidate)
    return plan, ready


def _promising(graph: TaskGraph) -> tuple[str, ...]:
    return _PROMISING if len(graph.tasks) <= _MANY_TASKS else _PROMISING[:1]


def _figures(
    graph: TaskGraph,
    memgraph: MemGraph,
    gpu_bytes: int,
    strategy: str,
    seconds: float,
    link: Link,
) -> Plan:
    h2d, d2h = figures.moved_bytes(graph, memgraph)
    bound = max(
        sum(t.seconds for t in graph.tasks),
        h2d / link.h2d_bytes_per_second,
        d2h / link.d2h_bytes_per_second,
    )
    return Plan(
        gpu_bytes=gpu_bytes,
        peak_bytes=peak_bytes(memgraph),
        h2d_bytes=h2d,
        d2h_bytes=d2h,
        host_bytes=figures.host_peak_bytes(graph, memgraph),
        predicted_seconds=seconds,
        lower_bound_seconds=bound,
        strategy=strategy,
        taskgraph=graph,
        memgraph=memgraph,
    )


def _check_host(plan: Plan, candidate: Split) -> None:
    device, needed = candidate.arguments.device, plan.host_bytes
    if device.platform != "cpu":  # the CPU backend takes numpy's memory as it is
        needed += _argument_bytes(candidate.flat, candidate.arguments, (Whose.OURS_HOST,))
    limit, why = placement.host_bytes_limit(device)
    if needed > limit:
        raise HostMemoryError(
            f"what must leave the device takes {format_bytes(needed)} of host memory; {why}"
            f" is {format_bytes(limit)}. Raise gpu_bytes above"
            f" {format_bytes(plan.gpu_bytes)}, or free host memory."
        )


@contextlib.contextmanager
def _without_cycle_collection() -> Iterator[None]:
    """Planning makes many records and no cycles; looking for those takes long."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
