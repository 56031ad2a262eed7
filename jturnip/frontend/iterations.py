"""Loops along axes that all of their iterations leave alone.

A batch of chains, of sequences, of particles: where no iteration mixes what is at two
positions along an axis, a part of the positions can be taken through all iterations by
itself. Along such an axis a scan has a rule as any other equation has (`axes.py`): it
follows from the rules of what is in its body. So has a loop whose condition reads nothing
of what is cut, or asks for each position by itself, as `jax.vmap` makes it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jturnip import compat
from jturnip.errors import UnsupportedError
from jturnip.frontend import costs
from jturnip.frontend.costs import RENAMING
from jturnip.frontend.inline import inline
from jturnip.frontend.loops import loop_counts, scanned
from jturnip.frontend.results import live
from jturnip.frontend.rules import SAME, Along, Rule, without
from jturnip.frontend.sets import Joined
from jturnip.frontend.values import Constant, Equation, FlatJaxpr, Type, bind, needs_x64


# What is done again for every part may be this share of the work. What only gives other
# shapes or places to what is read, as a layer's weights out of all, is done by its reader.
_AGAIN = 1 / 4
_BY_READERS = RENAMING | frozenset(
    "broadcast_in_dim convert_element_type copy dynamic_slice rev slice transpose".split()
)

# How results may be combined that iterations sum up; what is linear in all its operands.
_SUMS = frozenset(["add", SAME, None])
_LINEAR = frozenset(
    "add add_any sub neg copy convert_element_type transpose reshape squeeze expand_dims"
    " broadcast_in_dim reduce_sum slice rev split concatenate pad".split()
)
# Of these, operands that are zeros need not be sums: what a gradient of a slice is.
_WITH_ZEROS = frozenset(["concatenate", "pad"])

# The rule of each equation of a function.
Rules: TypeAlias = Callable[[FlatJaxpr], Sequence[Rule | None]]
# Applies an equation to parts: with what is expected of each result, where it is cut, and
# the position at which the part begins.
Apply: TypeAlias = Callable[
    [Equation, Sequence[Any], Sequence[tuple[int, ...]], Along, Any], Sequence[Any]
]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a loop's body."""

    # Value → the dimension along which it is cut.
    dims: Mapping[int, int]
    # How each result of the loop is combined; None for one that is cut.
    how: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """What a loop does in each iteration."""

    # Of constants, carried values and positions of scanned arrays: the next carried values
    # and what is stacked.
    flat: FlatJaxpr
    # Whether the loop goes on; None for a scan.
    condition: int | None
    # How many constants, carried values and scanned arrays there are.
    counts: tuple[int, int, int]
    axes: tuple[Axis, ...]

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
    """The body of a loop with its axes; None where it is not one of plain arrays."""
    params, counts = eqn.params, loop_counts(eqn)
    condition, closed = None, params.get("jaxpr")
    if eqn.primitive.name == "while":
        condition = params["cond_jaxpr"], params["cond_nconsts"]
        closed = params["body_jaxpr"]
    return _body_of(closed, condition, counts, rules, compat.trace_context())


@functools.lru_cache(maxsize=1024)
def _body_of(
    closed: Any,
    condition: tuple[Any, int] | None,
    counts: tuple[int, int, int],
    rules: Rules,
    context: Hashable,
) -> Body | None:
    del context  # what the rules depend on
    if needs_x64(map(Type.of, (*closed.in_avals, *closed.out_avals))):
        return None
    if condition is not None:
        closed = _with_condition(closed, *condition)
    try:
        flat = inline(closed)
    except UnsupportedError:
        return None
    if flat.constants or needs_x64(flat.types):
        return None
    joined, whole = Joined[tuple[int, int]](), set[tuple[int, int]]()
    of_equation = rules(flat)
    for e, rule in zip(flat.equations, of_equation, strict=True):
        _see(e, rule, flat, joined, whole)
    goes_on = None
    if condition is not None:
        goes_on, *outputs = flat.result_values
        flat = dataclasses.replace(flat, outputs=tuple(outputs))
    # What an iteration hands on is what the next one gets.
    for v, w in _carried(flat, counts):
        for dim in range(len(flat.types[v].shape)):
            joined.join((v, dim), (w, dim))
    named: dict[tuple[int, int], dict[int, int]] = {}
    bad = set(map(joined.find, whole))
    for v, dim in list(joined):
        name = joined.find((v, dim))
        if v in named.setdefault(name, {}):
            bad.add(name)
        named[name][v] = dim
    axes = (
        _axis(flat, goes_on, counts, of_equation, dims)
        for name, dims in named.items()
        if name not in bad
    )
    axes = tuple(axis for axis in axes if axis is not None)
    return Body(flat, goes_on, counts, axes)


