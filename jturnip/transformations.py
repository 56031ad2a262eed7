"""A jturnip function under JAX's transformations: every part of it in the budget.

Under `jax.grad`, `jvp`, `vmap` and the like, a call is one operation `jturnip`, whose rules
make other flat functions of a flat function, by JAX's public transformations: its
linearization in two parts, the transpose of the linear one, its batched form. Each of them
is a jturnip function in the same budget. What passes from the forward part to the backward
one, the residuals, stays on the device if that leaves room for the backward part, else it
waits in host memory.

The operation is seen by JAX's eager interpreters only: where a call becomes part of a
larger jaxpr, that jaxpr's owner decides about memory, and the call is inlined there.
"""

import dataclasses
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import jax
import jax.extend
import numpy as np
from jax.core import Tracer
from jax.interpreters import ad, batching, mlir

from jturnip import compat, memory
from jturnip.frontend import refs
from jturnip.frontend.flatten import flatten
from jturnip.placement import is_on_host
from jturnip.programs import bounds, places
from jturnip.signature import Call, Statics
from jturnip.units import padded


# Signatures of one function that are kept.
_SIGNATURES = 256

# Flat results of flat arguments.
Flat = Callable[..., list[Any]]


class Runner(Protocol):
    """What runs a flat function in the budget."""

    def __call__(self, *args: Any) -> list[Any]:
        """Calls it."""
        ...

    def seconds(self, leaves: Sequence[Any], beside_bytes: int, cut: bool) -> float | None:
        """What a call with such arguments is thought to take, cut along axes or not; None
        if it is refused."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A flat function, with what runs it in the budget."""

    name: str
    fn: Flat
    # `jax.ShapeDtypeStruct`s of the arguments, and what to call each.
    inputs: tuple[Any, ...]
    names: tuple[str, ...]
    # Makes of a function what runs it with concrete arguments.
    make: "Callable[[Function], Runner]"
    # Of each result the number of a group, which lies in one memory; None for a residual,
    # which may lie anywhere.
    groups: tuple[int | None, ...]
    # Whether each result must be in host memory, or on the device, or None; empty where
    # nothing is asked. JAX has a cotangent in the memory of its argument.
    on_host: tuple[bool | None, ...] = ()
    # Positions of arguments whose memory may be re-used.
    donated: tuple[int, ...] = ()
    # Whether a transformation made it.
    is_derived: bool = False
    # Of a forward part: what is probably called with its residuals, if known.
    later: "Later | None" = None
    _derived: dict[Hashable, Any] = dataclasses.field(default_factory=dict, repr=False)
    _lock: Any = dataclasses.field(default_factory=threading.RLock, repr=False)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Calls it in the budget."""
        return self.runner(*args)

    @property
    def runner(self) -> "Runner":
        """What runs it."""
        return self._once("run", lambda: self.make(self))

    @property
    def closed(self) -> Any:
        """Its jaxpr."""
        return self._once("jaxpr", lambda: jax.make_jaxpr(self.fn)(*self.inputs))

    @property
    def unread(self) -> frozenset[int]:
        """Positions of arguments that nothing reads: no plan of it counts them."""

        def positions() -> frozenset[int]:
            flat = flatten(self.closed)
            ignored = places.unread(flat)
            return frozenset(i for i, v in enumerate(flat.inputs) if v in ignored)

        return self._once("unread", positions)

    def jvp(self, moving: tuple[bool, ...]) -> "tuple[Function, tuple[bool, ...]]":
        """Of the arguments and the tangents of those that move, the results and the
        tangents of those that move with them."""
        return self._once(("jvp", moving), lambda: _jvp_of(self, moving))

    def linearized(self, moving: tuple[bool, ...]) -> "Linearized":
        """Its two parts, where some arguments move."""
        return self._once(("linearized", moving), lambda: _linearized(self, moving))

    def transposed(
        self,
        linear_in: tuple[bool, ...],
        given: tuple[bool, ...],
        on_host: tuple[bool | None, ...] = (),
    ) -> "Function":
        """Of the other arguments and the cotangents of given results, the cotangents of the
        arguments that it is linear in, where they are wanted."""
        return self._once(
            ("transposed", linear_in, given, on_host),
            lambda: _transposed(self, linear_in, given, on_host),
        )

    def batched(
        self, dims: tuple[int | None, ...], size: int
    ) -> "tuple[Function, tuple[int | None, ...]]":
        """The function of arguments batched along some dimensions, and those of its
        results."""
        return self._once(("batched", dims, size), lambda: _batched(self, dims, size))

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        key = (key, compat.trace_context())
        with self._lock:
            if key not in self._derived:
                with compat.tracing():
                    self._derived[key] = make()
            return self._derived[key]

    def derived(self, kind: str, fn: Flat, inputs: Any, names: Any, **more: Any) -> Any:
        """Another function, in the same budget."""
        name = f"{self.name}_{kind}"
        more |= {"is_derived": True}
        return Function(name, fn, tuple(inputs), tuple(names), self.make, **more)


@dataclasses.dataclass(frozen=True)
class Later:
    """The gradient's part that is probably called with the residuals of a forward part."""

    linear: Function
    # Of each residual: whether it is an argument (else a result) of the forward part, and
    # which.
    residuals: tuple[tuple[bool, int], ...]
    # Of each argument of the forward part whether its gradient is asked for, and of each
    # result whether it has a cotangent.
    moving: tuple[bool, ...]
    moves: tuple[bool, ...]

    def seconds(
        self, arguments: Sequence[Any], results: Sequence[Any], beside_bytes: int, cut: bool
    ) -> float | None:
        """What its call is thought to take: nothing as one executable; None if refused.

        Args:
          arguments, results: `jax.ShapeDtypeStruct`s of those of the forward part, with
            where they lie. The cotangents are taken to lie where the results do.
          beside_bytes: what other parts have on the device meanwhile.
          cut: whether what does not fit may be cut along its axes.
        """
        known = [(arguments if given else results)[i] for given, i in self.residuals]
        cotangents = _only(results[: len(self.moves)], self.moves)
        function = self._function(_only(arguments, self.moving))
        # What it does not read is there nevertheless.
        idle = [
            known[k]
            for k, (given, _) in enumerate(self.residuals)
            if k in function.unread and not given and not is_on_host(known[k])
        ]
        beside_bytes += sum(padded(s.size * s.dtype.itemsize) for s in idle)
        return function.runner.seconds([*known, *cotangents], beside_bytes, cut)

    def most_bytes(self, arguments: Sequence[Any]) -> int:
        """The most bytes of its values at once, where none is written over."""
        function = self._function(_only(arguments, self.moving))
        return bounds.alive_at_most(flatten(function.closed))

    def _function(self, wanted: Sequence[Any]) -> Function:
        linear_in = (False,) * len(self.residuals) + (True,) * len(wanted)
        on_host = tuple(x.sharding is not None and is_on_host(x) for x in wanted)
        return self.linear.transposed(linear_in, (True,) * sum(self.moves), on_host)


