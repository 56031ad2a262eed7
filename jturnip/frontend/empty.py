"""What is put together of pieces some of which are empty, without these.

`jnp.roll(x, (1, 0), (0, 1))` puts a whole array and an empty one together, along the axis
that it does not shift.
"""

from typing import Any

import jax
from jax import lax

from jturnip.frontend.values import Type


def without_empty(eqn: Any) -> Any:
    """A `concatenate` as a jaxpr of the same operands that reads none of the empty ones;
    None for any other equation, and for one that has none, or nothing else."""
    if eqn.primitive.name != "concatenate":
        return None
    types = [Type.of(v.aval) for v in eqn.invars]
    some = [i for i, t in enumerate(types) if t.nbytes]
    if len(some) == len(types) or not some:
        return None

    def together(*pieces: Any) -> Any:
        first, *others = (pieces[i] for i in some)
        return lax.concatenate([first, *others], eqn.params["dimension"])

    with eqn.ctx.manager:
        return jax.make_jaxpr(together)(*(t.struct() for t in types))
