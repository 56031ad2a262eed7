"""A part of an array in host memory as an array that shares it, through DLPack: what a GPU
might read at the rate of its link, and what jturnip does not do until one has shown it."""

import ctypes
from typing import Any

import jax

from jturnip import memory


_CPU, _CUDA_HOST = 1, 3  # DLDeviceType
_UNSIGNED = 1  # DLDataTypeCode


class _Tensor(ctypes.Structure):
    """DLManagedTensor, with the structures in it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


# Called when the array that shares the memory is gone; whoever made the view keeps all
# that there is to free.
_NOTHING = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda tensor: None)
_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _View:
    """What `from_dlpack` takes."""

    def __init__(self, address: int, nbytes: int, device_type: int):
        self._shape = (ctypes.c_int64 * 1)(nbytes)
        self._tensor = _Tensor(
            data=address,
            device_type=device_type,
            ndim=1,
            code=_UNSIGNED,
            bits=8,
            lanes=1,
            shape=ctypes.addressof(self._shape),
            deleter=ctypes.cast(_NOTHING, ctypes.c_void_p),
        )

    def __dlpack__(self, **_: Any) -> Any:
        return _new_capsule(ctypes.addressof(self._tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.device_type, 0


class Shared:
    """A part of an array of bytes in host memory; keeps what it needs alive."""

    def __init__(self, array: jax.Array, begin: int, nbytes: int):
        self._source = jax.block_until_ready(array)
        self.address = array.unsafe_buffer_pointer() + begin
        on_cpu = memory.is_on_cpu(array.sharding)
        self._view = _View(self.address, nbytes, _CPU if on_cpu else _CUDA_HOST)
        self.array = jax.dlpack.from_dlpack(self._view)

    @property
    def is_one(self) -> bool:
        """Whether it really is the same memory, and of the same kind."""
        kinds = {a.sharding.memory_kind for a in (self.array, self._source)}
        return len(kinds) == 1 and self.array.unsafe_buffer_pointer() == self.address
