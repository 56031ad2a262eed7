"""Models of haiku: a residual network with state, and an LSTM over a sequence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half import assert_half_is_enough, filled


hk = pytest.importorskip("haiku", exc_type=ImportError)
optax = pytest.importorskip("optax", exc_type=ImportError)

CHANNELS = 160
IMAGES = np.random.default_rng(1).normal(size=(2, 8, 8, 3)).astype(np.float32)
LABELS = np.array([3, 7], np.int32)


class Residual(hk.Module):
    def __init__(self, stride: int):
        super().__init__()
        self.stride = stride

    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        y = x
        for stride in (self.stride, 1):
            y = hk.Conv2D(CHANNELS, 3, stride=stride, with_bias=False)(jax.nn.relu(y))
            y = hk.BatchNorm(True, True, decay_rate=0.9)(y, is_training)
        if self.stride > 1:
            x = hk.Conv2D(CHANNELS, 1, stride=self.stride, with_bias=False)(x)
        return x + y


def residual(images: jax.Array, is_training: bool) -> jax.Array:
    x = hk.Conv2D(CHANNELS, 3)(images)
    for stride in (2, 1):
        x = Residual(stride)(x, is_training)
    return hk.Linear(10)(jnp.mean(x, axis=(1, 2)))


def test_residual_forward():
    net = hk.without_apply_rng(hk.transform_with_state(residual))
    init = jax.eval_shape(lambda: net.init(jax.random.key(0), IMAGES, True))

    def forward(params: Any, state: Any, images: jax.Array) -> jax.Array:
        return net.apply(params, state, images, False)[0]

    assert_half_is_enough(forward, *filled(init), IMAGES)


@pytest.mark.slow
def test_residual_step():
    net = hk.without_apply_rng(hk.transform_with_state(residual))
    optimizer = optax.sgd(0.1, momentum=0.9)

    def init() -> tuple[Any, Any, Any]:
        params, state = net.init(jax.random.key(0), IMAGES, True)
        return params, state, optimizer.init(params)

    def step(
        params: Any, state: Any, momenta: Any, images: jax.Array, labels: jax.Array
    ) -> tuple[Any, ...]:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            logits, after = net.apply(params, state, images, True)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            decay = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
            return losses.mean() + 1e-4 * decay, after

        (value, after), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, new_momenta = optimizer.update(grads, momenta)
        return optax.apply_updates(params, updates), after, new_momenta, value

    args = filled(jax.eval_shape(init))
    assert_half_is_enough(step, *args, IMAGES, LABELS, donated=(0, 1, 2))


VOCABULARY, WIDTH, LENGTH = 128, 192, 16
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (LENGTH, 2), np.int32)


def recurrent(tokens: jax.Array) -> jax.Array:
    x = hk.Embed(VOCABULARY, WIDTH)(tokens)
    core = hk.DeepRNN([hk.LSTM(WIDTH), hk.LSTM(WIDTH)])
    x, _ = hk.dynamic_unroll(core, x, core.initial_state(tokens.shape[1]))
    return hk.BatchApply(hk.Linear(VOCABULARY))(x)


def test_lstm_forward():
    net = hk.without_apply_rng(hk.transform(recurrent))
    params = jax.eval_shape(lambda: net.init(jax.random.key(0), TOKENS))
    assert_half_is_enough(net.apply, filled(params), TOKENS)


@pytest.mark.slow
def test_lstm_step():
    net = hk.without_apply_rng(hk.transform(recurrent))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def init() -> tuple[Any, Any]:
        params = net.init(jax.random.key(0), TOKENS)
        return params, optimizer.init(params)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            logits = net.apply(params, tokens)[:-1]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:])
            return losses.mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    assert_half_is_enough(step, *filled(jax.eval_shape(init)), TOKENS, donated=(0, 1))
