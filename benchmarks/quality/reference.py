"""A compact Llama forward pass that shows its KV: where methods run that recompute chosen tokens or layers.

tests/unit/test_reference.py ties it to the engine's model: the same weights give the same logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from kvcmas_sgl.triton_kernels import RotaryTable
from kvcmas_sgl.triton_kernels.rope import turn_
from safetensors.torch import load_file
from torch import Tensor


@dataclass
class KV:
    """K after RoPE and V of consecutive tokens from position 0 on, fp32 [L, n, H, d] each."""

    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return self.k.shape[1]

    def cut(self, start: int, stop: int) -> KV:
        """A view of tokens ``[start, stop)``."""
        return KV(self.k[:, start:stop], self.v[:, start:stop])

    @staticmethod
    def join(parts: Sequence[KV]) -> KV:
        return KV(torch.cat([part.k for part in parts], 1), torch.cat([part.v for part in parts], 1))


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; q, k and v in one matrix, gate and up in another."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class ReferenceModel:
    """A Llama-like model in fp32 from a folder of safetensors with tied or untied embeddings."""

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        folder = Path(folder)
        config = json.loads((folder / "config.json").read_text())
        weights = {
            name: part.to(dtype)
            for file in sorted(folder.glob("*.safetensors"))
            for name, part in load_file(file).items()
        }
        self.layers = config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps = config["rms_norm_eps"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.table = RotaryTable.from_theta(theta, self.head_dim, config["max_position_embeddings"])
        self.embedding = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self.norm = weights["model.norm.weight"]
        self.blocks = [_layer(weights, f"model.layers.{i}.") for i in range(self.layers)]

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [n, hidden] of int64 ``tokens`` [n]."""
        return self.embedding[tokens]

    def project(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Roped Q [n, heads, d], roped K and V [n, H, d] of ``hidden`` [n, hidden] at int64 ``positions`` [n]."""
        block = self.blocks[layer]
        x = F.rms_norm(hidden, hidden.shape[-1:], block.attention_norm, self.eps) @ block.qkv.T
        q, k, v = x.split([n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        cos, sin = self.table.rows(positions)
        return turn_(q.clone(), cos, sin, self.table), turn_(k.clone(), cos, sin, self.table), v

    def finish_layer(self, layer: int, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Hidden states after ``layer``: ``q`` at ``positions`` attends to ``k``, ``v`` [m, H, d] up to itself."""
        block = self.blocks[layer]
        m = k.shape[0]
        mask = None
        causal = q.shape[0] == m
        if not causal and int(positions.min()) < m - 1:
            mask = torch.arange(m)[None, :] <= positions[:, None]
        mixed = (
            F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=causal,
                enable_gqa=True,
            )[0]
            .transpose(0, 1)
            .flatten(1)
        )
        hidden = hidden + mixed @ block.out.T
        x = F.rms_norm(hidden, hidden.shape[-1:], block.mlp_norm, self.eps) @ block.gate_up.T
        gate, up = x.chunk(2, dim=-1)
        return hidden + (F.silu(gate) * up) @ block.down.T

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocabulary] of the last layer's ``hidden`` [n, hidden]."""
        return F.rms_norm(hidden, hidden.shape[-1:], self.norm, self.eps) @ self.head.T

    @torch.inference_mode()
    def extend(
        self,
        tokens: Tensor,
        past: KV | None = None,
        last: int = 1,
        watch: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> tuple[Tensor, KV]:
        """Compute ``tokens`` [n] after ``past``: logits of the ``last`` tokens, and the KV of past and new ones.

        ``watch(layer, q, k)`` sees the roped queries of the new tokens and the keys of all.
        """
        start = 0 if past is None else len(past)
        positions = torch.arange(start, start + len(tokens))
        hidden = self.embed(tokens)
        ks, vs = [], []
        for layer in range(self.layers):
            q, k, v = self.project(layer, hidden, positions)
            if past is not None:
                k, v = torch.cat([past.k[layer], k]), torch.cat([past.v[layer], v])
            if watch is not None:
                watch(layer, q, k)
            hidden = self.finish_layer(layer, hidden, q, k, v, positions)
            ks.append(k)
            vs.append(v)
        return self.logits(hidden[-last:]), KV(torch.stack(ks), torch.stack(vs))

    def canonical(self, kv: KV, start: int) -> tuple[Tensor, Tensor]:
        """Pre-RoPE K and V, [L, n, D] each, of ``kv`` whose first token is at position ``start``."""
        cos, sin = self.table.rows(torch.arange(start, start + len(kv)), inverse=True)
        return turn_(kv.k.clone(), cos, sin, self.table).flatten(2), kv.v.flatten(2)

    def place(self, k: Tensor, v: Tensor, start: int) -> KV:
        """KV of canonical ``k``, ``v`` [L, n, D] at positions from ``start`` on."""
        cos, sin = self.table.rows(torch.arange(start, start + k.shape[1]))
        shape = (self.kv_heads, self.head_dim)
        return KV(turn_(k.unflatten(-1, shape).clone(), cos, sin, self.table), v.unflatten(-1, shape))


def _layer(weights: dict[str, Tensor], at: str) -> Layer:
    def joined(*names: str) -> Tensor:
        return torch.cat([weights[f"{at}{name}.weight"] for name in names])

    return Layer(
        attention_norm=joined("input_layernorm"),
        qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=joined("self_attn.o_proj"),
        mlp_norm=joined("post_attention_layernorm"),
        gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
        down=joined("mlp.down_proj"),
    )


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q), nats, [n], of logits [n, vocabulary]."""
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)
