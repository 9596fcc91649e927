"""The report's plots: quality against computation, and where in the model the error sits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.quality.methods import MAIN, Method
from benchmarks.quality.summary import Row

_OURS = ("ours", "ours, head only", "own delta")
# Colour-blind safe (Okabe-Ito); ours are the greens and the black, as in the demo's picture.
_COLOURS = {
    "ours": "#009e73", "ours, head only": "#66c2a5", "own delta": "#1f2430", "fullshared": "#d55e00",
    "cacheblend": "#0072b2", "droidspeak": "#56b4e9", "epic": "#cc79a7", "kvcmas": "#e69f00", "kvcomm": "#a6761d",
}  # fmt: skip
_OTHER = "#7f8794"
_SKIPPED = ("dense", "noise", "none", "fullshared_context_free")


def draw_trade(rows: Mapping[str, Row], methods: Sequence[Method], path: Path) -> None:
    """KL against the recomputed share, all methods; those with a parameter are curves. PNG."""
    figure, axes = plt.subplots(figsize=(10.5, 6.4), dpi=120, layout="constrained")
    families: dict[str, list[tuple[float, str]]] = {}
    for method in methods:
        if method.name in rows and method.name not in _SKIPPED:
            families.setdefault(method.family, []).append((method.parameter or 0.0, method.name))
    for number, (family, members) in enumerate(families.items()):
        points = [rows[name] for _, name in sorted(members)]
        x = [row.recomputed_share for row in points]
        y = [max(row.kl_mean, 1e-9) for row in points]
        colour = _COLOURS.get(family, _OTHER)
        strong = family in _OURS
        # Methods without a colour of their own are told apart by their marks.
        mark = "o" if family in _COLOURS else "sv^<>PX*dph"[number % 11]
        width, size = (2.2, 7) if strong else (1.2, 6)
        axes.plot(x, y, linestyle="-", marker=mark, color=colour, linewidth=width, markersize=size, label=family)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    axes.axhline(rows["fullshared"].kl_mean, color=_COLOURS["fullshared"], linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.set_xlabel("token-layers computed, of those of a dense run (the request included)")
    axes.set_ylabel("KL to the dense run (nats per token)")
    axes.set_title("What a method computes, and what it costs: down and left is better", loc="left", fontweight="bold")
    _clean(axes)
    figure.savefig(path)
    plt.close(figure)


def draw_layers(rows: Mapping[str, Row], path: Path) -> None:
    """Relative error of the spans' K and V, layer by layer, of the main methods. PNG."""
    figure, both = plt.subplots(1, 2, figsize=(12, 4.6), dpi=120, layout="constrained", sharex=True)
    shown = [name for name in MAIN if name in rows and name not in (*_SKIPPED, "anchors", "mean", "nearest")]
    for axes, title, of in zip(both, ("K", "V"), ("error_k_layers", "error_v_layers"), strict=True):
        for number, name in enumerate(shown):
            colour = _COLOURS.get("own delta" if name == "ours_own_delta" else name)
            style = "-" if colour else ("--", ":", "-.")[number % 3]
            axes.plot(getattr(rows[name], of), style, color=colour or _OTHER, linewidth=1.4, label=name)
        axes.set_title(f"Relative error of {title}, by layer", loc="left", fontweight="bold")
        axes.set_xlabel("layer")
        _clean(axes)
    both[1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)
    plt.close(figure)


def _clean(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#e6e9ef", linewidth=0.8)
    axes.set_axisbelow(True)
