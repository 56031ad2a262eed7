"""Programs as records: what to run, and what jturnip is expected to make of it."""

import contextlib
import enum
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np


# Modules of programs, in the order of the table.
MODULES = (
    "arrays",
    "calls",
    "control_flow",
    "autodiff",
    "transformations",
    "linear_algebra",
    "numerics",
    "neural_networks",
    "random_numbers",
    "dtypes",
    "effects",
    "placement",
    "extensions",
    "failures",
)


class Status(enum.Enum):
    """What jturnip makes of a program in a small budget."""

    SUPPORTED = "supported"
    ONE_TASK = "one task"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Expected:
    """A status; where it is not `supported`, the primitives that are why."""

    status: Status
    causes: tuple[str, ...] = ()

    def __str__(self) -> str:
        because = ", ".join(f"`{c}`" for c in self.causes)
        return f"{self.status.value}: {because}" if because else self.status.value


SUPPORTED = Expected(Status.SUPPORTED)


def one_task(*primitives: str) -> Expected:
    """These are kept whole, each as one equation of one task."""
    return Expected(Status.ONE_TASK, tuple(sorted(primitives)))


def refused(*causes: str) -> Expected:
    """UnsupportedError names this primitive."""
    return Expected(Status.REFUSED, causes)


Jit: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One function and its arguments, made afresh for each run."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    # Keywords of `jax.jit`.
    keywords: Mapping[str, Any] = field(default_factory=dict)
    # What callbacks of the function append to.
    log: list[Any] = field(default_factory=list)
    # Whether `jax.jit` keeps the order of the log.
    ordered: bool = True


@dataclass(frozen=True)
class Script:
    """A program that jits, calls and asks as it likes; its value is compared."""

    run: Callable[[Jit], Any]
    # Whether JAX itself runs through every jturnip function in it, so that none is planned.
    # Only then may it warn of that.
    inlined: bool = False


@dataclass(frozen=True)
class Program:
    """One program and what is expected of it."""

    area: str
    name: str
    build: Callable[[], Case | Script]
    expected: Expected = SUPPORTED
    # How far values may be apart, in units in the last place of the largest.
    ulps: int = 64
    # Also at half of what `jax.jit` needs, and with room for everything.
    thorough: bool = False
    # In how much time it must be done where nothing else runs: no program may hang.
    seconds: int = 60
    # Whether it takes seconds: CI runs it with the newest jax only.
    long: bool = False
    # What must be entered around all of it.
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    # What it needs of jax that not every supported version has, as a dotted name.
    needs: str = "jax"
    # The type of the error that it raises under `jax.jit`.
    raises: str = ""
    # Where jturnip is wrong at present: what is wrong.
    known: str = ""
    # The version of jax since which it is wrong.
    known_since: tuple[int, ...] = ()


_PROGRAMS: list[Program] = []


def area(name: str) -> Callable[..., Any]:
    """A decorator for the builders of an area's programs; takes the fields of `Program`."""

    def program(expected: Expected = SUPPORTED, **fields: Any) -> Callable[..., Any]:
        def register(build: Callable[[], Case | Script]) -> Callable[[], Case | Script]:
            title = build.__name__.strip("_").replace("_", " ")
            _PROGRAMS.append(Program(name, title, build, expected, **fields))
            return build

        return register

    return program


def programs() -> tuple[Program, ...]:
    """Every program, in the order of the table."""
    for module in MODULES:
        importlib.import_module(f"{__package__}.{module}")
    return tuple(_PROGRAMS)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Random numbers of about one, in host memory."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def weights(count: int, width: int = 64) -> list[np.ndarray]:
    """Square matrices that keep the size of what they are applied to."""
    return [normal(width, width, seed=k + 1) / np.sqrt(width) for k in range(count)]
