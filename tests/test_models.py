"""The models against naive versions of themselves, and against their published sizes."""

import dataclasses
import functools
import itertools
import math
import sys
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jturnip.models import llama, pair, text, training


TINY = llama.config("tiny", layers=1)  # layers cost seconds of compilation
TINY_PAIR = pair.config("tiny", blocks=1)


@pytest.fixture(scope="module")
def params() -> training.Params:
    return llama.init(TINY, jax.random.key(0))


@pytest.fixture(scope="module")
def pair_params() -> training.Params:
    random = np.random.default_rng(0)  # pair.init compiles for seconds
    return jax.tree.map(
        lambda leaf: (random.normal(size=leaf.shape) / 4).astype(leaf.dtype),
        pair.abstract_params(TINY_PAIR),
    )


def a_batch(seed: int = 0) -> np.ndarray:
    return next(text.batches(TINY.batch, TINY.length, seed))


def some_pairs(seed: int = 0) -> np.ndarray:
    shape = (TINY_PAIR.length, TINY_PAIR.length, TINY_PAIR.width)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def normed(weights: training.Params, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + TINY_PAIR.norm_epsilon)
    return centred / deviation * weights["scale"] + weights["shift"]


def softmax(x: np.ndarray) -> np.ndarray:
    shares = np.exp(x - x.max())
    return shares / shares.sum()


# Llama


@pytest.mark.parametrize(
    ("size", "published"),
    [("1b", 1_100_048_384), ("7b", 6_738_415_616), ("13b", 13_015_864_320)],
)
def test_the_large_sizes_have_the_published_number_of_parameters(size: str, published: int):
    assert llama.param_count(llama.config(size)) == published


@pytest.mark.long
def test_abstract_params_are_the_tree_that_init_makes(params: training.Params):
    abstract = llama.abstract_params(TINY)
    assert jax.tree.structure(abstract) == jax.tree.structure(params)
    for expected, actual in zip(
        jax.tree.leaves(abstract), jax.tree.leaves(params), strict=True
    ):
        assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_gives_a_logit_for_each_token_in_the_dtype_asked_for(dtype: str):
    model = dataclasses.replace(TINY, dtype=dtype)
    tokens = jax.ShapeDtypeStruct((3, 16), jnp.int32)
    logits = jax.eval_shape(
        functools.partial(llama.forward, model), llama.abstract_params(model), tokens
    )
    assert logits.shape == (3, 16, TINY.vocabulary)
    assert logits.dtype == jnp.dtype(dtype)
    loss = jax.eval_shape(
        functools.partial(llama.loss, model), llama.abstract_params(model), tokens
    )
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


@pytest.mark.long
def test_a_token_changes_no_logits_before_it(params: training.Params):
    forward = jax.jit(functools.partial(llama.forward, TINY))
    tokens = a_batch()
    changed = tokens.copy()
    changed[:, 20] = (changed[:, 20] + 1) % TINY.vocabulary
    before, after = forward(params, tokens), forward(params, changed)
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert np.all(np.abs(before[:, 20:] - after[:, 20:]).max(axis=-1) > 0)


