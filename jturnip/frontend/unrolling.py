"""Loops whose iterations are stencils, several iterations in one.

What an iteration carries on may not fit: then each reads all of it from host memory and
writes all of it there. Windows that slide over it let several iterations be done for one
part after the other (`tiles.py`), so that it moves once for all of these: temporal blocking
(Wolf & Lam, PLDI 1991).

A `while`, of which it is not known how often it runs, is in `whiles.py`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jturnip.frontend import costs, parts
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.loops import LOOPS, loop_counts, scan_counts
from jturnip.frontend.pieces import with_pieces
from jturnip.frontend.results import live
from jturnip.frontend.sliding import sliding_rules
from jturnip.frontend.stretches import Stretches
from jturnip.frontend.tiles import axes_of
from jturnip.frontend.values import FlatJaxpr, Type, touched


# So many iterations become one, or as many as have so many equations together; none of more
# than so many: XLA compiles that for the first tile, the last one, and those between, each
# some milliseconds for every equation.
_AT_ONCE = 4
_EQUATIONS = 160
_MOST_EQUATIONS = 600
# Each needs one more row on both sides of a tile, and half of these are computed twice.
# More than the few above become one only while that is less than a third of a tile. A tile
# has a twelfth or so of the rows for which the budget would be room, and what counts as
# large (`largest`) is a half of the budget: so many rows for each, of those for which that
# would be room.
_ROWS = 20
# What is scanned and stacked takes this share of what is carried at most.
LITTLE = 1 / 8


def carries_more(closed: Any, largest: float) -> bool:
    """Whether a loop of a jaxpr carries more bytes than fit beside what they become."""
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        if eqn.primitive.name in LOOPS and 2 * carried_bytes(eqn) > largest:
            return True
        if any(carries_more(inner, largest) for inner in costs.nested(eqn)):
            return True
    return False


def carried_bytes(eqn: Any) -> int:
    """Bytes of what a loop carries."""
    return _bytes_of(eqn.outvars[: loop_counts(eqn)[1]])


def _bytes_of(variables: Sequence[Any]) -> int:
    return sum(Type.of(v.aval).nbytes for v in variables)


def is_stencil(eqn: Any, flat: FlatJaxpr, largest: float, known: Known) -> bool:
    """Whether a loop carries more bytes than fit beside what they become, which windows
    slide over.

    Args:
      eqn: the loop.
      flat: its body, inlined; of a `while` with its condition.
      largest: what it carries, in and out, is large if it is more than so many bytes.
      known: the rules of equations; grows.
    """
    consts, carries, _ = loop_counts(eqn)
    carried = carried_bytes(eqn)
    passing = _bytes_of([*eqn.invars[consts + carries :], *eqn.outvars[carries:]])
    if 2 * carried <= largest or passing > carried * LITTLE or eqn.params.get("reverse"):
        return False
    if not any(e.origin.effects for e in flat.equations):
        flat = live(flat)
    return _is_one_chain(flat, int(carried * LITTLE), known)


def _is_one_chain(flat: FlatJaxpr, large: int, known: Known) -> bool:
    """Whether all that reads or writes more than so many bytes is one stretch along an
    axis, over which windows slide."""
    with_writes = with_pieces(flat, large)
    equations = with_writes.equations
    nbytes = lambda e: max((with_writes.types[v].nbytes for v in touched(e)), default=0)
    of_large = {i for i, e in enumerate(equations) if nbytes(e) > large}
    slid = sliding_rules(with_writes, rules(with_writes, parts.works, known))
    if any(slid[i] is None for i in of_large):
        return False
    stretches = Stretches(with_writes, slid)
    types = with_writes.types
    results = [v for v in with_writes.result_values if v in stretches.writer]
    if not results:
        return False
    last = max(results, key=lambda v: types[v].nbytes)
    members = stretches.ruled()
    found = (stretches.around(members, last, d) for d in range(len(types[last].shape)))
    return any(
        stretch is not None
        and stretch.loops == 1
        and of_large <= stretch.working
        and any(axis.slides for axis in axes_of(with_writes, slid, stretch).values())
        for stretch in found
    )


def _each_time(length: int, most: int) -> int:
    """How many iterations are one, of so many in all and at most: as few times as may be,
    as many each time; or two thirds of that, if that leaves none over, which would be a
    program of its own."""
    count = -(-length // -(-length // most))
    fewer = range(max(2, -(-2 * count // 3)), count + 1)
    return max((n for n in fewer if length % n == 0), default=count)


def _most_by_borders(eqn: Any, largest: float) -> int:
    """How many iterations a tile may do at once, if windows reach one row farther in each,
    along the longest axis."""
    carried = eqn.outvars[: loop_counts(eqn)[1]]
    large = max((v.aval for v in carried), key=lambda aval: Type.of(aval).nbytes)
    return int(max(large.shape) * largest / (_ROWS * carried_bytes(eqn)))


def most_at_once(eqn: Any, equations: int, largest: float) -> int:
    """How many iterations may be one, of a body of so many equations."""
    equations = max(1, equations)
    few = min(_AT_ONCE, _MOST_EQUATIONS // equations)
    more = min(_EQUATIONS // equations, _most_by_borders(eqn, largest))
    return max(few, more)


def written_down(results: Sequence[Any]) -> tuple[Any, ...]:
    """What an iteration gives: XLA would compute it anew for each that reads it."""
    return tuple(map(lax.optimization_barrier, results))


def several_at_once(eqn: Any, equations: int, largest: float) -> Any | None:
    """A scan that is a stencil with several iterations in one, as a jaxpr of what it reads;
    None where it is too short or too large.

    Args:
      eqn: the scan.
      equations: how many its body has.
      largest: as for `is_stencil`.
    """
    length = eqn.params["length"]
    most = min(length, most_at_once(eqn, equations, largest))
    if most < 2:
        return None
    count = _each_time(length, most)
    consts, carries, _ = scan_counts(eqn)
    body = jaxpr_as_fun(eqn.params["jaxpr"])
    many = length - length % count

    def iterations(fixed: Any, carried: Any, rows: Any, count: int) -> tuple[Any, Any]:
        """So many iterations: what is carried in the end, and what each stacks."""
        stacked = []
        for at in range(count):
            results = body(*fixed, *carried, *(x[at] for x in rows))
            carried = written_down(results[:carries])
            stacked.append(results[carries:])
        return carried, [jnp.stack(each) for each in zip(*stacked, strict=True)]

    def function(*operands: Any) -> Any:
        fixed, carried = operands[:consts], operands[consts : consts + carries]
        xs = operands[consts + carries :]
        step = lambda carried, rows: iterations(fixed, carried, rows, count)
        grouped = [x[:many].reshape(many // count, count, *x.shape[1:]) for x in xs]
        if many > count:
            carried, ys = lax.scan(step, tuple(carried), grouped, many // count)
            ys = [y.reshape(many, *y.shape[2:]) for y in ys]
        else:
            carried, ys = step(carried, [x[0] for x in grouped])
        if many < length:
            rest = [x[many:] for x in xs]
            carried, more = iterations(fixed, carried, rest, length - many)
            ys = [jnp.concatenate(each) for each in zip(ys, more, strict=True)]
        return [*carried, *ys]

    structs = [Type.of(v.aval).struct() for v in eqn.invars]
    with eqn.ctx.manager:
        return jax.make_jaxpr(function)(*structs)
