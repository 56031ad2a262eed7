"""What is expected of a device and of the link to it, until they are measured."""

from jturnip import compat
from jturnip.compat import Device
from jturnip.frontend.costs import LINEAR_ALGEBRA, DeviceRates
from jturnip.hardware import Accelerator
from jturnip.runtime.link import SimulatedLink
from jturnip.runtime.schedule import Link


# Guesses about a device, until its tasks are measured.
_RATES = {
    "cpu": DeviceRates(
        5e10, 1e10, 1e-4, LINEAR_ALGEBRA if compat.LAPACK_MAY_HANG else frozenset()
    ),
    "gpu": DeviceRates(5e13, 2e12, 5e-5),
}


_LINKS = {"cpu": Link(5e9, 5e9), "gpu": Link(2.5e10, 2.5e10)}


def rates(device: Device, instead: Accelerator | None = None) -> DeviceRates:
    """What is expected of a device's arithmetic and memory, or of any accelerator's."""
    is_cpu = device.platform == "cpu" and instead is None
    return _RATES["cpu" if is_cpu else "gpu"]


def link_of(device: Device, simulated: SimulatedLink | None) -> Link:
    """What is expected of the link to a device."""
    if simulated is not None:
        return Link(
            simulated.h2d_bytes_per_second,
            simulated.d2h_bytes_per_second,
            simulated.latency_seconds,
        )
    return _LINKS["cpu" if device.platform == "cpu" else "gpu"]