@dataclasses.dataclass(frozen=True)
class Linearized:
    """A function in two parts.

    `forward` gives the results, then residuals; `linear` takes residuals, then the tangents
    of the arguments that move, and gives those of the results that move with them.
    """

    forward: Function
    linear: Function
    # Of each residual: whether it is an argument (else a result of `forward`), and which.
    residuals: tuple[tuple[bool, int], ...]
    results: int
    moves: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Signature:
    """A user's function, made flat for arguments of some types."""

    function: Function
    # Traced values or references that it closes over: its first arguments.
    closed_over: tuple[Any, ...]
    out_tree: Any
    # Of arguments that are references, the positions. The function takes their values, and
    # gives their last values after its results.
    references: tuple[int, ...] = ()

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Calls it, and lets references hold their last values."""
        args = [*self.closed_over, *leaves]
        held = [args[i] for i in self.references]
        for i in self.references:
            args[i] = compat.value_of(args[i])
        results = call(self.function, args)
        count = len(results) - len(held)
        for reference, value in zip(held, results[count:], strict=True):
            where = compat.value_of(reference).sharding
            if isinstance(value, compat.array_type()) and value.sharding == where:
                where = None  # it lies there already
            compat.set_value(reference, memory.placed(value, where))
        return results[:count]


class Functions:
    """A user's function as flat ones, by the types of its arguments."""

    def __init__(self, jitted: Any, statics: Statics, make: Callable[[Function], Runner]):
        self._jitted = jitted
        self._statics = statics
        self._make = make
        self._known: dict[Hashable, Signature] = {}
        self._lock = threading.RLock()

    def find(self, call: Call) -> Signature | None:
        """The flat function for a call; None for one that has tokens, names axes of `vmap`,
        or transforms references: that is left to JAX."""
        if not all(
            isinstance(x, jax.Ref) or compat.has_type(jax.typeof(x)) for x in call.leaves
        ):
            return None
        statics = tuple((place, type(value), value) for place, value in call.statics)
        types = tuple(
            x if isinstance(x, jax.Ref) else _struct(jax.typeof(x)) for x in call.leaves
        )
        shapes = tuple((t.shape, t.dtype, _kind(t)) for t in types)
        # Those of references are left to JAX where they are transformed.
        transformed = call.traced and any(isinstance(x, jax.Ref) for x in types)
        key = (call.tree, statics, shapes, transformed, compat.trace_context())
        with self._lock:
            if key in self._known:
                return self._known[key]
            made = self._flat(call, types)
            traced = made is not None and any(
                isinstance(x, Tracer) for x in made.closed_over
            )
            if made is not None and not traced:
                self._known[key] = made
                if len(self._known) > _SIGNATURES:
                    del self._known[next(iter(self._known))]
            return made

    def _flat(self, call: Call, types: tuple[Any, ...]) -> Signature | None:
        args, kwargs = self._statics.with_leaves(call, types)
        with compat.tracing():
            traced = self._jitted.trace(*args, **kwargs)
        closed, out, name = traced.jaxpr, traced.out_info, traced.fun_name
        if len(closed.in_avals) != len(types):
            # It closes over traced values, which `make_jaxpr` tells apart.
            def of_leaves(*leaves: Any) -> Any:
                args, kwargs = self._statics.with_leaves(call, leaves)
                return self._jitted(*args, **kwargs)

            with compat.tracing():
                closed, out = jax.make_jaxpr(of_leaves, return_shape=True)(*types)
        if compat.names_an_axis(closed) or not all(map(compat.has_type, closed.out_avals)):
            return None
        # Traced values and references are arguments, before the others.
        is_argument = [isinstance(c, Tracer | jax.Ref) for c in closed.consts]
        closed_over = tuple(_only(closed.consts, is_argument))
        elements = out if type(out) is tuple else (out,)
        names = (
            *(f"closed-over value {i}" for i in range(len(closed_over))),
            *self._statics.names(call),
        )
        given = (*closed_over, *types)
        function = Function(
            name,
            _of_constants(closed, is_argument),
            tuple(x if isinstance(x, jax.Ref) else _struct(jax.typeof(x)) for x in given),
            names,
            self._make,
            tuple(
                number
                for number, element in enumerate(elements)
                for _ in jax.tree.leaves(element)
            ),
        )
        tree = jax.tree.structure(out)
        references = tuple(i for i, x in enumerate(given) if isinstance(x, jax.Ref))
        transformed = call.traced or any(map(_is_traced, given))
        if transformed and refs.are_in(closed.jaxpr):
            return None
        if not references:
            return Signature(function, closed_over, tree)
        pure = _of_values(function, references, tree.num_leaves)
        return None if pure is None else Signature(pure, closed_over, tree, references)

    def clear(self) -> None:
        """Forgets every one."""
        with self._lock:
            self._known.clear()


