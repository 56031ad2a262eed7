"""What equations hold at once when they are one executable: the bytes XLA writes down.

What enters and leaves is written down, and so is what a heavy equation (`costs.WRITTEN`)
reads or writes, and what a gather takes from. The rest is fused: it is never in memory. A
loop or a branch holds what its largest body does. How near this is to XLA's own analysis is
in docs/memory-model.md; it orders the work, and refuses nothing.
"""

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jturnip.frontend import costs
from jturnip.frontend.costs import WRITTEN, nested
from jturnip.frontend.values import FlatJaxpr, Type


# What is held to make a result, over what it takes: the halves of a counter, and the state
# of loops of continued fractions and series.
_HELD = {
    "random_bits": 3,
    "igamma": 38,
    "igammac": 38,
    "igamma_grad_a": 44,
    "regularized_incomplete_beta": 17,
}


def temporary_bytes(closed: Any) -> int:
    """Bytes that a jaxpr holds at once beside what enters and leaves it."""
    jaxpr = getattr(closed, "jaxpr", closed)
    if jaxpr not in _known:
        _known[jaxpr] = _temporary_bytes(jaxpr)
    return _known[jaxpr]


# Of jaxprs while they live: what they close over is the user's, and is not held.
_known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _temporary_bytes(jaxpr: Any) -> int:
    outside = {id(v) for v in (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars)}
    last: dict[int, int] = {}
    heavy: set[int] = set()
    for at, eqn in enumerate(jaxpr.eqns):
        variables = [v for v in eqn.invars if not hasattr(v, "val")]
        last.update((id(v), at) for v in variables)
        if any(True for _ in nested(eqn)):
            heavy.update(map(id, (*variables, *eqn.outvars)))
        else:
            of = eqn.primitive.name, eqn.invars[:1], variables, eqn.outvars
            heavy.update(map(id, _written_down(*of)))
    alive = most = 0
    ending: dict[int, int] = {}
    for at, eqn in enumerate(jaxpr.eqns):
        for v in eqn.outvars:
            if id(v) in heavy and id(v) not in outside and id(v) in last:
                nbytes = Type.of(v.aval).nbytes
                alive += nbytes
                ending[last[id(v)]] = ending.get(last[id(v)], 0) + nbytes
        most = max(most, alive + inner_bytes(eqn))
        alive -= ending.pop(at, 0)
    return most


def inner_bytes(eqn: Any) -> int:
    """Temporary bytes of the largest jaxpr that an equation calls, or of what it is lowered
    to: products of groups of rows are made of all rows once for each group; gradients of a
    pool are put where the numbers of the largest positions say, which are found first
    (`xla/service/select_and_scatter_expander.cc`); what a callback gives is copied."""
    if eqn.primitive.name in _HELD:
        return _HELD[eqn.primitive.name] * Type.of(eqn.outvars[0].aval).nbytes
    if eqn.primitive.name == "ragged_dot_general":
        left, _, sizes = (Type.of(v.aval) for v in eqn.invars)
        return sizes.shape[-1] * left.nbytes
    if eqn.primitive.name == "select_and_scatter_add":
        source, operand = (Type.of(v.aval).nbytes for v in eqn.invars)
        return 4 * operand + 6 * source
    if eqn.primitive.name == "pure_callback":
        return sum(Type.of(v.aval).nbytes for v in eqn.outvars)
    if eqn.primitive.name == "conv_general_dilated":
        return _transposed_bytes(eqn)
    return max(map(temporary_bytes, nested(eqn)), default=0)


def _transposed_bytes(eqn: Any) -> int:
    """Bytes of what a convolution reads and writes with its dimensions in another order
    than the one in which the CPU's XLA does it: channels last
    (`xla/service/cpu/conv_canonicalization.cc`)."""
    numbers = eqn.params["dimension_numbers"]
    image, kernel = (Type.of(v.aval) for v in eqn.invars)
    result = Type.of(eqn.outvars[0].aval)

    def moved(t: Type, first: Sequence[int], last: Sequence[int]) -> int:
        return 0 if [*first, *last] == [*range(len(t.shape))] else t.nbytes

    batch, features, *along = numbers.lhs_spec
    of_image = moved(image, [batch, *along], [features])
    given, taken, *along = numbers.rhs_spec
    of_kernel = moved(kernel, along, [taken, given])
    batch, features, *along = numbers.out_spec
    of_result = moved(result, [batch, *along], [features])
    if of_image <= of_result:  # it lies where the result will
        of_image = 0
    return of_image + of_kernel + of_result


