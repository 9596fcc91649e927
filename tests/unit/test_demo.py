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

from kvcmas_sgl.demo import picture_demo
from kvcmas_sgl.demo.__main__ import _max_kl
from kvcmas_sgl.demo.divergence import kl_divergence
from kvcmas_sgl.demo.measure import continued
from kvcmas_sgl.demo.picture import draw
from kvcmas_sgl.demo.picture_demo import Reading, summary
from kvcmas_sgl.demo.pictures import picture
from kvcmas_sgl.demo.prompts import PassedOn, PromptMaker, TokenPrompt
from kvcmas_sgl.demo.report import summary_lines, table, write_html
from kvcmas_sgl.demo.roles import ROLES, InputError, load_documents, load_roles
from kvcmas_sgl.demo.rows import Row, SpanRow, span_rows
from kvcmas_sgl.demo.servers import ServerError, ServerProcess, free_port
from kvcmas_sgl.demo.summary import summarize
from kvcmas_sgl.image_limits import data_url
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


def test_every_role_reads_the_same_tokens_inside_the_models_own_template():
    prompts = PromptMaker(str(default_model()))
    document = load_documents([])[0].text
    # An answer as it may be generated: it begins and ends inside a word, and no text gives these ids back.
    written = [PassedOn(role.name, (*prompts.tokens(f"ing {role.name}s of 12")[:-1], 314, 29)) for role in ROLES]
    for place, role in enumerate(ROLES):
        answers = written[:place]
        prompt = prompts.prompt(role, document, answers)
        spans = [list(prompt.ids[start:stop]) for start, stop in prompt.spans]
        assert spans == [prompts.tokens(document), *(list(answer.ids) for answer in answers)]
        assert prompt.shared_tokens == sum(len(span) for span in spans)
        ends = [0, *(stop for _, stop in prompt.spans)]
        starts = [*(start for start, _ in prompt.spans), len(prompt.ids)]
        own = [prompts.text(prompt.ids[end:start]) for end, start in zip(ends, starts, strict=True)]
        assert role.system in own[0] and role.question in own[-1]
        for answer, glue in zip(answers, own[1:-1], strict=True):
            assert glue == f"\n\nThe {answer.author} wrote:\n"
        # The template's own ends of message, system and user, are the only ones.
        assert prompt.ids.count(prompts.tokens("<|im_end|>")[0]) == 2


def test_special_tokens_are_those_that_would_end_or_open_a_message():
    prompts = PromptMaker(str(default_model()))
    special = prompts.special_tokens
    assert set(prompts.tokens("<|im_start|><|im_end|><|endoftext|>")) <= set(special)
    assert not set(prompts.tokens("The planner wrote: 12 eggs.")) & set(special)


def test_an_answer_that_was_written_is_one_more_span_after_its_prompt():
    after = continued(TokenPrompt((5, 6, 7, 8), ((1, 3),)), (9, 10))
    assert after == TokenPrompt((5, 6, 7, 8, 9, 10), ((1, 3), (4, 6)))


def test_the_documents_have_the_lengths_the_demo_needs_and_a_source_each():
    prompts = PromptMaker(str(default_model()))
    documents = load_documents([])
    lengths = [len(prompts.tokens(document.text)) for document in documents]
    # The first four are learned from, and are short; with three answers of 80 tokens the others pass 3,000.
    assert len(lengths) == 6
    assert all(500 <= length <= 700 for length in lengths[:3]) and 1200 <= lengths[3] <= 1400
    assert all(2800 <= length <= 3500 for length in lengths[4:])
    sources = (Path(__file__).parents[2] / "kvcmas_sgl/demo/documents/SOURCES.md").read_text()
    assert "0*-problems.txt" in sources
    prose = sorted((Path(__file__).parents[2] / "kvcmas_sgl/demo/documents/prose").glob("*.txt"))
    assert prose and all(f"`{path.name}`" in sources for path in prose)


def _entry(start: int, stop: int, corrected: int, reason: str) -> dict[str, object]:
    return {
        "start": start, "stop": stop, "exact_tokens": 0, "corrected_tokens": corrected,
        "computed_tokens": stop - start - corrected, "reason": reason, "source": "planner" if corrected else None,
        "estimator": "affine" if corrected else None, "predicted_error": None, "predicted_kl": 0.001,
    }  # fmt: skip


def test_span_rows_follow_the_report():
    rows = span_rows({"spans": [_entry(20, 200, 180, "reused"), _entry(210, 290, 0, "no_source")]})
    assert [(row.tokens, row.corrected, row.reason, row.reused) for row in rows] == [
        (180, 180, "reused", True),
        (80, 0, "no_source", False),
    ]
    assert [row.source for row in rows] == ["planner", None]


