"""What a function would take in a budget: on the machine at hand, or on one elsewhere."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jturnip import placement
from jturnip.compiler.executables import Executable, work_of
from jturnip.compiler.trials import may_be_tried, try_out
from jturnip.frontend.values import Type
from jturnip.graph.plan import Plan
from jturnip.graph.report import RunReport
from jturnip.hardware import Accelerator, HostLink
from jturnip.programs.devices import link_of, rates
from jturnip.programs.expected import seconds_on
from jturnip.runtime.schedule import Link
from jturnip.stages.budgeted import Budgeted
from jturnip.units import format_bytes


@dataclass(frozen=True, slots=True, repr=False)
class Prediction:
    """What one call would take, after others with the same arrays in host memory. Of a plan
    in pieces, each piece is counted once: nobody knows how often a loop turns."""

    # From the first transfer or task to the last.
    seconds: float
    # Nothing is computed although tasks are left, because of transfers.
    stall_seconds: float
    # The tasks' own times, added up.
    compute_seconds: float
    # The larger of compute and of bytes over the link: no order of this plan is faster.
    lower_bound_seconds: float
    # Bytes over the link, each way.
    h2d_bytes: int
    d2h_bytes: int
    # The most host bytes that offloaded copies take, beside the arguments' own.
    host_bytes: int
    # The most device bytes in use at any moment, and the budget.
    peak_bytes: int
    gpu_bytes: int
    # Of these, what stays on the device between calls: the first call moves it there.
    kept_bytes: int
    strategy: str
    # What it is for, by name.
    device: str
    link: str
    plan: Plan

    def __repr__(self) -> str:
        return (
            f"<Prediction for {self.device}: {self.seconds:.3g} s a call, in"
            f" {format_bytes(self.peak_bytes)} of {format_bytes(self.gpu_bytes)}>"
        )

    def summary(self) -> str:
        """A few lines for people."""
        lines = [
            f"{self.device}, {self.link}, strategy {self.strategy}",
            f"time: {self.seconds:.3g} s, of which {self.stall_seconds:.3g} s wait for"
            f" transfers; compute {self.compute_seconds:.3g} s;"
            f" at least {self.lower_bound_seconds:.3g} s",
            f"device: peak {format_bytes(self.peak_bytes)}"
            f" of {format_bytes(self.gpu_bytes)}"
            f"; {format_bytes(self.kept_bytes)} kept between calls",
            f"link: {format_bytes(self.h2d_bytes)} to the device,"
            f" {format_bytes(self.d2h_bytes)} to the host;"
            f" host copies take {format_bytes(self.host_bytes)}",
        ]
        if self.plan.pieces:
            lines.append(f"in {len(self.plan.pieces)} pieces; each is counted once")
        return "\n".join(lines)


def predicted(
    function: Budgeted, on: Accelerator | None, over: HostLink | None, used: list[Any]
) -> Prediction:
    """Of a function in its budget.

    Args:
      function: as it is to run on the device at hand, over the link there.
      on: the device that it is predicted for, or None for the one at hand.
      over: the link, or None likewise.
      used: what earlier predictions of it compiled; grows by what this one does.

    Raises:
      ValueError: the budget is more than the device has.
    """
    made = elsewhere(function, on, over)
    device = function.flattened.given.device
    name = on.name if on else f"{device.device_kind} as measured"
    simulated = function.asked.options.link is not None
    at_hand = "a simulated link" if simulated else "the link at hand"
    names = name, over.name if over else at_hand
    if made.whole is not None:
        seconds, expected = _whole_seconds(made), link_of(device, made.asked.link)
        return of_whole(made.whole_plan[1], seconds, expected, *names)
    if on is None:
        program = made.measured_program(made.trials(), used)
    else:
        program = made.made(used=used)
    return of_split(made.with_kept(program).plan, *names)


def elsewhere(
    function: Budgeted, on: Accelerator | None, over: HostLink | None
) -> Budgeted:
    """The same function on an accelerator, over a link; None for what it has here."""
    if on is None and over is None:
        return function
    asked, gpu_bytes = function.asked, function.gpu_bytes
    if on is not None and on.memory_bytes is not None:
        if asked.options.gpu_bytes is None:
            gpu_bytes = on.memory_bytes * 9 // 10
        elif gpu_bytes > on.memory_bytes:
            raise ValueError(
                f"gpu_bytes is {format_bytes(gpu_bytes)};"
                f" {on.name} has {format_bytes(on.memory_bytes)}"
            )
    link = None
    if over is not None:
        link = Link(
            over.h2d_bytes_per_second,
            over.d2h_bytes_per_second,
            over.latency_seconds,
            after_compute=on is not None or asked.arguments.device.platform != "cpu",
        )
    asked = dataclasses.replace(asked.in_budget(gpu_bytes), accelerator=on, elsewhere=link)
    made = Budgeted(asked)
    if gpu_bytes == function.gpu_bytes and function.whole is not None:
        made.take_whole(function)
    return made


def of_split(plan: Plan, device: str, link: str) -> Prediction:
    """Of a plan with the times of the tasks there.

    Args:
      plan: of tasks, or in pieces.
      device, link: what it is for, by name.
    """
    runs = list(_runs(plan))
    return _of(
        plan,
        sum(run.stall_seconds for run in runs),
        sum(run.compute_seconds for run in runs),
        device,
        link,
    )


def of_whole(
    plan: Plan, compute_seconds: float, over: Link, device: str, link: str
) -> Prediction:
    """Of a function that runs as one executable: what is in host memory comes before it,
    and what belongs there goes after it.

    Args:
      plan: of the whole; it says nothing of times.
      compute_seconds: what the executable takes.
      over: the link.
      device, link: what it is for, by name.
    """
    latency = over.latency_seconds
    h2d = plan.h2d_bytes / over.h2d_bytes_per_second + latency * bool(plan.h2d_bytes)
    d2h = plan.d2h_bytes / over.d2h_bytes_per_second + latency * bool(plan.d2h_bytes)
    plan = dataclasses.replace(
        plan,
        predicted_seconds=h2d + compute_seconds + d2h,
        lower_bound_seconds=max(h2d, compute_seconds, d2h),
    )
    # What goes back when all is computed holds nothing up.
    return _of(plan, h2d, compute_seconds, device, link)


def _of(plan: Plan, stall: float, compute: float, device: str, link: str) -> Prediction:
    return Prediction(
        seconds=plan.predicted_seconds,
        stall_seconds=stall,
        compute_seconds=compute,
        lower_bound_seconds=plan.lower_bound_seconds,
        h2d_bytes=plan.h2d_bytes,
        d2h_bytes=plan.d2h_bytes,
        host_bytes=plan.host_bytes,
        peak_bytes=plan.peak_bytes,
        gpu_bytes=plan.gpu_bytes,
        kept_bytes=plan.kept_bytes,
        strategy=plan.strategy,
        device=device,
        link=link,
        plan=plan,
    )


def _runs(plan: Plan) -> Iterator[RunReport]:
    """What the simulator predicts of a plan's pieces, or of itself."""
    if plan.predicted_run is not None:
        yield plan.predicted_run
    for piece in plan.pieces:
        yield from _runs(piece)


