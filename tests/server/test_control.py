"""The operator's routes over HTTP: stats, switches and their key, the live table, the line in the log."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from kvcmas_sgl.demo.servers import ServerProcess
from kvcmas_sgl.wire import agent_hint
from tests.server.conftest import KEY

PROMPT = list(range(1000, 1120))


def ask(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {
        "input_ids": PROMPT,
        "kv_hints": agent_hint("operated", [(10, 110)]),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        **fields,
    }
    response = requests.post(server.url + "/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["meta_info"]


def stats(server: ServerProcess) -> dict[str, Any]:
    response = requests.get(server.url + "/kvcmas/stats", timeout=60)
    assert response.status_code == 200, response.text
    (state,) = response.json()["ranks"]
    return state


def switch(server: ServerProcess, **values: Any) -> list[dict[str, Any]]:
    response = requests.post(server.url + "/kvcmas/settings", json=values, headers=KEY, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["ranks"]


@pytest.fixture
def as_started(server: ServerProcess) -> Iterator[None]:
    yield
    switch(server, mode="on", max_kl=0.3)


def test_stats_are_the_totals_of_server_info(server: ServerProcess) -> None:
    report = ask(server)["kvcmas"]
    seen = stats(server)
    info = requests.get(server.url + "/server_info", timeout=60).json()["internal_states"][0]["kvcmas"]
    assert info["recent"][-1]["role"] == "operated" and "recent" not in seen
    for name in ("requests", "exact_tokens", "corrected_tokens", "computed_tokens", "reasons", "edge_table"):
        assert seen[name] == info[name]
    role = seen["roles"][0]
    assert (role["role"], role["computed_tokens"] >= report["computed_tokens"] > 0) == ("operated", True)
    assert seen["settings"] == {"mode": "on", "max_kl": 0.3}


def test_switches_change_what_the_next_request_gets(server: ServerProcess, as_started: None) -> None:
    before = stats(server)["requests"]
    assert switch(server, mode="off") == [{"mode": "off", "max_kl": 0.3}]
    assert "kvcmas" not in ask(server)
    assert stats(server)["requests"] == before
    assert switch(server, mode="learn", max_kl=0.125) == [{"mode": "learn", "max_kl": 0.125}]
    assert ask(server, input_ids=list(range(2000, 2120)))["kvcmas"]["reason"] == "declined"
    assert stats(server)["settings"] == {"mode": "learn", "max_kl": 0.125}
    assert stats(server)["requests"] == before + 1
    lines = [line for line in server.log.read_text().splitlines() if "settings are now" in line]
    assert lines[-1].endswith("mode=learn max_kl=0.125")


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}], ids=["none", "wrong"])
def test_switches_need_the_admin_key(server: ServerProcess, headers: dict[str, str]) -> None:
    settings = stats(server)["settings"]
    url = server.url + "/kvcmas/settings"
    assert requests.post(url, json={"mode": "off"}, headers=headers, timeout=60).status_code == 401
    assert stats(server)["settings"] == settings


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"mode": "sometimes"}', "mode is 'sometimes', but must be one of on, learn, off."),
        (b'{"max_kl": 11}', "max_kl is 11, but must be a number from 0 to 10 (nats)."),
        (b'{"mode": "off", "rank": 8}', "unknown setting 'rank'; known are mode, max_kl."),
        (b"mode=off", "the body is no JSON, but must be an object with mode, max_kl or both."),
    ],
    ids=["mode", "max_kl", "unknown", "no JSON"],
)
def test_bad_settings_get_400_and_change_nothing(server: ServerProcess, body: bytes, sentence: str) -> None:
    settings = stats(server)["settings"]
    response = requests.post(server.url + "/kvcmas/settings", data=body, headers=KEY, timeout=60)
    assert (response.status_code, response.json()) == (400, {"error": {"message": sentence}})
    assert stats(server)["settings"] == settings


def test_sglangs_own_route_cannot_set_nonsense(server: ServerProcess) -> None:
    settings = stats(server)["settings"]
    body = {"server_args": {"kvcmas_mode": 7}}
    response = requests.post(server.url + "/set_internal_state", json=body, headers=KEY, timeout=60)
    assert response.json() == [False]
    assert stats(server)["settings"] == settings


def test_top_prints_the_table(server: ServerProcess) -> None:
    ask(server)
    command = [sys.executable, "-m", "kvcmas_sgl.top", server.url, "--once"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    (row,) = [line.split() for line in out.splitlines() if line.startswith("operated ")]
    (role,) = [role for role in stats(server)["roles"] if role["role"] == "operated"]
    assert row[1:5] == [
        f"{role[name]:,}" for name in ("requests", "exact_tokens", "corrected_tokens", "computed_tokens")
    ]


def test_the_log_explains_a_request_by_its_id(server: ServerProcess) -> None:
    meta = ask(server, rid="explain-me")
    report = meta["kvcmas"]
    assert meta["id"] == "explain-me"
    (line,) = [line for line in server.log.read_text().splitlines() if '"explain-me"' in line]
    assert f'kvcmas: request "explain-me" role="operated" reason={report["reason"]} ' in line
    assert f"exact={report['exact_tokens']} corrected=0 " in line and "budget=0.3; span=[10,110) reason=" in line
