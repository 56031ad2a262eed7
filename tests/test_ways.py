"""Which ways to cut a function are made, and when one is given up."""

import dataclasses
import functools
import math
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, whole_bytes
from flat import flat_of

import jturnip
from jturnip.compiler.executables import TooManyTasks
from jturnip.errors import DoesNotFit, HostMemoryError
from jturnip.frontend import blocks, cutting, effort
from jturnip.frontend.blocks import Ways
from jturnip.frontend.choosing import Search
from jturnip.frontend.effort import Effort, Sofar
from jturnip.frontend.materializing import Again
from jturnip.frontend.partition import Group, Partitioner
from jturnip.frontend.values import FlatJaxpr
from jturnip.placement import Budget
from jturnip.programs import make, splitting, tries, ways
from jturnip.programs.devices import rates
from jturnip.programs.needs import Needs
from jturnip.programs.setting import Function, How, Setting
from jturnip.runtime.schedule import Link


def partitioner_of(flat: FlatJaxpr, staying: Sequence[int] = ()) -> Partitioner:
    return Partitioner(flat, rates(jax.devices()[0]), staying)


def whole_of(flat: FlatJaxpr) -> Group:
    """All equations as one task."""
    (group,) = partitioner_of(flat).partition(1 << 40)
    return group


def sorted_and_scaled(x: Any, small: Any) -> Any:
    return jnp.sort(x, 0), small * 2 + 1


BIG, SMALL = jnp.zeros((64, 64)), jnp.zeros(64)  # 16384 and 256 bytes


def test_what_others_touch_is_taken_off_with_copies_of_it():
    flat = flat_of(sorted_and_scaled, BIG, SMALL)
    e, least = partitioner_of(flat).neediest(whole_of(flat), 100_000)
    assert flat.equations[e].name == "sort"
    # The argument, what is between two equations, and the result; and it may be sorted in
    # its place.
    assert least == 100_000 - 3 * 3 * SMALL.nbytes - BIG.nbytes
    in_place = dataclasses.replace(whole_of(flat), overwrites=((0, 0),))
    assert partitioner_of(flat).neediest(in_place, 100_000) == (e, least + BIG.nbytes)


def test_of_what_others_read_too_there_may_be_copies():
    flat = flat_of(lambda x: jnp.sort(x, 0).sum(1), BIG)
    e, least = partitioner_of(flat).neediest(whole_of(flat), 100_000)
    assert flat.equations[e].name == "sort"
    assert least == 100_000 - 3 * SMALL.nbytes - 2 * BIG.nbytes - BIG.nbytes


def test_what_is_on_the_device_anyway_is_not_taken_off():
    flat = flat_of(sorted_and_scaled, BIG, SMALL)
    partitioner = partitioner_of(flat, staying=flat.inputs)
    e, least = partitioner.neediest(whole_of(flat), 100_000)
    assert least == 100_000 - 3 * 2 * SMALL.nbytes
    assert partitioner.there(e) == BIG.nbytes


def test_what_an_equation_needs_is_known_in_another_cut():
    flat = flat_of(sorted_and_scaled, BIG, SMALL)
    partitioner = partitioner_of(flat)
    (sort,) = (i for i, e in enumerate(flat.equations) if e.name == "sort")
    refusal = DoesNotFit("no", needed_bytes=100_000, gpu_bytes=50_000)
    needs, surely = Needs(), 100_000
    needs.know(flat.equations[sort], surely, refusal, Budget(50_000))
    finest = lambda: partitioner.partition(0)
    needs.refuse(flat, partitioner, Budget(60_000), surely, finest)
    taken = Budget(60_000, taken=5_000)
    with pytest.raises(DoesNotFit, match="no") as caught:
        needs.refuse(flat, partitioner, taken, surely - 1, finest)
    assert caught.value.gpu_bytes == 60_000
    assert caught.value.needed_bytes == 105_000
    # What it reads may be on the device anyway, and is none of its own then.
    there = partitioner_of(flat, staying=flat.inputs)
    needs.refuse(flat, there, Budget(60_000), surely - 1, finest)
    with pytest.raises(DoesNotFit):
        needs.refuse(flat, there, Budget(60_000), surely - BIG.nbytes - 1, finest)
    needs.clear()
    needs.refuse(flat, partitioner, Budget(60_000), 0, finest)


