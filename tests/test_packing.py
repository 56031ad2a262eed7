"""Swaps that fit free time of the link, one after the other at the highest peak."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st
from support import GraphBuilder, assert_plan_is_right, on_device_before_runs, taskgraphs

from benchmarks.graphs import training_graph
from jturnip.graph.memgraph import OpKind
from jturnip.graph.taskgraph import BufferId, Place, TaskGraph
from jturnip.planner.packing import _TRIES, _Packing, packed
from jturnip.planner.planner import plan, smallest_budget
from jturnip.planner.rates import FREE, Rates
from jturnip.planner.transfers import Transfers
from jturnip.planner.verify import peak_bytes
from jturnip.units import padded


KIB = 1024
RATE = Rates(KIB, KIB)  # so that KiB are seconds


def plain(transfers: Transfers) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Who leaves after which task, and who comes beside which, in whatever order."""
    leave = {t: sorted(map(int, bs)) for t, bs in transfers.leave.items() if bs}
    return leave, {t: sorted(int(b) for b, _ in c) for t, c in transfers.come.items() if c}


def kept_for_later(
    tasks: int, *sizes: int, seconds: float = 1.0
) -> tuple[TaskGraph, list[BufferId]]:
    """The first task writes what the last reads; between them others take a second each."""
    g = GraphBuilder()
    (x, *kept) = g.task([g.input(KIB, Place.DEVICE)], KIB, *sizes, seconds=seconds)
    for _ in range(tasks - 2):
        (x,) = g.task([x], KIB, seconds=seconds)
    (y,) = g.task([x, *kept], KIB, seconds=seconds)
    return g.build([y]), kept


def test_it_leaves_at_once_and_comes_as_late_as_possible():
    # Two seconds each way. The first task ends after one, the last begins after nine.
    graph, (kept,) = kept_for_later(10, 2 * KIB)
    leave, come = plain(packed(graph, 3 * KIB, RATE))
    assert leave == {2: [kept]}  # it is out after three seconds
    assert come == {7: [kept]}  # it comes from the seventh on


def test_latency_is_waited_for_and_does_not_keep_the_link_busy():
    graph, (kept,) = kept_for_later(10, 2 * KIB)
    leave, come = plain(packed(graph, 3 * KIB, Rates(KIB, KIB, 1.0)))
    assert (leave, come) == ({3: [kept]}, {6: [kept]})


def test_nothing_leaves_where_there_is_room_or_no_time():
    graph, _ = kept_for_later(10, 2 * KIB)
    assert plain(packed(graph, 5 * KIB, RATE)) == ({}, {})
    assert plain(packed(graph, 3 * KIB, Rates(KIB / 4, KIB / 4))) == ({}, {})


def with_a_peak(*kept: int, weights: tuple[int, ...] = ()) -> TaskGraph:
    """What the first task reads and writes is read by the last; halfway between them, ten
    seconds later, a result of 8 KiB is written."""
    g = GraphBuilder()
    inputs = [g.input(nbytes) for nbytes in weights]
    (x, *kept_ones) = g.task([*inputs, g.input(KIB, Place.DEVICE)], KIB, *kept, seconds=1.0)
    for t in range(20):
        (x,) = g.task([x], 8 * KIB if t == 9 else KIB, seconds=1.0)
    (y,) = g.task([x, *kept_ones, *inputs], KIB, seconds=1.0)
    return g.build([y])


def test_the_largest_leaves_first_and_others_only_while_there_is_a_peak():
    graph = with_a_peak(KIB, 3 * KIB)  # buffers 1 is x, 2 and 3 are kept
    assert plain(packed(graph, 13 * KIB, RATE)) == ({}, {})
    assert plain(packed(graph, 12 * KIB, RATE)) == ({3: [3]}, {18: [3]})
    assert plain(packed(graph, 10 * KIB, RATE)) == ({3: [3]}, {18: [3]})
    assert plain(packed(graph, 9 * KIB, RATE)) == ({3: [3], 4: [2]}, {18: [3], 17: [2]})


