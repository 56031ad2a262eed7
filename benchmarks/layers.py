"""How long a deep model takes to give its first result, and how much it compiles."""

import contextlib
import functools
import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

import jturnip
from benchmarks import inside
from benchmarks.measure import Figure, Section, column, in_turn, ratios
from benchmarks.steps import batch_of, new_state, on_device, train_step
from jturnip.compiler import profiles
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
    later = _in_a_later_process(ways[0], pairs)
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
        Figure(
            f"first result of {many} layers in a later process",
            ratios(later),
            "",
            1.0,
            {"jturnip, s": sorted(column(later, 0))[len(later) // 2]},
        ),
    )
    about = (
        f"A Llama's training step, width {deep.width}, state in host memory, in"
        f" {_BUDGET:.0%} of its own peak; `jax.jit` has its state on the device. To the"
        " first result: trace, plan, compile, run, with the caches of jax and jturnip empty"
        " before each. In a later process: with all tasks in JAX's persistent cache, and"
        " what was measured of them beside it, over the same without what was measured."
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


def _in_a_later_process(first_result: Callable[[], float], pairs: int) -> Any:
    """First results with all executables stored: with what was measured, and without."""

    def with_times() -> float:
        inside.forget_link()
        return first_result()

    def without_times() -> float:
        where = profiles.directory()
        assert where is not None
        shutil.rmtree(where, ignore_errors=True)
        return with_times()

    with _stored():
        without_times()
        return in_turn([with_times, without_times], pairs, warm_up=0)


@contextlib.contextmanager
def _stored() -> Iterator[None]:
    """A context in which JAX stores all that it compiles, in a directory of its own."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    usual = [getattr(jax.config, name) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        for name, value in zip(names, (folder, 0.0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            for name, value in zip(names, usual, strict=True):
                jax.config.update(name, value)
            compilation_cache.reset_cache()


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
