"""`jturnip.compare`: the same arguments by every way, and rows that say what came of it."""

import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import unconstrained_peak
from jax.experimental import io_callback

import jturnip
from jturnip.comparison import BASELINES, distance
from jturnip.placement import is_on_host


def loss(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def arguments() -> Any:
    weights = [np.full((128, 128), k / 1000, np.float32) for k in range(1, 7)]
    return weights, np.ones((32, 128), np.float32)


@pytest.fixture(scope="module")
def comparison(arguments: Any) -> jturnip.Comparison:
    budgets = [0.7, "300KiB", 10_000]
    return jturnip.compare(
        loss, *arguments, gpu_bytes=budgets, baselines=BASELINES, transform=jax.grad,
        rounds=2,
    )  # fmt: skip


@pytest.mark.long
def test_its_rows_are_the_ways_that_were_asked_for(comparison: jturnip.Comparison):
    names = [row.name for row in comparison.rows]
    assert names == ["jax.jit", *BASELINES, "jturnip", "jturnip", "jturnip"]
    peak = comparison.stock_peak_bytes
    budgets = [row.gpu_bytes for row in comparison.rows[-3:]]
    assert budgets == [int(0.7 * peak), 300 * 1024, 10_000]
    for row in comparison.rows[-3:]:
        assert row.gpu_bytes is not None
        assert row.share == pytest.approx(row.gpu_bytes / peak)


def test_stock_is_what_xla_says_of_it(comparison: jturnip.Comparison, arguments: Any):
    peak = unconstrained_peak(jax.grad(loss), *arguments)
    assert comparison.stock_peak_bytes == comparison.rows[0].peak_bytes == peak
    assert comparison.rows[0].ratios == (1.0, 1.0)


def test_rows_in_a_budget_are_what_the_last_run_was(comparison: jturnip.Comparison):
    rows = [row for row in comparison.rows if row.name == "jturnip" and row.seconds]
    assert len(rows) == len(comparison.runs) == 2
    for row, run in zip(rows, comparison.runs, strict=True):
        assert row.gpu_bytes is not None
        assert row.peak_bytes == run.peak_bytes <= row.gpu_bytes
        assert (row.h2d_bytes, row.d2h_bytes) == (run.h2d_bytes, run.d2h_bytes)
        assert run.plan is not None
        least = min([run.plan.lower_bound_seconds, *row.seconds])
        assert row.lower_bound_seconds == least
        assert len(row.seconds) == len(row.ratios) == 2


def test_what_is_refused_is_a_row_that_says_why(comparison: jturnip.Comparison):
    refused = comparison.rows[-1]
    assert not refused.seconds
    assert refused.median_seconds is refused.ratio is refused.agrees is None
    assert "gpu_bytes is 10000" in refused.refused
    for text in (str(comparison), comparison._repr_html_()):
        assert "gpu_bytes is 10000" in text
        assert "refused" in text


def test_the_answers_are_compared(comparison: jturnip.Comparison):
    assert comparison.agrees
    assert "the answers agree" in str(comparison)
    assert all(row.ulps is not None for row in comparison.rows if row.seconds)


def test_a_wrong_answer_is_seen(arguments: Any):
    wrong = {"half": lambda weights, x: loss(weights, x) / 2}
    found = jturnip.compare(loss, *arguments, gpu_bytes=1.0, baselines=wrong, rounds=1)
    assert not found.agrees
    assert [row.agrees for row in found.rows] == [True, False, True]
    assert "THE ANSWERS DIFFER" in str(found)


def test_what_makes_much_of_rounding_may_differ_by_more():
    """Its answers are as far apart as those of arguments that are rounded otherwise; one
    that is wrong is still seen."""
    random = np.random.default_rng(0)
    weights, x = random.normal(size=(2, 96, 96)).astype(np.float32)

    def fn(weights: Any, x: Any) -> Any:
        balanced = jnp.sum(weights @ x, axis=0) - jnp.sum(weights, axis=0) @ x
        return weights[0] - 1e-2 * balanced / (jnp.abs(balanced) + 1e-20)

    def otherwise(weights: Any, x: Any) -> Any:
        added = lambda a: jnp.sum(a[::-1], axis=0)
        balanced = added(weights @ x) - added(weights) @ x
        return weights[0] - 1e-2 * balanced / (jnp.abs(balanced) + 1e-20)

    ways = {"otherwise": otherwise, "wrong": lambda weights, x: fn(weights, x) * 1.05}
    found = jturnip.compare(fn, weights, x, gpu_bytes=1.0, baselines=ways, rounds=1)
    rows = {row.name: row for row in found.rows}
    assert rows["otherwise"].ulps is not None
    assert rows["otherwise"].ulps > 1024
    assert rows["otherwise"].agrees
    assert rows["wrong"].agrees is False
    assert f"of {rows['wrong'].most_ulps:.0f} ulps" in str(found)


@pytest.mark.parametrize(
    ("found", "expected", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, np.nan], [1.0, np.nan], 0.0),
        ([1.0, np.nan], [1.0, 2.0], np.inf),
        ([1.0, 2.0], [1.0, np.inf], np.inf),
        ([2.0 + 2**-22], [2.0], 1.0),
        ([0.0], [0.0], 0.0),
        ([1e-9], [0.0], np.inf),
    ],
)
def test_how_far_answers_are_apart(found: Any, expected: Any, apart: float):
    as_array = lambda values: np.asarray(values, np.float32)
    assert distance(as_array(found), as_array(expected)) == apart


