"""The virtual arena: no byte is lost, had twice, or taken without naming who freed it."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from jturnip.graph.memgraph import OpId, Ranges
from jturnip.planner.allocator import Arena
from jturnip.units import GRANULE, padded


def freed_in_turn(*sizes: int) -> Arena:
    """An arena of blocks of these sizes, one after the other; block k was freed by op k."""
    arena = Arena(sum(sizes))
    slots = [arena.take(nbytes)[0] for nbytes in sizes]
    for op, ranges in enumerate(slots):
        arena.free(ranges, OpId(op))
    return arena


def total(ranges: Ranges) -> int:
    return sum(nbytes for _, nbytes in ranges)


def test_bytes_that_nobody_had_come_without_a_freer():
    arena = Arena(100)
    assert arena.take(60) == (((0, 60),), ())
    assert arena.free_bytes == 40


def test_the_bytes_freed_longest_ago_go_first():
    assert freed_in_turn(8, 8, 8).take(4) == (((0, 4),), (0,))


def test_what_is_left_of_a_block_keeps_its_age():
    arena = freed_in_turn(8, 16)
    arena.take(5)
    assert arena.take(3) == (((5, 3),), (0,))


def test_several_blocks_together_name_all_who_freed_them():
    arena = freed_in_turn(4, 2, 4)
    assert arena.take(7) == (((0, 7),), (0, 1, 2))


def test_a_whole_block_of_just_the_size_is_preferred_to_the_pieces_of_others():
    # Six bytes are four of block 0 and two of block 1, or block 1 as a whole.
    assert freed_in_turn(4, 6, 9).take(6) == (((4, 6),), (1,))


def test_a_whole_block_is_not_preferred_where_it_was_freed_later():
    # Block 0 alone has enough: block 1 was freed later, and its freer may not be over.
    assert freed_in_turn(8, 4).take(4) == (((0, 4),), (0,))


def test_of_whole_blocks_the_oldest_goes_first():
    arena = freed_in_turn(2, 4, 4)
    assert arena.take(4) == (((2, 4),), (1,))


def test_a_slot_may_be_several_ranges():
    arena = Arena(12)
    first, middle, last = (arena.take(4)[0] for _ in range(3))
    arena.free(first, OpId(0))
    arena.free(last, OpId(1))
    assert arena.take(8) == (((0, 4), (8, 4)), (0, 1))
    assert middle == ((4, 4),)


def test_no_bytes_are_nowhere_and_wait_for_nobody():
    arena = freed_in_turn(4)
    assert arena.take(0) == ((), ())
    arena.free((), OpId(1))
    assert arena.take(4) == (((0, 4),), (0,))


def test_an_arena_of_no_bytes_has_none():
    assert Arena(0).free_bytes == 0
    assert Arena(0).take(0) == ((), ())


@given(st.integers(0, 1 << 50))
def test_padding_is_the_next_multiple_of_the_granule(nbytes: int):
    assert 0 <= padded(nbytes) - nbytes < GRANULE
    assert padded(nbytes) % GRANULE == 0


@pytest.mark.long
@given(st.randoms(use_true_random=False), st.integers(1, 200), st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_bytes_are_neither_lost_nor_had_twice(rng: random.Random, size: int, steps: int):
    arena = Arena(size)
    # Who freed each byte last, and the slots that are taken.
    freed_by: list[int | None] = [None] * size
    taken: list[Ranges] = []
    for op in range(steps):
        if taken and rng.random() < 0.5:
            ranges = taken.pop(rng.randrange(len(taken)))
            arena.free(ranges, OpId(op))
            for byte in bytes_of(ranges):
                freed_by[byte] = op
        else:
            nbytes = rng.randint(0, min(arena.free_bytes, 40))
            ranges, freers = arena.take(nbytes)
            assert total(ranges) == nbytes
            assert set(freers) == {freed_by[b] for b in bytes_of(ranges)} - {None}
            assert list(ranges) == sorted(ranges)
            taken.append(ranges)
        used = [byte for ranges in taken for byte in bytes_of(ranges)]
        assert len(used) == len(set(used)), "a byte is in two slots"
        assert all(0 <= byte < size for byte in used)
        assert arena.free_bytes == size - len(used)


@given(st.randoms(use_true_random=False), st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_whatever_is_free_can_be_had_in_one_piece(rng: random.Random, size: int):
    arena = Arena(size)
    taken = []
    while arena.free_bytes:
        taken.append(arena.take(rng.randint(1, arena.free_bytes))[0])
    rng.shuffle(taken)
    for op, ranges in enumerate(taken[: len(taken) // 2 + 1]):
        arena.free(ranges, OpId(op))
    free = arena.free_bytes
    assert total(arena.take(free)[0]) == free


def bytes_of(ranges: Ranges) -> list[int]:
    return [byte for start, n in ranges for byte in range(start, start + n)]
