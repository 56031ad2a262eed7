"""The only place that makes arrays while a function is compiled or called.

What is on the device is in the account of a call: a plan's slots, and what `device_bytes`
says of arrays that are in no plan. So that nothing else is there, everything goes through
this module or is the result of a task's executable (a test sees to both).
"""

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jturnip import compat, placement
from jturnip.compat import Device
from jturnip.placement import Wanted, Whose, is_on_host, sharding
from jturnip.units import padded


Tree = TypeVar("Tree")

# XLA's CPU client shares numpy's memory if it begins at a multiple of this.
ALIGNMENT = 64
# So many zeros are quicker made by a device, which compiles that, than copied to it.
_MANY = 1 << 20


def host(tree: Tree) -> Tree:
    """Copies every array of a tree to pinned host memory.

    Args:
      tree: arrays of any kind: JAX arrays in any memory, numpy arrays, Python numbers. What
        else modules of some libraries have, names and functions, stays as it is.

    Returns:
      The same tree of JAX arrays with memory kind `pinned_host`, on the device (or the
      default device) each array was on. Nothing is shared with what was given, and no more
      is made than that.

    Raises:
      UnsupportedError: for an array spread over several devices.
    """

    def copied(leaf: Any) -> Any:
        if not _is_numbers(leaf):
            return leaf
        device = placement.device_of(leaf) or compat.default_device()
        pinned = sharding(device, on_host=True)
        is_number = isinstance(leaf, bool | int | float | complex)
        if is_number or (isinstance(leaf, jax.Array) and _is_more_than_numpy(leaf)):
            # They are small, so they may pass through the device.
            leaf = jax.device_put(leaf, sharding(device, on_host=False))
        if isinstance(leaf, jax.Array) and not is_on_host(leaf):
            return jax.device_put(leaf, pinned)
        # The contents in numpy's hands: the CPU backend would take them as they are.
        contents = view(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)
        return _own_copy(contents, pinned)

    return jax.block_until_ready(jax.tree.map(copied, tree))


def _is_numbers(leaf: Any) -> bool:
    """Whether a leaf is an array, a number, or gives an array if it is asked."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        return True
    return hasattr(type(leaf), "__jax_array__") or hasattr(type(leaf), "__array__")


def device(tree: Tree) -> Tree:
    """Brings every array of a tree to the device: the way back from `jturnip.host`.

    JAX's own operations take arrays of one memory. So what a function in a budget gave back
    in `pinned_host`, gradients for example, is brought back before stock JAX or optax
    compute with it, where there is room for it; or they compute with it in a function that
    is under `jturnip.jit` itself.

    Args:
      tree: arrays of any kind: JAX arrays in any memory, numpy arrays, Python numbers. What
        else there is in it stays as it is.

    Returns:
      The same tree of JAX arrays with memory kind `device`. Arrays that are there already
      are the same; as `jax.device_put`, it does not wait for the others.

    Raises:
      UnsupportedError: for an array spread over several devices.
    """

    def there(leaf: Any) -> Any:
        if not _is_numbers(leaf):
            return leaf
        at = placement.device_of(leaf) or compat.default_device()
        if isinstance(leaf, jax.Array) and not is_on_host(leaf):
            return leaf
        return jax.device_put(leaf, sharding(at, on_host=False))

    return jax.tree.map(there, tree)


def on_device(leaves: Sequence[Any]) -> list[Any]:
    """Leaves, also traced ones, with those in host memory brought to the device."""
    space = jax.memory.Space
    return [
        jax.device_put(leaf, space.Device)
        if isinstance(leaf, jax.Array) and _space(leaf) == space.Host
        else leaf
        for leaf in leaves
    ]


def typed_as(cotangent: Any, aval: Any) -> Any:
    """A cotangent; one that is traced with the memory of its argument as part of its type,
    with which JAX compares it."""
    space = jax.memory.Space.Host
    if isinstance(cotangent, Tracer) and aval.memory_space == space:
        return jax.device_put(cotangent, space)
    return cotangent


def _space(array: Any) -> Any:
    if isinstance(array, Tracer):
        return getattr(jax.typeof(array), "memory_space", None)
    return jax.memory.Space.Host if is_on_host(array) else jax.memory.Space.Device


def _own_copy(contents: np.ndarray, where: jax.sharding.Sharding) -> jax.Array:
    """Numpy's contents in memory of our own, held once.

    The CPU backend takes numpy's memory as it is where it begins at a whole cache line,
    even if asked not to, and copies it elsewhere. So it is given a copy that it will take.
    """
    dtype = jax.dtypes.canonicalize_dtype(contents.dtype)
    if is_on_cpu(where):
        memory = empty(contents.shape, dtype)
        np.copyto(memory, contents, casting="unsafe")
        return jax.device_put(memory, where)
    # Elsewhere numpy's own memory is read, which is the user's to change after this.
    return jax.block_until_ready(jax.device_put(contents, where))


def is_on_cpu(where: jax.sharding.Sharding) -> bool:
    """Whether it is of the CPU backend, whose device memory is the host's."""
    return next(iter(where.device_set)).platform == "cpu"


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory of numpy's that the CPU backend takes as it is."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)


