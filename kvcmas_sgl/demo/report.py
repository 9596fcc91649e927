"""What the demo leaves behind: a table, a summary, reports/demo.json and one HTML page."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcmas_sgl.demo.rows import Row, rows_as_json

_COLUMNS = (
    "document", "role", "spans", "shared", "exact", "corrected", "computed", "TTFT stock", "TTFT ours", "ratio",
    "KL", "KL rotate", "noise", "top-1", "what happened to each span",
)  # fmt: skip
_UNITS = ("", "", "", "tokens", "tokens", "tokens", "tokens", "s", "s", "x", "nats", "nats", "nats", "", "")
_TEXT_COLUMNS = (0, 1, len(_COLUMNS) - 1)


def table(rows: Sequence[Row]) -> str:
    """All rows as aligned plain text; `-` is not measured."""
    lines = [_COLUMNS, _UNITS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]

    def aligned(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if column in _TEXT_COLUMNS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    out = [aligned(_COLUMNS), aligned(_UNITS)]
    for number, row in enumerate(rows):
        if number == 0 or rows[number - 1].document != row.document:
            out.append(rule)
        out.append(aligned(_cells(row)))
    return "\n".join(out)


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary in sentences; those that no row can support are left out."""
    lines = [
        f"{summary['rows_corrected']} of {summary['rows']} readings reused what others hold: "
        f"{summary['spans_reused']} of {summary['spans_marked']} spans, and "
        f"{summary['corrected_tokens_unseen']:,} corrected tokens that their role had never read."
    ]
    if summary["ttft_ratio_last_agent_3000plus"] is not None:
        lines.append(
            f"Time to first token of the last agent at 3,000 shared tokens and more: "
            f"{summary['ttft_ratio_last_agent_3000plus']:.1f} times faster than stock SGLang "
            f"(median of {summary['ttft_rows_last_agent_3000plus']} readings)."
        )
    if summary["kl_last_agent_mean"] is not None:
        lines.append(
            f"KL of the last agent to the dense run: {summary['kl_last_agent_mean']:.4f} nats per token, "
            f"budget {summary['max_kl_budget']:g}."
        )
    if summary["ttft_ratio_median_2000plus"] is not None:
        lines.append(
            f"Time to first token at 2,000 shared tokens and more: {summary['ttft_ratio_median_2000plus']:.1f} times "
            f"faster than stock SGLang (median of {summary['ttft_rows_2000plus']} readings)."
        )
    if summary["kl_mean"] is not None:
        sentence = f"KL to the dense run, mean over corrected readings: {summary['kl_mean']:.4f} nats per token"
        if summary["kl_ratio_to_rotate_only"] is not None:
            sentence += (
                f", {summary['kl_ratio_to_rotate_only']:.2f} of rotate-only's {summary['kl_rotate_only_mean']:.4f}"
            )
        if summary["kl_noise"] is not None:
            sentence += f"; two dense runs differ by {summary['kl_noise']:.4f}"
        lines.append(sentence + ".")
        lines.append(
            f"The likeliest next token is the dense run's at {summary['top1_agreement_mean']:.1%} of the positions."
        )
    for role, figures in summary["per_role"].items():
        if figures["kl_ratio_to_rotate_only"] is not None:
            line = (
                f"  {role}: KL {figures['kl']:.4f}, rotate-only {figures['kl_rotate_only']:.4f}, "
                f"ratio {figures['kl_ratio_to_rotate_only']:.2f}"
            )
            lines.append(line + (f" ({figures['note']})" if figures["note"] else ""))
    return lines


