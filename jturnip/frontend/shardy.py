"""The rules of equations by Shardy, which knows all of StableHLO.

They are those of its `sdy-populate-op-sharding-rules`: factors along which operands and
results of an operation can be cut together.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.extend.mlir.passmanager import PassManager

from jturnip.frontend.rules import COMBINED, Rule, without
from jturnip.frontend.sets import Joined
from jturnip.frontend.values import Equation, FlatJaxpr, Type


_PASSES = "builtin.module(inline,canonicalize,func.func(sdy-populate-op-sharding-rules))"
# Operations that Shardy has no rule for, of operands and results of one shape.
_ELEMENTWISE = frozenset(
    f"chlo.{name}"
    for name in "square erf erfc erf_inv lgamma digamma polygamma zeta tan acos acosh asin"
    " asinh atan atanh cosh sinh bessel_i1e is_inf is_neg_inf is_pos_inf next_after"
    " conj".split()
)
# What they do depends on positions: a part would be other positions. JAX's own primitives
# for them have rules by hand.
# (Shardy lets a dimension that is padded on one side as much as it is cut on the other, and
# one that is updated at a position, be cut: each device would do that to its own part.)
_POSITIONAL = frozenset(
    f"stablehlo.{name}" for name in "iota gather scatter pad dynamic_update_slice".split()
)


def rules_or_none(distinct: Sequence[Equation], flat: FlatJaxpr) -> list[Rule | None]:
    """The rules of all, or of each by itself where one of them cannot be lowered here."""
    try:
        return _rules(distinct, flat)
    except Exception:  # whatever a primitive says that has no lowering on this platform
        if len(distinct) == 1:
            return [None]
        return [rule for e in distinct for rule in rules_or_none([e], flat)]


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
            written = [flat.types[v] for v in e.outputs]
            found.append(reader.rule(e, each, at, written, result))
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

    def rule(
        self,
        e: Equation,
        read: Sequence[Type],
        argument: int,
        written: Sequence[Type],
        result: int,
    ) -> Rule | None:
        """The rule of an equation that reads and writes values of these types, the first of
        which are these arguments and results."""
        whole = set(map(self._joined.find, self._whole))
        reduced = set(map(self._joined.find, self._reduced))
        numbers: dict[Any, int] = {}

        def labels(value: Any, t: Type) -> tuple[int | None, ...]:
            # Keys have a dimension more there, of their data.
            nodes = [self._joined.find((hash(value), d)) for d in range(len(t.shape))]
            return tuple(
                None
                if size < 2 or node in whole or nodes.count(node) > 1
                else numbers.setdefault(node, len(numbers))
                for node, size in zip(nodes, t.shape, strict=True)
            )

        operands = tuple(
            labels(self._arguments[i], t) for i, t in enumerate(read, start=argument)
        )
        outputs = tuple(
            labels(self._returned[i], t) for i, t in enumerate(written, start=result)
        )
        of_operands = {x for each in operands for x in each if x is not None}
        of_results = {x for each in outputs for x in each if x is not None}
        missing = of_operands - of_results
        if e.name in COMBINED and len(outputs) == 1:
            combined = {numbers[n] for n in reduced if n in numbers} & missing
        else:
            combined = set()
        bad = missing - combined
        bad |= _along_windows(e, Rule(operands, outputs))
        # What is cut in one result must be so in all.
        bad |= {x for x in of_results if any(x not in each for each in outputs)}

        how = {label: (COMBINED[e.name],) for label in combined}
        return without(Rule(operands, outputs, how), bad)


def _shardys(op: Any) -> Any:
    name = "sdy.sharding_rule"
    return sdy.OpShardingRuleAttr(op.attributes[name]) if name in op.attributes else None


def _is_splat(op: Any) -> bool:
    """Whether an operation gives one number, as often as there are positions."""
    if op.name != "stablehlo.constant":
        return False
    try:
        return ir.DenseElementsAttr(op.attributes["value"]).is_splat
    except TypeError:  # complex numbers, which MLIR's bindings know as text only
        return "dense<(" in op.get_asm(large_elements_limit=1)


def _shape(value: Any) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


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
