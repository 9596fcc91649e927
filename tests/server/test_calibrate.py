"""Calibration against the real server: afterwards every pair of roles is known, and the first reading is reused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import requests

from kvcmas_sgl import calibrate
from kvcmas_sgl.demo.roles import DOCUMENTS
from kvcmas_sgl.demo.servers import ServerProcess
from tests.server.conftest import ADMIN_KEY
from tests.server.test_control import stats

ROLES = {
    "calibrated-reader": "You are a careful reader. You say what a text is about.",
    "calibrated-judge": "You are a judge. You weigh both sides and give a verdict in plain words.",
}


def test_roles_are_taught_and_the_next_text_is_reused(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = tmp_path / "roles.json"
    roles.write_text(json.dumps(ROLES))
    arguments = [server.url, "--roles", str(roles), "--documents", str(DOCUMENTS), "--texts", "6"]
    arguments += ["--characters", "900", "--answer-tokens", "4", "--api-key", ADMIN_KEY]
    before = stats(server)
    assert calibrate.main(arguments) == 0
    after = stats(server)
    assert after["settings"] == before["settings"] and after["learning"] == 0
    assert after["requests"] - before["requests"] == 6 * len(ROLES)
    table = capsys.readouterr().out.splitlines()
    both = [line.split() for line in table[1:3]]
    assert {(row[0], row[1]) for row in both} == {tuple(ROLES), tuple(reversed(ROLES))}
    # Each role was the second reader of every other text; the first of these had no prediction to be held against.
    assert [row[2] for row in both] == ["2", "2"]
    assert all(float(row[5]) <= float(row[4]) for row in both)
    text = "The harbour lay still, and the boats came home one by one before the storm. " * 12
    reports = []
    for name, system in ROLES.items():
        body = {
            "model": "default",
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": f"{text}\n\nWell?"}],
            "kvcmas": {"role": name, "spans": [{"message": 1, "start": 0, "end": len(text)}]},
            "max_tokens": 1,
        }
        reply = requests.post(server.url + "/v1/chat/completions", json=body, timeout=120).json()
        reports.append(reply["kvcmas"])
    assert reports[0]["reason"] == "no_source"
    assert reports[1]["reason"] in ("reused", "over_budget") and reports[1]["predicted_kl"] > 0


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ('{"one": "You are alone."}', "must hold a JSON object of at least two role names"),
        ("[1]", "must hold a JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_bad_roles_are_one_sentence(
    roles: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "roles.json"
    path.write_text(roles)
    assert calibrate.main(["http://localhost:1", "--roles", str(path), "--documents", str(DOCUMENTS)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_a_server_without_the_admin_key_is_left_as_it_is(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = tmp_path / "roles.json"
    roles.write_text(json.dumps(ROLES))
    before = stats(server)
    assert calibrate.main([server.url, "--roles", str(roles), "--documents", str(DOCUMENTS), "--api-key", "wrong"]) == 1
    assert "answered HTTP 401: it wants its key in --api-key" in capsys.readouterr().err
    assert stats(server)["requests"] == before["requests"]
