"""Functions whose intermediates are much larger than their arguments and results.

    python tests/large_intermediates.py

runs each in less than XLA's peak and writes docs/large-intermediates.md.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checks import assert_same, whole_bytes

import jturnip
from jturnip.programs.devices import link_of


class long(int):
    """A dimension that grows where a function is tried on more."""


@dataclass(frozen=True)
class Case:
    """A function, and what makes its arguments, as numpy arrays; more of them, with the
    factor by which its long dimensions grow."""

    fn: Callable[..., Any]
    make: Callable[..., tuple[Any, ...]]


CASES: dict[str, Case] = {}
SHARES = (2, 4, 8)
PAGE = Path(__file__).parents[1] / "docs" / "large-intermediates.md"


def pair(case: Case, args: Any, gpu_bytes: int) -> Any:
    """What a function gives in a budget, or how it is refused."""
    fn = jturnip.jit(case.fn, gpu_bytes)
    try:
        found = jax.block_until_ready(fn(*args))
    except jturnip.DoesNotFit as refusal:
        return refusal
    assert fn.last_run.peak_bytes <= gpu_bytes
    return found


def case(*shapes: tuple[int, ...] | Callable[..., Any]) -> Any:
    """Registers a function with random arguments of these shapes, or what makes them."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        def make(times: int = 1) -> tuple[Any, ...]:
            random = np.random.default_rng(0)
            return tuple(
                shape(random, times)
                if callable(shape)
                else random.normal(size=_grown(shape, times)).astype(np.float32) / 4
                for shape in shapes
            )

        CASES[fn.__name__.replace("_", " ")] = Case(fn, make)
        return fn

    return register


def integers(below: int, *shape: int) -> Callable[..., Any]:
    return lambda random, times: random.integers(
        0, below, _grown(shape, times), dtype=np.int32
    )


def _grown(shape: tuple[int, ...], times: int) -> tuple[int, ...]:
    return tuple(n * times if isinstance(n, long) else n for n in shape)


# -- attention -------------------------------------------------------------------------

_HEADS = (4, long(256), 32)


@case(_HEADS, _HEADS, _HEADS)
def causal_attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("hqd,hkd->hqk", q, k)
    mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    return jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ v


@case((8, long(256), 16), (2, long(256), 16), (2, long(256), 16))
def grouped_attention(q: Any, k: Any, v: Any) -> Any:
    q = q.reshape(2, 4, *q.shape[1:])
    scores = jnp.einsum("ghqd,gkd->ghqk", q, k)
    return jnp.einsum("ghqk,gkd->ghqd", jax.nn.softmax(scores), v)


@case(_HEADS, _HEADS, _HEADS, (4, long(256), long(256)))
def attention_with_a_bias(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k) + bias) @ v


@case(_HEADS, _HEADS, _HEADS)
def gradients_of_attention(q: Any, k: Any, v: Any) -> Any:
    loss = lambda q, k, v: jnp.sum(jnp.square(causal_attention(q, k, v)))
    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


# -- kernels and distances -------------------------------------------------------------


def distances(x: Any, y: Any) -> Any:
    return jnp.sum(jnp.square(x[:, None] - y[None]), axis=-1)


@case((long(512), 3), (long(512), 3), (long(512),))
def a_kernel_times_a_vector(x: Any, y: Any, v: Any) -> Any:
    return jnp.exp(-distances(x, y)) @ v


@case((long(2048), 3), (long(2048), 3), (long(2048), 32))
def a_kernel_times_a_matrix(x: Any, y: Any, v: Any) -> Any:
    return jnp.exp(-distances(x, y)) @ v


@case((long(512), 8), (long(512), 8))
def nearest_neighbours(x: Any, y: Any) -> Any:
    return jax.lax.top_k(-distances(x, y), 5)


@case((long(256), 3), (long(256),))
def a_gaussian_process(x: Any, y: Any) -> Any:
    kernel = jnp.exp(-distances(x, x)) + 0.5 * jnp.eye(x.shape[0])
    lower = jnp.linalg.cholesky(kernel)
    solved = jax.scipy.linalg.cho_solve((lower, True), y)
    return y @ solved / 2 + jnp.sum(jnp.log(jnp.diag(lower)))


@case((long(256), 3), (long(256),))
def gradients_of_a_gaussian_process(x: Any, y: Any) -> Any:
    """Of points far from one another: the system is solved as exactly as it is given."""
    return jax.grad(lambda x, y: a_gaussian_process(8 * x, y), (0, 1))(x, y)


@case((long(256), 3), (long(256),), (long(256), 3))
def a_process_at_new_points(x: Any, y: Any, new: Any) -> Any:
    """Mean and variance there; points far from one another, as before."""
    x, new = 8 * x, 8 * new
    kernel = jnp.exp(-distances(x, x)) + 0.5 * jnp.eye(x.shape[0])
    across = jnp.exp(-distances(new, x))
    factor = jax.scipy.linalg.cho_factor(kernel, lower=True)
    half = jax.scipy.linalg.solve_triangular(factor[0], across.T, lower=True)
    mean = across @ jax.scipy.linalg.cho_solve(factor, y)
    return mean, 1 - jnp.sum(jnp.square(half), axis=0)


def unsymmetric_kernel(x: Any) -> Any:
    """Of points far from one another, as before."""
    return jnp.exp(-distances(8 * x, 8 * x + 0.5)) + jnp.eye(x.shape[0])


