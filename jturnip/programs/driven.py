"""Loops and branches that are driven, and what the host does itself: it reads and writes
rows, and calls functions of the user's."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jturnip.compiler.executables import TooManyTasks
from jturnip.errors import DoesNotFit, PlanningError
from jturnip.frontend import tables
from jturnip.frontend.inline import Condition
from jturnip.frontend.loops import CALL, iterations
from jturnip.frontend.values import Equation
from jturnip.programs import places
from jturnip.programs.chains import CARRIED, Held, arguments_of, bytes_on_device, together
from jturnip.programs.keeping import keeping, with_branches
from jturnip.programs.records import (
    Call,
    Chain,
    Choice,
    Loop,
    Program,
    Rows,
    Straight,
    all_constants,
    expected_seconds,
)
from jturnip.programs.setting import Function, Setting
from jturnip.programs.splitting import spread_evenly
from jturnip.programs.staying import rooms_beside
from jturnip.programs.ways import or_in_blocks, straight, waits
from jturnip.units import padded


# Carried values go to host memory where so many times their bytes would be enough: what a
# body lacks they take themselves, and so do values that are made of them.
_WORTH_SENDING = 4

# More of what is carried stays on the device where a body takes more than so many times
# what its tasks do by themselves.
_HARDLY_WAITS = 1.1
# But not where it has more than so many times its equations: to look for other ways to cut
# twenty steps of a denoised image took 16 s, and they were six times as slow.
_TIMES_WHOLE = 3

# A loop that leaves what it carries on the device has a small body: of no more equations
# than so many, for which so many executables are compiled to see whether it fits.
_FEW_EQUATIONS = 100
_FEW_TASKS = 16

# `make.make_program`, for bodies and branches.
Make: TypeAlias = Callable[..., Program]


def driven(
    equation: Equation, operands: Sequence[Held], setting: Setting, make_program: Make
) -> Program:
    """The program of an equation that is driven.

    Args:
      equation: a `while`, a `cond`, rows that the host reads or writes, or a call.
      operands: where what it reads is.
      setting: what it is made for, with the function's arguments.
      make_program: makes the programs of bodies and branches.
    """
    if equation.name in tables.HOST_READS | tables.HOST_WRITES:
        away = sum(h.nbytes for h in operands if not h.on_host)
        plan = dataclasses.replace(
            together([], setting.budget.room),
            d2h_bytes=away,
            peak_bytes=bytes_on_device(operands),
        )
        return Rows(plan, equation.origin)
    if equation.name == CALL:
        return _call(equation, operands, setting)
    make = _loop if equation.name == "while" else _choice
    return make(equation, operands, setting, make_program)


def _call(equation: Equation, operands: Sequence[Held], setting: Setting) -> Call:
    """A function of the user's: what it is called with the host reads where it lies, and
    what it gives is in host memory."""
    plan = dataclasses.replace(
        together([], setting.budget.room),
        d2h_bytes=sum(h.nbytes for h in operands if not h.on_host),
        peak_bytes=bytes_on_device(operands),
    )
    on_host = (True,) * len(equation.outputs)
    return Call(plan, equation.origin, setting.device, equation.source, on_host)


def _loop(
    equation: Equation, operands: Sequence[Held], setting: Setting, make_program: Make
) -> Loop:
    params = equation.origin.params
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    constants = [h.kept() for h in operands[: of_condition + of_body]]
    carried = operands[of_condition + of_body :]
    # A carried array that the caller keeps on the device is copied: it stays there.
    staying = bytes_on_device(h for h in carried if not h.ours)
    arguments, room = setting.arguments, setting.budget.room
    setting = setting.beside(staying)
    on_host = _carried_on_host(carried, setting.budget.room)
    condition = Condition(params["cond_jaxpr"], of_condition)
    # What the body returns as it is stays in its own place: so it is the loop's for good.
    given = {i + 1: len(constants) + i for i in range(len(carried))}
    function = Function(params["body_jaxpr"], given, condition)
    often = setting.otherwise(repeated=True)
    make = _BodyMaker(function, constants, carried, often, make_program)
    on_host, body, unread = _in_their_places(make, on_host)
    body = make.in_blocks(body, on_host, unread)
    state = make.state(on_host)
    asked = arguments_of(arguments, [*constants[:of_condition], *(h.kept() for h in state)])
    beside = bytes_on_device(constants[of_condition:])
    left = dataclasses.replace(setting.beside(beside), arguments=asked)
    begin = make_program(Function(params["cond_jaxpr"]), left, frozenset([0]))
    unasked = _bytes_at(_unread(begin, len(carried)), state)
    if unasked:
        left = left.beside(unasked)
        begin = make_program(Function(params["cond_jaxpr"]), left, frozenset([0]))
    beside += unasked
    used_up = _used_up(body)[of_condition + of_body :]
    plan = together([("condition", begin.plan), ("body", body.plan)], room)
    everything = sum(all_constants((begin, body)).values())
    lacking = lambda program: everything - sum(program.constants.values())
    peak = max(
        bytes_on_device([*constants, *carried]),  # before any is put in its place
        begin.plan.peak_bytes + beside + staying + lacking(begin),
        body.plan.peak_bytes + staying + unread + lacking(body),
    )
    moved_once = body.plan.kept_bytes
    plan = dataclasses.replace(plan, peak_bytes=peak, h2d_bytes=plan.h2d_bytes + moved_once)
    used = tuple(on_host), used_up, (unasked, unread), _unread(body, len(carried))
    count = iterations(equation.origin)
    return Loop(plan, of_condition, of_body, begin, body, *used, iterations=count)


@dataclass(frozen=True, slots=True)
class _BodyMaker:
    """Makes the body of a loop, of where its carried values are."""

    function: Function
    constants: Sequence[Held]
    carried: Sequence[Held]
    setting: Setting
    make_program: Make

    def state(self, on_host: Sequence[bool]) -> list[Held]:
        """The carried values, where they are to be."""
        return [
            dataclasses.replace(h, on_host=away, ours=True)
            for h, away in zip(self.carried, on_host, strict=True)
        ]

    def body(self, on_host: Sequence[bool], unread: int) -> Program:
        """The body, beside so many bytes of carried values that it does not know."""
        own = self._own(on_host, unread)
        return self.make_program(self.function, own, self._to_host(on_host))

    def small_body(self, unread: int) -> Straight:
        """The same of a few tasks, with all carried values on the device."""
        own = self._own([False] * len(self.carried), unread)
        flat = self.function.flat(own.seen())
        if len(flat.equations) > _FEW_EQUATIONS:
            raise TooManyTasks
        return straight(flat, own, frozenset([0]), _FEW_TASKS)

    def _to_host(self, on_host: Sequence[bool]) -> frozenset[int]:
        """Positions of results that must end in host memory: first whether it goes on."""
        return frozenset([0, *(i + 1 for i, away in enumerate(on_host) if away)])

    def _own(self, on_host: Sequence[bool], unread: int) -> Setting:
        held = [*self.constants, *self.state(on_host)]
        arguments = arguments_of(self.setting.arguments, held)
        return dataclasses.replace(self.setting.beside(unread), arguments=arguments)

    def keeping(self, body: Program, unread: int) -> Program:
        """A body that keeps on the device what it reads in each iteration."""
        return keeping(body, self.setting.budget.beside(unread), self.setting.how)

    def in_blocks(self, body: Program, on_host: Sequence[bool], unread: int) -> Program:
        """A body; or the same in blocks, with all that it takes and gives where it is."""
        if not isinstance(body, Straight):
            return body
        own = self._own(on_host, unread).otherwise(axes=True)
        other = or_in_blocks(body, self.function, own, self._to_host(on_host))
        if other is body:
            return body
        other = self.keeping(other, unread)
        if other.ends_on_host != body.ends_on_host:
            return body
        if self.unread_bytes(other, on_host) > unread:
            return body
        return min(body, other, key=expected_seconds)

    def unread_bytes(self, body: Program, on_host: Sequence[bool]) -> int:
        """Bytes on the device of carried values that a body does not know."""
        return _bytes_at(_unread(body, len(self.carried)), self.state(on_host))


# A body, and bytes of the carried values that it does not know.
_Made: TypeAlias = tuple[Program, int]
# Which carried values are in host memory, and what is `_Made` so.
_Placed: TypeAlias = tuple[list[bool], Program, int]


def _in_their_places(make: _BodyMaker, on_host: list[bool]) -> _Placed:
    """Where what is carried is between iterations, the body, and bytes of carried values
    that it does not know: all of it on the device, if that moves nothing instead; or the
    fastest, as predicted.

    Args:
      make: makes the body.
      on_host: what goes to host memory unless all of it stays.
    """
    here = [False] * len(on_host)
    stays = _staying(make) if any(on_host) else None
    if stays is not None and _moved(stays[0]) <= _moved_otherwise(make, on_host):
        body, unread = stays
        return here, make.keeping(body, unread), unread
    body, unread = _sending(make, on_host)
    placed = _some_staying(make, on_host, body, unread)
    if stays is None:
        return placed
    body, unread = stays
    staying = here, make.keeping(body, unread), unread
    return min(staying, placed, key=lambda found: found[1].plan.predicted_seconds)


def _staying(make: _BodyMaker) -> _Made | None:
    """The body in a few tasks, with all that is carried on the device, if there is room for
    that: what a task is the last to read, it may write over."""
    here = [False] * len(make.carried)
    if bytes_on_device(make.state(here)) > make.setting.arena:
        return None
    body, unread = None, 0
    with contextlib.suppress(PlanningError, TooManyTasks):
        while body is None or make.unread_bytes(body, here) > unread:
            unread = 0 if body is None else make.unread_bytes(body, here)
            body = make.small_body(unread)
    return None if body is None or any(body.ends_on_host[1:]) else (body, unread)


def _moved(body: Program) -> int:
    return body.plan.h2d_bytes + body.plan.d2h_bytes


def _moved_otherwise(make: _BodyMaker, on_host: Sequence[bool]) -> int:
    """What the loop reads in host memory, and carried values that would be there."""
    streamed = sum(h.nbytes for h in make.constants if h.on_host)
    sent = sum(h.nbytes for h, away in zip(make.carried, on_host, strict=True) if away)
    return streamed + sent


def _sending(make: _BodyMaker, on_host: list[bool]) -> _Made:
    """The body with what finds no room in host memory: `on_host` grows by that."""
    unread = 0
    while True:
        try:
            body = make.body(on_host, unread)
        except DoesNotFit as error:
            lacking = error.needed_bytes - error.gpu_bytes
            there = bytes_on_device(make.state(on_host))
            if all(on_host) or lacking > _WORTH_SENDING * there:
                raise
            _send_larger_half(make.carried, on_host)
            unread = 0
            continue
        moved = [
            i for i, away in enumerate(body.ends_on_host[1:]) if away and not on_host[i]
        ]
        for i in moved:
            on_host[i] = True
        unknown = make.unread_bytes(body, on_host)
        if not moved and unknown <= unread:
            return body, unread
        unread = 0 if moved else unknown


def _some_staying(
    make: _BodyMaker, on_host: list[bool], body: Program, unread: int
) -> _Placed:
    """The same where not all stays: some of what would go to host memory stays on the
    device, where there is room for it and that is predicted to take less time.

    Args:
      make: makes the body.
      on_host: what is in host memory if the least is on the device.
      body: as it is then, beside so many bytes.
      unread: these.
    """
    best = on_host, make.keeping(body, unread), unread
    if make.setting.how.any_plan or not isinstance(body, Straight | Chain):
        return best
    if isinstance(body, Straight) and not waits(body, _HARDLY_WAITS):
        return best
    whole = make.function.flat(make.setting.seen())
    if len(body.flat.equations) > _TIMES_WHOLE * len(whole.equations):
        return best  # in tiles or blocks, with other room for whole values
    first = len(make.constants)
    order = [at - first for at in places.in_order_of_reading(body.flat) if at >= first]
    away = [i for i in order if on_host[i]]
    sizes = [padded(make.carried[i].nbytes) for i in away]
    for room in rooms_beside(body, make.setting.arena - unread):
        here = set(itertools.compress(away, spread_evenly(sizes, room)))
        if not here:
            break
        some = [far and i not in here for i, far in enumerate(on_host)]
        with contextlib.suppress(PlanningError, TooManyTasks):
            other, unknown = _sending(make, some)
            other = make.keeping(other, unknown)
            if other.plan.predicted_seconds < best[1].plan.predicted_seconds:
                best = some, other, unknown
    return best


def _unread(program: Program, last: int) -> frozenset[int]:
    """Which of its last so many arguments a program neither reads nor returns: they are
    there while it runs, and its plan does not know them."""
    if not isinstance(program, Straight | Chain) or not last:
        return frozenset()
    ignored = places.unread(program.flat)
    inputs = program.flat.inputs[-last:]
    return frozenset(i for i, v in enumerate(inputs) if v in ignored)


def _bytes_at(positions: Collection[int], held: Sequence[Held]) -> int:
    return bytes_on_device(held[i] for i in positions)


def _carried_on_host(carried: Sequence[Held], room: int) -> list[bool]:
    """The smallest stay on the device, up to a share of the budget."""
    on_host = [True] * len(carried)
    total = 0
    for i in sorted(range(len(carried)), key=lambda i: carried[i].nbytes):
        total += carried[i].nbytes
        if total > room // CARRIED:
            break
        on_host[i] = False
    return on_host


def _send_larger_half(carried: Sequence[Held], on_host: list[bool]) -> None:
    there = [i for i, away in enumerate(on_host) if not away]
    there.sort(key=lambda i: carried[i].nbytes)
    for i in there[len(there) // 2 :]:
        on_host[i] = True


def _used_up(program: Program) -> tuple[bool, ...]:
    if isinstance(program, Straight):
        return tuple(w.donated for w in program.split.arguments.whose)
    assert isinstance(program, Chain)
    return tuple(w.donated for w in program.arguments.whose)


def _choice(
    equation: Equation, operands: Sequence[Held], setting: Setting, make_program: Make
) -> Choice:
    index, *operands = operands
    beside = bytes_on_device([index])
    own = arguments_of(setting.arguments, operands)
    own = dataclasses.replace(setting, arguments=own)
    to_host: frozenset[int] = frozenset()

    def made(branch: Any) -> tuple[Program, int]:
        # What is returned as it is stays where it is, also where a result ends elsewhere.
        given = [i for i, h in enumerate(operands) if h.ours and (h.on_host or not to_host)]
        unread = 0
        while True:
            left = own.beside(beside + unread)
            program = make_program(Function(branch, given), left, to_host)
            found = _bytes_at(_unread(program, len(operands)), operands)
            if found <= unread:
                return program, unread
            unread = found

    while True:
        both = list(map(made, equation.origin.params["branches"]))
        branches = tuple(program for program, _ in both)
        unread = tuple(nbytes for _, nbytes in both)
        ends = [b.ends_on_host for b in branches]
        away = frozenset(i for one in ends for i, on_host in enumerate(one) if on_host)
        if away == to_host:
            break
        to_host = away
    on_host = tuple(i in to_host for i in range(len(equation.origin.outvars)))
    choice = Choice(together([], setting.budget.room), branches, on_host, unread, beside)
    return with_branches(choice, branches)
