"""Random programs against `jax.jit`: the same answers, the budget kept, the account true.

A program is a few steps drawn from what functions are made of: arithmetic, products, scans,
loops, branches, tables, stacks, optimizer updates, gradients. Its arguments lie on the
device, on the host or in numpy's hands, committed or not, donated or not, and what it
returns is given to it again.

    python tests/random_programs.py --count=2000 --jobs=2

runs many, in processes of their own, so that an abort is a line of the report too.
"""

import argparse
import collections
import concurrent.futures
import gc
import json
import random
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checks import assert_same, on_device, whole_bytes
from watch import Watch

import jturnip
from jturnip.frontend.inline import pruned_arguments


WIDTH = 128  # a matrix is 64 KiB, the size from which jturnip takes arrays apart
State = dict[str, Any]
Step = Callable[[State], State]

# Steps are a few sums of products deep, and each may round otherwise; a wrong bit is off by
# far more.
_ULPS = 2048


@dataclass(frozen=True)
class RandomProgram:
    """A function of a state and a batch, and how it is called."""

    seed: int
    steps: tuple[str, ...]
    fn: Callable[[State, Any], tuple[State, Any]]
    # Where each argument lies: "device", "committed", "host" or "numpy".
    places: tuple[str, ...]
    donated: bool
    # Of XLA's peak; 0 stands for the smallest budget there is.
    share: float


def random_program(seed: int) -> RandomProgram:
    """The program of a seed."""
    rng = random.Random(seed)
    names = [rng.choice(sorted(_STEPS)) for _ in range(rng.randint(1, 4))]
    steps = [_STEPS[name](rng) for name in names]

    def fn(state: State, batch: Any) -> tuple[State, Any]:
        state = {**state, "x": state["x"] * 0.5 + batch}
        for step in steps:
            state = {**state, **step(state)}
        return state, jnp.tanh(state["x"]).mean()

    uniform = rng.choice(["device", "committed", "host", "host", "numpy", "mixed"])
    kinds = ["device", "committed", "host", "numpy"]
    count = len(jax.tree.leaves(initial_state()))
    places = [rng.choice(kinds) if uniform == "mixed" else uniform for _ in range(count)]
    share = rng.choice([1.0, 1.0, 0.7, 0.5, 0.25, 0.0])
    return RandomProgram(seed, tuple(names), fn, tuple(places), rng.random() < 0.5, share)


