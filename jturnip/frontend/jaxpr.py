"""A jaxpr, flat: nested calls inlined, loops cut where asked, dead equations gone."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jturnip import compat
from jturnip.errors import UnsupportedError
from jturnip.frontend import hints, refs, stacks, tables
from jturnip.frontend.loops import (
    SMALL,
    Cuts,
    Streaming,
    find_cuts,
    is_driven,
    scan_counts,
)
from jturnip.frontend.stacks import Spread, Stack, Value
from jturnip.frontend.tables import Sparse
from jturnip.frontend.values import (
    Constant,
    Equation,
    FlatJaxpr,
    Parts,
    Slice,
    Type,
    Window,
    bind,
    is_key,
    is_packed,
    source_line,
    values_of,
)


__all__ = ["Constant", "Equation", "FlatJaxpr", "Parts", "Slice", "Type", "flatten"]

# A table in host memory that is larger than this, or than a share of what a task may hold,
# is left there.
_TABLE = 1 << 20
# Parts smaller than this are more trouble than the whole.
_LEAST_PART = 4096

# Primitive name → the parameter that holds the jaxpr it only calls. Differentiation rules
# (custom_jvp, custom_vjp) have done their part by the time a function is traced.
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


@dataclass(frozen=True, slots=True)
class Condition:
    """What a loop's body is followed by: whether the loop goes on with its results."""

    jaxpr: Any
    # How many arguments only the condition has. They come before the body's; the others
    # are the body's results.
    constants: int


def flatten(
    closed: Any,
    forwarded: Collection[int] | Mapping[int, int] = (),
    streaming: Streaming | None = None,
    condition: Condition | None = None,
) -> FlatJaxpr:
    """Flattens a traced function's jaxpr.

    Args:
      closed: `jax.jit(fn).trace(...).jaxpr`, of any supported JAX version.
      forwarded: positions of arguments that may be returned as they are, once; or for
        positions of results the only argument that each may be. Any other result is
        written by an equation of its own, a copy where the function has none.
      streaming: how to cut loops and large arrays; without it none is.
      condition: for the body of a loop: then the first result is the condition's.

    Raises:
      UnsupportedError: for values that are no arrays, or are put on another device; it
        names the primitive and the user's line.
    """
    avals = argument_avals(closed, condition)
    _check_arguments(closed)
    flattener = _Flattener(closed, avals, streaming)
    inputs = tuple(map(flattener.new_value, avals))
    arguments = flattener.arguments(inputs)
    before = condition.constants if condition else 0
    results = flattener.call(closed, arguments[before:])
    if condition:
        results = [
            *flattener.call(condition.jaxpr, [*arguments[:before], *results]),
            *results,
        ]
    if isinstance(forwarded, Mapping):
        allowed = [
            {inputs[forwarded[r]]} if r in forwarded else () for r in range(len(results))
        ]
    else:
        allowed = [{inputs[i] for i in forwarded}] * len(results)
    outputs = flattener.distinct(results, allowed)
    return flattener.finish(inputs, outputs)


def argument_avals(closed: Any, condition: Condition | None = None) -> list[Any]:
    """Abstract values of the arguments that `flatten` finds."""
    own = [v.aval for v in getattr(closed, "jaxpr", closed).invars]
    if condition is None:
        return own
    invars = getattr(condition.jaxpr, "jaxpr", condition.jaxpr).invars
    return [*(v.aval for v in invars[: condition.constants]), *own]


def pruned_arguments(closed: Any) -> frozenset[int]:
    """Positions of arguments that no equation reads and that are not returned: `jax.jit`
    makes no parameters of them."""
    jaxpr = getattr(closed, "jaxpr", closed)
    used = {v for e in jaxpr.eqns for v in e.invars if not hasattr(v, "val")}
    used.update(v for v in jaxpr.outvars if not hasattr(v, "val"))
    return frozenset(i for i, v in enumerate(jaxpr.invars) if v not in used)


