"""Loops and branches that are driven, and rows that the host reads and writes."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from jturnip.errors import DoesNotFit
from jturnip.frontend import tables
from jturnip.frontend.inline import Condition
from jturnip.frontend.loops import iterations
from jturnip.frontend.values import Equation
from jturnip.programs import places
from jturnip.programs.chains import CARRIED, Held, arguments_of, bytes_on_device, together
from jturnip.programs.keeping import keeping, with_branches
from jturnip.programs.records import (
    Chain,
    Choice,
    Loop,
    Program,
    Rows,
    Straight,
    all_constants,
)
from jturnip.programs.setting import Function, Setting


# Carried values go to host memory where so many times their bytes would be enough: what a
# body lacks they take themselves, and so do values that are made of them.
_WORTH_SENDING = 4

# `make.make_program`, for bodies and branches.
Make: TypeAlias = Callable[..., Program]


def driven(
    equation: Equation, operands: Sequence[Held], setting: Setting, make_program: Make
) -> Program:
    """The program of an equation that is driven.

    Args:
      equation: a `while`, a `cond`, or rows that the host reads or writes.
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
    make = _loop if equation.name == "while" else _choice
    return make(equation, operands, setting, make_program)


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
    of_state = lambda program: _bytes_at(_unread(program, len(carried)), state)
    unread = 0
    while True:
        state = [
            dataclasses.replace(h, on_host=away, ours=True)
            for h, away in zip(carried, on_host, strict=True)
        ]
        own = arguments_of(arguments, [*constants, *state])
        own = dataclasses.replace(often.beside(unread), arguments=own)
        to_host = frozenset([0, *(i + 1 for i, away in enumerate(on_host) if away)])
        try:
            body = make_program(function, own, to_host)
        except DoesNotFit as error:
            lacking = error.needed_bytes - error.gpu_bytes
            if all(on_host) or lacking > _WORTH_SENDING * bytes_on_device(state):
                raise
            _send_larger_half(carried, on_host)
            unread = 0
            continue
        moved = [
            i for i, away in enumerate(body.ends_on_host[1:]) if away and not on_host[i]
        ]
        for i in moved:
            on_host[i] = True
        if not moved and of_state(body) <= unread:
            break
        unread = 0 if moved else of_state(body)
    body = keeping(body, setting.budget.beside(unread), often.how)
    asked = arguments_of(arguments, [*constants[:of_condition], *(h.kept() for h in state)])
    beside = bytes_on_device(constants[of_condition:])
    left = dataclasses.replace(setting.beside(beside), arguments=asked)
    begin = make_program(Function(params["cond_jaxpr"]), left, frozenset([0]))
    unasked = of_state(begin)
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
