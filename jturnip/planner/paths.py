"""Which ops an op waits for through others: path queries on a MemGraph's edges.

For the verifier. Queries that a sensible plan gives rise to are answered by an edge or two;
the rest of this file keeps the others from taking long.
"""

from jturnip.graph.memgraph import MemGraph, OpKind


# Stands for "no op" where an op is expected.
NO_OP = -1


class Paths:
    """Answers which ops an op waits for, directly or through others."""

    def __init__(self, memgraph: MemGraph):
        # For each op, the ops it waits for directly.
        self.before: list[tuple[int, ...]] = [
            tuple([dep[0] for dep in op.deps]) for op in memgraph.ops
        ]
        self.kinds = [op.kind for op in memgraph.ops]
        self.forest: tuple[list[int], list[int]] | None = None

    def unreached(self, op: int, targets: set[int]) -> set[int]:
        """Those of `targets`, all before `op`, from which no path leads to it.

        Searches backwards in layers, never past the earliest target. Where the first
        layers do not settle it, a spanning forest answers for long chains at once; asking
        it never takes longer than the search itself has so far.
        """
        left = set(targets)
        floor = min(left)
        seen = {op}
        layer: list[int] = [op]
        depth = credit = 0
        while layer and left:
            reached: set[int] = {d for o in layer for d in self.before[o] if d >= floor}
            layer = sorted(reached - seen)
            seen |= reached
            left -= reached
            depth += 1
            credit += len(reached)
            cost = len(left) * len(layer)
            if depth > 2 and 0 < cost <= credit:
                credit -= cost
                left = {target for target in left if not self.above_any(target, layer)}
                floor = min(left, default=0)
        return left

    def above_any(self, target: int, layer: list[int]) -> bool:
        """Whether a path of the spanning forest leads from `target` to one of `layer`."""
        if self.forest is None:
            self.forest = _spanning_forest(self.before, self.kinds)
        first, size = self.forest
        begin = first[target]
        end = begin + size[target]
        return any(begin <= first[op] < end for op in layer)


def _spanning_forest(
    before: list[tuple[int, ...]], kinds: list[OpKind]
) -> tuple[list[int], list[int]]:
    """For each op, its number in a depth-first walk of the forest, and its tree's size.

    An op hangs on its latest predecessor of the same kind, else on its latest: where a
    strategy orders all the runs, they form one long chain. The tree under an op is then
    the numbers from its own up to its own plus size.
    """
    count = len(before)
    parents = [NO_OP] * count
    for op, earlier in enumerate(before):
        same = [d for d in earlier if kinds[d] is kinds[op]]
        parents[op] = max(same or earlier, default=NO_OP)
    size = [1] * (count + 1)
    for op in range(count - 1, -1, -1):
        size[parents[op]] += size[op]
    # The last entry, which `NO_OP` indexes, stands for the root above all trees.
    first = [0] * count
    free = [0] * (count + 1)
    for op, parent in enumerate(parents):
        first[op] = free[parent]
        free[parent] += size[op]
        free[op] = first[op] + 1
    return first, size
