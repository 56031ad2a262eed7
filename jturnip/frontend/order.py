"""A serial order of equations in which those that belong together stand together.

Program order is kept for everything that leads to heavy work: it is the user's, and JAX's
backward pass is already in the order that frees memory early. Two kinds of cheap equations
move:
- what depends on no heavy work (a weight's transpose, a mask) comes just before its first
  reader;
- what leads to no heavy work (an optimizer's update, a metric) comes right after the last
  heavy work it depends on, one result's whole chain after the other, so that a gradient is
  used up as soon as it exists.
What only gives a heavy result another layout or dtype stays with it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Order:
    """Equations in a valid serial order."""

    equations: tuple[int, ...]
    # Positions at which an update's chain begins or ends: natural places to cut.
    cuts: frozenset[int]


def order_equations(
    heavy: Sequence[bool], glued: Sequence[bool], operands: Sequence[Sequence[int]]
) -> Order:
    """Orders equations that are given in program order.

    Args:
      heavy: whether each equation is heavy work.
      glued: whether each comes right after the one equation that it reads from.
      operands: for each equation the earlier equations that it reads from.
    """
    everything = range(len(heavy))
    readers: list[list[int]] = [[] for _ in everything]
    for e in everything:
        for p in operands[e]:
            readers[p].append(e)
    anchors = _anchors(heavy, operands)
    leads = _leading_to_heavy(heavy, readers)
    # Chains that lead nowhere heavy, by the equation they follow, named by their ends.
    chains: defaultdict[int, list[int]] = defaultdict(list)
    for e in everything:
        if not leads[e] and all(anchors[r] > anchors[e] for r in readers[e]):
            chains[anchors[e]].append(e)
    glued_to = [[r for r in readers[e] if glued[r]] for e in everything]
    placer = _Placer(operands, glued_to)
    for e in everything:
        if leads[e] and anchors[e] >= 0:
            placer.place(e)
            if heavy[e]:
                placer.place_chains(chains[e])
    placer.place_chains(chains[-1])
    for e in everything:
        placer.place(e)
    return Order(tuple(placer.order), frozenset(placer.cuts))


def _anchors(heavy: Sequence[bool], operands: Sequence[Sequence[int]]) -> list[int]:
    """The last heavy equation that each depends on, or is; -1 for none."""
    anchors: list[int] = []
    for e, is_heavy in enumerate(heavy):
        before = max((anchors[p] for p in operands[e]), default=-1)
        anchors.append(e if is_heavy else before)
    return anchors


def _leading_to_heavy(
    heavy: Sequence[bool], readers: Sequence[Sequence[int]]
) -> list[bool]:
    """Whether each is heavy, or something heavy depends on it."""
    leads = list(heavy)
    for e in range(len(heavy) - 1, -1, -1):
        leads[e] = leads[e] or any(leads[r] for r in readers[e])
    return leads


class _Placer:
    """Invariant: all operands of what is in `order` stand before it."""

    def __init__(
        self, operands: Sequence[Sequence[int]], glued_to: Sequence[Sequence[int]]
    ):
        self.order: list[int] = []
        self.cuts: set[int] = set()
        self._operands = operands
        self._glued_to = glued_to
        self._placed = [False] * len(operands)

    def place(self, e: int) -> None:
        """Puts `e` next, after whatever it still needs."""
        if self._placed[e]:
            return
        stack = [(e, iter(self._operands[e]))]
        while stack:
            top, rest = stack[-1]
            needed = next((p for p in rest if not self._placed[p]), None)
            if needed is not None:
                stack.append((needed, iter(self._operands[needed])))
                continue
            stack.pop()
            if not self._placed[top]:
                self._placed[top] = True
                self.order.append(top)
                stack += [(r, iter(())) for r in reversed(self._glued_to[top])]

    def place_chains(self, ends: Sequence[int]) -> None:
        """Puts whole chains next, with a cut before and after each."""
        for end in ends:
            self.cuts.add(len(self.order))
            self.place(end)
            self.cuts.add(len(self.order))
