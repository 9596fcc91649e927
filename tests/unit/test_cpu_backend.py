"""The CPU kernel: portable builds, packing, and what happens without a compiler. Values: test_correction.py."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from kvcmas_sgl.triton_kernels import (
    AffineDelta,
    CorrectionError,
    Delta,
    LowRankDelta,
    RotaryTable,
    Segment,
    canonical_rows,
    correction,
    cpu_backend,
    left_factors,
    plan,
    run,
)
from kvcmas_sgl.triton_kernels.cpu_backend import pack
from kvcmas_sgl.triton_kernels.cpu_build import BuildError, build, load

# A width that is no multiple of the kernel's panel of 32 columns, ranks that are odd, rows that fill no block of 16.
LAYERS, HEADS, DIM, ROWS, SLOTS = 3, 3, 24, 45, 128
WIDTH = HEADS * DIM
TABLE = RotaryTable.from_theta(1e4, DIM, 512, rotary_dim=16)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low_rank() -> LowRankDelta:
    """The ranks of K and V differ."""
    return LowRankDelta(
        draw(1, LAYERS, ROWS, 5), draw(2, LAYERS, 5, WIDTH), draw(3, LAYERS, ROWS, 8), draw(4, LAYERS, 8, WIDTH)
    )


def affine() -> AffineDelta:
    return AffineDelta(
        draw(5, LAYERS, 2 * WIDTH, 14) / WIDTH,
        draw(6, LAYERS, 14),
        draw(7, LAYERS, 7, 2 * WIDTH),
        draw(8, LAYERS, 3, 2 * WIDTH),
        (math.inf, 64.0),
        (math.inf, 8.0, 32.0),
    )


def buffers(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return tuple([draw(20 + 2 * i + j, SLOTS, HEADS, DIM).to(dtype) for i in range(LAYERS)] for j in range(2))


def batch(delta: Delta | None, backend: str):
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(9))
    segment = Segment(slots[:ROWS], slots[ROWS : 2 * ROWS], 11, 300, 0, delta)
    return plan([segment], TABLE, head_dim=DIM, kv_heads=HEADS, backend=backend)


@pytest.fixture(scope="module", params=[True, False], ids=["this machine", "any machine"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return load(build(native=request.param, folder=tmp_path_factory.mktemp("kernels")))


@pytest.mark.parametrize("delta", [None, low_rank(), affine()], ids=["move", "low rank", "affine"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2.0**-7)])
def test_every_build_equals_the_torch_reference(library, delta, dtype, tolerance) -> None:
    want_k, want_v = buffers(dtype)
    run(batch(delta, "torch"), want_k, want_v)
    got_k, got_v = buffers(dtype)
    cpu_backend.run_with(library, batch(delta, "cpu"), got_k, got_v)
    for got, want in zip(got_k + got_v, want_k + want_v, strict=True):
        assert (got.double() - want.double()).abs().max() <= tolerance * want.double().abs().max()


def test_threads_change_nothing(library) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            k, v = buffers(torch.bfloat16)
            cpu_backend.run_with(library, batch(affine(), "cpu"), k, v)
            found.append(torch.stack([*k, *v]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_neox", [True, False])
def test_rows_read_by_the_kernel_are_those_of_the_formula(dtype: torch.dtype, is_neox: bool) -> None:
    """K after rope at a position, un-roped by complex division in float64; V as it is."""
    table = RotaryTable.from_theta(1e4, DIM, 512, rotary_dim=16, is_neox=is_neox)
    k, v = buffers(dtype)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[:ROWS]
    positions = torch.arange(30, 30 + ROWS)
    got_k, got_v = canonical_rows(k, v, slots, positions, table, "cpu")
    angle = positions[:, None, None].double() * 1e4 ** (-torch.arange(8).double() / 8)
    for layer in range(LAYERS):
        x = k[layer][slots].double()
        real, imaginary = (x[..., :8], x[..., 8:16]) if is_neox else (x[..., :16:2], x[..., 1:16:2])
        turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), -angle)
        want = x.clone()
        parts = (want[..., :8], want[..., 8:16]) if is_neox else (want[..., :16:2], want[..., 1:16:2])
        parts[0].copy_(turned.real)
        parts[1].copy_(turned.imag)
        assert (got_k[layer].double() - want.flatten(1)).abs().max() <= 1e-4
        assert torch.equal(got_v[layer], v[layer][slots].float().flatten(1))
    with pytest.raises(IndexError, match="to 128: the pool ends before"):
        canonical_rows(k, v, torch.tensor([3, SLOTS]), positions[:2], table, "cpu")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)])
@pytest.mark.parametrize("rank", [1, 5, 40])
def test_left_factors_are_the_delta_projected(library, dtype: torch.dtype, tolerance: float, rank: int) -> None:
    """In fp64 from rows of the formula above, by every build and by torch."""
    k, v = buffers(dtype)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
    consumer = slots[:ROWS], torch.arange(30, 30 + ROWS)
    source = slots[ROWS : 2 * ROWS], torch.arange(7, 7 + ROWS)
    right = [torch.linalg.qr(draw(40 + part, LAYERS, WIDTH, rank)).Q.mT.to(dtype) for part in range(2)]
    want = []
    for part, pool in enumerate((k, v)):
        delta = torch.stack(pool)[:, consumer[0]].double() - torch.stack(pool)[:, source[0]].double()
        if part == 0:
            rows = [canonical_rows(k, v, *place, TABLE)[0].double() for place in (consumer, source)]
            delta = (rows[0] - rows[1]).unflatten(2, (HEADS, DIM))
        want.append(delta.flatten(2) @ right[part].double().mT)
    for got in (
        cpu_backend.left_factors(k, v, consumer, source, right, TABLE, library),
        left_factors(k, v, consumer, source, right, TABLE, "cpu"),
        left_factors(k, v, consumer, source, right, TABLE, "torch"),
    ):
        for mine, true in zip(got, want, strict=True):
            assert mine.dtype is dtype and mine.shape == (LAYERS, ROWS, rank)
            assert (mine.double() - true).abs().max() <= tolerance * true.abs().max()
    v[1][slots[3], 0, 0] = math.nan
    for backend in ("cpu", "torch"):
        with pytest.raises(CorrectionError, match="NaN"):
            left_factors(k, v, consumer, source, right, TABLE, backend)
    with pytest.raises(IndexError, match="to 128: the pool ends before"):
        left_factors(k, v, consumer, (torch.full((ROWS,), SLOTS), source[1]), right, TABLE, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (4, 32), (5, 33), (6, 70)])
def test_packing_keeps_every_entry_where_the_kernel_looks(dtype: torch.dtype, depth: int, columns: int) -> None:
    matrix = torch.arange(2 * depth * columns, dtype=torch.float32).view(2, depth, columns) % 200
    packed, even = pack(matrix, dtype).float().numpy(), depth + depth % 2
    for layer in range(2):
        for row in range(even):
            for column in range(columns):
                panel, inside = divmod(column, 32)
                if dtype is torch.bfloat16:
                    at = panel * 32 * even + (row // 2) * 64 + inside * 2 + row % 2
                else:
                    at = panel * 32 * even + row * 32 + inside
                want = matrix[layer, row, column] if row < depth else 0
                assert packed[layer, at] == want


def test_a_pool_that_is_too_small_is_refused_before_memory_is_touched() -> None:
    k, v = buffers(torch.float32)
    with pytest.raises(ValueError, match=r"k_buffers\[0\] has 100 slots: the plan needs 1"):
        run(batch(None, "cpu"), [x[:100] for x in k], [x[:100] for x in v])


def test_other_pools_go_to_torch_and_asking_for_the_kernel_says_why() -> None:
    want_k, want_v = buffers(torch.float16)
    got_k, got_v = buffers(torch.float16)
    run(batch(affine(), "torch"), want_k, want_v)
    run(batch(affine(), "auto"), got_k, got_v)
    assert all(torch.equal(a, b) for a, b in zip(got_k + got_v, want_k + want_v, strict=True))
    with pytest.raises(ValueError, match=r"'cpu' cannot be used: the pool is torch\.float16"):
        run(batch(None, "cpu"), got_k, got_v)


def test_without_a_compiler_corrections_run_on_torch_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    try:
        k, v = buffers(torch.float32)
        with caplog.at_level(logging.WARNING):
            run(batch(affine(), "auto"), k, v)
        assert "no-such-compiler" in caplog.text
        want_k, want_v = buffers(torch.float32)
        run(batch(affine(), "torch"), want_k, want_v)
        assert all(torch.equal(a, b) for a, b in zip(k + v, want_k + want_v, strict=True))
    finally:
        forget()


def forget() -> None:
    """What was found out about backends in this process."""
    cpu_backend._library.cache_clear()
    correction._refusal.cache_clear()


def test_a_compilers_error_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'no target today' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(BuildError, match="ended with status 3: no target today"):
        build(folder=tmp_path / "kernels")
    assert not list((tmp_path / "kernels").iterdir())


def test_a_build_is_made_once(tmp_path: Path) -> None:
    first = build(native=False, folder=tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build(native=False, folder=tmp_path) == first and first.stat().st_mtime_ns == stamp
    assert np.array_equal([path.name for path in tmp_path.iterdir()], [first.name])
