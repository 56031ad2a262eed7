"""What a function would take on hardware that is not there, and what stock JAX needs."""

import contextlib
import dataclasses
import functools
import gc
import math
import pathlib
import re
import subprocess
import sys
import time
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from watch import Watch

import jturnip
from jturnip.compiler import profiles
from jturnip.compiler.executables import work_of
from jturnip.compiler.trials import Trials
from jturnip.hardware import accelerator, accelerator_like, host_link
from jturnip.planner.strategies import STRATEGIES
from jturnip.programs import calibration
from jturnip.programs.devices import link_of, rates
from jturnip.runtime.schedule import Link
from jturnip.stages import prediction
from jturnip.stages.lowered import Lowered


MIB = 2**20
# A figure each, so that what comes out can be computed by hand.
PLAIN = jturnip.Accelerator("plain", 1e12, 1e11, launch_seconds=0.0)


def struct(*shape: int, dtype: str = "float32", on_host: bool = False):
    kind = "pinned_host" if on_host else "device"
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def layers(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


WEIGHTS = [struct(512, 512, on_host=True)] * 8  # 1 MiB each
X = struct(512, 512)


def lowered(gpu_bytes="4.5MiB", **options) -> Lowered:
    return jturnip.jit(layers, gpu_bytes, strategy="turnip", **options).lower(WEIGHTS, X)


# --- The tables.


def test_every_accelerator_has_figures_that_go_together():
    for name, one in jturnip.ACCELERATORS.items():
        assert one.name == name
        assert one.link in jturnip.LINKS
        assert one.memory_bytes is not None
        assert one.float32_flops_per_second is not None
        assert 2**33 < one.memory_bytes < 2**40
        assert one.float32_flops_per_second < one.flops_per_second
        assert 1e11 < one.bytes_per_second < 1e14
        assert 0 < one.achievable_share < 1
    assert len(jturnip.ACCELERATORS) >= 12


def test_every_link_has_figures_that_go_together():
    for name, link in jturnip.LINKS.items():
        assert link.name == name
        assert 1e9 < link.d2h_bytes_per_second <= link.h2d_bytes_per_second < 1e12
        assert 0 < link.latency_seconds < 1e-3


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 PCIe"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A6000", None),
        ("cpu", None),
    ],
)
def test_a_device_is_known_by_its_kind(kind: str, name: str | None):
    found = accelerator_like(kind)
    assert (found.name if found else None) == name


