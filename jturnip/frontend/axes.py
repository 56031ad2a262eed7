"""What each equation does along each dimension: by Shardy's rules, not by a table of ours.

A rule gives dimensions labels, as an einsum does: dimensions of operands and results with
the same label can be cut together, and the equation done for one part after the other. A
label that only operands have is reduced: what the parts give is to be combined. These are
the labels of EinDecomp (arXiv 2410.02682), and the factors of Shardy's
`sdy-populate-op-sharding-rules`, which knows all of StableHLO.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.extend.mlir.passmanager import PassManager

from jturnip import compat
from jturnip.frontend import costs
from jturnip.frontend.sets import Joined
from jturnip.frontend.values import Equation, FlatJaxpr, Type, is_key


_PASSES = "builtin.module(inline,canonicalize,func.func(sdy-populate-op-sharding-rules))"

# How partial results of a primitive are combined, if it may be done in parts at all along
# what it reduces.
COMBINED = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
    "dot_general": "add",
    "conv_general_dilated": "add",
}
# Of a product of groups of rows, along the rows where they are contracted.
COMBINED["ragged_dot_general"] = "add"
# A gather along what it indexes finds each row in one part, and nothing in the others.
COMBINED["gather"] = "add"
SCATTERS = frozenset(
    ["scatter", *(f"scatter-{how}" for how in "add sub mul min max".split())]
)
# Operations that Shardy has no rule for, of operands and results of one shape.
_ELEMENTWISE = frozenset(
    f"chlo.{name}"
    for name in "square erf erfc erf_inv lgamma digamma polygamma zeta tan acos acosh asin"
    " asinh atan atanh cosh sinh bessel_i1e is_inf is_neg_inf is_pos_inf next_after"
    " conj".split()
)
# What they do depends on positions: a part would be other positions. JAX's own primitives
# for them have rules by hand.
_POSITIONAL = frozenset(f"stablehlo.{name}" for name in "iota gather scatter".split())
# They call code that is not XLA's own.
_UNRULED = frozenset("pure_callback ffi_call custom_call".split())


@dataclass(frozen=True, slots=True)
class Rule:
    """Labels of one equation's dimensions; None along what cannot be cut."""

    operands: tuple[tuple[int | None, ...], ...]
    results: tuple[tuple[int | None, ...], ...]
    # Labels that are reduced.
    reduced: frozenset[int]


# Whether an equation can be done for parts along a label.
Works: TypeAlias = Callable[[Equation, FlatJaxpr, Rule, int], bool]


@dataclass(slots=True)
class Known:
    """The rules of equations of one function: with each equation, so that its id stays its
    own."""

    of_equation: dict[int, tuple[Equation, Rule | None]] = field(default_factory=dict)


# Rules of all functions: by what decides how they are traced, and by what an equation does;
# with its parameters, since a key may name them by their addresses.
_known: dict[Hashable, tuple[Any, Rule | None]] = {}
_MOST_KNOWN = 10_000


def rules(flat: FlatJaxpr, works: Works, known: Known) -> list[Rule | None]:
    """The rule of each equation; None for one that does everything at once.

    Args:
      flat: the function. All distinct equations are lowered side by side in one module.
      works: says along which labels.
      known: grows.
    """
    unknown = [e for e in flat.equations if id(e) not in known.of_equation]
    found = _rules_by_keys(unknown, flat, works)
    for e, rule in zip(unknown, found, strict=True):
        known.of_equation[id(e)] = e, rule
    return [known.of_equation[id(e)][1] for e in flat.equations]


def _rules_by_keys(
    equations: Sequence[Equation], flat: FlatJaxpr, works: Works
) -> list[Rule | None]:
    context = works, compat.trace_context()
    keys = [
        (context, _key(e, flat)) if _may_have_a_rule(e, flat) else None for e in equations
    ]
    distinct = {key: e for key, e in zip(keys, equations, strict=True) if key is not None}
    before = {key: _known.get(key) for key in distinct}
    found = {key: entry[1] for key, entry in before.items() if entry is not None}
    new = {key: e for key, e in distinct.items() if key not in found}
    lowered = {key: e for key, e in new.items() if e.name not in _BY_HAND}
    of_shardy = _rules_or_none(list(lowered.values()), flat) if lowered else ()
    found.update(zip(lowered, of_shardy, strict=True))
    for key, e in new.items():
        if key not in lowered:
            types = flat.operand_types(e), [flat.types[v] for v in e.outputs]
            found[key] = _BY_HAND[e.name](e, *types)
        found[key] = _that_works(found[key], functools.partial(works, e, flat))
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    _known.update((key, (e.origin.params, found[key])) for key, e in new.items())
    return [None if key is None else found[key] for key in keys]