def test_copies_share_the_time_of_the_link():
    # Each is three seconds on its way, and all are wanted by the same task: only three
    # are away while the peak is, though the fourth would fit before or after it.
    graph = with_a_peak(*[3 * KIB] * 4)
    leave, come = plain(packed(graph, 8 * KIB, RATE))
    assert leave == {3: [2], 6: [3], 9: [4]}
    assert come == {18: [2], 15: [3], 12: [4]}


def test_what_has_a_copy_on_the_host_leaves_without_one():
    graph = with_a_peak(weights=(4 * KIB,))
    nothing_goes_out = Rates(KIB, 1e-9)
    leave, come = plain(packed(graph, 9 * KIB, nothing_goes_out))
    # It comes before the first task, too.
    assert (leave, come) == ({0: [0]}, {0: [0], 17: [0]})
    assert plain(packed(with_a_peak(4 * KIB), 9 * KIB, nothing_goes_out)) == ({}, {})


def test_results_that_go_to_the_host_anyway_go_there_once():
    g = GraphBuilder()
    (x, kept) = g.task([g.input(KIB, Place.DEVICE)], KIB, 2 * KIB, seconds=1.0)
    for _ in range(8):
        (x,) = g.task([x], KIB, seconds=1.0)
    (y,) = g.task([x, kept], KIB, seconds=1.0)
    graph = g.build([y, kept], end_on_host=[kept])
    leave, come = plain(packed(graph, 3 * KIB, RATE))
    assert (leave, come) == ({2: [kept]}, {7: [kept]})
    kinds = [op.kind for op in plan(graph, 4 * KIB, "tensile", RATE).ops]
    assert kinds.count(OpKind.OFFLOAD) == 1


def test_a_result_may_leave_for_good_and_an_argument_before_its_first_reader():
    g = GraphBuilder()
    argument = g.input(2 * KIB, Place.DEVICE)
    (x, result) = g.task([g.input(KIB, Place.DEVICE)], KIB, 2 * KIB, seconds=1.0)
    for t in range(8):
        (x,) = g.task([x], 4 * KIB if t == 4 else KIB, seconds=1.0)
    (y,) = g.task([x, argument], KIB, seconds=1.0)
    leave, come = plain(packed(g.build([y, result]), 5 * KIB, RATE))
    assert leave == {1: [argument], 3: [result]}
    assert come == {7: [argument]}


def test_weights_come_just_before_they_are_read():
    g = GraphBuilder()
    x = g.input(KIB, Place.DEVICE)
    weights = [g.input(nbytes * KIB) for nbytes in (1, 1, 2, 5)]
    for w in weights:
        (x,) = g.task([x, w], KIB, seconds=3.0)
    # The link brings the first after one second; the last, which takes five, from four
    # seconds on, and what is read before that until then.
    transfers = packed(g.build([x]), 1 << 20, RATE)
    assert plain(transfers) == ({}, {0: [1, 2, 3], 1: [4]})
    assert [b for b, _ in transfers.come[0]] == weights[:3]


def test_a_plan_does_as_packed_where_that_is_enough():
    graph = with_a_peak(KIB, 3 * KIB, 2 * KIB, weights=(2 * KIB,))
    memgraph = plan(graph, 10 * KIB, "tensile", RATE)
    assert_plan_is_right(graph, memgraph, orders=5)
    there = on_device_before_runs(memgraph)
    leave, come = plain(packed(graph, 10 * KIB, RATE))
    assert len(leave) == 3
    for after, buffers in leave.items():
        for b in buffers:
            (back,) = [t for t, bs in come.items() if b in bs and t > after]
            away = {t for t in range(len(there)) if t >= after and b not in there[t]}
            assert away == set(range(after + 1, back))