def _is_more_than_numpy(array: jax.Array) -> bool:
    """Whether it is a key or weakly typed, which numpy's arrays never are."""
    return _is_key(array.dtype) or bool(getattr(array, "weak_type", False))


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def lent(array: jax.Array, where: jax.sharding.Sharding) -> jax.Array:
    """An array on the CPU, for as long as the one lives: not copied where that lies in host
    memory."""
    if is_on_host(array) and not _is_more_than_numpy(array):
        return from_numpy(view(array), where)
    return jax.device_put(array, where)


def view(array: jax.Array) -> np.ndarray:
    """The contents of an array in host memory, not copied where that can be helped; of keys
    their data, with dimensions more at the end.

    Keeps the memory alive, even if the array is deleted.
    """
    data = jax.random.key_data(array) if _is_key(array.dtype) else array
    return np.asarray(data.addressable_data(0))


def room_for(struct: jax.ShapeDtypeStruct) -> np.ndarray:
    """Memory of numpy's for the contents of an array."""
    if _is_key(struct.dtype):
        struct = jax.eval_shape(jax.random.key_data, struct)
    return empty(struct.shape, struct.dtype)


def with_contents(
    contents: np.ndarray, dtype: Any, where: jax.sharding.Sharding
) -> jax.Array:
    """An array of contents that `view` gave, or that were put in `room_for` it."""
    array = from_numpy(contents, where)
    return jax.random.wrap_key_data(array, impl=_impl(dtype)) if _is_key(dtype) else array


@functools.lru_cache
def _impl(dtype: Any) -> Any:
    """What makes keys of a type."""
    found: list[Any] = []
    struct = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), struct)
    return found[0]


class ClosedOver:
    """A closed-over array as programs have it: on the device if it is small, else on the
    host.

    As under `jax.jit`, changing an array of numpy's later changes no program that is there
    already. So its contents are copied, once for all programs that close over it while they
    stay what they are.
    """

    __slots__ = ("__weakref__", "_array", "_contents", "_where")

    def __init__(self, array: Any, device: Device):
        holder = placement.whose(array, False)
        self._where = sharding(device, holder.on_host)
        # Of a small one: what to put on the device again, when it has left.
        self._contents: np.ndarray | None = None
        self._array: Any = array
        if holder.on_host and holder.ours:
            self._array = _own_copy(np.asarray(array), self._where)
        elif holder.ours:
            self._contents = np.array(array)
            self._array = None

    @property
    def array(self) -> jax.Array:
        """The array in its place."""
        if self._array is None:
            assert self._contents is not None
            self._array = from_numpy(self._contents, self._where)
        return self._array

    def leave(self) -> None:
        """Frees what was put on the device."""
        if self._contents is not None:
            self._array = None

    def is_still(self, array: Any) -> bool:
        """Whether this is what the array holds now."""
        copied = self._contents
        if copied is None:
            copied = np.asarray(self._array)
        contents = np.asarray(array)
        same = (copied.shape, copied.dtype) == (contents.shape, contents.dtype)
        as_bytes = lambda a: np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        return same and np.array_equal(as_bytes(copied), as_bytes(contents))


# (id of a closed-over array of numpy's, device) → what programs have, while one has it.
_CLOSED_OVER: "weakref.WeakValueDictionary[Any, ClosedOver]"
_CLOSED_OVER = weakref.WeakValueDictionary()


def closed_over(array: Any, device: Device) -> ClosedOver:
    """A closed-over array for a program that is made now."""
    if not placement.whose(array, False).ours:
        return ClosedOver(array, device)
    key = id(array), device
    found = _CLOSED_OVER.get(key)
    if found is None or not found.is_still(array):
        found = _CLOSED_OVER[key] = ClosedOver(array, device)
    return found


