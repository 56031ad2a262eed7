"""Calls as flat arguments: what is static, what is donated, what to call each leaf."""

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jturnip import compat
from jturnip.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Call:
    """One call's arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # The dynamic ones, as `jax.jit` flattens them.
    leaves: list[Any]
    tree: Any
    # (position or keyword, value) of the static ones.
    statics: tuple[tuple[int | str, Any], ...]

    @property
    def traced(self) -> bool:
        """Whether it is made under a JAX transformation."""
        if self._has_arrays_only:
            return False
        return any([isinstance(leaf, Tracer) for leaf in self.leaves])

    @property
    def _has_arrays_only(self) -> bool:
        """Whether all leaves are concrete arrays, as they nearly always are."""
        return set(map(type, self.leaves)) <= {compat.array_type()}

    def key(self) -> Hashable:
        """Equal for calls that one executable serves.

        Its hash raises TypeError where a static argument has none.
        """
        array = compat.array_type()
        # A list of plain attributes for what is nearly always an array: this is done for
        # every leaf of every call. An array's abstract value knows its memory kind.
        leaves = [
            (leaf.aval, leaf.sharding, leaf.committed)
            if type(leaf) is array
            else _leaf_key(leaf)
            for leaf in self.leaves
        ]
        statics = [(place, type(value), value) for place, value in self.statics]
        return (self.tree, tuple(statics), tuple(leaves), compat.trace_context())

    def check_alive(self, names: Callable[[], Sequence[str]]) -> None:
        """Raises ArgumentError for an array that was donated or deleted before."""
        array: Any = compat.array_type()
        if self._has_arrays_only and not any(map(array.is_deleted, self.leaves)):
            return
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ArgumentError(
                    f"argument {names()[index]}, {leaf.dtype}{list(leaf.shape)}, was"
                    " donated or deleted before this call. Pass the result of the call that"
                    " it was donated to, or do not donate it."
                )


class Statics:
    """Which parameters of a function are static, by position and by name, as in jax.jit."""

    def __init__(
        self,
        fn: Callable[..., Any],
        argnums: int | Iterable[int] | None,
        argnames: str | Iterable[str] | None,
    ):
        self._signature = _signature(fn)
        self._nums = _tuple(argnums)
        self._names = _tuple(argnames)
        parameters = list(self._signature.parameters.values()) if self._signature else []
        by_position = [
            p.name
            for p in parameters
            if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)
        ]
        if argnums is not None and argnames is None:
            self._names = tuple(
                by_position[n]
                for n in self._nums
                if -len(by_position) <= n < len(by_position)
            )
        elif argnames is not None and argnums is None:
            self._nums = tuple(
                by_position.index(n) for n in self._names if n in by_position
            )

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Flattens a call."""
        if not self._nums and not self._names:
            leaves, tree = jax.tree.flatten((args, kwargs))
            return Call(args, kwargs, leaves, tree, ())
        nums = {n % len(args) for n in self._nums if -len(args) <= n < len(args)}
        names = {n for n in self._names if n in kwargs}
        dynamic = tuple(a for i, a in enumerate(args) if i not in nums)
        named = {k: v for k, v in kwargs.items() if k not in names}
        statics = (
            *((i, args[i]) for i in sorted(nums)),
            *((n, kwargs[n]) for n in sorted(names)),
        )
        leaves, tree = jax.tree.flatten((dynamic, named))
        return Call(args, kwargs, leaves, tree, statics)

    def with_leaves(
        self, call: Call, leaves: Sequence[Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments of `call` with its dynamic leaves exchanged."""
        dynamic, named = jax.tree.unflatten(call.tree, leaves)
        static = dict(call.statics)
        rest = iter(dynamic)
        args = tuple(
            static[i] if i in static else next(rest) for i in range(len(call.args))
        )
        return args, {**named, **{k: v for k, v in static.items() if isinstance(k, str)}}

    def names(self, call: Call) -> tuple[str, ...]:
        """What to call each leaf: the parameter's name and the path in its tree."""
        nums = {i for i, _ in call.statics if isinstance(i, int)}
        positions = [i for i in range(len(call.args)) if i not in nums]
        parameters = list(self._signature.parameters) if self._signature else []

        def name(path: tuple[Any, ...]) -> str:
            first, second, *rest = path
            if first.idx == 1:
                head = str(second.key)
            else:
                at = positions[second.idx]
                head = parameters[at] if at < len(parameters) else f"args[{at}]"
            return head + jax.tree_util.keystr(tuple(rest))

        paths = jax.tree_util.tree_flatten_with_path(
            jax.tree.unflatten(call.tree, call.leaves)
        )[0]
        return tuple(name(path) for path, _ in paths)


class Flat(Statics):
    """Of a function of positional arrays, whose names are known."""

    def __init__(self, fn: Callable[..., Any], names: Sequence[str]):
        super().__init__(fn, None, None)
        self._leaf_names = tuple(names)

    def names(self, call: Call) -> tuple[str, ...]:
        """What to call each leaf."""
        return self._leaf_names


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        weak = getattr(leaf, "weak_type", False)
        committed = getattr(leaf, "committed", None)
        return (leaf.shape, leaf.dtype, weak, leaf.sharding, committed)
    if isinstance(leaf, np.ndarray):
        return (leaf.shape, leaf.dtype, None)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return (tuple(leaf.shape), leaf.dtype, type(leaf))
    return type(leaf)


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def _tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str) else tuple(value)
