"""Calls of one function, side by side: whole, split, and the loop's own cost."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jturnip
from benchmarks import inside
from benchmarks.measure import Figure, Section, column, in_turn, ratios, seconds_of
from jturnip.models import llama, text


PLENTY = 2**42  # a budget that is never short


class Training:
    """A training step whose new state is the next one's argument; a call is one step."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any):
        self.step, self.state, self.batch = step, state, batch

    def __call__(self) -> Any:
        self.state, loss = self.step(self.state, self.batch)
        return loss


def train_step(model: llama.LlamaConfig) -> Callable[..., Any]:
    """A new function each time, which no cache knows."""
    return functools.partial(llama.train_step, model, llama.adamw())


def new_state(model: llama.LlamaConfig) -> Any:
    """Weights and optimizer of a model, as `numbers`."""
    return numbers(llama.abstract_state(model, llama.adamw()))


def numbers(abstract: Any) -> Any:
    """A training state as numpy arrays, which need no device and no compiler."""
    some = np.random.default_rng(0).standard_normal(1_000_003, np.float32)

    def weight(struct: jax.ShapeDtypeStruct) -> np.ndarray:
        if len(struct.shape) < 2:
            return np.ones(struct.shape, struct.dtype)
        values = (some / math.sqrt(struct.shape[0])).astype(struct.dtype)
        return np.resize(values, struct.shape)

    moments = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), abstract.opt_state)
    return abstract._replace(
        params=jax.tree.map(weight, abstract.params), opt_state=moments
    )


def batch_of(model: llama.LlamaConfig) -> np.ndarray:
    return next(text.batches(model.batch, model.length)) % model.vocabulary


