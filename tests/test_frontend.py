"""The front end: a function to flat equations, these in an order, that order in groups."""

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_bitwise, assert_same, some_numbers, tower
from flat import evaluated, flat_of
from hypothesis import given, settings, strategies as st

from jturnip.compiler.executables import group_key
from jturnip.frontend import costs
from jturnip.frontend.choosing import Search
from jturnip.frontend.costs import LINEAR_ALGEBRA, DeviceRates
from jturnip.frontend.flatten import flatten
from jturnip.frontend.order import Order, order_equations
from jturnip.frontend.partition import Group, Partitioner
from jturnip.frontend.streaming import Seen
from jturnip.frontend.values import Constant, FlatJaxpr
from jturnip.models import llama


# A device so slow that every product is worth a launch of its own, and one so fast that
# nothing ever is.
SLOW = DeviceRates(1.0, 1.0, 1e-9)
FAST = DeviceRates(1e30, 1e30, 1.0)


def names(flat: FlatJaxpr) -> list[str]:
    return [equation.name for equation in flat.equations]


def evaluate(flat: FlatJaxpr, groups: Sequence[Group], args: Sequence[Any]) -> list[Any]:
    """Group after group in plain Python; each sees only its inputs."""
    values: dict[int, Any] = dict(zip(flat.inputs, args, strict=True))
    values.update(flat.constants)
    for group in groups:
        inside = {v: values[v] for v in group.inputs}
        for e in group.equations:
            equation = flat.equations[e]
            operands = [
                v.value if isinstance(v, Constant) else inside[v] for v in equation.inputs
            ]
            inside.update(zip(equation.outputs, equation.bind(operands), strict=True))
        values.update((v, inside[v]) for v in group.outputs)
    return [values[v] for v in flat.result_values]


def x32(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# Flattening


def test_nested_calls_are_inlined():
    inner = jax.jit(lambda x: jnp.sin(x) + 1)
    assert names(flat_of(lambda x: inner(inner(x)), x32(4))) == ["sin", "add"] * 2


def test_custom_derivatives_and_checkpoints_are_inlined():
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda x, t: (sine(*x), t[0]))

    @jax.custom_vjp
    def cosine(x):
        return jnp.cos(x)

    cosine.defvjp(lambda x: (cosine(x), None), lambda _, g: (g,))
    fn = lambda x: jax.checkpoint(lambda x: sine(cosine(x)))(x)
    assert names(flat_of(fn, x32(4))) == ["cos", "sin"]


def test_what_jax_writes_with_other_operations_is_these():
    """`searchsorted` is a primitive of its own since JAX 0.12."""
    flat = flat_of(jnp.searchsorted, jnp.zeros(8), jnp.zeros((5, 3)))
    assert "scan" in names(flat)
    assert "call_hi_primitive" not in names(flat)


def test_loops_and_branches_are_one_equation_each():
    def fn(x):
        x, _ = jax.lax.scan(lambda c, _: (c * 2, None), x, length=3)
        x = jax.lax.while_loop(lambda c: c.sum() < 0, lambda c: c + 1, x)
        return jax.lax.cond(x[0] > 0, lambda a: a, lambda a: -a, x)

    found = names(flat_of(fn, x32(4)))
    assert [found.count(name) for name in ("scan", "while", "cond")] == [1, 1, 1]


def test_dead_equations_are_gone():
    def fn(x):
        _ = jnp.sin(x) @ x
        return jnp.cos(x)

    assert names(flat_of(fn, x32(4))) == ["cos"]


def test_dead_equations_inside_a_call_are_gone():
    inner = jax.jit(lambda x: (jnp.sin(x), jnp.cos(x)))
    assert names(flat_of(lambda x: inner(x)[1], x32(4))) == ["cos"]


def test_what_is_put_together_has_no_empty_pieces():
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    shifted = lambda x: jnp.roll(x, (0, 2), (0, 1))
    flat = flat_of(shifted, x)
    assert [e.name for e in flat.equations].count("concatenate") == 1
    assert all(flat.types[v].nbytes for e in flat.equations for v in e.outputs)
    assert_same(evaluated(flat, x)[0], jax.jit(shifted)(x))
    empty = lambda x: jnp.concatenate([x[:0], x[4:], x[:0]])
    assert_same(evaluated(flat_of(empty, x), x)[0], jax.jit(empty)(x))
    one = lambda x: jnp.concatenate([x[:0], x, x[:0]])
    assert_same(evaluated(flat_of(one, x), x)[0], x + 0)