def _of_values(
    function: Function, references: tuple[int, ...], results: int
) -> Function | None:
    """A function of references as one of their values, which gives their last ones too."""
    pure = compat.discharged(function.closed)
    if pure is None:
        return None
    values = {i: compat.value_of(function.inputs[i]) for i in references}
    types = [
        _struct(jax.typeof(values[i])) if i in values else t
        for i, t in enumerate(function.inputs)
    ]
    return dataclasses.replace(
        function,
        fn=jax.extend.core.jaxpr_as_fun(pure),
        inputs=tuple(types),
        groups=(*function.groups, *(None for _ in values)),
        on_host=(*(None,) * results, *map(is_on_host, values.values())),
        donated=references,
        _derived={},
    )


def _is_traced(x: Any) -> bool:
    """Whether a value, or what a reference holds, is traced."""
    return isinstance(compat.value_of(x) if isinstance(x, jax.Ref) else x, Tracer)


def _kind(x: Any) -> str | bool:
    """Of a reference, the memory it is in; of a type, whether it is weak."""
    if not isinstance(x, jax.Ref):
        return x.weak_type
    if _is_traced(x):
        return "traced"
    return "host" if is_on_host(compat.value_of(x)) else "device"


def call(function: Function, args: Sequence[Any]) -> list[Any]:
    """Calls a function with arguments, some of which are traced."""
    return _operation.bind(*args, function=function)


