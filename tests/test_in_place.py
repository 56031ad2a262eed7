"""Loops that change what they carry where it is (`frontend/in_place.py`)."""

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, unconstrained_peak
from jax import lax

import jturnip
from jturnip.frontend.in_place import in_place
from jturnip.frontend.inline import inline
from jturnip.frontend.merging import merged
from jturnip.frontend.values import FlatJaxpr, evaluated


N = 64
BARRIER = "optimization_barrier"


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def body_of(body: Callable[..., Any], *carried: Any) -> FlatJaxpr:
    """A loop's body: of a number, and of what is carried."""
    return merged(inline(jax.make_jaxpr(body)(jnp.int32(0), *carried)))


def changed(flat: FlatJaxpr, least: int = 4096) -> FlatJaxpr | None:
    return in_place(
        flat, list(zip(flat.inputs[1:], flat.result_values, strict=False)), least
    )


def barriers(flat: FlatJaxpr | None) -> int:
    return 0 if flat is None else sum(e.name == BARRIER for e in flat.equations)


# -- bodies ----------------------------------------------------------------------------


def paths(k: Any, d: Any, stops: Any) -> Any:
    """Floyd and Warshall's, with the next stop of each pair."""
    via = d[:, k, None] + d[k]
    better = via < d
    return jnp.where(better, via, d), jnp.where(better, stops[:, k, None], stops)


def elimination(k: Any, a: Any, inverse: Any) -> Any:
    row, of_inverse = a[k] / a[k, k], inverse[k] / a[k, k]
    factors = a[:, k].at[k].set(0)
    return (
        (a - factors[:, None] * row).at[k].set(row),
        (inverse - factors[:, None] * of_inverse).at[k].set(of_inverse),
    )


def orthogonal(k: Any, q: Any) -> Any:
    v = q[:, k] / jnp.linalg.norm(q[:, k])
    q = q.at[:, k].set(v)
    return (q - jnp.outer(v, jnp.where(jnp.arange(q.shape[1]) > k, v @ q, 0)),)


def rotation(t: Any, a: Any) -> Any:
    c, s = jnp.cos(t * 0.1), jnp.sin(t * 0.1)
    i = t % (a.shape[0] - 1)
    x, y = a[i], a[i + 1]
    a = a.at[i].set(c * x - s * y).at[i + 1].set(s * x + c * y)
    x, y = a[:, i], a[:, i + 1]
    return (a.at[:, i].set(c * x - s * y).at[:, i + 1].set(s * x + c * y),)


def balanced(t: Any, p: Any) -> Any:
    del t
    p = p / p.sum(1, keepdims=True)
    return (p / p.sum(0),)


def leapfrog(t: Any, q: Any, p: Any) -> Any:
    del t
    p = p - 0.1 * jnp.sin(q) * jnp.tanh(jnp.mean(p))
    return q + 0.1 * p, p


def inverse_hessian(t: Any, x: Any, h: Any) -> Any:
    """A rank-two update, as of BFGS."""
    g = x + jnp.cos(t.astype(x.dtype))
    hg = h @ g
    return x - 0.1 * hg, h - 0.01 * (jnp.outer(g, hg) + jnp.outer(hg, g))


BODIES: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
    "paths": (
        paths,
        [np.abs(numbers(N, N)), np.arange(N * N, dtype=np.int32).reshape(N, N)],
    ),
    "elimination": (elimination, [numbers(N, N) / 9 + 3 * np.eye(N, dtype=np.float32)] * 2),
    "orthogonal": (orthogonal, [numbers(N, N)]),
    "rotation": (rotation, [numbers(N, N)]),
    "balanced": (balanced, [np.abs(numbers(N, N)) + 0.1]),
    "leapfrog": (leapfrog, [numbers(N, N), numbers(N, N, seed=1)]),
    "inverse hessian": (inverse_hessian, [numbers(N), np.eye(N, dtype=np.float32)]),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_gives_the_same(name: str):
    body, carried = BODIES[name]
    flat = body_of(body, *carried)
    made = changed(flat)
    assert barriers(made)
    assert made is not None
    for k in (0, 3, N - 1):
        assert_same(
            evaluated(made, np.int32(k), *carried),
            evaluated(flat, np.int32(k), *carried),
            0,
        )


def test_what_reads_another_value_changes_before_that_does():
    """Next stops read both; distances are written last, of what was there."""
    body, carried = BODIES["paths"]
    made = changed(body_of(body, *carried))
    assert made is not None
    d, stops = made.inputs[1:]
    first, last = (e for e in made.equations if e.name == BARRIER)
    assert first.inputs[0] == stops
    assert last.inputs[0] == d
    new_stops = made.result_values[1]
    assert new_stops in last.outputs  # so it is there by then


@pytest.mark.parametrize(
    "body",
    [
        lambda t, x: (x * 2,),  # XLA does so anyway
        lambda t, x: (x.T + x,),
        lambda t, x: (jnp.roll(x, 1, 0) + x,),
        lambda t, x: (x @ x,),
        lambda t, x: (jnp.cumsum(x, 0) * jnp.sum(x) + x.T,),
        lambda t, x: (jnp.sort(x, 0),),
        lambda t, x: (x - x[t], x.T * 2),  # what is stacked would be written down for it
    ],
)
def test_what_cannot_be_or_is_anyway_stays(body: Callable[..., Any]):
    assert changed(body_of(body, numbers(N, N))) is None