def test_scalars_are_constants_of_equations_and_arrays_are_values():
    table = x32(4, seed=1)
    flat = flat_of(lambda x: x * 2.0 + table, x32(4))
    scalars = [v for e in flat.equations for v in e.inputs if isinstance(v, Constant)]
    assert [float(s.value) for s in scalars] == [2.0]
    assert [c for _, c in flat.constants] == [table]


def test_an_array_closed_over_twice_is_one_value():
    table = x32(4, seed=1)
    inner = jax.jit(lambda x: x + table)
    assert len(flat_of(lambda x: inner(x) * table, x32(4)).constants) == 1


def test_closed_over_arrays_that_nothing_reads_are_gone():
    table = x32(4, seed=1)

    def fn(x):
        _ = x + table
        return x * 2

    assert flat_of(fn, x32(4)).constants == ()


def test_every_argument_is_an_input_even_if_unused():
    assert len(flat_of(lambda x, y, z: y + 1, x32(4), x32(4), x32(4)).inputs) == 3


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x, x),
        lambda x: (jnp.sin(x),) * 3,
        lambda x: (1.0, 1.0, x),
        lambda x: (CLOSED_OVER, CLOSED_OVER, x),
        lambda x: (jnp.sin(x), jax.jit(lambda y: y)(x), x),
    ],
    ids=["argument", "value", "literal", "closed over", "through a call"],
)
def test_results_are_written_once_each(fn: Callable[..., Any]):
    flat = flat_of(fn, x32(4))
    written = [v for e in flat.equations for v in e.outputs]
    assert len(set(flat.outputs)) == len(flat.outputs)
    assert set(flat.outputs) <= set(written)
    found = evaluate(flat, Partitioner(flat, FAST).partition(1 << 30), [x32(4)])
    assert_same(found, jax.tree.leaves(jax.jit(fn)(x32(4))))


def on_platform(x: Any) -> Any:
    return jax.lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos, default=jnp.tan)


@pytest.mark.parametrize(
    ("platform", "name"), [("cpu", "sin"), ("cuda", "cos"), ("tpu", "tan")]
)
def test_what_depends_on_the_platform_is_what_it_is_there(platform: str, name: str):
    closed = jax.jit(on_platform).trace(x32(4)).jaxpr
    assert names(flatten(closed, seen=Seen(platform=platform))) == [name]


def test_what_depends_on_the_platform_is_a_branch_where_that_is_unknown():
    assert "cond" in names(flat_of(on_platform, x32(4)))


def test_a_task_has_one_operation_that_waits_for_threads_of_its_device():
    """Some at once, each with a thread that the others wait for, would never end."""

    def solves(a: Any, b: Any) -> Any:
        return [
            jax.lax.linalg.triangular_solve(a[i] + jnp.eye(4), b[i], left_side=True)
            for i in range(3)
        ]

    flat = flat_of(solves, x32(3, 5, 4, 4), x32(3, 5, 4, 1, seed=1))
    of_cpu = dataclasses.replace(FAST, one_a_task=LINEAR_ALGEBRA)
    counts = [
        [flat.equations[e].name for e in group.equations].count("triangular_solve")
        for group in Partitioner(flat, of_cpu).partition(1 << 30)
    ]
    assert counts == [1, 1, 1]
    assert len(Partitioner(flat, FAST).partition(1 << 30)) == 1


def test_what_is_joined_to_save_a_launch_holds_a_share_of_what_a_task_may():
    def products(x: Any, ws: Any) -> Any:
        for w in ws:
            x = x @ w
        return x

    flat = flat_of(products, x32(8, 64), [x32(64, 64, seed=s) for s in range(6)])
    counts = {
        share: len(
            Partitioner(flat, dataclasses.replace(FAST, joined_share=share)).partition(
                1 << 20
            )
        )
        for share in (1.0, 3 * 2**14 / 2**20, 0.0)
    }
    assert list(counts.values()) == [1, 3, 6]


CLOSED_OVER = x32(3, seed=7)


def test_an_argument_that_may_be_forwarded_is_a_result_as_it_is_once():
    flat = flat_of(lambda x, y: (x, y, x), x32(4), x32(4), forwarded=[0])
    assert flat.outputs[0] == flat.inputs[0]
    assert set(flat.outputs[1:]).isdisjoint(flat.inputs)
    assert names(flat) == ["copy", "copy"]