@case((long(256), 3), (long(256), 16))
def a_system_of_an_unsymmetric_kernel(x: Any, b: Any) -> Any:
    return jnp.linalg.solve(unsymmetric_kernel(x), b)


@case((long(256), 3))
def gradients_of_a_log_determinant(x: Any) -> Any:
    return jax.grad(lambda x: jnp.linalg.slogdet(unsymmetric_kernel(x))[1])(x)


@case((long(4096), 16), (long(4096),))
def least_squares(x: Any, y: Any) -> Any:
    return jnp.linalg.lstsq(x, y)[0]


@case((long(4096), 16))
def principal_components(x: Any) -> Any:
    """With variances that are far from one another."""
    centred = (x - jnp.mean(x, axis=0)) * 1.5 ** jnp.arange(x.shape[1])
    left, values, _ = jnp.linalg.svd(centred, full_matrices=False)
    return left * values


@case((long(256), long(256)))
def a_matrix_exponential(x: Any) -> Any:
    return jax.scipy.linalg.expm(x / x.shape[0])


@case((long(256), long(256)))
def a_step_of_newton_and_schulz(x: Any) -> Any:
    gram = x @ x.T / x.shape[0]
    return 3.4 * x + (-4.8 * gram + 2.0 * gram @ gram) @ x


# -- losses and statistics -------------------------------------------------------------


@case((long(128), 32), (32, long(2048)), integers(2048, long(128)))
def cross_entropy_over_a_vocabulary(x: Any, w: Any, labels: Any) -> Any:
    return -jnp.mean(jax.nn.log_softmax(x @ w)[jnp.arange(labels.shape[0]), labels])


@case((long(128), 32), (32, long(2048)), integers(2048, long(128)))
def gradients_of_cross_entropy(x: Any, w: Any, labels: Any) -> Any:
    return jax.grad(cross_entropy_over_a_vocabulary, argnums=(0, 1))(x, w, labels)


@case(integers(512, long(2048)))
def a_histogram_by_one_hot(x: Any) -> Any:
    return jnp.sum(jax.nn.one_hot(x, 512), axis=0)


@case((long(256), 64), (64, 64), (64, 64))
def gradients_per_example(x: Any, a: Any, b: Any) -> Any:
    loss = lambda a, b, x: jnp.sum(jnp.tanh(jnp.tanh(x @ a) @ b))
    each = jax.vmap(jax.grad(loss, argnums=(0, 1)), (None, None, 0))(a, b, x)
    return jax.tree.map(lambda g: jnp.sqrt(jnp.sum(jnp.square(g), axis=(1, 2))), each)


@case((long(4096),), (long(4096),), (long(4096),))
def outer_products(a: Any, b: Any, c: Any) -> Any:
    return jnp.einsum("i,j,k->", jnp.sin(a), jnp.cos(b), c), jnp.tanh(
        a[:, None] * b[None] + c[:, None]
    ).sum(0)


# -- elementwise work, convolutions, transforms ----------------------------------------


def conv_of_images(x: Any, w: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


@case((long(256), 1024))
def an_elementwise_chain(x: Any) -> Any:
    for k in range(8):
        x = jnp.sin(x) / (k + 1) + x
    return x


@case((long(4), 32, 32, 4), (3, 3, 4, 32), (3, 3, 32, 4))
def a_stack_of_convolutions(x: Any, a: Any, b: Any) -> Any:
    for _ in range(3):
        x = x + conv_of_images(jax.nn.relu(conv_of_images(x, a)), b)
    return x


_IMAGE_WEIGHTS = (3, 3, 3, 16), (3, 3, 16, 16), (3, 3, 16, 16), (3, 3, 16, 3)


@case((1, long(128), 256, 3), *_IMAGE_WEIGHTS)
def one_image_through_a_network(x: Any, *weights: Any) -> Any:
    for w in weights[:-1]:
        x = jax.nn.gelu(conv_of_images(x, w))
    return conv_of_images(x, weights[-1])


@case((1, long(128), 256, 3), *_IMAGE_WEIGHTS)
def gradients_of_a_network_of_one_image(x: Any, *weights: Any) -> Any:
    loss = lambda w: jnp.mean(jnp.square(one_image_through_a_network(x, *w)))
    return jax.grad(loss)(weights)


@case((1, long(128), 256, 3), (3, 3, 3, 8), (3, 3, 8, 16), (3, 3, 24, 8), (3, 3, 8, 3))
def gradients_of_a_unet_of_one_image(x: Any, *weights: Any) -> Any:
    def loss(weights: Any) -> Any:
        first, second, third, last = weights
        high = jax.nn.relu(conv_of_images(x, first))
        window = (1, 2, 2, 1)
        low = jax.lax.reduce_window(high, -jnp.inf, jax.lax.max, window, window, "VALID")
        low = jax.nn.relu(conv_of_images(low, second))
        again = jax.image.resize(low, (*high.shape[:3], low.shape[3]), "nearest")
        both = jnp.concatenate([again, high], -1)
        made = conv_of_images(jax.nn.relu(conv_of_images(both, third)), last)
        return jnp.mean(jnp.square(made - x))

    return jax.grad(loss)(weights)


@case((long(64), 1024))
def filtered_by_ffts(x: Any) -> Any:
    spectrum = jnp.fft.rfft(x, axis=1)
    return jnp.fft.irfft(spectrum * jnp.exp(-jnp.arange(spectrum.shape[1]) / 64), axis=1)


@case((long(256), 256))
def a_field_filtered_by_ffts(x: Any) -> Any:
    spectrum = jnp.fft.rfft2(x)
    return jnp.fft.irfft2(spectrum / (1 + jnp.abs(spectrum)), s=x.shape)


@case((long(64), 1024))
def sorted_along_the_long_axis(x: Any) -> Any:
    return jnp.sum(jnp.sort(x, axis=1) * jnp.arange(x.shape[1]), axis=1)


# -- longer functions, and shapes that nothing divides -----------------------------------


@case((2, long(251), 16), (2, long(127), 16), (2, long(127), 16))
def cross_attention_with_a_softcap(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("hqd,hkd->hqk", q, k)
    return jax.nn.softmax(20 * jnp.tanh(scores / 20)) @ v


_MASKED = (1, 4, long(191), 16)


@case(_MASKED, _MASKED, _MASKED, integers(50, long(191)))
def attention_masked_by_positions(q: Any, k: Any, v: Any, positions: Any) -> Any:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    near = jnp.abs(positions[:, None] - positions[None]) < 20
    weights = jax.nn.softmax(jnp.where(near, scores, -1e9))
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v)


def _normed(x: Any) -> Any:
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


_BLOCK = ((long(512), 32), (32, 96), (32, 32), (32, 128), (128, 32))


@case(*_BLOCK)
def a_transformer_block(x: Any, qkv: Any, out: Any, up: Any, down: Any) -> Any:
    q, k, v = jnp.moveaxis((_normed(x) @ qkv).reshape(-1, 3, 2, 16), 0, 2)
    weights = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k) / 4)
    mixed = jnp.einsum("hqk,hkd->qhd", weights, v).reshape(-1, 32)
    x = x + mixed @ out
    return x + jax.nn.gelu(_normed(x) @ up) @ down


