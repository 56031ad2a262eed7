"""Scans along axes that all of their iterations leave alone.

A batch of chains, of sequences, of particles: where no iteration mixes what is at two
positions along an axis, a part of the positions can be taken through all iterations by
itself. Along such an axis a scan has a rule as any other equation has (`axes.py`): it
follows from the rules of what is in its body.
"""

import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax import lax

from jturnip import compat
from jturnip.errors import UnsupportedError
from jturnip.frontend import costs
from jturnip.frontend.inline import inline
from jturnip.frontend.loops import scan_counts
from jturnip.frontend.rules import Along, Rule
from jturnip.frontend.sets import Joined
from jturnip.frontend.values import Constant, Equation, FlatJaxpr, Type


# What is done again for every part may be this share of the work.
_AGAIN = 1 / 16

# The rule of each equation of a function.
Rules: TypeAlias = Callable[[FlatJaxpr], Sequence[Rule | None]]
# Applies an equation to parts: with what is expected of each result, where it is cut, and
# the position at which the part begins.
Apply: TypeAlias = Callable[
    [Equation, Sequence[Any], Sequence[tuple[int, ...]], Along, Any], Sequence[Any]
]


@dataclass(frozen=True, slots=True)
class Body:
    """What a scan does in each iteration."""

    flat: FlatJaxpr
    # How many constants, carried values and scanned arrays there are.
    counts: tuple[int, int, int]
    # Label → the dimension along which each value that has it is cut.
    cut: Mapping[int, Mapping[int, int]]

    @property
    def outer(self) -> list[int]:
        """How many dimensions each operand has before those of the body's."""
        consts, carry, xs = self.counts
        return [0] * (consts + carry) + [1] * xs

    @property
    def outer_of_results(self) -> list[int]:
        """The same of each result."""
        carry = self.counts[1]
        return [0] * carry + [1] * (len(self.flat.outputs) - carry)


def body_of(eqn: Any, rules: Rules) -> Body | None:
    """The body of a scan with its axes; None where it is not one of plain arrays."""
    counts = scan_counts(eqn)
    return _body_of(eqn.params["jaxpr"], counts, rules, compat.trace_context())


@functools.lru_cache(maxsize=1024)
def _body_of(
    closed: Any, counts: tuple[int, int, int], rules: Rules, context: Hashable
) -> Body | None:
    del context  # what the rules depend on
    try:
        flat = inline(closed)
    except UnsupportedError:
        return None
    if flat.constants:
        return None
    consts, carry, _ = counts
    joined, whole = Joined[tuple[int, int]](), set[tuple[int, int]]()
    of_equation = rules(flat)
    for e, rule in zip(flat.equations, of_equation, strict=True):
        _see(e, rule, flat, joined, whole)
    # What an iteration hands on is what the next one gets.
    for v, w in zip(flat.inputs[consts : consts + carry], flat.result_values, strict=False):
        for dim in range(len(flat.types[v].shape)):
            joined.join((v, dim), (w, dim))
    cut: dict[tuple[int, int], dict[int, int]] = {}
    bad = set(map(joined.find, whole))
    for v, dim in list(joined):
        name = joined.find((v, dim))
        if v in cut.setdefault(name, {}):
            bad.add(name)
        cut[name][v] = dim
    ends = {*flat.inputs, *flat.result_values}
    found = [
        each
        for name, each in cut.items()
        if name not in bad and _works(flat, of_equation, each, ends)
    ]
    return Body(flat, counts, dict(enumerate(found)))


def _see(
    e: Equation,
    rule: Rule | None,
    flat: FlatJaxpr,
    joined: Joined[tuple[int, int]],
    whole: set[tuple[int, int]],
) -> None:
    """Joins what an equation cuts together; and what it needs whole."""
    sides = [*e.inputs, *e.outputs]
    together: dict[int, tuple[int, int]] = {}
    nothing = [(None,) * len(t.shape) for t in _types(e, flat)]
    labels = nothing if rule is None else [*rule.operands, *rule.results]
    for v, each in zip(sides, labels, strict=True):
        if isinstance(v, Constant):
            continue
        for dim, label in enumerate(each):
            if label is None or (rule is not None and label in rule.reduced):
                whole.add((v, dim))
            else:
                joined.join((v, dim), together.setdefault(label, (v, dim)))


def _types(e: Equation, flat: FlatJaxpr) -> list[Type]:
    return [*flat.operand_types(e), *(flat.types[v] for v in e.outputs)]


