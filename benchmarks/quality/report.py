"""What the harness leaves behind: quality.json, one Markdown and one HTML page, and its plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages import Block, Heading, Picture, Table, Text, html_page, markdown
from benchmarks.quality.claims import Claim
from benchmarks.quality.methods import MAIN, Method
from benchmarks.quality.picture import draw_layers, draw_trade
from benchmarks.quality.summary import Cell, Row

TITLE = "Quality of reuse, method by method"
_HEAD = (
    "method", "KL mean", "of fullshared", "KL first", "KL p95", "top-1", "same choice", "same answer", "score",
    "to dense (95 %)", "recomputed", "of spans", "reused", "state MiB", "K error", "V error", "s a reading",
)  # fmt: skip
_CLAIM_HEAD = ("claim", "published", "ours", "conditions", "verdict")
_CELL_HEAD = ("task", "reader", "fullshared KL", "noise KL", "counts", "above bf16 noise")


@dataclass(frozen=True)
class Report:
    """All that is reported. ``scores``: hops -> (dense score, chance, counts); ``noise_bf16``: mean KL, nats."""

    rows: Mapping[str, Row]
    methods: Sequence[Method]
    cells: Sequence[Cell]
    scores: Mapping[int, tuple[float, float, bool]]
    claims: Sequence[Claim]
    noise_bf16: float | None
    settings: Mapping[str, Any]
    total_seconds: float


def write(report: Report, folder: Path) -> None:
    """Write quality.json, quality.md, quality.html, quality_trade.png and quality_layers.png to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_trade(report.rows, report.methods, folder / "quality_trade.png")
    draw_layers(report.rows, folder / "quality_layers.png")
    (folder / "quality.json").write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8")
    parts = blocks(report, folder)
    (folder / "quality.md").write_text(markdown(parts), encoding="utf-8")
    (folder / "quality.html").write_text(html_page(TITLE, parts), encoding="utf-8")


def as_json(report: Report) -> dict[str, Any]:
    """KL in nats, shares from 0 to 1, bytes, seconds."""
    notes = {method.name: method.note for method in report.methods}
    return {
        "methods": {name: {**asdict(row), "note": notes.get(name, "")} for name, row in report.rows.items()},
        "noise_bf16": report.noise_bf16,
        "cells": [
            {**asdict(cell), "counts": cell.counts, "shows_in_bf16": cell.shows_in_bf16} for cell in report.cells
        ],
        "scores": {
            str(hops): {"dense": dense, "chance": chance, "counts": counts}
            for hops, (dense, chance, counts) in report.scores.items()
        },
        "claims": [asdict(claim) for claim in report.claims],
        "settings": dict(report.settings),
        "total_seconds": round(report.total_seconds, 1),
    }


def table(rows: Mapping[str, Row]) -> str:
    """The main methods as aligned plain text."""
    lines = [_HEAD, *(_cells(name, rows[name]) for name in MAIN if name in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    padded = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *cells[1:]]) for line, cells in zip(lines, padded, strict=True)
    )


def blocks(report: Report, folder: Path) -> list[Block]:
    """The whole page; its plots lie in ``folder``."""
    return [
        Heading(TITLE, 1),
        *map(Text, _sentences(report)),
        Picture(folder / "quality_trade.png", "KL to the dense run against the share of token-layers computed"),
        Heading("Methods"),
        Table(_HEAD, _method_rows(report)),
        Picture(folder / "quality_layers.png", "Relative error of K and V by layer"),
        Heading("How each method was run"),
        Table(("method", "note"), _notes(report), words=True),
        Heading("Cells"),
        Table(_CELL_HEAD, _cell_rows(report), words=True),
        Heading("The article's claims"),
        Table(_CLAIM_HEAD, _claim_rows(report), words=True),
        Heading("Settings"),
        Table(("setting", "value"), tuple((name, str(value)) for name, value in report.settings.items()), words=True),
    ]


def _sentences(report: Report) -> list[str]:
    full = report.rows["fullshared"]
    lines = [
        f"Every method on the same {full.readings} readings, in fp32: KL compares the next-token distributions after "
        f"the spans, along the dense run's request and greedy answer, with those of the dense run.",
        "Recomputed: token-layers computed, of those that a dense run computes after the agent's own prefix, and of "
        "those of spans; encoding "
        "new content without context is charged in equal parts to its readers, so both shares can sum to more than 1.",
        f"Noise: another chunking of the same dense run, KL {report.rows['noise'].kl_mean:.1e} in fp32"
        + ("." if report.noise_bf16 is None else f", {report.noise_bf16:.4f} between two bf16 runs."),
    ]
    for hops, (dense, chance, counts) in report.scores.items():
        what = {0: "MMLU questions", 1: "one-fact probes", 2: "two-fact probes"}[hops]
        lines.append(
            f"{what}: dense {dense:.2f}, chance {chance:.2f}; "
            + ("part of the score." if counts else "not above chance, so not part of the score.")
        )
    return lines


def _cells(name: str, row: Row) -> tuple[str, ...]:
    return (
        name,
        _small(row.kl_mean),
        f"{row.kl_ratio:.2f}",
        _small(row.kl_first),
        _small(row.kl_p95),
        f"{row.top1:.3f}",
        _maybe(row.answer_agreement),
        f"{row.same_answer:.2f}",
        _maybe(row.score),
        "-" if row.score_low is None or row.score_high is None else f"{row.score_low:+.2f} to {row.score_high:+.2f}",
        f"{row.recomputed_share:.3f}",
        f"{row.span_recomputed_share:.3f}",
        f"{row.reused_share:.3f}",
        f"{row.state_bytes / 2**20:.1f}",
        f"{row.error_k:.3f}",
        f"{row.error_v:.3f}",
        f"{row.seconds:.2f}",
    )


def _small(value: float) -> str:
    return f"{value:.4f}" if value >= 5e-5 or value == 0 else f"{value:.0e}"


def _maybe(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _method_rows(report: Report) -> tuple[tuple[str, ...], ...]:
    return tuple(_cells(name, row) for name, row in report.rows.items())


def _notes(report: Report) -> tuple[tuple[str, ...], ...]:
    return tuple((method.name, method.note) for method in report.methods if method.note and method.name in report.rows)


def _cell_rows(report: Report) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            cell.kind,
            cell.agent,
            _small(cell.fullshared),
            _small(cell.noise),
            "yes" if cell.counts else "no",
            "-" if cell.shows_in_bf16 is None else "yes" if cell.shows_in_bf16 else "no",
        )
        for cell in report.cells
    )


def _claim_rows(report: Report) -> tuple[tuple[str, ...], ...]:
    return tuple((c.claim, c.published, c.ours, c.conditions, c.verdict) for c in report.claims)
