"""A pass: what is shifted, read by its positions.

A stencil adds up an array and the same array rolled by one. What is rolled is put together
of two slices, and what is padded has a border: along that axis neither can be done in
parts. But each position of the result has its place in the array, and what is read by
positions can be, of an array that is there as a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from jturnip.frontend.halos import is_one_image
from jturnip.frontend.results import with_others
from jturnip.frontend.values import Atom, Constant, Equation, FlatJaxpr, Type


_SHIFTS = frozenset(["concatenate", "pad"])
# What takes less than this share of what there is stays as it is.
_LARGE = 1 / 16
# What has so many positions along a dimension has many.
_LONG = 16
# Of so many pieces something is put together at most.
_PIECES = 4


def shifted(flat: FlatJaxpr, arena: int) -> FlatJaxpr:
    """The function with large shifts of arrays as gathers; itself where there are none."""
    written = {v: e for e in flat.equations for v in e.outputs}
    gathers = [
        _pieces(e, flat, written) or _border(e, flat)
        if e.name in _SHIFTS and flat.types[e.outputs[0]].nbytes > arena * _LARGE
        else None
        for e in flat.equations
    ]
    return with_others(flat, gathers)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Positions of an array along one dimension."""

    source: int
    start: int
    stop: int


def _pieces(
    e: Equation, flat: FlatJaxpr, written: Mapping[int, Equation]
) -> tuple[tuple[Atom, ...], Any] | None:
    """The array of which pieces are put together along a dimension, and how."""
    if e.name != "concatenate" or not 2 <= len(e.inputs) <= _PIECES:
        return None
    dim = e.origin.params["dimension"]
    if dim != _first_long(flat.types[e.outputs[0]]):
        return None
    pieces = [_piece(v, dim, flat, written) for v in e.inputs]
    found = [p for p in pieces if p is not None]
    if len(found) < len(pieces) or len({p.source for p in found}) > 1:
        return None
    source = found[0].source

    def places(at: Any) -> Any:
        """Where in the array each position is."""
        place, end = at, 0
        for p in found:
            place = lax.select(at >= end, at + (p.start - end), place)
            end += p.stop - p.start
        return place

    t = flat.types[source]
    length = sum(p.stop - p.start for p in found)
    gather = lambda x: _rows(x, dim, places(_positions(length)))
    return (source,), jax.make_jaxpr(gather)(t.struct())


def _piece(
    v: Any, dim: int, flat: FlatJaxpr, written: Mapping[int, Equation]
) -> _Piece | None:
    if isinstance(v, Constant):
        return None
    e, shape = written.get(v), flat.types[v].shape
    if e is None or e.name != "slice" or isinstance(e.inputs[0], Constant):
        return _Piece(v, 0, shape[dim])
    whole, params = flat.types[e.inputs[0]].shape, e.origin.params
    steps = params["strides"] or (1,) * len(shape)
    along = [d for d in range(len(shape)) if shape[d] != whole[d]]
    if along not in ([], [dim]) or any(step != 1 for step in steps):
        return _Piece(v, 0, shape[dim])
    start = params["start_indices"][dim]
    return _Piece(e.inputs[0], start, start + shape[dim])


def _border(e: Equation, flat: FlatJaxpr) -> tuple[tuple[Atom, ...], Any] | None:
    """The array that a border of one number is put around, with that number, and how."""
    if e.name != "pad" or isinstance(e.inputs[0], Constant):
        return None
    config = e.origin.params["padding_config"]
    if any(low < 0 or high < 0 or inner for low, high, inner in config):
        return None
    t, of_border = flat.operand_types(e)
    dim = _first_long(t)
    if dim is None or not any(config[dim]) or is_one_image(t):  # that has halos
        return None
    low, high, _ = config[dim]
    others = [(0, 0, 0) if d == dim else each for d, each in enumerate(config)]

    def padded(x: Any, border: Any) -> Any:
        x = lax.pad(x, border, others) if any(map(any, others)) else x
        places = _positions(low + x.shape[dim] + high) - low
        inside = (places >= 0) & (places < x.shape[dim])
        found = _rows(x, dim, lax.clamp(0, places, x.shape[dim] - 1))
        spread = lax.broadcast_in_dim(inside[:, 0], found.shape, (dim,))
        return lax.select(spread, found, lax.broadcast_in_dim(border, found.shape, ()))

    return e.inputs, jax.make_jaxpr(padded)(t.struct(), of_border.struct())


def _first_long(t: Type) -> int | None:
    """The first dimension that has many positions. One that can be cut is enough, and what
    is read of an array along the first is read fast."""
    return next((d for d, n in enumerate(t.shape) if n >= _LONG), None)


def _positions(length: int) -> Any:
    return lax.broadcasted_iota(np.int32, (length, 1), 0)


def _rows(x: Any, dim: int, places: Any) -> Any:
    """The positions of an array along a dimension that are at some places."""
    others = tuple(d for d in range(x.ndim) if d != dim)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=others, collapsed_slice_dims=(dim,), start_index_map=(dim,)
    )
    sizes = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, places, numbers, slice_sizes=sizes, mode=mode)
