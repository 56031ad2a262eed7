"""Token after token with a cache of keys and values, in loops of lax, with flax.nnx."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half import assert_half_is_enough, filled


nnx = pytest.importorskip("flax.nnx", exc_type=ImportError)

VOCABULARY, WIDTH, BATCH, LENGTH = 128, 128, 4, 32


class Block(nnx.Module):
    def __init__(self, rngs: Any):
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=True, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), deterministic=True)
        return x + self.down(nnx.silu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    def __init__(self, rngs: Any):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        for block in self.blocks:
            block.attention.init_cache((BATCH, LENGTH, WIDTH))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)[:, 0]


def decoder() -> tuple[Any, Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))), nnx.Param, ...)


def test_one_token():
    graph, params, cache = decoder()

    def one(params: Any, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, cache)
        logits = model(tokens)
        return logits, nnx.split(model, nnx.Param, ...)[2]

    tokens = np.arange(BATCH, dtype=np.int32)
    assert_half_is_enough(one, filled(params), filled(cache), tokens, donated=(1,))


def test_sampling_until_all_have_ended():
    graph, params, cache = decoder()

    def generate(params: Any, cache: Any, first: jax.Array, key: jax.Array) -> jax.Array:
        def more(state: Any) -> jax.Array:
            length, ended, *_ = state
            return (length < LENGTH) & ~ended.all()

        def step(state: Any) -> Any:
            length, ended, texts, cache, key = state
            model = nnx.merge(graph, params, cache)
            logits = model(texts[:, length - 1])
            key, use = jax.random.split(key)
            tokens = jnp.where(ended, 0, jax.random.categorical(use, logits))
            texts = texts.at[:, length].set(tokens)
            cache = nnx.split(model, nnx.Param, ...)[2]
            return length + 1, ended | (tokens == 0), texts, cache, key

        texts = jnp.zeros((BATCH, LENGTH), jnp.int32).at[:, 0].set(first)
        state = (1, jnp.zeros(BATCH, bool), texts, cache, key)
        return jax.lax.while_loop(more, step, state)[2]

    first = np.arange(1, BATCH + 1, dtype=np.int32)
    args = filled(params), filled(cache), first, jax.random.key(3)
    assert_half_is_enough(generate, *args)


def test_greedy_for_a_number_of_tokens():
    graph, params, cache = decoder()

    def generate(params: Any, cache: Any, first: jax.Array) -> jax.Array:
        def step(i: jax.Array, state: Any) -> Any:
            texts, cache = state
            model = nnx.merge(graph, params, cache)
            texts = texts.at[:, i + 1].set(model(texts[:, i]).argmax(-1))
            return texts, nnx.split(model, nnx.Param, ...)[2]

        texts = jnp.zeros((BATCH, 9), jnp.int32).at[:, 0].set(first)
        return jax.lax.fori_loop(0, 8, step, (texts, cache))[0]

    first = np.arange(1, BATCH + 1, dtype=np.int32)
    assert_half_is_enough(generate, filled(params), filled(cache), first)
