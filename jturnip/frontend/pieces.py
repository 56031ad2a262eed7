"""A pass: reads and writes at places that are known, as slices and as pieces.

What is written into the middle of an array, `x.at[1:-1].set(y)`, is one array put together
of three: what is before, the new, and what is after. So parts of it can be made of parts,
which nothing says of a scatter to positions that are an array of their own. Where the
positions are numbers in the function's text, or made of such, they are known here.

A row of which a row is made, `x.at[0].set(2 * x[1] - x[2])`, keeps its dimension of one
position: it belongs to the first part of the array, and to no other.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax

from jturnip.frontend import stacks
from jturnip.frontend.builder import Builder
from jturnip.frontend.costs import ELEMENTWISE, RENAMING
from jturnip.frontend.known import known
from jturnip.frontend.results import live
from jturnip.frontend.values import Atom, Constant, Equation, FlatJaxpr, Type


_REPLACING = frozenset(["scatter", "dynamic_update_slice"])
_COMBINING = {
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-mul": lax.mul,
    "scatter-min": lax.min,
    "scatter-max": lax.max,
}
_READING = frozenset("dynamic_slice gather split".split())
# What is done in pieces where the places are known.
AT_PLACES = _REPLACING | _COMBINING.keys() | _READING
# What an equation of one result reads instead, and a jaxpr of that.
_Other: TypeAlias = tuple[tuple[Atom, ...], Any]
# Makes a value of what is read for it.
_Make: TypeAlias = Callable[[Sequence[Any]], Any]
# Of no more equations than so many.
_MOST_MADE = 64


def with_pieces(flat: FlatJaxpr, least: int) -> FlatJaxpr:
    """The function with slices for what is read of arrays of more than `least` bytes at
    places that it gives as numbers, and with pieces put together for what is written there;
    itself where there is none."""
    written = {v: e for e in flat.equations for v in e.outputs}
    found = {
        i: others
        for i, e in enumerate(flat.equations)
        if e.name in AT_PLACES
        and flat.operand_types(e)[0].nbytes > least
        and (others := _pieces(e, flat, written)) is not None
    }
    if not found:
        return flat
    builder = Builder.of(dataclasses.replace(flat, equations=()))
    for i, e in enumerate(flat.equations):
        if i not in found:
            builder.equations.append(e)
            continue
        for v, other in zip(e.outputs, found[i], strict=True):
            builder.instead(dataclasses.replace(e, outputs=(v,)), *other)
    return live(builder.finish(flat.inputs, flat.outputs, flat.slices))


def _pieces(
    e: Equation, flat: FlatJaxpr, written: Mapping[int, Equation]
) -> list[_Other] | None:
    """For each result what is read instead, and a jaxpr of that."""
    types = flat.operand_types(e)
    if isinstance(e.inputs[0], Constant):
        return None
    if e.name == "split":
        dim, sizes = e.origin.params["axis"], e.origin.params["sizes"]
        ends = itertools.accumulate(sizes)
        bounds = [(end - n, end) for end, n in zip(ends, sizes, strict=True)]
        return [(e.inputs, stacks.cutting_at(types[0], dim, *each)) for each in bounds]
    if e.name in _READING:
        return _read(e, types, flat, written)
    return _written(e, types, flat, written)


def _read(
    e: Equation,
    types: Sequence[Type],
    flat: FlatJaxpr,
    written: Mapping[int, Equation],
) -> list[_Other] | None:
    """A slice, for what is read of one window."""
    window = _window(e, types, flat, written)
    if window is None:
        return None
    shape = flat.types[e.outputs[0]].shape
    read = lambda array: lax.reshape(lax.slice(array, *window), shape)
    return [(e.inputs[:1], jax.make_jaxpr(read)(types[0].struct()))]


def _window(
    e: Equation,
    types: Sequence[Type],
    flat: FlatJaxpr,
    written: Mapping[int, Equation],
) -> tuple[Sequence[int], Sequence[int]] | None:
    """Where the window of an array that is read begins and ends, if it is one."""
    whole, result = types[0].shape, flat.types[e.outputs[0]]
    if e.name == "gather":
        numbers, shape = (
            e.origin.params["dimension_numbers"],
            e.origin.params["slice_sizes"],
        )
        if numbers.operand_batching_dims or types[1].shape[:-1] != ():
            return None
        at = known(e.inputs[1], flat, written)
        starts = None if at is None else _placed(numbers.start_index_map, at, len(whole))
    else:
        shape, starts = (
            result.shape,
            _starts(e.inputs[1:], whole, result.shape, flat, written),
        )
    if starts is None or not _are_inside(starts, shape, whole):
        return None
    return starts, [start + n for start, n in zip(starts, shape, strict=True)]


def _written(
    e: Equation,
    types: Sequence[Type],
    flat: FlatJaxpr,
    written: Mapping[int, Equation],
) -> list[_Other] | None:
    """What is written in one window with what is around it, put together."""
    whole = types[0].shape
    if e.name == "dynamic_update_slice":
        update, shape = e.inputs[1], types[1].shape
        starts = _starts(e.inputs[2:], whole, shape, flat, written)
    else:
        numbers, update = e.origin.params["dimension_numbers"], e.inputs[2]
        if numbers.operand_batching_dims or types[1].shape[:-1] != ():
            return None
        left = iter(types[2].shape)
        gone = numbers.inserted_window_dims
        shape = tuple(1 if d in gone else next(left) for d in range(len(whole)))
        at = known(e.inputs[1], flat, written)
        dims = numbers.scatter_dims_to_operand_dims
        starts = None if at is None else _placed(dims, at, len(whole))
    if starts is None or not _are_inside(starts, shape, whole) or shape == whole:
        return None
    bounds = [(start, start + n) for start, n in zip(starts, shape, strict=True)]

    made_of = _MadeOf(shape, flat, written)
    make = made_of.made(update)

    def together(array: Any, *read: Any) -> Any:
        made = make(read)
        if e.name not in _REPLACING:
            old = lax.slice(array, starts, [b for _, b in bounds])
            made = _COMBINING[e.name](old, made)
        # From what is written outwards: of one dimension more, each time, all is there.
        for dim in reversed(range(len(whole))):
            all_of = [(0, n) for n in whole[dim + 1 :]]
            piece = lambda *of, dim=dim, all_of=all_of: lax.slice(
                array, *zip(*bounds[:dim], of, *all_of, strict=True)
            )
            first, last = bounds[dim]
            before = [piece(0, first)] if first > 0 else []
            after = [piece(last, whole[dim])] if last < whole[dim] else []
            if before or after:
                made = lax.concatenate([*before, made, *after], dim)
        return made

    operands = e.inputs[0], *made_of.operands
    structs = (flat.type_of(v).struct() for v in operands)
    return [(operands, jax.make_jaxpr(together)(*structs))]


class _MadeOf:
    """What a value is made of, with all dimensions of the window that it is written to."""

    def __init__(
        self, shape: tuple[int, ...], flat: FlatJaxpr, written: Mapping[int, Equation]
    ):
        self._shape = shape
        self._flat = flat
        self._written = written
        self._left = _MOST_MADE
        # What is read for it.
        self.operands: list[Atom] = []

    def made(self, v: Atom) -> _Make:
        """Makes it of the operands: of itself where nothing else will do."""
        make = self._as_shaped(v) if self._flat.type_of(v).shape else None
        if make is None:
            self.operands.clear()
            make = self._of_operand(v, lambda x: lax.reshape(x, self._shape))
        return make

    def _of_operand(self, v: Atom, make: Callable[[Any], Any]) -> _Make:
        at = len(self.operands)
        self.operands.append(v)
        return lambda read: make(read[at])

    def _as_shaped(self, v: Atom) -> _Make | None:
        """Makes it without what has fewer dimensions; None where there is no such way."""
        flat, shape = self._flat, self._flat.type_of(v).shape
        self._left -= 1
        if shape in ((), self._shape):
            return self._of_operand(v, lambda x: x)
        e = None if isinstance(v, Constant) else self._written.get(v)
        if e is None or self._left < 0:
            return None
        types = flat.operand_types(e)
        if e.name in RENAMING and types[0].shape == self._shape:
            return self._of_operand(e.inputs[0], lambda x: x)
        if e.name == "broadcast_in_dim" and types[0].shape == ():
            return self._of_operand(e.inputs[0], lambda x: lax.broadcast(x, self._shape))
        if e.name in _READING - {"split"}:
            window = _window(e, types, flat, self._written)
            if window is None or _shape_of(*window) != self._shape:
                return None
            return self._of_operand(e.inputs[0], lambda x: lax.slice(x, *window))
        if e.name not in ELEMENTWISE:
            return None
        makes = [make for operand in e.inputs if (make := self._as_shaped(operand))]
        if len(makes) < len(e.inputs):
            return None
        return lambda read: e.bind([make(read) for make in makes])[0]


def _shape_of(starts: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - start for start, end in zip(starts, ends, strict=True))


def _starts(
    positions: Sequence[Atom],
    whole: Sequence[int],
    shape: Sequence[int],
    flat: FlatJaxpr,
    written: Mapping[int, Equation],
) -> list[int] | None:
    """Where a window of a shape begins that stays inside."""
    found = [x for v in positions if (x := known(v, flat, written)) is not None]
    if len(found) < len(positions):
        return None
    sizes = zip(found, whole, shape, strict=True)
    return [min(max(int(x), 0), n - m) for x, n, m in sizes]


def _placed(dims: Sequence[int], at: Any, count: int) -> list[int]:
    """Numbers for some of so many dimensions; 0 for the others."""
    found = [0] * count
    for dim, x in zip(dims, at, strict=True):
        found[dim] = int(x)
    return found


def _are_inside(starts: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> bool:
    sizes = zip(starts, shape, whole, strict=True)
    return all(0 <= start and start + n <= size for start, n, size in sizes)
