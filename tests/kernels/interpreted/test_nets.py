"""Mistakes planted into the kernels: each is caught by the net that is there for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from kvcmas_sgl.triton_kernels import CorrectionPlan, Segment, triton_source
from triton.runtime.errors import InterpreterError

from kvcmas_sgl import triton_kernels
from tests.kernels.cases import Model, assert_rounded_once, planned, ragged, reference, segments
from tests.kernels.interpreted.running import run_watched
from tests.kernels.memory_check import OutOfBounds, cause, watched

Plant = Callable[[str, str], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plant:
    """Replace a text, which must be there, in a copy of the kernels, and have the backend launch the copy."""

    def change(old: str, new: str) -> None:
        source = Path(triton_source.__file__).read_text()
        assert old in source, f"the kernels no longer hold {old!r}"
        path = tmp_path / "planted.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location("planted", path)
        assert spec and spec.loader
        module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(triton_kernels, "triton_source", module)

    return change


def outcome(model: Model, plan: CorrectionPlan) -> set[str]:
    """Which nets caught something: values, bounds, race, or flag (nothing written is NaN or Inf, or it is not told)."""
    k, v = model.pool(3)
    want = reference(plan, k, v)
    try:
        seen, failed = run_watched(plan, k, v)
    except InterpreterError as error:
        assert isinstance(cause(error), OutOfBounds), error
        return {"bounds"}
    caught = {"race"} if seen.races() else set()
    if failed == all(bool(x.isfinite().all()) for x in (*k, *v)):
        caught.add("flag")
    try:
        assert_rounded_once([*k, *v], want)
    except AssertionError:
        caught.add("values")
    return caught


def odd_model() -> Model:
    """Nothing fills its tile: 24 channels in 32, 5 pairs in 16, 14 channels that do not turn in 16, ranks in 16."""
    return Model(heads=3, dim=24, rotary=10, dtype=torch.bfloat16)


def odd_plan(neox: bool = True) -> tuple[Model, CorrectionPlan]:
    model = replace(odd_model(), neox=neox)
    return model, planned(model, ragged(model))


def test_without_a_mistake_nothing_is_caught() -> None:
    for neox in (True, False):
        assert outcome(*odd_plan(neox)) == set()


MISTAKES = {
    "a rotation turns the wrong way": ("imaginary * cos + real * sin", "imaginary * cos - real * sin", "values"),
    "neighbours are not the pairs": ("if NEOX:", "if NEOX == 0:", "values"),
    "the delta is not roped": ("_rotation(arrive_cos, arrive_sin,", "_rotation(shift_cos, shift_sin,", "values"),
    "keys stay in the source's frame for the map": ("_rotation(leave_cos, leave_sin, rows, live, pair, HALF)",
                                                     "_rotation(leave_cos, leave_sin, rows, live, pair, 0)", "values"),
    "V gets the delta of K": ("_product(part + 12,", "_product(part,", "values"),
    "the rank's tail is dropped": ("rank + biases), RANK)", "(rank + biases) // RANK * RANK), RANK)", "values"),
    "layer 0 is corrected": ("tl.where(layer == 0, 0, rank + biases)", "rank + biases", "values"),
    "the bias is forgotten": ("if HAS_BIAS:", "if HAS_BIAS and LEFT == 0:", "values"),
    "rows grow instead of fading": ("fade = 1.0 / (1.0 + t /", "fade = 1.0 * (1.0 + t /", "values"),
    "only one decay is used": ("for j in range(decays):", "for j in range(1):", "values"),
    "features of the layer before": (".to(tl.int64) + 1", ".to(tl.int64)", "values"),
    "bf16 is truncated": ("value.to(pointers.dtype.element_ty)",
                          "(value.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)"
                          ".to(pointers.dtype.element_ty)", "values"),
    "sums are kept in bf16": ("sums = _dot(x, y, sums, PRECISION)",
                              "sums = _dot(x, y, sums, PRECISION).to(tl.bfloat16).to(tl.float32)", "values"),
    "a block runs into the next group": ("live = lane < tl.load(block + 2)", "live = lane < BLOCK", "race bounds"),
    "a pair's padding is not masked": ("both = live[:, None] & (pair < HALF)[None, :]",
                                       "both = live[:, None] & (pair >= 0)[None, :]", "values race bounds"),
    "a channel's padding is not masked": ("inside = live[:, None] & (column < DIM)[None, :]",
                                          "inside = live[:, None] & (column >= 0)[None, :]", "race bounds"),
    "the left rank's padding is not masked": ("mask=live[:, None] & (inner < columns)[None, :],",
                                              "mask=live[:, None] & (inner < RANK)[None, :],", "values bounds"),
    "the right rank's padding is not masked": ("mask=(inner < rank)[:, None] & valid[None, :],",
                                               "mask=(inner < RANK)[:, None] & valid[None, :],", "values bounds"),
    "NaN is never told": ("mask=tl.max(bad, axis=0) > 0", "mask=tl.max(bad, axis=0) > 1", "flag"),
    "NaN is always told": ("finite == 0", "finite == 1", "flag"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, plant: Plant) -> None:
    old, new, nets = MISTAKES[name]
    plant(old, new)
    model, plan = odd_plan()
    if name == "NaN is never told":
        delta = model.low_rank(1, 20, 3)
        delta.left_v[1, 13, 2] = float("nan")
        plan = planned(model, segments(8, [(20, 0, delta)]))
        k, v = model.pool(3)
        _, failed = run_watched(plan, k, v)
        assert not failed and bool(v[1].isnan().any())
        return
    caught = outcome(model, plan)
    assert caught & set(nets.split()), f"caught by {caught or 'nothing'}, expected one of {nets}"


def test_slots_in_32_bits_are_caught(plant: Plant) -> None:
    from tests.kernels.interpreted.test_correct import big_pool

    plant(
        "there = tl.load(target + rows, mask=live, other=0)[:, None] * slot_stride",
        "there = tl.load(target + rows, mask=live, other=0).to(tl.int32)[:, None] * slot_stride",
    )
    model = Model(dtype=torch.bfloat16)
    k, v = big_pool(model, 2**30 + 64)
    plan = planned(model, [Segment(torch.tensor([0]), torch.tensor([2]), 5, 50)])
    with pytest.raises(InterpreterError) as caught:
        run_watched(plan, k, v)
    assert isinstance(cause(caught.value), OutOfBounds)


def test_a_move_onto_its_own_source_is_a_race() -> None:
    """``plan`` refuses overlapping slots; a kernel that was given them reads rows that another program overwrites."""
    model = Model()
    plan = planned(model, [Segment(torch.arange(40), torch.arange(100, 140), 0, 1)])
    group = replace(plan.groups[0], target=torch.arange(1, 41))
    seen, _ = run_watched(replace(plan, groups=(group,)), *model.pool(1))
    assert seen.races() > 0


def test_two_rows_for_one_slot_are_a_race() -> None:
    model = Model()
    plan = planned(model, [Segment(torch.arange(40), torch.arange(100, 140), 0, 1)])
    target = plan.groups[0].target.clone()
    target[20] = target[3]
    seen, _ = run_watched(replace(plan, groups=(replace(plan.groups[0], target=target),)), *model.pool(1))
    # Slot 103 is written from both blocks: every channel of K and V in both layers.
    assert seen.races() == 2 * model.layers * model.width


@triton.jit
def _round(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(tl.bfloat16))


def test_the_interpreter_rounds_to_bf16_as_torch_does() -> None:
    """All upper halves of an fp32, each with a tie, right below and right above one."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    bits = torch.cat([upper + low for low in (0, 0x7FFF, 0x8000, 0x8001)])
    x = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)
    out = torch.empty(x.numel(), dtype=torch.bfloat16)
    _round[(1,)](x, out, x.numel())
    want = x.bfloat16()
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out[~out.isnan()], want[~out.isnan()])


@triton.jit
def _multiply(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


def test_the_interpreter_multiplies_bf16_matrices_exactly() -> None:
    x, y = (torch.randn(16, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
    out = torch.empty(16, 16)
    _multiply[(1,)](x, y, out, 16)
    assert torch.allclose(out, x.float() @ y.float(), rtol=1e-6, atol=1e-6)


def test_the_check_knows_a_tensors_last_byte() -> None:
    x, out = torch.zeros(32), torch.zeros(32, dtype=torch.bfloat16)
    with watched(reads=[x], writes=[out]):
        _round[(1,)](x, out, 32)
    with pytest.raises(InterpreterError) as caught, watched(reads=[x[:31]], writes=[out]):
        _round[(1,)](x, out, 32)
    assert "load" in str(cause(caught.value))
    with pytest.raises(InterpreterError) as caught, watched(reads=[x, out], writes=[]):
        _round[(1,)](x, out, 32)
    assert "store" in str(cause(caught.value))
