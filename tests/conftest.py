"""What tests of several files ask for."""

import gc
from collections.abc import Iterator

import jax
import pytest


# Where a test fails, our own frames are what one wants to see.
jax.config.update("jax_traceback_filtering", "off")


def pytest_collection_finish() -> None:
    """Takes what has been imported out of the collector's sight: many tests collect, to see
    that nothing is left behind, and would look at all of it every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Takes half the time, where what runs when is tested and not how fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
