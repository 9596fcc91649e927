"""What an operator sees and switches, on the tree: the edge table, the counters, the metrics, the modes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcmas_sgl.radix_ext.edge_table import MAX_ROWS
from kvcmas_sgl.radix_ext.estimators import Edge
from kvcmas_sgl.radix_ext.gate import MIN_PAIRS
from kvcmas_sgl.radix_ext.sources import edge
from prometheus_client import CollectorRegistry
from sglang.srt.managers.io_struct import GetInternalStateReqOutput, SetInternalStateReq, SetInternalStateReqOutput

from kvcmas_sgl import metrics
from kvcmas_sgl.seams.scheduler import after_get_internal_state, around_set_internal_state
from kvcmas_sgl.switches import Switches
from tests.tree.harness import CRITIC, PLANNER, Tree, document, learned, sources_of

N = len(document(0))


def table(tree: Tree) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["source"], row["consumer"], row["estimator"]): row for row in tree.cache.state()["edge_table"]}


def learned_edge(tree: Tree, seed: int = 0) -> Edge:
    critic, planner = (source.agent for source in sources_of(tree, document(seed)))
    assert critic is not None and planner is not None
    return edge(planner, critic)


def test_the_edge_table_says_what_the_gate_knows_and_what_was_reused() -> None:
    tree = Tree()
    learned(tree)
    on = learned_edge(tree)
    before = table(tree)["planner", "critic", "affine"]
    PLANNER.read(tree, document(9))
    report = CRITIC.read(tree, document(9))
    assert report["reason"] == "reused"
    row = table(tree)["planner", "critic", "affine"]
    expected = tree.cache.gate.expect(on, "affine", N)
    assert expected is not None and row["predicted_error"] == expected.error and row["predicted_kl"] == expected.kl
    assert (row["source_place"], row["consumer_place"], row["tokens"]) == ("first", "first", N)
    assert row["corrected_tokens"] - before["corrected_tokens"] == report["corrected_tokens"] > 0
    assert row["pairs"] == tree.cache.gate.pairs(on, "affine") and row["audits"] == 0 and row["audited_kl"] is None
    assert row["state_bytes"] == tree.cache.estimators["affine"].edge_bytes(on) > 0


def test_the_counters_add_up_to_the_reports() -> None:
    tree = Tree()
    reports = [role.read(tree, document(seed)) for seed in range(4) for role in (PLANNER, CRITIC)]
    state = tree.cache.state()
    assert [row["role"] for row in state["roles"]] == ["critic", "planner"]
    for row in state["roles"]:
        own = [report for report in reports if report["role"] == row["role"]]
        assert row["requests"] == len(own)
        for kind in ("exact_tokens", "corrected_tokens", "computed_tokens"):
            assert row[kind] == sum(report[kind] for report in own)
    # Nothing can be vouched for before two pairs; every later one had a prediction to be held against.
    ways = [row for row in state["edge_table"] if row["consumer"] == "critic"]
    held = state["held_out_errors"]
    assert held["unpredicted"] == sum(min(row["pairs"], MIN_PAIRS) for row in ways)
    assert held["inside"] + held["above"] == sum(max(row["pairs"] - MIN_PAIRS, 0) for row in ways)


def test_the_table_is_bounded() -> None:
    tree = Tree()
    for number in range(MAX_ROWS + 10):
        tree.cache.gate.record(Edge("s", f"r{number}#d@first", "c#d@first"), "affine", squared_error=0.1, tokens=10)
    rows = tree.cache.state()["edge_table"]
    assert [row["source"] for row in rows] == [f"r{number}" for number in range(MAX_ROWS + 9, 9, -1)]


def values(registry: CollectorRegistry) -> Mapping[tuple[str, str], float]:
    """By name of the sample and its only label's value."""
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {(sample.name, "".join(sample.labels.values())): sample.value for sample in samples}


