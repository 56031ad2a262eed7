"""Loops that read and write rows by their counter:
`lax.fori_loop(0, n, lambda i, y: y.at[i].set(f(x[i])), y)`.

It is the same as a scan that reads these rows and stacks those, and what can be done with a
scan can be done with it: rows come from host memory one after the other and go there, are
made when they are read, or stay in the parts in which they were made. A whole array that
all iterations read or carry is there all the time, or is moved or made in each of them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax

from jturnip import compat
from jturnip.frontend.loops import scan_counts, scanned
from jturnip.frontend.values import Atom, Constant, Type, bind, called, is_key


@dataclass(frozen=True, slots=True)
class _Counter:
    """A number that is that of the iteration, and so many more: never negative."""

    more: int


@dataclass(frozen=True, slots=True)
class _Array:
    """What the loop reads or carries, as it was at first: by its position."""

    number: int


@dataclass(frozen=True, slots=True)
class _Written:
    """The same with one row written, by the counter."""

    number: int
    more: int


class _False:
    """What is false in all iterations."""


_Kind: TypeAlias = _Counter | _Array | _Written | _False | None
# Gives a row of an array, of one more dimension: by the number of that, and how many
# positions it is past that of the iteration.
_Row: TypeAlias = Callable[[int, int], Any]


def with_rows(eqn: Any, operands: Sequence[Atom], positions: Collection[int] = ()) -> Any:
    """A scan that does nothing with some arrays but to read or write rows by its counter,
    as a jaxpr of the same operands in which it scans these and stacks those; None where
    there is no such array.

    Args:
      eqn: a scan's equation.
      operands: what it reads.
      positions: of operands of which each element is its position along the first
        dimension.
    """
    if eqn.primitive.name != "scan" or eqn.effects:
        return None
    kinds = _kinds(eqn, operands, positions)
    found = _found(eqn, kinds) if kinds else None
    return _scanning(eqn, kinds, found) if found else None


def _kinds(eqn: Any, operands: Sequence[Atom], positions: Collection[int]) -> list[_Kind]:
    """What is known of the operands of a scan's body; nothing if it surely reads and writes
    no rows by its counter."""
    consts, carry, _ = scan_counts(eqn)
    before, length = consts + carry, eqn.params["length"]
    jaxpr, types = eqn.params["jaxpr"].jaxpr, [Type.of(v.aval) for v in eqn.invars]
    counters = {
        i: _Counter(0) for i in positions if i >= before and len(types[i].shape) == 1
    }
    if not eqn.params["reverse"]:
        counters |= _counters(jaxpr, operands[consts:before], length, consts)
    kinds: list[_Kind] = [counters.get(i) for i in range(len(types))]
    for i, t in enumerate(types[:before]):
        # What is stacked has a type of its own.
        is_plain = not is_key(t.dtype) and not t.weak_type
        if t.shape and t.shape[0] >= length and is_plain:
            kinds[i] = _Array(i)
    has_arrays = any(isinstance(kind, _Array) for kind in kinds)
    return kinds if counters and has_arrays and _has_rows(jaxpr) else []


@dataclass(frozen=True, slots=True)
class _Found:
    """The rows that a scan's body reads, as `_Row` has them; and by the numbers of what is
    carried which it writes."""

    rows: tuple[tuple[int, int], ...]
    written: Mapping[int, int]


def _found(eqn: Any, kinds: Sequence[_Kind]) -> _Found | None:
    """The rows of arrays with which nothing else is done; None where there are none."""
    consts, carry, _ = scan_counts(eqn)
    types = [Type.of(v.aval) for v in eqn.invars]
    closed, like = eqn.params["jaxpr"], lambda n: types[n].part(0, 1)
    row = lambda n, _: lax.full(like(n).shape, 0, like(n).dtype)
    walk = _Walk(eqn.params["length"], row)
    body = (Type.of(t).struct() for t in closed.in_avals)
    jax.make_jaxpr(lambda *given: walk.results(closed, given, kinds, consts))(*body)
    carried = range(consts, consts + carry)
    whole = walk.whole.union(n for n in carried if n not in walk.written)
    # Of what is carried, rows that are written later are as they were at first.
    for n, more in walk.rows:
        to = walk.written.get(n, more)
        if more > to if eqn.params["reverse"] else more < to:
            whole.add(n)
    written = {n: more for n, more in walk.written.items() if n not in whole}
    rows = tuple(row for row in sorted(walk.rows) if row[0] not in whole)
    return _Found(rows, written) if rows or written else None


def _scanning(eqn: Any, kinds: Sequence[_Kind], found: _Found) -> Any:
    """A scan that reads some rows as what it scans, and stacks those that it writes, as a
    jaxpr of the same operands."""
    rows, written = found.rows, found.written
    consts, carry, _ = scan_counts(eqn)
    closed, length, before = eqn.params["jaxpr"], eqn.params["length"], consts + carry
    chosen = {n for n, _ in rows}.union(written)
    still = [None if isinstance(k, _Array) and k.number not in chosen else k for k in kinds]
    kept = [i for i in range(before) if i not in chosen]
    still_carried = [i for i in kept if i >= consts]

    def loop(*given: Any) -> Sequence[Any]:
        read = [lax.slice_in_dim(given[n], more, more + length) for n, more in rows]
        own = len(given) - before

        def step(carried: Any, xs: Any) -> Any:
            values = {i: given[i] for i in kept}
            values.update(zip(still_carried, carried, strict=True))
            values.update(enumerate(xs[:own], before))
            made = dict(zip(rows, xs[own:], strict=True))
            walk = _Walk(length, lambda *row: lax.expand_dims(made[row], (0,)))
            # Nobody reads what is not there.
            there = [values.get(i) for i in range(len(given))]
            results = walk.results(closed, there, still, consts)
            stacked = *results[carry:], *(walk.updates[n] for n in written)
            return tuple(results[i - consts] for i in still_carried), stacked

        carried = [given[i] for i in still_carried]
        results = scanned(eqn, step, carried, [*given[before:], *read])
        after = dict(zip(still_carried, results, strict=False))
        stacked = results[len(still_carried) :]
        of_rows = stacked[len(stacked) - len(written) :]
        for (n, more), new in zip(written.items(), of_rows, strict=True):
            after[n] = _with_new(given[n], new, more)
        carried = (after[i] for i in range(consts, before))
        return *carried, *stacked[: len(stacked) - len(written)]

    return jax.make_jaxpr(loop)(*(Type.of(v.aval).struct() for v in eqn.invars))


def _with_new(array: Any, rows: Any, begin: int) -> Any:
    """An array with other rows from one on."""
    end = begin + len(rows)
    sides = lax.slice_in_dim(array, 0, begin), lax.slice_in_dim(array, end, len(array))
    pieces = [piece for piece in (sides[0], rows, sides[1]) if len(piece)]
    return lax.concatenate(pieces, 0) if len(pieces) > 1 else rows


def _has_rows(jaxpr: Any) -> bool:
    """Whether anything may read or write a row."""
    inner = (called(eqn) for eqn in jaxpr.eqns)
    return any(eqn.primitive.name in _READS | _WRITES for eqn in jaxpr.eqns) or any(
        _has_rows(getattr(each, "jaxpr", each)) for each in inner if each is not None
    )


def _counters(
    jaxpr: Any, carried: Sequence[Atom], length: int, consts: int
) -> dict[int, _Counter]:
    """Which operands of a scan's body count its iterations, and from where."""
    writer = {v: e for e in jaxpr.eqns for v in e.outvars}
    found = {}
    for k, begin in enumerate(carried):
        v, after = jaxpr.invars[consts + k], jaxpr.outvars[k]
        e = None if hasattr(after, "val") else writer.get(after)
        if (
            isinstance(begin, Constant)
            and np.issubdtype(begin.type.dtype, np.integer)
            and 0 <= begin.value <= np.iinfo(begin.type.dtype).max - length
            and e is not None
            and e.primitive.name == "add"
            and any(v is read for read in e.invars)
            and any(_number(read) == 1 for read in e.invars)
        ):
            found[consts + k] = _Counter(int(begin.value))
    return found


