"""Everything that needs a GPU, in one run of under eight minutes and without a network.

    python -m benchmarks.gpu_check

1. Every backend of the correction op against the torch reference, on a ragged batch of all kinds of deltas.
2. Time of the op for three models' shapes, against a plain index copy of the same rows and against the time that the
   bytes alone take at the bandwidth that this GPU's own copy reaches.
3. SGLang with kvcmas, on a model of random weights with Llama-3.1-8B's layers: time to first token for a span that is
   computed, hit and corrected, with FlashInfer's and Triton's attention and CUDA graphs (--no-serving leaves it out).

With no GPU it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
from kvcmas_sgl.triton_kernels import (
    AffineDelta,
    CorrectionError,
    CorrectionPlan,
    Delta,
    LowRankDelta,
    RotaryTable,
    Segment,
    flashinfer_backend,
    plan,
    torch_backend,
    triton_backend,
    triton_tuning,
)
from torch import Tensor

OWN_RANK, PREDICTED_RANK = 32, 64
TOKEN_DECAYS, MEAN_DECAYS = (math.inf, 128.0), (math.inf, 8.0, 32.0, 128.0, 512.0)
KINDS = ("moved", "measured", "predicted")
# Units of the pool's rounding that a written value may be off, relative to the largest: one rounding and products in
# TF32 for Triton, three roundings on top of 16-bit factors for FlashInfer.
ALLOWED = {"triton": 2.0, "flashinfer": 8.0}


@dataclass(frozen=True)
class Shape:
    """KV sizes of a model."""

    name: str
    layers: int
    heads: int
    dim: int
    theta: float


SHAPES = (
    Shape("SmolLM2-135M", 30, 3, 64, 100_000.0),
    Shape("Llama-3.1-8B", 32, 8, 128, 500_000.0),
    Shape("Qwen2.5-7B", 28, 4, 128, 1_000_000.0),
)


@dataclass(frozen=True)
class Correctness:
    """``worst``: largest error, in units of the pool's rounding of the largest value. ``told``: a NaN was reported."""

    backend: str
    dtype: str
    layout: str
    worst: float | None
    told: bool
    passed: bool
    note: str = ""


@dataclass(frozen=True)
class OpTime:
    """Milliseconds of one correction of ``rows`` tokens in all layers; ratios to the copy and to the bytes alone."""

    model: str
    kind: str
    backend: str
    rows: int
    ms: float
    copy_ms: float
    floor_ms: float
    note: str = ""


def backends(device: torch.device) -> Iterator[tuple[str, ModuleType | None, str]]:
    """(name, module or None, why it cannot run)."""
    for name, module in (("triton", triton_backend), ("flashinfer", flashinfer_backend)):
        why = module.unavailable(device, torch.bfloat16)
        yield name, None if why else module, why or ""


