"""What `make bench-serving` leaves behind: serving.json, serving.md, serving.html, pictures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import Block, Heading, Picture, Table, Text, html_page, markdown
from benchmarks.serving.arms import ARMS, OFF, PYTHON, RUST
from benchmarks.serving.picture import draw

_TIMES = ("ttft_reuse_s", "ttft_first_s", "ttft_s", "hop_s", "workflow_s", "tpot_s")
_POINTS = ("p50", "p90", "p95", "p99")
_RATIOS = ("ttft_p50_ratio", "ttft_p99_ratio", "workflow_ratio")
_MEANING = {
    "ttft_reuse_s": "TTFT, hops that reread",
    "ttft_first_s": "TTFT, first readers",
    "ttft_s": "TTFT, all hops",
    "hop_s": "hop, end to end",
    "workflow_s": "workflow, end to end",
    "tpot_s": "time per output token",
}


def write_reports(folder: Path, found: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write all files of the report.

    Args:
        found: by phase, as `Benchmark.found`; what is missing is not mentioned.
        about: plan, machine, time, and what was left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = _without_runs({**summary(found), **about, "phases": dict(found)})
    (folder / "serving.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    pictures = draw(found, folder)
    blocks = list(_blocks(found, about, pictures))
    (folder / "serving.md").write_text(markdown(blocks), encoding="utf-8")
    (folder / "serving.html").write_text(html_page("Serving: ours against stock SGLang", blocks), encoding="utf-8")


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that comparisons are made with; None is not measured. Ratios are ours over stock."""
    poisson, saturation = found.get("poisson70") or {}, found.get("saturation") or {}
    plain = (found.get("plain") or {}).get("all") or {}

    def median(name: str) -> float | None:
        ratio = plain.get(name)
        return None if ratio is None else ratio["value"]

    return {
        "poisson70": {
            **{name: poisson.get(name) for name in _RATIOS},
            "intervals": poisson.get("intervals"),
            "rate_per_s": poisson.get("rate_per_s"),
            "reuse_hops": _reuse_hops(poisson),
        },
        "saturation": {
            "throughput_ratio": saturation.get("throughput_ratio"),
            "range": saturation.get("throughput_ratio_range"),
            "workflows_per_s": saturation.get("workflows_per_s"),
        },
        "plain_overhead_vs_python_tree": median("ours_vs_python_tree"),
        "plain_overhead_vs_rust_tree": median("ours_vs_rust_tree"),
        "plain_overhead_intervals": plain or None,
        "bounds": poisson.get("bounds"),
    }


def headline(found: Mapping[str, Any]) -> list[str]:
    """The summary in sentences, with the bound beside each figure."""
    figures = summary(found)
    poisson, bound = figures["poisson70"], figures["bounds"] or {}
    lines = []
    if poisson["ttft_p50_ratio"] is not None:
        for name, what in zip(
            _RATIOS, ("TTFT of hops that reread, p50", "TTFT of hops that reread, p99", "workflow time"), strict=True
        ):
            ends = poisson["intervals"][name]
            lines.append(
                f"Poisson at 70 % of stock's limit, {what}: {poisson[name]:.2f} of stock's "
                f"(95 % interval {ends['low']:.2f} to {ends['high']:.2f}; token arithmetic allows {bound[name]:.2f})."
            )
    if figures["saturation"]["throughput_ratio"] is not None:
        lines.append(
            f"At saturation: {figures['saturation']['throughput_ratio']:.2f} times stock's workflows per second "
            f"(token arithmetic allows {bound.get('throughput_ratio', float('nan')):.2f})."
        )
    for name, what in (("python", "Python"), ("rust", "Rust")):
        value = figures[f"plain_overhead_vs_{name}_tree"]
        if value is not None:
            ends = figures["plain_overhead_intervals"][f"ours_vs_{name}_tree"]
            lines.append(
                f"Plain traffic against stock with the {what} tree: {value:+.2%} "
                f"(95 % interval {ends['low']:+.2%} to {ends['high']:+.2%})."
            )
    return lines


