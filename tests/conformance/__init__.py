"""Ordinary JAX programs through `jax.jit` and `jturnip.jit`: the same in every respect.

`registry.py` says what a program is, `harness.py` how two runs are compared and how it is
seen what jturnip did; the other modules hold the programs, one area each. `python -m
tests.conformance` writes the table of them, `docs/conformance.md`.
"""