@pytest.mark.long
@given(taskgraphs(), st.integers(0, 8192), st.sampled_from([100.0, 10.0, 1.0]))
@settings(max_examples=200, deadline=None)
def test_a_packing_adds_up(graph: TaskGraph, more: int, rate: float):
    budget = smallest_budget(graph) + more
    packing = _Packing(graph, budget, Rates(rate, 1.5 * rate, 0.1))
    packing.shave()
    swaps, begins, ends = packing._swaps, packing._begins, packing._ends
    for swap in swaps:
        if swap.out and swap.gap.after >= 0:
            assert swap.out[0] >= ends[swap.gap.after]
        if swap.out:
            assert sum(swap.out) + 0.1 <= begins[swap.first] + 1e-9
        if swap.back:
            assert swap.back[0] >= ends[swap.last] - 1e-9 or swap.last < 0
            assert sum(swap.back) + 0.1 <= begins[swap.gap.until] + 1e-9
    for way in ("out", "back"):
        every = (getattr(swap, way) for swap in swaps)
        copies = sorted(copy for copy in every if copy and copy[1])  # of no bytes: no time
        for one, next_one in itertools.pairwise(copies):
            assert sum(one) <= next_one[0] + 1e-9
    for used, found in zip(in_use(graph, packing), packing._used, strict=True):
        assert found == used <= budget or found < 0  # nothing fits there any more


def in_use(graph: TaskGraph, packing: _Packing) -> list[int]:
    """Bytes in use beside each task, buffer by buffer."""
    away = {
        (swap.gap.buffer, t)
        for swap in packing._swaps
        for t in range(swap.first, swap.last + 1)
    }
    found = [padded(task.workspace) for task in graph.tasks]
    for buffer in graph.buffers:
        b = buffer.id
        stays = buffer.pinned or (b in graph.outputs and not buffer.end_on_host)
        touching = [t.id for t in graph.tasks if b in t.inputs + t.outputs]
        first = touching[0] if buffer.start is None else 0
        last = len(graph.tasks) - 1 if stays else max(touching, default=-1)
        if any(b in t.overwritten for t in graph.tasks):
            last -= 1  # its bytes are the result's then
        for t in range(first, last + 1):
            found[t] += padded(buffer.nbytes) * ((b, t) not in away)
    return found


@pytest.mark.long
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_plans_over_any_link_are_right(data: st.DataObject):
    graph = data.draw(taskgraphs())
    budget = smallest_budget(graph) + data.draw(st.integers(0, 8192))
    rates = st.sampled_from([0.1, 1.0, 10.0, 100.0, 1e9])
    link = Rates(data.draw(rates), data.draw(rates), data.draw(st.sampled_from([0.0, 1.0])))
    memgraph = plan(graph, budget, "tensile", link)
    assert_plan_is_right(graph, memgraph, orders=5)
    assert peak_bytes(memgraph) <= budget
    assert plan(graph, budget, "tensile", link) == memgraph


def test_copies_that_take_no_time_leave_peaks_where_tasks_need_them():
    graph = with_a_peak(KIB, 3 * KIB)
    packing = _Packing(graph, 6 * KIB, FREE)
    packing.shave()
    assert max(in_use(graph, packing)) == 9 * KIB  # the task that writes 8 KiB


def test_each_gap_is_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch):
    """So that time grows with the tasks, not with their square."""
    looks = []
    fitting = _Packing._fitting
    monkeypatch.setattr(
        _Packing, "_fitting", lambda self, gap: looks.append(gap) or fitting(self, gap)
    )
    graph = training_graph(600)
    bytes_of_all = sum(b.nbytes for b in graph.buffers)
    rate = bytes_of_all / sum(task.seconds for task in graph.tasks)
    packed(graph, bytes_of_all // 10, Rates(rate, rate))
    assert len(looks) > 100
    assert max(Counter(map(id, looks)).values()) <= _TRIES + 1
