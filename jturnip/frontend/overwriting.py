"""Tasks that write a result over an operand that nobody reads any more.

XLA can write a result into the memory of a donated argument where it reads of each element
of the argument no more than it writes there: elementwise chains (an optimizer's update, a
sum that grows), updates of slices and rows, and what a loop carries. Then a task needs the
bytes of one of the two only.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from jturnip.frontend.costs import ELEMENTWISE
from jturnip.frontend.loops import scan_counts
from jturnip.frontend.partition import SMALL, Group
from jturnip.frontend.values import (
    Constant,
    Equation,
    FlatJaxpr,
    Type,
    is_key,
    is_packed,
)


# The first operand is changed in a few places.
_UPDATES = frozenset(
    "dynamic_update_slice scatter scatter-add scatter_add scatter-mul scatter_mul"
    " scatter-min scatter_min scatter-max scatter_max".split()
)
# The same bytes in the same order.
_RENAMING = frozenset("reshape squeeze expand_dims".split())


def with_overwriting(
    flat: FlatJaxpr, groups: Sequence[Group], staying: Collection[int]
) -> list[Group]:
    """The groups, each with the operands that results are to be written over.

    Results that are written over operands come first, in the order of these: so XLA pairs
    them.

    Args:
      flat: the function the groups are cut from.
      groups: in the order in which they may run.
      staying: values that must not be lost, beside the function's results.
    """
    last = {v: at for at, group in enumerate(groups) for v in group.inputs}
    kept = {*flat.result_values, *staying}
    return [
        _overwriting(
            flat, group, [v for v in group.inputs if last[v] == at and v not in kept]
        )
        for at, group in enumerate(groups)
    ]


def _overwriting(flat: FlatJaxpr, group: Group, ending: Sequence[int]) -> Group:
    types = flat.types
    large = [v for v in ending if types[v].nbytes > SMALL and _is_plain(types[v])]
    written = {types[v] for v in group.outputs}
    distance = {v: _reached_in_place(flat, group, v) for v in large if types[v] in written}
    pairs = sorted(
        (distance[v][out], group.outputs.index(out), group.inputs.index(v))
        for v in distance
        for out in group.outputs
        if out in distance[v] and types[out] == types[v]
    )
    over: dict[int, int] = {}  # input → output, by position; the nearest first
    for _, out, read in pairs:
        if read not in over and out not in over.values():
            over[read] = out
    if not over:
        return group
    first = [group.outputs[over[read]] for read in sorted(over)]
    others = [v for v in group.outputs if v not in first]
    return dataclasses.replace(
        group,
        outputs=(*first, *others),
        overwrites=tuple((o, read) for o, read in enumerate(sorted(over))),
    )


def _is_plain(t: Type) -> bool:
    return not is_key(t.dtype) and not is_packed(t.dtype)


def _reached_in_place(flat: FlatJaxpr, group: Group, v: int) -> Mapping[int, int]:
    """What may be written over an operand, and after how many equations that is.

    Nothing is where the operand is read again after it was changed by what is not
    elementwise.
    """
    found = {v: 0}
    for i in group.equations:
        e = flat.equations[i]
        before = [found[x] for x in e.inputs if not isinstance(x, Constant) and x in found]
        if not before:
            continue
        for read, out in _in_place(flat, e):
            if read in found:
                found[out] = min(found.get(out, len(group.equations)), 1 + min(before))
    del found[v]
    return found


def _in_place(flat: FlatJaxpr, e: Equation) -> Iterator[tuple[int, int]]:
    """Operands of an equation, each with a result that can be written in its place."""
    read: list[tuple[int | Constant, int]] = []
    if e.name in ELEMENTWISE or e.name in _RENAMING:
        size = flat.types[e.outputs[0]].shape
        read = [(x, e.outputs[0]) for x in e.inputs]
        if e.name in ELEMENTWISE:
            types = flat.operand_types(e)
            read = [pair for pair, t in zip(read, types, strict=True) if t.shape == size]
    elif e.name in _UPDATES:
        read = [(e.inputs[0], e.outputs[0])]
    elif e.name == "scan" and not e.driven:
        consts, carries, _ = scan_counts(e.origin)
        carried = e.inputs[consts : consts + carries]
        read = list(zip(carried, e.outputs[:carries], strict=True))
    elif e.name == "while" and not e.driven:
        carries = len(e.outputs)
        read = list(zip(e.inputs[len(e.inputs) - carries :], e.outputs, strict=True))
    return ((x, out) for x, out in read if not isinstance(x, Constant))
