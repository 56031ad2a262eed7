"""What a stretch in several loops writes down for the later ones, and how much of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same
from flat import evaluated, flat_of
from hypothesis import example, given, settings, strategies as st

import jturnip
from jturnip.frontend import blocks, costs, materializing, parts
from jturnip.frontend.axes import Known, rules
from jturnip.frontend.costs import DeviceRates
from jturnip.frontend.cutting import Blocks, Tasks, with_cuttings
from jturnip.frontend.materializing import (
    NOTHING,
    Materialized,
    worth_keeping,
    worth_materializing,
)
from jturnip.frontend.stretches import Stretch, Stretches
from jturnip.frontend.values import FlatJaxpr


# Arithmetic that is dear, and cheap, beside what is read and written.
DEAR = DeviceRates(1e9, 1e12, launch_seconds=1e-4)
CHEAP = DeviceRates(1e15, 1e9, launch_seconds=1e-4)


def transport(x: Any, y: Any) -> Any:
    """Three loops over the same costs in each iteration."""
    costs = jnp.abs(x @ y.T)
    f, g = jnp.zeros(x.shape[0]), jnp.zeros(y.shape[0])
    for _ in range(2):
        f = -jax.nn.logsumexp(g[None] - costs, axis=1)
        g = -jax.nn.logsumexp(f[:, None] - costs, axis=0)
    return jnp.exp(f[:, None] + g[None] - costs).sum(1)


ARGS = tuple(
    np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for shape in ((60, 16), (40, 16))
)


def stretches_of(flat: FlatJaxpr) -> Stretches:
    return Stretches(flat, rules(flat, parts.works, Known()))


@pytest.fixture(scope="module")
def found() -> tuple[Stretches, Stretch]:
    """The function, and all of it along the rows of the costs."""
    flat = flat_of(transport, *ARGS)
    product = next(e.outputs[0] for e in flat.equations if e.name == "dot_general")
    stretches = stretches_of(flat)
    stretch = stretches.along(range(len(flat.equations)), product, 0)
    assert stretch is not None
    assert stretch.loops > 2
    return stretches, stretch


def crossing(stretches: Stretches, stretch: Stretch) -> Materialized:
    """What is worth it where all else is dear: all blocks of one position."""
    made = worth_materializing(stretches, stretch, 1, 1 << 30, DEAR)
    assert made is not None
    return made


@pytest.mark.long
@settings(max_examples=3, deadline=None)
@example(size=60, share=1)
@example(size=7, share=0.5)
@given(size=st.integers(1, 60), share=st.floats(0, 1))
def test_it_changes_nothing_but_what_is_made_anew(
    found: tuple[Stretches, Stretch], size: int, share: float
):
    stretches, stretch = found
    flat = stretches.flat
    values = crossing(stretches, stretch).values
    written = Materialized(values, int(share * (stretch.length // size)))
    plain, other = (
        evaluated(_in_blocks(flat, stretch, size, each), *ARGS)
        for each in (NOTHING, written)
    )
    assert_same(other, plain, ulps=16)  # XLA may contract other multiplications and sums
    assert_same(other, jax.tree.leaves(jax.jit(transport)(*ARGS)), ulps=64)


def _in_blocks(
    flat: FlatJaxpr, stretch: Stretch, size: int, written: Materialized
) -> FlatJaxpr:
    return with_cuttings(stretches_of(flat), [Blocks(stretch, size, 0, written)])


def test_products_are_made_once_where_they_are_written_down(
    found: tuple[Stretches, Stretch],
):
    stretches, stretch = found
    flat = stretches.flat
    written = crossing(stretches, stretch)
    assert written.blocks == stretch.length

    def products(values: frozenset[int]) -> int:
        steps = (i for each in stretch.passes(flat, values) for i in each.steps)
        return sum(flat.equations[i].name == "dot_general" for i in steps)

    assert products(frozenset()) == stretch.loops
    assert products(written.values) == 1


def test_as_much_is_written_down_as_there_is_room_for(found: tuple[Stretches, Stretch]):
    stretches, stretch = found
    row = 4 * ARGS[1].shape[0]
    for rows in (30, 45, 60):
        made = worth_materializing(stretches, stretch, 5, rows * row, DEAR)
        assert made is not None
        assert made.blocks == rows // 5
    assert worth_materializing(stretches, stretch, 5, 10 * row, DEAR) is None


def test_what_is_cheap_is_made_anew(found: tuple[Stretches, Stretch]):
    assert worth_materializing(*found, 5, 1 << 30, CHEAP) is None


@pytest.mark.long
@settings(max_examples=3, deadline=None)
@example(size=30)
@example(size=7)
@given(size=st.integers(5, 30))
def test_tasks_hand_on_what_later_loops_read(found: tuple[Stretches, Stretch], size: int):
    """As parts of their own, which a plan may have anywhere: they are made once."""
    stretches, stretch = found
    kept = worth_keeping(stretches, stretch, DEAR)
    assert kept is not None
    none, parts_of = frozenset[int](), -(-stretch.length // size)
    counts = []
    for values in (none, kept.values):
        tasks = Tasks(stretch, size, 0, none, none, none, kept=values)
        cut = with_cuttings(stretches, [tasks])
        assert_same(
            evaluated(cut, *ARGS), jax.tree.leaves(jax.jit(transport)(*ARGS)), ulps=64
        )
        counts.append(str([e.name for e in cut.equations]).count("dot_general"))
    assert counts == [stretch.loops * parts_of, parts_of]


def test_what_loops_make_anew_is_less_where_some_is_written_down(
    found: tuple[Stretches, Stretch],
):
    stretches, stretch = found
    flat = stretches.flat
    kept = worth_keeping(stretches, stretch, DEAR)
    assert kept is not None
    assert kept.written_bytes == sum(flat.types[v].nbytes for v in kept.values)
    assert kept.read_bytes > kept.written_bytes
    made_again = [
        materializing.made_again(stretches, stretch, DEAR, s) for s in (1, 0.5, 0)
    ]
    assert [again.share for again in made_again] == sorted(
        (again.share for again in made_again), reverse=True
    )
    whole, half, nothing = made_again
    assert nothing.saved_seconds == 0
    assert whole.read_bytes == 2 * half.read_bytes == kept.read_bytes
    assert half.seconds == pytest.approx(whole.seconds - whole.saved_seconds / 2)
    both = whole + nothing
    assert both.share == pytest.approx(
        whole.saved_seconds / (whole.seconds + nothing.seconds)
    )
    assert materializing.made_again(stretches, stretch, CHEAP).share == 0


def test_rows_of_few_features_are_dear_on_some_devices():
    """A sum over the last axis takes as long for each row, however short that is."""
    rates = DeviceRates(1e9, 1e9, launch_seconds=0.0, row_seconds=1e-6)
    x = np.ones((30, 20, 3), np.float32)
    for axis, rows in ((-1, 600), ((0, 2), 20), (0, 0)):
        (e,) = flat_of(lambda x, axis=axis: x.sum(axis), x).equations
        seconds = rates.computing(e.origin)
        assert seconds == pytest.approx(rows * 1e-6 + costs.flops(e.origin) / 1e9)


def test_ways_that_keep_make_nothing_anew():
    flat = flat_of(transport, *ARGS)
    where = blocks.Where(frozenset(flat.inputs))
    first = next(blocks.cut_along_axes(flat, where, 28_000, DEAR, 1e-9))
    assert first.again is not None
    products = lambda cut: str(cut.equations).count("dot_general")
    ways = blocks.cut_along_axes(flat, where, 28_000, DEAR, 1e-9, False, keep=True)
    kept = next(way for way in ways if way.again is None)
    (cut, *_) = kept.cut
    assert 0 < products(cut) < sum(e.name == "sub" for e in cut.equations)


def test_both_forms_are_ways_to_cut():
    """The one that writes down comes first; they differ in nothing else."""
    flat = flat_of(transport, *ARGS)
    where = blocks.Where(frozenset(flat.inputs))
    arena = 28_000
    ways = next(blocks.cut_along_axes(flat, where, arena, DEAR, 1e-9, anew=False))
    written, plain = ways.cut
    assert len(written.equations) == len(plain.equations)
    count = lambda cut: str(cut.equations).count("dot_general[")
    assert 2 * count(written) < count(plain)
    ways = next(blocks.cut_along_axes(flat, where, arena, CHEAP, 1e-9, anew=False))
    assert len(ways.cut) == 1


def normalised(x: Any, *weights: Any) -> Any:
    """Each layer's outputs are normalised over all rows: a loop over these for each."""
    numbers = ("NWC", "WIO", "NWC")
    for w in weights:
        x = jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers)
        x = jnp.tanh((x - x.mean((0, 1))) * jax.lax.rsqrt(x.var((0, 1)) + 1e-3))
    return jnp.sum(jnp.square(x).mean(0))


