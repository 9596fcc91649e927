"""Time `kvcmas_cpu` against SGLang's `torch_native` attention on this machine's CPU.

    python benchmarks/cpu_attention.py

Both backends run on the same real KV pool in the shape of SmolLM2-135M (9 query heads, 3 KV heads, head size 64,
bfloat16). Every repeat times both, and the order alternates from repeat to repeat, so a change of the machine's
load hits both. A time is the median over repeats, in milliseconds per layer, planning of the forward included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from kvcmas_sgl.cpu.environment import prepare_environment

prepare_environment()

import torch  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402

from kvcmas_sgl.cpu.attention import CpuAttnBackend  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM, MODEL_LAYERS = 9, 3, 64, 30
BACKENDS: dict[str, type[TorchNativeAttnBackend]] = {
    "torch_native": TorchNativeAttnBackend,
    "kvcmas_cpu": CpuAttnBackend,
}


@dataclass(frozen=True)
class Case:
    """A forward of equal requests: `prefix` cached tokens and `new` ones each, slots in one run or scattered."""

    name: str
    prefix: int
    new: int
    batch: int = 1
    scattered: bool = False


@dataclass(frozen=True)
class Row:
    """Medians in ms per layer; `ratio` is torch_native / kvcmas_cpu, the median of the ratios of each repeat."""

    case: Case
    torch_native_ms: float
    kvcmas_cpu_ms: float
    ratio: float


def cases(longest: int) -> list[Case]:
    """The table's rows, up to `longest` tokens of context."""
    found = [Case(f"dense {n}", 0, n) for n in (16, 128, 512, 1024, 2048, 4096, 7000)]
    found += [Case(f"exact hit {n} + 20", n, 20) for n in (512, 2048, 7000)]
    found += [Case("exact hit 7000 + 20, scattered", 7000, 20, scattered=True)]
    found += [Case(f"chunk {prefix} + {new}", prefix, new) for prefix, new in ((2048, 2048), (5000, 2000))]
    for context in (1024, 7000):
        for batch in (1, 8):
            found.append(Case(f"decode {context} x {batch}", context - 1, 1, batch))
            found.append(Case(f"decode {context} x {batch}, scattered", context - 1, 1, batch, scattered=True))
    return [case for case in found if case.prefix + case.new <= longest + 20]


class Bench:
    """One case on pools of its own; both backends read the same keys and values."""

    def __init__(self, case: Case, layers: int) -> None:
        length = case.prefix + case.new
        total = case.batch * length
        pool = MHATokenToKVPool(
            total + 8, 1, torch.bfloat16, KV_HEADS, HEAD_DIM, layers, "cpu", False, enable_alt_stream=False
        )
        for layer in range(layers):
            pool.get_key_buffer(layer).normal_()
            pool.get_value_buffer(layer).normal_()
        table = ReqToTokenPool(case.batch + 1, length + 4, "cpu", False)
        free = torch.randperm(total) + 1 if case.scattered else torch.arange(1, total + 1)
        slots = free.view(case.batch, length)
        table.req_to_token[1 : case.batch + 1, :length] = slots
        self.decode = case.name.startswith("decode")
        self.batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if self.decode else ForwardMode.EXTEND,
            batch_size=case.batch,
            input_ids=torch.zeros(case.batch * case.new, dtype=torch.int64),
            req_pool_indices=torch.arange(1, case.batch + 1),
            seq_lens=torch.full((case.batch,), length),
            seq_lens_sum=total,
            out_cache_loc=slots[:, case.prefix :].flatten(),
        )
        if not self.decode:
            self.batch.extend_seq_lens = torch.full((case.batch,), case.new)
            self.batch.extend_prefix_lens = torch.full((case.batch,), case.prefix)
        self.layers = [RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=i) for i in range(layers)]
        self.query = torch.randn(case.batch * case.new, HEADS * HEAD_DIM).to(torch.bfloat16)
        # The server's keys are rows of the projection's output; both backends write them to the pool.
        self.new_kv = torch.randn(2, case.batch * case.new, KV_HEADS, HEAD_DIM).to(torch.bfloat16)
        runner = SimpleNamespace(device="cpu", req_to_token_pool=table, token_to_kv_pool=pool)
        self.backends = {name: make(runner) for name, make in BACKENDS.items()}

    def time_ms(self, name: str) -> float:
        """Milliseconds per layer of one forward, its planning included."""
        backend = self.backends[name]
        step = backend.forward_decode if self.decode else backend.forward_extend
        begin = time.perf_counter()
        backend.init_forward_metadata(self.batch)
        for layer in self.layers:
            step(self.query, self.new_kv[0], self.new_kv[1], layer, self.batch)
        return (time.perf_counter() - begin) * 1e3 / len(self.layers)


def measure(case: Case, layers: int, repeats: int, progress: tqdm) -> Row:
    """Medians of `repeats` interleaved repeats after one warm-up of each backend."""
    bench = Bench(case, layers)
    order = list(BACKENDS)
    times: dict[str, list[float]] = {name: [] for name in order}
    with torch.inference_mode():
        for name in order:
            bench.time_ms(name)
        for repeat in range(repeats):
            for name in order if repeat % 2 == 0 else reversed(order):
                times[name].append(bench.time_ms(name))
            progress.update()
    ratios = [native / ours for native, ours in zip(times["torch_native"], times["kvcmas_cpu"], strict=True)]
    return Row(
        case=case,
        torch_native_ms=statistics.median(times["torch_native"]),
        kvcmas_cpu_ms=statistics.median(times["kvcmas_cpu"]),
        ratio=statistics.median(ratios),
    )


def table(rows: list[Row]) -> str:
    """The rows as text, with the model's 30 layers in seconds."""
    lines = [
        f"{'case (tokens x requests)':34} {'torch_native':>14} {'kvcmas_cpu':>14} {'ratio':>7} {'30 layers':>16}",
        f"{'':34} {'ms/layer':>14} {'ms/layer':>14} {'':>7} {'s -> s':>16}",
    ]
    for row in rows:
        whole = [ms * MODEL_LAYERS / 1e3 for ms in (row.torch_native_ms, row.kvcmas_cpu_ms)]
        lines.append(
            f"{row.case.name:34} {row.torch_native_ms:14.3f} {row.kvcmas_cpu_ms:14.3f} {row.ratio:6.2f}x"
            f" {whole[0]:7.2f} -> {whole[1]:5.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats per case (default: 7)")
    parser.add_argument("--layers", type=int, default=4, help="layers per timed forward, each its own KV (default: 4)")
    parser.add_argument("--longest", type=int, default=7000, help="longest context, tokens (default: 7000)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads (default: torch's)")
    parser.add_argument(
        "--output", type=Path, default=Path("reports/cpu_attention.json"), help="JSON file (default: %(default)s)"
    )
    options = parser.parse_args()
    for name in ("repeats", "layers", "longest", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    todo = cases(options.longest)
    with tqdm(total=len(todo) * options.repeats, unit="repeat", file=sys.stderr) as progress:
        rows = []
        for case in todo:
            progress.set_description(case.name)
            rows.append(measure(case, options.layers, options.repeats, progress))
    print(table(rows))
    report = {
        "unit": "ms per layer, median",
        "shape": {"query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16"},
        "threads": options.threads,
        "repeats": options.repeats,
        "layers": options.layers,
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__},
        "load_average_1min": os.getloadavg()[0],
        "rows": [asdict(row) for row in rows],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {options.output}")
    return 0


def _cpu_name() -> str:
    """The processor's name, as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
