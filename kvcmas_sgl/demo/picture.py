"""The demo's picture: where each token's KV came from, what that saves, and what it costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from kvcmas_sgl.demo.rows import Row

# Colour-blind safe (Okabe-Ito): stock and dense, ours and corrected, rotate-only, exact hits.
_STOCK, _OURS, _ROTATE, _EXACT = "#7f8794", "#009e73", "#d55e00", "#56b4e9"


def draw(rows: Sequence[Row], summary: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG."""
    figure = plt.figure(figsize=(13, 8.6), dpi=120, layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1.0, 1.15), hspace=0.04)
    _tokens(upper.subplots(), rows)
    left, right = lower.subplots(1, 2)
    _times(left, rows, summary)
    _divergence(right, rows, summary)
    figure.savefig(path)
    plt.close(figure)


def _tokens(axes: Axes, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    bottom = [0] * len(rows)
    for label, color, counts in (
        ("exact hit", _EXACT, [row.exact for row in rows]),
        ("corrected (reused)", _OURS, [row.corrected for row in rows]),
        ("computed", _STOCK, [row.computed for row in rows]),
    ):
        axes.bar(places, counts, bottom=bottom, color=color, width=0.82, label=label)
        bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
    axes.set_xticks(list(places), [row.role for row in rows], rotation=90, fontsize=8)
    top = max(bottom) * 1.2
    axes.set_ylim(0, top)
    axes.set_xlim(-0.7, len(rows) - 0.3)
    for number, row in enumerate(rows):
        if number == 0 or rows[number - 1].document != row.document:
            if number:
                axes.axvline(number - 0.5, color="#c9cfda", linewidth=1)
            axes.text(number - 0.4, top * 0.97, row.document, fontsize=9, va="top", color="#1f2430")
    axes.set_ylabel("prompt tokens")
    axes.set_title("How each prompt token got its KV, reading after reading", loc="left", fontweight="bold")
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.9), frameon=False, fontsize=9)
    _clean(axes)


def _times(axes: Axes, rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    axes.set_title("Time to first token (s)", loc="left", fontweight="bold")
    reused = [row for row in rows if row.corrected]
    for label, color, marker, points in (
        ("stock SGLang", _STOCK, "o", [(row.shared_tokens, row.ttft_stock_s) for row in rows]),
        ("ours, shared text reused", _OURS, "D", [(row.shared_tokens, row.ttft_ours_s) for row in reused]),
    ):
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, color=color, marker=marker, s=30, alpha=0.75, linewidths=0, label=label)
    # One label a document: its readings differ by the answers only, and stand close together.
    for document in dict.fromkeys(row.document for row in reused):
        group = [row for row in reused if row.document == document]
        place = statistics.fmean(row.shared_tokens for row in group)
        label = f"{statistics.median(row.ttft_ratio for row in group):.1f}x"
        top = max(row.ttft_stock_s for row in group)
        axes.annotate(label, (place, top), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9)
    axes.set_ylim(0, max(row.ttft_stock_s for row in rows) * 1.25)
    axes.set_xlim(left=0)
    axes.set_xlabel("shared tokens in the prompt (document and answers)")
    last = summary["ttft_ratio_last_agent_3000plus"]
    median = summary["ttft_ratio_median_2000plus"]
    if last is not None:
        text = f"{last:.1f} times faster: last agent\nat 3,000 shared tokens and more (median)"
    elif median is not None:
        text = f"{median:.1f} times faster\nat 2,000 shared tokens and more (median)"
    else:
        text = ""
    axes.text(0.03, 0.72, text, transform=axes.transAxes, color=_OURS, fontsize=11)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    _clean(axes)


def _divergence(axes: Axes, rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    title = f"KL to the dense run (nats per token; budget {summary['max_kl_budget']:g})"
    axes.set_title(title, loc="left", fontweight="bold")
    both = [row for row in rows if row.corrected and row.kl_rotate_only is not None]
    roles = [role for role in summary["per_role"] if any(row.role == role for row in both)]
    for shift, label, color, values in (
        (-0.2, "rotate-only", _ROTATE, lambda row: row.kl_rotate_only),
        (0.2, "ours, corrected", _OURS, lambda row: row.kl),
    ):
        for place, role in enumerate(roles):
            points = [values(row) for row in both if row.role == role]
            mean = statistics.fmean(points)
            axes.bar(place + shift, mean, 0.36, color=color, alpha=0.85, label=label if place == 0 else None)
            axes.scatter(
                [place + shift] * len(points), points, color="#1f2430", s=11, alpha=0.55, linewidths=0, zorder=3
            )
            number = axes.annotate(f"{mean:.4f}", (place + shift, 0), xytext=(0, 4), textcoords="offset points")
            number.set(ha="center", va="bottom", fontsize=8, color="white", fontweight="bold")
    if summary["kl_noise"] is not None:
        axes.axhline(summary["kl_noise"], color="#1f2430", linestyle="--", linewidth=1, label="noise: two dense runs")
    axes.set_xticks(range(len(roles)), roles)
    axes.set_xlim(-0.6, max(len(roles), 1) - 0.4)
    if roles:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
        axes.legend(loc="upper center", ncols=3, frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "no document was reused", transform=axes.transAxes, ha="center")
    _clean(axes)


def _clean(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#e6e9ef", linewidth=0.8)
    axes.set_axisbelow(True)
