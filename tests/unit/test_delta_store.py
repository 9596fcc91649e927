"""Own deltas: rows follow splits, bytes are exact, the budget drops the least recently used."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcmas_sgl.radix_ext.delta_store import DeltaStore, Factors, Rows, join

L, R, D = 2, 3, 8


def rows(n: int) -> Rows:
    factors = Factors(torch.randn(L, R, D), torch.randn(L, R, D), error=0.1)
    return Rows(factors, torch.randn(L, n, R), torch.randn(L, n, R))


def row_bytes(n: int) -> int:
    return 2 * L * n * R * 4


FACTOR_BYTES = 2 * L * R * D * 4


@given(st.integers(2, 12), st.data())
def test_split_rows_join_to_the_same_delta(n: int, data: st.DataObject) -> None:
    whole, store = rows(n), DeltaStore()
    halves = store.split(store.put(whole), data.draw(st.integers(1, n - 1)))
    assert halves is not None
    parts = [store.get(handle) for handle in halves]
    delta = join([part for part in parts if part is not None])
    assert delta is not None
    assert torch.equal(delta.left_k, whole.left_k) and torch.equal(delta.left_v, whole.left_v)
    assert store.nbytes == row_bytes(n) + FACTOR_BYTES


def test_rows_of_two_factorisations_do_not_join() -> None:
    assert join([rows(2), rows(3)]) is None
    assert join([]) is None


def test_the_right_factor_is_counted_once_and_until_its_last_row_goes() -> None:
    store, whole = DeltaStore(), rows(5)
    first, second = store.put(whole.cut(0, 2)), store.put(whole.cut(2, 5))
    assert store.nbytes == row_bytes(5) + FACTOR_BYTES
    store.drop(first)
    assert store.nbytes == row_bytes(3) + FACTOR_BYTES
    store.drop(second)
    store.drop(second)
    assert store.nbytes == 0 and len(store) == 0


def test_the_budget_drops_what_was_not_used() -> None:
    store = DeltaStore()
    old, used, new = (store.put(rows(4)) for _ in range(3))
    store.get(old)
    store.shrink(store.nbytes - 1)
    assert store.get(used) is None
    assert store.get(old) is not None and store.get(new) is not None
    assert store.split(used, 1) is None