class Maker:
    """Random pools, deltas and batches of one shape on the GPU."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, neox: bool = True) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.table = RotaryTable.from_theta(shape.theta, shape.dim, 65_536, is_neox=neox)
        self._generator = torch.Generator(device).manual_seed(0)

    def draw(self, *size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self.device) * scale

    def pool(self, slots: int) -> tuple[list[Tensor], list[Tensor]]:
        one = self.shape
        k, v = ([self.draw(slots, one.heads, one.dim).to(self.dtype) for _ in range(one.layers)] for _ in range(2))
        return k, v

    def delta(self, kind: str, rows: int) -> Delta | None:
        layers, width = self.shape.layers, self.shape.heads * self.shape.dim
        if kind == "moved":
            return None
        if kind == "measured":
            lefts = [self.draw(layers, rows, OWN_RANK).to(self.dtype) for _ in range(2)]
            rights = [self.draw(layers, OWN_RANK, width, scale=0.2 / OWN_RANK**0.5).to(self.dtype) for _ in range(2)]
            return LowRankDelta(lefts[0], rights[0], lefts[1], rights[1])
        columns = PREDICTED_RANK * len(TOKEN_DECAYS)
        return AffineDelta(
            self.draw(layers, 2 * width, columns, scale=(2 * width) ** -0.5),
            self.draw(layers, columns),
            self.draw(layers, PREDICTED_RANK, 2 * width, scale=0.2 / PREDICTED_RANK**0.5),
            self.draw(layers, len(MEAN_DECAYS), 2 * width, scale=0.2),
            TOKEN_DECAYS,
            MEAN_DECAYS,
        )

    def plan(self, parts: Sequence[tuple[int, str]], slots: int) -> CorrectionPlan:
        """A plan of (rows, kind) segments on shuffled slots of a pool of ``slots``."""
        order = torch.randperm(slots, generator=torch.Generator().manual_seed(1)).to(self.device)
        segments, used = [], 0
        for number, (rows, kind) in enumerate(parts):
            source, target = order[used : used + rows], order[used + rows : used + 2 * rows]
            segments.append(Segment(source, target, 100 + number, 900 + 13 * number, 0, self.delta(kind, rows)))
            used += 2 * rows
        return plan(segments, self.table, head_dim=self.shape.dim, kv_heads=self.shape.heads, backend="torch")


def correctness(device: torch.device, say: Callable[[str], None]) -> list[Correctness]:
    """All backends in all types and both layouts, and that each reports what is not finite."""
    found = []
    small = Shape("small", 4, 8, 128, 500_000.0)
    parts = [(100, "moved"), (333, "measured"), (1, "measured"), (250, "predicted"), (64, "predicted")]
    for name, module, why in backends(device):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for neox in (True, False):
                layout = "neox" if neox else "interleaved"
                if module is None or (name == "flashinfer" and dtype == torch.float32):
                    note = why or "fp32 pools are not supported"
                    found.append(Correctness(name, str(dtype), layout, None, False, module is not None, note))
                    continue
                one = _correct(name, module, Maker(small, device, dtype, neox), parts, layout)
                say(f"{name} {dtype} {layout}: {'ok' if one.passed else 'WRONG'}, worst {one.worst:.2f} roundings")
                found.append(one)
    return found


def _correct(name: str, module: ModuleType, maker: Maker, parts: Sequence[tuple[int, str]], layout: str) -> Correctness:
    slots = 4000
    k, v = maker.pool(slots)
    made = maker.plan(parts, slots)
    wide_k, wide_v = [x.float() for x in k], [x.float() for x in v]
    torch_backend.run(made, wide_k, wide_v)
    module.run(made, k, v)
    unit = torch.finfo(maker.dtype).eps / 2
    worst = max(
        float((a.float() - b).abs().max() / (unit * b.abs().max()))
        for a, b in zip([*k, *v], [*wide_k, *wide_v], strict=True)
    )
    v[1][made.groups[0].source[0], 0, 0] = float("nan")
    try:
        module.run(made, k, v)
        told = False
    except CorrectionError:
        told = True
    # Sums of an fp32 pool are compared in fp32's own noise: hundreds of terms in another order.
    allowed = 64.0 if maker.dtype == torch.float32 else ALLOWED[name]
    return Correctness(name, str(maker.dtype), layout, worst, told, told and worst <= allowed)


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reaches, read and written together."""
    x = torch.empty(2**30, dtype=torch.int8, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / (_milliseconds(lambda: y.copy_(x)) / 1e3)


def op_times(device: torch.device, rows: int, tune: bool, say: Callable[[str], None]) -> list[OpTime]:
    """The op for all shapes, kinds and backends, bf16."""
    speed, found = bandwidth(device), []
    say(f"a large copy reaches {speed / 1e12:.2f} TB/s")
    for shape in SHAPES:
        maker = Maker(shape, device, torch.bfloat16)
        slots = 2 * rows + 64
        k, v = maker.pool(slots)
        for kind in KINDS:
            made = maker.plan([(rows, kind)], slots)
            group = made.groups[0]
            copy_ms = _milliseconds(lambda k=k, v=v, group=group: _copy([*k, *v], group.source, group.target))
            row_bytes = 2 * 2 * shape.heads * shape.dim * shape.layers * 2
            delta = getattr(group.delta, "nbytes", 0)
            floor_ms = (rows * row_bytes + delta) / speed * 1e3
            for name, module, why in [("torch", torch_backend, ""), *backends(device)]:
                if module is None:
                    found.append(OpTime(shape.name, kind, name, rows, math.nan, copy_ms, floor_ms, why))
                    continue
                if name == "triton" and tune:
                    triton_tuning.tune(made, k, v)
                ms = _milliseconds(lambda module=module, made=made, k=k, v=v: module.run(made, k, v))
                found.append(OpTime(shape.name, kind, name, rows, ms, copy_ms, floor_ms))
                say(f"{shape.name} {kind} {name}: {ms:.3f} ms, copy {copy_ms:.3f} ms, bytes alone {floor_ms:.3f} ms")
    return found


def _copy(buffers: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    for x in buffers:
        x.index_copy_(0, target, x.index_select(0, source))


def _milliseconds(work: Callable[[], object]) -> float:
    """Median over at least five runs and 0.1 s, after a warm-up; the device is idle before and after each."""
    for _ in range(3):
        work()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 100 and len(times) < 200):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times)[len(times) // 2]


def table(rows: Sequence[OpTime]) -> str:
    """One line a model, kind and backend."""
    lines = [f"{'model':14} {'delta':10} {'backend':11} {'ms':>8} {'x copy':>8} {'x bytes':>8}"]
    for row in rows:
        if math.isnan(row.ms):
            lines.append(f"{row.model:14} {row.kind:10} {row.backend:11} {row.note}")
            continue
        ratios = f"{row.ms / row.copy_ms:8.2f} {row.ms / row.floor_ms:8.2f}"
        lines.append(f"{row.model:14} {row.kind:10} {row.backend:11} {row.ms:8.3f} {ratios}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    shape = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    shape.add_argument("--rows", type=int, default=4096, metavar="N", help="tokens a correction (default: 4096)")
    shape.add_argument("--layers", type=int, default=8, metavar="N", help="layers of the served model (default: 8)")
    shape.add_argument("--budget", type=float, default=460, metavar="S", help="seconds for everything (default: 460)")
    shape.add_argument("--no-tune", action="store_true", help="time Triton's default block sizes")
    shape.add_argument("--no-serving", action="store_true", help="only the op")
    shape.add_argument("--reports", type=Path, default=Path("reports"), metavar="DIR", help="output (default: reports)")
    return shape


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print the tables, write gpu_check.json; returns the exit status."""
    options = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("No GPU was found: this check needs one, and everything else is in `make test`.", file=sys.stderr)
        return 2
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {text}", file=sys.stderr, flush=True)

    device = torch.device("cuda", torch.cuda.current_device())
    options.reports.mkdir(parents=True, exist_ok=True)
    path = options.reports / "gpu_check.json"
    report: dict[str, object] = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}

    def keep(**parts: object) -> None:
        # After each part: a run that is cut short leaves what it had.
        report.update(parts)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    right = correctness(device, say)
    keep(correctness=[asdict(one) for one in right])
    times = op_times(device, options.rows, not options.no_tune, say)
    keep(op=[asdict(one) for one in times], tuned=[str(item) for item in triton_tuning.tuned()])
    torch.cuda.empty_cache()
    print(table(times))
    served_well = True
    if not options.no_serving:
        from benchmarks.gpu_serving import serve, serving_table

        served = serve(options.layers, begin + options.budget, options.reports, say)
        keep(serving=[asdict(one) for one in served])
        print(serving_table(served))
        served_well = all(not one.note for one in served)
    print(f"written to {path}")
    wrong = [one for one in right if not one.passed]
    for one in wrong:
        print(f"WRONG: {one}", file=sys.stderr)
    return 1 if wrong or not served_well else 0


if __name__ == "__main__":
    sys.exit(main())