@case(*_BLOCK)
def gradients_of_a_transformer_block(*args: Any) -> Any:
    loss = lambda *args: jnp.sum(jnp.square(a_transformer_block(*args)))
    return jax.grad(loss, argnums=(0, 1, 2, 3, 4))(*args)


@case((long(8), 16, 16, 3), (3, 3, 3, 16), (3, 3, 16, 16), (3, 3, 32, 3))
def gradients_of_a_small_unet(x: Any, a: Any, b: Any, c: Any) -> Any:
    def loss(weights: Any) -> Any:
        a, b, c = weights
        top = jax.nn.relu(conv_of_images(x, a))
        halved = top.reshape(-1, 8, 2, 8, 2, 16).mean((2, 4))
        low = jax.nn.relu(conv_of_images(halved, b))
        again = jnp.repeat(jnp.repeat(low, 2, axis=1), 2, axis=2)
        return jnp.sum(jnp.square(conv_of_images(jnp.concatenate([top, again], -1), c) - x))

    return jax.grad(loss)((a, b, c))


@case(
    (long(32), 16, 16, 3),
    (3, 3, 3, 16),
    (3, 3, 16, 16),
    (3, 3, 16, 32),
    (3, 3, 32, 32),
    (1, 1, 16, 32),
)
def gradients_of_a_residual_network(x: Any, *weights: Any) -> Any:
    """Each normalisation is over the whole batch."""

    def normed(x: Any) -> Any:
        return (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5)

    def pooled(x: Any) -> Any:
        window = (1, 2, 2, 1)
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID") / 4

    def loss(weights: Any) -> Any:
        first, second, third, fourth, skip = weights
        low = jax.nn.relu(normed(conv_of_images(x, first)))
        low = pooled(jax.nn.relu(normed(conv_of_images(low, second)) + low))
        high = jax.nn.relu(normed(conv_of_images(low, third)))
        high = jax.nn.relu(normed(conv_of_images(high, fourth)) + conv_of_images(low, skip))
        return jnp.sum(jnp.square(high.mean((1, 2))))

    return jax.grad(loss)(weights)


@case((3, long(65537)))
def normalised_over_the_long_axis(x: Any) -> Any:
    return jnp.sum(jnp.exp(_normed(x)) / (1 + jnp.square(x)), axis=1)


@case((long(64), 128), (128, 512), (512, 128))
def a_wide_layer(x: Any, up: Any, down: Any) -> Any:
    return jnp.tanh(jax.nn.silu(x @ up) @ down)


_SQUARE = (long(512), long(512))


@case(_SQUARE, _SQUARE)
def a_product_of_matrices(a: Any, b: Any) -> Any:
    return a @ b


@case(_SQUARE, _SQUARE, _SQUARE)
def a_chain_of_products(a: Any, b: Any, c: Any) -> Any:
    return jnp.tanh(a @ b) @ c


@case((48, long(24), long(24), 8))
def triangles_of_a_pair_representation(pair: Any) -> Any:
    return jnp.einsum("bikc,bjkc->bijc", jax.nn.sigmoid(pair), jnp.tanh(pair))


@case((long(1024), 16), (long(1024),))
def kernel_ridge_by_conjugate_gradients(x: Any, y: Any) -> Any:
    kernel = lambda v: jnp.exp(-distances(x, x)) @ v + v
    a = r = y - kernel(y)
    for _ in range(2):
        step = (r @ r) / (a @ kernel(a))
        new = r - step * kernel(a)
        a, r = new + (new @ new) / (r @ r) * a, new
    return r