class _Walk:
    """Does what a loop does in an iteration, with rows instead of arrays.

    Args:
      length: how many iterations there are.
      row: gives the rows that are read by the counter.
    """

    def __init__(self, length: int, row: _Row):
        self._length = length
        self._row = row
        # Rows that are read, as `_Row` has them; those of what is carried that are written,
        # with what; and arrays with which anything else is done.
        self.rows: set[tuple[int, int]] = set()
        self.written: dict[int, int] = {}
        self.updates: dict[int, Any] = {}
        self.whole: set[int] = set()

    def results(
        self, closed: Any, given: Sequence[Any], kinds: Sequence[_Kind], consts: int
    ) -> list[Any]:
        """What it gives of these operands, of which the first so many are constants."""
        found, given_kinds = self._done(closed, given, kinds)
        for at, kind in enumerate(given_kinds, consts):
            if isinstance(kind, _Written) and kind.number == at:
                self.written[at] = kind.more
            else:
                self._need([kind])
        return found

    def _done(
        self, closed: Any, given: Sequence[Any], kinds: Sequence[_Kind]
    ) -> tuple[list[Any], list[_Kind]]:
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        scope: dict[Any, tuple[Any, _Kind]] = {}
        scope.update((v, (c, None)) for v, c in zip(jaxpr.constvars, consts, strict=True))
        pairs = zip(given, kinds, strict=True)
        scope.update(zip(jaxpr.invars, pairs, strict=True))

        def read(atoms: Sequence[Any]) -> tuple[list[Any], list[_Kind]]:
            found = [(a.val, None) if hasattr(a, "val") else scope[a] for a in atoms]
            return [value for value, _ in found], [kind for _, kind in found]

        for eqn in jaxpr.eqns:
            results, their_kinds = self._applied(eqn, *read(eqn.invars))
            scope.update(
                zip(eqn.outvars, zip(results, their_kinds, strict=True), strict=True)
            )
        return read(jaxpr.outvars)

    def _applied(
        self, eqn: Any, given: Sequence[Any], kinds: Sequence[_Kind]
    ) -> tuple[Sequence[Any], Sequence[_Kind]]:
        inner = called(eqn)
        if inner is not None and any(kinds):
            return self._done(inner, given, kinds)
        with compat.at_line_of(eqn):
            row = self._row_read(eqn, kinds)
            if row is not None:
                self.rows.add(row)
                made = self._row(*row)
                return [_of_row(eqn, made, given)], [None]
            to = self._row_written(eqn, kinds)
            if to is not None:
                self.updates[to.number] = self._new_row(eqn, given, to)
                there = given[0] is not None
                return bind(eqn, given) if there else [None], [to]
            self._need(kinds)
            follow = _FOLLOWED.get(eqn.primitive.name)
            kind = follow(eqn, kinds) if follow is not None and any(kinds) else None
            return bind(eqn, given), [kind] * len(eqn.outvars)

    def _row_read(self, eqn: Any, kinds: Sequence[_Kind]) -> tuple[int, int] | None:
        """Which row an equation reads by the counter; None for others."""
        if eqn.primitive.name not in _READS:
            return None
        array, at = kinds[:2]
        if not (isinstance(array, _Array) and isinstance(at, _Counter)):
            return None
        shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
        if sizes[0] != 1 or at.more + self._length > shape[0]:
            return None
        if eqn.primitive.name == "gather" and not _is_of_a_row(eqn, shape):
            return None
        return array.number, at.more

    def _row_written(self, eqn: Any, kinds: Sequence[_Kind]) -> _Written | None:
        """An array with a row written by the counter; None for what writes others."""
        if eqn.primitive.name not in _WRITES:
            return None
        in_place = eqn.primitive.name == "dynamic_update_slice"
        array, at = kinds[0], kinds[2 if in_place else 1]
        if not (isinstance(array, _Array) and isinstance(at, _Counter)):
            return None
        shape = eqn.invars[0].aval.shape
        if at.more + self._length > shape[0]:
            return None
        of_row = eqn.invars[1].aval.shape == (1, *shape[1:]) if in_place else _to_a_row(eqn)
        return _Written(array.number, at.more) if of_row else None

    def _new_row(self, eqn: Any, given: Sequence[Any], to: _Written) -> Any:
        """What is written there."""
        if eqn.primitive.name == "dynamic_update_slice":
            return lax.squeeze(given[1], (0,))
        if eqn.primitive.name == "scatter":
            return given[2]
        self.rows.add((to.number, to.more))
        return lax.squeeze(self._row(to.number, to.more), (0,)) + given[2]

    def _need(self, kinds: Sequence[_Kind]) -> None:
        arrays = (kind for kind in kinds if isinstance(kind, (_Array, _Written)))
        self.whole.update(kind.number for kind in arrays)


