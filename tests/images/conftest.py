"""One HTTP server on the model that reads pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import requests

import kvcmas_sgl
from kvcmas_sgl.demo.client import Client
from kvcmas_sgl.demo.pictures import picture
from kvcmas_sgl.demo.servers import ServerProcess, kvcmas_command
from kvcmas_sgl.prepare_image_model import IMAGE_TOKEN_ID, IMAGE_TOKENS, default_image_model
from tests.prompts import CRITIC, PLANNER, Reader

JUDGE = Reader("judge", "You are a judge. Weigh what is shown on both sides, and quote what you rely on, line by line.")
READERS = (PLANNER, CRITIC, JUDGE)
BUDGET = 0.1


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_image_model())


def words(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


@dataclass(frozen=True)
class Prompt:
    """A reader's prompt with one token for each picture, and its shared span."""

    role: str
    ids: list[int]
    span: tuple[int, int]
    pictures: list[bytes]

    @property
    def length(self) -> int:
        """Tokens of the prompt with all of its pictures' tokens."""
        return len(self.ids) + (IMAGE_TOKENS - 1) * len(self.pictures)

    def body(self, new_tokens: int = 2, hint: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        """A body of `/generate`; with ``hint``, further fields of an agent's hint."""
        body = {
            "input_ids": self.ids,
            "image_data": [base64.b64encode(file).decode() for file in self.pictures],
            "modalities": ["multi-images"],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
        }
        if hint is not None:
            body["kv_hints"] = kvcmas_sgl.agent_hint(self.role, [self.span], **hint)
        return body | fields


def prompt(
    reader: Reader,
    pictures: Sequence[bytes | int],
    *,
    caption: str = "Four pictures of the report:\n",
    question: str = "What do they show?",
) -> Prompt:
    """A prompt whose span is a caption and pictures, each with a line of its own; numbers stand for generated ones."""
    head = words(f"<|im_start|>system\n{reader.system}<|im_end|>\n<|im_start|>user\n")
    span = words(caption)
    for _ in pictures:
        span += [IMAGE_TOKEN_ID, *words("\n")]
    tail = words(f"\n{question}<|im_end|>\n<|im_start|>assistant\n")
    files = [one if isinstance(one, bytes) else picture(one) for one in pictures]
    return Prompt(reader.role, [*head, *span, *tail], (len(head), len(head) + len(span)), files)


@dataclass(frozen=True)
class Server:
    """A client of the server."""

    url: str

    def post(self, body: dict[str, Any]) -> requests.Response:
        return requests.post(f"{self.url}/generate", json=body, timeout=120)

    def ask(self, asked: Prompt, new_tokens: int = 2, hint: dict[str, Any] | None = None, **fields: Any) -> Any:
        response = self.post(asked.body(new_tokens, hint, **fields))
        assert response.status_code == 200, response.text
        return response.json()

    def read(self, asked: Prompt, **hint: Any) -> Any:
        """The report on an agent's request."""
        return self.ask(asked, 9, hint)["meta_info"]["kvcmas"]

    def state(self) -> dict[str, Any]:
        return requests.get(f"{self.url}/server_info", timeout=60).json()["internal_states"][0]["kvcmas"]

    def settle(self) -> dict[str, Any]:
        """Wait until nothing is left to learn or to check; returns the totals."""
        Client(self.url).wait_until_learned()
        totals = self.state()
        assert (totals["learning"], totals["fallbacks"]) == (0, 0)
        return totals


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = Path(tmp_path_factory.mktemp("server")) / "server.log"
    flags = ["--max-total-tokens", "24000", "--kvcmas-max-kl", str(BUDGET), "--kvcmas-allow-overrides"]
    with ServerProcess("server", kvcmas_command(str(default_image_model()), flags), log) as running:
        running.wait_ready()
        yield Server(running.url)
