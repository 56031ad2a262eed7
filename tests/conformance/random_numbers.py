"""Random keys of both styles, and what is drawn with them."""

import jax
import jax.numpy as jnp

from .registry import Case, Script, area, normal


program = area("random numbers")


@program()
def keys_split_and_used():
    def fn(key, x):
        a, b, rest = jax.random.split(key, 3)
        noise = jax.random.normal(a, (64, 64)) @ x
        return noise, jax.random.uniform(b, (8,)), rest

    return Case(fn, (jax.random.key(0), normal(64, 64)))


@program()
def keys_of_the_old_style():
    def fn(key, x):
        a, b = jax.random.split(key)
        return jax.random.normal(a, (64, 64)) @ x, jax.random.fold_in(b, 3), a

    return Case(fn, (jax.random.PRNGKey(0), normal(64, 64)))


@program()
def keys_made_inside():
    def fn(seed, x):
        key = jax.random.key(seed)
        return jax.random.normal(key, (64, 64)) @ x, key, jax.random.PRNGKey(seed)

    return Case(fn, (7, normal(64, 64)))


@program()
def arrays_of_keys():
    def fn(keys, x):
        draws = jax.vmap(lambda k: jax.random.normal(k, (64,)))(keys)
        return draws @ x, keys[::-1], keys.reshape(8, 8), jax.random.key_data(keys[3])

    return Case(fn, (jax.random.split(jax.random.key(1), 64), normal(64, 64)))


@program()
def keys_that_come_back_as_they_went():
    def fn(key, x):
        return key, jnp.sin(x @ x), jax.random.clone(key)

    return Case(fn, (jax.random.key(2), normal(64, 64)))


@program()
def keys_of_another_kind():
    def fn(key, x):
        a, b = jax.random.split(key)
        return jax.random.normal(a, (64, 64)) @ x, b

    return Case(fn, (jax.random.key(0, impl="rbg"), normal(64, 64)))


@program()
def permutations_and_choices():
    def fn(key, x):
        a, b, c = jax.random.split(key, 3)
        rows = jax.random.permutation(a, x)
        picked = jax.random.randint(b, (10,), 0, 64)
        return rows @ x, picked, jax.random.categorical(c, x)

    return Case(fn, (jax.random.key(0), normal(64, 64)))


@program()
def a_key_in_a_training_state():
    def run(jit):
        @jit
        def step(state):
            key, use = jax.random.split(state["key"])
            w = state["w"] + 0.1 * jax.random.normal(use, (64, 64)) @ state["w"]
            return {"key": key, "w": w, "n": state["n"] + 1}

        state = {"key": jax.random.key(0), "w": normal(64, 64), "n": 0}
        for _ in range(3):
            state = step(state)
        return {**state, "key": jax.random.key_data(state["key"])}

    return Script(run)
