"""Disjoint sets that are joined: what hangs together."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar


Node = TypeVar("Node", bound=Hashable)


class Joined(Generic[Node]):
    """A union-find: every node is in one set, which is named by one of its nodes."""

    def __init__(self) -> None:
        self._above: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        """The node that names the set of this one, which may be new."""
        above = self._above
        while above.setdefault(node, node) != node:
            above[node] = above[above[node]]
            node = above[node]
        return node

    def join(self, one: Node, other: Node) -> None:
        """Makes one set of two, named as the first was."""
        self._above[self.find(other)] = self.find(one)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._above)

    def sets(self) -> list[list[Node]]:
        """The nodes by sets, in the order in which they came."""
        found: dict[Node, list[Node]] = {}
        for node in list(self._above):
            found.setdefault(self.find(node), []).append(node)
        return list(found.values())
