"""A function with some of its stretches done part by part, in blocks or over tasks.

In blocks, a stretch becomes one equation with a loop in it. Over tasks, each part becomes
equations of its own: they read windows of what lies in host memory, and slices of what does
not; results are put together, or left in parts.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from jturnip.frontend import parts, stacks
from jturnip.frontend.materializing import NOTHING, Materialized
from jturnip.frontend.rules import SAME
from jturnip.frontend.sliding import Axis, Extent
from jturnip.frontend.stretches import Stretch, Stretches
from jturnip.frontend.tiles import Step, Tile, Tiles
from jturnip.frontend.values import (
    Constant,
    Equation,
    FlatJaxpr,
    Parts,
    Slice,
    Type,
    Window,
    values_of,
)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A stretch as one task, in blocks of so many positions."""

    stretch: Stretch
    size: int
    nbytes: int
    # What is written down of the first blocks, rather than made anew in each of its loops.
    materialized: Materialized = NOTHING

    @property
    def key(self) -> Any:
        """The same for the same cut of the same function."""
        return self.stretch.key, self.size, self.materialized

    @property
    def share_made_anew(self) -> float:
        """Of how much of its blocks nothing is written down."""
        return 1 - self.materialized.blocks * self.size / self.stretch.length


@dataclass(frozen=True, slots=True)
class Tasks:
    """A stretch as tasks of so many positions."""

    stretch: Stretch
    size: int
    nbytes: int
    # Of what enters, that of which each task reads only its part, in host memory.
    sliced: frozenset[int]
    # Results whose parts are put together in host memory; a task joins others.
    left_in_parts: frozenset[int]
    # What others read of it piece by piece, and is never put together for them.
    apart: frozenset[int]
    # So many that read the same parts are done side by side: a part once for all of them.
    abreast: int = 1
    # What later loops read of the same part, and do not make anew.
    kept: frozenset[int] = frozenset()

    @property
    def key(self) -> Any:
        """The same for the same cut of the same function."""
        left = self.left_in_parts, self.apart, self.abreast
        return self.stretch.key, self.size, self.sliced, *left, self.kept

    @property
    def count(self) -> int:
        """How many parts there are."""
        return -(-self.stretch.length // self.size)

    def goes_with(self, first: "Tasks") -> bool:
        """Whether it is done side by side with another that comes before it."""
        mine, its = self.stretch, first.stretch
        return (
            first.abreast > 1
            and (self.size, mine.length) == (first.size, its.length)
            and not self.sliced.isdisjoint(first.sliced)
            and mine.loops == its.loops == 1
            and not mine.reduced
            and not its.reduced
            and set(its.leaving).isdisjoint(mine.entering)
        )


Cutting: TypeAlias = Blocks | Tasks | Tiles
SomeCutting = TypeVar("SomeCutting", bound=Cutting)
Some = TypeVar("Some")


class Made:
    """What was made of equations for one part, or of stretches in blocks: parts that are
    alike have the same, in one function or in several forms of it."""

    def __init__(self) -> None:
        # By keys that name equations by their ids: with these, so that they stay their own.
        self._made: dict[Any, tuple[tuple[Any, ...], Any]] = {}

    def get(self, key: Any, origins: Iterable[Any], make: Callable[[], Some]) -> Some:
        """What there is by a key, or is made, of some origins of equations."""
        if key not in self._made:
            self._made[key] = tuple(origins), make()
        return self._made[key][1]


def with_cuttings(
    stretches: Stretches, cuttings: Sequence[Cutting], made: Made | None = None
) -> FlatJaxpr:
    """The function with other equations in the place of each stretch that is cut; none of
    them waits for another that waits for it.

    Args:
      stretches: of the function.
      cuttings: how some of them are cut.
      made: what was made for other forms of the function; grows.
    """
    return _New(stretches, cuttings, made or Made()).result()


def one_after_the_other(
    stretches: Stretches, cuttings: Sequence[SomeCutting]
) -> list[SomeCutting]:
    """Those that can be done one after the other. Each of two may need what is made in the
    other: of such, later ones are left out."""
    left = list(cuttings)
    while waiting := _in_order(stretches, left)[1]:
        without = {
            i: [c for c in left if c.stretch.equations[-1] != i]
            for i in waiting
            if any(c.stretch.equations[-1] == i for c in left)
        }
        still = {i: len(_in_order(stretches, some)[1]) for i, some in without.items()}
        least = min(still.values())
        left = without[max(i for i, count in still.items() if count == least)]
    return left


def _in_order(
    stretches: Stretches, cuttings: Sequence[Cutting]
) -> tuple[list[int], list[int]]:
    """The equations as they can be done, a stretch in the place of its last; and those that
    cannot be, since they wait for one another."""
    flat, writer = stretches.flat, stretches.writer
    ends = {c.stretch.equations[-1]: c.stretch for c in cuttings}
    of = {i: last for last, stretch in ends.items() for i in stretch.equations}
    # What reads a stretch and stands among its equations comes after it.
    waiting = [i for i in range(len(flat.equations)) if of.get(i, i) == i]
    order: list[int] = []
    done: set[int] = set()
    while waiting:
        later = []
        for i in waiting:
            read = ends[i].entering if i in ends else flat.equations[i].reads
            if any(v in writer and writer[v] not in done for v in read):
                later.append(i)
                continue
            order.append(i)
            done.update(ends[i].equations if i in ends else (i,))
        if len(later) == len(waiting):
            break
        waiting = later
    return order, waiting


class _New:
    """The new function, while it is made."""

    def __init__(self, stretches: Stretches, cuttings: Sequence[Cutting], made: Made):
        self._flat = stretches.flat
        self._stretches = stretches
        self._cuttings = cuttings
        self._types = list(self._flat.types)
        self._outputs = list(self._flat.outputs)
        self._slices = {s.value: s for s in self._flat.slices}
        self._windows: dict[tuple[int, Window], int] = {}
        # Value that is there in parts only → the dimension, and its parts by their first
        # positions. Pieces of such values that were made.
        self._apart = dict(_joined_before(self._flat))
        self._pieces: dict[tuple[int, int, int, int], int] = {}
        self._equations: list[Equation] = []
        self._made = made
        # Stretches that will be done side by side; what those before them read in parts,
        # and whether that was from the last part to the first.
        self._abreast: list[Tasks] = []
        self._passed: tuple[frozenset[int], bool] = frozenset(), True

    def result(self) -> FlatJaxpr:
        flat = self._flat
        order, waiting = _in_order(self._stretches, self._cuttings)
        assert not waiting, "stretches that wait for one another"
        ends = {c.stretch.equations[-1]: c for c in self._cuttings}
        for i in order:
            self._add(i, ends.get(i))
        self._do_abreast()
        self._whole(v for output in self._outputs for v in values_of(output))
        used = {v for e in self._equations for v in e.reads}
        return dataclasses.replace(
            flat,
            types=tuple(self._types),
            equations=tuple(self._equations),
            outputs=tuple(self._outputs),
            slices=tuple(s for s in self._slices.values() if s.value in used),
        )

    def _add(self, i: int, cutting: Cutting | None) -> None:
        waiting = self._abreast
        if waiting and isinstance(cutting, Tasks) and len(waiting) < waiting[0].abreast:
            if all(cutting.goes_with(before) for before in waiting):
                waiting.append(cutting)
                return
        self._do_abreast()
        if isinstance(cutting, Tasks):
            waiting.append(cutting)
        elif cutting is not None:
            self._make_apart_anew(cutting)
            if isinstance(cutting, Tiles):
                self._in_tiles(cutting)
            else:
                self._in_blocks(cutting)
        else:
            e = self._flat.equations[i]
            if self._apart.keys().isdisjoint(e.outputs):
                self._whole(e.reads)
                self._equations.append(e)
            # else it is put together when it is read

    def _do_abreast(self) -> None:
        """Adds the stretches that wait to be done side by side."""
        for cutting in self._abreast:
            self._make_apart_anew(cutting)
        if self._abreast:
            self._in_tasks(self._abreast)
        self._abreast.clear()

    def _make_apart_anew(self, cutting: Cutting) -> None:
        for i in cutting.stretch.equations:
            for v in self._flat.equations[i].outputs:
                self._apart.pop(v, None)

    def _in_blocks(self, cutting: Blocks) -> None:
        stretch = cutting.stretch
        self._whole(stretch.entering)
        how = stretch, cutting.size, cutting.materialized
        origins = (self._flat.equations[i].origin for i in stretch.equations)
        make = functools.partial(parts.in_blocks, self._flat, *how)
        origin = self._made.get(self._key(*how), origins, make)
        calls = parts.lead_equation(self._flat, stretch).within
        self._equations.append(
            Equation(origin, stretch.entering, stretch.leaving, calls, ours=True)
        )

    def _key(self, stretch: Stretch, size: int, materialized: Materialized) -> Any:
        """The same for stretches that are the same but for the numbers of their values."""
        numbers: dict[int, int] = {}
        equations = []
        for i in stretch.equations:
            e = self._flat.equations[i]
            read = tuple(
                ("constant", np.asarray(v.value).tobytes(), v.type)
                if isinstance(v, Constant)
                else (numbers.setdefault(v, len(numbers)), self._flat.types[v])
                for v in e.inputs
            )
            written = tuple(numbers.setdefault(v, len(numbers)) for v in e.outputs)
            equations.append((id(e.origin), read, written, i in stretch.working))
        dims = tuple(sorted((numbers[v], dim) for v, dim in stretch.dims.items()))
        at = {i: place for place, i in enumerate(stretch.equations)}
        uses = tuple(sorted((at[i], p, dim) for (i, p), dim in stretch.uses.items()))
        entering = tuple(numbers[v] for v in stretch.entering)
        leaving = tuple(numbers[v] for v in stretch.leaving)
        written = tuple(sorted(numbers[v] for v in materialized.values))
        of_ends = dims, uses, entering, leaving
        return tuple(equations), *of_ends, size, written, materialized.blocks

    # -- tasks -------------------------------------------------------------------------

    def _value(self, t: Type) -> int:
        self._types.append(t)
        return len(self._types) - 1

    def _in_tasks(self, abreast: Sequence[Tasks]) -> None:
        """Adds the parts of some stretches; of more than one where each is one loop."""
        flat, lows = self._flat, _lows(abreast[0])
        # What each part of a value is, by its first position.
        made: list[dict[int, dict[int, int]]] = [{low: {} for low in lows} for _ in abreast]
        loops = (cutting.stretch.passes(flat, cutting.kept) for cutting in abreast)
        accumulated = set[int]().union(*(c.stretch.accumulated(flat) for c in abreast))
        for loop in zip(*loops, strict=True):
            for i in itertools.chain(*(each.once for each in loop)):
                self._whole(flat.equations[i].reads)
                self._equations.append(flat.equations[i])
            sofar: dict[int, int] = {}
            for low in self._there_and_back(abreast[0]):
                last = low == lows[-1]
                for cutting, each, of in zip(abreast, loop, made, strict=True):
                    growing = {v: sofar.get(v) for v in each.wanted if v in accumulated}
                    part = self._part(cutting, each.steps, low, of[low], growing, last)
                    for v in each.wanted:
                        if v in cutting.stretch.dims:
                            of[low][v] = part[v]
                        elif v in growing:
                            sofar[v] = part[v]
                        else:  # partial results are combined as they come
                            before = sofar.get(v)
                            sofar[v] = self._combined(cutting, v, before, part[v], last)
        for cutting, of in zip(abreast, made, strict=True):
            for v in cutting.stretch.leaving:
                if v in cutting.stretch.dims:
                    scale = cutting.stretch.scale(flat, v, cutting.stretch.dims[v])
                    parts_of_it = {low * scale: of[low][v] for low in lows}
                    self._put_together(cutting, v, parts_of_it)

    def _there_and_back(self, cutting: Tasks) -> Sequence[int]:
        """The order in which parts are read: where the same were read just before, the last
        of them come first, since they are still there. Sums stay in their order."""
        before, backwards = self._passed
        again = not cutting.sliced.isdisjoint(before) and not cutting.stretch.reduced
        self._passed = cutting.sliced, again and not backwards
        lows = _lows(cutting)
        return lows[::-1] if again and not backwards else lows

    def _put_together(
        self, cutting: Tasks | Tiles, v: int, parts: Mapping[int, int]
    ) -> None:
        """Puts together the parts of a value, each with its first position."""
        dim, values = cutting.stretch.dims[v], [*parts.values()]
        if v in cutting.left_in_parts or v in cutting.apart:
            made = Parts.along(dim, values, self._types, self._types[v])
            self._outputs = [_with_parts(o, v, made) for o in self._outputs]
        if v in cutting.apart:
            self._apart[v] = dim, dict(parts)
        elif v not in cutting.left_in_parts:
            self._joined(values, dim, v)

    def _joined(self, values: Sequence[int], dim: int, v: int | None = None) -> int:
        closed = stacks.joining(tuple(self._types[p] for p in values), dim)
        if v is None:
            v = self._value(Type.of(closed.jaxpr.outvars[0].aval))
        self._ours(closed, values, (v,), ())
        return v

    def _whole(self, values: Iterable[int]) -> None:
        """Puts together what is there in parts only, for who reads it whole."""
        for v in values:
            if v in self._apart:
                dim, parts = self._apart.pop(v)
                self._whole(parts.values())
                self._joined([*parts.values()], dim, v)

    def _piece(self, v: int, dim: int, low: int, length: int) -> int:
        """Some positions of a value that is there in parts only."""
        key = v, dim, low, length
        if key not in self._pieces:
            of, parts = self._apart[v]
            found = []
            for first, part in parts.items():
                begin, end = low, low + length
                if of == dim:
                    begin = max(low - first, 0)
                    end = min(low + length - first, self._types[part].shape[dim])
                if begin < end:
                    found.append(self._part_of(part, dim, begin, end - begin))
            self._pieces[key] = found[0] if len(found) == 1 else self._joined(found, of)
        return self._pieces[key]

    def _part_of(self, v: int, dim: int, low: int, length: int) -> int:
        """Some positions of a value, wherever it is."""
        if v in self._apart:
            return self._piece(v, dim, low, length)
        if length == self._types[v].shape[dim]:
            return v
        closed = stacks.cutting(self._types[v], dim, length)
        value = self._value(Type.of(closed.jaxpr.outvars[0].aval))
        self._ours(closed, (v, Constant.position(low, np.uint32)), (value,), ())
        return value

    def _combined(
        self, cutting: Tasks | Tiles, v: int, sofar: int | None, part: int, last: bool
    ) -> int:
        if sofar is None:
            return part
        how = cutting.stretch.reduced[v]
        if how == SAME:
            if last:
                self._ours(stacks.copying(self._types[v]), (part,), (v,), ())
            return part
        dtype = self._types[v].dtype if last else None
        closed = parts.combining(how, self._types[sofar], self._types[part], dtype)
        total = v if last else self._value(Type.of(closed.jaxpr.outvars[0].aval))
        self._ours(closed, (sofar, part), (total,), ())
        return total

    def _part(
        self,
        cutting: Tasks,
        steps: Sequence[int],
        low: int,
        made: Mapping[int, int],
        growing: Mapping[int, int | None],
        last: bool,
    ) -> Mapping[int, int]:
        """Adds some equations for one part; returns what each value is there.

        Args:
          made: what some values are there already.
          growing: what scatters make of all parts, and of those before this one, if any.
          last: whether it is the last part.
        """
        flat, stretch = self._flat, cutting.stretch
        length = min(cutting.size, stretch.length - low)
        of_part: dict[int, int] = {**made}
        cut: dict[tuple[int, int], int] = {}

        def read(i: int, position: int, v: int | Constant) -> int | Constant:
            dim = stretch.uses.get((i, position))
            if isinstance(v, Constant):
                return v
            # What is reduced is read of all parts, though this one's may be made again.
            if v in of_part and v not in stretch.reduced:
                return of_part[v]
            make = self._window if v in cutting.sliced else self._part_of
            if i in stretch.halos and position == 0:
                first, count, _ = stretch.halo(i, low, length)
                return make(v, stretch.halos[i].dim, first, count)
            if dim is None:
                self._whole([v])
                return v
            if (v, dim) not in cut:
                scale = stretch.scale(flat, v, dim)
                cut[v, dim] = make(v, dim, low * scale, length * scale)
            return cut[v, dim]

        for i in steps:
            e = flat.equations[i]
            inputs = [read(i, position, v) for position, v in enumerate(e.inputs)]
            (v, *_) = e.outputs
            if (before := growing.get(v)) is not None:
                inputs[0] = before
            types = [v.type if isinstance(v, Constant) else self._types[v] for v in inputs]
            if v in growing:
                key = (id(e.origin), tuple(types))
                make = functools.partial(parts.on_sofar, e, types)
            else:
                shapes = [stretch.shape(flat, v, length) for v in e.outputs]
                along = stretch.along(flat, i, low, length)
                key = (id(e.origin), along, tuple(types), tuple(shapes))
                make = functools.partial(parts.on_part, e, types, shapes, along)
                inputs = [Constant.position(low), *inputs]
            closed = self._made.get(key, [e.origin], make)
            if v in growing and last:
                outputs = [v]
            else:
                outputs = [self._value(Type.of(v.aval)) for v in closed.jaxpr.outvars]
            self._ours(closed, inputs, outputs, e.within)
            of_part.update(zip(e.outputs, outputs, strict=True))
        return of_part

    def _in_tiles(self, cutting: Tiles) -> None:
        """Adds the tiles of a stretch, once for each of its loops."""
        flat, stretch = self._flat, cutting.stretch
        made: dict[int, dict[int, int]] = {}
        for each in stretch.passes(flat):
            for i in each.once:
                self._whole(flat.equations[i].reads)
                self._equations.append(flat.equations[i])
            sofar: dict[int, int] = {}
            for number in range(cutting.count):
                tile = cutting.tile(flat, each.wanted, number)
                for v, part in self._tile(cutting, tile).items():
                    extent = tile.wanted[v]
                    if extent is None:
                        last = number == cutting.last(flat, v)
                        sofar[v] = self._combined(cutting, v, sofar.get(v), part, last)
                    else:
                        made.setdefault(v, {})[extent.low] = part
        for v in stretch.leaving:
            if v in stretch.dims:
                self._put_together(cutting, v, made[v])

    def _tile(self, cutting: Tiles, tile: Tile) -> dict[int, int]:
        """Adds the equations of a tile; returns its part of what is wanted."""
        there = _There(tile)
        sums: dict[int, int] = {}
        for step in tile.steps:
            axis = cutting.axes[step.equation]
            inputs = [
                self._read(cutting, there, v, extent)
                for v, extent in zip(axis.equation.inputs, step.reads, strict=True)
                if extent is None or extent.length
            ]
            outputs = self._step(axis, step, inputs, tile.wanted)
            results = zip(axis.equation.outputs, step.writes, outputs, strict=True)
            for v, extent, value in results:
                if extent is None:
                    sums[v] = value
                else:
                    there.add(v, extent, value)
        return {
            v: sums[v] if extent is None else self._found(there, v, extent)
            for v, extent in tile.wanted.items()
        }

    def _read(
        self, cutting: Tiles, there: "_There", v: int | Constant, extent: Extent | None
    ) -> int | Constant:
        """What a step of a tile reads."""
        if isinstance(v, Constant):
            return v
        if extent is None:
            self._whole([v])
            return v
        make = self._window if v in cutting.sliced else self._part_of
        for each in there.to_be_read(v, extent.dim):
            there.add(v, each, make(v, each.dim, each.low, each.length))
        return self._found(there, v, extent)

    def _found(self, there: "_There", v: int, extent: Extent) -> int:
        """Some positions of a value, of the part of it that has them."""
        around, part = there.around(v, extent)
        if around == extent:
            return part
        low, high = extent.low - around.low, extent.high - around.low
        key = part, extent.dim, low, high
        if key not in there.cut:
            # The same of all parts, so that their tasks are one.
            closed = stacks.cutting_at(self._types[part], extent.dim, low, high)
            value = self._value(Type.of(closed.jaxpr.outvars[0].aval))
            self._ours(closed, (part,), (value,), ())
            there.cut[key] = value
        return there.cut[key]

    def _step(
        self,
        axis: Axis,
        step: Step,
        inputs: Sequence[int | Constant],
        wanted: Collection[int],
    ) -> list[int]:
        """Adds an equation for some positions along its axis; returns what it writes."""
        e = axis.equation
        if e.name == "concatenate" and len(inputs) == 1 and e.outputs[0] not in wanted:
            (piece,) = inputs
            assert not isinstance(piece, Constant)
            return [piece]  # nothing is put together
        types = [v.type if isinstance(v, Constant) else self._types[v] for v in inputs]
        shapes = [
            t.shape if extent is None else t.part(extent.dim, extent.length).shape
            for t, extent in zip(axis.results, step.writes, strict=True)
        ]
        along = axis.along(*step.span)
        key = (id(e.origin), axis.label, along, tuple(types), tuple(shapes))
        make = functools.partial(axis.on_part, types, shapes, along)
        closed, by_position = self._made.get(key, [e.origin], make)
        outputs = [self._value(Type.of(v.aval)) for v in closed.jaxpr.outvars]
        first = (Constant.position(step.span[0]),) if by_position else ()
        self._ours(closed, (*first, *inputs), outputs, e.within)
        return outputs

    def _window(self, v: int, dim: int, low: int, length: int) -> int:
        """The part of an array in host memory that a task reads."""
        whole = Slice(v, v, Window.of(self._types[v].shape))
        before = self._slices.get(v, whole)
        window = before.window.part(dim, low, low + length)
        key = before.source, window
        if key not in self._windows:
            value = self._value(self._types[v].part(dim, length))
            self._slices[value] = Slice(value, *key)
            self._windows[key] = value
        return self._windows[key]

    def _ours(
        self,
        closed: Any,
        inputs: Sequence[int | Constant],
        outputs: Sequence[int],
        calls: tuple[Any, ...],
    ) -> None:
        """Adds the equations of a jaxpr of our own making."""
        jaxpr = closed.jaxpr
        assert not jaxpr.constvars
        values: dict[Any, int | Constant] = dict(zip(jaxpr.invars, inputs, strict=True))
        values.update(zip(jaxpr.outvars, outputs, strict=True))
        calls = calls or (self._equations[-1].calls if self._equations else ())
        for eqn in jaxpr.eqns:
            read = tuple(
                Constant(v.val, Type.of(v.aval)) if hasattr(v, "val") else values[v]
                for v in eqn.invars
            )
            for v in eqn.outvars:
                if v not in values:
                    values[v] = self._value(Type.of(v.aval))
            written = tuple(values[v] for v in eqn.outvars)
            assert all(isinstance(v, int) for v in written)
            self._equations.append(Equation(eqn, read, written, calls, ours=True))  # pyright: ignore[reportArgumentType]


class _There:
    """What there is of each value while a tile is made."""

    def __init__(self, tile: Tile):
        self._read = dict(tile.read)
        self._parts: dict[tuple[int, int], list[tuple[Extent, int]]] = {}
        # What was cut out of some part.
        self.cut: dict[tuple[int, int, int, int], int] = {}

    def to_be_read(self, v: int, dim: int) -> list[Extent]:
        """What is read of what was there before the tile; asked the first time only."""
        return [Extent(dim, *span) for span in self._read.pop((v, dim), ())]

    def add(self, v: int, extent: Extent, part: int) -> None:
        """There is this part of a value."""
        self._parts.setdefault((v, extent.dim), []).append((extent, part))

    def around(self, v: int, extent: Extent) -> tuple[Extent, int]:
        """A part of a value in which some positions are."""
        return next(
            (each, part)
            for each, part in self._parts[v, extent.dim]
            if each.low <= extent.low and extent.high <= each.high
        )


def _joined_before(flat: FlatJaxpr) -> Iterator[tuple[int, tuple[int, dict[int, int]]]]:
    """Values that are put together of parts in order to be cut: with the dimension, and the
    parts by their first positions."""
    for e in flat.equations:
        if not e.ours or e.name != "concatenate":
            continue
        parts = e.reads
        if len(parts) == len(e.inputs):
            dim = e.origin.params["dimension"]
            lengths = (flat.types[v].shape[dim] for v in parts)
            lows = itertools.accumulate(lengths, initial=0)
            yield e.outputs[0], (dim, dict(zip(lows, parts, strict=False)))


def _lows(cutting: Tasks) -> range:
    """The first position of each part."""
    return range(0, cutting.stretch.length, cutting.size)


def _with_parts(output: int | Parts, v: int, made: Parts) -> int | Parts:
    """A result that is a value, or has it as a part, with its parts instead."""
    if output == v:
        return made
    if not isinstance(output, Parts) or v not in output.values:
        return output
    at = output.values.index(v)
    window = output.windows[at]
    inside = tuple(w.within(window) for w in made.windows)
    return Parts(
        (*output.values[:at], *made.values, *output.values[at + 1 :]),
        (*output.windows[:at], *inside, *output.windows[at + 1 :]),
        output.type,
    )
