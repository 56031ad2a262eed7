"""Models of flax.nnx, in its functional style: `split` outside, `merge` inside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half import assert_half_is_enough, filled


nnx = pytest.importorskip("flax.nnx", exc_type=ImportError)
optax = pytest.importorskip("optax", exc_type=ImportError)

VOCABULARY, WIDTH, LENGTH = 256, 128, 16


class Block(nnx.Module):
    def __init__(self, rngs: Any):
        self.before_attention = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, WIDTH, dropout_rate=0.1, decode=False, rngs=rngs
        )
        self.before_mlp = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.before_attention(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.before_mlp(x)))))


class Transformer(nnx.Module):
    """A decoder with dropout, whose random streams are part of its state."""

    def __init__(self, rngs: Any):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((LENGTH, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions[...]
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def language_loss(model: Any, tokens: jax.Array) -> jax.Array:
    model.train()
    logits = model(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (4, LENGTH), np.int32)


def test_transformer_forward():
    graph, params, rest = nnx.split(
        nnx.eval_shape(lambda: Transformer(nnx.Rngs(0))), nnx.Param, ...
    )

    def forward(params: Any, rest: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, rest)
        model.train()
        logits = model(tokens)
        _, _, rest = nnx.split(model, nnx.Param, ...)
        return logits, rest

    assert_half_is_enough(forward, filled(params), filled(rest), TOKENS)


def assert_half_is_enough_to_train(init: Callable[[], tuple[Any, Any]]) -> None:
    """For a language model and its optimizer, as `init` makes them."""
    graph, state = nnx.split(nnx.eval_shape(init))

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(language_loss)(model, tokens)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    assert_half_is_enough(step, filled(state), TOKENS, donated=(0,))


@pytest.mark.slow
def test_transformer_step():
    def init() -> tuple[Any, Any]:
        model = Transformer(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    assert_half_is_enough_to_train(init)


class Tied(nnx.Module):
    """The embedding of the tokens is also what scores them."""

    def __init__(self, rngs: Any):
        self.embed = nnx.Embed(1024, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        return self.embed.attend(x + self.down(nnx.relu(self.up(x))))


def test_tied_embeddings_step():
    graph, params = nnx.split(nnx.eval_shape(lambda: Tied(nnx.Rngs(0))))

    def step(params: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return language_loss(nnx.merge(graph, params), tokens)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    assert_half_is_enough(step, filled(params), TOKENS, donated=(0,))


class Recurrent(nnx.Module):
    """A GRU after another, each a scan over the sequence."""

    def __init__(self, rngs: Any):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List(
            [nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)) for _ in range(3)]
        )
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_gru_forward():
    graph, params, rest = nnx.split(
        nnx.eval_shape(lambda: Recurrent(nnx.Rngs(0))), nnx.Param, ...
    )

    def forward(params: Any, rest: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, rest)(tokens)

    assert_half_is_enough(forward, filled(params), filled(rest), TOKENS)


@pytest.mark.slow
def test_gru_step():
    def init() -> tuple[Any, Any]:
        model = Recurrent(nnx.Rngs(0))
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    assert_half_is_enough_to_train(init)


class Autoencoder(nnx.Module):
    """Variational, with batch statistics; the key is the caller's."""

    def __init__(self, rngs: Any):
        self.inside = nnx.Linear(784, 256, rngs=rngs)
        self.norm = nnx.BatchNorm(256, momentum=0.9, rngs=rngs)
        self.mean = nnx.Linear(256, 32, rngs=rngs)
        self.deviation = nnx.Linear(256, 32, rngs=rngs)
        self.outside = nnx.Linear(32, 256, rngs=rngs)
        self.image = nnx.Linear(256, 784, rngs=rngs)

    def __call__(self, images: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        x = nnx.relu(self.norm(self.inside(images)))
        mean, deviation = self.mean(x), jnp.exp(self.deviation(x))
        z = mean + deviation * jax.random.normal(key, mean.shape)
        return self.image(nnx.relu(self.outside(z))), mean, deviation


IMAGES = np.random.default_rng(1).uniform(size=(32, 784)).astype(np.float32)


def test_autoencoder_samples():
    graph, state = nnx.split(nnx.eval_shape(lambda: Autoencoder(nnx.Rngs(0))))

    def reconstruct(state: Any, images: jax.Array, key: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        model.eval()
        logits, _, _ = model(images, key)
        return jax.random.bernoulli(jax.random.fold_in(key, 1), nnx.sigmoid(logits))

    assert_half_is_enough(reconstruct, filled(state), IMAGES, jax.random.key(3))


@pytest.mark.slow
def test_autoencoder_step():
    def init() -> tuple[Any, Any]:
        model = Autoencoder(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(init))

    def loss(model: Any, images: jax.Array, key: jax.Array) -> jax.Array:
        model.train()
        logits, mean, deviation = model(images, key)
        missed = optax.sigmoid_binary_cross_entropy(logits, images).sum(-1)
        far = 0.5 * (mean**2 + deviation**2 - 1 - 2 * jnp.log(deviation)).sum(-1)
        return jnp.mean(missed + far)

    def step(state: Any, key: jax.Array, images: jax.Array) -> tuple[Any, ...]:
        model, optimizer = nnx.merge(graph, state)
        use, key = jax.random.split(key)
        value, grads = nnx.value_and_grad(loss)(model, images, use)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), key, value

    args = filled(state), jax.random.key(3), IMAGES
    assert_half_is_enough(step, *args, donated=(0, 1))
