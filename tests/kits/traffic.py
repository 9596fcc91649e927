"""Agent traffic for kits that know plain requests only: their own payloads, with our hints in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import requests

from tests.prompts import CRITIC, PLANNER, Reader, document

BUDGET = 0.05
"""The server's budget for the KL of a prompt's corrected KV, nats: what the KL kit is held to with agent traffic."""

PROMPTS, TOKENS = 12, 500
LESSONS = range(20, 25)
"""Documents that both agents read before the kit starts; the kit's own are 0 to `PROMPTS`."""


class AgentTraffic:
    """Stands in for ``_flush_cache`` and ``_generate`` of ``sglang.test.kl_test_utils``.

    The first flush is followed by what an edge has to see before it is trusted, and by the planner's reading of every
    document of the kit: the critic's requests, which the kit sends, then find sources. The kit's reference, the replay
    of prompt and answer for its logprobs, goes out as a plain request.
    """

    def __init__(self, flush: Callable[..., None], generate: Callable[..., Any]) -> None:
        self._flush, self._generate = flush, generate
        self._taught = False
        self.reports: list[dict[str, Any]] = []

    def flush(self, base_url: str, timeout_s: float = 30) -> None:
        self._flush(base_url, timeout_s)
        if self._taught:
            return
        self._taught = True
        for index in LESSONS:
            for reader in (PLANNER, CRITIC):
                self._read(base_url, reader, index)
                settle(base_url)
        for index in range(PROMPTS):
            self._read(base_url, PLANNER, index)
        settle(base_url)

    def generate(self, base_url: str, input_ids: Sequence[Sequence[int]], max_new_tokens: int, **fields: Any) -> Any:
        if fields.get("logprob_start_len", -1) == 0:
            return self._generate(base_url, input_ids, max_new_tokens, **fields)
        start = len(CRITIC.head())
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "kv_hints": [CRITIC.hint(prompt[start : start + TOKENS]) for prompt in input_ids],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
            **fields,
        }
        results = _post(base_url, body)
        self.reports += [result["meta_info"]["kvcmas"] for result in results]
        return results

    def _read(self, base_url: str, reader: Reader, index: int) -> None:
        span = document(index, TOKENS)
        sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        _post(base_url, {"input_ids": reader.prompt(span), "kv_hints": reader.hint(span), "sampling_params": sampling})


def settle(base_url: str, timeout_s: float = 120.0) -> None:
    """Wait until nothing is left to learn."""
    deadline = time.monotonic() + timeout_s
    while requests.get(base_url + "/kvcmas/stats", timeout=60).json()["ranks"][0]["learning"]:
        assert time.monotonic() < deadline, "learning never ended"
        time.sleep(0.1)


def _post(base_url: str, body: dict[str, Any]) -> Any:
    response = requests.post(base_url + "/generate", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()
