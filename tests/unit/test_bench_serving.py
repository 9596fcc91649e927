"""The pure parts of `benchmarks/serving`: bounds, intervals, overheads, plans, flatness, pages, the whole report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.serving.__main__ import make_plan, parser
from benchmarks.serving.agents import comparison, ratios
from benchmarks.serving.arms import ANCHORS, ARMS, EXTRAS, KVCOMM, OFF, OURS, PYTHON, ROTATE, RUST
from benchmarks.serving.bootstrap import paired_ratio
from benchmarks.serving.bounds import bounds, least_tokens, stock_tokens
from benchmarks.serving.load_client import LoadRun, load_client_figures
from benchmarks.serving.peers import last_error
from benchmarks.serving.plain import Pair, overhead, plain_figures
from benchmarks.serving.plan import Clock
from benchmarks.serving.report import headline, summary, write_reports
from benchmarks.serving.scaling import Window, scaling_figures
from benchmarks.serving.session import Measured, PromptsDiffer, ServerSide, check_prompts
from benchmarks.workload.endpoint import Reply
from benchmarks.workload.runner import HopResult, Run

_NOTHING = ServerSide(None, {}, None, None, None, None, None)


def _hop(flow: str, name: str, ttft: float, reusable: bool) -> HopResult:
    """100 tokens: a head of 10, a document of 60, an answer of 10 that nobody has read, 20 of its own."""
    reply = Reply(ttft, ttft + 1.0, 6, exact=10, corrected=60 if reusable else 0)
    return HopResult(flow, name, "r", 0.0, 100, ((10, 70), (75, 85)), (reusable, False), 10, reply)


def _measured(arm: str, ttft: dict[str, tuple[float, float]], prompts: str = "p") -> Measured:
    hops = tuple(
        hop
        for flow, (first, second) in ttft.items()
        for hop in (_hop(flow, "a", first, False), _hop(flow, "b", second, True))
    )
    seconds = {flow: first + second + 2.0 for flow, (first, second) in ttft.items()}
    return Measured(arm, Run(hops, seconds, 10.0, prompts, ()), _NOTHING)


def test_bounds_count_what_a_prefix_cache_computes_and_what_is_left_without_read_spans():
    first, second = _hop("w", "a", 1.0, False), _hop("w", "b", 1.0, True)
    assert (stock_tokens(first), least_tokens(first)) == (90, 90)
    assert (stock_tokens(second), least_tokens(second)) == (90, 30)
    best = bounds([first, second, second])
    assert best is not None
    assert best.ttft_p50_ratio == pytest.approx(1 / 3)
    assert best.workflow_ratio == pytest.approx((90 + 30 + 30) / 270)
    assert best.throughput_ratio == pytest.approx(270 / 150)
    assert bounds([first]) is None
    # Stock had read the document itself: nothing is left to gain.
    cached = replace(second, reply=replace(second.reply, computed=25))
    assert (stock_tokens(cached), least_tokens(cached)) == (25, 25)


def test_ratios_compare_the_same_workflows_over_hops_that_reread():
    stock = _measured(RUST, {"u": (4.0, 8.0), "v": (4.0, 6.0), "w": (4.0, 4.0)})
    ours = _measured(OURS, {"u": (4.0, 1.0), "v": (9.0, 3.0), "w": (9.0, 2.0)})
    found = ratios([stock, ours], OURS)
    assert found["ttft_p50_ratio"] == pytest.approx(2.0 / 6.0)
    assert found["ttft_p99_ratio"] == pytest.approx(np.percentile([1, 2, 3], 99) / np.percentile([4, 6, 8], 99))
    # Workflows take 14, 12, 10 and 7, 14, 13 seconds.
    assert found["workflow_ratio"] == pytest.approx(13 / 12)
    interval = found["intervals"]["ttft_p50_ratio"]
    assert interval["low"] <= found["ttft_p50_ratio"] <= interval["high"]
    assert ratios([stock], OURS)["ttft_p50_ratio"] is None
    # An arm that ran some of the workflows only, in another order, is compared on those.
    some = _measured(ROTATE, {"w": (4.0, 3.0), "u": (4.0, 2.0)})
    against = ratios([stock, ours, some], OURS, ROTATE)
    assert against["ttft_p50_ratio"] == pytest.approx(1.5 / 2.5) and against["workflow_ratio"] == pytest.approx(
        np.median([7.0, 13.0]) / np.median([9.0, 8.0])
    )


def test_different_prompts_are_refused():
    with pytest.raises(PromptsDiffer):
        check_prompts([_measured(RUST, {"w": (1, 1)}, "p"), _measured(OURS, {"w": (1, 1)}, "q")])
    check_prompts([_measured(RUST, {"w": (1, 1)}, "p"), _measured(OURS, {"w": (2, 2)}, "p")])


def test_the_interval_of_a_ratio_covers_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(3)
    covered = 0
    for trial in range(60):
        stock = [random.exponential(2.0, 3) for _ in range(30)]
        ours = [random.exponential(1.0, 3) for _ in range(30)]
        found = paired_ratio(ours, stock, np.mean, seed=trial)
        assert found is not None
        covered += found.low <= 0.5 <= found.high
    # 95 % of 60 is 57; fewer than 50 would be five standard deviations off.
    assert covered >= 50


def test_a_group_that_one_side_lacks_counts_on_neither():
    found = paired_ratio([[1.0], [], [3.0]], [[2.0], [100.0], [2.0]], np.mean)
    assert found is not None and found.value == pytest.approx(1.0)
    assert paired_ratio([[]], [[1.0]], np.mean) is None


def _pair(kind: str, ours: float, python: float, rust: float) -> Pair:
    seconds = {OFF: ours, PYTHON: python, RUST: rust}
    return Pair(kind, seconds, seconds, dict.fromkeys(seconds, 0))


def test_overhead_is_the_median_ratio_of_the_same_prompts():
    pairs = [_pair("cold", 1.1, 1.0, 0.5), _pair("cold", 2.0, 2.0, 1.0), _pair("next_turn", 3.06, 3.0, 3.0)]
    found = overhead(pairs, OFF, PYTHON)
    assert found is not None and found.value == pytest.approx(0.02)
    assert found.low <= found.value <= found.high
    only = overhead(pairs, OFF, RUST, "next_turn")
    assert only is not None and only.value == pytest.approx(0.02)
    figures = plain_figures(pairs)
    assert figures["all"]["python_tree_vs_rust_tree"]["value"] == pytest.approx(1.0)
    assert figures["median_seconds"]["cold"] == {RUST: 0.75, PYTHON: 1.5, OFF: pytest.approx(1.55)}


def test_the_load_clients_ratios_are_taken_in_the_same_repeat():
    def run(arm: str, repeat: int, value: float) -> LoadRun:
        names = ("duration", "completed", "request_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms")
        return LoadRun(arm, repeat, dict.fromkeys((*names, "median_e2e_latency_ms"), value))

    runs = [run(arm, n, value * (n + 1)) for arm, value in ((RUST, 2.0), (PYTHON, 4.0), (OFF, 3.0)) for n in range(3)]
    found = load_client_figures(runs)
    assert found["ratios"][f"ours_over_{PYTHON}"]["median_ttft_ms"] == pytest.approx(0.75)
    assert found["ratios"][f"ours_over_{RUST}"]["request_throughput"] == pytest.approx(1.5)
    assert found["medians"][OFF]["duration"] == pytest.approx(6.0)


def _window(documents: int, roles: int, ms: float, state: int) -> Window:
    return Window(documents, roles, 20, 100.0, ms, ms / 2, 1.0, state, 10, roles - 1, documents)


def test_flatness_is_the_late_windows_over_the_early_ones():
    documents = [_window(10 * n, 2, 5.0 if n == 1 else 1.0 + 0.1 * n, 100) for n in range(1, 11)]
    roles = [_window(100, 2, 2.0, 100), _window(100, 4, 3.0, 150)]
    found = scaling_figures({"documents": documents, "roles": roles})
    # Windows 8 to 10 over windows 2 to 4; the first is left out.
    assert found["documents"]["ratio"]["ours_ms"] == pytest.approx(1.9 / 1.3)
    assert found["documents"]["ratio"]["state_bytes"] == 1.0
    # 0.1 ms a window over eight windows, of a median of 1.6 ms.
    assert found["documents"]["trend"]["ours_ms"] == pytest.approx({"value": 0.5, "low": 0.5, "high": 0.5})
    # 90 bytes of one pair of agents; 140 of three.
    assert found["roles"]["ratio"] == pytest.approx(
        {"request_ms": 1.0, "ours_ms": 1.5, "match_ms": 1.5, "state_bytes": 1.5, "own_delta_bytes": 1.0,
         "edge_bytes": 140 / 3 / 90}
    )  # fmt: skip


def test_the_command_line_changes_the_plan_and_refuses_unknown_phases():
    plan = make_plan(parser().parse_args(["--quick", "--phases", "plain,poisson70", "--document-tokens", "300"]))
    assert (plan.document_tokens, plan.phases) == (300, ("plain", "poisson70"))
    assert plan.poisson_repeats == 1 and plan.extras
    with pytest.raises(ValueError, match="--phases names 'plane'"):
        make_plan(parser().parse_args(["--phases", "plane"]))


def test_a_clock_without_time_left_notes_what_it_leaves_out():
    clock = Clock(budget_s=1000.0)
    assert clock.has(100.0, "short") and not clock.has(1001.0, "long")
    assert len(clock.left_out) == 1 and clock.left_out[0].startswith("long")
    assert not clock.keeping(950.0).has(100.0, "shared") and clock.has(100.0, "its own")
    assert [text.split(":")[0] for text in clock.left_out] == ["long", "shared"]


def test_every_arm_but_the_off_one_has_its_own_server():
    keys = [arm.key for arm in ARMS.values()]
    assert sorted(keys) == sorted([RUST, PYTHON, OURS, OURS, *EXTRAS])
    assert ARMS[OFF].key == OURS and not ARMS[OFF].hints
    assert [name for name, arm in ARMS.items() if arm.learns] == [OURS, ANCHORS, KVCOMM]


def test_the_reason_of_a_failed_start_is_the_last_exception_of_the_log(tmp_path: Path):
    log = tmp_path / "peer.log"
    log.write_text("ValueError: first\nTraceback:\n  File x\nModuleNotFoundError: No module named 'lmcache'\nKilled\n")
    assert last_error(log, "otherwise") == "ModuleNotFoundError: No module named 'lmcache'"
    log.write_text("all is well\n")
    assert last_error(log, "not ready\nmore") == "not ready"


def _found() -> dict[str, Any]:
    from benchmarks.serving.agents import AgentBench

    bench = AgentBench.__new__(AgentBench)
    from benchmarks.workload.figures import Slo

    bench.slo = Slo(5.0, 0.5)
    measured = [
        _measured(RUST, {"v": (4.0, 6.0), "w": (4.0, 4.0)}),
        _measured(OURS, {"v": (4.0, 1.0), "w": (4.0, 1.0)}),
    ]
    rows = [bench.row(entry) for entry in measured]
    poisson = {"load": 0.7, "rate_per_s": 0.04, "slo": {"ttft_s": 5.0, "tpot_s": 0.5}, **comparison(measured),
               "rows": rows}  # fmt: skip
    saturation = {"throughput_ratio": 2.5, "throughput_ratio_range": [2.4, 2.6],
                  "workflows_per_s": {RUST: 0.05, OURS: 0.125},
                  "rows": [{"level": 2, "repeat": 0, **row} for row in rows]}  # fmt: skip
    windows = {"documents": [_window(10 * n, 2, 1.0, 100) for n in range(1, 7)], "roles": [_window(30, 2, 1.0, 100)]}
    return {
        "plain": plain_figures([_pair("cold", 1.01, 1.0, 1.0), _pair("next_turn", 1.01, 1.0, 1.0)]),
        "saturation": saturation,
        "poisson70": poisson,
        "sweeps": {"span_tokens": [{"x": 512, **poisson}], "agents": []},
        "scaling": scaling_figures(windows),
        "peers": [{"name": "p", "what": "w", "command": "c", "why": "it cannot", "row": None}],
    }


def test_the_reports_keys_are_those_that_others_read(tmp_path: Path):
    about = {"profile": "quick", "seconds": 1.0, "left_out": ["long: 9 s"], "kept_from_an_earlier_run": ["plain"],
             "plan": {"second_document": 0}, "machine": {"cores": 2, "load_average_1min": 0.5}}  # fmt: skip
    found = _found()
    write_reports(tmp_path, found, about)
    content = json.loads((tmp_path / "serving.json").read_text())
    assert content["poisson70"]["ttft_p50_ratio"] == pytest.approx(0.2)
    assert content["poisson70"]["reuse_hops"] == 2
    assert content["saturation"]["throughput_ratio"] == 2.5
    assert content["plain_overhead_vs_python_tree"] == pytest.approx(0.01)
    assert content["plain_overhead_vs_rust_tree"] == pytest.approx(0.01)
    assert content["bounds"]["ttft_p50_ratio"] == pytest.approx(1 / 3)
    # Raw requests are in the raw file.
    assert "run" not in content["phases"]["poisson70"]["rows"][0]
    text = (tmp_path / "serving.md").read_text()
    assert "ours_ms +0.0% (+0.0% to +0.0%)" in text and "resumed: plain." in text
    assert "it cannot" in text and "long: 9 s" in text and "0.20 of stock's" in text
    assert (tmp_path / "serving.html").read_text().count("data:image/png;base64,") == 3


def test_nothing_measured_is_nothing_claimed():
    assert headline({}) == []
    assert summary({})["poisson70"]["ttft_p50_ratio"] is None