def _is_of_a_row(eqn: Any, shape: Sequence[int]) -> bool:
    """Whether a gather reads one whole row, at one position."""
    numbers = eqn.params["dimension_numbers"]
    return (
        eqn.invars[1].aval.shape == (1,)
        and eqn.params["slice_sizes"] == (1, *shape[1:])
        and tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and not numbers.operand_batching_dims
    )


def _to_a_row(eqn: Any) -> bool:
    """Whether a scatter writes one whole row, at one position."""
    numbers = eqn.params["dimension_numbers"]
    shape, at, row = (v.aval.shape for v in eqn.invars)
    return (
        (at, row) == ((1,), shape[1:])
        and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and tuple(numbers.inserted_window_dims) == (0,)
        and not numbers.operand_batching_dims
    )


def _of_row(eqn: Any, row: Any, given: Sequence[Any]) -> Any:
    """What an equation reads of a row, which has one more dimension."""
    if eqn.primitive.name == "gather":
        return lax.squeeze(row, (0,))
    _, at, *others = given
    first = lax.full_like(at, 0)
    return lax.dynamic_slice(row, (first, *others), eqn.params["slice_sizes"])


def _number(atom: Any) -> int | None:
    """A whole number that is written in the function."""
    value = getattr(atom, "val", None)
    if value is None or np.ndim(value) or not np.issubdtype(atom.aval.dtype, np.integer):
        return None
    return int(value)