def test_metrics_are_the_totals() -> None:
    tree, registry = Tree(), CollectorRegistry()
    metrics.export(tree.cache, registry)
    learned(tree)
    PLANNER.read(tree, document(9))
    CRITIC.read(tree, document(9))
    state, seen = tree.cache.state(), values(registry)
    assert seen["kvcmas:requests_total", "false"] == state["requests"] == 12
    for kind in ("exact", "corrected", "computed"):
        assert seen["kvcmas:prompt_tokens_total", kind] == state[f"{kind}_tokens"]
    for reason, count in state["reasons"].items():
        assert seen["kvcmas:spans_total", reason] == count
    for outcome, count in state["held_out_errors"].items():
        assert seen.get(("kvcmas:held_out_total", outcome), 0) == count
    assert seen["kvcmas:state_bytes", "own_deltas"] == state["own_delta_bytes"] > 0
    assert seen["kvcmas:state_bytes", "estimators"] == state["state_bytes"] - state["own_delta_bytes"] > 0
    assert seen["kvcmas:seconds_total", "learn"] == pytest.approx(state["learn_seconds"]) and state["learn_seconds"] > 0
    assert seen["kvcmas:source_tokens", ""] == state["source_tokens"] and seen["kvcmas:learning_jobs", ""] == 0
    assert seen["kvcmas:predicted_kl_count", ""] == state["reasons"]["reused"]
    assert (seen["kvcmas:mode", "on"], seen["kvcmas:mode", "off"], seen["kvcmas:max_kl", ""]) == (1, 0, 0.05)
    tree.cache.switch(Switches("off", 0.01))
    seen = values(registry)
    assert (seen["kvcmas:mode", "on"], seen["kvcmas:mode", "off"], seen["kvcmas:max_kl", ""]) == (0, 1, 0.01)


def test_audits_and_checks_reach_the_metrics() -> None:
    tree, registry = Tree(), CollectorRegistry()
    metrics.export(tree.cache, registry)
    tree.cache.statistics.held_out(None, error=0.1, kl=0.004)
    seen = values(registry)
    assert seen["kvcmas:audits_total", "unpredicted"] == 1 and seen["kvcmas:audited_kl_sum", ""] == 0.004
    totals = tree.cache.statistics
    totals.images_encoded, totals.images_encoded_idle, totals.images_corrected = 5, 3, 8
    totals.changed()
    kinds = {label: value for (name, label), value in values(registry).items() if name == "kvcmas:images_total"}
    assert kinds == {"encoded": 5, "encoded_idle": 3, "corrected": 8}
    tree.cache.statistics.checked(0.006, over_budget=False)
    tree.cache.statistics.checked(0.1, over_budget=True)
    seen = values(registry)
    assert seen["kvcmas:checks_total", "inside"] == seen["kvcmas:checks_total", "above"] == 1
    assert seen["kvcmas:checked_kl_sum", ""] == pytest.approx(0.106)


def test_dense_only_learning_reuses_nothing_and_learns_on() -> None:
    tree = Tree()
    learned(tree)
    on = learned_edge(tree)
    tree.cache.switch(Switches("learn", 0.05))
    spans = tree.cache.estimators["affine"].spans_seen(on)
    PLANNER.read(tree, document(9))
    report = CRITIC.read(tree, document(9))
    assert (report["reason"], report["corrected_tokens"]) == ("declined", 0)
    assert tree.cache.estimators["affine"].spans_seen(on) == spans + 1
    # Its own exact KV is no reuse that could be declined.
    assert CRITIC.read(tree, document(9))["reason"] == "exact"
    tree.cache.switch(Switches("on", 0.05))
    PLANNER.read(tree, document(10))
    assert CRITIC.read(tree, document(10))["reason"] == "reused"


def test_a_server_that_was_started_to_learn_can_be_switched_on() -> None:
    tree = Tree(policy="learn")
    learned(tree)
    assert tree.cache.statistics.corrected_tokens == 0
    tree.cache.switch(Switches("on", 0.05))
    PLANNER.read(tree, document(9))
    assert CRITIC.read(tree, document(9))["reason"] == "reused"


def test_off_drops_what_waits_and_keeps_what_was_learned() -> None:
    tree = Tree()
    learned(tree)
    on = learned_edge(tree)
    spans = tree.cache.estimators["affine"].spans_seen(on)
    PLANNER.read(tree, document(9))
    CRITIC.read(tree, document(9), settle=False, reuse="never")
    assert len(tree.cache.learner) > 0
    tree.cache.switch(Switches("off", 0.05))
    assert len(tree.cache.learner) == 0 and tree.cache.statistics.jobs_dropped > 0
    # A request that was under way at the switch.
    CRITIC.read(tree, document(10), settle=False)
    assert len(tree.cache.learner) == 0 and not tree.cache.learner.step()
    tree.cache.switch(Switches("on", 0.05))
    assert tree.cache.estimators["affine"].spans_seen(on) == spans
    PLANNER.read(tree, document(11))
    assert CRITIC.read(tree, document(11))["reason"] == "reused"


