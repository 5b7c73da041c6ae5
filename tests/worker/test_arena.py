from __future__ import annotations

import fcntl
import gc
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.worker.arena import PAGE, Arena, Block, map_memory

SIZES = st.integers(1, 5 * PAGE)


@given(steps=st.lists(st.one_of(SIZES, st.just(0)), max_size=60), seed=st.integers(0, 2**32 - 1))
def test_arena_live_blocks_never_overlap_and_all_return(steps: list[int], seed: int) -> None:
    """A step is a size to allocate, or 0 to drop a block at random."""
    rng = np.random.default_rng(seed)
    arena = Arena(16 * PAGE)
    live: list[tuple[Block, bytes]] = []
    for size in steps:
        if size:
            block = arena.allocate(size)
            if block is not None:
                block.view[:] = pattern = rng.bytes(size)
                live.append((block, pattern))
                del block
        elif live:
            del live[rng.integers(len(live))]
        assert all(block.view == pattern for block, pattern in live)
        assert arena.free == arena.size - sum(-(-block.size // PAGE) * PAGE for block, _ in live)
    live.clear()
    assert arena.free == arena.size
    assert arena.allocate(arena.size) is not None
    arena.close()


def test_arena_full_allocates_none() -> None:
    arena = Arena(2 * PAGE)
    first, second = arena.allocate(1), arena.allocate(PAGE)
    assert first is not None and second is not None
    assert (first.offset, second.offset) == (0, PAGE)
    assert arena.allocate(1) is None
    del first
    assert arena.allocate(PAGE + 1) is None
    again = arena.allocate(PAGE)
    assert again is not None and again.offset == 0
    arena.close()


def test_arena_block_is_kept_while_it_is_referenced() -> None:
    arena = Arena(PAGE)
    block = arena.allocate(64)
    assert block is not None
    view, array = block.view[8:16], np.frombuffer(block.view[16:32], np.uint8)
    del block
    assert arena.allocate(1) is None
    del view
    assert arena.allocate(1) is None
    array = array[1:3]
    assert arena.allocate(1) is None
    del array
    assert arena.allocate(1) is not None
    arena.close()


def test_arena_block_in_a_reference_cycle_returns() -> None:
    arena = Arena(PAGE)
    cycle: list[object] = [arena.allocate(1)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert arena.free == PAGE
    arena.close()


def test_arena_second_mapping_sees_the_same_bytes() -> None:
    arena = Arena(4 * PAGE)
    held = arena.allocate(PAGE)
    block = arena.allocate(5)
    assert held is not None and block is not None
    block.view[:] = b"hello"
    other = map_memory(arena.fd, arena.size)
    assert other[block.offset : block.offset + 5] == b"hello"
    other[block.offset] = ord("j")
    assert bytes(block.view) == b"jello"
    other.close()
    arena.close()


@pytest.mark.skipif(not hasattr(fcntl, "F_ADD_SEALS"), reason="this system has no sealed memory")
def test_arena_keeps_its_size_whatever_a_worker_does() -> None:
    arena = Arena(16 * PAGE)
    for size in (PAGE, 32 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    arena.close()
