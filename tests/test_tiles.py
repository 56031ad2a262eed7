"""Stretches over which windows slide, in tiles that overlap."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same
from flat import evaluated, flat_of
from hypothesis import given, settings, strategies as st
from stencils import STEPS, chain, field, gradients

import jturnip
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.choosing import Where
from jturnip.frontend.parts import works
from jturnip.frontend.pieces import with_pieces
from jturnip.frontend.sliding import Axis, sliding_rules
from jturnip.frontend.tiles import united
from jturnip.frontend.tiling import in_tiles, of_each_example
from jturnip.frontend.values import FlatJaxpr


def forms_of(fn: Callable[..., Any], x: Any, share: float) -> list[FlatJaxpr]:
    """A function of an array in host memory in tiles, with so many times its bytes."""
    flat = flat_of(fn, x)
    where = Where(frozenset(flat.inputs))
    return [tiled.flat for tiled in in_tiles(flat, where, int(share * x.nbytes), Known())]


def read_bytes(flat: FlatJaxpr) -> int:
    """What comes from host memory if each part comes once."""
    return sum(flat.types[s.value].nbytes for s in flat.slices)


def largest_bytes(flat: FlatJaxpr) -> int:
    """The largest value that something writes."""
    return max(flat.types[v].nbytes for e in flat.equations for v in e.outputs)


def written_bytes(flat: FlatJaxpr) -> int:
    """What all equations write together."""
    return sum(flat.types[v].nbytes for e in flat.equations for v in e.outputs)


def convolved(x: Any, *kernels: Any) -> Any:
    """Images through a network of convolutions."""
    numbers = ("NHWC", "HWIO", "NHWC")
    for w in kernels:
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
        x = jnp.tanh(x)
    return x


# -- what is read for some positions -----------------------------------------------------


def test_spans_that_meet_are_one():
    assert united([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert united([]) == []


# Equations that read other positions than they write, and a shape of what they read.
SLIDING: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "slice": (lambda x: x[2:9], (12, 5)),
    "slice of every third": (lambda x: x[1:11:3], (12, 5)),
    "pad": (lambda x: jnp.pad(x, ((2, 1), (0, 3))), (7, 4)),
    "pad of less than none": (
        lambda x: jax.lax.pad(x, np.float32(3), ((-2, 1, 0), (1, -1, 0))),
        (7, 4),
    ),
    "pad between": (
        lambda x: jax.lax.pad(x, np.float32(3), ((1, 2, 2), (0, 0, 0))),
        (5, 4),
    ),
    "concatenate": (lambda x: jnp.concatenate([x, x, x], 0), (4, 3)),
    "rev": (lambda x: x[::-1], (7, 3)),
    "reshape": (lambda x: x.reshape(1, 7, 1, 3), (7, 1, 3)),
    "spread": (lambda x: jnp.broadcast_to(x[:, None], (5, 2, 3)), (5, 3)),
    "one with many": (lambda x: jax.lax.mul(x, jnp.ones((1, 3))), (6, 3)),
    "pool": (
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1), (2, 1), "SAME"),
        (9, 3),
    ),
    "conv": (
        lambda x: jax.lax.conv(x[None, None], jnp.ones((1, 1, 3, 2)), (2, 1), "SAME"),
        (9, 6),
    ),
}


@pytest.mark.parametrize("name", SLIDING)
def test_what_is_not_read_does_not_matter(name: str):
    fn, shape = SLIDING[name]
    flat = flat_of(fn, field(*shape))
    slid = sliding_rules(flat, rules(flat, works, Known()))
    tried = 0
    for e, rule in zip(flat.equations, slid, strict=True):
        if rule is None or len(flat.types[e.outputs[0]].shape) < 2:
            continue
        operands, (result,) = flat.operand_types(e), [flat.types[v] for v in e.outputs]
        read = [field(*t.shape) for t in operands]
        (whole,) = e.bind(read)
        for label in {x for each in rule.results for x in each if x is not None}:
            axis = Axis(e, rule, label, tuple(operands), (result,))
            for low in range(axis.length):
                for high in range(low + 1, axis.length + 1):
                    only = [np.full_like(x, np.nan) for x in read]
                    for x, y, extent in zip(only, read, axis.reads(low, high), strict=True):
                        here: Any = [slice(None)] * x.ndim
                        if extent is not None:
                            here[extent.dim] = slice(extent.low, extent.high)
                        x[tuple(here)] = y[tuple(here)]
                    (written,) = axis.writes(low, high)
                    assert written is not None
                    part = lambda x, to=written: np.asarray(x).take(
                        range(to.low, to.high), to.dim
                    )
                    np.testing.assert_array_equal(part(e.bind(only)[0]), part(whole))
                    tried += 1
    assert tried


# -- places that are known ---------------------------------------------------------------


WRITES: dict[str, Callable[[Any], Any]] = {
    "in the middle": lambda x: x.at[2:5, 1:3].set(x[:3, :2] * 2),
    "a row": lambda x: x.at[-1].set(7.0),
    "added": lambda x: x.at[1:4].add(x[3:6]),
    "multiplied": lambda x: x.at[:, 2:].multiply(x[:, :-2]),
    "the least": lambda x: x.at[2:, 3:].min(0.0),
    "by dynamic_update_slice": lambda x: jax.lax.dynamic_update_slice(x, x[:2], (4, 0)),
    "moved inside": lambda x: jax.lax.dynamic_update_slice(x, x[:2], (40, 0)),
    "read": lambda x: jax.lax.dynamic_slice(x, (1, 2), (3, 3)),
    "split": lambda x: sum(jnp.split(x, 3)),
    "a number": lambda x: x.at[3, 4].set(x[0, 0]),
    "a row of rows": lambda x: x.at[0].set(2 * x[1] - jnp.minimum(x[2], 0.5)),
    "columns of columns": lambda x: x.at[1:-1, -1].set(x[2:, -2] + x[0, 0]),
    "a row of a product": lambda x: x.at[0].set(x[1] @ jnp.ones((6, 6))),
    "gradients of a write": gradients(lambda x: x.at[1:4, 1:4].set(x[2:5, 2:5] ** 2)),
}


@pytest.mark.parametrize("name", WRITES)
def test_reads_and_writes_at_known_places_are_slices_and_pieces(name: str):
    fn, x = WRITES[name], field(9, 6)
    made = with_pieces(flat_of(fn, x), 0)
    at_places = "scatter", "gather", "split", "dynamic"
    assert not [e.name for e in made.equations if e.name.startswith(at_places)]
    np.testing.assert_array_equal(evaluated(made, x)[0], jax.jit(fn)(x))


@pytest.mark.parametrize("name", ["a row of rows", "columns of columns"])
def test_what_is_made_of_rows_only_keeps_its_dimensions(name: str):
    """So it is known to which part of the array it belongs."""
    made = with_pieces(flat_of(WRITES[name], field(9, 6)), 0)
    shapes = [made.types[v].shape for e in made.equations for v in e.outputs]
    assert all(len(shape) == 2 for shape in shapes if shape not in ((), (1,)))


def test_what_is_small_or_at_places_that_are_not_known_stays():
    x, fn = field(9, 6), lambda x: x.at[1:4].set(0.0)
    flat = flat_of(fn, x)
    assert with_pieces(flat, x.nbytes) is flat
    several = lambda x: x.at[jnp.array([1, 5])].set(0.0)
    by_argument = lambda x: jax.lax.dynamic_slice(x, (x[0, 0].astype(int), 0), (2, 6))
    for fn in (several, by_argument):
        flat = flat_of(fn, x)
        assert with_pieces(flat, 0) is flat


# -- functions in tiles ------------------------------------------------------------------


# What is slow to compile, and like others.
SLOW = (
    "gradients",
    "set at borders",
    "a torus by roll",
    "a torus by pad",
    "the edge around",
)
MOST_STEPS = [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in STEPS]


@pytest.mark.long
@pytest.mark.parametrize("name", MOST_STEPS)
def test_a_chain_of_steps_reads_each_part_once(name: str):
    fn, x = chain(name), field(192, 40)
    forms = forms_of(fn, x, 0.9)
    assert forms
    for form in forms:
        assert_same(evaluated(form, x)[0], jax.jit(fn)(x))
        assert largest_bytes(form) < x.nbytes / 2
    # With borders of six positions; what is turned around is read from both ends.
    assert read_bytes(forms[0]) < (3.5 if name == "upside down" else 1.7) * x.nbytes


@pytest.mark.long
@pytest.mark.parametrize("name", MOST_STEPS)
def test_its_gradients_are_the_same(name: str):
    fn, x = gradients(chain(name, 2)), field(64, 24)
    forms = forms_of(fn, x, 1.2)
    assert forms
    # Sums of parts are added up in another order than one sum.
    assert_same(evaluated(forms[0], x)[0], jax.jit(fn)(x), ulps=64)


@pytest.mark.long
def test_borders_that_are_more_than_the_tiles_cut_the_chain():
    fn, x = chain("zeros around", 24), field(96, 40)
    form = forms_of(fn, x, 0.9)[0]
    done = sum(form.types[e.outputs[0]].nbytes for e in form.equations if e.name == "tanh")
    assert done < 1.4 * 24 * x.nbytes
    assert largest_bytes(form) < x.nbytes / 2
    assert_same(evaluated(form, x)[0], jax.jit(fn)(x))


@pytest.mark.long
def test_sums_over_what_is_in_tiles_are_added_up():
    steps = chain("a torus by roll", 2)
    fn = lambda x: (steps(x) / jnp.linalg.norm(steps(x)), steps(x).max(0), steps(x).sum())
    x = field(96, 40)
    form = forms_of(fn, x, 0.9)[0]
    for found, expected in zip(evaluated(form, x), jax.jit(fn)(x), strict=True):
        assert_same(found, expected, ulps=32)


@pytest.mark.long
def test_each_tile_has_some_of_every_level():
    """More tiles than the lower one has rows would hold less, but do nothing for it."""

    def levels(x: Any) -> Any:
        x = chain("zeros around", 2)(x)
        low = jax.lax.reduce_window(x, 0.0, jax.lax.add, (4, 4), (4, 4), "VALID")
        return x, chain("zeros around", 2)(low)

    x = field(128, 32)
    whole = written_bytes(flat_of(levels, x))
    for form in forms_of(levels, x, 0.5):
        # At borders 1.3 times as much at most; what is put together of tiles counts too.
        assert written_bytes(form) <= 1.6 * whole
        for found, expected in zip(evaluated(form, x), jax.jit(levels)(x), strict=True):
            assert_same(found, expected)


def test_tiles_that_are_several_tasks_take_more_of_what_there_is():
    """Twice as many would be twice as many tasks; the next one's part has room as well."""
    x = field(1, 64, 64, 4)
    kernels = [field(3, 3, 4, 4) / 8 for _ in range(2)]
    fn = lambda x: convolved(x, *kernels)
    form = forms_of(fn, x, 3.0)[0]
    names = [e.name for e in form.equations]
    assert names.count("conv_general_dilated") == 4
    # Both layers of one tile, a part that comes and a part that leaves.
    assert largest_bytes(form) <= x.nbytes
    assert_same(evaluated(form, x)[0], jax.jit(fn)(x), ulps=16)