def test_narrow_numbers_may_differ_by_fewer_units():
    one = jnp.ones(3, jnp.bfloat16)
    assert distance(one * 1.0625, one) <= 1024
    assert distance(one * 1.25, one) > 1024


def test_narrow_numbers_do_not_agree_with_anything():
    """A unit of 8 bits is an eighth; one of 16 is not allowed 16 times the number."""
    ones = jnp.ones(3, jnp.float8_e4m3fn)
    assert distance(ones, jnp.zeros_like(ones)) > 1024
    x = jnp.full(1 << 20, 1.5, jnp.bfloat16)
    fn = lambda x, y: (x.astype(float).sum() - y.astype(float).sum()).astype(x.dtype)
    otherwise = {"ten times": lambda x, y: fn(x, y) * 10}
    found = jturnip.compare(
        fn, x.at[0].set(2.5), x, gpu_bytes=1.0, baselines=otherwise, rounds=1
    )
    assert [row.agrees for row in found.rows] == [True, False, True]


def test_other_shapes_and_other_numbers_of_results_are_other_answers():
    x = np.ones(3, np.float32)
    others = {"a column": lambda x: x[:, None], "two": lambda x: (x, x)}
    found = jturnip.compare(lambda x: +x, x, gpu_bytes=2.0, baselines=others, rounds=1)
    assert [row.agrees for row in found.rows] == [True, False, False, True]


def test_what_needs_no_bytes_is_compared():
    empty = np.zeros((0, 3), np.float32)
    found = jturnip.compare(lambda x: x + 1, empty, gpu_bytes="1MiB", rounds=1)
    assert found.agrees
    assert "inf" not in str(found)


def test_integers_are_the_same_or_not():
    assert distance(np.arange(3), np.arange(3)) == 0
    assert distance(np.arange(3), np.arange(3) + 1) == np.inf
    key = jax.random.key(0)
    assert distance(key, key) == 0
    assert distance(key, jax.random.key(1)) == np.inf


def test_donated_arguments_are_copied_and_not_eaten():
    def step(state: Any, x: Any) -> Any:
        return state * 0.9 + x

    state, x = jnp.ones((64, 64)), jnp.ones((64, 64))
    held = jturnip.host(state)
    for given in (state, held):
        found = jturnip.compare(step, given, x, gpu_bytes=1.0, rounds=2, donate_argnums=0)
        assert found.agrees
        assert not given.is_deleted()
    assert np.array_equal(state, np.ones((64, 64)))


def test_arguments_that_xla_brings_are_not_donated():
    """Nor is the process ended, as XLA does with those that are."""

    def step(state: Any, x: Any) -> Any:
        return jax.tree.map(lambda s: s * 0.9 + jnp.sum(x), state), jnp.sum(x)

    state = {"a": jnp.ones((64, 64)), "b": jnp.ones(64)}
    found = jturnip.compare(
        step, state, jnp.ones(8), gpu_bytes=1.0, rounds=1, donate_argnums=0,
        baselines=["offload arguments"],
    )  # fmt: skip
    assert found.agrees
    assert found.rows[1].seconds


