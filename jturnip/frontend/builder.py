"""A flat program while a pass makes it: values are numbered as they come."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jturnip.frontend import stacks
from jturnip.frontend.values import (
    Atom,
    Constant,
    Equation,
    FlatJaxpr,
    Parts,
    Slice,
    Type,
    called,
)


class Builder:
    """Types, closed-over arrays and equations of a program.

    Invariant: no equation reads a value that is neither written by an earlier one nor an
    argument, a closed-over array or a slice.
    """

    def __init__(self) -> None:
        self.types: list[Type] = []
        self.equations: list[Equation] = []
        # id of a closed-over array → (its value, the array, which keeps the id its own)
        self._constants: dict[int, tuple[int, Any]] = {}

    @classmethod
    def of(cls, flat: FlatJaxpr) -> "Builder":
        """With what a program has already."""
        builder = cls()
        builder.types += flat.types
        builder.equations += flat.equations
        builder._constants = {id(array): (v, array) for v, array in flat.constants}
        return builder

    def finish(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int | Parts],
        slices: Sequence[Slice] = (),
    ) -> FlatJaxpr:
        """The program with these arguments and results."""
        return FlatJaxpr(
            tuple(self.types),
            tuple(self.equations),
            tuple(inputs),
            tuple(self._constants.values()),
            tuple(outputs),
            tuple(slices),
        )

    def value(self, t: Type) -> int:
        """A new value."""
        self.types.append(t)
        return len(self.types) - 1

    def closed_over(self, array: Any, t: Type) -> int:
        """The value of a closed-over array, which is one however often it comes."""
        if id(array) not in self._constants:
            self._constants[id(array)] = (self.value(t), array)
        return self._constants[id(array)][0]

    def type_of(self, atom: Atom) -> Type:
        """The type of what an equation may read."""
        return atom.type if isinstance(atom, Constant) else self.types[atom]

    def emit(
        self,
        eqn: Any,
        operands: Sequence[Atom],
        calls: tuple[Any, ...],
        ours: bool = False,
        driven: bool = False,
        types: Sequence[Type] | None = None,
    ) -> list[int]:
        """Adds an equation; returns its results.

        Args:
          eqn: the equation that it is.
          operands: what it reads.
          calls: those it was inlined from, outermost first.
          ours: whether it is ours, not the user's.
          driven: whether it is driven (`Equation.driven`): it then reads values only.
          types: of its results, where they are not those of `eqn`.
        """
        if driven:
            operands = list(map(self._value_of, operands))
        if types is None:
            types = [Type.of(v.aval) for v in eqn.outvars]
        results = list(map(self.value, types))
        self.equations.append(
            Equation(eqn, tuple(operands), tuple(results), calls, ours=ours, driven=driven)
        )
        return results

    def _value_of(self, atom: Atom) -> int:
        if not isinstance(atom, Constant):
            return atom
        return self.closed_over(np.asarray(atom.value, atom.type.dtype), atom.type)

    def instead(self, e: Equation, operands: Sequence[Atom], closed: Any) -> None:
        """Adds the equations of a jaxpr of our own making that give what an equation
        gives."""
        begin = len(self.equations)
        results = self.ours(closed, operands, e.within)
        names = dict(zip(results, e.outputs, strict=True))
        named = lambda atoms: tuple(names.get(v, v) if type(v) is int else v for v in atoms)
        self.equations[begin:] = [
            dataclasses.replace(
                each, inputs=named(each.inputs), outputs=named(each.outputs)
            )
            for each in self.equations[begin:]
        ]

    def one(self, closed: Any, operands: Sequence[Atom], calls: tuple[Any, ...]) -> int:
        """Adds the equations of a jaxpr of our own making that gives one result; returns
        that."""
        (value,) = self.ours(closed, operands, calls)
        return value

    def joined(self, pieces: Sequence[int], dim: int, calls: tuple[Any, ...]) -> int:
        """Pieces next to one another along a dimension, as one value."""
        if len(pieces) == 1:
            return pieces[0]
        types = tuple(self.types[v] for v in pieces)
        return self.one(stacks.joining(types, dim), pieces, calls)

    def part_of(
        self, v: int, dim: int, bounds: tuple[int, int], calls: tuple[Any, ...]
    ) -> int:
        """Some positions of a value along a dimension: from the first on, up to another."""
        begin, end = bounds
        cutting = stacks.cutting(self.types[v], dim, end - begin)
        return self.one(cutting, (v, Constant.position(begin, np.uint32)), calls)

    def ours(
        self,
        closed: Any,
        operands: Sequence[Atom],
        calls: tuple[Any, ...],
        driven: str = "",
        instead: Callable[[Any], Any] = called,
    ) -> list[int]:
        """Adds the equations of a jaxpr of our own making, none of which returns what it
        is given; returns its results.

        Args:
          closed: the jaxpr.
          operands: what it reads.
          calls: those it was inlined from, outermost first.
          driven: the name of the primitive whose equations are driven.
          instead: gives the jaxpr that is added instead of an equation, or None.
        """
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        scope: dict[Any, Any] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            scope[var] = self.closed_over(const, Type.of(var.aval))
        scope.update(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Any) -> Any:
            if not hasattr(atom, "val"):
                return scope[atom]
            return Constant(atom.val, Type.of(atom.aval))

        for eqn in jaxpr.eqns:
            given = list(map(read, eqn.invars))
            inner = instead(eqn)
            if inner is not None:
                results = self.ours(inner, given, calls, driven, instead)
            else:
                is_driven = eqn.primitive.name == driven
                results = self.emit(eqn, given, calls, ours=True, driven=is_driven)
            scope.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))
