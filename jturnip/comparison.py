"""`jturnip.compare`: stock `jax.jit`, jturnip in some budgets and what one would do without
it, side by side on the same arguments."""

import abc
import contextlib
import dataclasses
import functools
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jturnip import api, compat, memory
from jturnip.compiler.progress import bar_class
from jturnip.errors import JTurnipError
from jturnip.frontend.values import is_key
from jturnip.graph.report import RunReport
from jturnip.show import charts, pages
from jturnip.show.pictures import format_seconds
from jturnip.show.text import aligned
from jturnip.stock import executable_bytes
from jturnip.units import format_bytes, parse_bytes


STOCK = "jax.jit"
# A larger float is a number of bytes, not a share.
_MOST_SHARE = 16
# Answers may differ by so many units in the last place of the largest number: sums are made
# in another order, and long ones add that up. Where more is apart, so many times what one
# unit more or less in each argument changes under `jax.jit`: an optimizer that divides by
# the root of a gradient's square makes much of a little.
_ULPS = 1024
_AS_ARGUMENTS = 4
# But never more than this, which is over one percent; and not where a result has 16 bits
# or less, of which a unit is a percent.
_MOST_ULPS = 2**17
# Numbers of so many bits may differ by so many times fewer of their units.
_FEWER_IF_NARROW = {16: 64, 8: 512}
# What JAX can do by itself; a name to what it makes of the function that is differentiated.
_POLICIES: dict[str, Callable[[], Any]] = {
    "checkpoint": lambda: None,
    "checkpoint dots": lambda: jax.checkpoint_policies.dots_saveable,
    "checkpoint dots without batch": (
        lambda: jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "offload dots": lambda: jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
}
_OFFLOAD = "offload arguments"
BASELINES = (*_POLICIES, _OFFLOAD)
# What says that a way cannot run.
_REFUSALS = (JTurnipError, jax.errors.JaxRuntimeError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run the function."""

    # "jax.jit", "jturnip", or the baseline's.
    name: str
    # Of jturnip's rows; also as a share of what stock `jax.jit` needs.
    gpu_bytes: int | None = None
    share: float | None = None
    strategy: str = ""
    # The most device bytes: by XLA's analysis, for jturnip by its own account of a run.
    peak_bytes: int | None = None
    # Of each round, and over that of `jax.jit` in the same round.
    seconds: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    # Of the last run: bytes over the link, and time in which compute waited for it.
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    stall_seconds: float | None = None
    # No order of the plan's operations can be faster.
    lower_bound_seconds: float | None = None
    # To the first result: tracing, planning and compiling.
    first_seconds: float | None = None
    # How far its answers are from the first row's that has one, in units in the last place
    # of the largest number; of the first call's and the last's, the most.
    ulps: float | None = None
    # How far apart they may be to be the same: more than usual for a function that makes
    # much of how its arguments are rounded.
    most_ulps: float = _ULPS
    # Why it did not run.
    refused: str = ""

    @property
    def median_seconds(self) -> float | None:
        """The median of its rounds; None where it did not run."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def ratio(self) -> float | None:
        """The median of its ratios; None where it or `jax.jit` did not run."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def agrees(self) -> bool | None:
        """Whether its answer is the first row's to rounding; None without one. Never true
        of a NaN that the other does not have."""
        return None if self.ulps is None else self.ulps <= self.most_ulps


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Ways to run one function, side by side."""

    function: str
    device: str
    # By XLA's own analysis of stock `jax.jit`.
    stock_peak_bytes: int
    rows: tuple[Row, ...]
    # What the last call of each jturnip row did; not part of the JSON.
    runs: tuple[RunReport, ...] = field(default=(), repr=False, compare=False)

    @property
    def agrees(self) -> bool:
        """Whether all that ran gave the same answer, to rounding."""
        return all(row.agrees is not False for row in self.rows)

    def to_json_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        rows = []
        for row in self.rows:
            plain = dataclasses.asdict(row)
            rows.append({**plain, "ratio": row.ratio, "agrees": row.agrees})
        return {
            "function": self.function,
            "device": self.device,
            "stock_peak_bytes": self.stock_peak_bytes,
            "rows": rows,
        }

    def to_json(self) -> str:
        """`to_json_dict` as text."""
        return json.dumps(self.to_json_dict())

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, a row each."""
        import pandas

        plain = [
            {**dataclasses.asdict(row), "seconds": row.median_seconds, "ratio": row.ratio}
            for row in self.rows
        ]
        return pandas.DataFrame(plain).drop(columns="ratios")

    def plot(self, axes: Any = None) -> Any:
        """Time, and bytes over the link, against the budget, with matplotlib.

        Args:
          axes: two axes to draw on; new ones without.

        Returns:
          The figure.
        """
        return charts.of_comparison(self, axes)

    def __str__(self) -> str:
        lines = aligned([_HEADS, *map(_cells, self.rows)], left=3)
        return "\n".join([self._title(), "", *lines, *self._refusals()])

    def __repr__(self) -> str:
        return f"<Comparison of {self.function}, {len(self.rows)} ways>"

    def _title(self) -> str:
        peak = format_bytes(self.stock_peak_bytes)
        verdict = "the answers agree" if self.agrees else "THE ANSWERS DIFFER"
        return f"{self.function} on {self.device}: jax.jit needs {peak}; {verdict}"

    def _repr_html_(self) -> str:
        table = pages.table(_HEADS, map(_cells, self.rows))
        return pages.block(self._title(), table, *map(pages.paragraph, self._refusals()))

    def _refusals(self) -> list[str]:
        return [f"{_label(row)}: {row.refused}" for row in self.rows if row.refused]


_HEADS = (
    "way", "budget", "strategy", "peak", "time", "x jax.jit", "to device", "to host",
    "stalled", "at least", "first call", "answer",
)  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    nbytes = lambda n: "" if n is None else format_bytes(n)
    seconds = lambda s: "" if s is None else format_seconds(s)
    budget = nbytes(row.gpu_bytes)
    if row.share is not None:
        budget += f" ({row.share:.0%})"
    answer = {None: "", True: "same", False: "DIFFERS"}[row.agrees]
    if row.agrees is False:
        answer += f": {row.ulps:.0f} of {row.most_ulps:.0f} ulps"
    return (
        row.name,
        budget,
        row.strategy,
        nbytes(row.peak_bytes),
        seconds(row.median_seconds) if row.seconds else "refused",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        nbytes(row.h2d_bytes),
        nbytes(row.d2h_bytes),
        seconds(row.stall_seconds),
        seconds(row.lower_bound_seconds),
        seconds(row.first_seconds),
        answer,
    )


def _label(row: Row) -> str:
    budget = "" if row.gpu_bytes is None else f" {format_bytes(row.gpu_bytes)}"
    return row.name + budget


def compare(
    fn: Callable[..., Any],
    *args: Any,
    gpu_bytes: Iterable[int | float | str] | int | float | str = (0.5, 0.25),
    strategies: Iterable[str] | str = ("auto",),
    baselines: Iterable[str] | Mapping[str, Callable[..., Any]] = (),
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    rounds: int = 5,
    progress: bool = True,
    **keywords: Any,
) -> Comparison:
    """Runs a function by stock `jax.jit`, and by jturnip in each budget, in turn.

    `jax.jit` has its arguments on the device; jturnip has them in pinned host memory, as it
    is used. While one way runs, nothing of another is on the device but the caller's own
    arrays. Each round runs every way once, so that what else the machine does slows all;
    the first call, which compiles, is not among the rounds. Arguments are brought to the
    device, and donated ones copied, before each call, which is not timed.

    Examples:
      >>> import jax, jax.numpy as jnp, jturnip
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> w, x = jnp.ones((64, 64)), jnp.ones((512, 64))
      >>> c = jturnip.compare(loss, w, x, gpu_bytes=0.5, transform=jax.grad, rounds=1)
      >>> [row.name for row in c.rows], c.agrees
      (['jax.jit', 'jturnip'], True)

    Args:
      fn: the function.
      *args: its arguments.
      gpu_bytes: budgets: bytes, strings such as "8GiB", or, as floats up to 16, shares of
        what `jax.jit` needs.
      strategies: of `jturnip.jit`; each runs in each budget.
      baselines: what one would do without jturnip: names of `jturnip.BASELINES`, or a
        dictionary of names to functions that take the same arguments. "checkpoint" and the
        others with policies wrap `fn` in `jax.checkpoint`, which changes something only
        under `transform`; "offload arguments" holds the arguments in pinned host memory,
        none of them donated, and leaves it to XLA when each is brought.
      transform: applied to `fn` in every way, such as `jax.grad`.
      rounds: how often each way runs.
      progress: whether to show a bar on terminals and in notebooks, with tqdm.
      **keywords: of both `jax.jit` and `jturnip.jit`, such as `donate_argnums`; `link`, of
        `jturnip.jit` alone.

    Returns:
      A `Comparison`, `jax.jit`'s row first. What does not fit, or is refused, is a row that
      says so.

    Raises:
      ValueError: a baseline's name is not known, or `rounds` is less than one.
      BudgetError: a budget is not a size.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    link = keywords.pop("link", None)
    call = _Call.of(fn, args, keywords)
    transformed = lambda fn: call.bound(transform(fn) if transform else fn)
    whole = transformed(fn)
    hosted = memory.host(call.args)
    stock = _Jax(STOCK, whole, hosted, call.keywords, on_host=False)
    peak = stock.peak_bytes
    ways: list[_Way] = [stock]
    for name, other in _baselines(baselines, fn, transformed):
        if other is None:
            # XLA ends the process where a donated array on the host is moved inside.
            kept = {k: v for k, v in call.keywords.items() if k != "donate_argnums"}
            ways.append(_Jax(name, _brought(whole), hosted, kept, on_host=True))
        else:
            ways.append(_Jax(name, other, hosted, call.keywords, on_host=False))
    each = [gpu_bytes] if isinstance(gpu_bytes, int | float | str) else list(gpu_bytes)
    names = [strategies] if isinstance(strategies, str) else list(strategies)
    for budget in each:
        nbytes = _bytes_of(budget, peak)
        for strategy in names:
            jitted = api.jit(whole, nbytes, strategy=strategy, link=link, **call.keywords)
            share = nbytes / peak if peak else None
            ways.append(_Budgeted(jitted, hosted, nbytes, share, strategy))
    with _bar(len(ways) * (rounds + 1), progress) as step:
        _run_in_turn(ways, rounds, step)
    return _comparison(_name(fn), peak, ways)


def _name(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", "a function")


def _bytes_of(budget: int | float | str, peak: int) -> int:
    if isinstance(budget, float) and 0 < budget <= _MOST_SHARE:
        return max(1, int(budget * peak))
    return parse_bytes(budget)


def _baselines(
    asked: Iterable[str] | Mapping[str, Callable[..., Any]],
    fn: Callable[..., Any],
    transformed: Callable[..., Callable[..., Any]],
) -> Iterator[tuple[str, Callable[..., Any] | None]]:
    """Names with functions; None for arguments that XLA is to bring."""
    if isinstance(asked, Mapping):
        yield from ((name, transformed(other)) for name, other in asked.items())
        return
    for name in [asked] if isinstance(asked, str) else asked:
        if name not in BASELINES:
            raise ValueError(
                f"baseline {name!r} is not known: choose from {', '.join(BASELINES)}, or"
                " give a dictionary of names to functions"
            )
        if name == _OFFLOAD:
            yield name, None
        else:
            policy = _POLICIES[name]()
            yield name, transformed(jax.checkpoint(fn, policy=policy))


def _brought(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same with arguments that XLA brings to the device."""

    def brought(*args: Any) -> Any:
        return fn(*jax.device_put(args, jax.memory.Space.Device))

    return brought


@dataclass(frozen=True)
class _Call:
    """A call without its static arguments, which are bound, so that every way is given the
    same arrays."""

    args: tuple[Any, ...]
    # Of `jax.jit`.
    keywords: dict[str, Any]
    # Static arguments by position.
    statics: dict[int, Any]

    @classmethod
    def of(
        cls, fn: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> "_Call":
        left = dict(keywords)
        static = _positions(fn, len(args), left, "static")
        donated = _positions(fn, len(args), left, "donate")
        dynamic = [i for i in range(len(args)) if i not in static]
        if donated:
            left["donate_argnums"] = tuple(dynamic.index(i) for i in donated)
        return cls(
            tuple(args[i] for i in dynamic), left, {i: args[i] for i in sorted(static)}
        )

    def bound(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` of the other arguments."""
        if not self.statics:
            return fn

        def bound(*args: Any) -> Any:
            all_of_them = list(args)
            for i, value in self.statics.items():  # by position, so each has its place
                all_of_them.insert(i, value)
            return fn(*all_of_them)

        return bound


def _positions(
    fn: Callable[..., Any], count: int, keywords: dict[str, Any], what: str
) -> list[int]:
    """Positions that `static_argnums` and `static_argnames` say, or those of `donate`; both
    are taken out of the keywords."""
    numbers = keywords.pop(f"{what}_argnums", None)
    names = keywords.pop(f"{what}_argnames", None)
    numbers = () if numbers is None else (numbers,) if isinstance(numbers, int) else numbers
    names = () if names is None else (names,) if isinstance(names, str) else names
    found = {n % count for n in numbers if -count <= n < count}
    if names:
        parameters = list(inspect.signature(fn).parameters)
        found |= {parameters.index(n) for n in names if n in parameters[:count]}
    return sorted(found)


# -- ways ------------------------------------------------------------------------------


class _Way(abc.ABC):
    """One way to run the function, and what came of it so far."""

    def __init__(self, row: Row, hosted: tuple[Any, ...]):
        self.row = row
        # The arguments, in pinned host memory; all ways share them.
        self._hosted = hosted
        # Of the calls, the first among them; of what came before that.
        self.seconds: list[float] = []
        self.setup_seconds = 0.0
        self.refused = ""
        # The most that an answer was apart from the first way's, and may be.
        self.ulps: float | None = None
        self.most_ulps: float = _ULPS

    @abc.abstractmethod
    def arguments(self) -> tuple[Any, ...]:
        """What the next call takes; it may use up what is donated."""

    @abc.abstractmethod
    def call(self, args: tuple[Any, ...]) -> Any:
        """Runs once."""

    def run(self) -> Any:
        """Runs once more; gives None where that fails, or has failed before."""
        if self.refused:
            return None
        try:
            args = jax.block_until_ready(self.arguments())
            began = time.perf_counter()
            results = jax.block_until_ready(self.call(args))
        except _REFUSALS as error:
            self.refused = str(error).splitlines()[0]
            return None
        self.seconds.append(time.perf_counter() - began)
        return results

    def final(self) -> Row:
        """Its row, without ratios."""
        first, rounds = self.seconds[:1], tuple(self.seconds[1:])
        return dataclasses.replace(
            self.row,
            seconds=rounds,
            first_seconds=self.setup_seconds + first[0] if first else None,
            ulps=self.ulps,
            most_ulps=self.most_ulps,
            refused=self.refused,
        )

    def _copied(self, donated: frozenset[int]) -> tuple[Any, ...]:
        """The arguments, with copies of those that a call uses up."""
        leaves, tree = jax.tree.flatten(self._hosted)
        leaves = [memory.copy(a) if i in donated else a for i, a in enumerate(leaves)]
        return jax.tree.unflatten(tree, leaves)


class _Jax(_Way):
    """Something that `jax.jit` made. Its arguments are on the device during a call only, so
    that nothing of one way is there while another runs."""

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        hosted: tuple[Any, ...],
        keywords: dict[str, Any],
        on_host: bool,
    ):
        super().__init__(Row(name), hosted)
        self._on_host = on_host
        self._donated: frozenset[int] = frozenset()
        self.peak_bytes = 0
        # Without a memory kind, an argument is taken to lie on the device.
        like = hosted if on_host else jax.tree.map(_struct, hosted)
        began = time.perf_counter()
        try:
            self._compiled = jax.jit(fn, **keywords).lower(*like).compile()
            self.setup_seconds = time.perf_counter() - began
            self.peak_bytes = executable_bytes(self._compiled)
            self.row = dataclasses.replace(self.row, peak_bytes=self.peak_bytes)
            self._donated = _donated(self._compiled)
        except _REFUSALS as error:
            if name == STOCK:
                raise
            self.refused = str(error).splitlines()[0]

    def arguments(self) -> tuple[Any, ...]:
        return self._copied(self._donated) if self._on_host else memory.device(self._hosted)

    def call(self, args: tuple[Any, ...]) -> Any:
        return self._compiled(*args)

    def changed_by_rounding(self, answer: Any) -> float:
        """How far from an answer it is of arguments of which each number is rounded up or
        down by a unit in the last place, at random."""
        at_random = np.random.default_rng(0)

        def rounded(array: Any) -> Any:
            if not jax.numpy.issubdtype(array.dtype, jax.numpy.inexact):
                return array
            step = at_random.choice(np.asarray([-1, 1], np.int8), array.shape)
            times = 1 + step * float(jax.numpy.finfo(array.dtype).eps)
            with jax.transfer_guard("allow"):
                return array * times.astype(array.dtype)

        try:
            found = self.call(jax.tree.map(rounded, self.arguments()))
            return distance([_numbers(a) for a in jax.tree.leaves(found)], answer)
        except _REFUSALS:  # there is no room for the arguments twice
            return 0.0


class _Budgeted(_Way):
    """Something that `jturnip.jit` made."""

    def __init__(
        self,
        jitted: Any,
        hosted: tuple[Any, ...],
        nbytes: int,
        share: float | None,
        strategy: str,
    ):
        row = Row("jturnip", gpu_bytes=nbytes, share=share, strategy=strategy)
        super().__init__(row, hosted)
        self._jitted = jitted
        self._donated = _donated(jitted.trace(*hosted))

    def arguments(self) -> tuple[Any, ...]:
        if self.report is not None and self.report.kept_bytes:
            # What is timed is a call after another one, which left something there.
            jax.block_until_ready(self._jitted(*self._copied(self._donated)))
        return self._copied(self._donated)

    def call(self, args: tuple[Any, ...]) -> Any:
        return self._jitted(*args)

    def run(self) -> Any:
        results = super().run()
        self._jitted._turn.kept.clear()  # others have the device to themselves
        return results

    @property
    def report(self) -> RunReport | None:
        """What the last call did."""
        return self._jitted.last_run

    def final(self) -> Row:
        row, run = super().final(), self.report
        if run is None:
            return row
        return dataclasses.replace(
            row,
            strategy=run.strategy,
            peak_bytes=run.peak_bytes,
            h2d_bytes=run.h2d_bytes,
            d2h_bytes=run.d2h_bytes,
            stall_seconds=run.stall_seconds,
            lower_bound_seconds=self._least_seconds(run),
        )

    def _least_seconds(self, run: RunReport) -> float | None:
        """The plan's bound; it is made of times of tasks that ran by themselves, and may be
        a little above what a call took."""
        bound = run.plan.lower_bound_seconds if run.plan else None
        return None if bound is None else min([bound, *self.seconds[1:]])


def _struct(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=array.aval.weak_type)


def _donated(stage: Any) -> frozenset[int]:
    """Positions of the leaves that a call uses up."""
    infos = jax.tree.leaves(stage.args_info)
    return frozenset(i for i, info in enumerate(infos) if info.donated)


def _run_in_turn(ways: Sequence[_Way], rounds: int, step: Callable[[str], None]) -> None:
    answer: Any = None
    for number in range(rounds + 1):  # the first compiles
        for way in ways:
            step(_label(way.row))
            results = way.run()
            if results is None or 0 < number < rounds:
                continue
            found = [_numbers(a) for a in jax.tree.leaves(results)]
            del results
            answer = found if answer is None else answer
            way.ulps = max(way.ulps or 0.0, distance(found, answer))
    finite = [way.ulps for way in ways if way.ulps is not None and way.ulps < np.inf]
    stock = ways[0]
    if answer is None or not isinstance(stock, _Jax) or any(map(_is_narrow, answer)):
        return
    if max(finite, default=0.0) > _ULPS:
        changed = stock.changed_by_rounding(answer)
        for way in ways:
            way.most_ulps = max(_ULPS, min(_MOST_ULPS, _AS_ARGUMENTS * changed))


def _comparison(function: str, peak: int, ways: Sequence[_Way]) -> Comparison:
    stock, rows, runs = ways[0], [], []
    for way in ways:
        row = way.final()
        if len(stock.seconds) == len(way.seconds):
            pairs = zip(way.seconds[1:], stock.seconds[1:], strict=True)
            row = dataclasses.replace(row, ratios=tuple(a / b for a, b in pairs))
        rows.append(row)
        if isinstance(way, _Budgeted) and way.report is not None:
            runs.append(way.report)
    device = compat.default_device().device_kind
    return Comparison(function, device, peak, tuple(rows), tuple(runs))


def distance(found: Any, expected: Any) -> float:
    """How far apart two trees of arrays are: for each array the largest difference over the
    largest number, in units in the last place of its dtype, those of 16 bits 64 times and
    those of less 512 times as much; of all, the most.

    Infinite where one has a NaN or an infinity that the other has not, where numbers that
    have no last place differ, and where there are other shapes or other arrays.
    """
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    if len(found) != len(expected):
        return np.inf
    pairs = zip(found, expected, strict=True)
    return max((_distance(_numbers(a), _numbers(b)) for a, b in pairs), default=0.0)


def _numbers(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and is_key(array.dtype):
        array = jax.random.key_data(array)
    return np.asarray(array)


def _is_narrow(array: np.ndarray) -> bool:
    dtype = array.dtype
    return (
        jax.numpy.issubdtype(dtype, jax.numpy.inexact) and jax.numpy.finfo(dtype).bits < 32
    )


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        return np.inf
    if not jax.numpy.issubdtype(a.dtype, jax.numpy.inexact):
        return 0.0 if np.array_equal(a, b) else np.inf
    info = jax.numpy.finfo(a.dtype)
    eps = float(info.eps) / _FEWER_IF_NARROW.get(max(info.bits, 8), 1)
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return np.inf
    if not np.isfinite(a[finite]).all():
        return np.inf
    largest = float(np.max(np.abs(b[finite]), initial=0.0))
    apart = float(np.max(np.abs(a[finite] - b[finite]), initial=0.0))
    if apart == 0:
        return 0.0
    return apart / (eps * largest) if largest > 0 else np.inf


@contextlib.contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[str], None]]:
    """Gives a function to be told what comes next; silent but on a terminal or in a
    notebook where tqdm is installed."""
    tqdm = bar_class() if wanted else None
    if tqdm is None:
        yield lambda what: None
        return
    with tqdm(total=total, disable=None, leave=False, unit="call") as bar:

        def step(what: str) -> None:
            bar.set_description(what)
            bar.update()

        yield step
