"""What is expected of a device and of the link to it, until they are measured."""

import dataclasses

from jturnip import compat
from jturnip.compat import Device
from jturnip.frontend.costs import LINEAR_ALGEBRA, DeviceRates
from jturnip.hardware import Accelerator, accelerator_like
from jturnip.programs.calibration import measured_link
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.schedule import Link


# Guesses about a device, until its tasks are measured: a CPU, and an accelerator of which
# nothing is known. With blocks of 8 MiB sums of products took a fifth longer than with 16,
# with 32 and more what is elementwise up to three times as long.
_CPU = DeviceRates(
    5e10,
    1e10,
    1e-4,
    (LINEAR_ALGEBRA if compat.LAPACK_MAY_HANG else frozenset())
    | frozenset(["fft"] if compat.FFT_MAY_HANG else []),
    row_seconds=1.5e-9,
    cache_bytes=16 * 2**20,
)
# A task takes the loop's thread a tenth of a millisecond on an H100.
_UNKNOWN = DeviceRates(5e13, 1e12, 1e-4, joined_share=0.125)
# And of links, with their latency, and the loop's time to start a copy.
_LINKS = {
    "cpu": Link(5e9, 5e9, latency_seconds=5e-5, issue_seconds=1e-4, heard_seconds=5e-5),
    "gpu": Link(
        2.5e10,
        2.5e10,
        latency_seconds=1e-4,
        issue_seconds=1e-4,
        heard_seconds=4e-5,
        after_compute=True,
    ),
}


def rates(device: Device, instead: Accelerator | None = None) -> DeviceRates:
    """What is expected of a device's arithmetic and memory, or of any accelerator's."""
    if instead is None and device.platform == "cpu":
        return _CPU
    known = instead or accelerator_like(device.device_kind)
    if known is None:
        return _UNKNOWN
    flops = known.float32_flops_per_second or known.flops_per_second
    share = known.achievable_share
    return dataclasses.replace(
        _UNKNOWN,
        flops_per_second=share * flops,
        bytes_per_second=share * known.bytes_per_second,
    )


def link_of(device: Device, over: SimulatedLink | Link | None) -> Link:
    """What is expected of the link to a device: as measured, where it has been. Of one that
    is simulated, what the real copies allow; another one is as it is."""
    if isinstance(over, Link):
        return over
    expected = _LINKS["cpu" if device.platform == "cpu" else "gpu"]
    real = measured_link(device) or expected
    if over is None:
        return real
    # The copies are real, and told of no earlier than they are made, by one more thread.
    return dataclasses.replace(
        real,
        h2d_bytes_per_second=min(over.h2d_bytes_per_second, real.h2d_bytes_per_second),
        d2h_bytes_per_second=min(over.d2h_bytes_per_second, real.d2h_bytes_per_second),
        latency_seconds=max(over.latency_seconds, real.latency_seconds)
        + real.heard_seconds,
    )
