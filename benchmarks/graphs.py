"""Training graphs of any size without a model: what a planner is given, and no jax.

Like a transformer's step: per layer some products and the cheap work between them,
forward, then backward in two products each, then one Adam-like update per weight. Weights
and moments start on the host and end there; activations wait for the backward pass.
"""

from collections.abc import Sequence

from jturnip.graph.taskgraph import Buffer, BufferId, Place, Role, Task, TaskGraph, TaskId


_PRODUCTS = 7  # a layer's weights: query, key, value, output, gate, up, down
# Forward and backward of a product and what follows it, and its update.
_TASKS_OF_LAYER = 5 * _PRODUCTS
_UNIT = 4096  # bytes of a small activation


class _Builder:
    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.tasks: list[Task] = []
        self.outputs: list[BufferId] = []

    def state(self, nbytes: int) -> BufferId:
        """An argument in host memory."""
        return self._add(Buffer(self._next(), nbytes, Role.INPUT, Place.HOST))

    def task(
        self, inputs: Sequence[BufferId], nbytes: int, seconds: float, workspace: int = 0
    ) -> BufferId:
        """A task that writes one buffer."""
        return self.update(inputs, [nbytes], seconds, workspace, Role.INTERMEDIATE)[0]

    def update(
        self,
        inputs: Sequence[BufferId],
        sizes: Sequence[int],
        seconds: float,
        workspace: int = 0,
        role: Role = Role.OUTPUT,
    ) -> list[BufferId]:
        """A task that writes results, which go back to the host."""
        is_output = role is Role.OUTPUT
        written = [
            self._add(Buffer(self._next(), nbytes, role, end_on_host=is_output))
            for nbytes in sizes
        ]
        if is_output:
            self.outputs += written
        distinct = tuple(dict.fromkeys(inputs))
        task = Task(TaskId(len(self.tasks)), distinct, tuple(written), workspace)
        task_with_costs = Task(
            task.id, task.inputs, task.outputs, workspace, seconds=seconds, name="task"
        )
        self.tasks.append(task_with_costs)
        return written

    def _next(self) -> BufferId:
        return BufferId(len(self.buffers))

    def _add(self, buffer: Buffer) -> BufferId:
        self.buffers.append(buffer)
        return buffer.id


def training_graph(tasks: int) -> TaskGraph:
    """A training step of about `tasks` tasks."""
    layers = max(1, round(tasks / _TASKS_OF_LAYER))
    builder = _Builder()
    states = [_layer_state(builder) for _ in range(layers)]
    x = builder.task([], _UNIT, 1e-5)
    saved = []
    for state in states:
        x, activations = _forward(builder, state, x)
        saved.append(activations)
    gradient = builder.task([x], _UNIT, 1e-5)
    gradients = []
    for state, activations in zip(reversed(states), reversed(saved), strict=True):
        gradient, of_weights = _backward(builder, state, activations, gradient)
        gradients.append(of_weights)
    for state, of_weights in zip(states, reversed(gradients), strict=True):
        for (weight, first, second), change in zip(state, of_weights, strict=True):
            sizes = [builder.buffers[weight].nbytes] * 3
            builder.update([weight, first, second, change], sizes, 2e-5)
    graph = TaskGraph(tuple(builder.buffers), tuple(builder.tasks), tuple(builder.outputs))
    graph.check()
    return graph


def total_bytes(graph: TaskGraph) -> int:
    """All buffers at once."""
    return sum(buffer.nbytes for buffer in graph.buffers)


State = tuple[BufferId, BufferId, BufferId]  # a weight and its two moments


def _layer_state(builder: _Builder) -> list[State]:
    sizes = [(4 if at < 4 else 11) * _UNIT for at in range(_PRODUCTS)]
    return [(builder.state(n), builder.state(n), builder.state(n)) for n in sizes]


def _forward(
    builder: _Builder, state: Sequence[State], x: BufferId
) -> tuple[BufferId, list[BufferId]]:
    """The residual stream after a layer, and what its products read."""
    read, stream = [], x
    for at, (weight, _, _) in enumerate(state):
        read.append(x)
        product = builder.task([x, weight], _UNIT * (1 + at % 3), 1e-4, workspace=_UNIT)
        x = builder.task([product, stream], _UNIT * (1 + at % 3), 1e-5)
    return x, read


def _backward(
    builder: _Builder,
    state: Sequence[State],
    activations: Sequence[BufferId],
    gradient: BufferId,
) -> tuple[BufferId, list[BufferId]]:
    """The gradient before a layer, and those of its weights."""
    of_weights = []
    for (weight, _, _), activation in zip(
        reversed(state), reversed(activations), strict=True
    ):
        nbytes = builder.buffers[weight].nbytes
        of_weights.append(builder.task([gradient, activation], nbytes, 1e-4))
        gradient = builder.task(
            [gradient, weight, activation], _UNIT, 1e-4, workspace=_UNIT
        )
    return gradient, of_weights[::-1]
