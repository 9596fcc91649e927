"""The kernels as GPU binaries: no spills, shared memory that fits, matrix instructions, wide loads, few variants."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.testing
from kvcmas_sgl.triton_kernels import LowRankDelta, triton_backend, triton_source, triton_start, triton_tuning
from kvcmas_sgl.triton_kernels.triton_tuning import Features, Shape, Tile, default, fits
from triton.compiler.compiler import max_shared_mem
from triton.runtime import driver

from tests.kernels.cases import Model, planned, segments
from tests.kernels.compiler import MATRIX, SHARED, TARGETS, WIDE_LOAD, WIDE_STORE, Binary, FakeDriver, build

LLAMA = Model(heads=8, dim=128, dtype=torch.bfloat16)
CPU = torch.device("cpu")


def correct(model: Model, kind: str, tile: Tile | None = None, rows: int = 40, rank: int = 32) -> tuple[Any, ...]:
    """(kernel, launch, options) of ``correct`` for rows that are moved only, or that get a delta of ``kind``."""
    delta = {"none": None, "measured": model.low_rank(1, rows, rank), "predicted": model.affine(2, 2 * rank)}[kind]
    plan = planned(model, segments(0, [(rows, 0, delta)]))
    batch = triton_backend.prepare(plan, CPU)[0]
    tile = tile or default(Shape.of(plan, batch, model.dtype))[0]
    failed = torch.zeros(1, dtype=torch.int32)
    launch = triton_backend.correct_launch(plan, batch, *model.pool(1), failed, tile)
    return triton_source.correct, launch, tile.options()


def features(model: Model, tile: Features | None = None, rank: int = 64) -> tuple[Any, ...]:
    """(kernel, launch, options) of ``features``."""
    plan = planned(model, segments(0, [(40, 0, model.affine(2, rank))]))
    batch = triton_backend.prepare(plan, CPU)[0]
    tile = tile or default(Shape.of(plan, batch, model.dtype))[1]
    return triton_source.features, triton_backend.feature_launch(plan, batch, *model.pool(1), tile), tile.options()


LAUNCHES: dict[str, Callable[[Model], tuple[Any, ...]]] = {
    "moved": lambda model: correct(model, "none"),
    "measured": lambda model: correct(model, "measured"),
    "predicted": lambda model: correct(model, "predicted"),
    "features": features,
}


def check(found: Binary, multiplies: bool) -> None:
    assert found.spills == 0
    assert found.registers <= (512 if found.target == "gfx942" else 255)
    assert found.shared <= SHARED[found.target]
    assert (found.count(MATRIX) > 0) == multiplies


@pytest.fixture
def hip(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the backend believe that torch was built for AMD, for targets that are."""

    def choose(target: str) -> None:
        monkeypatch.setattr(torch.version, "hip", "6.4" if TARGETS[target].backend == "hip" else None)

    return choose


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("target", TARGETS)
def test_llama_shapes(target: str, name: str, hip: Callable[[str], None]) -> None:
    hip(target)
    found = build(*LAUNCHES[name](LLAMA), target)
    check(found, multiplies=name != "moved")
    assert found.count(WIDE_LOAD) > 0
    # On AMD rows leave in the layout that a matrix product leaves them in: 8 bytes at a time.
    if name != "features" and (target != "gfx942" or name == "moved"):
        assert found.count(WIDE_STORE) > 0


@pytest.mark.parametrize(
    "model",
    [
        Model(heads=3, dim=64, dtype=torch.bfloat16),
        Model(heads=4, dim=128, neox=False, dtype=torch.float16),
        Model(heads=2, dim=256, rotary=64, dtype=torch.bfloat16),
        Model(heads=8, dim=128, dtype=torch.float32),
    ],
    ids=["64", "interleaved", "256 partial", "fp32"],
)
@pytest.mark.parametrize("name", ["measured", "features"])
def test_other_shapes(model: Model, name: str) -> None:
    check(build(*LAUNCHES[name](model), "sm_90"), multiplies=True)


def test_fp32_pools_compile_for_amd(hip: Callable[[str], None]) -> None:
    hip("gfx942")
    check(build(*features(replace(LLAMA, dtype=torch.float32)), "gfx942"), multiplies=True)