# -- derived functions -----------------------------------------------------------------


def _jvp_of(
    function: Function, moving: tuple[bool, ...]
) -> tuple[Function, tuple[bool, ...]]:
    count = len(function.inputs)

    def both(*args: Any) -> list[Any]:
        primals, tangents = args[:count], args[count:]
        of_moving = _of_some(function.fn, moving, _without(primals, moving))
        found = jax.jvp(of_moving, tuple(_only(primals, moving)), tangents)
        return [*found[0], *found[1]]

    inputs = (*function.inputs, *_only(function.inputs, moving))
    closed = jax.make_jaxpr(both)(*inputs)
    results = len(function.closed.jaxpr.outvars)
    depends = _depends(closed.jaxpr, closed.jaxpr.invars[count:])[results:]
    moves = _moving_results(function, depends)
    fn = _some_results(closed, [True] * results + list(moves))
    names = [*function.names, *_called("the tangent of", _only(function.names, moving))]
    of_tangents = (None if g is None else g + results for g in function.groups)
    made = function.derived(
        "jvp",
        fn,
        inputs,
        names,
        groups=(*function.groups, *_only(tuple(of_tangents), moves)),
        on_host=(*function.on_host, *_only_if_any(function.on_host, moves)),
    )
    return made, moves


def _linearized(function: Function, moving: tuple[bool, ...]) -> Linearized:
    linear: list[Any] = []
    tangent_types = _only(function.inputs, moving)

    def both(*primals: Any) -> tuple[list[Any], list[Any]]:
        of_moving = _of_some(function.fn, moving, _without(primals, moving))
        results, tangent = jax.linearize(of_moving, *_only(primals, moving))
        made = jax.make_jaxpr(tangent)(*tangent_types)
        traced = [c for c in made.consts if isinstance(c, Tracer)]
        linear.append(_without_tracers(made, traced, tangent_types))
        return results, traced

    closed, (result_types, _) = jax.make_jaxpr(both, return_shape=True)(*function.inputs)
    (made,) = linear
    results = len(result_types)
    residuals, fixed, wanted = _residuals(closed, results)
    count = len(fixed)
    is_fixed = [f is not _RESIDUAL for f in fixed]
    types = [_struct(v.aval) for v in _without(made.jaxpr.invars[:count], is_fixed)]
    depends = _depends(made.jaxpr, made.jaxpr.invars[count:])
    moves = _moving_results(function, depends)
    of_all = _some_results(made, moves)

    def of_tangents(*args: Any) -> list[Any]:
        given, tangents = iter(args[: len(types)]), args[len(types) :]
        return of_all(*(next(given) if f is _RESIDUAL else f for f in fixed), *tangents)

    names = [
        function.names[i] if is_argument else f"residual {k} of {function.name}"
        for k, (is_argument, i) in enumerate(residuals)
    ]
    tangents = _called("the tangent of", _only(function.names, moving))
    tangent = function.derived(
        "tangent",
        of_tangents,
        (*types, *tangent_types),
        (*names, *tangents),
        groups=tuple(_only(function.groups, moves)),
        on_host=_only_if_any(function.on_host, moves),
    )
    # Of a derivative nobody knows what is next: of a function, probably its gradient.
    later = None
    if not function.is_derived:
        later = Later(tangent, tuple(residuals), moving, moves)
    none = (None,) * sum(wanted[results:])
    first = function.derived(
        "forward",
        _some_results(closed, wanted),
        function.inputs,
        function.names,
        groups=(*function.groups, *none),
        on_host=function.on_host and (*function.on_host, *none),
        later=later,
    )
    return Linearized(first, tangent, tuple(residuals), results, moves)


def _without_tracers(made: Any, traced: Sequence[Any], tangent_types: Sequence[Any]) -> Any:
    """A linear part as a jaxpr of what it closes over that is traced, then of tangents."""

    of_all = _of_constants(made, [isinstance(c, Tracer) for c in made.consts])
    return jax.make_jaxpr(of_all)(*map(_struct, map(jax.typeof, traced)), *tangent_types)


