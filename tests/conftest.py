"""What tests of several files ask for."""

from collections.abc import Iterator

import jax
import pytest
from checks import collected


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