def test_bf16_factors_meet_bf16_matrix_units() -> None:
    found = build(*correct(LLAMA, "measured"), "sm_90")
    assert re.search(r"mma\S*\.bf16", found.text) and not re.search(r"mma\S*\.tf32", found.text)


def test_factors_that_do_not_start_at_16_bytes_are_read_narrow_and_the_pool_wide() -> None:
    model = LLAMA
    whole = model.low_rank(1, 50, 7)
    cut = LowRankDelta(whole.left_k[:, 3:43], whole.right_k, whole.left_v[:, 3:43], whole.right_v, start=3)
    plan = planned(model, segments(0, [(40, 3, cut)]))
    batch = triton_backend.prepare(plan, CPU)[0]
    tile = default(Shape.of(plan, batch, model.dtype))[0]
    launch = triton_backend.correct_launch(plan, batch, *model.pool(1), torch.zeros(1, dtype=torch.int32), tile)
    found = build(triton_source.correct, launch, tile.options(), "sm_90")
    check(found, multiplies=True)
    assert not batch.parts_aligned
    narrow = {"cuda": r"ld\.global\S*\.[bu]16\b", "hip": "unused"}
    assert found.count(narrow) > 0 and found.count(WIDE_LOAD) > 0


def test_batches_of_other_lengths_and_ranks_need_no_other_binary() -> None:
    """Serving must not wait for the compiler because a span has a new length."""
    driver.set_active(FakeDriver(TARGETS["sm_90"]))
    kernel = triton_source.correct
    kernel.device_caches.clear()
    for rows, rank in ((40, 32), (1, 32), (97, 32), (40, 24), (33, 20)):
        _, (grid, arguments, constants), options = correct(LLAMA, "measured", rows=rows, rank=rank)
        constants["PARTS_ALIGNED"] = True
        kernel.warmup(*arguments, grid=grid, **constants, **options)
    assert len(kernel.device_caches[0][0]) == 1


def test_what_a_launch_promises_the_compiler() -> None:
    """Addresses in tables are int64; slots are int64, whatever the strides are."""
    found = build(*correct(LLAMA, "measured"), "sm_90")
    names = triton_source.correct.arg_names
    kinds = {name: found.signature[name] for name in names}
    assert {kinds[name] for name in ("k_layers", "v_layers", "parts", "source", "target", "at")} == {"*i64"}
    assert {kinds[name] for name in ("shift_cos", "arrive_sin")} == {"*fp32"}
    assert kinds["slot_stride"] == "i32"


def loading(shared: int) -> None:
    """From here on, binaries are loaded on a device with ``shared`` bytes a block."""
    driver.set_active(FakeDriver(TARGETS["sm_90"], shared))
    triton_source.correct.device_caches.clear()
    max_shared_mem.cache_clear()


def test_the_tuner_drops_what_spills() -> None:
    good, spilling = correct(LLAMA, "measured"), correct(LLAMA, "measured", Tile(64, 4, 32, 4, 1))
    loading(SHARED["sm_90"])
    assert fits(*good)
    assert not fits(*spilling)
    assert build(*spilling, "sm_90").spills > 0


def test_the_tuner_drops_what_needs_more_shared_memory() -> None:
    launch = correct(LLAMA, "measured")
    needed = build(*launch, "sm_90").shared
    loading(needed)
    assert fits(*launch)
    loading(needed - 1)
    assert not fits(*launch)


