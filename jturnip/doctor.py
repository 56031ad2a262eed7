"""`jturnip doctor`: looks at this machine, and says what to change for jturnip to run well.

`examine` gives findings, `render` their text. Each check is a function that gives the
findings on one topic; those about settings take what they judge as arguments.
"""

import importlib.metadata
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jturnip.native import marks
from jturnip.placement import PINNED_LIMIT, PINNED_LIMIT_DEFAULT, available_host_bytes
from jturnip.units import format_bytes


Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable
MIB, GIB = 2**20, 2**30
FRACTION = "XLA_CLIENT_MEM_FRACTION"
FRACTION_DEFAULT = 0.75
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb"
FIRST_WITH_HUGE_PAGES = (2, 35)  # of glibc
MOST_OF_THE_CARD = 0.9  # above this share, fragments no longer fit between the rest
LINK_SIZES = (1 * MIB, 8 * MIB, 64 * MIB)
LINK_REPEATS = 5
LINK_SECONDS = 0.5  # for each measurement; the one begun is ended
SLOW_LINK = 10e9  # bytes per second; PCIe 3.0 x16 reaches 12e9
TESTED_JAX = ((0, 10, 2), (0, 12))  # from the first; up to any release of the second


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    found: str
    advice: str = ""  # what to do; empty when nothing is wrong


