"""A pass: tables in host memory of which a function reads or changes some rows only.

An embedding is read by a `gather` of rows and changed by a `scatter-add` of rows. Where the
table is in host memory, so are its rows: the host takes them out or adds to them, and only
they travel. Such an equation is driven, like a loop: it stands between two plans.

The gradient of a gather is a `scatter-add` to zeros: rows and their numbers. What scales or
converts it does so to the rows; where it is then added to a table, the host adds the rows.
"""

import dataclasses
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jturnip.frontend.builder import Builder
from jturnip.frontend.costs import HEAVY
from jturnip.frontend.values import Atom, Constant, Equation, FlatJaxpr, Type, bind


# Equations that may be done by the host.
HOST_READS = frozenset(("gather", "dynamic_slice"))
HOST_WRITES = frozenset(("scatter-add", "scatter_add"))
# Numbers of rows that are larger are not made before their turn.
_SMALL = 64 * 1024


def rows_by_host(flat: FlatJaxpr, tables: Collection[int]) -> FlatJaxpr:
    """The program with driven equations where rows of tables in host memory are read, or
    added to.

    Args:
      flat: the program.
      tables: arguments and closed-over arrays in host memory, too large to be moved for
        some rows of them.
    """
    return _Tables(flat, tables).result() if tables else flat


def loops_read_rows(
    flat: FlatJaxpr, hosted: Collection[int], inline: Callable[[Any], FlatJaxpr]
) -> bool:
    """Whether some `while` reads or adds to rows of a table in host memory, so that only
    these rows need travel if it is driven."""
    for e in flat.equations:
        if e.name == "while":
            params = e.origin.params
            first = params["cond_nconsts"]
            read = e.inputs[first : first + params["body_nconsts"]]
            if reads_rows(inline(params["body_jaxpr"]), read, hosted):
                return True
    return False


def reads_rows(body: FlatJaxpr, read: Sequence[Atom], hosted: Collection[int]) -> bool:
    """The same of a body whose first inputs are what the loop reads in each iteration."""
    tables = {
        inside
        for v, inside in zip(read, body.inputs, strict=False)
        if isinstance(v, int) and v in hosted and body.types[inside].nbytes > _SMALL
    }
    return any(inner.driven for inner in rows_by_host(body, tables).equations)


def lookups_first(flat: FlatJaxpr, most: int) -> FlatJaxpr:
    """The program with the rows that the host reads first, where their numbers follow from
    small arguments by next to nothing.

    What is driven stands between two plans. Several batches whose tokens are looked up one
    after the other would be as many plans; so they are one.

    Args:
      flat: the program, without tokens: what is moved must not come between effects.
      most: bytes of rows that may wait in host memory for their turn.
    """
    writer = {v: at for at, e in enumerate(flat.equations) for v in e.outputs}
    light: list[bool] = []
    for e in flat.equations:
        earlier = (writer.get(v, -1) for v in e.inputs if isinstance(v, int))
        light.append(_is_light(flat, e) and all(light[w] for w in earlier if w >= 0))
    before: set[int] = set()
    first: dict[int, None] = {}
    waiting = 0
    for at, e in enumerate(flat.equations):
        if not e.driven or e.name not in HOST_READS:
            continue
        leading = {writer[v] for v in e.inputs if isinstance(v, int) and v in writer}
        rows = sum(flat.types[v].nbytes for v in e.outputs)
        if waiting + rows <= most and all(light[w] for w in leading):
            waiting += rows
            first[at] = None
            _add_with_what_leads_to(flat, leading, writer, before)
    moved = {**dict.fromkeys(sorted(before)), **first}
    rest = (at for at in range(len(flat.equations)) if at not in moved)
    equations = tuple(flat.equations[at] for at in (*moved, *rest))
    return dataclasses.replace(flat, equations=equations)


def _is_light(flat: FlatJaxpr, e: Equation) -> bool:
    """Whether an equation does next to nothing, and nothing but compute."""
    values = (*e.outputs, *(v for v in e.inputs if isinstance(v, int)))
    small = all(flat.types[v].nbytes <= _SMALL for v in values)
    return small and not (e.driven or e.origin.effects or e.name in HEAVY)


def _add_with_what_leads_to(
    flat: FlatJaxpr, equations: Collection[int], writer: Mapping[int, int], found: set[int]
) -> None:
    """Adds equations to those found, and all that they depend on."""
    todo = [at for at in equations if at not in found]
    while todo:
        at = todo.pop()
        found.add(at)
        read = (v for v in flat.equations[at].inputs if isinstance(v, int))
        todo += [writer[v] for v in read if v in writer and writer[v] not in found]


@dataclass(frozen=True, slots=True)
class _Sparse:
    """A table of zeros with rows added to it."""

    # The equation that adds them.
    eqn: Equation
    type: Type
    # Integers [..., 1], and rows [..., *the table's other axes].
    indices: Atom
    updates: int
    # What the zeros have become, where they were scaled by what may not be finite.
    base: int | None = None


