"""SGLang's own test kits against our cache: one server for those that can share one, and text in place of downloads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.test import kl_test_utils

from kvcmas_sgl.demo.servers import ServerProcess, kvcmas_command
from kvcmas_sgl.prepare_model import default_model
from tests.kits.traffic import BUDGET, PROMPTS, TOKENS
from tests.prompts import CRITIC, document, tokenizer

FLAGS = ["--kvcmas-max-kl", str(BUDGET), "--max-total-tokens", "40000", "--max-running-requests", "48"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = Path(tmp_path_factory.mktemp("kits")) / "server.log"
    with ServerProcess("server", kvcmas_command(str(default_model()), FLAGS), log) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="class")
def kit(request: pytest.FixtureRequest, server: ServerProcess) -> None:
    """What a kit's mixin asks of the class that it is mixed into."""
    request.cls.base_url = server.url
    request.cls.process = server.process
    request.cls.model = str(default_model())


@pytest.fixture(scope="session")
def share_gpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file in ShareGPT's format: the cache-hit kit downloads one otherwise."""
    talks = [
        {"conversations": [{"value": tokenizer().decode(document(i))}, {"value": tokenizer().decode(document(i, 40))}]}
        for i in range(24)
    ]
    path = Path(tmp_path_factory.mktemp("kits")) / "talks.json"
    path.write_text(json.dumps(talks))
    return str(path)


@pytest.fixture
def long_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of the KL kit, which downloads LongBench otherwise: a critic's, over one document each."""
    key = f"{default_model()}_{kl_test_utils.DEFAULT_PROMPT_TOKENS}_{kl_test_utils.DEFAULT_NUM_SAMPLES}"
    prompts = [CRITIC.prompt(document(i, TOKENS)) for i in range(PROMPTS)]
    monkeypatch.setitem(kl_test_utils._cached_input_ids, key, prompts)