# In the place of what a linear part closes over: that it is a residual.
_RESIDUAL = object()


def _residuals(
    closed: Any, results: int
) -> tuple[list[tuple[bool, int]], list[Any], list[bool]]:
    """Where what a linear part closes over comes from.

    Args:
      closed: the forward part, which gives results, then what the linear one closes over.
      results: how many results there are.

    Returns:
      Of each residual, whether it is an argument (else a result of the forward part), and
      which: what is an argument, or a result anyhow, is not given out again. Of all that is
      closed over, what it is, or `_RESIDUAL`. Of each result of `closed`, whether the
      forward part gives it out.
    """
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    places: dict[Any, tuple[bool, int]] = {v: (True, i) for i, v in enumerate(jaxpr.invars)}
    for i, v in enumerate(jaxpr.outvars[:results]):
        if _is_variable(v):
            places.setdefault(v, (False, i))
    residuals: list[tuple[bool, int]] = []
    fixed: list[Any] = []
    wanted = [True] * results
    for v in jaxpr.outvars[results:]:
        is_new = _is_variable(v) and v not in known and v not in places
        wanted.append(is_new)
        if is_new:
            places[v] = (False, sum(wanted) - 1)
        if _is_variable(v) and v in places:
            residuals.append(places[v])
            fixed.append(_RESIDUAL)
        else:
            fixed.append(known[v] if _is_variable(v) else v.val)
    return residuals, fixed, wanted


def _transposed(
    function: Function,
    linear_in: tuple[bool, ...],
    given: tuple[bool, ...],
    on_host: tuple[bool | None, ...],
) -> Function:
    known = _without(function.inputs, linear_in)
    wanted = _only(function.inputs, linear_in)
    results = [_struct(v.aval) for v in function.closed.jaxpr.outvars]

    # Results of integers have no cotangents.
    moving = [bool(jax.numpy.issubdtype(t.dtype, np.inexact)) for t in results]
    results, given = _only(results, moving), tuple(_only(given, moving))

    def fn(*args: Any) -> list[Any]:
        of_wanted = _of_some(function.fn, linear_in, args[: len(known)])
        cotangents = iter(args[len(known) :])
        of_moving = lambda *some: _only(of_wanted(*some), moving)
        back = jax.linear_transpose(of_moving, *wanted)
        return list(
            back(
                [
                    next(cotangents) if there else jax.numpy.zeros(t.shape, t.dtype)
                    for t, there in zip(results, given, strict=True)
                ]
            )
        )

    numbers = [f"the cotangent of result {i}" for i in range(len(results))]
    names = [*_without(function.names, linear_in), *_only(numbers, given)]
    inputs = [*known, *_only(results, given)]
    groups = (0,) * len(wanted)
    return function.derived("backward", fn, inputs, names, groups=groups, on_host=on_host)


def _batched(
    function: Function, dims: tuple[int | None, ...], size: int
) -> tuple[Function, tuple[int | None, ...]]:
    jaxpr = function.closed.jaxpr
    batched = [v for v, d in zip(jaxpr.invars, dims, strict=True) if d is not None]
    out = tuple(0 if b else None for b in _depends(jaxpr, batched))
    fn = jax.vmap(function.fn, in_axes=dims, out_axes=list(out), axis_size=size)
    inputs = [
        t if d is None else _struct(t, (*t.shape[:d], size, *t.shape[d:]))
        for t, d in zip(function.inputs, dims, strict=True)
    ]
    made = function.derived(
        "batched",
        fn,
        inputs,
        function.names,
        groups=function.groups,
        on_host=function.on_host,
    )
    return made, out


def _of_constants(closed: Any, which: Sequence[bool]) -> Flat:
    """A function of some constants of a jaxpr, then of its arguments."""
    count, others = sum(which), _without(closed.consts, which)

    def fn(*args: Any) -> list[Any]:
        some, rest = iter(args[:count]), iter(others)
        consts = [next(some) if w else next(rest) for w in which]
        with_them = closed.replace(consts=consts)
        return jax.extend.core.jaxpr_as_fun(with_them)(*args[count:])

    return fn


def _some_results(closed: Any, which: Sequence[bool]) -> Flat:
    """A function that gives some results of a jaxpr."""
    whole = jax.extend.core.jaxpr_as_fun(closed)
    return lambda *args: _only(whole(*args), which)