def _whole_seconds(function: Budgeted) -> float:
    """Seconds of a function that fits, as one executable: as expected on an accelerator
    elsewhere, on zeros on the device at hand, or as expected there where it cannot be tried
    out."""
    asked, device = function.asked, function.flattened.given.device
    whole: Any = function.whole
    equations = asked.traced.jaxpr.eqns
    infos, results = map(jax.tree.leaves, (asked.traced.args_info, asked.traced.out_info))
    nbytes = sum(Type.of(info).nbytes for info in (*infos, *results))
    flops, accessed = work_of(whole, equations, nbytes, device)
    if asked.accelerator is not None:
        return seconds_on(asked.accelerator, equations, flops, accessed)

    def call(*leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(asked.in_tree, leaves)
        return jax.tree.leaves(whole(*args, **kwargs))

    executable = Executable(
        call=call,
        marked=False,
        workspace=0,
        flops=flops,
        bytes_accessed=accessed,
        arguments=tuple(Type.of(info).struct() for info in infos),
        may_be_tried=may_be_tried(equations),
        overwrites=tuple((0, i) for i, info in enumerate(infos) if info.donated),
    )
    nbytes, where = function.compiled_whole[1], placement.sharding(device, on_host=False)
    try_out([(executable, nbytes)], where, function.trials())
    return executable.seconds or rates(device).seconds(flops, accessed)
