"""Models of equinox: arrays and the rest apart, one example at a time under `vmap`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half import assert_half_is_enough, filled


eqx = pytest.importorskip("equinox", exc_type=ImportError)
optax = pytest.importorskip("optax", exc_type=ImportError)

WIDTH, LENGTH, EXPERTS = 128, 16, 4


class Experts(eqx.Module):
    """Each token goes to one of several small networks, as far as those have room."""

    gate: Any
    up: jax.Array
    down: jax.Array

    def __init__(self, key: jax.Array):
        gate, up, down = jax.random.split(key, 3)
        self.gate = eqx.nn.Linear(WIDTH, EXPERTS, use_bias=False, key=gate)
        self.up = jax.random.normal(up, (EXPERTS, WIDTH, 2 * WIDTH)) / WIDTH**0.5
        self.down = jax.random.normal(down, (EXPERTS, 2 * WIDTH, WIDTH)) / WIDTH**0.5

    def __call__(self, x: jax.Array) -> jax.Array:
        room = 2 * LENGTH // EXPERTS
        shares = jax.nn.softmax(jax.vmap(self.gate)(x))
        share, chosen = jax.lax.top_k(shares, 1)
        belongs = jax.nn.one_hot(chosen[:, 0], EXPERTS)
        place = ((jnp.cumsum(belongs, axis=0) - 1) * belongs).sum(1).astype(int)
        sent = belongs[:, :, None] * jax.nn.one_hot(place, room)[:, None, :]
        inside = jnp.einsum("tec,td->ecd", sent, x)
        inside = jax.nn.silu(jnp.einsum("ecd,edh->ech", inside, self.up))
        inside = jnp.einsum("ech,ehd->ecd", inside, self.down)
        return jnp.einsum("tec,ecd->td", sent * share[:, :, None], inside)


class Block(eqx.Module):
    attention: Any
    experts: Experts
    norms: list[Any]
    dropout: Any

    def __init__(self, key: jax.Array):
        attention, experts = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=attention)
        self.experts = Experts(experts)
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.RMSNorm(WIDTH)]
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=mask)
        y = self.experts(jax.vmap(self.norms[1])(x))
        return x + self.dropout(y, key=key, inference=key is None)


class Transformer(eqx.Module):
    embed: Any
    blocks: tuple[Block, ...]
    activation: Any  # a leaf that is no array

    def __init__(self, key: jax.Array):
        embed, *blocks = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(128, WIDTH, key=embed)
        self.blocks = tuple(Block(key) for key in blocks)
        self.activation = jax.nn.gelu

    def __call__(self, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        x = jax.vmap(self.embed)(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, i))
        return self.activation(x) @ self.embed.weight.T


TOKENS = np.random.default_rng(1).integers(0, 128, (2, LENGTH), np.int32)


def abstract_parts() -> tuple[Any, Any]:
    return eqx.partition(
        eqx.filter_eval_shape(Transformer, jax.random.key(0)),
        lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    )


def test_mixture_of_experts_forward():
    arrays, static = abstract_parts()

    def forward(arrays: Any, tokens: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(arrays, static))(tokens)

    assert_half_is_enough(forward, filled(arrays), TOKENS)


@pytest.mark.slow
def test_mixture_of_experts_step():
    arrays, static = abstract_parts()
    optimizer = optax.adamw(1e-3)

    def loss(model: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        logits = jax.vmap(model)(tokens, jax.random.split(key, len(tokens)))[:, :-1]
        targets = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(
        arrays: Any, state: Any, tokens: jax.Array, key: jax.Array
    ) -> tuple[Any, Any, jax.Array, jax.Array]:
        model = eqx.combine(arrays, static)
        use, key = jax.random.split(key)
        value, grads = eqx.filter_value_and_grad(loss)(model, tokens, use)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        model = eqx.apply_updates(model, updates)
        return eqx.filter(model, eqx.is_array), state, key, value

    state = filled(jax.eval_shape(optimizer.init, arrays))
    args = filled(arrays), state, TOKENS, jax.random.key(3)
    assert_half_is_enough(step, *args, donated=(0, 1))
