"""Models of flax.linen: statistics as mutable collections, layers as a scan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half import assert_half_is_enough, assert_same, filled, named

import jturnip


nn = pytest.importorskip("flax.linen", exc_type=ImportError)
train_state = pytest.importorskip("flax.training.train_state", exc_type=ImportError)
optax = pytest.importorskip("optax", exc_type=ImportError)

CLASSES, CHANNELS = 10, 192
IMAGES = np.random.default_rng(1).normal(size=(2, 8, 8, 3)).astype(np.float32)
LABELS = np.array([3, 7], np.int32)


class Stage(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.Conv(CHANNELS, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(y))
        y = nn.Conv(CHANNELS, (3, 3), use_bias=False)(y)
        return nn.relu(x + nn.BatchNorm(use_running_average=not train, momentum=0.9)(y))


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(CHANNELS, (3, 3))(x)
        for _ in range(2):
            x = Stage()(x, train)
        x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def test_batch_norm_forward():
    model = Convolutional()
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), IMAGES, False))

    def forward(variables: Any, images: jax.Array) -> jax.Array:
        return model.apply(variables, images, False)

    assert_half_is_enough(forward, filled(variables), IMAGES)


def test_batch_norm_step():
    model = Convolutional()

    def init() -> Any:
        variables = model.init(jax.random.key(0), IMAGES, True)
        return TrainState.create(
            apply_fn=model.apply,
            params=variables["params"],
            tx=optax.sgd(0.1, momentum=0.9, nesterov=True),
            batch_stats=variables["batch_stats"],
        )

    def step(state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            changes = ["batch_stats"]
            logits, updates = state.apply_fn(variables, images, True, mutable=changes)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), (updates, logits)

        (value, (updates, logits)), grads = jax.value_and_grad(loss, has_aux=True)(
            state.params
        )
        state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
        return state, {"loss": value, "accuracy": jnp.mean(logits.argmax(-1) == labels)}

    state = filled(jax.eval_shape(init))
    assert_half_is_enough(step, state, IMAGES, LABELS, donated=(0,))


def test_a_train_state_on_the_host_keeps_its_types():
    # `create` begins to count with Python's 0.
    params = {"w": np.ones(2, np.float32)}
    state = train_state.TrainState.create(
        apply_fn=lambda: None, params=params, tx=optax.identity()
    )
    assert_same(named(jturnip.host(state)), named(jax.device_put(state)))


VOCABULARY, WIDTH, LENGTH = 256, 96, 16
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (2, LENGTH), np.int32)


class Block(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        y = nn.LayerNorm()(x)
        x += nn.MultiHeadDotProductAttention(num_heads=4)(y, y, mask=mask)
        y = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))
        y = nn.Dense(WIDTH)(nn.gelu(y))
        return x + nn.Dropout(0.1, deterministic=not self.train)(y), None


class Transformer(nn.Module):
    """One block's code for all: its weights stacked, and only its inputs kept."""

    train: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=4,
        )
        x, _ = blocks(self.train)(x, nn.make_causal_mask(tokens))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def test_scanned_layers_forward():
    model = Transformer(train=False)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS))
    assert_half_is_enough(model.apply, filled(variables), TOKENS)


@pytest.mark.slow
def test_scanned_and_rematerialised_layers_step():
    model = Transformer(train=True)

    def init() -> Any:
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        return train_state.TrainState.create(
            apply_fn=model.apply,
            params=model.init(keys, TOKENS)["params"],
            tx=optax.adam(1e-3),
        )

    def step(state: Any, tokens: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            rngs = {"dropout": jax.random.fold_in(key, state.step)}
            logits = state.apply_fn({"params": params}, tokens, rngs=rngs)[:, :-1]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    state = filled(jax.eval_shape(init))
    assert_half_is_enough(step, state, TOKENS, jax.random.key(2), donated=(0,))
