"""Accelerators and host links by their figures, to predict runs on machines elsewhere."""

import math
import re
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class HostLink:
    """A link between an accelerator and its host; both directions may be busy at once.

    Attributes:
      name: how to speak of it.
      h2d_bytes_per_second: rate towards the device, from pinned host memory.
      d2h_bytes_per_second: rate towards the host.
      latency_seconds: added to every transfer; does not occupy the link.

    Raises:
      ValueError: for a rate that is not positive, or a latency below zero.
    """

    name: str
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    latency_seconds: float = 1e-5

    def __post_init__(self) -> None:
        _check_positive(self, "h2d_bytes_per_second", "d2h_bytes_per_second")
        _check_not_negative(self, "latency_seconds")


@dataclass(frozen=True)
class Accelerator:
    """An accelerator by its figures.

    Attributes:
      name: how to speak of it.
      flops_per_second: peak of dense matrix products of 16-bit floats, summed in float32.
      bytes_per_second: peak of its memory.
      float32_flops_per_second: peak of dense float32 products as JAX does them by default,
        in TF32 where the device has it; used for all that is no 16-bit product, float64
        too. None: the same as `flops_per_second`.
      memory_bytes: what it has; None where that is not said.
      achievable_share: the share of each of these peaks that a program reaches, above 0 and
        at most 1.
      launch_seconds: what every task takes beside its arithmetic and its bytes.
      link: the link it usually has to the host: a name in `jturnip.LINKS`, or a `HostLink`.

    Raises:
      ValueError: for a figure that is not positive, a share that is not in range, or a
        negative launch time.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    float32_flops_per_second: float | None = None
    memory_bytes: int | None = None
    achievable_share: float = 1.0
    launch_seconds: float = 2e-5
    link: str | HostLink = "PCIe 4 x16"

    def __post_init__(self) -> None:
        _check_positive(self, "flops_per_second", "bytes_per_second", "achievable_share")
        for name in ("float32_flops_per_second", "memory_bytes"):
            if getattr(self, name) is not None:
                _check_positive(self, name)
        if self.achievable_share > 1:
            raise ValueError(f"achievable_share={self.achievable_share} must be at most 1")
        _check_not_negative(self, "launch_seconds")

    def seconds(self, flops: float, nbytes: float, narrow_share: float = 0.0) -> float:
        """Seconds of one task, which either arithmetic or memory bounds.

        Args:
          flops: its floating-point operations.
          nbytes: bytes of device memory that it reads and writes.
          narrow_share: the share of `flops` in products of 16-bit floats.
        """
        wide = self.float32_flops_per_second or self.flops_per_second
        narrow = narrow_share / self.flops_per_second
        arithmetic = flops * (narrow + (1 - narrow_share) / wide)
        bound = max(arithmetic, nbytes / self.bytes_per_second)
        return bound / self.achievable_share + self.launch_seconds


def _check_positive(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be positive and finite")


def _check_not_negative(record: object, name: str) -> None:
    if not 0 <= getattr(record, name) < math.inf:
        raise ValueError(f"{name}={getattr(record, name)} must be zero or more")


# Each way. PCIe's are what copies from pinned memory reach, four fifths of the 15.8, 31.5
# and 63 GB/s that the standard has for 16 lanes; NVLink-C2C has 450 GB/s each way.
_LINKS = (
    HostLink("PCIe 3 x16", 12.5e9, 12.5e9),
    HostLink("PCIe 4 x16", 25e9, 25e9),
    HostLink("PCIe 5 x16", 50e9, 50e9),
    HostLink("NVLink-C2C", 360e9, 360e9, latency_seconds=5e-6),
)

LINKS: dict[str, HostLink] = {link.name: link for link in _LINKS}
"""Links by name, with the rates that copies reach."""


def _nvidia(
    name: str,
    tflops: float,
    float32_tflops: float,
    gigabytes_per_second: float,
    gibibytes: int,
    share: float,
    link: str,
) -> Accelerator:
    return Accelerator(
        name,
        flops_per_second=tflops * 1e12,
        bytes_per_second=gigabytes_per_second * 1e9,
        float32_flops_per_second=float32_tflops * 1e12,
        memory_bytes=gibibytes * 2**30,
        achievable_share=share,
        link=link,
    )


# From the vendor's data sheets and architecture papers, without sparsity: bfloat16 products
# (float16 on V100 and T4), TF32 products (float32 on V100 and T4), memory bandwidth and
# memory. The share is not from there: a round figure for what large products reach, less
# where a small power limit holds the clock down.
_ACCELERATORS = (
    _nvidia("T4", 65, 8.1, 320, 16, 0.4, "PCIe 3 x16"),
    _nvidia("V100", 125, 15.7, 900, 32, 0.7, "PCIe 3 x16"),
    _nvidia("A100 40GB", 312, 156, 1555, 40, 0.7, "PCIe 4 x16"),
    _nvidia("A100 80GB", 312, 156, 2039, 80, 0.7, "PCIe 4 x16"),
    _nvidia("H100 PCIe", 756, 378, 2000, 80, 0.6, "PCIe 5 x16"),
    _nvidia("H100 SXM", 989, 494, 3350, 80, 0.65, "PCIe 5 x16"),
    _nvidia("H200", 989, 494, 4800, 141, 0.65, "PCIe 5 x16"),
    _nvidia("GH200", 989, 494, 4000, 96, 0.65, "NVLink-C2C"),
    _nvidia("L4", 121, 60, 300, 24, 0.5, "PCIe 4 x16"),
    _nvidia("L40S", 362, 183, 864, 48, 0.6, "PCIe 4 x16"),
    _nvidia("RTX 3090", 71, 35.6, 936, 24, 0.7, "PCIe 4 x16"),
    _nvidia("RTX 4090", 165, 82.6, 1008, 24, 0.7, "PCIe 4 x16"),
    _nvidia("RTX 5090", 209, 104.8, 1792, 32, 0.7, "PCIe 5 x16"),
)

ACCELERATORS: dict[str, Accelerator] = {a.name: a for a in _ACCELERATORS}
"""Accelerators by name, with their data sheets' peaks and the share of them to expect."""


