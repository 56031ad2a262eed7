"""Every array that is made is in the account, whoever makes it, from the first call on."""

import ast
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, layers, memory_kinds, on_device, unconstrained_peak
from watch import Watch

import jturnip
from jturnip import memory, placement
from jturnip.native import marks, queue
from jturnip.programs import chains
from jturnip.runtime import engines
from jturnip.runtime.state import Limits


pytestmark = pytest.mark.usefixtures("quick_compilation")

KIB = 1024
MATRIX = 256 * KIB  # of (256, 256)


def matrices(count: int, place: str = "committed") -> list[Any]:
    put: dict[str, Callable[[Any], Any]] = {
        "device": jnp.asarray,
        "committed": lambda a: jax.device_put(a, on_device()),
        "host": jturnip.host,
        "numpy": np.array,
    }
    one = np.eye(256, dtype=np.float32)
    return [put[place](one * (k + 1) / count) for k in range(count)]


def watched(f: Any, *args: Any) -> Any:
    """Calls with every allocation looked at: within the budget, and told of."""
    with Watch(args) as watch:
        result = jax.block_until_ready(f(*args))
    assert watch.peak_bytes <= f.last_run.peak_bytes
    assert f.last_run.peak_bytes <= f._options.gpu_bytes
    return result


# Loops and stacks


def halve(carried: list[Any], turns: int = 3) -> list[Any]:
    body = lambda state: (state[0] + 1, [a * 0.5 + 1 for a in state[1]])
    return jax.lax.while_loop(lambda state: state[0] < turns, body, (0, carried))[1]


@pytest.mark.long
@pytest.mark.parametrize("place", ["device", "committed", "host", "numpy"])
@pytest.mark.parametrize("donated", [True, False])
def test_what_a_loop_carries_wherever_it_is(place: str, donated: bool):
    """Uncommitted arrays that a loop moved to host memory ended the process."""
    f = jturnip.jit(
        halve, 12 * MATRIX, strategy="turnip", donate_argnums=(0,) if donated else ()
    )
    expected = jax.jit(halve)(matrices(8))
    for _ in range(2):
        given = matrices(8, place)
        assert_same(jax.device_put(watched(f, given), on_device()), expected)


def test_two_ordinary_arrays_in_a_loop_that_does_not_fit():
    c = [jnp.ones((512, 512)), jnp.ones((512, 512))]
    found = jturnip.jit(halve, gpu_bytes=3_200_000)(c)
    assert_same(jax.device_put(found, on_device()), jax.jit(halve)(c))


def test_carried_arrays_larger_than_the_budget_are_refused_before_any_is_copied():
    carried = matrices(24)
    f = jturnip.jit(halve, 196 * KIB, strategy="turnip", donate_argnums=0)
    with Watch(carried) as watch, pytest.raises(jturnip.DoesNotFit, match="6 MiB") as error:
        f(carried)
    assert watch.peak_bytes == 24 * MATRIX
    assert not any(a.is_deleted() for a in carried)
    f = jturnip.jit(halve, error.value.needed_bytes, donate_argnums=0)
    watched(f, carried)


def adam(stack: Any, mu: Any, nu: Any, x: Any) -> Any:
    def loss(stack: Any) -> Any:
        layer = lambda x, w: (jnp.tanh(x @ w), None)
        return (jax.lax.scan(layer, x, stack)[0] ** 2).sum()

    grad = jax.grad(loss)(stack)
    mu, nu = 0.9 * mu + 0.1 * grad, 0.9 * nu + 0.1 * grad**2
    return stack - 0.1 * mu / (jnp.sqrt(nu) + 0.1), mu, nu


@pytest.mark.long
@pytest.mark.parametrize("place", ["device", "committed"])
def test_a_scanned_step_whose_stacks_are_given_up_on_the_device(place: str):
    random = np.random.default_rng(0)
    stacks = [random.normal(size=(8, 256, 256)).astype(np.float32) / 16 for _ in range(3)]
    stacks[2] = stacks[2] ** 2
    x = random.normal(size=(256, 256)).astype(np.float32)
    peak = unconstrained_peak(adam, *stacks, x, donate_argnums=(0, 1, 2))
    put = jnp.asarray if place == "device" else lambda a: jax.device_put(a, on_device())
    expected = jax.jit(adam)(*stacks, x)
    for budget in (24 * MATRIX + 70 * KIB + MATRIX, 28 * MATRIX, peak):
        f = jturnip.jit(adam, budget, strategy="turnip", donate_argnums=(0, 1, 2))
        try:
            found = watched(f, *map(put, stacks), x)
        except jturnip.DoesNotFit as error:
            f = jturnip.jit(
                adam, error.needed_bytes, strategy="turnip", donate_argnums=(0, 1, 2)
            )
            found = watched(f, *map(put, stacks), x)
        assert_same(jax.device_put(found, on_device()), expected, ulps=512)