def _with_condition(body: Any, condition: Any, of_condition: int) -> Any:
    """A function of the constants of a condition and those of a body, then of what is
    carried: whether the loop goes on from there, and what is carried then."""
    carry = len(body.out_avals)
    inner, consts = condition.in_avals[:of_condition], body.in_avals[: -carry or None]

    def both(*values: Any) -> list[Any]:
        mine, carried = values[:of_condition], values[len(values) - carry :]
        goes_on = jaxpr_as_fun(condition)(*mine, *carried)
        return [*goes_on, *jaxpr_as_fun(body)(*values[of_condition:])]

    types = (*inner, *consts, *body.in_avals[len(body.in_avals) - carry :])
    return jax.make_jaxpr(both)(*(Type.of(t).struct() for t in types))


def _carried(flat: FlatJaxpr, counts: tuple[int, int, int]) -> list[tuple[int, int]]:
    """What is carried, and what takes its place in the next iteration."""
    consts, carry, _ = counts
    inputs = flat.inputs[consts : consts + carry]
    return list(zip(inputs, flat.result_values[:carry], strict=True))


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
            if label is None or not _SUMS.issuperset(_hows(rule, label)):
                whole.add((v, dim))
            else:
                joined.join((v, dim), together.setdefault(label, (v, dim)))


def _hows(rule: Rule | None, label: int) -> tuple[str | None, ...]:
    return () if rule is None else rule.reduced.get(label, ())


def _types(e: Equation, flat: FlatJaxpr) -> list[Type]:
    return [*flat.operand_types(e), *(flat.types[v] for v in e.outputs)]


def _axis(
    flat: FlatJaxpr,
    goes_on: int | None,
    counts: tuple[int, int, int],
    rules: Sequence[Rule | None],
    dims: Mapping[int, int],
) -> Axis | None:
    """An axis, if a body can be done in parts along it: along one label of each equation,
    with little that is done for all parts alike, and whole positions of all between its
    ends."""
    ends = {*flat.inputs, *flat.result_values, goes_on}.intersection(dims)
    sizes = {v: flat.types[v].shape[dim] for v, dim in dims.items()}
    length = math.gcd(*(sizes[v] for v in ends))
    if length < 2 or any(size % length for size in sizes.values()):
        return None
    labels = [set(_labels(e, r, dims)) for e, r in zip(flat.equations, rules, strict=True)]
    if max(map(len, labels), default=0) > 1:
        return None
    work = [costs.flops(e.origin) for e in flat.equations]
    again = sum(
        each
        for e, each, found in zip(flat.equations, work, labels, strict=True)
        if not found and e.name not in _BY_READERS
    )
    if again > _AGAIN * sum(work):
        return None
    hows = [
        _hows(rule, *found) if found else None
        for rule, found in zip(rules, labels, strict=True)
    ]
    sums = _sums(flat, counts, hows, dims)
    if sums is None:
        return None
    if goes_on is not None and not _goes_on_alike(flat, goes_on, counts, dims, sums):
        return None
    how = (None if v in dims else "add" if v in sums else SAME for v in flat.result_values)
    return Axis(dims, tuple(how))


