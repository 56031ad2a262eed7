"""What a planner knows of the link."""

import math
from typing import NamedTuple


class Rates(NamedTuple):
    """Bytes a second over the link."""

    # To the device, and from it.
    h2d: float
    d2h: float
    # Until a copy that is over is known to be; it does not occupy the link.
    latency_seconds: float = 0.0

    def seconds(self, nbytes: int, back: int = 1) -> float:
        """To the host, and back so many times."""
        return nbytes / self.d2h + back * nbytes / self.h2d


# Where copies take no time.
FREE = Rates(math.inf, math.inf)
