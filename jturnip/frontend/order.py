"""A serial order of equations in which those that belong together stand together.

Program order is kept for everything that leads to heavy work: it is the user's, and JAX's
backward pass is already in the order that frees memory early. Three kinds of cheap
equations move:
- what depends on no heavy work (a weight's transpose, a mask) comes just before its first
  reader;
- what leads to no heavy work (an optimizer's update, a metric) comes right after the last
  heavy work it depends on, one result's whole chain after the other, so that a gradient is
  used up as soon as it exists;
- of what neither leads to heavy work nor depends on any, what makes little of much (a sum,
  a largest value) comes as soon as all that it reads is there, whenever the little is read:
  else the much would wait for it.
What only gives a heavy result another layout or dtype stays with it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Order:
    """Equations in a valid serial order."""

    equations: tuple[int, ...]
    # Positions at which an update's chain begins or ends: natural places to cut.
    cuts: frozenset[int]


def order_equations(
    heavy: Sequence[bool],
    glued: Sequence[bool],
    operands: Sequence[Sequence[int]],
    reduces: Sequence[bool] | None = None,
    arguments: Sequence[Collection[int]] | None = None,
) -> Order:
    """Orders equations that are given in program order.

    Args:
      heavy: whether each equation is heavy work.
      glued: whether each comes right after the one equation that it reads from; such a one
        reads nothing else.
      operands: for each equation the earlier equations that it reads from.
      reduces: whether each makes little of much; None if none does.
      arguments: what each reads of the function's arguments; None if nothing.
    """
    everything = range(len(heavy))
    reduces = reduces or [False] * len(heavy)
    arguments = arguments or [()] * len(heavy)
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
    free = [anchors[e] < 0 and not leads[e] for e in everything]
    soon = _soon(reduces, free, readers)
    soon_after = [[r for r in readers[e] if soon[r] and not glued[r]] for e in everything]
    for e, first in _first_beside(soon, operands, arguments):
        soon_after[first].append(e)
    placer = _Placer(operands, glued_to, soon_after)
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


def _soon(
    reduces: Sequence[bool], free: Sequence[bool], readers: Sequence[Sequence[int]]
) -> list[bool]:
    """Whether each is to come as soon as it can: what makes little of much, and what only
    such read, of those that heavy work says nothing about."""
    soon = list(reduces)
    for e in range(len(reduces) - 1, -1, -1):
        only_soon = bool(readers[e]) and all(soon[r] for r in readers[e])
        soon[e] = free[e] and (soon[e] or only_soon)
    return soon


def _first_beside(
    soon: Sequence[bool],
    operands: Sequence[Sequence[int]],
    arguments: Sequence[Collection[int]],
) -> Iterator[tuple[int, int]]:
    """What is to come soon and reads arguments only, with the first other that reads one of
    these."""
    first: dict[int, int] = {}
    for e, read in enumerate(arguments):
        for v in () if soon[e] else read:
            first.setdefault(v, e)
    for e, read in enumerate(arguments):
        others = [first[v] for v in read if v in first]
        if soon[e] and not operands[e] and others:
            yield e, min(others)


class _Placer:
    """Invariant: all operands of what is in `order` stand before it."""

    def __init__(
        self,
        operands: Sequence[Sequence[int]],
        glued_to: Sequence[Sequence[int]],
        soon_after: Sequence[Sequence[int]],
    ):
        self.order: list[int] = []
        self.cuts: set[int] = set()
        self._operands = operands
        self._glued_to = glued_to
        self._soon_after = soon_after
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
                ready = [r for r in self._soon_after[top] if self._is_ready(r)]
                after = *self._glued_to[top], *ready
                stack += [(r, iter(())) for r in reversed(after)]

    def _is_ready(self, e: int) -> bool:
        """Whether all operands stand."""
        return all(self._placed[p] for p in self._operands[e])

    def place_chains(self, ends: Sequence[int]) -> None:
        """Puts whole chains next, with a cut before and after each."""
        for end in ends:
            self.cuts.add(len(self.order))
            self.place(end)
            self.cuts.add(len(self.order))