def test_a_task_that_cannot_be_cut_is_known_where_nothing_spares_it_more():
    flat = flat_of(sorted_and_scaled, BIG, SMALL)
    partitioner = partitioner_of(flat)
    alone = partitioner.partition(0)
    (group,) = (
        g for g in alone if any(flat.equations[e].name == "sort" for e in g.equations)
    )
    refusal = DoesNotFit("no", needed_bytes=100_000, gpu_bytes=50_000)
    needs, nbytes = Needs(), 100_000
    needs.know_alone(flat, partitioner, group, nbytes, refusal, Budget(50_000))
    refuse = functools.partial(needs.refuse, flat)
    refuse(partitioner, Budget(60_000), nbytes, lambda: alone)
    with pytest.raises(DoesNotFit, match="no"):
        refuse(partitioner, Budget(60_000), nbytes - 1, lambda: alone)
    # Elsewhere it may write over what it reads, or read what is on the device anyway.
    over = dataclasses.replace(group, overwrites=((0, 0),))
    spared = [over if g is group else g for g in alone]
    refuse(partitioner, Budget(60_000), nbytes - 1, lambda: spared)
    there = partitioner_of(flat, staying=flat.inputs)
    refuse(there, Budget(60_000), nbytes - 1, lambda: alone)
    needs.clear()
    refuse(partitioner, Budget(60_000), 0, lambda: alone)


