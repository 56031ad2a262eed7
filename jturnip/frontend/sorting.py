"""Sorts of long rows in tiles: what is done with two tiles.

A row is sorted by comparing tiles of it, two at a time: the smaller half of both becomes
the first of the two, the rest the second. Which two are compared, and when, is Batcher's
merge exchange, a network that sorts whatever there is (D. E. Knuth, The Art of Computer
Programming, volume 3, algorithm 5.2.2 M; section 5.3.4, exercise 38, for tiles instead of
numbers). The last tile may be shorter: what it lacks is larger than all there is.

XLA sorts a row at once.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jturnip.frontend.rules import InOrder
from jturnip.frontend.values import Equation, FlatJaxpr, Type


SORT = "sort"


def row_bytes(e: Equation, types: Sequence[Type]) -> int:
    """Bytes of a row that is sorted, with all that is sorted with it."""
    return types[0].shape[e.origin.params["dimension"]] * sum(
        t.dtype.itemsize for t in types
    )


def rule_in_order(types: Sequence[Type]) -> InOrder:
    """The labels of a sort of operands of these types: its dimensions."""
    labels = tuple(range(len(types[0].shape)))
    return InOrder((labels,) * len(types), (labels,) * len(types))


@functools.cache
def network(count: int) -> tuple[tuple[int, int], ...]:
    """Which of `count` tiles are compared, one pair after the other: the first of a pair
    becomes the smaller."""
    found = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            found += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            q, r, d = q // 2, p, q - p
        p //= 2
    return tuple(found)


def last_of(tile: int, pairs: Sequence[tuple[int, int]]) -> int | None:
    """The last comparison of a tile; None where there is none."""
    return max((t for t, pair in enumerate(pairs) if tile in pair), default=None)


def position_of(e: Equation, flat: FlatJaxpr) -> int | None:
    """Which operand of a sort tells the positions in a row, so that what is equal stays in
    its order; the number of operands where one more must. None where there is a single
    operand: its equals are alike, but for zeros of either sign.
    """
    if len(e.inputs) == 1:
        return None
    dim, keys = e.origin.params["dimension"], e.origin.params["num_keys"]
    n = flat.operand_types(e)[0].shape[dim]
    iotas = {
        each.outputs[0]
        for each in flat.equations
        if each.name == "iota"
        and each.origin.params["dimension"] == dim
        # Those of few bits, and of rounded numbers, tell no positions.
        and has_positions(each.origin.params["dtype"], n)
    }
    operands = enumerate(e.inputs)
    found = (at for at, v in operands if at >= keys and type(v) is int and v in iotas)
    return next(found, len(e.inputs))


def has_positions(dtype: Any, n: int) -> bool:
    """Whether the positions of a row of `n` numbers are different numbers of a dtype."""
    return jnp.issubdtype(dtype, jnp.integer) and n - 1 <= int(jnp.iinfo(dtype).max)


def several(e: Equation, flat: FlatJaxpr) -> int:
    """How many values are sorted together."""
    return max(len(e.inputs), (position_of(e, flat) or 0) + 1)


def positions(t: Type, dim: int, begin: Type) -> Any:
    """The positions of a tile of this type along a dimension, from the first on, as a
    jaxpr of that."""

    def function(first: Any) -> Any:
        found = lax.broadcasted_iota(np.uint32, t.shape, dim)
        return found + lax.convert_element_type(first, np.uint32)

    return jax.make_jaxpr(function)(begin.struct())


def compared(e: Equation, position: int | None, *types: Type) -> Any:
    """The smaller and the larger of what two tiles are, as a jaxpr of these.

    Args:
      e: the sort.
      position: which operand tells the positions (`position_of`).
      *types: of the operands of one tile, and of the same of the other.
    """
    dim, keys = e.origin.params["dimension"], e.origin.params["num_keys"]
    half = len(types) // 2
    middle = types[0].shape[dim]
    order = list(range(half))
    if position is not None:
        order.remove(position)
        order.insert(keys, position)
        keys += 1

    def function(*operands: Any) -> Any:
        sides = zip(operands[:half], operands[half:], strict=True)
        joined = [lax.concatenate(each, dim) for each in sides]
        found = lax.sort([joined[k] for k in order], dim, is_stable=False, num_keys=keys)
        ordered = dict(zip(order, found, strict=True))
        cut = functools.partial(lax.slice_in_dim, axis=dim)
        values = [ordered[k] for k in range(half)]
        first = [cut(x, 0, middle) for x in values]
        return [*first, *(cut(x, middle, x.shape[dim]) for x in values)]

    return jax.make_jaxpr(function)(*(t.struct() for t in types))
