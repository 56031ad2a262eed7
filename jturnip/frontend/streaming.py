"""A pass: loops and large arrays in host memory, some rows at a time.

A scan that does not fit becomes parts of a few iterations each; the arrays it reads and
writes become parts along their rows. What is computed from parts row by row, by the rules
of its axes (`axes.py`), stays in parts: an optimizer's update of a stack of weights never
holds the stack. Anything else asks for a value in one piece. Slices of what is in host
memory are free, so each part of it is read where it is needed.

Loops of unknown length and branches that do not fit are driven: they stand between two
plans, and so do rows that the host reads and writes (`tables.py`).
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from jturnip.frontend import parts, stacks
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.builder import Builder
from jturnip.frontend.foreign import Foreign
from jturnip.frontend.hoisting import hoisted
from jturnip.frontend.inline import Condition, inline
from jturnip.frontend.loops import (
    LOOPS,
    MOST_EQUATIONS,
    SMALL,
    Cuts,
    Streaming,
    bytes_for_one_branch,
    find_cuts,
    is_driven,
    scan_counts,
)
from jturnip.frontend.merging import merged
from jturnip.frontend.results import Forwarded, may_be
from jturnip.frontend.rules import COMBINED, SCATTERS, Along, Rule, without_halos
from jturnip.frontend.stacks import Made, Spread, Stack, Value
from jturnip.frontend.tables import reads_rows, rows_by_host
from jturnip.frontend.unread import without_unread
from jturnip.frontend.unrolling import is_stencil, several_at_once
from jturnip.frontend.values import (
    Atom,
    Constant,
    Equation,
    FlatJaxpr,
    Parts,
    Slice,
    Type,
    Window,
    called,
    is_key,
    is_packed,
    values_of,
)
from jturnip.frontend.whiles import several_on_trial


# A table in host memory that is larger than this, or than a share of what a task may hold,
# is left there.
_TABLE = 1 << 20
# Parts smaller than this are more trouble than the whole.
_LEAST_PART = 4096


@dataclass(slots=True)
class Seen:
    """What is known of one function from passes over it, with whatever sizes."""

    # What `jax.lax.platform_dependent` chooses by.
    platform: str = ""
    # Fourier transforms over several dimensions, or of rows, that give more bytes are done
    # over one dimension after the other.
    largest_fft: float = math.inf
    # Loops that carry more bytes, in and out, have several iterations in one, if these are
    # stencils.
    largest_carried: float = math.inf
    rules: Known = field(default_factory=Known)
    foreign: Foreign = field(default_factory=Foreign)
    # By the id of a jaxpr, with it, so that the id stays its own: it inlined.
    inlined: dict[Any, tuple[Any, FlatJaxpr]] = field(default_factory=dict)
    # By the id of an equation and more, with it: what was made of it.
    made: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    # Jaxprs in which several iterations of a loop are one.
    unrolled: list[Any] = field(default_factory=list)

    def inline(self, closed: Any, condition: Condition | None = None) -> FlatJaxpr:
        """What `inline`, `merged` and `without_unread` make of a jaxpr."""
        key = id(closed), id(condition)
        if key not in self.inlined:
            how = self.platform, self.largest_fft, self._unrolled, self.foreign
            flat = merged(inline(closed, condition, *how))
            self.inlined[key] = (closed, condition), without_unread(flat, self.inline)
        return self.inlined[key][1]

    def is_unrolled(self, eqn: Any) -> bool:
        """Whether several iterations are one in a loop."""
        return any(eqn is e for closed in self.unrolled for e in closed.jaxpr.eqns)

    def _unrolled(self, eqn: Any) -> Any | None:
        """What is inlined instead of a loop that is a stencil."""
        if eqn.primitive.name not in LOOPS or self.largest_carried == math.inf:
            return None
        if self.is_unrolled(eqn):
            return None

        def make() -> Any | None:
            largest = self.largest_carried
            if eqn.primitive.name == "scan":
                body = self.inline(eqn.params["jaxpr"])
            else:
                first = eqn.params["cond_jaxpr"], eqn.params["cond_nconsts"]
                body = self.inline(eqn.params["body_jaxpr"], Condition(*first))
            if not is_stencil(eqn, body, largest, self.rules):
                return None
            if eqn.primitive.name == "scan":
                made = several_at_once(eqn, len(body.equations), largest)
            else:
                made = several_on_trial(eqn, body, largest)
            if made is not None:
                self.unrolled.append(made)
            return made

        return self.once(eqn, "unrolled", make)

    def once(self, origin: Any, key: Any, make: Any) -> Any:
        """What is made of a jaxpr's equation; the key says what."""
        key = id(origin), key
        if key not in self.made:
            self.made[key] = origin, make()
        return self.made[key][1]


