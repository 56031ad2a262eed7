"""One training step for any loss: value_and_grad, then an optax update.

optax is an optional dependency, so it is imported where it is used.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax


if TYPE_CHECKING:
    import optax


Params = dict[str, Any]  # a tree of arrays; each model's init says which


class TrainState(NamedTuple):
    """Everything a step reads and replaces; donate it."""

    params: Params
    opt_state: Any


def adamw(learning_rate: float = 3e-4) -> "optax.GradientTransformation":
    """AdamW as language models use it: a short second moment and some weight decay."""
    return _optax().adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.1)


def new_state(params: Params, optimizer: "optax.GradientTransformation") -> TrainState:
    """The state before the first step."""
    return TrainState(params, optimizer.init(params))


def update(
    loss: Callable[[Params], jax.Array],
    optimizer: "optax.GradientTransformation",
    state: TrainState,
) -> tuple[TrainState, jax.Array]:
    """One step: the state after it, and the loss before it."""
    value, gradients = jax.value_and_grad(loss)(state.params)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    return TrainState(_optax().apply_updates(state.params, updates), opt_state), value


def _optax() -> Any:
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            'training needs optax, which is not installed: pip install "jturnip[demo]"'
        ) from error
    return optax
