"""Writes what `frontend.memory_model` predicts over what XLA says, for whole functions.

    python -m tests.memory_model

For the version of jax that runs it; what other versions wrote of themselves stays.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jturnip.demo import peak_bytes
from jturnip.frontend.flatten import flatten
from jturnip.frontend.memory_model import Segment
from jturnip.frontend.partition import Partitioner
from jturnip.models import llama, pair
from jturnip.programs.devices import rates
from tests.conformance.registry import Case, programs


sys.path.append(str(Path(__file__).parent))  # where modules of tests find each other
import large_intermediates


PAGE = Path(__file__).parents[1] / "docs" / "memory-model.md"
_HEAD = """# What is written down

Written by `python -m tests.memory_model`, under each version of jax, on the CPU backend.

Where tasks are drawn together, and to decide what is cut first, jturnip predicts what XLA
will hold of some equations: what enters and leaves, and what a product, a sort or another
heavy equation reads or writes; the rest is taken to be fused
(`jturnip/frontend/memory_model.py`). Here that prediction for whole functions is held
against XLA's own analysis of them: predicted bytes over XLA's, at the lowest, the 10th,
50th and 90th percentile and at the highest, and the share of functions that are predicted
within a quarter.

What is far off is so for a reason. Too low: the CPU's XLA writes masks and one-hot codes
down in front of a reduction, which a GPU's fuses, and widens 16-bit numbers. Too high: it
makes the operand of a narrow product inside the product, so that a kernel matrix times a
few columns is never written down. The prediction orders the work and refuses nothing: what
is compiled is asked itself.

| jax | functions | number | lowest | 10% | 50% | 90% | highest | within a quarter |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""

_Function = tuple[Callable[..., Any], tuple[Any, ...]]


def conformance() -> Iterator[_Function]:
    """Programs of the conformance suite that are one call without keywords."""
    for program in programs():
        if program.raises or program.area == "failures":
            continue
        with program.context():
            built = program.build()
        if isinstance(built, Case) and not built.keywords:
            yield built.fn, built.args


def large() -> Iterator[_Function]:
    """The functions with large intermediates."""
    for case in large_intermediates.CASES.values():
        yield case.fn, case.make()


def models() -> Iterator[_Function]:
    """Forward passes and training steps of the models."""
    small = llama.config("small")
    tokens = jax.ShapeDtypeStruct((2, small.length), jnp.int32)
    labelled = jax.ShapeDtypeStruct((2, small.length + 1), jnp.int32)
    weights = llama.abstract_params(small)
    yield lambda w, t: llama.forward(small, w, t), (weights, tokens)
    yield jax.grad(lambda w, t: llama.loss(small, w, t)), (weights, labelled)
    pairs = pair.config("small")
    x = jax.ShapeDtypeStruct((pairs.length, pairs.length, pairs.width), jnp.float32)
    of_pairs = pair.abstract_params(pairs)
    yield lambda w, x: pair.forward(pairs, w, x), (of_pairs, x)
    total = lambda w, x: pair.forward(pairs, w, x).sum()
    yield jax.grad(total), (of_pairs, x)


def ratio(fn: Callable[..., Any], args: tuple[Any, ...]) -> float | None:
    """Predicted bytes over XLA's; None for what takes next to nothing."""
    traced = jax.jit(fn).trace(*args)
    flat = flatten(traced.jaxpr)
    partitioner = Partitioner(flat, rates(jax.devices()[0]))
    model = partitioner._model
    predicted = Segment(model, 0, len(model.order)).held
    needed = peak_bytes(traced.lower().compile())
    return predicted / needed if needed > 4096 else None


def row(name: str, functions: Iterator[_Function]) -> str:
    """A line of the table."""
    found = np.array([r for r in (ratio(*each) for each in functions) if r is not None])
    near = np.mean((found > 0.75) & (found < 1.25))
    shares = " | ".join(f"{q:.2g}" for q in np.quantile(found, (0, 0.1, 0.5, 0.9, 1)))
    version = jax.__version__
    return f"| {version} | {name} | {len(found)} | {shares} | {near:.0%} |"


def main() -> None:
    warnings.simplefilter("ignore")
    sets: Sequence[tuple[str, Iterator[_Function]]] = (
        ("conformance programs", conformance()),
        ("large intermediates", large()),
        ("models", models()),
    )
    rows = [row(*each) for each in sets]
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    others = [
        line
        for line in before.splitlines()
        if re.match(r"\| \d", line) and not line.startswith(f"| {jax.__version__} |")
    ]
    version = lambda line: [int(n) for n in re.findall(r"\d+", line.split("|")[1])]
    lines = sorted([*others, *rows], key=version)
    PAGE.write_text(_HEAD + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