def _row(
    role: str,
    corrected: int,
    ratio: float,
    kl: float,
    rotate: float | None,
    noise: float | None,
    spans: str = "",
    shared: int = 2200,
) -> Row:
    reasons = (spans or ("reused" if corrected else "no_source")).split(",")
    return Row(
        document="doc", role=role, prompt_tokens=shared + 300, shared_tokens=shared, marked_spans=len(reasons),
        spans=tuple(SpanRow(shared // len(reasons), 0, 0, reason, None, None, None) for reason in reasons),
        answer_tokens=16, exact=20, corrected=corrected, computed=shared + 280 - corrected, ttft_stock_s=ratio,
        ttft_ours_s=1.0, ttft_ratio=ratio, kl=kl, agreement=1.0, kl_rotate_only=rotate, kl_noise=noise,
        answer="It is <b>.", passed_on="",
    )  # fmt: skip


def test_the_summary_takes_corrected_rows_only_and_says_where_rotation_is_near_the_noise():
    rows = [
        _row("planner", 0, 1.0, 0.5, None, 0.001),
        _row("solver", 2200, 6.0, 0.002, 0.008, None),
        _row("solver", 2200, 8.0, 0.004, 0.004, 0.003),
        _row("critic", 2200, 10.0, 0.003, 0.006, None),
        _row("critic", 0, 1.0, 0.9, 0.9, None),
    ]
    summary = summarize(rows, 0.02)
    assert summary["ttft_ratio_median_2000plus"] == 8.0
    assert summary["kl_mean"] == pytest.approx(0.003)
    assert summary["kl_ratio_to_rotate_only"] == pytest.approx(0.009 / 0.018)
    assert summary["kl_noise"] == pytest.approx(0.002)
    assert summary["corrected_tokens_unseen"] == 6600
    assert (summary["spans_reused"], summary["spans_marked"]) == (3, 5)
    assert summary["per_role"]["solver"]["note"] and summary["per_role"]["critic"]["note"]
    assert len(table(rows).splitlines()) == 8
    assert any("8.0 times" in line for line in summary_lines(summary))


def test_the_last_agents_figures_are_over_its_long_readings_that_were_reused_for_the_most_part():
    rows = [
        _row("critic", 3000, 30.0, 0.05, None, None, "reused,reused,reused", 3200),
        _row("judge", 2200, 40.0, 0.004, None, None, "reused,reused,reused,reused", 2900),
        _row("judge", 1500, 50.0, 0.04, None, None, "reused,reused,edge_unknown,no_source", 3200),
        _row("judge", 3000, 7.0, 0.002, None, None, "reused,reused,exact,no_source", 3000),
        _row("judge", 3000, 9.0, 0.003, None, None, "reused,reused,own_corrected,reused", 3200),
    ]
    summary = summarize(rows, 0.02)
    assert summary["ttft_ratio_last_agent_3000plus"] == pytest.approx(8.0)
    assert summary["ttft_rows_last_agent_3000plus"] == 2
    assert summary["kl_last_agent_mean"] == pytest.approx(0.003)
    assert summary["max_kl_budget"] == 0.02
    lines = summary_lines(summary)
    assert any("last agent at 3,000" in line and "8.0 times" in line for line in lines)
    assert any("0.0030 nats per token, budget 0.02" in line for line in lines)
    assert "reused,reused,edge_unknown,no_source" in table(rows)


def test_a_summary_without_corrected_rows_has_no_figures_instead_of_wrong_ones():
    summary = summarize([_row("planner", 0, 1.0, 0.5, None, None)], 0.02)
    assert summary["kl_ratio_to_rotate_only"] is None and summary["ttft_ratio_median_2000plus"] is None
    assert summary["ttft_ratio_last_agent_3000plus"] is None and summary["kl_last_agent_mean"] is None
    assert len(summary_lines(summary)) == 1


def test_picture_and_page_are_drawn_with_and_without_reuse(tmp_path):
    dense = [_row("planner", 0, 1.0, 0.5, None, None)]
    for rows in (dense, [*dense, _row("judge", 3000, 9.0, 0.003, 0.006, None, "reused,reused", 3200)]):
        summary = summarize(rows, 0.02)
        draw(rows, summary, tmp_path / "demo.png")
        write_html(tmp_path / "demo.html", rows, summary, {"model": "m"}, tmp_path / "demo.png")
        page = (tmp_path / "demo.html").read_text()
        assert "reused,reused" in page or rows == dense
        assert "<b>" not in page.replace("&lt;b&gt;", "")


def test_the_budget_in_the_report_is_the_one_our_server_runs_with():
    assert _max_kl("--kvcmas-rank 8") == 0.02
    assert _max_kl("--kvcmas-max-kl 0.5 --kvcmas-rank 8") == 0.5


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


def reading(first: int, encoded: int, kl: float | None) -> Reading:
    corrected = 0 if kl is None else 580
    return Reading(first, "critic", 660, 0, corrected, 660 - corrected, encoded, 0.6, 0.2, kl, kl and 4 * kl, "reused")


def test_the_page_of_pictures_holds_them_and_its_figures_are_those_of_the_readings(tmp_path):
    readings = [reading(0, 4, None), reading(0, 0, 0.01), reading(4, 1, 0.03)]
    figures = summary(readings)
    assert (figures["pictures_given"], figures["pictures_encoded"], figures["corrected_tokens"]) == (12, 5, 1160)
    assert figures["pictures_encoded_of_corrected_readings"] == 1
    assert figures["kl_mean"] == pytest.approx(0.02) and figures["kl_rotate_only_mean"] == pytest.approx(0.08)
    assert figures["ttft_ratio_median"] == pytest.approx(3)
    picture_demo.write(tmp_path, readings, 0.02, {"model": "m"})
    page = (tmp_path / "demo-images.html").read_text()
    assert all(page.count(data_url(picture(number))) == 1 for number in range(8)) and "0.0300" in page
    assert json.loads((tmp_path / "demo-images.json").read_text())["measured_rows"][2]["encoded"] == 1
    assert len(picture_demo.table(readings).splitlines()) == 5
    assert "KL" not in "".join(picture_demo.sentences(summary(readings[:1]), 0.02))


def test_generated_pictures_are_the_same_every_time_and_all_different():
    files = [picture(number) for number in range(12)]
    assert files == [picture(number) for number in range(12)] and len(set(files)) == 12