@case((long(4096),), integers(64, long(4096)))
def segments_by_one_hot(values: Any, groups: Any) -> Any:
    member = jax.nn.one_hot(groups, 64)
    return jnp.tanh(member * values[:, None]).sum(0) / (1 + member.sum(0))


@case((long(64), 33), (long(500), 33), integers(500, long(64)))
def cross_entropy_by_take_along_axis(x: Any, table: Any, labels: Any) -> Any:
    logits = x @ table.T
    taken = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -taken.mean()


@case((4, long(4096)), (4, long(4096)))
def correlations_by_ffts(x: Any, y: Any) -> Any:
    return jnp.real(jnp.fft.ifft(jnp.fft.fft(x) * jnp.conj(jnp.fft.fft(y))))


@case((long(2000), 12))
def pairs_closer_than_a_radius(x: Any) -> Any:
    near = distances(x, x) < 1.5
    return jnp.sum(near, axis=1) - 1


@case((long(256), 64), (long(256), 64))
def a_contrastive_loss(x: Any, y: Any) -> Any:
    scores = (x / jnp.linalg.norm(x, axis=1, keepdims=True)) @ y.T * 5
    own = jnp.diagonal(scores)
    return jnp.mean(jax.nn.logsumexp(scores, axis=1) - own)


_CUBE = (long(96), long(96))


@case(_CUBE, _CUBE, _CUBE)
def an_einsum_of_three(a: Any, b: Any, c: Any) -> Any:
    each = jnp.sin(a[:, :, None] + b[None]) * c[:, None]
    return jnp.max(each, axis=1), jnp.sum(each)


# -- from other fields -----------------------------------------------------------------


@case((long(700), 3), (long(700),))
def forces_between_bodies(x: Any, mass: Any) -> Any:
    apart = x[None] - x[:, None]
    cube = (jnp.sum(apart**2, axis=-1) + 0.01) ** 1.5
    return jnp.einsum("ijc,ij->ic", apart, mass / cube)


@case((long(24), 40), (long(12), 40), (40, 300))
def a_lattice_of_a_transducer(sounds: Any, words: Any, w: Any) -> Any:
    joint = jnp.tanh(sounds[:, None] + words[None]) @ w
    return jax.nn.log_softmax(joint)[:, :, 0], jnp.max(joint, axis=-1)


@case((20, long(48), 8), (20, long(48), 8), (64, 16))
def an_outer_product_mean(a: Any, b: Any, w: Any) -> Any:
    outer = jnp.einsum("sic,sjd->ijcd", a, b) / a.shape[0]
    return outer.reshape(*outer.shape[:2], -1) @ w


@case((long(128), 16, 16), (long(128), 16))
def a_batch_of_solves(a: Any, b: Any) -> Any:
    return jnp.linalg.solve(a @ a.mT + jnp.eye(16), b[..., None])[..., 0]


@case(_HEADS, _HEADS, _HEADS)
def attention_with_dropout(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k))
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape)
    return jnp.where(kept, weights / 0.9, 0) @ v


@case((long(200), 24), (24, 8), (8, 24, 96), (8, 96, 24))
def a_mixture_of_experts(x: Any, gate: Any, up: Any, down: Any) -> Any:
    chosen = jax.nn.one_hot(jnp.argmax(x @ gate, axis=-1), gate.shape[1])
    of_expert = jnp.einsum("nd,edh->enh", x, up)
    return jnp.einsum("enh,ehd,ne->nd", jax.nn.gelu(of_expert), down, chosen)


@case((long(300),), (long(257),))
def an_integral_over_a_grid(x: Any, y: Any) -> Any:
    x, y = jnp.sort(x), jnp.sort(y)
    at = jnp.stack(jnp.meshgrid(x, y, indexing="ij"))
    values = jnp.exp(-jnp.sum(at**2, axis=0)) * jnp.cos(at[0] * at[1])
    return jnp.trapezoid(jnp.trapezoid(values, y), x)


@case((long(256), 3), (long(200), 3))
def a_transport_plan_by_sinkhorn(x: Any, y: Any) -> Any:
    costs = distances(x, y)
    f, g = jnp.zeros(x.shape[0]), jnp.zeros(y.shape[0])
    for _ in range(5):
        f = -jax.nn.logsumexp(g[None] - costs, axis=1)
        g = -jax.nn.logsumexp(f[:, None] - costs, axis=0)
    return jnp.sum(jnp.exp(f[:, None] + g[None] - costs) * costs)


@case((long(256), 256), (long(200), 256))
def a_transport_plan_between_features(x: Any, y: Any) -> Any:
    squares = jnp.sum(x * x, 1)[:, None] + jnp.sum(y * y, 1)[None]
    costs = squares / 8 - x @ y.T / 4
    f, g = jnp.zeros(x.shape[0]), jnp.zeros(y.shape[0])
    for _ in range(5):
        f = -jax.nn.logsumexp(g[None] - costs, axis=1)
        g = -jax.nn.logsumexp(f[:, None] - costs, axis=0)
    return jnp.sum(jnp.exp(f[:, None] + g[None] - costs) * costs)


@case((long(1000), 64), (64, 256), (256, 256), (256, 8))
def a_fit_to_features_of_a_network(x: Any, into: Any, between: Any, fit: Any) -> Any:
    features = jnp.tanh(jnp.tanh(x @ into) @ between)
    for _ in range(6):
        fit -= features.T @ jax.nn.sigmoid(features @ fit) / x.shape[0]
    return fit


