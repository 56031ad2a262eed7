"""What a program is made of, and for."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jturnip import compat
from jturnip.compat import Device
from jturnip.compiler.report import Spent
from jturnip.compiler.trials import Trials
from jturnip.frontend.costs import DeviceRates
from jturnip.frontend.effort import Effort
from jturnip.frontend.flatten import flatten
from jturnip.frontend.inline import Condition
from jturnip.frontend.loops import Streaming
from jturnip.frontend.results import Forwarded
from jturnip.frontend.streaming import Passes, Seen
from jturnip.frontend.values import FlatJaxpr
from jturnip.hardware import Accelerator
from jturnip.placement import NOTHING_KNOWN, Arguments, Budget, Returned
from jturnip.programs import attempts, devices
from jturnip.programs.needs import Needs
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.schedule import Link


# Stands for ways that are left out (`How.left_out`).
WAYS = "ways"


@dataclass(frozen=True, slots=True)
class How:
    """How programs are made, beside the budget."""

    strategy: str
    # What moves bytes, where it is not the device's own link.
    link: SimulatedLink | Link | None
    # Where tasks are run on zeros first, to know their times: what that may take.
    trials: Trials | None
    # Whether every equation is a task of its own.
    finest: bool = False
    # Whether it is for the body of a loop, run many times with the same constants.
    repeated: bool = False
    # Whether arrays in host memory and loops are cut along rows first.
    streams: bool = True
    # Whether what does not fit is cut along its axes.
    axes: bool = True
    # Whether tasks are cut as fine as they can be also where that is hopeless, to know what
    # they need then.
    thorough: bool = False
    # Whether tasks are cut no finer where it is unlikely that they will fit: other ways are
    # tried first, and this one at last again.
    hasty: bool = False
    # Which attempts are made (`attempts.streaming`): those inside a loop are its own.
    attempts: tuple[int, ...] = tuple(range(attempts.ATTEMPTS))
    # Whether attempts that make very many equations are left out, since other ways come
    # before them.
    few: bool = True
    # Whether all ways are looked for to cut what is around a loop that was too large in one
    # of them: at last.
    every_way: bool = False
    # The attempts that were left out, and `WAYS`.
    left_out: set[Hashable] = field(
        default_factory=set[Hashable], compare=False, hash=False
    )
    # Whether any plan will do, since it is only asked whether there is one.
    any_plan: bool = False
    # What was made before, of the same in the same room; and all that was compiled.
    known: dict[Any, Any] = field(default_factory=dict, compare=False, hash=False)
    needs: Needs = field(default_factory=Needs, compare=False, hash=False)
    effort: Effort = field(default_factory=Effort, compare=False, hash=False)
    executables: list[Any] = field(default_factory=list, compare=False, hash=False)
    spent: Spent = field(default_factory=Spent, compare=False, hash=False)
    passes: Passes = field(default_factory=Passes, compare=False, hash=False)

    # How the function's results belong together; of what is inside it, nothing is known.
    returned: Returned = NOTHING_KNOWN
    # What it is planned for where it will not run here, only be predicted.
    accelerator: Accelerator | None = None

    @property
    def is_free(self) -> bool:
        """Whether a function is cut in whatever way is best; strategies are compared with
        one another, of the same tasks."""
        return self.strategy == "auto" and not self.finest

    def as_it_is(
        self, thorough: bool = False, few: bool = True, may_be_hasty: bool = True
    ) -> "How":
        """The same without cutting along axes: in haste, if it may be, where they are cut
        next."""
        others_follow = self.axes and not thorough and not self.any_plan
        hasty = may_be_hasty and others_follow
        return replace(self, axes=False, thorough=thorough, few=few, hasty=hasty)

    @property
    def compares_ways(self) -> bool:
        """Whether a program is compared with one that is cut otherwise."""
        return self.is_free and not self.any_plan

    @property
    def tight(self) -> bool:
        """Whether whatever is between pieces goes to host memory."""
        return self.attempts == (attempts.ATTEMPTS - 1,)


@dataclass(frozen=True, slots=True)
class Function:
    """What a program computes, as it was traced."""

    # Its jaxpr.
    closed: Any
    # Arguments that may be returned as they are, as for `flatten`.
    forwarded: Forwarded = ()
    # Of the body of a loop: its constants come first among the arguments, and what it says
    # first among the results.
    condition: Condition | None = None

    def flat(self, seen: Seen, streaming: Streaming | None = None) -> FlatJaxpr:
        """Its equations, as the passes make them.

        Raises:
          UnsupportedError: for what cannot be taken apart.
        """
        make = lambda: flatten(self.closed, self.forwarded, streaming, self.condition, seen)
        if streaming is not None:
            return make()
        # Kept with what it was made of, so that the ids stay theirs.
        return seen.once(self.closed, ("flat", self.key), lambda: (self, make()))[1]

    @property
    def key(self) -> Any:
        """Tells it from others, while it is there."""
        pairs = self.forwarded
        pairs = pairs.items() if isinstance(pairs, Mapping) else pairs
        asked = self.condition and (id(self.condition.jaxpr), self.condition.constants)
        return id(self.closed), tuple(sorted(pairs)), asked


@dataclass(frozen=True, slots=True)
class Setting:
    """What a program is made for: where its arguments are, what room there is, and what the
    user has chosen."""

    arguments: Arguments
    budget: Budget
    how: How

    @property
    def device(self) -> Device:
        """Where it runs."""
        return self.arguments.device

    @property
    def arena(self) -> int:
        """Device bytes that its plans share out."""
        return self.budget.arena(self.device)

    @property
    def rates(self) -> DeviceRates:
        """What is expected of the device's arithmetic and memory."""
        return devices.rates(self.device, self.how.accelerator)

    @property
    def link(self) -> Link:
        """What is expected of the link to the device."""
        return devices.link_of(self.device, self.how.link)

    @property
    def seconds_per_byte(self) -> float:
        """What it takes to move a byte to host memory and back."""
        link = self.link
        return 1 / link.h2d_bytes_per_second + 1 / link.d2h_bytes_per_second

    def seen(self, **large: float) -> Seen:
        """What is known of functions that are lowered for the device.

        Args:
          large: what is too large to stay as it is, as for `Passes.seen`.
        """
        return self.how.passes.seen(compat.lowering_platform(self.device), **large)

    def beside(self, nbytes: int) -> "Setting":
        """The same with so many bytes taken by others."""
        return replace(self, budget=self.budget.beside(nbytes))

    def otherwise(self, **choices: Any) -> "Setting":
        """The same with other choices."""
        return replace(self, how=replace(self.how, **choices))
