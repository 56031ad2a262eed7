"""Inference with numpyro: a variational update, and one draw of a NUTS chain."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half import assert_half_is_enough


numpyro = pytest.importorskip("numpyro", exc_type=ImportError)
infer = pytest.importorskip("numpyro.infer", exc_type=ImportError)
distributions = pytest.importorskip("numpyro.distributions", exc_type=ImportError)
autoguide = pytest.importorskip("numpyro.infer.autoguide", exc_type=ImportError)

WIDTH = 192
RANDOM = np.random.default_rng(1)
INPUTS = RANDOM.normal(size=(16, WIDTH)).astype(np.float32)
TARGETS = RANDOM.normal(size=16).astype(np.float32)


def network(inputs: jax.Array, targets: jax.Array | None = None, layers: int = 3) -> None:
    """A regression whose weights all have a prior."""
    x = inputs
    for layer in range(layers):
        shape = (WIDTH, WIDTH)
        prior = distributions.Normal(jnp.zeros(shape), WIDTH**-0.5).to_event(2)
        x = jnp.tanh(x @ numpyro.sample(f"weight_{layer}", prior))
    noise = numpyro.sample("noise", distributions.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(inputs)):
        numpyro.sample("observed", distributions.Normal(x.sum(1), noise), obs=targets)


@pytest.mark.slow
def test_variational_update():
    guide = autoguide.AutoNormal(network)
    optimizer = numpyro.optim.Momentum(1e-3, 0.9)
    svi = infer.SVI(network, guide, optimizer, loss=infer.Trace_ELBO())
    state = jax.jit(svi.init)(jax.random.key(0), INPUTS, TARGETS)
    assert_half_is_enough(svi.update, state, INPUTS, TARGETS, donated=(0,))


def test_predictions():
    shape = (2, WIDTH, WIDTH)
    weights = RANDOM.normal(size=(4, *shape)).astype(np.float32) / WIDTH**0.5
    samples = {f"weight_{i}": weight for i, weight in enumerate(weights)}
    samples["noise"] = np.ones(2, np.float32)

    def predict(samples: Any, key: jax.Array, inputs: jax.Array) -> Any:
        predictive = infer.Predictive(network, samples, parallel=True)
        return predictive(key, inputs, layers=4)

    assert_half_is_enough(predict, samples, jax.random.key(0), INPUTS)


@pytest.mark.slow
def test_draw_of_nuts():
    kernel = infer.NUTS(network, max_tree_depth=3, step_size=0.01)

    def init(key: jax.Array) -> Any:
        return kernel.init(key, 10, None, (INPUTS, TARGETS, 1), {})

    state = jax.jit(init)(jax.random.key(0))

    def draw(state: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        return kernel.sample(state, (inputs, targets, 1), {})

    assert_half_is_enough(draw, state, INPUTS, TARGETS)
