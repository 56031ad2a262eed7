"""What equations read for some positions of their results, where windows slide over it.

Along most axes a part of the result needs the same part of what is read (`axes.py`). A
stencil needs the positions beside it too: it adds up an array and the same array shifted,
which are slices of it, pieces put together in another order, what is padded, or a
convolution. What of its operands an equation reads for some positions is then an interval
that is computed from these, as Halide's bounds inference does (Ragan-Kelley et al.,
PLDI 2013).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jturnip.frontend import parts, stacks
from jturnip.frontend.costs import ELEMENTWISE
from jturnip.frontend.halos import POOLS
from jturnip.frontend.rules import Along, Halo, Rule, has_labels
from jturnip.frontend.values import Equation, FlatJaxpr, Type


# What windows may slide over.
SLIDING = POOLS | frozenset("concatenate conv_general_dilated pad rev slice".split())


# -- rules with labels where windows slide ---------------------------------------------


def sliding_rules(flat: FlatJaxpr, rules: Sequence[Rule | None]) -> list[Rule | None]:
    """The rules of all equations, in which what windows slide over has their labels."""
    return [
        _sliding(e, flat.operand_types(e), [flat.types[v] for v in e.outputs], rule)
        for e, rule in zip(flat.equations, rules, strict=True)
    ]


def _sliding(
    e: Equation, read: Sequence[Type], written: Sequence[Type], rule: Rule | None
) -> Rule | None:
    if any(0 in t.shape for t in (*read, *written)):
        return None
    if e.name in _BY_DIMENSION:
        found = _BY_DIMENSION[e.name](e, read, written) or rule
        return found if found is not None and has_labels(found) else None
    if rule is None or not rule.halos:
        return rule
    first = list(rule.operands[0])
    for label, halo in rule.halos.items():
        first[halo.dim] = label
    return dataclasses.replace(rule, operands=(tuple(first), *rule.operands[1:]))


def _of_all(e: Equation, read: Sequence[Type], written: Sequence[Type]) -> Rule:
    """Along every dimension, also along one of a single position."""
    labels = lambda t: tuple(range(len(t.shape)))
    return Rule(tuple(map(labels, read)), tuple(map(labels, written)))


def _of_each(e: Equation, read: Sequence[Type], written: Sequence[Type]) -> Rule:
    """The same for what is done element by element; one position may go with many."""
    (result,) = {t.shape for t in written}
    labels = [
        tuple(
            d if n == m else None
            for d, (n, m) in enumerate(zip(t.shape, result, strict=False))
        )
        for t in read
    ]
    return Rule(tuple(labels), (tuple(range(len(result))),) * len(written))


def _spread(e: Equation, read: Sequence[Type], written: Sequence[Type]) -> Rule:
    (operand, *sizes), (result,) = read, written
    dims = e.origin.params["broadcast_dimensions"]
    labels = [
        dim if n == result.shape[dim] else None
        for n, dim in zip(operand.shape, dims, strict=True)
    ]
    others = tuple((None,) * len(t.shape) for t in sizes)
    return Rule((tuple(labels), *others), (tuple(range(len(result.shape))),))


def _renamed(e: Equation, read: Sequence[Type], written: Sequence[Type]) -> Rule | None:
    """Where dimensions of one position come or go: along the others, and along those of
    one position in their order."""
    (old, *sizes), (new,) = read, written
    long = lambda t: [n for n in t.shape if n != 1]
    if sizes or long(old) != long(new) or e.origin.params.get("dimensions"):
        return None
    of_old: list[int | None] = [None] * len(old.shape)
    of_new: list[int | None] = [None] * len(new.shape)
    here = there = 0
    while here < len(old.shape) and there < len(new.shape):
        if old.shape[here] == new.shape[there]:
            of_old[here] = of_new[there] = here
            here, there = here + 1, there + 1
        elif old.shape[here] == 1:
            here += 1
        else:
            there += 1
    return Rule((tuple(of_old),), (tuple(of_new),))


def _with_windows(e: Equation, read: Sequence[Type], written: Sequence[Type]) -> Rule:
    """Of windows of one position, which begin and step as a slice or a pad does."""
    operand, result = read[0], written[0]
    halos: dict[int, Halo] = {}
    for dim, (first, step, dilation) in enumerate(_steps(e, operand)):
        if (first, step, dilation, operand.shape[dim]) != (0, 1, 1, result.shape[dim]):
            halos[dim] = Halo(
                at=dim,
                dim=dim,
                size=operand.shape[dim],
                positions=result.shape[dim],
                step=step,
                reach=1,
                before=-first,
                dilation=dilation,
            )
    labels = tuple(range(len(result.shape)))
    others = tuple((None,) * len(t.shape) for t in read[1:])
    return Rule((labels, *others), (labels,), halos=halos)


def _steps(e: Equation, operand: Type) -> Iterator[tuple[int, int, int]]:
    """For each dimension where the first position is read, in positions of what is read
    with what is put between them; how far the next one is from it; and how far positions
    of what is read are apart."""
    params = e.origin.params
    if e.name == "pad":
        for low, _, inside in params["padding_config"]:
            yield -int(low), 1, int(inside) + 1  # gradients have numpy's numbers
    else:
        steps = params["strides"] or (1,) * len(operand.shape)
        for start, step in zip(params["start_indices"], steps, strict=True):
            yield int(start), int(step), 1


_BY_DIMENSION: dict[
    str, Callable[[Equation, Sequence[Type], Sequence[Type]], Rule | None]
] = {
    **dict.fromkeys(ELEMENTWISE, _of_each),
    "broadcast_in_dim": _spread,
    "concatenate": _of_all,
    "pad": _with_windows,
    "reshape": _renamed,
    "rev": _of_all,
    "slice": _with_windows,
}


# -- what is read for some positions ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Extent:
    """Some positions along a dimension of a value: from the first one to before the last.

    Of what is put together, nothing is read of the pieces that are elsewhere.
    """

    dim: int
    low: int
    high: int

    @property
    def length(self) -> int:
        """How many there are."""
        return self.high - self.low


@dataclass(frozen=True)
class Axis:
    """An equation along one label of its rule."""

    equation: Equation
    rule: Rule
    label: int
    operands: tuple[Type, ...]
    results: tuple[Type, ...]

    @property
    def slides(self) -> bool:
        """Whether positions of results are made of others of what is read."""
        return self.halo is not None or self._is_joined or self._is_reversed

    @functools.cached_property
    def halo(self) -> Halo | None:
        """What windows along it reach of the first operand."""
        return self.rule.halos.get(self.label)

    @functools.cached_property
    def _is_joined(self) -> bool:
        e = self.equation
        return e.name == "concatenate" and e.origin.params["dimension"] == self.label

    @functools.cached_property
    def _is_reversed(self) -> bool:
        e = self.equation
        return e.name == "rev" and self.label in e.origin.params["dimensions"]

    @functools.cached_property
    def length(self) -> int:
        """How many positions there are."""
        operands = self._dims_of(self.operands, self.rule.operands)
        if self.halo is not None:
            operands = operands[1:]
        if self._is_joined:
            operands = []
        sides = [*operands, *self._dims_of(self.results, self.rule.results)]
        return math.gcd(*(t.shape[dim] for t, dim in sides if dim is not None))

    def _dims_of(
        self, types: Sequence[Type], labels: Sequence[Sequence[int | None]]
    ) -> list[tuple[Type, int | None]]:
        """Each type with the dimension that has the label."""
        return [
            (t, each.index(self.label) if self.label in each else None)
            for t, each in zip(types, labels, strict=True)
        ]

    def _scales(
        self, types: Sequence[Type], labels: Sequence[Sequence[int | None]]
    ) -> tuple[tuple[int, int] | None, ...]:
        """The dimensions that have the label, and how many positions along each are one
        along the axis."""
        return tuple(
            None if dim is None else (dim, t.shape[dim] // self.length)
            for t, dim in self._dims_of(types, labels)
        )

    @functools.cached_property
    def _of_results(self) -> tuple[tuple[int, int] | None, ...]:
        return self._scales(self.results, self.rule.results)

    @functools.cached_property
    def _of_operands(self) -> tuple[tuple[int, int] | None, ...]:
        """As they are cut where nothing slides."""
        found = self._scales(self.operands, self.rule.operands)
        return found if self.halo is None else (None, *found[1:])

    @functools.cached_property
    def _begins(self) -> tuple[int, ...]:
        """Where each of the pieces that are put together begins, and the last one ends."""
        sizes = (t.shape[self.label] for t in self.operands)
        return (0, *itertools.accumulate(sizes))

    def writes(self, low: int, high: int) -> list[Extent | None]:
        """The positions of each result that some along the axis are; None for a result
        that is reduced, of which they are a part of all."""
        return [_scaled(each, low, high) for each in self._of_results]

    def giving(self, at: int, low: int, high: int) -> tuple[int, int]:
        """The positions along the axis that give some positions of a result."""
        found = self._of_results[at]
        assert found is not None
        scale = found[1]
        return low // scale, -(-high // scale)

    def reads(self, low: int, high: int) -> list[Extent | None]:
        """The positions of each operand that are read for some along the axis; None where
        all of it is."""
        if self._is_joined:
            begins = itertools.pairwise(self._begins)
            return [_common(self.label, low, high, *each) for each in begins]
        if self._is_reversed:
            return [Extent(self.label, self.length - high, self.length - low)]
        found = [_scaled(each, low, high) for each in self._of_operands]
        if self.halo is not None:
            first, count, _ = self._of_halo(low, high)
            found[0] = Extent(self.halo.dim, first, first + count)
        return found

    def _of_halo(self, low: int, high: int) -> tuple[int, int, tuple[int, int]]:
        halo = self.halo
        assert halo is not None
        scale = halo.positions // self.length
        return halo.of(low * scale, (high - low) * scale)

    def along(self, low: int, high: int) -> Along:
        """Where the equation is cut, for some positions along the axis."""
        padding = None
        if self.halo is not None:
            padding = self.halo.at, self._of_halo(low, high)[-1]
        return Along(self._of_operands, self._of_results[0], padding)

    def on_part(
        self, types: Sequence[Type], shapes: Sequence[tuple[int, ...]], along: Along
    ) -> tuple[Any, bool]:
        """The equation for some positions, as a jaxpr of what is read of its operands; and
        whether it is also one of the first position, which comes before them."""
        if self._is_joined:
            return stacks.joining(tuple(types), self.label), False
        if self.equation.name == "slice" and self.halo is not None:
            return self._sliced(types[0]), False
        return parts.on_part(self.equation, types, shapes, along), True

    def _sliced(self, t: Type) -> Any:
        params, halo = self.equation.origin.params, self.halo
        assert halo is not None
        starts, limits = [*params["start_indices"]], [*params["limit_indices"]]
        starts[halo.dim], limits[halo.dim] = 0, t.shape[halo.dim]
        cut = lambda x: lax.slice(x, starts, limits, params["strides"])
        return jax.make_jaxpr(cut)(t.struct())


def _scaled(cut: tuple[int, int] | None, low: int, high: int) -> Extent | None:
    if cut is None:
        return None
    dim, scale = cut
    return Extent(dim, low * scale, high * scale)


def _common(dim: int, low: int, high: int, begin: int, end: int) -> Extent:
    """Of some positions those from one to before another, counted from that one."""
    first, last = max(low, begin), min(high, end)
    return Extent(dim, first - begin, max(first, last) - begin)