def test_a_partial_function_has_the_name_of_its_function(arguments: Any):
    fn = functools.partial(loss, arguments[0])
    found = jturnip.compare(fn, arguments[1], gpu_bytes="8MiB", rounds=1)
    assert found.function == "loss"


def test_static_arguments_stay_what_they_are():
    def power(x: Any, n: int, name: str) -> Any:
        assert isinstance(name, str)
        return x**n

    x = jnp.arange(16.0)
    found = jturnip.compare(
        power, x, 3, "cube", gpu_bytes="1MiB", rounds=1, static_argnums=1,
        static_argnames="name",
    )  # fmt: skip
    assert found.agrees
    assert [row.refused for row in found.rows] == ["", ""]


def test_it_is_plain_data(comparison: jturnip.Comparison):
    plain = json.loads(comparison.to_json())
    assert [row["name"] for row in plain["rows"]] == [r.name for r in comparison.rows]
    assert plain["rows"][0]["agrees"] is True
    assert "\n" not in repr(comparison)


def test_it_is_a_data_frame(comparison: jturnip.Comparison):
    pytest.importorskip("pandas")
    frame = comparison.to_pandas()
    assert list(frame["name"]) == [row.name for row in comparison.rows]
    assert frame["seconds"][0] == comparison.rows[0].median_seconds


def test_it_is_a_plot(comparison: jturnip.Comparison):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    figure = comparison.plot()
    figure.canvas.draw()
    left, right = figure.axes
    assert left.get_xlabel() == right.get_xlabel() == "budget (KiB)"
    labels = left.get_legend_handles_labels()[1]
    assert {"jax.jit", "checkpoint", "refused", "peak of jax.jit"} <= set(labels)
    (line,) = (line for line in left.lines if line.get_label() == "jax.jit")
    assert line.get_xdata()[0] == pytest.approx(comparison.stock_peak_bytes / 1024)


def test_without_matplotlib_it_says_what_is_missing(
    comparison: jturnip.Comparison, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        comparison.plot()


def test_it_is_silent_where_nobody_looks(arguments: Any, capfd: pytest.CaptureFixture[str]):
    jturnip.compare(loss, *arguments, gpu_bytes=1.0, rounds=1)
    assert capfd.readouterr() == ("", "")


def test_what_is_asked_must_be_known(arguments: Any):
    with pytest.raises(ValueError, match="choose from checkpoint"):
        jturnip.compare(loss, *arguments, baselines=["zero"])
    with pytest.raises(ValueError, match="rounds=0"):
        jturnip.compare(loss, *arguments, rounds=0)
    with pytest.raises(jturnip.BudgetError):
        jturnip.compare(loss, *arguments, gpu_bytes="half")


def test_nothing_of_one_way_is_there_while_another_runs():
    """Only the arguments of the one whose turn it is."""
    shape = 67, 61  # no other test's arrays
    seen: list[int] = []

    def look() -> Any:
        mine = [a for a in jax.live_arrays() if a.shape == shape]
        seen.append(sum(a.nbytes for a in mine if not is_on_host(a)))
        return np.float32(0)

    def fn(x: Any) -> Any:
        return jnp.sum(x) + io_callback(look, jax.ShapeDtypeStruct((), np.float32))

    x = np.ones(shape, np.float32)
    jturnip.compare(fn, x, gpu_bytes=1.0, baselines={"other": fn}, rounds=2)
    # Every way three times; and calls that put there what the next one finds.
    assert len(seen) >= 9
    assert max(seen) <= x.nbytes


def test_ways_take_turns(arguments: Any):
    """Every way once before any a second time, and each as often."""
    order: list[str] = []

    def told(name: str) -> Any:
        def called() -> Any:
            order.append(name)
            return np.float32(0)

        def fn(weights: Any, x: Any) -> Any:
            more = io_callback(called, jax.ShapeDtypeStruct((), np.float32))
            return loss(weights, x) + more

        return fn

    others = {name: told(name) for name in ("a", "b")}
    jturnip.compare(loss, *arguments, gpu_bytes=1.0, baselines=others, rounds=3)
    assert order == ["a", "b"] * 4
