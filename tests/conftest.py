"""What tests of several files ask for."""

from collections.abc import Iterator

import jax
import pytest


# Where a test fails, our own frames are what one wants to see.
jax.config.update("jax_traceback_filtering", "off")


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Takes half the time, where what runs when is tested and not how fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
