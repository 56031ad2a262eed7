"""The smallest budgets that refusals ask for, of functions that write over what they read.

    python -m benchmarks.least

compiles them and prints a table; nothing of them is run, so no time is measured.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jturnip
from benchmarks.measure import aligned
from benchmarks.steps import batch_of, new_state, train_step
from jturnip.demo import peak_bytes
from jturnip.models import llama
from jturnip.units import format_bytes


@dataclass(frozen=True)
class Case:
    """A function, its arguments as numpy arrays, and which of them it is given for good."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...] = (0,)


def cases(width: int, rows: int) -> Iterator[tuple[str, Case]]:
    """Functions over square arrays of `width`, and tables of so many rows."""
    random = np.random.default_rng(0)
    array = lambda *shape: random.normal(size=shape).astype(np.float32)
    square = array(width, width)
    table, some = array(rows, 64), np.arange(32)

    def adam(p: Any, m: Any, v: Any, g: Any) -> Any:
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g
        return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

    def tied(table: Any, some: Any, x: Any) -> Any:
        def loss(table: Any) -> Any:
            scores = jnp.tanh(table[some] + x) @ table.T
            right = jnp.take_along_axis(jax.nn.log_softmax(scores), some[:, None], 1)
            return -jnp.mean(right)

        return table - 0.1 * jax.grad(loss)(table)

    def stencil(u: Any) -> Any:
        around = lambda u: sum(jnp.roll(u, by, axis) for by in (1, -1) for axis in (0, 1))
        step = lambda state: (state[0] + 1, 0.25 * around(state[1]))
        return lax.while_loop(lambda state: state[0] < 20, step, (0, u))[1]

    def relaxed(u: Any, f: Any) -> Any:
        step = lambda state: (state[0] + 1, state[1] * 0.9 + f * 0.1)
        return lax.while_loop(lambda state: state[0] < 20, step, (0, u))[1]

    put = lambda cache, row, at: lax.dynamic_update_slice(cache, row, (at, 0))
    model = llama.config("tiny", layers=2, hidden=96, length=8, batch=1, vocabulary=64)
    yield "Adam's update of an array", Case(adam, (square,) * 4, (0, 1, 2))
    yield "gradient step, tied embeddings", Case(tied, (table, some, table[some]))
    yield "stencil in a loop", Case(stencil, (square,))
    yield "relaxation in a loop", Case(relaxed, (square, square))
    yield "row put into a cache", Case(put, (table, table[:1], 3))
    yield (
        "training step of a small Llama",
        Case(train_step(model), (new_state(model), batch_of(model))),
    )


def asked(case: Case) -> int:
    """The budget that a refusal asks for, in bytes."""
    f = jturnip.jit(case.fn, 1, strategy="turnip", donate_argnums=case.donated)
    try:
        _ = f.lower(*jturnip.host(case.args)).plan
    except jturnip.DoesNotFit as refusal:
        return refusal.needed_bytes
    raise AssertionError("a plan in one byte")


def main() -> None:
    rows = [("function", "smallest budget", "XLA's peak")]
    for name, case in cases(width=512, rows=8192):
        stock = jax.jit(case.fn, donate_argnums=case.donated)
        peak = peak_bytes(stock.lower(*case.args).compile())
        rows.append((name, format_bytes(asked(case)), format_bytes(peak)))
    print("\n".join(aligned(rows)))


if __name__ == "__main__":
    main()
