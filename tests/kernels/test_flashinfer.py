"""The FlashInfer backend: every call fits FlashInfer's own signatures and checks, and the result is the reference's.

FlashInfer's operations need a GPU. Here they are replaced by torch code that computes what their documentation says, in
the pool's type, after the call was bound to the real signature and held against the checks of FlashInfer's C++ sources
(data/csrc: rope.cu, page.cu, group_gemm.cu).
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import flashinfer
import pytest
import torch
from kvcmas_sgl.triton_kernels import CorrectionError, LowRankDelta, RotaryTable, flashinfer_backend, rotate

from tests.kernels.cases import SLOTS, Model, draw, planned, ragged, reference, segments

ROPE = inspect.signature(flashinfer.rope.apply_rope_with_cos_sin_cache_inplace)
APPEND = inspect.signature(flashinfer.page.append_paged_kv_cache)
PRODUCT = inspect.signature(flashinfer.gemm.SegmentGEMMWrapper.run)
HALVES = (torch.float16, torch.bfloat16)


def bound(signature: inspect.Signature, args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults included; TypeError if the call does not fit."""
    made = signature.bind(*args, **options)
    made.apply_defaults()
    return made.arguments


def rope(*args: Any, **options: Any) -> None:
    at = bound(ROPE, args, options)
    positions, cache, size = at["positions"], at["cos_sin_cache"], at["head_size"]
    assert cache.dtype == torch.float32 and cache.ndim == 2 and cache.is_contiguous()
    assert positions.dtype in (torch.int32, torch.int64) and positions.ndim == 1 and positions.is_contiguous()
    assert int(positions.max()) < cache.shape[0] and cache.shape[1] <= size
    cos, sin = (part.contiguous() for part in cache.chunk(2, dim=1))
    table = RotaryTable(cos, sin, at["is_neox"], cache.shape[1])
    for x in (at["query"], at["key"]):
        assert x.dtype in HALVES and x.stride(-1) == 1 and x.shape[0] == positions.numel() and x.shape[1]
        heads = x.view(x.shape[0], -1, size)
        heads.copy_(rotate(heads, positions.long(), table))


def append(*args: Any, **options: Any) -> None:
    at = bound(APPEND, args, options)
    key, value = at["append_key"], at["append_value"]
    k_pages, v_pages = at["paged_kv_cache"]
    assert at["kv_layout"] == "NHD" and k_pages.shape == v_pages.shape and k_pages.stride() == v_pages.stride()
    assert k_pages.ndim == 4 and k_pages.stride(-1) == 1 and k_pages.shape[3] in (64, 128, 256, 512)
    assert key.shape == value.shape and key.shape[1:] == k_pages.shape[2:] and key.dtype == k_pages.dtype
    for name in ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len"):
        assert at[name].dtype == torch.int32 and at[name].ndim == 1 and at[name].is_contiguous(), name
    assert at["batch_indices"].numel() == at["positions"].numel() == key.shape[0]
    assert at["kv_indptr"].numel() == at["kv_last_page_len"].numel() + 1
    page, size = at["positions"].long(), k_pages.shape[1]
    slot = at["kv_indices"].long()[at["kv_indptr"].long()[at["batch_indices"].long()] + page // size]
    k_pages[slot, page % size], v_pages[slot, page % size] = key, value


def product(*args: Any, **options: Any) -> torch.Tensor:
    at = bound(PRODUCT, args, options)
    x, weights, first = at["x"], at["weights"], at["seg_indptr"]
    assert x.dtype == weights.dtype and x.dtype in HALVES and x.is_contiguous() and weights.is_contiguous()
    assert at["batch_size"] == weights.shape[0] == first.numel() - 1 and first.dtype == torch.int64
    assert not at["weight_column_major"] and at["out"] is None and int(first[-1]) == x.shape[0]
    # CUTLASS reads 16 bytes at a time (alignment 8 in group_gemm.cuh).
    assert x.shape[1] % 8 == weights.shape[2] % 8 == 0 and x.shape[1] == weights.shape[1]
    rows = [x[a:b].float() @ w.float() for a, b, w in zip(first[:-1], first[1:], weights, strict=True)]
    return torch.cat(rows).to(x.dtype)


@dataclass
class Calls:
    """How often each operation ran."""

    count: Counter[str] = field(default_factory=Counter)

    def counted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.count[name] += 1
            return operation(*args, **options)

        return call


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen = Calls()
    monkeypatch.setattr(flashinfer.rope, "apply_rope_with_cos_sin_cache_inplace", seen.counted("rope", rope))
    monkeypatch.setattr(flashinfer.page, "append_paged_kv_cache", seen.counted("append", append))
    wrapped = seen.counted("product", product)
    monkeypatch.setattr(flashinfer.gemm.SegmentGEMMWrapper, "run", lambda *args, **options: wrapped(*args, **options))
    return seen


def assert_near(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    """Three roundings of what enters the sum, and of the factors before it: four units in all, of the largest value."""
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b).abs().max() <= 4 * torch.finfo(a.dtype).eps / 2 * b.abs().max()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary", [None, 32], ids=["full", "partial"])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_ragged_batch_of_all_kinds(
    dtype: torch.dtype, neox: bool, rotary: int | None, heads: int, calls: Calls
) -> None:
    model = Model(layers=3, heads=heads, dim=64, dtype=dtype, neox=neox, rotary=rotary)
    k, v = model.pool(3)
    before = [x.clone() for x in (*k, *v)]
    made = ragged(model)
    plan = planned(model, made)
    want = reference(plan, k, v)
    flashinfer_backend.run(plan, k, v)
    assert_near([*k, *v], want)
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[torch.cat([one.target_slots for one in made])] = False
    for a, b in zip((*k, *v), before, strict=True):
        assert torch.equal(a[others], b[others])
    # A layer: one rotation and one append; two products for deltas, a rotation and a product for features.
    assert calls.count == {"rope": 1 + 2 * 2, "append": 3, "product": 2 * 3}