# Where results go


def products(weights: list[Any]) -> list[Any]:
    return [w @ w for w in weights]


def test_a_call_is_not_refused_on_its_own_results():
    weights = jturnip.host([jnp.ones((512, 512)) / 512] * 16)
    f = jturnip.jit(products, "8MiB")
    first = watched(f, weights)
    second = watched(f, first)
    assert_same(jax.device_put(second, on_device()), products(products(list(weights))))


@pytest.mark.parametrize("mib", [8, 12, 17, 24])
def test_what_is_returned_together_lies_together(mib: int):
    def fn(weights: list[Any]) -> tuple[Any, Any]:
        return sum(w.sum() for w in weights), products(weights)

    weights = jturnip.host([jnp.ones((512, 512)) / 512] * 16)
    total, found = jturnip.jit(fn, mib << 20, strategy="turnip")(weights)
    assert memory_kinds(total) == ["device"]
    assert len(set(memory_kinds(found))) == 1


def test_results_that_out_shardings_puts_on_the_device_are_counted():
    weights = matrices(8, "host")
    f = jturnip.jit(products, 8 * MATRIX + 4 * KIB, out_shardings=on_device())
    less = jturnip.jit(products, 8 * MATRIX, out_shardings=on_device(), strategy="turnip")
    with pytest.raises(jturnip.DoesNotFit) as refusal:
        less(weights)
    assert refusal.value.needed_bytes == 8 * MATRIX + 4 * KIB
    found = watched(f, weights)
    assert set(memory_kinds(found)) == {"device"}


def test_arguments_that_stay_are_counted_beside_results_on_the_device():
    weights = matrices(8)
    with pytest.raises(jturnip.DoesNotFit, match="2 MiB of arguments"):
        jturnip.jit(products, 15 * MATRIX, out_shardings=on_device())(weights)