def on_device(tree: Any) -> Any:
    """A copy of its own for each way that donates it."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    return jax.block_until_ready(jax.tree.map(lambda a: jax.device_put(a, device), tree))


def fits(model: llama.LlamaConfig, pairs: int) -> Section:
    """A function that fits, under jturnip and under `jax.jit`."""
    state, batch = new_state(model), batch_of(model)
    figures = [
        _small_function("a function of about 1 ms", 160, 12, pairs * 4, 1.02),
        _small_function("a function of 8 x 8 numbers", 8, 1, pairs * 4, None),
        _many_arrays(500, pairs * 4),
        _compared(
            "a training step",
            Training(jax.jit(train_step(model), donate_argnums=0), on_device(state), batch),
            Training(
                jturnip.jit(train_step(model), gpu_bytes=PLENTY, donate_argnums=0),
                on_device(state),
                batch,
            ),
            pairs,
            1.02,
        ),
    ]
    about = (
        "One call under `jturnip.jit` over the same call under `jax.jit`, arguments on the"
        f" device, state donated. The step is a Llama's with {model.layers} layers of width"
        f" {model.width}."
    )
    return Section("(a) A function that fits", about, tuple(figures))


def _small_function(
    name: str, width: int, products: int, pairs: int, target: float | None
) -> Figure:
    def chain(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(products):
            y = jnp.tanh(y @ x)
        return y

    x = jnp.eye(width, dtype=jnp.float32)
    stock = functools.partial(jax.jit(chain), x)
    ours = functools.partial(jturnip.jit(chain, gpu_bytes=PLENTY), x)
    return _compared(name, stock, ours, pairs, target, calls=20)


def _many_arrays(count: int, pairs: int) -> Figure:
    """Of a call with so many arrays, small ones: what each costs."""
    arrays = [jnp.full((4, 4), float(n)) for n in range(count)]

    def each(arrays: list[jax.Array]) -> list[jax.Array]:
        return [array + 1 for array in arrays]

    stock = functools.partial(jax.jit(each), arrays)
    ours = functools.partial(jturnip.jit(each, gpu_bytes=PLENTY), arrays)
    return _compared(f"a function of {count} arrays", stock, ours, pairs, None, calls=20)


def _compared(
    name: str,
    stock: Callable[[], Any],
    ours: Callable[[], Any],
    pairs: int,
    target: float | None,
    calls: int = 1,
) -> Figure:
    ways = [functools.partial(seconds_of, way, calls) for way in (ours, stock)]
    taken = in_turn(ways, pairs, warm_up=2)
    theirs = float(np.median(column(taken, 1)))
    extra = float(np.median([one - other for one, other in taken])) * 1e6
    more: dict[str, float | str] = {"jax.jit, ms": theirs * 1e3, "more, µs": extra}
    return Figure(name, ratios(taken), "", target, more)


def split(model: llama.LlamaConfig, pairs: int) -> Section:
    """A training step cut into tasks with all the memory it wants."""
    state, batch = new_state(model), batch_of(model)
    keywords: dict[str, Any] = {"gpu_bytes": PLENTY, "strategy": "turnip"}
    step = jturnip.jit(train_step(model), donate_argnums=0, **keywords)
    ours = Training(step, on_device(state), batch)
    stock = Training(jax.jit(train_step(model), donate_argnums=0), on_device(state), batch)
    over_jit = _compared("over jax.jit", stock, ours, pairs, 1.10)
    del ours, stock, step
    kept = on_device(state)
    compiled = jturnip.jit(train_step(model), **keywords).lower(kept, batch).compile()
    leaves = [*jax.tree.leaves(kept), batch]
    calls = inside.bare_calls(compiled, leaves)
    bare = _compared(
        "over its own executables, called bare",
        calls,
        inside.runs(compiled, leaves),
        pairs,
        None,
    )
    bare.more["bare, ms"] = bare.more.pop("jax.jit, ms")
    about = (
        f"A Llama's training step ({model.layers} layers of width {model.width},"
        f" {model.batch} x {model.length} tokens), cut into {len(calls.calls)} tasks,"
        " not short of memory, over the same step as one executable. State on the device,"
        " donated."
    )
    return Section("(b) Split without memory pressure", about, (over_jit, bare))


def loop(tasks: int, pairs: int) -> Section:
    """What the loop adds to each call of an executable."""
    figures = [
        _loop_cost("8 x 8 tanh", jnp.tanh, 8, tasks, pairs),
        _loop_cost("64 x 64 product", _product, 64, tasks, pairs),
        _loop_cost("256 x 256 product", _product, 256, tasks, pairs),
        _reload_cost(tasks, pairs),
    ]
    about = (
        f"A chain of {tasks} equations, each a task of its own: a run of the loop, less the"
        " same executables called bare in the same order with the same arguments, by task."
        " Bare calls are all queued at once; the loop keeps up to eight in flight and is"
        " woken when four are left. The CPU backend runs the tanh in the caller's"
        " thread, and products in its own, which share the cores with the loop. A reload's"
        " cost is that of the same chain with a weight for each task in host memory, less"
        " with all on the device."
    )
    return Section("(c) The loop, per operation", about, tuple(figures))


def _product(y: jax.Array, x: jax.Array) -> jax.Array:
    return y @ x


def _loop_cost(
    name: str, operation: Callable[..., jax.Array], width: int, tasks: int, pairs: int
) -> Figure:
    def chain(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(tasks):
            y = operation(y, x) if operation is _product else operation(y)
        return y

    x = on_device(np.eye(width, dtype=np.float32))
    lowered = jturnip.jit(chain, gpu_bytes=PLENTY, strategy="turnip").lower(x)
    compiled = inside.one_task_per_equation(lowered)
    calls = inside.bare_calls(compiled, [x])
    run = inside.runs(compiled, [x])
    ways = [
        functools.partial(seconds_of, run),
        functools.partial(seconds_of, calls),
    ]
    taken = in_turn(ways, pairs, warm_up=3)
    by_task = 1e6 / len(calls.calls)
    more: dict[str, float | str] = {
        "tasks": str(len(calls.calls)),
        "bare call, µs": float(np.median(column(taken, 1))) * by_task,
    }
    cost = tuple((one - other) * by_task for one, other in taken)
    return Figure(name, cost, "µs", 30.0, more)


def _reload_cost(tasks: int, pairs: int) -> Figure:
    """What one more small transfer adds to a run, all in."""
    width = 32

    def chain(x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
        for weight in weights:
            x = x * weight
        return x

    numbers = [np.ones((width, width), np.float32)] * tasks
    x = on_device(numbers[0])

    def run_with(weights: Any, gpu_bytes: int) -> Callable[[], Any]:
        step = jturnip.jit(chain, gpu_bytes=gpu_bytes, strategy="turnip")
        compiled = inside.one_task_per_equation(step.lower(x, weights))
        return inside.runs(compiled, [x, *weights])

    budget = 16 * x.nbytes
    away, here = (
        run_with(jturnip.host(numbers), budget),
        run_with(on_device(numbers), PLENTY),
    )
    ways = [functools.partial(seconds_of, way) for way in (away, here)]
    cost = tuple((one - other) / tasks * 1e6 for one, other in in_turn(ways, pairs, 3))
    return Figure("a reload of 4 KiB", cost, "µs", None, {"tasks": str(tasks)})