def test_work_of_libraries_is_known_from_shapes():
    """XLA's analysis for a GPU says -1 of a product that cuBLAS does."""

    class Compiled:
        def cost_analysis(self) -> dict[str, float]:
            return {"flops": -1.0, "bytes accessed": -1.0}

    closed = jax.make_jaxpr(lambda x, y: x @ y)(jnp.ones((8, 4)), jnp.ones((4, 2)))
    device = Mock(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    found = work_of(Compiled(), closed.jaxpr.eqns, 4 * (32 + 8 + 16), device)
    assert found == (2 * 8 * 4 * 2, 4 * (32 + 8 + 16))
    expected = rates(device)
    assert expected.flops_per_second == pytest.approx(0.6 * 378e12)
    assert rates(jax.devices()[0], PLAIN).flops_per_second == PLAIN.flops_per_second
    device.device_kind = "of another kind"
    assert rates(device).flops_per_second < expected.flops_per_second


def test_a_name_or_a_record_is_an_accelerator():
    assert accelerator("L4") is jturnip.ACCELERATORS["L4"]
    assert accelerator(PLAIN) is PLAIN
    link = jturnip.HostLink("own", 1e9, 1e9)
    assert host_link(link) is link


@pytest.mark.parametrize("find", [accelerator, host_link])
def test_an_unknown_name_gives_an_error_with_those_that_are_known(find):
    table = jturnip.ACCELERATORS if find is accelerator else jturnip.LINKS
    with pytest.raises(ValueError, match="is not known") as raised:
        find("Voodoo 2")
    assert all(name in str(raised.value) for name in table)
    with pytest.raises(TypeError, match="neither a name nor"):
        find(12)


@pytest.mark.parametrize(
    "figure",
    [
        {"flops_per_second": 0.0},
        {"bytes_per_second": -1.0},
        {"float32_flops_per_second": math.inf},
        {"memory_bytes": 0},
        {"achievable_share": 1.5},
        {"launch_seconds": math.nan},
    ],
    ids=lambda figure: next(iter(figure)),
)
def test_an_accelerator_refuses_a_figure_that_cannot_be(figure):
    with pytest.raises(ValueError, match=next(iter(figure))):
        dataclasses.replace(PLAIN, **figure)


def test_a_link_refuses_a_figure_that_cannot_be():
    with pytest.raises(ValueError, match="d2h_bytes_per_second"):
        jturnip.HostLink("none", 1e9, 0.0)
    with pytest.raises(ValueError, match="latency_seconds"):
        jturnip.HostLink("before", 1e9, 1e9, -1.0)


def test_a_task_is_bound_by_arithmetic_or_by_memory():
    assert PLAIN.seconds(1e12, 1e10) == pytest.approx(1.0)
    assert PLAIN.seconds(1e10, 1e11) == pytest.approx(1.0)
    half = dataclasses.replace(PLAIN, achievable_share=0.5, launch_seconds=0.25)
    assert half.seconds(1e12, 1e10) == pytest.approx(2.25)


def test_small_floats_are_computed_with_at_their_own_rate():
    both = dataclasses.replace(PLAIN, float32_flops_per_second=0.5e12)
    assert both.seconds(1e12, 0.0) == pytest.approx(2.0)
    assert both.seconds(1e12, 0.0, narrow_share=1.0) == pytest.approx(1.0)
    assert both.seconds(1e12, 0.0, narrow_share=0.5) == pytest.approx(1.5)


def test_the_api_page_describes_every_field():
    page = pathlib.Path(__file__).parent.parent / "docs/api.md"
    text = page.read_text(encoding="utf-8")
    for record in (jturnip.Accelerator, jturnip.HostLink, jturnip.Prediction):
        for field in dataclasses.fields(record):
            assert re.search(rf"\b{field.name}\b", text), f"{record.__name__}.{field.name}"
    assert all(f"`{name}`" in text for name in (*jturnip.ACCELERATORS, *jturnip.LINKS))


# --- Predictions for hardware elsewhere.


def test_the_figures_are_those_of_the_plan():
    predicted = lowered().predict("A100 40GB")
    plan = predicted.plan
    assert predicted.device == "A100 40GB"
    assert predicted.link == "PCIe 4 x16"  # as the table has it
    for name in ("h2d_bytes", "d2h_bytes", "host_bytes", "peak_bytes", "gpu_bytes"):
        assert getattr(predicted, name) == getattr(plan, name), name
    assert predicted.strategy == plan.strategy == "turnip"
    assert predicted.seconds == plan.predicted_seconds
    assert predicted.compute_seconds == pytest.approx(
        sum(task.seconds for task in plan.taskgraph.tasks)
    )
    assert predicted.lower_bound_seconds <= predicted.seconds
    busy = predicted.compute_seconds + predicted.stall_seconds
    assert busy <= predicted.seconds * (1 + 1e-9)
    assert predicted.peak_bytes <= 4.5 * MIB
    assert predicted.h2d_bytes >= 8 * MIB


def test_the_summary_is_some_lines_and_the_repr_is_one():
    predicted = lowered().predict("L4", "PCIe 3 x16")
    assert "L4, PCIe 3 x16, strategy turnip" in predicted.summary()
    assert predicted.summary().count("\n") == 3
    assert "\n" not in repr(predicted)
    assert "for L4: " in repr(predicted)
    assert " s a call, in " in repr(predicted)


def test_products_take_what_the_flops_say():
    flops = 8 * 2 * 512**3
    predicted = lowered().predict(PLAIN)
    assert flops / 1e12 <= predicted.compute_seconds < 1.2 * flops / 1e12


def test_a_device_twice_as_fast_halves_compute():
    fast = dataclasses.replace(
        PLAIN, name="fast", flops_per_second=2e12, bytes_per_second=2e11
    )
    function = lowered()
    slow, fast = function.predict(PLAIN), function.predict(fast)
    assert fast.compute_seconds == pytest.approx(slow.compute_seconds / 2)
    assert fast.seconds < slow.seconds


def test_each_task_has_a_launch():
    launching = dataclasses.replace(PLAIN, launch_seconds=1e-3)
    function = lowered()
    more = function.predict(launching).compute_seconds
    tasks = len(function.predict(PLAIN).plan.taskgraph.tasks)
    expected = function.predict(PLAIN).compute_seconds + tasks * 1e-3
    assert more == pytest.approx(expected)


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_a_faster_link_is_never_predicted_to_be_slower(strategy):
    function = jturnip.jit(layers, "4.5MiB", strategy=strategy).lower(WEIGHTS, X)
    rates = [1e8, 1e9, 1e10, 1e11, 1e12]
    links = [jturnip.HostLink(f"{rate:g}", rate, rate, 0.0) for rate in rates]
    seconds = [function.predict(PLAIN, link).seconds for link in links]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] >= 8 * MIB / 1e8