@case((long(640), 3), (long(640), 4))
def the_largest_vectors_of_a_kernel(x: Any, vectors: Any) -> Any:
    kernel = jnp.exp(-distances(x, x))
    for _ in range(3):
        vectors, _ = jnp.linalg.qr(kernel @ vectors)
    return vectors, jnp.einsum("ik,ij,jk->k", vectors, kernel, vectors)


@case((long(400), 24), (long(400), 2))
def gradients_of_an_embedding_of_neighbours(x: Any, y: Any) -> Any:
    def loss(y: Any) -> Any:
        apart = 1 - jnp.eye(x.shape[0])
        p, q = jnp.exp(-distances(x, x)) * apart, apart / (1 + distances(y, y))
        p, q = p / jnp.sum(p), q / jnp.sum(q)
        return jnp.sum(p * (jnp.log(p + 1e-9) - jnp.log(q + 1e-9)))

    return jax.value_and_grad(loss)(y)


@case((long(512), 64), (64, 256), (256, 64))
def gradients_of_two_losses(x: Any, up: Any, down: Any) -> Any:
    output = lambda weights: jnp.tanh(x @ weights[0]) @ weights[1]
    square = jax.grad(lambda weights: jnp.sum(jnp.square(output(weights))))
    absolute = jax.grad(lambda weights: jnp.sum(jnp.abs(output(weights))))
    return square((up, down)), absolute((up, down))


@case((long(1024), 4))
def points_that_move_to_where_others_are(x: Any) -> Any:
    moved = x
    for _ in range(3):
        kernel = jnp.exp(-distances(moved, x))
        moved = kernel @ x / jnp.sum(kernel, axis=1, keepdims=True)
    return moved


@case((2, long(512), 16), (2, long(512), 8), (2, long(512), 8), (16, 8))
def a_linear_recurrence(x: Any, into: Any, out: Any, rates: Any) -> Any:
    decay = jnp.exp(-jax.nn.softplus(x[..., None] * rates))
    after = lambda one, two: (one[0] * two[0], two[0] * one[1] + two[1])
    _, states = jax.lax.associative_scan(
        after, (decay, into[:, :, None] * x[..., None]), axis=1
    )
    return jnp.einsum("blds,bls->bld", states, out)


@case((long(2048), 8), (32, 8))
def a_mixture_of_gaussians(x: Any, means: Any) -> Any:
    spread = jnp.ones_like(means)
    for _ in range(3):
        apart = x[:, None] - means[None]
        likely = jnp.sum(jnp.square(apart) / spread, axis=-1) + jnp.sum(jnp.log(spread), -1)
        of_each = jax.nn.softmax(-likely / 2)
        count = jnp.sum(of_each, axis=0)[:, None] + 1e-6
        spread = jnp.einsum("nk,nkd->kd", of_each, jnp.square(apart)) / count + 1e-3
        means = of_each.T @ x / count
    return means, spread


@case((long(120), long(90)))
def medians_of_windows(x: Any) -> Any:
    around = jnp.pad(x, 2, mode="edge")
    windows = [
        around[i : i + x.shape[0], j : j + x.shape[1]] for i in range(5) for j in range(5)
    ]
    return jnp.median(jnp.stack(windows, axis=-1), axis=-1)


@case((long(64), 40), (40, 40), (40, 40))
def a_jacobian_of_a_network(x: Any, a: Any, b: Any) -> Any:
    network = lambda row: jnp.tanh(jnp.tanh(row @ a) @ b)
    return jnp.linalg.norm(jax.vmap(jax.jacfwd(network))(x), axis=(1, 2))


# -- loops -----------------------------------------------------------------------------


@case((long(512), 16), (16, 16))
def chains_of_a_hamiltonian_sampler(start: Any, factor: Any) -> Any:
    precision = factor @ factor.T + jnp.eye(16)
    energy = lambda x: x @ precision @ x / 2

    def chain(x: Any, key: Any) -> Any:
        def leap(state: Any, _: Any) -> Any:
            x, speed = state
            speed = speed - 0.1 * jax.grad(energy)(x)
            return (x + 0.1 * speed, speed), None

        def step(state: Any, _: Any) -> Any:
            x, key = state
            key, of_speed, of_choice = jax.random.split(key, 3)
            speed = jax.random.normal(of_speed, x.shape)
            (to, after), _ = jax.lax.scan(leap, (x, speed), length=5)
            gain = energy(x) + speed @ speed / 2 - energy(to) - after @ after / 2
            x = jnp.where(jnp.log(jax.random.uniform(of_choice)) < gain, to, x)
            return (x, key), x

        _, seen = jax.lax.scan(step, (x, key), length=12)
        return seen.mean(0), seen.var(0)

    return jax.vmap(chain)(start, jax.random.split(jax.random.key(0), start.shape[0]))


@case((long(256), 24, 16), (16, 32), (32, 32))
def gradients_of_a_recurrent_network(x: Any, into: Any, again: Any) -> Any:
    def loss(weights: Any) -> Any:
        def step(state: Any, row: Any) -> Any:
            state = jnp.tanh(row @ weights[0] + state @ weights[1])
            return state, state

        state = jnp.zeros((x.shape[0], 32))
        _, states = jax.lax.scan(step, state, jnp.swapaxes(x, 0, 1))
        return jnp.mean(jnp.square(states[-1]))

    return jax.grad(loss)((into, again))


