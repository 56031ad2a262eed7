"""What the tests of libraries share, and what of the other tests they may import."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation: None) -> None:
    """For every test here."""