@pytest.mark.parametrize("kind", ["tuple", "elements", "apart"])
def test_results_are_recognised_however_the_state_is_returned(kind: str):
    def step(p: Any, o: Any) -> tuple[Any, Any]:
        return jnp.tanh(p @ o), o @ p

    fns: dict[str, Callable[..., Any]] = {
        "tuple": lambda state: step(*state),
        "elements": step,
        "apart": lambda state: (*step(state["p"], state["o"]), state["p"].sum()),
    }
    for budget in (4 * MATRIX, 5 * MATRIX, 13 * MATRIX // 2):
        p, o = matrices(2, "host")
        f = jturnip.jit(fns[kind], budget, strategy="turnip")
        for _ in range(3):
            given = {"tuple": [(p, o)], "elements": [p, o], "apart": [{"p": p, "o": o}]}
            p, o, *_ = watched(f, *given[kind])


def test_arguments_that_in_shardings_places_are_refused_before_they_are_copied():
    x = jturnip.host(np.ones((1024, 1024), np.float32))
    f = jturnip.jit(lambda x: x + 1, "1MiB", in_shardings=on_device())
    with Watch() as watch, pytest.raises(jturnip.DoesNotFit):
        f(x)
    assert watch.peak_bytes == 0
    small = jturnip.host(np.ones((64, 64), np.float32))
    assert_same(watched(f, small), jnp.ones((64, 64)) + 1)


def test_what_nothing_reads_decides_nothing():
    unread = jturnip.host(np.ones((1024, 1024), np.float32))

    def fn(x: Any, unread: Any) -> Any:
        _ = jax.jit(lambda unread: unread * 2)(unread)
        return x + 1

    f = jturnip.jit(fn, "1MiB")
    with Watch() as watch:
        f(np.ones(16, np.float32), unread)
    assert f.last_run.strategy == "whole"
    assert watch.peak_bytes < 1000
    there = jnp.asarray(np.ones((1024, 1024), np.float32))
    g = jturnip.jit(fn, "1MiB", out_shardings=on_device())
    assert_same(g(np.ones(16, np.float32), there), jnp.ones(16) + 1)


@pytest.mark.long
def test_what_nothing_reads_is_in_no_account_of_a_loop():
    def fn(x: Any, unread: Any, w: Any) -> Any:
        state = 0, x @ w, x @ w, x @ w
        # All positions decide, so that no axis is left to cut the loop along.
        more = lambda s: (s[0] < 3) & (jnp.abs(s[1]).max() < 1e9)
        step = lambda s: (s[0] + 1, jnp.tanh(s[2] @ w), s[1], s[3] * 0.5 + s[1])
        return jax.lax.while_loop(more, step, state)

    x, unread, w = (jnp.asarray(w) for w in layers(3))
    for there in (unread, np.asarray(unread)):
        f = jturnip.jit(fn, int(0.5 * jturnip.peak_bytes(fn, x, unread, w)))
        assert_same(f(x, there, w), jax.jit(fn)(x, unread, w))
        assert f.last_run.strategy == "driven"
        assert f.last_run.peak_bytes <= f.last_run.plan.gpu_bytes


# What is closed over


@pytest.mark.parametrize("fn", ["scan", "products"])
def test_closed_over_device_arrays_are_counted(fn: str):
    stack = jnp.asarray(np.ones((16, 256, 256), np.float32) / 256)
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    fns = {
        "scan": lambda x: jax.lax.scan(layer, x, stack)[0],
        "products": lambda x: x @ stack[0] @ stack[5],
    }
    x = np.ones((256, 256), np.float32)
    with pytest.raises(jturnip.DoesNotFit, match=r"(?s)4 MiB.*jturnip\.host"):
        jturnip.jit(fns[fn], 12 * MATRIX)(x)
    f = jturnip.jit(fns[fn], 64 * MATRIX)
    with Watch(stack, x) as watch:
        found = jax.block_until_ready(f(x))
    assert watch.peak_bytes <= f.last_run.peak_bytes <= 64 * MATRIX
    assert f.last_run.peak_bytes >= stack.nbytes
    assert_same(found, jax.jit(fns[fn])(x))


def test_a_closed_over_numpy_array_stays_what_it_was():
    """As under `jax.jit`, whose executables hold a copy."""
    for budget, strategy in ((1 << 30, "auto"), (3 * MATRIX + 100_000, "turnip")):
        weight = np.ones((256, 256), np.float32)
        f = jturnip.jit(lambda x, w=weight: jnp.tanh(x @ w) @ w, budget, strategy=strategy)
        x = np.eye(256, dtype=np.float32)
        before = np.asarray(f(x))
        weight[:] = 7
        np.testing.assert_array_equal(np.asarray(f(x)), before)


def test_a_closed_over_array_is_copied_anew_once_it_has_changed():
    weight = np.ones((256, 256), np.float32)
    fn = lambda x: x @ weight @ weight
    x = np.eye(256, dtype=np.float32)
    make = lambda: jturnip.jit(lambda x: fn(x), 4 * MATRIX, strategy="turnip")
    first = make()
    assert float(first(x)[0, 0]) == 256
    weight[:] = 2
    second = make()
    assert float(second(x)[0, 0]) == 1024
    assert float(first(x)[0, 0]) == 256


def test_a_closed_over_array_stays_what_it_was_when_another_signature_had_its_turn():
    numbers = np.arange(64, dtype=np.float32)
    f = jturnip.jit(lambda x: (x + numbers) @ x.T, 100_000, strategy="turnip")
    x = np.ones((8, 64), np.float32)
    before = np.asarray(f(x))
    f(np.ones((16, 64), np.float32))
    numbers[:] = 5
    np.testing.assert_array_equal(np.asarray(f(x)), before)


def test_closed_over_arrays_leave_the_device_for_a_whole_call():
    arrays = [np.full((100, 100), k, np.float32) for k in range(10)]
    f = jturnip.jit(lambda x: sum((a * x.sum()).sum() for a in arrays) + x * 2, 614_400)
    small, large = (
        np.ones((4, 4), np.float32),
        jturnip.host(np.ones((300, 233), np.float32)),
    )
    f(small)
    keep = jax.live_arrays()
    with Watch(large) as watch:
        jax.block_until_ready(f(large))
    del keep
    assert watch.peak_bytes <= 614_400


# One budget for the function


def test_signatures_and_threads_share_the_budget():
    budget = 20 * MATRIX
    f = jturnip.jit(lambda ws: sum(jnp.tanh(w @ w).sum() for w in ws), budget)
    cases = [matrices(n, "host") for n in (30, 31, 32)]
    for case in cases:
        f(case)
    errors = []

    def call(case: Any) -> None:
        try:
            for _ in range(5):
                f(case).block_until_ready()
        except BaseException as error:
            errors.append(error)

    with Watch() as watch:
        threads = [threading.Thread(target=call, args=(case,)) for case in cases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert watch.peak_bytes <= budget


def test_whole_calls_that_nobody_waits_for_keep_the_budget(monkeypatch: pytest.MonkeyPatch):
    """Copies of their host arguments live until they are over."""
    x = jnp.ones((256, 256))

    def fn(weights: list[Any], x: Any) -> Any:
        for _ in range(20):
            for w in weights:
                x = jnp.tanh(x @ w)
        return x.sum()

    f = jturnip.jit(fn, int(1.5 * unconstrained_peak(fn, matrices(8), x)))
    f(matrices(8, "host"), x)
    assert f.last_run.strategy == "whole"
    turn = f._turn
    most = []
    copied = turn.copied

    def looking(nbytes: int, results: Any) -> None:
        copied(nbytes, results)
        most.append(sum(n for n, left in turn._under_way if left))

    monkeypatch.setattr(turn, "copied", looking)
    for _ in range(6):
        f(matrices(8, "host"), x)  # new ones each time, so that nothing can stay
    assert len(most) == 6
    assert max(most) <= f._options.gpu_bytes
    gc.collect()


def test_a_whole_call_takes_its_bytes_until_its_results_are_in_host_memory(
    monkeypatch: pytest.MonkeyPatch,
):
    def fn(state: list[Any], x: Any) -> Any:
        return [s + x for s in state], x.sum()

    x = jnp.ones((256, 256))
    f = jturnip.jit(fn, int(1.5 * unconstrained_peak(fn, matrices(4), x)), donate_argnums=0)
    state, _ = f(matrices(4, "host"), x)
    assert f.last_run.strategy == "whole"
    waited_for: list[Any] = []
    monkeypatch.setattr(f._turn, "copied", lambda nbytes, some: waited_for.append(some))
    state, _ = f(state, x)
    assert list(map(id, waited_for[0])) == list(map(id, state))
    assert set(memory_kinds(waited_for[0])) == {"pinned_host"}


def test_numbers_that_tasks_take_stay_on_an_accelerator(monkeypatch: pytest.MonkeyPatch):
    there = placement.sharding(jax.devices()[0], on_host=False)
    numbers = tuple(np.asarray(n, np.int32) for n in (3, 4, 3))
    assert engines._in_reach(there, {}, numbers) is numbers
    monkeypatch.setattr(memory, "is_on_cpu", lambda where: False)
    known: dict[Any, Any] = {}
    three, four, again = engines._in_reach(there, known, numbers)
    assert three is again
    assert {getattr(number, "sharding", None) for number in (three, four)} == {there}
    assert [int(three), int(four), len(known)] == [3, 4, 2]
    many = tuple(np.asarray(n, np.int32) for n in range(500))
    passed = engines._in_reach(there, known, many)
    assert list(map(int, passed)) == list(range(500))
    kept = sum(isinstance(number, jax.Array) for number in passed)
    # With the slots of as many runs as may be in flight, no more than is ours there.
    slots = 2 * Limits.on("gpu").most_runs
    assert 64 < kept == len(known)
    assert (kept + slots) * 256 <= placement._GPU_BOOKKEEPING


@pytest.mark.skipif(not marks.load(), reason="needs the C++ extension")
def test_on_a_cpu_the_marks_of_all_runs_in_flight_are_within_what_is_ours():
    slots = engines.MarkSlots(jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0]))
    for _ in range(Limits.on("cpu").most_runs):
        slots.take()
    assert 0 < slots.nbytes <= placement.BOOKKEEPING - chains._INNER
    assert slots.nbytes // 2 <= placement.MARKS  # while none is in flight
    slots.close()