@pytest.mark.long
def test_a_loop_that_is_in_the_way_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    """However the function around it is cut; and once more to know what to ask for."""
    compiled: Counter[int] = Counter()
    kept: list[Any] = []
    compile_groups = splitting._compile

    def counting(flat: FlatJaxpr, groups: Sequence[Group], *rest: Any, **more: Any) -> Any:
        for e in (flat.equations[i] for g in groups for i in g.equations):
            if e.name in ("scan", "while"):
                kept.append(e.origin)
                compiled[id(e.origin)] += 1
        return compile_groups(flat, groups, *rest, **more)

    monkeypatch.setattr(splitting, "_compile", counting)

    def fn(x: Any, w: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            return jnp.sort(jnp.sort(c * 1.01, 0), 1) @ jnp.linalg.qr(c)[0], None

        c, _ = jax.lax.scan(body, x, None, length=3)
        return c.sum(), jnp.tanh(w[:, None] * w[None] + c[0, 0]) @ w

    random = np.random.default_rng(0)
    args = (random.normal(size=shape).astype(np.float32) for shape in ((256, 256), 700))
    with pytest.raises(DoesNotFit):
        jturnip.jit(fn, 500_000)(*jturnip.host(tuple(args)))
    assert compiled
    assert max(compiled.values()) <= 2


@pytest.mark.long
def test_no_more_ways_are_looked_for_around_a_loop_that_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
):
    """By itself it could fit, if XLA never wrote down what it begins with. All that may be
    looked at was so used up, and loops were not driven, which would have done."""
    looked: list[int] = []
    cut_along_axes = ways.cut_along_axes

    def looking(*given: Any) -> Any:
        looked.append(0)
        for each in cut_along_axes(*given):
            looked[-1] += 1
            yield each

    monkeypatch.setattr(ways, "cut_along_axes", looking)

    def fn(x: Any, w: Any) -> Any:
        body = lambda c, _: (jnp.sort(jnp.sort(c * 1.01, 0), 1) @ jnp.linalg.qr(c)[0], None)
        c, _ = jax.lax.scan(body, 2 * x + 1, None, length=3)
        return c.sum(), jnp.tanh(w[:, None] * w[None] + c[0, 0]) @ w

    random = np.random.default_rng(0)
    args = tuple(random.normal(size=n).astype(np.float32) for n in ((256, 256), 700))
    results = jturnip.jit(fn, 800_000)(*jturnip.host(args))
    # Sums of 65536 numbers, and of 700, each the end of three products of 256.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3),
        results,
        jax.jit(fn)(*args),
    )
    assert looked
    assert max(looked) == 1


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks were to be compiled, each time."""
    compiled: list[int] = []
    compile_groups = splitting._compile

    def counting(flat: FlatJaxpr, groups: Sequence[Group], *rest: Any, **more: Any) -> Any:
        compiled.append(len(groups))
        return compile_groups(flat, groups, *rest, **more)

    monkeypatch.setattr(splitting, "_compile", counting)
    return compiled


def test_what_is_expected_to_need_most_is_compiled_first(compiled: list[int]):
    """Where it cannot be cut and does not fit, the others need not be compiled."""

    def fn(x: Any, w: Any) -> Any:
        large = jnp.linalg.eigh(x @ x.T)[1]
        for n in range(1, 20):
            w = jnp.sin(w * n) @ w
        return large, w

    traced = jax.jit(fn).trace(jnp.ones((128, 16)), jnp.ones((16, 16)))
    lowered = jturnip.jit(fn, 130_000).lower(*traced.args_info[0])
    how = dataclasses.replace(lowered._budgeted.how(), axes=False, finest=True)
    arguments = lowered._budgeted.flattened.given
    setting = Setting(arguments, Budget(140_000), how)
    with pytest.raises(DoesNotFit, match="eigh"):
        make.make_program(Function(traced.jaxpr), setting)
    assert sum(compiled) < 10


def test_what_is_too_large_as_it_is_is_compiled_once(compiled: list[int]):
    """What it reads and writes is more than there is: in another form of the function, the
    others are not compiled to say so again."""
    traced = jax.jit(lambda x, y: (jnp.sort(x, 0), jax.lax.rev(y, (0,)))).trace(
        BIG, BIG[:48]
    )
    lowered = jturnip.jit(lambda x, y: (x, y), 30_000).lower(*jturnip.host((BIG, BIG[:48])))
    given = lowered._budgeted.flattened.given
    setting = Setting(given, Budget(30_000), lowered._budgeted.how())
    flat = Function(traced.jaxpr).flat(setting.seen())
    (i,) = (i for i, e in enumerate(flat.equations) if e.name == "rev")
    origin = flat.equations[i].origin
    origin = origin.replace(params={**origin.params, "dimensions": (1,)})
    other = dataclasses.replace(flat.equations[i], origin=origin)
    equations = (*flat.equations[:i], other, *flat.equations[i + 1 :])
    with pytest.raises(DoesNotFit, match="sort"):
        splitting.split(flat, setting)
    assert compiled == [2]
    with pytest.raises(DoesNotFit, match="sort"):
        splitting.split(dataclasses.replace(flat, equations=equations), setting)
    assert compiled == [2]


def test_a_task_has_not_thousands_of_equations():
    """XLA takes much longer for one of 4,000 than for eight of 500."""

    def fn(x: Any) -> Any:
        for n in range(600):
            x = jnp.sin(x) + n
        return x

    flat = flat_of(fn, SMALL)
    groups = partitioner_of(flat).partition(1 << 40)
    assert sum(len(g.equations) for g in groups) == len(flat.equations) == 1200
    assert max(len(g.equations) for g in groups) <= 500
    assert len(groups) <= 6


@dataclasses.dataclass
class Made:
    """What a way becomes, as far as `_Compared` looks at it."""

    flat: FlatJaxpr
    plan: Any
    split: Any


def compared(
    moved: int,
    refuse: Sequence[int] = (),
    any_plan: bool = False,
    tasks: Sequence[Any] = (),
    most: list[float] | None = None,
) -> Any:
    """Of a function whose ways move so many bytes; those with so many equations do not
    fit. Each equation is an executable, of which one more than was allowed is too many."""
    flat = flat_of(sorted_and_scaled, BIG, SMALL)

    def made(cut: FlatJaxpr, allowed: float) -> Any:
        count = len(cut.equations)
        if most is not None:
            most.append(allowed)
        if count in refuse:
            raise DoesNotFit("no", needed_bytes=2, gpu_bytes=1)
        if count > allowed:
            raise TooManyTasks
        return Made(cut, Plan(moved), Split(Graph(tuple(tasks)), (None,) * count))

    return ways._Compared(flat, made, any_plan)


@dataclasses.dataclass
class Plan:
    h2d_bytes: int
    d2h_bytes: int = 0
    predicted_seconds: float = 1.0


@dataclasses.dataclass
class Graph:
    tasks: tuple[Any, ...]
    buffers: tuple[Any, ...] = (types.SimpleNamespace(nbytes=100),)


@dataclasses.dataclass
class Split:
    graph: Graph
    executables: tuple[Any, ...]


def ways_of(*counts: int, anew: bool = False, again: Again | None = None) -> list[Ways]:
    """Ways with so many equations."""
    flat = flat_of(sorted_and_scaled, BIG, SMALL)
    (equation, *_) = flat.equations
    return [
        Ways((dataclasses.replace(flat, equations=(equation,) * n),), False, anew, again)
        for n in counts
    ]


MUCH, LITTLE = 1 << 30, 1


def lengths(found: Any) -> list[int]:
    return [len(made.flat.equations) for made in found.found]


def in_tiles(count: int) -> list[Ways]:
    return [dataclasses.replace(each, in_grids=True) for each in ways_of(count)]


@pytest.mark.parametrize(("tasks", "found"), [(200, [80]), (400, [80, 20, 4])])
def test_many_tiles_are_compared_with_fewer_parts(tasks: int, found: list[int]):
    task = types.SimpleNamespace(seconds=1.0, bytes_accessed=0, inputs=(), outputs=())
    some = compared(MUCH, tasks=[task] * tasks)
    some.look(iter([*in_tiles(80), *ways_of(21, 20, 4, 60)]))
    assert lengths(some) == found


def test_what_has_many_more_equations_is_not_made():
    some = compared(MUCH)
    some.look(iter(ways_of(10, 21, 20, 4, 9, 8)))
    assert lengths(some) == [10, 20, 4, 8]


def test_so_many_ways_are_looked_for_after_the_first():
    """Each takes time to find, also where it has too many equations to be made."""
    some = compared(MUCH, refuse=(100,))
    count = ways._MOST_WAYS
    some.look(iter(ways_of(*[100] * count, 10, *[21] * (count - 1), 9, 8)))
    assert lengths(some) == [10, 9]


@pytest.mark.parametrize(
    ("seconds", "accessed", "found"),
    [
        (1.0, 200, [40, 39]),  # no more executables than the best one has
        (0.5, 200, [40, 60, 50, 39]),  # that waits half of the time
        (1.0, 400, [40, 60, 50, 39]),  # that copies as much as goes in and out
    ],
)
def test_what_takes_more_to_compile_is_made_only_where_there_is_much_to_gain(
    seconds: float, accessed: int, found: list[int]
):
    task = types.SimpleNamespace(
        seconds=seconds, bytes_accessed=accessed, inputs=(0,), outputs=(0,)
    )
    some = compared(MUCH, tasks=[task], most=(most := []))
    some.look(iter(ways_of(40, 60, 50, 39, 38)))
    assert lengths(some) == found
    assert most[0] == math.inf
    assert len(most) == 4  # that were looked at


@pytest.mark.parametrize(("share", "much"), [(0.35, False), (0.45, True)])
def test_blocks_are_compared_where_much_is_written_down(share: float, much: bool):
    """To cut a training step of a small Llama takes longer than all else, for nothing."""
    (cut,) = ways_of(10)[0].cut
    task = types.SimpleNamespace(seconds=1.0, inputs=(0,), outputs=(0,))
    one_gigabyte = (types.SimpleNamespace(nbytes=10**9),)
    made: Any = Made(cut, Plan(0), Split(Graph((task,), one_gigabyte), ()))
    expected = dataclasses.replace(rates(jax.devices()[0]), bytes_per_second=2e9 / share)
    assert ways._writes_down_much(made, expected) == much


@pytest.mark.parametrize(
    ("seconds", "looked"),
    [
        ([5, 4, 3, 2], 3),  # enough are known
        ([5, 6, 7, 2], 3),  # two were no better than the first
        ([5, 0, 6, 2], 3),  # or did not fit
        ([0, 0, 0, 5, 6, 2, 1], 6),  # but the first often do not fit
        ([12, 13, 2], 2),  # or than what there is
        ([9, 11, 9] * 20, 3),
        ([0] * 20, 12),
    ],
)
def test_no_more_ways_are_compared_after_some_that_were_no_better(
    seconds: list[int], looked: int
):
    """Each takes seconds to compile. Those that do not fit take none here."""

    def made(seconds: float) -> Any:
        return Made(cut, Plan(MUCH, predicted_seconds=seconds), None)

    (cut,) = ways_of(1)[0].cut
    asked: list[float] = []

    def make(_: FlatJaxpr) -> Any:
        asked.append(seconds[len(asked)])
        if not asked[-1]:
            raise DoesNotFit("no", needed_bytes=2, gpu_bytes=1)
        return made(asked[-1])

    best = ways._or_faster(made(10), iter([[cut]] * len(seconds)), make, Sofar())
    assert len(asked) == looked
    assert best.plan.predicted_seconds == min([10, *filter(None, asked)])


def test_one_way_that_takes_clearly_less_will_do_where_each_takes_seconds_to_compile():
    (cut,) = ways_of(1)[0].cut
    made = lambda seconds: Made(cut, Plan(MUCH, predicted_seconds=seconds), None)
    asked = iter([9, 7, 4, 1])
    make: Any = lambda _: made(next(asked))
    first: Any = made(10)
    assert (
        ways._or_faster(
            first, iter([[cut]] * 4), make, Sofar(), 2 / 3
        ).plan.predicted_seconds
        == 4
    )
    assert next(asked) == 1


def test_blocks_that_fit_follow_from_what_two_others_needed():
    """A part that is the same for all, of 0.2; of the rest, a share that they ask for."""
    needs = lambda at_once: (at_once, 0.2 + 3 / at_once)
    first, *others = blocks._smaller_that_fit([needs(1), needs(2)])
    assert needs(first)[1] == pytest.approx(blocks._FULL)
    assert others == sorted(others)
    assert not list(blocks._smaller_that_fit([needs(1)]))
    assert not list(blocks._smaller_that_fit([needs(2), needs(1)]))
    assert not list(blocks._smaller_that_fit([needs(1), needs(1)]))
    assert not list(blocks._smaller_that_fit([(1, 3), (2, 3)]))  # it is not the blocks
    assert not list(blocks._smaller_that_fit([(1, 2.5), (2, 2)]))  # the rest is too much


def test_what_differs_in_the_number_of_blocks_only_is_not_made():
    task = types.SimpleNamespace(seconds=1.0, bytes_accessed=200, inputs=(0,), outputs=(0,))
    some = compared(MUCH, tasks=[task])
    some.look(iter(ways_of(20, 20, 19)))
    assert lengths(some) == [20, 19]


def test_few_executables_may_always_be_compiled():
    task = types.SimpleNamespace(seconds=1.0, bytes_accessed=200, inputs=(0,), outputs=(0,))
    some = compared(MUCH, tasks=[task])
    some.look(iter(ways_of(17, 32, 33)))
    assert lengths(some) == [17, 32]


def test_the_first_that_moves_little_will_do():
    some = compared(LITTLE, refuse=(10,))
    some.look(iter(ways_of(10, 30, 7)))
    assert lengths(some) == [30]
    assert len(some.refusals) == 1


def test_another_way_for_which_the_host_has_no_room_is_left_out():
    some = compared(MUCH)
    make, hopeless = some.make, ways_of(20)[0].cut[0]

    def made(cut: FlatJaxpr, allowed: float) -> Any:
        if len(cut.equations) == len(hopeless.equations):
            raise HostMemoryError("no")
        return make(cut, allowed)

    some.make = made
    some.look(iter(ways_of(30, 20, 25)))
    assert lengths(some) == [30, 25]
    some = dataclasses.replace(some, found=[])
    with pytest.raises(HostMemoryError):
        some.look(iter(ways_of(20)))


LINK = Link(1e9, 1e9)


def test_what_is_made_anew_is_also_kept():
    """That is looked at for itself, also with many more equations."""
    some = compared(LITTLE)
    some.look(iter(ways_of(30, anew=True)))
    some.look_to_keep(lambda: iter(ways_of(90, 50)), LINK)
    assert lengths(some) == [30, 90]


@pytest.mark.parametrize(
    ("share", "moved", "found"),
    [
        (0.5, 1e8, [30, 40]),
        (0.2, 1e8, [30]),  # it would not be much faster
        (0.5, 1e9, [30]),  # it takes as long to move it
    ],
)
def test_what_loops_make_anew_is_kept_where_that_may_be_faster(
    share: float, moved: int, found: list[int]
):
    again = Again(1.0, share, written_bytes=int(moved), read_bytes=int(moved))
    some = compared(LITTLE)
    some.look(iter(ways_of(30, again=again)))
    # One that makes it anew as well is not made, nor one with so many equations.
    kept = [*ways_of(20, again=again), *ways_of(30, ways._MOST_KEPT + 1, 40, 10)]
    some.look_to_keep(lambda keep: iter(kept) if keep else iter(()), LINK)
    assert lengths(some) == found


def test_any_plan_will_do_where_it_is_only_asked_whether_there_is_one():
    some = compared(MUCH, any_plan=True)
    some.look(iter(ways_of(10, 9)))
    assert lengths(some) == [10]


def test_equations_count_as_often_as_they_are_looked_at():
    effort_of_one = Effort()
    effort_of_one.looked_at(3)
    effort_of_one.looked_at(4)
    effort_of_one.made_tasks(5)
    assert effort_of_one == Effort(7 + 5 * effort._OF_TASKS)
    assert not effort_of_one.is_enough
    assert Effort(effort._ENOUGH + 1).is_enough


def test_what_takes_the_rest_of_the_effort_is_no_way():
    """Where only little is looked at, since it is only asked what a part would take."""
    patience = 0.06
    most = int(patience * effort._ENOUGH) // effort._OF_TASKS
    asked = Effort(patience=patience)
    assert not asked.is_too_much_for(most)
    assert asked.is_too_much_for(most + 1)
    asked.looked_at(effort._OF_TASKS)
    assert asked.is_too_much_for(most)
    assert not Effort().is_too_much_for(most)


def kernel_sums(x: Any, y: Any) -> Any:
    """Of all pairs, which no way keeps."""
    return jnp.exp(-((x[:, None] - y[None]) ** 2)).sum(1)


MANY = np.linspace(0, 1, 2048, dtype=np.float32)


def test_once_enough_was_looked_at_there_are_no_ways_to_cut_a_function():
    flat = flat_of(kernel_sums, MANY, MANY)
    where, cpu = blocks.Where(frozenset()), jax.devices("cpu")[0]

    def ways(effort: Effort) -> list[Ways]:
        arena = MANY.nbytes * 64
        found = blocks.cut_along_axes(flat, where, arena, rates(cpu), 1e-9, effort=effort)
        return list(found)

    looked_at = Effort()
    assert ways(looked_at)
    assert 0 < looked_at.equations <= effort._ENOUGH
    assert not ways(Effort(effort._ENOUGH + 1))


def ways_to_cut(fn: Any, sofar: Sofar) -> Iterator[Ways]:
    flat = flat_of(fn, MANY, MANY)
    where, arena = blocks.Where(frozenset(), frozenset()), MANY.nbytes * 64
    cpu = jax.devices("cpu")[0]
    return blocks.cut_along_axes(flat, where, arena, rates(cpu), 1e-9, sofar=sofar)


def test_ways_with_too_many_equations_are_left_out_and_counted():
    plain = list(ways_to_cut(kernel_sums, Sofar()))
    tasks = [way for way in plain if len(way.cut[0].equations) > 4]
    assert tasks
    assert len(tasks) < len(plain)
    for way in ways_to_cut(kernel_sums, Sofar(most_equations=4)):
        assert way.in_grids or all(len(cut.equations) <= 4 for cut in way.cut)
        assert way.cut or way.left_out


def two_kernels(x: Any, y: Any) -> Any:
    """The second is large only in a smaller share of what there is."""
    return kernel_sums(x, y).sum() + kernel_sums(x[:256], y[:256]).sum()


def test_smaller_blocks_come_next_where_some_are_too_large():
    """Not others that are as large for what there is."""
    sofar, found = Sofar(), []
    for way in ways_to_cut(two_kernels, sofar):
        found.append(way)
        sofar.times = 1.5
    assert 0 < len(found) < len(list(ways_to_cut(two_kernels, Sofar())))


def test_parts_are_made_once_for_all_forms_of_a_function():
    flat = flat_of(kernel_sums, MANY, MANY)
    stretches = Search().stretches_of(flat)
    largest = max(flat.equations, key=lambda e: flat.types[e.outputs[0]].nbytes)
    stretch = stretches.along(range(len(flat.equations)), largest.outputs[0], 0)
    assert stretch is not None
    made, none = cutting.Made(), frozenset[int]()
    forms = [
        cutting.with_cuttings(
            stretches, [cutting.Tasks(stretch, 512, 0, none, left, none)], made
        )
        for left in (none, frozenset(stretch.leaving))  # put together, or in parts
    ]
    parts = [{id(e.origin) for e in form.equations if e.ours} for form in forms]
    assert parts[1] < parts[0]
    assert 3 * len(parts[1]) < len(forms[1].equations)


def networks_trained(weights: Any, x: Any, y: Any) -> Any:
    """Some networks, of which each layer is one product for all."""

    def loss(weights: Any) -> Any:
        hidden = jnp.broadcast_to(x, (len(weights[0]), *x.shape))
        for weight in weights[:-1]:
            hidden = jax.nn.silu(hidden @ weight)
        return jnp.mean(jnp.square(hidden @ weights[-1] - y))

    for _ in range(3):
        gradients = jax.grad(loss)(weights)
        weights = jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients)
    return weights


@pytest.mark.long
def test_smaller_blocks_are_tried_rather_than_to_move_what_others_are_too_large_for():
    normal = np.random.default_rng(0).standard_normal
    weights = [normal((16, *s), np.float32) / 8 for s in ((32, 64), (64, 64), (64, 1))]
    args = weights, normal((2048, 32), np.float32), normal((2048, 1), np.float32)
    peak = whole_bytes(jax.jit(networks_trained).lower(*args).compile())
    f = jturnip.jit(networks_trained, peak // 2, link=jturnip.SimulatedLink(2e8, 2e8))
    # Sums over 2048 examples, in another order.
    for found, want in zip(
        f(*jturnip.host(args)), jax.jit(networks_trained)(*args), strict=True
    ):
        np.testing.assert_allclose(found, want, rtol=0, atol=2048 * 2e-7 * abs(want).max())
    moved = f.last_run.h2d_bytes + f.last_run.d2h_bytes
    assert moved <= 0.2 * peak  # 4.2 where nothing is in blocks


def pairs_nearby(x: Any) -> Any:
    """How many are near each, by a matrix that is read twice."""
    squares = jnp.sum(jnp.square(x[:, None] - x[None]), -1)
    near = jnp.exp(-squares)
    return jnp.sum(near / near.max(1, keepdims=True), axis=1)


def test_it_is_in_haste_only_where_it_is_tried_again():
    how = How("auto", None, None)
    assert how.as_it_is().hasty
    for other in (
        how.as_it_is(thorough=True),
        how.as_it_is(may_be_hasty=False),
        dataclasses.replace(how, any_plan=True).as_it_is(),
        dataclasses.replace(how, axes=False).as_it_is(),
    ):
        assert not other.hasty
        assert not other.axes


@pytest.mark.long
def test_a_function_is_not_cut_finer_where_that_is_unlikely_to_fit():
    x = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
    peak = jturnip.peak_bytes(pairs_nearby, x)
    f = jturnip.jit(pairs_nearby, gpu_bytes=peak // 4)
    np.testing.assert_allclose(f(jturnip.host(x)), jax.jit(pairs_nearby)(x), rtol=1e-5)
    report = f.lower(jturnip.host(x)).compile().compile_report
    # As it is, as it is with the arguments in host memory, and in blocks.
    assert report.compiled + report.reused <= 3


def sorted_kernel(x: Any, y: Any) -> Any:
    """A row of it is sorted at once, so that XLA writes it down."""
    return jnp.sort(jnp.exp(-((x[:, None] - y[None]) ** 2)), 1)[:, :8]


def test_a_search_that_takes_too_long_ends_with_a_budget_that_works(
    monkeypatch: pytest.MonkeyPatch,
):
    few = MANY[:512]
    budget = jturnip.peak_bytes(sorted_kernel, few, few) // 4
    expected = jax.jit(sorted_kernel)(few, few)
    run = jturnip.jit(sorted_kernel, gpu_bytes=budget)
    np.testing.assert_array_equal(run(few, few), expected)
    monkeypatch.setattr(effort, "_ENOUGH", 0)
    with pytest.raises(DoesNotFit) as caught:
        jturnip.jit(sorted_kernel, gpu_bytes=budget)(few, few)
    assert budget < caught.value.needed_bytes <= 4 * budget + 4
    again = jturnip.jit(sorted_kernel, gpu_bytes=caught.value.needed_bytes)
    np.testing.assert_array_equal(again(few, few), expected)


@pytest.mark.long
def test_no_way_is_looked_for_where_a_loop_that_stays_as_it_is_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
):
    """Around it, much could be cut in many ways."""
    searches: list[FlatJaxpr] = []
    search = ways.cut_along_axes

    def searched(flat: FlatJaxpr, *args: Any) -> Any:
        searches.append(flat)
        return search(flat, *args)

    def squared(x: Any) -> Any:
        x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ x.T) @ x / 200, x)
        wide = jax.nn.softmax(jnp.tile(x, 20), axis=0)
        return wide @ wide.T

    x = np.random.default_rng(0).normal(size=(200, 200)).astype(np.float32)
    monkeypatch.setattr(ways, "cut_along_axes", searched)
    f = jturnip.jit(squared, gpu_bytes=int(2.5 * x.nbytes))
    # Sums of 4000 numbers of one sign.
    np.testing.assert_allclose(f(x), jax.jit(squared)(x), rtol=1e-4)
    assert searches
    assert not any(e.name == "scan" for flat in searches for e in flat.equations)


@pytest.mark.long
def test_tiles_are_not_smaller_for_a_loop_that_is_in_none(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of matrices beside it, a sixteenth would be tens of thousands of equations."""
    split = splitting.split
    sizes: list[int] = []

    def watched(flat: FlatJaxpr, *args: Any) -> Any:
        sizes.append(len(flat.equations))
        return split(flat, *args)

    def fn(a: Any, b: Any, x: Any) -> Any:
        done = jax.lax.while_loop(lambda x: x[0, 0] < 5, lambda x: jnp.tanh(x @ b) + 6, x)
        return a @ a, a @ b, done

    monkeypatch.setattr(splitting, "split", watched)
    n = 256
    a, b, x = np.random.default_rng(0).normal(size=(3, n, n)).astype(np.float32)
    f = jturnip.jit(fn, gpu_bytes=4 * a.nbytes + 4096, strategy="turnip")
    f(*map(jnp.asarray, (a, b, x)))
    assert sizes
    assert max(sizes) < 1000


