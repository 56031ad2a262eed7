"""What an equation costs, from its shapes alone; good enough to group equations by."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a device is expected to do; measured times replace the guesses they give."""

    flops_per_second: float
    bytes_per_second: float
    # Time a task must at least take to be worth a launch of its own.
    launch_seconds: float
    # Names of equations of which a task may hold one: the device runs several at once, and
    # each waits for threads that the others hold.
    one_a_task: frozenset[str] = frozenset()
    # What a sum over the last axis takes beside its arithmetic, for each row.
    row_seconds: float = 0.0
    # Of what a task may hold, what those may hold that are joined to save launches: on an
    # accelerator all must be there before they begin, and a link takes longer for it.
    joined_share: float = 1.0
    # What one of several blocks may hold so that one operation finds in the caches what the
    # last one wrote there.
    cache_bytes: float = math.inf

    def computing(self, eqn: Any) -> float:
        """Time of what a jaxpr equation computes, whatever it reads and writes."""
        return flops(eqn) / self.flops_per_second + _rows(eqn) * self.row_seconds

    def seconds(self, flops: float, nbytes: float) -> float:
        """Time of work that is bound by arithmetic or by memory."""
        return max(flops / self.flops_per_second, nbytes / self.bytes_per_second)


# What LAPACK does for the CPU.
LINEAR_ALGEBRA = frozenset(
    "cholesky lu householder_product qr geqrf geqp3 ormqr eigh eig svd schur hessenberg"
    " triangular_solve tridiagonal tridiagonal_solve".split()
)

# Primitives that are the reason for a task, with cheap ones around them.
HEAVY = LINEAR_ALGEBRA | frozenset(
    "dot_general ragged_dot ragged_dot_general conv_general_dilated scan while cond sort"
    " top_k approx_top_k fft lu_pivots_to_permutation custom_linear_solve gather scatter"
    " scatter-add scatter-mul scatter-min scatter-max reduce_window reduce_window_sum"
    " reduce_window_max select_and_scatter select_and_scatter_add cumsum cumprod cummax"
    " cummin cumlogsumexp pallas_call ffi_call shard_map pure_callback random_bits"
    " threefry2x32 custom_call jit pjit".split()
)
# Of these XLA writes down what they read and write. A gather it makes where each element is
# read: only the array that is taken from must be there.
WRITTEN = HEAVY - {"gather"}

# Fewer elements are written than read.
REDUCTIONS = frozenset(
    "reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor"
    " argmax argmin".split()
)

# Every element of a result comes from the elements at its place; scalars go with any shape.
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz"
    " complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv"
    " erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p"
    " logistic lt max min mul name ne neg nextafter not or pow real reduce_precision rem"
    " round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin"
    " sinh sqrt square sub tan tanh xor".split()
)

# The first operand is changed in a few places.
UPDATES = frozenset(
    "dynamic_update_slice scatter scatter-add scatter_add scatter-mul scatter_mul"
    " scatter-min scatter_min scatter-max scatter_max".split()
)

# The same bytes in the same order under another shape.
RENAMING = frozenset("reshape squeeze expand_dims".split())
# What only takes from an array or gives it another shape is no work: what reads that does
# it on the way.
VIEWS = RENAMING | frozenset(
    "broadcast_in_dim transpose slice dynamic_slice copy device_put rev".split()
)


def flops(eqn: Any) -> float:
    """Floating-point operations of a jaxpr equation, near enough."""
    written = sum(_size(v) for v in eqn.outvars)
    if eqn.primitive.name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * written * math.prod(shape[d] for d in contracting)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        numbers = eqn.params["dimension_numbers"]
        return 2.0 * written * math.prod(kernel) / max(1, kernel[numbers.rhs_spec[0]])
    inner = sum(sum(map(flops, body.eqns)) for body in nested(eqn))
    inner *= eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
    return inner + written + sum(_size(v) for v in eqn.invars)


def _rows(eqn: Any) -> int:
    """How many rows an equation reduces to a number each, if it reduces the last axis."""
    if eqn.primitive.name not in REDUCTIONS:
        return 0
    last = len(eqn.invars[0].aval.shape) - 1
    axes = eqn.params.get("axes", eqn.params.get("dimensions", ()))
    return _size(eqn.outvars[0]) if last in axes else 0


def _size(variable: Any) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))


def nested(eqn: Any) -> Iterator[Any]:
    for name in ("jaxpr", "call_jaxpr", "cond_jaxpr", "body_jaxpr", "branches"):
        param = eqn.params.get(name)
        for closed in param if isinstance(param, tuple) else (param,):
            body = getattr(closed, "jaxpr", closed)
            if hasattr(body, "eqns"):
                yield body


def has_one_of(names: frozenset[str], eqn: Any) -> bool:
    """Whether an equation is one of some primitives, or calls one."""
    return eqn.primitive.name in names or any(
        has_one_of(names, inner) for body in nested(eqn) for inner in body.eqns
    )


def equation_count(closed: Any) -> int:
    """Equations of a jaxpr and of all that it calls."""
    eqns = getattr(closed, "jaxpr", closed).eqns
    return sum(1 + sum(map(equation_count, nested(e))) for e in eqns)
