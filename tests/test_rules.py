"""The rules of equations' axes, held against the equations: done part by part and put
together, or combined, each gives what it gives at once."""

import collections
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import large_intermediates
import numpy as np
import pytest
from flat import all_values, flat_of
from hypothesis import assume, given, settings, strategies as st
from jax import lax

from jturnip.frontend import axes, parts
from jturnip.frontend.rules import Rule
from jturnip.frontend.stretches import Along
from jturnip.frontend.values import Constant, Equation, FlatJaxpr, Type
from tests.conformance.registry import Case, programs


# Equations of one primitive that are looked at, of the small programs.
_APIECE = 1
_SMALL = ("arrays",)


class Checked:
    """Looks at each distinct equation of functions once."""

    def __init__(self, apiece: int | None = None):
        self.labels = self.halos = 0
        self._known = axes.Known()
        self._seen: set[Any] = set()
        self._apiece = apiece
        self._times: collections.Counter[str] = collections.Counter()

    def function(self, fn: Callable[..., Any], args: Any) -> None:
        """All equations that have a rule, with the operands they have in a function."""
        flat = flat_of(fn, *args)
        if len(jax.tree.leaves(args)) != len(flat.inputs):
            return
        if any(e.effects for e in flat.equations):
            return
        of_equation = axes.rules(flat, parts.works, self._known)
        values = all_values(flat, *map(jnp.asarray, jax.tree.leaves(args)))
        for e, rule in zip(flat.equations, of_equation, strict=True):
            if rule is not None and self._is_new(e, flat):
                read = [v.value if isinstance(v, Constant) else values[v] for v in e.inputs]
                self._equation(flat, e, rule, read, [values[v] for v in e.outputs])

    def _is_new(self, e: Equation, flat: FlatJaxpr) -> bool:
        key = axes._key(e, flat, {})
        if key in self._seen or self._times[e.name] == self._apiece:
            return False
        self._seen.add(key)
        self._times[e.name] += 1
        return True

    def _equation(
        self,
        flat: FlatJaxpr,
        e: Equation,
        rule: Rule,
        read: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        types = flat.operand_types(e)
        written = [flat.types[v] for v in e.outputs]
        labels = {x for each in (*rule.operands, *rule.results) for x in each}
        for label in labels - {None}:
            assert label is not None
            # One executable instead of one for each of its many small steps.
            parts_of = functools.partial(in_two, e, rule, label, types, written)
            found = jax.jit(parts_of)(read)
            for got, want in zip(found, results, strict=True):
                assert_near(got, want, f"{e.name} {types} along {label} of {rule}")
            self.labels += 1
            self.halos += label in rule.halos


def in_two(
    e: Equation,
    rule: Rule,
    label: int,
    types: Sequence[Type],
    written: Sequence[Type],
    read: Sequence[Any],
) -> list[Any]:
    """What an equation gives if it is done in two parts along a label."""
    dim = lambda labels: labels.index(label) if label in labels else None
    sides = [
        *zip(types, rule.operands, strict=True),
        *zip(written, rule.results, strict=True),
    ]
    length = math.gcd(*(t.shape[d] for t, x in sides if (d := dim(x)) is not None))

    def cut(t: Type, labels: Any) -> tuple[int, int] | None:
        d = dim(labels)
        return None if d is None else (d, t.shape[d] // length)

    of_operands = [cut(*side) for side in zip(types, rule.operands, strict=True)]
    of_results = [cut(*side) for side in zip(written, rule.results, strict=True)]
    halo = rule.halos.get(label)
    made = []
    size = -(-length // 2)
    for low in range(0, length, size):
        count = min(size, length - low)
        padding = None
        pieces = [
            array
            if c is None
            else jax.lax.slice_in_dim(array, low * c[1], (low + count) * c[1], axis=c[0])
            for array, c in zip(read, of_operands, strict=True)
        ]
        if halo is not None:
            scale = halo.positions // length
            first, many, around = halo.of(low * scale, count * scale)
            pieces[0] = lax.slice_in_dim(read[0], first, first + many, axis=halo.dim)
            padding = halo.at, around
        along = Along(tuple(of_operands), of_results[0], padding)
        shapes = [
            t.shape if c is None else t.part(c[0], count * c[1]).shape
            for t, c in zip(written, of_results, strict=True)
        ]
        made.append(parts._apply(e, pieces, shapes, along, jnp.int32(low)))
    hows = rule.reduced.get(label, (None,) * len(of_results))
    return [
        jnp.concatenate(column, cut[0])
        if cut is not None
        else functools.reduce(functools.partial(parts.combined, how or ""), column)
        for column, cut, how in zip(zip(*made, strict=True), of_results, hows, strict=True)
    ]


def assert_near(got: Any, want: Any, what: str) -> None:
    if jnp.issubdtype(want.dtype, jax.dtypes.extended):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    # Sums in another order, of numbers with as few as eight bits.
    of = np.finfo(np.float32) if want.dtype.itemsize >= 4 else jnp.finfo(jnp.bfloat16)
    kind = np.complex128 if jnp.iscomplexobj(want) else np.float64
    got, want = np.asarray(got).astype(kind), np.asarray(want).astype(kind)
    largest = np.max(np.abs(want), where=np.isfinite(want), initial=1.0)
    np.testing.assert_allclose(got, want, rtol=0, atol=512 * of.eps * largest, err_msg=what)


def small_programs(areas: Sequence[str] | None = None) -> Iterator[Any]:
    for program in programs():
        if program.known or program.raises or program.area in ("failures", "effects"):
            continue
        if areas is None or program.area in areas:
            with program.context():
                built = program.build()
                if isinstance(built, Case) and not built.keywords:
                    yield built


@pytest.mark.long
def test_parts_are_what_the_rules_say():
    checked = Checked(_APIECE)
    for case in small_programs(_SMALL):
        checked.function(case.fn, case.args)
    assert checked.labels > 30


@pytest.mark.slow
def test_parts_are_what_the_rules_say_in_all_programs():
    checked = Checked()
    for case in small_programs():
        checked.function(case.fn, case.args)
    for case in large_intermediates.CASES.values():
        checked.function(case.fn, case.make())
    assert checked.labels > 2000


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Convolutions of one image of two channels, with operands."""
    pairs = lambda least, most: st.tuples(*[st.integers(least, most)] * 2)
    strides, apart, dilated = draw(pairs(1, 3)), draw(pairs(1, 2)), draw(pairs(1, 2))
    window, image, padding = draw(pairs(1, 4)), draw(pairs(9, 20)), draw(pairs(0, 3))
    conv = lambda x, w: lax.conv_general_dilated(
        x, w, strides, (padding, padding[::-1]), apart, dilated, ("NHWC", "HWIO", "NHWC")
    )
    made = np.random.default_rng(draw(st.integers(0, 99)))
    args = made.normal(size=(1, *image, 2)), made.normal(size=(*window, 2, 3))
    return conv, tuple(x.astype(np.float32) for x in args)


@pytest.mark.long
@settings(max_examples=5, deadline=None)
@given(convolutions())
def test_parts_of_images_are_read_with_their_halos(drawn: Any):
    """With any strides, padding and dilation; and so are their gradients."""
    conv, (x, w) = drawn
    y = jax.eval_shape(conv, x, w)
    assume(min(y.shape[1:3]) > max(w.shape[:2]))
    checked = Checked()
    checked.function(conv, (x, w))
    checked.function(
        lambda x, w: jax.vjp(conv, x, w)[1](jnp.cos(jnp.ones(y.shape).cumsum(1))), (x, w)
    )
    assert checked.labels > 0


@pytest.mark.long
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [1, 2])
def test_halos_are_found_where_windows_slide(padding: str, stride: int):
    """Over one image: along both its dimensions, forward and for the gradients of image
    and kernel."""
    conv = lambda x, w: lax.conv(x, w, (stride, stride), padding)
    args = random(1, 3, 12, 14), random(4, 3, 3, 3)
    checked = Checked()
    checked.function(conv, args)
    assert checked.halos == 2
    gradients = jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), (0, 1))
    checked.function(gradients, args)
    assert checked.halos == 6
    pooled = lambda x: lax.reduce_window(
        x, 0.0, lax.add, (1, 1, 3, 3), (1, 1, 2, 2), padding
    )
    checked.function(pooled, args[:1])
    assert checked.halos == 8
    padded = lambda x: lax.pad(x, 0.0, [(0, 0, 0), (0, 0, 0), (2, 3, 0), (-1, 1, 1)])
    checked.function(padded, args[:1])
    assert checked.halos == 10


def test_windows_over_several_examples_are_not_cut():
    """Gradients of a convolution's weights slide one operand over the other."""

    def fn(x: Any, g: Any) -> Any:
        conv = lambda w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")
        return jax.vjp(conv, jnp.zeros((4, 3, 3, 3)))[1](g)[0]

    random = np.random.default_rng(0)
    args = tuple(random.normal(size=(2, n, 8, 8)).astype(np.float32) for n in (3, 4))
    checked = Checked()
    checked.function(fn, args)
    assert checked.labels > 0


WINDOW = (1, 3, 1)


def _largest(x: Any, window: Sequence[int], strides: Sequence[int]) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "VALID")


def _sum_and_product(one: Any, other: Any) -> Any:
    return one[0] + other[0], one[1] * other[1]


def _series(x: Any) -> Any:
    return (
        lax.igamma(0.1 + jnp.abs(x), 9 * jnp.abs(x[::-1])),
        lax.igammac(0.1 + jnp.abs(x), jnp.abs(x[::-1])),
        lax.igamma_grad_a(0.1 + jnp.abs(x), jnp.abs(x[::-1])),
        lax.betainc(1 + jnp.abs(x), 9 * jnp.abs(x[::-1]), lax.logistic(x)),
    )


POSITIONAL: dict[str, Callable[..., Any]] = {
    "shifted forward": lambda x: lax.pad(x, 0.0, [(0, 0, 0), (1, -1, 0), (0, 0, 0)]),
    "shifted back": lambda x: lax.pad(x, 0.0, [(-2, 2, 0), (0, 0, 0), (0, 0, 0)]),
    "spread out": lambda x: lax.pad(x, 0.0, [(0, 0, 1), (0, 0, 0), (1, 1, 0)]),
    "a row written": lambda x: lax.dynamic_update_slice(x, x[:1] + 1, (3, 0, 0)),
    "a column written": lambda x: lax.dynamic_update_slice(x, x[:, :1], (0, 5, 0)),
    "a corner written": lambda x: lax.dynamic_update_slice(x, -x[:3, :2, :4], (4, 1, 2)),
    "written after the end": lambda x: lax.dynamic_update_slice(x, -x[:3], (99, 0, 0)),
    "read by signed 8 bits": lambda x: lax.dynamic_slice(
        jnp.tile(x, (70, 1, 1)), tuple(map(jnp.int8, (100, 0, 0))), (200, 6, 8)
    ),
    "numbered in 16 bits": lambda x: (
        lax.iota(jnp.bfloat16, 2000) + x[0, 0, 0].astype(jnp.bfloat16)
    ),
    "rows with signs": lambda x: 1 / (x * 0 * jnp.sign(x))[jnp.array([1, 5, 7, 0])],
    "largest of windows that overlap": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (3, 1, 3), (1, 1, 1), "SAME"
    ),
    "written by 8 bits": lambda x: lax.dynamic_update_slice(
        jnp.tile(x, (30, 1, 1)), x[:2], tuple(map(jnp.uint8, (230, 0, 0)))
    ),
    "read by 8 bits": lambda x: lax.dynamic_slice(
        jnp.tile(x, (70, 1, 1)), tuple(map(jnp.uint8, (3, 0, 0))), (500, 6, 8)
    ),
    "read before the begin": lambda x: lax.dynamic_slice(
        x, tuple(map(jnp.int32, (-2, 0, 1))), (6, 6, 4), allow_negative_indices=False
    ),
    "one row read": lambda x: lax.dynamic_slice(x, (5, 0, 0), (1, 6, 8)),
    "reversed": lambda x: x[::-1, :, ::-1],
    "rolled": lambda x: jnp.roll(x, 1, 0),
    "largest of windows": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, WINDOW, WINDOW, "SAME"
    ),
    "gradients of those": jax.grad(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, WINDOW, (1, 1, 1), "SAME").sum()
    ),
    "gradients of windows side by side": jax.grad(
        lambda x: jnp.sum(_largest(x, WINDOW, WINDOW) * jnp.arange(8.0))
    ),
    "gradients of windows that overlap": jax.grad(
        lambda x: jnp.sum(_largest(x, (4, 3, 1), (2, 3, 1)) * jnp.arange(8.0))
    ),
    "tangents of those": lambda x: jax.jvp(
        lambda x: _largest(x, WINDOW, WINDOW), (x,), (x[::-1],)
    ),
    "windows of two arrays": lambda x: lax.reduce_window(
        (x, -x), (0.0, 1.0), _sum_and_product, WINDOW, WINDOW, "VALID"
    ),
    "a sum and a product": lambda x: lax.reduce(
        (x, -x), (np.float32(0), np.float32(1)), _sum_and_product, (1,)
    ),
    **{
        f"scattered to {how}": lambda x, how=how: getattr(
            (x * 3)[:, 0].at[jnp.array([5, 1, 1, -2, 5, 99, 0, 3])], how
        )(1 + x[:, 2], mode="drop")
        for how in ("add", "mul", "min", "max", "subtract")
    },
    # Along one dimension: each takes a second to compile.
    "series of each": lambda x: _series(x[0, :, 0]),
    "sums so far": lambda x: lax.cumsum(x, 1),
    "put together": lambda x: lax.concatenate([x, x + 1], 1),
    "sorted": lambda x: lax.sort((x, -x), dimension=1, num_keys=1),
    "largest": lambda x: lax.top_k(x, 3),
    "where the least is": lambda x: lax.argmin(x, 1, jnp.int32),
    "spectra": lambda x: jnp.fft.rfft(x, axis=1),
    "held together": lambda x: lax.optimization_barrier((x + 1, x)),
    "nothing": lambda x: jnp.square(x[:0]),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n == "series of each"))
        for n in POSITIONAL
    ],
)
def test_parts_have_their_positions(name: str):
    """What a single position does not show."""
    x = np.random.default_rng(0).normal(size=(8, 6, 8)).astype(np.float32)
    Checked().function(POSITIONAL[name], (x,))