class _Flattener:
    """Collects what `flatten` returns."""

    def __init__(
        self, closed: Any, avals: Sequence[Any], streaming: Streaming | None
    ) -> None:
        self._types: list[Type] = []
        self._equations: list[Equation] = []
        # id of a closed-over array → (its value, the array, which keeps the id its own)
        self._constants: dict[int, tuple[int, Any]] = {}
        self._slices: dict[tuple[int, int, int], int] = {}
        # Values of arrays in host memory, whose slices are free.
        self._hosted: set[int] = set()
        self._held: dict[int, Stack] = {}
        # The token of the last equation with effects, and all there were.
        self._token: int | None = None
        self._tokens: list[int] = []
        self._starts: dict[int, int] = {}
        # (id of an equation, which operands are cut, rows) → (jaxpr, equation)
        self._by_rows: dict[Any, tuple[Any, Any]] = {}
        self._streaming = streaming
        self._cuts = Cuts(frozenset(), frozenset(), {})
        if streaming is not None:
            self._cuts = find_cuts(
                closed, streaming, _INLINED, _held(closed, avals, streaming)
            )

    # -- values ------------------------------------------------------------------------

    def new_value(self, aval: Any) -> int:
        self._types.append(Type.of(aval))
        return len(self._types) - 1

    def arguments(self, inputs: Sequence[int]) -> list[Value]:
        """The arguments; those in host memory can be read in parts."""
        on_host = self._streaming.on_host if self._streaming else ()
        return [self._stored(v, i in on_host) for i, v in enumerate(inputs)]

    def constant(self, array: Any, aval: Any) -> Value:
        if id(array) not in self._constants:
            self._constants[id(array)] = (self.new_value(aval), array)
        on_host = self._streaming is not None and self._streaming.is_on_host(array)
        return self._stored(self._constants[id(array)][0], on_host)

    def _stored(self, value: int, on_host: bool) -> Value:
        t = self._types[value]
        if not on_host or not t.shape or t.nbytes < SMALL or not _can_be_cut(t.dtype):
            return value
        self._hosted.add(value)
        rows = self._cuts.rows.get(t.shape[0])
        assert self._streaming is not None
        if rows is None or (
            t.rows(rows).nbytes < _LEAST_PART and t.nbytes <= self._streaming.largest
        ):
            return value  # what reads it by rows still finds them in host memory
        return self._held.setdefault(value, Stack(t, rows, whole=value))

    def _start(self, row: int) -> int:
        """A number on the device: first rows are operands, so that parts share a task."""
        if row not in self._starts:
            array = np.asarray(row, np.int32)
            self._starts[row] = self.new_value(array)
            self._constants[id(array)] = (self._starts[row], array)
        return self._starts[row]

    def whole(self, value: Value, calls: tuple[Any, ...] = ()) -> int | Constant:
        """A value in one piece."""
        if isinstance(value, Stack):
            if value.whole is None:
                assert value.parts is not None
                types = tuple(self._types[p] for p in value.parts)
                (value.whole,) = self._ours(stacks.joining(types), value.parts, calls)
            return value.whole
        if isinstance(value, Sparse):
            if value.whole is None:
                value.whole = self._sparse_rows(value, 0, value.type.shape[0])
            return value.whole
        if isinstance(value, Spread):
            length = value.type.shape[0]
            if length not in value.values:
                (value.values[length],) = self._emit(
                    value.eqn, (value.operand,), value.calls
                )
            return value.values[length]
        return value

    def parts(self, value: Value, rows: int, calls: tuple[Any, ...]) -> tuple[int, ...]:
        """A value as parts of so many rows."""
        if isinstance(value, Stack) and value.rows == rows and value.parts is not None:
            return value.parts
        if isinstance(value, Sparse):
            if rows not in value.parts:
                cuts = stacks.bounds(value.type.shape[0], rows)
                value.parts[rows] = tuple(self._sparse_rows(value, *cut) for cut in cuts)
            return value.parts[rows]
        if isinstance(value, Spread):
            return tuple(
                self._spread_rows(value, stop - start)
                for start, stop in stacks.bounds(value.type.shape[0], rows)
            )
        whole = self.whole(value, calls)
        assert isinstance(whole, int)
        parts = tuple(
            self._part(whole, start, stop, calls)
            for start, stop in stacks.bounds(self._types[whole].shape[0], rows)
        )
        if isinstance(value, Stack) and value.rows == rows:
            value.parts = parts
        return parts

    def _part(self, whole: int, start: int, stop: int, calls: tuple[Any, ...]) -> int:
        t = self._types[whole]
        if whole in self._hosted:
            key = whole, start, stop
            if key not in self._slices:
                self._slices[key] = self.new_value(t.rows(stop - start).struct())
            return self._slices[key]
        cutting = stacks.cutting(t, stop - start)
        (part,) = self._ours(cutting, (whole, self._start(start)), calls)
        return part

    def _spread_rows(self, value: Spread, rows: int) -> int:
        if rows not in value.values:
            jaxpr = self._on_rows(value.eqn, (False,), rows)
            operands = (value.operand,)
            (value.values[rows],) = self._ours(jaxpr, operands, value.calls)
        return value.values[rows]

    # -- equations ---------------------------------------------------------------------

    def call(
        self, closed: Any, arguments: Sequence[Value], calls: tuple[Any, ...] = ()
    ) -> list[Value]:
        """Inlines a call; returns its results."""
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        scope: dict[Any, Value] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            scope[var] = self.constant(const, var.aval)
        scope.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Value:
            if not hasattr(atom, "val"):
                return scope[atom]
            if atom.aval.shape:
                return self.constant(atom.val, atom.aval)
            return Constant(atom.val, Type.of(atom.aval))

        for eqn in refs.draw_together(jaxpr):
            operands = [read(v) for v in eqn.invars]
            if isinstance(eqn, refs.Region):
                results = self._region(eqn, operands, calls)
            else:
                results = self._apply(eqn, operands, calls)
            scope.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _apply(
        self, eqn: Any, operands: Sequence[Value], calls: tuple[Any, ...]
    ) -> Sequence[Value]:
        name = eqn.primitive.name
        inner = _INLINED.get(name)
        if inner is not None and inner in eqn.params:
            return self.call(eqn.params[inner], operands, (*calls, eqn))
        if name == "custom_linear_solve":
            return self._solved(eqn, operands, calls)
        _check(eqn, calls)
        if hints.is_move(eqn):
            return operands
        if id(eqn) in self._cuts.scans:
            return self._scan(eqn, operands, calls)
        if id(eqn) in self._cuts.long:
            return self._long_scan(eqn, operands, calls)
        if name == "unstack":
            rows = self._unstacked(eqn, operands[0], calls)
            if rows is not None:
                return rows
        made = self._apart(eqn, operands, calls)
        if made is not None:
            return [made]
        ours = hints.has_moves(eqn)
        if ours:
            eqn, calls = self._without_moves(eqn), (*calls, eqn)
        whole = [self.whole(v, calls) for v in operands]
        if self._streaming is not None and is_driven(eqn, self._streaming):
            return self._driven(eqn, whole, calls, ours)
        return self._emit(eqn, whole, calls, ours)

    def _solved(
        self, eqn: Any, operands: Sequence[Value], calls: tuple[Any, ...]
    ) -> Sequence[Value]:
        """A linear system: its derivative has had its part, the solver is left."""
        counts = eqn.params["const_lengths"]
        before = counts.matvec + counts.vecmat
        own = operands[before : before + counts.solve]
        return self.call(
            eqn.params["jaxprs"].solve, [*own, *operands[sum(counts) :]], (*calls, eqn)
        )

    def _apart(
        self, eqn: Any, operands: Sequence[Value], calls: tuple[Any, ...]
    ) -> Value | None:
        """The result of an equation that need not hold all of what it reads or writes;
        None for any other."""
        name = eqn.primitive.name
        made: Value | None = None
        if name in tables.HOST_READS or name in tables.HOST_WRITES:
            made = self._table_rows(eqn, operands, calls)
        elif name == "slice":
            made = self._rows(eqn, operands[0], calls)
        if made is None and any(isinstance(v, Sparse) for v in operands):
            made = self._with_sparse(eqn, operands, calls)
            operands = [self._stacked(v) if isinstance(v, Sparse) else v for v in operands]
        if made is None and any(isinstance(v, Stack) for v in operands):
            made = self._by_parts(eqn, operands, calls)
        if made is None and self._is_spread(eqn):
            operand = self.whole(operands[0], calls)
            made = Spread(eqn, operand, calls, Type.of(eqn.outvars[0].aval))
        return made

    def _driven(
        self,
        eqn: Any,
        operands: Sequence[int | Constant],
        calls: tuple[Any, ...],
        ours: bool,
        like: Any = None,
    ) -> list[int]:
        """A loop or a branch that is planned by itself; all it reads are values. Its
        results are of the types of those of `like`, if that is another equation."""
        read = []
        for v in operands:
            if isinstance(v, Constant):
                array = np.asarray(v.value, v.type.dtype)
                v = self.whole(self.constant(array, v.type.struct()))
            read.append(v)
        results = [self.new_value(v.aval) for v in (like or eqn).outvars]
        self._equations.append(
            Equation(eqn, tuple(read), tuple(results), calls, ours=ours, driven=True)
        )
        # What is driven has its place in the program already; so has what comes after.
        self._token = None
        return results

    def _emit(
        self,
        eqn: Any,
        operands: Sequence[int | Constant],
        calls: tuple[Any, ...],
        ours: bool = False,
    ) -> list[int]:
        results = [self.new_value(v.aval) for v in eqn.outvars]
        if not eqn.effects:
            equation = Equation(eqn, tuple(operands), tuple(results), calls, ours=ours)
            self._equations.append(equation)
            return results
        if self._token is None:
            self._token = self._start(0)
        before, self._token = self._token, self.new_value(np.int32(0))
        self._tokens.append(self._token)
        inputs, outputs = (*operands, before), (*results, self._token)
        self._equations.append(Equation(eqn, inputs, outputs, calls, True, ours))
        return results

    def _ours(
        self,
        closed: Any,
        operands: Sequence[int | Constant],
        calls: tuple[Any, ...],
        driven: str = "",
    ) -> list[int]:
        """Emits the equations of a jaxpr of our own making; drives the primitive named."""
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        scope: dict[Any, Any] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            scope[var] = self.whole(self.constant(const, var.aval))
        scope.update(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Any) -> Any:
            if not hasattr(atom, "val"):
                return scope[atom]
            return Constant(atom.val, Type.of(atom.aval))

        for eqn in jaxpr.eqns:
            given = list(map(read, eqn.invars))
            inner = _INLINED.get(eqn.primitive.name)
            if inner is not None and inner in eqn.params:
                results = self._ours(eqn.params[inner], given, calls, driven)
            elif eqn.primitive.name == driven:
                results = self._driven(eqn, given, calls, ours=True)
            else:
                results = self._emit(eqn, given, calls, ours=True)
            scope.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _without_moves(self, eqn: Any) -> Any:
        structs = [Type.of(v.aval).struct() for v in eqn.invars]
        params = hints.params_without_moves(eqn, _INLINED)
        run = lambda *operands: bind(eqn, operands, **params)
        made = jax.make_jaxpr(run)(*structs)
        (cleaned,) = getattr(made, "jaxpr", made).eqns
        return cleaned

    def _region(
        self, region: refs.Region, operands: Sequence[Value], calls: tuple[Any, ...]
    ) -> list[int]:
        """All that touches some references, as one equation."""
        lead = region.lead
        for v in region.invars:
            if compat.is_reference(v.aval):
                raise UnsupportedError(
                    f"{_what(lead, calls)} changes a reference that was made outside the"
                    " function, and jturnip splits functions of arrays only. Make the"
                    " reference inside, or raise gpu_bytes so that the whole function fits."
                )
        structs = [Type.of(v.aval).struct() for v in region.invars]
        made = jax.make_jaxpr(jax.jit(region.function()))(*structs)
        (eqn,) = getattr(made, "jaxpr", made).eqns
        whole = [self.whole(v, calls) for v in operands]
        return self._emit(eqn, whole, (*calls, lead), ours=True)

    # -- tables ------------------------------------------------------------------------

    def _is_table(self, value: Value) -> bool:
        """Whether a value is in host memory and large enough to be left there."""
        whole = value.whole if isinstance(value, Stack) else value
        if self._streaming is None or not isinstance(whole, int):
            return False
        least = min(_TABLE, max(SMALL, self._streaming.largest // 4))
        return whole in self._hosted and self._types[whole].nbytes > least

    def _table_rows(
        self, eqn: Any, operands: Sequence[Value], calls: tuple[Any, ...]
    ) -> Value | None:
        """Rows of a table in host memory, or some added to one."""
        table, *others = operands
        reads = eqn.primitive.name in tables.HOST_READS
        if self._is_table(table) and (
            tables.takes_rows(eqn) if reads else tables.adds_rows(eqn)
        ):
            whole = [self.whole(v, calls) for v in operands]
            return self._driven(eqn, whole, calls, ours=False)[0]
        if not reads and self._is_zeros(table) and tables.adds_rows(eqn):
            indices, updates = (self.whole(v, calls) for v in others)
            if isinstance(updates, int):
                t = Type.of(eqn.outvars[0].aval)
                return Sparse(eqn, calls, t, indices, updates)
        return None

    def _is_zeros(self, value: Value) -> bool:
        if not isinstance(value, Spread) or not isinstance(value.operand, Constant):
            return False
        return not np.any(np.asarray(value.operand.value))

    def _with_sparse(
        self, eqn: Any, operands: Sequence[Value], calls: tuple[Any, ...]
    ) -> Value | None:
        """What stays sparse, and what is done to a table in host memory; None else."""
        name = eqn.primitive.name
        sparse = next(v for v in operands if isinstance(v, Sparse))
        if _only_scales(eqn, [v is sparse for v in operands]):
            return self._scaled(eqn, sparse, operands, calls)
        first = operands[0]
        added = name in ("add", "add_any") or (name == "sub" and first is not sparse)
        others = [v for v in operands if v is not sparse]
        if not added or len(others) != 1 or not self._is_table(others[0]):
            return None
        given = [sparse.updates] if sparse.base is None else [sparse.updates, sparse.base]
        if name == "sub":
            given = [self._negative(v, calls) for v in given]
        whole = [self.whole(others[0], calls), sparse.indices, *given]
        return self._driven(sparse.eqn, whole, calls, ours=False, like=eqn)[0]

    def _stacked(self, sparse: Sparse) -> Stack:
        rows = self._cuts.rows[sparse.type.shape[0]]
        return Stack(sparse.type, rows, self.parts(sparse, rows, sparse.calls))

    def _negative(self, value: int, calls: tuple[Any, ...]) -> int:
        made = jax.make_jaxpr(lax.neg)(self._types[value].struct())
        return self._ours(made, (value,), calls)[0]

    def _scaled(
        self, eqn: Any, sparse: Sparse, operands: Sequence[Value], calls: tuple[Any, ...]
    ) -> Sparse:
        """Does to the rows of a sparse table what `eqn` does to all of it."""
        structs = [
            (self._types[sparse.updates] if v is sparse else Type.of(atom.aval)).struct()
            for v, atom in zip(operands, eqn.invars, strict=True)
        ]
        made = jax.make_jaxpr(lambda *operands: bind(eqn, operands))(*structs)
        given = [sparse.updates if v is sparse else self.whole(v, calls) for v in operands]
        (updates,) = self._ours(made, given, (*calls, eqn))
        t = Type.of(eqn.outvars[0].aval)
        base = self._scaled_base(eqn, sparse, operands, calls)
        return Sparse(sparse.eqn, sparse.calls, t, sparse.indices, updates, base)

    def _scaled_base(
        self, eqn: Any, sparse: Sparse, operands: Sequence[Value], calls: tuple[Any, ...]
    ) -> int | None:
        """What the zeros become, where they may not stay zeros."""
        others = [v for v in operands if v is not sparse]
        if sparse.base is None and all(map(_is_ordinary, others)):
            return None
        t = Type((), sparse.type.dtype, sparse.type.weak_type)
        structs = [
            (t if v is sparse else Type.of(atom.aval)).struct()
            for v, atom in zip(operands, eqn.invars, strict=True)
        ]
        made = jax.make_jaxpr(lambda *operands: bind(eqn, operands))(*structs)
        zero = Constant(np.zeros((), t.dtype), t) if sparse.base is None else sparse.base
        given = [zero if v is sparse else self.whole(v, calls) for v in operands]
        return self._ours(made, given, (*calls, eqn))[0]

    def _sparse_rows(self, sparse: Sparse, start: int, stop: int) -> int:
        indices = sparse.indices
        of_indices = indices.type if isinstance(indices, Constant) else self._types[indices]
        made = tables.scattering(
            sparse.eqn.params["mode"],
            sparse.type.shape[0],
            sparse.type.rows(stop - start),
            of_indices,
            self._types[sparse.updates],
            sparse.base is not None,
        )
        base = () if sparse.base is None else (sparse.base,)
        operands = (indices, sparse.updates, self._start(start), *base)
        (part,) = self._ours(made, operands, (*sparse.calls, sparse.eqn))
        return part

    # -- loops and parts ---------------------------------------------------------------

    def _scan(
        self, eqn: Any, operands: Sequence[Value], calls: tuple[Any, ...]
    ) -> list[Value]:
        """A scan, some iterations at a time."""
        consts, carries, _ = scan_counts(eqn)
        length = eqn.params["length"]
        rows = self._cuts.rows[length]
        scanned = [self.parts(x, rows, calls) for x in operands[consts + carries :]]
        fixed = [self.whole(v, calls) for v in operands[:consts]]
        # What one iteration hands to the next is whole, unless it is too large to be.
        assert self._streaming is not None
        most = self._streaming.largest
        carry: list[Value] = [
            self.whole(v, calls) if isinstance(v, Stack) and v.type.nbytes <= most else v
            for v in operands[consts : consts + carries]
        ]
        cuts = stacks.bounds(length, rows)
        order = range(len(cuts))
        stacked: list[list[int]] = [[0] * len(cuts) for _ in eqn.outvars[carries:]]
        for k in reversed(order) if eqn.params["reverse"] else order:
            start, stop = cuts[k]
            parts = [parts[k] for parts in scanned]
            carry, ys = self._iterations(eqn, fixed, carry, parts, stop - start, calls)
            for column, y in zip(stacked, ys, strict=True):
                column[k] = y
        types = [Type.of(v.aval) for v in eqn.outvars[carries:]]
        results = [Stack(t, rows, tuple(c)) for t, c in zip(types, stacked, strict=True)]
        within = (*calls, eqn)
        small = [r.type.nbytes < SMALL for r in results]
        return [
            *carry,
            *(
                self.whole(r, within) if s else r
                for r, s in zip(results, small, strict=True)
            ),
        ]

    def _long_scan(
        self, eqn: Any, operands: Sequence[Value], calls: tuple[Any, ...]
    ) -> list[Value]:
        """A scan as a loop that is driven."""
        made = stacks.as_while(eqn, *scan_counts(eqn)[:2])
        if hints.has_moves(eqn):
            made = hints.without_moves(made, _INLINED)
        whole = [self.whole(v, calls) for v in operands]
        return list(self._ours(made, whole, (*calls, eqn), driven="while"))

    def _iterations(
        self,
        eqn: Any,
        fixed: Sequence[int | Constant],
        carry: Sequence[Value],
        parts: Sequence[int],
        count: int,
        calls: tuple[Any, ...],
    ) -> tuple[list[Value], list[int]]:
        within = (*calls, eqn)
        if count > 1 or not self._is_inlined(eqn):
            whole = [self.whole(v, calls) for v in carry]
            shorter = self._shorter(eqn, count)
            if hints.has_moves(shorter):
                shorter = self._without_moves(shorter)
            operands = [*fixed, *whole, *parts]
            results: list[Any] = self._emit(shorter, operands, within, ours=True)
            return results[: len(carry)], results[len(carry) :]
        rows = [self._ours(stacks.taking(self._types[p]), (p,), within)[0] for p in parts]
        results = self.call(eqn.params["jaxpr"], [*fixed, *carry, *rows], within)
        ys = []
        for y in results[len(carry) :]:
            piece = self.whole(y, within)
            t = piece.type if isinstance(piece, Constant) else self._types[piece]
            ys += self._ours(stacks.stacking(t), (piece,), within)
        return results[: len(carry)], ys

    def _is_inlined(self, eqn: Any) -> bool:
        return self._cuts.rows[eqn.params["length"]] == 1

    def _shorter(self, eqn: Any, length: int) -> Any:
        key = ("scan", id(eqn), length)
        if key not in self._by_rows:
            consts, carries, _ = scan_counts(eqn)
            types = [Type.of(v.aval) for v in eqn.invars]
            structs = [
                (t.rows(length) if i >= consts + carries else t).struct()
                for i, t in enumerate(types)
            ]
            made = stacks.shortened(eqn, length, structs)
            self._by_rows[key] = made, eqn
        made = self._by_rows[key][0]
        (shorter,) = getattr(made, "jaxpr", made).eqns
        return shorter

    def _on_rows(self, eqn: Any, cut: tuple[bool, ...], rows: int) -> Any:
        key = (id(eqn), cut, rows)
        if key not in self._by_rows:
            self._by_rows[key] = stacks.on_rows(eqn, cut, rows), eqn
        return self._by_rows[key][0]

    def _is_spread(self, eqn: Any) -> bool:
        if eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) != 1:
            return False
        t = Type.of(eqn.outvars[0].aval)
        if not t.shape or t.shape[0] not in self._cuts.rows or t.nbytes < SMALL:
            return False
        return 0 not in eqn.params["broadcast_dimensions"]

    def _by_parts(
        self, eqn: Any, operands: Sequence[Value], calls: tuple[Any, ...]
    ) -> Value | None:
        """Applies an equation part by part; None where that cannot be done."""
        rows = next(v.rows for v in operands if isinstance(v, Stack))
        combine = stacks.combiner(eqn)
        if combine is not None:
            return self._reduce(eqn, operands[0], calls)
        if not stacks.works_by_rows(eqn, operands):
            return None
        cut = tuple(stacks.cut_operands(eqn, operands))
        columns = [
            self.parts(v, rows, calls) if c else self.whole(v, calls)
            for v, c in zip(operands, cut, strict=True)
        ]
        t = Type.of(eqn.outvars[0].aval)
        results = []
        for k, (start, stop) in enumerate(stacks.bounds(t.shape[0], rows)):
            piece = [c[k] if isinstance(c, tuple) else c for c in columns]
            results += self._ours(
                self._on_rows(eqn, cut, stop - start), piece, (*calls, eqn)
            )
        return Stack(t, rows, tuple(results))

    def _unstacked(
        self, eqn: Any, operand: Value, calls: tuple[Any, ...]
    ) -> Sequence[Value] | None:
        """Every row of what is in host memory by itself; None for anything else."""
        whole = operand.whole if isinstance(operand, Stack) else operand
        if eqn.params["axis"] != 0 or not isinstance(whole, int):
            return None
        if whole not in self._hosted:
            return None
        parts = self.parts(whole, 1, calls)
        within = (*calls, eqn)
        return [self._ours(stacks.taking(self._types[p]), (p,), within)[0] for p in parts]

    def _rows(self, eqn: Any, operand: Value, calls: tuple[Any, ...]) -> Value | None:
        """Some rows of what is in host memory or in parts; None where that is no help."""
        (start, stop), aside = stacks.rows_taken(eqn)
        if stop - start == eqn.invars[0].aval.shape[0] or stop <= start:
            return None
        whole = operand.whole if isinstance(operand, Stack) else operand
        if isinstance(whole, int) and whole in self._hosted:
            taken = self._part(whole, start, stop, calls)
        elif isinstance(operand, Stack) and operand.parts is not None:
            cuts = operand.bounds
            wanted = [k for k, (a, b) in enumerate(cuts) if a < stop and start < b]
            if cuts[wanted[0]][0] != start or cuts[wanted[-1]][1] != stop:
                return None
            parts = operand.parts[wanted[0] : wanted[-1] + 1]
            types = tuple(self._types[p] for p in parts)
            taken = parts[0]
            if len(parts) > 1:
                (taken,) = self._ours(stacks.joining(types), parts, calls)
        else:
            return None
        if not aside:
            return taken
        key = ("aside", id(eqn))
        if key not in self._by_rows:
            self._by_rows[key] = stacks.sliced_aside(eqn, stop - start), eqn
        (taken,) = self._ours(self._by_rows[key][0], (taken,), (*calls, eqn))
        return taken

    def _reduce(self, eqn: Any, operand: Value, calls: tuple[Any, ...]) -> int:
        assert isinstance(operand, Stack)
        within = (*calls, eqn)
        widen, combine, narrow = stacks.combining(eqn, Type.of(eqn.outvars[0].aval))
        total: int | None = None
        parts = self.parts(operand, operand.rows, calls)
        for part in parts:
            jaxpr = self._on_rows(eqn, (True,), self._types[part].shape[0])
            (partial,) = self._ours(jaxpr, (part,), within)
            if widen is not None:
                (partial,) = self._ours(widen, (partial,), within)
            if total is None:
                total = partial
            else:
                (total,) = self._ours(combine, (total, partial), within)
        assert total is not None
        if narrow is not None:
            (total,) = self._ours(narrow, (total,), within)
        return total

    # -- the end -----------------------------------------------------------------------

    def distinct(
        self, results: Sequence[Value], allowed: Sequence[Collection[int]]
    ) -> tuple[int | Parts, ...]:
        """Results as values that are each written once, for this purpose only.

        Args:
          results: what the function returns.
          allowed: for each the arguments that may be returned in its place as they are.
        """
        found = [
            (r, self.parts(r, r.rows, ()), None)
            if isinstance(r, Stack) and self._is_left_in_parts(r, of)
            else (r, None, self.whole(r))
            for r, of in zip(results, allowed, strict=True)
        ]
        taken = set(range(len(self._types)))
        for equation in self._equations:
            taken.difference_update(equation.outputs)
        outputs: list[int | Parts] = []
        for (result, pieces, value), of in zip(found, allowed, strict=True):
            if pieces is not None:
                assert isinstance(result, Stack)
                own = tuple(self._own(p, taken) for p in pieces)
                outputs.append(Parts.along(0, own, self._types, result.type))
            elif isinstance(value, int) and value in of and value not in outputs:
                outputs.append(value)
            else:
                assert value is not None
                outputs.append(self._own(value, taken))
        return tuple(outputs)

    def _own(self, value: int | Constant, taken: set[int]) -> int:
        """A value that is not taken: itself, or a copy. Takes it."""
        if isinstance(value, Constant) or value in taken:
            t = value.type if isinstance(value, Constant) else self._types[value]
            # New values are not taken: they are written for this.
            (value,) = self._ours(stacks.copying(t), (value,), ())
        taken.add(value)
        return value

    def _is_left_in_parts(self, result: Stack, forwarded: Collection[int]) -> bool:
        """Whether a result is put together in host memory: where it is large, or takes the
        place of an argument there."""
        if result.whole in forwarded:
            return False
        assert self._streaming is not None
        large = 2 * result.type.nbytes > self._streaming.largest
        reuses = self._streaming.donated[(result.type.shape, result.type.dtype)] > 0
        return large or (result.parts is not None and reuses)

    def finish(
        self, inputs: tuple[int, ...], outputs: tuple[int | Parts, ...]
    ) -> FlatJaxpr:
        """What was collected, without what no result and no effect needs."""
        wanted = {*self._tokens, *(v for o in outputs for v in values_of(o))}
        equations = _live(self._equations, wanted)
        used = {v for e in equations for v in e.inputs if isinstance(v, int)}
        slices = tuple(
            Slice(v, source, Window.of(self._types[source].shape).part(0, start, stop))
            for (source, start, stop), v in self._slices.items()
            if v in used
        )
        used.update(s.source for s in slices)
        constants = tuple((v, c) for v, c in self._constants.values() if v in used)
        return FlatJaxpr(tuple(self._types), equations, inputs, constants, outputs, slices)


def _held(closed: Any, avals: Sequence[Any], streaming: Streaming) -> Iterator[Type]:
    for i, aval in enumerate(avals):
        if i in streaming.on_host and _can_be_cut(aval.dtype):
            yield Type.of(aval)
    for array in getattr(closed, "consts", ()):
        if streaming.is_on_host(array) and _can_be_cut(array.dtype):
            yield Type.of(array)


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


def _is_ordinary(value: Value) -> bool:
    """Whether zero times it, and zero divided by it, are surely zero."""
    if not isinstance(value, Constant):
        return False
    number = np.asarray(value.value)
    return bool(np.isfinite(number) and number != 0)


def _can_be_cut(dtype: Any) -> bool:
    """Whether rows lie in host memory as numpy has them: not so for keys and int4."""
    return not is_key(dtype) and not is_packed(dtype)


def _check_arguments(closed: Any) -> None:
    """Refuses tokens, and references that come from outside, with the line that first uses
    one."""
    jaxpr = getattr(closed, "jaxpr", closed)
    if not all(compat.has_type(v.aval) for v in (*jaxpr.invars, *jaxpr.outvars)):
        raise UnsupportedError(
            "the function takes or returns a token, which orders what it does, and jturnip"
            " splits functions of arrays only. Order effects with ordered=True instead, or"
            " raise gpu_bytes so that the whole function fits."
        )
    for v in (*jaxpr.invars, *jaxpr.constvars):
        if not compat.is_reference(v.aval):
            continue
        users = [e for e in jaxpr.eqns if any(v is operand for operand in e.invars)]
        what = f"{_what(users[0], ())} uses one: " if users else ""
        raise UnsupportedError(
            f"{what}the function takes or closes over a mutable reference ({v.aval}), and"
            " jturnip splits functions of arrays only. Make the reference inside the"
            " function, or raise gpu_bytes so that the whole function fits."
        )


def _what(eqn: Any, calls: tuple[Any, ...]) -> str:
    """How to speak of an equation to the user."""
    where = source_line((eqn,), calls) or "unknown line"
    return f'primitive "{eqn.primitive.name}" ({where})'


def _check(eqn: Any, calls: tuple[Any, ...]) -> None:
    """Refuses what is not a function of arrays on one device, with the user's line."""
    for variable in (*eqn.invars, *eqn.outvars):
        aval = variable.aval
        if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
            raise UnsupportedError(
                f"{_what(eqn, calls)} uses {aval}, which is not an array, and jturnip"
                " splits functions of arrays only. Raise gpu_bytes so that the whole"
                " function fits."
            )
    if eqn.primitive.name == "device_put" and not hints.is_move(eqn):
        raise UnsupportedError(
            f"{_what(eqn, calls)} puts a value on another device, and jturnip runs on one."
            " Move it with jax.device_put outside the function."
        )


def _live(equations: Sequence[Equation], wanted: set[int]) -> tuple[Equation, ...]:
    """Equations that a wanted value needs, in their order."""
    kept = []
    for equation in reversed(equations):
        acts = equation.driven and equation.origin.effects
        if wanted.isdisjoint(equation.outputs) and not acts:
            continue
        kept.append(equation)
        wanted.update(v for v in equation.inputs if isinstance(v, int))
    return tuple(reversed(kept))
