"""Tables in host memory of which a function reads or changes some rows only.

An embedding is read by a `gather` of rows and changed by a `scatter-add` of rows. Where the
table is in host memory, so are its rows: the host takes them out or adds to them, and only
they travel. Such an equation is driven, like a loop: it stands between two plans.

The gradient of a gather is a `scatter-add` to zeros. It stays what it is, rows and their
numbers (`Sparse`), through scaling and conversion, until something asks for the whole or
for a part of it.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jturnip.frontend.values import Constant, Type


# Equations that may be done by the host.
HOST_READS = frozenset(("gather", "dynamic_slice"))
HOST_WRITES = frozenset(("scatter-add", "scatter_add"))


@dataclass(eq=False, slots=True)
class Sparse:
    """A table of zeros with rows added to it."""

    # The equation that added them, and the calls around it.
    eqn: Any
    calls: tuple[Any, ...]
    type: Type
    # Integers [..., 1], and rows [..., *the table's other axes].
    indices: int | Constant
    updates: int
    # What the zeros have become, where they were scaled by what may not be finite.
    base: int | None = None
    # The whole of it, and parts of so many rows, once something asked for them.
    whole: int | None = None
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)


def takes_rows(eqn: Any) -> bool:
    """Whether a `gather` or `dynamic_slice` takes whole rows, and not most of them."""
    table, result = eqn.invars[0].aval, eqn.outvars[0].aval
    if not table.shape or 2 * result.size > table.size:
        return False
    if eqn.primitive.name == "dynamic_slice":
        return eqn.params["slice_sizes"][1:] == table.shape[1:]
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    return (
        tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and not numbers.operand_batching_dims
        and tuple(sizes) == (1, *table.shape[1:])
    )


def adds_rows(eqn: Any) -> bool:
    """Whether a `scatter-add` adds whole rows, and to fewer than there are."""
    table, _, updates = (v.aval for v in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    rows = len(updates.shape) - len(table.shape) + 1
    return (
        tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and tuple(numbers.inserted_window_dims) == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.update_window_dims) == tuple(range(rows, len(updates.shape)))
        and updates.shape[rows:] == table.shape[1:]
    )


@functools.lru_cache(maxsize=256)
def scattering(
    mode: Any, length: int, part: Type, indices: Type, updates: Type, based: bool
) -> Any:
    """A jaxpr: indices, updates and a first row to `part.shape[0]` rows of a sparse table.

    Args:
      mode: what the equation does with indices outside.
      length: rows of the whole table.
      part, indices, updates: types of the result and of the first two operands.
      based: whether a fourth operand is what rows that nothing is added to hold.
    """

    def scatter(indices: Any, updates: Any, start: Any, *base: Any) -> Any:
        if mode == lax.GatherScatterMode.CLIP:
            indices = jnp.clip(indices, 0, length - 1)
        zeros = jnp.zeros(part.shape, part.dtype)
        shifted = indices[..., 0].astype(jnp.int32) - start
        # Rows before the first count from the end in numpy's way: beyond the end instead.
        shifted = jnp.where(shifted < 0, part.shape[0], shifted)
        rows = zeros.at[shifted].add(updates, mode="drop")
        if not base:
            return rows
        added = jnp.zeros(part.shape[0], bool).at[shifted].set(True, mode="drop")
        return jnp.where(added.reshape(-1, *[1] * (rows.ndim - 1)), rows, base[0])

    start = jax.ShapeDtypeStruct((), jnp.int32)
    base = [jax.ShapeDtypeStruct((), part.dtype)] if based else []
    return jax.make_jaxpr(scatter)(indices.struct(), updates.struct(), start, *base)


# -- what the host does ----------------------------------------------------------------


def read_rows(eqn: Any, table: np.ndarray, *indices: np.ndarray) -> np.ndarray:
    """What a `gather` or `dynamic_slice` for which `takes_rows` holds gives."""
    length = table.shape[0]
    if eqn.primitive.name == "dynamic_slice":
        count = eqn.params["slice_sizes"][0]
        start = min(max(int(indices[0]), 0), length - count)
        return np.array(table[start : start + count])
    params = eqn.params
    chosen = indices[0][..., 0].astype(np.int64)
    inside = (chosen >= 0) & (chosen < length)
    rows = table[np.clip(chosen, 0, length - 1)]
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP and not inside.all():
        rows[~inside] = _filling(params.get("fill_value"), table.dtype)
    offsets = tuple(params["dimension_numbers"].offset_dims)
    batch = chosen.ndim
    return np.moveaxis(rows, range(batch, rows.ndim), offsets)


def _filling(value: Any, dtype: Any) -> Any:
    if value is not None:
        return value
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return jnp.iinfo(dtype).max
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else True


def add_rows(
    eqn: Any, table: np.ndarray, indices: np.ndarray, updates: np.ndarray, base: Any = 0
) -> None:
    """Does to `table` what a `scatter-add` for which `adds_rows` holds does.

    Rows for the same index are summed up first, those of 16-bit numbers in float32. All
    other rows get `base`, which is zero unless all were scaled by what is not finite.
    """
    length = table.shape[0]
    chosen = indices[..., 0].astype(np.int64).reshape(-1)
    rows = updates.reshape(-1, *table.shape[1:])
    if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        chosen = np.clip(chosen, 0, length - 1)
    inside = (chosen >= 0) & (chosen < length)
    chosen, rows = chosen[inside], rows[inside]
    if base != 0:
        others = np.ones(length, bool)
        others[chosen] = False
        table[others] += np.asarray(base).astype(table.dtype)
    if not len(chosen):
        return
    order = np.argsort(chosen, kind="stable")
    distinct, starts = np.unique(chosen[order], return_index=True)
    short = jnp.issubdtype(table.dtype, jnp.floating) and table.dtype.itemsize < 4
    wide = np.float32 if short else table.dtype
    sums = np.add.reduceat(rows[order].astype(wide), starts, axis=0)
    table[distinct] = (table[distinct].astype(wide) + sums).astype(table.dtype)