def test_what_cannot_be_combined_is_not_cut():
    """A product of truth values is an `or` of `and`s, and nothing adds those."""
    x = jnp.ones((8, 8), bool)
    checked = Checked()
    checked.function(lambda x: jax.lax.dot(x, x), (x,))
    assert checked.labels == 2


def sampled(x: Any, keys: Any, matrix: Any) -> Any:
    """Chains of a sampler: a loop within a loop, each chain with random bits of its own."""

    def chain(x: Any, key: Any) -> Any:
        def step(carried: Any, _: Any) -> Any:
            x, key, n = carried
            key, of_step = jax.random.split(key)
            y, _ = jax.lax.scan(
                lambda y, _: (y - 0.1 * matrix @ y, None),
                x + jax.random.normal(of_step, x.shape),
                length=2,
            )
            below = jnp.log(jax.random.uniform(jax.random.fold_in(of_step, n))) < y[0]
            x = jnp.where(below, y, x)
            return (x, key, n + 1), x.sum()

        (x, _, n), sums = jax.lax.scan(step, (x, key, 0), length=3)
        return x, n, sums

    return jax.vmap(chain, out_axes=(0, None, 0))(x, keys)


def through_time(rows: Any, weights: Any, first: Any) -> Any:
    """Gradients of weights that each step adds to, and sums over a batch of each step."""

    def loss(weights: Any) -> Any:
        def step(state: Any, row: Any) -> Any:
            state = jnp.tanh(row @ weights[0] + state @ weights[1])
            return state, state.sum(0)

        state, sums = jax.lax.scan(step, first, rows)
        return jnp.sum(state**2), sums

    return jax.grad(loss, has_aux=True)(weights)


