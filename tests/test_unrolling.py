"""Scans whose iterations are stencils: several iterations in one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same
from jax.extend.core import jaxpr_as_fun
from stencils import STEPS, field

import jturnip
from jturnip.frontend.inline import inline
from jturnip.frontend.streaming import Seen
from jturnip.frontend.unrolling import carries_more, several_at_once


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
    """The only scan of a function."""
    flat = inline(jax.jit(fn).trace(*args).jaxpr)
    (scan,) = (e.origin for e in flat.equations if e.name == "scan")
    return scan


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
    one = scan_of(lambda u, v: waves(u, v, 1), field(9, 7), field(9, 7))
    assert several_at_once(one, 20, ROOM) is None


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
def test_what_a_loop_carries_moves_once_for_several_iterations():
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
def test_a_loop_that_fits_stays_as_it_is():
    u, fn = field(256, 192), repeated(STEPS["a torus by roll"], 12)
    f = jturnip.jit(fn, 8 * u.nbytes)
    assert_same(f(jturnip.host(u)), jax.jit(fn)(u))
    assert f.last_run.h2d_bytes == u.nbytes