def test_types_are_those_of_the_jaxpr():
    flat = flat_of(lambda x, n: (x.astype(jnp.bfloat16), n + 1), x32(4), 3)
    assert [
        (t.shape, t.dtype, t.weak_type) for t in (flat.types[v] for v in flat.result_values)
    ] == [
        ((4,), jnp.bfloat16, False),
        ((), jnp.int32, True),
    ]


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [(jnp.float32, 24), (jnp.bfloat16, 12), (jnp.bool_, 6), (jnp.int4, 6)],
)
def test_bytes_of_a_value(dtype: Any, nbytes: int):
    flat = flat_of(lambda x: x, jax.ShapeDtypeStruct((2, 3), dtype))
    assert flat.types[flat.inputs[0]].nbytes == nbytes


def test_bytes_of_keys_are_those_of_their_data():
    flat = flat_of(lambda k: k, jax.random.split(jax.random.key(0), 3))
    assert flat.types[flat.inputs[0]].nbytes == 3 * 8


def test_bytes_of_no_elements():
    flat = flat_of(lambda x: x, jnp.zeros((0, 3)))
    assert flat.types[flat.inputs[0]].nbytes == 0


def test_effects_are_kept_in_order_even_inside_a_call():
    @jax.jit
    def inner(x):
        jax.debug.print("{}", x)
        return x

    def fn(x):
        jax.debug.print("{}", x * 2)
        return inner(x) + 1

    flat = flat_of(fn, x32(4))
    first, second = (e for e in flat.equations if e.effects)
    assert second.inputs[-1] == first.outputs[-1]


# The order


def random_program(rng: random.Random, size: int) -> tuple[Callable[..., Any], list[Any]]:
    """A function of some matrices: products, cheap chains, broadcasts, nested calls."""
    args = [x32(6, 6, seed=k) for k in range(rng.randint(1, 3))]
    choices = [
        (rng.randrange(9), rng.random(), rng.random(), rng.random()) for _ in range(size)
    ]
    results = [rng.random() for _ in range(rng.randint(1, 4))]

    def fn(*args: Any) -> Any:
        values = list(args)
        pick = lambda share: values[int(share * len(values))]
        for kind, a, b, c in choices:
            x, y = pick(a), pick(b)
            match kind:
                case 0 | 1:
                    value = jnp.tanh(x @ y / 6)
                case 2:
                    value = x + 0.5 * y
                case 3:
                    value = jnp.broadcast_to(x.sum(0), (6, 6)) / 36
                case 4:
                    value = jax.jit(lambda x, y: (x * y, x - y))(x, y)[int(2 * c)]
                case 5:
                    value = jnp.where(x > 0, y.T, CLOSED_OVER.sum())
                case 6:
                    value = jnp.sort(x, axis=0)
                case 7:
                    value = jax.nn.softmax(x, axis=-1)
                case _:
                    # No denormal: XLA folds those, and flushes them where it computes.
                    value = jnp.zeros((6, 6)) + round(c, 3)
            values.append(value)
        return [pick(share) for share in results]

    return fn, args


programs = st.builds(random_program, st.randoms(use_true_random=False), st.integers(0, 25))


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[bool], list[bool], list[tuple[int, ...]], Order]:
    """Which equations are heavy, which are glued, the ones each reads, and their order."""
    heavy = draw(st.lists(st.booleans(), max_size=20))
    operands = [
        tuple(sorted(draw(st.sets(st.integers(0, e - 1), max_size=3)))) if e else ()
        for e in range(len(heavy))
    ]
    glued = [
        not is_heavy and len(of) == 1 and draw(st.booleans())
        for is_heavy, of in zip(heavy, operands, strict=True)
    ]
    reduces = [draw(st.booleans()) for _ in heavy]
    some = st.sets(st.integers(0, 4), max_size=2)
    arguments = [set[int]() if is_glued else draw(some) for is_glued in glued]
    order = order_equations(heavy, glued, operands, reduces, arguments)
    return heavy, glued, operands, order


@given(orders())
def test_the_order_keeps_every_dependency(drawn: Any):
    heavy, _, operands, order = drawn
    assert sorted(order.equations) == list(range(len(heavy)))
    at = {e: position for position, e in enumerate(order.equations)}
    assert all(at[p] < at[e] for e in at for p in operands[e])
    assert all(0 <= cut <= len(heavy) for cut in order.cuts)


