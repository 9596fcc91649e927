"""What plain traffic pays: the same prompts, one at a time, on stock with either tree and on ours without agents."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.serving.arms import ARMS, OFF, PYTHON, RUST, Fleet
from benchmarks.serving.bootstrap import Ratio
from benchmarks.workload.text import TextSupply
from kvcmas_sgl.demo.prompts import TokenPrompt

PLAIN_ARMS = (RUST, PYTHON, OFF)
COLD, TURN = "cold", "next_turn"
_COLD_TOKENS, _HISTORY_TOKENS, _TURN_TOKENS, _OUTPUT_TOKENS = 192, 1024, 24, 6
_DRAWS = 4000


@dataclass(frozen=True)
class Pair:
    """One prompt on all arms: seconds of the whole request, by arm; `hits`: tokens that were cached there."""

    kind: str
    seconds: dict[str, float]
    ttft_s: dict[str, float]
    hits: dict[str, int]


def measure_plain(fleet: Fleet, text: TextSupply, rounds: int) -> list[Pair]:
    """`rounds` cold prompts and as many next turns of one conversation, whose history is an exact hit.

    All arms get each prompt right after one another; which goes first changes from prompt to prompt.
    """

    async def work() -> list[Pair]:
        async with AsyncExitStack() as stack:
            endpoints = {name: await stack.enter_async_context(fleet.endpoint(ARMS[name])) for name in PLAIN_ARMS}
            history = text.span(_HISTORY_TOKENS)
            pairs: list[Pair] = []
            # The first prompts are a warm-up; they also make the history resident.
            for number in tqdm(range(-2, 2 * rounds), desc="plain", unit="prompt", file=sys.stderr, mininterval=2.0):
                kind = COLD if number % 2 else TURN
                ids = text.span(_COLD_TOKENS) if kind == COLD else (*history, *text.span(_TURN_TOKENS))
                seconds, ttft, hits = {}, {}, {}
                for place in range(len(PLAIN_ARMS)):
                    name = PLAIN_ARMS[(number + place) % len(PLAIN_ARMS)]
                    reply = await endpoints[name].send("", TokenPrompt(tuple(ids), ()), _OUTPUT_TOKENS)
                    if reply.error:
                        raise RuntimeError(f"{ARMS[name].label} refused a plain request: {reply.error}")
                    seconds[name], ttft[name], hits[name] = reply.seconds, reply.ttft_s, int(reply.exact or 0)
                if number >= 0:
                    pairs.append(Pair(kind, seconds, ttft, hits))
            return pairs

    return asyncio.run(work())


def overhead(pairs: Sequence[Pair], arm: str, against: str, kind: str | None = None) -> Ratio | None:
    """Median over prompts of the time on `arm` over the time on `against`, minus 1, with a 95 % bootstrap interval."""
    ratios = np.array([p.seconds[arm] / p.seconds[against] for p in pairs if kind is None or p.kind == kind]) - 1
    if not len(ratios):
        return None
    chooser = np.random.default_rng(0)
    drawn = np.median(chooser.choice(ratios, (_DRAWS, len(ratios))), axis=1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def plain_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Overheads of ours, and of stock's Python tree over its Rust tree, over all prompts and by kind."""
    names = {
        "ours_vs_python_tree": (OFF, PYTHON),
        "ours_vs_rust_tree": (OFF, RUST),
        "python_tree_vs_rust_tree": (PYTHON, RUST),
    }
    found: dict[str, Any] = {}
    for kind in (None, COLD, TURN):
        group = kind or "all"
        found[group] = {}
        for name, (arm, against) in names.items():
            ratio = overhead(pairs, arm, against, kind)
            found[group][name] = ratio and ratio.as_json()
    found["median_seconds"] = {
        kind: {arm: float(np.median([pair.seconds[arm] for pair in pairs if pair.kind == kind])) for arm in PLAIN_ARMS}
        for kind in (COLD, TURN)
        if any(pair.kind == kind for pair in pairs)
    }
    return found
