"""Values as parts along their first axis, and the equations that can work on parts.

A scan that is cut leaves its stacked results as parts, and arrays in host memory can be
read in parts. What is computed from parts row by row stays in parts: an optimizer's update
of a stack of weights never holds the stack. Anything else asks for the value in one piece.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax

from jturnip.frontend.costs import ELEMENTWISE
from jturnip.frontend.tables import Sparse
from jturnip.frontend.values import Constant, Type, bind


@dataclass(eq=False, slots=True)
class Stack:
    """A value cut after every `rows` rows.

    At least one of `parts` and `whole` is known; the other is made when asked for.
    """

    type: Type
    rows: int
    parts: tuple[int, ...] | None = None
    whole: int | None = None

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First and past last row of each part."""
        return bounds(self.type.shape[0], self.rows)


@dataclass(eq=False, slots=True)
class Spread:
    """A broadcast whose rows are all the same, not computed until asked for."""

    eqn: Any
    operand: int | Constant
    calls: tuple[Any, ...]
    type: Type
    # Number of rows → the value that has so many.
    values: dict[int, int] = field(default_factory=dict)


Value: TypeAlias = int | Constant | Stack | Spread | Sparse


def bounds(length: int, rows: int) -> list[tuple[int, int]]:
    """Where an array of `length` rows is cut."""
    return [(at, min(at + rows, length)) for at in range(0, length, rows)]


# Work along the axes that one of these params names, each other index by itself.
_ALONG = {
    "argmax": "axes",
    "argmin": "axes",
    "cumlogsumexp": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumprod": "axis",
    "cumsum": "axis",
    "rev": "dimensions",
    "squeeze": "dimensions",
    "concatenate": "dimension",
}
_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": lax.add,
    "reduce_prod": lax.mul,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
    "reduce_xor": lax.bitwise_xor,
}


def combiner(eqn: Any) -> Callable[[Any, Any], Any] | None:
    """How to put together what a reduction over the first axis makes of two parts."""
    found = _REDUCTIONS.get(eqn.primitive.name)
    return found if found is not None and 0 in eqn.params["axes"] else None


def works_by_rows(eqn: Any, operands: Sequence[Value]) -> bool:
    """Whether rows of the result come from the same rows of the stacks among `operands`,
    which are at least one."""
    stacks = [v for v in operands if isinstance(v, Stack)]
    if len(eqn.outvars) != 1 or len({(s.type.shape[0], s.rows) for s in stacks}) != 1:
        return False
    name, params = eqn.primitive.name, eqn.params
    length = stacks[0].type.shape[0]
    shapes = [v.aval.shape for v in eqn.invars]
    if name in ELEMENTWISE:
        return all(not s or s == eqn.outvars[0].aval.shape for s in shapes)
    if name in _ALONG:
        along = params[_ALONG[name]]
        return 0 not in (along if isinstance(along, tuple | list) else (along,))
    if name in _REDUCTIONS:
        return 0 not in params["axes"]
    if name == "transpose":
        return params["permutation"][0] == 0
    if name == "reshape":
        return params["dimensions"] is None and params["new_sizes"][:1] == (length,)
    if name == "broadcast_in_dim":
        leads = params["broadcast_dimensions"][:1] == (0,)
        return leads and params["shape"][:1] == (length,) and len(shapes) == 1
    if name == "dot_general":
        (contracting, _), batch = params["dimension_numbers"]
        if batch[0]:
            return batch[0][0] == 0 and batch[1][0] == 0
        return isinstance(operands[0], Stack) and len(stacks) == 1 and 0 not in contracting
    return False


def cut_operands(eqn: Any, operands: Sequence[Value]) -> list[bool]:
    """Which operands of an equation that works by rows have those rows."""
    if eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][1][0]:
        return [True, False]
    return [bool(v.aval.shape) for v in eqn.invars]


def on_rows(eqn: Any, cut: Sequence[bool], rows: int) -> Any:
    """A jaxpr that does what `eqn` does, on `rows` rows of its `cut` operands."""
    params: dict[str, Any] = {}
    if eqn.primitive.name == "reshape":
        params["new_sizes"] = (rows, *eqn.params["new_sizes"][1:])
    if eqn.primitive.name == "broadcast_in_dim":
        params["shape"] = (rows, *eqn.params["shape"][1:])
    types = [Type.of(v.aval) for v in eqn.invars]
    structs = [(t.rows(rows) if c else t).struct() for t, c in zip(types, cut, strict=True)]
    return jax.make_jaxpr(lambda *operands: bind(eqn, operands, **params))(*structs)


