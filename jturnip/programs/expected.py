"""What work is expected to take on an accelerator that is not at hand."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jturnip.frontend import costs
from jturnip.frontend.values import Type
from jturnip.hardware import Accelerator


_PRODUCTS = frozenset("dot_general ragged_dot ragged_dot_general".split()) | {
    "conv_general_dilated"
}
_NARROW = 2  # bytes


def seconds_on(
    accelerator: Accelerator, eqns: Iterable[Any], flops: float, nbytes: float
) -> float:
    """Seconds of an executable there.

    XLA counts the body of a loop once: what it says is taken as often as each `scan` runs
    its body. And it counts the bytes of small floats that its CPU backend widens to compute
    with them: so no more is taken than the equations read and write one by one.

    Args:
      accelerator: where it would run.
      eqns: the jaxpr equations that it does.
      flops: its floating-point operations, by XLA.
      nbytes: bytes that it reads and writes, by XLA.
    """
    work = _work(eqns)
    times = work.flops / work.flops_once if work.flops_once else 1.0
    flops = max(flops * times, work.products)
    narrow_share = work.narrow / flops if flops else 0.0
    return accelerator.seconds(flops, min(nbytes * times, work.nbytes), narrow_share)


@dataclass(frozen=True, slots=True)
class _Work:
    """What some equations do, from their shapes."""

    # Floating-point operations, and the same with the body of each loop counted once.
    flops: float = 0.0
    flops_once: float = 0.0
    # Those in matrix products, and in products of 16-bit floats.
    products: float = 0.0
    narrow: float = 0.0
    # Read and written by one equation after the other.
    nbytes: float = 0.0

    def times(self, length: int, least_nbytes: int) -> "_Work":
        """Of a body that runs so often, and reads and writes no less than that."""
        return _Work(
            self.flops * length,
            self.flops_once,
            self.products * length,
            self.narrow * length,
            max(self.nbytes * length, least_nbytes),
        )


def _work(eqns: Iterable[Any]) -> _Work:
    each = [_work_of(eqn) for eqn in eqns]
    return _Work(
        sum(w.flops for w in each),
        sum(w.flops_once for w in each),
        sum(w.products for w in each),
        sum(w.narrow for w in each),
        sum(w.nbytes for w in each),
    )


def _work_of(eqn: Any) -> _Work:
    name = eqn.primitive.name
    nbytes = sum(_nbytes(v) for v in (*eqn.invars, *eqn.outvars))
    bodies = list(costs.nested(eqn))
    if bodies:
        inner = _work(e for body in bodies for e in body.eqns)
        length = eqn.params.get("length", 1) if name == "scan" else 1
        return inner.times(length, nbytes)
    flops = costs.flops(eqn)
    is_product = name in _PRODUCTS
    is_narrow = is_product and all(v.aval.dtype.itemsize <= _NARROW for v in eqn.invars[:2])
    return _Work(flops, flops, flops * is_product, flops * is_narrow, nbytes)


def _nbytes(variable: Any) -> int:
    return Type.of(variable.aval).nbytes