def _goes_on_alike(
    flat: FlatJaxpr,
    goes_on: int,
    counts: tuple[int, int, int],
    dims: Mapping[int, int],
    sums: Collection[int],
) -> bool:
    """Whether a loop on parts does for each position what the loop on all does.

    A condition may ask for each position along the first dimensions of all that is carried,
    as `jax.vmap` makes it: then those where it says no stay as they are, and the loop goes
    on for the others. So a part may do without iterations that only others need. Else all
    parts must be told the same.
    """
    places = [dims.get(v) for v, _ in _carried(flat, counts)]
    if goes_on in dims:
        return all(at == dims[goes_on] for at in places)
    outer = len(flat.types[goes_on].shape)
    return goes_on not in sums and all(at is None or at >= outer for at in places)


def _sums(
    flat: FlatJaxpr,
    counts: tuple[int, int, int],
    hows: Sequence[Sequence[str | None] | None],
    dims: Mapping[int, int],
) -> frozenset[int] | None:
    """The values of which each part gives one summand: sums along the axis, and what is
    linear in them; None where anything else is made of such.

    What is carried is one if what is handed on is: gradients of weights, to which each
    iteration adds. Of their first values, one part has all, and the others nothing.

    Args:
      hows: of each equation that is cut, how the results that it reduces to are combined.
      dims: what is cut.
    """
    carried = _carried(flat, counts)
    sums: set[int] = set()
    while True:
        before = len(sums)
        for e, how in zip(flat.equations, hows, strict=True):
            if how is not None:
                sums.update(v for v, h in zip(e.outputs, how, strict=False) if h == "add")
            elif not sums.isdisjoint(e.reads):
                sums.update(e.outputs)
        sums.update(v for v, handed_on in carried if handed_on in sums)
        if len(sums) == before:
            break
    if not sums.isdisjoint(dims) or any(v in sums and w not in sums for v, w in carried):
        return None
    numbers = _same_numbers(flat, counts[0])
    for e, how in zip(flat.equations, hows, strict=True):
        if how is None and not _is_linear(e, sums, numbers, flat):
            return None
        if how is not None and not sums.isdisjoint(e.reads):
            return None
    return frozenset(sums)


def _same_numbers(flat: FlatJaxpr, consts: int) -> frozenset[int]:
    """Numbers that are the same in all iterations, and what is made of nothing else."""
    found = {v for v in flat.inputs[:consts] if not flat.types[v].shape}
    for e in flat.equations:
        if found.issuperset(e.reads):
            found.update(e.outputs)
    return frozenset(found)


def _is_linear(
    e: Equation, sums: Collection[int], numbers: Collection[int], flat: FlatJaxpr
) -> bool:
    """Whether an equation gives of a sum the sum of what it gives of each summand; or reads
    none."""
    read = [isinstance(v, int) and v in sums for v in e.inputs]
    if not any(read):
        return True
    dtypes = [t.dtype for t in _types(e, flat)]
    counts = any(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes)
    if not counts and not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        return False
    # Counts wrap around, which other types and quotients of them do not.
    if counts and (len(set(dtypes)) > 1 or e.name == "div"):
        return False
    if e.name in _WITH_ZEROS:
        read = [r or _is_zero(v) for r, v in zip(read, e.inputs, strict=True)]
    if e.name not in ("mul", "dot_general", "div"):
        return e.name in _LINEAR and all(read)
    # Times infinity, or divided by zero, a part that is zero becomes NaN though the sum is
    # none: so the other operand must be known. A number that is the same in all iterations
    # (a step of time, a rate) may be any: where it is infinite, so is the sum.
    if sum(read) != 1 or (e.name == "div" and not read[0]):
        return False
    other = e.inputs[read.index(False)]
    if not isinstance(other, Constant):
        return counts or other in numbers
    return bool(
        np.all(np.isfinite(other.value)) and (e.name != "div" or np.all(other.value))
    )


def _is_zero(v: int | Constant) -> bool:
    return isinstance(v, Constant) and not np.any(v.value)


def _labels(e: Equation, rule: Rule | None, cut: Mapping[int, int]) -> Iterator[int]:
    """The labels of what is cut of an equation's operands and results."""
    if rule is None:
        return
    labels = (*rule.operands, *rule.results)
    for v, each in zip((*e.inputs, *e.outputs), labels, strict=True):
        if isinstance(v, int) and v in cut and each[cut[v]] is not None:
            yield each[cut[v]]  # pyright: ignore[reportReturnType]


