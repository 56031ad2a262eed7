"""Windows that slide: what a part of their results reads of the positions beside it.

A convolution can be done for a part of an image, of that part with the rows around it: its
halo. So can the gradients of its kernel, which are sums over positions of an image and of
the same image shifted; and what is padded is a window of one position. What a part reads
lies in parts that others make: it must be there before the first part is done, so each
layer is a stretch of its own.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jturnip.frontend.rules import COMBINED, Halo, Rule, has_labels
from jturnip.frontend.values import Constant, Equation, Type


# Windows over their only operand, whose numbers they reduce.
POOLS = frozenset("reduce_window_sum reduce_window_max reduce_window_min".split())
# An array of one example of something with channels has so many dimensions.
_OF_IMAGES = 3


@dataclass(frozen=True, slots=True)
class _Window:
    """A window along one dimension of the first operand."""

    # Where it is in the equation's parameters, and the dimension: of the operand, and of
    # the result.
    at: int
    dim: int
    result: int
    padding: tuple[int, int]
    # Of the operand, between its positions.
    dilation: int
    length: int = 1
    stride: int = 1
    spread: int = 1
    # Of the second operand, where that is the window.
    kernel: int | None = None
    # Whether there may be less padding than none.
    crops: bool = True


def with_halos(
    e: Equation, read: Sequence[Type], written: Sequence[Type], rule: Rule | None
) -> Rule | None:
    """The rule of an equation with labels along which its windows slide; the same where it
    has none."""
    windows = list(_windows(e, read))
    if not windows or isinstance(e.inputs[0], Constant):
        return rule
    if rule is None:
        rule = Rule(
            tuple((None,) * len(t.shape) for t in read),
            tuple((None,) * len(t.shape) for t in written),
        )
    for window in windows:
        rule = _with_halo(e, rule, window, read, written)
    return rule if has_labels(rule) else None


def _with_halo(
    e: Equation,
    rule: Rule,
    window: _Window,
    read: Sequence[Type],
    written: Sequence[Type],
) -> Rule:
    """A rule with a label for the results of a window, or for the window itself where that
    is longer: gradients of a kernel are sums over windows of an image's size."""
    size, results = read[0].shape[window.dim], written[0].shape[window.result]
    sides = [*map(list, rule.operands), *map(list, rule.results)]
    used = {x for each in sides for x in each if x is not None}
    label = max(used, default=-1) + 1
    reduced = dict(rule.reduced)
    low, high = window.padding
    if results >= window.length:
        step, reach = window.stride, (window.length - 1) * window.spread + 1
        positions, side, dim = results, len(rule.operands), window.result
    elif window.kernel is not None:
        step, reach = window.spread, (results - 1) * window.stride + 1
        positions, side, dim = window.length, 1, window.kernel
        reduced[label] = (COMBINED[e.name],)
    else:
        return rule
    if positions < 2 or sides[side][dim] is not None:
        return rule
    if not window.crops and max(low, high) >= reach:
        return rule
    sides[side][dim] = label
    halo = Halo(window.at, window.dim, size, positions, step, reach, low, window.dilation)
    count = len(rule.operands)
    return dataclasses.replace(
        rule,
        operands=tuple(map(tuple, sides[:count])),
        results=tuple(map(tuple, sides[count:])),
        reduced=reduced,
        halos={**rule.halos, label: halo},
    )


def _windows(e: Equation, read: Sequence[Type]) -> Iterator[_Window]:
    """The windows of an equation that has one example: more of these are cut apart first,
    which needs no halos."""
    params = e.origin.params
    if e.name == "conv_general_dilated" and read[0].shape[examples_of(e)] == 1:
        numbers = params["dimension_numbers"]
        spatial = zip(
            numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True
        )
        for at, (image, kernel, result) in enumerate(spatial):
            yield _Window(
                at=at,
                dim=image,
                result=result,
                kernel=kernel,
                length=read[1].shape[kernel],
                stride=params["window_strides"][at],
                spread=params["rhs_dilation"][at],
                padding=params["padding"][at],
                dilation=params["lhs_dilation"][at],
            )
    elif e.name in POOLS:
        lengths = params["window_dimensions"]
        of_one = read[0].shape[0] == 1 or lengths[0] > 1
        for dim, length in enumerate(lengths):
            if of_one and length > 1:
                yield _Window(
                    at=dim,
                    dim=dim,
                    result=dim,
                    length=length,
                    stride=params["window_strides"][dim],
                    spread=params["window_dilation"][dim],
                    padding=params["padding"][dim],
                    dilation=params["base_dilation"][dim],
                    crops=False,
                )
    elif e.name == "pad" and is_one_image(read[0]):
        for dim, (low, high, inside) in enumerate(params["padding_config"]):
            if (low, high, inside) != (0, 0, 0):
                yield _Window(
                    at=dim,
                    dim=dim,
                    result=dim,
                    padding=(low, high),
                    dilation=inside + 1,
                )


def is_one_image(t: Type) -> bool:
    """Whether something may be one example of something with channels."""
    return len(t.shape) >= _OF_IMAGES and t.shape[0] == 1


def along_channels(e: Equation, dim: int | None) -> bool:
    """Whether a convolution that is cut along a dimension of its first operand, or not of
    that, is done for some of its channels at a time: little work for all that is read."""
    if e.name != "conv_general_dilated":
        return False
    numbers = e.origin.params["dimension_numbers"]
    return dim is None or (dim != examples_of(e) and dim in numbers.lhs_spec[:2])


def examples_of(e: Equation) -> int:
    """The dimension of its first operand along which a convolution has its examples."""
    numbers = e.origin.params["dimension_numbers"]
    batch, features = numbers.lhs_spec[:2]
    kernel, result = e.origin.invars[1].aval.shape, e.origin.outvars[0].aval.shape
    # The gradients of a kernel have their examples where others have channels.
    of_kernel = any(
        result[r] < kernel[k]
        for r, k in zip(numbers.out_spec[2:], numbers.rhs_spec[2:], strict=True)
    )
    return features if of_kernel else batch
