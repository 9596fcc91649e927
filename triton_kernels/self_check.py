"""Before a backend is trusted with a pool it has to agree with the torch reference, on this machine, on a small one.

Kernels are verified elsewhere without the hardware that they will meet. A compiler, a driver or a card that makes
something else of them shows here, at the server's start, and not in answers.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from . import torch_backend
from .batch import CorrectionError, CorrectionPlan, Segment
from .delta import AffineDelta, Delta, LowRankDelta
from .rope import RotaryTable

_LAYERS, _ROWS = 3, 40
# Factors may be rounded to the pool's dtype, and so is the result.
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-6}


def disagreement(
    backend: ModuleType, device: torch.device, dtype: torch.dtype, kv_heads: int, head_dim: int
) -> str | None:
    """One sentence if ``backend`` fails or differs from the reference on pools of this shape, or None."""
    from .correction import plan

    generator = torch.Generator().manual_seed(20_110_601)
    table = RotaryTable.from_theta(1e4, head_dim, 512)
    for name, delta in _deltas(kv_heads * head_dim, dtype, device, generator).items():
        slots = torch.randperm(3 * _ROWS, generator=generator).to(device)
        segments = [Segment(slots[:_ROWS], slots[_ROWS : 2 * _ROWS], 17, 203, 0, delta)]
        made = plan(segments, table, head_dim=head_dim, kv_heads=kv_heads)
        shape = (2, _LAYERS, 3 * _ROWS, kv_heads, head_dim)
        pool = torch.randn(shape, generator=generator).to(device, dtype)
        want = _result(torch_backend, made, pool)
        try:
            got = _result(backend, made, pool)
        except Exception as error:
            return f"its self-check with {name} failed: {type(error).__name__}: {error}"
        off = float((got.float() - want.float()).abs().max() / want.float().abs().max())
        # NaN compares false.
        if not off <= _TOLERANCE[dtype]:
            return f"its self-check with {name} is off by {off:.2g} of the largest value"
    poisoned = torch.full(shape, math.nan, device=device, dtype=dtype)
    try:
        _result(backend, made, poisoned)
    except CorrectionError:
        return None
    return "its self-check did not notice NaN"


def _result(backend: ModuleType, made: CorrectionPlan, pool: Tensor) -> Tensor:
    copy = pool.clone()
    backend.run(made, list(copy[0]), list(copy[1]))
    return copy


def _deltas(
    width: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> dict[str, Delta | None]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    factors = [(draw(_LAYERS, _ROWS, 8) / 8).to(dtype), (draw(_LAYERS, 8, width) / 8).to(dtype)]
    return {
        "moved rows": None,
        "a measured delta": LowRankDelta(factors[0], factors[1], factors[0].clone(), factors[1].clone()),
        "a predicted delta": AffineDelta(
            draw(_LAYERS, 2 * width, 16) / width,
            draw(_LAYERS, 16),
            draw(_LAYERS, 16, 2 * width) / 8,
            draw(_LAYERS, 5, 2 * width) / 8,
            (math.inf,),
            (math.inf, 8.0, 32.0, 128.0, 512.0),
        ),
    }
