"""A real server with a state folder, ended by SIGTERM and by SIGKILL: the next one knows what it had learned.

In one test: every server takes its time to start, and each begins from what the one before has left.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import requests

from kvcmas_sgl.demo.servers import ServerProcess, kvcmas_command
from kvcmas_sgl.prepare_model import default_model
from kvcmas_sgl.state import load
from tests.prompts import CRITIC, HEAD, PLANNER, Reader, document

N, BUDGET = 300, 0.1


def serve(folder: Path, log: Path) -> ServerProcess:
    flags = ["--kvcmas-state-dir", str(folder), "--kvcmas-max-kl", str(BUDGET), "--kvcmas-check-share", "0"]
    return ServerProcess("server", kvcmas_command(str(default_model()), [*flags, "--max-total-tokens", "9000"]), log)


def read(server: ServerProcess, reader: Reader, index: int) -> dict[str, Any]:
    span = document(index, N)
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    body = {"input_ids": reader.prompt(span), "kv_hints": reader.hint(span), "sampling_params": sampling}
    response = requests.post(server.url + "/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    report: dict[str, Any] = response.json()["meta_info"]["kvcmas"]
    settled(server)
    return report


def settled(server: ServerProcess) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while True:
        response = requests.get(server.url + "/kvcmas/stats", timeout=60)
        (state,) = response.json()["ranks"]
        if not state["learning"]:
            return dict(state)
        assert time.monotonic() < deadline, "learning never ended"
        time.sleep(0.1)


def assert_corrected(server: ServerProcess, index: int) -> None:
    """The first workflow on a document that no server has seen."""
    assert read(server, PLANNER, index)["reason"] == "no_source"
    report = read(server, CRITIC, index)
    assert (report["reason"], report["corrected_tokens"]) == ("reused", N - HEAD)
    assert 0 < report["predicted_kl"] <= BUDGET


def test_what_was_learned_survives_sigterm_and_sigkill(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serve(folder, tmp_path / "first.log") as server:
        server.wait_ready()
        for index in range(4):
            read(server, PLANNER, index)
            read(server, CRITIC, index)
        before = settled(server)
        assert before["edges"]["affine"] > 0 and before["spans_learned"] > 0
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=60)
    kept = load(folder)
    assert sum(kept.estimators["affine"].spans_seen(edge) for edge in kept.edges) == before["spans_learned"]
    (file,) = folder.iterdir()

    with serve(folder, tmp_path / "second.log") as server:
        server.wait_ready()
        state = settled(server)
        assert state["edges"] == before["edges"]
        assert (state["sources"], state["state_refused"], state["fallbacks"]) == (0, 0, 0)
        assert_corrected(server, 8)
        # In the middle of whatever it does then, the whole process group.
        read(server, PLANNER, 9)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(timeout=60)

    # Saved or not since the start, the file is a whole one.
    load(folder)
    assert file in set(folder.iterdir())
    with serve(folder, tmp_path / "third.log") as server:
        server.wait_ready()
        state = settled(server)
        assert (state["edges"], state["state_refused"], state["fallbacks"]) == (before["edges"], 0, 0)
        assert_corrected(server, 10)