def _blocks(found: Mapping[str, Any], about: Mapping[str, Any], pictures: Sequence[Path]) -> Iterator[Block]:
    machine = about["machine"]
    yield Heading("Serving: ours against stock SGLang", 1)
    yield Text(
        f"Profile {about['profile']}, {about['seconds']:.0f} s, {machine['cores']} cores, load "
        f"{machine['load_average_1min']:.1f} at the end. Every arm on a server of its own, in turns, with the same "
        "prompts; ratios are ours over stock SGLang with its Rust tree. A bound is what token arithmetic allows: spans "
        "that were read before cost nothing, waiting and decoding are left out."
    )
    if about["kept_from_an_earlier_run"]:
        yield Text(
            f"Measured in an earlier run, which this one resumed: {', '.join(about['kept_from_an_earlier_run'])}."
        )
    for line in headline(found):
        yield Text(line)
    for path in pictures:
        yield Picture(path, path.stem)
    if found.get("saturation"):
        yield from _saturation_blocks(found["saturation"])
    if found.get("poisson70"):
        yield from _poisson_blocks(found["poisson70"])
    if found.get("plain"):
        yield from _plain_blocks(found["plain"])
    if found.get("load_client"):
        yield from _load_blocks(found["load_client"])
    for name, points in (found.get("sweeps") or {}).items():
        if points:
            yield Heading(f"Sweep: {name.replace('_', ' ')}")
            yield _sweep_table(name, points)
    if found.get("scaling"):
        yield from _scaling_blocks(found["scaling"])
    second = found.get("second_model")
    if second:
        yield Heading("A second model shape, for time only")
        yield Text(f"{second['model']}; every span is reused, one hop at a time.")
        yield _sweep_table("document tokens", [{"x": about["plan"]["second_document"], **second}])
    if found.get("peers"):
        yield Heading("Other systems")
        rows = [(peer["name"], peer["what"], peer["command"], peer["why"]) for peer in found["peers"]]
        yield Table(("system", "what it reuses", "tried with", "result"), tuple(rows))
        for peer in found["peers"]:
            if peer["row"]:
                yield _times_table([peer["row"]])
    if about["left_out"]:
        yield Heading("Not measured")
        yield Text("Left out because the time was over: " + "; ".join(about["left_out"]) + ".")