_Record = TypeVar("_Record", Accelerator, HostLink)


def accelerator(of: str | Accelerator) -> Accelerator:
    """An accelerator by its name in `ACCELERATORS`, or as it is.

    Raises:
      ValueError: the name is not known.
      TypeError: for anything else.
    """
    return _found(of, Accelerator, ACCELERATORS, "device")


def accelerator_like(kind: str) -> Accelerator | None:
    """The accelerator in `ACCELERATORS` that a device is, as far as its kind says, such as
    "NVIDIA A100-SXM4-80GB"; of several that it may be the one before the others."""
    words = frozenset(re.findall(r"\w+", kind))
    found = [a for a in _ACCELERATORS if _model(a.name) in words]
    return max(found, key=lambda a: len(words.intersection(a.name.split())), default=None)


def _model(name: str) -> str:
    """The word of a name that says which one it is."""
    return next(word for word in name.split() if re.search(r"\d", word))


def host_link(of: str | HostLink) -> HostLink:
    """A link by its name in `LINKS`, or as it is.

    Raises:
      ValueError: the name is not known.
      TypeError: for anything else.
    """
    return _found(of, HostLink, LINKS, "link")


def _found(
    of: str | _Record, record: type[_Record], table: dict[str, _Record], what: str
) -> _Record:
    if isinstance(of, record):
        return of
    if not isinstance(of, str):
        raise TypeError(f"{what}={of!r} is neither a name nor a jturnip.{record.__name__}")
    if of not in table:
        raise ValueError(
            f"{what}={of!r} is not known; choose one of {', '.join(table)}, or give a"
            f" jturnip.{record.__name__}"
        )
    return table[of]
