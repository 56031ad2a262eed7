"""Sizes: in the user's words, "8GiB" to bytes and back, and as allocators have them."""

import math
import numbers
import re

from jturnip.errors import BudgetError


_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


# The granule of JAX's GPU allocator: every buffer takes a multiple of it.
GRANULE = 256


def padded(nbytes: int) -> int:
    """Bytes that a buffer of `nbytes` takes on a device, and in an arena."""
    return -(-nbytes // GRANULE) * GRANULE


def parse_bytes(size: int | float | str) -> int:
    """Reads a size in bytes: an integer, or a string like "8GiB" or "500MB".

    Raises:
      BudgetError: where `size` is not a positive size.
    """
    asked = f"gpu_bytes={size!r} is not a size"
    what_is = 'Give a positive number of bytes, or a string such as "8GiB" or "500MB".'
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if not match or match[2].upper() not in _UNITS:
            raise BudgetError(f"{asked}. {what_is}")
        value = float(match[1]) * _UNITS[match[2].upper()]
    elif isinstance(size, bool) or not isinstance(size, numbers.Real):
        raise BudgetError(f"{asked} but a {type(size).__name__}. {what_is}")
    else:
        value = float(size) if not isinstance(size, numbers.Integral) else int(size)
        if math.isfinite(value) and 0 < value != int(value):
            raise BudgetError(
                f"{asked}: there are no parts of a byte. {what_is} A share of what jax.jit"
                " needs is int(share * jturnip.peak_bytes(fn, *args))."
            )
    if not math.isfinite(value) or value < 1:
        raise BudgetError(f"{asked}: it must be finite and at least one byte. {what_is}")
    return int(value)


def format_bytes(nbytes: float) -> str:
    """Bytes for people: exact below 10 KiB, else with three digits."""
    if nbytes < 10 * 2**10:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 2**10
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
    return f"{nbytes / 2**10:.3g} TiB"
