"""What every test of a library asks: the same results in half of the memory.

Half of what stock `jax.jit` of the same function needs, by XLA's own analysis. Arguments
lie on the host, as they must where they are larger than the budget.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checks import (  # pyright: ignore[reportMissingImports]  # tests/, by conftest.py
    ULPS,
    assert_same,
    numbers,
    on_device,
    whole_bytes,
)

import jturnip


def assert_half_is_enough(
    fn: Callable[..., Any], *args: Any, donated: tuple[int, ...] = (), ulps: int = ULPS
) -> None:
    """`fn` gives in half of its peak what it gives under `jax.jit`, and had to be split."""
    compiled = jax.jit(fn, donate_argnums=donated).lower(*args).compile()
    half = whole_bytes(compiled) // 2
    f = jturnip.jit(fn, half, donate_argnums=donated)
    hosted = jturnip.host(args)
    expected = compiled(*args)
    assert all(np.isfinite(numbers(leaf)).all() for leaf in jax.tree.leaves(expected))
    try:
        found = f(*hosted)
    except jturnip.DoesNotFit as refusal:
        # Without the planner's frames, whose arguments take pytest seconds to print.
        raise refusal.with_traceback(None) from None
    assert f.last_run.strategy != "whole"
    assert 0 < f.last_run.peak_bytes <= half
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_same(named(jax.device_put(found, on_device())), named(expected), ulps)


def named(tree: Any) -> dict[str, Any]:
    """The leaves by their paths; libraries have kinds of nodes that `checks` has not."""
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def filled(structs: Any, seed: int = 0) -> Any:
    """Weights and statistics of the usual sizes for `jax.eval_shape` of an `init`.

    Quicker than to run it. Variances are positive, and those of an optimizer not near zero:
    at its beginning an update is gradient over its own size, which makes much of the
    rounding of gradients near zero.
    """
    random = np.random.default_rng(seed)

    def leaf(path: Any, struct: Any) -> Any:
        if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(seed), struct.shape)
        if not np.issubdtype(struct.dtype, np.floating):
            return np.zeros(struct.shape, struct.dtype)
        fan_in = np.prod(struct.shape[:-1]) if struct.ndim > 1 else 1
        values = random.normal(size=struct.shape) / np.sqrt(fan_in)
        words = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if {"nu", "var", "var_ema"} & set(words):
            values = 0.1 + values**2
        return values.astype(struct.dtype)

    return jax.tree.map_with_path(leaf, structs)
