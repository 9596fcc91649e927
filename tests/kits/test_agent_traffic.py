"""SGLang's KL and cache-hit kits, whose contracts hold for agents too, with hints in their requests."""

from __future__ import annotations

import unittest
from typing import Any

import pytest
from sglang.test import kl_test_utils
from sglang.test.kits import cache_hit_kit
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin

from kvcmas_sgl.demo.servers import ServerProcess
from kvcmas_sgl.prepare_model import default_model
from kvcmas_sgl.wire import agent_hint
from tests.kits.traffic import BUDGET, PROMPTS, TOKENS, AgentTraffic
from tests.prompts import HEAD


@pytest.mark.usefixtures("kit", "long_bench")
class TestKLDivergence(KLDivergenceMixin, unittest.TestCase):
    """Answers over corrected KV, against a dense replay of the same tokens: the budget is the kit's threshold."""

    kl_div_thres = BUDGET
    kl_div_max_samples = PROMPTS
    kl_div_prefill_max_new_tokens = kl_div_decode_max_new_tokens = 16

    @pytest.fixture(autouse=True)
    def _with_agents(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        traffic = AgentTraffic(kl_test_utils._flush_cache, kl_test_utils._generate)
        monkeypatch.setattr(kl_test_utils, "_flush_cache", traffic.flush)
        monkeypatch.setattr(kl_test_utils, "_generate", traffic.generate)
        yield
        corrected = [report["corrected_tokens"] >= TOKENS - HEAD - 32 for report in traffic.reports]
        assert len(corrected) == 2 * PROMPTS and sum(corrected) > 0.5 * len(corrected)


def test_multiturn_cache_hit(server: ServerProcess, share_gpt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of one agent: its own history is an exact hit, hint or not."""
    plain = cache_hit_kit.gen_payload

    def with_hint(input_ids: list[int], *args: Any) -> dict[str, Any]:
        return {**plain(input_ids, *args), "kv_hints": agent_hint("talker", [(16, 240)])}

    monkeypatch.setattr(cache_hit_kit, "gen_payload", with_hint)
    result = cache_hit_kit.run_multiturn_cache_hit_test(
        server.url, str(default_model()), num_clients=6, dataset_path=share_gpt
    )
    hits = [result["rounds"][f"round_{r}"]["total_cached_tokens"] for r in (1, 2)]
    assert hits == [6 * 287, 6 * 575]
