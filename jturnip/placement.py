"""Where arrays lie: of arguments, of what a device has free, of what a host can hold."""

import collections
import contextlib
import enum
import itertools
import os
import pathlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jturnip import compat
from jturnip.compat import Device
from jturnip.errors import UnsupportedError
from jturnip.units import format_bytes


# What JAX's pool of pinned memory for a GPU takes at most, in GiB.
PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
PINNED_LIMIT_DEFAULT = 64

# Arguments that are not JAX arrays and smaller than this start on the device.
SMALL = 64 * 1024
# Device bytes that are ours and in no plan: the slots' numbers and the marks' results.
BOOKKEEPING = 4096
# The same on a GPU, where more runs are in flight and the numbers that tasks take stay.
_GPU_BOOKKEEPING = 64 * 1024
# Of what is ours, what the marks of a run take while none is in flight.
MARKS = 1024


class Whose(enum.Enum):
    """Who holds an argument's bytes during a call."""

    # The caller keeps a device array: it takes its bytes during the whole call.
    CALLER_DEVICE = "caller's, on the device"
    DONATED_DEVICE = "donated, on the device"
    CALLER_HOST = "caller's, in host memory"
    DONATED_HOST = "donated, in host memory"
    # A small numpy array or a Python number: put on the device when the call begins.
    OURS_DEVICE = "small"
    # A numpy array: reached through a pinned copy made when the call begins.
    OURS_HOST = "numpy"

    @property
    def on_host(self) -> bool:
        """Whether a call finds it in host memory."""
        return self in (Whose.CALLER_HOST, Whose.DONATED_HOST, Whose.OURS_HOST)

    @property
    def ours(self) -> bool:
        """Whether the array is made when a call begins."""
        return self in (Whose.OURS_DEVICE, Whose.OURS_HOST)

    @property
    def donated(self) -> bool:
        """Whether its memory may be re-used."""
        return self in (Whose.DONATED_DEVICE, Whose.DONATED_HOST)


def sharding(device: Device, on_host: bool) -> jax.sharding.Sharding:
    """One of the two memories of a device."""
    kind = "pinned_host" if on_host else "device"
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


def is_on_host(array: jax.Array) -> bool:
    """Whether an array is in host memory."""
    return array.sharding.memory_kind not in (None, "device")


def reused_arguments(
    arguments: Sequence[tuple[Any, Whose]],
    results: Sequence[Any],
    first: Collection[int] = (),
) -> dict[int, int]:
    """Which result takes the place of which donated host argument.

    Args:
      arguments: type (anything with a shape and a dtype) and holder of each.
      results: type of each, or None for one that is not to be matched.
      first: positions of results that choose before the others.

    Returns:
      Position of a result → that of its argument: the first of the same shape and dtype
      that no earlier result took.
    """
    offers: dict[tuple[Any, Any], list[int]] = {}
    for i, (t, holder) in reversed(list(enumerate(arguments))):
        if holder is Whose.DONATED_HOST:
            offers.setdefault((tuple(t.shape), t.dtype), []).append(i)
    found = {}
    for i, t in sorted(enumerate(results), key=lambda result: result[0] not in first):
        offered = offers.get((tuple(t.shape), t.dtype)) if t is not None else None
        if offered:
            found[i] = offered.pop()
    return found


def device_of(leaf: Any) -> Device | None:
    """The one device of an array, None for what is no JAX array."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    devices = sharding.device_set
    if len(devices) > 1:
        raise UnsupportedError(
            f"an argument of shape {leaf.shape} is spread over {len(devices)} devices;"
            " jturnip runs on one device. Put it on one with jax.device_put first."
        )
    return next(iter(devices))


def whose(leaf: Any, donated: bool) -> Whose:
    """Classifies one argument; a struct without a sharding counts as a numpy array."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None and isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if sharding.memory_kind in (None, "device"):
            return Whose.DONATED_DEVICE if donated else Whose.CALLER_DEVICE
        return Whose.DONATED_HOST if donated else Whose.CALLER_HOST
    if isinstance(leaf, jax.ShapeDtypeStruct):
        large = leaf.size * _itemsize(leaf.dtype) >= SMALL
        return Whose.OURS_HOST if large else Whose.OURS_DEVICE
    large = isinstance(leaf, np.ndarray) and leaf.nbytes >= SMALL
    return Whose.OURS_HOST if large else Whose.OURS_DEVICE


def _itemsize(dtype: Any) -> int:
    return getattr(dtype, "itemsize", 4)


def free_device_bytes(device: Device) -> int:
    """What `gpu_bytes=None` means: the device's free bytes, less a reserve of a tenth.

    A backend without allocator figures (the CPU's) has what the host has.
    """
    unused = unused_device_bytes(device)
    return int((host_memory_available() if unused is None else unused) * 0.9)


