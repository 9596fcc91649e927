"""Next-token distributions of an engine, and how far apart two of them are."""

from __future__ import annotations

import math
from typing import Any

TOP = 128


def distributions(engine: Any, prompt: list[int], answer: list[int], **fields: Any) -> list[dict[int, float]]:
    """Log-probabilities of the ``TOP`` likeliest tokens at every position of a forced answer."""
    out = engine.generate(
        input_ids=prompt + answer,
        sampling_params={"temperature": 0.0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
        top_logprobs_num=TOP,
        **fields,
    )
    rows = out["meta_info"]["input_top_logprobs"]
    return [{int(token): float(value) for value, token, *_ in row} for row in rows if row]


def kl(p: list[dict[int, float]], q: list[dict[int, float]]) -> float:
    """Mean KL(p || q) in nats over positions, on p's top tokens that q reports too, the rest as one bucket.

    Lumping only lowers a KL: the figure is a lower bound.
    """
    assert len(p) == len(q) > 0
    total = 0.0
    for a, b in zip(p, q, strict=True):
        shared = [token for token in a if token in b]
        pairs = [(math.exp(a[token]), math.exp(b[token])) for token in shared]
        rest = [max(1e-9, 1 - sum(column)) for column in zip(*pairs, strict=True)]
        pairs.append((rest[0], rest[1]))
        total += sum(x * math.log(x / max(y, 1e-12)) for x, y in pairs if x > 0)
    return total / len(p)
