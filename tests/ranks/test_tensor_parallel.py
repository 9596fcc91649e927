"""Two ranks on the CPU: both take the same decisions, and clients get what one rank gives.

The weights are random: which words come is of no interest, so answers are compared by their logprobs.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from kvcmas_sgl.demo.servers import ServerProcess, kvcmas_command, server_environment
from tests.prompts import CRITIC, HEAD, PLANNER, Reader, document
from tests.ranks.small_llama import make_small_llama

N = 200
ALONE, TOGETHER = range(8), range(8, 24)
JUDGE = Reader("judge", "You judge what others wrote, and you never take sides.")
READERS = (PLANNER, CRITIC, JUDGE)
LINE = re.compile(r"\bTP(\d)\b.*\] kvcmas: (request \"([^\"]+)\".*)$")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_llama(tmp_path_factory.mktemp("model"))


def serve(model: Path, log: Path, ranks: int) -> ServerProcess:
    flags = ["--tp-size", str(ranks), "--max-total-tokens", "9000", "--kvcmas-log-decisions", "all"]
    flags += ["--kvcmas-max-kl", "10", "--random-seed", "1"]
    # SGLang binds each rank to cores of its own, and by itself only to those of a NUMA node.
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank * len(cores) // ranks]) for rank in range(ranks))
    environment = {**server_environment(), "SGLANG_CPU_OMP_THREADS_BIND": bound}
    return ServerProcess(f"{ranks} ranks", kvcmas_command(str(model), flags), log, environment=environment)


def ask(server: ServerProcess, prompt: list[int], **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **fields}
    response = requests.post(server.url + "/generate", json=body, timeout=300)
    assert response.status_code == 200, response.text
    meta: dict[str, Any] = response.json()["meta_info"]
    return meta


def read(server: ServerProcess, reader: Reader, index: int, question: str = "What is this about?") -> dict[str, Any]:
    span = document(index, N)
    return ask(
        server, reader.prompt(span, question), kv_hints=reader.hint(span), rid=f"{reader.role}-{index}-{question}"
    )


def settle(server: ServerProcess) -> dict[str, Any]:
    deadline = time.monotonic() + 180
    while True:
        (state,) = requests.get(server.url + "/kvcmas/stats", timeout=60).json()["ranks"]
        if not state["learning"]:
            return dict(state)
        assert time.monotonic() < deadline, "learning never ended"
        time.sleep(0.1)


def alone(server: ServerProcess) -> tuple[list[dict[str, Any]], list[float]]:
    """Reports of requests one after another, and the logprob of each one's first token; plain ones at the end."""
    metas = []
    for index in ALONE:
        for reader in READERS:
            metas.append(read(server, reader, index))
            settle(server)
    plain = [ask(server, document(index, 150)) for index in ALONE]
    return [meta["kvcmas"] for meta in metas], [m["output_token_logprobs"][0][0] for m in (*metas, *plain)]


def decisions(log: Path) -> Iterator[tuple[str, str, str]]:
    for line in log.read_text().splitlines():
        found = LINE.search(line)
        if found:
            yield found[1], found[3], found[2]


def test_two_ranks_decide_alike_and_answer_as_one(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path / "two.log", 2) as server:
        server.wait_ready()
        reports, logprobs = alone(server)
        todo = [(r, i, q) for q in ("Why?", "Who?", "When?", "Where?") for i in TOGETHER for r in READERS][:176]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda one: read(server, *one), todo))
        state = settle(server)
    assert state["requests"] == len(reports) + len(todo) == 200
    assert state["fallbacks"] == 0 and state["corrected_tokens"] > 0 and state["audits"] > 0
    by_rank: dict[str, dict[str, str]] = {}
    for rank, rid, line in decisions(tmp_path / "two.log"):
        by_rank.setdefault(rank, {})[rid] = line
    assert set(by_rank) == {"0", "1"} and len(by_rank["0"]) == 200
    assert by_rank["0"] == by_rank["1"]

    with serve(model, tmp_path / "one.log", 1) as server:
        server.wait_ready()
        expected, expected_logprobs = alone(server)
    kinds = [(report["reason"], report["corrected_tokens"]) for report in reports]
    assert kinds == [(report["reason"], report["corrected_tokens"]) for report in expected]
    assert ("reused", N - HEAD) in kinds
    off = [abs(a - b) for a, b in zip(logprobs, expected_logprobs, strict=True)]
    agents, plain = max(off[: -len(ALONE)]), max(off[-len(ALONE) :])
    print(
        f"largest difference of a first token's logprob, two ranks against one: agents {agents:.3f}, plain {plain:.3f}"
    )
    assert max(agents, plain) < 0.1
