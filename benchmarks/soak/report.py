"""What a soak leaves behind: soak.json, soak.html, soak.png; and what of it is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import Heading, Picture, Table, Text, html_page
from benchmarks.soak.watch import Sample, growth

_MIB = 1024 * 1024


def verdict(figures: dict[str, Any]) -> list[str]:
    """One sentence for everything that a soak must not show; sets ``summary`` in the figures on the way."""
    load, seen, plan, totals = (figures[name] for name in ("load", "seen", "plan", "totals"))
    samples = [Sample(**sample) for sample in figures["samples"]]
    quiet = [sample for sample in samples if sample.quiet]
    grown = growth(quiet)
    handles = [sample.handles for sample in quiet]
    faults, fallbacks = totals.get("faults", {}), totals.get("fallbacks", 0)
    far = [gap for gap in load["parted"] if gap > plan["near_tie"]]
    figures["summary"] = {
        "requests": load["total"],
        "requests_by_kind": load["sent"],
        "failed_requests": len(load["failed"]),
        "corrected_share_of_agent_tokens": round(load["corrected"] / max(1, load["agent_tokens"]), 3),
        "plain_alone_equal": seen["alone_equal"],
        "plain_alone_different": len(seen["alone_differ"]),
        "plain_under_load_equal": load["equal"],
        "plain_under_load_parted_at_a_near_tie": len(load["parted"]) - len(far),
        "plain_under_load_parted_elsewhere": len(far),
        "stock_under_load_equal_to_itself": seen["stock_busy_equal"],
        "stock_under_load_parted_from_itself": len(seen["stock_busy_parted"]),
        "faults_injected": sum(faults.values()),
        "fallbacks_counted": fallbacks,
        "rounds": seen["rounds"],
        "rss_mib_first_and_last": [round(sample.rss / _MIB) for sample in (quiet[:1] + quiet[-1:])],
        "rss_growth_second_half": None if grown is None else round(grown, 4),
        "handles_quiet_least_and_most": [min(handles), max(handles)] if handles else None,
    }
    wrong = list(seen["problems"])
    wrong += [f"a request failed: {sentence}" for sentence in load["failed"]]
    wrong += [f"a plain prompt that was asked alone was answered otherwise: {text}" for text in seen["alone_differ"]]
    wrong += [f"a plain answer under load took a token {gap:.2f} nats below stock's best" for gap in far]
    if grown is not None and grown > plan["rss_growth"]:
        wrong.append(f"resident memory grew by {grown:.1%} in the second half.")
    if len(handles) > 2 and min(handles[len(handles) // 2 :]) > max(handles[: len(handles) // 2]):
        wrong.append(f"open file handles at quiet moments only grew: {handles}.")
    if fallbacks > sum(faults.values()):
        wrong.append(f"{fallbacks} failures were counted, but only {sum(faults.values())} injected.")
    if plan["fault_rate"] and not faults:
        wrong.append("no fault was injected: nothing is known about them.")
    if not load["corrected"]:
        wrong.append("no token was corrected: nothing is known about corrections.")
    if totals.get("state_failures"):
        wrong.append(f"learned state could not be saved {totals['state_failures']} times.")
    return wrong


def write_reports(folder: Path, figures: Mapping[str, Any]) -> None:
    """Write the three files; `verdict` must have been asked before."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "soak.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    samples = [Sample(**sample) for sample in figures["samples"]]
    wrong = figures["wrong"]
    blocks: list[Any] = [Heading("Soak", 1)]
    blocks.append(Text("Nothing wrong was seen." if not wrong else f"{len(wrong)} things were wrong."))
    blocks += [Text(sentence) for sentence in wrong[:50]]
    rows = tuple((name.replace("_", " "), str(value)) for name, value in figures["summary"].items())
    blocks.append(Table(("what", "value"), rows))
    faults = figures["totals"].get("faults", {})
    blocks.append(Table(("fault injected at", "times"), tuple((name, str(faults[name])) for name in sorted(faults))))
    if samples:
        path = folder / "soak.png"
        _draw(samples, path)
        blocks.append(Picture(path, "memory, file handles and KV slots over time"))
    (folder / "soak.html").write_text(html_page("Soak", blocks), encoding="utf-8")


def _draw(samples: Sequence[Sample], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = (("resident memory, MiB", "rss", _MIB), ("open file handles", "handles", 1), ("KV slots in use", "slots", 1),
            ("learned state, MiB", "state", _MIB))  # fmt: skip
    figure, grid = plt.subplots(len(rows), 1, figsize=(9, 9), dpi=110, sharex=True, layout="constrained")
    quiet = [sample for sample in samples if sample.quiet]
    for axes, (title, name, unit) in zip(grid, rows, strict=True):
        axes.plot([s.at_s / 60 for s in samples], [getattr(s, name) / unit for s in samples], color="#7f8794")
        axes.plot([s.at_s / 60 for s in quiet], [getattr(s, name) / unit for s in quiet], "o", color="#009e73", ms=4,
                  label="nothing under way")  # fmt: skip
        axes.set_title(title, loc="left", fontweight="bold", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].legend(frameon=False)
    grid[-1].set_xlabel("minutes")
    figure.savefig(path)
    plt.close(figure)
