"""The demo's figures over all readings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from kvcmas_sgl.demo.rows import Row

LONG_TOKENS = 2000
"""Shared tokens from which on a reading counts as long."""

LAST_AGENT_TOKENS = 3000
"""Shared tokens from which on a reading of the last agent counts as one of a full pipeline."""


def summarize(rows: Sequence[Row], max_kl: float) -> dict[str, Any]:
    """The figures of `reports/demo.json`; a figure is None where no row can show it.

    `corrected_tokens_unseen` counts every corrected token of the timed requests: each role reads each document for
    the first time there. The figures of the last agent, whose prompt holds all that was written before it, are over
    readings in which more than half of the shared tokens were reused.

    Args:
        max_kl: the quality budget that our server runs with, nats.
    """
    corrected = [row for row in rows if row.corrected > 0]
    long_ratios = [row.ttft_ratio for row in corrected if row.shared_tokens >= LONG_TOKENS]
    both = [row for row in corrected if row.kl_rotate_only is not None]
    noise = _mean([row.kl_noise for row in rows])
    kl_both = _mean([row.kl for row in both])
    kl_rotate_only = _mean([row.kl_rotate_only for row in both])
    last_role = rows[-1].role if rows else None
    last = [row for row in corrected if row.role == last_role and row.mostly_reused]
    last_ratios = [row.ttft_ratio for row in last if row.shared_tokens >= LAST_AGENT_TOKENS]
    return {
        "ttft_ratio_last_agent_3000plus": statistics.median(last_ratios) if last_ratios else None,
        "ttft_rows_last_agent_3000plus": len(last_ratios),
        "ttft_ratio_median_2000plus": statistics.median(long_ratios) if long_ratios else None,
        "ttft_rows_2000plus": len(long_ratios),
        "kl_last_agent_mean": _mean([row.kl for row in last]),
        "kl_ratio_to_rotate_only": kl_both / kl_rotate_only if kl_both is not None and kl_rotate_only else None,
        "kl_mean": _mean([row.kl for row in corrected]),
        "kl_rotate_only_mean": kl_rotate_only,
        "kl_noise": noise,
        "max_kl_budget": max_kl,
        "top1_agreement_mean": _mean([row.agreement for row in corrected]),
        "corrected_tokens_unseen": sum(row.corrected for row in corrected),
        "spans_reused": sum(row.reused_spans for row in rows),
        "spans_marked": sum(row.marked_spans for row in rows),
        "rows_corrected": len(corrected),
        "rows": len(rows),
        "per_role": {role: _role_summary(rows, role, noise) for role in dict.fromkeys(row.role for row in rows)},
    }


def _role_summary(rows: Sequence[Row], role: str, noise: float | None) -> dict[str, Any]:
    both = [row for row in rows if row.role == role and row.corrected > 0 and row.kl_rotate_only is not None]
    kl = _mean([row.kl for row in both])
    rotate_only = _mean([row.kl_rotate_only for row in both])
    near = rotate_only is not None and noise is not None and rotate_only <= 3 * noise
    return {
        "rows_corrected": sum(row.role == role and row.corrected > 0 for row in rows),
        "kl": kl,
        "kl_rotate_only": rotate_only,
        "kl_ratio_to_rotate_only": kl / rotate_only if kl is not None and rotate_only else None,
        "note": "rotate-only is within 3x the noise: its ratio says little" if near else "",
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
