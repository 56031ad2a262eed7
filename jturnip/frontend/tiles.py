"""A stretch over which windows slide, in tiles that overlap.

Of a chain of stencils no array need be there as a whole: what some positions of the last
result need of the first array are those positions and a few beside them. So each tile reads
a part with a border and does the whole chain for it; what neighbours have in common both
compute (overlapped tiling: Krishnamoorthy et al., PLDI 2007). Each array comes once, and
nothing that is between leaves.
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jturnip.frontend.rules import Rule
from jturnip.frontend.sliding import Axis, Extent
from jturnip.frontend.stretches import Stretch
from jturnip.frontend.values import Constant, FlatJaxpr


# The first of some positions, and past the last.
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Step:
    """An equation for some positions along its axis."""

    equation: int
    span: Span
    # Of each operand what is read, None for all of it; of each result what is written,
    # None for a part of a sum.
    reads: tuple[Extent | None, ...]
    writes: tuple[Extent | None, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """What is done for some positions of what is wanted."""

    steps: tuple[Step, ...]
    # Value → the positions of it that are made; None for a part of a sum.
    wanted: Mapping[int, Extent | None]
    # (value that is there before, dimension) → the positions that are read.
    read: Mapping[tuple[int, int], tuple[Span, ...]]


@dataclass(frozen=True)
class Tiles:
    """A stretch as so many tiles."""

    stretch: Stretch
    # Equation that works on parts → the axis along which it does.
    axes: Mapping[int, Axis]
    count: int
    # Of what enters, that of which each tile reads only its part, in host memory.
    sliced: frozenset[int]
    # Results whose parts are put together in host memory; and what others read of it piece
    # by piece. A task joins what is neither.
    left_in_parts: frozenset[int]
    apart: frozenset[int]

    @property
    def key(self) -> Any:
        """The same for the same cut of the same function."""
        return self.stretch.key, self.count, self.sliced, self.left_in_parts, self.apart

    @functools.cached_property
    def _writer(self) -> dict[int, int]:
        """Value of which parts are made → its equation."""
        axes = sorted(self.axes.items())
        return {v: i for i, axis in axes for v in axis.equation.outputs}

    def last(self, flat: FlatJaxpr, v: int) -> int:
        """The last of the tiles in which some of a value is made."""
        length = self.length(flat, v)
        return -(-length // -(-length // self.count)) - 1

    def length(self, flat: FlatJaxpr, v: int) -> int:
        """Of something that is wanted, how many positions are shared among the tiles."""
        if v in self.stretch.reduced:
            return self.axes[self._writer[v]].length
        return flat.types[v].shape[self.stretch.dims[v]]

    def tile(self, flat: FlatJaxpr, wanted: Collection[int], number: int) -> Tile:
        """What is done in one tile for its share of some values, in order."""
        reduced, dims, writer = self.stretch.reduced, self.stretch.dims, self._writer
        found: dict[int, Extent | None] = {}
        needed: dict[int, list[Span]] = {}  # value that is made → what is read of it
        shares: dict[int, Span] = {}  # equation → its share of a sum
        read: dict[tuple[int, int], list[Span]] = {}
        for v in wanted:
            length = self.length(flat, v)
            size = -(-length // self.count)
            low, high = number * size, min((number + 1) * size, length)
            if low >= high:
                continue
            if v in reduced:
                found[v], shares[writer[v]] = None, (low, high)
            else:
                found[v] = Extent(dims[v], low, high)
                needed.setdefault(v, []).append((low, high))
        steps: list[Step] = []
        for i, axis in sorted(self.axes.items(), reverse=True):
            for span in _spans(axis, needed, shares.get(i)):
                step = Step(i, span, tuple(axis.reads(*span)), tuple(axis.writes(*span)))
                steps.append(step)
                for v, extent in zip(axis.equation.inputs, step.reads, strict=True):
                    if isinstance(v, Constant) or extent is None or not extent.length:
                        continue
                    made = v in writer and v not in reduced
                    where = (
                        needed.setdefault(v, [])
                        if made
                        else read.setdefault((v, extent.dim), [])
                    )
                    where.append((extent.low, extent.high))
        return Tile(
            tuple(reversed(steps)),
            found,
            {key: tuple(united(spans)) for key, spans in read.items()},
        )


def _spans(axis: Axis, needed: Mapping[int, list[Span]], share: Span | None) -> list[Span]:
    """The positions along an axis for which its equation is done: its share of a sum, and
    what others read of it."""
    spans = united(
        axis.giving(at, *span)
        for at, v in enumerate(axis.equation.outputs)
        for span in needed.get(v, ())
    )
    if share is None:
        return spans
    low, high = share
    return [share, *(s for s in spans if s[0] < low or s[1] > high)]


def united(spans: Iterable[Span]) -> list[Span]:
    """The same positions, each once: those that meet or follow on one another together."""
    found: list[Span] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def axes_of(
    flat: FlatJaxpr, slid: Sequence[Rule | None], stretch: Stretch
) -> dict[int, Axis]:
    """The axis along which each equation of a stretch works on parts."""
    return {i: _axis(flat, slid[i], stretch, i) for i in stretch.working}


def _axis(flat: FlatJaxpr, rule: Rule | None, stretch: Stretch, i: int) -> Axis:
    e = flat.equations[i]
    assert rule is not None
    labels = [
        labels[stretch.dims[v]]
        for v, labels in zip(e.outputs, rule.results, strict=True)
        if v in stretch.dims
    ]
    labels += [
        labels[stretch.uses[i, at]]
        for at, labels in enumerate(rule.operands)
        if (i, at) in stretch.uses
    ]
    label = labels[0]
    assert label is not None
    assert set(labels) == {label}
    results = tuple(flat.types[v] for v in e.outputs)
    return Axis(e, rule, label, tuple(flat.operand_types(e)), results)