class _Deaf:
    """A queue whose marks never fire, as those of executables that fail."""

    def __init__(self, queue: Any):
        self._queue = queue
        self.closed: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def arm(self, slot: int, id: int, is_called_next: bool = False) -> None:
        pass

    def close_slot(self, slot: int) -> None:
        self.closed.append(slot)
        self._queue.close_slot(slot)


@pytest.mark.skipif(not marks.load(), reason="needs the C++ extension")
def test_a_run_that_is_over_without_its_mark_gives_up_its_slot(
    monkeypatch: pytest.MonkeyPatch,
):
    made: list[_Deaf] = []

    def make_queue() -> Any:
        made.append(_Deaf(queue.make_queue()))
        return made[-1]

    monkeypatch.setattr(engines, "make_queue", make_queue)
    monkeypatch.setattr(engines, "_IDLE", {})
    monkeypatch.setattr(engines, "_LOOK_AGAIN", 0.01)
    x = jnp.ones((64, 64))
    f = jturnip.jit(lambda x: jnp.tanh(x @ x) @ x, "1MiB", strategy="turnip")
    assert_same(f(x), jax.jit(lambda x: jnp.tanh(x @ x) @ x)(x))
    (deaf,) = made
    runs = len(f.last_run.plan.taskgraph.tasks)
    assert len(set(deaf.closed)) == len(deaf.closed) == runs


