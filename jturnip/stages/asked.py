"""What is asked of a function, in one record."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jturnip.hardware import Accelerator
from jturnip.placement import Arguments, Wanted
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.schedule import Link
from jturnip.runtime.turns import Turn
from jturnip.stages.options import Options


@dataclass(frozen=True)
class Asked:
    """A function for one signature, and what is asked of it."""

    # As `jax.jit(fn).trace(...)` returns it, and the tree of its arguments.
    traced: Any
    in_tree: Any
    arguments: Arguments
    wanted: Wanted
    options: Options
    turn: Turn
    # Where each leaf of a call is to be put first, or None.
    in_places: tuple[Any, ...]
    # Whether arrays in host memory may stay on the device between calls.
    keeps: bool
    # Whether it is only asked whether there is a plan: then any will do.
    any_plan: bool = False
    # Whether every equation is to be a task of its own, for study.
    finest: bool = False
    # What it is planned for, where it is to be predicted and not to be run: a device, and
    # another link than the function's own.
    accelerator: Accelerator | None = None
    elsewhere: Link | None = None

    @property
    def link(self) -> SimulatedLink | Link | None:
        """The link that it is planned for; None for the device's own."""
        return self.options.link if self.elsewhere is None else self.elsewhere

    @property
    def is_asked(self) -> bool:
        """Whether it is a part of a transformed function of which it is only asked what it
        would take."""
        return self.options.part is not None and self.options.part.is_asked

    def in_budget(self, gpu_bytes: int) -> "Asked":
        """The same, in another budget."""
        options = dataclasses.replace(self.options, gpu_bytes=gpu_bytes)
        return dataclasses.replace(self, options=options)

    def compiled_with(self, compiler_options: dict[str, Any]) -> "Asked":
        """The same, with more options of XLA's for every executable."""
        merged = {**dict(self.options.compiler_options), **compiler_options}
        both = tuple(sorted(merged.items()))
        return dataclasses.replace(
            self,
            options=dataclasses.replace(self.options, compiler_options=both),
            arguments=dataclasses.replace(self.arguments, compiler_options=both),
        )