def test_two_that_wait_for_one_another_are_left_to_xla():
    swapped = lambda t, x, y: (x + y * x[t], y - x * y[t])
    assert changed(body_of(swapped, numbers(N, N), numbers(N, N))) is None


def test_others_change_though_two_wait_for_one_another():
    body = lambda t, x, y, z: (x + y * x[t], y - x * y[t], z - z[t])
    made = changed(body_of(body, *(numbers(N, N, seed=i) for i in range(3))))
    assert made is not None
    (barrier,) = (e for e in made.equations if e.name == BARRIER)
    assert barrier.inputs[0] == made.inputs[3]


def test_small_values_are_left_alone():
    body, carried = BODIES["paths"]
    assert changed(body_of(body, *carried), least=1 << 20) is None


STEPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "row": lambda k, x, y: x - 0.1 * x[k],
    "column": lambda k, x, y: x + 0.1 * y[:, k, None],
    "sum": lambda k, x, y: x / (1 + jnp.abs(x).sum(1, keepdims=True)),
    "other": lambda k, x, y: jnp.where(y > 0, x, -y),
    "set": lambda k, x, y: x.at[k].set(y[k] + x[(k + 1) % len(x)]),
    "product": lambda k, x, y: x - 0.01 * jnp.outer(y @ jnp.ones(len(x)), x[k]),
    "sine": lambda k, x, y: jnp.sin(x),
}


@st.composite
def bodies(draw: Any) -> Callable[..., Any]:
    """Two matrices that are changed by rows, columns, sums and each other, in turn."""
    steps = st.tuples(st.sampled_from([0, 1]), st.sampled_from(sorted(STEPS)))
    chosen = draw(st.lists(steps, min_size=1, max_size=6))
    stacks = draw(st.booleans())

    def body(k: Any, *both: Any) -> Any:
        values = list(both)
        for at, name in chosen:
            values[at] = STEPS[name](k, values[at], values[1 - at])
        return (*values, values[0].sum(0)) if stacks else tuple(values)

    return body


@pytest.mark.long
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(bodies(), st.integers(0, 31))
def test_whatever_changes_gives_the_same(body: Callable[..., Any], k: int):
    both = jnp.asarray(numbers(32, 32)), jnp.asarray(numbers(32, 32, seed=1))
    flat = body_of(body, *both)
    made = changed(flat, least=1024)
    if made is not None:
        got, expected = (evaluated(each, np.int32(k), *both) for each in (made, flat))
        assert_same(got, expected, 0)


# -- in a budget -----------------------------------------------------------------------


def xla_finds_the_order() -> bool:
    """Whether XLA changes values where they are if barriers say in which order. That of jax
    0.10 for the CPU copies all the same."""
    body, carried = BODIES["paths"]
    flat = changed(body_of(body, *carried))
    assert flat is not None
    loop = lambda *s: lax.fori_loop(0, 4, lambda k, s: tuple(evaluated(flat, k, *s)), s)
    compiled = jax.jit(loop, donate_argnums=(0, 1)).lower(*carried).compile()
    figures = compiled.memory_analysis()
    assert figures is not None
    return figures.temp_size_in_bytes < carried[0].nbytes


def counted(count: int, step: Callable[..., Any], first: Any) -> Any:
    return lax.fori_loop(0, count, step, first)


def while_less(count: int, step: Callable[..., Any], first: Any) -> Any:
    """The same in a loop that says nothing of how often it runs."""
    go_on = lambda s: (s[0] < count) & (s[0] >= 0)
    next_of = lambda s: (s[0] + 1, step(s[0], s[1]))
    return lax.while_loop(go_on, next_of, (jnp.int32(0), first))[1]


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("paths", counted),
        ("paths", while_less),
        ("orthogonal", counted),
        ("rotation", counted),
        ("balanced", counted),
    ],
)
def test_what_is_carried_takes_its_place_once(name: str, loop: Callable[..., Any]):
    """In a half of the peak, driven, all of it was moved in each iteration or copied."""
    if not xla_finds_the_order():
        pytest.skip("XLA copies whatever the order")
    body, carried = BODIES[name]
    large = [np.tile(x, (4, 4)) if x.ndim == 2 else x for x in carried]
    if name == "paths":
        large[0] = np.abs(numbers(*large[0].shape))

    def fn(*s: Any) -> Any:
        return loop(24, lambda k, s: tuple(body(k, *s)), s)

    peak = unconstrained_peak(fn, *large)
    budget = max(peak // 2, int(1.1 * sum(x.nbytes for x in large)))
    assert budget < 0.75 * peak
    f = jturnip.jit(fn, budget)
    assert_same(f(*jturnip.host(large)), jax.jit(fn)(*large), ulps=64)
    assert f.last_run.peak_bytes <= budget
    ends = 2 * sum(x.nbytes for x in large)
    assert f.last_run.h2d_bytes + f.last_run.d2h_bytes <= ends
