"""Figures, table and picture of `benchmarks/spans.py` from its raw results."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOCK, OURS, STAGED = "stock", "ours", "ours_staged"
ARMS = (STOCK, OURS, STAGED)
_COLORS = {"exact": "#56b4e9", "corrected": "#009e73", "computed": "#7f8794"}
_LABELS = {STOCK: "stock SGLang", OURS: "ours", STAGED: "ours, staged\nby the client"}


@dataclass(frozen=True)
class RequestResult:
    """One request. Times in seconds from its sending, `staging_s` among them; counts in prompt tokens.

    `reasons` is what happened to each span, in prompt order; empty on stock SGLang.
    """

    agent: str
    seconds: float
    ttft_s: float
    staging_s: float
    exact: int
    corrected: int
    computed: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Round:
    """Requests that were sent together, and the seconds until the last was answered."""

    arm: str
    number: int
    seconds: float
    requests: tuple[RequestResult, ...]

    @property
    def requests_per_s(self) -> float:
        return len(self.requests) / self.seconds


@dataclass(frozen=True)
class Single:
    """One repetition at concurrency 1: several spans on both servers, and as many shared tokens in one span on ours."""

    number: int
    stock: RequestResult
    several: RequestResult
    one: RequestResult


@dataclass(frozen=True)
class TokenCounts:
    """How the tokens of one prompt got their KV."""

    exact: int
    corrected: int
    computed: int


def count_tokens(passes: Sequence[Mapping[str, Any]], prompt_tokens: int) -> TokenCounts:
    """The counts of a prompt that was sent in several passes, from our server's report on each of them.

    What one pass computes or corrects is a hit for the next. So exact is what the first pass found, computed is the
    work of all passes, and the rest was corrected.
    """
    exact = int(passes[0]["exact_tokens"])
    computed = sum(int(done["computed_tokens"]) for done in passes)
    return TokenCounts(exact, prompt_tokens - exact - computed, computed)


def summarize(rounds: Sequence[Round], singles: Sequence[Single]) -> dict[str, Any]:
    """The figures of `reports/spans.json`: ratios are medians over the rounds' own ratios, so that a change of the
    machine's load hits both arms of a ratio; a figure is None where nothing was measured."""
    by_arm = {arm: [entry for entry in rounds if entry.arm == arm] for arm in ARMS}
    staged = [request for entry in by_arm[STAGED] for request in entry.requests]
    return {
        "throughput_ratio": _throughput_ratio(by_arm[OURS], by_arm[STOCK]),
        "throughput_ratio_staged": _throughput_ratio(by_arm[STAGED], by_arm[STOCK]),
        "requests_per_s": {arm: _median([entry.requests_per_s for entry in found]) for arm, found in by_arm.items()},
        "staging_share": statistics.fmean(r.staging_s / r.seconds for r in staged) if staged else None,
        "single_pass_share": _median([(s.several.seconds - s.one.seconds) / s.several.seconds for s in singles]),
        "ttft_ratio_last_agent": _median([single.stock.ttft_s / single.several.ttft_s for single in singles]),
        "tokens": {
            arm: _tokens([request for entry in found for request in entry.requests]) for arm, found in by_arm.items()
        },
        "spans": {
            arm: dict(
                Counter(reason for entry in by_arm[arm] for request in entry.requests for reason in request.reasons)
            )
            for arm in (OURS, STAGED)
        },
        "requests": {arm: sum(len(entry.requests) for entry in found) for arm, found in by_arm.items()},
    }


def table(summary: dict[str, Any]) -> str:
    """The figures as aligned text."""
    lines = [f"{'arm':14} {'requests/s':>11} {'ratio':>7} {'exact':>9} {'corrected':>10} {'computed':>9}   spans"]
    ratios = {STOCK: 1.0, OURS: summary["throughput_ratio"], STAGED: summary["throughput_ratio_staged"]}
    for arm in ARMS:
        tokens = summary["tokens"][arm]
        spans = ", ".join(f"{count} {reason}" for reason, count in summary["spans"].get(arm, {}).items())
        lines.append(
            f"{arm:14} {_shown(summary['requests_per_s'][arm], '.3f'):>11} {_shown(ratios[arm], '.2f'):>6}x"
            f" {tokens['exact']:9} {tokens['corrected']:10} {tokens['computed']:9}   {spans}"
        )
    lines += [
        "",
        f"staging passes take {_shown(summary['staging_share'], '.1%')} of a staged request's time (mean)",
        f"several spans instead of one take {_shown(summary['single_pass_share'], '.1%')} of a request's time "
        "(median, one request at a time)",
        f"time to first token, one request at a time, stock / ours: {_shown(summary['ttft_ratio_last_agent'], '.1f')}x",
    ]
    return "\n".join(lines)


def draw(rounds: Sequence[Round], summary: dict[str, Any], path: Path) -> None:
    """Write the picture as PNG: requests per second of every round, and where the prompt tokens' KV came from."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, kinds) = plt.subplots(1, 2, figsize=(11, 4.4), dpi=120, layout="constrained")
    names = [_LABELS[arm] for arm in ARMS]
    for place, arm in enumerate(ARMS):
        color = _COLORS["computed" if arm == STOCK else "corrected"]
        points = [entry.requests_per_s for entry in rounds if entry.arm == arm]
        median = summary["requests_per_s"][arm]
        speed.bar(place, median, 0.6, color=color, alpha=0.85)
        speed.scatter([place] * len(points), points, color="#1f2430", s=14, zorder=3)
        ratio = {OURS: summary["throughput_ratio"], STAGED: summary["throughput_ratio_staged"]}.get(arm)
        label = f"{median:.2f}" + (f"  ({ratio:.1f}x)" if ratio is not None else "")
        speed.annotate(label, (place, max(points)), xytext=(0, 6), textcoords="offset points", ha="center")
    speed.set_title("Requests per second, agents at once (median, rounds)", loc="left", fontweight="bold")
    bottom = [0.0] * len(ARMS)
    for kind, color in _COLORS.items():
        means = [summary["tokens"][arm][kind] / max(summary["requests"][arm], 1) for arm in ARMS]
        kinds.bar(range(len(ARMS)), means, 0.6, bottom=bottom, color=color, label=kind)
        bottom = [low + mean for low, mean in zip(bottom, means, strict=True)]
    kinds.set_title("Prompt tokens of a request (mean)", loc="left", fontweight="bold")
    kinds.legend(frameon=False, ncols=3, loc="upper right")
    for axes, room in ((speed, 1.15), (kinds, 1.18)):
        axes.set_xticks(range(len(ARMS)), names)
        axes.set_ylim(0, axes.get_ylim()[1] * room)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e9ef", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path)
    plt.close(figure)


def _throughput_ratio(ours: Sequence[Round], stock: Sequence[Round]) -> float | None:
    theirs = {entry.number: entry.requests_per_s for entry in stock}
    return _median([entry.requests_per_s / theirs[entry.number] for entry in ours if entry.number in theirs])


def _tokens(requests: Sequence[RequestResult]) -> dict[str, int]:
    return {kind: sum(getattr(request, kind) for request in requests) for kind in _COLORS}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