class Model:
    """What it takes to know what any run of a function's equations holds."""

    def __init__(
        self,
        flat: FlatJaxpr,
        order: Sequence[int],
        reads: Sequence[Sequence[int]],
        staying: Collection[int] = (),
    ):
        """Of a function.

        Args:
          flat: the function.
          order: its equations, but those that readers repeat.
          reads: for every equation what it really reads, through what it repeats.
          staying: values that are on the device anyway: no task holds them.
        """
        self.flat = flat
        self.order = order
        self.reads = reads
        self.staying = frozenset(staying)
        self.nbytes = [t.nbytes for t in flat.types]
        self.flops = [costs.flops(e.origin) for e in flat.equations]
        self.inner = [inner_bytes(e.origin) for e in flat.equations]
        # Values that XLA must keep in memory even inside a task.
        self.written_down = frozenset(
            v
            for e, equation in enumerate(flat.equations)
            for v in _written_down(
                equation.name, equation.inputs[:1], reads[e], equation.outputs
            )
        )
        # The last position in the order that reads each value; results are read at the end.
        self.last_use = {v: at for at, e in enumerate(order) for v in reads[e]}
        self.last_use.update(dict.fromkeys(flat.result_values, len(order)))

    def least_bytes(self) -> int:
        """Bytes of what the largest heavy equation reads and writes, beside what is on the
        device anyway: no cut needs less."""
        most = 0
        for e, equation in enumerate(self.flat.equations):
            if equation.name in WRITTEN:
                written = (v for v in equation.outputs if v in self.last_use)
                values = {*self.reads[e], *written}.difference(self.staying)
                most = max(most, sum(self.nbytes[v] for v in values))
        return most


def _written_down(
    name: str, first: Sequence[Any], read: Sequence[Any], written: Sequence[Any]
) -> Sequence[Any]:
    """What XLA must keep in memory since an equation reads or writes it.

    Args:
      name: its primitive.
      first: its first operand, which a gather takes from.
      read, written: all that it reads and writes.
    """
    if name in WRITTEN:
        return *read, *written
    return first if name == "gather" else ()


class Segment:
    """What a run of equations holds, kept while it grows at its end.

    Invariant: `_alive[k]` is what is alive at position `begin + k` of the values that XLA
    writes down and that are written and used up inside; `_ending` has, by the position of
    their last use, the values written inside that are still to be used.
    """

    def __init__(self, model: Model, begin: int, end: int):
        self.begin = begin
        self.flops = 0.0
        self._model = model
        self._end = begin
        self._inside: set[int] = set()
        self._entering: set[int] = set()
        self._crossing_in = self._crossing_out = self._staying = 0
        self._ending: dict[int, list[tuple[int, int]]] = {}
        self._alive = np.zeros(16, np.int64)
        self._most = self._inner = 0
        self.grow(end)

    @property
    def crossing(self) -> int:
        """Bytes of what enters and leaves it."""
        return self._crossing_in + self._crossing_out

    @property
    def held(self) -> int:
        """Bytes it holds at once: what enters and leaves it, and the most that is alive of
        what is written down inside."""
        return self.crossing + self._most

    @property
    def shared(self) -> int:
        """The same without what does not depend on how equations are drawn together: what
        is on the device anyway, and what a single loop or branch holds by itself, which is
        in one task."""
        return self.held - self._inner - self._staying

    def grow(self, end: int) -> None:
        """Takes in the positions up to `end`."""
        model = self._model
        nbytes, last_use = model.nbytes, model.last_use
        while end - self.begin > len(self._alive):
            self._alive = np.concatenate([self._alive, np.zeros_like(self._alive)])
        for at in range(self._end, end):
            e = model.order[at]
            self.flops += model.flops[e]
            for v in model.reads[e]:
                if v not in self._inside and v not in self._entering:
                    self._entering.add(v)
                    self._crossing_in += nbytes[v]
                    if v in model.staying:
                        self._staying += nbytes[v]
            for v in model.flat.equations[e].outputs:
                self._inside.add(v)
                last = last_use.get(v, -1)
                if last > at:
                    self._crossing_out += nbytes[v]
                    self._ending.setdefault(last, []).append((at, v))
            for start, v in self._ending.pop(at, ()):
                self._crossing_out -= nbytes[v]
                if v in model.written_down:
                    self._lived(start, at, nbytes[v])
            if model.inner[e]:
                self._inner = max(self._inner, model.inner[e])
                self._lived(at, at, model.inner[e])
        self._end = end

    def _lived(self, start: int, last: int, nbytes: int) -> None:
        alive = self._alive[start - self.begin : last + 1 - self.begin]
        alive += nbytes
        self._most = max(self._most, int(alive.max()))
