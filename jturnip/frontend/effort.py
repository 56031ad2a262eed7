"""How much is looked at to find a way to cut a function, and when it is enough.

The loops of a function, the loops in them, where each leaves what it carries, and the ways
to cut each body multiply. Most functions are cut in a way that is found soon or not at all.
It is counted in equations, not in seconds, so that the same function always becomes the
same.
"""

import math
from dataclasses import dataclass


# Half a minute or so on two cores, beside what XLA takes. What was found for the functions
# of the tests was found in a sixth of it, the most that was seen elsewhere in a quarter.
_ENOUGH = 1_500_000
# To make tasks of an equation takes so many times what it takes to look where it can be
# cut.
_OF_TASKS = 8


@dataclass(slots=True)
class Effort:
    """Equations of one function that were looked at, each as often as it was."""

    equations: int = 0
    # Which share of what is usual is enough.
    patience: float = 1.0

    def looked_at(self, equations: int) -> None:
        """So many equations were looked at, to see where they can be cut."""
        self.equations += equations

    def made_tasks(self, equations: int) -> None:
        """So many equations were made tasks."""
        self.equations += _OF_TASKS * equations

    def is_too_much_for(self, equations: int) -> bool:
        """Whether it would be enough before so many equations were made tasks."""
        return self.equations + _OF_TASKS * equations > self.patience * _ENOUGH

    @property
    def is_enough(self) -> bool:
        """Whether no more ways are looked for: one that was not found by now asks for more
        patience than a budget that works."""
        return self.equations > self.patience * _ENOUGH


@dataclass(slots=True)
class Sofar:
    """What was found, by who makes tasks of them, of the ways to cut a function that were
    looked at so far."""

    # How many equations another may have, to be compared with those that fit.
    most_equations: float = math.inf
    # How many times what there is the last one needed by XLA's figures, if blocks were too
    # large in it; else one.
    times: float = 1.0
    # Whether a program is there that fits: ways that are only for where there is none are
    # not looked for; and whether the fastest of these waits for what it moves.
    fits: bool = False
    waits: bool = False
    # Whether a loop needed too much that is whole in tiles of whatever size.
    loop_is_too_large: bool = False