@pytest.mark.long
def test_an_image_that_is_enlarged_is_read_once():
    """Of the gathers that enlarge it, and of their gradients, each row is known."""
    kernel = jnp.asarray(field(3, 3, 2, 2)) / 8

    def fn(x: Any) -> Any:
        larger = jax.image.resize(convolved(x, kernel), (1, 64, 32, 2), "nearest")
        return convolved(larger, kernel)

    x = field(1, 32, 16, 2)
    for form in forms_of(gradients(fn), x, 4.0):
        assert largest_bytes(form) <= x.nbytes
        assert_same(evaluated(form, x)[0], jax.jit(gradients(fn))(x), ulps=64)


def test_along_one_dimension():
    halves = lambda x: jnp.concatenate([x[::2] + x[1::2], x[::2] - x[1::2]])
    x = field(4096)
    form = forms_of(halves, x, 0.9)[0]
    np.testing.assert_array_equal(evaluated(form, x)[0], jax.jit(halves)(x))
    assert read_bytes(form) == x.nbytes


def test_what_fits_as_a_whole_or_does_not_slide_stays():
    x = field(96, 40)
    assert not forms_of(chain("zeros around"), x, 8.0)
    assert not forms_of(lambda x: jnp.tanh(x) + 1, x, 0.9)
    assert not forms_of(lambda x: x @ x.T, x, 0.9)


