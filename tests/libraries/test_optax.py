"""Chains of optax transformations, whose states are counters, keys and averages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half import assert_half_is_enough, filled


optax = pytest.importorskip("optax", exc_type=ImportError)

WIDTH, DEPTH = 256, 4
INPUTS, TARGETS = np.random.default_rng(1).normal(size=(2, 16, WIDTH)).astype(np.float32)
PARAMS = {
    f"layer_{i}": {
        "weight": jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32"),
        "bias": jax.ShapeDtypeStruct((WIDTH,), "float32"),
    }
    for i in range(DEPTH)
}


def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    x = inputs
    for layer in params.values():
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    return optax.l2_loss(x, targets).mean()


def midway(optimizer: Any) -> tuple[Any, Any]:
    """Weights and a state: arrays as in the middle of training, scalars as at its start."""
    params = filled(PARAMS)
    start = jax.jit(optimizer.init)(params)
    return params, jax.tree.map(lambda a, b: b if a.ndim else a, start, filled(start))


def weights_only(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def clipped_and_scheduled() -> Any:
    schedule = optax.warmup_cosine_decay_schedule(1e-4, 1e-2, 10, 100)
    return optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(schedule, mask=weights_only)
    )


def injected() -> Any:
    return optax.chain(
        optax.adaptive_grad_clip(0.01),
        optax.inject_hyperparams(optax.nadam)(
            learning_rate=optax.exponential_decay(1e-2, 10, 0.9), b1=0.8
        ),
        optax.ema(0.99),
    )


def accumulated() -> Any:
    inner = optax.chain(
        optax.masked(optax.add_decayed_weights(1e-2), weights_only),
        optax.scale_by_amsgrad(),
        optax.scale_by_learning_rate(1e-3),
    )
    return optax.MultiSteps(inner, every_k_schedule=2)


def by_kind() -> Any:
    def kinds(params: Any) -> Any:
        return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)

    matrices = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(7)), optax.lion(1e-3))
    vectors = optax.sgd(1e-2, momentum=0.9)
    return optax.partition({"matrix": matrices, "vector": vectors}, kinds)


def test_gradients_summed_over_parts_of_a_batch():
    optimizer = optax.adam(1e-3)

    def step(params: Any, state: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        def add(total: Any, part: Any) -> tuple[Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, *part)
            return optax.tree.add(total, grads), value

        parts = inputs.reshape(4, -1, WIDTH), targets.reshape(4, -1, WIDTH)
        grads, values = jax.lax.scan(add, optax.tree.zeros_like(params), parts)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, values.mean()

    args = midway(optimizer)
    assert_half_is_enough(step, *args, INPUTS, TARGETS, donated=(0, 1))


@pytest.mark.parametrize(
    "make",
    [
        clipped_and_scheduled,
        injected,
        by_kind,
        accumulated,
    ],
)
def test_step(make: Any):
    optimizer = make()

    def step(params: Any, state: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    args = midway(optimizer)
    assert_half_is_enough(step, *args, INPUTS, TARGETS, donated=(0, 1))
