"""Jobs of the threads that wait for arrays."""

import gc
import threading
import weakref
from typing import Any

import jax.numpy as jnp
import pytest

from jturnip.runtime import waiters


class Something:
    """What a job has to do with; weak references can point to it."""


def make_job(said: list[Any]) -> tuple[waiters.Job, weakref.ref[Something]]:
    something = Something()

    def then(error: BaseException | None, ready: float) -> None:
        said.append((error, something))

    return waiters.Job([jnp.ones(8)], then), weakref.ref(something)


def test_a_job_says_when_its_arrays_are_ready_and_forgets_why():
    said: list[Any] = []
    job, something = make_job(said)
    job.run()
    assert job.over
    assert len(said) == 1
    said.clear()
    assert something() is None


def test_a_job_given_up_before_its_turn_holds_nothing_and_does_nothing():
    """All threads may be at work when a run fails: its jobs are still in the inbox then."""
    said: list[Any] = []
    job, something = make_job(said)
    job.give_up()
    assert something() is None
    job.run()
    assert job.over
    assert said == []


def test_giving_up_waits_for_the_thread_that_is_at_it():
    entered, released = threading.Event(), threading.Event()

    def then(error: BaseException | None, ready: float) -> None:
        entered.set()
        released.wait()

    job = waiters.Job([jnp.ones(8)], then)
    waiters.submit(job)
    assert entered.wait(60)
    threading.Timer(0.01, released.set).start()
    job.give_up()
    assert released.is_set()
    assert job.over


def test_an_error_is_said_and_nothing_is_kept():
    said: list[Any] = []
    job, something = make_job(said)
    job._arrays[0].delete()
    job.run()
    ((error, its),) = said
    assert isinstance(error, RuntimeError)
    said.clear()
    del error, its
    assert something() is None


@pytest.fixture(autouse=True)
def without_collector():
    """Nothing may need the garbage collector to be let go of."""
    gc.disable()
    yield
    gc.enable()