@pytest.mark.parametrize("kind", ["none", "measured", "predicted"])
def test_batches_of_one_kind(kind: str) -> None:
    model = Model(dim=64, dtype=torch.bfloat16)
    delta = {"none": None, "measured": model.low_rank(1, 20, 5), "predicted": model.affine(1, 5, (math.inf,), ())}[kind]
    k, v = model.pool(3)
    plan = planned(model, segments(1, [(20, 0, delta)]))
    want = reference(plan, k, v)
    flashinfer_backend.run(plan, k, v)
    assert_near([*k, *v], want)


def test_moved_values_keep_their_bits() -> None:
    model = Model(dim=64, dtype=torch.bfloat16)
    k, v = model.pool(3)
    made = segments(1, [(20, 0, None)])
    flashinfer_backend.run(planned(model, made), k, v)
    for x in v:
        assert torch.equal(x[made[0].target_slots], x[made[0].source_slots])


def test_values_that_are_not_finite_are_reported() -> None:
    model = Model(dim=64, dtype=torch.bfloat16)
    k, v = model.pool(3)
    made = segments(1, [(20, 0, None)])
    v[1][made[0].source_slots[3], 0, 0] = float("nan")
    with pytest.raises(CorrectionError):
        flashinfer_backend.run(planned(model, made), k, v)


def test_what_flashinfer_was_not_compiled_for_is_refused() -> None:
    for model, name in ((Model(dim=80, dtype=torch.bfloat16), "80"), (Model(dim=64), "float32")):
        with pytest.raises(ValueError, match=name):
            flashinfer_backend.run(planned(model, segments(1, [(4, 0, None)])), *model.pool(1))


def test_an_unknown_kind_of_delta_is_refused() -> None:
    model = Model(dim=64, dtype=torch.bfloat16)
    plan = planned(model, segments(1, [(4, 0, None)]))
    odd = replace(plan, groups=(replace(plan.groups[0], delta=object()),))
    with pytest.raises(TypeError, match="neither"):
        flashinfer_backend.run(odd, *model.pool(1))


def test_why_it_is_unavailable_without_a_gpu() -> None:
    why = flashinfer_backend.unavailable(torch.device("cpu"), torch.bfloat16)
    assert why == "FlashInfer needs an NVIDIA GPU: the KV pool is on cpu"


def _skipping(real: Callable[..., None]) -> Callable[..., None]:
    """Rotate only the moved rows of a stack of moved rows and deltas."""

    def rope_(plan: Any, x: torch.Tensor, rotations: torch.Tensor, positions: torch.Tensor) -> None:
        real(plan, x[: plan.rows], rotations, positions)

    return rope_


def test_deltas_that_are_not_roped_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "_rope_", _skipping(flashinfer_backend._rope_))
    assert not _equal_to_reference()


def test_values_that_get_the_deltas_of_keys_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(dim=64, dtype=torch.bfloat16)
    one = model.low_rank(1, 20, 5)
    assert _equal_to_reference(one)
    real = flashinfer_backend.prepare

    def swapped(*args: Any) -> Any:
        made = real(*args)
        return replace(made, factors=replace(made.factors, left_v=made.factors.left_k, right_v=made.factors.right_k))

    monkeypatch.setattr(flashinfer_backend, "prepare", swapped)
    assert not _equal_to_reference(one)


def _equal_to_reference(delta: LowRankDelta | None = None) -> bool:
    model = Model(dim=64, dtype=torch.bfloat16)
    k, v = model.pool(3)
    plan = planned(model, segments(1, [(20, 0, delta or model.low_rank(1, 20, 5))]))
    want = reference(plan, k, v)
    flashinfer_backend.run(plan, k, v)
    try:
        assert_near([*k, *v], want)
    except AssertionError:
        return False
    return True


def test_a_call_that_does_not_fit_the_signature_is_caught() -> None:
    x = draw(1, 4, 64).bfloat16()
    with pytest.raises(TypeError):
        flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(torch.arange(4), x, x, 64, torch.ones(4, 64), neox=True)
    with pytest.raises(AssertionError):
        flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(torch.arange(4), x, x, 64, torch.ones(4, 64).double())
