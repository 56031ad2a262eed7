"""A function as numbered values: what `flatten` makes of a jaxpr.

There are no scopes: a value is a number, an equation names the values it reads and writes.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jturnip import compat
from jturnip.units import padded


# Primitive name → the parameter that holds the jaxpr it only calls. Differentiation rules
# (custom_jvp, custom_vjp) have done their part by the time a function is traced.
_CALLS = {
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


@functools.lru_cache
def _key_bytes(dtype: Any) -> int:
    """Bytes of the data of one key."""
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    return data.size * data.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Type:
    """Shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    # Bytes on a device; a key's are those of its data.
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = _key_bytes(self.dtype) if is_key(self.dtype) else self.dtype.itemsize
        object.__setattr__(self, "nbytes", math.prod(self.shape) * size)

    @classmethod
    def of(cls, aval: Any) -> "Type":
        """Of an abstract value, an array, or a struct; a token is of no type."""
        try:
            shape = tuple(aval.shape)
        except (AttributeError, TypeError):
            return cls((0,), np.dtype(bool))
        return cls(shape, aval.dtype, bool(getattr(aval, "weak_type", False)))

    def struct(self, sharding: Any = None) -> jax.ShapeDtypeStruct:
        """As an argument of `jax.jit(...).lower`."""
        return jax.ShapeDtypeStruct(
            self.shape, self.dtype, weak_type=self.weak_type, sharding=sharding
        )

    def rows(self, count: int) -> "Type":
        """The type of `count` of its rows."""
        return self.part(0, count)

    def part(self, dim: int, length: int) -> "Type":
        """The type of so many positions along a dimension."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return dataclasses.replace(self, shape=shape)


@dataclass(frozen=True, slots=True)
class Constant:
    """A scalar written in the function's text."""

    value: Any
    type: Type

    @classmethod
    def position(cls, at: int, dtype: Any = np.int32) -> "Constant":
        """A position along an axis. Tasks that differ in positions only are one."""
        return cls(np.asarray(at, dtype), Type((), np.dtype(dtype)))


# What an equation reads: a value by its number, or a number written in the text.
Atom: TypeAlias = int | Constant


