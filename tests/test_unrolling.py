"""Loops whose iterations are stencils: several iterations in one."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same
from flat import evaluated
from jax.extend.core import jaxpr_as_fun
from stencils import STEPS, field

import jturnip
from jturnip.frontend.inline import Condition, inline
from jturnip.frontend.streaming import Seen
from jturnip.frontend.unrolling import carries_more, several_at_once
from jturnip.frontend.whiles import several_on_trial
from jturnip.programs import ways
from jturnip.stages import budgeted


ROOM = 1e9  # for borders, in bytes


def waves(u: Any, speed: Any, count: int) -> Any:
    """Carries two fields; reads a number and writes one in each iteration."""

    def step(state: Any, time: Any) -> Any:
        u, speed = state
        speed = speed + 0.1 * (STEPS["zeros around"](u) - u) + 0.01 * jnp.sin(time)
        return (u + 0.1 * speed, speed), jnp.max(u)

    return jax.lax.scan(step, (u, speed), jnp.arange(float(count)))


def lattice(f: Any) -> Any:
    """What moves along five directions, a field each, and what they make of one another."""
    ways = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
    density = f.sum(0)
    along = sum(way[0] * f[k] for k, way in enumerate(ways)) / density
    return jnp.stack(
        [
            jnp.roll(0.4 * f[k] + 0.12 * density * (1 + way[0] * along), way, (0, 1))
            for k, way in enumerate(ways)
        ]
    )


def repeated(step: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
    return lambda u: jax.lax.fori_loop(0, count, lambda _, u: jnp.tanh(step(u)), u)


def scan_of(fn: Callable[..., Any], *args: Any) -> Any:
    return loop_of("scan", fn, *args)


def loop_of(name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """The only loop of a function."""
    flat = inline(jax.jit(fn).trace(*args).jaxpr)
    (loop,) = (e.origin for e in flat.equations if e.name == name)
    return loop


@pytest.mark.parametrize(
    ("count", "equations", "grouped"),
    [
        (2, 100, []),
        (4, 100, []),
        (5, 100, []),  # three and two
        (5, 290, [2]),  # and one
        (8, 100, [2]),
        (9, 100, [3]),  # three each time
        (11, 100, [2]),
        (10, 40, [2]),  # four, four, and two, rather than two each time
        (11, 20, []),  # six and five
        (40, 10, [4]),  # ten each time, rather than fourteen, fourteen, and twelve
    ],
)
def test_several_iterations_in_one_give_the_same(
    count: int, equations: int, grouped: list[int]
):
    u, speed = field(9, 7), field(9, 7) * 2
    fn = lambda u, speed: waves(u, speed, count)
    scan = scan_of(fn, u, speed)
    made = several_at_once(scan, equations, ROOM)
    assert made is not None
    lengths = [e.params["length"] for e in made.jaxpr.eqns if e.primitive.name == "scan"]
    assert lengths == grouped
    times = jnp.arange(float(count))
    found = jax.jit(jaxpr_as_fun(made))(u, speed, times)
    (u_end, speed_end), most = jax.jit(fn)(u, speed)
    for x, expected in zip(found, (u_end, speed_end, most), strict=True):
        assert_same(x, expected)


def test_rows_that_are_empty_are_scanned():
    fn = lambda u, rows: jax.lax.scan(lambda u, row: (u * 2 + row.sum(), -row), u, rows)
    args = jnp.arange(9.0), jnp.zeros((8, 0))
    made = several_at_once(scan_of(fn, *args), 10, ROOM)
    assert made is not None
    for found, expected in zip(jaxpr_as_fun(made)(*args), fn(*args), strict=True):
        assert_same(found, expected)


def test_what_is_short_or_large_stays():
    scan = scan_of(lambda u, v: waves(u, v, 5), field(9, 7), field(9, 7))
    assert several_at_once(scan, 400, ROOM) is None
    assert several_at_once(scan, 100, ROOM) is not None
    two = scan_of(lambda u, v: waves(u, v, 2), field(9, 7), field(9, 7))
    assert several_at_once(two, 400, ROOM) is None


@pytest.mark.parametrize(
    ("share", "at_once"),
    [(2, 12), (1, 6), (1 / 2, 4)],  # forty rows in a tile, twenty, or ten
)
def test_no_more_iterations_at_once_than_borders_allow(share: float, at_once: int):
    u = field(120, 9)
    scan = scan_of(repeated(STEPS["zeros around"], 24), u)
    largest = share * (u.nbytes + 4)  # with the number of the iteration
    made = several_at_once(scan, 10, largest)
    assert made is not None
    (inner,) = (e for e in made.jaxpr.eqns if e.primitive.name == "scan")
    assert inner.params["length"] == 24 // at_once


def so_often(u: Any, count: Any) -> Any:
    return jax.lax.fori_loop(0, count, lambda _, u: jnp.tanh(STEPS["zeros around"](u)), u)


def until_a_time(u: Any, count: Any) -> Any:
    """A wave, with what was before it."""

    def step(state: Any) -> Any:
        u, before, time, by = state
        return 2 * u - before + 0.1 * (STEPS["zeros around"](u) - u), u, time + by, by

    first = u, u, jnp.float32(0), jnp.float32(0.25)
    return jax.lax.while_loop(lambda state: state[2] < count / 4, step, first)[:3]


def until_it_is_small(u: Any, count: Any) -> Any:
    """How often depends on all of it: each step halves it; with a key of random numbers."""

    def step(state: Any) -> Any:
        u, _, key = state
        u = STEPS["a torus by roll"](u)
        u = u * (0.5 / jnp.float32(1))
        return u, jnp.max(jnp.abs(u)), jax.random.split(key)[0]

    first = jnp.ones_like(u), jnp.float32(1), jax.random.key(0)
    small = jnp.exp2(-jnp.float32(count)) * 1.5
    u, most, key = jax.lax.while_loop(lambda state: state[1] > small, step, first)
    return u, most, jax.random.key_data(key)


LOOPS_OF_UNKNOWN_LENGTH = [so_often, until_a_time, until_it_is_small]


def on_trial(eqn: Any, largest: float = ROOM) -> Any:
    """A `while` with several iterations in one."""
    condition = Condition(eqn.params["cond_jaxpr"], eqn.params["cond_nconsts"])
    return several_on_trial(eqn, inline(eqn.params["body_jaxpr"], condition), largest)


@pytest.mark.parametrize("fn", LOOPS_OF_UNKNOWN_LENGTH)
def test_a_loop_of_unknown_length_does_as_many_iterations(fn: Callable[..., Any]):
    """None, fewer than are done at once, just as many, one more, and so on."""
    u = field(9, 7)
    made = on_trial(loop_of("while", fn, u, 5))
    loops = [e for e in made.jaxpr.eqns if e.primitive.name == "while"]
    assert len(loops) == 2

    def other(u: Any, count: Any) -> Any:
        seen = Seen(largest_carried=0.0)
        flat = seen.inline(jax.jit(fn).trace(u, count).jaxpr)
        assert seen.unrolled
        return evaluated(flat, u, count)

    other, expected = jax.jit(other), jax.jit(fn)
    for count in range(20):
        for found, x in zip(
            other(u, count), jax.tree.leaves(expected(u, count)), strict=True
        ):
            assert_same(found, x)


def test_where_all_is_asked_or_something_is_said_a_loop_stays():
    step = STEPS["zeros around"]
    asks_all = lambda u: jax.lax.while_loop(lambda u: jnp.max(u) > 1, step, u)
    assert on_trial(loop_of("while", asks_all, field(9, 7))) is None

    def waits(u: Any, count: Any) -> Any:
        """Its iterations end while there are as many as it has."""
        inner = lambda k: jax.lax.while_loop(lambda n: n != count, lambda n: n + 1, k)
        return jax.lax.fori_loop(0, count, lambda k, u: step(u) + inner(k), u)

    eqn = loop_of("while", waits, field(9, 7), 5)
    assert on_trial(eqn) is None
    each = jax.vmap(so_often)  # as often as it needs
    assert on_trial(loop_of("while", each, field(3, 9, 7), np.arange(3))) is None

    def says(u: Any, count: Any) -> Any:
        def speaking(k: Any, u: Any) -> Any:
            jax.debug.print("{}", k)
            return step(u)

        return jax.lax.fori_loop(0, count, speaking, u)

    assert on_trial(loop_of("while", says, field(9, 7), 5)) is None


def test_nothing_is_done_on_trial_where_nans_are_looked_for():
    u = field(9, 7)
    with jax.debug_nans(True):
        assert on_trial(loop_of("while", until_it_is_small, u, 5)) is None
        assert on_trial(loop_of("while", so_often, u, 5)) is not None


@pytest.mark.parametrize(
    ("fn", "is_one"),
    [
        (repeated(STEPS["a torus by roll"], 8), True),
        (repeated(STEPS["set inside"], 8), True),
        (repeated(STEPS["set at borders"], 8), True),
        (repeated(lambda u: STEPS["zeros around"](u).at[0].set(2 * u[1] - u[2]), 8), True),
        (repeated(lambda u: lattice(jnp.stack([u] * 5))[1], 8), True),
        (repeated(lambda u: u @ u, 8), False),
        (repeated(jnp.sin, 8), False),
        (repeated(lambda u: STEPS["zeros around"](u) / jnp.sum(u), 8), False),
        # What it stacks is as large as what it carries.
        (lambda u: jax.lax.scan(lambda u, _: (u[::-1], u), u, length=8), False),
    ],
)
def test_stencils_are_told_from_other_loops(fn: Callable[[Any], Any], is_one: bool):
    u = field(32, 32)
    closed = jax.jit(fn).trace(u).jaxpr
    assert carries_more(closed, u.nbytes)
    assert not carries_more(closed, 3 * u.nbytes)
    for largest, expected in ((u.nbytes, is_one), (3 * u.nbytes, False)):
        seen = Seen(largest_carried=largest)
        lengths = [
            e.origin.params["length"]
            for e in seen.inline(closed).equations
            if e.name == "scan"
        ]
        assert (lengths != [8]) == expected
        assert bool(seen.unrolled) == expected


@pytest.mark.long
def test_what_a_loop_carries_moves_once_for_several_iterations(
    monkeypatch: pytest.MonkeyPatch,
):
    # Where only borders move twice, no other way is looked for: that took most of the call.
    monkeypatch.setattr(ways, "_or_faster", Mock(side_effect=AssertionError))
    u, speed = field(1024, 48), field(1024, 48) * 2
    fn = lambda u, speed: waves(u, speed, 10)
    gpu_bytes = 2 * u.nbytes  # what is carried, and half of what it becomes
    f = jturnip.jit(fn, gpu_bytes)
    for make in (jturnip.host, np.asarray):
        found, expected = f(make(u), make(speed)), jax.jit(fn)(u, speed)
        jax.tree.map(assert_same, found, expected)
        report = f.last_run
        assert report.peak_bytes <= gpu_bytes
        # Five and five, with borders, and the largest value of each by the way; and a copy
        # that the loop owns, which some jax makes of what it is given.
        assert max(report.h2d_bytes, report.d2h_bytes) <= 1.15 * 2 * 2 * u.nbytes


@pytest.mark.long
@pytest.mark.parametrize(
    "fn",
    [
        until_a_time,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (so_often, until_it_is_small)),
    ],
)
def test_in_a_loop_of_unknown_length_too(fn: Callable[..., Any]):
    """Once for all that are done on trial, and once for what is left over; on trial, what
    was before is kept, too."""
    u = field(1024, 48)
    gpu_bytes = int(1.9 * u.nbytes) + (u.nbytes if fn is until_a_time else 0)
    f, most = jturnip.jit(fn, gpu_bytes), 0
    for count in (13, 2, 0):
        for make in (jturnip.host, np.asarray):
            found, expected = f(make(u), count), jax.jit(fn)(u, count)
            jax.tree.map(assert_same, found, expected)
            assert f.last_run.peak_bytes <= gpu_bytes
            most = max(most, f.last_run.h2d_bytes, f.last_run.d2h_bytes)
    # Thirteen are two times some; three of a wave, which is two fields. On trial they are
    # done twice, each time with what was before, and a copy of that at the beginning.
    fields = {so_often: 2, until_a_time: 2 * 3, until_it_is_small: 6}
    assert most <= 1.15 * fields[fn] * u.nbytes


@pytest.mark.long
def test_a_lattice_moves_once_for_several_iterations():
    """Each field by itself is small; some are not shifted along one of both axes."""
    f, fn = 1 + np.abs(field(5, 256, 128)), repeated(lattice, 8)
    gpu_bytes = int(1.5 * f.nbytes)
    g = jturnip.jit(fn, gpu_bytes)
    assert_same(g(jturnip.host(f)), jax.jit(fn)(f))
    assert g.last_run.peak_bytes <= gpu_bytes
    assert max(g.last_run.h2d_bytes, g.last_run.d2h_bytes) <= 1.15 * 3 * f.nbytes


@pytest.mark.long
def test_tiles_that_do_not_fit_as_expected_are_cut():
    """XLA fuses less of six iterations than is hoped for, so their tasks are cut twice."""
    u, fn = field(256, 256), repeated(STEPS["a torus by pad"], 12)
    gpu_bytes = int(1.2 * u.nbytes)
    f = jturnip.jit(fn, gpu_bytes)
    assert_same(f(jturnip.host(u)), jax.jit(fn)(u))
    assert f.last_run.peak_bytes <= gpu_bytes
    assert f.last_run.h2d_bytes <= 4 * u.nbytes


@pytest.mark.long
def test_a_loop_that_cannot_stay_whole_is_not_taken_apart_first():
    """Nor is it tried to cut what is left over where the loop itself does not fit."""
    u = field(256, 256)
    fn = repeated(STEPS["gradients"], 8)
    peak = jturnip.peak_bytes(fn, u)
    lowered = jturnip.jit(fn, peak // 2).lower(jturnip.host(u))
    compiled = lowered.compile()
    assert compiled.compile_report.compiled <= 20


@pytest.mark.long
def test_what_may_be_slower_is_taken_where_nothing_else_fits(
    monkeypatch: pytest.MonkeyPatch,
):
    u, fn = field(256, 48), repeated(STEPS["zeros around"], 8)
    nothing = jturnip.DoesNotFit("", needed_bytes=2, gpu_bytes=1)
    monkeypatch.setattr(budgeted, "may_be_slower", lambda *args: True)
    monkeypatch.setattr(
        budgeted.Budgeted, "_in_some_way", Mock(side_effect=nothing, autospec=True)
    )
    f = jturnip.jit(fn, u.nbytes)
    assert_same(f(jturnip.host(u)), jax.jit(fn)(u))
    assert f.last_run.h2d_bytes < 4 * u.nbytes  # not in each iteration


@pytest.mark.long
def test_a_loop_that_fits_stays_as_it_is():
    u, fn = field(256, 192), repeated(STEPS["a torus by roll"], 12)
    f = jturnip.jit(fn, 8 * u.nbytes)
    assert_same(f(jturnip.host(u)), jax.jit(fn)(u))
    assert f.last_run.h2d_bytes == u.nbytes
