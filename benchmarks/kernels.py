"""Time the correction op against a plain copy of the same rows, for every backend that works here.

    python -m benchmarks.kernels

Rows of K and V move from scattered slots of a pool to others, in runs of 16. ``copy`` moves the same rows by index
with torch (`index_select`, `index_copy_`) and nothing else; ``eager`` is the torch reference. Every repeat times all of
them in turn, and the order is reversed from repeat to repeat, so a change of the machine's load hits all. A ratio is
the median of the ratios of each repeat.

A case gets as many repeats as its share of the time allows, two at least. What cannot fit into memory or time is in
the table with the reason.
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

import psutil
import torch
from kvcmas_sgl.triton_kernels import BACKENDS, AffineDelta, Delta, LowRankDelta, RotaryTable, Segment, plan, run
from tqdm import tqdm

RUN = 16
FEWEST = 2
# Of a full run: cases of 4,096 tokens get five repeats, the slowest of 32,768 two.
CASE_SECONDS = 15.0
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
JUDGED = ("llama8b", 4096, 1)
KINDS = ("move", "low rank", "affine")


@dataclass(frozen=True)
class Row:
    """Medians. ``seconds``: plan and run; ``gigabytes``: K and V, read and written once; ratios as in the module.

    ``skipped``: why there is nothing else.
    """

    model: str
    tokens: int
    segments: int
    kind: str
    backend: str
    seconds: float | None = None
    plan_seconds: float | None = None
    gigabytes: float | None = None
    ratio_to_copy: float | None = None
    speedup_over_eager: float | None = None
    repeats: int = 0
    skipped: str = ""

    @property
    def cells(self) -> list[str]:
        """Of the printed table."""
        named = [str(x) for x in (self.model, self.tokens, self.segments, self.kind, self.backend)]
        if self.seconds is None or self.plan_seconds is None:
            return [*named, f" {self.skipped}"]
        numbers = (1e3 * self.seconds, 1e3 * self.plan_seconds, self.gigabytes, self.ratio_to_copy)
        faster = "" if self.speedup_over_eager is None else f"{self.speedup_over_eager:.2f}"
        return [*named, *(f"{number:.2f}" for number in numbers), faster, str(self.repeats)]


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


def measure(
    bench: Bench, count: int, kind: str, backends: list[str], ranks: dict[str, int], repeats: int, allowed: float
) -> list[Row]:
    """The rows of one case, all backends and the copy in the same repeats, which end after ``allowed`` seconds."""
    segments = bench.segments(count, delta_of(kind, bench.model, bench.tokens, ranks, bench.k[0].dtype))
    work: dict[str, Callable[[], float | None]] = {"copy": bench.copy}
    for name in backends:
        work[name] = lambda name=name: bench.correct(segments, name)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in work}
    plans: dict[str, list[float]] = {name: [] for name in work}
    began, repeat = time.perf_counter(), -1
    while repeat < repeats:
        for name in reversed(work) if repeat % 2 else work:
            started = time.perf_counter()
            planned = work[name]()
            seconds = time.perf_counter() - started
            if repeat >= 0:
                times[name].append(seconds)
                plans[name].append(planned or 0.0)
        repeat += 1
        spent = time.perf_counter() - began
        if repeat >= FEWEST and spent * (repeat + 2) / (repeat + 1) > allowed:
            break

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
            len(times[name]),
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
        "--tokens", type=int, nargs="+", help="tokens of all spans together (default: 512 4096 32768; quick: 512 4096)"
    )
    parser.add_argument(
        "--segments", type=int, nargs="+", help="spans that the tokens are cut into (default: 1 8 64; quick: 1)"
    )
    parser.add_argument(
        "--models", nargs="+", choices=[m.name for m in MODELS], default=[m.name for m in MODELS], help="shapes"
    )
    parser.add_argument("--own-rank", type=int, default=48, help="rank of low-rank (own) deltas")
    parser.add_argument("--rank", type=int, default=16, help="rank of affine (predicted) deltas")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of each case, at most")
    parser.add_argument("--seconds", type=float, help="no case begins later (default: 600; quick: 120)")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    args = parser.parse_args()
    tokens = args.tokens or ([512, 4096] if args.quick else [512, 4096, 32768])
    segments = args.segments or ([1] if args.quick else [1, 8, 64])
    seconds = args.seconds or (120.0 if args.quick else 600.0)
    torch.manual_seed(0)
    ranks = {"low rank": args.own_rank, "affine": args.rank}
    grid = Grid(working_backends(), ranks, args.repeats, CASE_SECONDS)
    deadline = time.monotonic() + seconds
    print(_line(("model", "tokens", "segs", "kind", "backend", "ms", "plan ms", "GB", "x copy", "x eager", "repeats")))
    # Short spans first: what they cost tells what long ones would.
    pools = [(m, n) for n in sorted(tokens) for m in MODELS if m.name in args.models]
    for model, count in tqdm(pools, unit="pool"):
        grid.run(model, count, segments, deadline)
    write(grid.rows, args.reports / "kernels.json", args)


class Grid:
    """Runs cases one after the other and keeps their rows, those of what was skipped too."""

    def __init__(self, backends: list[str], ranks: dict[str, int], repeats: int, case_seconds: float) -> None:
        self.rows: list[Row] = []
        self._backends = backends
        self._ranks = ranks
        self._repeats = repeats
        self._case_seconds = case_seconds
        self._per_token: dict[tuple[str, str, str], float] = {}

    def run(self, model: Model, tokens: int, segments: Sequence[int], deadline: float) -> None:
        """All cases of one pool."""
        cases = [(count, kind) for count in segments for kind in KINDS]
        # The pool, and for a moment as much again of its largest part: factors, packed factors, rows of a layer.
        needed, free = 1.25 * 4 * model.layers * tokens * model.width * 2, psutil.virtual_memory().available
        if needed > free:
            why = f"needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free"
        elif time.monotonic() > deadline:
            why = "the time was up"
        else:
            why = ""
        if why:
            for count, kind in cases:
                self._keep([Row(model.name, tokens, count, kind, name, skipped=why) for name in self._backends])
            return
        bench = Bench(model, tokens, torch.bfloat16)
        for count, kind in cases:
            self._case(bench, count, kind, deadline)

    def _case(self, bench: Bench, count: int, kind: str, deadline: float) -> None:
        model, tokens = bench.model.name, bench.tokens
        skipped = {}
        for name in self._backends:
            expected = self._per_token.get((model, kind, name), 0.0) * tokens
            if time.monotonic() > deadline:
                skipped[name] = "the time was up"
            # A warm-up and the fewest repeats have to fit, but for the case that the op is judged by.
            elif (model, tokens, count) != JUDGED and expected * (1 + FEWEST) > self._case_seconds:
                skipped[name] = f"would take about {expected:.0f} s a run"
        self._keep([Row(model, tokens, count, kind, name, skipped=why) for name, why in skipped.items()])
        left = [name for name in self._backends if name not in skipped]
        if left:
            rows = measure(bench, count, kind, left, self._ranks, self._repeats, self._case_seconds)
            self._keep(rows)
            for row in rows:
                self._per_token[model, kind, row.backend] = (row.seconds or 0.0) / tokens

    def _keep(self, rows: Sequence[Row]) -> None:
        self.rows += rows
        for row in rows:
            tqdm.write(_line(row.cells))


def _line(cells: Sequence[object]) -> str:
    return "".join(f"{cell!s:>10}" for cell in cells)


def write(rows: list[Row], path: Path, args: argparse.Namespace) -> None:
    """The rows, and the figure that the op is judged by; keeps what `benchmarks.reuse_path` left in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(path.read_text()) if path.exists() else {}
    report["rows"] = [asdict(row) for row in rows]
    report["quick"] = args.quick
    report["machine"] = {"processor": platform.processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    report["ranks"] = {"low rank": args.own_rank, "affine": args.rank}
    judged = [r for r in rows if (r.model, r.tokens, r.segments) == JUDGED and r.backend == "cpu"]
    for row in judged:
        if row.kind == "low rank" and not row.skipped:
            report["cpu_llama8b_4k"] = {
                "ratio_to_copy": row.ratio_to_copy,
                "speedup_over_eager": row.speedup_over_eager,
            }
    path.write_text(json.dumps(report, indent=1))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
