"""`python -m jturnip`: the `jturnip` command."""

from jturnip.cli import run


run()
