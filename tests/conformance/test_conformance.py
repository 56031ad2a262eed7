"""Each program of the registry, and the table of them."""

import importlib

import jax
import pytest

from .harness import UndeclaredStatus, check
from .registry import Program, programs
from .table import PAGE, page


PROGRAMS = programs()


def _title(program: Program) -> str:
    return f"{program.area}: {program.name}".replace(" ", "-")


# What may take long is for `make test-slow`.
_A_MINUTE = 60


def _marks(program: Program) -> list[pytest.MarkDecorator]:
    slow = [pytest.mark.slow] if program.seconds > _A_MINUTE else []
    return [*slow, pytest.mark.long] if program.long else slow


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=_marks(p)) for p in PROGRAMS],
    ids=_title,
)
def test_a_program_does_as_under_jax_jit(program: Program):
    if not _has(program.needs):
        pytest.skip(f"this jax has no {program.needs}")
    wrong = program.known and jax.__version_info__ >= program.known_since
    try:
        check(program)
    except UndeclaredStatus:
        raise
    except Exception:
        if wrong:
            pytest.xfail(program.known)
        raise
    assert not wrong, f"right now, but known to be wrong: {program.known}"


def test_names_are_given_once():
    names = [(p.area, p.name) for p in PROGRAMS]
    assert len(set(names)) == len(names)


def test_the_table_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(PROGRAMS), (
        "run python -m tests.conformance"
    )


def _has(dotted: str) -> bool:
    """Whether a module or an attribute of one is there."""
    module, _, name = dotted.rpartition(".")
    if not module:
        return True
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(dotted)
    except ImportError:
        return False
    return True
