"""A backend that disagrees with the reference is not used."""

from __future__ import annotations

import logging
from types import ModuleType

import pytest
import torch
from kvcmas_sgl.triton_kernels import CorrectionPlan, backend_for, correction, cpu_backend, torch_backend
from kvcmas_sgl.triton_kernels.self_check import disagreement

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def backend(run) -> ModuleType:
    made = ModuleType("kvcmas_sgl.triton_kernels.made_up_backend")
    made.run, made.unavailable = run, lambda device, dtype: None
    return made


def without_the_delta(plan: CorrectionPlan, k, v) -> None:
    torch_backend.run(plan, k, v)
    for group in plan.groups:
        if group.delta is not None:
            v[1][group.target] = v[1][group.source]


def blind(plan: CorrectionPlan, k, v) -> None:
    for part in (k, v):
        for buffer in part:
            buffer.nan_to_num_(0.0)
    torch_backend.run(plan, k, v)


def crashing(plan: CorrectionPlan, k, v) -> None:
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (8, 128), (1, 80)])
def test_what_works_agrees(dtype: torch.dtype, kv_heads: int, head_dim: int) -> None:
    assert disagreement(torch_backend, CPU, dtype, kv_heads, head_dim) is None
    assert disagreement(cpu_backend, CPU, dtype, kv_heads, head_dim) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_does_not_is_told_in_a_sentence(dtype: torch.dtype) -> None:
    def found(run) -> str | None:
        return disagreement(backend(run), CPU, dtype, 2, 64)

    assert "with a measured delta is off by" in (found(without_the_delta) or "")
    assert found(blind) == "its self-check did not notice NaN"
    assert found(crashing) == "its self-check with moved rows failed: RuntimeError: no kernel image"


def test_auto_leaves_it_out_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_backend, "run", without_the_delta)
    correction._refusal.cache_clear()
    try:
        with caplog.at_level(logging.ERROR):
            assert backend_for(CPU, torch.float32, 2, 16) == "torch"
        assert "the cpu backend of the correction op is not used" in caplog.text
        with pytest.raises(ValueError, match="backend 'cpu' cannot be used: its self-check"):
            backend_for(CPU, torch.float32, 2, 16, "cpu")
    finally:
        correction._refusal.cache_clear()
