"""What each equation does along each dimension: by Shardy's rules, not by a table of ours.

Those of what reads positions are by hand (`byhand.py`); that of a loop follows from the
rules of its body (`iterations.py`).

A rule gives dimensions labels, as an einsum does: dimensions of operands and results with
the same label can be cut together, and the equation done for one part after the other. A
label that only operands have is reduced: what the parts give is to be combined. These are
the labels of EinDecomp (arXiv 2410.02682), and the factors of Shardy's
`sdy-populate-op-sharding-rules`, which knows all of StableHLO.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jturnip import compat
from jturnip.frontend import byhand, costs, iterations, shardy
from jturnip.frontend.halos import with_halos
from jturnip.frontend.loops import LOOPS
from jturnip.frontend.rules import Rule, without, without_halos
from jturnip.frontend.values import Constant, Equation, FlatJaxpr, is_key


# They call code that is not XLA's own.
_UNRULED = frozenset("pure_callback ffi_call custom_call".split())
# Of what calls jaxprs, what has a rule.
_CALLING = LOOPS.union("reduce reduce_window".split())
# They may read and write keys.
_OF_KEYS = byhand.OF_KEYS.union(
    "scan while random_bits slice squeeze unstack reshape transpose broadcast_in_dim"
    " select_n".split()
)


# Whether an equation can be done for parts along a label.
Works: TypeAlias = Callable[[Equation, FlatJaxpr, Rule, int], bool]


@dataclass(slots=True)
class Known:
    """The rules of equations of one function: with each equation, so that its id stays its
    own."""

    of_equation: dict[int, tuple[Equation, Rule | None]] = field(default_factory=dict)


# Rules of all functions: by what decides how they are traced, and by what an equation does;
# with its parameters, since a key may name them by their addresses.
_known: dict[Hashable, tuple[Any, Rule | None]] = {}
_MOST_KNOWN = 10_000


def rules(flat: FlatJaxpr, works: Works, known: Known) -> list[Rule | None]:
    """The rule of each equation; None for one that does everything at once.

    Args:
      flat: the function. All distinct equations are lowered side by side in one module.
      works: says along which labels.
      known: grows.
    """
    unknown = [e for e in flat.equations if id(e) not in known.of_equation]
    found = _rules_by_keys(unknown, flat, works)
    for e, rule in zip(unknown, found, strict=True):
        known.of_equation[id(e)] = e, rule
    return [known.of_equation[id(e)][1] for e in flat.equations]


@functools.cache
def rules_by(works: Works) -> iterations.Rules:
    """What gives the rules of the body of a loop."""
    return lambda flat: list(map(without_halos, rules(flat, works, Known())))


def _rules_by_keys(
    equations: Sequence[Equation], flat: FlatJaxpr, works: Works
) -> list[Rule | None]:
    context = works, compat.trace_context()
    texts: dict[int, str] = {}  # of the origins, which parts share
    keys = [
        (context, _key(e, flat, texts)) if _may_have_a_rule(e, flat) else None
        for e in equations
    ]
    distinct = {key: e for key, e in zip(keys, equations, strict=True) if key is not None}
    before = {key: _known.get(key) for key in distinct}
    found = {key: entry[1] for key, entry in before.items() if entry is not None}
    new = {key: e for key, e in distinct.items() if key not in found}
    ours = {*LOOPS, *byhand.RULES}
    lowered = {key: e for key, e in new.items() if e.name not in ours}
    of_shardy = shardy.rules_or_none(list(lowered.values()), flat) if lowered else ()
    found.update(zip(lowered, of_shardy, strict=True))
    for key, e in new.items():
        types = flat.operand_types(e), [flat.types[v] for v in e.outputs]
        if e.name in LOOPS:
            found[key] = iterations.rule_of(e, rules_by(works))
        elif key not in lowered:
            found[key] = byhand.RULES[e.name](e, *types)
        found[key] = with_halos(e, *types, found[key])
        found[key] = _that_works(found[key], functools.partial(works, e, flat))
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    _known.update((key, (e.origin.params, found[key])) for key, e in new.items())
    return [None if key is None else found[key] for key in keys]


def _that_works(rule: Rule | None, works: Callable[[Rule, int], bool]) -> Rule | None:
    """A rule, with the labels along which the equation can be done for parts."""
    if rule is None:
        return None
    labels = {x for each in (*rule.operands, *rule.results) for x in each}
    bad = {x for x in labels if x is not None and not works(rule, x)}
    return without(rule, bad)


def _may_have_a_rule(e: Equation, flat: FlatJaxpr) -> bool:
    if (
        e.effects
        or e.origin.effects
        or e.driven
        or e.name in _UNRULED
        or (e.name not in _CALLING and any(True for _ in costs.nested(e.origin)))
    ):
        return False
    types = [*flat.operand_types(e), *(flat.types[v] for v in e.outputs)]
    return e.name in _OF_KEYS or not any(is_key(t.dtype) for t in types)


_text = functools.lru_cache(str)  # numpy makes that of a dtype anew each time


def _key(e: Equation, flat: FlatJaxpr, texts: dict[int, str]) -> Hashable:
    shapes = tuple(
        (t.shape, _text(t.dtype), isinstance(v, Constant))
        for v, t in zip(e.inputs, flat.operand_types(e), strict=True)
    )
    if id(e.origin) not in texts:
        params = sorted(e.origin.params.items(), key=lambda item: item[0])
        texts[id(e.origin)] = str(params)
    return e.name, shapes, texts[id(e.origin)]
