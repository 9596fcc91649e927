"""Automatic mode on the real engine: nothing is annotated, plain traffic stays as it is, learned edges are reused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvcmas_sgl
from kvcmas_sgl.prepare_model import default_model
from kvcmas_sgl.wire import OPT_OUT, hint_envelope
from tests.engine.conftest import COMMON, greedy, plain_prompts, settle
from tests.prompts import CRITIC, HEAD, PLANNER, document

N = 400


@pytest.fixture(scope="module")
def auto(stock_answers: list[list[int]]) -> Iterator[Any]:
    """Another engine, with automatic mode. This module comes last: SGLang's shutdown ends all children of a process."""
    import sglang as sgl

    settings = kvcmas_sgl.engine_args(auto=True, max_kl=0.3)
    running = sgl.Engine(model_path=str(default_model()), **COMMON, **settings)
    try:
        yield running
    finally:
        running.shutdown()


def test_plain_traffic_still_gets_stocks_answers(auto: Any, stock_answers: list[list[int]]) -> None:
    for index, (prompt, answer) in enumerate(zip(plain_prompts(), stock_answers, strict=True)):
        out = greedy(auto, prompt)
        assert out["output_ids"] == answer, f"prompt {index}"
        assert out["meta_info"]["kvcmas"]["corrected_tokens"] == 0


def test_unannotated_agents_are_corrected_after_the_learning_phase(auto: Any) -> None:
    auto.flush_cache()
    reports = []
    for index in range(5):
        text = document(index)[:N]
        greedy(auto, PLANNER.prompt(text), 1)
        reports.append(greedy(auto, CRITIC.prompt(text), 1)["meta_info"]["kvcmas"])
        settle(auto)
    assert [report["corrected_tokens"] for report in reports[:2]] == [0, 0]
    assert reports[-1]["auto"] and reports[-1]["reason"] == "reused"
    # The question is the same for both agents, so it counts as shared with what stands before it.
    assert reports[-1]["corrected_tokens"] >= N - HEAD
    found = settle(auto)
    assert found["fallbacks"] == 0 and found["checks"] >= 1
    assert 0 < found["checked_kl"] / found["checks"] <= 0.3


def test_a_request_can_opt_out(auto: Any) -> None:
    text = document(4)[:N]
    out = greedy(auto, CRITIC.prompt(text), 1, kv_hints=hint_envelope(OPT_OUT))
    assert "kvcmas" not in out["meta_info"] and out["meta_info"]["cached_tokens"] == 0