def test_a_prompt_in_the_middle_of_its_chunks_is_computed_from_the_switch_on() -> None:
    tree = Tree()
    learned(tree)
    PLANNER.read(tree, document(9))
    prompt = CRITIC.prompt(document(9))
    req = tree.request(prompt, CRITIC.hint(document(9)))
    middle = len(CRITIC.prefix) + N // 2
    tree.admit(req, upto=middle)
    assert len(tree.computed) < middle and req.kvcmas.pieces
    tree.cache.switch(Switches("off", 0.05))
    tree.chunk(req, len(prompt))
    assert tree.computed == list(range(middle, len(prompt)))
    tree.finish(req)
    tree.check()


def test_a_lowered_budget_holds_for_what_was_corrected_before() -> None:
    tree = Tree()
    learned(tree)
    PLANNER.read(tree, document(9))
    first = CRITIC.read(tree, document(9))
    assert first["reason"] == "reused"
    assert CRITIC.read(tree, document(9))["reason"] == "own_corrected"
    tree.cache.switch(Switches("on", first["predicted_kl"] / 100))
    req = tree.request(CRITIC.prompt(document(9)), CRITIC.hint(document(9)))
    tree.admit(req)
    assert set(range(len(CRITIC.prefix), len(req.origin_input_ids))) <= set(tree.computed)
    assert req.kvcmas.report.reason == "over_budget"
    for held, true in zip(tree.held(req), tree.expected(req), strict=True):
        assert torch.equal(held, true)
    tree.finish(req)
    tree.learn()
    tree.check()
    # The dense run's KV took the corrected one's place.
    assert CRITIC.read(tree, document(9))["reason"] == "exact"


def test_a_decision_is_logged_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    tree = Tree(log_decisions="all")
    learned(tree)
    PLANNER.read(tree, document(9))
    with caplog.at_level(logging.INFO, logger="kvcmas_sgl.radix_ext.cache"):
        report = CRITIC.read(tree, document(9))
    (line,) = [record.getMessage() for record in caplog.records if "request" in record.getMessage()]
    assert f'request "r{tree.served}" role="critic" reason=reused' in line and "budget=0.05;" in line
    assert f'source="planner" estimator={report["estimator"]}' in line
    assert f"corrected={report['corrected_tokens']} computed={report['computed_tokens']} " in line


def test_a_message_that_is_not_only_ours_is_left_to_sglang() -> None:
    tree, passed_on = Tree(), []

    def original(scheduler: object, message: SetInternalStateReq) -> SetInternalStateReqOutput:
        passed_on.append(message.server_args)
        return SetInternalStateReqOutput(updated=False)

    def send(**numbers: float) -> bool:
        message = SetInternalStateReq(server_args=numbers)
        return around_set_internal_state(original, SimpleNamespace(tree_cache=tree.cache), message).updated

    theirs = [{"pp_max_micro_batch_size": 8}, {"kvcmas_max_kl": 0.5, "pp_max_micro_batch_size": 8}, {}]
    assert [send(**numbers) for numbers in theirs] == [False] * 3 and passed_on == theirs
    assert not send(kvcmas_max_kl=11) and tree.cache.switches == Switches("on", 0.05)
    assert send(kvcmas_max_kl=0.5, kvcmas_mode=1) and tree.cache.switches == Switches("learn", 0.5)
    assert len(passed_on) == 3


def test_totals_that_cannot_be_read_do_not_end_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree()
    scheduler, result = SimpleNamespace(tree_cache=tree.cache), GetInternalStateReqOutput(internal_state={"tp_size": 1})
    monkeypatch.setattr(tree.cache.gate, "evidence", lambda limit: 1 // 0)
    after_get_internal_state(result, scheduler)
    assert result.internal_state == {"tp_size": 1} and tree.cache.statistics.fallbacks == 1
    monkeypatch.undo()
    after_get_internal_state(result, scheduler)
    assert result.internal_state["kvcmas"]["fallbacks"] == 1
