"""What was measured in earlier processes, beside JAX's persistent compilation cache.

Where `jax_compilation_cache_dir` names a local directory, what was measured is kept in
`jturnip` below it, one small file for each thing: the seconds of an executable, and what
the link to a device does. A name is the hash of all that the numbers depend on, so nothing
is ever out of date but what other work on the machine did to a measurement. To measure
again, remove the files. As with JAX's cache, what cannot be read or written is done
without.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jturnip.compat import Device


# Of what is written and how it is measured: another number, and nothing older is read.
_FORMAT = 1
_FOLDER = "jturnip"


def directory() -> pathlib.Path | None:
    """Where profiles are kept; None where the user keeps no cache, or not on a disk."""
    config: Any = jax.config
    name = config.jax_compilation_cache_dir
    if not name or not config.jax_enable_compilation_cache or "://" in str(name):
        return None
    return pathlib.Path(name) / _FOLDER


def key(device: Device | None, *parts: str) -> str:
    """The name of a profile: a hash of the device, of versions, and of `parts`.

    Args:
      device: where it is measured; None for JAX's first device.
      parts: what else it depends on.
    """
    where: Any = device or jax.devices()[0]
    about = (
        str(_FORMAT),
        *_versions(),
        where.platform,
        where.device_kind,
        where.client.platform_version,
        *(_processor() if where.platform == "cpu" else ()),
    )
    return hashlib.sha256("\0".join((*about, *parts)).encode()).hexdigest()


def read(name: str, fields: Iterable[str]) -> tuple[float, ...] | None:
    """The numbers of a profile, by the names of its fields; None where there are none."""
    where = directory()
    if where is None:
        return None
    try:
        found = json.loads((where / f"{name}.json").read_text(encoding="utf-8"))
        return tuple(float(found[field]) for field in fields)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(name: str, numbers: Mapping[str, float]) -> None:
    """Keeps numbers for later processes; whole or not at all, whoever else writes them."""
    where = directory()
    if where is None:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=where, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(dict(numbers), file)
            os.replace(written, where / f"{name}.json")
        except OSError:
            pathlib.Path(written).unlink(missing_ok=True)
            raise


@functools.cache
def _versions() -> Sequence[str]:
    return tuple(importlib.metadata.version(name) for name in ("jax", "jaxlib"))


@functools.cache
def _processor() -> Sequence[str]:
    """What computes here: JAX calls every processor "cpu"."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return model, str(cores())


def cores() -> int:
    """How many cores this process may compute on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