@pytest.mark.long
def test_attention_equals_a_loop_over_heads_and_positions(params: training.Params):
    weights = params["layers"][0]
    x = np.random.default_rng(0).normal(size=(1, 6, TINY.width)).astype(np.float32)
    rotation = llama.rotary_angles(TINY, jnp.arange(6))
    actual = llama.attention(TINY, weights, jnp.asarray(x), rotation)

    def heads(name: str, count: int) -> jax.Array:
        return (x @ weights[name]).reshape(1, 6, count, TINY.head_width)

    query = np.asarray(llama.rotate(heads("query", TINY.heads), rotation))
    key = np.asarray(llama.rotate(heads("key", TINY.kv_heads), rotation))
    value = np.asarray(heads("value", TINY.kv_heads))
    mixed = np.zeros((6, TINY.heads, TINY.head_width), np.float32)
    for head, position in itertools.product(range(TINY.heads), range(6)):
        shared = head // (TINY.heads // TINY.kv_heads)
        seen = slice(0, position + 1)
        scores = key[0, seen, shared] @ query[0, position, head]
        shares = softmax(scores / math.sqrt(TINY.head_width))
        mixed[position, head] = shares @ value[0, seen, shared]
    expected = mixed.reshape(6, TINY.width) @ np.asarray(weights["output"])
    np.testing.assert_allclose(actual[0], expected, rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_only_on_the_distance_between_positions():
    query, key = np.random.default_rng(0).normal(size=(2, TINY.head_width))
    rotation = llama.rotary_angles(TINY, jnp.arange(32))

    def at_every_position(vector: np.ndarray) -> np.ndarray:
        repeated = np.tile(vector.astype(np.float32), (1, 32, 1, 1))
        return np.asarray(llama.rotate(jnp.asarray(repeated), rotation))[0, :, 0]

    scores = at_every_position(query) @ at_every_position(key).T
    for distance in (0, 1, 5, 17):
        same_distance = np.diagonal(scores, -distance)
        np.testing.assert_allclose(same_distance, same_distance[0], rtol=1e-4, atol=1e-5)
    assert np.ptp(scores[:, 0]) > 0.1


@pytest.mark.long
@pytest.mark.parametrize("scanned", [False, True], ids=["list", "stacked"])
def test_text_is_what_the_whole_text_so_far_would_give(scanned: bool):
    model = llama.config("tiny")
    params = llama.init(model, jax.random.key(0))
    tokens = a_batch()[:, :11]
    prompt, tokens[:, 5:] = tokens[:, :5].copy(), 0
    forward = jax.jit(functools.partial(llama.forward, model))
    for at in range(5, 11):  # no cache: all tokens anew for each, and none looks ahead
        tokens[:, at] = jnp.argmax(forward(params, tokens)[:, at - 1], axis=-1)
    weights = llama.stacked(params) if scanned else params
    found = jax.jit(functools.partial(llama.generate, model, count=6))(weights, prompt)
    np.testing.assert_array_equal(found, tokens[:, 5:])


def test_random_weights_know_nothing(params: training.Params):
    loss = jax.jit(functools.partial(llama.loss, TINY))(params, a_batch())
    assert math.log(TINY.vocabulary) - 0.3 < loss < math.log(TINY.vocabulary) + 1


def test_the_state_of_the_largest_size_is_described_without_memory():
    state = llama.abstract_state(llama.config("13b"), llama.adamw())
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert nbytes == 3 * 4 * 13_015_864_320 + 4  # weights, two moments, and the count


def test_training_without_optax_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r'pip install "jturnip\[demo\]"'):
        llama.adamw()


@pytest.mark.parametrize("model", [llama, pair])
def test_an_unknown_size_is_refused_with_the_known_ones(model: ModuleType):
    with pytest.raises(ValueError, match=r"'enormous'.*tiny"):
        model.config("enormous")


def test_heads_that_cannot_be_shared_are_refused():
    with pytest.raises(ValueError, match="4 heads cannot share 3 kv_heads"):
        llama.config("tiny", kv_heads=3)


# Training


class Run(NamedTuple):
    before: training.Params
    losses: list[float]
    after: training.Params


def three_steps(model: ModuleType, config, params: training.Params, batch) -> Run:
    """Gradient descent without momentum, where each change is a gradient."""
    optimizer = optax.sgd(0.05)
    step = jax.jit(functools.partial(model.train_step, config, optimizer))
    state = training.new_state(params, optimizer)
    losses = []
    for _ in range(3):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return Run(params, losses, state.params)


@pytest.fixture(scope="module")
def llama_run(params: training.Params) -> Run:
    return three_steps(llama, TINY, params, a_batch())


@pytest.fixture(scope="module")
def pair_run(pair_params: training.Params) -> Run:
    return three_steps(pair, TINY_PAIR, pair_params, next(pair.examples(TINY_PAIR)))


