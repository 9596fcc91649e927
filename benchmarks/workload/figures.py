"""Figures of one run: percentiles, throughput, goodput, and how the prompt tokens got their KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.workload.runner import HopResult, Run

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Slo:
    """A request is good if its first token comes in `ttft_s`, and each later one in `tpot_s` on average, seconds."""

    ttft_s: float
    tpot_s: float


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p95, p99 and mean; linear between neighbours, as numpy's default. None of nothing."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    named = {f"p{name}": float(value) for name, value in zip(PERCENTILES, found, strict=True)}
    return {**named, "mean": float(np.mean(values))}


def tpot(hop: HopResult) -> float | None:
    """Seconds per generated token after the first; None where there is only one."""
    reply = hop.reply
    return (reply.seconds - reply.ttft_s) / (reply.output_tokens - 1) if reply.output_tokens > 1 else None


def run_figures(run: Run, slo: Slo) -> dict[str, Any]:
    """All figures of one run; failed requests count in `failed` and in no time.

    `ttft_reuse_s` is over hops whose shared text an earlier hop of the same workflow has read. `goodput_per_s`: good
    requests a second.
    """
    good = [hop for hop in run.hops if hop.reply.error is None]
    speeds = [value for value in map(tpot, good) if value is not None]
    within = [hop for hop in good if hop.reply.ttft_s <= slo.ttft_s and (tpot(hop) or 0.0) <= slo.tpot_s]
    return {
        "requests": len(run.hops),
        "failed": len(run.hops) - len(good),
        "seconds": run.seconds,
        "ttft_s": percentiles([hop.reply.ttft_s for hop in good]),
        "ttft_reuse_s": percentiles([hop.reply.ttft_s for hop in good if hop.reuses]),
        "ttft_first_s": percentiles([hop.reply.ttft_s for hop in good if not hop.reuses]),
        "hop_s": percentiles([hop.reply.seconds for hop in good]),
        "workflow_s": percentiles(list(run.workflow_s.values())),
        "tpot_s": percentiles(speeds),
        "workflows_per_s": len(run.workflow_s) / run.seconds if run.seconds else None,
        "requests_per_s": len(good) / run.seconds if run.seconds else None,
        "prompt_tokens_per_s": sum(hop.prompt_tokens for hop in good) / run.seconds if run.seconds else None,
        "goodput_per_s": len(within) / run.seconds if run.seconds else None,
        "slo_attainment": len(within) / len(run.hops) if run.hops else None,
        "tokens": token_counts(good),
        "spans": dict(Counter(reason for hop in good for reason in hop.reply.reasons)),
    }


def token_counts(hops: Sequence[HopResult]) -> dict[str, Any]:
    """Prompt tokens by how they got their KV, and the share not computed; None where a server does not tell."""
    total = sum(hop.prompt_tokens for hop in hops)
    corrected = sum(hop.reply.corrected for hop in hops)
    known = [hop.reply.exact for hop in hops if hop.reply.exact is not None]
    exact = sum(known) if len(known) == len(hops) else None
    computed = None if exact is None else total - exact - corrected
    return {
        "prompt": total,
        "exact": exact,
        "corrected": corrected,
        "computed": computed,
        "reuse_share": None if computed is None or not total else 1 - computed / total,
    }


def text_table(figures: Mapping[str, Any]) -> str:
    """The figures of one run as aligned text."""
    lines = [f"{'':16} {'p50':>9} {'p90':>9} {'p95':>9} {'p99':>9} {'mean':>9}"]
    for name in ("ttft_s", "ttft_reuse_s", "ttft_first_s", "hop_s", "workflow_s", "tpot_s"):
        found = figures[name]
        if found is not None:
            lines.append(f"{name:16} " + " ".join(f"{value:9.3f}" for value in found.values()))
    for name, value in figures.items():
        if not isinstance(value, Mapping) and value is not None:
            lines.append(f"{name:20} {value:.4g}")
    lines += [f"{name:20} {figures[name]}" for name in ("tokens", "spans")]
    return "\n".join(lines)