def _that_works(rule: Rule | None, works: Callable[[Rule, int], bool]) -> Rule | None:
    """A rule, with the labels along which the equation can be done for parts."""
    if rule is None:
        return None
    labels = {x for each in (*rule.operands, *rule.results) for x in each}
    bad = {x for x in labels if x is not None and not works(rule, x)}
    return _without(rule, bad)


def _along_windows(e: Equation, rule: Rule) -> set[int]:
    """Labels along which windows slide. For Shardy parts may be cut along those, which then
    exchange what is at their borders; ours cannot."""
    if e.name != "conv_general_dilated":
        return set()
    numbers = e.origin.params["dimension_numbers"]
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    sides = (*rule.operands, *rule.results)
    along = (each[d] for spec, each in zip(specs, sides, strict=True) for d in spec[2:])
    return {x for x in along if x is not None}


def _without(rule: Rule, bad: Collection[int]) -> Rule | None:
    without = lambda each: tuple(None if x in bad else x for x in each)
    rule = Rule(
        tuple(map(without, rule.operands)),
        tuple(map(without, rule.results)),
        rule.reduced.difference(bad),
    )
    return rule if any(_labels(rule)) else None


def _may_have_a_rule(e: Equation, flat: FlatJaxpr) -> bool:
    if (
        e.effects
        or e.origin.effects
        or e.driven
        or e.name in _UNRULED
        or any(True for _ in costs.nested(e.origin))
    ):
        return False
    types = [*flat.operand_types(e), *(flat.types[v] for v in e.outputs)]
    return e.name == "random_bits" or not any(is_key(t.dtype) for t in types)


def _key(e: Equation, flat: FlatJaxpr) -> Hashable:
    shapes = tuple((t.shape, str(t.dtype)) for t in flat.operand_types(e))
    return e.name, shapes, str(sorted(e.origin.params.items(), key=lambda item: item[0]))


def _rules_or_none(distinct: Sequence[Equation], flat: FlatJaxpr) -> list[Rule | None]:
    """The rules of all, or of each by itself where one of them cannot be lowered here."""
    try:
        return _rules(distinct, flat)
    except Exception:  # whatever a primitive says that has no lowering on this platform
        if len(distinct) == 1:
            return [None]
        return [rule for e in distinct for rule in _rules_or_none([e], flat)]


def _rules(distinct: Sequence[Equation], flat: FlatJaxpr) -> list[Rule | None]:
    types = [flat.operand_types(e) for e in distinct]
    structs = [[t.struct() for t in each] for each in types]

    def side_by_side(operands: Any) -> Any:
        return [list(e.bind(each)) for e, each in zip(distinct, operands, strict=True)]

    lowered = jax.jit(side_by_side, keep_unused=True).lower(structs)
    module = lowered.compiler_ir("stablehlo")
    assert isinstance(module, ir.Module)
    with module.context:
        PassManager.parse(_PASSES).run(module.operation)
        reader = _Reader(_main(module))
        found = []
        at = result = 0
        for e, each in zip(distinct, types, strict=True):
            found.append(
                reader.rule(
                    e, range(at, at + len(each)), range(result, result + len(e.outputs))
                )
            )
            at += len(each)
            result += len(e.outputs)
    return found


def _main(module: Any) -> Any:
    for op in module.body.operations:
        name = op.operation.attributes
        if "sym_name" in name and ir.StringAttr(name["sym_name"]).value == "main":
            return op.regions[0].blocks[0]
    raise AssertionError("a lowered function without main")