def initial_state() -> State:
    """Numpy arrays of every kind that a step knows."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (generator.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    return {
        "x": normal(WIDTH, WIDTH),
        "weights": [normal(WIDTH, WIDTH) for _ in range(4)],
        "stack": normal(6, WIDTH, WIDTH),
        "odd": normal(7, 129, 33),  # rows that are no whole cache lines
        "table": normal(1024, 64),
        "moments": [0.1 + normal(WIDTH, WIDTH) ** 2 for _ in range(4)],
        "rows": generator.integers(0, 1024, (32,), dtype=np.int32),
        "count": np.int32(3),
    }


# -- steps: each draws what it is, and changes some of the state -----------------------


def _arithmetic(rng: random.Random) -> Step:
    scale, which = rng.choice([0.25, 0.5, 0.75]), rng.randrange(4)
    kind = rng.randrange(4)

    def step(state: State) -> State:
        x, w = state["x"], state["weights"][which]
        changed = (x * scale + w, jnp.sin(x) - w.T, x * (w > 0), jnp.maximum(x, w) * scale)
        return {"x": changed[kind]}

    return step


def _products(rng: random.Random) -> Step:
    order = [rng.randrange(4) for _ in range(rng.randint(1, 5))]

    def step(state: State) -> State:
        x = state["x"]
        for k, which in enumerate(order):
            x = jnp.tanh(x @ state["weights"][which]) * 0.9**k
        return {"x": x}

    return step


def _scan_over_stack(rng: random.Random) -> Step:
    stacked, reverse = rng.random() < 0.5, rng.random() < 0.3

    def step(state: State) -> State:
        def layer(x: Any, w: Any) -> tuple[Any, Any]:
            x = jnp.tanh(x @ w)
            return x, w * 0.9 + x * 0.01 if stacked else None

        x, ys = jax.lax.scan(layer, state["x"], state["stack"], reverse=reverse)
        return {"x": x, "stack": ys} if stacked else {"x": x}

    return step


def _scan_of_many(rng: random.Random) -> Step:
    length = rng.choice([3, 17, 40])

    def step(state: State) -> State:
        def turn(carry: Any, k: Any) -> tuple[Any, Any]:
            x, total = carry
            return (jnp.sin(x) * 0.9, total + x[0, 0] * k), x[0]

        carry = state["x"], jnp.float32(0)
        (x, total), rows = jax.lax.scan(turn, carry, jnp.arange(length) * 0.1)
        return {"x": x + rows.mean() + total * 1e-3}

    return step


def _while(rng: random.Random) -> Step:
    carried = rng.randint(1, 4)
    turns = rng.choice([0, 1, 3])

    def step(state: State) -> State:
        ws = state["weights"]

        def body(loop: Any) -> Any:
            k, x, lot = loop
            return k + 1, jnp.tanh(x @ ws[0]), [a * 0.5 + x * 0.1 for a in lot]

        end = jnp.minimum(state["count"], turns)
        lot = list(ws[:carried])
        _, x, lot = jax.lax.while_loop(
            lambda loop: loop[0] < end, body, (jnp.int32(0), state["x"], lot)
        )
        return {"x": x, "weights": [*lot, *ws[carried:]]}

    return step


def _fori(rng: random.Random) -> Step:
    turns = rng.choice([0, 2, 5])

    def step(state: State) -> State:
        turn = lambda k, x: jnp.tanh(x + state["stack"][k % 6]) * 0.9
        end = turns * jnp.sign(state["count"])
        return {"x": jax.lax.fori_loop(0, end, turn, state["x"])}

    return step


def _branch(rng: random.Random) -> Step:
    which = rng.randrange(3)

    def step(state: State) -> State:
        branches = [
            lambda x, w: x @ w,
            lambda x, w: x,
            lambda x, w: jnp.tanh(x) + w.sum() * 1e-3,
        ]
        index = (state["count"] + which) % 3
        return {"x": jax.lax.switch(index, branches, state["x"], state["weights"][1])}

    return step


def _table(rng: random.Random) -> Step:
    write, grad = rng.random() < 0.5, rng.random() < 0.5

    def step(state: State) -> State:
        table, rows, w = state["table"], state["rows"], state["weights"][2][:64, :64]
        if grad:
            loss = lambda table: (jnp.tanh(table[rows] @ w) ** 2).mean()
            return {"table": table - 0.1 * jax.grad(loss)(table)}
        taken = jnp.tanh(table[rows] @ w)
        if write:
            return {"table": table.at[rows].add(taken * 0.1)}
        return {"x": state["x"] + taken.mean()}

    return step


def _stack_update(rng: random.Random) -> Step:
    name, kind = rng.choice(["stack", "odd"]), rng.randrange(3)

    def step(state: State) -> State:
        stack = state[name]
        if kind == 0:
            return {name: stack * 0.9 + jnp.sign(stack) * 0.01}
        if kind == 1:
            return {"x": state["x"] + stack.sum(axis=0).mean() * 1e-2}
        return {"x": state["x"] + sum(jnp.tanh(row).mean() for row in stack)}

    return step


def _adam(rng: random.Random) -> Step:
    scanned = rng.random() < 0.4

    def loss(weights: Any, x: Any) -> Any:
        if scanned:
            stack = jnp.stack(weights)
            x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]
        else:
            for w in weights:
                x = jnp.tanh(x @ w)
        return (x**2).mean() * 100

    def step(state: State) -> State:
        grads = jax.grad(loss)(state["weights"], state["x"])
        pairs = zip(state["moments"], grads, strict=True)
        moments = [0.9 * m + 0.1 * g**2 for m, g in pairs]
        weights = [
            w - 0.01 * g / (jnp.sqrt(m) + 1e-3)
            for w, m, g in zip(state["weights"], moments, grads, strict=True)
        ]
        return {"weights": weights, "moments": moments}

    return step


def _stacked_adam(rng: random.Random) -> Step:
    def loss(stack: Any, x: Any) -> Any:
        layer = lambda x, w: (jnp.tanh(x @ w), None)
        return (jax.lax.scan(layer, x, stack)[0] ** 2).mean() * 100

    def step(state: State) -> State:
        grad = jax.grad(loss)(state["stack"], state["x"])
        return {"stack": state["stack"] - 0.01 * grad / (jnp.abs(grad) + 0.1)}

    return step


def _shapes(rng: random.Random) -> Step:
    kind = rng.randrange(3)

    def step(state: State) -> State:
        x, w = state["x"], state["weights"][3]
        if kind == 0:
            return {"x": jnp.concatenate([x[: WIDTH // 2], w[WIDTH // 2 :]])}
        if kind == 1:
            return {"x": jnp.cumsum(x, axis=1) * 0.01 + w.T}
        return {"x": jnp.einsum("ij,kj->ik", x, w).reshape(-1, WIDTH)}

    return step


def _keys(rng: random.Random) -> Step:
    layers = rng.randint(1, 4)

    def step(state: State) -> State:
        x, key = state["x"], jax.random.key(0)
        for k in range(layers):
            keep = jax.random.bernoulli(jax.random.fold_in(key, k), 0.9, x.shape)
            x = jnp.tanh(jnp.where(keep, x, 0) @ state["weights"][k])
        return {"x": x}

    return step


_STEPS: dict[str, Callable[[random.Random], Step]] = {
    "arithmetic": _arithmetic,
    "products": _products,
    "scan over a stack": _scan_over_stack,
    "scan of many": _scan_of_many,
    "while": _while,
    "fori": _fori,
    "branch": _branch,
    "table": _table,
    "stack update": _stack_update,
    "adam": _adam,
    "stacked adam": _stacked_adam,
    "shapes": _shapes,
    "keys": _keys,
}


# -- what is asked of one --------------------------------------------------------------


def check(program: RandomProgram, calls: int = 3) -> str:
    """Runs a program a few times, on its own results; what there is to say of it.

    Returns:
      "whole", "split", "driven", or how it was refused.

    Raises:
      AssertionError: an answer differs, or the budget is passed, or the account is wrong.
    """
    batch = np.full((WIDTH, WIDTH), 0.1, np.float32)
    donated = (0,) if program.donated else ()
    stock = jax.jit(program.fn, donate_argnums=donated)
    start = initial_state()
    compiled = stock.lower(start, batch).compile()
    peak = whole_bytes(compiled)
    pruned = pruned_arguments(stock.trace(start, batch).jaxpr)
    state = _placed(start, program.places)
    gpu_bytes, refusal = _budget(program, peak, state, batch)
    f = jturnip.jit(program.fn, gpu_bytes, donate_argnums=donated)
    expected = jax.device_put(start, on_device())
    for call in range(calls):
        expected, value = compiled(expected, batch)
        leaves = jax.tree.leaves(state)
        mine = [leaf for i, leaf in enumerate(leaves) if i not in pruned]
        del leaves
        watch = Watch(mine)
        del mine
        try:
            with watch:
                state, found = jax.block_until_ready(f(state, batch))
        except jturnip.DoesNotFit as error:
            if call:
                raise AssertionError(
                    f"call {call} is refused on the results of the one before: {error}"
                ) from error
            raise
        where = f"call {call} in {gpu_bytes} bytes ({f.last_run.strategy})"
        reported = f.last_run.peak_bytes
        assert watch.peak_bytes <= gpu_bytes, f"{where}: {watch.peak_bytes} alive"
        assert watch.peak_bytes <= reported, f"{where}: {watch.peak_bytes} > {reported}"
        assert reported <= gpu_bytes, f"{where}: peak_bytes is {reported}"
        assert_same(state, expected, _ULPS)
        # A mean is as exact as what it is of, which may cancel out.
        largest = jnp.abs(jnp.tanh(jax.device_put(expected["x"], on_device()))).max()
        assert_same(jnp.stack([found, largest]), jnp.stack([value, largest]), _ULPS)
    strategy = f.last_run.strategy
    kind = strategy if strategy in ("whole", "driven") else "split"
    return f"{refusal}, then {kind}" if refusal else kind


def _placed(start: State, places: tuple[str, ...]) -> State:
    leaves, tree = jax.tree.flatten(start)
    put = {
        "device": jnp.asarray,
        "committed": lambda a: jax.device_put(a, on_device()),
        "host": jturnip.host,
        "numpy": np.array,
    }
    return jax.tree.unflatten(
        tree, [put[place](leaf) for place, leaf in zip(places, leaves, strict=True)]
    )


def _budget(program: RandomProgram, peak: int, state: State, batch: Any) -> tuple[int, str]:
    """A budget in which the program is to run, and how a smaller one was refused."""
    gpu_bytes = max(1, int(program.share * peak))
    donated = (0,) if program.donated else ()
    lowered = jturnip.jit(program.fn, gpu_bytes, donate_argnums=donated).lower(state, batch)
    error = _refusal(lowered)
    if error is None:
        return gpu_bytes, ""
    assert error.needed_bytes > gpu_bytes, str(error)
    assert "is -" not in str(error), str(error)
    refusal = "refused at XLA's peak" if program.share == 1 else "refused"
    return error.needed_bytes, refusal


def _refusal(lowered: Any) -> jturnip.DoesNotFit | None:
    try:
        _ = lowered.plan
    except jturnip.DoesNotFit as error:
        return error
    return None


# -- many ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--at-a-time", type=int, default=25)
    parser.add_argument("--here", action="store_true", help="in this process")
    flags = parser.parse_args()
    if flags.here:
        _run_here(range(flags.start, flags.start + flags.count))
        return
    outcomes: collections.Counter[str] = collections.Counter()
    starts = range(flags.start, flags.start + flags.count, flags.at_a_time)
    with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
        for lines in pool.map(lambda s: _run_apart(s, flags.at_a_time), starts):
            for seed, outcome, story in lines:
                outcomes[outcome] += 1
                if story:
                    print(f"seed {seed}: {story}", flush=True)
    for outcome, number in outcomes.most_common():
        print(f"{number:6} {outcome}")
    sys.exit(bool(outcomes["wrong"] or outcomes["aborted"]))


def _run_apart(start: int, count: int) -> list[tuple[int, str, str]]:
    found: list[tuple[int, str, str]] = []
    seed, end = start, start + count
    while seed < end:
        command = [sys.executable, __file__, "--here", f"--start={seed}"]
        done = subprocess.run(
            [*command, f"--count={end - seed}"], capture_output=True, text=True
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "["]
        found += [(a, b, c) for a, b, c in lines]
        seed += len(lines)
        if seed < end:
            found.append((seed, "aborted", done.stderr[-500:]))
            seed += 1
    return found


def _run_here(seeds: range) -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    for seed in seeds:
        program, story = random_program(seed), ""
        try:
            outcome = check(program)
        except Exception as error:
            outcome = "wrong"
            last = traceback.format_exc().splitlines()[-12:]
            steps = ", ".join(program.steps)
            story = f"{steps}; {type(error).__name__}: " + "\n  ".join(last)
        if outcome.startswith("refused at"):
            story = f"{outcome}: {', '.join(program.steps)}"
        print(json.dumps([seed, outcome, story]), flush=True)
        del program
        gc.collect()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
