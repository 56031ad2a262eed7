"""How long a deep model takes to give its first result, and how much it compiles."""

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax

import jturnip
from benchmarks import inside
from benchmarks.measure import Figure, Section, column, in_turn, ratios
from benchmarks.steps import batch_of, new_state, on_device, train_step
from jturnip.demo import peak_bytes
from jturnip.models import llama


_BUDGET = 0.25  # of the peak of `jax.jit`


StepOf = Callable[[llama.LlamaConfig], Callable[..., Any]]


def layers(
    model_of: Callable[[int], llama.LlamaConfig],
    few: int,
    many: int,
    pairs: int,
    step_of: StepOf = train_step,
) -> Section:
    """Counts executables and times first results.

    Args:
      model_of: the model with so many layers.
      few, many: numbers of layers.
      pairs: measurements of the time to the first result of the deep model.
      step_of: what is compiled for a model.
    """
    counts = {n: _executables(model_of(n), step_of) for n in (few, many)}
    small, large = counts[few][1], counts[many][1]
    deep, gpu_bytes = model_of(many), int(_BUDGET * counts[many][0])
    arguments = new_state(deep), batch_of(deep)

    def ours() -> Callable[..., Any]:
        return jturnip.jit(step_of(deep), gpu_bytes, donate_argnums=0)

    def stock() -> Callable[..., Any]:
        return jax.jit(step_of(deep), donate_argnums=0)

    ways = [
        functools.partial(_first_result, ours, jturnip.host, *arguments),
        functools.partial(_first_result, stock, on_device, *arguments),
    ]
    taken = in_turn(ways, pairs, warm_up=0)
    seconds: dict[str, float | str] = {
        "jturnip, s": sorted(column(taken, 0))[len(taken) // 2],
        "jax.jit, s": sorted(column(taken, 1))[len(taken) // 2],
    }
    more: dict[str, float | str] = {
        f"{few} layers": str(small),
        f"{many} layers": str(large),
    }
    name = f"distinct executables, {many} layers over {few}"
    figures = (
        Figure(name, (large / small,), "", 1.0, more),
        Figure(f"first result of {many} layers", ratios(taken), "", 1.0, seconds),
    )
    about = (
        f"A Llama's training step, width {deep.width}, state in host memory, in"
        f" {_BUDGET:.0%} of its own peak; `jax.jit` has its state on the device. To the"
        " first result: trace, plan, compile, run, with the caches of jax and jturnip empty"
        " before each."
    )
    return Section("(f) Many layers", about, figures)


def _executables(model: llama.LlamaConfig, step_of: StepOf) -> tuple[int, int]:
    """The peak of `jax.jit`, and how many executables jturnip has in a part of it."""
    state, batch = new_state(model), batch_of(model)
    struct = jax.eval_shape(lambda: state)
    stock = jax.jit(step_of(model), donate_argnums=0).lower(struct, batch).compile()
    peak = peak_bytes(stock)
    ours = jturnip.jit(
        step_of(model), int(_BUDGET * peak), strategy="turnip", donate_argnums=0
    )
    return peak, inside.executable_count(ours.lower(jturnip.host(state), batch))


def _first_result(
    make: Callable[[], Callable[..., Any]],
    place: Callable[[Any], Any],
    state: Any,
    batch: Any,
) -> float:
    inside.forget_everything()
    gc.collect()
    placed, step = place(state), make()
    begin = time.perf_counter()
    jax.block_until_ready(step(placed, batch))
    return time.perf_counter() - begin
