"""The TaskGraph of a function whose equations are drawn together into tasks."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jturnip.compat import Device
from jturnip.compiler import executables as compiler
from jturnip.compiler.executables import Executable
from jturnip.frontend.blocks import name_of
from jturnip.frontend.partition import Group
from jturnip.frontend.values import FlatJaxpr, Parts, first_source
from jturnip.graph.taskgraph import Buffer, BufferId, Place, Role, Task, TaskGraph, TaskId
from jturnip.hardware import Accelerator
from jturnip.placement import Arguments, Whose
from jturnip.programs.devices import rates
from jturnip.programs.expected import seconds_on
from jturnip.programs.places import constant_whose, reuses, unread


def build(
    flat: FlatJaxpr,
    groups: Sequence[Group],
    arguments: Arguments,
    compiled: compiler.Compiled | None = None,
    to_host: Collection[int] = (),
    accelerator: Accelerator | None = None,
) -> tuple[TaskGraph, dict[int, BufferId]]:
    """The TaskGraph of some groups, and the buffer of each value.

    Buffers of the flat arguments come first, in order, then those of the constants, then
    those of slices of either. Tasks have the seconds they take on `accelerator` where that
    is given, else those measured or expected here.
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
        task = _task(flat, group, index, of_value, compiled)
        if compiled is not None:
            executable = compiled.executables[task.executable]
            seconds = _seconds(flat, group, executable, arguments.device, accelerator)
            task = dataclasses.replace(task, seconds=seconds)
            if accelerator is None:
                held = executable.dispatch_seconds
                task = dataclasses.replace(task, dispatch_seconds=held)
        tasks.append(task)
    graph = TaskGraph(
        tuple(buffers),
        tuple(tasks),
        tuple(of_value[v] for v in written if v in of_value),
    )
    return graph, of_value


def _start(whose: Whose) -> dict[str, Any]:
    place = Place.HOST if whose.on_host else Place.DEVICE
    return {"start": place, "pinned": whose is Whose.CALLER_DEVICE}


def _ending_on_host(
    flat: FlatJaxpr, arguments: Arguments, to_host: Collection[int]
) -> frozenset[int]:
    """Values of results that are put together in host memory, that re-use an argument's,
    or that are asked for there by their positions."""
    reusing = reuses(flat, arguments, to_host)
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
        }
    return Task(
        id=TaskId(index),
        inputs=tuple(of_value[v] for v in group.inputs),
        outputs=tuple(of_value[v] for v in group.outputs),
        name=name_of(lead),
        source=first_source([lead, *(flat.equations[e] for e in group.equations)]),
        overwrites=group.overwrites,
        **fields,
    )


def _seconds(
    flat: FlatJaxpr,
    group: Group,
    executable: Executable,
    device: Device,
    accelerator: Accelerator | None,
) -> float:
    """What a task takes: on another accelerator, or here as measured, or as expected."""
    flops, nbytes = executable.flops, executable.bytes_accessed
    if accelerator is not None:
        eqns = [flat.equations[e].origin for e in group.equations]
        return seconds_on(accelerator, eqns, flops, nbytes)
    return executable.seconds or rates(device).seconds(flops, nbytes)