@pytest.fixture(params=["llama_run", "pair_run"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue(request.param)


@pytest.mark.long
def test_each_training_step_lowers_the_loss_of_its_batch(run: Run):
    first, second, third = run.losses
    assert first > second > third


@pytest.mark.long
def test_training_changes_every_weight(run: Run):
    changed = jax.tree.map(lambda old, new: bool(np.any(old != new)), run.before, run.after)
    assert all(jax.tree.leaves(changed)), changed


@pytest.mark.slow
def test_remat_trains_to_the_same_losses_and_weights(llama_run: Run, pair_run: Run):
    again = three_steps(
        llama, dataclasses.replace(TINY, remat=True), llama_run.before, a_batch()
    )
    assert_close(again, llama_run)
    batch = next(pair.examples(TINY_PAIR))
    with_remat = dataclasses.replace(TINY_PAIR, remat=True)
    assert_close(three_steps(pair, with_remat, pair_run.before, batch), pair_run)


def assert_close(actual: Run, expected: Run) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# The pair representation


def test_blocks_keep_the_shape_of_the_pairs():
    huge = pair.config("huge", blocks=1)
    pairs = jax.ShapeDtypeStruct((huge.length, huge.length, huge.width), jnp.float32)
    out = jax.eval_shape(
        functools.partial(pair.forward, huge), pair.abstract_params(huge), pairs
    )
    assert (out.shape, out.dtype) == (pairs.shape, pairs.dtype)


@pytest.mark.parametrize("edges", ["outgoing", "incoming"])
def test_triangle_multiplication_equals_a_loop_over_triangles(
    edges, pair_params: training.Params
):
    weights = pair_params["blocks"][0][edges]
    z = some_pairs()
    actual = pair.triangle_multiplication(TINY_PAIR, weights, jnp.asarray(z), edges)

    x = normed(weights["norm"], z)
    left = sigmoid(x @ weights["left_gate"]) * (x @ weights["left"])
    right = sigmoid(x @ weights["right_gate"]) * (x @ weights["right"])
    triangles = np.zeros((*z.shape[:2], TINY_PAIR.hidden), np.float32)
    for i, j, k in itertools.product(range(TINY_PAIR.length), repeat=3):
        if edges == "outgoing":
            triangles[i, j] += left[i, k] * right[j, k]
        else:
            triangles[i, j] += left[k, i] * right[k, j]
    triangles = normed(weights["triangle_norm"], triangles)
    expected = sigmoid(x @ weights["gate"]) * (triangles @ weights["output"])
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def test_triangle_attention_equals_a_loop_over_heads_and_pairs(
    pair_params: training.Params,
):
    weights = pair_params["blocks"][0]["starting"]
    z = some_pairs()
    actual = pair.triangle_attention(TINY_PAIR, weights, jnp.asarray(z))

    x = normed(weights["norm"], z)
    bias = x @ weights["bias"]
    mixed = np.zeros((*z.shape[:2], TINY_PAIR.heads * TINY_PAIR.head_width), np.float32)
    for head in range(TINY_PAIR.heads):
        its = slice(head * TINY_PAIR.head_width, (head + 1) * TINY_PAIR.head_width)
        query, key, value = (
            (x @ weights[name])[..., its] for name in ("query", "key", "value")
        )
        for i, j in itertools.product(range(TINY_PAIR.length), repeat=2):
            scores = key[i] @ query[i, j] / math.sqrt(TINY_PAIR.head_width)
            mixed[i, j, its] = softmax(scores + bias[j, :, head]) @ value[i]
    expected = (sigmoid(x @ weights["gate"]) * mixed) @ weights["output"]
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def test_examples_repeat_with_their_seed():
    first, again = next(pair.examples(TINY_PAIR, 7)), next(pair.examples(TINY_PAIR, 7))
    np.testing.assert_array_equal(first.pair, again.pair)
    np.testing.assert_array_equal(first.bins, again.bins)
    assert 0 <= np.min(first.bins) <= np.max(first.bins) < TINY_PAIR.bins


# Text


def test_batches_are_windows_of_the_text_and_repeat_with_their_seed():
    batch = a_batch(3)
    assert (batch.shape, batch.dtype) == ((TINY.batch, TINY.length), np.int32)
    np.testing.assert_array_equal(batch, a_batch(3))
    assert not np.array_equal(batch, a_batch(4))
    whole = text.corpus().tobytes()
    assert all(row.astype(np.uint8).tobytes() in whole for row in batch)


def test_there_is_enough_text_to_learn_from():
    assert len(text.corpus()) > 300_000