@given(orders())
def test_heavy_work_stays_in_program_order(drawn: Any):
    heavy, _, _, order = drawn
    found = [e for e in order.equations if heavy[e]]
    assert found == sorted(found)


@given(orders())
def test_what_is_glued_comes_right_after_what_it_reads(drawn: Any):
    _, glued, operands, order = drawn
    at = {e: position for position, e in enumerate(order.equations)}
    for e in at:
        if glued[e]:
            # Only others that are glued to the same, or what makes little of those.
            of = {operands[e][0]}
            for other in order.equations[at[operands[e][0]] + 1 : at[e]]:
                assert of.intersection(operands[other])
                of.add(other)


def test_what_leads_to_no_heavy_work_follows_what_it_depends_on():
    # 0 and 1 are heavy; 2 reads 0, and 3 reads 2: an update of what 0 made.
    order = order_equations([True, True, False, False], [False] * 4, [(), (), (0,), (2,)])
    assert order.equations == (0, 2, 3, 1)


def test_what_depends_on_no_heavy_work_comes_before_its_first_reader():
    # 0 is a mask that only the second heavy equation reads.
    order = order_equations([False, True, True], [False] * 3, [(), (), (0,)])
    assert order.equations == (1, 0, 2)


@pytest.mark.parametrize(
    ("operands", "reduces", "arguments", "expected"),
    [
        # 3 makes little of what 0 made; so does 4, for 5, once 3 is there.
        ([(), (0,), (1,), (0,)], [3], [], (0, 3, 1, 2)),
        ([(), (0,), (1,), (0,), (0, 3), (2, 4)], [4], [], (0, 3, 4, 1, 2, 5)),
        # 2 makes little of an argument that 1 reads too; 3 is what only 2 reads.
        ([(), (0,), (), ()], [2], [(), (7,), (7,), ()], (0, 1, 2, 3)),
        ([(), (0,), (1,), (), (3,)], [4], [(), (7,), (), (7,), ()], (0, 1, 3, 4, 2)),
    ],
)
def test_what_makes_little_of_much_comes_as_soon_as_it_can(
    operands: list[tuple[int, ...]],
    reduces: list[int],
    arguments: list[tuple[int, ...]],
    expected: tuple[int, ...],
):
    none = [False] * len(operands)
    reducing = [e in reduces for e in range(len(operands))]
    order = order_equations(none, none, operands, reducing, arguments)
    assert order.equations == expected


def test_what_heavy_work_needs_of_much_keeps_its_place():
    # 2 makes little of what 0 made, for 3, which is heavy, as is 1.
    heavy, reduces = [True, True, False, True], [False, False, True, False]
    operands = [(), (0,), (0,), (1, 2)]
    order = order_equations(heavy, [False] * 4, operands, reduces)
    assert order.equations == (0, 1, 2, 3)


def test_an_update_follows_the_gradient_it_uses_up():
    # Each weight's update comes right after its own gradient, not at the end.
    def step(weights, x):
        loss = lambda ws: functools.reduce(lambda x, w: jnp.exp(x @ w), ws, x).sum()
        grads = jax.grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]

    flat = flat_of(step, [x32(8, 8)] * 4, x32(8, 8))
    groups = Partitioner(flat, SLOW).partition(0)
    order = [flat.equations[g.equations[-1]].name for g in groups]
    updates = [k for k, name in enumerate(order) if name == "sub"]
    products = [k for k, name in enumerate(order) if name == "dot_general"]
    assert len(updates) == 4
    assert updates[0] < products[-1]


# Groups


def assert_groups_are_right(flat: FlatJaxpr, groups: Sequence[Group]) -> None:
    times = Counter(e for group in groups for e in group.equations)
    assert set(times) == set(range(len(flat.equations))), "every live equation is somewhere"
    written = set(flat.inputs) | {v for v, _ in flat.constants}
    for group in groups:
        inside = set(group.inputs)
        assert inside <= written, "a group reads what none before it wrote"
        assert len(set(group.inputs)) == len(group.inputs)
        for e in group.equations:
            values = {v for v in flat.equations[e].inputs if isinstance(v, int)}
            assert values <= inside, f"equation {e} comes before what it reads"
            inside.update(flat.equations[e].outputs)
        assert set(group.outputs) <= inside - set(group.inputs)
        assert written.isdisjoint(group.outputs), "a value leaves two groups"
        written.update(group.outputs)
    # What leaves no group is either repeated or not needed outside.
    assert set(flat.outputs) <= written
    cheap = {e for e, count in times.items() if count > 1}
    assert not {flat.equations[e].name for e in cheap} & costs.HEAVY, (
        "heavy work is repeated"
    )


