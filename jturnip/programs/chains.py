"""Programs one after the other, and where what passes between them lies."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from jturnip.errors import DoesNotFit
from jturnip.frontend.loops import SMALL
from jturnip.frontend.values import (
    Equation,
    FlatJaxpr,
    Parts,
    entering,
    first_source,
    values_of,
)
from jturnip.graph.memgraph import MemGraph
from jturnip.graph.plan import Plan
from jturnip.graph.taskgraph import TaskGraph
from jturnip.placement import NOTHING_KNOWN, Arguments, Budget, Whose
from jturnip.programs import places
from jturnip.programs.records import Chain, Program, Stage, all_constants
from jturnip.programs.setting import Setting
from jturnip.units import GRANULE, format_bytes, padded


# What a loop carries is on the device if together it takes no more than this share of the
# budget; what only waits for a loop to end, if it is no larger than this.
CARRIED = 4
_WAITING = 16


_Made = TypeVar("_Made")

# Of what is jturnip's own in a budget (`placement.BOOKKEEPING`), the bytes that may be
# numbers which bodies of loops and branches close over.
_INNER = 2048


@dataclass(frozen=True, slots=True)
class Held:
    """Where a value is between stages."""

    on_host: bool
    # Whether it may be used up; else the caller keeps it.
    ours: bool
    nbytes: int
    name: str

    @property
    def whose(self) -> Whose:
        if self.on_host:
            return Whose.DONATED_HOST if self.ours else Whose.CALLER_HOST
        return Whose.DONATED_DEVICE if self.ours else Whose.CALLER_DEVICE

    def kept(self) -> "Held":
        return dataclasses.replace(self, ours=False)


def bytes_on_device(held: Iterable[Held]) -> int:
    """Bytes of those that are on the device."""
    return sum(padded(h.nbytes) for h in held if not h.on_host)


def arguments_of(like: Arguments, held: Iterable[Held]) -> Arguments:
    held = list(held)
    return dataclasses.replace(
        like,
        whose=tuple(h.whose for h in held),
        names=tuple(h.name for h in held),
    )


# Makes the program of some equations, or of a driven one: of where what they read is, what
# it is made for (with the function's arguments), and which of their results must go to host
# memory.
MakePiece: TypeAlias = Callable[
    [FlatJaxpr | Equation, Sequence[Held], Setting, frozenset[int]], Program
]


def chain(
    flat: FlatJaxpr, setting: Setting, to_host: frozenset[int], make_piece: MakePiece
) -> Chain:
    """Programs one after the other, for which there is room beside all closed-over arrays
    that any of them has on the device, and whose results leave room for the next call.

    Args:
      flat: the function, with some equations that are driven.
      setting: what it is made for.
      to_host: positions of results that must end in host memory.
      make_piece: makes the program of each piece.
    """
    arguments, arena = places.kept(setting.arguments, flat), setting.arena
    to_host |= places.at_home(flat, arguments, to_host)
    returned = setting.how.returned
    setting = dataclasses.replace(setting, arguments=arguments)
    setting = setting.otherwise(returned=NOTHING_KNOWN)
    _refuse_what_is_there(flat, arguments, setting.budget)
    pieces, known = tuple(_pieces(flat)), dict[Hashable, Program]()
    while True:
        beside = functools.partial(
            _chain_beside, flat, pieces, setting, to_host, make_piece, known
        )
        chain = with_reserve(beside, lambda made: made.plan.peak_bytes - arena - _INNER)
        away = places.leaving(flat, arguments, to_host, returned, arena)
        if away <= to_host:
            return chain
        to_host |= away


def with_reserve(make: Callable[[int], _Made], lacking: Callable[[_Made], int]) -> _Made:
    """What is made with the least of a budget reserved that will do, or little more.

    What is reserved may change nothing until it is much: so it grows by twice as much each
    time if as much is lacking as before, and is halved where that was too much. Less than
    what was tried, and what was lacking then, is not tried again: more reserved leaves no
    more lacking, as a rule.

    Args:
      make: makes it with so many bytes reserved.
      lacking: how many more must be, as what was made shows.

    Raises:
      DoesNotFit: from `make`, with no more reserved than must be.
    """
    reserve = least = step = before = 0
    while True:
        try:
            made = make(reserve)
        except DoesNotFit:
            if reserve == least:
                raise
            half = (reserve - least) // 2
            reserve = least + (half if half >= GRANULE else 0)
            step = 0
            continue
        more = lacking(made)
        if more <= 0:
            return made
        least = reserve + more
        step = max(more, 2 * step if more >= before else 0)
        reserve, before = reserve + step, more


def _refuse_what_is_there(flat: FlatJaxpr, arguments: Arguments, budget: Budget) -> None:
    """Refuses a budget that device arguments and closed-over arrays alone exceed."""
    device = arguments.device
    there = places.bytes_at_start(flat, arguments)
    if there > budget.arena(device):
        needed = budget.needed(there, device)
        raise DoesNotFit(
            f"arguments and closed-over arrays on the device take {format_bytes(there)};"
            f" gpu_bytes is {budget.gpu_bytes} ({format_bytes(budget.gpu_bytes)})."
            " Hold them in host memory with jturnip.host(tree), or raise gpu_bytes to at"
            f" least {needed} ({format_bytes(needed)}).",
            needed_bytes=needed,
            gpu_bytes=budget.gpu_bytes,
        )


def _chain_beside(
    flat: FlatJaxpr,
    pieces: "Sequence[Piece]",
    setting: Setting,
    to_host: frozenset[int],
    make_piece: MakePiece,
    known: dict[Hashable, Program],
    reserve: int,
    sent: frozenset[int] = frozenset(),
) -> Chain:
    """A chain in a budget of which `reserve` bytes are for what bodies close over. What
    pieces make and leave on the device is `sent` to host memory where a later one does not
    fit beside it. What is `known` grows by their programs."""
    arguments, room = setting.arguments, setting.budget.room
    last_use = _last_uses(flat, pieces)
    read_over = _read_by_driven(flat, pieces)
    always = places.constants_on_device(flat)
    held = _held_at_start(flat, arguments, read_over)
    stages: list[Stage] = []
    for k, piece in enumerate(pieces):
        there = {v: held[v] for v in piece.reads}
        mine = {
            v: h if last_use[v] == k and piece.reads.count(v) == 1 else h.kept()
            for v, h in there.items()
        }
        waiting = bytes_on_device(
            h
            for v, h in held.items()
            if v not in mine
            and v not in read_over
            and (not h.ours or last_use.get(v, -1) >= k)
        )
        others = sum(always.values()) - sum(
            always.get(id(a), 0) for a in _closed_over(flat, piece)
        )
        left = setting.beside(waiting + others + reserve)
        ahead = pieces[k + 1] if k + 1 < len(pieces) else None
        away = _away(flat, piece, ahead, 0 if setting.how.tight else room, to_host)
        away |= {at for at, v in enumerate(piece.writes) if v in sent}
        read = [mine[v] for v in piece.reads]
        key = k, tuple(read), left.budget, away
        try:
            if key not in known:
                known[key] = make_piece(piece.work, read, left, away)
        except DoesNotFit:
            made_before = (v for before in pieces[:k] for v in before.writes)
            there = {v for v in made_before if last_use[v] >= k and not held[v].on_host}
            if there <= sent:
                raise
            sent |= there
            return _chain_beside(
                flat, pieces, setting, to_host, make_piece, known, reserve, sent
            )
        made = known[key]
        for v, on_host in zip(piece.writes, made.ends_on_host, strict=True):
            nbytes = flat.types[v].nbytes
            held[v] = Held(on_host, True, nbytes, f"a result of {_name(piece)}")
        over = tuple(v for v in piece.reads if last_use[v] == k and held[v].ours)
        unread = frozenset(v for v in piece.writes if last_use[v] == k)
        stages.append(Stage(made, piece.reads, piece.writes, over, unread, waiting, 0))
    everything = {**always, **all_constants([s.program for s in stages])}
    for k, (stage, piece) in enumerate(zip(stages, pieces, strict=True)):
        own = {*stage.program.constants, *map(id, _closed_over(flat, piece))}
        others = sum(n for key, n in everything.items() if key not in own)
        stages[k] = dataclasses.replace(
            stage, waiting=stage.waiting + others, constants=others
        )
    ends = tuple(
        isinstance(o, Parts) or at in to_host or held[o].on_host
        for at, o in enumerate(flat.outputs)
    )
    plan = together(
        [(_name(p), s.program.plan) for s, p in zip(stages, pieces, strict=True)],
        room,
    )
    peak = max(s.program.plan.peak_bytes + s.waiting for s in stages)
    plan = dataclasses.replace(plan, peak_bytes=peak)
    used = tuple((v, a) for v, a in flat.constants if v in read_over)
    return Chain(plan, flat, arguments, used, tuple(stages), to_host, ends)


def _closed_over(flat: FlatJaxpr, piece: "Piece") -> list[Any]:
    """The closed-over arrays that a piece has, or is given."""
    if isinstance(piece.work, FlatJaxpr):
        return [a for _, a in piece.work.constants]
    return [a for v, a in flat.constants if v in piece.reads]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some equations of a chain as a function, or a driven one."""

    work: FlatJaxpr | Equation
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def _name(piece: Piece) -> str:
    if isinstance(piece.work, Equation):
        return f'"{piece.work.name}" ({piece.work.source or "unknown line"})'
    first, line = piece.work.equations[0], first_source(piece.work.equations)
    return f'tasks from "{first.name}" ({line or "unknown line"})'


