"""The demo's own arithmetic and housekeeping; what it measures is measured by running it."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvcmas_sgl.demo.client import PromptMaker
from kvcmas_sgl.demo.measure import Row, kl_divergence, summarize
from kvcmas_sgl.demo.report import summary_lines, table
from kvcmas_sgl.demo.roles import ROLES, InputError, load_documents, load_roles
from kvcmas_sgl.demo.servers import ServerError, ServerProcess, free_port
from kvcmas_sgl.prepare_model import default_model


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def test_kl_over_the_likeliest_tokens_is_a_lower_bound_that_tightens_to_the_full_kl():
    rng = np.random.default_rng(0)
    p, q = _log_softmax(rng.normal(0, 4, 500)), _log_softmax(rng.normal(0, 4, 500))
    full = float((np.exp(p) * (p - q)).sum())
    order = np.argsort(-p)
    bounds = []
    for top in (1, 10, 100, 500):
        tokens = [int(token) for token in order[:top]]
        bounds.append(kl_divergence({t: float(p[t]) for t in tokens}, {t: float(q[t]) for t in tokens}))
    assert bounds == sorted(bounds)
    assert bounds[0] > 0 and bounds[-2] < full
    assert bounds[-1] == pytest.approx(full, rel=1e-6)


def test_kl_of_a_distribution_to_itself_is_zero():
    same = {1: math.log(0.5), 2: math.log(0.3)}
    assert kl_divergence(same, {**same, 3: -9.0}) == pytest.approx(0.0, abs=1e-12)


def test_every_role_reads_the_same_document_tokens_inside_the_models_own_template():
    prompts = PromptMaker(str(default_model()))
    for document in load_documents([]):
        expected = prompts.tokens(document.text)
        for role in ROLES:
            prompt = prompts.prompt(role, document.text)
            start, end = prompt.span
            assert list(prompt.ids[start:end]) == expected
            before, after = prompts.text(prompt.ids[:start]), prompts.text(prompt.ids[end:])
            assert role.system in before and role.question in after


def test_the_documents_have_the_lengths_the_demo_needs_and_a_source_each():
    prompts = PromptMaker(str(default_model()))
    documents = load_documents([])
    lengths = [len(prompts.tokens(document.text)) for document in documents]
    # The first three are learned from; what is measured later is short (KL) and long (time).
    assert len(lengths) == 7
    assert all(500 <= length <= 1500 for length in lengths[:4])
    assert sum(2000 <= length <= 2500 for length in lengths[3:]) == 2
    sources = (Path(__file__).parents[2] / "kvcmas_sgl/demo/documents/SOURCES.md").read_text()
    assert "0*-problems.txt" in sources
    prose = sorted((Path(__file__).parents[2] / "kvcmas_sgl/demo/documents/prose").glob("*.txt"))
    assert prose and all(f"`{path.name}`" in sources for path in prose)


def _row(role: str, corrected: int, ratio: float, kl: float, rotate: float | None, noise: float | None) -> Row:
    return Row(
        document="doc", role=role, prompt_tokens=2500, span_tokens=2200, answer_tokens=16, exact=20,
        corrected=corrected, computed=2480 - corrected, source="planner" if corrected else None,
        reason="reused" if corrected else "no_source", predicted_kl=None, ttft_stock_s=ratio, ttft_ours_s=1.0,
        ttft_ratio=ratio, kl=kl, agreement=1.0, kl_rotate_only=rotate, kl_noise=noise, answer="",
    )  # fmt: skip


def test_the_summary_takes_corrected_rows_only_and_says_where_rotation_is_near_the_noise():
    rows = [
        _row("planner", 0, 1.0, 0.5, None, 0.001),
        _row("auditor", 2200, 6.0, 0.002, 0.008, None),
        _row("auditor", 2200, 8.0, 0.004, 0.004, 0.003),
        _row("critic", 2200, 10.0, 0.003, 0.006, None),
        _row("critic", 0, 1.0, 0.9, 0.9, None),
    ]
    summary = summarize(rows)
    assert summary["ttft_ratio_median_2000plus"] == 8.0
    assert summary["kl_mean"] == pytest.approx(0.003)
    assert summary["kl_ratio_to_rotate_only"] == pytest.approx(0.009 / 0.018)
    assert summary["kl_noise"] == pytest.approx(0.002)
    assert summary["corrected_tokens_unseen"] == 6600
    assert summary["per_role"]["auditor"]["note"] and summary["per_role"]["critic"]["note"]
    assert len(table(rows).splitlines()) == 8
    assert any("8.0 times" in line for line in summary_lines(summary))


def test_a_summary_without_corrected_rows_has_no_figures_instead_of_wrong_ones():
    summary = summarize([_row("planner", 0, 1.0, 0.5, None, None)])
    assert summary["kl_ratio_to_rotate_only"] is None and summary["ttft_ratio_median_2000plus"] is None
    assert len(summary_lines(summary)) == 1


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path):
    command = [sys.executable, "-c", "import sys; print('no such flag: --fast'); sys.exit(7)"]
    with (
        ServerProcess("our server", command, tmp_path / "server.log", environment=dict(os.environ)) as server,
        pytest.raises(ServerError, match=r"(?s)our server exited with code 7.*no such flag: --fast") as raised,
    ):
        server.wait_ready(30)
    assert "server.log" in str(raised.value)


def test_stopping_a_server_ends_its_children_too(tmp_path):
    child = "import time; time.sleep(600)"
    parent = (
        "import subprocess, sys, time\n"
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)\n"
        "time.sleep(600)"
    )
    log = tmp_path / "server.log"
    with ServerProcess("server", [sys.executable, "-c", parent], log, environment=dict(os.environ)):
        deadline = time.monotonic() + 30
        while len(log.read_text().splitlines()) < 2 + parent.count("\n") and time.monotonic() < deadline:
            time.sleep(0.05)
        pid = int(log.read_text().splitlines()[-1])
        os.kill(pid, 0)
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_free_ports_differ_from_one_in_use():
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        assert free_port() != used.getsockname()[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "must be a JSON list of at least 2 roles"),
        ("[", "cannot be read as JSON"),
        (json.dumps([{"name": "a", "system": "s", "question": "q"}] * 2), "names the role 'a' twice"),
        (json.dumps([{"name": "a", "system": "", "question": "q"}, {}]), "system of role 0 is ''"),
    ],
)
def test_unusable_roles_get_one_sentence(tmp_path, content, message):
    path = tmp_path / "roles.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        load_roles(path)


def test_unusable_documents_get_one_sentence(tmp_path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("  \n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in ((empty, "is empty"), (binary, "cannot be read"), (tmp_path / "none.txt", "cannot be read")):
        with pytest.raises(InputError, match=message):
            load_documents([path])
