"""What a device, its allocator and its link really do, where the design rests on it.

Each probe yields figures as it finds them. Sizes come from a `Scale`, so that a CPU can run
all of it in seconds.
"""

import concurrent.futures
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jturnip
from benchmarks import inside, steps
from benchmarks.measure import Figure, column, in_turn, ratios, seconds_of
from jturnip import doctor
from jturnip.models import llama
from jturnip.native import marks


MIB = 2**20
Figures = Iterator[Figure]


@dataclass(frozen=True)
class Scale:
    """How large things are."""

    link_sizes: tuple[int, ...]
    # One transfer of this many bytes takes a millisecond or more.
    block: int
    # Pinned memory taken anew, in pieces of `block`.
    pool: int
    # Products of matrices of this width, chained to a kernel of so many seconds.
    width: int
    kernel_seconds: float
    repeats: int
    loop_tasks: int
    model: llama.LlamaConfig


FULL = Scale(
    link_sizes=(64 * 2**10, MIB, 16 * MIB, 128 * MIB, 1024 * MIB),
    block=128 * MIB,
    pool=2048 * MIB,
    width=4096,
    kernel_seconds=0.02,
    repeats=20,
    loop_tasks=400,
    model=llama.config("400m", layers=4, batch=2, dtype="bfloat16"),
)
TINY = Scale(
    link_sizes=(64 * 2**10,),
    block=MIB,
    pool=2 * MIB,
    width=128,
    kernel_seconds=0.002,
    repeats=2,
    loop_tasks=5,
    model=llama.config("tiny", layers=1, length=8),
)


class SkippedError(Exception):
    """What is measured is not there on this device."""


# -- 1. the link and the pinned pool ---------------------------------------------------


