"""What equations hold beside what they read and write, as XLA's own analysis says."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jturnip.frontend.memory_model import inner_bytes


def convolution(*names: str, stride: int = 1) -> Callable[..., Any]:
    numbers: Any = names
    return lambda x, w: lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        "SAME",
        dimension_numbers=numbers,
    )


def gradients(fn: Callable[..., Any], of: int) -> Callable[..., Any]:
    """Of one operand, as a function of the other one and of what comes back."""

    def function(other: Any, back: Any) -> Any:
        make = (lambda x: fn(x, other)) if of == 0 else (lambda w: fn(other, w))
        return jax.linear_transpose(make, _OPERANDS[of])(back)[0]

    return function


_LAST = "NHWC", "HWIO", "NHWC"
_FIRST = "NCHW", "OIHW", "NCHW"
_OPERANDS = (
    jax.ShapeDtypeStruct((4, 32, 16, 8), jnp.float32),
    jax.ShapeDtypeStruct((3, 3, 8, 16), jnp.float32),
)


def pooled(x: Any) -> Any:
    window = (1, 2, 2, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


def gradients_of_pool(x: Any, back: Any) -> Any:
    return jax.vjp(pooled, x)[1](back)[0]


HOLDING: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "channels last": (convolution(*_LAST), ((4, 32, 16, 8), (3, 3, 8, 16))),
    "channels first": (convolution(*_FIRST), ((4, 16, 32, 16), (8, 16, 3, 3))),
    "few channels first": (convolution(*_FIRST), ((4, 8, 32, 16), (16, 8, 3, 3))),
    "kernels as rows": (
        convolution("NHWC", "OHWI", "NHWC", stride=2),
        ((4, 32, 16, 8), (16, 3, 3, 8)),
    ),
    "gradients of a kernel": (
        gradients(convolution(*_LAST), 1),
        ((4, 32, 16, 8), (4, 32, 16, 16)),
    ),
    "gradients of an image": (
        gradients(convolution(*_LAST), 0),
        ((3, 3, 8, 16), (4, 32, 16, 16)),
    ),
    "gradients of a pool": (gradients_of_pool, ((4, 32, 16, 8), (4, 16, 8, 8))),
}


@pytest.mark.parametrize("name", HOLDING)
def test_what_an_equation_holds_inside_is_what_xla_says(name: str):
    fn, shapes = HOLDING[name]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    held = max(inner_bytes(eqn) for eqn in jax.make_jaxpr(fn)(*args).eqns)
    analysis = jax.jit(fn).lower(*args).compile().memory_analysis()
    assert analysis is not None
    # Numbers of a few bytes, and kernels that XLA may turn around on the way.
    beside = 1024 + 4 * 3 * 3 * 8 * 16
    assert analysis.temp_size_in_bytes == pytest.approx(held, rel=0.05, abs=beside)