@case((long(8192),))
def largest_falls_of_random_walks(start: Any) -> Any:
    def step(_: Any, state: Any) -> Any:
        at, most, fall, key = state
        key, of_step = jax.random.split(key)
        at = at + 0.1 * jax.random.normal(of_step, at.shape)
        most = jnp.maximum(most, at)
        return at, most, jnp.maximum(fall, most - at), key

    first = start, start, jnp.zeros_like(start), jax.random.key(0)
    return jax.lax.fori_loop(0, 20, step, first)[2]


@case((long(64), 24, 16), (16, 16))
def likeliest_states_of_a_hidden_chain(seen: Any, between: Any) -> Any:
    def one(seen: Any) -> Any:
        def forward(score: Any, row: Any) -> Any:
            scores = score[:, None] + between + row
            return scores.max(0), scores.argmax(0)

        score, came_from = jax.lax.scan(forward, seen[0], seen[1:])
        back = lambda state, of: (of[state], state)
        last, states = jax.lax.scan(back, score.argmax(), came_from, reverse=True)
        return jnp.append(last, states)

    return jax.vmap(one)(seen)


@case((24, long(2048)), (16,))
def channels_filtered_along_time(signal: Any, taps: Any) -> Any:
    def step(latest: Any, now: Any) -> Any:
        latest = jnp.concatenate([latest[:, 1:], now[:, None]], axis=1)
        return latest, latest @ taps

    latest = jnp.zeros((signal.shape[1], taps.shape[0]))
    return jax.lax.scan(step, latest, signal)[1]


@case((long(4000), 8))
def centres_that_settle(x: Any) -> Any:
    """How often it takes depends on all points."""

    def step(state: Any) -> Any:
        centres, _, count = state
        nearest = ((x[:, None] - centres) ** 2).sum(-1).argmin(1)
        belongs = jax.nn.one_hot(nearest, 32)
        moved = (belongs.T @ x) / jnp.maximum(belongs.sum(0), 1)[:, None]
        return moved, jnp.abs(moved - centres).max(), count + 1

    goes_on = lambda state: (state[1] > 1e-3) & (state[2] < 8)
    return jax.lax.while_loop(goes_on, step, (x[:32], jnp.inf, 0))[0]


@case((long(8192), 12))
def roots_one_by_one(coefficients: Any) -> Any:
    """Each takes as many steps as it needs."""

    def root(c: Any) -> Any:
        def step(state: Any) -> Any:
            x, _, count = state
            value = (c**2 * x + x**3 / 12 - jnp.sin(c)).sum()
            change = value / (c**2 + x**2 / 4).sum()
            return x - change, jnp.abs(change), count + 1

        goes_on = lambda state: (state[1] > 1e-4) & (state[2] < 12)
        return jax.lax.while_loop(goes_on, step, (0.3, jnp.inf, 0))[0]

    return jax.vmap(root)(coefficients)


@case((200, 16), (3, 32, 16), integers(200, 2, long(8000)))
def gradients_along_the_edges_of_a_graph(nodes: Any, weights: Any, edges: Any) -> Any:
    def loss(nodes: Any, weights: Any) -> Any:
        for w in weights:
            ends = jnp.concatenate([nodes[edges[0]], nodes[edges[1]]], axis=-1)
            sent = jax.ops.segment_sum(jax.nn.relu(ends @ w), edges[1], nodes.shape[0])
            nodes = nodes + jnp.tanh(sent / 40)
        return jnp.mean(nodes**2)

    return jax.grad(loss, (0, 1))(nodes, weights)


@case((long(256), 256))
def a_lattice_of_spins(field: Any) -> Any:
    def step(count: Any, state: Any) -> Any:
        spins, key = state
        key, used = jax.random.split(key)
        around = sum(jnp.roll(spins, d, axis) for axis in (0, 1) for d in (1, -1))
        up = jax.random.uniform(used, spins.shape) < jax.nn.sigmoid(0.9 * around + field)
        rows = jax.lax.broadcasted_iota(jnp.int32, spins.shape, 0)
        return jnp.where((rows + count) % 2 == 0, jnp.where(up, 1.0, -1.0), spins), key

    first = jnp.ones(field.shape), jax.random.key(0)
    return jax.lax.fori_loop(0, 5, step, first)[0]


@case(integers(4, long(1000), 32), integers(4, long(1000), 32))
def sequences_that_are_aligned(a: Any, b: Any) -> Any:
    """A scan in a scan, in which next to nothing is done in each step."""

    def one(a: Any, b: Any) -> Any:
        def row(before: Any, x: Any) -> Any:
            def cell(left: Any, above: Any) -> Any:
                best = jnp.maximum(jnp.maximum(left - 1, above[0] - 1), above[1])
                return best, best

            match = before + jnp.where(x == b, 2.0, -1.0)
            _, new = jax.lax.scan(cell, jnp.float32(0), (before, match))
            return new, new.max()

        return jax.lax.scan(row, jnp.zeros(b.shape[0]), a)[1].max()

    return jax.vmap(one)(a, b)


@case((2, long(8), 64, 64), (2, long(8), 64, 64), (64, 64))
def an_image_of_several_coils(measured: Any, coils: Any, mask: Any) -> Any:
    """Steps of a least-squares fit, as in parallel imaging with magnetic resonance."""
    measured, coils = jax.lax.complex(*measured), jax.lax.complex(*coils)
    mask = (mask > 0).astype(jnp.float32)
    seen = lambda x: mask * jnp.fft.fft2(coils * x)
    back = lambda y: jnp.sum(coils.conj() * jnp.fft.ifft2(mask * y), 0)
    x = back(measured)
    for _ in range(3):
        x = x - 0.1 * back(seen(x) - measured)
    return jnp.abs(x)


