"""SGLang's server kits with the traffic that they make. docs/kits.md says which were left out."""

from __future__ import annotations

import unittest
from functools import partial
from typing import ClassVar

import pytest
from sglang.test.kits import cache_hit_kit, radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin

from kvcmas_sgl.demo.servers import ServerProcess
from kvcmas_sgl.prepare_model import default_model
from tests.kits.traffic import PROMPTS
from tests.prompts import document


@pytest.mark.usefixtures("kit")
class TestBasics(BasicAPIContractMixin, BasicDecodeCorrectnessMixin, BasicSchedulerStressMixin, unittest.TestCase):
    # What the small model gets wrong on stock SGLang, too.
    test_basic_math = test_concurrent_requests = None


@pytest.mark.usefixtures("kit")
class TestAbortAndPause(AbortAllMixin, PauseResumeInPlaceMixin, unittest.TestCase):
    abort_all_num_requests = pause_num_requests = 16
    # The model's context ends before the kit's 16,000 tokens.
    abort_all_max_new_tokens = 4000
    pause_max_new_tokens = 96
    pause_ignore_eos = True


@pytest.mark.usefixtures("kit", "long_bench")
class TestKLDivergence(KLDivergenceMixin, unittest.TestCase):
    kl_div_thres = 0.003
    kl_div_max_samples = PROMPTS
    kl_div_prefill_max_new_tokens = kl_div_decode_max_new_tokens = 32


@pytest.mark.usefixtures("kit")
class TestUnifiedRadixTree(UnifiedRadixTreeTestMixin, unittest.TestCase):
    # Few-shot GSM8K wants a download, and a model that can solve it.
    test_gsm8k = None
    max_new_tokens = 16
    prefix_len = 256
    input_ids: ClassVar = [document(i, 400) for i in range(4)]


def test_radix_attention(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = partial(radix_cache_server_kit.gen_radix_tree, num_nodes=80, chunk_len=48)
    monkeypatch.setattr(radix_cache_server_kit, "gen_radix_tree", smaller)
    radix_cache_server_kit.run_radix_attention_test(server.url)


def test_multiturn_cache_hit(server: ServerProcess, share_gpt: str) -> None:
    result = cache_hit_kit.run_multiturn_cache_hit_test(
        server.url, str(default_model()), num_clients=6, dataset_path=share_gpt
    )
    # Its rounds have 256, 544 and 832 tokens, of which the newest 256 and the last generated one are computed.
    hits = [result["rounds"][f"round_{r}"]["total_cached_tokens"] for r in (1, 2)]
    assert hits == [6 * 287, 6 * 575]