def _added(eqn: Any, kinds: Sequence[_Kind]) -> _Kind:
    sign = 1 if eqn.primitive.name == "add" else -1
    order = (0, 1) if isinstance(kinds[0], _Counter) else (1, 0)
    counter, number = kinds[order[0]], _number(eqn.invars[order[1]])
    if not isinstance(counter, _Counter) or number is None or (sign < 0 and order[0]):
        return None
    more = counter.more + sign * number
    return _Counter(more) if more >= 0 and _is_wide(eqn.outvars[0].aval.dtype) else None


def _converted(eqn: Any, kinds: Sequence[_Kind]) -> _Kind:
    wide = _is_wide(eqn.params["new_dtype"])
    return kinds[0] if wide and isinstance(kinds[0], _Counter) else None


def _is_wide(dtype: Any) -> bool:
    """Whether a type has all positions of an array."""
    return np.dtype(dtype) in (np.int32, np.int64, np.uint32, np.uint64)


def _less(eqn: Any, kinds: Sequence[_Kind]) -> _Kind:
    number = _number(eqn.invars[1])
    is_false = isinstance(kinds[0], _Counter) and number is not None and number <= 0
    return _False() if is_false else None


def _broadcast(eqn: Any, kinds: Sequence[_Kind]) -> _Kind:
    is_one = eqn.outvars[0].aval.size == 1
    return kinds[0] if is_one and isinstance(kinds[0], _Counter) else None


def _selected(_: Any, kinds: Sequence[_Kind]) -> _Kind:
    kind = kinds[1] if isinstance(kinds[0], _False) else None
    return kind if isinstance(kind, _Counter) else None


# What may read a row, and write one.
_READS = frozenset(["dynamic_slice", "gather"])
_WRITES = frozenset(["dynamic_update_slice", "scatter", "scatter-add", "scatter_add"])
_FOLLOWED: Mapping[str, Callable[[Any, Sequence[_Kind]], _Kind]] = {
    "add": _added,
    "sub": _added,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _converted,
    "lt": _less,
    "select_n": _selected,
}
