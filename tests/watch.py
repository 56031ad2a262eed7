"""What is alive on the device, looked at whenever something is put there."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax
import jax.stages
from checks import collected  # pyright: ignore[reportMissingImports]

from jturnip import compat, memory


class Watch:
    """While it lasts, looks at all live arrays after everything that makes some.

    Attributes:
      peak_bytes: the most bytes on the device at once, of the arrays that were `mine` and
        of those made since.
    """

    # All that makes arrays: of JAX, and our own ways around it.
    _MAKERS: tuple[tuple[Any, str], ...] = (
        (jax, "device_put"),
        (jax.numpy, "copy"),
        (jax.stages.Compiled, "__call__"),
        (compat, "copy_to"),
        (compat, "put"),
        (memory, "moved"),
    )

    def __init__(self, *mine: Any):
        collected()
        watched = {id(leaf) for leaf in jax.tree.leaves(mine)}
        # Held, so that no later array gets the id of one of them.
        self._others = {id(a): a for a in jax.live_arrays() if id(a) not in watched}
        self.peak_bytes = 0
        self._saved: list[tuple[Any, str, Any]] = []

    def look(self) -> None:
        """Counts what is alive now; arrays that share a buffer are one."""
        alive: dict[Any, int] = {}
        for array in jax.live_arrays():
            if id(array) in self._others or array.is_deleted():
                continue
            if array.sharding.memory_kind == "device":
                alive[_buffer(array)] = array.nbytes
        self.peak_bytes = max(self.peak_bytes, sum(alive.values()))

    def __enter__(self) -> "Watch":
        for owner, name in self._MAKERS:
            made = getattr(owner, name)
            self._saved.append((owner, name, made))
            setattr(owner, name, self._looking(made))
        self.look()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for owner, name, made in self._saved:
            setattr(owner, name, made)
        self._saved.clear()
        self.look()
        self._others.clear()

    def _looking(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **keywords: Any) -> Any:
            results = make(*args, **keywords)
            self.look()
            return results

        return made


def _buffer(array: Any) -> Any:
    """Equal for arrays of one buffer, as far as that can be known without waiting."""
    try:
        return array.unsafe_buffer_pointer() if array.is_ready() else id(array)
    except Exception:  # keys have no pointer, and what failed has none
        return id(array)
