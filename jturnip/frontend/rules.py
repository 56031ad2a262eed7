"""What an equation does along each dimension, as labels; and where one is cut."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


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
# What some of the updates of a scatter make of its operand, which only one part has.
COMBINED.update({"scatter-add": "add", "scatter-sub": "add", "scatter-mul": "mul"})
COMBINED.update({"scatter-min": "min", "scatter-max": "max"})
# Not by any operation: it is the same for each part.
SAME = "same"
SCATTERS = frozenset(
    ["scatter", *(f"scatter-{how}" for how in "add sub mul min max".split())]
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Labels of one equation's dimensions; None along what cannot be cut."""

    operands: tuple[tuple[int | None, ...], ...]
    results: tuple[tuple[int | None, ...], ...]
    # Label that is reduced → how each result is combined along it (`COMBINED`), or None for
    # one that is cut.
    reduced: Mapping[int, tuple[str | None, ...]] = field(default_factory=dict)


def without(rule: Rule, bad: Collection[int]) -> Rule | None:
    """A rule without some labels; None where none are left."""
    kept = lambda each: tuple(None if x in bad else x for x in each)
    rule = Rule(
        tuple(map(kept, rule.operands)),
        tuple(map(kept, rule.results)),
        {x: how for x, how in rule.reduced.items() if x not in bad},
    )
    return rule if _has_labels(rule) else None


def _has_labels(rule: Rule) -> bool:
    sides = (*rule.operands, *rule.results)
    return any(x is not None for each in sides for x in each)


@dataclass(frozen=True, slots=True)
class Along:
    """Where one equation is cut: for each operand and the first result the dimension, and
    how many positions along it are one along the axis; None for what is not cut."""

    operands: tuple[tuple[int, int] | None, ...]
    result: tuple[int, int] | None
