"""The pair representation of structure prediction in plain JAX, where weights are tiny and
intermediates are not.

A residue pair (i, j) has a vector; a block updates all of them through triangles (i, j, k):
two multiplications, two attentions and a transition, as in AlphaFold 2 (supplementary
algorithms 11 to 15). The representation is length² x width; one attention's scores are
heads x length³.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jturnip.models.training import Params, TrainState, adamw as adamw, new_state, update


if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class PairConfig:
    """The shape of a model and of its input."""

    length: int  # residues; the representation is length x length x width
    width: int
    blocks: int
    heads: int = 4
    head_width: int = 32
    hidden: int = 128  # channels of the triangle multiplication
    widening: int = 4  # of the transition
    bins: int = 64  # of the predicted distance
    norm_epsilon: float = 1e-5
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and activations
    remat: bool = False  # keep only each block's input, compute the rest again


# "large" and "huge" have AlphaFold 2's channels, "huge" its number of blocks.
SIZES: dict[str, PairConfig] = {
    "tiny": PairConfig(12, 16, 2, heads=2, head_width=8, hidden=16, bins=8),
    "small": PairConfig(32, 32, 2, heads=2, head_width=16, hidden=32, bins=16),
    "bench": PairConfig(96, 48, 2, heads=4, head_width=16, hidden=48, bins=32),
    "medium": PairConfig(128, 64, 4, heads=4, head_width=16, hidden=64),
    "large": PairConfig(384, 128, 8),
    "huge": PairConfig(1024, 128, 48),
}


def config(size: str, **changes: Any) -> PairConfig:
    """A named size, with fields replaced: `config("large", length=512)`."""
    if size not in SIZES:
        raise ValueError(f"no pair model of size {size!r}; there are {', '.join(SIZES)}")
    return dataclasses.replace(SIZES[size], **changes)


class PairBatch(NamedTuple):
    """One training example."""

    pair: jax.Array | np.ndarray  # [length, length, width], what is seen
    bins: jax.Array | np.ndarray  # int32 [length, length], the true distances, in bins


def init(config: PairConfig, key: jax.Array) -> Params:
    """Random weights: normal, scaled by the width of what each reads."""
    block_keys = jax.random.split(key, config.blocks + 1)
    return {
        "blocks": [_init_block(config, each) for each in block_keys[:-1]],
        "norm": _init_norm(config, config.width),
        "distances": _init_linear(config, block_keys[-1], config.width, config.bins),
    }


def abstract_params(config: PairConfig) -> Params:
    """The tree of `init` as ShapeDtypeStructs; allocates nothing."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def forward(config: PairConfig, params: Params, pair: jax.Array | np.ndarray) -> jax.Array:
    """All blocks: [length, length, width] to the same."""
    step = functools.partial(block, config)
    if config.remat:
        step = jax.checkpoint(step)
    x = jnp.asarray(pair, config.dtype)
    for weights in params["blocks"]:
        x = step(weights, x)
    return x


