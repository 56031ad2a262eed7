"""The Llama architecture in plain JAX: tokens to logits, loss, training step, and text.

RMSNorm, rotary positions, grouped-query attention, SwiGLU and an untied head. The layers
are a Python loop over arrays of their own or, if `stacked`, a `lax.scan` over stacks.
Norms, softmax and loss are computed in float32 whatever the dtype of the weights.

    model = llama.config("tiny")
    optimizer = llama.adamw()
    step = jax.jit(functools.partial(llama.train_step, model, optimizer), donate_argnums=0)
    state = llama.init_state(model, optimizer, jax.random.key(0))
    state, loss = step(state, tokens)
    tokens = llama.generate(model, state.params, prompt, 32)
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jturnip.models.training import Params, TrainState, adamw as adamw, new_state, update


if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model, and of the training batch its size is meant for."""

    vocabulary: int
    width: int  # a multiple of `heads`
    layers: int
    heads: int  # query heads, a multiple of `kv_heads`
    kv_heads: int  # key and value heads, each shared by heads // kv_heads query heads
    hidden: int  # width inside the feed-forward block
    length: int  # tokens in a sequence
    batch: int = 1  # sequences in a training batch
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and activations
    remat: bool = False  # keep only each layer's input, compute the rest again

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} / {self.heads} heads must be even")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} kv_heads")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


# Bytes are the vocabulary below 1b; 1b, 3b, 7b and 13b are the shapes of TinyLlama,
# OpenLLaMA and Llama 2.
SIZES: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(256, 32, 2, 4, 2, 64, length=32, batch=2),
    "small": LlamaConfig(256, 128, 4, 4, 2, 384, length=64, batch=4),
    "bench": LlamaConfig(256, 512, 6, 8, 4, 1536, length=128, batch=8),
    "demo": LlamaConfig(256, 384, 12, 6, 2, 1024, length=128, batch=8),
    "100m": LlamaConfig(256, 768, 16, 12, 4, 2048, length=512, batch=8),
    "400m": LlamaConfig(256, 1024, 32, 16, 4, 3072, length=1024, batch=8),
    "1b": LlamaConfig(32_000, 2048, 22, 32, 4, 5632, length=2048, batch=4),
    "3b": LlamaConfig(32_000, 3200, 26, 32, 32, 8640, length=2048),
    "7b": LlamaConfig(32_000, 4096, 32, 32, 32, 11_008, length=4096),
    "13b": LlamaConfig(32_000, 5120, 40, 40, 40, 13_824, length=4096),
}


def config(size: str, **changes: Any) -> LlamaConfig:
    """A named size, with fields replaced: `config("7b", dtype="bfloat16")`."""
    if size not in SIZES:
        raise ValueError(f"no Llama of size {size!r}; there are {', '.join(SIZES)}")
    return dataclasses.replace(SIZES[size], **changes)


def init(config: LlamaConfig, key: jax.Array) -> Params:
    """Random weights: normal, scaled by the width of what each reads."""
    dtype = jnp.dtype(config.dtype)

    def normal(key: jax.Array, inputs: int, outputs: int, scale: float = 1.0) -> jax.Array:
        deviation = scale / math.sqrt(inputs)
        return (jax.random.normal(key, (inputs, outputs)) * deviation).astype(dtype)

    # What adds to the residual stream starts smaller, so that its variance stays near 1.
    residual = 1 / math.sqrt(2 * config.layers)
    kv_width = config.kv_heads * config.head_width
    layers: list[Params] = []
    for index in range(config.layers):
        keys = jax.random.split(jax.random.fold_in(key, index), 7)
        layers.append(
            {
                "attention_norm": jnp.ones(config.width, dtype),
                "query": normal(keys[0], config.width, config.width),
                "key": normal(keys[1], config.width, kv_width),
                "value": normal(keys[2], config.width, kv_width),
                "output": normal(keys[3], config.width, config.width, residual),
                "feed_norm": jnp.ones(config.width, dtype),
                "gate": normal(keys[4], config.width, config.hidden),
                "up": normal(keys[5], config.width, config.hidden),
                "down": normal(keys[6], config.hidden, config.width, residual),
            }
        )
    ends = jax.random.split(jax.random.fold_in(key, config.layers))
    embedding = jax.random.normal(ends[0], (config.vocabulary, config.width))
    return {
        "embedding": embedding.astype(dtype),
        "layers": layers,
        "norm": jnp.ones(config.width, dtype),
        "head": normal(ends[1], config.width, config.vocabulary),
    }


