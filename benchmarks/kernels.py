"""Time the correction op against a plain copy of the same rows, for every backend that works here.

    python -m benchmarks.kernels

Rows of K and V move from scattered slots of a pool to others, in runs of 16. ``copy`` moves the same rows by index
with torch (`index_select`, `index_copy_`) and nothing else; ``eager`` is the torch reference. Every repeat times all of
them in turn, and the order is reversed from repeat to repeat, so a change of the machine's load hits all. A ratio is
the median of the ratios of each repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from kvcmas_sgl.triton_kernels import BACKENDS, AffineDelta, Delta, LowRankDelta, RotaryTable, Segment, plan, run
from tqdm import tqdm

RUN = 16
MEAN_DECAYS = (float("inf"), 8.0, 32.0, 128.0, 512.0)


@dataclass(frozen=True)
class Model:
    """Shape of a model's KV cache."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.kv_heads * self.head_dim


MODELS = (Model("smollm2", 30, 3, 64), Model("llama8b", 32, 8, 128), Model("qwen7b", 28, 4, 128))
KINDS = ("move", "low rank", "affine")


@dataclass(frozen=True)
class Row:
    """Medians. ``seconds``: plan and run; ``gigabytes``: K and V, read and written once; ratios as in the module."""

    model: str
    tokens: int
    segments: int
    kind: str
    backend: str
    seconds: float
    plan_seconds: float
    gigabytes: float
    ratio_to_copy: float
    speedup_over_eager: float | None


def delta_of(kind: str, model: Model, tokens: int, ranks: dict[str, int], dtype: torch.dtype) -> Delta | None:
    """A random delta of ``kind``, as large as a real one next to a random pool."""
    layers, width, rank = model.layers, model.width, ranks.get(kind, 0)
    if kind == "low rank":
        left = [torch.randn(layers, tokens, rank).mul_(0.1).to(dtype) for _ in range(2)]
        right = [torch.randn(layers, rank, width).mul_(0.1).to(dtype) for _ in range(2)]
        return LowRankDelta(left[0], right[0], left[1], right[1])
    if kind == "affine":
        return AffineDelta(
            torch.randn(layers, 2 * width, rank) / width,
            torch.zeros(layers, rank),
            torch.randn(layers, rank, 2 * width) * 0.1,
            torch.randn(layers, len(MEAN_DECAYS), 2 * width) * 0.1,
            (float("inf"),),
            MEAN_DECAYS,
        )
    return None


class Bench:
    """One model and number of tokens: a pool, and where rows come from and go to."""

    def __init__(self, model: Model, tokens: int, dtype: torch.dtype) -> None:
        self.model, self.tokens = model, tokens
        slots = 2 * tokens + RUN
        shape = (slots, model.kv_heads, model.head_dim)
        row = torch.randn(1, *shape[1:]).to(dtype)
        self.k = [row.repeat(slots, 1, 1) for _ in range(model.layers)]
        self.v = [row.repeat(slots, 1, 1) for _ in range(model.layers)]
        runs = torch.randperm(2 * tokens // RUN) * RUN
        slots_of = (runs[:, None] + torch.arange(RUN)).flatten()
        self.source, self.target = slots_of[:tokens].clone(), slots_of[tokens : 2 * tokens].clone()
        self.table = RotaryTable.from_theta(1e4, model.head_dim, 2 * tokens + 4096)

    @property
    def gigabytes(self) -> float:
        return 4 * self.model.layers * self.tokens * self.model.width * self.k[0].element_size() / 1e9

    def copy(self) -> None:
        for buffer in (*self.k, *self.v):
            buffer.index_copy_(0, self.target, buffer.index_select(0, self.source))

    def segments(self, count: int, delta: Delta | None) -> list[Segment]:
        each = self.tokens // count
        return [
            Segment(
                self.source[i * each : (i + 1) * each],
                self.target[i * each : (i + 1) * each],
                source_start=100 + i * each,
                target_start=700 + i * each,
                offset=i * each,
                delta=delta,
            )
            for i in range(count)
        ]

    def correct(self, segments: list[Segment], backend: str) -> float:
        """Plan and run; seconds that the plan took."""
        started = time.perf_counter()
        made = plan(segments, self.table, head_dim=self.model.head_dim, kv_heads=self.model.kv_heads, backend=backend)
        planned = time.perf_counter() - started
        run(made, self.k, self.v)
        return planned


def measure(bench: Bench, count: int, kind: str, backends: list[str], ranks: dict[str, int], repeats: int) -> list[Row]:
    """The rows of one case, every backend and the copy in the same repeats."""
    segments = bench.segments(count, delta_of(kind, bench.model, bench.tokens, ranks, bench.k[0].dtype))
    work: dict[str, Callable[[], float | None]] = {"copy": bench.copy}
    for name in backends:
        work[name] = lambda name=name: bench.correct(segments, name)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in work}
    plans: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(-1, repeats):
        for name in reversed(work) if repeat % 2 else work:
            started = time.perf_counter()
            planned = work[name]()
            seconds = time.perf_counter() - started
            if repeat >= 0:
                times[name].append(seconds)
                plans[name].append(planned or 0.0)

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))

    return [
        Row(
            bench.model.name,
            bench.tokens,
            count,
            kind,
            name,
            statistics.median(times[name]),
            statistics.median(plans[name]),
            bench.gigabytes,
            ratio(name, "copy"),
            ratio("torch", name) if "torch" in backends and name != "torch" else None,
        )
        for name in backends
    ]


