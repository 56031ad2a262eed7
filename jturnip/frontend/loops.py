"""Which loops are taken apart, and into how many iterations at a time.

A scan whose operands, results and temporaries fit in one task stays one. Any other is cut
into parts: as few iterations each as are worth a launch, as many as may be needed so that
there are not too many parts. A part of one iteration is inlined, so that the partitioner
can cut it further; one of several is a shorter scan. All arrays with as many rows as a scan
that is cut has iterations are cut at the same rows: parts flow from one scan to the next.

A long scan whose iterations need one another and read the same, as a model that generates
token by token does, is driven if what it reads is more than the budget, or if the host
takes rows of a table out for each: it would become thousands of tasks, to plan and to run,
which nothing could put in another order, and between the rows of two iterations nothing
stays.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Var, jaxpr_as_fun

from jturnip.frontend import costs
from jturnip.frontend.costs import DeviceRates
from jturnip.frontend.memory_model import inner_bytes, temporary_bytes
from jturnip.frontend.values import (
    Atom,
    Constant,
    Equation,
    FlatJaxpr,
    Type,
    bind,
    needs_x64,
)


# An array smaller than this is not worth cutting.
SMALL = 64 * 1024
# What one function may be cut into: parts of one loop, equations of all its iterations.
_MOST_PARTS = 1024
MOST_EQUATIONS = 100_000
# A scan that only repeats itself is driven rather than become so many equations.
_MANY_EQUATIONS = 2_000
# Where what it carries and stacks takes more than this share of the budget, part of it goes
# to host memory and back in each iteration then: so it becomes more of them before.
_CARRIED = 4
_VERY_MANY_EQUATIONS = 10_000
# A part of several iterations must take this many times as long as a launch.
_WORTH = 4


LOOPS = frozenset(["scan", "while"])
# What is taken apart or driven where it is too large.
LOOPS_AND_BRANCHES = LOOPS | {"cond"}
# What holds the jaxprs of what is done inside.
INSIDE = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}
# A function of the user's that is called with numbers, and gives some.
CALL = "pure_callback"


@dataclass(frozen=True, slots=True)
class Streaming:
    """What cutting loops and large arrays depends on, beside the function."""

    # Bytes that a task may hold, where that can be helped; bytes that one can hold at most.
    largest: int
    arena: int
    rates: DeviceRates
    # A loop without end known, or a branch, that holds more bytes than this is driven.
    drive: int = 1 << 62
    # Whether a long scan that only repeats itself is driven; or any scan of which not even
    # two iterations are a task.
    drive_long: bool = False
    drive_all: bool = False
    # Arrays in host memory that are larger than `largest` are cut at rows, also where no
    # scan is, so that so many parts are no more than that; not at all if it is 0.
    parts_at_once: int = 4
    # Positions of arguments that are in host memory, and whether a closed-over array is.
    on_host: frozenset[int] = frozenset()
    is_on_host: Callable[[Any], bool] = lambda array: False
    # (shape, dtype) of donated host arguments, whose memory results re-use.
    donated: Counter[tuple[Any, Any]] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Cuts:
    """What is cut: scans by the id of their equation, arrays by their number of rows."""

    scans: frozenset[int]
    # Scans of which not even a part is a task, with too many iterations to inline them all,
    # or for nothing: these become loops that are driven.
    long: frozenset[int]
    # Number of rows → how many of them a part has.
    rows: Mapping[int, int]


def scan_counts(eqn: Any) -> tuple[int, int, int]:
    """How many constants, carried values and scanned arrays a scan has.

    By their types, since the params that tell differ between versions of JAX.
    """
    body = eqn.params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    same = lambda outer, inner: len(outer.aval.shape) == len(inner.aval.shape)
    carry = sum(map(same, eqn.outvars, body.outvars))
    xs = sum(not same(o, i) for o, i in zip(eqn.invars, body.invars, strict=True))
    return len(eqn.invars) - carry - xs, carry, xs


def loop_counts(eqn: Any) -> tuple[int, int, int]:
    """The same of one of `LOOPS`. A `while` scans nothing, and has the constants of its
    condition before those of its body."""
    if eqn.primitive.name == "scan":
        return scan_counts(eqn)
    consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    return consts, len(eqn.invars) - consts, 0


def done_once(eqn: Any) -> Any:
    """A scan of one iteration as a jaxpr of its operands without one; None for any other
    equation. What its body holds can be taken apart then."""
    if eqn.primitive.name != "scan" or eqn.params["length"] != 1:
        return None
    body = jaxpr_as_fun(eqn.params["jaxpr"])
    consts, carry, _ = scan_counts(eqn)
    before = consts + carry

    def function(*operands: Any) -> Sequence[Any]:
        rows = (lax.squeeze(x, (0,)) for x in operands[before:])
        results = body(*operands[:before], *rows)
        return *results[:carry], *(lax.expand_dims(y, (0,)) for y in results[carry:])

    with eqn.ctx.manager:
        return jax.make_jaxpr(function)(*(Type.of(v.aval).struct() for v in eqn.invars))


def reading_less(eqn: Any) -> Any:
    """A loop without the constants and the rows that its body does not read, as a jaxpr of
    all operands; None for one that reads all, and for any other equation. JAX hands on to a
    loop what one that it was made of had, and what only another form of it reads."""
    if eqn.primitive.name not in LOOPS or eqn.effects:
        return None
    params = eqn.params
    bodies: list[tuple[str, int, int]]
    if eqn.primitive.name == "scan":
        bodies = [("jaxpr", *scan_counts(eqn)[:2])]
    else:
        asked, consts = params["cond_nconsts"], params["body_nconsts"]
        carry = len(eqn.outvars)
        bodies = [("cond_jaxpr", asked, carry), ("body_jaxpr", consts, carry)]
    read, counts, less = list[int](), list[int](), dict[str, Any]()
    before = 0
    for name, consts, carry in bodies:
        jaxpr = params[name].jaxpr
        used = _positions_read(params[name]).union(range(consts, consts + carry))
        kept = sorted(used)
        invars = [jaxpr.invars[i] for i in kept]
        less[name] = params[name].replace(jaxpr=jaxpr.replace(invars=invars))
        counts.append(sum(i < consts for i in kept))
        read += [before + i for i in kept if name == "jaxpr" or i < consts]
        before += consts
    if eqn.primitive.name == "while":
        read += range(before, len(eqn.invars))
        changed = {**less, "cond_nconsts": counts[0], "body_nconsts": counts[1]}
        function = lambda *operands: bind(eqn, operands, **changed)
    else:
        function = with_body(eqn, less["jaxpr"], counts[0])
    if len(read) == len(eqn.invars):
        return None
    made = (v for each in less.values() for e in each.jaxpr.eqns for v in e.outvars)
    if needs_x64(Type.of(v.aval) for v in (*eqn.invars, *eqn.outvars, *made)):
        return None

    def loop(*operands: Any) -> Sequence[Any]:
        return function(*(operands[i] for i in read))

    return jax.make_jaxpr(loop)(*(Type.of(v.aval).struct() for v in eqn.invars))


def iterations(eqn: Any) -> int | None:
    """How often a loop is expected to run: a scan its length; a `while` that goes on while
    a whole number is below a limit, as from zero. None where nobody knows."""
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    jaxpr = eqn.params["cond_jaxpr"].jaxpr
    if [e.primitive.name for e in jaxpr.eqns] != ["lt"]:
        return None
    limit = jaxpr.eqns[0].invars[1]
    counts = hasattr(limit, "val") and np.issubdtype(limit.aval.dtype, np.integer)
    return int(limit.val) if counts else None


def scanned(
    eqn: Any, step: Callable[..., Any], carried: Sequence[Any], xs: Sequence[Any]
) -> Sequence[Any]:
    """What the iterations of a scan give with another body, and other operands: what is
    carried, then what is stacked."""
    params = eqn.params
    with eqn.ctx.manager:
        carried, stacked = lax.scan(
            step,
            tuple(carried),
            tuple(xs),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
    return *carried, *stacked


def with_body(eqn: Any, body: Any, consts: int) -> Callable[..., Sequence[Any]]:
    """A scan with another body, that reads so many constants: as a function of these, what
    is carried and what is scanned."""
    carry = scan_counts(eqn)[1]

    def function(*operands: Any) -> Sequence[Any]:
        first, carried = operands[:consts], operands[consts : consts + carry]

        def step(carried: Any, xs: Any) -> Any:
            results = jaxpr_as_fun(body)(*first, *carried, *xs)
            return tuple(results[:carry]), tuple(results[carry:])

        return scanned(eqn, step, carried, operands[consts + carry :])

    return function


def other_loop(
    e: Equation,
    flat: FlatJaxpr,
    given: Sequence[Atom],
    function: Callable[..., Sequence[Any]],
) -> Equation | None:
    """A loop's equation with other operands and the same results; None where JAX has
    another form for it.

    Args:
      e: the loop.
      flat: the function that it is in.
      given: the operands.
      function: binds a loop, and nothing else, to these.
    """
    types = (v.type if isinstance(v, Constant) else flat.types[v] for v in given)
    closed = jax.make_jaxpr(function)(*(t.struct() for t in types))
    jaxpr = closed.jaxpr
    if len(jaxpr.eqns) != 1 or closed.consts or jaxpr.outvars != jaxpr.eqns[0].outvars:
        return None
    (origin,) = jaxpr.eqns
    of: dict[Any, Atom] = dict(zip(jaxpr.invars, given, strict=True))
    operands: list[Any] = origin.invars
    inputs = tuple(
        Constant(v.val, Type.of(v.aval)) if hasattr(v, "val") else of[v] for v in operands
    )
    return dataclasses.replace(e, origin=origin, inputs=inputs, calls=e.within, ours=True)


def find_cuts(
    flat: FlatJaxpr,
    streaming: Streaming,
    inline: Callable[[Any], FlatJaxpr],
    held: Sequence[Type],
    by_rows: Callable[[Any], bool] = lambda scan: False,
    too_many: Collection[int] = (),
) -> Cuts:
    """Decides what is cut.

    Args:
      flat: the function, inlined.
      streaming: the sizes that count.
      inline: inlines the body of a scan.
      held: types of the arrays in host memory that could be cut.
      by_rows: says of a scan whether it reads rows of a table in host memory.
      too_many: by the ids of their equations, scans that were found to become more than
        `MOST_EQUATIONS`.
    """
    scans: set[int] = set()
    long: set[int] = set()
    rows: dict[int, int] = {}

    found: list[Any] = []
    agenda, inlined = [flat], set[int]()
    while agenda:
        for eqn in (e.origin for e in agenda.pop().equations if e.name == "scan"):
            count = None if id(eqn) in scans else _iterations_per_part(eqn, streaming)
            if count is None:
                continue
            if id(eqn) in too_many or (
                count == 1
                and (streaming.drive_all or _only_repeats_itself(eqn, streaming, by_rows))
            ):
                count = 0
            if count == 0:
                long.add(id(eqn))
                continue
            scans.add(id(eqn))
            found.append(eqn)
            length = eqn.params["length"]
            rows[length] = min(count, rows.get(length, count))
        # Only of parts with one iteration the body is looked into: others stay scans.
        for eqn in found:
            if rows[eqn.params["length"]] == 1 and id(eqn) not in inlined:
                inlined.add(id(eqn))
                agenda.append(inline(eqn.params["jaxpr"]))
    at_once = streaming.parts_at_once
    for t in held if at_once else ():
        if t.shape and t.shape[0] > 1 and t.nbytes > streaming.largest:
            fitting = streaming.largest // at_once * t.shape[0] // t.nbytes
            fewest = max(-(-t.shape[0] // _MOST_PARTS), SMALL * t.shape[0] // t.nbytes)
            rows.setdefault(t.shape[0], max(1, fitting, fewest))
    return Cuts(frozenset(scans), frozenset(long), rows)


def is_driven(eqn: Any, streaming: Streaming) -> bool:
    """Whether a `while` or a `cond` is too large to be one task, or a call of the user's
    that the host can make itself."""
    if eqn.primitive.name not in ("while", "cond", CALL):
        return False
    sizes = [Type.of(v.aval).nbytes for v in (*eqn.invars, *eqn.outvars)]
    return sum(sizes) + inner_bytes(eqn) > streaming.drive


def bytes_for_one_branch(
    e: Equation,
    operands: Sequence[Atom],
    types: Sequence[Type],
    hosted: Collection[int],
) -> int:
    """Bytes in host memory that not every branch of a `cond` reads: a task with all of them
    would move those of the others for nothing.

    Args:
      e: any equation; of another than a `cond` it is nothing.
      operands: what it reads.
      types: of all values.
      hosted: values that are in host memory.
    """
    if e.name != "cond":
        return 0
    by_all = frozenset.intersection(*map(_positions_read, e.origin.params["branches"]))
    return sum(
        types[v].nbytes
        for i, v in enumerate(operands[1:])
        if i not in by_all and isinstance(v, int) and v in hosted
    )


def _positions_read(branch: Any) -> frozenset[int]:
    """Which of its arguments a branch, or a body, reads or returns, by position."""
    jaxpr = branch.jaxpr
    used = {v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Var)}
    used.update(v for v in jaxpr.outvars if isinstance(v, Var))
    return frozenset(i for i, v in enumerate(jaxpr.invars) if v in used)


def _iterations_per_part(eqn: Any, streaming: Streaming) -> int | None:
    """How many iterations a part of a scan has; None for a scan that stays one task, 0 for
    one that is to be driven."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    consts, carry, _ = scan_counts(eqn)
    sizes = [Type.of(v.aval).nbytes for v in eqn.invars]
    results = [Type.of(v.aval).nbytes for v in eqn.outvars]
    inner = temporary_bytes(body)
    stacked = sum(sizes[consts + carry :]) + sum(results[carry:])
    fixed = sum(sizes[: consts + carry]) + sum(results[:carry]) + inner
    if length < 2 or fixed + stacked <= streaming.largest:
        return None
    each = -(-stacked // length)
    flops = sum(map(costs.flops, getattr(body, "jaxpr", body).eqns))
    seconds = streaming.rates.seconds(flops, each + fixed)
    # Each part of a stacked array may be a copy, which costs about what a launch does.
    operations = 1 + len(sizes[consts + carry :]) + len(results[carry:])
    worth = _WORTH * operations * streaming.rates.launch_seconds / max(seconds, 1e-12)
    equations = _inlined(body, streaming)
    fewest = max(-(-length // _MOST_PARTS), -(-length * equations // MOST_EQUATIONS))
    # What several iterations can hold; where one is too much, the partitioner cuts it.
    room = streaming.largest if fixed + each <= streaming.largest else streaming.arena // 2
    if fewest > 1 and fixed + fewest * each > max(room, streaming.arena // 2, SMALL):
        return 0
    fitting = (room - fixed) // each if each else length * (fixed <= room)
    count = min(length, max(fewest, min(int(worth) + 1, fitting), 1))
    # All that has as many rows is cut as what is scanned; but not what several hand on.
    by_rows = length * _inlined(body, streaming, length) if count == 1 else 0
    if by_rows > MOST_EQUATIONS:
        return 2 if fixed + 2 * each <= room else 0
    return count


def _inlined(closed: Any, streaming: Streaming, rows: int = 1) -> int:
    """How many equations a jaxpr becomes where scans in it are cut, if those that write so
    many rows become one for each."""
    total = 0
    for e in getattr(closed, "jaxpr", closed).eqns:
        if e.primitive.name == "scan":
            count, length = _iterations_per_part(e, streaming), e.params["length"]
            each = _inlined(e.params["jaxpr"], streaming, rows) if count == 1 else 1
            total += each * -(-length // count) if count else 1
            continue
        shapes = (getattr(v.aval, "shape", ()) for v in e.outvars)  # a token has none
        by_rows = any(shape[:1] == (rows,) for shape in shapes)
        total += rows if by_rows else 1
        total += sum(_inlined(each, streaming, rows) for each in costs.nested(e))
    return total


def _only_repeats_itself(
    eqn: Any, streaming: Streaming, by_rows: Callable[[Any], bool]
) -> bool:
    """Whether a scan whose iterations are tasks had better be driven.

    Each moves what it reads again: since that is more than the budget, or since the rows
    that the host takes out for each come between two plans. A short one is better in one
    plan, where there can be one.
    """
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    if not streaming.drive_long:
        return False
    consts, carry, _ = scan_counts(eqn)
    bytes_of = lambda variables: sum(Type.of(v.aval).nbytes for v in variables)
    passing = bytes_of(eqn.invars[consts + carry :]) + bytes_of(eqn.outvars)
    stays = passing <= streaming.arena // _CARRIED
    equations = length * costs.equation_count(body)
    if not stays and equations <= _VERY_MANY_EQUATIONS:
        return False
    if not _needs_the_last(body, consts, carry):
        return False
    is_long = equations > _MANY_EQUATIONS
    reads_more = bytes_of(eqn.invars[:consts]) + passing > streaming.arena
    return (is_long and reads_more) or by_rows(eqn)


def _needs_the_last(body: Any, consts: int, carry: int) -> bool:
    """Whether most of the work of an iteration needs what the last one gave."""
    body = getattr(body, "jaxpr", body)
    given = set(body.invars[consts : consts + carry])
    total = needing = 0.0
    for eqn in body.eqns:
        work = costs.flops(eqn)
        total += work
        if any(isinstance(v, Var) and v in given for v in eqn.invars):
            given.update(eqn.outvars)
            needing += work
    return 2 * needing > total
