"""Equations on parts of their operands, and a stretch of them part by part."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from jturnip.frontend import axes, costs, iterations
from jturnip.frontend.loops import LOOPS
from jturnip.frontend.materializing import NOTHING, Materialized
from jturnip.frontend.rules import COMBINED, SAME, SCATTERS, Along, Rule
from jturnip.frontend.stretches import Pass, Stretch
from jturnip.frontend.values import Constant, Equation, FlatJaxpr, Type, bind, carry_out


# -- one equation ----------------------------------------------------------------------


# Primitive → what of its parameters is different for parts.
_OTHER: dict[str, Callable[[Equation, Sequence[Any], tuple[int, ...]], Any]] = {
    "broadcast_in_dim": lambda e, operands, shape: {"shape": shape},
    "reshape": lambda e, operands, shape: {"new_sizes": shape},
}
_PRODUCTS = frozenset(["dot_general", "conv_general_dilated", "ragged_dot_general"])


def _apply(
    e: Equation,
    operands: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    along: Along,
    low: Any,
) -> Sequence[Any]:
    """Applies an equation to parts.

    Args:
      e: an equation with a rule.
      operands: parts of its operands, or those that are not cut.
      shapes: what is expected of each result.
      along: where it is cut.
      low: the position along the axis at which the part begins.

    Raises:
      TypeError: where the parts are of other shapes than expected.
    """
    if e.name in _BY_POSITION:
        results = [_BY_POSITION[e.name](e, operands, shapes[0], along, low)]
    elif e.name in LOOPS:
        results = iterations.on_part(e, operands, along, low, axes.rules_by(works), _apply)
    else:
        if e.name == "ragged_dot_general":
            operands = _of_groups(e, operands, along, low)
        other = _OTHER.get(e.name)
        params = other(e, operands, shapes[0]) if other else {}
        if along.padding is not None:
            params |= _with_padding(e, *along.padding)
        dtype = e.origin.outvars[0].aval.dtype
        if e.name in _PRODUCTS and along.result is None and _is_narrow(dtype):
            params["preferred_element_type"] = np.dtype(np.float32)
        results = bind(e.origin, operands, **params)
    for result, shape in zip(results, shapes, strict=True):
        if result.shape != shape:
            raise TypeError(f"{e.name} of parts has shape {result.shape}, not {shape}")
    return results


def _with_padding(e: Equation, at: int, padding: tuple[int, int]) -> dict[str, Any]:
    """The parameters of an equation with other padding around one dimension."""
    name = "padding_config" if e.name == "pad" else "padding"
    whole = e.origin.params[name]
    each = (*padding, *whole[at][2:])  # a pad has some between positions, too
    return {name: (*whole[:at], each, *whole[at + 1 :])}


def _of_groups(
    e: Equation, operands: Sequence[Any], along: Along, low: Any
) -> Sequence[Any]:
    """The operands of a product of groups of rows, with how many rows of a part are of each
    group."""
    left, right, sizes = operands
    (rows,) = e.origin.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    dim, scale = along.operands[0] or (None, 0)
    if dim != rows:
        return operands
    # Signed and wide, whatever they are: a part may begin after the end of a group.
    sizes = lax.convert_element_type(sizes, np.int32)
    begin, ends = low * scale, jnp.cumsum(sizes)
    before, until = (jnp.clip(x - begin, 0, left.shape[rows]) for x in (ends - sizes, ends))
    return left, right, until - before


def _sliced(
    e: Equation,
    operands: Sequence[Any],
    shape: tuple[int, ...],
    along: Along,
    low: Any,
) -> Any:
    """A part of a slice, of the part of the operand that is the same or of all of it."""
    operand, params = operands[0], e.origin.params
    dim, scale = along.result or (0, 0)
    if along.operands[0] is not None:
        first, scale = 0, 0
    elif e.name == "slice":
        first = params["start_indices"][dim]
    else:
        most = operand.shape[dim] - e.origin.outvars[0].aval.shape[dim]
        first = jnp.clip(_wide(operands[1 + dim]), 0, most)
    if e.name == "dynamic_slice":
        starts = list(map(_wide, operands[1:]))
        begin = lax.convert_element_type(low * scale, starts[dim].dtype)
        starts[dim] = lax.convert_element_type(first, starts[dim].dtype) + begin
        return lax.dynamic_slice(operand, starts, shape, allow_negative_indices=False)
    steps = params["strides"] or (1,) * len(shape)
    starts, limits = [*params["start_indices"]], [*params["limit_indices"]]
    if scale:  # from where the part begins, then as it is written along the others
        length = (shape[dim] - 1) * steps[dim] + 1
        operand = lax.dynamic_slice_in_dim(
            operand, first + low * scale * steps[dim], length, dim
        )
    starts[dim], limits[dim] = 0, operand.shape[dim]
    return lax.slice(operand, starts, limits, steps)


def _updated(
    e: Equation,
    operands: Sequence[Any],
    shape: tuple[int, ...],
    along: Along,
    low: Any,
) -> Any:
    """A part of what a slice was written into, which may lie in it, in others, or both."""
    part, update, *starts = operands
    dim, scale = along.operands[0] or (None, 0)
    if dim is None or along.operands[1] is not None:  # all of it is written along the axis
        (result,) = bind(e.origin, operands)
        return result
    starts = list(map(_wide, starts))
    whole, length = e.origin.invars[0].aval.shape[dim], update.shape[dim]
    start = jnp.clip(starts[dim], 0, whole - length)
    # Which position of the update each position of the part has, if any.
    begin = lax.convert_element_type(low * scale, start.dtype)
    at = lax.iota(start.dtype, part.shape[dim]) + begin - start
    rows = jnp.take(update, jnp.clip(at, 0, length - 1), axis=dim, mode="clip")
    starts[dim] = jnp.zeros_like(start)
    (written,) = bind(e.origin, (part, rows, *starts))
    inside = lax.broadcast_in_dim((at >= 0) & (at < length), shape, (dim,))
    return lax.select(inside, written, part)


def _random_bits(
    e: Equation,
    operands: Sequence[Any],
    shape: tuple[int, ...],
    along: Along,
    low: Any,
) -> Any:
    """A part of random bits.

    Raises:
      TypeError: where this jax does not make them of a threefry key and their positions.
    """
    (key,) = operands
    whole, width = e.origin.params["shape"], e.origin.params["bit_width"]
    threefry = str(key.dtype) == "key<fry>"
    if along.result is None or (along.operands[0] is not None and threefry):
        (bits,) = bind(e.origin, (key,))  # all bits of each key
        return bits
    if not threefry or not _are_of_positions(
        width,
        bool(jax.config.jax_threefry_partitionable),  # pyright: ignore[reportAttributeAccessIssue]
    ):
        raise TypeError("random bits that are not made of their positions")
    dim, scale = along.result
    return _bits_at(key, width, whole, shape, dim, low * scale)


def _bits_at(
    key: Any, width: int, whole: Sequence[int], shape: Sequence[int], dim: int, first: Any
) -> Any:
    """Random bits of some positions of an array, those from `first` along a dimension."""
    position = jnp.zeros(shape, np.uint32)
    for d in range(len(whole)):
        here = lax.broadcasted_iota(np.uint32, shape, d)
        if d == dim:
            here = here + lax.convert_element_type(first, np.uint32)
        position = position + here * np.uint32(math.prod(whole[d + 1 :]))
    words = jax.random.key_data(key)
    high, lower = threefry2x32_p.bind(
        words[0], words[1], jnp.zeros_like(position), position
    )
    return lax.convert_element_type(high ^ lower, f"uint{width}")


@functools.cache
def _are_of_positions(width: int, partitionable: bool) -> bool:
    """Whether this jax makes random bits as `_bits_at` does: tried on a few."""
    if width > 32 or not partitionable:
        return False
    with jax.ensure_compile_time_eval():
        key = jax.random.key(7, impl="threefry2x32")
        bits = jax.random.bits(key, (3, 5), f"uint{width}")
        ours = [_bits_at(key, width, (3, 5), (3, 1), 1, np.int32(n)) for n in range(5)]
        return bool(jnp.array_equal(jnp.concatenate(ours, 1), bits))


def works(e: Equation, flat: FlatJaxpr, rule: Rule, label: int) -> bool:
    """Whether an equation can be done for one position along a label of its rule: sizes
    may be hidden in parameters."""

    def dim(labels: Sequence[int | None]) -> int | None:
        return labels.index(label) if label in labels else None

    types = flat.operand_types(e)
    results = [flat.types[v] for v in e.outputs]
    sides = [
        *zip(types, rule.operands, strict=True),
        *zip(results, rule.results, strict=True),
    ]
    length = math.gcd(*(t.shape[d] for t, x in sides if (d := dim(x)) is not None))
    if length == 0:
        return False

    def cut(t: Type, labels: Sequence[int | None]) -> tuple[int, int] | None:
        d = dim(labels)
        return None if d is None else (d, t.shape[d] // length)

    def part(t: Type, labels: Sequence[int | None]) -> Type:
        d = dim(labels)
        return t if d is None else t.part(d, t.shape[d] // length)

    of_operands = [part(*pair) for pair in zip(types, rule.operands, strict=True)]
    padding, halo = None, rule.halos.get(label)
    if halo is not None:
        _, count, around = halo.of(0, halo.positions // length)
        of_operands[0] = of_operands[0].part(halo.dim, count)
        padding = halo.at, around
    shapes = [part(*pair).shape for pair in zip(results, rule.results, strict=True)]
    along = Along(
        tuple(cut(*pair) for pair in zip(types, rule.operands, strict=True)),
        cut(results[0], rule.results[0]),
        padding,
    )
    try:
        made = on_part(e, of_operands, shapes, along)
        hows = rule.reduced.get(label, ())
        for how, v in zip(hows, made.jaxpr.outvars, strict=bool(hows)):
            if how is not None:
                partial = Type.of(v.aval)
                combining(how, partial, partial)
                jax.eval_shape(functools.partial(nothing, how, partial))
    except Exception:  # whatever a primitive says of what it was not made for
        return False
    return True


def _wide(indices: Any) -> Any:
    """Indices in a type that has the positions of all parts: 256 is none for 8 bits."""
    narrow = indices.dtype.itemsize < 4
    return lax.convert_element_type(indices, np.int32) if narrow else indices


def _column(indices: Any, column: int, change: Callable[[Any], Any]) -> Any:
    """Indices, one column of which is changed."""
    here = lax.broadcasted_iota(np.int32, indices.shape, indices.ndim - 1) == column
    return lax.select(here, change(indices), indices)


def _gathered(
    e: Equation,
    operands: Sequence[Any],
    shape: tuple[int, ...],
    along: Along,
    low: Any,
) -> Any:
    """What a gather finds in a part; nothing for an index that is in another."""
    part, indices = operands[0], _wide(operands[1])
    params, whole = e.origin.params, e.origin.invars[0].aval.shape
    numbers, mode = params["dimension_numbers"], params["mode"]
    sizes = [
        now if size == was else size
        for size, was, now in zip(params["slice_sizes"], whole, part.shape, strict=True)
    ]
    dim, scale = along.operands[0] or (None, 0)
    if dim not in {*numbers.collapsed_slice_dims}.intersection(numbers.start_index_map):
        (found,) = bind(e.origin, operands, slice_sizes=tuple(sizes))
        return found
    assert dim is not None
    column, begin = numbers.start_index_map.index(dim), low * scale
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        # So does XLA with what was promised to be in bounds, and is not.
        indices = _column(indices, column, lambda x: jnp.clip(x, 0, whole[dim] - 1))
    begin = lax.convert_element_type(begin, indices.dtype)
    wanted = indices[..., column]
    there = (wanted >= begin) & (wanted < begin + part.shape[dim])
    local = _column(indices, column, lambda x: jnp.clip(x - begin, 0, part.shape[dim] - 1))
    (found,) = bind(e.origin, (part, local), slice_sizes=tuple(sizes))
    dims = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    spread = lambda mask: lax.broadcast_in_dim(mask, shape, dims)
    # What is added to it stays as it is, -0.0 too.
    is_float = jnp.issubdtype(found.dtype, jnp.floating)
    zero = lax.full_like(found, -0.0 if is_float else 0)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        # What is nowhere is filled in with the first part.
        nowhere = (wanted < 0) | (wanted >= whole[dim])
        none = _column(local, column, lambda x: x * 0 - 1)
        (filled,) = bind(e.origin, (part, none), slice_sizes=tuple(sizes))
        nothing = lax.select(spread(nowhere & (begin == 0)), filled, zero)
    else:
        nothing = zero
    return lax.select(spread(there), found, nothing)


def _scattered(
    e: Equation,
    operands: Sequence[Any],
    shape: tuple[int, ...],
    along: Along,
    low: Any,
) -> Any:
    """What a scatter makes of a part; updates for other parts are dropped."""
    part, indices, updates = operands[0], _wide(operands[1]), operands[2]
    params, whole = e.origin.params, e.origin.invars[0].aval.shape
    numbers = params["dimension_numbers"]
    dim, scale = along.operands[0] or (None, 0)
    indexed = {*numbers.inserted_window_dims}
    if dim not in indexed.intersection(numbers.scatter_dims_to_operand_dims):
        if along.result is None:  # it has some of the updates, and all of the operand
            none = nothing(COMBINED[e.name], Type(shape, part.dtype))
            part = lax.select(low == 0, part, _converted(none, part.dtype))
        return _scattered_into(e, (part, indices, updates))
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = iter(numbers.update_window_dims)
    room = [
        n - (1 if d in gone else updates.shape[next(windows)]) for d, n in enumerate(whole)
    ]
    for column, d in enumerate(numbers.scatter_dims_to_operand_dims):
        if params["mode"] == lax.GatherScatterMode.CLIP:
            indices = _column(indices, column, lambda x, n=room[d]: jnp.clip(x, 0, n))
        if d == dim:
            begin = lax.convert_element_type(low * scale, indices.dtype)
            indices = _column(indices, column, lambda x, b=begin: x - b)
    dropped = lax.GatherScatterMode.FILL_OR_DROP
    (result,) = bind(e.origin, (part, indices, updates), mode=dropped)
    return result


def _scattered_into(e: Equation, operands: Sequence[Any]) -> Any:
    """What some of the updates of a scatter make of what others made of its operand."""
    sofar, indices, updates = operands
    (result,) = bind(e.origin, (sofar, _wide(indices), updates))
    return result


def _numbered(
    e: Equation,
    operands: Sequence[Any],
    shape: tuple[int, ...],
    along: Along,
    low: Any,
) -> Any:
    """A part of an iota: rounded once, as the whole is."""
    dtype, number = e.origin.params["dtype"], e.origin.params["dimension"]
    if along.result is None or along.result[0] != number:
        return lax.broadcasted_iota(dtype, shape, number)
    begin = lax.convert_element_type(low * along.result[1], np.uint32)
    positions = lax.broadcasted_iota(np.uint32, shape, number) + begin
    return lax.convert_element_type(positions, dtype)


# What gives other results at other positions.
_BY_POSITION: dict[
    str, Callable[[Equation, Sequence[Any], tuple[int, ...], Along, Any], Any]
] = {
    "gather": _gathered,
    **dict.fromkeys(SCATTERS, _scattered),
    "random_bits": _random_bits,
    "iota": _numbered,
    "slice": _sliced,
    "dynamic_slice": _sliced,
    "dynamic_update_slice": _updated,
}


def goes_by_position(e: Equation) -> bool:
    """Whether an equation gives other results at other positions."""
    return e.name in _BY_POSITION


# -- reductions ------------------------------------------------------------------------

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": lax.add,
    "max": lax.max,
    "min": lax.min,
    "mul": lax.mul,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _dtype_of_sums(how: str, dtype: Any) -> Any:
    """In what the parts of a reduction are combined: 16-bit sums in float32, as XLA does
    inside a reduction."""
    wide = how == "add" and _is_narrow(dtype)
    return np.dtype(np.float32) if wide else dtype


def nothing(how: str, t: Type) -> Any:
    """What changes nothing when it is combined."""
    dtype = t.dtype
    if how in ("max", "min"):
        least = how == "max"
        if dtype == np.dtype(bool):
            value: Any = not least
        elif jnp.issubdtype(dtype, jnp.floating):
            value = -np.inf if least else np.inf
            if not np.isinf(np.asarray(value).astype(dtype)):  # 8 bits have none
                value = jnp.finfo(dtype).min if least else jnp.finfo(dtype).max
        else:
            value = jnp.iinfo(dtype).min if least else jnp.iinfo(dtype).max
    else:
        value = {"add": 0, "mul": 1, "or": 0, "xor": 0, SAME: 0}.get(how)
        if how == "add" and jnp.issubdtype(dtype, jnp.floating):
            value = -0.0  # what is added to it stays as it is, -0.0 too
        if how == "and":
            value = np.invert(np.zeros((), dtype))
        elif dtype == np.dtype(bool):
            value = bool(value)
    return lax.full(t.shape, value, _dtype_of_sums(how, dtype))


@functools.lru_cache(maxsize=1024)
def combining(how: str, sofar: Type, part: Type, dtype: Any = None) -> Any:
    """What a reduction has of some parts, and one more part, to what it has then: of this
    dtype in the end, until then sums of 16-bit numbers in float32."""

    def combine(sofar: Any, part: Any) -> Any:
        wide = lax.convert_element_type(sofar, _dtype_of_sums(how, sofar.dtype))
        total = combined(how, wide, part)
        return total if dtype is None else lax.convert_element_type(total, dtype)

    return jax.make_jaxpr(combine)(sofar.struct(), part.struct())


def combined(how: str, sofar: Any, part: Any) -> Any:
    """What a reduction has of all parts up to one."""
    if how == SAME:
        return part
    part = lax.convert_element_type(part, sofar.dtype)
    return COMBINE[how](sofar, part)


# -- stretches -------------------------------------------------------------------------


def on_sofar(e: Equation, types: Sequence[Type]) -> Any:
    """A scatter of some of its updates into what others made of its operand, as a jaxpr of
    operands of these types."""
    function = lambda *operands: _scattered_into(e, operands)
    return jax.make_jaxpr(function)(*(t.struct() for t in types))


def on_part(
    e: Equation, types: Sequence[Type], shapes: Sequence[tuple[int, ...]], along: Along
) -> Any:
    """An equation on parts, as a jaxpr of the position at which the part begins and of
    operands of these types."""

    def function(low: Any, *operands: Any) -> Any:
        results = _apply(e, operands, shapes, along, low)
        # What a loop hands on unchanged JAX gives back as it is: here each is a new value.
        there = {id(x) for x in operands}
        new = []
        for x in results:
            new.append(jnp.copy(x) if id(x) in there else x)
            there.add(id(x))
        return new

    return jax.make_jaxpr(function)(_POSITION, *(t.struct() for t in types))


IN_BLOCKS = "blocks_of_"
_POSITION = jax.ShapeDtypeStruct((), np.int32)


def in_blocks(
    flat: FlatJaxpr, stretch: Stretch, size: int, materialized: Materialized
) -> Any:
    """The equation of a jaxpr that does a stretch in blocks of so many positions; of the
    first blocks some values are written down for later loops."""

    def function(*arrays: Any) -> Any:
        values = dict(zip(stretch.entering, arrays, strict=True))
        return _Blockwise(flat, stretch, size, materialized).run(values)

    lead = lead_equation(flat, stretch)
    function.__name__ = function.__qualname__ = f"{IN_BLOCKS}{lead.name}"
    structs = [flat.types[v].struct() for v in stretch.entering]
    closed = jax.make_jaxpr(jax.jit(function))(*structs)
    (eqn,) = closed.jaxpr.eqns
    assert list(eqn.invars) == list(closed.jaxpr.invars)
    return eqn


def at_position(
    flat: FlatJaxpr,
    stretch: Stretch,
    steps: Sequence[int],
    values: Mapping[int, Any],
    position: Any,
) -> dict[int, Any]:
    """What some equations of a stretch give at one position of its axis; `values` has,
    whole, all that they read and do not make themselves."""
    blocks = _Blockwise(flat, stretch, 1, NOTHING)
    return blocks.block(steps, values, {}, position, 1)


def lead_equation(flat: FlatJaxpr, stretch: Stretch) -> Equation:
    """The equation of a stretch that does most of the work."""
    equations = (flat.equations[i] for i in sorted(stretch.working))
    return max(equations, key=lambda e: costs.flops(e.origin))


def _converted(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


class _Blockwise:
    """A stretch evaluated block by block."""

    def __init__(
        self, flat: FlatJaxpr, stretch: Stretch, size: int, materialized: Materialized
    ):
        self._flat = flat
        self._stretch = stretch
        self._size = size
        self._materialized = materialized
        self._accumulated = stretch.accumulated(flat)

    def run(self, values: dict[int, Any]) -> list[Any]:
        """What leaves the stretch, of what enters it."""
        flat, stretch, written = self._flat, self._stretch, self._materialized.values
        forms = stretch.passes(flat, written), stretch.passes(flat)
        for first, others in zip(*forms, strict=True):
            carry_out([flat.equations[i] for i in first.once], values)
            if first.wanted:
                values.update(self._loop(first, others, values))
        return [values[v] for v in stretch.leaving]

    def _loop(self, first: Pass, others: Pass, values: Mapping[int, Any]) -> dict[int, Any]:
        """Some values, made block by block: the first blocks with what is written down of
        them, the others without."""
        size, many = self._size, self._materialized.blocks
        count, rest = divmod(self._stretch.length, size)

        def add(each: Pass, sofar: Mapping[int, Any], start: Any, size: int) -> Any:
            block = self.block(each.steps, values, sofar, start, size)
            return {v: self._with_block(v, x, block[v], start) for v, x in sofar.items()}

        made = {v: self._begin(v, values) for v in first.wanted}
        of = lambda each: {v: made[v] for v in each.wanted}
        for each, begin, end in ((first, 0, many), (others, many, count)):
            if begin < end and each.wanted:
                body = lambda n, sofar, each=each: add(each, sofar, n * size, size)
                made.update(lax.fori_loop(begin, end, body, of(each)))
        if rest:
            made.update(add(others, of(others), count * size, rest))
        return {v: _converted(x, self._flat.types[v].dtype) for v, x in made.items()}

    def _begin(self, v: int, values: Mapping[int, Any]) -> Any:
        t, stretch = self._flat.types[v], self._stretch
        if v in self._accumulated:
            operand = self._accumulated[v].inputs[0]
            is_constant = isinstance(operand, Constant)
            return jnp.asarray(operand.value) if is_constant else values[operand]
        if v in stretch.reduced:
            return nothing(stretch.reduced[v], t)
        if v in self._materialized.values:
            length = self._materialized.blocks * self._size
            return lax.full(stretch.shape(self._flat, v, length), 0, t.dtype)
        return lax.full(t.shape, 0, t.dtype)

    def _with_block(self, v: int, before: Any, block: Any, start: Any) -> Any:
        if v in self._accumulated:
            return block
        if v in self._stretch.reduced:
            return combined(self._stretch.reduced[v], before, block)
        dim = self._stretch.dims[v]
        at = start * self._stretch.scale(self._flat, v, dim)
        return lax.dynamic_update_slice_in_dim(before, block, at, dim)

    def block(
        self,
        steps: Sequence[int],
        values: Mapping[int, Any],
        sofar: Mapping[int, Any],
        start: Any,
        size: int,
    ) -> dict[int, Any]:
        """What some equations make of one block, and of what there is of those before."""
        flat, stretch = self._flat, self._stretch
        block: dict[int, Any] = {}

        def read(i: int, position: int, v: int | Constant) -> Any:
            if isinstance(v, Constant):
                return v.value
            if v in stretch.reduced:  # of all blocks, though this one's is made again
                return values[v]
            dim = stretch.uses.get((i, position))
            if v in block or dim is None:
                return block[v] if v in block else values[v]
            scale = stretch.scale(flat, v, dim)
            return lax.dynamic_slice_in_dim(values[v], start * scale, size * scale, dim)

        for i in steps:
            e = flat.equations[i]
            operands = [read(i, position, v) for position, v in enumerate(e.inputs)]
            v = e.outputs[0]
            if v in self._accumulated and v in sofar:
                block[v] = _scattered_into(e, (sofar[v], *operands[1:]))
                continue
            shapes = [stretch.shape(flat, v, size) for v in e.outputs]
            # Windows do not slide along what is done in blocks.
            made = _apply(e, operands, shapes, stretch.along(flat, i, 0, size), start)
            block.update(zip(e.outputs, made, strict=True))
        return block
