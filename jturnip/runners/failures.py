"""What a run does before and after it fails."""

import collections
import traceback
from collections.abc import Collection, Sequence
from typing import Any

import jax

from jturnip.errors import ArgumentError, ExecutionError


def check_donated_once(
    leaves: Sequence[Any], given_up: Collection[int], names: Sequence[str]
) -> None:
    """Raises ArgumentError for an array that is donated and passed a second time.

    Args:
      leaves: the flat arguments.
      given_up: positions of those that are donated.
      names: what to call each.
    """
    if not given_up or len({id(leaf) for leaf in leaves}) == len(leaves):
        return
    places = collections.Counter(id(leaf) for leaf in leaves)
    for i in given_up:
        if places[id(leaves[i])] > 1:
            raise ArgumentError(
                f"argument {names[i]} is donated and passed a second time. Pass a copy, or"
                " do not donate it."
            )


def let_go(error: BaseException | None, outer: BaseException | None) -> None:
    """Clears the finished frames that an error would keep alive, and our arrays in them.

    Notebooks keep the last error, and with it every local variable on its way.

    Args:
      error: what was raised.
      outer: what the caller was handling already, whose frames are not ours.
    """
    seen: set[int] = set()
    while error is not None and error is not outer and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C came inside JAX's C++, which makes other errors of it."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or "KeyboardInterrupt" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def raise_failures(results: Sequence[Any]) -> None:
    try:
        jax.block_until_ready(results)
    except Exception as error:
        raise ExecutionError(f"a result could not be computed: {error}") from error