def rows_taken(eqn: Any) -> tuple[tuple[int, int], bool]:
    """First and past last row that a `slice` takes, none left out between them, or no row;
    and whether it also takes a part of other axes."""
    params = eqn.params
    shape = eqn.invars[0].aval.shape
    start, stop = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(shape)
    if not shape or strides[0] != 1:
        return (0, 0), False
    aside = any(
        (a, b, s) != (0, n, 1)
        for a, b, s, n in zip(start[1:], stop[1:], strides[1:], shape[1:], strict=True)
    )
    return (start[0], stop[0]), aside


def sliced_aside(eqn: Any, rows: int) -> Any:
    """What a `slice` takes of the other axes, once it has its rows."""
    changed = {
        "start_indices": (0, *eqn.params["start_indices"][1:]),
        "limit_indices": (rows, *eqn.params["limit_indices"][1:]),
    }
    struct = Type.of(eqn.invars[0].aval).rows(rows).struct()
    return jax.make_jaxpr(lambda array: bind(eqn, (array,), **changed))(struct)


# -- small jaxprs of our own -----------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def copying(t: Type) -> Any:
    """One equation that copies."""
    return jax.make_jaxpr(jnp.copy)(t.struct())


@functools.lru_cache(maxsize=1024)
def joining(parts: tuple[Type, ...], dim: int = 0) -> Any:
    """Parts along a dimension to the whole."""
    join = lambda *arrays: lax.concatenate(arrays, dim)
    return jax.make_jaxpr(join)(*(t.struct() for t in parts))


@functools.lru_cache(maxsize=1024)
def cutting(t: Type, rows: int) -> Any:
    """The whole, and a first row, to a part of it."""
    cut = lambda array, start: lax.dynamic_slice_in_dim(array, start, rows)
    start = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.make_jaxpr(cut)(t.struct(), start)


@functools.lru_cache(maxsize=1024)
def taking(t: Type) -> Any:
    """The only row of a part."""
    return jax.make_jaxpr(lambda array: lax.squeeze(array, (0,)))(t.rows(1).struct())


@functools.lru_cache(maxsize=1024)
def stacking(t: Type) -> Any:
    """A value to a part with one row."""
    return jax.make_jaxpr(lambda array: lax.expand_dims(array, (0,)))(t.struct())


def combining(eqn: Any, partial: Type) -> tuple[Any, Any, Any]:
    """How to add up what a reduction makes of parts: widen one, combine two, narrow.

    Sums of 16-bit numbers are added up in float32, as XLA does inside a reduction.
    """
    short = jnp.issubdtype(partial.dtype, jnp.floating) and partial.dtype.itemsize < 4
    wide = jnp.dtype(jnp.float32) if short else partial.dtype
    combine: Any = combiner(eqn)
    widened = Type(partial.shape, wide, partial.weak_type).struct()
    convert = lambda dtype: lambda x: lax.convert_element_type(x, dtype)
    return (
        jax.make_jaxpr(convert(wide))(partial.struct()) if short else None,
        jax.make_jaxpr(combine)(widened, widened),
        jax.make_jaxpr(convert(partial.dtype))(widened) if short else None,
    )


def as_while(eqn: Any, consts: int, carries: int) -> Any:
    """A jaxpr that does what the scan `eqn` does with a `while`, one row at a time.

    The rows that an iteration reads and writes are those of its number.
    """
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    body = jax.extend.core.jaxpr_as_fun(eqn.params["jaxpr"])

    def run(*operands: Any) -> list[Any]:
        fixed, rest = operands[:consts], operands[consts:]
        init, stacks = rest[:carries], rest[carries:]
        results = [Type.of(v.aval) for v in eqn.outvars[carries:]]
        begun = [lax.full(t.shape, 0, t.dtype) for t in results]

        def step(state: Any) -> Any:
            number, carry, written = state
            row = length - 1 - number if reverse else number
            rows = [lax.dynamic_index_in_dim(s, row, keepdims=False) for s in stacks]
            out = body(*fixed, *carry, *rows)
            put = lambda stack, y: lax.dynamic_update_index_in_dim(stack, y, row, 0)
            written = [put(s, y) for s, y in zip(written, out[carries:], strict=True)]
            return number + 1, list(out[:carries]), written

        start = (jnp.int32(0), list(init), begun)
        _, carry, written = lax.while_loop(lambda state: state[0] < length, step, start)
        return [*carry, *written]

    structs = [Type.of(v.aval).struct() for v in eqn.invars]
    return jax.make_jaxpr(run)(*structs)


def shortened(eqn: Any, length: int, structs: Sequence[Any]) -> Any:
    """A jaxpr with one equation: the scan `eqn` with `length` iterations."""
    run = lambda *operands: bind(eqn, operands, length=length)
    return jax.make_jaxpr(run)(*structs)