def _pieces(flat: FlatJaxpr) -> Iterator[Piece]:
    runs: list[list[Equation]] = [[]]
    driven: list[Equation] = []
    for equation in flat.equations:
        if equation.driven:
            driven.append(equation)
            runs.append([])
        else:
            runs[-1].append(equation)
    needed: list[set[int]] = []  # after each run
    later = set(flat.result_values)
    for k in range(len(runs) - 1, -1, -1):
        needed.append(set(later))
        later.update(v for e in runs[k] for v in e.inputs if isinstance(v, int))
        if k:
            later.update(v for v in driven[k - 1].inputs if isinstance(v, int))
    needed.reverse()
    for k, run in enumerate(runs):
        if run:
            yield _run(flat, run, needed[k])
        if k < len(driven):
            reads = tuple(v for v in driven[k].inputs if isinstance(v, int))
            yield Piece(driven[k], reads, driven[k].outputs)


def _run(flat: FlatJaxpr, run: Sequence[Equation], needed: set[int]) -> Piece:
    read = dict.fromkeys(entering(run))
    slices = [s for s in flat.slices if s.value in read]
    cut = {s.value for s in slices}
    needs = dict.fromkeys((*read, *(s.source for s in slices)))
    constants = tuple((v, a) for v, a in flat.constants if v in needs)
    closed_over = {v for v, _ in constants}
    reads = tuple(v for v in needs if v not in cut and v not in closed_over)
    writes = tuple(v for e in run for v in e.outputs if v in needed)
    work = FlatJaxpr(flat.types, tuple(run), reads, constants, writes, tuple(slices))
    return Piece(work, reads, writes)