def loss(config: PairConfig, params: Params, batch: PairBatch) -> jax.Array:
    """Mean cross-entropy of the distance bins, predicted alike for (i, j) and (j, i)."""
    pair = layer_norm(config, params["norm"], forward(config, params, batch.pair))
    logits = (pair + pair.swapaxes(0, 1)) @ params["distances"]
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, batch.bins[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def init_state(
    config: PairConfig, optimizer: "optax.GradientTransformation", key: jax.Array
) -> TrainState:
    """Random weights and a fresh optimizer."""
    return new_state(init(config, key), optimizer)


def train_step(
    config: PairConfig,
    optimizer: "optax.GradientTransformation",
    state: TrainState,
    batch: PairBatch,
) -> tuple[TrainState, jax.Array]:
    """One optimizer step: the new state, and the loss before it. Donate `state`."""
    return update(lambda params: loss(config, params, batch), optimizer, state)


def examples(config: PairConfig, seed: int = 0) -> Iterator[PairBatch]:
    """Endless random chains: blurred distances to see, true ones to predict (as numpy)."""
    random = np.random.default_rng(seed)
    centres = np.linspace(0.0, 2.0 * math.sqrt(config.length), config.width)
    edges = np.linspace(0.0, 2.0 * math.sqrt(config.length), config.bins)[1:]
    while True:
        chain = np.cumsum(random.normal(size=(config.length, 3)), axis=0)
        distance = np.linalg.norm(chain[:, None] - chain[None], axis=-1)
        blurred = distance + random.normal(size=distance.shape)
        seen = np.exp(-((blurred[..., None] - centres) ** 2)).astype(np.float32)
        yield PairBatch(seen, np.digitize(distance, edges).astype(np.int32))


def block(config: PairConfig, weights: Params, pair: jax.Array) -> jax.Array:
    """Five updates through triangles, each added to its input."""
    pair = pair + triangle_multiplication(config, weights["outgoing"], pair, "outgoing")
    pair = pair + triangle_multiplication(config, weights["incoming"], pair, "incoming")
    pair = pair + triangle_attention(config, weights["starting"], pair)
    # Around the ending node: the same on (j, i).
    flipped = triangle_attention(config, weights["ending"], pair.swapaxes(0, 1))
    pair = pair + flipped.swapaxes(0, 1)
    return pair + transition(config, weights["transition"], pair)


def triangle_multiplication(
    config: PairConfig,
    weights: Params,
    pair: jax.Array,
    edges: Literal["outgoing", "incoming"],
) -> jax.Array:
    """Updates (i, j) by sum over k of (i, k) (j, k), or of (k, i) (k, j) if incoming."""
    x = layer_norm(config, weights["norm"], pair)
    left = jax.nn.sigmoid(x @ weights["left_gate"]) * (x @ weights["left"])
    right = jax.nn.sigmoid(x @ weights["right_gate"]) * (x @ weights["right"])
    sum_over_k = "ikc,jkc->ijc" if edges == "outgoing" else "kic,kjc->ijc"
    triangles = layer_norm(
        config, weights["triangle_norm"], jnp.einsum(sum_over_k, left, right)
    )
    return jax.nn.sigmoid(x @ weights["gate"]) * (triangles @ weights["output"])


def triangle_attention(config: PairConfig, weights: Params, pair: jax.Array) -> jax.Array:
    """Updates (i, j) from every (i, k), biased by (j, k)."""
    x = layer_norm(config, weights["norm"], pair)
    split = (*pair.shape[:2], config.heads, config.head_width)
    query, key, value = (
        (x @ weights[name]).reshape(split) for name in ("query", "key", "value")
    )
    bias = jnp.einsum("jkc,ch->hjk", x, weights["bias"])
    scores = jnp.einsum("ijhc,ikhc->ihjk", query, key, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(config.head_width) + bias
    shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("ihjk,ikhc->ijhc", shares, value)
    gated = jax.nn.sigmoid(x @ weights["gate"]) * mixed.reshape(*pair.shape[:2], -1)
    return gated @ weights["output"]


def transition(config: PairConfig, weights: Params, pair: jax.Array) -> jax.Array:
    """A two-layer network on each pair alone."""
    x = layer_norm(config, weights["norm"], pair)
    return jax.nn.relu(x @ weights["widen"]) @ weights["narrow"]


def layer_norm(config: PairConfig, weights: Params, x: jax.Array) -> jax.Array:
    """x less its mean, over its deviation, scaled and shifted; in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    normed = (centred * jax.lax.rsqrt(variance + config.norm_epsilon)).astype(x.dtype)
    return normed * weights["scale"] + weights["shift"]


def _init_block(config: PairConfig, key: jax.Array) -> Params:
    linear = functools.partial(_init_linear, config)
    width, hidden, inner = config.width, config.hidden, config.heads * config.head_width

    def multiplication(key: jax.Array) -> Params:
        keys = jax.random.split(key, 6)
        return {
            "norm": _init_norm(config, width),
            "left": linear(keys[0], width, hidden),
            "left_gate": linear(keys[1], width, hidden),
            "right": linear(keys[2], width, hidden),
            "right_gate": linear(keys[3], width, hidden),
            "triangle_norm": _init_norm(config, hidden),
            "gate": linear(keys[4], width, width),
            "output": linear(keys[5], hidden, width),
        }

    def attention(key: jax.Array) -> Params:
        keys = jax.random.split(key, 6)
        return {
            "norm": _init_norm(config, width),
            "query": linear(keys[0], width, inner),
            "key": linear(keys[1], width, inner),
            "value": linear(keys[2], width, inner),
            "bias": linear(keys[3], width, config.heads),
            "gate": linear(keys[4], width, inner),
            "output": linear(keys[5], inner, width),
        }

    keys = jax.random.split(key, 6)
    return {
        "outgoing": multiplication(keys[0]),
        "incoming": multiplication(keys[1]),
        "starting": attention(keys[2]),
        "ending": attention(keys[3]),
        "transition": {
            "norm": _init_norm(config, width),
            "widen": linear(keys[4], width, config.widening * width),
            "narrow": linear(keys[5], config.widening * width, width),
        },
    }


def _init_linear(
    config: PairConfig, key: jax.Array, inputs: int, outputs: int
) -> jax.Array:
    return (jax.random.normal(key, (inputs, outputs)) / math.sqrt(inputs)).astype(
        config.dtype
    )


def _init_norm(config: PairConfig, width: int) -> Params:
    dtype = jnp.dtype(config.dtype)
    return {"scale": jnp.ones(width, dtype), "shift": jnp.zeros(width, dtype)}