@case((long(8), 16384))
def spectra_of_signals(signals: Any) -> Any:
    """Of frames that overlap by a half."""
    return jnp.abs(jax.scipy.signal.stft(signals, nperseg=256)[2])


@case((long(20_000),), (long(20_000),))
def a_correlation_of_ranks(x: Any, y: Any) -> Any:
    ranks = lambda x: jnp.argsort(jnp.argsort(x)).astype(jnp.float32)
    return jnp.corrcoef(ranks(x), ranks(y))[0, 1]


@case((long(2**14),), (3, 2, 2))
def gates_on_qubits(state: Any, gates: Any) -> Any:
    """Of each, and of neighbours; a qubit more for each doubling."""
    n = state.size.bit_length() - 1
    state = state.reshape((2,) * n)
    for q in range(n):
        state = jnp.moveaxis(jnp.tensordot(gates[q % 3], state, [[1], [q]]), 0, q)
    flipped = jnp.stack([gates[0], gates[1]])  # one that the other qubit chooses
    for q in range(n - 1):
        chosen = jnp.einsum(
            "cij,cj...->ci...", flipped, jnp.moveaxis(state, (q, q + 1), (0, 1))
        )
        state = jnp.moveaxis(chosen, (0, 1), (q, q + 1))
    return jnp.abs(state).reshape(-1) ** 2


@case((long(500), 4))
def boxes_that_are_left(boxes: Any) -> Any:
    """The best of those that overlap: one after the other, by a row of all pairs."""
    low = boxes[:, :2]
    high = low + jnp.abs(boxes[:, 2:])
    sides = jnp.minimum(high[:, None], high) - jnp.maximum(low[:, None], low)
    common = jnp.prod(jnp.maximum(sides, 0), -1)
    area = jnp.prod(high - low, -1)
    overlap = common / (area[:, None] + area - common)

    def step(i: Any, left: Any) -> Any:
        later = jnp.arange(len(boxes)) > i
        return left & ~((overlap[i] > 0.3) & later & left[i])

    left = jax.lax.fori_loop(0, len(boxes), step, jnp.ones(len(boxes), bool))
    return jnp.where(left[:, None], boxes, 0)


@case((long(200), long(200)))
def next_stops_of_shortest_paths(lengths: Any) -> Any:
    """Floyd and Warshall's: each iteration changes all pairs, by a row and a column."""
    n = len(lengths)
    lengths = jnp.where(jnp.eye(n, dtype=bool), 0, jnp.abs(lengths))
    stops = jnp.broadcast_to(jnp.arange(n), (n, n))

    def step(k: Any, carried: Any) -> Any:
        lengths, stops = carried
        via = lengths[:, k, None] + lengths[k]
        better = via < lengths
        stops = jnp.where(better, stops[:, k, None], stops)
        return jnp.where(better, via, lengths), stops

    return jax.lax.fori_loop(0, n, step, (lengths, stops))


@case((long(400), long(200)))
def columns_made_orthogonal(a: Any) -> Any:
    """Gram and Schmidt's, one column after the other."""

    def step(k: Any, q: Any) -> Any:
        column = q[:, k] / jnp.linalg.norm(q[:, k])
        q = q.at[:, k].set(column)
        along = jnp.where(jnp.arange(q.shape[1]) > k, column @ q, 0)
        return q - jnp.outer(column, along)

    return jax.lax.fori_loop(0, a.shape[1], step, a)


# -- the page --------------------------------------------------------------------------

# Why some are refused where they are.
_WHY = {
    "centres that settle": "all points are read in each iteration, and leave no room",
    "a lattice of spins": "spins before and after a step, and their field, are more than"
    " that",
    "outer products": "an eighth is 8 KiB, of which half is jturnip's own",
    "a jacobian of a network": "the weights leave no room for a row; cut along more axes"
    " there are too many tasks",
}


# The budgets in which times are measured, as shares of XLA's peak; how often; and how
# long `jax.jit` takes at least, since what a launch costs is measured elsewhere.
_TIMED = (2, 4)
_ROUNDS = 7
_SECONDS = 0.02
_SIZING = 8  # calls, so that a machine that is busy for a moment does not count


def grown(case: Case) -> tuple[Any, int]:
    """Arguments that keep `jax.jit` busy for a while, and its peak."""
    times = 1
    while True:
        args = case.make(times)
        compiled = jax.jit(case.fn).lower(*args).compile()
        here = jax.device_put(args)
        taken = []
        for _ in range(_SIZING):
            begin = time.perf_counter()
            jax.block_until_ready(compiled(*here))
            taken.append(time.perf_counter() - begin)
        if min(taken) >= _SECONDS:
            return args, whole_bytes(compiled)
        times *= 2


@dataclass(frozen=True)
class Timed:
    """Calls in a budget beside calls of `jax.jit` with its arguments on the device."""

    # Time over time, the median of calls in turn, and seconds of `jax.jit`.
    ratio: float
    seconds: float
    # Time over the larger of that of `jax.jit` and that of the arguments and results over
    # the link at hand.
    over_limit: float
    # Whether arguments and results fit in the budget together: else the link is busy with
    # them, whatever is done.
    ends_fit: bool
    # Until the first result is there: trace, search, compile, measure, run.
    first: float


