"""Where arrays lie: of arguments, of what a device has free, of what a host can hold."""

import enum
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jturnip import compat
from jturnip.compat import Device
from jturnip.errors import UnsupportedError


Tree = TypeVar("Tree")

# Arguments that are not JAX arrays and smaller than this start on the device.
SMALL = 64 * 1024
# Device bytes that are ours and in no plan: the slots' numbers and the marks' results.
BOOKKEEPING = 4096


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


def host(tree: Tree) -> Tree:
    """Copies every array of a tree to pinned host memory.

    Args:
      tree: arrays of any kind: JAX arrays in any memory, numpy arrays, Python numbers.

    Returns:
      The same tree of JAX arrays with memory kind `pinned_host`, on the device (or the
      default device) each array was on. Nothing is shared with what was given.

    Raises:
      UnsupportedError: for an array spread over several devices.
    """

    def copy(leaf: Any) -> jax.Array:
        device = device_of(leaf) or compat.default_device()
        pinned = sharding(device, on_host=True)
        if whose(leaf, False) is Whose.CALLER_DEVICE:
            return jax.device_put(leaf, pinned)
        is_number = isinstance(leaf, bool | int | float | complex)
        if is_number or (isinstance(leaf, jax.Array) and _is_more_than_numpy(leaf)):
            # They are small, so they may pass through the device.
            there = jax.device_put(leaf, sharding(device, on_host=False))
            return jax.device_put(there, pinned)
        # A copy of ours first: the CPU backend takes numpy's memory as it is.
        return jax.device_put(np.array(leaf, copy=True), pinned)

    return jax.block_until_ready(jax.tree.map(copy, tree))


def _is_more_than_numpy(array: jax.Array) -> bool:
    """Whether it is a key or weakly typed, which numpy's arrays never are."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.extended)
    return is_key or bool(getattr(array, "weak_type", False))


# id of a closed-over array → its copy in its place, as long as a program has that.
_PLACED: "weakref.WeakValueDictionary[Any, jax.Array]" = weakref.WeakValueDictionary()


def placed_for_good(array: Any, device: Device) -> jax.Array:
    """A closed-over array in its place: on the device if it is small, else on the host.

    Numpy's memory is not made for transfers, so it is copied once, for all programs that
    close over it, and not in each run. The programs must hold `array`.
    """
    key = id(array), device
    found = _PLACED.get(key)
    if found is None:
        found = _PLACED[key] = in_its_place(array, whose(array, False), device)
    return found


def sharding(device: Device, on_host: bool) -> jax.sharding.Sharding:
    """One of the two memories of a device."""
    kind = "pinned_host" if on_host else "device"
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


def copy(array: jax.Array) -> jax.Array:
    """Another array of the same contents in the same place."""
    return host(array) if is_on_host(array) else jnp.copy(array)


def is_on_host(array: jax.Array) -> bool:
    """Whether an array is in host memory."""
    return array.sharding.memory_kind not in (None, "device")


def in_its_place(leaf: Any, holder: Whose, device: Device) -> jax.Array:
    """An argument as a call finds it: one that is ours is put where the plan has it."""
    if isinstance(leaf, jax.Array) and not holder.ours:
        return leaf
    return jax.device_put(leaf, sharding(device, holder.on_host))


def reused_arguments(
    arguments: Sequence[tuple[Any, Whose]], results: Sequence[Any]
) -> dict[int, int]:
    """Which result takes the place of which donated host argument.

    Args:
      arguments: type (anything with a shape and a dtype) and holder of each.
      results: type of each, or None for one that is not to be matched.

    Returns:
      Position of a result → that of its argument: the first of the same shape and dtype
      that no earlier result took.
    """
    offers: dict[tuple[Any, Any], list[int]] = {}
    for i, (t, holder) in reversed(list(enumerate(arguments))):
        if holder is Whose.DONATED_HOST:
            offers.setdefault((tuple(t.shape), t.dtype), []).append(i)
    found = {}
    for i, t in enumerate(results):
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
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return int(host_memory_available() * 0.9)
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return int(free * 0.9)


def arena_bytes(gpu_bytes: int, device: Device) -> int:
    """The part of the budget that plans may use.

    The rest covers what no plan can see: our own few bytes and, where an allocator rounds
    (a GPU's hands out blocks up to twice as large as asked), a fiftieth of the budget.
    """
    rounding = gpu_bytes // 50 if device.platform != "cpu" else 0
    return max(0, gpu_bytes - BOOKKEEPING - rounding)


def gpu_bytes_for(arena: int, device: Device) -> int:
    """The budget whose arena holds `arena` bytes; the inverse of `arena_bytes`."""
    asked = arena + BOOKKEEPING
    while arena_bytes(asked, device) < arena:
        asked += max(1, arena - arena_bytes(asked, device))
    return asked


def host_memory_available() -> int:
    """Bytes of RAM that programs can still take."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_bytes_limit(device: Device) -> tuple[int, str]:
    """What pinned host copies may take, and why no more."""
    available = host_memory_available()
    if device.platform == "cpu":
        return available, "the memory that the machine has available"
    pool = float(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64")) * 2**30
    if pool < available:
        return int(pool), "JAX's pinned pool (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB)"
    return available, "the memory that the machine has available"


@dataclass(frozen=True, slots=True)
class Arguments:
    """How a signature's flat arguments are held, and what to call them."""

    whose: tuple[Whose, ...]
    names: tuple[str, ...]
    device: Device
    # Whether `device` was chosen by committed arguments.
    committed: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where the user asks results to lie."""

    # A sharding for each result, or None; empty where nothing is asked.
    shardings: tuple[Any, ...] = ()
    # The mesh of one device that arguments are on: results are then on it too.
    mesh: Any = None
    # Results that are brought back to the device, their bytes, and whether they are then
    # committed to it.
    back: tuple[int, ...] = ()
    back_bytes: int = 0
    committed: bool = False

    def places(self, on_host: bool) -> frozenset[int]:
        """Positions of results that must end in host memory, or on the device."""
        return frozenset(
            i
            for i, s in enumerate(self.shardings)
            if s is not None and (s.memory_kind not in (None, "device")) == on_host
        )

    def finish(self, results: list[Any]) -> list[Any]:
        """Results where they are wanted; nothing moves that is there already."""
        for i in self.back:
            there = sharding(device_of(results[i]), on_host=False)
            moved = jax.block_until_ready(compat.copy_to(results[i], there))
            results[i] = compat.settled(moved, self.committed)
        for i, result in enumerate(results):
            wanted = self.shardings[i] if self.shardings else None
            if wanted is None and self.mesh is not None:
                kind = result.sharding.memory_kind
                wanted = jax.sharding.NamedSharding(
                    self.mesh, jax.sharding.PartitionSpec(), memory_kind=kind
                )
            # Also where it is there already, since what is asked for is committed.
            if wanted is not None:
                results[i] = placed(result, wanted)
        return results

    @property
    def is_nothing(self) -> bool:
        """Whether every result may be as it comes."""
        return self.mesh is None and not any(self.shardings)


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


def placed(leaf: Any, where: Any) -> Any:
    """An argument or a result where the user says that it is, committed to it."""
    if where is None:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak, sharding=where)
    if isinstance(leaf, jax.Array) and leaf.sharding == where and leaf.committed:
        return leaf
    return jax.device_put(leaf, where)


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
