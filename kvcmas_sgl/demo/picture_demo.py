"""`make demo IMAGES=1`: agents read pictures one after another, on stock SGLang and on our server."""

from __future__ import annotations

import base64
import html
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests

from kvcmas_sgl.demo.client import Client, agent_report
from kvcmas_sgl.demo.divergence import mean_kl
from kvcmas_sgl.demo.measure import ROTATE_ONLY_SALT
from kvcmas_sgl.demo.pictures import picture
from kvcmas_sgl.demo.roles import ROLES, Role
from kvcmas_sgl.image_limits import data_url
from kvcmas_sgl.prepare_image_model import IMAGE_TOKEN_ID, IMAGE_TOKENS
from kvcmas_sgl.wire import agent_hint

PER_SET = 4
SETS, QUICK_SETS = 12, 6
_COLUMNS = (
    "pictures",
    "role",
    "tokens",
    "exact",
    "corrected",
    "computed",
    "encoded",
    "TTFT stock",
    "TTFT ours",
    "KL",
    "KL rotate",
)
_UNITS = ("", "", "", "tokens", "tokens", "tokens", "pictures", "s", "s", "nats", "nats")


@dataclass(frozen=True)
class Reading:
    """One role reading four pictures: tokens by kind, pictures that our server's vision tower ran for, seconds, nats.

    KL is None where nothing was corrected.
    """

    first: int
    role: str
    prompt_tokens: int
    exact: int
    corrected: int
    computed: int
    encoded: int
    ttft_stock_s: float
    ttft_ours_s: float
    kl: float | None
    kl_rotate_only: float | None
    reason: str

    @property
    def name(self) -> str:
        return f"{self.first} to {self.first + PER_SET - 1}"