def random(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize("typed", [False, True])
def test_parts_of_scans(typed: bool):
    seeds = np.arange(480, dtype=np.uint32)
    keys = jax.vmap(jax.random.key if typed else jax.random.PRNGKey)(seeds)
    checked = Checked()
    checked.function(sampled, (random(480, 4), keys, random(4, 4)))
    assert checked._times["scan"] == 1
    weights = random(3, 4), random(4, 4)
    checked.function(through_time, (random(5, 480, 3), weights, random(480, 4)))
    assert checked._times["scan"] == 3


def test_sums_of_scans_are_not_cut_where_more_is_made_of_them():
    x = random(5, 480, 3)

    def scans(step: Callable[[Any, Any], Any], first: Any) -> bool:
        flat = flat_of(lambda x: jax.lax.scan(step, first, x), x)
        known = axes.rules(flat, parts.works, axes.Known())
        ((_, rule),) = (
            (e, rule)
            for e, rule in zip(flat.equations, known, strict=True)
            if e.name == "scan"
        )
        batch = rule and [each[1] for each in rule.operands if len(each) == 3]
        return bool(batch) and batch != [None]

    zero = jnp.zeros(3)
    assert scans(lambda total, row: (total + row.sum(0), None), jnp.ones(3))
    assert scans(lambda total, row: (0.5 * total - row.sum(0), total / 3), jnp.ones(3))
    # A product of sums is no sum of products; nor is what is added to one of each part.
    assert not scans(lambda total, row: (total * total + row.sum(0), None), zero)
    assert not scans(lambda total, row: (total + row.sum(0) + 1, None), zero)
    assert not scans(lambda total, row: (jnp.tanh(total) + row.sum(0), None), zero)
    assert not scans(lambda total, row: (1 - (total + row.sum(0)), None), zero)
    assert not scans(lambda total, row: (total + row.sum(0), row + total), zero)
    assert not scans(lambda most, row: (jnp.maximum(most, row.max(0)), None), zero)
    # Each iteration mixes the positions.
    whole = lambda state, row: (state - state.mean(0) + row, None)
    assert not scans(whole, jnp.zeros((480, 3)))
    # What is not cut is done again for each part: here that is nearly all.
    again = lambda state, row: (jnp.tanh(state @ state), row * 2)
    assert not scans(again, jnp.ones((30, 30)))
    # What takes some weights out of all is hardly any work, whatever it reads.
    weights = jnp.asarray(random(2000, 3))
    some = lambda state, row: (jnp.tanh(state + row @ weights[7:10].T), None)
    assert scans(some, jnp.zeros((480, 3)))


def roots(a: Any, keys: Any, n: Any) -> Any:
    """Each row goes on until it is done, and has a loop within its loop; then all rows do
    some steps more."""

    def root(a: Any, key: Any) -> Any:
        def step(s: Any) -> Any:
            x, key, n = s
            key, of_step = jax.random.split(key)
            x = lax.while_loop(lambda x: jnp.abs(x).max() > 2, lambda x: x / 2, x)
            return x - (x**3 - a) * jax.random.uniform(of_step) / 4, key, n + 1

        goes_on = lambda s: (jnp.abs(s[0] ** 3 - a).max() > 0.05) & (s[2] < 40)
        x, _, n = lax.while_loop(goes_on, step, (a * 9, key, 0))
        return x, n

    x, steps = jax.vmap(root)(a, keys)
    return lax.fori_loop(0, n, lambda i, x: jnp.sin(x) * i, x), steps


@pytest.mark.long
def test_parts_of_whiles():
    keys = jax.vmap(jax.random.key)(np.arange(50, dtype=np.uint32))
    checked = Checked()
    checked.function(roots, (random(50, 2), keys, np.int32(3)))
    assert checked._times["while"] == 2
    x = random(50, 2)
    for goes_on in (lambda x: jnp.abs(x).max() > 1e-2, lambda x: x[3, 1] ** 2 > 1e-4):
        # All positions decide together: none can be taken through by itself.
        checked.function(lambda x, g=goes_on: lax.while_loop(g, lambda x: x / 2, x), (x,))
    assert checked._times["while"] == 2
    whole = lambda x: x / 2 - x.mean()
    checked.function(
        lambda x: lax.fori_loop(0, jnp.int32(x[0, 0]), lambda _, x: whole(x), x), (x,)
    )
    assert checked._times["while"] == 2


@pytest.mark.long
@pytest.mark.parametrize("rows", [256, 640])
def test_narrow_indices_find_their_rows_in_every_part(rows: int):
    """The end of the last part, or the begin of another, is none of their numbers."""
    table = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)
    indices = np.arange(0, 256, 5).astype(np.uint8)

    def fn(table: Any, indices: Any) -> Any:
        taken = lambda t: jnp.take(t, indices, axis=0, mode="clip")
        return taken(table), jax.grad(lambda t: jnp.sum(taken(t) ** 2))(table)

    checked = Checked()
    checked.function(fn, (table, indices))
    assert {"gather", "scatter-add"} <= checked._times.keys()


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_what_windows_have_all_of_is_cut_though_it_is_indexed(mode: str):
    """As frames of a signal are: the index along all channels can only be 0, and what it
    is otherwise is said by the mode, for parts as well."""
    mode_of = lax.GatherScatterMode.from_any(mode)
    places = [0] if mode == "promise_in_bounds" else [-1, 0, 2]
    at = np.array([[row, start] for row in places for start in (0, 3, 7)], np.int32)
    of_gather = lax.GatherDimensionNumbers((1, 2), (), (0, 1))
    of_scatter = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))

    def frames(x: Any, at: Any) -> Any:
        return lax.gather(x, at, of_gather, (4, 5), mode=mode_of)

    def overlapping(x: Any, at: Any, frames: Any) -> Any:
        return lax.scatter_add(x, at, frames, of_scatter, mode=mode_of)

    x = random(4, 12)
    checked = Checked()
    checked.function(frames, (x, at))
    checked.function(overlapping, (x, at, random(len(at), 4, 5)))
    assert checked.labels == 4  # frames and channels of each
    for fn, args in ((frames, (x, at)), (overlapping, (x, at, random(len(at), 4, 5)))):
        flat = flat_of(fn, *args)
        (rule,) = axes.rules(flat, parts.works, axes.Known())
        assert rule is not None
        assert rule.operands[0][0] is not None
        assert rule.operands[0][0] in rule.results[0]