def _last_uses(flat: FlatJaxpr, pieces: Sequence[Piece]) -> dict[int, int]:
    last: dict[int, int] = {}
    for k, piece in enumerate(pieces):
        last.update(dict.fromkeys((*piece.writes, *piece.reads), k))
    last.update(dict.fromkeys(flat.result_values, len(pieces)))
    return last


def _read_by_driven(flat: FlatJaxpr, pieces: Sequence[Piece]) -> frozenset[int]:
    read = {v for p in pieces if isinstance(p.work, Equation) for v in p.reads}
    return frozenset(v for v, _ in flat.constants if v in read)


def _held_at_start(
    flat: FlatJaxpr, arguments: Arguments, constants: Collection[int]
) -> dict[int, Held]:
    held: dict[int, Held] = {}
    unread = places.unread(flat)
    for v, w, name in zip(flat.inputs, arguments.whose, arguments.names, strict=True):
        if v not in unread:
            held[v] = Held(w.on_host, w.donated or w.ours, flat.types[v].nbytes, name)
    for number, (v, array) in enumerate(flat.constants):
        if v in constants:
            on_host = places.constant_whose(array).on_host
            name = f"closed-over array {number}"
            held[v] = Held(on_host, False, flat.types[v].nbytes, name)
    return held


def _away(
    flat: FlatJaxpr,
    piece: Piece,
    ahead: Piece | None,
    gpu_bytes: int,
    to_host: Collection[int],
) -> frozenset[int]:
    """Results of a straight piece that go to host memory, by position: results of the
    function that must, what only waits for the loop ahead to end, and what is large."""
    ending = {
        v
        for at, output in enumerate(flat.outputs)
        if isinstance(output, Parts) or at in to_host
        for v in values_of(output)
    }
    away = set()
    for at, v in enumerate(piece.writes):
        nbytes = flat.types[v].nbytes
        waits = ahead is not None and v not in ahead.reads
        share = _WAITING if waits else CARRIED
        large = nbytes > min(SMALL, gpu_bytes) and nbytes > gpu_bytes // share
        if v in ending or large:
            away.add(at)
    return frozenset(away)


def together(named: Sequence[tuple[str, Plan]], gpu_bytes: int) -> Plan:
    """The plan of pieces that run one after the other, each once."""
    plans = tuple(dataclasses.replace(plan, name=name) for name, plan in named)
    total: Callable[[str], Any] = lambda name: sum(getattr(p, name) for p in plans)
    return Plan(
        gpu_bytes=gpu_bytes,
        peak_bytes=max((p.peak_bytes for p in plans), default=0),
        h2d_bytes=total("h2d_bytes"),
        d2h_bytes=total("d2h_bytes"),
        host_bytes=max((p.host_bytes for p in plans), default=0),
        predicted_seconds=total("predicted_seconds"),
        lower_bound_seconds=total("lower_bound_seconds"),
        strategy="driven",
        taskgraph=TaskGraph((), (), ()),
        memgraph=MemGraph(gpu_bytes, (), (), (), ()),
        pieces=plans,
    )