names = st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=4)


@pytest.mark.long
@settings(max_examples=5, deadline=None)
@given(names, st.integers(33, 70), st.integers(5, 40), st.floats(0.7, 1.5))
def test_any_steps_give_the_same(steps: list[str], rows: int, columns: int, share: float):
    def fn(u: Any) -> Any:
        for name in steps:
            u = jnp.tanh(STEPS[name](u))
        return u

    x = field(rows, columns)
    for form in forms_of(fn, x, share):
        assert_same(evaluated(form, x)[0], jax.jit(fn)(x))


# -- in a budget -------------------------------------------------------------------------


KINDS = {"numpy": lambda x: x, "host": jturnip.host, "device": jax.device_put}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["zeros around", "a torus by roll", "set at borders"])
def test_less_than_an_array_is_enough_for_a_chain_of_steps(name: str, kind: str):
    fn, x = chain(name), field(384, 320)
    held = x.nbytes if kind == "device" else 0  # what the caller has there counts
    gpu_bytes = int(0.9 * x.nbytes) + held
    f = jturnip.jit(fn, gpu_bytes)
    for _ in range(2):
        assert_same(f(KINDS[kind](x)), jax.jit(fn)(x))
        report = f.last_run
        assert report.peak_bytes <= gpu_bytes
        assert report.h2d_bytes <= 1.3 * x.nbytes
        assert report.d2h_bytes <= x.nbytes + 4096 * 32


