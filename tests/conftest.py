"""What tests of several files ask for."""

import os
from collections.abc import Iterator

import jax
import pytest
from checks import collected


# Much of what the tests take is XLA's compiling, which this makes twice as quick. Of
# stock JAX, with which all is compared, as of ours; read when the backend starts.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_prefer_vector_width=128",
        "--xla_backend_optimization_level=0",
    ]
)

# Where a test fails, our own frames are what one wants to see.
jax.config.update("jax_traceback_filtering", "off")


def pytest_collection_finish() -> None:
    """What has been imported is no garbage."""
    collected()


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Takes half the time, where what runs when is tested and not how fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
