"""Writes the table of programs."""

from .registry import programs
from .table import PAGE, page


PAGE.write_text(page(programs()), encoding="utf-8")