@dataclass(slots=True)
class Passes:
    """What is known of one function, by how it is inlined."""

    _seen: dict[tuple[str, float, float], Seen] = field(default_factory=dict)

    def seen(
        self,
        platform: str,
        largest_fft: float = math.inf,
        largest_carried: float = math.inf,
    ) -> Seen:
        """What is known of it so, which grows."""
        key = platform, largest_fft, largest_carried
        return self._seen.setdefault(key, Seen(*key))

    def clear(self) -> None:
        """Forgets all."""
        self._seen.clear()


def streamed(
    flat: FlatJaxpr, streaming: Streaming, forwarded: Forwarded, seen: Seen
) -> FlatJaxpr:
    """The program with what is too large in parts, or driven.

    Args:
      flat: the program, inlined.
      streaming: what is too large.
      forwarded: arguments that may be returned as they are; such results are not put
        together of parts.
      seen: grows.
    """
    too_many = set[int]()
    while True:
        try:
            made = _Streamer(flat, streaming, seen, too_many)
            return made.result(flat, forwarded)
        except _TooMany as found:
            too_many.add(id(found.scan))


class _TooMany(Exception):
    """What `find_cuts` expects of a scan is an estimate, and it becomes far more."""

    def __init__(self, scan: Any):
        super().__init__(scan)
        self.scan = scan


