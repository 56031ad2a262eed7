"""Indices that only count: `x[jnp.arange(n), labels]` is one pick in each row.

Of what `jax.vmap` makes of a gather or a scatter its dimension numbers say that rows do not
mix. Of indices that a user writes only their values say so. Where a column of them is
surely the number of the row, the dimension numbers say it as well, and each row, or each
sequence of a batch, can be worked with by itself. A loop that reads such numbers makes them
in each iteration, so that its body says so too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jturnip.frontend.counted import with_rows
from jturnip.frontend.loops import LOOPS, loop_counts, with_body
from jturnip.frontend.rules import SCATTERS
from jturnip.frontend.values import Atom, Constant, Type, bind, is_key


# Of both kinds of dimension numbers: the dimensions of the operand that are gone, those
# that are indexed, and in which dimension of the indices each batch is.
_GATHER = "collapsed_slice_dims", "start_index_map", "start_indices_batching_dims"
_SCATTER = (
    "inserted_window_dims",
    "scatter_dims_to_operand_dims",
    "scatter_indices_batching_dims",
)
# Constants of more elements are not looked at: they may lie on the device.
_MOST_ELEMENTS = 1 << 16


@dataclass(slots=True)
class Counts:
    """What is known of values that count: by their numbers."""

    # Each element is its position along a dimension.
    along: dict[int, int] = field(default_factory=dict)
    # The same of what is at each position of the last dimension, or None.
    columns: dict[int, tuple[int | None, ...]] = field(default_factory=dict)
    # All is false.
    false: set[int] = field(default_factory=set)
    _looked_at: set[int] = field(default_factory=set)

    def see_constant(self, value: Atom, array: Any) -> None:
        """Learns of a closed-over array, if it is small enough to be looked at."""
        if not isinstance(value, int) or value in self._looked_at:
            return
        self._looked_at.add(value)
        kind = "" if is_key(array.dtype) else np.dtype(array.dtype).kind
        if not kind or kind not in "iub":
            return
        if array.size > _MOST_ELEMENTS or not _is_at_hand(array):
            return
        with jax.transfer_guard("allow"):
            known = np.asarray(array)
        if kind == "b" and not known.any():
            self.false.add(value)
        for d, n in enumerate(known.shape if kind != "b" else ()):
            shape = [n if k == d else 1 for k in range(known.ndim)]
            if n > 1 and (known == np.arange(n).reshape(shape)).all():
                self.along[value] = d

    def see(self, eqn: Any, operands: Sequence[Atom], results: Sequence[Atom]) -> None:
        """Learns of what an equation writes."""
        follow = _FOLLOWED.get(eqn.primitive.name)
        if follow is not None and isinstance(results[0], int):
            follow(self, eqn, operands, results[0])

    def written_otherwise(self, eqn: Any, operands: Sequence[Atom]) -> Any:
        """The same as a jaxpr of the same operands that says what counts; None where that
        is not known to be anything."""
        if eqn.primitive.name in LOOPS:
            counts = [i for i, v in enumerate(operands) if self._of(v) == 0]
            other = self._made_inside(eqn, operands)
            return other or with_rows(eqn, operands, counts)
        return self._by_rows(eqn, operands)

    def _made_inside(self, eqn: Any, operands: Sequence[Atom]) -> Any:
        """A loop that makes what counts, of what all its iterations read."""
        count = loop_counts(eqn)[0]
        made = {
            i: d for i, v in enumerate(operands[:count]) if (d := self._of(v)) is not None
        }
        if not made or eqn.effects:
            return None
        return _counting(eqn, count, made)

    def _by_rows(self, eqn: Any, operands: Sequence[Atom]) -> Any:
        """The same as a gather or a scatter with one more batch, as a jaxpr of the same
        operands; None where no column of its indices is known to count rows."""
        is_gather = eqn.primitive.name == "gather"
        if not (is_gather or eqn.primitive.name in SCATTERS):
            return None
        indices = operands[1]
        columns = self.columns.get(indices) if isinstance(indices, int) else None
        if columns is None or len(columns) < 2:
            return None
        gone, indexed, batches = _GATHER if is_gather else _SCATTER
        numbers = eqn.params["dimension_numbers"]
        of_operand, of_indices = (v.aval.shape for v in eqn.invars[:2])
        for column, d in enumerate(columns):
            dim = getattr(numbers, indexed)[column]
            if (
                d is not None
                and dim in getattr(numbers, gone)
                and d not in getattr(numbers, batches)
                and of_operand[dim] == of_indices[d]
            ):
                return _with_batch(eqn, column, dim, d, (gone, indexed, batches))
        return None

    # -- what is known of results ------------------------------------------------------

    def _iota(self, eqn: Any, operands: Sequence[Atom], result: int) -> None:
        t = Type.of(eqn.outvars[0].aval)
        if not operands and _counts_in(t, d := eqn.params["dimension"]):
            self.along[result] = d

    def _broadcast(self, eqn: Any, operands: Sequence[Atom], result: int) -> None:
        d = self._of(operands[0])
        if d is not None:
            self._keep(eqn, d, eqn.params["broadcast_dimensions"][d], result)

    def _reshape(self, eqn: Any, operands: Sequence[Atom], result: int) -> None:
        if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
            return
        d = self._of(operands[0])
        before, after = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))
        long = [[k for k, n in enumerate(s) if n > 1] for s in (before, after)]
        if d not in long[0]:
            return
        if [before[k] for k in long[0]] == [after[k] for k in long[1]]:
            self._keep(eqn, d, long[1][long[0].index(d)], result)

    def _transpose(self, eqn: Any, operands: Sequence[Atom], result: int) -> None:
        d = self._of(operands[0])
        if d is not None:
            self._keep(eqn, d, eqn.params["permutation"].index(d), result)

    def _convert(self, eqn: Any, operands: Sequence[Atom], result: int) -> None:
        d = self._of(operands[0])
        if d is not None and _counts_in(Type.of(eqn.outvars[0].aval), d):
            self.along[result] = d

    def _compare(self, eqn: Any, operands: Sequence[Atom], result: int) -> None:
        """Whether an index is negative, as numpy allows."""
        zero = operands[1]
        is_zero = isinstance(zero, Constant) and not np.any(np.asarray(zero.value))
        if is_zero and self._of(operands[0]) is not None:
            self.false.add(result)

    def _select(self, eqn: Any, operands: Sequence[Atom], result: int) -> None:
        d, which = self._of(operands[1]), operands[0]
        if isinstance(which, int) and which in self.false and d is not None:
            self.along[result] = d

    def _concatenate(self, eqn: Any, operands: Sequence[Atom], result: int) -> None:
        last = len(eqn.outvars[0].aval.shape) - 1
        if eqn.params["dimension"] != last or last < 1:
            return
        columns: list[int | None] = []
        for operand, v in zip(operands, eqn.invars, strict=True):
            d = self._of(operand)
            known = self.columns.get(operand) if isinstance(operand, int) else None
            columns += known or [None if d == last else d] * v.aval.shape[last]
        if any(d is not None for d in columns):
            self.columns[result] = tuple(columns)

    def _of(self, operand: Atom) -> int | None:
        return self.along.get(operand) if isinstance(operand, int) else None

    def _keep(self, eqn: Any, before: int, after: int, result: int) -> None:
        """Positions along a dimension of the operand are those along one of the result, if
        that is as long."""
        operand, written = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))
        if operand[before] == written[after]:
            self.along[result] = after


_FOLLOWED = {
    "iota": Counts._iota,
    "broadcast_in_dim": Counts._broadcast,
    **dict.fromkeys(["reshape", "squeeze", "expand_dims"], Counts._reshape),
    "transpose": Counts._transpose,
    **dict.fromkeys(["convert_element_type", "copy"], Counts._convert),
    "lt": Counts._compare,
    "select_n": Counts._select,
    "concatenate": Counts._concatenate,
}


def _is_at_hand(array: Any) -> bool:
    """Whether a closed-over array can be read."""
    if not isinstance(array, jax.Array):
        return True
    return array.is_fully_addressable and not array.is_deleted()


def _counts_in(t: Type, dim: int) -> bool:
    """Whether a type has all positions along a dimension."""
    return t.dtype.kind in "iu" and t.shape[dim] - 1 <= np.iinfo(t.dtype).max


def _counting(eqn: Any, count: int, made: Mapping[int, int]) -> Any:
    """A loop as a jaxpr of its operands, some of whose constants it makes in each
    iteration: positions along a dimension."""
    types = [Type.of(v.aval) for v in eqn.invars]
    kept = [i for i in range(count) if i not in made]

    def with_made(closed: Any, consts: range) -> Any:
        """What is done in an iteration, of the constants that are kept."""
        here = [i for i in consts if i not in made]

        def function(*operands: Any) -> Any:
            values = dict(zip(here, operands, strict=False))
            values.update(
                (i, lax.broadcasted_iota(types[i].dtype, types[i].shape, made[i]))
                for i in consts
                if i in made
            )
            own = [values[i] for i in consts]
            return jaxpr_as_fun(closed)(*own, *operands[len(here) :])

        rest = [Type.of(t).struct() for t in closed.in_avals[len(consts) :]]
        return jax.make_jaxpr(function)(*(types[i].struct() for i in here), *rest)

    given = lambda operands: (*(operands[i] for i in kept), *operands[count:])
    if eqn.primitive.name == "scan":
        scan = with_body(eqn, with_made(eqn.params["jaxpr"], range(count)), len(kept))
        loop = lambda *operands: scan(*given(operands))
    else:
        first = eqn.params["cond_nconsts"]
        asked, read = range(first), range(first, count)
        changed = {
            "cond_jaxpr": with_made(eqn.params["cond_jaxpr"], asked),
            "cond_nconsts": sum(i in asked for i in kept),
            "body_jaxpr": with_made(eqn.params["body_jaxpr"], read),
            "body_nconsts": sum(i in read for i in kept),
        }
        loop = lambda *operands: bind(eqn, given(operands), **changed)
    return jax.make_jaxpr(loop)(*(t.struct() for t in types))


def _with_batch(
    eqn: Any, column: int, dim: int, of_indices: int, names: tuple[str, str, str]
) -> Any:
    gone, indexed, batches = names
    numbers = eqn.params["dimension_numbers"]
    pairs = [
        *zip(numbers.operand_batching_dims, getattr(numbers, batches), strict=True),
        (dim, of_indices),
    ]
    by_operand, by_indices = zip(*sorted(pairs), strict=True)
    without = lambda dims: tuple(each for each in dims if each != dim)
    changed = numbers._replace(
        **{
            gone: without(getattr(numbers, gone)),
            indexed: without(getattr(numbers, indexed)),
            "operand_batching_dims": by_operand,
            batches: by_indices,
        }
    )
    # They are in order no more than the other columns are.
    params = {**eqn.params, "dimension_numbers": changed, "indices_are_sorted": False}

    def apply(operand: Any, indices: Any, *updates: Any) -> Any:
        last, count = indices.ndim - 1, indices.shape[-1]
        sides = [(0, column), (column + 1, count)]
        kept = [lax.slice_in_dim(indices, a, b, axis=last) for a, b in sides if a < b]
        rest = lax.concatenate(kept, last) if len(kept) > 1 else kept[0]
        return eqn.primitive.bind(operand, rest, *updates, **params)

    structs = [Type.of(v.aval).struct() for v in eqn.invars]
    return jax.make_jaxpr(apply)(*structs)
