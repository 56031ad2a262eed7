"""The picture of the README: `python -m benchmarks.pictures` writes docs/pictures/run.svg.

The run is that of the README's example over a simulated link of 4 GB/s each way.
"""

import jax
import jax.numpy as jnp
from absl import app

import jturnip
from benchmarks.measure import ROOT
from jturnip.show import pictures, timeline


def main(argv: list[str]) -> None:
    """Runs the example and draws what it did."""
    del argv
    keys = jax.random.split(jax.random.key(0), 16)
    weights = jturnip.host([jax.random.normal(k, (1024, 1024)) / 32 for k in keys])
    link = jturnip.SimulatedLink(4e9, 4e9)
    step = jturnip.jit(jax.value_and_grad(_loss), gpu_bytes="32MiB", link=link)
    for _ in range(3):  # the first measures its tasks
        jax.block_until_ready(step(weights, jnp.ones((256, 1024))))
    assert step.last_run is not None
    drawn = pictures.of_timeline(timeline.of_run(step.last_run))
    path = ROOT / "docs" / "pictures" / "run.svg"
    # Lines of this file are named as they stand in the repository.
    drawn = pictures.on_white(drawn).replace(f"{ROOT}/", "")
    path.write_text(drawn + "\n", encoding="utf-8")


def _loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


if __name__ == "__main__":
    app.run(main)