LAYERS = tuple(
    np.random.default_rng(i).normal(size=shape).astype(np.float32)
    for i, shape in enumerate(((512, 16, 8), (3, 8, 64), *[(3, 64, 64)] * 6))
)


def test_each_of_many_products_is_kept():
    """Of each layer one, however many there are."""
    flat = flat_of(normalised, *LAYERS)
    stretches = stretches_of(flat)
    stretch = stretches.along(range(len(flat.equations)), flat.inputs[0], 0)
    assert stretch is not None
    count = lambda *values: sum(
        flat.equations[i].name == "conv_general_dilated"
        for each in stretch.passes(flat, *values)
        for i in each.steps
    )
    layers = len(LAYERS) - 1
    assert count() > 3 * layers
    kept = worth_keeping(stretches, stretch, DEAR)
    assert kept is not None
    assert count(kept.values) == layers


@pytest.mark.long
def test_what_tasks_would_make_anew_is_kept_where_all_is_in_parts():
    """Room for what each loop holds is enough, though all together hold more."""
    loss = jax.grad(normalised, tuple(range(1, len(LAYERS))))
    flat = flat_of(loss, *LAYERS)
    where = blocks.Where(frozenset(flat.inputs))
    ways = blocks.cut_along_axes(flat, where, 6 << 20, DEAR, 1e-9)
    first = next(way for way in ways if way.keeps and not way.doubtful)
    count = lambda flat: sum(e.name == "conv_general_dilated" for e in flat.equations)
    (cut, *_) = first.cut
    parts_of = count(cut) / count(flat)
    assert 16 <= parts_of < 17  # all in as many parts, and hardly one of them twice


@pytest.mark.slow
def test_layers_that_are_normalised_in_a_budget():
    loss = jax.grad(normalised, tuple(range(1, len(LAYERS))))
    gpu_bytes = jturnip.peak_bytes(loss, *LAYERS) // 8
    f = jturnip.jit(loss, gpu_bytes)
    assert_same(f(*jturnip.host(LAYERS)), jax.jit(loss)(*LAYERS), ulps=1024)
    assert f.last_run.peak_bytes <= gpu_bytes


@pytest.mark.slow
@pytest.mark.parametrize("share", [2, 3])
def test_costs_that_are_read_again_in_a_budget(share: int):
    gpu_bytes = jturnip.peak_bytes(transport, *ARGS) // share
    f = jturnip.jit(transport, gpu_bytes)
    assert_same(f(*jturnip.host(ARGS)), jax.jit(transport)(*ARGS), ulps=64)
    assert f.last_run.peak_bytes <= gpu_bytes