def test_a_slow_link_is_waited_for():
    link = jturnip.HostLink("slow", 1e8, 1e8)
    predicted = lowered().predict(PLAIN, link)
    assert predicted.link == "slow"
    assert predicted.seconds >= predicted.h2d_bytes / 1e8
    assert predicted.stall_seconds > predicted.compute_seconds


def test_nothing_runs_and_no_array_is_made(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something was tried out")

    monkeypatch.setattr("jturnip.compiler.trials._Trial.call", refuse)
    function = jturnip.jit(layers, "4.5MiB", strategy="turnip")
    before = len(jax.live_arrays())
    plain = [jax.ShapeDtypeStruct((512, 512), "float32")] * 8
    predicted = function.lower(plain, plain[0]).predict("RTX 4090")
    assert predicted.h2d_bytes >= 8 * MIB
    whole = jturnip.jit(layers, "64MiB").lower(plain, plain[0]).predict("RTX 4090")
    assert whole.strategy == "whole"
    assert jturnip.peak_bytes(layers, plain, plain[0]) >= 9 * MIB
    assert len(jax.live_arrays()) == before


def test_what_needs_more_than_any_machine_has_is_predicted_too():
    weights = [struct(2**16, 2**16, on_host=True)] * 64  # 1 TiB
    tokens = struct(1024, 2**16)
    function = jturnip.jit(layers, "70GiB", strategy="turnip").lower(weights, tokens)
    predicted = function.predict("H100 SXM")
    assert predicted.h2d_bytes + predicted.kept_bytes == 2**40
    assert predicted.kept_bytes == 2 * 2**34  # beside two more, and a result
    assert predicted.seconds >= predicted.h2d_bytes / 50e9


def test_what_leaves_the_device_need_not_fit_the_host_at_hand(
    monkeypatch: pytest.MonkeyPatch,
):
    def chain(x):
        kept = []
        for _ in range(8):
            x = jnp.tanh(x @ x)
            kept.append(x)
        return kept

    function = jturnip.jit(chain, "8MiB", strategy="turnip").lower(X)
    monkeypatch.setattr("jturnip.placement.host_memory_available", lambda: 100)
    assert function.predict("T4").host_bytes > 100
    with pytest.raises(jturnip.HostMemoryError):
        _ = function.plan


def test_without_a_budget_it_has_nine_tenths_of_the_devices_memory():
    function = jturnip.jit(layers).lower(WEIGHTS, X)
    assert function.predict("T4").gpu_bytes == 16 * 2**30 * 9 // 10
    assert function.predict("A100 80GB").gpu_bytes == 80 * 2**30 * 9 // 10
    assert function.predict(PLAIN).gpu_bytes == function.gpu_bytes


def test_a_budget_that_the_device_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"gpu_bytes is 20 GiB; T4 has 16 GiB"):
        lowered("20GiB").predict("T4")


def test_a_budget_that_is_too_small_is_refused_as_ever():
    function = jturnip.jit(layers, "8KiB").lower(WEIGHTS, X)
    with pytest.raises(jturnip.DoesNotFit) as raised:
        function.predict("A100 80GB")
    assert raised.value.gpu_bytes == 8 * 2**10
    enough = jturnip.jit(layers, raised.value.needed_bytes).lower(WEIGHTS, X)
    assert enough.predict("A100 80GB").peak_bytes <= raised.value.needed_bytes


def test_unknown_names_are_refused():
    function = lowered()
    with pytest.raises(ValueError, match="H100 SXM"):
        function.predict("H1000")
    with pytest.raises(ValueError, match="NVLink-C2C"):
        function.predict("T4", "ISA")