BUDGETS = [0, 200, 1000, 5000, 1 << 30]


@given(programs, st.sampled_from(BUDGETS), st.sampled_from([SLOW, FAST]))
@settings(max_examples=80, deadline=None)
def test_groups_cover_the_function(
    program: tuple[Callable[..., Any], list[Any]], largest: int, rates: DeviceRates
):
    fn, args = program
    flat = flat_of(fn, *args)
    assert_groups_are_right(flat, Partitioner(flat, rates).partition(largest))


@pytest.mark.long
@given(programs, st.sampled_from(BUDGETS), st.sampled_from([SLOW, FAST]))
@settings(max_examples=25, deadline=None)
def test_groups_one_after_the_other_compute_the_function(
    program: tuple[Callable[..., Any], list[Any]], largest: int, rates: DeviceRates
):
    fn, args = program
    flat = flat_of(fn, *args)
    found = evaluate(flat, Partitioner(flat, rates).partition(largest), args)
    assert_same(found, jax.jit(fn)(*args))


def llama_loss() -> tuple[Callable[..., Any], list[Any]]:
    config = llama.config("tiny", layers=1, length=8, batch=1, vocabulary=64)
    tokens = np.random.default_rng(1).integers(0, 64, (1, 8), np.int32)
    args = [some_numbers(llama.abstract_params(config)), tokens]
    return jax.grad(functools.partial(llama.loss, config)), args


@pytest.mark.slow
@pytest.mark.parametrize("largest", [0, 20_000])
def test_groups_of_a_models_gradient_compute_it(largest: int):
    fn, args = llama_loss()
    flat = flat_of(fn, *args)
    groups = Partitioner(flat, SLOW).partition(largest)
    assert_groups_are_right(flat, groups)
    found = evaluate(flat, groups, jax.tree.leaves(args))
    assert_same(found, jax.tree.leaves(jax.jit(fn)(*args)))


def test_the_finest_groups_are_one_equation_each_beside_repeated_ones():
    fn, args = llama_loss()
    flat = flat_of(fn, *args)
    groups = Partitioner(flat, FAST).partition(0)
    times = Counter(e for group in groups for e in group.equations)
    for group in groups:
        # The last is its own; those before it blow something small up for it.
        assert all(
            times[e] >= 1 and flat.equations[e].name not in costs.HEAVY
            for e in group.equations[:-1]
        )
    assert len({g.equations[-1] for g in groups}) == len(groups)


