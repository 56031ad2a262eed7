"""Where arguments and results lie: shardings, commitment, meshes of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, layers, memory_kinds, on_device, on_host, smallest_budget
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jturnip


X = np.random.default_rng(0).normal(size=(8, 128)).astype(np.float32)
WEIGHTS = layers(6)
SPLIT_AND_WHOLE = pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])


def tower(weights: Any, x: Any) -> Any:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return {"last": x, "sums": [x.sum(0), weights[0] * 2]}


def loop(weights: Any, x: Any) -> Any:
    body = lambda state: (state[0] + 1, tower(weights, state[1])["last"])
    return jax.lax.while_loop(lambda state: state[0] < 2, body, (0, x))


def jitted(fn: Any, split: bool, **keywords: Any) -> Any:
    if not split:
        return jturnip.jit(fn, 1 << 30, **keywords)
    return jturnip.jit(fn, smallest_budget(fn, WEIGHTS, X) + (1 << 18), **keywords)


def committed(tree: Any) -> set[bool]:
    return {leaf.committed for leaf in jax.tree.leaves(tree)}


@SPLIT_AND_WHOLE
@pytest.mark.parametrize("fn", [tower, loop])
def test_results_are_committed_as_those_of_jit(fn, split):
    f = jitted(fn, split)
    result = f(WEIGHTS, X)
    # Those that are in host memory are committed to it.
    found = [leaf for leaf in jax.tree.leaves(result) if memory_kinds(leaf) == ["device"]]
    assert committed(found) == committed(jax.jit(fn)(WEIGHTS, X)) == {False}
    there = jax.device_put(X, on_device())
    assert committed(f(WEIGHTS, there)) == {True}
    assert committed(jax.jit(fn)(WEIGHTS, there)) == {True}


@SPLIT_AND_WHOLE
def test_results_know_the_memory_they_are_in(split):
    for leaf in jax.tree.leaves(jitted(tower, split)(jturnip.host(WEIGHTS), X)):
        on_host = leaf.sharding.memory_kind != "device"
        assert ("host" in str(jax.typeof(leaf).memory_space).lower()) == on_host
        assert (leaf + 1).shape == leaf.shape


@SPLIT_AND_WHOLE
@pytest.mark.parametrize("fn", [tower, loop])
def test_results_go_where_out_shardings_says(fn, split):
    expected = jax.jit(fn)(WEIGHTS, X)
    for sharding in (on_host(), on_device()):
        f = jitted(fn, split, out_shardings=sharding)
        result = f(WEIGHTS, X)
        assert_same(result, expected)
        assert set(memory_kinds(result)) == {sharding.memory_kind}
        assert {leaf.sharding for leaf in jax.tree.leaves(result)} == {sharding}
        assert committed(result) == {True}


@SPLIT_AND_WHOLE
def test_out_shardings_for_a_part_of_the_tree(split):
    wanted = {"last": None, "sums": on_host()}
    result = jitted(tower, split, out_shardings=wanted)(WEIGHTS, X)
    assert memory_kinds(result["sums"]) == ["pinned_host"] * 2
    assert_same(result, jax.jit(tower)(WEIGHTS, X))


@SPLIT_AND_WHOLE
def test_arguments_are_put_where_in_shardings_says(split):
    f = jitted(tower, split, in_shardings=(on_host(), None))
    assert_same(f(WEIGHTS, X), jax.jit(tower)(WEIGHTS, X))
    if split:
        # In host memory, they are streamed from there.
        assert f.last_run.h2d_bytes >= sum(w.nbytes for w in WEIGHTS)
    f = jitted(tower, False, in_shardings=on_device())
    assert_same(f(WEIGHTS, X), jax.jit(tower)(WEIGHTS, X))


def test_stages_take_shardings_too():
    wanted = {"in_shardings": (on_host(), None), "out_shardings": on_host()}
    lowered = jitted(tower, True, **wanted).lower(WEIGHTS, X)
    assert lowered.plan.strategy != "whole"
    result = lowered.compile()(WEIGHTS, X)
    assert set(memory_kinds(result)) == {"pinned_host"}
    assert_same(result, jax.jit(tower)(WEIGHTS, X))


def test_a_donated_host_argument_and_a_result_wanted_on_the_device():
    f = jturnip.jit(lambda x: x * 2, 1 << 20, donate_argnums=0, out_shardings=on_device())
    x = jturnip.host(jnp.ones((64, 64)))
    assert memory_kinds(f(x)) == ["device"]
    assert x.is_deleted()


def test_results_that_cannot_be_on_the_device_are_refused():
    with pytest.raises(jturnip.DoesNotFit, match="out_shardings places on the device"):
        jturnip.jit(tower, 50_000, out_shardings=on_device()).lower(WEIGHTS, X)


def test_a_prefix_that_does_not_fit():
    with pytest.raises(ValueError, match="in_shardings does not fit"):
        jturnip.jit(tower, in_shardings=(on_host(), None, None))(WEIGHTS, X)
    with pytest.raises(ValueError, match="out_shardings does not fit"):
        jturnip.jit(tower, out_shardings=(on_host(), None))(WEIGHTS, X)
    with pytest.raises(ValueError, match="keyword"):
        jturnip.jit(tower, in_shardings=on_host())(WEIGHTS, x=X)


@SPLIT_AND_WHOLE
def test_under_a_transformation_shardings_are_those_of_jit(split):
    room = 350_000 if split else 1 << 30
    f = jturnip.jit(tower, room, out_shardings=on_device())
    gradient = jax.grad(lambda w: f(w, X)["last"].sum())(jturnip.host(WEIGHTS))
    assert_same(gradient, jax.grad(lambda w: tower(w, X)["last"].sum())(WEIGHTS), ulps=256)


@SPLIT_AND_WHOLE
def test_results_of_arguments_on_a_mesh_are_on_the_mesh(split):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    result = jitted(tower, split)(WEIGHTS, x)
    expected = jax.jit(tower)(WEIGHTS, x)
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert isinstance(one.sharding, NamedSharding)
        assert one.sharding.mesh == other.sharding.mesh
        if one.sharding.memory_kind == "device":
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    assert_same(result, expected)
