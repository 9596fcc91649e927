"""One request over HTTP, streamed and timed: to SGLang's `/generate` or to an OpenAI `/v1/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import aiohttp

from kvcmas_sgl.demo.prompts import TokenPrompt
from kvcmas_sgl.wire import agent_hint

Api = Literal["sglang", "openai"]
_TIMEOUT = aiohttp.ClientTimeout(total=900)


@dataclass(frozen=True)
class Reply:
    """One answered request.

    Times in seconds from its sending. `tokens` are the generated ids, empty where the API returns text only (`text`).
    `exact`, `corrected` and `computed` count prompt tokens; a server that knows no corrected ones has 0, one that
    does not tell what it had cached has None. `reasons`: what our server did with each span. `error`: what went wrong
    instead.
    """

    ttft_s: float
    seconds: float
    output_tokens: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    exact: int | None = None
    corrected: int = 0
    computed: int | None = None
    reasons: tuple[str, ...] = ()
    predicted_kl: float | None = None
    error: str | None = None


class Endpoint:
    """Sends requests to one server; entered, it holds a pool of connections.

    Args:
        url: address without path.
        api: `sglang` or `openai`. Prompts are token ids in both.
        hints: whether requests say who asks and what is shared (`kv_hints`, or the field `kvcmas`). Without, they are
        what any client sends.
        overrides: fields of the hint that replace the server's settings, as in `agent_hint`.
        options: further fields of every request.
        model: name of the model, for `openai`.
    """

    def __init__(
        self,
        url: str,
        api: Api = "sglang",
        hints: bool = False,
        overrides: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        model: str = "default",
    ) -> None:
        self.url = url.rstrip("/")
        self._api = api
        self._hints = hints
        self._overrides = dict(overrides or {})
        self._options = dict(options or {})
        self._model = model
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Endpoint:
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()

    def body(self, role: str, prompt: TokenPrompt, output_tokens: int) -> dict[str, Any]:
        """The JSON of one request."""
        hinted = self._hints and bool(role)
        if self._api == "sglang":
            sampling = {"max_new_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
            body: dict[str, Any] = {"input_ids": list(prompt.ids), "sampling_params": sampling, "stream": True}
            if hinted:
                body["kv_hints"] = agent_hint(role, prompt.spans, **self._overrides)
        else:
            body = {"model": self._model, "prompt": list(prompt.ids), "max_tokens": output_tokens, "temperature": 0}
            body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
            if hinted:
                body["kvcmas"] = {"role": role, "spans": [list(span) for span in prompt.spans], **self._overrides}
        return body | self._options

    async def send(self, role: str, prompt: TokenPrompt, output_tokens: int) -> Reply:
        """Send one request and read its answer to the end. Never raises for what the server or the network does."""
        path = "/generate" if self._api == "sglang" else "/v1/completions"
        data = json.dumps(self.body(role, prompt, output_tokens)).encode()
        if self._session is None:
            raise RuntimeError("an Endpoint must be entered before it sends")
        begin = time.perf_counter()
        try:
            async with self._session.post(
                self.url + path, data=data, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    text = (await response.text())[:300]
                    return _failed(begin, f"HTTP {response.status}: {text}")
                read = _read_sglang if self._api == "sglang" else _read_openai
                reply = await read(_events(response), begin)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            return _failed(begin, f"{type(error).__name__}: {error}")
        return replace(reply, computed=None if reply.exact is None else len(prompt.ids) - reply.exact - reply.corrected)

    async def json(self, path: str) -> Any:
        """The JSON behind a GET of `path`, or None where the server has no such page."""
        if self._session is None:
            raise RuntimeError("an Endpoint must be entered before it asks")
        async with self._session.get(self.url + path) as response:
            return await response.json() if response.status == 200 else None


async def _read_sglang(events: AsyncIterator[dict[str, Any]], begin: float) -> Reply:
    ttft = None
    last: dict[str, Any] = {}
    async for event in events:
        if "output_ids" not in event:
            return _failed(begin, _refusal(event))
        if ttft is None and event["output_ids"]:
            ttft = time.perf_counter() - begin
        last = event
    seconds = time.perf_counter() - begin
    if ttft is None:
        return _failed(begin, f"no token was streamed; the last event was {str(last)[:200]}")
    meta = last["meta_info"]
    report = meta.get("kvcmas")
    tokens = tuple(last["output_ids"])
    if report is None:
        exact, corrected, reasons, predicted = int(meta.get("cached_tokens", 0)), 0, (), None
    else:
        exact, corrected = int(report["exact_tokens"]), int(report["corrected_tokens"])
        reasons, predicted = tuple(str(span["reason"]) for span in report["spans"]), report["predicted_kl"]
    return Reply(
        ttft, seconds, int(meta["completion_tokens"]), tokens, last.get("text", ""), exact, corrected, None, reasons,
        predicted,
    )  # fmt: skip


async def _read_openai(events: AsyncIterator[dict[str, Any]], begin: float) -> Reply:
    ttft = None
    text = ""
    usage: dict[str, Any] = {}
    report: dict[str, Any] | None = None
    async for event in events:
        if "error" in event:
            return _failed(begin, _refusal(event))
        for choice in event.get("choices", ()):
            # The first chunk may hold no text yet where a token is half a character.
            if ttft is None:
                ttft = time.perf_counter() - begin
            text += choice.get("text") or ""
        usage = event.get("usage") or usage
        report = event.get("kvcmas") or report
    seconds = time.perf_counter() - begin
    if ttft is None:
        return _failed(begin, "no token was streamed")
    details = usage.get("prompt_tokens_details") or {}
    corrected = int(details.get("corrected_tokens", 0))
    cached = details.get("cached_tokens")
    return Reply(
        ttft_s=ttft,
        seconds=seconds,
        output_tokens=int(usage.get("completion_tokens", 0)),
        text=text,
        exact=None if cached is None else int(cached) - corrected,
        corrected=corrected,
        reasons=tuple(str(span["reason"]) for span in report["spans"]) if report else (),
        predicted_kl=report["predicted_kl"] if report else None,
    )


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield json.loads(line[5:])


def _refusal(event: dict[str, Any]) -> str:
    """What a streamed event says that is no part of an answer; its status is in the event: the stream's is 200."""
    error = event.get("error")
    if not isinstance(error, dict):
        return str(event)[:300]
    return f"HTTP {error.get('code')}: {error.get('message')}"[:300]


def _failed(begin: float, error: str) -> Reply:
    seconds = time.perf_counter() - begin
    return Reply(seconds, seconds, 0, error=error)