def test_less_room_gives_more_groups():
    fn, args = llama_loss()
    partitioner = Partitioner(flat_of(fn, *args), FAST)
    counts = [len(partitioner.partition(n)) for n in (0, 5_000, 20_000, 100_000, 1 << 30)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 4 * counts[-1]


def test_a_product_worth_a_launch_is_a_task_of_its_own():
    fn = lambda x: jnp.tanh(jnp.tanh(x @ x) @ x) @ x
    flat = flat_of(fn, x32(8, 8))
    groups = Partitioner(flat, SLOW).partition(1 << 30)
    heavy = [
        sum(flat.equations[e].name == "dot_general" for e in group.equations)
        for group in groups
    ]
    assert heavy == [1, 1, 1]


@pytest.mark.parametrize(("share", "tasks"), [(4, 1), (1 / 2, 1), (1 / 16, 1), (0, 6)])
def test_a_chain_stays_whole_where_one_of_its_equations_holds_as_much(
    share: float, tasks: int
):
    def fn(x: jax.Array, y: jax.Array) -> jax.Array:
        z = jnp.sin(x) * y
        return jnp.tanh(z) * jnp.exp(x) + y

    flat = flat_of(fn, x32(64, 64), x32(64, 64))
    groups = Partitioner(flat, SLOW).partition(int(share * x32(64, 64).nbytes))
    assert len(groups) == tasks


def test_work_too_small_for_a_launch_is_joined():
    fn = lambda x: jnp.tanh(jnp.tanh(x @ x) @ x) @ x
    assert len(Partitioner(flat_of(fn, x32(8, 8)), FAST).partition(1 << 30)) == 1


@pytest.mark.parametrize("lookups", [1, 2, 3])
def test_what_begins_something_new_is_not_joined_with_what_ends_before_it(lookups: int):
    """Else the second batch would wait for the first."""
    tables, weight = [x32(64, 64) for _ in range(lookups)], x32(64 * lookups, 64)
    batches = [jnp.arange(64) // k for k in (1, 2, 3)]
    rows = lambda batch: jnp.concatenate([table[batch] for table in tables], axis=1)
    fn = lambda batches: [rows(batch) @ weight for batch in batches]
    flat = flat_of(fn, batches)
    # Lookups are too small for a launch, and products are not.
    groups = Partitioner(flat, DeviceRates(1e9, 1e15, 1e-5)).partition(1 << 30)
    assert_groups_are_right(flat, groups)
    of_batches = [set(group.inputs).intersection(flat.inputs) for group in groups]
    assert max(map(len, of_batches)) == 1


def found_by_halves(table: Any, asked: Any, rows: Any) -> Any:
    """A binary search as `jnp.searchsorted` does it, and rows at the places it finds."""
    low, high = jnp.zeros(asked.shape, jnp.int32), jnp.full(asked.shape, len(table))
    for _ in range(len(table).bit_length()):
        middle = (low + high) // 2
        is_left = asked < table[middle]
        low, high = jnp.where(is_left, low, middle), jnp.where(is_left, middle, high)
    return rows[high]


def test_a_task_has_no_long_chain_of_lookups():
    """XLA for the CPU took 108 s to compile one."""
    flat = flat_of(found_by_halves, x32(1000), x32(1000), x32(1000, 8))
    groups = Partitioner(flat, FAST).partition(1 << 30)
    assert_groups_are_right(flat, groups)
    lookups = [sum(flat.equations[e].name == "gather" for e in g.equations) for g in groups]
    assert sum(lookups) == 11
    assert max(lookups) == 4
    args = [jnp.sort(x32(1000)), x32(1000), x32(1000, 8)]
    assert_bitwise(evaluate(flat, groups, args), [jax.jit(found_by_halves)(*args)])


def test_lookups_that_do_not_follow_one_another_are_one_task():
    def fn(table: Any, places: Any) -> Any:
        return sum(table[(places + k) % 1000] for k in range(12))

    flat = flat_of(fn, x32(1000), jnp.arange(1000))
    assert len(Partitioner(flat, FAST).partition(1 << 30)) == 1


def test_a_large_broadcast_is_repeated_by_its_readers():
    # The mask is 64 KiB, made of nothing: no task should hold it for another.
    def fn(x):
        mask = jnp.tril(jnp.ones((128, 128), bool))
        for _ in range(3):
            x = jnp.where(mask, x @ x, 0.0)
        return x

    flat = flat_of(fn, x32(128, 128))
    groups = Partitioner(flat, SLOW).partition(1 << 30)
    passed = [flat.types[v].dtype for g in groups for v in g.outputs]
    assert len(groups) >= 3
    assert jnp.bool_ not in passed
    assert_groups_are_right(flat, groups)


@pytest.mark.parametrize(
    ("read", "then", "passed"),
    [
        (jnp.sum, jnp.cos, 0),
        (jnp.sum, None, 1),  # nothing else keeps what it is made of
        (lambda x: x @ x, jnp.cos, 1),  # for a product it would be written down again
        (jnp.tanh, jnp.cos, 1),  # which may be written over it
        (lambda x: jnp.sum(2 * x), jnp.cos, 0),
    ],
    ids=["reduced", "read last", "a product", "another", "a chain"],
)
def test_readers_repeat_what_is_quickly_made_of_what_is_there_anyway(
    read: Callable[[Any], Any], then: Callable[[Any], Any] | None, passed: int
):
    def fn(x: Any, mean: Any) -> Any:
        x = jnp.tanh(x)
        less = x - mean
        found = jnp.max(less), read(less)
        return found if then is None else (*found, then(x).sum())

    args = x32(64, 64), x32(64)
    flat = flat_of(fn, *args)
    groups = Partitioner(flat, FAST).partition(0)
    assert_groups_are_right(flat, groups)
    (less,) = (e.outputs[0] for e in flat.equations if e.name == "sub")
    assert sum(less in group.outputs for group in groups) == passed
    assert_same(evaluate(flat, groups, args), jax.tree.leaves(jax.jit(fn)(*args)))


def test_refining_cuts_only_the_groups_that_are_named():
    fn, args = llama_loss()
    flat = flat_of(fn, *args)
    partitioner = Partitioner(flat, SLOW)
    groups = partitioner.partition(1 << 30)
    large = max(range(len(groups)), key=lambda k: len(groups[k].equations))
    finer = partitioner.refine(groups, frozenset([large]))
    assert finer[:large] == groups[:large]
    assert finer[large + 2 :] == groups[large + 1 :]
    assert_groups_are_right(flat, finer)


def test_refining_puts_what_holds_most_by_itself_alone():
    def fn(x: Any) -> Any:
        for _ in range(6):
            x = jnp.sin(x) + 1
        x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=3)
        for _ in range(6):
            x = jnp.cos(x) * 2
        return x

    flat = flat_of(fn, x32(8, 8))
    partitioner = Partitioner(flat, FAST)
    groups = partitioner.partition(1 << 30)
    assert len(groups) == 1
    finer = partitioner.refine(groups, frozenset([0]))
    alone = [[flat.equations[e].name for e in g.equations] for g in finer]
    assert len(alone) == 3
    assert alone[1] == ["scan"]
    assert_groups_are_right(flat, finer)


def test_refining_so_many_times_cuts_what_was_cut():
    def fn(x: Any) -> Any:
        for _ in range(12):
            x = jnp.roll(x, 1) * 2
        return x

    flat = flat_of(fn, x32(8, 8))
    partitioner = Partitioner(flat, FAST)
    (whole,) = groups = partitioner.partition(1 << 30)
    for cuts in (1, 2, 3):
        finer = partitioner.refine(groups, frozenset([0]), cuts)
        assert len(finer) == 2**cuts
        assert_groups_are_right(flat, finer)
        one_by_one = groups
        for _ in range(cuts):
            everything = frozenset(range(len(one_by_one)))
            one_by_one = partitioner.refine(one_by_one, everything)
        assert finer == one_by_one
    assert len(whole.equations) > 8


def test_refining_single_equations_changes_nothing():
    fn, args = llama_loss()
    partitioner = Partitioner(flat_of(fn, *args), FAST)
    groups = partitioner.partition(0)
    assert partitioner.refine(groups, frozenset(range(len(groups)))) == groups


@given(programs)
@settings(max_examples=25, deadline=None)
def test_refining_over_and_over_ends_at_single_equations(
    program: tuple[Callable[..., Any], list[Any]],
):
    fn, args = program
    flat = flat_of(fn, *args)
    partitioner = Partitioner(flat, FAST)
    groups = partitioner.partition(1 << 30)
    while True:
        finer = partitioner.refine(groups, frozenset(range(len(groups))))
        assert_groups_are_right(flat, finer)
        if len(finer) == len(groups):
            break
        groups = finer
    assert finer == partitioner.partition(0)


def test_a_function_of_no_equations_has_no_groups():
    flat = flat_of(lambda x: x, x32(4), forwarded=[0])
    assert Partitioner(flat, SLOW).partition(0) == []


# Keys


def keys_of(fn: Callable[..., Any], *args: Any) -> list[Any]:
    flat = flat_of(fn, *args)
    return [group_key(flat, g) for g in Partitioner(flat, SLOW).partition(1 << 30)]


def test_equal_layers_have_equal_keys():
    keys = keys_of(tower, x32(8, 8), [x32(8, 8)] * 20)
    assert len(keys) >= 20
    fewer = keys_of(tower, x32(8, 8), [x32(8, 8)] * 5)
    assert all(key in fewer for key in keys)
    assert all(key in keys for key in fewer)


@pytest.mark.slow
def test_equal_functions_traced_apart_have_equal_keys():
    first = keys_of(lambda x: jax.nn.softmax(x @ x), x32(8, 8))
    jax.clear_caches()
    again = keys_of(lambda y: jax.nn.softmax(y @ y), x32(8, 8))
    assert first == again


@pytest.mark.long
def test_equal_loops_traced_apart_have_equal_keys():
    def fn(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), c.sum()), x, length=3)

    first = keys_of(fn, x32(8, 8))
    jax.clear_caches()
    assert keys_of(fn, x32(8, 8)) == first