class PictureDemo:
    """Sends the same prompts to both servers, one request at a time.

    ``model``: folder made by `kvcmas_sgl.prepare_image_model`.
    """

    def __init__(self, stock: str, ours: str, model: str, answer_tokens: int, top: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._stock, self._ours, self._ours_url = Client(stock), Client(ours), ours
        self._answer_tokens, self._top = answer_tokens, top

    def run(self, sets: int) -> Iterator[Reading]:
        """One reading per set of pictures and role. A set that nobody measures comes first: it warms both up."""
        for role in ROLES:
            self._reading(role, sets * PER_SET)
        for number in range(sets):
            for role in ROLES:
                yield self._reading(role, number * PER_SET)

    def _reading(self, role: Role, first: int) -> Reading:
        ids, span = self._prompt(role)
        files = [base64.b64encode(picture(first + number)).decode() for number in range(PER_SET)]
        pictures: dict[str, Any] = {"image_data": files, "modalities": ["multi-images"]}
        hint: dict[str, Any] = {"kv_hints": agent_hint(role.name, [span])}
        dense = self._stock.answer(ids, self._answer_tokens, **pictures)
        before = self._encoded()
        shared = self._ours.answer(ids, 1, **pictures, **hint)
        encoded = self._encoded() - before
        self._ours.wait_until_learned()
        report = agent_report(shared.meta)
        length = len(ids) + PER_SET * (IMAGE_TOKENS - 1)
        rotated: dict[str, Any] = {
            "kv_hints": agent_hint(role.name, [span], policy="always", estimator="none", head=0),
            "cache_salt": ROTATE_ONLY_SALT,
        }
        kl = kl_rotate_only = None
        if report["corrected_tokens"]:
            # Positions count the pictures' tokens; the client's own count does not.
            pictures["logprob_start_len"] = length - 1
            reference = self._stock.scores(ids, dense.tokens, self._top, **pictures)

            def compared(options: dict[str, Any]) -> float:
                return mean_kl(
                    reference, self._ours.scores(ids, dense.tokens, 1, reference.tokens, **pictures, **options)
                )

            kl, kl_rotate_only = compared(hint), compared(rotated)
        else:
            self._ours.prefill(ids, **pictures, **rotated)
        self._ours.wait_until_learned()
        return Reading(
            first=first,
            role=role.name,
            prompt_tokens=length,
            exact=report["exact_tokens"],
            corrected=report["corrected_tokens"],
            computed=report["computed_tokens"],
            encoded=encoded,
            ttft_stock_s=dense.ttft_s,
            ttft_ours_s=shared.ttft_s,
            kl=kl,
            kl_rotate_only=kl_rotate_only,
            reason=report["reason"],
        )

    def _prompt(self, role: Role) -> tuple[list[int], tuple[int, int]]:
        """One token for each picture, and where the shared part lies in these."""
        head = self._tokens(f"<|im_start|>system\n{role.system}<|im_end|>\n<|im_start|>user\n")
        span = self._tokens("Pictures of the report:\n")
        for number in range(PER_SET):
            span += [*self._tokens(f"Figure {number + 1}: "), IMAGE_TOKEN_ID, *self._tokens("\n")]
        tail = self._tokens(f"\n{role.question}<|im_end|>\n<|im_start|>assistant\n")
        return [*head, *span, *tail], (len(head), len(head) + len(span))

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _encoded(self) -> int:
        response = requests.get(f"{self._ours_url}/server_info", timeout=60)
        return int(response.json()["internal_states"][0]["kvcmas"]["images_encoded"])


def table(readings: Sequence[Reading]) -> str:
    """All readings as aligned plain text."""
    lines = [_COLUMNS, _UNITS, *map(_cells, readings)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def summary(readings: Sequence[Reading]) -> dict[str, Any]:
    """Totals; a figure is None where no reading can show it."""
    reused = [one for one in readings if one.corrected]
    kls = [one.kl for one in reused if one.kl is not None]
    rotated = [one.kl_rotate_only for one in reused if one.kl_rotate_only is not None]
    return {
        "readings": len(readings),
        "readings_corrected": len(reused),
        "pictures_given": PER_SET * len(readings),
        "pictures_encoded": sum(one.encoded for one in readings),
        "pictures_encoded_of_corrected_readings": sum(one.encoded for one in reused),
        "corrected_tokens": sum(one.corrected for one in reused),
        "kl_mean": statistics.fmean(kls) if kls else None,
        "kl_rotate_only_mean": statistics.fmean(rotated) if rotated else None,
        "ttft_ratio_median": statistics.median(one.ttft_stock_s / one.ttft_ours_s for one in reused)
        if reused
        else None,
    }


def sentences(figures: dict[str, Any], budget: float) -> list[str]:
    lines = [
        f"{figures['readings_corrected']} of {figures['readings']} readings of four pictures reused what another role "
        f"holds: {figures['corrected_tokens']:,} tokens were corrected.",
        f"The prompts held {figures['pictures_given']} pictures; our server's vision tower ran for "
        f"{figures['pictures_encoded']} of them, in corrected readings for "
        f"{figures['pictures_encoded_of_corrected_readings']}.",
    ]
    if figures["kl_mean"] is not None:
        lines.append(f"KL to stock SGLang's dense run: {figures['kl_mean']:.4f} nats per token, budget {budget:g}.")
        lines.append(
            f"Time to first token of corrected readings: {figures['ttft_ratio_median']:.1f} times faster than stock "
            "SGLang (median)."
        )
    return lines


def write(folder: Path, readings: Sequence[Reading], budget: float, settings: dict[str, Any]) -> None:
    """Write demo-images.json and demo-images.html, a page that holds its pictures."""
    figures = summary(readings)
    rows = [asdict(one) for one in readings]
    content = {**figures, "max_kl_budget": budget, "settings": settings, "measured_rows": rows}
    (folder / "demo-images.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    parts = []
    for first in dict.fromkeys(one.first for one in readings):
        shown = "".join(
            f'<img alt="picture {first + number}" src="{data_url(picture(first + number))}">'
            for number in range(PER_SET)
        )
        body = "".join(_html_row(one) for one in readings if one.first == first)
        parts.append(f"<h2>Pictures {first} to {first + PER_SET - 1}</h2>{shown}<table>{_HEAD}{body}</table>")
    text = "".join(f"<p>{html.escape(line)}</p>" for line in sentences(figures, budget))
    page = _PAGE.replace("TEXT", text).replace("PARTS", "".join(parts))
    (folder / "demo-images.html").write_text(page, encoding="utf-8")


def _cells(one: Reading) -> tuple[str, ...]:
    counts = (one.prompt_tokens, one.exact, one.corrected, one.computed, one.encoded)
    times = (f"{one.ttft_stock_s:.2f}", f"{one.ttft_ours_s:.2f}")
    kls = ("-" if kl is None else f"{kl:.4f}" for kl in (one.kl, one.kl_rotate_only))
    return (one.name, one.role, *map(str, counts), *times, *kls)


def _html_row(one: Reading) -> str:
    cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(one)[1:])
    return f"<tr{' class=reused' if one.corrected else ''}>{cells}</tr>"


_HEAD = (
    "<tr>"
    + "".join(
        f"<th>{name}<br><small>{unit}</small></th>"
        for name, unit in zip(_COLUMNS, _UNITS, strict=True)
        if name != "pictures"
    )
    + "</tr>"
)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Agents that share pictures</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #1f2430; }
img { width: 23%; margin-right: 1%; border: 1px solid #c9cfda; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .2rem .6rem; text-align: right; }
tr.reused { background: #e9f5ee; }
small { color: #667085; font-weight: normal; }
</style></head><body>
<h1>Agents that share pictures share their KV</h1>
TEXT
<p>Every role reads every four pictures once, with its own system prompt before them. Shaded: the pictures' KV was
corrected from another role's; <em>encoded</em> counts pictures that our server's vision tower ran for. The model is
SmolLM2-135M behind a random vision tower: its answers mean nothing, its KV depends on every pixel.</p>
PARTS
</body></html>
"""