def working_backends() -> list[str]:
    """Backends that can work on a bf16 pool in this machine's memory."""
    found = []
    one = torch.zeros(4, 1, 64, dtype=torch.bfloat16)
    table = RotaryTable.from_theta(1e4, 64, 8)
    for name in BACKENDS:
        if name == "auto":
            continue
        try:
            made = plan(
                [Segment(torch.tensor([0]), torch.tensor([1]), 0, 1)], table, head_dim=64, kv_heads=1, backend=name
            )
            run(made, [one], [one])
            found.append(name)
        except ValueError as error:
            print(error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--reports", type=Path, default=Path("reports"), help="folder for kernels.json")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[512, 4096, 32768], help="tokens of all spans together"
    )
    parser.add_argument(
        "--segments", type=int, nargs="+", default=[1, 8, 64], help="spans that the tokens are cut into"
    )
    parser.add_argument(
        "--models", nargs="+", choices=[m.name for m in MODELS], default=[m.name for m in MODELS], help="shapes"
    )
    parser.add_argument("--own-rank", type=int, default=32, help="rank of low-rank (own) deltas")
    parser.add_argument("--rank", type=int, default=16, help="rank of affine (predicted) deltas")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of each case")
    parser.add_argument("--memory-gib", type=float, default=10.0, help="skip cases whose pool is larger, GiB")
    args = parser.parse_args()
    torch.manual_seed(0)
    backends = working_backends()
    grid = [(m, n) for m in MODELS if m.name in args.models for n in args.tokens]
    ranks = {"low rank": args.own_rank, "affine": args.rank}
    rows: list[Row] = []
    columns = ("model", "tokens", "segs", "kind", "backend", "ms", "plan ms", "GB", "x copy", "x eager")
    print(_line(columns))
    for model, tokens in tqdm(grid, unit="pool"):
        bytes_needed = 4 * model.layers * tokens * model.width * 2
        if bytes_needed > args.memory_gib * 2**30:
            tqdm.write(f"{model.name} with {tokens} tokens needs {bytes_needed / 2**30:.1f} GiB: skipped")
            continue
        bench = Bench(model, tokens, torch.bfloat16)
        for count in args.segments:
            for kind in KINDS:
                for row in measure(bench, count, kind, backends, ranks, args.repeats):
                    rows.append(row)
                    faster = "" if row.speedup_over_eager is None else f"{row.speedup_over_eager:.2f}"
                    numbers = (1e3 * row.seconds, 1e3 * row.plan_seconds, row.gigabytes, row.ratio_to_copy)
                    cells = (f"{number:.2f}" for number in numbers)
                    tqdm.write(_line((row.model, row.tokens, row.segments, row.kind, row.backend, *cells, faster)))
    write(rows, args.reports / "kernels.json", args)


def _line(cells: Sequence[object]) -> str:
    return "".join(f"{cell!s:>10}" for cell in cells)


def write(rows: list[Row], path: Path, args: argparse.Namespace) -> None:
    """The rows, and the figure that the op is judged by; keeps what `benchmarks.reuse_path` left in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(path.read_text()) if path.exists() else {}
    report["rows"] = [asdict(row) for row in rows]
    report["machine"] = {"processor": platform.processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    report["ranks"] = {"low rank": args.own_rank, "affine": args.rank}
    judged = [r for r in rows if (r.model, r.tokens, r.segments, r.backend) == ("llama8b", 4096, 1, "cpu")]
    for row in judged:
        if row.kind == "low rank":
            report["cpu_llama8b_4k"] = {
                "ratio_to_copy": row.ratio_to_copy,
                "speedup_over_eager": row.speedup_over_eager,
            }
    path.write_text(json.dumps(report, indent=1))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