BASE = lambda x, y: jnp.cumsum(x @ y, axis=0) * 2.0


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x, y: jnp.cumsum(x @ y, axis=0) * 3.0, (x32(8, 8), x32(8, 8))),
        (lambda x, y: jnp.cumsum(x @ y, axis=1) * 2.0, (x32(8, 8), x32(8, 8))),
        (lambda x, y: jnp.cumprod(x @ y, axis=0) * 2.0, (x32(8, 8), x32(8, 8))),
        (lambda x, y: jnp.cumsum(x @ x, axis=0) * 2.0, (x32(8, 8), x32(8, 8))),
        (lambda x, y: (x @ y, jnp.cumsum(x @ y, axis=0) * 2.0), (x32(8, 8), x32(8, 8))),
        (BASE, (x32(8, 4), x32(4, 8))),
        (BASE, (x32(8, 8).astype(jnp.bfloat16), x32(8, 8).astype(jnp.bfloat16))),
    ],
    ids=["literal", "param", "primitive", "operands", "results", "shape", "dtype"],
)
def test_what_differs_has_another_key(fn: Callable[..., Any], args: tuple[Any, ...]):
    whole = lambda fn, args: [
        group_key(flat, g)
        for flat in [flat_of(fn, *args)]
        for g in Partitioner(flat, FAST).partition(1 << 30)
    ]
    assert whole(fn, args) != whole(BASE, (x32(8, 8), x32(8, 8)))


