"""Values as parts along their first axis, and small jaxprs that make and join parts."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jturnip.frontend import hints
from jturnip.frontend.values import Atom, Constant, Equation, Type, bind


@dataclass(eq=False, slots=True)
class Made:
    """An equation as it is done row by row."""

    equation: Equation
    operands: tuple["Value", ...]
    # Which of the operands have those rows; the types of the results.
    cut: tuple[bool, ...]
    types: tuple[Type, ...]


@dataclass(eq=False, slots=True)
class Stack:
    """A value cut after every `rows` rows.

    At least one of `parts`, `whole` and `made` is known; others are made when asked for.
    """

    type: Type
    rows: int
    parts: tuple[int, ...] | None = None
    whole: int | None = None
    # What makes it, where that is not there until somebody asks.
    made: Made | None = None

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First and past last row of each part."""
        return bounds(self.type.shape[0], self.rows)


@dataclass(eq=False, slots=True)
class Spread:
    """A broadcast whose rows are all the same, not there until asked for."""

    equation: Equation
    operand: Atom
    type: Type
    # Number of rows → the value that has so many.
    values: dict[int, int] = field(default_factory=dict)


Value: TypeAlias = int | Constant | Stack | Spread


def bounds(length: int, rows: int) -> list[tuple[int, int]]:
    """Where an array of `length` rows is cut."""
    return [(at, min(at + rows, length)) for at in range(0, length, rows)]


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


def asks_for_each(eqn: Any) -> bool:
    """Whether it is a `while` whose condition says for each of several whether it goes on,
    as `vmap` makes it."""
    if eqn.primitive.name != "while":
        return False
    return bool(eqn.params["cond_jaxpr"].out_avals[0].shape)


def as_one(eqn: Any) -> Any:
    """A jaxpr that does what a `while` does that `asks_for_each`: with one that goes on
    while any does, and hands on the others as they are."""
    closed, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    goes_on, iterate = map(jax.extend.core.jaxpr_as_fun, (closed, body))
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]

    def function(*operands: Any) -> Any:
        first, operands = operands[:of_condition], operands[of_condition:]
        consts, carried = operands[:of_body], operands[of_body:]

        def step(carried: Any) -> Any:
            (on,) = goes_on(*first, *carried)
            dims = tuple(range(on.ndim))
            return tuple(
                lax.select(lax.broadcast_in_dim(on, x.shape, dims), new, x)
                for new, x in zip(iterate(*consts, *carried), carried, strict=True)
            )

        any_goes_on = lambda carried: jnp.any(goes_on(*first, *carried)[0])
        return lax.while_loop(any_goes_on, step, tuple(carried))

    return jax.make_jaxpr(function)(*(Type.of(v.aval).struct() for v in eqn.invars))


@functools.lru_cache(maxsize=1024)
def copying(t: Type) -> Any:
    """One equation that copies."""
    return jax.make_jaxpr(jnp.copy)(t.struct())


@functools.lru_cache(maxsize=1024)
def joining(parts: tuple[Type, ...], dim: int = 0) -> Any:
    """Parts along a dimension to the whole; a copy of one that is all of it."""
    if len(parts) == 1:
        return copying(parts[0])
    join = lambda *arrays: lax.concatenate(arrays, dim)
    return jax.make_jaxpr(join)(*(t.struct() for t in parts))


@functools.lru_cache(maxsize=1024)
def cutting(t: Type, dim: int, length: int) -> Any:
    """The whole, and a first position along a dimension, to a part of it; one equation,
    since no position is negative."""
    cut = lambda array, start: lax.dynamic_slice_in_dim(array, start, length, dim)
    return jax.make_jaxpr(cut)(t.struct(), jax.ShapeDtypeStruct((), np.uint32))


@functools.lru_cache(maxsize=1024)
def cutting_at(t: Type, dim: int, low: int, high: int) -> Any:
    """The whole to some positions of it along a dimension."""
    cut = lambda array: lax.slice_in_dim(array, low, high, axis=dim)
    return jax.make_jaxpr(cut)(t.struct())


@functools.lru_cache(maxsize=1024)
def taking(t: Type) -> Any:
    """The only row of a part."""
    return jax.make_jaxpr(lambda array: lax.squeeze(array, (0,)))(t.rows(1).struct())


@functools.lru_cache(maxsize=1024)
def stacking(t: Type) -> Any:
    """A value to a part with one row."""
    return jax.make_jaxpr(lambda array: lax.expand_dims(array, (0,)))(t.struct())


def as_while(eqn: Any, consts: int, carries: int) -> Any:
    """A jaxpr that does what the scan `eqn` does with a `while`, one row at a time.

    The rows that an iteration reads and writes are those of its number.
    """
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    # Rows that are written in host memory would be put into a stack on the device.
    closed = eqn.params["jaxpr"]
    closed = hints.without_moves(closed) if hints.has_moves(eqn) else closed
    body = jax.extend.core.jaxpr_as_fun(closed)

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
