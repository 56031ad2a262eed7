"""A jaxpr, flat: nested calls inlined, dead equations gone, values numbered.

The only module that looks inside a jaxpr. What comes out has no scopes: a value is a
number, an equation names the values it reads and writes.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jturnip import compat
from jturnip.errors import UnsupportedError


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
class Type:
    """Shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool

    @property
    def nbytes(self) -> int:
        """Bytes on a device; a key's are those of its data."""
        if jnp.issubdtype(self.dtype, jax.dtypes.extended):
            struct = jax.ShapeDtypeStruct(self.shape, self.dtype)
            data = jax.eval_shape(jax.random.key_data, struct)
            return data.size * data.dtype.itemsize
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def struct(self, sharding: Any = None) -> jax.ShapeDtypeStruct:
        """As an argument of `jax.jit(...).lower`."""
        return jax.ShapeDtypeStruct(
            self.shape, self.dtype, weak_type=self.weak_type, sharding=sharding
        )


@dataclass(frozen=True, slots=True)
class Constant:
    """A scalar written in the function's text."""

    value: Any
    type: Type


@dataclass(frozen=True, slots=True)
class Equation:
    """One primitive applied to values."""

    # The equation it came from: its primitive, params and context are used as they are.
    origin: Any
    inputs: tuple[int | Constant, ...]
    outputs: tuple[int, ...]
    # The calls it was inlined from, outermost first.
    calls: tuple[Any, ...] = ()

    @property
    def source(self) -> str:
        """The user's line: its own, or that of the call that led to it."""
        return _source(self.origin, self.calls)

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.origin.primitive.name

    def bind(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Applies the primitive, in the context in which the user did."""
        primitive = self.origin.primitive
        params = primitive.get_bind_params(self.origin.params)
        with self.origin.ctx.manager:
            results = primitive.bind(*operands, **params)
        return results if primitive.multiple_results else (results,)


@dataclass(frozen=True, slots=True)
class FlatJaxpr:
    """A function as numbered values and the equations between them, in a serial order."""

    types: tuple[Type, ...]
    equations: tuple[Equation, ...]
    # Value of each flat argument, in order.
    inputs: tuple[int, ...]
    # Closed-over arrays: (value, array).
    constants: tuple[tuple[int, Any], ...]
    # Value of each flat result, in order, none twice: an argument that is returned as it
    # is, or a value that an equation writes.
    outputs: tuple[int, ...]

    @property
    def written_outputs(self) -> tuple[int, ...]:
        """The results that equations write, in order."""
        inputs = frozenset(self.inputs)
        return tuple(v for v in self.outputs if v not in inputs)


def flatten(closed: Any, forwarded: Collection[int] = ()) -> FlatJaxpr:
    """Flattens a traced function's jaxpr.

    Args:
      closed: `jax.jit(fn).trace(...).jaxpr`, of any supported JAX version.
      forwarded: positions of arguments that may be returned as they are, once. Any other
        result is written by an equation of its own, a copy where the function has none.

    Raises:
      UnsupportedError: for an equation with effects or values that are no arrays; it names
        the primitive and the user's line.
    """
    flattener = _Flattener()
    jaxpr = getattr(closed, "jaxpr", closed)
    inputs = tuple(flattener.new_value(v.aval) for v in jaxpr.invars)
    results = tuple(flattener.call(closed, inputs))
    outputs = flattener.distinct(results, {inputs[i] for i in forwarded})
    equations = _live(flattener.equations, outputs)
    used = {v for e in equations for v in e.inputs if isinstance(v, int)}
    constants = tuple((v, c) for v, c in flattener.constants.values() if v in used)
    return FlatJaxpr(tuple(flattener.types), equations, inputs, constants, outputs)


class _Flattener:
    """Collects what `flatten` returns."""

    def __init__(self) -> None:
        self.types: list[Type] = []
        self.equations: list[Equation] = []
        # id of a closed-over array → (its value, the array, which keeps the id its own)
        self.constants: dict[int, tuple[int, Any]] = {}

    def new_value(self, aval: Any) -> int:
        self.types.append(_type_of(aval))
        return len(self.types) - 1

    def constant(self, array: Any, aval: Any) -> int:
        if id(array) not in self.constants:
            self.constants[id(array)] = (self.new_value(aval), array)
        return self.constants[id(array)][0]

    def call(
        self, closed: Any, arguments: Sequence[int | Constant], calls: tuple[Any, ...] = ()
    ) -> Iterator[int | Constant]:
        """Inlines a call; returns the values of its results."""
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        scope: dict[Any, int | Constant] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            scope[var] = self.constant(const, var.aval)
        scope.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> int | Constant:
            if not hasattr(atom, "val"):
                return scope[atom]
            if atom.aval.shape:
                return self.constant(atom.val, atom.aval)
            return Constant(atom.val, _type_of(atom.aval))

        for equation in jaxpr.eqns:
            operands = [read(v) for v in equation.invars]
            inner = _INLINED.get(equation.primitive.name)
            if inner is not None and inner in equation.params:
                within = (*calls, equation)
                results = list(self.call(equation.params[inner], operands, within))
                scope.update(zip(equation.outvars, results, strict=True))
                continue
            _check(equation, calls)
            results = [self.new_value(v.aval) for v in equation.outvars]
            scope.update(zip(equation.outvars, results, strict=True))
            self.equations.append(
                Equation(equation, tuple(operands), tuple(results), calls)
            )
        return map(read, jaxpr.outvars)

    def distinct(
        self, results: Sequence[int | Constant], forwarded: Collection[int]
    ) -> tuple[int, ...]:
        """Results as values that are each written once, for this purpose only."""
        taken = {v for v in range(len(self.types))}
        for equation in self.equations:
            taken.difference_update(equation.outputs)
        outputs = []
        for result in results:
            is_value = isinstance(result, int)
            if is_value and result in forwarded and result not in outputs:
                outputs.append(result)
                continue
            if isinstance(result, Constant) or result in taken:
                t = result.type if isinstance(result, Constant) else self.types[result]
                (result,) = self.call(jax.make_jaxpr(jnp.copy)(t.struct()), (result,))
            assert isinstance(result, int)
            taken.add(result)
            outputs.append(result)
        return tuple(outputs)


def _type_of(aval: Any) -> Type:
    return Type(tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False)))


def _source(equation: Any, calls: tuple[Any, ...]) -> str:
    lines = map(compat.source_line, (equation, *reversed(calls)))
    return next(filter(None, lines), "")


def _check(equation: Any, calls: tuple[Any, ...]) -> None:
    """Refuses what cannot be moved about freely, with the user's line."""
    where = _source(equation, calls) or "unknown line"
    what = f'primitive "{equation.primitive.name}" ({where})'
    if equation.effects:
        effects = ", ".join(sorted(map(str, equation.effects)))
        raise UnsupportedError(
            f"{what} has effects ({effects}), and jturnip does not split functions with"
            " effects yet. Move it out of the function, or raise gpu_bytes so that the"
            " whole function fits."
        )
    for variable in (*equation.invars, *equation.outvars):
        aval = variable.aval
        if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
            raise UnsupportedError(f"{what} uses {aval}, which is not an array.")
        if "host" in str(getattr(aval, "memory_space", "")).lower():
            raise UnsupportedError(
                f"{what} places a value in host memory. jturnip decides itself what lies"
                " where: remove the device_put or the offloading policy."
            )


def _live(equations: Sequence[Equation], outputs: Sequence[int]) -> tuple[Equation, ...]:
    """Equations that a result needs, in their order."""
    wanted = set(outputs)
    kept = []
    for equation in reversed(equations):
        if wanted.isdisjoint(equation.outputs):
            continue
        kept.append(equation)
        wanted.update(v for v in equation.inputs if isinstance(v, int))
    return tuple(reversed(kept))
