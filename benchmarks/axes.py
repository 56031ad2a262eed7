"""Functions whose intermediates do not fit, cut along their axes."""

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jturnip
from benchmarks.measure import Figure, Section, column, in_turn, ratios, seconds_of
from jturnip.demo import peak_bytes


_SHARE = 4  # the budget is the peak of `jax.jit` over this


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    return jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ v


def _of_attention(q: Any, k: Any, v: Any) -> Any:
    return jax.grad(lambda *qkv: jnp.sum(attention(*qkv) ** 2), (0, 1, 2))(q, k, v)


def _cross_entropy(x: Any, w: Any) -> Any:
    labels = jnp.arange(x.shape[0]) % w.shape[1]
    return -jnp.mean(jax.nn.log_softmax(x @ w)[jnp.arange(x.shape[0]), labels])


def _triangles(pair: Any, a: Any, b: Any, c: Any) -> Any:
    left, right = jax.nn.sigmoid(pair @ a), jax.nn.sigmoid(pair @ b)
    return pair + jnp.einsum("ikc,jkc->ijc", left, right) @ c


def _block(x: Any, qkv: Any, up: Any, down: Any) -> Any:
    q, k, v = jnp.split(x @ qkv, 3, axis=-1)
    heads = lambda a: a.reshape(a.shape[0], -1, 32).swapaxes(0, 1)
    mixed = attention(*map(heads, (q, k, v))).swapaxes(0, 1).reshape(x.shape)
    return jnp.sum((jax.nn.gelu((x + mixed) @ up) @ down) ** 2)


def _convolutions(images: Any, first: Any, second: Any) -> Any:
    def conv(x: Any, w: Any) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)

    return jnp.mean(conv(jax.nn.relu(conv(images, first)), second) ** 2)


