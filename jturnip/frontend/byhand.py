"""Rules by hand: of what reads positions, and of what Shardy has no rule for."""

import math
from collections.abc import Callable, Sequence

from jturnip.frontend.rules import COMBINED, SCATTERS, Rule
from jturnip.frontend.values import Equation, Type, is_key


def _iota(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    del e
    if operands:  # sizes that are not known
        return None
    labels = _large(results[0], range(len(results[0].shape)))
    return Rule((), (labels,))


def _each(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    """Every element by itself, in a loop that leaves those that are done as they are."""
    del e
    labels = lambda t: _large(t, range(len(t.shape)))
    return Rule(tuple(map(labels, operands)), tuple(map(labels, results)))


def _passed_on(
    e: Equation, operands: Sequence[Type], results: Sequence[Type]
) -> Rule | None:
    """All operands as they are, once all are there: those of one shape."""
    alike = len({t.shape for t in operands}) == 1
    return _each(e, operands, results) if alike else None


def _factored(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    """Batches of matrices: LAPACK is called for each of them."""
    matrix = e.name != "lu_pivots_to_permutation"
    batch = len(operands[0].shape) - (2 if matrix else 1)

    def labels(t: Type) -> tuple[int | None, ...]:
        return _large(t, [d if d < batch else None for d in range(len(t.shape))])

    return Rule(tuple(map(labels, operands)), tuple(map(labels, results)))


def _solved(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    """Batches of triangular systems; each column of the right sides is one of its own."""
    rule = _factored(e, operands, results)
    right = operands[1]
    free = len(right.shape) - (1 if e.origin.params["left_side"] else 2)
    matrix = len(right.shape) - 2
    labels = _large(
        right, [d if d < matrix or d == free else None for d in range(len(right.shape))]
    )
    return Rule((rule.operands[0], labels), (labels,))


def _of_diagonals(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    """Batches of tridiagonal systems, of three diagonals each; each column of the right
    sides is one of its own."""
    del e
    right = len(operands[-1].shape)
    of_diagonal = [*range(right - 2), None]
    of_right = _large(results[0], [*of_diagonal, right - 1])
    diagonals = tuple(_large(t, of_diagonal) for t in operands[:-1])
    return Rule((*diagonals, of_right), (of_right,))


def _ragged(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    """Products of groups of rows, each with a matrix of its own; and what each group gives
    where the rows are contracted. Which rows of a part are of which group follows from the
    groups' sizes (`parts.py`)."""
    params = e.origin.params
    numbers = params["ragged_dot_dimension_numbers"]
    ((of_left, of_right), batch) = numbers.dot_dimension_numbers
    ragged = numbers.lhs_ragged_dimensions
    if any(batch) or len(ragged) != 1 or params["group_offset"] is not None:
        return None
    left, right, sizes = operands
    rows, groups = ragged[0], tuple(numbers.rhs_group_dimensions)
    first = len(left.shape)
    lefts: list[int | None] = [d for d in range(first) if d not in of_left]
    rights = [first + d for d in range(len(right.shape)) if d not in (*of_right, *groups)]
    contracted = rows if rows in of_left else None
    result = [*([] if contracted is None else [None]), *lefts, *rights]
    of_rights: list[int | None] = [
        first + d if first + d in rights else None for d in range(len(right.shape))
    ]
    if contracted is not None:
        of_rights[of_right[tuple(of_left).index(rows)]] = rows
    of_lefts = [d if d in (*lefts, contracted) else None for d in range(first)]
    return Rule(
        (_large(left, of_lefts), _large(right, of_rights), (None,) * len(sizes.shape)),
        (_large(results[0], result),),
        {} if contracted is None or left.shape[rows] < 2 else {rows: ("add",)},
    )


def _sliced(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    """A part of a slice is one of the operand, which is read whole if it is not sliced
    along that axis."""
    operand, result = operands[0], results[0]
    steps = e.origin.params.get("strides") or (1,) * len(result.shape)
    labels = _large(result, range(len(result.shape)))
    read = [
        label if n == m and step == 1 else None
        for label, n, m, step in zip(
            labels, operand.shape, result.shape, steps, strict=True
        )
    ]
    positions = ((),) * (len(operands) - 1)
    return Rule((tuple(read), *positions), (labels,))


def _padded(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    """What is not padded can be cut."""
    config = e.origin.params["padding_config"]
    labels = [None if any(each) else d for d, each in enumerate(config)]
    return Rule((_large(operands[0], labels), ()), (_large(results[0], labels),))


def _updated(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    """Each part takes what of the update is for it (`parts.py`)."""
    del e
    operand, update, *starts = operands
    dims = range(len(operand.shape))
    written = [
        d if n == m else None
        for d, n, m in zip(dims, update.shape, operand.shape, strict=True)
    ]
    labels = _large(results[0], dims)
    positions = ((),) * len(starts)
    return Rule((labels, _large(update, written), *positions), (labels,))


def _random(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    """Bits that are made of their positions, where that is so (`parts.works`); those of
    several keys are of one after the other."""
    del e
    (keys,), (bits,) = operands, results
    if keys.shape:
        batch = range(len(keys.shape))
        labels = [d if d in batch else None for d in range(len(bits.shape))]
        return Rule((_large(keys, batch),), (_large(bits, labels),))
    if math.prod(bits.shape) >= 2**32:
        return None
    return Rule(((),), (_large(bits, range(len(bits.shape))),))


def _of_keys(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    """Each key is worked with by itself; so is what it is made of, and what it gives."""
    if any("fry" not in str(t.dtype) for t in (*operands, *results) if is_key(t.dtype)):
        return None
    batch = range(len((results if e.name == "random_wrap" else operands)[0].shape))

    def labels(t: Type) -> tuple[int | None, ...]:
        return _large(t, [d if d in batch else None for d in range(len(t.shape))])

    return Rule(tuple(map(labels, operands)), tuple(map(labels, results)))


def _top_k(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    del results
    rank = len(operands[0].shape)
    axis = e.origin.params.get("axis", rank - 1) % rank
    labels = _large(operands[0], [None if d == axis else d for d in range(rank)])
    return Rule((labels,), (labels, labels))


def _running(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    del results
    axis = e.origin.params["axis"]
    labels = [None if d == axis else d for d in range(len(operands[0].shape))]
    large = _large(operands[0], labels)
    return Rule((large,), (large,))


def _arg(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    axes = e.origin.params["axes"]
    labels = [None if d in axes else d for d in range(len(operands[0].shape))]
    kept = [d for d in range(len(labels)) if d not in axes]
    return Rule((_large(operands[0], labels),), (_large(results[0], kept),))


def _pooled(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    """What has no windows, and windows side by side that fill what they are of."""
    params, rank = e.origin.params, len(results[0].shape)
    ones, shapes = (1,) * rank, [t.shape for t in (*operands, *results) if t.shape]
    dilations = (params.get(f"{of}_dilation") or ones for of in ("base", "window"))
    plain = (*zip(*dilations, strict=True),)

    def is_free(d: int) -> bool:
        window, few = params["window_dimensions"][d], min(shape[d] for shape in shapes)
        return (
            params["window_strides"][d] == window
            and (plain[d], params["padding"][d]) == ((1, 1), (0, 0))
            and few > 1
            and max(shape[d] for shape in shapes) == window * few
        )

    free = [d if is_free(d) else None for d in range(rank)]
    labels = lambda t: tuple(free) if t.shape else ()
    return Rule(tuple(map(labels, operands)), tuple(map(labels, results)))


def _reduced(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule:
    """By whatever function: what is not reduced can be cut."""
    axes = e.origin.params["dimensions"]
    kept = [d for d in range(len(operands[0].shape)) if d not in axes]

    def labels(t: Type) -> tuple[int | None, ...]:
        return _large(t, [d if d in kept else None for d in range(len(t.shape))])

    return Rule(tuple(map(labels, operands)), tuple(_large(t, kept) for t in results))


def _large(t: Type, labels: Sequence[int | None]) -> tuple[int | None, ...]:
    """Labels of a type's dimensions, without those of a single position."""
    of = zip(labels, t.shape, strict=True)
    return tuple(label if size > 1 else None for label, size in of)


def _gather(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    """Parts of what is indexed: what an index finds is in one of them."""
    operand, indices = operands
    numbers, sizes = e.origin.params["dimension_numbers"], e.origin.params["slice_sizes"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole = [d for d in range(len(operand.shape)) if d not in gone]
    of_result = _windowed(results[0], numbers.offset_dims, indices, whole)
    labels: list[int | None] = [None] * len(operand.shape)
    for d in whole:
        # All of it can only begin at 0, whether it is indexed or not.
        if sizes[d] == operand.shape[d]:
            labels[d] = _WINDOW + d
    reduced = []
    for d in numbers.collapsed_slice_dims:
        if d in numbers.start_index_map:
            labels[d] = _INDEXED + d
            reduced.append(_INDEXED + d)
    _batched(labels, numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    return Rule(
        (_large(operand, labels), _of_indices(indices)),
        (
            _large(
                results[0], [x if x in labels or _is_batch(x) else None for x in of_result]
            ),
        ),
        {label: ("add",) for label in reduced},
    )


def _scatter(e: Equation, operands: Sequence[Type], results: Sequence[Type]) -> Rule | None:
    """Parts of what is written to: each takes the updates that are for it. Or parts of the
    updates, if these are combined."""
    operand, indices, updates = operands
    numbers = e.origin.params["dimension_numbers"]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    whole = [d for d in range(len(operand.shape)) if d not in gone]
    of_updates = _windowed(updates, numbers.update_window_dims, indices, whole)
    labels: list[int | None] = [None] * len(operand.shape)
    for d, at in zip(whole, numbers.update_window_dims, strict=True):
        if updates.shape[at] == operand.shape[d]:
            labels[d] = _WINDOW + d
    for d in numbers.inserted_window_dims:
        if d in numbers.scatter_dims_to_operand_dims:
            labels[d] = _INDEXED + d
    batching = numbers.scatter_indices_batching_dims
    _batched(labels, numbers.operand_batching_dims, batching)
    # The result is whole along what only indices and updates are cut along.
    how, inside = COMBINED.get(e.name), set(labels)
    of_indices, of_updates = _of_indices(indices), _large(updates, of_updates)
    apart = {x for x in of_indices if x is not None and x not in inside} if how else set()
    kept = lambda each: tuple(x if x in inside | apart else None for x in each)
    return Rule(
        (_large(operand, labels), kept(of_indices), kept(of_updates)),
        (_large(results[0], labels),),
        {label: (how,) for label in sorted(apart)},
    )


# Labels: of a dimension of the indices, of one of the operand that is in each window, and
# of one that is indexed.
_BATCH, _WINDOW, _INDEXED = 0, 100, 200


def _is_batch(label: int | None) -> bool:
    return label is not None and label < _WINDOW


def _of_indices(indices: Type) -> tuple[int | None, ...]:
    rank = len(indices.shape)
    return _large(indices, [*(_BATCH + d for d in range(rank - 1)), None])


def _windowed(
    t: Type, window: Sequence[int], indices: Type, whole: Sequence[int]
) -> list[int | None]:
    """Labels of what has the dimensions of windows, and for others those of the indices."""
    batch = iter(range(len(indices.shape) - 1))
    in_window = iter(whole)
    return [
        _WINDOW + next(in_window) if d in window else _BATCH + next(batch)
        for d in range(len(t.shape))
    ]


def _batched(
    labels: list[int | None], operand: Sequence[int], indices: Sequence[int]
) -> None:
    for d, at in zip(operand, indices, strict=True):
        labels[d] = _BATCH + at


# What works with keys, but to make random bits of them.
OF_KEYS = frozenset(f"random_{what}" for what in "wrap unwrap split fold_in".split())

RULES: dict[str, Callable[[Equation, Sequence[Type], Sequence[Type]], Rule | None]] = {
    **dict.fromkeys(
        "igamma igammac igamma_grad_a regularized_incomplete_beta".split(),
        _each,
    ),
    "optimization_barrier": _passed_on,
    "top_k": _top_k,
    "argmax": _arg,
    "argmin": _arg,
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), _running),
    **dict.fromkeys(
        "cholesky lu lu_pivots_to_permutation qr geqrf geqp3 householder_product eig eigh"
        " svd schur hessenberg tridiagonal".split(),
        _factored,
    ),
    **dict.fromkeys(
        "reduce_window reduce_window_max reduce_window_min reduce_window_sum"
        " select_and_gather_add select_and_scatter_add".split(),
        _pooled,
    ),
    "reduce": _reduced,
    "triangular_solve": _solved,
    "tridiagonal_solve": _of_diagonals,
    "ragged_dot_general": _ragged,
    **dict.fromkeys(["slice", "dynamic_slice"], _sliced),
    "dynamic_update_slice": _updated,
    "pad": _padded,
    "random_bits": _random,
    **dict.fromkeys(OF_KEYS, _of_keys),
    "iota": _iota,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
}
