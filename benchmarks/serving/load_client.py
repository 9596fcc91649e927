"""SGLang's own load client (`sglang.benchmark.serving`) with plain traffic: what a server pays for our flag."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.arms import ARMS, OFF, PYTHON, RUST, Fleet
from kvcmas_sgl.demo.servers import server_environment

_ARMS = (RUST, PYTHON, OFF)
_TIMEOUT_S = 600
# The client's own names of what it measured, and units.
_KEPT = ("duration", "completed", "request_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms",
         "median_e2e_latency_ms")  # fmt: skip


@dataclass(frozen=True)
class LoadRun:
    """One call of SGLang's client: what it printed, by its own names (`_ms`: milliseconds)."""

    arm: str
    repeat: int
    figures: dict[str, float]


def measure_load_client(fleet: Fleet, model: str, prompts: int, repeats: int, folder: Path) -> list[LoadRun]:
    """The same random prompts to every arm, repeated with other seeds; which arm goes first changes."""
    runs = []
    for repeat in range(repeats):
        shift = repeat % len(_ARMS)
        for name in (*_ARMS[shift:], *_ARMS[:shift]):
            runs.append(LoadRun(name, repeat, _call(fleet.url(ARMS[name]), model, prompts, repeat, folder)))
            print(f"load client {name}: {runs[-1].figures}", file=sys.stderr)
    return runs


def load_client_figures(runs: Sequence[LoadRun]) -> dict[str, Any]:
    """Medians by arm, and the median over repeats of ours over each stock arm in the same repeat."""
    by = {(run.arm, run.repeat): run.figures for run in runs}
    repeats = sorted({run.repeat for run in runs})
    ratio: dict[str, dict[str, float]] = {}
    for against in (PYTHON, RUST):
        ratio[f"ours_over_{against}"] = {
            name: statistics.median(by[OFF, n][name] / by[against, n][name] for n in repeats)
            for name in ("request_throughput", "median_ttft_ms", "median_e2e_latency_ms")
        }
    medians = {arm: {name: statistics.median(by[arm, n][name] for n in repeats) for name in _KEPT} for arm in _ARMS}
    return {"ratios": ratio, "medians": medians, "runs": [vars(run) for run in runs]}


def _call(url: str, model: str, prompts: int, seed: int, folder: Path) -> dict[str, float]:
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "load-client.jsonl"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", url]
    command += ["--model", model, "--dataset-name", "random-ids", "--num-prompts", str(prompts)]
    command += ["--random-input-len", "256", "--random-output-len", "8", "--random-range-ratio", "1"]
    command += ["--max-concurrency", "2", "--seed", str(seed), "--output-file", str(out), "--disable-tqdm"]
    # Random prompts of another repeat must not meet this one's in the cache.
    command += ["--flush-cache", "--warmup-requests", "1"]
    done = subprocess.run(command, env=server_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode or not out.exists():
        raise RuntimeError(f"SGLang's load client failed on {url}: {done.stderr[-800:]}")
    result = json.loads(out.read_text().splitlines()[-1])
    return {name: float(result[name]) for name in _KEPT}
