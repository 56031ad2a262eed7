"""How a plan looks ahead, whom it evicts, and what it holds in order.

One planner core serves every strategy (`planner.py`); a `Strategy` is the few answers it
asks for. Each is named for the system whose idea it is.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jturnip.graph.taskgraph import TaskGraph
from jturnip.units import padded


# (task position) → the layer it belongs to
Layers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Strategy:
    """The choices of one strategy, for `planner.plan`."""

    name: str
    # Runs keep the simulated order.
    serial: bool = False
    # Victims: furthest next use first (Belady), else least recently used first.
    belady: bool = True
    # Splits the order into layers for a given budget; a reload may be issued only once
    # the layer before its own has begun. None: as far ahead as memory allows.
    layers: Callable[[TaskGraph, int], Layers] | None = None
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


def _every_task_its_own_layer(graph: TaskGraph, gpu_bytes: int) -> Layers:
    # Layer numbers grow by two, so that nothing is ever "one layer ahead".
    return tuple(range(0, 2 * len(graph.tasks), 2))


def _half_budget_layers(graph: TaskGraph, gpu_bytes: int) -> Layers:
    """Consecutive tasks whose distinct buffers fill at most half the budget.

    One such layer computes while the next one loads, as ZeRO-Inference does with a
    model's layers; a jaxpr does not say where those begin, its bytes do.
    """
    layers: list[int] = []
    layer, held, filled = 0, set(), 0
    for task in graph.tasks:
        touched = task.inputs + task.outputs
        new = sum(padded(graph.buffers[b].nbytes) for b in touched if b not in held)
        if held and filled + new + task.workspace > gpu_bytes // 2:
            layer, held, filled = layer + 1, set(), 0
            new = sum(padded(graph.buffers[b].nbytes) for b in touched)
        held.update(touched)
        filled += new
        layers.append(layer)
    return tuple(layers)


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
        Strategy("layerwise", serial=True, layers=_half_budget_layers, late=True),
        # What unified memory does: a fault when a task begins, the least recently used out.
        Strategy("on_demand", serial=True, belady=False, layers=_every_task_its_own_layer),
    )
}
