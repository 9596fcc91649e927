"""One stock engine, whose answers are kept, and then one engine of ours, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import kvcmas_sgl
from kvcmas_sgl.cpu.environment import has_gpu
from kvcmas_sgl.prepare_model import default_model
from tests.prompts import PLANNER, document, tokenizer

POOL = 9000
COMMON: dict[str, Any] = {
    "max_total_tokens": POOL,
    # Spans of 600 tokens cross chunk borders.
    "chunked_prefill_size": 512,
    "sleep_on_idle": True,
}
if not has_gpu():
    COMMON |= {"device": "cpu", "attention_backend": "kvcmas_cpu"}


def plain_prompts() -> list[list[int]]:
    """Twenty prompts, some of which share prefixes with earlier ones."""
    prompts = [document(i, 80 + 20 * i) for i in range(8)]
    prompts += [prompts[i][:60] + document(20, 50) for i in range(6)]
    prompts += [PLANNER.prompt(document(i, 100)) for i in range(3)]
    prompts += [tokenizer().encode(text) for text in ("The capital of France is", "1, 2, 3,", "def main():")]
    return prompts


def greedy(engine: Any, prompt: list[int], tokens: int = 12, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    return engine.generate(input_ids=prompt, sampling_params=sampling, **fields)


@pytest.fixture(scope="session")
def stock_answers() -> list[list[int]]:
    """Stock SGLang's greedy tokens for `plain_prompts`, with its own Rust tree."""
    import sglang as sgl

    engine = sgl.Engine(model_path=str(default_model()), **COMMON)
    try:
        return [greedy(engine, prompt)["output_ids"] for prompt in plain_prompts()]
    finally:
        engine.shutdown()


@pytest.fixture(scope="session")
def engine(stock_answers: list[list[int]]) -> Iterator[Any]:
    """Our engine; own deltas of full rank, and requests may choose policy and estimator."""
    import sglang as sgl

    # A budget that nothing here comes near: which way of reuse a span gets is then known. tests/tree tests the choice.
    # And no checks: what an edge has learned is then what a test has shown it.
    settings = kvcmas_sgl.engine_args(allow_overrides=True, own_rank=192, own_energy=1, max_kl=0.3, check_share=0)
    engine = sgl.Engine(model_path=str(default_model()), **COMMON, **settings)
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(autouse=True)
def _fresh_cache(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").flush_cache()


def state(engine: Any) -> dict[str, Any]:
    return engine.get_server_info()["internal_states"][0]["kvcmas"]


def settle(engine: Any, timeout_s: float = 120.0) -> dict[str, Any]:
    """Wait until nothing is left to learn; returns the totals."""
    deadline = time.monotonic() + timeout_s
    while (totals := state(engine))["learning"]:
        assert time.monotonic() < deadline, "learning never ended"
        time.sleep(0.1)
    return totals
