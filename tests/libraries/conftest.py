"""What the tests of libraries share, and what of the other tests they may import."""

import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest


sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Takes half the time: what is tested here is what runs when, not how fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