class _Reader:
    """The labels of a module's values: dimensions that some operation cuts together."""

    def __init__(self, block: Any):
        self._joined = Joined[Any]()
        self._whole: set[Any] = set()
        self._reduced: set[Any] = set()
        self._returned: list[Any] = []
        self._arguments = list(block.arguments)
        for op in block.operations:
            self._see(op.operation)

    def _join(self, nodes: Sequence[Any]) -> None:
        for a, b in itertools.pairwise(nodes):
            self._joined.join(a, b)

    def _see(self, op: Any) -> None:
        if op.name == "func.return":
            self._returned = list(op.operands)
            return
        if _is_splat(op):
            return  # it has no positions
        values = [*op.operands, *op.results]
        rule = None if op.name in _POSITIONAL else _shardys(op)
        if op.name in _ELEMENTWISE and len({tuple(_shape(v)) for v in values}) == 1:
            for dim in range(len(_shape(values[0]))):
                self._join([(hash(v), dim) for v in values])
        elif rule is None or rule.is_custom:
            self._whole.update(
                (hash(v), dim) for v in values for dim in range(len(_shape(v)))
            )
        else:
            self._see_rule(values, rule)

    def _see_rule(self, values: Sequence[Any], rule: Any) -> None:
        sizes = list(rule.factor_sizes)
        together: dict[int, list[Any]] = {}
        whole = {
            *rule.need_replication_factors,
            *rule.permutation_factors,
            *rule.blocked_propagation_factors,
        }
        mappings = [*rule.operand_mappings, *rule.result_mappings]
        for value, mapping in zip(values, mappings, strict=True):
            dims = sdy.TensorMappingAttr(mapping).dim_mappings
            for dim, (size, entry) in enumerate(zip(_shape(value), dims, strict=True)):
                factors = [
                    f for f in sdy.DimMappingAttr(entry).factor_indices if sizes[f] > 1
                ]
                if size == 1:
                    continue
                if math.prod(sizes[f] for f in factors) == size:
                    # Of several factors, parts along the first are next to one another.
                    together.setdefault(factors[0], []).append((hash(value), dim))
                    whole.update(factors[1:])
                else:
                    self._whole.add((hash(value), dim))
                    whole.update(factors)
        for factor, nodes in together.items():
            self._join(nodes)
            if factor in whole:
                self._whole.add(nodes[0])
            if factor in set(rule.reduction_factors):
                self._reduced.add(nodes[0])

    def rule(self, e: Equation, arguments: range, results: range) -> Rule | None:
        """The rule of an equation that reads these arguments and gives these results."""
        whole = set(map(self._joined.find, self._whole))
        reduced = set(map(self._joined.find, self._reduced))
        numbers: dict[Any, int] = {}

        def labels(value: Any) -> tuple[int | None, ...]:
            nodes = [self._joined.find((hash(value), d)) for d in range(len(_shape(value)))]
            return tuple(
                None
                if size == 1 or node in whole or nodes.count(node) > 1
                else numbers.setdefault(node, len(numbers))
                for node, size in zip(nodes, _shape(value), strict=True)
            )

        operands = tuple(labels(self._arguments[i]) for i in arguments)
        outputs = tuple(labels(self._returned[i]) for i in results)
        read = {x for each in operands for x in each if x is not None}
        written = {x for each in outputs for x in each if x is not None}
        missing = read - written
        if e.name in COMBINED and len(outputs) == 1:
            combined = {numbers[n] for n in reduced if n in numbers} & missing
        else:
            combined = set()
        bad = missing - combined
        bad |= _along_windows(e, Rule(operands, outputs, frozenset()))
        # What is cut in one result must be so in all.
        bad |= {x for x in written if any(x not in each for each in outputs)}

        return _without(Rule(operands, outputs, frozenset(combined)), bad)


def _labels(rule: Rule) -> Iterator[bool]:
    return (x is not None for each in (*rule.operands, *rule.results) for x in each)


def _shardys(op: Any) -> Any:
    name = "sdy.sharding_rule"
    return sdy.OpShardingRuleAttr(op.attributes[name]) if name in op.attributes else None


def _is_splat(op: Any) -> bool:
    if op.name != "stablehlo.constant":
        return False
    return ir.DenseElementsAttr(op.attributes["value"]).is_splat


def _shape(value: Any) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


# -- by hand: what reads positions, and what Shardy has no rule for ----------------------


