"""How a plan looks ahead, whom it evicts, and what it holds in order.

One planner core serves every strategy (`planner.py`); a `Strategy` is the few answers it
asks for. Each is named for the system whose idea it is.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from jturnip.graph.taskgraph import TaskGraph
from jturnip.planner import packing, windows
from jturnip.planner.rates import Rates
from jturnip.planner.transfers import Transfers
from jturnip.planner.windows import Window


@dataclass(frozen=True, slots=True)
class Strategy:
    """The choices of one strategy, for `planner.plan`."""

    name: str
    # Runs keep the simulated order.
    serial: bool = False
    # Victims: furthest next use first (Belady), else least recently used first.
    belady: bool = True
    # Splits the order into partitions for a given budget, of which some are on the device
    # at once: no reload of another is issued. None: as far ahead as memory allows.
    window: Callable[[TaskGraph, int], Window] | None = None
    # Says who leaves and who comes when, beside those for whom there is no room. A strategy
    # with it is `late`.
    transfers: Callable[[TaskGraph, int, Rates | None], Transfers] | None = None
    # So many tasks get room before their turn comes, if only what has a copy on the host
    # must leave for that.
    ahead: int = 0
    # Whether what a task writes gets its bytes when the task's turn comes, not when it is
    # passed ahead of that: they may still be in use until then.
    late: bool = False
    # The share of the budget that stays free where something gets room ahead of its turn.
    # A reload whose turn comes late in the plan may begin early nevertheless: it waits for
    # nothing but its bytes.
    spare: float = 0.0
    # The same with other numbers, which may be faster: the simulator says.
    variants: "tuple[Strategy, ...]" = ()


def _superpipeline(resident: int, returned: int) -> Strategy:
    window = functools.partial(windows.of_resident, resident=resident, returned=returned)

    def transfers(graph: TaskGraph, gpu_bytes: int, rates: Rates | None) -> Transfers:
        return windows.returned_after_use(graph, window(graph, gpu_bytes))

    return Strategy(
        "superpipeline", serial=True, window=window, transfers=transfers, late=True
    )


_HALVES = functools.partial(windows.of_resident, resident=2)
# By k and k'. What they make of the budget differs by k; k' makes little difference.
_PIPELINES = tuple(_superpipeline(*pair) for pair in ((2, 1), (8, 2), (16, 4), (32, 8)))

STRATEGIES: dict[str, Strategy] = {
    s.name: s
    for s in (
        # The paper's: two horizons, furthest next use, free order.
        Strategy("turnip"),
        # The same, but of what is ahead only reloads get bytes, and only while there is
        # much room: what is needed sooner finds it.
        Strategy("ours", late=True, spare=0.5),
        # And with room for the next task before its turn, where that takes no write back:
        # as one double buffers by hand. More bytes over the link, fewer stalls.
        Strategy("ahead", ahead=1, late=True),
        # The paper's ablation: the same plan, runs held in the simulated order.
        Strategy("fixed_order", serial=True),
        # ZeRO-Inference: one layer loads while another computes.
        Strategy("layerwise", serial=True, window=_HALVES, late=True),
        # Superpipeline: k partitions are there, k' of them make room for others together.
        replace(_PIPELINES[0], variants=_PIPELINES[1:]),
        # TENSILE: peaks are shaved by swaps that fit free time of the link.
        Strategy("tensile", serial=True, transfers=packing.packed, late=True),
        # What unified memory does: a fault when a task begins, the least recently used out.
        Strategy("on_demand", serial=True, belady=False, window=windows.every_task),
    )
}
