"""How far one run's next-token distributions are from another's, position by position of one answer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from kvcmas_sgl.demo.client import Scores


def kl_divergence(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL(reference || other) in nats, over the reference's tokens and one bucket for all the rest.

    Lumping the rest makes it a lower bound of the full KL (data-processing inequality), exact but for what happens
    inside of that rest.

    Args:
        reference: token -> log probability of its likeliest tokens.
        other: token -> log probability; holds at least the reference's tokens.
    """
    inside = sum(math.exp(logprob) * (logprob - other[token]) for token, logprob in reference.items())
    # Rounding can put the sum of many probabilities a little over 1.
    rest = max(1.0 - sum(math.exp(logprob) for logprob in reference.values()), 1e-9)
    other_rest = max(1.0 - sum(math.exp(other[token]) for token in reference), 1e-9)
    return inside + rest * math.log(rest / other_rest)


def mean_kl(reference: Scores, other: Scores) -> float:
    """Mean of `kl_divergence` over the answer's positions; `other` was asked for the reference's tokens."""
    pairs = zip(reference.top, other.asked, strict=True)
    return statistics.fmean(kl_divergence(dense, approximate) for dense, approximate in pairs)


def top1_agreement(reference: Scores, other: Scores) -> float:
    """Share of the answer's positions at which both name the same likeliest token."""
    pairs = zip(reference.top, other.top, strict=True)
    return statistics.fmean(_likeliest(dense) == _likeliest(approximate) for dense, approximate in pairs)


def _likeliest(logprobs: Mapping[int, float]) -> int:
    return max(logprobs, key=lambda token: logprobs[token])