def test_what_was_compiled_for_one_device_is_used_for_the_next():
    function = lowered()
    function.predict("T4")
    device, link = accelerator("H200"), host_link("PCIe 5 x16")
    again = prediction.elsewhere(function._budgeted, device, link)
    program = again.made(used=function._of_prediction)
    assert program.report.compiled == 0


# --- Functions that fit, loops and branches.


def test_what_fits_is_one_executable_between_two_transfers():
    link = jturnip.HostLink("link", 1e9, 1e9, 0.0)
    function = jturnip.jit(layers).lower(WEIGHTS, X)
    predicted = function.predict(PLAIN, link)
    assert predicted.strategy == "whole"
    assert predicted.h2d_bytes == 8 * MIB
    flops = 8 * 2 * 512**3
    assert flops / 1e12 <= predicted.compute_seconds < 1.2 * flops / 1e12
    assert predicted.stall_seconds == pytest.approx(8 * MIB / 1e9)
    total = predicted.stall_seconds + predicted.compute_seconds
    assert predicted.seconds == pytest.approx(total)
    assert predicted.peak_bytes == jturnip.peak_bytes(layers, WEIGHTS, X)
    assert predicted.plan.predicted_seconds == predicted.seconds
    assert predicted.lower_bound_seconds == pytest.approx(8 * MIB / 1e9)


def test_the_body_of_a_scan_counts_as_often_as_it_runs():
    def scanned(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    one, many = (
        jturnip.jit(scanned, "256MiB").lower(struct(n, 256, 256), struct(256, 256))
        for n in (1, 32)
    )
    assert many.plan.strategy == "whole"
    ratio = many.predict(PLAIN).compute_seconds / one.predict(PLAIN).compute_seconds
    assert 28 < ratio < 36


def test_products_of_small_floats_have_their_own_rate():
    fast = dataclasses.replace(PLAIN, float32_flops_per_second=1e11)

    def seconds(dtype: str) -> float:
        shapes = [struct(1024, 1024, dtype=dtype)] * 2
        function = jturnip.jit(lambda a, b: a @ b, "64MiB").lower(*shapes)
        return function.predict(fast).compute_seconds

    assert seconds("float32") == pytest.approx(10 * seconds("bfloat16"), rel=0.05)


def test_each_piece_of_what_is_driven_counts_once():
    def driven(weights, x):
        def body(carry):
            i, x = carry
            return i + 1, layers(weights, x)

        return jax.lax.while_loop(lambda carry: jnp.sum(carry[1]) < carry[0], body, (0, x))

    function = jturnip.jit(driven, "4.5MiB").lower(WEIGHTS, X)
    predicted = function.predict("RTX 3090")
    assert predicted.strategy == "driven"
    pieces = predicted.plan.pieces
    assert pieces
    assert predicted.seconds == pytest.approx(sum(p.predicted_seconds for p in pieces))
    assert predicted.h2d_bytes == predicted.plan.h2d_bytes >= 4 * MIB
    assert 0 < predicted.compute_seconds <= predicted.seconds
    assert 0 <= predicted.stall_seconds < predicted.seconds
    assert f"in {len(pieces)} pieces; each is counted once" in predicted.summary()


def test_a_branch_that_is_driven_is_predicted():
    def branched(weights, x, first):
        return jax.lax.cond(first, lambda: layers(weights, x), lambda: x + weights[0])

    first = jax.ShapeDtypeStruct((), bool)
    function = jturnip.jit(branched, "4.5MiB").lower(WEIGHTS, X, first)
    predicted = function.predict("RTX 3090")
    assert predicted.plan.pieces
    assert predicted.h2d_bytes == predicted.plan.h2d_bytes


def test_what_fits_finds_its_weights_from_a_call_before():
    predicted = jturnip.jit(layers, "64MiB").lower(WEIGHTS, X).predict(PLAIN)
    assert (predicted.h2d_bytes, predicted.kept_bytes) == (0, 8 * MIB)
    assert predicted.seconds == predicted.compute_seconds


# --- The machine at hand.


def test_the_machine_at_hand_is_measured():
    function = lowered()
    predicted = function.predict()
    assert predicted.device == f"{jax.devices()[0].device_kind} as measured"
    assert predicted.link == "the link at hand"
    gc.collect()  # what is measured is not measured again
    plan = function.compile().plan
    assert predicted.h2d_bytes == plan.h2d_bytes
    assert predicted.peak_bytes == plan.peak_bytes
    alone = sum(task.seconds for task in plan.taskgraph.tasks)
    link = link_of(jax.devices()[0], None)
    moves = [op for op in plan.memgraph.ops if op.kind.value in ("reload", "offload")]
    lost = link.lost_seconds(0) * len(moves)
    lost += link.compute_seconds_per_byte * (plan.h2d_bytes + plan.d2h_bytes)
    assert alone * 0.999 <= predicted.compute_seconds <= (alone + lost) * 1.001


def trials_in(room: int) -> Trials:
    return Trials(1000, room, contextlib.nullcontext)


def test_the_link_at_hand_is_measured_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "_links", {})
    device, trials = jax.devices("cpu")[0], trials_in(32 * MIB)
    calibration.calibrate(device, trials)
    link = calibration.measured_link(device)
    assert link is not None
    # What any machine has, and none.
    for rate in (link.h2d_bytes_per_second, link.d2h_bytes_per_second):
        assert 1e7 < rate < 1e13
    assert 0 < link.latency_seconds < 1.0
    assert 0 < link.heard_seconds <= link.issue_seconds < 1.0
    assert 0 < link.late_seconds < 1.0
    assert 0 < link.compute_seconds_per_copy < 1.0
    assert link.compute_seconds_per_byte >= 0
    assert 1000 + 4 * MIB < trials.peak_bytes <= 1000 + 32 * MIB
    calibration.calibrate(device, again := trials_in(32 * MIB))
    assert calibration.measured_link(device) is link
    assert again.peak_bytes == 0


