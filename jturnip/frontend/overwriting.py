"""Tasks that write a result over an operand that nobody reads any more.

XLA can write a result into the memory of a donated argument where it reads of each element
of the argument no more than it writes there: elementwise chains (an optimizer's update, a
sum that grows), updates of slices and rows, and what a loop carries. Then a task needs the
bytes of one of the two only.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterator, Sequence

from jturnip.frontend.costs import ELEMENTWISE, RENAMING, UPDATES
from jturnip.frontend.factors import OVER_PANELS, of_panel
from jturnip.frontend.loops import LOOPS, scan_counts
from jturnip.frontend.partition import SMALL, Group
from jturnip.frontend.values import (
    Constant,
    Equation,
    FlatJaxpr,
    Type,
    is_key,
    is_packed,
)


# So many values are followed from an operand.
_FAR = 64


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
    written: dict[Type, list[int]] = {}
    for out in group.outputs:
        written.setdefault(types[out], []).append(out)
    large = [v for v in ending if types[v].nbytes > SMALL and types[v] in written]
    large = [
        v for v in large if not is_key(types[v].dtype) and not is_packed(types[v].dtype)
    ]
    if not large:
        return group
    # By whether anything else needs the operand, then by how near it is to the result.
    pairs: list[tuple[bool, int, int, int]] = []
    reader = _Reader(flat, group)
    for v in large:
        distance = reader.reached_in_place(v)
        for out in written[types[v]]:
            if out in distance:
                at = group.outputs.index(out), group.inputs.index(v)
                pairs.append((reader.is_read_beside(v, out), distance[out], *at))
    over: dict[int, int] = {}  # input → output, by position
    for beside, _, out, read in sorted(pairs):
        # XLA does not know which of two results comes first where each needs what the
        # other is written over, and copies. One alone comes last.
        if read not in over and out not in over.values() and not (beside and over):
            over[read] = out
            if beside:
                break
    first = [group.outputs[over[read]] for read in sorted(over)]
    others = [v for v in group.outputs if v not in first]
    return dataclasses.replace(
        group,
        outputs=(*first, *others),
        overwrites=tuple((o, read) for o, read in enumerate(sorted(over))),
    )


class _Reader:
    """Follows values through the equations of a group, but not far."""

    def __init__(self, flat: FlatJaxpr, group: Group):
        self._flat = flat
        self._outputs = frozenset(group.outputs)
        self._readers: dict[int, list[int]] = {}
        for i in group.equations:
            for v in flat.equations[i].reads:
                self._readers.setdefault(v, []).append(i)

    def reached_in_place(self, v: int) -> dict[int, int]:
        """What may be written over an operand, and after how many equations that is."""
        distance = {v: 0}
        agenda = collections.deque([v])
        while agenda and len(distance) < _FAR:
            read = agenda.popleft()
            for i in self._readers.get(read, ()):
                for operand, out in _in_place(self._flat, self._flat.equations[i]):
                    if operand == read and out not in distance:
                        distance[out] = distance[read] + 1
                        agenda.append(out)
        del distance[v]
        return distance

    def is_read_beside(self, v: int, out: int) -> bool:
        """Whether other results are made of an operand, but not of the result over it. What
        else a loop gives does not count: it has a place for all that it carries."""
        reached = {v}
        agenda = [v]
        while agenda:
            for i in self._readers.get(agenda.pop(), ()):
                e = self._flat.equations[i]
                if e.name in LOOPS and out in e.outputs:
                    continue
                for written in e.outputs:
                    if written not in reached and written != out:
                        reached.add(written)
                        agenda.append(written)
            if len(reached) > _FAR or not reached.isdisjoint(self._outputs):
                return True
        return False


def _in_place(flat: FlatJaxpr, e: Equation) -> Iterator[tuple[int, int]]:
    """Operands of an equation, each with a result that can be written in its place."""
    read: list[tuple[int | Constant, int]] = []
    if e.name in ELEMENTWISE or e.name in RENAMING:
        size = flat.types[e.outputs[0]].shape
        read = [(x, e.outputs[0]) for x in e.inputs]
        if e.name in ELEMENTWISE:
            types = flat.operand_types(e)
            read = [pair for pair, t in zip(read, types, strict=True) if t.shape == size]
    elif e.name in UPDATES:
        read = [(e.inputs[0], e.outputs[0])]
    elif of_panel(e) in OVER_PANELS:
        read = [(e.inputs[1], e.outputs[0])]
    elif e.name == "scan" and not e.driven:
        consts, carries, _ = scan_counts(e.origin)
        carried = e.inputs[consts : consts + carries]
        read = list(zip(carried, e.outputs[:carries], strict=True))
    elif e.name == "while" and not e.driven:
        carries = len(e.outputs)
        read = list(zip(e.inputs[len(e.inputs) - carries :], e.outputs, strict=True))
    return ((x, out) for x, out in read if not isinstance(x, Constant))
