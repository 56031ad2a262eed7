"""Functions whose intermediates are much larger than their arguments and results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """A function, and what makes its arguments, as numpy arrays."""

    fn: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]


CASES: dict[str, Case] = {}


def case(*shapes: tuple[int, ...] | Callable[[np.random.Generator], Any]) -> Any:
    """Registers a function with random arguments of these shapes, or what makes them."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        def make() -> tuple[Any, ...]:
            random = np.random.default_rng(0)
            return tuple(
                shape(random)
                if callable(shape)
                else random.normal(size=shape).astype(np.float32) / 4
                for shape in shapes
            )

        CASES[fn.__name__.replace("_", " ")] = Case(fn, make)
        return fn

    return register


def integers(below: int, *shape: int) -> Callable[[np.random.Generator], Any]:
    return lambda random: random.integers(0, below, shape, np.int32)


# -- attention -------------------------------------------------------------------------

_HEADS = (4, 256, 32)


@case(_HEADS, _HEADS, _HEADS)
def causal_attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("hqd,hkd->hqk", q, k)
    mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    return jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ v


@case((8, 256, 16), (2, 256, 16), (2, 256, 16))
def grouped_attention(q: Any, k: Any, v: Any) -> Any:
    q = q.reshape(2, 4, *q.shape[1:])
    scores = jnp.einsum("ghqd,gkd->ghqk", q, k)
    return jnp.einsum("ghqk,gkd->ghqd", jax.nn.softmax(scores), v)


@case(_HEADS, _HEADS, _HEADS, (4, 256, 256))
def attention_with_a_bias(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k) + bias) @ v


@case(_HEADS, _HEADS, _HEADS)
def gradients_of_attention(q: Any, k: Any, v: Any) -> Any:
    loss = lambda q, k, v: jnp.sum(jnp.square(causal_attention(q, k, v)))
    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


# -- kernels and distances -------------------------------------------------------------


def distances(x: Any, y: Any) -> Any:
    return jnp.sum(jnp.square(x[:, None] - y[None]), axis=-1)


@case((512, 3), (512, 3), (512,))
def a_kernel_times_a_vector(x: Any, y: Any, v: Any) -> Any:
    return jnp.exp(-distances(x, y)) @ v


@case((512, 3), (512, 3), (512, 8))
def a_kernel_times_a_matrix(x: Any, y: Any, v: Any) -> Any:
    return jnp.exp(-distances(x, y)) @ v


@case((512, 8), (512, 8))
def nearest_neighbours(x: Any, y: Any) -> Any:
    return jax.lax.top_k(-distances(x, y), 5)


@case((128, 3), (128,))
def a_gaussian_process(x: Any, y: Any) -> Any:
    kernel = jnp.exp(-distances(x, x)) + 0.5 * jnp.eye(x.shape[0])
    lower = jnp.linalg.cholesky(kernel)
    solved = jax.scipy.linalg.cho_solve((lower, True), y)
    return y @ solved / 2 + jnp.sum(jnp.log(jnp.diag(lower)))


# -- losses and statistics -------------------------------------------------------------


@case((128, 32), (32, 2048), integers(2048, 128))
def cross_entropy_over_a_vocabulary(x: Any, w: Any, labels: Any) -> Any:
    return -jnp.mean(jax.nn.log_softmax(x @ w)[jnp.arange(labels.shape[0]), labels])


@case((128, 32), (32, 2048), integers(2048, 128))
def gradients_of_cross_entropy(x: Any, w: Any, labels: Any) -> Any:
    return jax.grad(cross_entropy_over_a_vocabulary, argnums=(0, 1))(x, w, labels)


@case(integers(512, 2048))
def a_histogram_by_one_hot(x: Any) -> Any:
    return jnp.sum(jax.nn.one_hot(x, 512), axis=0)


@case((64, 32), (32, 32), (32, 32))
def gradients_per_example(x: Any, a: Any, b: Any) -> Any:
    loss = lambda a, b, x: jnp.sum(jnp.tanh(jnp.tanh(x @ a) @ b))
    each = jax.vmap(jax.grad(loss, argnums=(0, 1)), (None, None, 0))(a, b, x)
    return jax.tree.map(lambda g: jnp.sqrt(jnp.sum(jnp.square(g), axis=(1, 2))), each)


@case((256,), (256,), (256,))
def outer_products(a: Any, b: Any, c: Any) -> Any:
    return jnp.einsum("i,j,k->", jnp.sin(a), jnp.cos(b), c), jnp.tanh(
        a[:, None] * b[None] + c[:, None]
    ).sum(0)


# -- elementwise work, convolutions, transforms ----------------------------------------


@case((256, 1024))
def an_elementwise_chain(x: Any) -> Any:
    for k in range(8):
        x = jnp.sin(x) / (k + 1) + x
    return x


@case((4, 32, 32, 4), (3, 3, 4, 32), (3, 3, 32, 4))
def a_stack_of_convolutions(x: Any, a: Any, b: Any) -> Any:
    conv = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    for _ in range(3):
        x = x + conv(jax.nn.relu(conv(x, a)), b)
    return x


@case((64, 1024))
def filtered_by_ffts(x: Any) -> Any:
    spectrum = jnp.fft.rfft(x, axis=1)
    return jnp.fft.irfft(spectrum * jnp.exp(-jnp.arange(spectrum.shape[1]) / 64), axis=1)


@case((64, 1024))
def sorted_along_the_long_axis(x: Any) -> Any:
    return jnp.sum(jnp.sort(x, axis=1) * jnp.arange(x.shape[1]), axis=1)
