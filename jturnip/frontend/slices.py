"""Parts of arrays in host memory that a function takes out: they are read from there.

A table of several levels, of which each is looked up by itself, need not be on the device
to be sliced there.
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping

from jturnip.frontend.values import Constant, Equation, FlatJaxpr, Slice, Window


def sliced_on_host(
    flat: FlatJaxpr, hosted: Collection[int], overlapping: bool = True
) -> FlatJaxpr:
    """The function without the `slice` equations that take parts of arrays in host memory,
    where all that read such an array are these: the parts alone come to the device.

    Args:
      flat: the function.
      hosted: arguments and closed-over arrays that are in host memory.
      overlapping: whether also where parts of one array have positions in common.
    """
    results = frozenset(flat.result_values)
    # By the number of the equation.
    taken = {
        i: window
        for i, e in enumerate(flat.equations)
        if results.isdisjoint(e.outputs) and (window := _window(e)) is not None
    }
    others = (e for i, e in enumerate(flat.equations) if i not in taken)
    sources = frozenset(hosted).difference(results, *(e.reads for e in others))
    if not overlapping:
        sources -= _read_twice(flat, taken)
    slices = {(s.source, s.window): s for s in flat.slices}
    # What a `slice` gave → the first value that is the same part.
    instead: dict[int, int] = {}
    equations: list[Equation] = []
    for i, e in enumerate(flat.equations):
        source = e.inputs[0] if i in taken else None
        if isinstance(source, int) and source in sources:
            part = Slice(e.outputs[0], source, taken[i])
            same = slices.setdefault((source, part.window), part)
            instead[part.value] = same.value
        else:
            equations.append(e)
    if not instead:
        return flat
    return dataclasses.replace(
        flat,
        equations=tuple(
            dataclasses.replace(e, inputs=e.reading(instead)) for e in equations
        ),
        slices=tuple(slices.values()),
    )


def _read_twice(flat: FlatJaxpr, taken: Mapping[int, Window]) -> set[int]:
    """Values of which some positions are in several parts; the same part is one."""
    windows: dict[int, set[Window]] = {}
    for i, window in taken.items():
        (source,) = flat.equations[i].reads
        windows.setdefault(source, set()).add(window)
    return {
        v
        for v, of in windows.items()
        if any(a.meets(b) for a, b in itertools.combinations(of, 2))
    }


def _window(e: Equation) -> Window | None:
    """The positions that a `slice` takes, if it leaves none out between them."""
    if e.name != "slice" or isinstance(e.inputs[0], Constant):
        return None
    params = e.origin.params
    if any(stride != 1 for stride in params["strides"] or ()):
        return None
    bounds = zip(params["start_indices"], params["limit_indices"], strict=True)
    return Window(tuple(bounds))
