"""Figures of plans on graphs small enough to count by hand."""

from support import GraphBuilder

from jturnip.graph.taskgraph import Place
from jturnip.planner.figures import host_peak_bytes, moved_bytes
from jturnip.planner.planner import plan, smallest_budget


def test_inputs_from_the_host_move_once_and_take_no_more_host_memory():
    g = GraphBuilder()
    x = g.input(256, Place.DEVICE)
    for _ in range(5):
        w = g.input(1024)
        (x,) = g.task([x, w], 256)
    graph = g.build(outputs=[x])
    memgraph = plan(graph, smallest_budget(graph))
    assert moved_bytes(graph, memgraph) == (5 * 1024, 0)
    assert host_peak_bytes(graph, memgraph) == 0


def test_a_result_kept_on_the_host_takes_host_memory_to_the_end():
    g = GraphBuilder()
    w = g.input(1024)
    (a,) = g.task([w], 512)
    (b,) = g.task([w, a], 256)
    graph = g.build(outputs=[a, b], end_on_host=[a])
    memgraph = plan(graph, 1 << 20)
    assert moved_bytes(graph, memgraph) == (1024, 512)
    assert host_peak_bytes(graph, memgraph) == 512
