"""A second model shape, for time only: Qwen2's 0.5B layers with random weights and SmolLM2's tokenizer."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.serving.agents import AgentBench, comparison
from benchmarks.serving.arms import ARMS, OURS, RUST, Arm, Fleet
from benchmarks.serving.plan import Plan
from benchmarks.serving.session import learn
from benchmarks.workload.arrivals import ClosedLoop
from benchmarks.workload.text import TextSupply
from kvcmas_sgl.demo.prompts import PromptMaker
from kvcmas_sgl.prepare_model import default_model

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_POOL = ("--max-total-tokens", "24000")
_LEARNED, _TIMED = 2, 2


def make_qwen2_like(folder: Path) -> None:
    """Write bf16 weights in the shapes of Qwen2-0.5B, but for the vocabulary, which is SmolLM2's."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    small = default_model()
    for name in _TOKENIZER:
        if (small / name).is_file():
            shutil.copy(small / name, folder / name)
    known = json.loads((small / "config.json").read_text())
    config = Qwen2Config(
        vocab_size=known["vocab_size"],
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=known["bos_token_id"],
        eos_token_id=known["eos_token_id"],
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def measure_second_model(plan: Plan, prompts: PromptMaker, text: TextSupply, logs: Path) -> dict[str, Any]:
    """Workflows one hop at a time, on stock and on ours. Ours reuses whatever it can: quality says nothing here."""
    folder = Path(tempfile.mkdtemp(prefix="kvcmas-qwen2-like-"))
    try:
        make_qwen2_like(folder)
        arms = (ARMS[RUST], Arm(OURS, "ours", ours=True, hints=True, flags=("--kvcmas-policy", "always")))
        with Fleet(str(folder), logs / "second-model", _POOL) as fleet:
            fleet.start(arms)
            bench = AgentBench(fleet, prompts, text, plan)
            builder = bench.make_builder(document_tokens=(plan.second_document, plan.second_document))
            bench.prepare((arms[0],))
            learn(fleet, arms[1], builder.workflows(_LEARNED, "learned-"), "second model")
            found = bench.compare(builder.workflows(_TIMED, "timed-"), ClosedLoop(1), arms, "second model")
            rows = [bench.row(entry) for entry in found]
        shape = "Qwen2-0.5B's layers, random weights"
        return {"model": shape, **comparison(found), "rows": rows}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