def unused_device_bytes(device: Device) -> int | None:
    """What the device has left; None for a backend without allocator figures."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def arena_bytes(gpu_bytes: int, platform: str) -> int:
    """The part of the budget that plans may use.

    The rest covers what no plan can see: our own few bytes and, on a GPU, an eighth of the
    budget for its allocator, which hands out a free block whole if it is less than twice as
    large as asked: most functions on an H100 took 0.98 to 1.11 times their account, one of
    few bytes 1.24 (XLA's tsl/framework/bfc_allocator.cc).
    """
    if platform == "cpu":
        return max(0, gpu_bytes - BOOKKEEPING)
    return max(0, gpu_bytes - _GPU_BOOKKEEPING - gpu_bytes // 8)


def gpu_bytes_for(arena: int, platform: str) -> int:
    """The budget whose arena holds `arena` bytes; the inverse of `arena_bytes`."""
    asked = arena + BOOKKEEPING
    while arena_bytes(asked, platform) < arena:
        asked += max(1, arena - arena_bytes(asked, platform))
    return asked


@dataclass(frozen=True, slots=True)
class Budget:
    """What is left of `gpu_bytes` for a part of a function, in bytes."""

    gpu_bytes: int
    # What others hold on the device meanwhile.
    taken: int = 0

    @property
    def room(self) -> int:
        """What the part may use. Below zero where the others alone are too much."""
        return self.gpu_bytes - self.taken

    def beside(self, nbytes: int) -> "Budget":
        """The same where others hold `nbytes` more."""
        return Budget(self.gpu_bytes, self.taken + nbytes)

    def arena(self, device: Device) -> int:
        """The part of the room that plans may use."""
        return arena_bytes(self.room, device.platform)

    def needed(self, arena: int, device: Device) -> int:
        """The `gpu_bytes` with which the arena would have so many bytes."""
        return gpu_bytes_for(arena, device.platform) + self.taken


def host_memory_available() -> int:
    """Bytes of RAM that programs can still take."""
    available = available_host_bytes()
    if available is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available


def available_host_bytes(root: pathlib.Path = pathlib.Path("/")) -> int | None:
    """Free and reclaimable host memory, within the container's limit; None if unknown."""
    try:
        meminfo = (root / "proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    if match is None:
        return None
    free = [int(match[1]) * 1024]
    groups = root / "sys/fs/cgroup"
    for folder, limit, used, cached in (  # version 2, then 1
        (groups, "memory.max", "memory.current", "inactive_file"),
        (
            groups / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        try:
            most = int((folder / limit).read_text())
            taken = int((folder / used).read_text())
        except (OSError, ValueError):  # no such group, or a limit of "max"
            continue
        free.append(most - max(0, taken - _cached(folder / "memory.stat", cached)))
    return max(0, min(free))


def _cached(path: pathlib.Path, name: str) -> int:
    """Bytes of files that a group has in memory, and gives up when that is needed."""
    with contextlib.suppress(OSError):
        match = re.search(rf"^{name} (\d+)$", path.read_text(), re.MULTILINE)
        return int(match[1]) if match else 0
    return 0


def host_bytes_limit(device: Device, ours: int = 0, theirs: int = 0) -> tuple[int, str]:
    """What pinned host copies may take beside a function's arguments, and why no more.

    Args:
      device: where the function runs.
      ours: bytes of arguments that a call copies there: none for a CPU, which takes numpy's
        memory as it is.
      theirs: bytes of those that the caller has there.
    """
    limits = [(host_memory_available(), ours, "the memory that the machine has available")]
    if device.platform != "cpu":
        pool = int(float(os.environ.get(PINNED_LIMIT, PINNED_LIMIT_DEFAULT)) * 2**30)
        why = "JAX's pinned pool (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB)"
        limits.append((pool, ours + theirs, why))
    limit, taken, why = min(limits, key=lambda each: each[0] - each[1])
    why += f" is {format_bytes(limit)}"
    if taken:
        why += f", of which arguments take {format_bytes(taken)}"
    return limit - taken, why


@dataclass(frozen=True, slots=True)
class Arguments:
    """How a signature's flat arguments are held, what to call them, and who reads them."""

    whose: tuple[Whose, ...]
    names: tuple[str, ...]
    device: Device
    # Whether `device` was chosen by committed arguments.
    committed: bool
    # Options of XLA's compiler, by name.
    compiler_options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where results are to lie."""

    # The sharding that the user asks for each, or None; empty where nothing is asked.
    shardings: tuple[Any, ...] = ()
    # Whether each must be in host memory, or on the device, or None; empty likewise.
    on_host: tuple[bool | None, ...] = ()
    # The mesh of one device that arguments are on: results are then on it too.
    mesh: Any = None
    # Results that are brought back to the device, their bytes, and whether they are then
    # committed to it.
    back: tuple[int, ...] = ()
    back_bytes: int = 0
    committed: bool = False

    def places(self, on_host: bool) -> frozenset[int]:
        """Positions of results that must end in host memory, or on the device."""
        asked = (
            None if s is None else s.memory_kind not in (None, "device")
            for s in self.shardings
        )
        return frozenset(
            i
            for places in (asked, self.on_host)
            for i, there in enumerate(places)
            if there is on_host
        )

    @property
    def is_nothing(self) -> bool:
        """Whether every result may be as it comes."""
        return self.mesh is None and not any(self.shardings) and True not in self.on_host


@dataclass(frozen=True, slots=True)
class Returned:
    """How results belong together, by position."""

    # Of each, all lie in one memory: the elements of a tuple that is returned, or all.
    groups: tuple[frozenset[int], ...] = ()
    # (result, argument) where the one looks like the other: as for a training state, the
    # next call may be given the one for the other.
    again: tuple[tuple[int, int], ...] = ()
    # Those that may lie anywhere: they have what room the others leave.
    anywhere: frozenset[int] = frozenset()

    @classmethod
    def of(cls, out_info: Any, args_info: Any, placed: Collection[int]) -> "Returned":
        """Of a function's trees of types; results at `placed` are where the user says."""
        args, kwargs = args_info
        elements = out_info if type(out_info) is tuple else (out_info,)
        groups = [
            frozenset(range(at, at + len(jax.tree.leaves(tree)))).difference(placed)
            for at, tree in _with_positions(elements)
        ]
        given = [*args, *(kwargs[name] for name in sorted(kwargs))]  # as JAX flattens them
        # Arguments that look like all that is returned, then like an element of it, then
        # single arrays: one pair too many does no more than send a result to the host.
        again: dict[int, int] = {}
        taken: set[int] = set()
        levels = (
            ([(0, out_info)], _with_positions(given)),
            (_with_positions(elements), _with_positions(given)),
            tuple(_with_positions(jax.tree.leaves(tree)) for tree in (out_info, given)),
        )
        for results, arguments in levels:
            alike: dict[Any, collections.deque[int]] = {}
            for at, tree in arguments:
                alike.setdefault(_looks(tree), collections.deque()).append(at)
            for at, tree in results:
                own = _looks(tree)
                count = range(len(own[1]))
                firsts = alike.get(own, ())
                if not again.keys().isdisjoint(at + k for k in count):
                    continue
                while firsts:
                    first = firsts.popleft()
                    if taken.isdisjoint(first + k for k in count):
                        again.update((at + k, first + k) for k in count)
                        taken.update(first + k for k in count)
                        break
        return cls(tuple(groups), tuple(again.items()))


# That any result may lie anywhere.
NOTHING_KNOWN = Returned()


def _with_positions(trees: Sequence[Any]) -> list[tuple[int, Any]]:
    """Trees with the position of the first leaf of each."""
    counts = [len(jax.tree.leaves(tree)) for tree in trees]
    return list(zip(itertools.accumulate([0, *counts]), trees, strict=False))


def _looks(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def broadcast_shardings(prefix: Any, tree: Any, what: str) -> list[Any]:
    """A sharding, or None, for every leaf of a tree, from a prefix of it.

    Raises:
      ValueError: the prefix does not fit the tree.
      UnsupportedError: a sharding is over several devices.
    """
    is_none = lambda node: node is None
    try:
        found = jax.tree.leaves(jax.tree.broadcast(prefix, tree, is_none), is_leaf=is_none)
    except ValueError as error:
        raise ValueError(
            f"{what} does not fit the tree of what it is for: {error}"
        ) from None
    for sharding in found:
        if sharding is None:
            continue
        if not isinstance(sharding, jax.sharding.Sharding):
            raise UnsupportedError(
                f"{what} has {sharding!r}; jturnip takes jax.sharding.Sharding objects."
            )
        if len(sharding.device_set) > 1:
            raise UnsupportedError(
                f"{what} spreads an array over {len(sharding.device_set)} devices; jturnip"
                " runs on one device."
            )
    return found


def structs_of(shardings: Any) -> list[jax.ShapeDtypeStruct]:
    """Something to read the device of each sharding in a tree from."""
    return [
        jax.ShapeDtypeStruct((), np.float32, sharding=s)
        for s in jax.tree.leaves(shardings)
        if isinstance(s, jax.sharding.Sharding) and len(s.device_set) == 1
    ]


def mesh_of(leaves: Sequence[Any]) -> Any | None:
    """The mesh of one device that arguments are on, if they are on one."""
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            return sharding.mesh
    return None


def common_device(leaves: Sequence[Any]) -> tuple[Device, bool]:
    """The device that a call runs on, and whether its arguments chose it.

    Raises:
      UnsupportedError: for arguments committed to different devices.
    """
    chosen: dict[Device, None] = {}
    for leaf in leaves:
        device = device_of(leaf)
        if device is not None and getattr(leaf, "committed", True):
            chosen[device] = None
    if len(chosen) > 1:
        raise UnsupportedError(
            f"arguments lie on different devices: {', '.join(map(str, chosen))}; jturnip"
            " runs on one. Put them on one with jax.device_put first."
        )
    if chosen:
        return next(iter(chosen)), True
    return compat.default_device(), False