def _works(
    flat: FlatJaxpr,
    rules: Sequence[Rule | None],
    cut: Mapping[int, int],
    ends: Collection[int],
) -> bool:
    """Whether a body can be done in parts: along one axis of each equation, with little
    that is done for all parts alike, and whole positions of all between its ends."""
    sizes = {v: flat.types[v].shape[dim] for v, dim in cut.items()}
    length = math.gcd(*(size for v, size in sizes.items() if v in ends))
    if length < 2 or any(size % length for size in sizes.values()):
        return False
    again = total = 0.0
    for e, rule in zip(flat.equations, rules, strict=True):
        labels = set(_labels(e, rule, cut))
        if len(labels) > 1:
            return False
        work = costs.flops(e.origin)
        total += work
        again += 0 if labels else work
    return again <= _AGAIN * total


def _labels(e: Equation, rule: Rule | None, cut: Mapping[int, int]) -> Iterator[int]:
    """The labels of what is cut of an equation's operands and results."""
    if rule is None:
        return
    labels = (*rule.operands, *rule.results)
    for v, each in zip((*e.inputs, *e.outputs), labels, strict=True):
        if isinstance(v, int) and v in cut and each[cut[v]] is not None:
            yield each[cut[v]]  # pyright: ignore[reportReturnType]


def rule_of(e: Equation, rules: Rules) -> Rule | None:
    """The rule of a scan: the labels are those of its body that operands have."""
    body = body_of(e.origin, rules)
    if body is None:
        return None
    flat = body.flat
    sides = [
        *zip(flat.inputs, body.outer, strict=True),
        *zip(flat.result_values, body.outer_of_results, strict=True),
    ]
    labels: list[tuple[int | None, ...]] = []
    for v, outer in sides:
        at = {each[v]: label for label, each in body.cut.items() if v in each}
        rank = len(flat.types[v].shape)
        labels.append((*[None] * outer, *(at.get(dim) for dim in range(rank))))
    operands, results = labels[: len(flat.inputs)], labels[len(flat.inputs) :]
    return Rule(tuple(operands), tuple(results), frozenset())


def on_part(
    e: Equation, operands: Sequence[Any], along: Along, low: Any, rules: Rules, apply: Apply
) -> Sequence[Any]:
    """A scan of parts: the same iterations of a smaller body."""
    body = body_of(e.origin, rules)
    assert body is not None
    at, (dim, scale) = next((i, cut) for i, cut in enumerate(along.operands) if cut)
    v = body.flat.inputs[at]
    (cut,) = (each for each in body.cut.values() if each.get(v) == dim - body.outer[at])
    length = body.flat.types[v].shape[cut[v]] // scale
    part = operands[at].shape[dim] // scale
    iteration = _Iteration(body.flat, cut, length, part, apply, low)
    consts, carry, _ = body.counts
    first, carried = operands[:consts], operands[consts : consts + carry]

    def step(carried: Any, xs: Any) -> tuple[Any, Any]:
        results = iteration.run([*first, *carried, *xs])
        return tuple(results[:carry]), tuple(results[carry:])

    params = e.origin.params
    with e.origin.ctx.manager:
        carried, stacked = lax.scan(
            step,
            tuple(carried),
            tuple(operands[consts + carry :]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
    return *carried, *stacked


@dataclass(frozen=True, slots=True)
class _Iteration:
    """One iteration for a part."""

    flat: FlatJaxpr
    # Value → the dimension along which it is cut.
    cut: Mapping[int, int]
    # Positions along the axis, those of the part, and the first of these.
    length: int
    part: int
    apply: Apply
    low: Any

    def run(self, operands: Sequence[Any]) -> list[Any]:
        flat = self.flat
        values = dict(zip(flat.inputs, operands, strict=True))
        for e in flat.equations:
            read = [v.value if isinstance(v, Constant) else values[v] for v in e.inputs]
            along = Along(tuple(map(self._at, e.inputs)), self._at(e.outputs[0]))
            if any((*along.operands, *map(self._at, e.outputs))):
                shapes = list(map(self._shape, e.outputs))
                made = self.apply(e, read, shapes, along, self.low)
            else:
                made = e.bind(read)
            values.update(zip(e.outputs, made, strict=True))
        return [values[v] for v in flat.result_values]

    def _at(self, v: int | Constant) -> tuple[int, int] | None:
        """Along which dimension a value is cut, and how many positions along it are one."""
        if isinstance(v, Constant) or v not in self.cut:
            return None
        dim = self.cut[v]
        return dim, self.flat.types[v].shape[dim] // self.length

    def _shape(self, v: int) -> tuple[int, ...]:
        shape, at = self.flat.types[v].shape, self._at(v)
        if at is None:
            return shape
        dim, scale = at
        return *shape[:dim], self.part * scale, *shape[dim + 1 :]
