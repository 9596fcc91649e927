"""One server's client: three kinds of requests to SGLang's /generate, one at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import requests

_TIMEOUT_S = 600


@dataclass(frozen=True)
class Answer:
    """A streamed answer: greedy tokens, seconds from the request to the first of them, the server's `meta_info`."""

    tokens: tuple[int, ...]
    ttft_s: float
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class Scores:
    """What a model says at each position of a given answer, in nats.

    `asked[i]` holds log probabilities of the tokens that were asked for, `top[i]` the likeliest ones, both at the
    position that predicts answer token i.
    """

    top: tuple[Mapping[int, float], ...]
    asked: tuple[Mapping[int, float], ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        """Every token that is likeliest somewhere: what another model is to be asked for."""
        return sorted(set().union(*self.top))


class Client:
    """Sends one request at a time to one server."""

    def __init__(self, url: str) -> None:
        self._server = url
        self._url = url + "/generate"
        self._session = requests.Session()

    def answer(self, ids: Sequence[int], max_tokens: int, without: Sequence[int] = (), **options: Any) -> Answer:
        """Stream a greedy answer.

        Args:
            max_tokens: its length; it is shorter where the model ends it.
            without: tokens that must not occur; where some are given, the model's end does not count either.
            options: further fields of the request.
        """
        sampling: dict[str, Any] = {"max_new_tokens": max_tokens, "temperature": 0}
        if without:
            sampling |= {"ignore_eos": True, "logit_bias": {str(token): -1e4 for token in without}}
        body = {"input_ids": list(ids), "sampling_params": sampling, "stream": True, **options}
        data = json.dumps(body)
        start = time.perf_counter()
        ttft = None
        last: dict[str, Any] = {}
        with self._session.post(self._url, data=data, headers=_JSON, stream=True, timeout=_TIMEOUT_S) as response:
            _require_ok(response)
            for line in response.iter_lines():
                if not line.startswith(b"data:") or line == b"data: [DONE]":
                    continue
                event = json.loads(line[5:])
                if "output_ids" not in event:
                    raise RuntimeError(f"{self._url} answered {event}")
                if ttft is None and event["output_ids"]:
                    ttft = time.perf_counter() - start
                last = event
        if ttft is None:
            raise RuntimeError(f"{self._url} streamed no token; its last event was {last}")
        return Answer(tuple(last["output_ids"]), ttft, last["meta_info"])

    def prefill(self, ids: Sequence[int], **options: Any) -> Mapping[str, Any]:
        """Make the KV of `ids` resident and generate nothing; returns `meta_info`."""
        body = {"input_ids": list(ids), "sampling_params": {"max_new_tokens": 0, "temperature": 0}, **options}
        response = self._session.post(self._url, json=body, timeout=_TIMEOUT_S)
        _require_ok(response)
        meta: Mapping[str, Any] = response.json()["meta_info"]
        return meta

    def scores(
        self, ids: Sequence[int], answer: Sequence[int], top: int, asked: Sequence[int] = (), **options: Any
    ) -> Scores:
        """Teacher-forced: the distributions that predict each token of `answer` after the prompt `ids`.

        Args:
            top: number of likeliest tokens to return per position.
            asked: tokens whose log probability is returned at every position as well.
            options: further fields of the request.
        """
        body = {
            "input_ids": [*ids, *answer],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            # Log probabilities of the tokens after this one: exactly the answer's. What comes before may be a hit.
            "logprob_start_len": len(ids) - 1,
            "top_logprobs_num": top,
            **options,
        }
        if asked:
            body["token_ids_logprob"] = list(asked)
        response = self._session.post(self._url, json=body, timeout=_TIMEOUT_S)
        _require_ok(response)
        meta = response.json()["meta_info"]
        return Scores(
            _positions(meta["input_top_logprobs"], len(answer)),
            _positions(meta["input_token_ids_logprobs"], len(answer)) if asked else (),
            {name: value for name, value in meta.items() if not name.startswith(("input_", "output_"))},
        )

    def wait_until_learned(self, timeout_s: float = 60.0) -> None:
        """Wait until our server has nothing left to learn in its idle time, or `timeout_s` seconds are over.

        On a machine without a GPU its learning takes the cores that the other server is about to be timed on.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            response = self._session.get(self._server + "/server_info", timeout=_TIMEOUT_S)
            _require_ok(response)
            states = response.json()["internal_states"]
            if not any(state["kvcmas"]["learning"] for state in states):
                return
            time.sleep(0.05)


_JSON = {"Content-Type": "application/json"}


def _positions(entries: Sequence[Any], count: int) -> tuple[dict[int, float], ...]:
    # The first entry belongs to the last prompt token, which nothing here predicts.
    return tuple({token: logprob for logprob, token, *_ in entry} for entry in entries[-count:])


def agent_report(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """What our server did with the hint, from a response's `meta_info`."""
    report: Mapping[str, Any] = meta["kvcmas"]
    return report


def _require_ok(response: requests.Response) -> None:
    if response.status_code != 200:
        raise RuntimeError(f"{response.url} answered HTTP {response.status_code}: {response.text[:500]}")
