"""What a client sees over HTTP: stock clients unchanged, reports, metrics, and 400 for bad hints."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import pytest
import requests

from kvcmas_sgl.demo.servers import ServerProcess
from kvcmas_sgl.prepare_model import default_model
from kvcmas_sgl.wire import agent_hint
from tests.prompts import CRITIC, HEAD, PLANNER, Reader, document, tokenizer
from tests.server.conftest import KEY

N = 400


def generate(server: ServerProcess, status: int = 200, tokens: int = 2, **fields: Any) -> dict[str, Any]:
    body = {"sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}, **fields}
    response = requests.post(server.url + "/generate", json=body, timeout=120)
    assert response.status_code == status, response.text
    return response.json()


def read(server: ServerProcess, reader: Reader, span: list[int]) -> dict[str, Any]:
    out = generate(server, input_ids=reader.prompt(span), kv_hints=reader.hint(span))
    return out["meta_info"]["kvcmas"]


def totals(server: ServerProcess) -> dict[str, Any]:
    return requests.get(server.url + "/server_info", timeout=60).json()["internal_states"][0]["kvcmas"]


def settle(server: ServerProcess) -> None:
    for _ in range(600):
        if not totals(server)["learning"]:
            return
        time.sleep(0.1)
    raise AssertionError("learning never ended")


def test_curl_without_hints_gets_what_stock_gives(server: ServerProcess) -> None:
    body = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    command = ["curl", "-sS", server.url + "/generate", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    out = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert "Paris" in out["text"] and "kvcmas" not in out["meta_info"]


def test_the_log_says_in_one_line_what_is_active(server: ServerProcess) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "kvcmas is active" in line]
    assert len(lines) == 1
    for setting in ("policy=gated", "estimator=affine", "max_kl=0.3", "layers=30"):
        assert setting in lines[0]


def test_the_openai_client_works_unchanged(server: ServerProcess) -> None:
    import openai

    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    done = client.completions.create(model="any", prompt="The capital of France is", temperature=0, max_tokens=8)
    assert "Paris" in done.choices[0].text
    chat = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "Say hello."}], temperature=0, max_tokens=8
    )
    assert chat.choices[0].message.content and not hasattr(chat, "kvcmas")


def test_later_readers_are_corrected_on_unseen_content(server: ServerProcess) -> None:
    # Other tests of this server have the same readers.
    assert requests.post(server.url + "/flush_cache", headers=KEY, timeout=60).status_code == 200
    reports = []
    for index in range(5):
        span = document(index, N)
        read(server, PLANNER, span)
        reports.append(read(server, CRITIC, span))
        settle(server)
    last = reports[-1]
    assert [r["corrected_tokens"] for r in reports[:2]] == [0, 0]
    assert last["corrected_tokens"] == N - HEAD and last["reason"] == "reused" and last["source"] == "planner"
    assert 0 < last["predicted_kl"] <= 0.3
    assert sum(last[f"{kind}_tokens"] for kind in ("exact", "corrected", "computed")) == len(CRITIC.prompt(span))
    # Few dense runs vouch for this edge, so what was served from it was checked in idle time.
    found = totals(server)
    assert found["checks"] >= 1 and found["fallbacks"] == 0
    assert 0 < found["checked_kl"] / found["checks"] <= 0.3


def test_no_key_of_a_client_reaches_an_agents_kv(server: ServerProcess) -> None:
    span = document(6, N)
    prompt = CRITIC.prompt(span)
    read(server, CRITIC, span)
    assert read(server, CRITIC, span)["reason"] == "exact"
    for fields in ({}, {"extra_key": "critic"}, {"extra_key": "kvcmas:critic"}, {"cache_salt": "tenant"}):
        # Other plain requests of this session begin with the same few template tokens.
        cached = generate(server, input_ids=prompt, tokens=1, **fields)["meta_info"]["cached_tokens"]
        assert cached < len(CRITIC.head()) - 5


def test_marks_in_characters_are_the_same_span(server: ServerProcess) -> None:
    span = document(6, N)
    text, head = tokenizer().decode(span), tokenizer().decode(CRITIC.head())
    prompt = head + text + "\n\nWhat is this?<|im_end|>\n<|im_start|>assistant\n"
    inside = tokenizer()(text, add_special_tokens=False)["input_ids"]
    hint = agent_hint("critic", [(len(head), len(head) + len(text))], unit="char")
    generate(server, text=prompt, kv_hints=hint)
    # The same content under token marks is the same source, so the role's own copy is an exact hit.
    assert read(server, CRITIC, inside)["exact_tokens"] >= len(CRITIC.head()) + len(inside)


def test_streams_carry_the_report(server: ServerProcess) -> None:
    span = document(7, N)
    body = {
        "input_ids": PLANNER.prompt(span),
        "kv_hints": PLANNER.hint(span),
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
    }
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=120) as response:
        lines = [line[6:] for line in response.iter_lines(decode_unicode=True) if line.startswith("data: {")]
    assert len(lines) == 4
    assert {json.loads(line)["meta_info"]["kvcmas"]["role"] for line in lines} == {"planner"}


BAD = {
    "role is ''": {"role": ""},
    "overlaps or precedes": {"role": "a", "spans": [[0, 5], [3, 9]]},
    "ends after the prompt, which has 9 tokens": {"role": "a", "spans": [[0, 10]]},
    "at most 64 are allowed": {"role": "a", "spans": [[i, i + 1] for i in range(65)]},
    "must be a text of 1 to 256 characters": {"role": "r" * 100_000},
    "unit is 'line'": {"role": "a", "unit": "line"},
    "unknown field 'extra'": {"role": "a", "extra": ["x" * 10_000]},
    "runs without --kvcmas-allow-overrides": {"role": "a", "estimator": "none"},
    "the request has no text": {"role": "a", "unit": "char", "spans": [[0, 3]]},
}


@pytest.mark.parametrize(("words", "payload"), BAD.items(), ids=list(BAD))
def test_malformed_hints_get_400_and_the_server_lives_on(
    server: ServerProcess, words: str, payload: dict[str, Any]
) -> None:
    hint = agent_hint("a", [])
    hint["actions"][0]["payload"] = payload
    error = generate(server, status=400, input_ids=list(range(20, 29)), kv_hints=hint)["error"]["message"]
    assert words in error and len(error) < 300 and "Traceback" not in error
    generate(server, input_ids=list(range(20, 29)))


def test_text_that_no_encoding_holds_gets_400(server: ServerProcess) -> None:
    hint = agent_hint("a", [])
    hint["actions"][0]["payload"] = {"role": "critic \ud800"}
    generate(server, status=400, input_ids=[20, 21, 22], kv_hints=hint)
    generate(server, input_ids=[20, 21, 22])


def test_an_unknown_version_gets_400(server: ServerProcess) -> None:
    hint = agent_hint("a", [])
    hint["actions"][0]["action_version"] = "9"
    error = generate(server, status=400, input_ids=[20, 21, 22], kv_hints=hint)["error"]["message"]
    assert "action_version is '9', but must be '1'" in error


def test_metrics_count_what_the_reports_say(server: ServerProcess) -> None:
    def counters() -> dict[str, float]:
        lines = requests.get(server.url + "/metrics", timeout=60).text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("kvcmas:")]
        return {name: float(value) for name, value in pairs}

    read(server, PLANNER, document(8, N))
    before = counters()
    report = read(server, PLANNER, document(8, N))
    after = counters()

    def grown(kind: str) -> float:
        name = next(name for name in after if "prompt_tokens_total" in name and f'kind="{kind}"' in name)
        return after[name] - before.get(name, 0.0)

    assert {kind: grown(kind) for kind in ("exact", "corrected", "computed")} == {
        kind: report[f"{kind}_tokens"] for kind in ("exact", "corrected", "computed")
    }


def test_a_frontend_program_shares_its_document(server: ServerProcess) -> None:
    import sglang as sgl
    from kvcmas_sgl.frontend import AgentRuntimeEndpoint, agent, shared

    @sgl.function
    def ask(s: Any, role: str, system: str, text: str) -> None:
        s += agent(role, system=system)
        s += sgl.user(shared(text) + "\nWhat is this?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=4, temperature=0))

    backend = AgentRuntimeEndpoint(server.url)
    text = tokenizer().decode(document(9, N))
    reports = []
    for role, system in (("poet", "You write verse."), ("judge", "You judge with care and give your reasons.")):
        for _ in range(2):
            state = ask.run(role=role, system=system, text=text, backend=backend)
            reports.append(state.get_meta_info("answer")["kvcmas"])
    assert [r["role"] for r in reports] == ["poet", "poet", "judge", "judge"]
    assert reports[1]["reason"] == "exact" and reports[3]["reason"] == "exact"
    assert reports[2]["reason"] == "edge_unknown"


def test_new_weights_void_what_was_learned_even_without_a_flush(server: ServerProcess) -> None:
    for index in (10, 11):
        read(server, PLANNER, document(index, N))
        read(server, CRITIC, document(index, N))
    settle(server)
    before = totals(server)
    assert before["state_bytes"] > 0 and before["sources"] > 0
    body = {"model_path": str(default_model()), "flush_cache": False}
    response = requests.post(server.url + "/update_weights_from_disk", json=body, headers=KEY, timeout=120)
    assert response.status_code == 200, response.text
    after = totals(server)
    assert (after["state_bytes"], after["sources"], after["learning"]) == (0, 0, 0)
    # The KV is SGLang's to keep or to flush.
    assert read(server, CRITIC, document(11, N))["reason"] in ("exact", "own_corrected")
