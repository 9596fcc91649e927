"""Two workers behind a client that routes by workflow: each learns for itself, and finds the sources that it made."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import requests

from kvcmas_sgl.demo.servers import ServerProcess, kvcmas_command
from tests.prompts import CRITIC, HEAD, PLANNER, Reader, document
from tests.ranks.small_llama import make_small_llama
from tests.ranks.test_tensor_parallel import settle

N = 200
WORKFLOWS = range(12)


def by_workflow(workflow: int) -> int:
    """The worker of a workflow, as a router that hashes its name would choose."""
    return zlib.crc32(f"workflow-{workflow}".encode()) % 2


def read(server: ServerProcess, reader: Reader, index: int) -> dict[str, Any]:
    span = document(index, N)
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    body = {"input_ids": reader.prompt(span), "kv_hints": reader.hint(span), "sampling_params": sampling}
    response = requests.post(server.url + "/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    settle(server)
    return dict(response.json()["meta_info"]["kvcmas"])


def test_requests_of_a_workflow_go_to_one_worker(tmp_path: Path) -> None:
    model = make_small_llama(tmp_path / "model")
    flags = ["--max-total-tokens", "9000", "--kvcmas-max-kl", "10", "--kvcmas-check-share", "0"]
    command = kvcmas_command(str(model), flags)
    with (
        ServerProcess("first", command, tmp_path / "first.log") as first,
        ServerProcess("second", command, tmp_path / "second.log") as second,
    ):
        workers = (first, second)
        for worker in workers:
            worker.wait_ready()
        seen: tuple[list[dict[str, Any]], ...] = ([], [])
        for workflow in WORKFLOWS:
            at = by_workflow(workflow)
            read(workers[at], PLANNER, workflow)
            seen[at].append(read(workers[at], CRITIC, workflow))
        for reports in seen:
            # One dense reading to learn from and two held-out ones each, as on a server of its own; then it corrects.
            assert [report["reason"] for report in reports[:3]] == ["edge_unknown"] * 3
            later = [(report["reason"], report["source"], report["corrected_tokens"]) for report in reports[3:]]
            assert len(later) >= 2 and set(later) == {("reused", "planner", N - HEAD)}
        # Round robin: the reader comes to the worker that has not read the document.
        read(first, PLANNER, 20)
        assert read(second, CRITIC, 20)["reason"] == "no_source"