def test_a_copy_takes_a_core_while_it_lasts_whatever_the_clock_of_cores_says(
    monkeypatch: pytest.MonkeyPatch,
):
    """It tells what a core does when that is interrupted, which may be later."""
    monkeypatch.setattr(calibration, "_links", {})
    monkeypatch.setattr(calibration.time, "process_time", lambda: 0.0)
    device = jax.devices("cpu")[0]
    calibration.calibrate(device, trials_in(32 * MIB))
    link = calibration.measured_link(device)
    assert link is not None
    fastest = max(link.h2d_bytes_per_second, link.d2h_bytes_per_second)
    assert link.compute_seconds_per_byte * fastest >= 0.999 / profiles.cores()


@pytest.mark.long
def test_a_link_is_measured_in_little_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "_links", {})
    device, trials = jax.devices("cpu")[0], trials_in(5 * MIB // 4)
    with Watch() as watch:
        calibration.calibrate(device, trials)
    assert calibration.measured_link(device) is not None
    assert 0 < watch.peak_bytes <= trials.peak_bytes - 1000 <= 5 * MIB // 4


def test_without_room_no_link_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "_links", {})
    device, trials = jax.devices("cpu")[0], trials_in(MIB // 2)
    calibration.calibrate(device, trials)
    assert calibration.measured_link(device) is None
    assert trials.peak_bytes == 0
    assert link_of(device, None).compute_seconds_per_copy == 0


def test_a_simulated_link_is_no_faster_than_the_copies_that_are_made(
    monkeypatch: pytest.MonkeyPatch,
):
    device = jax.devices("cpu")[0]
    real = Link(1e9, 2e9, 1e-4, 2e-5, 3e-5, 1e-10)
    monkeypatch.setattr(calibration, "_links", {device: real})
    slow = link_of(device, jturnip.SimulatedLink(1e8, 1e8, 1e-3))
    # One more thread tells of each copy.
    told = dataclasses.replace(real, latency_seconds=1e-4 + 3e-5)
    assert slow == dataclasses.replace(
        told,
        h2d_bytes_per_second=1e8,
        d2h_bytes_per_second=1e8,
        latency_seconds=1e-3 + 3e-5,
    )
    assert link_of(device, jturnip.SimulatedLink(1e12, 1e12)) == told
    # A link that is not there has no copies.
    assert link_of(device, Link(1e12, 1e12)) == Link(1e12, 1e12)


def test_the_machine_at_hand_may_have_another_link():
    slow = jturnip.HostLink("slow", 2e7, 2e7)
    predicted = lowered().predict(link=slow)
    assert predicted.link == "slow"
    assert predicted.seconds >= 8 * MIB / 2e7
    simulated = lowered(link=jturnip.SimulatedLink(2e7, 2e7))
    assert simulated.predict().link == "a simulated link"
    assert simulated.predict().seconds >= 8 * MIB / 2e7


def test_a_whole_function_is_measured_on_the_machine_at_hand():
    function = jturnip.jit(layers, donate_argnums=1).lower(WEIGHTS, X)
    predicted = function.predict()
    assert predicted.strategy == "whole"
    assert predicted.compute_seconds > 0
    assert predicted.seconds > predicted.compute_seconds  # 8 MiB come first


def test_what_may_not_be_tried_out_is_guessed():
    def calls_back(x):
        shape = jax.ShapeDtypeStruct((), "float32")
        return x + jax.pure_callback(lambda x: np.float32(1 / 0), shape, x[0, 0])

    predicted = jturnip.jit(calls_back, "64MiB").lower(X).predict()
    assert predicted.strategy == "whole"
    assert predicted.seconds > 0


# --- What stock JAX needs.


def stock_bytes(jitted, *args) -> int:
    sizes = jitted.lower(*args).compile().memory_analysis()
    needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    return needed - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes


def test_peak_bytes_are_xlas_own():
    structs = [jax.ShapeDtypeStruct((256, 256), "float32")] * 4
    x = jax.ShapeDtypeStruct((64, 256), "float32")
    expected = stock_bytes(jax.jit(layers), structs, x)
    assert jturnip.peak_bytes(layers, structs, x) == expected
    assert jturnip.peak_bytes(jax.jit(layers), structs, x) == expected
    assert jturnip.peak_bytes(jturnip.jit(layers, "1MiB"), structs, x) == expected
    arrays = [np.ones((256, 256), np.float32)] * 4
    assert jturnip.peak_bytes(layers, arrays, jnp.ones((64, 256))) == expected


def test_peak_bytes_do_not_depend_on_where_arguments_lie():
    x = jnp.ones((64, 256))
    held = jturnip.host([jnp.ones((256, 256))] * 4)
    expected = jturnip.peak_bytes(layers, [jnp.ones((256, 256))] * 4, x)
    assert jturnip.peak_bytes(layers, held, x) == expected
    assert jturnip.peak_bytes(jturnip.jit(layers, "1MiB"), held, x) == expected


def test_peak_bytes_know_static_and_donated_arguments():
    def power(x, n):
        return functools.reduce(jnp.multiply, [x] * n)

    x = jax.ShapeDtypeStruct((256, 256), "float32")
    options: dict[str, Any] = {"static_argnums": 1, "donate_argnums": 0}
    expected = stock_bytes(jax.jit(power, **options), x, 3)
    kept = stock_bytes(jax.jit(power, static_argnums=1), x, 3)
    assert jturnip.peak_bytes(jturnip.jit(power, "1MiB", **options), x, 3) == expected
    assert jturnip.peak_bytes(jax.jit(power, **options), x, 3) == expected
    assert expected < kept
    assert jturnip.peak_bytes(functools.partial(power, n=3), x) == kept


def test_peak_bytes_of_a_method():
    class Model:
        @jturnip.jit(gpu_bytes="1MiB")
        def double(self, x):
            return x * 2

    jax.tree_util.register_static(Model)
    x = jax.ShapeDtypeStruct((256,), "float32")
    assert jturnip.peak_bytes(Model().double, x) == 2 * 1024


# --- At full size.

SEVEN = """
import functools, resource, jax, jturnip
from jturnip.models import llama

model = llama.config("7b", dtype="bfloat16", length=512)
optimizer = llama.adamw()
where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
state = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
    llama.abstract_state(model, optimizer),
)
tokens = jax.ShapeDtypeStruct((1, 512), "int32")
step = jturnip.jit(
    functools.partial(llama.train_step, model, optimizer), "22GiB", donate_argnums=0
)
predicted = step.lower(state, tokens).predict("RTX 4090", "PCIe 4 x16")
assert predicted.peak_bytes <= 22 * 2**30, predicted
assert predicted.h2d_bytes >= 37 * 2**30, predicted  # the state: three times 12.5 GiB
assert 1 < predicted.lower_bound_seconds <= predicted.seconds < 10, predicted
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20  # KiB
"""


@pytest.mark.slow
def test_a_step_of_seven_billion_parameters_is_predicted_in_a_minute():
    pytest.importorskip("optax")
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", SEVEN], check=True)
    assert time.perf_counter() - began < 60
