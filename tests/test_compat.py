"""What uses private JAX works, and works without it too."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jturnip
from jturnip import compat
from jturnip.compiler import executables
from jturnip.native import marks


PRIVATE = (
    "_lines",
    "_trace_context",
    "_batched_copy",
    "_Array",
    "_put",
    "_tokens",
    "_core",
    "_frames",
    "_discharge",
)


def on(kind: str) -> jax.sharding.SingleDeviceSharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def first_equation():
    return jax.jit(lambda x: jnp.sin(x)).trace(1.0).jaxpr.eqns[0]


@pytest.fixture
def without_private(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PRIVATE:
        monkeypatch.setattr(compat, name, None)


def test_the_private_names_are_there_on_this_version():
    assert all(getattr(compat, name) is not None for name in PRIVATE)


def test_the_users_line_is_known():
    assert "test_compat.py" in compat.source_line(first_equation())


def test_the_users_line_is_not_one_of_a_library(monkeypatch: pytest.MonkeyPatch):
    def frames(traceback: object) -> list[Frame]:
        library = compat.sysconfig.get_path("purelib")
        return [Frame(f"{library}/net.py", 7, 1, "call"), Frame("me.py", 3, 2, "f")]

    monkeypatch.setattr(compat._lines, "user_frames", frames)
    compat._line_in.cache_clear()
    assert compat.source_line(first_equation()) == "me.py:3:2 (f)"
    compat._line_in.cache_clear()


def test_without_private_names_it_is_known_what_stages(without_private: None):
    seen = []

    def look(x: object) -> object:
        seen.append(compat.is_staging())
        return x

    look(1.0)
    jax.grad(look)(1.0)
    jax.vmap(look)(jnp.ones(2))
    assert seen == [False, False, False]
    jax.jit(look)(1.0)
    jax.grad(jax.jit(lambda x: look(x)))(1.0)
    jax.make_jaxpr(jax.vmap(look))(jnp.ones(2))
    assert seen[3:] == [True, True, True]
    assert not compat.is_for_checkpoint()


def test_without_private_names_gradients_keep_the_budget(without_private: None):
    x, weights = jnp.ones((8, 128)), [jnp.full((128, 128), 0.01 * i) for i in range(8)]
    f = jturnip.jit(lambda w, x: tower(x, w).sum(), "400KiB")
    found = jax.grad(f)(jturnip.host(weights), x)
    expected = jax.grad(lambda w, x: tower(x, w).sum())(weights, x)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert f.last_run is not None
    assert f.last_run.peak_bytes <= 400 * 1024


def test_without_private_names_references_are_those_of_jit(without_private: None):
    r = jax.new_ref(jnp.ones(3))
    f = jturnip.jit(lambda r, x: r.__setitem__(0, x))
    with pytest.warns(jturnip.InlinedWarning, match="references"):
        f(r, 5.0)
    np.testing.assert_array_equal(r[...], [5.0, 1.0, 1.0])


def test_types_are_jaxs_own_again_after_tracing():
    moved = jax.device_put(jnp.ones(8), on("pinned_host"))
    with compat.tracing(), compat.tracing():
        assert jax.typeof(moved).memory_space == jax.memory.Space.Device
    assert jax.typeof(moved).memory_space == jax.memory.Space.Host
    types = compat._core.pytype_aval_mappings
    assert types[type(moved)] is not compat._type_while_tracing


class Frame(NamedTuple):
    file_name: str
    start_line: int
    start_column: int
    function_name: str


def test_a_settled_array_is_what_jit_would_give():
    moved = compat.copy_to(jax.device_put(jnp.ones(8), on("pinned_host")), on("device"))
    settled = compat.settled(moved, committed=False)
    assert not settled.committed
    assert jax.typeof(settled) == jax.typeof(jnp.ones(8))
    assert settled.unsafe_buffer_pointer() == moved.unsafe_buffer_pointer()


def test_without_private_names_results_stay_committed(without_private: None):
    moved = compat.copy_to(jnp.ones(8), on("pinned_host"))
    assert compat.settled(moved, committed=False) is moved


def test_without_private_names_there_is_no_line(without_private: None):
    assert compat.source_line(first_equation()) == ""


def test_without_private_names_an_operation_is_what_it_is(without_private: None):
    (call,) = jax.jit(jnp.searchsorted).trace(jnp.zeros(8), jnp.zeros(5)).jaxpr.eqns
    inner = call.params["jaxpr"]
    assert all(compat.expanded(e) is None for e in getattr(inner, "jaxpr", inner).eqns)


@pytest.mark.parametrize("private", [True, False])
def test_x64_is_part_of_the_trace_context(private: bool, request: pytest.FixtureRequest):
    if not private:
        request.getfixturevalue("without_private")
    before = compat.trace_context()
    with jax.enable_x64(True):
        assert compat.trace_context() != before
    assert compat.trace_context() == before


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("kinds", [("device", "pinned_host"), ("pinned_host", "device")])
def test_a_copy_is_in_the_other_memory_and_shares_nothing(
    private: bool, kinds: tuple[str, str], request: pytest.FixtureRequest
):
    if not private:
        request.getfixturevalue("without_private")
    x = jax.device_put(jnp.arange(4096.0), on(kinds[0]))
    copy = compat.copy_to(x, on(kinds[1]))
    assert copy.sharding.memory_kind == kinds[1]
    x.delete()
    np.testing.assert_array_equal(np.asarray(copy), np.arange(4096.0))


def test_a_private_copy_with_another_signature_is_not_tried_twice(
    monkeypatch: pytest.MonkeyPatch,
):
    calls = []

    def changed(*args: object) -> None:
        calls.append(args)
        raise TypeError("takes other arguments now")

    monkeypatch.setattr(compat, "_batched_copy", changed)
    for _ in range(2):
        copy = compat.copy_to(jnp.ones(8), on("pinned_host"))
        assert copy.sharding.memory_kind == "pinned_host"
    assert len(calls) == 1


def tower(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


@pytest.mark.parametrize("native", [True, False])
def test_a_function_runs_in_its_budget_without_private_names(
    without_private: None, native: bool, monkeypatch: pytest.MonkeyPatch
):
    if not native:
        monkeypatch.setattr(marks, "load", lambda: False)
        monkeypatch.setattr(executables, "_CACHE", type(executables._CACHE)())
    x, weights = jnp.ones((128, 128)), [jnp.full((128, 128), 0.01 * i) for i in range(8)]
    f = jturnip.jit(tower, "400KiB")
    y = f(x, jturnip.host(weights))
    # One product is the same in a task of its own, to the bit or two of another blocking.
    np.testing.assert_allclose(y, jax.jit(tower)(x, weights), rtol=1e-6)
    assert f.last_run is not None
    assert 0 < f.last_run.peak_bytes <= 400 * 1024
    assert f.last_run.h2d_bytes >= sum(w.nbytes for w in weights)
