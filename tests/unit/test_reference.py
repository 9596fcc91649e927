"""The reference forward pass against transformers' Llama, and the moves that the methods build on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quality.reference import KV, ReferenceModel, divergence


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with grouped heads, written as transformers writes it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> ReferenceModel:
    return ReferenceModel(folder)


TOKENS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def test_logits_and_kv_are_those_of_transformers(folder: Path, model: ReferenceModel) -> None:
    from transformers import LlamaForCausalLM

    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    want = theirs(TOKENS[None], use_cache=True)
    logits, kv = model.extend(TOKENS, last=len(TOKENS))
    torch.testing.assert_close(logits, want.logits[0], rtol=1e-4, atol=1e-4)
    for layer in range(3):
        keys, values = want.past_key_values.layers[layer].keys, want.past_key_values.layers[layer].values
        torch.testing.assert_close(kv.k[layer], keys[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kv.v[layer], values[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cuts", [(1,), (17,), (39,), (5, 6, 30)])
def test_chunks_give_what_one_pass_gives(model: ReferenceModel, cuts: tuple[int, ...]) -> None:
    want_logits, want = model.extend(TOKENS, last=1)
    past: KV | None = None
    for start, stop in zip((0, *cuts), (*cuts, len(TOKENS)), strict=True):
        logits, past = model.extend(TOKENS[start:stop], past)
    assert past is not None
    torch.testing.assert_close(past.k, want.k, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(past.v, want.v, rtol=1e-4, atol=1e-5)
    assert float(divergence(want_logits, logits)) < 1e-9


def test_a_moved_span_is_the_span_computed_there(model: ReferenceModel) -> None:
    """Layer 0 depends on token and position alone, so a move must give exactly what the other position computes."""
    _, kv = model.extend(TOKENS)
    _, shifted = model.extend(torch.cat([TOKENS[:7], TOKENS]))
    k, v = model.canonical(kv.cut(10, 30), 10)
    moved = model.place(k, v, 17)
    torch.testing.assert_close(moved.k[0], shifted.k[0, 17:37], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moved.v[0], shifted.v[0, 17:37], rtol=1e-4, atol=1e-5)
    back = model.place(*model.canonical(moved, 17), 10)
    torch.testing.assert_close(back.k, kv.k[:, 10:30], rtol=1e-4, atol=1e-5)


def test_watch_sees_the_queries_and_keys_of_the_pass(model: ReferenceModel) -> None:
    """The softmax of what is seen, times the values, is what one query attends to: compare the whole by the logits."""
    seen: dict[int, tuple[torch.Size, torch.Size]] = {}
    _, past = model.extend(TOKENS[:30])
    model.extend(TOKENS[30:], past, watch=lambda layer, q, k: seen.update({layer: (q.shape, k.shape)}))
    assert seen == {layer: (torch.Size([10, 4, 12]), torch.Size([40, 2, 12])) for layer in range(3)}


def test_divergence_is_the_textbook_sum() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64)
    want = 0.5 * torch.log(torch.tensor(2.0)) + 0.25 * torch.log(torch.tensor(0.5))
    torch.testing.assert_close(divergence(p.log(), q.log()), want.double()[None])
