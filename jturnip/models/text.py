"""Text to train on that every Python has: the help topics of `pydoc`, as bytes."""

from collections.abc import Iterator
from pydoc_data.topics import topics

import numpy as np


def corpus() -> np.ndarray:
    """All topics in the order of their names, as uint8; some 700 kB, by Python version."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), np.uint8)


def batches(batch: int, length: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Endless int32 [batch, length] windows of the text, the same for the same seed."""
    text = corpus()
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - length, batch)
        yield text[starts[:, None] + np.arange(length)].astype(np.int32)
