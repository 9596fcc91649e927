"""A Llama whose heads two ranks can share: SmolLM2's nine do not divide by two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from kvcmas_sgl.prepare_model import default_model

HEADS, KV_HEADS, LAYERS = 4, 2, 6
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def make_small_llama(folder: Path) -> Path:
    """Write random bf16 weights in Llama's shapes, with SmolLM2's tokenizer; returns ``folder``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = default_model()
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER:
        if (small / name).is_file():
            shutil.copy(small / name, folder / name)
    known = json.loads((small / "config.json").read_text())
    config = LlamaConfig(
        vocab_size=known["vocab_size"],
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=known["bos_token_id"],
        eos_token_id=known["eos_token_id"],
        initializer_range=0.06,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