def test_a_weak_type_makes_another_key():
    keys = keys_of(lambda x: x * 2, 3.0), keys_of(lambda x: x * 2, jnp.float32(3.0))
    assert keys[0] != keys[1]


def test_matmul_precision_makes_another_key():
    fn = lambda x: x @ x
    usual = keys_of(fn, x32(8, 8))
    with jax.default_matmul_precision("highest"):
        assert keys_of(fn, x32(8, 8)) != usual


def test_different_loop_bodies_have_different_keys():
    def loop(factor: float) -> Callable[..., Any]:
        return lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c * factor, x)

    assert keys_of(loop(2.0), x32(8, 8)) != keys_of(loop(3.0), x32(8, 8))


def test_different_callbacks_have_different_keys():
    def calling(factor: float) -> Callable[..., Any]:
        return lambda x: jax.pure_callback(lambda a: a * np.float32(factor), x, x)

    assert keys_of(calling(2.0), x32(8, 8)) != keys_of(calling(3.0), x32(8, 8))


# Costs


def test_a_products_flops_are_two_for_each_multiplication():
    flat = flat_of(lambda x, y: x @ y, x32(3, 5), x32(5, 7))
    (product,) = flat.equations
    assert costs.flops(product.origin) == 2 * 3 * 5 * 7


def test_a_batched_products_flops():
    flat = flat_of(
        lambda x, y: jnp.einsum("bij,bjk->bik", x, y), x32(2, 3, 5), x32(2, 5, 7)
    )
    found = [costs.flops(e.origin) for e in flat.equations if e.name == "dot_general"]
    assert found == [2 * 2 * 3 * 5 * 7]


def test_a_scans_flops_are_its_bodys_times_its_length():
    def loop(length: int) -> float:
        fn = lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=length)[0]
        flat = flat_of(fn, x32(8, 8))
        return sum(costs.flops(e.origin) for e in flat.equations)

    assert loop(30) / loop(10) == pytest.approx(3, rel=0.1)


def test_all_pairs_of_budgets_and_rates_are_deterministic():
    fn, args = llama_loss()
    flat = flat_of(fn, *args)
    for rates, largest in itertools.product((SLOW, FAST), BUDGETS):
        first = Partitioner(flat, rates).partition(largest)
        assert first == Partitioner(flat, rates).partition(largest)


def test_what_is_fused_takes_no_room_in_a_block():
    """Of distances to centres, XLA writes down the distances, and none of the differences
    that are squared and summed."""

    def nearest(x: Any, centres: Any) -> Any:
        return ((x[:, None] - centres) ** 2).sum(-1).argmin(1)

    x, centres = jnp.zeros((1000, 8)), jnp.zeros((32, 8))
    flat = flatten(jax.jit(nearest).trace(x, centres).jaxpr)
    stretches = Search().stretches_of(flat)
    (result,) = flat.result_values
    stretch = stretches.along(stretches.ruled(), result, 0)
    assert stretch is not None
    distances, numbered = 1000 * 32 * 4, 1000 * 32 * 4
    ends = x.nbytes + 1000 * 4
    assert stretches.widest_bytes(stretch, fused=True) <= distances + numbered + ends
    assert stretches.widest_bytes(stretch) >= 2 * 1000 * 32 * 8 * 4