def copy(array: jax.Array) -> jax.Array:
    """Another array of the same contents in the same place."""
    return host(array) if is_on_host(array) else jnp.copy(array)


def moved(array: jax.Array, on_host: bool) -> jax.Array:
    """A copy of an array in the other memory of its device; committed, typed as what it is.

    JAX's transfer leaves an array that does not know which memory it is in, and XLA ends
    the process where it meets one that is not committed either.
    """
    there = sharding(placement.device_of(array), on_host)
    with jax.transfer_guard("allow"):
        return compat.settled(compat.copy_to(array, there), committed=True)


def transferred(array: Any, where: jax.sharding.Sharding) -> jax.Array:
    """What a transfer engine does: the same, as quick as can be, also from a view of
    numpy's. For arrays that only tasks and transfers see; who asks has allowed transfers
    for all of them, which takes as long as one takes to begin."""
    if type(array) is np.ndarray:
        return compat.put(array, where)
    return compat.copy_to(array, where)


def from_numpy(contents: np.ndarray, where: jax.sharding.Sharding) -> jax.Array:
    """An array of numpy's contents, which nobody may change any more.

    It is ours, and no transfer that the user may have forbidden.
    """
    with jax.transfer_guard("allow"):
        return compat.put(contents, where)


def zeros(
    struct: jax.ShapeDtypeStruct, where: jax.sharding.Sharding, given_up: bool = False
) -> jax.Array:
    """Zeros, or keys of zeros, to try an executable or a copy out: large ones made by the
    device where it is not the CPU, rather than copied to it.

    XLA makes results on the device only: zeros in host memory are numpy's. So are those on
    a CPU, which takes numpy's memory as it is; but an executable that writes over it would
    copy it first.

    Args:
      struct: shape and dtype.
      where: the device and its memory.
      given_up: whether an executable is to write over them.
    """
    if given_up and is_on_cpu(where):  # a copy, as a reload gives
        on_host = zeros(struct, where.with_memory_kind("pinned_host"))
        return moved(on_host, on_host=False)
    is_large = struct.size >= _MANY and not _is_key(struct.dtype)
    if is_large and where.memory_kind == "device" and not is_on_cpu(where):
        with jax.transfer_guard("allow"):
            return jnp.zeros(struct.shape, struct.dtype, device=where)
    contents = room_for(struct)
    contents.fill(0)
    return with_contents(contents, struct.dtype, where)


def in_their_places(
    leaves: Sequence[Any], holders: Sequence[Whose], device: Device
) -> list[Any]:
    """Arguments as a call finds them: what is ours is put where the plan has it."""
    return [
        leaf
        if isinstance(leaf, jax.Array) and not holder.ours
        else compat.put(leaf, sharding(device, holder.on_host))
        for leaf, holder in zip(leaves, holders, strict=True)
    ]


def placed(leaf: Any, where: Any) -> Any:
    """An argument or a result where the user says that it is, committed to it; one that is
    traced stays as it is, since JAX would differentiate the move too."""
    if where is None or isinstance(leaf, Tracer):
        return leaf
    if isinstance(leaf, jax.Array) and leaf.sharding == where and leaf.committed:
        return leaf
    return jax.device_put(leaf, where)


def finished(results: list[Any], wanted: Wanted) -> list[Any]:
    """Results where they are wanted; nothing moves that is there already."""
    for i in wanted.back:
        back = jax.block_until_ready(moved(results[i], on_host=False))
        results[i] = compat.settled(back, wanted.committed)
    for i, result in enumerate(results):
        where = wanted.shardings[i] if wanted.shardings else None
        if where is None and wanted.mesh is not None:
            kind = result.sharding.memory_kind
            where = jax.sharding.NamedSharding(
                wanted.mesh, jax.sharding.PartitionSpec(), memory_kind=kind
            )
        # Also where it is there already, since what is asked for is committed.
        if where is not None:
            results[i] = placed(result, where)
    return results


def device_bytes(arrays: Iterable[Any]) -> int:
    """Bytes on the device of some arrays, each counted once."""
    there = {
        id(a): a.nbytes
        for a in arrays
        if isinstance(a, jax.Array) and not a.is_deleted() and not is_on_host(a)
    }
    return sum(map(padded, there.values()))
