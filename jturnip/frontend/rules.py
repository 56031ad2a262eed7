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
class Halo:
    """What the first operand is read of for some positions along a label: what windows at
    these positions reach.

    The window at position p begins `p * step - before`, and is `reach` long, in positions
    of the operand with `dilation - 1` zeros after each.
    """

    # Where the window is in the equation's parameters; of the operand the dimension, and
    # how long that is; and how many positions there are along the label.
    at: int
    dim: int
    size: int
    positions: int
    step: int
    reach: int
    before: int
    dilation: int

    def of(self, low: int, length: int) -> tuple[int, int, tuple[int, int]]:
        """The first position that is read for so many positions from one on, how many are,
        and the padding around them; less than none where windows have nothing but
        padding, and what is read is cut away."""
        begin = low * self.step - self.before
        end = (low + length - 1) * self.step - self.before + self.reach
        first = min(max(0, -(-begin // self.dilation)), self.size - 1)
        last = max(min(self.size - 1, (end - 1) // self.dilation), first)
        padding = first * self.dilation - begin, end - 1 - last * self.dilation
        return first, last - first + 1, padding


@dataclass(frozen=True, slots=True)
class Rule:
    """Labels of one equation's dimensions; None along what cannot be cut."""

    operands: tuple[tuple[int | None, ...], ...]
    results: tuple[tuple[int | None, ...], ...]
    # Label that is reduced → how each result is combined along it (`COMBINED`), or None for
    # one that is cut.
    reduced: Mapping[int, tuple[str | None, ...]] = field(default_factory=dict)
    # Label along which windows slide → what is read of the first operand, which has no
    # label there.
    halos: Mapping[int, Halo] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InOrder(Rule):
    """Labels of what is made of tiles that are made before."""


def without(rule: Rule, bad: Collection[int]) -> Rule | None:
    """A rule without some labels; None where none are left."""
    kept = lambda each: tuple(None if x in bad else x for x in each)
    rule = Rule(
        tuple(map(kept, rule.operands)),
        tuple(map(kept, rule.results)),
        {x: how for x, how in rule.reduced.items() if x not in bad},
        {x: halo for x, halo in rule.halos.items() if x not in bad},
    )
    return rule if has_labels(rule) else None


def without_halos(rule: Rule | None) -> Rule | None:
    """A rule without the labels along which windows slide."""
    return without(rule, rule.halos) if rule is not None and rule.halos else rule


def has_labels(rule: Rule) -> bool:
    """Whether something can be cut."""
    sides = (*rule.operands, *rule.results)
    return any(x is not None for each in sides for x in each)


@dataclass(frozen=True, slots=True)
class Along:
    """Where one equation is cut: for each operand and the first result the dimension, and
    how many positions along it are one along the axis; None for what is not cut."""

    operands: tuple[tuple[int, int] | None, ...]
    result: tuple[int, int] | None
    # Where a window slides along the axis: where that is in the equation's parameters, and
    # the padding around what the part reads.
    padding: tuple[int, tuple[int, int]] | None = None