def timed(case: Case, args: Any, gpu_bytes: int) -> Timed:
    ours, stock = jturnip.jit(case.fn, gpu_bytes), jax.jit(case.fn)
    hosted, here = jturnip.host(args), jax.device_put(args)
    taken = []
    for _ in range(_ROUNDS + 1):  # the first compiles
        row = []
        for call, given in ((ours, hosted), (stock, here)):
            begin = time.perf_counter()
            jax.block_until_ready(call(*given))
            row.append(time.perf_counter() - begin)
        taken.append(row)
    ratio = statistics.median(a / b for a, b in taken[1:])
    seconds = statistics.median(b for _, b in taken[1:])
    nbytes = lambda tree: sum(a.nbytes for a in jax.tree.leaves(tree))
    into, out = nbytes(args), nbytes(stock(*here))
    link = link_of(jax.devices()[0], None)
    limit = max(seconds, into / link.h2d_bytes_per_second, out / link.d2h_bytes_per_second)
    over_limit = statistics.median(a for a, _ in taken[1:]) / limit
    return Timed(ratio, seconds, over_limit, into + out <= gpu_bytes, taken[0][0])


def _times(share: int, found: Sequence[Timed]) -> str:
    """Lines on the times of functions in a share of their peaks."""
    lines = [
        f"- In 1/{share} of the peak: median"
        f" {statistics.median(t.ratio for t in found):.2f} of {len(found)}; until the first"
        f" result median {statistics.median(t.first for t in found):.1f} s, longest"
        f" {max(t.first for t in found):.0f} s."
    ]
    for ends_fit, where in ((True, "fit in that"), (False, "do not fit in that")):
        some = [t for t in found if t.ends_fit is ends_fit]
        ratios = [t.ratio for t in some]
        line = (
            f"  - Of {len(some)} whose arguments and results {where} together: median"
            f" {statistics.median(ratios):.2f}, worst {max(ratios):.2f},"
            f" {sum(r > 1.5 for r in ratios)} above 1.5."
        )
        if not ends_fit:
            over = [t.over_limit for t in some]
            line += (
                " Their time over the larger of that of `jax.jit` and that of these bytes"
                f" over the link at hand: median {statistics.median(over):.2f}, worst"
                f" {max(over):.2f}."
            )
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> str | None:
    """Writes the page; returns what it leaves unexplained."""
    unexplained: list[str] = []
    rows, ran, refused_at_peak, above_peak = [], 0, 0, 0
    times: dict[int, list[Timed]] = {share: [] for share in _TIMED}
    for name, case in CASES.items():
        args = case.make()
        compiled = jax.jit(case.fn).lower(*args).compile()
        peak, expected = whole_bytes(compiled), compiled(*args)
        ends = sum(a.nbytes for a in jax.tree.leaves((args, expected)))
        hosted = jturnip.host(args)
        refused_at_peak += isinstance(pair(case, hosted, peak), jturnip.DoesNotFit)
        cells, took = [], []
        for share in SHARES:
            found = pair(case, hosted, peak // share)
            if isinstance(found, jturnip.DoesNotFit):
                above_peak += found.needed_bytes > peak
                cells.append(f"asks for {found.needed_bytes / peak:.2f}")
            else:
                assert_same(found, expected, ulps=64)
                ran += 1
                cells.append("runs")
        more, its_peak = grown(case)
        for share in _TIMED:
            try:
                found = timed(case, more, its_peak // share)
            except jturnip.DoesNotFit:
                took += ["refused", ""]
                continue
            times[share].append(found)
            cell = f"{found.ratio:.2f} of {1e3 * found.seconds:.0f} ms"
            if not found.ends_fit:
                cell += f"; {found.over_limit:.2f} of the limit"
            took += [cell, f"{found.first:.1f} s"]
        why = _WHY.get(name, "") if any(cell != "runs" for cell in cells) else ""
        print(name, cells, took, why, flush=True)
        if not why and any(cell != "runs" for cell in cells):
            unexplained.append(name)
        row = [name, f"{ends / peak:.2f}", *cells, *took, why]
        rows.append(f"| {' | '.join(row)} |")
    pairs = len(SHARES) * len(CASES)
    PAGE.write_text(
        "# Functions with large intermediates\n\n"
        "Written by `python tests/large_intermediates.py`"
        f" (jax {jax.__version__}, CPU backend). Arguments lie in host memory; shares are"
        " of the peak of XLA's own analysis.\n\n"
        f"- Refused at XLA's peak: {refused_at_peak} of {len(CASES)}.\n"
        f"- Refusals that ask for more than XLA's peak: {above_peak}.\n"
        f"- Pairs of function and budget that run: {ran} of {pairs}"
        f" ({100 * ran / pairs:.0f}%), all with the answer of `jax.jit`.\n"
        "- Times are over those of `jax.jit` with its arguments on the device, with long"
        f" dimensions grown until that takes at least {1e3 * _SECONDS:.0f} ms.\n"
        + "".join(_times(share, found) for share, found in times.items())
        + "\n| function | arguments and results | in 1/2 | in 1/4 | in 1/8 "
        + "".join(f"| time in 1/{share} | first result " for share in _TIMED)
        + "| why not |\n"
        + "| --- " * (6 + 2 * len(_TIMED))
        + "|\n"
        + "\n".join(rows)
        + "\n",
        encoding="utf-8",
    )
    return f"say why: {', '.join(unexplained)}" if unexplained else None


if __name__ == "__main__":
    sys.exit(main())
