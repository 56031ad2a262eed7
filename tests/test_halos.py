"""Networks over one large image: parts of it are read with the positions around them."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, whole_bytes
from jax import lax

import jturnip
from jturnip.frontend.rules import Halo


def numbers(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def conv(x: Any, w: Any, stride: int = 1, apart: int = 1) -> Any:
    n = x.ndim - 2
    names = "DHW"[-n:]
    layout = f"N{names}C", f"{names}IO", f"N{names}C"
    steps, padding = (stride,) * n, "SAME"
    if apart > 1:
        steps, padding = (1,) * n, [(1, apart)] * n
    return lax.conv_general_dilated(
        x, w, steps, padding, (apart,) * n, dimension_numbers=layout
    )


def chain(x: Any, *weights: Any) -> Any:
    for w in weights[:-1]:
        x = jax.nn.relu(conv(x, w))
    return conv(x, weights[-1])


def gradients_of_a_chain(x: Any, *weights: Any) -> Any:
    return jax.grad(lambda *w: jnp.mean(chain(x, *w) ** 2), range(len(weights)))(*weights)


def up_and_down(x: Any, first: Any, second: Any, third: Any, last: Any) -> Any:
    """Convolutions with strides, and their transposes, with what was before beside it."""
    high = jax.nn.relu(conv(x, first))
    low = jax.nn.relu(conv(high, second, stride=2))
    again = conv(low, third, apart=2)
    return conv(jnp.concatenate([jax.nn.relu(again), high], -1), last)


def gradients_of_up_and_down(x: Any, *weights: Any) -> Any:
    loss = lambda *weights: jnp.mean(up_and_down(x, *weights) ** 2)
    return jax.grad(loss, range(len(weights)))(*weights)


def smoothed(x: Any) -> Any:
    """Windows that overlap, over the largest and the sums."""
    for _ in range(3):
        window = 1, 5, 5, 1
        x = lax.reduce_window(x, 0.0, lax.add, window, (1, 1, 1, 1), "SAME") / 25
        x = x + lax.reduce_window(x, -jnp.inf, lax.max, window, (1, 1, 1, 1), "SAME")
    return x


def gradients_of_averages(x: Any, *weights: Any) -> Any:
    """Of what is padded by itself, and of means of windows."""

    def loss(weights: Any) -> Any:
        made = x
        for w in weights:
            made = jnp.pad(made, ((0, 0), (1, 1), (1, 1), (0, 0)))
            made = lax.conv_general_dilated(
                made, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            window = 1, 2, 2, 1
            made = lax.reduce_window(jnp.tanh(made), 0.0, lax.add, window, window, "VALID")
        return jnp.sum(made**2)

    return jax.grad(loss)(weights)


CHAIN = (3, 3, 3, 16), (3, 3, 16, 16), (3, 3, 16, 16), (3, 3, 16, 3)
LADDER = (3, 3, 3, 8), (3, 3, 8, 16), (3, 3, 16, 8), (3, 3, 16, 4)
NETWORKS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "an image": (chain, ((1, 96, 96, 3), *CHAIN)),
    "gradients of an image": (gradients_of_a_chain, ((1, 96, 96, 3), *CHAIN)),
    "a sound": (chain, ((1, 16384, 4), (9, 4, 8), (9, 8, 8), (9, 8, 2))),
    "gradients of a volume": (
        gradients_of_a_chain,
        ((1, 20, 20, 20, 2), (3, 3, 3, 2, 8), (3, 3, 3, 8, 8), (3, 3, 3, 8, 2)),
    ),
    "up and down": (up_and_down, ((1, 96, 96, 3), *LADDER)),
    "gradients of up and down": (gradients_of_up_and_down, ((1, 96, 96, 3), *LADDER)),
    "gradients of averages": (
        gradients_of_averages,
        ((1, 128, 96, 3), (3, 3, 3, 12), (3, 3, 12, 12)),
    ),
    "smoothed": (smoothed, ((1, 256, 192, 2),)),
}


# What is tried in every run; the others take long to compile.
QUICK = {
    ("an image", 4),
    ("a sound", 4),
    ("gradients of up and down", 2),
    ("gradients of averages", 2),
    ("smoothed", 4),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in itertools.product(NETWORKS, (2, 4))
    ],
)
def test_one_image_is_cut_where_its_network_does_not_fit(name: str, share: int):
    fn, shapes = NETWORKS[name]
    args = tuple(numbers(*shape) / np.sqrt(shape[-1]) for shape in shapes)
    compiled = jax.jit(fn).lower(*args).compile()
    gpu_bytes = whole_bytes(compiled) // share
    f = jturnip.jit(fn, gpu_bytes)
    # Sums over an image in another order.
    assert_same(f(*jturnip.host(args)), compiled(*args), ulps=512)
    assert f.last_run.peak_bytes <= gpu_bytes
    assert f.last_run.h2d_bytes > 0


def test_a_chain_of_layers_needs_little_of_each():
    """What is between two layers is there a few rows at a time."""
    args = numbers(1, 256, 64, 3), *(numbers(*w) / 8 for w in CHAIN)
    layer = 256 * 64 * 16 * 4
    # So slow that what moves is what counts, also where others use the cores.
    f = jturnip.jit(chain, layer, link=jturnip.SimulatedLink(1e8, 1e8))
    assert_same(f(*jturnip.host(args)), jax.jit(chain)(*args), ulps=512)
    assert f.last_run.h2d_bytes + f.last_run.d2h_bytes < layer


def test_what_is_read_of_an_image_lies_in_it():
    """A window of three positions with one of padding, then one with strides, then one over
    an image with zeros between."""
    same = Halo(at=0, dim=1, size=8, positions=8, step=1, reach=3, before=1, dilation=1)
    assert same.of(0, 4) == (0, 5, (1, 0))
    assert same.of(4, 4) == (3, 5, (0, 1))
    assert same.of(2, 3) == (1, 5, (0, 0))
    strided = Halo(at=0, dim=1, size=8, positions=4, step=2, reach=3, before=0, dilation=1)
    assert strided.of(0, 2) == (0, 5, (0, 0))
    assert strided.of(2, 2) == (4, 4, (0, 1))
    between = Halo(at=0, dim=1, size=4, positions=8, step=1, reach=3, before=1, dilation=2)
    assert between.of(0, 4) == (0, 3, (1, 0))
    assert between.of(4, 4) == (2, 2, (1, 2))
