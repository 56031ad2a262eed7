"""Every error jturnip raises on purpose.

    JTurnipError
    ├── BudgetError          gpu_bytes is not a size (also a ValueError)
    ├── PlanningError        no plan exists for what was asked
    │   ├── DoesNotFit       a task, or the caller's own arrays, exceed gpu_bytes
    │   └── HostMemoryError  the host cannot hold what must be offloaded
    ├── UnsupportedError     a function jturnip cannot take apart, or arrays it cannot place
    ├── ArgumentError        a deleted or donated array was passed (also a ValueError and
    │                        a RuntimeError)
    └── ExecutionError       an operation failed while running; its cause is attached
    InternalError            our own bug: please report it
    InlinedWarning           a call whose memory is another function's matter

A message says what was asked, what was found with its units, where in the user's code, and
what to do next.
"""

import functools
from typing import Any


class JTurnipError(Exception):
    """Base of every error a caller may want to catch."""


class BudgetError(JTurnipError, ValueError):
    """`gpu_bytes` is not a size."""


class PlanningError(JTurnipError):
    """No plan exists for what was asked."""


class DoesNotFit(PlanningError):
    """Something must be on the device at once that is larger than `gpu_bytes`.

    Attributes:
      needed_bytes: a `gpu_bytes` that works, in bytes, and at most what XLA needs for the
        whole function; `lowered.minimum_gpu_bytes` looks for the least.
      gpu_bytes: what was asked for, in bytes.
      task: what the task that needs most is there for, if one is in the way.
    """

    def __init__(self, message: str, *, needed_bytes: int, gpu_bytes: int, task: str = ""):
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.gpu_bytes = gpu_bytes
        self.task = task

    def __reduce__(self) -> Any:
        kept = {**self.__dict__}
        made = functools.partial(
            DoesNotFit, needed_bytes=self.needed_bytes, gpu_bytes=self.gpu_bytes
        )
        return made, self.args, kept

    def saying(
        self,
        message: str,
        *,
        needed_bytes: int | None = None,
        gpu_bytes: int | None = None,
    ) -> "DoesNotFit":
        """The same in other words, and perhaps as the answer to another budget."""
        return DoesNotFit(
            message,
            needed_bytes=self.needed_bytes if needed_bytes is None else needed_bytes,
            gpu_bytes=self.gpu_bytes if gpu_bytes is None else gpu_bytes,
            task=self.task,
        )

    def beside(self, nbytes: int) -> "DoesNotFit":
        """The same as the answer to a budget of which others take so much."""
        if not nbytes:
            return self
        return self.saying(
            f"{self} {nbytes} bytes more are taken by residuals of other parts of the"
            " transformed function, of gpu_bytes"
            f" {self.gpu_bytes + nbytes}.",
            needed_bytes=self.needed_bytes + nbytes,
            gpu_bytes=self.gpu_bytes + nbytes,
        )


class HostMemoryError(PlanningError):
    """The host cannot hold the buffers that must leave the device."""


class UnsupportedError(JTurnipError):
    """A function jturnip cannot take apart, or arrays it cannot place."""


class ArgumentError(JTurnipError, ValueError, RuntimeError):
    """An argument cannot be used, for example because it was donated before.

    Where `jax.jit` says so it raises a ValueError or a RuntimeError, by its version.
    """


class ExecutionError(JTurnipError, RuntimeError):
    """An operation failed while the function ran."""


class InternalError(Exception):
    """A bug in jturnip itself. Please report it with the message."""


class InlinedWarning(UserWarning):
    """A call inside another traced function: the memory is that function's matter."""