def _iota(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    del e
    if operands:  # sizes that are not known
        return None
    labels = _large(results[0], range(len(results[0].shape)))
    return Rule((), (labels,), frozenset())


def _factored(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    """Batches of matrices: LAPACK is called for each of them."""
    matrix = e.name != "lu_pivots_to_permutation"
    batch = len(operands[0].shape) - (2 if matrix else 1)

    def labels(t: Type) -> tuple[int | None, ...]:
        return _large(t, [d if d < batch else None for d in range(len(t.shape))])

    return Rule(tuple(map(labels, operands)), tuple(map(labels, results)), frozenset())


def _solved(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    """Batches of triangular systems; each column of the right sides is one of its own."""
    rule = _factored(e, operands, results)
    right = operands[1]
    free = len(right.shape) - (1 if e.origin.params["left_side"] else 2)
    matrix = len(right.shape) - 2
    labels = _large(
        right, [d if d < matrix or d == free else None for d in range(len(right.shape))]
    )
    return Rule((rule.operands[0], labels), (labels,), frozenset())


def _ragged(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    """Products of groups of rows, each with a matrix of its own; and what each group gives
    where the rows are contracted. Which rows of a part are of which group follows from the
    groups' sizes (`parts.py`)."""
    params = e.origin.params
    numbers = params["ragged_dot_dimension_numbers"]
    ((of_left, of_right), batch) = numbers.dot_dimension_numbers
    ragged = numbers.lhs_ragged_dimensions
    if any(batch) or len(ragged) != 1 or params["group_offset"] is not None:
        return None
    left, right, sizes = operands
    rows, groups = ragged[0], tuple(numbers.rhs_group_dimensions)
    first = len(left.shape)
    lefts: list[int | None] = [d for d in range(first) if d not in of_left]
    rights = [first + d for d in range(len(right.shape)) if d not in (*of_right, *groups)]
    contracted = rows if rows in of_left else None
    result = [*([] if contracted is None else [None]), *lefts, *rights]
    of_rights: list[int | None] = [
        first + d if first + d in rights else None for d in range(len(right.shape))
    ]
    if contracted is not None:
        of_rights[of_right[tuple(of_left).index(rows)]] = rows
    of_lefts = [d if d in (*lefts, contracted) else None for d in range(first)]
    return Rule(
        (_large(left, of_lefts), _large(right, of_rights), (None,) * len(sizes.shape)),
        (_large(results[0], result),),
        frozenset() if contracted is None or left.shape[rows] < 2 else frozenset([rows]),
    )


def _sliced(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    """A part of a slice is one of the operand, which is read whole if it is not sliced
    along that axis."""
    operand, result = operands[0], results[0]
    steps = e.origin.params.get("strides") or (1,) * len(result.shape)
    labels = _large(result, range(len(result.shape)))
    read = [
        label if n == m and step == 1 else None
        for label, n, m, step in zip(
            labels, operand.shape, result.shape, steps, strict=True
        )
    ]
    positions = ((),) * (len(operands) - 1)
    return Rule((tuple(read), *positions), (labels,), frozenset())


def _random(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    """Bits that are made of their positions, where that is so (`parts.works`); those of
    several keys are of one after the other."""
    del e
    (keys,), (bits,) = operands, results
    if keys.shape:
        batch = range(len(keys.shape))
        labels = [d if d in batch else None for d in range(len(bits.shape))]
        return Rule((_large(keys, batch),), (_large(bits, labels),), frozenset())
    if math.prod(bits.shape) >= 2**32:
        return None
    return Rule(((),), (_large(bits, range(len(bits.shape))),), frozenset())


def _top_k(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    del results
    rank = len(operands[0].shape)
    axis = e.origin.params.get("axis", rank - 1) % rank
    labels = _large(operands[0], [None if d == axis else d for d in range(rank)])
    return Rule((labels,), (labels, labels), frozenset())


def _running(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    del results
    axis = e.origin.params["axis"]
    labels = [None if d == axis else d for d in range(len(operands[0].shape))]
    large = _large(operands[0], labels)
    return Rule((large,), (large,), frozenset())


def _arg(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    axes = e.origin.params["axes"]
    labels = [None if d in axes else d for d in range(len(operands[0].shape))]
    kept = [d for d in range(len(labels)) if d not in axes]
    return Rule((_large(operands[0], labels),), (_large(results[0], kept),), frozenset())


def _large(t: Type, labels: Sequence[int | None]) -> tuple[int | None, ...]:
    """Labels of a type's dimensions, without those of a single position."""
    of = zip(labels, t.shape, strict=True)
    return tuple(label if size > 1 else None for label, size in of)


def _gather(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    """Parts of what is indexed: what an index finds is in one of them."""
    operand, indices = operands
    numbers, sizes = e.origin.params["dimension_numbers"], e.origin.params["slice_sizes"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole = [d for d in range(len(operand.shape)) if d not in gone]
    of_result = _windowed(results[0], numbers.offset_dims, indices, whole)
    labels: list[int | None] = [None] * len(operand.shape)
    for d in whole:
        if sizes[d] == operand.shape[d] and d not in numbers.start_index_map:
            labels[d] = _WINDOW + d
    reduced = []
    for d in numbers.collapsed_slice_dims:
        if d in numbers.start_index_map:
            labels[d] = _INDEXED + d
            reduced.append(_INDEXED + d)
    _batched(labels, numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    return Rule(
        (_large(operand, labels), _of_indices(indices)),
        (
            _large(
                results[0], [x if x in labels or _is_batch(x) else None for x in of_result]
            ),
        ),
        frozenset(reduced),
    )


def _scatter(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    """Parts of what is written to: each takes the updates that are for it."""
    operand, indices, updates = operands
    numbers = e.origin.params["dimension_numbers"]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    whole = [d for d in range(len(operand.shape)) if d not in gone]
    of_updates = _windowed(updates, numbers.update_window_dims, indices, whole)
    labels: list[int | None] = [None] * len(operand.shape)
    for d, at in zip(whole, numbers.update_window_dims, strict=True):
        full = updates.shape[at] == operand.shape[d]
        if full and d not in numbers.scatter_dims_to_operand_dims:
            labels[d] = _WINDOW + d
    for d in numbers.inserted_window_dims:
        if d in numbers.scatter_dims_to_operand_dims:
            labels[d] = _INDEXED + d
    batching = numbers.scatter_indices_batching_dims
    _batched(labels, numbers.operand_batching_dims, batching)
    # The result is whole along what only indices and updates are cut along.
    of_indices = [x if x in labels else None for x in _of_indices(indices)]
    return Rule(
        (
            _large(operand, labels),
            tuple(of_indices),
            _large(updates, [x if x in labels else None for x in of_updates]),
        ),
        (_large(results[0], labels),),
        frozenset(),
    )


# Labels: of a dimension of the indices, of one of the operand that is in each window, and
# of one that is indexed.
_BATCH, _WINDOW, _INDEXED = 0, 100, 200


def _is_batch(label: int | None) -> bool:
    return label is not None and label < _WINDOW


def _of_indices(indices: Type) -> tuple[int | None, ...]:
    rank = len(indices.shape)
    return _large(indices, [*(_BATCH + d for d in range(rank - 1)), None])


def _windowed(
    t: Type, window: Sequence[int], indices: Type, whole: Sequence[int]
) -> list[int | None]:
    """Labels of what has the dimensions of windows, and for others those of the indices."""
    batch = iter(range(len(indices.shape) - 1))
    in_window = iter(whole)
    return [
        _WINDOW + next(in_window) if d in window else _BATCH + next(batch)
        for d in range(len(t.shape))
    ]


def _batched(
    labels: list[int | None], operand: Sequence[int], indices: Sequence[int]
) -> None:
    for d, at in zip(operand, indices, strict=True):
        labels[d] = _BATCH + at


_BY_HAND: dict[str, Callable[[Equation, Sequence[Type], Sequence[Type]], Rule | None]] = {
    "top_k": _top_k,
    "argmax": _arg,
    "argmin": _arg,
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), _running),
    **dict.fromkeys(
        "cholesky lu lu_pivots_to_permutation qr geqrf geqp3 householder_product eig eigh"
        " svd schur hessenberg tridiagonal tridiagonal_solve".split(),
        _factored,
    ),
    "triangular_solve": _solved,
    "ragged_dot_general": _ragged,
    **dict.fromkeys(["slice", "dynamic_slice"], _sliced),
    "random_bits": _random,
    "iota": _iota,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
}