@pytest.mark.long
def test_its_gradients_in_less_than_an_array():
    fn, x = gradients(chain("added inside")), field(384, 320)
    gpu_bytes = int(1.2 * x.nbytes)
    f = jturnip.jit(fn, gpu_bytes)
    assert_same(f(jturnip.host(x)), jax.jit(fn)(x), ulps=64)
    assert f.last_run.peak_bytes <= gpu_bytes


@pytest.mark.long
def test_what_would_fit_and_move_much_is_in_tiles_too():
    """Two of its arrays fit, but each step needs many more."""
    fn, x = chain("gradients", 4), field(512, 384)
    f = jturnip.jit(fn, int(2.4 * x.nbytes))
    assert_same(f(jturnip.host(x)), jax.jit(fn)(x))
    assert f.last_run.h2d_bytes + f.last_run.d2h_bytes <= 4 * x.nbytes


@pytest.mark.long
def test_several_images_of_which_none_fits_come_once():
    """Each for itself, in tiles: sixteen channels of one take more than the budget."""
    x = field(3, 64, 64, 4)
    kernels = [
        field(*shape) / 8 for shape in ((3, 3, 4, 16), (3, 3, 16, 16), (3, 3, 16, 4))
    ]
    # Over a link on which what moves is all that counts.
    link = jturnip.SimulatedLink(1e7, 1e7)
    f = jturnip.jit(convolved, 168 << 10, link=link)
    assert_same(f(x, *kernels), jax.jit(convolved)(x, *kernels))
    assert f.last_run.peak_bytes <= 168 << 10
    everything = sum(a.nbytes for a in (x, *kernels))
    assert f.last_run.h2d_bytes <= 1.3 * everything
    assert f.last_run.d2h_bytes <= x.nbytes + 4096 * 32


def test_images_of_which_one_fits_are_not_cut_apart_for_tiles():
    x, kernel = field(3, 64, 64, 4), field(3, 3, 4, 4)
    flat = flat_of(convolved, x, kernel)
    where = Where(frozenset(flat.inputs))
    assert of_each_example(flat, where, x.nbytes, Known()) is None
    assert of_each_example(flat, where, x.nbytes // 3, Known()) is not None
    one = flat_of(convolved, x[:1], kernel)
    assert of_each_example(one, where, x.nbytes // 9, Known()) is None


def test_levels_that_have_nothing_in_common_are_read_one_by_one():
    """Each is a part of the array; a tile would read all of them at once."""
    levels = field(4, 512, 8)
    fn = lambda x: jnp.concatenate([jnp.tanh(level) for level in x]).sum(0)
    f = jturnip.jit(fn, levels.nbytes // 2)
    assert_same(f(jturnip.host(levels)), jax.jit(fn)(levels), ulps=64)
    # Sums of eight numbers may leave and come back.
    assert f.last_run.h2d_bytes <= levels.nbytes + 4 * 32