def _saturation_blocks(saturation: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("Saturation (closed loop)")
    rows = [
        (_label(row["arm"]), str(row["level"]), str(row["repeat"]), _shown(row["workflows_per_s"], ".4f"),
         _shown(row["requests_per_s"], ".3f"), _shown(row["tokens"]["reuse_share"], ".0%"))
        for row in saturation["rows"]
    ]  # fmt: skip
    yield Table(("arm", "at once", "repeat", "workflows / s", "requests / s", "reuse share"), tuple(rows))


def _poisson_blocks(poisson: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("Poisson arrivals at 70 % of stock's limit")
    slo = poisson["slo"]
    yield Text(
        f"{poisson['rate_per_s']:.4f} workflows a second. A request is good if its first token comes within "
        f"{slo['ttft_s']:.1f} s and later ones take {slo['tpot_s']:.1f} s or less."
    )
    yield _times_table(poisson["rows"])
    yield _server_table(poisson["rows"])
    spans: dict[str, Counter[str]] = {}
    for row in poisson["rows"]:
        if row["spans"]:
            spans.setdefault(row["arm"], Counter()).update(row["spans"])
    for arm, reasons in spans.items():
        yield Text(
            f"Spans, {_label(arm)}: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items()) + "."
        )


def _times_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    lines = [
        (f"{label}: {_MEANING[name]}", *(_shown(row[name][point], ".3f") for point in _POINTS))
        for name in _TIMES
        for label, row in _labelled(rows)
        if row[name] is not None
    ]
    return Table(("seconds", *_POINTS), tuple(lines))


def _server_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    lines = []
    for label, row in _labelled(rows):
        tokens, server = row["tokens"], row["server"]
        lines.append(
            (
                label,
                _shown(row["workflows_per_s"], ".4f"),
                _shown(row["goodput_per_s"], ".3f"),
                _shown(row["slo_attainment"], ".0%"),
                *(_shown(tokens[name], ",") for name in ("exact", "corrected", "computed")),
                _shown(tokens["reuse_share"], ".0%"),
                _shown(server["peak_slots"], ","),
                _shown(server["own_delta_bytes"], ","),
                _shown(
                    None if server["state_bytes"] is None else server["state_bytes"] - server["own_delta_bytes"], ","
                ),
                *(_shown(row[name] if server["seconds"] else None, ".1%") for name in ("request_share", "idle_share")),
                str(row["failed"]),
            )
        )
    columns = ("arm", "workflows / s", "goodput / s", "inside SLO", "exact", "corrected", "computed", "reuse share",
               "peak KV slots", "own delta bytes", "estimator bytes", "our time, requests", "our time, idle",
               "failed")  # fmt: skip
    return Table(columns, tuple(lines))


def _plain_blocks(plain: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("Plain traffic")
    yield Text(
        "Each prompt on all arms right after one another: cold prompts, and next turns whose history is an exact hit. "
        "Median of the ratio per prompt, minus 1, with its 95 % interval."
    )
    rows = []
    for group in ("all", "cold", "next_turn"):
        for name, ratio in plain.get(group, {}).items():
            if ratio is not None:
                ends = f"{ratio['low']:+.2%} to {ratio['high']:+.2%}"
                rows.append((f"{group.replace('_', ' ')}: {name.replace('_', ' ')}", f"{ratio['value']:+.2%}", ends))
    yield Table(("comparison", "overhead", "interval"), tuple(rows))
    lines = [
        (kind.replace("_", " "), *(f"{seconds[arm]:.4f}" for arm in (RUST, PYTHON, OFF)))
        for kind, seconds in plain["median_seconds"].items()
    ]
    yield Table(("median seconds", *(_label(arm) for arm in (RUST, PYTHON, OFF))), tuple(lines))


def _load_blocks(load: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("Plain traffic with SGLang's own load client")
    rows = [
        (against.replace("_", " "), *(f"{value:.3f}" for value in ratio.values()))
        for against, ratio in load["ratios"].items()
    ]
    yield Table(("median over repeats", *next(iter(load["ratios"].values()))), tuple(rows))


def _sweep_table(name: str, points: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for point in points:
        found = {row["arm"]: row for row in point["rows"]}
        stock, ours = found[RUST], found["ours"]
        best = point["bounds"] or {}
        rows.append(
            (
                f"{point['x']:g}",
                *(_shown((row["ttft_reuse_s"] or row["ttft_s"])["p50"], ".3f") for row in (stock, ours)),
                *(f"{_shown(point[ratio], '.2f')} ({_shown(best.get(ratio), '.2f')})" for ratio in _RATIOS),
                _shown(ours["tokens"]["reuse_share"], ".0%"),
                *(_shown(row["server"]["peak_slots"], ",") for row in (stock, ours)),
                _shown(ours["server"]["state_bytes"], ","),
            )
        )
    columns = (name.replace("_", " "), "TTFT stock s", "TTFT ours s", "TTFT p50 (bound)", "TTFT p99 (bound)",
               "workflow (bound)", "reuse share", "slots stock", "slots ours", "state bytes")  # fmt: skip
    return Table(columns, tuple(rows))


def _scaling_blocks(scaling: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("Does it stay flat?")
    yield Text(
        "Last windows over early ones; 1 is flat. `ours_ms`: the scheduler's thread in our code, per request. State is "
        "kept per pair of agents that follow one another (`edge_bytes`), up to --kvcmas-state-bytes."
    )
    trends = {name: trend for name, trend in scaling["documents"]["trend"].items() if trend}
    if trends:
        told = (f"{name} {one['value']:+.1%} ({one['low']:+.1%} to {one['high']:+.1%})" for name, one in trends.items())
        yield Text(f"Trend over all documents after the first window, and its 95 % interval: {', '.join(told)}.")
    rows = []
    for kind in ("documents", "roles"):
        found = scaling[kind]
        ratio = found["ratio"]
        rows.append((f"{found['from']} to {found['to']} {kind}", *(_shown(ratio[name], ".2f") for name in ratio)))
    yield Table(("from, to", *scaling["documents"]["ratio"]), tuple(rows))
    names = ("documents", "roles", "request_ms", "ours_ms", "match_ms", "learn_ms", "state_bytes", "edges", "sources")
    windows = scaling["windows"]
    step = max(1, len(windows["documents"]) // 8)
    shown = [*windows["documents"][::step], windows["documents"][-1], *windows["roles"]]
    yield Table(names, tuple(tuple(f"{window[name]:,.4g}" if isinstance(window[name], float) else f"{window[name]:,}"
                                   for name in names) for window in shown))  # fmt: skip


def _reuse_hops(poisson: Mapping[str, Any]) -> int | None:
    rows = [row for row in poisson.get("rows", ()) if row["arm"] == "ours"]
    return sum(hop["reuses"] for row in rows for hop in row["run"]["hops"]) if rows else None


def _without_runs(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_runs(item) for name, item in value.items() if name not in ("run", "pairs")}
    return [_without_runs(item) for item in value] if isinstance(value, list | tuple) else value


def _labelled(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Rows by arm, and an arm's own in the order of its runs, which are numbered where there are several."""
    arms = [row["arm"] for row in rows]
    found = []
    for arm in dict.fromkeys(arms):
        runs = [row for row in rows if row["arm"] == arm]
        numbers = (f" ({number})" if len(runs) > 1 else "" for number in range(1, len(runs) + 1))
        found += [(_label(arm) + number, row) for number, row in zip(numbers, runs, strict=True)]
    return found


def _label(arm: str) -> str:
    return ARMS[arm].label if arm in ARMS else arm


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