def pinned_pool(scale: Scale) -> Figures:
    """First use of pinned memory, which the pool must get from the system, and later use.

    Only the first probe of a process finds the pool empty.
    """
    array = _ready(jax.device_put(np.ones(scale.block, np.uint8), _device()))

    def fill() -> list[float]:
        kept, taken = [], []
        for _ in range(scale.pool // scale.block):
            begin = time.perf_counter()
            kept.append(_ready(jax.device_put(array, _host())))
            taken.append((time.perf_counter() - begin) * 2**30 / scale.block)
        return taken

    yield Figure("offload into new pinned memory, per GiB", tuple(fill()), "s")
    yield Figure("the same into memory used before", tuple(fill()), "s")


def link(scale: Scale) -> Figures:
    """Bytes per second each way and both at once, by size; and many arrays in one call."""
    for nbytes in scale.link_sizes:
        speed = doctor.measure_link(jax.devices()[0], nbytes)
        for way in ("h2d", "d2h", "both"):
            name = f"{way}, {nbytes / MIB:g} MiB"
            yield Figure(name, (getattr(speed, way) / 1e9,), "GB/s")
    small = [np.ones(scale.block // 64, np.uint8)] * 16
    here = _ready(jax.device_put(small, _device()))
    there = _ready(jax.device_put(here, _host()))
    for name, arrays, target in (("h2d", there, _device()), ("d2h", here, _host())):
        ways = [
            lambda a=arrays, t=target: seconds_of(lambda: jax.device_put(a, t)),
            lambda a=arrays, t=target: seconds_of(
                lambda: [jax.device_put(x, t) for x in a]
            ),
        ]
        taken = in_turn(ways, scale.repeats)
        total = 16 * small[0].nbytes / 1e9
        for at, how in enumerate(("one call", "16 calls")):
            rates = tuple(total / seconds for seconds in column(taken, at))
            size = f"16 x {small[0].nbytes / MIB:g} MiB"
            yield Figure(f"{name}, {size}, {how}", rates, "GB/s")


# -- 2. the allocation rule ------------------------------------------------------------


def sync_rule(scale: Scale) -> Figures:
    """Whether a copy issued behind k kernels is over before they are."""
    work, _ = _kernel(scale)
    for way, start, target in (
        ("reload", _host(), _device()),
        ("offload", _device(), _host()),
    ):
        source = _block(scale, start)
        move = functools.partial(jax.device_put, source, target)
        alone = [seconds_of(move) for _ in range(5)]
        yield Figure(f"a {way} alone", tuple(s * 1e3 for s in alone[1:]), "ms")
        for behind in (1, 2, 4):
            shares = []
            for _ in range(scale.repeats):
                kernels = [work() for _ in range(behind)]
                begin = time.perf_counter()
                copy = _when(move())
                end = _when(kernels[-1]).result()
                shares.append((copy.result() - begin) / (end - begin))
            name = f"{way} behind {behind} kernels: its end over theirs"
            yield Figure(name, tuple(shares), "", None, {"below 1": "it overlaps"})


def race(scale: Scale) -> Figures:
    """How often a kernel dispatched right after a transfer holds the transfer up."""
    work, _ = _kernel(scale)
    places = (("reload", _host(), _device()), ("offload", _device(), _host()))
    for (name, start, target), micros in itertools.product(places, (0, 20, 50, 100, 500)):
        source, lost = _block(scale, start), []
        for _ in range(scale.repeats):
            copy = _when(jax.device_put(source, target))
            _spin(micros * 1e-6)
            end = _when(work()).result()
            lost.append(float(copy.result() >= end - 0.1 * scale.kernel_seconds))
        title = f"{name} overtaken by a kernel {micros} µs later"
        yield Figure(title, (float(np.mean(lost)),), "of runs")


# -- 3. completion ---------------------------------------------------------------------


def completion(scale: Scale) -> Figures:
    """From issuing a reload to knowing its end, by two ways, with and without a kernel."""
    work, _ = _kernel(scale)
    for nbytes, pending in itertools.product((4096, scale.block), (False, True)):
        source = _ready(jax.device_put(np.ones(nbytes, np.uint8), _host()))
        ways: dict[str, Callable[[jax.Array], float]] = {
            "is_ready polled": _polled,
            "waiter thread": lambda array: _when(array).result(),
        }
        for way, wait in ways.items():
            taken = []
            for _ in range(scale.repeats):
                begin = time.perf_counter()
                array = jax.device_put(source, _device())
                running = None
                if pending:
                    _spin(200e-6)
                    running = work()
                taken.append((wait(array) - begin) * 1e6)
                _ready(running)
            after = ", a kernel dispatched 200 µs later" if pending else ""
            yield Figure(f"{nbytes / 1024:g} KiB, {way}{after}", tuple(taken), "µs")


# -- 4. freeing ------------------------------------------------------------------------


def freeing(scale: Scale) -> Figures:
    """From an offload's end, as the host sees it, to its bytes leaving `bytes_in_use`."""
    _bytes_in_use()
    work, _ = _kernel(scale)
    for pending in (False, True):
        taken, by_ready = [], []
        for _ in range(scale.repeats):
            source = _block(scale, _device())
            before = _bytes_in_use()
            copy = jax.device_put(source, _host())
            del source
            running = work() if pending else None
            ready = _polled(copy)
            by_ready.append(float(_bytes_in_use() <= before - scale.block // 2))
            freed = _freed(before - scale.block // 2)
            taken.append((freed - ready) * 1e6)
            _ready(running)
        after = ", with a kernel pending" if pending else ""
        yield Figure(f"bytes free after is_ready{after}", tuple(taken), "µs")
        yield Figure(f"already free then{after}", (float(np.mean(by_ready)),), "of runs")


def _freed(wanted: int) -> float:
    until = time.perf_counter() + 2.0
    while _bytes_in_use() > wanted and time.perf_counter() < until:
        pass
    return time.perf_counter()


def _bytes_in_use() -> int:
    stats = jax.devices()[0].memory_stats()
    if not stats:
        raise SkippedError(
            "this device's allocator gives no figures (memory_stats is None)"
        )
    return stats["bytes_in_use"]


# -- 5. dispatch and fusion ------------------------------------------------------------


def dispatch(scale: Scale) -> Figures:
    """What the calls cost the Python thread, and what pieces cost the device."""
    for count in (2, 8):
        yield from _call_costs(count, scale.repeats)
    here = _ready(jax.device_put(np.ones(1024, np.float32), _device()))
    there = _ready(jax.device_put(here, _host()))
    for name, array, target in (("h2d", there, _device()), ("d2h", here, _host())):
        move = functools.partial(jax.device_put, array, target)
        taken = [seconds_of(move, 100) * 1e6 for _ in range(scale.repeats + 1)]
        yield Figure(f"device_put of 4 KiB, {name}", tuple(taken[1:]), "µs")
    yield from steps.loop(scale.loop_tasks, scale.repeats).figures


def _call_costs(count: int, repeats: int) -> Figures:
    x = _ready(jax.device_put(np.ones((8, 8), np.float32), _device()))
    slot = jnp.int32(-1)
    arguments = [x] * count

    def plain(*xs: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, xs)

    def marked(slot: jax.Array, *xs: jax.Array) -> Any:
        return (y := plain(*xs)), marks.mark(y, slot)

    jitted = jax.jit(plain)
    compiled = jitted.lower(*arguments).compile()
    ways = {
        "jax.jit": functools.partial(jitted, *arguments),
        "Compiled": functools.partial(compiled, *arguments),
    }
    if marks.load():
        with_mark = jax.jit(marked).lower(slot, *arguments).compile()
        ways["Compiled with a mark"] = functools.partial(with_mark, slot, *arguments)
    timed = [functools.partial(seconds_of, way, 200) for way in ways.values()]
    taken = in_turn(timed, repeats)
    for at, name in enumerate(ways):
        micros = tuple(seconds * 1e6 for seconds in column(taken, at))
        yield Figure(f"{name}, {count} arguments", micros, "µs")


def fusion(scale: Scale) -> Figures:
    """A forward pass whole, cut into tasks, and cut into single equations."""
    model = scale.model
    params = steps.on_device(steps.new_state(model).params)
    batch = _ready(jax.device_put(steps.batch_of(model), _device()))

    def forward(params: Any, batch: Any) -> Any:
        return llama.forward(model, params, batch)

    split = jturnip.jit(forward, gpu_bytes=steps.PLENTY, strategy="turnip")
    leaves = [*jax.tree.leaves(params), batch]
    clustered = split.lower(params, batch).compile()
    single = inside.one_task_per_equation(split.lower(params, batch))
    ways = [
        functools.partial(seconds_of, functools.partial(jax.jit(forward), params, batch)),
        functools.partial(seconds_of, inside.runs(clustered, leaves)),
        functools.partial(seconds_of, inside.runs(single, leaves)),
    ]
    taken = in_turn(ways, scale.repeats, warm_up=2)
    whole = tuple(seconds * 1e3 for seconds in column(taken, 0))
    yield Figure("forward under jax.jit", whole, "ms")
    for at, (name, compiled) in enumerate(
        (("clustered", clustered), ("per equation", single)), start=1
    ):
        tasks = {"tasks": str(len(compiled.plan.taskgraph.tasks))}
        over = ratios((row[at], row[0]) for row in taken)
        yield Figure(f"{name} over jax.jit", over, "", None, {**tasks})


# -- 6. copies against kernels ---------------------------------------------------------


def contention(scale: Scale) -> Figures:
    """How much copies and kernels slow each other down."""
    large = _ready(jax.device_put(np.ones(scale.block * 2, np.float32), _device()))
    scaled = jax.jit(lambda x: x * 1.0001).lower(large).compile()
    product, _ = _kernel(scale)
    kernels: dict[str, Callable[[], Any]] = {
        "memory-bound": functools.partial(_repeated, scaled, large, 24),
        "compute-bound": product,
    }
    places = (("reload", _host(), _device()), ("offload", _device(), _host()))
    for (name, run), (way, start, target) in itertools.product(kernels.items(), places):
        arrays = [_block(scale, start) for _ in range(4)]
        move = functools.partial(jax.device_put, arrays, target)
        copy_alone, run_alone = [], []
        for _ in range(4):
            copy_alone.append(seconds_of(move))
            run_alone.append(seconds_of(run))
        slower_copy, slower_run = [], []
        for _ in range(scale.repeats):
            begin = time.perf_counter()
            copies = _when(move())
            _spin(200e-6)
            end = _when(run()).result()
            slower_run.append((end - begin - 200e-6) / min(run_alone))
            slower_copy.append((copies.result() - begin) / min(copy_alone))
        yield Figure(f"{way} beside {name}: its time over alone", tuple(slower_copy))
        yield Figure(f"{name} beside {way}: its time over alone", tuple(slower_run))


def _repeated(call: Callable[[Any], Any], x: jax.Array, times: int) -> Any:
    for _ in range(times):
        x = call(x)
    return x


# -- 7. destination passing ------------------------------------------------------------


def aliasing(scale: Scale) -> Figures:
    """Whether a result lands in a donated buffer that is otherwise unused."""
    into = jax.jit(lambda v, d: v * 2, donate_argnums=1, keep_unused=True)
    hits = []
    for _ in range(scale.repeats):
        value, destination = _block(scale, _device()), _block(scale, _device())
        address = destination.unsafe_buffer_pointer()
        result = into(value, destination)
        hits.append(float(_ready(result).unsafe_buffer_pointer() == address))
    yield Figure("results in the donated destination", (float(np.mean(hits)),), "of runs")


# -- 8. parts of arrays in host memory -------------------------------------------------


def host_parts(scale: Scale) -> Figures:
    """What it takes to read a part of an array in host memory, through numpy's view of it:
    one that lies in one piece, and columns of a matrix."""
    numbers = np.ones((scale.block // (4 * scale.width), scale.width), np.float32)
    rate = lambda call, size: size / 1e9 / seconds_of(call)
    put = lambda: jax.device_put(numbers, _host())
    into = [rate(put, numbers.nbytes) for _ in range(4)]
    yield Figure("numpy's into pinned memory", tuple(into[1:]), "GB/s")
    matrix = np.asarray(put())
    rows, columns = matrix.shape[0] // 4, matrix.shape[1] // 4
    blocks = [matrix[:, i * columns : (i + 1) * columns] for i in range(4)]
    whole = _ready(jax.device_put(blocks[0], _host()))
    ways: dict[str, Callable[[], Any]] = {
        "that is an array of its own": lambda: jax.device_put(whole, _device()),
        "of rows": lambda: jax.device_put(matrix[:rows], _device()),
        "of columns": lambda: jax.device_put(blocks[0], _device()),
        "of columns, copied first": lambda: jax.device_put(
            np.ascontiguousarray(blocks[0]), _device()
        ),
    }
    for name, way in ways.items():
        rates = [rate(way, whole.nbytes) for _ in range(scale.repeats + 1)]
        yield Figure(f"reload of a part {name}", tuple(rates[1:]), "GB/s")
    four = lambda: [jax.device_put(block, _device()) for block in blocks]
    rates = [rate(four, matrix.nbytes) for _ in range(scale.repeats + 1)]
    yield Figure("four of columns at once", tuple(rates[1:]), "GB/s")
    returned = []
    for _ in range(scale.repeats + 1):
        begin = time.perf_counter()
        copy = ways["of columns"]()
        returned.append((time.perf_counter() - begin) * 1e3)
        _ready(copy)
    yield Figure("until the call for one of columns returns", tuple(returned[1:]), "ms")


PROBES: dict[str, Callable[[Scale], Figures]] = {
    probe.__name__: probe
    for probe in (
        pinned_pool,
        link,
        sync_rule,
        race,
        completion,
        freeing,
        dispatch,
        fusion,
        contention,
        aliasing,
        host_parts,
    )
}


# -- tools -----------------------------------------------------------------------------


def _device() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")


def _host() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def _ready(tree: Any) -> Any:
    return jax.block_until_ready(tree)


def _block(scale: Scale, where: jax.sharding.Sharding) -> jax.Array:
    return _ready(jax.device_put(np.ones(scale.block, np.uint8), where))


def _kernel(scale: Scale) -> tuple[Callable[[], jax.Array], float]:
    """A call that keeps the device busy for about `kernel_seconds`, and its length."""
    x = _ready(jax.device_put(np.eye(scale.width, dtype=np.float32), _device()))

    def chain(count: int, x: jax.Array) -> jax.Array:
        return functools.reduce(lambda y, _: jnp.tanh(y @ x), range(count), x)

    def build(count: int) -> tuple[Callable[[], jax.Array], float]:
        call = jax.jit(functools.partial(chain, count)).lower(x).compile()
        work = functools.partial(call, x)
        return work, min(seconds_of(work) for _ in range(5))

    guess = 4
    _, took = build(guess)
    return build(max(1, min(500, round(guess * scale.kernel_seconds / took))))


_POOL = concurrent.futures.ThreadPoolExecutor(8)


def _when(tree: Any) -> concurrent.futures.Future[float]:
    """The time at which a thread that waits for arrays wakes up."""
    return _POOL.submit(_awake, [tree])


def _awake(cell: list[Any]) -> float:
    _ready(cell.pop())
    return time.perf_counter()


def _polled(array: Any) -> float:
    while not array.is_ready():
        pass
    return time.perf_counter()


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
