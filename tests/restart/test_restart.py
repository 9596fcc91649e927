"""A warm restart: what one engine has learned, the next one knows before its first workflow.

In a process of its own: an engine's shutdown ends all children of a process, and an engine whose child died ends it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvcmas_sgl
from kvcmas_sgl.prepare_model import default_model
from kvcmas_sgl.state import load
from tests.engine.conftest import COMMON, greedy, settle, state
from tests.prompts import CRITIC, HEAD, PLANNER, Reader, document

N, BUDGET = 600, 0.1


def start(folder: Path) -> Any:
    import sglang as sgl

    settings = kvcmas_sgl.engine_args(state_dir=str(folder), max_kl=BUDGET, check_share=0.0)
    return sgl.Engine(model_path=str(default_model()), **COMMON, **settings)


def read(engine: Any, reader: Reader, index: int) -> dict[str, Any]:
    span = document(index)
    report = greedy(engine, reader.prompt(span), 2, kv_hints=reader.hint(span))["meta_info"]["kvcmas"]
    settle(engine)
    return report


def test_the_first_workflow_after_a_restart_is_corrected_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Settings travel in the environment: other tests' engines must not find these.
    monkeypatch.setenv("KVCMAS_CONFIG", "")
    folder = tmp_path / "state"
    engine = start(folder)
    try:
        for index in range(4):
            read(engine, PLANNER, index)
            read(engine, CRITIC, index)
        before = state(engine)
    finally:
        engine.shutdown()
    kept = load(folder)
    assert sum(kept.estimators["affine"].spans_seen(edge) for edge in kept.edges) == before["spans_learned"]
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600

    engine = start(folder)
    try:
        totals = state(engine)
        assert totals["edges"] == before["edges"] and totals["edges"]["affine"] > 0
        assert (totals["sources"], totals["spans_learned"], totals["state_refused"]) == (0, 0, 0)
        assert read(engine, PLANNER, 8)["reason"] == "no_source"
        report = read(engine, CRITIC, 8)
        assert (report["reason"], report["corrected_tokens"]) == ("reused", N - HEAD)
        assert 0 < report["predicted_kl"] <= BUDGET
        with capsys.disabled():
            print(f"\n  predicted KL of the first corrected prompt {report['predicted_kl']:.5f}")
        assert state(engine)["fallbacks"] == 0

        # Other weights: what was learned is dropped, and not saved in their name.
        saved = file.read_bytes()
        assert engine.update_weights_from_disk(str(default_model()))[0]
        assert state(engine)["edges"] == {"affine": 0}
        read(engine, PLANNER, 5)
        read(engine, CRITIC, 5)
    finally:
        engine.shutdown()
    assert file.read_bytes() == saved