class _Tables:
    """The new program, while it is made."""

    def __init__(self, flat: FlatJaxpr, tables: Collection[int]):
        self._flat = flat
        self._tables = tables
        self._builder = Builder.of(flat)
        self._builder.equations.clear()
        # What is known of some values: that they are all zeros, or all but some rows.
        self._zeros: set[int] = set()
        self._sparse: dict[int, _Sparse] = {}

    def result(self) -> FlatJaxpr:
        for e in self._flat.equations:
            driven = self._by_host(e)
            self._builder.equations.append(e if driven is None else driven)
            self._see(e)
        return self._builder.finish(self._flat.inputs, self._flat.outputs)

    def _by_host(self, e: Equation) -> Equation | None:
        """What the host does instead of an equation, if it does."""
        at_table = _is_one(e.inputs[0] if e.inputs else None, self._tables)
        reads = at_table and e.name in HOST_READS and takes_rows(e.origin)
        writes = at_table and e.name in HOST_WRITES and adds_rows(e.origin)
        if reads or writes:
            return self._driven(e, e.inputs)
        found = self._added(e)
        if found is None:
            return None
        table, sparse = found
        given = [sparse.updates] if sparse.base is None else [sparse.updates, sparse.base]
        if e.name == "sub":
            given = [self._negative(v, e.within) for v in given]
        inputs = table, sparse.indices, *given
        return dataclasses.replace(
            self._driven(e, inputs), origin=sparse.eqn.origin, ours=sparse.eqn.ours
        )

    def _driven(self, e: Equation, inputs: Sequence[Atom]) -> Equation:
        return dataclasses.replace(e, inputs=tuple(inputs), driven=True)

    def _added(self, e: Equation) -> tuple[int, _Sparse] | None:
        """The table, and what is added to it or taken from it."""
        if e.name not in ("add", "add_any", "sub"):
            return None
        a, b = e.inputs
        pairs = [(a, b)] if e.name == "sub" else [(a, b), (b, a)]
        for table, sparse in pairs:
            if _is_one(table, self._tables) and _is_one(sparse, self._sparse):
                return table, self._sparse[sparse]
        return None

    def _see(self, e: Equation) -> None:
        """Remembers what an equation writes, if it is zeros or sparse."""
        first = e.inputs[0] if e.inputs else None
        if e.name == "broadcast_in_dim" and isinstance(first, Constant):
            if not np.any(np.asarray(first.value)):
                self._zeros.update(e.outputs)
            return
        of = [_is_one(v, self._sparse) for v in e.inputs]
        if any(of) and _only_scales(e.origin, of):
            (result,) = e.outputs
            self._sparse[result] = self._scaled(e, of)
        elif e.name in HOST_WRITES and _is_one(first, self._zeros) and adds_rows(e.origin):
            _, indices, updates = e.inputs
            (result,) = e.outputs
            t = self._flat.types[result]
            # More rows than that are as quickly moved as all of the table.
            if (
                isinstance(updates, int)
                and 2 * self._flat.types[updates].nbytes <= t.nbytes
            ):
                self._sparse[result] = _Sparse(e, t, indices, updates)

    def _negative(self, value: int, calls: tuple[Any, ...]) -> int:
        made = jax.make_jaxpr(lax.neg)(self._builder.types[value].struct())
        return self._builder.ours(made, (value,), calls)[0]

    def _scaled(self, e: Equation, of: Sequence[bool]) -> _Sparse:
        """Does to the rows of a sparse table what `e` does to all of it."""
        sparse = next(self._sparse[v] for v in e.inputs if _is_one(v, self._sparse))
        updates = self._applied(e, of, sparse.updates)
        others = [v for v, s in zip(e.inputs, of, strict=True) if not s]
        base = sparse.base
        if base is not None or not all(map(_is_ordinary, others)):
            zero = Type((), sparse.type.dtype, sparse.type.weak_type)
            before = Constant(np.zeros((), zero.dtype), zero) if base is None else base
            base = self._applied(e, of, before)
        t = self._flat.types[e.outputs[0]]
        return _Sparse(sparse.eqn, t, sparse.indices, updates, base)

    def _applied(self, e: Equation, of: Sequence[bool], instead: Atom) -> int:
        """What an equation makes of something else in the place of a sparse table."""
        given = [instead if s else v for v, s in zip(e.inputs, of, strict=True)]
        structs = [self._builder.type_of(v).struct() for v in given]
        made = jax.make_jaxpr(lambda *operands: bind(e.origin, operands))(*structs)
        return self._builder.ours(made, given, e.within)[0]


def _is_one(atom: Atom | None, values: Container[int]) -> TypeGuard[int]:
    return isinstance(atom, int) and atom in values


def _only_scales(eqn: Any, sparse: Sequence[bool]) -> bool:
    """Whether all zeros become one number, and a sum of rows that of what they become."""
    if eqn.primitive.name in ("neg", "copy"):
        return True
    dtypes = [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)]
    inexact = all(jnp.issubdtype(d, jnp.inexact) for d in dtypes)
    if eqn.primitive.name == "convert_element_type":
        return inexact
    scalars = not any(
        v.aval.shape
        for v, is_sparse in zip(eqn.invars, sparse, strict=True)
        if not is_sparse
    )
    one = sum(sparse) == 1
    if eqn.primitive.name == "mul":
        return one and scalars
    return eqn.primitive.name == "div" and one and scalars and sparse[0] and inexact


def _is_ordinary(atom: Atom) -> bool:
    """Whether zero times it, and zero divided by it, are surely zero."""
    if not isinstance(atom, Constant):
        return False
    number = np.asarray(atom.value)
    return bool(np.isfinite(number) and number != 0)


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
    """Whether a `scatter-add` adds whole rows."""
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
    rows = table[np.clip(chosen.reshape(-1), 0, length - 1)]  # new, also if it is one
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP and not inside.all():
        rows[~inside.reshape(-1)] = _filling(params.get("fill_value"), table.dtype)
    rows = rows.reshape((*chosen.shape, *table.shape[1:]))
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
