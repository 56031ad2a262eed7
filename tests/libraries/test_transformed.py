"""Users' models under JAX's transformations, in half of what the whole needs."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import whole_bytes  # pyright: ignore[reportMissingImports]
from half import filled  # pyright: ignore[reportMissingImports]
from watch import Watch  # pyright: ignore[reportMissingImports]

import jturnip
from jturnip.models import llama, pair


# Scales of the weights, in turn: all of a model is between them and its result.
SCALES = jnp.linspace(-0.1, 0.1, 4)
# What JAX itself holds beside a function: scales, their basis, one number of each.
BESIDE = 4096


def scaled(weights: Any, scales: jax.Array) -> Any:
    leaves, tree = jax.tree.flatten(weights)
    return jax.tree.unflatten(
        tree, [w * (1 + scales[i % len(scales)]) for i, w in enumerate(leaves)]
    )


def of_llama() -> tuple[Callable[..., Any], Any]:
    model = llama.config("small", layers=1)
    tokens = np.random.default_rng(0).integers(0, 256, (2, model.length + 1), np.int32)
    return lambda w: llama.loss(model, w, jnp.asarray(tokens)), filled(
        llama.abstract_params(model)
    )


def of_pair(blocks: int = 2) -> tuple[Callable[..., Any], Any]:
    model = pair.config("small", blocks=blocks, widening=2)
    batch = next(pair.examples(model))
    return lambda w: pair.loss(model, w, batch), filled(pair.abstract_params(model))


def of_flax() -> tuple[Callable[..., Any], Any]:
    nn = pytest.importorskip("flax.linen")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = x + nn.Dense(128)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
            return x

    model, x = Network(), np.linspace(-1, 1, 16 * 128, dtype=np.float32).reshape(16, 128)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), x))
    return lambda v: jnp.square(model.apply(v, x)).mean(), filled(variables)


def of_equinox() -> tuple[Callable[..., Any], Any]:
    eqx = pytest.importorskip("equinox")
    model = eqx.filter_eval_shape(
        eqx.nn.MLP, 64, 64, 128, 6, jax.nn.gelu, key=jax.random.key(0)
    )
    arrays, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    x = np.linspace(-1, 1, 16 * 64, dtype=np.float32).reshape(16, 64)
    of = lambda w: jnp.square(jax.vmap(eqx.combine(w, static))(x)).mean()
    return of, filled(arrays)


MODELS = {"llama": of_llama, "pair": of_pair, "flax": of_flax, "equinox": of_equinox}
# A hessian's four parts take long to compile: of one block here.
SMALLER: dict[Any, Callable[[], Any]] = {
    ("pair", "hessian"): functools.partial(of_pair, blocks=1)
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "gradients": lambda f: lambda *a: (jax.grad(f)(*a), jax.value_and_grad(f)(*a)[0]),
    "vmap": lambda f: lambda w, z: jax.vmap(f, (None, 0))(w, jnp.stack([z, -z, 2 * z])),
    "hessian": lambda f: jax.hessian(f, argnums=1),
}


# What takes longest to compile.
LONG = [
    ("flax", "hessian"),
    ("equinox", "hessian"),
    *itertools.product(("llama", "pair"), WAYS),
]


@pytest.mark.parametrize(
    ("model", "way"),
    [
        pytest.param(*each, marks=pytest.mark.slow) if each in LONG else each
        for each in itertools.product(MODELS, WAYS)
    ],
)
def test_half_is_enough(model: str, way: str):
    of_model = SMALLER[model, way] if (model, way) in SMALLER else MODELS[model]
    of_weights, weights = of_model()
    transformed = WAYS[way]

    def fn(weights: Any, scales: Any) -> Any:
        return of_weights(scaled(weights, scales))

    compiled = jax.jit(transformed(fn)).lower(weights, SCALES).compile()
    expected, half = compiled(weights, SCALES), whole_bytes(compiled) // 2
    f, hosted = jturnip.jit(fn, half), jturnip.host(weights)
    with Watch((hosted, SCALES)) as watch:
        found = jax.block_until_ready(transformed(f)(hosted, SCALES))
    assert watch.peak_bytes <= half + BESIDE
    assert f.last_run is not None
    assert f.last_run.peak_bytes <= half
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Sums in another order: rounding of the size of the largest, not of each.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * scale)