def outcome(f: Any, *args: Any) -> tuple[float | None, str]:
    try:
        return float(f(*args)), ""
    except jturnip.ExecutionError as error:
        return None, str(error)


@pytest.mark.parametrize("strategy", ["auto", "turnip"])
def test_a_callback_that_calls_the_function_hangs_for_neither(strategy: str):
    """Whole it works as under `jax.jit`; split it is told what to do."""
    weights = layers(12, width=256)

    def fn(x: Any) -> Any:
        for w in weights if x.ndim == 2 else ():
            x = jnp.tanh(x @ w)
        if x.ndim == 2:
            x = jax.pure_callback(again, jax.ShapeDtypeStruct((), np.float32), x)
        return x * 2

    def again(x: Any) -> Any:
        return np.asarray(f(np.float32(3.0)))

    budget = {"auto": 1 << 30, "turnip": 1 << 21}[strategy]
    f: Any = jturnip.jit(fn, budget, strategy=strategy)
    f(np.float32(1.0))
    value, error = outcome(f, np.ones((256, 256), np.float32))
    assert value == 12 or strategy == "turnip"
    assert value == 12 or "Call another jturnip.jit" in error
    assert float(f(np.float32(2.0))) == 4


def test_a_host_array_that_is_donated_twice_is_refused_whole_or_split():
    for budget, strategy in ((1 << 30, "auto"), (6 * MATRIX, "turnip")):
        (a,) = matrices(1, "host")
        f = jturnip.jit(
            lambda a, b: (a @ b + 1, b + 2),
            budget,
            donate_argnums=(0, 1),
            strategy=strategy,
        )
        with pytest.raises(jturnip.ArgumentError, match="second time"):
            f(a, a)
        assert not a.is_deleted()


# What is said of a budget


@pytest.mark.long
@pytest.mark.parametrize(
    "budget", [MATRIX, pytest.param(4 * MATRIX, marks=pytest.mark.slow)]
)
def test_a_nested_refusal_speaks_of_the_users_budget(budget: int):
    def fn(a: Any, b: Any, x: Any) -> Any:
        first = [a @ w for w in (a, b)]
        x = jax.lax.while_loop(lambda x: x[0, 0] < 5, lambda x: jnp.tanh(x @ b) + 6, x)
        return first, x

    args = matrices(3)
    with pytest.raises(jturnip.DoesNotFit) as refusal:
        jturnip.jit(fn, budget, strategy="turnip")(*args)
    error, message = refusal.value, str(refusal.value)
    assert error.gpu_bytes == budget
    assert f"{budget} bytes" in message or f"is {budget} (" in message
    assert " -" not in message
    watched(jturnip.jit(fn, error.needed_bytes, strategy="turnip"), *args)


# One place that makes arrays


MAKERS = {"device_put", "copy_to", "put", "_batched_copy", "_put", "batched_device_put"}
MODULES = [
    path
    for path in sorted(Path(jturnip.__file__).parent.rglob("*.py"))
    if path.parts[-2] not in ("models",)
    and path.name not in ("memory.py", "compat.py", "demo.py", "doctor.py", "queue.py")
]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_nothing_else_makes_arrays(path: Path):
    """Beside `memory`, tasks' executables, what is traced, and the search for a NaN."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    made = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        of = owner.id if isinstance(owner, ast.Name) else ""
        name = node.func.attr
        creates = of == "jnp" and name in ("asarray", "array", "copy", "zeros", "ones")
        is_maker = name in MAKERS and of != "_inbox"
        if is_maker or (creates and "frontend" not in path.parts):
            made.append(f"{name}, line {node.lineno}")
    # The one looks at what was made, the other traces a function that XLA is to move for.
    allowed = {"nans": "asarray", "comparison": "device_put"}.get(path.stem)
    assert [m for m in made if m.split(",")[0] != allowed] == []