def _of_some(fn: Flat, which: Sequence[bool], others: Sequence[Any]) -> Flat:
    """A function of some of its arguments, given the others."""

    def of_some(*args: Any) -> list[Any]:
        some, rest = iter(args), iter(others)
        return fn(*(next(some) if w else next(rest) for w in which))

    return of_some


def _only(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [v for v, w in zip(values, which, strict=True) if w]


def _only_if_any(places: Sequence[Any], which: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(_only(places, which)) if places else ()


def _without(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [v for v, w in zip(values, which, strict=True) if not w]


def _called(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what} {name}" for name in names]


def _struct(aval: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    weak = getattr(aval, "weak_type", False)
    shape = tuple(aval.shape) if shape is None else shape
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak)


def _is_variable(atom: Any) -> bool:
    return not hasattr(atom, "val")


def _moving_results(function: Function, depends: Sequence[bool]) -> tuple[bool, ...]:
    """Results with tangents: those that depend on what moves, and are no integers."""
    return tuple(
        d and bool(jax.numpy.issubdtype(v.aval.dtype, np.inexact))
        for v, d in zip(function.closed.jaxpr.outvars, depends, strict=True)
    )


def _depends(jaxpr: Any, variables: Sequence[Any]) -> tuple[bool, ...]:
    """Which results of a jaxpr may depend on some variables."""
    reached = set(variables)
    for equation in jaxpr.eqns:
        if any(_is_variable(v) and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    return tuple(_is_variable(v) and v in reached for v in jaxpr.outvars)


# -- the operation ---------------------------------------------------------------------


_operation = jax.extend.core.Primitive("jturnip")
_operation.multiple_results = True


@_operation.def_impl
def _run(*args: Any, function: Function) -> list[Any]:
    return function.run(args)


@_operation.def_effectful_abstract_eval
def _types(*_: Any, function: Function) -> tuple[list[Any], Any]:
    return list(function.closed.out_avals), function.closed.effects


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, function: Function
) -> tuple[list[Any], list[Any]]:
    moving = tuple(not isinstance(t, ad.Zero) for t in tangents)
    given = _only(tangents, moving)
    if any(isinstance(x, Tracer) for x in (*primals, *given)):
        # What is to come of the tangents is not known: the results do not wait for it.
        parts = function.linearized(moving)
        found = call(parts.forward, primals)
        residuals = [primals[i] if arg else found[i] for arg, i in parts.residuals]
        results, moves = found[: parts.results], parts.moves
        out = call(parts.linear, [*residuals, *given])
    else:
        fused, moves = function.jvp(moving)
        found = call(fused, [*primals, *given])
        results, out = found[: len(moves)], found[len(moves) :]
    moved = iter(out)
    avals = function.closed.out_avals
    return results, [
        next(moved) if m else ad.Zero(aval.to_tangent_aval())
        for m, aval in zip(moves, avals, strict=True)
    ]


def _transpose(
    cotangents: Sequence[Any], *args: Any, function: Function
) -> list[Any | None]:
    linear_in = tuple(map(ad.is_undefined_primal, args))
    given = tuple(not isinstance(ct, ad.Zero) for ct in cotangents)
    spaces = (a.aval.memory_space for a in _only(args, linear_in))
    on_host = tuple(space == jax.memory.Space.Host for space in spaces)
    transposed = function.transposed(linear_in, given, on_host)
    out = iter(call(transposed, [*_without(args, linear_in), *_only(cotangents, given)]))
    return [
        memory.typed_as(next(out), a.aval) if ad.is_undefined_primal(a) else None
        for a in args
    ]


def _batch(
    args: Sequence[Any], dims: Sequence[Any], *, function: Function
) -> tuple[list[Any], list[int | None]]:
    dims = tuple(dims)
    size = next(np.shape(a)[d] for a, d in zip(args, dims, strict=True) if d is not None)
    batched, out = function.batched(dims, size)
    return call(batched, args), list(out)


def _inlined(*args: Any, function: Function) -> list[Any]:
    with compat.tracing():
        return function.fn(*args)


ad.primitive_jvps[_operation] = _jvp
ad.primitive_transposes[_operation] = _transpose
batching.primitive_batchers[_operation] = _batch
mlir.register_lowering(_operation, mlir.lower_fun(_inlined, multiple_results=True))
