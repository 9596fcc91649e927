"""What token arithmetic allows: every shared span that was read before is free, and a token costs the same everywhere.

Stock SGLang computes what its exact prefix cache lacks. Nobody can do with less than a prompt's tokens behind the
agent's head without the spans that another agent has read before. Waiting, decoding and what a correction costs are
not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.workload.figures import percentiles
from benchmarks.workload.runner import HopResult


@dataclass(frozen=True)
class Bounds:
    """Ratios of ours over stock at best; `throughput_ratio` is above 1, the others below."""

    ttft_p50_ratio: float
    ttft_p99_ratio: float
    workflow_ratio: float
    throughput_ratio: float

    def as_json(self) -> dict[str, float]:
        return dict(vars(self))


def stock_tokens(hop: HopResult) -> int:
    """Prompt tokens that stock SGLang computed; without its word, all behind the agent's head."""
    computed = hop.reply.computed
    return hop.prompt_tokens - hop.head_tokens if computed is None else computed


def least_tokens(hop: HopResult) -> int:
    """Prompt tokens that are left when what was read before in the workflow is free, and what stock had cached."""
    known = zip(hop.spans, hop.reusable, strict=True)
    read = sum(stop - start for (start, stop), seen in known if seen)
    return min(stock_tokens(hop), hop.prompt_tokens - hop.head_tokens - read)


def bounds(hops: Sequence[HopResult]) -> Bounds | None:
    """The bounds over hops as stock SGLang served them, or None if no hop in them could reuse anything."""
    reusing = [hop for hop in hops if hop.reuses]
    if not reusing:
        return None
    least: Any = percentiles([float(least_tokens(hop)) for hop in reusing])
    stock: Any = percentiles([float(stock_tokens(hop)) for hop in reusing])
    total = sum(map(least_tokens, hops)) / sum(map(stock_tokens, hops))
    return Bounds(least["p50"] / stock["p50"], least["p99"] / stock["p99"], total, 1 / total)
