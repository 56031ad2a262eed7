"""The third stage: a program that can be called."""

from collections.abc import Sequence
from typing import Any

import jax.experimental.layout
from jax.core import Tracer

from jturnip import compat, placement
from jturnip.compiler.report import CompileReport
from jturnip.errors import ArgumentError
from jturnip.frontend.values import Type
from jturnip.graph.plan import Plan
from jturnip.graph.report import RunReport
from jturnip.placement import Arguments
from jturnip.runners.function import Runner
from jturnip.signature import Call
from jturnip.stages.options import Options, placed
from jturnip.units import format_bytes


class Compiled:
    """A program for one signature. Calls take the dynamic arguments only."""

    def __init__(
        self,
        runner: Runner,
        in_tree: Any,
        arguments: Arguments,
        traced: Any,
        options: Options,
        compile_report: CompileReport,
    ):
        self._runner = runner
        # What was compiled for it, and what was there.
        self.compile_report = compile_report
        self._in_tree = in_tree
        self._options = options
        self._arguments = arguments
        self._types = list(map(Type.of, jax.tree.leaves(traced.args_info)))
        self.out_info = traced.out_info
        self.args_info = traced.args_info
        # Abstract values of the arguments, in their tree.
        self.in_avals = avals(traced)

    def __repr__(self) -> str:
        plan = self.plan
        return f"<Compiled in {format_bytes(plan.gpu_bytes)}, strategy {plan.strategy}>"

    @property
    def in_tree(self) -> Any:
        """The tree of the arguments: (positional, by name)."""
        return self._in_tree

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated arguments among all leaves."""
        return donated(self.args_info)

    @property
    def out_tree(self) -> Any:
        """The tree of the results."""
        return jax.tree.structure(self.out_info)

    @property
    def input_shardings(self) -> Any:
        """Where each argument is taken to lie, in the arguments' tree."""
        device = self._arguments.device
        places = [placement.sharding(device, w.on_host) for w in self._arguments.whose]
        return jax.tree.unflatten(self._in_tree, places)

    def __getattr__(self, name: str) -> Any:
        """What else `jax.stages.Compiled` has, of a function that runs whole."""
        whole = getattr(self.__dict__.get("_runner"), "whole", None)
        if whole is None or name.startswith("__"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
                + ("; the function is split, and is no one executable" * (whole is None))
            )
        return getattr(whole, name)

    @property
    def input_formats(self) -> Any:
        """The same with layouts, which are JAX's own choice."""
        places = jax.tree.leaves(self.input_shardings)
        formats = [jax.experimental.layout.Format(None, place) for place in places]
        return jax.tree.unflatten(self._in_tree, formats)

    def cost_analysis(self) -> dict[str, float]:
        """Floating-point operations and bytes accessed, of all tasks together."""
        return cost_of(getattr(self._runner, "whole", None), self.plan)

    @property
    def plan(self) -> Plan:
        """The plan that calls run."""
        return self._runner.plan

    @property
    def last_run(self) -> RunReport | None:
        """What the last finished call did; None before the first."""
        return self._runner.last_run

    def memory_analysis(self) -> Any:
        """XLA's analysis of the whole function where it runs whole, else the plan."""
        whole = getattr(self._runner, "whole", None)
        return whole.memory_analysis() if whole is not None else self.plan

    def as_text(self) -> str:
        """XLA's own text where the function runs whole, else the plan in a few lines."""
        whole = getattr(self._runner, "whole", None)
        return self.plan.summary() if whole is None else whole.as_text()

    def runtime_executable(self) -> Any:
        """XLA's executable where the function runs whole, else the plan."""
        whole = getattr(self._runner, "whole", None)
        return self.plan if whole is None else whole.runtime_executable()

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self._in_tree:
            raise TypeError(
                "Function compiled with input pytree does not match the input pytree it was"
                f" called with: compiled for {self._in_tree}, called with {tree}"
            )
        for leaf in leaves:
            if isinstance(leaf, Tracer):
                raise TypeError(
                    "Cannot apply JAX transformations to a function lowered and compiled"
                    " for a particular signature. Detected argument of Tracer type"
                    f" {type(leaf)}. Transform what jturnip.jit returned instead."
                )
        given = Call(args, kwargs, leaves, tree, ())
        call, _ = placed(given, self._options)
        self._check_types(call.leaves)
        for leaf, whose, name in zip(
            call.leaves, self._arguments.whose, self._arguments.names, strict=True
        ):
            is_array = isinstance(leaf, jax.Array) and not whose.ours
            if is_array and placement.whose(leaf, False).on_host != whose.on_host:
                there = "in host memory" if whose.on_host else "on the device"
                raise ArgumentError(
                    f"{name} was compiled to be {there}, and is not. Move it with"
                    " jturnip.host or jturnip.device, or lower with an array like it."
                )
        given.check_alive(lambda: self._arguments.names)
        return self.call_flat(leaves)

    def _check_types(self, leaves: Sequence[Any]) -> None:
        differing = []
        for leaf, t, name in zip(leaves, self._types, self._arguments.names, strict=True):
            has_type = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
            found = Type.of(leaf if has_type else jax.typeof(leaf))
            if (found.shape, found.dtype) != (t.shape, t.dtype):
                differing.append(
                    f"Argument '{name}' compiled with {t.dtype}{list(t.shape)} and called"
                    f" with {found.dtype}{list(found.shape)}"
                )
        if differing:
            raise TypeError(
                "Argument types differ from the types for which this computation was"
                " compiled. The mismatches are:\n" + "\n".join(differing)
            )

    def call_flat(self, leaves: Sequence[Any]) -> Any:
        """Calls with leaves that are known to be right."""
        return self._runner.run(leaves)


def avals(traced: Any) -> Any:
    tree = jax.tree.structure(traced.args_info)
    return jax.tree.unflatten(tree, traced.jaxpr.in_avals)


def donated(args_info: Any) -> tuple[int, ...]:
    infos = enumerate(jax.tree.leaves(args_info))
    return tuple(i for i, info in infos if info.donated)


def cost_of(whole: Any | None, plan: Plan) -> dict[str, float]:
    if whole is not None:
        return dict(whole.cost_analysis() or {})
    costs = [cost_of(None, piece) for piece in plan.pieces]
    tasks = plan.taskgraph.tasks
    costs.append(
        {
            "flops": sum(t.flops for t in tasks),
            "bytes accessed": sum(t.bytes_accessed for t in tasks),
        }
    )
    return {name: sum(c[name] for c in costs) for name in costs[-1]}
