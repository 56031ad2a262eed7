"""What a function surely needs, and what it needs at most: before it is compiled."""

from collections.abc import Collection, Sequence
from typing import Any

from jturnip import memory, placement
from jturnip.frontend.hints import nested
from jturnip.frontend.loops import scan_counts
from jturnip.frontend.values import FlatJaxpr, Type, is_packed
from jturnip.placement import Arguments
from jturnip.programs.places import unread


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


def whole_bytes(whole: Any, closed_over: Sequence[Any]) -> int:
    """Device bytes of a whole executable, by XLA's own analysis.

    That leaves out what is closed over (`_closed_over_bytes`).
    """
    sizes = whole.memory_analysis()
    return int(
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.temp_size_in_bytes
        + _closed_over_bytes(closed_over)
    )


def _closed_over_bytes(closed_over: Sequence[Any]) -> int:
    """Device bytes of what a whole executable closes over: a copy is part of it, and the
    array itself may be on the device too. A few numbers are as much a part of it as its
    code is, which nobody counts: with them it fits where XLA says so."""
    nbytes = sum(Type.of(array).nbytes for array in closed_over)
    nbytes += memory.device_bytes(closed_over)
    return nbytes if nbytes > placement.BOOKKEEPING else 0


def least_whole_bytes(
    flat: FlatJaxpr,
    arguments: Arguments,
    pruned: Collection[int],
    closed_over: Sequence[Any],
) -> int:
    """Device bytes that a function surely needs as one executable: its arguments, its
    results but those that may take the memory of donated arguments, and, as `whole_bytes`
    counts it, what it closes over.

    What is between them, fusion may never write down, so nothing is said of it.
    """
    inputs = [(i, _least_bytes(flat.types[v])) for i, v in enumerate(flat.inputs)]
    read = sum(nbytes for i, nbytes in inputs if i not in pruned)
    donated = sum(nbytes for i, nbytes in inputs if arguments.whose[i].donated)
    by_equations = {v for e in flat.equations for v in e.outputs}
    results = by_equations.intersection(flat.written_outputs)
    written = sum(_least_bytes(flat.types[v]) for v in results)
    return read + max(0, written - donated) + _closed_over_bytes(closed_over)


def _least_bytes(t: Type) -> int:
    """Bytes of a value as XLA may pack it."""
    return t.nbytes // 8 if is_packed(t.dtype) else t.nbytes
