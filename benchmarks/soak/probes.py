"""Plain prompts whose answers stock SGLang gave first, and how ours compare.

On a CPU in bf16 a token's logits depend on what else is in its batch, since a matrix product sums in another order. So
answers are held against each other in two ways. A prompt that both servers got while nothing else ran has to be
answered token for token. One that ours got among other requests may part from stock's where stock itself was
undecided: ours took a token that stock put within `near_tie` nats of its best. How often stock parts from itself under
load is measured too.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import requests

OUTPUT_TOKENS = 12
_BEST = 20


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and at each place the logprobs (nats) of the best ones."""

    tokens: tuple[int, ...]
    best: tuple[dict[int, float], ...]
    cached: int


@dataclass(frozen=True)
class Recorded:
    """A prompt and stock's answers: to the first time it was asked, and to the second, when all of it was cached."""

    prompt: tuple[int, ...]
    cold: Answer
    warm: Answer


def ask(url: str, prompt: Sequence[int]) -> Answer:
    """Ask a server for a greedy answer. Raises `requests.HTTPError`."""
    sampling = {"temperature": 0.0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": _BEST}
    response = requests.post(url + "/generate", json=body, timeout=600)
    response.raise_for_status()
    found = response.json()
    best = tuple(
        {int(token): float(logprob) for logprob, token, _ in place}
        for place in found["meta_info"]["output_top_logprobs"]
    )
    return Answer(tuple(found["output_ids"]), best, int(found["meta_info"]["cached_tokens"]))


def ask_together(url: str, prompts: Sequence[Sequence[int]], at_once: int) -> list[Answer]:
    """Ask for all of them, ``at_once`` at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: ask(url, prompt), prompts))


def parting(expected: Answer, tokens: Sequence[int]) -> tuple[int, float] | None:
    """Where ``tokens`` part from an answer, and how far stock put the other token below its best there, nats.

    None if nowhere; infinitely far where the other token was not among stock's best.
    """
    for at, (wanted, got) in enumerate(zip(expected.tokens, tokens, strict=True)):
        if wanted != got:
            known = expected.best[at]
            return at, max(known.values()) - known.get(got, float("-inf"))
    return None