def examine(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Everything worth knowing about this machine; starts JAX's backend."""
    environ = os.environ if environ is None else environ
    findings = [*versions(), *extension()]
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        advice = "Nothing runs before JAX finds its device; see the message above."
        return [
            *findings,
            Finding("device", f"JAX's backend does not start: {error}", advice),
        ]
    host_bytes = available_host_bytes()
    findings += [*host_memory(host_bytes), *accelerator(devices[0].platform)]
    for device in devices:
        findings += [*memory(device)]
    if devices[0].platform == "cpu":
        findings += [*pages(environ)]
    if devices[0].platform == "gpu":
        findings += [*allocator(environ), *pinned_limit(environ, host_bytes)]
    if {"device", "pinned_host"} <= memory_kinds(devices[0]):
        findings += [*link(devices[0])]
    return findings


def render(findings: Iterable[Finding]) -> str:
    """One line a finding, its advice below it, and the number of those at the end."""
    findings = list(findings)
    width = max((len(each.topic) for each in findings), default=0)
    lines = []
    for each in findings:
        lines.append(f"{'!' if each.advice else ' '} {each.topic:<{width}}  {each.found}")
        if each.advice:
            lines.append(f"  {'':<{width}}  -> {each.advice}")
    problems = sum(bool(each.advice) for each in findings)
    lines += ["", f"{problems} to look at, marked !" if problems else "Nothing to fix."]
    return "\n".join(lines)


def versions() -> Iterator[Finding]:
    """What is installed, and whether it goes together."""
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield _jturnip_version()
    jax_version, jaxlib_version = (_version(name) for name in ("jax", "jaxlib"))
    first, last = TESTED_JAX
    advice = ""
    if _numbers(jax_version) < first:
        advice = f"Older than jturnip supports: pip install 'jax>={_dotted(first)}'."
    elif _numbers(jax_version)[: len(last)] > last:
        advice = f"Newer than tested (up to {_dotted(last)}); if it fails, try that one."
    yield Finding("jax", jax_version, advice)
    apart = _numbers(jax_version)[:3] != _numbers(jaxlib_version)[:3]
    advice = f"Not jax's version: pip install 'jaxlib=={jax_version}'." if apart else ""
    yield Finding("jaxlib", jaxlib_version, advice)
    yield Finding("numpy", _version("numpy"))
    missing = [name for name in ("optax", "tqdm") if not _version(name)]
    if missing:
        found = f"without {' and '.join(missing)}, which only `jturnip demo` needs"
        yield Finding("demo", found, 'For the demo: pip install "jturnip[demo]".')


def extension() -> Iterator[Finding]:
    """Whether completions reach the run loop through the C++ extension."""
    status = marks.status()
    if status.loaded:
        yield Finding("xla_ext", "loaded: tasks mark their own completion")
    else:
        found = "not loaded: threads wait for completions, which takes longer"
        yield Finding("xla_ext", found, status.reason)


def accelerator(
    backend: str, driver: pathlib.Path = pathlib.Path("/proc/driver/nvidia/version")
) -> Iterator[Finding]:
    """Whether JAX leaves a GPU unused."""
    if backend == "cpu" and driver.exists():
        found = "this machine has an NVIDIA driver, but JAX uses the CPU"
        advice = (
            'Install JAX for it: pip install "jturnip[cuda13]" (or cuda12); '
            "if that is done, unset JAX_PLATFORMS."
        )
        yield Finding("backend", found, advice)
    else:
        yield Finding("backend", backend)


def memory(device: Device) -> Iterator[Finding]:
    """What the device holds, and which memories it reaches."""
    stats = device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        room = "gives no figures of its memory"
        advice = "" if device.platform == "cpu" else "Give gpu_bytes: it cannot be guessed."
    else:
        limit, in_use = stats["bytes_limit"], stats.get("bytes_in_use", 0)
        room = f"{format_bytes(limit)} for JAX, {format_bytes(in_use)} in use"
        advice = ""
    yield Finding(f"device {device.id}", f"{device.device_kind}: {room}", advice)
    kinds = memory_kinds(device)
    missing = sorted({"device", "pinned_host"} - kinds)
    advice = f"jturnip needs {' and '.join(missing)} memory, and cannot run here."
    yield Finding(
        f"memories {device.id}", ", ".join(sorted(kinds)), advice if missing else ""
    )


def pages(
    environ: Mapping[str, str],
    kernel: pathlib.Path = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled"),
    libc: tuple[str, str] | None = None,
) -> Iterator[Finding]:
    """Where the CPU is the device: whether large arrays get large pages of memory."""
    name, version = platform.libc_ver() if libc is None else libc
    try:
        chosen = re.search(r"\[(\w+)\]", kernel.read_text(encoding="utf-8"))
    except OSError:
        chosen = None
    if name != "glibc" or _numbers(version) < FIRST_WITH_HUGE_PAGES or chosen is None:
        return
    asked = HUGE_PAGES in environ.get(TUNABLES, "")
    advice = ""
    if chosen[1] == "madvise" and not asked:
        advice = (
            f"Arrays of tens of MiB come in pages of 4 KiB each time they are made, which"
            f" may take as long as computing them. Before Python starts, set"
            f" {TUNABLES}={HUGE_PAGES}=1; `jax.jit` gains by it, too."
        )
    found = f"large ones of the kernel: {chosen[1]}{', asked for' if asked else ''}"
    yield Finding("pages", found, advice)


def memory_kinds(device: Device) -> set[str]:
    """The names of the memories a device reaches."""
    return {each.kind for each in device.addressable_memories()}


def allocator(environ: Mapping[str, str]) -> Iterator[Finding]:
    """JAX's own allocator on the GPU: which, of how much, and taken when."""
    name = environ.get(ALLOCATOR, "default").lower()
    explained = {
        "default": "bfc, which cannot move what is in its way",
        "bfc": "bfc, which cannot move what is in its way",
        "cuda_async": "cuda_async, which remaps what is free into one piece",
    }.get(name, name)
    use_another = f"Unset {ALLOCATOR}, or set it to cuda_async."
    advice = {
        "platform": f"Every array waits for the driver and none is counted. {use_another}",
        "vmm": f"It does not say what is in use, so nothing can be checked. {use_another}",
    }.get(name, "")
    fraction = _fraction(environ)
    compacts = name in ("cuda_async", "vmm", "platform")
    if fraction > MOST_OF_THE_CARD and not compacts:
        advice = (
            f"With this much of the card, fragments can fail a run that fits: set "
            f"{ALLOCATOR}=cuda_async, or keep gpu_bytes a tenth below the limit."
        )
    yield Finding("allocator", explained, advice)

    preallocates = environ.get(PREALLOCATE, "true") not in ("false", "False", "0")
    share = f"{fraction:.0%} of the card"
    advice = ""
    if not preallocates and not compacts:
        advice = f"An arena that grows piece by piece fragments: unset {PREALLOCATE}."
    elif FRACTION not in environ and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environ:
        advice = f"The rest stays idle unless you set {FRACTION}, for example to 0.9."
    when = "when JAX starts" if preallocates else "as needed"
    yield Finding("preallocation", f"{share}, taken {when}", advice)


def pinned_limit(environ: Mapping[str, str], host_bytes: int | None) -> Iterator[Finding]:
    """How much host memory JAX may pin, against how much there is."""
    limit = float(environ.get(PINNED_LIMIT, PINNED_LIMIT_DEFAULT)) * GIB
    by = "set" if PINNED_LIMIT in environ else "JAX's default"
    advice = ""
    if host_bytes is not None and limit > host_bytes:
        advice = (
            f"More than is available: what does not fit is killed, not refused. Before "
            f"Python starts, set {PINNED_LIMIT}={int(host_bytes * 0.9 / GIB)}."
        )
    elif host_bytes is not None and limit < 0.8 * host_bytes:
        advice = (
            f"More host memory could be used: before Python starts, set "
            f"{PINNED_LIMIT}={int(host_bytes * 0.9 / GIB)}."
        )
    yield Finding("pinned host limit", f"{format_bytes(limit)} ({by})", advice)


def host_memory(available: int | None) -> Iterator[Finding]:
    """How much room there is to offload into."""
    if available is None:
        yield Finding("host memory", "unknown on this system")
    else:
        advice = "Little to offload into; close what else is running." * (available < GIB)
        yield Finding("host memory", f"{format_bytes(available)} available", advice)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Median bytes per second between device and pinned host memory."""

    nbytes: int  # in one transfer
    h2d: float
    d2h: float
    both: float  # the sum of both directions, when both are used at once


def link(device: Device) -> Iterator[Finding]:
    """How fast bytes move each way, and both at once."""
    speeds = [measure_link(device, nbytes) for nbytes in LINK_SIZES]
    slow = device.platform != "cpu" and min(speeds[-1].h2d, speeds[-1].d2h) < SLOW_LINK
    advice = "Slow for a GPU: look at its slot with `nvidia-smi -q -d PCIE`." * slow
    for direction in ("h2d", "d2h", "both"):
        figures = (
            f"{getattr(each, direction) / 1e9:.2f} GB/s at {format_bytes(each.nbytes)}"
            for each in speeds
        )
        last = direction == "both"
        yield Finding(f"link {direction}", ", ".join(figures), advice if last else "")


def measure_link(device: Device, nbytes: int) -> LinkSpeed:
    """Times `device_put` between the two memories, which is how jturnip moves bytes."""
    on_device = SingleDeviceSharding(device, memory_kind="device")
    on_host = SingleDeviceSharding(device, memory_kind="pinned_host")
    here = jax.block_until_ready(jax.device_put(np.ones(nbytes, np.uint8), on_device))
    there = jax.block_until_ready(jax.device_put(here, on_host))
    h2d = _median_seconds(lambda: jax.device_put(there, on_device))
    d2h = _median_seconds(lambda: jax.device_put(here, on_host))
    both = _median_seconds(
        lambda: (jax.device_put(there, on_device), jax.device_put(here, on_host))
    )
    return LinkSpeed(nbytes, nbytes / h2d, nbytes / d2h, 2 * nbytes / both)


def _median_seconds(move: Callable[[], object]) -> float:
    jax.block_until_ready(move())  # the first may have to get its memory
    times: list[float] = []
    until = time.perf_counter() + LINK_SECONDS
    while len(times) < LINK_REPEATS and (not times or time.perf_counter() < until):
        begin = time.perf_counter()
        jax.block_until_ready(move())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _fraction(environ: Mapping[str, str]) -> float:
    older = environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", FRACTION_DEFAULT)
    return float(environ.get(FRACTION, older))


def _jturnip_version() -> Finding:
    version = _version("jturnip")
    return Finding("jturnip", version or "run from its source, not installed")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
