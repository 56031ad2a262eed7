"""A serial order of equations in which those that belong together stand together.

Program order is kept for everything that leads to heavy work: it is the user's, and JAX's
backward pass is already in the order that frees memory early. Two kinds of cheap equations
move:
- what depends on no heavy work (a weight's transpose, a mask) comes just before its first
  reader;
- what leads to no heavy work (an optimizer's update, a metric) comes right after the last
  heavy work it depends on, one result's whole chain after the other, so that a gradient is
  used up as soon as it exists.
"""

from collections import defaultdict
from collections.abc import Sequence

from jturnip.frontend.costs import HEAVY
from jturnip.frontend.jaxpr import FlatJaxpr


def order_equations(
    flat: FlatJaxpr, operands: Sequence[Sequence[int]]
) -> tuple[list[int], set[int]]:
    """Orders the equations of `flat`.

    Args:
      flat: the function.
      operands: for each equation the equations it reads from; an empty sequence with no
        readers marks one that is left out here because its readers repeat it.

    Returns:
      Indices of equations in a valid serial order, and the positions in it at which an
      update's chain begins or ends: natural places to cut.
    """
    count = len(flat.equations)
    heavy = [e.name in HEAVY for e in flat.equations]
    readers: list[list[int]] = [[] for _ in range(count)]
    for e in range(count):
        for p in operands[e]:
            readers[p].append(e)
    # The last heavy equation that each depends on (itself, if heavy); -1 for none.
    anchor = [-1] * count
    for e in range(count):
        anchor[e] = e if heavy[e] else max((anchor[p] for p in operands[e]), default=-1)
    leads = [False] * count
    for e in range(count - 1, -1, -1):
        leads[e] = heavy[e] or any(leads[r] for r in readers[e])
    # Chains that lead nowhere heavy, by the equation they follow, named by their ends.
    chains: defaultdict[int, list[int]] = defaultdict(list)
    for e in range(count):
        if not leads[e] and all(anchor[r] > anchor[e] for r in readers[e]):
            chains[anchor[e]].append(e)
    order: list[int] = []
    placed = [False] * count
    cuts: set[int] = set()

    def place(e: int) -> None:
        """Puts `e` next, after whatever it still needs."""
        stack = [(e, iter(operands[e]))]
        while stack:
            top, rest = stack[-1]
            needed = next((p for p in rest if not placed[p]), None)
            if needed is not None:
                stack.append((needed, iter(operands[needed])))
                continue
            stack.pop()
            if not placed[top]:
                placed[top] = True
                order.append(top)

    def place_chains(after: int) -> None:
        for end in chains.get(after, ()):
            cuts.add(len(order))
            place(end)
            cuts.add(len(order))

    for e in range(count):
        if leads[e] and anchor[e] >= 0 and not placed[e]:
            place(e)
            if heavy[e]:
                place_chains(e)
    place_chains(-1)
    for e in range(count):
        if not placed[e]:
            place(e)
    return order, cuts