class _Streamer:
    """The new program, while it is made."""

    def __init__(
        self, flat: FlatJaxpr, streaming: Streaming, seen: Seen, too_many: Collection[int]
    ):
        self._builder = Builder()
        self._streaming = streaming
        self._seen = seen
        # Values of arrays in host memory, whose slices are free; stacks of them; slices.
        self._hosted: set[int] = set()
        self._held: dict[int, Stack] = {}
        self._slices: dict[tuple[int, int, int], int] = {}
        on_host = [v for i, v in enumerate(flat.inputs) if i in streaming.on_host]
        on_host += [v for v, array in flat.constants if streaming.is_on_host(array)]
        held = [t for t in map(flat.types.__getitem__, on_host) if _can_be_cut(t.dtype)]
        scans = {id(e.origin): e for e in flat.equations if e.name == "scan"}
        tables = frozenset(on_host)

        def by_rows(scan: Any) -> bool:
            if id(scan) not in scans:  # it is inside another
                return False
            read = scans[id(scan)].inputs[: scan_counts(scan)[0]]
            return reads_rows(seen.inline(scan.params["jaxpr"]), read, tables)

        self._cuts: Cuts = find_cuts(flat, streaming, seen.inline, held, by_rows, too_many)

    def result(self, flat: FlatJaxpr, forwarded: Forwarded) -> FlatJaxpr:
        builder, on_host = self._builder, self._streaming.on_host
        inputs = [builder.value(flat.types[v]) for v in flat.inputs]
        arguments = [self._stored(v, i in on_host) for i, v in enumerate(inputs)]
        results = self._run(flat, arguments, ())
        allowed = may_be(dataclasses.replace(flat, inputs=tuple(inputs)), forwarded)
        outputs = [self._output(r, of) for r, of in zip(results, allowed, strict=True)]
        slices = [
            Slice(v, source, Window.of(builder.types[source].shape).part(0, start, stop))
            for (source, start, stop), v in self._slices.items()
        ]
        return builder.finish(inputs, outputs, slices)

    def _output(self, result: Value, allowed: frozenset[int]) -> int | Parts:
        if isinstance(result, Stack) and self._is_left_in_parts(result, allowed):
            pieces = self._parts(result, result.rows, ())
            return Parts.along(0, pieces, self._builder.types, result.type)
        whole = self._whole(result)
        if isinstance(whole, Constant):
            (whole,) = self._builder.ours(stacks.copying(whole.type), (whole,), ())
        return whole

    def _is_left_in_parts(self, result: Stack, allowed: frozenset[int]) -> bool:
        """Whether a result is put together in host memory: where it is large, or takes the
        place of an argument there."""
        if result.whole in allowed:
            return False
        large = 2 * result.type.nbytes > self._streaming.largest
        reuses = self._streaming.donated[(result.type.shape, result.type.dtype)] > 0
        return large or (result.parts is not None and reuses)

    # -- values ------------------------------------------------------------------------

    def _stored(self, value: int, on_host: bool) -> Value:
        """An argument or closed-over array; one in host memory can be read in parts."""
        t = self._builder.types[value]
        if not on_host or not t.shape or t.nbytes < SMALL or not _can_be_cut(t.dtype):
            return value
        self._hosted.add(value)
        rows = self._cuts.rows.get(t.shape[0])
        if rows is None or (
            t.rows(rows).nbytes < _LEAST_PART and t.nbytes <= self._streaming.largest
        ):
            return value  # what reads it by rows still finds them in host memory
        return self._held.setdefault(value, Stack(t, rows, whole=value))

    def _is_table(self, value: Value) -> bool:
        """Whether a value is in host memory and large enough to be left there."""
        whole = value.whole if isinstance(value, Stack) else value
        if not isinstance(whole, int) or whole not in self._hosted:
            return False
        least = min(_TABLE, max(SMALL, self._streaming.largest // 4))
        return self._builder.types[whole].nbytes > least

    def _whole(self, value: Value, calls: tuple[Any, ...] = ()) -> Atom:
        """A value in one piece."""
        if isinstance(value, Stack):
            if value.whole is None:
                value.whole = self._joined(value, calls)
            return value.whole
        if isinstance(value, Spread):
            length = value.type.shape[0]
            if length not in value.values:
                e = value.equation
                (value.values[length],) = self._builder.emit(
                    e.origin, (value.operand,), e.calls, e.ours
                )
            return value.values[length]
        return value

    def _computed(self, value: Atom, calls: tuple[Any, ...]) -> Atom:
        """A value that is there for what is driven: tasks read parts of what is in host
        memory, a loop does not."""
        if isinstance(value, Constant) or value not in self._slices.values():
            return value
        t = self._builder.types[value]
        return self._builder.ours(stacks.copying(t), (value,), calls)[0]

    def _joined(self, stack: Stack, calls: tuple[Any, ...]) -> int:
        builder, made = self._builder, stack.made
        if stack.parts is None:
            assert made is not None
            e = made.equation
            operands = [self._whole(v, e.calls) for v in made.operands]
            (whole,) = builder.emit(e.origin, operands, e.calls, e.ours)
            return whole
        types = tuple(builder.types[p] for p in stack.parts)
        (whole,) = builder.ours(stacks.joining(types), stack.parts, calls)
        return whole

    def _parts(self, value: Value, rows: int, calls: tuple[Any, ...]) -> tuple[int, ...]:
        """A value as parts of so many rows."""
        if isinstance(value, Spread):
            cuts = stacks.bounds(value.type.shape[0], rows)
            return tuple(self._spread_rows(value, stop - start) for start, stop in cuts)
        if isinstance(value, Stack) and value.rows == rows:
            if value.parts is None and value.whole is None:
                assert value.made is not None
                (value.parts,) = self._by_rows(value.made, rows)
            if value.parts is not None:
                return value.parts
        whole = self._whole(value, calls)
        assert isinstance(whole, int)
        pieces = tuple(
            self._part(whole, start, stop, calls)
            for start, stop in stacks.bounds(self._builder.types[whole].shape[0], rows)
        )
        if isinstance(value, Stack) and value.rows == rows:
            value.parts = pieces
        return pieces

    def _part(self, whole: int, start: int, stop: int, calls: tuple[Any, ...]) -> int:
        builder = self._builder
        t = builder.types[whole]
        if whole in self._hosted:
            key = whole, start, stop
            if key not in self._slices:
                self._slices[key] = builder.value(t.rows(stop - start))
            return self._slices[key]
        return builder.part_of(whole, 0, (start, stop), calls)

    def _spread_rows(self, value: Spread, rows: int) -> int:
        if rows not in value.values:
            made = Made(value.equation, (value.operand,), (False,), (value.type,))
            (value.values[rows],) = self._of_rows(made, 0, rows, (value.operand,))
        return value.values[rows]

    # -- equations ---------------------------------------------------------------------

    def _run(
        self, flat: FlatJaxpr, arguments: Sequence[Value], calls: tuple[Any, ...]
    ) -> list[Value]:
        """Adds what is to be done instead of a program's equations; returns its results."""
        values: dict[int, Value] = dict(zip(flat.inputs, arguments, strict=True))
        for v, array in flat.constants:
            value = self._builder.closed_over(array, flat.types[v])
            values[v] = self._stored(value, self._streaming.is_on_host(array))
        flat = rows_by_host(flat, {v for v, held in values.items() if self._is_table(held)})
        of_equation = self._rules(flat, values)
        for e in flat.equations:
            operands = [v if isinstance(v, Constant) else values[v] for v in e.inputs]
            types = [flat.types[v] for v in e.outputs]
            inside = dataclasses.replace(e, calls=(*calls, *e.calls)) if calls else e
            results = self._apply(inside, operands, types, of_equation.get(id(e)))
            values.update(zip(e.outputs, results, strict=True))
        return [values[v] for output in flat.outputs for v in values_of(output)]

    def _rules(self, flat: FlatJaxpr, values: dict[int, Value]) -> dict[int, Rule | None]:
        """By the id of an equation the rule of each that may read or write in parts."""
        may_be_cut = {v for v, held in values.items() if isinstance(held, Stack | Spread)}
        found = []
        for e in flat.equations:
            reads = not may_be_cut.isdisjoint(v for v in e.inputs if isinstance(v, int))
            begins = e.name == "scan" or self._is_spread(e)
            if reads and not begins:
                found.append(e)
            if reads or begins:
                types = ((v, flat.types[v].shape[:1]) for v in e.outputs)
                may_be_cut.update(v for v, n in types if n and n[0] in self._cuts.rows)
        if not found:
            return {}
        some = dataclasses.replace(flat, equations=tuple(found))
        known = map(without_halos, rules(some, parts.works, self._seen.rules))
        return {id(e): rule for e, rule in zip(found, known, strict=True)}

    def _apply(
        self,
        e: Equation,
        operands: Sequence[Value],
        types: Sequence[Type],
        rule: Rule | None,
    ) -> Sequence[Value]:
        calls, origin = e.calls, e.origin
        if id(origin) in self._cuts.scans:
            return self._scan(e, operands)
        if id(origin) in self._cuts.long:
            make = lambda: stacks.as_while(origin, *scan_counts(origin)[:2])
            whole = [self._computed(self._whole(v, calls), calls) for v in operands]
            return self._driven(self._seen.once(origin, "while", make), whole, e)
        taken = None
        if e.name == "slice":
            taken = self._rows(e, operands[0])
        elif e.name == "unstack":
            taken = self._unstacked(e, operands[0])
        if taken is None:
            taken = self._by_parts(e, operands, types, rule)
        if taken is not None:
            return taken
        if self._is_spread(e):
            operand = self._whole(operands[0], calls)
            return [Spread(e, operand, types[0])]
        whole = [self._whole(v, calls) for v in operands]
        chosen = bytes_for_one_branch(e, whole, self._builder.types, self._hosted)
        driven = e.driven or is_driven(origin, self._streaming)
        driven = driven or chosen > self._streaming.largest
        if driven:
            whole = [self._computed(v, calls) for v in whole]
            if stacks.asks_for_each(origin):
                made = self._seen.once(origin, "while", lambda: stacks.as_one(origin))
            else:
                made = self._hoisted(origin)
            if made is not None:
                return self._driven(made, whole, e)
        return self._builder.emit(origin, whole, calls, e.ours, driven, types)

    def _driven(
        self, closed: Any, operands: Sequence[Atom], e: Equation
    ) -> Sequence[Value]:
        """A loop that is driven instead of an equation, as a jaxpr of our own making."""
        instead = lambda eqn: called(eqn) or self._hoisted(eqn)
        return self._builder.ours(closed, operands, e.within, "while", instead)

    def _hoisted(self, eqn: Any) -> Any:
        return self._seen.once(eqn, "hoisted", lambda: hoisted(eqn))

    def _is_spread(self, e: Equation) -> bool:
        if e.name != "broadcast_in_dim" or len(e.inputs) != 1:
            return False
        t = Type.of(e.origin.outvars[0].aval)
        if not t.shape or t.shape[0] not in self._cuts.rows or t.nbytes < SMALL:
            return False
        return 0 not in e.origin.params["broadcast_dimensions"]

    # -- rows --------------------------------------------------------------------------

    def _by_parts(
        self,
        e: Equation,
        operands: Sequence[Value],
        types: Sequence[Type],
        rule: Rule | None,
    ) -> Sequence[Value] | None:
        """The results of an equation that is done part by part; None where that cannot be
        done, or nothing is in parts."""
        at = _first_in_parts(e, operands)
        if at is None or rule is None or e.driven:
            return None
        first = operands[at]
        assert isinstance(first, Stack | Spread)
        label, length = rule.operands[at][0], first.type.shape[0]
        rows = self._cuts.rows.get(length) if isinstance(first, Spread) else first.rows
        if label is None or rows is None:
            return None
        sides = [
            *zip((Type.of(v.aval) for v in e.origin.invars), rule.operands, strict=True),
            *zip(types, rule.results, strict=True),
        ]
        # All of them are cut at the same rows, or not at all.
        for t, labels in sides:
            if label in labels and (labels[0] != label or t.shape[0] != length):
                return None
        cut = tuple(label in labels for labels in rule.operands)
        made = Made(e, tuple(operands), cut, tuple(types))
        if label in rule.reduced:
            return [self._reduced(made, rows)] if len(operands) == 1 else None
        if not all(label in labels for labels in rule.results):
            return None
        if isinstance(first, Spread):
            return [Stack(types[0], rows, made=made)]
        columns = self._by_rows(made, rows)
        return [Stack(t, rows, c) for t, c in zip(types, columns, strict=True)]

    def _by_rows(self, made: Made, rows: int) -> list[tuple[int, ...]]:
        """For each result of an equation its parts of so many rows."""
        calls = made.equation.calls
        columns = [
            self._parts(v, rows, calls) if cut else self._whole(v, calls)
            for v, cut in zip(made.operands, made.cut, strict=True)
        ]
        results = [
            self._of_rows(
                made, start, stop, [c[k] if isinstance(c, tuple) else c for c in columns]
            )
            for k, (start, stop) in enumerate(stacks.bounds(made.types[0].shape[0], rows))
        ]
        return list(zip(*results, strict=True))

    def _of_rows(
        self, made: Made, start: int, stop: int, operands: Sequence[Atom]
    ) -> list[int]:
        """The results of an equation for some rows, of those rows of its operands."""
        e, builder = made.equation, self._builder
        types = tuple(map(builder.type_of, operands))
        shapes = tuple(t.rows(stop - start).shape for t in made.types)
        along = Along(tuple((0, 1) if cut else None for cut in made.cut), (0, 1))
        closed = self._seen.once(
            e.origin,
            (types, shapes, along),
            lambda: parts.on_part(e, types, shapes, along),
        )
        return builder.ours(closed, (Constant.position(start), *operands), e.within)

    def _reduced(self, made: Made, rows: int) -> int:
        """What a reduction along the rows makes of its operand, combined as it comes."""
        e, builder, (t,) = made.equation, self._builder, made.types
        along = Along(((0, 1),), None)
        total: int | None = None
        pieces = self._parts(made.operands[0], rows, e.calls)
        for k, piece in enumerate(pieces):
            types = (builder.types[piece],)
            closed = self._seen.once(
                e.origin, types, lambda of=types: parts.on_part(e, of, [t.shape], along)
            )
            given = Constant.position(k * rows), piece
            (partial,) = builder.ours(closed, given, e.within)
            if total is None:
                total = partial
                continue
            closed = parts.combining(
                COMBINED[e.name],
                builder.types[total],
                builder.types[partial],
                t.dtype if k == len(pieces) - 1 else None,
            )
            (total,) = builder.ours(closed, (total, partial), e.within)
        assert total is not None
        return total

    def _unstacked(self, e: Equation, operand: Value) -> Sequence[Value] | None:
        """Every row of what is in host memory by itself; None for anything else."""
        whole = operand.whole if isinstance(operand, Stack) else operand
        if e.origin.params["axis"] != 0 or not isinstance(whole, int):
            return None
        if whole not in self._hosted:
            return None
        return [self._row(p, e.within) for p in self._parts(operand, 1, e.calls)]

    def _row(self, part: int, calls: tuple[Any, ...]) -> int:
        """The only row of a part."""
        taking = stacks.taking(self._builder.types[part])
        return self._builder.ours(taking, (part,), calls)[0]

    def _rows(self, e: Equation, operand: Value) -> Sequence[Value] | None:
        """Some rows of what is in host memory or in parts; None where that is no help."""
        (start, stop), aside = stacks.rows_taken(e.origin)
        if stop - start == e.origin.invars[0].aval.shape[0] or stop <= start:
            return None
        whole = operand.whole if isinstance(operand, Stack) else operand
        if isinstance(whole, int) and whole in self._hosted:
            taken = self._part(whole, start, stop, e.calls)
        elif isinstance(operand, Stack) and operand.parts is not None:
            cuts = operand.bounds
            wanted = [k for k, (a, b) in enumerate(cuts) if a < stop and start < b]
            if cuts[wanted[0]][0] != start or cuts[wanted[-1]][1] != stop:
                return None
            pieces = operand.parts[wanted[0] : wanted[-1] + 1]
            taken = self._builder.joined(pieces, 0, e.calls)
        else:
            return None
        if aside:
            rows = stop - start
            made = lambda: stacks.sliced_aside(e.origin, rows)
            slicing = self._seen.once(e.origin, rows, made)
            (taken,) = self._builder.ours(slicing, (taken,), e.within)
        return [taken]

    # -- scans -------------------------------------------------------------------------

    def _scan(self, e: Equation, operands: Sequence[Value]) -> list[Value]:
        """A scan, some iterations at a time."""
        origin = e.origin
        consts, carries, _ = scan_counts(origin)
        length = origin.params["length"]
        rows = self._cuts.rows[length]
        scanned = [self._parts(x, rows, e.calls) for x in operands[consts + carries :]]
        fixed = [self._whole(v, e.calls) for v in operands[:consts]]
        # What one iteration hands to the next is whole, unless it is too large to be.
        most = self._streaming.largest
        carry: list[Value] = [
            self._whole(v, e.calls) if isinstance(v, Stack) and v.type.nbytes <= most else v
            for v in operands[consts : consts + carries]
        ]
        cuts = stacks.bounds(length, rows)
        order = range(len(cuts))
        before = len(self._builder.equations)
        stacked: list[list[int]] = [[0] * len(cuts) for _ in origin.outvars[carries:]]
        for k in reversed(order) if origin.params["reverse"] else order:
            start, stop = cuts[k]
            pieces = [pieces[k] for pieces in scanned]
            carry, ys = self._iterations(e, fixed, carry, pieces, stop - start)
            if len(self._builder.equations) - before > MOST_EQUATIONS:
                raise _TooMany(origin)
            for column, y in zip(stacked, ys, strict=True):
                column[k] = y
        types = [Type.of(v.aval) for v in origin.outvars[carries:]]
        results = [Stack(t, rows, tuple(c)) for t, c in zip(types, stacked, strict=True)]
        small = [r.type.nbytes < SMALL for r in results]
        return [
            *carry,
            *(
                self._whole(r, e.within) if s else r
                for r, s in zip(results, small, strict=True)
            ),
        ]

    def _iterations(
        self,
        e: Equation,
        fixed: Sequence[Atom],
        carry: Sequence[Value],
        pieces: Sequence[int],
        count: int,
    ) -> tuple[list[Value], list[int]]:
        """What some iterations carry on, and the rows that they write."""
        builder, origin, within = self._builder, e.origin, e.within
        if count > 1 or self._cuts.rows[origin.params["length"]] > 1:
            whole = [self._whole(v, within) for v in carry]
            shorter = self._seen.once(
                origin, ("scan", count), lambda: _shorter(origin, count)
            )
            operands = [*fixed, *whole, *pieces]
            results: list[Any] = builder.emit(shorter, operands, within, ours=True)
            return results[: len(carry)], results[len(carry) :]
        rows = [self._row(p, within) for p in pieces]
        body = self._seen.inline(origin.params["jaxpr"])
        results = self._run(body, [*fixed, *carry, *rows], within)
        ys = []
        for y in results[len(carry) :]:
            piece = self._whole(y, within)
            stacking = stacks.stacking(builder.type_of(piece))
            ys += builder.ours(stacking, (piece,), within)
        return results[: len(carry)], ys


def _first_in_parts(e: Equation, operands: Sequence[Value]) -> int | None:
    """The position of the first operand that is in parts. Zeros that something is scattered
    to count as such: each part of the result is made by itself."""
    for at, operand in enumerate(operands):
        scattered = e.name in SCATTERS and at == 0 and isinstance(operand, Spread)
        if isinstance(operand, Stack) or scattered:
            return at
    return None


def _shorter(scan: Any, length: int) -> Any:
    """A scan of fewer iterations."""
    consts, carries, _ = scan_counts(scan)
    types = [Type.of(v.aval) for v in scan.invars]
    structs = [
        (t.rows(length) if i >= consts + carries else t).struct()
        for i, t in enumerate(types)
    ]
    made = stacks.shortened(scan, length, structs)
    (shorter,) = getattr(made, "jaxpr", made).eqns
    return shorter


def _can_be_cut(dtype: Any) -> bool:
    """Whether rows lie in host memory as numpy has them: not so for keys and int4."""
    return not is_key(dtype) and not is_packed(dtype)
