"""Windows are hashed as a loop would, and every known block is found at every offset."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcmas_sgl.radix_ext.blocks import MAX_OWNERS, BlockTable, window_hashes

tokens = st.lists(st.integers(0, 5), max_size=60).map(lambda values: np.array(values, np.int64))


@given(tokens, st.integers(1, 8))
def test_equal_windows_and_only_they_have_equal_hashes(values: np.ndarray, block: int) -> None:
    hashes = window_hashes(values, block).tolist()
    windows = [tuple(values[i : i + block].tolist()) for i in range(len(values) - block + 1)]
    assert len(hashes) == len(windows)
    assert len(set(windows)) == len(set(hashes)) == len(set(zip(windows, hashes, strict=True)))


@given(tokens, tokens, st.integers(1, 8))
def test_hits_are_where_a_search_finds_them(known: np.ndarray, asked: np.ndarray, block: int) -> None:
    table: BlockTable[str] = BlockTable(block)
    table.add("k", known)
    starts = range(0, len(known) - block + 1, block)
    expected = {
        at: [("k", i) for i in starts if (known[i : i + block] == asked[at : at + block]).all()][-MAX_OWNERS:]
        for at in range(len(asked) - block + 1)
    }
    assert dict(table.hits(asked)) == {at: places for at, places in expected.items() if places}


@given(tokens, tokens)
def test_a_removed_owner_leaves_nothing_behind(first: np.ndarray, second: np.ndarray) -> None:
    table: BlockTable[str] = BlockTable(4)
    table.add("a", first)
    table.add("b", second)
    table.remove("a", first)
    assert all(owner == "b" for _, places in table.hits(np.concatenate([first, second])) for owner, _ in places)
    table.remove("b", second)
    assert len(table) == 0


def test_a_block_that_stands_everywhere_keeps_its_newest_owners() -> None:
    table: BlockTable[int] = BlockTable(2)
    for owner in range(MAX_OWNERS + 3):
        table.add(owner, np.array([1, 2]))
    ((_, places),) = table.hits(np.array([1, 2]))
    assert [owner for owner, _ in places] == list(range(3, MAX_OWNERS + 3))


def test_a_block_holds_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="block is 0"):
        BlockTable(0)
