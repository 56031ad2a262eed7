"""Path queries against all-pairs reachability."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from jturnip.graph.memgraph import Dep, DepKind, MemGraph, Op, OpId, OpKind
from jturnip.planner.paths import Paths


def edges(before: list[list[int]], kinds: list[OpKind]) -> MemGraph:
    """A MemGraph of nothing but edges."""
    ops = [
        Op(
            id=OpId(op),
            kind=kinds[op],
            task=None,
            reads=(),
            writes=(),
            workspace=(),
            deps=tuple(Dep(OpId(d), DepKind.ORDER) for d in earlier),
        )
        for op, earlier in enumerate(before)
    ]
    return MemGraph(0, tuple(ops), (), (), ())


@pytest.mark.long
@given(st.integers(2, 60), st.integers(1, 12), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_random_graphs_have_the_paths_that_brute_force_finds(
    count: int, reach: int, rng: random.Random
) -> None:
    before = [
        sorted({max(0, op - rng.randint(1, reach)) for _ in range(rng.randint(0, 3))})
        for op in range(count)
    ]
    before[0] = []
    kinds = [rng.choice(list(OpKind)) for _ in before]
    reachable: list[set[int]] = []
    for earlier in before:
        reachable.append(set(earlier).union(*(reachable[d] for d in earlier)))
    paths = Paths(edges(before, kinds))
    for op in range(1, count):
        targets = set(rng.sample(range(op), rng.randint(1, op)))
        assert paths.unreached(op, targets) == targets - reachable[op]
        one = rng.randrange(op)
        assert paths.unreached(op, {one}) == {one} - reachable[op]


def test_the_start_of_a_long_chain_is_found_from_its_end() -> None:
    count = 20_000
    before = [[op - 1] if op else [] for op in range(count)]
    paths = Paths(edges(before, [OpKind.RUN] * count))
    assert not paths.unreached(count - 1, set(range(count - 1)))
    assert not paths.unreached(count - 1, {0})