def write_json(
    path: Path, rows: Sequence[Row], summary: Mapping[str, Any], settings: Mapping[str, Any], total_seconds: float
) -> None:
    """Write the figures, the settings and every row; times in seconds, KL in nats."""
    content = {
        **summary,
        "total_seconds": round(total_seconds, 1),
        "settings": dict(settings),
        "measured_rows": rows_as_json(rows),
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_html(
    path: Path, rows: Sequence[Row], summary: Mapping[str, Any], settings: Mapping[str, Any], picture: Path
) -> None:
    """Write one page that needs nothing else: the picture is inside."""
    image = base64.b64encode(picture.read_bytes()).decode()
    meaning = "".join(f"<p>{html.escape(line)}</p>" for line in summary_lines(summary) if not line.startswith(" "))
    head = "".join(f"<th>{name}<br><small>{unit}</small></th>" for name, unit in zip(_COLUMNS, _UNITS, strict=True))
    body = "".join(_table_row(rows, number) for number in range(len(rows)))
    answers = "".join(
        f"<tr><td>{html.escape(row.document)}</td><td>{html.escape(row.role)}</td>"
        f"<td>{html.escape(row.answer)}</td><td>{html.escape(row.passed_on)}</td></tr>"
        for row in rows
        if row.corrected
    )
    shown = "".join(f"<li><code>{html.escape(k)}</code>: {html.escape(str(v))}</li>" for k, v in settings.items())
    path.write_text(
        _PAGE.format(image=image, meaning=meaning, head=head, body=body, answers=answers, settings=shown),
        encoding="utf-8",
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.document,
        row.role,
        str(row.marked_spans),
        str(row.shared_tokens),
        str(row.exact),
        str(row.corrected),
        str(row.computed),
        f"{row.ttft_stock_s:.2f}",
        f"{row.ttft_ours_s:.2f}",
        f"{row.ttft_ratio:.1f}",
        "-" if row.kl is None else f"{row.kl:.4f}",
        "-" if row.kl_rotate_only is None else f"{row.kl_rotate_only:.4f}",
        "-" if row.kl_noise is None else f"{row.kl_noise:.4f}",
        "-" if row.agreement is None else f"{row.agreement:.0%}",
        row.reasons,
    )


def _table_row(rows: Sequence[Row], number: int) -> str:
    row = rows[number]
    classes = ["first"] if number == 0 or rows[number - 1].document != row.document else []
    classes += ["reused"] if row.corrected else []
    cells = "".join(
        f"<td{' class=text' if column in _TEXT_COLUMNS else ''}>{html.escape(cell)}</td>"
        for column, cell in enumerate(_cells(row))
    )
    return f'<tr class="{" ".join(classes)}">{cells}</tr>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Agents that share their KV cache</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #1f2430; }}
img {{ width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; width: 100%; }}
th, td {{ padding: .2rem .6rem; text-align: right; vertical-align: top; }}
td.text, th:first-child, th:nth-child(2), th:last-child, .answers td {{ text-align: left; }}
tr.first td {{ border-top: 1px solid #c9cfda; }}
tr.reused {{ background: #e9f5ee; }}
small {{ color: #667085; font-weight: normal; }}
</style></head><body>
<h1>Agents that share one model share its KV cache</h1>
{meaning}
<img alt="How each prompt token got its KV, time to first token, and KL to the dense run"
 src="data:image/png;base64,{image}">
<h2>Every reading, in order</h2>
<p>Each role reads each document once, and what the roles before it wrote about it. The pipeline runs on our server;
stock SGLang gets exactly the same prompts. Shaded: shared text was reused, corrected into the role's own context; the
last column names each text's fate in the order of the prompt, the document first. KL compares the next-token
distributions along stock's greedy answer with those of stock's own dense run; <em>noise</em> is the same comparison
between two dense runs, <em>rotate</em> is reuse without correction. KL is summed over the likeliest tokens one by one
and over the rest as a whole: a lower bound, exact but for that rest.</p>
<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<h2>What the roles answered</h2>
<div class="scroll"><table class="answers"><thead><tr><th>document</th><th>role</th><th>stock SGLang's answer, along
which both are compared</th><th>what the next roles read</th></tr></thead><tbody>{answers}</tbody></table></div>
<h2>Settings</h2><ul>{settings}</ul>
</body></html>
"""
