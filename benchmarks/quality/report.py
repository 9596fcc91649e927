"""What the harness leaves behind: quality.json, one Markdown and one HTML page, and its plots."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.claims import Claim
from benchmarks.quality.methods import MAIN, Method
from benchmarks.quality.picture import draw_layers, draw_trade
from benchmarks.quality.summary import Cell, Row

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
    (folder / "quality.md").write_text(markdown(report), encoding="utf-8")
    (folder / "quality.html").write_text(page(report, folder), encoding="utf-8")


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


def markdown(report: Report) -> str:
    """The whole page."""
    parts = ["# Quality of reuse, method by method", "", *_sentences(report), "", "![trade-off](quality_trade.png)", ""]
    parts += ["## Methods", "", *_md(_HEAD, _method_rows(report)), ""]
    parts += [
        "![layers](quality_layers.png)",
        "",
        "## How each method was run",
        "",
        *_md(("method", "note"), _notes(report)),
    ]
    parts += ["", "## Cells", "", *_md(_CELL_HEAD, _cell_rows(report)), ""]
    parts += ["## The article's claims", "", *_md(_CLAIM_HEAD, _claim_rows(report)), ""]
    parts += ["## Settings", "", *(f"- `{name}`: {value}" for name, value in report.settings.items())]
    return "\n".join(parts) + "\n"


def page(report: Report, folder: Path) -> str:
    """One HTML page that needs nothing else: the plots are inside."""
    images = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in _IMAGES}
    return _PAGE.format(
        sentences="".join(f"<p>{html.escape(line)}</p>" for line in _sentences(report)),
        trade=images[_IMAGES[0]],
        layers=images[_IMAGES[1]],
        methods=_html(_HEAD, _method_rows(report)),
        notes=_html(("method", "note"), _notes(report)),
        cells=_html(_CELL_HEAD, _cell_rows(report)),
        claims=_html(_CLAIM_HEAD, _claim_rows(report)),
        settings="".join(
            f"<li><code>{html.escape(str(k))}</code>: {html.escape(str(v))}</li>" for k, v in report.settings.items()
        ),
    )


_IMAGES = ("quality_trade.png", "quality_layers.png")


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


def _method_rows(report: Report) -> list[tuple[str, ...]]:
    return [_cells(name, row) for name, row in report.rows.items()]


def _notes(report: Report) -> list[tuple[str, ...]]:
    return [(method.name, method.note) for method in report.methods if method.note and method.name in report.rows]


def _cell_rows(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            cell.kind,
            cell.agent,
            _small(cell.fullshared),
            _small(cell.noise),
            "yes" if cell.counts else "no",
            "-" if cell.shows_in_bf16 is None else "yes" if cell.shows_in_bf16 else "no",
        )
        for cell in report.cells
    ]


def _claim_rows(report: Report) -> list[tuple[str, ...]]:
    return [(c.claim, c.published, c.ours, c.conditions, c.verdict) for c in report.claims]


def _md(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Quality of reuse, method by method</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; color: #1f2430; }}
img {{ width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; width: 100%; }}
th, td {{ padding: .2rem .6rem; text-align: left; vertical-align: top; border-top: 1px solid #e6e9ef; }}
</style></head><body>
<h1>Quality of reuse, method by method</h1>
{sentences}
<img alt="KL to the dense run against the share of token-layers computed" src="data:image/png;base64,{trade}">
<h2>Methods</h2>{methods}
<img alt="Relative error of K and V by layer" src="data:image/png;base64,{layers}">
<h2>How each method was run</h2>{notes}
<h2>Cells</h2>{cells}
<h2>The article's claims</h2>{claims}
<h2>Settings</h2><ul>{settings}</ul>
</body></html>
"""