def test_tuning_keeps_the_fastest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast, spilling = Tile(16, 4, 32, 4, 1), Tile(16, 2, 32, 4, 1), Tile(64, 4, 32, 4, 1)
    # Nothing can be timed here: the times of those that fit, the default first.
    assert slow == default(Shape(torch.bfloat16, 128, 8, "measured", 32))[0]
    times = iter([3.0, 2.0, 4.0])
    monkeypatch.setattr(triton.testing, "do_bench", lambda *_, **options: next(times))
    monkeypatch.setattr(triton_tuning, "TILES", (slow, fast, spilling))
    monkeypatch.setattr(triton_tuning, "_tuned", {})
    loading(SHARED["sm_90"])
    plan = planned(LLAMA, segments(0, [(40, 0, LLAMA.low_rank(1, 40, 32))]))
    best = triton_tuning.tune(plan, *LLAMA.pool(1))
    (shape,) = best
    assert best[shape] == 2.0
    assert triton_tuning.chosen(shape)[0] == fast and triton_tuning.tuned() == {shape: triton_tuning.chosen(shape)}
    monkeypatch.setattr(triton_tuning, "TILES", (spilling,))
    assert triton_tuning.tune(plan, *LLAMA.pool(1)) == {shape: 4.0}
    assert triton_tuning.chosen(shape)[0] == slow
    loading(0)
    assert triton_tuning.tune(plan, *LLAMA.pool(1)) == {}


def test_a_start_tunes_once_and_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first start on a GPU measures; the next one reads; another GPU is another file."""
    fast = Tile(16, 1, 32, 4, 1)
    monkeypatch.setattr(triton_tuning, "TILES", (fast,))
    monkeypatch.setattr(triton_tuning, "FEATURES", (Features(32, 64, 8, 1),))
    monkeypatch.setattr(triton_tuning, "_tuned", {})
    loading(SHARED["sm_90"])
    triton_source.features.device_caches.clear()
    timed: list[float] = []

    def do_bench(*_: object, **options: object) -> float:
        timed.append(10.0 - len(timed))
        return timed[-1]

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    start = {"own_rank": 32, "rank": 16, "folder": tmp_path}
    triton_start.tune_pool(*LLAMA.pool(1), LLAMA.table(), gpu="one", **start)
    kinds = {shape.delta: shape for shape in triton_tuning.tuned()}
    # The default and one candidate for each kind, and for the features of a predicted delta; later ones are faster.
    assert kinds.keys() == {"none", "measured", "predicted"} and len(timed) == 8
    assert {triton_tuning.chosen(shape)[0] for shape in kinds.values()} == {fast}
    assert triton_tuning.chosen(kinds["predicted"])[1] == Features(32, 64, 8, 1)
    found = triton_tuning.tuned()
    triton_tuning._tuned.clear()
    triton_start.tune_pool(*LLAMA.pool(1), LLAMA.table(), gpu="one", **start)
    assert triton_tuning.tuned() == found and len(timed) == 8
    # No time at all: the default is what was tried.
    triton_tuning._tuned.clear()
    triton_start.tune_pool(*LLAMA.pool(1), LLAMA.table(), gpu="other", seconds=0.0, **start)
    assert len(timed) == 12 and all(triton_tuning.chosen(shape) == default(shape) for shape in kinds.values())
    (broken, _) = sorted(tmp_path.iterdir())
    broken.write_text("[1]")
    assert triton_start._load(broken) == {}


def test_a_start_goes_on_with_the_defaults_when_tuning_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **options: object) -> float:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(triton.testing, "do_bench", broken)
    monkeypatch.setattr(triton_tuning, "_tuned", {})
    loading(SHARED["sm_90"])
    triton_start.tune_pool(*LLAMA.pool(1), LLAMA.table(), own_rank=0, rank=16, gpu="one", folder=tmp_path)
    assert triton_tuning.tuned() == {} and not list(tmp_path.iterdir())
    assert "block sizes for one could not be tuned" in caplog.text


def test_tuned_configurations_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    plan = planned(model, segments(0, [(4, 0, None)]))
    shape = Shape.of(plan, triton_backend.prepare(plan, CPU)[0], model.dtype)
    other = Tile(64, 1, 16, 8, 1), Features(64, 64, 8, 1)
    monkeypatch.setitem(triton_tuning._tuned, shape, other)
    assert triton_tuning.chosen(shape) == other
    assert triton_tuning.chosen(replace(shape, head_dim=64)) == default(replace(shape, head_dim=64))


def test_heads_a_program_divide_the_pools_heads() -> None:
    assert [Tile(32, 4, 16, 4, 1).heads_of(heads) for heads in (1, 2, 3, 4, 5, 6, 8, 9)] == [1, 2, 3, 4, 1, 3, 4, 3]