@pytest.mark.long
def test_a_few_rows_of_scores_at_a_time_are_not_all_that_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
):
    """Keys and values of a group leave room for seven; in parts along the keys as well it
    takes a fraction of the time."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("ghqd,gkd->ghqk", q, k)
        return jnp.einsum("ghqk,gkd->ghqd", jax.nn.softmax(scores), v)

    random = np.random.default_rng(0)
    q, k, v = (
        random.normal(size=(2, *heads, 2048, 16)).astype(np.float32) / 4
        for heads in ((4,), (), ())
    )
    gpu_bytes = (2 * q.nbytes + k.nbytes + v.nbytes) // 4
    seconds = []
    for long in (ways._LONG_IN_BLOCKS, math.inf):
        monkeypatch.setattr(ways, "_LONG_IN_BLOCKS", long)
        f = jturnip.jit(functools.partial(attention), gpu_bytes)
        # Sums of 2048 numbers in another order.
        assert_same(f(*jturnip.host((q, k, v))), jax.jit(attention)(q, k, v), ulps=64)
        seconds.append(f.lower(*jturnip.host((q, k, v))).plan.predicted_seconds)
    assert seconds[0] < seconds[1] / 2


@pytest.mark.long
def test_a_task_for_each_head_is_found_before_a_thousand_tiles():
    """Two ways in which the whole just does not fit, in blocks, came before."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        q = q.reshape(2, 4, *q.shape[1:])
        scores = jnp.einsum("ghqd,gkd->ghqk", q, k)
        return jnp.einsum("ghqk,gkd->ghqd", jax.nn.softmax(scores), v)

    random = np.random.default_rng(0)
    q, k, v = (
        random.normal(size=(heads, 1024, 16)).astype(np.float32) / 4 for heads in (8, 2, 2)
    )
    f = jturnip.jit(attention, (2 * q.nbytes + k.nbytes + v.nbytes) // 2)
    # Sums of 1024 numbers in another order.
    assert_same(f(*jturnip.host((q, k, v))), jax.jit(attention)(q, k, v), ulps=64)
    assert len(f.lower(*jturnip.host((q, k, v))).plan.taskgraph.tasks) < 50


@pytest.mark.long
def test_a_loop_is_not_refused_for_what_a_task_never_writes_down():
    """By itself it reads a matrix, and holds another that is made of it; in one task with
    what makes the first, XLA holds the second only."""

    def solved(x: Any, y: Any, h: Any) -> Any:
        matrix = jnp.cos(x.astype(jnp.float32) * y[:, None])
        solve = functools.partial(jax.lax.linalg.triangular_solve, left_side=True)
        return jax.lax.fori_loop(0, 5, lambda _, h: solve(jnp.sin(matrix) + 3, h), h)

    def fn(x: Any, y: Any, h: Any, q: Any, k: Any) -> Any:
        for j in range(6):
            h = solved(x, y + j, h)
        shares = jax.nn.softmax(q @ k.T, axis=0)
        return h, shares.T @ q

    n = 300
    random = np.random.default_rng(0)
    numbers = lambda *shape: random.normal(size=shape).astype(np.float32)
    x, y = numbers(n, n).astype(np.float16), np.linspace(0, 1, n, dtype=np.float32)
    args = x, y, np.ones((n, 4), np.float32), numbers(4 * n, 8), numbers(n, 8)
    lowered = jturnip.jit(fn, gpu_bytes=int(2.6 * 4 * n**2)).lower(*map(jturnip.host, args))
    assert lowered.compile().plan.h2d_bytes < 4 * n**2


def smoothed(transitions: Any, likelihood: Any) -> Any:
    """States of a hidden Markov model: two scans, and all pairs of states in each step."""

    def forward(a: Any, l: Any) -> Any:
        a = jax.nn.logsumexp(a[:, None] + transitions, 0) + l
        return a, a

    def backward(b: Any, l: Any) -> Any:
        b = jax.nn.logsumexp(transitions + (l + b)[None], 1)
        return b, b

    first, rest = likelihood[:1], likelihood[1:]
    _, alpha = jax.lax.scan(forward, first[0], rest)
    _, beta = jax.lax.scan(backward, jnp.zeros_like(first[0]), rest, reverse=True)
    alpha = jnp.concatenate([first, alpha])
    beta = jnp.concatenate([beta, jnp.zeros_like(first)])
    pairs = alpha[:-1, :, None] + transitions + (rest + beta[1:])[:, None]
    pairs = jax.nn.softmax(pairs.reshape(len(rest), -1)).reshape(pairs.shape)
    return jax.nn.softmax(alpha + beta), pairs.sum(0)


@pytest.mark.long
def test_what_was_found_is_the_first_that_is_tried_with_other_results_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
):
    random = np.random.default_rng(0)
    states = np.log(random.dirichlet(np.ones(24), 24)).astype(np.float32)
    likelihood = random.normal(size=(1200, 24)).astype(np.float32)
    searches: list[FlatJaxpr] = []
    asked: list[tuple[FlatJaxpr, int]] = []
    search, cut = ways.cut_along_axes, ways.in_fastest_way

    def searched(flat: FlatJaxpr, *args: Any) -> Any:
        searches.append(flat)
        return search(flat, *args)

    def cut_so(flat: Any, setting: Any, to_host: Any) -> Any:
        asked.append((flat, len(to_host)))
        return cut(flat, setting, to_host)

    monkeypatch.setattr(ways, "cut_along_axes", searched)
    monkeypatch.setattr(tries, "in_fastest_way", cut_so)
    peak = jturnip.peak_bytes(smoothed, states, likelihood)
    expected = jax.jit(smoothed)(states, likelihood)
    for share in (3, 4, 5):
        result = jturnip.jit(smoothed, gpu_bytes=peak // share)(states, likelihood)
        for mine, theirs in zip(result, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    # Some function was to be cut again, with more of its results on the host.
    assert len({id(flat) for flat, _ in asked}) < len(asked)
    assert len({id(flat) for flat in searches}) == len(searches)
