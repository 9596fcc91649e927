"""The report's pictures: TTFT and workflow times under Poisson arrivals, and the sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.arms import ANCHORS, ARMS, KVCOMM, OURS, ROTATE, RUST

_COLORS = {RUST: "#7f8794", OURS: "#009e73", ROTATE: "#d55e00", ANCHORS: "#0072b2", KVCOMM: "#cc79a7"}


def draw(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what was measured; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    files = []
    if found.get("poisson70"):
        files.append(_poisson(found["poisson70"]["rows"], folder / "serving-poisson.png"))
    sweeps = {name: points for name, points in (found.get("sweeps") or {}).items() if points}
    if sweeps:
        files.append(_sweeps(sweeps, folder / "serving-sweeps.png"))
    if found.get("scaling"):
        files.append(_scaling(found["scaling"]["windows"], folder / "serving-scaling.png"))
    return files


def _poisson(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, (first, whole) = plt.subplots(1, 2, figsize=(11, 4), dpi=120, layout="constrained")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row["run"] for row in rows if row["arm"] == arm]
        hops = [hop["reply"]["ttft_s"] for run in mine for hop in run["hops"] if hop["reuses"]]
        flows = [seconds for run in mine for seconds in run["workflow_s"].values()]
        for axes, values in ((first, hops), (whole, flows)):
            if values:
                axes.ecdf(values, color=_COLORS.get(arm, "#56b4e9"), label=ARMS[arm].label, linewidth=2)
    first.set_title("TTFT of hops that reread, s (share of hops)", loc="left", fontweight="bold")
    whole.set_title("Workflow, end to end, s (share of workflows)", loc="left", fontweight="bold")
    first.legend(frameon=False, loc="lower right")
    return _save(figure, (first, whole), path)


def _sweeps(sweeps: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(1, len(sweeps), figsize=(4.2 * len(sweeps), 3.8), dpi=120, layout="constrained",
                                squeeze=False)  # fmt: skip
    for axes, (name, points) in zip(grid[0], sweeps.items(), strict=True):
        for arm in (RUST, OURS):
            line = []
            for point in sorted(points, key=lambda entry: entry["x"]):
                row = next(row for row in point["rows"] if row["arm"] == arm)
                line.append((point["x"], (row["ttft_reuse_s"] or row["ttft_s"])["p50"]))
            axes.plot(*zip(*line, strict=True), marker="o", color=_COLORS[arm], label=ARMS[arm].label)
        axes.set_title(f"TTFT p50, s, by {name.replace('_', ' ')}", loc="left", fontweight="bold")
        axes.set_ylim(bottom=0)
    grid[0][0].legend(frameon=False)
    return _save(figure, tuple(grid[0]), path)


def _scaling(windows: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(1, 4, figsize=(15, 3.6), dpi=120, layout="constrained")
    for place, kind in enumerate(("documents", "roles")):
        x = [window[kind] for window in windows[kind]]
        time, state = grid[2 * place : 2 * place + 2]
        time.plot(x, [window["ours_ms"] for window in windows[kind]], marker="o", color=_COLORS[OURS])
        time.set_title(f"our ms a request, by {kind}", loc="left", fontweight="bold")
        state.plot(x, [window["state_bytes"] / 2**20 for window in windows[kind]], marker="o", color=_COLORS[RUST])
        state.set_title(f"state, MiB, by {kind}", loc="left", fontweight="bold")
        time.set_ylim(bottom=0)
        state.set_ylim(bottom=0)
    return _save(figure, tuple(grid), path)


def _save(figure: Any, every: Sequence[Any], path: Path) -> Path:
    import matplotlib.pyplot as plt

    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e9ef", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path)
    plt.close(figure)
    return path
