"""A traced function as a flat program: a row of passes, each in a file of its own.

| pass | what it does |
| --- | --- |
| `inline` | calls inlined, references drawn together |
| `counted` | (within that) loops that read or write rows by their counter scan them |
| `unrolling`, `whiles` | (within that) several iterations of a stencil's loop in one |
| `merging.merged` | (within that) what is computed twice, once |
| `unread.without_unread` | (within that) loops without what nobody reads of them |
| `streaming.streamed` | what does not fit in parts along its rows: scans, host arrays |
| `hoisting` | (within that) what a driven loop makes in each iteration, once before it |
| `tables.rows_by_host` | (within that) rows of tables in host memory, read by the host |
| `hints.still` | moves between memories taken out of what is left of loops |
| `results.written_once` | each result a value of its own |
| `tables.lookups_first` | rows that the host reads, before all else |
| `effects.with_tokens` | effects in the order of the program |
| `results.live` | without what nobody needs |

What still does not fit is cut along any axis by `blocks.cut_along_axes`, another pass of
the same kind, in tiles first where windows slide over it (`tiling.in_tiles`), and loops
whose arguments fit get other bodies (`bodies.py`): in blocks, or such that change what they
carry where it is (`in_place.py`). Then `partition.py` orders equations and draws them
together into tasks.
"""

from typing import Any

from jturnip.frontend.effects import with_tokens
from jturnip.frontend.hints import still
from jturnip.frontend.inline import Condition
from jturnip.frontend.loops import Streaming
from jturnip.frontend.results import Forwarded, live, written_once
from jturnip.frontend.streaming import Seen, streamed
from jturnip.frontend.tables import lookups_first
from jturnip.frontend.values import FlatJaxpr


def flatten(
    closed: Any,
    forwarded: Forwarded = (),
    streaming: Streaming | None = None,
    condition: Condition | None = None,
    seen: Seen | None = None,
) -> FlatJaxpr:
    """Flattens a traced function's jaxpr.

    Args:
      closed: `jax.jit(fn).trace(...).jaxpr`, of any supported JAX version.
      forwarded: positions of arguments that may be returned as they are, once; or for
        positions of results the only argument that each may be. Any other result is
        written by an equation of its own, a copy where the function has none.
      streaming: how to cut loops and large arrays; without it none is.
      condition: for the body of a loop: then the first result is the condition's.
      seen: what is known of the same function; grows.

    Raises:
      UnsupportedError: for values that are no arrays, or are put on another device; it
        names the primitive and the user's line.
    """
    seen = Seen() if seen is None else seen
    flat = seen.inline(closed, condition)
    if streaming is not None:
        flat = streamed(flat, streaming, forwarded, seen)
    flat = written_once(still(flat), forwarded)
    if streaming is not None:
        flat = lookups_first(flat, streaming.arena)
    return live(with_tokens(flat))
