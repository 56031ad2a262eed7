"""What it took to make a function's executables, as a record."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class CompileReport:
    """Where the executables of one function came from."""

    # Distinct executables that the function runs.
    distinct: int
    # Compiled by XLA just now. Some may be given up since: a whole function that does not
    # fit, a task that its workspace makes too large and that is cut again, or all of those
    # that another way to cut the function would have had.
    compiled: int
    # Of `distinct`, those that the process had before.
    reused: int
    # Found in JAX's persistent cache; given up since or not, as above.
    cached: int
    # Spent on lowering and compiling them.
    seconds: float

    def after(self, earlier: "CompileReport") -> "CompileReport":
        """This, with what was compiled earlier for the same function."""
        return replace(
            self,
            compiled=earlier.compiled + self.compiled,
            cached=earlier.cached + self.cached,
            seconds=earlier.seconds + self.seconds,
        )

    def beside(self, other: "CompileReport") -> "CompileReport":
        """Of two parts of one function, this the first."""
        return CompileReport(
            self.distinct + other.distinct,
            self.compiled + other.compiled,
            self.reused + other.reused,
            self.cached + other.cached,
            self.seconds + other.seconds,
        )

    def summary(self) -> str:
        """One line for people."""
        return (
            f"{self.distinct} executables: {self.compiled} compiled, {self.reused} re-used,"
            f" {self.cached} from JAX's persistent cache; {self.seconds:.3f} s"
        )


@dataclass(slots=True)
class Spent:
    """What was compiled for one function so far, in whichever ways it was cut."""

    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0
    # The executables, as long as they live.
    executables: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def add(self, new: Iterable[Any], cached: int, seconds: float) -> None:
        """So many seconds were spent on new executables, some of which were in JAX's
        persistent cache."""
        new = tuple(new)
        self.executables.update(new)
        self.compiled += len(new) - cached
        self.cached += cached
        self.seconds += seconds

    def in_all(self, report: CompileReport) -> CompileReport:
        """The report on the executables that the function runs, with all that was spent."""
        return replace(
            report, compiled=self.compiled, cached=self.cached, seconds=self.seconds
        )