# Function, and the shapes of its arguments at a length of 1,024.
_CASES: dict[str, tuple[Callable[..., Any], Callable[[int], Sequence[tuple[int, ...]]]]] = {
    "causal attention": (attention, lambda n: [(8, n, 64)] * 3),
    "its gradients": (_of_attention, lambda n: [(8, n, 64)] * 3),
    "a transformer block's gradients": (
        jax.grad(_block, argnums=(0, 1, 2, 3)),
        lambda n: [(n, 256), (256, 768), (256, 1024), (1024, 256)],
    ),
    "cross entropy": (_cross_entropy, lambda n: [(n, 64), (64, 16 * n)]),
    "its gradient": (
        jax.grad(_cross_entropy, argnums=(0, 1)),
        lambda n: [(n, 64), (64, 16 * n)],
    ),
    "nearest neighbours": (
        lambda x, y: jax.lax.top_k(-(x @ y.T - 0.5 * jnp.sum(y**2, 1)), 5),
        lambda n: [(2 * n, 32), (2 * n, 32)],
    ),
    "a kernel times a matrix": (
        lambda x, v: jnp.exp(x @ x.T - 0.5 * jnp.sum(x**2, 1)) @ v,
        lambda n: [(2 * n, 32), (2 * n, 32)],
    ),
    "triangles of pairs": (
        _triangles,
        lambda n: [(n // 4, n // 4, 8), (8, 64), (8, 64), (64, 8)],
    ),
    "gradients of convolutions": (
        jax.grad(_convolutions, argnums=(1, 2)),
        lambda n: [(n // 32, 64, 64, 3), (3, 3, 3, 32), (3, 3, 32, 32)],
    ),
    "sorted along the long axis": (
        lambda x: jnp.sort(jnp.sin(x) * x, axis=1)[:, ::16],
        lambda n: [(n // 4, 8 * n)],
    ),
}


@dataclass(frozen=True)
class _Measured:
    """One function in a share of its peak."""

    ratios: tuple[float, ...]
    milliseconds: float
    tasks: int
    moved: int


def axes(length: int, pairs: int) -> Section:
    """Times functions in a quarter of their peak, and an out-of-core product.

    Args:
      length: of sequences, and of what else is long.
      pairs: measurements of each, in turn with stock `jax.jit`.
    """
    figures: list[Figure] = []
    for name, (fn, shapes) in _CASES.items():
        try:
            ours = _measured(fn, numbers(shapes(length)), pairs)
        except jturnip.DoesNotFit as refusal:
            figures.append(Figure(name, (), "", 1.5, {"refused": str(refusal)}))
            continue
        more: dict[str, float | str] = {
            "jax.jit, ms": ours.milliseconds,
            "tasks": str(ours.tasks),
            "over the link, MB": ours.moved / 1e6,
        }
        figures.append(Figure(name, ours.ratios, "", 1.5, more))
    medians = [f.median for f in figures if f.samples]
    all_of_them = (statistics.median(medians),) if medians else ()
    figures.append(Figure("the median of them", all_of_them, "", 1.1))
    figures += _product(4 * length)
    about = (
        "Functions whose intermediates are most of what they need, their arguments in host"
        f" memory, in 1/{_SHARE} of the peak of `jax.jit`, which has its arguments on the"
        " device; time over its time. The product is of two matrices in host memory, each"
        " larger than the budget: bytes over the link over those of the best blocking; and"
        " with links that need half as long as the product, as long and twice as long, time"
        " over the larger of both."
    )
    return Section("(h) Cut along axes", about, tuple(figures))


def numbers(shapes: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(0)
    return tuple(random.normal(size=s).astype(np.float32) / 4 for s in shapes)


def _measured(fn: Callable[..., Any], args: Sequence[np.ndarray], pairs: int) -> _Measured:
    stock = jax.jit(fn)
    peak = peak_bytes(stock.lower(*args).compile())
    ours = jturnip.jit(fn, peak // _SHARE)
    here, there = jax.device_put(args), jturnip.host(args)
    ways = [
        functools.partial(seconds_of, functools.partial(ours, *there)),
        functools.partial(seconds_of, functools.partial(stock, *here)),
    ]
    taken = in_turn(ways, pairs)
    run = ours.last_run
    assert run is not None
    return _Measured(
        ratios(taken),
        1e3 * statistics.median(column(taken, 1)),
        len(ours.lower(*there).plan.taskgraph.tasks),
        run.h2d_bytes + run.d2h_bytes,
    )


def _product(n: int) -> list[Figure]:
    """A product of n x n matrices of which each is twice as large as the budget."""
    a, b = jturnip.host(numbers([(n, n), (n, n)]))
    product = lambda a, b: a @ b
    budget = 2 * n * n
    run = jturnip.jit(product, budget)
    jax.block_until_ready(run(a, b))
    assert run.last_run is not None
    moved = run.last_run.h2d_bytes + run.last_run.d2h_bytes
    best = best_blocking(n, 4, budget)
    here, stock = jax.device_put((a, b)), jax.jit(product)
    compute = min(seconds_of(lambda: stock(*here)) for _ in range(5))
    more: dict[str, float | str] = {"over the link, MB": moved / 1e6}
    figures = [Figure("bytes of an out-of-core product", (moved / best,), "", 1.15, more)]
    for name, share in (("half", 0.5), ("just", 1.0), ("twice", 2.0)):
        limit = share * compute
        rate = run.last_run.h2d_bytes / limit
        linked = jturnip.jit(product, budget, link=jturnip.SimulatedLink(rate, rate))
        ways = [
            functools.partial(seconds_of, functools.partial(linked, a, b)),
            lambda: seconds_of(lambda: stock(*here)),
        ]
        over = [ours / max(theirs, limit) for ours, theirs in in_turn(ways, 5)]
        name = f"its time, with a link that takes {name} as long"
        figures.append(Figure(name, tuple(over), "", 1.15, more))
    return figures


def best_blocking(n: int, itemsize: int, budget: int) -> int:
    """The fewest bytes that a product of n x n matrices moves in a budget.

    Of all blockings in which a block of the result stays while strips of both sides pass:
    each side is read once for each block of the result that is beside it.
    """
    best = None
    for rows in range(1, n + 1):
        for columns in (n, *range(1, n, max(1, n // 256))):
            strip = itemsize * (rows * columns + rows + columns)
            if strip > budget:
                continue
            moved = itemsize * n * n * (1 + -(-n // columns) + -(-n // rows))
            best = moved if best is None else min(best, moved)
    assert best is not None
    return best
