"""Loops that read rows by their counter: `lax.fori_loop(0, n, lambda i, s: f(s, x[i]), s)`.

It is the same as a scan over these rows, and what can be done with a scan can be done with
it: rows come from host memory one after the other, are made when they are read, or stay in
the parts in which they were made. As a whole array that all iterations read it would have
to be there all the time, or be made in each of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax

from jturnip import compat
from jturnip.frontend.loops import scan_counts, with_body
from jturnip.frontend.values import Atom, Constant, Type, bind, called, is_key


@dataclass(frozen=True, slots=True)
class _Counter:
    """A number that is that of the iteration, and so many more: never negative."""

    more: int


@dataclass(frozen=True, slots=True)
class _Array:
    """A constant of the loop, by its position among these."""

    number: int


class _False:
    """What is false in all iterations."""


_Kind: TypeAlias = _Counter | _Array | _False | None
# Gives a row of a constant, of one more dimension: by the number of that, and how many
# positions it is past that of the iteration.
_Row: TypeAlias = Callable[[int, int], Any]


def with_rows(eqn: Any, operands: Sequence[Atom]) -> Any:
    """A scan that reads rows of arrays by its counter, and nothing else of these, as a
    jaxpr of the same operands in which it scans them; None where there is no such array.

    Args:
      eqn: a scan's equation.
      operands: what it reads.
    """
    if eqn.primitive.name != "scan" or eqn.params["reverse"] or eqn.effects:
        return None
    consts, carry, _ = scan_counts(eqn)
    closed, length = eqn.params["jaxpr"], eqn.params["length"]
    types = [Type.of(v.aval) for v in eqn.invars]
    counters = _counters(closed.jaxpr, operands[consts : consts + carry], length, consts)
    kinds: list[_Kind] = [counters.get(i) for i in range(len(types))]
    for i, t in enumerate(types[:consts]):
        if t.shape and t.shape[0] >= length and not is_key(t.dtype):
            kinds[i] = _Array(i)
    if not counters or not any(kinds[:consts]) or not _reads_rows(closed.jaxpr):
        return None
    body = [Type.of(t).struct() for t in closed.in_avals]
    walk = _Walk(length, lambda n, _: lax.full((1, *types[n].shape[1:]), 0, types[n].dtype))
    jax.make_jaxpr(lambda *given: walk.results(closed, given, kinds))(*body)
    rows = sorted((n, more) for n, more in walk.rows if n not in walk.whole)
    if not rows:
        return None
    scanned = {n for n, _ in rows}
    kept = [i for i in range(consts) if i not in scanned]

    def with_given(*given: Any) -> Sequence[Any]:
        values = dict(zip(kept, given, strict=False))
        values |= dict(enumerate(given[len(kept) : len(given) - len(rows)], consts))
        made = dict(zip(rows, given[len(given) - len(rows) :], strict=True))
        # Nobody reads what is not there.
        whole = [values.get(i) for i in range(len(kinds))]
        row = lambda n, more: lax.expand_dims(made[n, more], (0,))
        return _Walk(length, row).results(closed, whole, kinds)

    of_rows = [jax.ShapeDtypeStruct(types[n].shape[1:], types[n].dtype) for n, _ in rows]
    inner = jax.make_jaxpr(with_given)(*(body[i] for i in kept), *body[consts:], *of_rows)
    scan = with_body(eqn, inner, len(kept))

    def loop(*given: Any) -> Sequence[Any]:
        of = lambda n, more: lax.slice_in_dim(given[n], more, more + length)
        return scan(*(given[i] for i in kept), *given[consts:], *(of(*row) for row in rows))

    return jax.make_jaxpr(loop)(*(t.struct() for t in types))


def _reads_rows(jaxpr: Any) -> bool:
    """Whether anything may read a row."""
    inner = (called(eqn) for eqn in jaxpr.eqns)
    return any(eqn.primitive.name in _READS for eqn in jaxpr.eqns) or any(
        _reads_rows(getattr(each, "jaxpr", each)) for each in inner if each is not None
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
        # Rows that are read, as `_Row` has them; and arrays of which anything else is.
        self.rows: set[tuple[int, int]] = set()
        self.whole: set[int] = set()

    def results(
        self, closed: Any, given: Sequence[Any], kinds: Sequence[_Kind]
    ) -> list[Any]:
        """What it gives of these operands."""
        found, given_kinds = self._done(closed, given, kinds)
        self._need(given_kinds)
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

    def _need(self, kinds: Sequence[_Kind]) -> None:
        self.whole.update(kind.number for kind in kinds if isinstance(kind, _Array))


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
    return _Counter(more) if more >= 0 else None


def _converted(eqn: Any, kinds: Sequence[_Kind]) -> _Kind:
    # Positions in an array are no larger than what its own type of positions holds.
    wide = np.dtype(eqn.params["new_dtype"]) in (np.int32, np.int64, np.uint32, np.uint64)
    return kinds[0] if wide and isinstance(kinds[0], _Counter) else None


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


# What may read a row.
_READS = frozenset(["dynamic_slice", "gather"])
_FOLLOWED: Mapping[str, Callable[[Any, Sequence[_Kind]], _Kind]] = {
    "add": _added,
    "sub": _added,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _converted,
    "lt": _less,
    "select_n": _selected,
}