@dataclass(frozen=True, slots=True)
class Equation:
    """One primitive applied to values."""

    # The equation it came from: its primitive, params and context are used as they are.
    origin: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    # The calls it was inlined from, outermost first.
    calls: tuple[Any, ...] = ()
    # Whether its last input and its last output are a token, handed from one equation with
    # effects to the next (`effects.py`).
    effects: bool = False
    # Whether `origin` is ours; the user's line is then that of the innermost call.
    ours: bool = False
    # Whether it is a loop or a branch that is too large for a task: what it calls is
    # planned by itself, and it is driven from outside.
    driven: bool = False
    # The values that it reads; not the numbers written in it.
    reads: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        reads = tuple(v for v in self.inputs if not isinstance(v, Constant))
        object.__setattr__(self, "reads", reads)

    @property
    def source(self) -> str:
        """The user's line: its own, or that of the call that led to it."""
        return source_line(() if self.ours else (self.origin,), self.calls)

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.origin.primitive.name

    @property
    def within(self) -> tuple[Any, ...]:
        """The calls of what is made out of it: its own, and itself if it is the user's."""
        return self.calls if self.ours else (*self.calls, self.origin)

    def reading(self, instead: Mapping[int, int]) -> tuple[Atom, ...]:
        """What it reads where some values are there instead of others."""
        return tuple(
            v if isinstance(v, Constant) else instead.get(v, v) for v in self.inputs
        )

    def bind(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Applies the primitive, in the context in which the user did."""
        if self.effects:
            *operands, token = operands
            return (*bind(self.origin, operands), token)
        return bind(self.origin, operands)


def touched(e: Equation) -> set[int]:
    """What an equation reads and writes."""
    return {*e.reads, *e.outputs}


def entering(equations: Sequence[Equation]) -> tuple[int, ...]:
    """What some equations read that others make: each once, in the order in which it is
    read."""
    written = {v for e in equations for v in e.outputs}
    return tuple(dict.fromkeys(v for e in equations for v in e.reads if v not in written))


def is_key(dtype: Any) -> bool:
    """Whether it is the type of PRNG keys, which numpy does not have."""
    return not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.extended)


def is_packed(dtype: Any) -> bool:
    """Whether it is of numbers of less than a byte, which XLA packs and numpy does not."""
    if is_key(dtype) or not jnp.issubdtype(dtype, jnp.number):
        return False
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return info(dtype).bits < 8


def called(eqn: Any) -> Any | None:
    """The jaxpr that an equation does nothing with but call it, or None."""
    return eqn.params.get(_CALLS.get(eqn.primitive.name, ""))


def bind(eqn: Any, operands: Sequence[Any], **params: Any) -> Sequence[Any]:
    """Applies a jaxpr equation's primitive to other operands, and perhaps params."""
    primitive = eqn.primitive
    params = primitive.get_bind_params({**eqn.params, **params})
    with eqn.ctx.manager:
        results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else (results,)


def carry_out(equations: Sequence[Equation], values: dict[int, Any]) -> None:
    """Does some equations, in order, with values that are there; adds what they write."""
    for e in equations:
        read = [v.value if isinstance(v, Constant) else values[v] for v in e.inputs]
        values.update(zip(e.outputs, e.bind(read), strict=True))


def source_line(own: Sequence[Any], calls: Sequence[Any]) -> str:
    """The user's line of some equations inlined from some calls, or ""."""
    lines = map(compat.source_line, (*own, *reversed(calls)))
    return next(filter(None, lines), "")


def first_source(equations: Iterable[Equation]) -> str:
    """The user's line of the first equation that has one, or ""."""
    return next(filter(None, (e.source for e in equations)), "")


@dataclass(frozen=True, slots=True)
class Window:
    """Some positions along each dimension of an array: the first, and past the last."""

    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Window":
        """All of an array."""
        return cls(tuple((0, n) for n in shape))

    def part(self, dim: int, start: int, stop: int) -> "Window":
        """Some of these positions, counted from the first."""
        first = self.bounds[dim][0]
        here = (first + start, first + stop)
        return Window((*self.bounds[:dim], here, *self.bounds[dim + 1 :]))

    def within(self, outer: "Window") -> "Window":
        """The same positions where the array is itself a window."""
        pairs = zip(self.bounds, outer.bounds, strict=True)
        return Window(tuple((a + first, b + first) for (a, b), (first, _) in pairs))

    @property
    def index(self) -> tuple[slice, ...]:
        """As numpy takes it."""
        return tuple(itertools.starmap(slice, self.bounds))

    def meets(self, other: "Window") -> bool:
        """Whether there is a position in both."""
        pairs = zip(self.bounds, other.bounds, strict=True)
        return all(a < d and c < b for (a, b), (c, d) in pairs)

    def text(self, shape: Sequence[int]) -> str:
        """As it is written behind the name of an array of this shape."""
        words = [
            ":" if (a, b) == (0, n) else f"{a}:{b}"
            for (a, b), n in zip(self.bounds, shape, strict=True)
        ]
        while len(words) > 1 and words[-1] == ":":
            words.pop()
        return f"[{', '.join(words)}]"


@dataclass(frozen=True, slots=True)
class Slice:
    """A value that is a part of an array in host memory; nobody computes it."""

    value: int
    # The value of the argument or closed-over array it is cut from.
    source: int
    window: Window


@dataclass(frozen=True, slots=True)
class Parts:
    """A result that exists as parts, to be put together in host memory."""

    values: tuple[int, ...]
    windows: tuple[Window, ...]
    type: Type

    @classmethod
    def along(
        cls, dim: int, values: Sequence[int], types: Sequence[Type], t: Type
    ) -> "Parts":
        """Parts of these types, one after the other along a dimension."""
        ends = list(itertools.accumulate(types[v].shape[dim] for v in values))
        bounds = zip([0, *ends], ends, strict=False)
        windows = tuple(Window.of(t.shape).part(dim, a, b) for a, b in bounds)
        return cls(tuple(values), windows, t)


def values_of(output: int | Parts) -> tuple[int, ...]:
    """The values that a result is, or is put together from."""
    return output.values if isinstance(output, Parts) else (output,)


@dataclass(frozen=True, slots=True)
class FlatJaxpr:
    """A function as numbered values and the equations between them, in a serial order."""

    types: tuple[Type, ...]
    equations: tuple[Equation, ...]
    # Value of each flat argument, in order.
    inputs: tuple[int, ...]
    # Closed-over arrays: (value, array).
    constants: tuple[tuple[int, Any], ...]
    # Each flat result, in order. In the end (`results.py`) no value comes twice: each is an
    # argument that is returned as it is, a value that an equation writes, or parts that are
    # all written.
    outputs: tuple[int | Parts, ...]
    slices: tuple[Slice, ...] = ()

    @property
    def result_values(self) -> tuple[int, ...]:
        """The values of all results, in order."""
        return tuple(v for o in self.outputs for v in values_of(o))

    @property
    def written_outputs(self) -> tuple[int, ...]:
        """The values of results that equations write, in order."""
        inputs = frozenset(self.inputs)
        return tuple(v for v in self.result_values if v not in inputs)

    def operand_types(self, e: Equation) -> list[Type]:
        """The types of what an equation reads."""
        return list(map(self.type_of, e.inputs))

    def type_of(self, what: Atom | Parts) -> Type:
        """The type of what an equation reads, or of a result."""
        return self.types[what] if isinstance(what, int) else what.type


def needs_x64(types: Iterable[Type]) -> bool:
    """Whether some are of 64 bits where JAX would trace them with 32: the user had other
    types for a part of the function only (`jax.enable_x64`)."""
    canonical = jax.dtypes.canonicalize_dtype
    arrays = (t.dtype for t in types if isinstance(t.dtype, np.dtype))
    return any(canonical(dtype) != dtype for dtype in arrays)


def evaluated(flat: FlatJaxpr, *operands: Any) -> list[Any]:
    """The results of a function, of its arguments."""
    values = dict(zip(flat.inputs, operands, strict=True))
    values.update(flat.constants)
    carry_out(flat.equations, values)
    return [values[v] for v in flat.result_values]


def nbytes_of(flat: FlatJaxpr, values: Collection[int]) -> int:
    """Bytes that some values take on the device."""
    return sum(padded(flat.types[v].nbytes) for v in values)
