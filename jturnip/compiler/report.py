"""What it took to make a function's executables, as a record."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CompileReport:
    """Where the executables of one function came from."""

    # Distinct executables that the function runs.
    distinct: int
    # Compiled by XLA just now. Some may be given up since: a whole function that does not
    # fit, or a task that its workspace makes too large and that is cut again.
    compiled: int
    # Of `distinct`, those that the process had before.
    reused: int
    # Found in JAX's persistent cache; given up since or not, as above.
    cached: int
    # From the first lowering to the last executable.
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
