"""A pass: what a function does beside computing happens in the order of the program.

Each equation with effects hands a token to the next: a value without bytes worth a thought,
and a dependency like any other. What is driven has its place in the program already, and so
has what comes after it.
"""

import dataclasses

import numpy as np

from jturnip.frontend.builder import Builder
from jturnip.frontend.values import FlatJaxpr, Type


def with_tokens(flat: FlatJaxpr) -> FlatJaxpr:
    """The program with a token through all equations that have effects."""
    if not any(e.origin.effects for e in flat.equations):
        return flat
    builder = Builder.of(flat)
    builder.equations.clear()
    start = np.zeros((), np.int32)
    token: int | None = None
    for e in flat.equations:
        if e.driven:
            token = None
        elif e.origin.effects:
            if token is None:
                token = builder.closed_over(start, Type.of(start))
            before, token = token, builder.value(Type.of(start))
            inputs, outputs = (*e.inputs, before), (*e.outputs, token)
            e = dataclasses.replace(e, inputs=inputs, outputs=outputs, effects=True)
        builder.equations.append(e)
    return builder.finish(flat.inputs, flat.outputs, flat.slices)
