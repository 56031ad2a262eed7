"""What end-to-end tests ask of results, of memory, and of budgets."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jturnip


# XLA fuses a function differently in pieces than whole: sums are split elsewhere and
# bfloat16 is rounded more often. Each costs a few units in the last place of the largest
# element of a result, never a share of it.
ULPS = 64


def assert_same(found: Any, expected: Any, ulps: int = ULPS) -> None:
    """The same trees, shapes, dtypes, weak types, and values to `ulps` of the largest."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for path, want in jax.tree.leaves_with_path(expected):
        where = jax.tree_util.keystr(path) or "the result"
        got = found
        for key in path:
            got = _child(got, key)
        assert isinstance(got, jax.Array), f"{where} is a {type(got).__name__}"
        assert (got.shape, got.dtype) == (want.shape, want.dtype), where
        assert is_weak(got) == is_weak(want), where
        _assert_close(numbers(got), numbers(want), ulps, where)


def assert_runs_in(
    fn: Callable[..., Any], args: Sequence[Any], gpu_bytes: int, ulps: int = ULPS
) -> Any:
    """A function of arrays in host memory gives the same in so many bytes, and holds no
    more; returns it."""
    within = jturnip.jit(fn, gpu_bytes)
    assert_same(within(*map(jturnip.host, args)), jax.jit(fn)(*args), ulps)
    assert within.last_run.peak_bytes <= gpu_bytes
    return within


def assert_bitwise(found: Any, expected: Any) -> None:
    """The same, bit for bit."""
    assert_same(found, expected, ulps=0)


def is_weak(array: jax.Array) -> bool:
    """Keys are never weakly typed, and lack the attribute."""
    return bool(getattr(array, "weak_type", False))


def numbers(array: jax.Array) -> np.ndarray:
    """The contents on the host; of a key, its data."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(jax.device_put(array, on_device()))
    return np.asarray(array)


def _child(tree: Any, key: Any) -> Any:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(tree, key.name)
    return tree[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]


def _assert_close(got: np.ndarray, want: np.ndarray, ulps: int, where: str) -> None:
    if not ulps or not jnp.issubdtype(want.dtype, jnp.inexact):
        assert got.tobytes() == want.tobytes(), where
        return
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    got, want, eps = got.astype(wide), want.astype(wide), jnp.finfo(want.dtype).eps
    largest = float(np.max(np.abs(want), initial=0.0, where=np.isfinite(want)))
    np.testing.assert_allclose(
        got, want, rtol=0, atol=ulps * float(eps) * largest, err_msg=where
    )


# --- Memory.


def on_device() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")


def on_host() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def memory_kinds(tree: Any) -> list[str | None]:
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


def device_bytes(arrays: Sequence[jax.Array]) -> int:
    return sum(
        a.nbytes
        for a in arrays
        if not a.is_deleted() and a.sharding.memory_kind == "device"
    )


def collected() -> None:
    """Collects garbage, and takes what is left out of the collector's sight: JAX keeps so
    much that to look at all of it, test after test, takes most of a second each time."""
    gc.collect()
    gc.freeze()


# XLA's threads let go of what they had a moment after they say that it is ready or failed.
_PATIENCE_SECONDS = 5.0


def is_gone(array: weakref.ref[Any]) -> bool:
    """Whether nobody has an array any more, or lets go of it soon."""
    end = time.perf_counter() + _PATIENCE_SECONDS
    while array() is not None and time.perf_counter() < end:
        gc.collect()
        time.sleep(0.01)
    return array() is None


class Holdings:
    """What JAX and the process hold, to see that nothing is left behind.

    Arrays of one number do not count: jturnip keeps a few as the numbers of mark slots, and
    JAX keeps some as constants of its own. What is new is looked at again.
    """

    def __init__(self) -> None:
        collected()
        self.arrays = {id(a): a for a in jax.live_arrays() if a.size > 1}
        self.threads = {t.ident for t in threading.enumerate()}

    def new_arrays(self, count: int = 0) -> list[str]:
        """What is new, when it is no more than so many arrays or stays more."""
        end = time.perf_counter() + _PATIENCE_SECONDS
        while len(found := self._new_arrays()) > count and time.perf_counter() < end:
            time.sleep(0.01)
        return found

    def _new_arrays(self) -> list[str]:
        gc.collect()
        return [
            f"{a.dtype}{list(a.shape)} in {a.sharding.memory_kind}"
            for a in jax.live_arrays()
            if a.size > 1 and id(a) not in self.arrays
        ]

    def new_threads(self) -> list[str]:
        """Beside the waiters and the simulated link's, which the process keeps."""
        return [
            t.name
            for t in threading.enumerate()
            if t.ident not in self.threads and not t.name.startswith("jturnip-")
        ]


# --- Budgets.


def unconstrained_peak(fn: Callable[..., Any], *args: Any, **keywords: Any) -> int:
    """Device bytes that `jax.jit(fn, **keywords)(*args)` needs."""
    return whole_bytes(jax.jit(fn, **keywords).lower(*args).compile())


def whole_bytes(compiled: Any) -> int:
    """Device bytes of a function compiled by stock JAX, by XLA's own analysis."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def smallest_budget(fn: Callable[..., Any], *args: Any, **keywords: Any) -> int:
    """The fewest bytes in which `fn` plans, as the refusal of less says."""
    return refused(fn, *args, **keywords)[0]


def refused(fn: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[int, Any]:
    """The smallest budget, and what has the executables that plan it: while it is kept,
    they are not compiled again."""
    lowered = jturnip.jit(fn, 1, **{"strategy": "turnip", **keywords}).lower(*args)
    with pytest.raises(jturnip.DoesNotFit) as refusal:
        _ = lowered.plan
    return refusal.value.needed_bytes, lowered


def layers(count: int, width: int = 128, seed: int = 0) -> list[np.ndarray]:
    """Weights of `tower`, 4 * width**2 bytes each."""
    random = np.random.default_rng(seed)
    shape = (width, width)
    return [
        (random.normal(size=shape) / np.sqrt(width)).astype(np.float32)
        for _ in range(count)
    ]


def tower(x: Any, weights: Sequence[Any]) -> jax.Array:
    """The plainest function that needs more weights than fit."""
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def some_numbers(tree: Any) -> Any:
    """Weights and an optimizer in the middle of its work.

    At its beginning an update is gradient over its own size, which makes much of the
    rounding of gradients near zero.
    """
    generator = np.random.default_rng(0)

    def leaf(path: Any, struct: jax.ShapeDtypeStruct) -> np.ndarray:
        values = generator.normal(size=struct.shape) / np.sqrt(struct.shape[:1] or 1).max()
        if "nu" in jax.tree_util.keystr(path, simple=True, separator="/").split("/"):
            values = 0.1 + values**2
        return values.astype(struct.dtype)

    return jax.tree.map_with_path(leaf, tree)
