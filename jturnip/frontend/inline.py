"""The first pass: a traced function as numbered values and one list of equations.

Calls are inlined, what JAX itself writes with other operations (`searchsorted`) is written
with these, as is what other libraries do (`foreign.py`), and of what depends on the
platform there is what is for the one at hand.
Indices that only count rows become dimension numbers that say so (`counting.py`). What
only moves values between memories is taken out, since what lies where is the plan's matter
(`hints.py`). All that touches a mutable reference becomes one equation (`refs.py`). What is
no function of arrays on one device is refused here, with the user's line.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jturnip import compat
from jturnip.errors import UnsupportedError
from jturnip.frontend import ffts, hints, refs, stacks
from jturnip.frontend.builder import Builder
from jturnip.frontend.counting import Counts
from jturnip.frontend.empty import without_empty
from jturnip.frontend.foreign import Foreign
from jturnip.frontend.loops import done_once, reading_less
from jturnip.frontend.values import Atom, Constant, FlatJaxpr, Type, called, source_line


@dataclass(frozen=True, slots=True)
class Condition:
    """What a loop's body is followed by: whether the loop goes on with its results."""

    jaxpr: Any
    # How many arguments only the condition has. They come before the body's; the others
    # are the body's results.
    constants: int


def inline(
    closed: Any,
    condition: Condition | None = None,
    platform: str = "",
    largest_fft: float = math.inf,
    instead: Callable[[Any], Any | None] = lambda eqn: None,
    foreign: Foreign | None = None,
) -> FlatJaxpr:
    """A function without calls in it. A result may be an argument, or come twice.

    Args:
      closed: `jax.jit(fn).trace(...).jaxpr`, of any supported JAX version.
      condition: for the body of a loop: then the first result is the condition's.
      platform: what `jax.lax.platform_dependent` chooses by; a choice is left as it is
        where it is empty.
      largest_fft: Fourier transforms over several dimensions, or of rows, that give more
        bytes are done over one dimension after the other.
      instead: gives a jaxpr to be inlined instead of an equation, or None.
      foreign: what operations of other libraries were found to stand for; grows.

    Raises:
      UnsupportedError: for values that are no arrays, or are put on another device; it
        names the primitive and the user's line.
    """
    _check_arguments(closed)
    inliner = _Inliner(platform, largest_fft, instead, foreign or Foreign())
    builder = inliner.builder
    inputs = [builder.value(Type.of(aval)) for aval in argument_avals(closed, condition)]
    before = condition.constants if condition else 0
    results = inliner.call(closed, inputs[before:])
    if condition:
        goes_on = inliner.call(condition.jaxpr, [*inputs[:before], *results])
        results = [*goes_on, *results]
    outputs = [
        builder.ours(stacks.copying(r.type), (r,), ())[0] if isinstance(r, Constant) else r
        for r in results
    ]
    return builder.finish(inputs, outputs)


def argument_avals(closed: Any, condition: Condition | None = None) -> list[Any]:
    """Abstract values of the arguments that `inline` finds."""
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


class _Inliner:
    """Follows a jaxpr, and those that it calls."""

    def __init__(
        self,
        platform: str,
        largest_fft: float,
        instead: Callable[[Any], Any | None],
        foreign: Foreign,
    ) -> None:
        self.builder = Builder()
        self._foreign = foreign
        self._instead = instead
        self._platform = platform
        self._largest_fft = largest_fft
        self._counts = Counts()

    def call(
        self, closed: Any, arguments: Sequence[Atom], calls: tuple[Any, ...] = ()
    ) -> list[Atom]:
        """Inlines a call; returns its results."""
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        scope: dict[Any, Atom] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            scope[var] = self._closed_over(const, Type.of(var.aval))
        scope.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Atom:
            if not hasattr(atom, "val"):
                return scope[atom]
            t = Type.of(atom.aval)
            return self._closed_over(atom.val, t) if t.shape else Constant(atom.val, t)

        for eqn in refs.draw_together(jaxpr):
            operands = [read(v) for v in eqn.invars]
            if isinstance(eqn, refs.Region):
                results = self._region(eqn, operands, calls)
            else:
                results = self._apply(eqn, operands, calls)
            scope.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _closed_over(self, array: Any, t: Type) -> Atom:
        value = self.builder.closed_over(array, t)
        self._counts.see_constant(value, array)
        return value

    def _apply(
        self, eqn: Any, operands: Sequence[Atom], calls: tuple[Any, ...]
    ) -> Sequence[Atom]:
        inner = called(eqn)
        if inner is not None:
            return self.call(inner, operands, (*calls, eqn))
        if eqn.primitive.name == "custom_linear_solve":
            return self._solved(eqn, operands, calls)
        _check(eqn, calls)
        expanded = compat.expanded(eqn) or ffts.one_by_one(eqn, self._largest_fft)
        expanded = expanded or without_empty(eqn) or done_once(eqn) or reading_less(eqn)
        expanded = expanded or self._instead(eqn) or self._foreign.written_out(eqn)
        if expanded is not None:
            return self.call(expanded, operands, (*calls, eqn))
        chosen = self._chosen(eqn)
        if chosen is not None:
            return self.call(chosen, operands[1:], (*calls, eqn))
        if hints.is_move(eqn):
            return operands
        counting = self._counts.written_otherwise(eqn, operands)
        if counting is not None:
            return self.call(counting, operands, (*calls, eqn))
        results = self.builder.emit(eqn, operands, calls)
        self._counts.see(eqn, operands, results)
        return results

    def _chosen(self, eqn: Any) -> Any:
        """The branch for this platform, of `jax.lax.platform_dependent`."""
        if eqn.primitive.name != "cond" or not self._platform:
            return None
        of_branches = eqn.params.get("branches_platforms") or ()
        for branch, platforms in zip(eqn.params["branches"], of_branches, strict=False):
            if platforms is None or self._platform in platforms:
                return branch
        return None

    def _solved(
        self, eqn: Any, operands: Sequence[Atom], calls: tuple[Any, ...]
    ) -> Sequence[Atom]:
        """A linear system: its derivative has had its part, the solver is left."""
        counts = eqn.params["const_lengths"]
        before = counts.matvec + counts.vecmat
        own = operands[before : before + counts.solve]
        return self.call(
            eqn.params["jaxprs"].solve, [*own, *operands[sum(counts) :]], (*calls, eqn)
        )

    def _region(
        self, region: refs.Region, operands: Sequence[Atom], calls: tuple[Any, ...]
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
        return self.builder.emit(eqn, operands, (*calls, lead), ours=True)


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