def rule_of(e: Equation, rules: Rules) -> Rule | None:
    """The rule of a loop: the labels are those of its body that operands have."""
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
        at = {axis.dims[v]: x for x, axis in enumerate(body.axes) if v in axis.dims}
        rank = len(flat.types[v].shape)
        labels.append((*[None] * outer, *(at.get(dim) for dim in range(rank))))
    operands, results = labels[: len(flat.inputs)], labels[len(flat.inputs) :]
    combined = {x: axis.how for x, axis in enumerate(body.axes) if any(axis.how)}
    read = {x for each in operands for x in each}
    rule = Rule(tuple(operands), tuple(results), combined)
    return without(rule, set(range(len(body.axes))) - read)


def on_part(
    e: Equation, operands: Sequence[Any], along: Along, low: Any, rules: Rules, apply: Apply
) -> Sequence[Any]:
    """A loop of parts: the iterations of a smaller body."""
    body = body_of(e.origin, rules)
    assert body is not None
    at, (dim, scale) = next((i, cut) for i, cut in enumerate(along.operands) if cut)
    v = body.flat.inputs[at]
    (axis,) = (axis for axis in body.axes if axis.dims.get(v) == dim - body.outer[at])
    length = body.flat.types[v].shape[axis.dims[v]] // scale
    part = operands[at].shape[dim] // scale
    iteration = _Iteration(body.flat, axis.dims, length, part, apply, low)
    consts, carry, _ = body.counts
    first, carried = operands[:consts], operands[consts : consts + carry]
    carried = [
        lax.select(low == 0, x, lax.full_like(x, 0)) if how == "add" else x
        for x, how in zip(carried, axis.how, strict=False)
    ]
    if body.condition is not None:
        return _while(e, body.condition, iteration, first, carried)

    def step(carried: Any, xs: Any) -> tuple[Any, Any]:
        results = iteration.run([*first, *carried, *xs])
        return tuple(results[:carry]), tuple(results[carry:])

    return scanned(e.origin, step, carried, operands[consts + carry :])


def _while(
    e: Equation,
    goes_on: int,
    iteration: "_Iteration",
    consts: Sequence[Any],
    carried: Sequence[Any],
) -> Sequence[Any]:
    """A loop of parts that goes on while its condition says so, perhaps for each position:
    that only the primitive itself takes."""
    given = (jnp.asarray(iteration.low), *consts)

    def made(outputs: tuple[int, ...]) -> tuple[Any, list[Any]]:
        """What gives some values of an iteration, and which constants it reads."""
        flat = live(dataclasses.replace(iteration.flat, outputs=outputs))
        read = {*outputs, *(v for e in flat.equations for v in e.reads)}
        which = [v in read for v in flat.inputs[: len(consts)]]
        part = dataclasses.replace(iteration, flat=flat)

        def function(low: Any, *operands: Any) -> list[Any]:
            some = iter(operands)
            every = [next(some) if w else None for w in which]
            return dataclasses.replace(part, low=low).run([*every, *some])

        mine = [given[0], *(x for x, w in zip(consts, which, strict=True) if w)]
        structs = [Type.of(jax.typeof(x)).struct() for x in (*mine, *carried)]
        return jax.make_jaxpr(function)(*structs), mine

    condition, of_condition = made((goes_on,))
    body, of_body = made(iteration.flat.result_values)
    return bind(
        e.origin,
        (*of_condition, *of_body, *carried),
        cond_jaxpr=condition,
        cond_nconsts=len(of_condition),
        body_jaxpr=body,
        body_nconsts=len(of_body),
    )


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
            # What is a sum may come wider than it is.
            made = [
                x
                if x.dtype == flat.types[v].dtype
                else lax.convert_element_type(x, flat.types[v].dtype)
                for x, v in zip(made, e.outputs, strict=True)
            ]
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
