"""Neural ODEs of diffrax: solvers are `while` loops, with gradients through checkpoints."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half import assert_half_is_enough, filled


eqx = pytest.importorskip("equinox", exc_type=ImportError)
optax = pytest.importorskip("optax", exc_type=ImportError)
diffrax = pytest.importorskip("diffrax", exc_type=ImportError)

POINTS = np.random.default_rng(1).normal(size=(16, 384)).astype(np.float32)


class Flow(eqx.Module):
    """A point is encoded, moves along an ODE, and is decoded where it arrives."""

    encoder: Any
    field: Any
    decoder: Any

    def __init__(self, key: jax.Array, field_width: int):
        one, two, three = jax.random.split(key, 3)
        self.encoder = eqx.nn.MLP(384, 32, 256, 2, key=one)
        self.field = eqx.nn.MLP(32, 32, field_width, 2, jax.nn.softplus, key=two)
        self.decoder = eqx.nn.MLP(32, 384, 256, 2, key=three)

    def __call__(self, point: jax.Array) -> jax.Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: self.field(y)),
            diffrax.Heun(),
            t0=0.0,
            t1=1.0,
            dt0=0.1,
            y0=self.encoder(point),
            stepsize_controller=diffrax.PIDController(rtol=0.1, atol=0.01),
            max_steps=64,
        )
        return self.decoder(solution.ys[-1])


def parts(field_width: int) -> tuple[Any, Any]:
    return eqx.partition(
        eqx.filter_eval_shape(Flow, jax.random.key(0), field_width),
        lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    )


@pytest.mark.parametrize(
    "field_width",
    [
        64,
        pytest.param(640, marks=pytest.mark.slow),
    ],
)
def test_solve(field_width: int):
    arrays, static = parts(field_width)

    def forward(arrays: Any, points: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(arrays, static))(points)

    assert_half_is_enough(forward, filled(arrays), POINTS)


@pytest.mark.slow
def test_step():
    arrays, static = parts(field_width=64)
    optimizer = optax.adabelief(1e-3)

    def loss(model: Any, points: jax.Array) -> jax.Array:
        return jnp.mean((jax.vmap(model)(points) - points) ** 2)

    def step(arrays: Any, state: Any, points: jax.Array) -> Any:
        model = eqx.combine(arrays, static)
        value, grads = eqx.filter_value_and_grad(loss)(model, points)
        updates, state = optimizer.update(grads, state)
        model = eqx.apply_updates(model, updates)
        return eqx.filter(model, eqx.is_array), state, value

    args = filled((arrays, jax.eval_shape(optimizer.init, arrays)))
    assert_half_is_enough(step, *args, POINTS, donated=(0, 1))
