"""Whatever stands where a hint is expected, the real server answers it, or refuses it with 400, and lives on."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvcmas_sgl.demo.servers import ServerProcess
from kvcmas_sgl.wire import agent_hint
from tests.server.conftest import KEY
from tests.unit.test_hostile_hints import JSON, MESSAGES, PAYLOADS

# Derandomised: what fails once has to fail again. Nothing is shrunk: every example is a request.
MANY = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0}
PROMPT = list(range(1000, 1100))
PROMPTS = st.sampled_from(
    [{"input_ids": PROMPT}, {"text": "A planner and a critic read a text. " * 12}, {"input_ids": [PROMPT, PROMPT[:50]]}]
)
ACTIONS = st.lists(
    st.fixed_dictionaries(
        {"action_id": st.just("a"), "action_type": st.just("kvcmas.agent"), "action_version": st.just("1") | JSON},
        optional={"payload": PAYLOADS},
    ),
    min_size=1,
    max_size=3,
)


def enveloped(actions: list[Any]) -> dict[str, Any]:
    return {**agent_hint("critic", []), "actions": actions}


HINTS = ACTIONS.map(enveloped) | PAYLOADS.map(
    lambda payload: enveloped([{**agent_hint("critic", [])["actions"][0], "payload": payload}])
)


@pytest.fixture(scope="module", autouse=True)
def _nothing_broke(server: ServerProcess) -> Any:
    before, digits = totals(server), sys.get_int_max_str_digits()
    # Numbers that Python itself would not print: what the server does with them is asked here.
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(digits)
    after = totals(server)
    assert after["fallbacks"] == before["fallbacks"] and after["requests"] > before["requests"]


def totals(server: ServerProcess) -> dict[str, Any]:
    (state,) = requests.get(server.url + "/kvcmas/stats", timeout=60).json()["ranks"]
    return dict(state)


def answered(server: ServerProcess, path: str, body: dict[str, Any]) -> int:
    """Send a body, NaN and all, and check the answer's form; returns its status."""
    headers = {"Content-Type": "application/json", **KEY}
    response = requests.post(server.url + path, data=json.dumps(body).encode(), headers=headers, timeout=120)
    assert response.status_code in (200, 400, 422), response.text[:300]
    if response.status_code != 200:
        assert "Traceback" not in response.text
    return response.status_code


@MANY
@given(prompt=PROMPTS, hint=HINTS)
def test_native_hints(server: ServerProcess, prompt: dict[str, Any], hint: Any) -> None:
    answered(server, "/generate", {**prompt, "sampling_params": ONE_TOKEN, "kv_hints": hint})


@MANY
@given(hint=JSON)
def test_envelopes_that_are_none(server: ServerProcess, hint: Any) -> None:
    answered(server, "/generate", {"input_ids": PROMPT, "sampling_params": ONE_TOKEN, "kv_hints": hint})


@MANY
@given(field=PAYLOADS, prompt=st.sampled_from([PROMPT, "Read this text. " * 20, ["One. " * 20, "Two. " * 20]]))
def test_completions(server: ServerProcess, field: Any, prompt: Any) -> None:
    answered(server, "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1, "kvcmas": field})


@MANY
@given(field=PAYLOADS, more=MESSAGES, stream=st.booleans())
def test_chats(server: ServerProcess, field: Any, more: list[Any], stream: bool) -> None:
    messages = [{"role": "system", "content": "You read."}, {"role": "user", "content": "Text. " * 30}, *more]
    body = {"model": "m", "messages": messages, "max_tokens": 1, "stream": stream, "kvcmas": field}
    answered(server, "/v1/chat/completions", body)


@MANY
@given(body=st.dictionaries(st.sampled_from(["mode", "max_kl", "rank"]) | st.text(max_size=9), JSON, max_size=3))
def test_settings_change_only_when_they_are_good(server: ServerProcess, body: dict[str, Any]) -> None:
    before = totals(server)["settings"]
    if answered(server, "/kvcmas/settings", body) != 200:
        assert totals(server)["settings"] == before
    answered(server, "/kvcmas/settings", before)


def test_the_server_still_answers(server: ServerProcess) -> None:
    body = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    response = requests.post(server.url + "/generate", json=body, timeout=120)
    assert "Paris" in response.json()["text"] and "kvcmas" not in response.json()["meta_info"]
