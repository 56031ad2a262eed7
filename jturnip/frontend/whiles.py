"""A `while` whose iterations are stencils, several iterations in one.

How often it runs is not known. Where that depends on a few numbers, as a count or a time,
these are computed ahead. Where it depends on all that is carried, as until something has
converged, several iterations are done on trial, and what was carried before them is kept:
if the loop would have ended in between, as many as it has then are done from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jturnip import compat
from jturnip.frontend.hints import anywhere
from jturnip.frontend.inline import pruned_arguments
from jturnip.frontend.loops import loop_counts
from jturnip.frontend.results import live
from jturnip.frontend.unrolling import LITTLE, carried_bytes, most_at_once, written_down
from jturnip.frontend.values import FlatJaxpr, Type, carry_out, touched


# What a loop carries.
_State: TypeAlias = tuple[Any, ...]


def several_on_trial(eqn: Any, flat: FlatJaxpr, largest: float) -> Any | None:
    """A `while` that is a stencil with several iterations in one, while there are so many,
    and as many as are left over, as a jaxpr of what it reads; None where it is too large,
    or where whether it goes on is asked of something large.

    Args:
      eqn: the loop.
      flat: its body with its condition, inlined.
      largest: as for `is_stencil`.
    """
    count, little = most_at_once(eqn, len(flat.equations), largest), _little(eqn)
    asked = eqn.params["cond_jaxpr"]
    if count < 2 or eqn.effects or _largest_read(asked) > little:
        return None
    if asked.out_avals[0].shape:  # under `jax.vmap` each ends by itself
        return None
    is_while = lambda eqn: eqn.primitive.name == "while"
    if any(anywhere(each, is_while) for each in eqn.params["body_jaxpr"].eqns):
        return None  # which may not end after too many iterations
    ahead = _foreseen(eqn, flat)
    if ahead is None and compat.nans_are_looked_for():
        return None  # what comes of too many iterations may be no numbers

    def function(*operands: Any) -> _State:
        consts, _, _ = loop_counts(eqn)
        loop = _Several(eqn, count, operands[:consts])
        return loop.result(operands[consts:], ahead)

    structs = [Type.of(v.aval).struct() for v in eqn.invars]
    with eqn.ctx.manager:
        return jax.make_jaxpr(function)(*structs)


@dataclass(frozen=True, slots=True)
class _Several:
    """A loop of which so many iterations are one."""

    eqn: Any
    count: int
    # What its condition and its body read beside what it carries.
    fixed: Sequence[Any]

    def result(self, carried: _State, ahead: "_Ahead | None") -> _State:
        """What it carries in the end."""
        if ahead is not None:
            before = lambda state: _in_a_row(self.going_ahead(ahead, state))
            all_go_on = lambda state: before(state)[0]
            state = lax.while_loop(all_go_on, lambda state: self.several(state)[0], carried)
            _, left = before(state)
        else:
            first = carried, carried, self.goes_on(carried), jnp.int32(0)
            all_went_on = lambda trial: trial[2]
            state, _, _, left = lax.while_loop(all_went_on, self.on_trial, first)
        are_left = lambda state: state[1] > 0
        state, _ = lax.while_loop(are_left, self.so_many, (state, left))
        return state

    def goes_on(self, state: _State) -> Any:
        """Whether there is one more iteration."""
        params = self.eqn.params
        asked = self.fixed[: params["cond_nconsts"]]
        return jaxpr_as_fun(params["cond_jaxpr"])(*asked, *state)[0]

    def iteration(self, state: _State) -> _State:
        """What one gives."""
        params = self.eqn.params
        read = self.fixed[params["cond_nconsts"] :]
        return written_down(jaxpr_as_fun(params["body_jaxpr"])(*read, *state))

    def several(self, state: _State) -> tuple[_State, list[Any]]:
        """What several give, and whether the loop goes on after each."""
        going: list[Any] = []
        for _ in range(self.count):
            state = self.iteration(state)
            going.append(self.goes_on(state))
        return state, going

    def going_ahead(self, ahead: "_Ahead", state: _State) -> list[Any]:
        """Whether the loop goes on before each of several, by numbers alone."""
        numbers = list(state)
        going = [self.goes_on(state)]
        for _ in range(self.count - 1):
            goes_on, *new = ahead.function(*self.fixed, *numbers)
            going.append(goes_on)
            for i, number in zip(ahead.positions, new, strict=True):
                numbers[i] = number
        return going

    def on_trial(self, trial: Any) -> Any:
        """What was there before several, what they give, whether the loop goes on after
        all of them, and else how many it has."""
        _, now, _, _ = trial
        after, going = self.several(now)
        all_go_on, number = _in_a_row(going)
        return now, after, all_go_on, 1 + number

    def so_many(self, state_and_left: tuple[_State, Any]) -> tuple[_State, Any]:
        """What fewer than all give; and that none is left."""
        state, left = state_and_left
        for number in range(self.count):
            pairs = zip(self.iteration(state), state, strict=True)
            state = tuple(lax.select(number < left, *each) for each in pairs)
        return state, jnp.zeros_like(left)


def _in_a_row(going: Sequence[Any]) -> tuple[Any, Any]:
    """Whether all are true, and how many are before the first that is not."""
    all_go_on, number = jnp.bool_(True), jnp.int32(0)
    for each in going:
        all_go_on &= each
        number += all_go_on
    return all_go_on, number


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The numbers on which it depends how often a loop runs: the positions of carried
    values, and whether the loop goes on after an iteration, and what these are then, as a
    function of all that it reads."""

    positions: list[int]
    function: Callable[..., list[Any]]


def _foreseen(eqn: Any, flat: FlatJaxpr) -> _Ahead | None:
    """What is computed ahead of a `while`; None where something of it is large."""
    consts, _, _ = loop_counts(eqn)
    position = {v: i - consts for i, v in enumerate(flat.inputs)}
    little, positions = _little(eqn), set[int]()
    while True:
        results = [flat.outputs[0], *(flat.outputs[i + 1] for i in sorted(positions))]
        some = live(replace(flat, outputs=tuple(results)))
        read = set().union(*map(touched, some.equations), some.result_values)
        if any(flat.types[v].nbytes > little for v in read):
            return None
        more = {position[v] for v in read if position.get(v, -1) >= 0}
        if more <= positions:
            return _Ahead(sorted(positions), _as_function(some))
        positions |= more


def _as_function(flat: FlatJaxpr) -> Callable[..., list[Any]]:
    def function(*operands: Any) -> list[Any]:
        values = dict(zip(flat.inputs, operands, strict=True)) | dict(flat.constants)
        carry_out(flat.equations, values)
        return [values[v] for v in flat.result_values]

    return function


def _little(eqn: Any) -> float:
    return carried_bytes(eqn) * LITTLE


def _largest_read(closed: Any) -> int:
    """Bytes of the largest argument that a jaxpr reads."""
    ignored = pruned_arguments(closed)
    sizes = [Type.of(aval).nbytes for aval in closed.in_avals]
    return max((n for i, n in enumerate(sizes) if i not in ignored), default=0)