def abstract_params(config: LlamaConfig) -> Params:
    """The tree of `init` as ShapeDtypeStructs; allocates nothing."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def param_count(config: LlamaConfig) -> int:
    """How many numbers the weights are."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


def forward(config: LlamaConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits of the next token: int [batch, length] to [batch, length, vocabulary]."""
    block = functools.partial(layer, config)
    if config.remat:
        block = jax.checkpoint(block)
    x = params["embedding"][tokens]
    rotation = rotary_angles(config, jnp.arange(tokens.shape[1]))
    layers = params["layers"]
    if isinstance(layers, dict):
        x, _ = jax.lax.scan(
            lambda x, weights: (block(weights, x, rotation), None), x, layers
        )
    else:
        for weights in layers:
            x = block(weights, x, rotation)
    return rms_norm(config, params["norm"], x) @ params["head"]


def generate(
    config: LlamaConfig, params: Params, prompt: jax.Array, count: int
) -> jax.Array:
    """The likeliest tokens after a prompt: int [batch, length] to [batch, count].

    The prompt is read at once, and each token that follows by itself, in a `while_loop`,
    with the keys and values of those before it in a cache.
    """
    batch, length = prompt.shape
    cache = empty_cache(config, params, batch, length + count)
    cache, logits = extended(config, params, cache, prompt, jnp.int32(0))
    tokens = jnp.zeros((batch, count), prompt.dtype)

    def step(state: Any) -> Any:
        at, cache, token, tokens = state
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, at, 1)
        cache, logits = extended(config, params, cache, token[:, None], length + at)
        return at + 1, cache, likeliest(logits), tokens

    def likeliest(logits: jax.Array) -> jax.Array:
        return jnp.argmax(logits[:, -1], axis=-1).astype(prompt.dtype)

    state = jnp.int32(0), cache, likeliest(logits), tokens
    return jax.lax.while_loop(lambda state: state[0] < count, step, state)[-1]


# Keys and values of all tokens so far, [batch, length, kv_heads, head_width] each: one pair
# for each layer, or one pair of stacks.
Cache: TypeAlias = Any


def empty_cache(config: LlamaConfig, params: Params, batch: int, length: int) -> Cache:
    """Room for the keys and values of so many tokens."""
    shape = (batch, length, config.kv_heads, config.head_width)
    empty = lambda *layers: (jnp.zeros((*layers, *shape), config.dtype),) * 2
    is_stacked = isinstance(params["layers"], dict)
    return empty(config.layers) if is_stacked else [empty() for _ in params["layers"]]


def extended(
    config: LlamaConfig, params: Params, cache: Cache, tokens: jax.Array, at: jax.Array
) -> tuple[Cache, jax.Array]:
    """The cache with some more tokens in it, and the logits of what follows each.

    Args:
      config: of the model.
      params: its weights.
      cache: of the tokens before.
      tokens: int [batch, length].
      at: how many there are before.
    """
    x = params["embedding"][tokens]
    positions = at + jnp.arange(tokens.shape[1])
    rotation = rotary_angles(config, positions)

    def block(x: jax.Array, weights: Params, before: Cache) -> tuple[jax.Array, Cache]:
        normed = rms_norm(config, weights["attention_norm"], x)
        query, key, value = heads(config, weights, normed, rotation)
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, at, 1)
        keys, values = put(before[0], key), put(before[1], value)
        seen = jnp.arange(keys.shape[1]) <= positions[:, None]
        x = x + attended(config, weights, query, keys, values, seen)
        return fed(config, weights, x), (keys, values)

    layers = params["layers"]
    if isinstance(layers, dict):
        step = lambda x, both: block(x, *both)
        x, cache = jax.lax.scan(step, x, (layers, cache))
    else:
        new = []
        for weights, before in zip(layers, cache, strict=True):
            x, cached = block(x, weights, before)
            new.append(cached)
        cache = new
    return cache, rms_norm(config, params["norm"], x) @ params["head"]


def stacked(params: Params) -> Params:
    """The same weights with each kind of all layers in one array: [layers, ...]."""
    return {**params, "layers": jax.tree.map(lambda *w: jnp.stack(w), *params["layers"])}


def loss(config: LlamaConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each token given those before it, in nats."""
    logits = forward(config, params, tokens)[:, :-1].astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def init_state(
    config: LlamaConfig, optimizer: "optax.GradientTransformation", key: jax.Array
) -> TrainState:
    """Random weights and a fresh optimizer."""
    return new_state(init(config, key), optimizer)


def abstract_state(
    config: LlamaConfig, optimizer: "optax.GradientTransformation"
) -> TrainState:
    """The tree of `init_state` as ShapeDtypeStructs; allocates nothing."""
    return jax.eval_shape(lambda: init_state(config, optimizer, jax.random.key(0)))


def train_step(
    config: LlamaConfig,
    optimizer: "optax.GradientTransformation",
    state: TrainState,
    tokens: jax.Array,
) -> tuple[TrainState, jax.Array]:
    """One optimizer step: the new state, and the loss before it. Donate `state`."""
    return update(lambda params: loss(config, params, tokens), optimizer, state)


def layer(
    config: LlamaConfig, weights: Params, x: jax.Array, rotation: jax.Array
) -> jax.Array:
    """Attention, then SwiGLU, each added to its input."""
    normed = rms_norm(config, weights["attention_norm"], x)
    return fed(config, weights, x + attention(config, weights, normed, rotation))


def fed(config: LlamaConfig, weights: Params, x: jax.Array) -> jax.Array:
    """SwiGLU, added to its input."""
    normed = rms_norm(config, weights["feed_norm"], x)
    gated = jax.nn.silu(normed @ weights["gate"]) * (normed @ weights["up"])
    return x + gated @ weights["down"]


def attention(
    config: LlamaConfig, weights: Params, x: jax.Array, rotation: jax.Array
) -> jax.Array:
    """Causal grouped-query attention over [batch, length, width]."""
    length = x.shape[1]
    query, key, value = heads(config, weights, x, rotation)
    causal = jnp.tril(jnp.ones((length, length), bool))
    return attended(config, weights, query, key, value, causal)


def heads(
    config: LlamaConfig, weights: Params, x: jax.Array, rotation: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [batch, length, kv_heads, heads / kv_heads, head_width], and keys and values
    [batch, length, kv_heads, head_width]."""
    batch, length, _ = x.shape
    groups = config.heads // config.kv_heads
    shared = (batch, length, config.kv_heads, config.head_width)
    query = (x @ weights["query"]).reshape(batch, length, config.heads, config.head_width)
    query = rotate(query, rotation).reshape(*shared[:3], groups, config.head_width)
    key = rotate((x @ weights["key"]).reshape(shared), rotation)
    value = (x @ weights["value"]).reshape(shared)
    return query, key, value


def attended(
    config: LlamaConfig,
    weights: Params,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: jax.Array,
) -> jax.Array:
    """What each position takes from those it sees, bool [queries, keys]."""
    batch, length = query.shape[:2]
    scores = jnp.einsum(
        "btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32
    ) / math.sqrt(config.head_width)
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    mixed = jnp.einsum("bkgts,bskh->btkgh", shares, value)
    return mixed.reshape(batch, length, config.width) @ weights["output"]


def rotary_angles(config: LlamaConfig, positions: jax.Array) -> jax.Array:
    """The angle of each position, int [length], and frequency: [length, head_width / 2]."""
    exponents = jnp.arange(0, config.head_width, 2, dtype=jnp.float32) / config.head_width
    return positions.astype(jnp.float32)[:, None] * config.rope_theta**-exponents


def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Turns the pairs (i, i + head_width / 2) of [batch, length, heads, head_width]."""
    cosine, sine = jnp.cos(rotation)[:, None], jnp.sin(rotation)[:, None]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [left * cosine - right * sine, right * cosine + left * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rms_norm(config: LlamaConfig, weight: jax.Array, x: jax.Array) -> jax.Array:
    """x over its root mean square, times a learned weight."""
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + config.norm_epsilon)).astype(x.dtype) * weight
