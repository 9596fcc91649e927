"""Every method of the report, by name, with its parameters."""

from __future__ import annotations

from kvcmas_sgl.radix_ext.estimators import (
    AffineEstimator,
    AnchorsEstimator,
    MeanEstimator,
    NearestEstimator,
    NoneEstimator,
)

from benchmarks.quality.methods.base import Method, Used
from benchmarks.quality.methods.cacheblend import CacheBlend
from benchmarks.quality.methods.deltas import DeltaMethod, OwnDelta
from benchmarks.quality.methods.epic import Epic
from benchmarks.quality.methods.exact import Dense, Rechunked
from benchmarks.quality.methods.fullshared import FullShared
from benchmarks.quality.methods.graphflow import GraphFlow
from benchmarks.quality.methods.layers import DroidSpeak, LayerProfile, RelayCaching
from benchmarks.quality.methods.published import Published
from benchmarks.quality.reference import ReferenceModel

MAIN = (
    "dense", "noise", "fullshared", "droidspeak", "cacheblend", "relaycaching", "epic", "graphflow", "kamera", "kvcomm",
    "kvcmas", "kvcmas_unchained", "ours", "ours_own_delta", "none", "mean", "nearest", "anchors",
)  # fmt: skip
"""Rows of the table; the others are points of the curves."""

QUICK = (*MAIN, "fullshared@16", "fullshared_context_free", "cacheblend@0.3", "epic@32", "ours@0", "ours@32")
"""What a quick run measures: the table, and two points of the curves that matter most."""

OURS_RANK = 64
OURS_HEAD = 16
PUBLISHED_TAU = 0.32
KVCOMM_GATE = 0.3
CONTROL_POOL = 10


def make_methods(model: ReferenceModel) -> list[Method]:
    """All methods, unlearned."""
    size = (model.layers, model.kv_heads, model.head_dim)

    profile = LayerProfile()
    affine = AffineEstimator(*size, OURS_RANK)
    chained, alone = (AnchorsEstimator(*size, rank=32, pool=10) for _ in range(2))

    def ours(head: int, tail: int = 0) -> DeltaMethod:
        is_main = (head, tail) == (OURS_HEAD, 0)
        return DeltaMethod(
            "ours" if is_main else f"ours@{head}" + (f"+{tail}" if tail else ""),
            affine,
            head=head,
            tail=tail,
            learns=is_main,
            solve_once=True,
            family="ours, head and tail" if tail else "ours",
            parameter=head + tail,
            note=f"affine map of rank {OURS_RANK} from the last reader; {head} head and {tail} tail tokens exact",
        )

    def kvcmas(tau: float) -> Published:
        is_main = tau == PUBLISHED_TAU
        return Published(
            "kvcmas" if is_main else f"kvcmas@{tau}",
            chained,
            tau=tau,
            context_free=False,
            correct_glue=False,
            learns=is_main,
            family="kvcmas",
            note="glue rotated from the agent's template, as published; frozen pool of 10",
        )

    return [
        Dense("dense"),
        Rechunked("noise"),
        FullShared("fullshared"),
        *(FullShared(f"fullshared@{head}", head=head) for head in (8, OURS_HEAD, 32)),
        FullShared("fullshared_context_free", context_free=True),
        *(DroidSpeak("droidspeak" if b == 0.2 else f"droidspeak@{b}", b, profile) for b in (0.1, 0.2, 0.4)),
        *(CacheBlend("cacheblend" if r == 0.16 else f"cacheblend@{r}", r) for r in (0.05, 0.16, 0.3)),
        RelayCaching("relaycaching"),
        *(Epic("epic" if k == 16 else f"epic@{k}", k) for k in (8, 16, 32)),
        GraphFlow("graphflow", MeanEstimator(*size, pool=CONTROL_POOL)),
        OwnDelta(
            "kamera",
            32,
            context_free=True,
            note="second visit of the same bytes by the same reader; the first visit, and unseen content, is dense",
        ),
        Published(
            "kvcomm",
            AnchorsEstimator(*size, rank=None, pool=20, top_k=None),
            tau=KVCOMM_GATE,
            context_free=True,
            correct_glue=True,
            note="glue corrected per channel from the agent's template; frozen pool of 20",
        ),
        *(kvcmas(tau) for tau in (0.02, 0.1, PUBLISHED_TAU)),
        Published(
            "kvcmas_unchained",
            alone,
            tau=PUBLISHED_TAU,
            context_free=True,
            correct_glue=False,
            note="as kvcmas, from a context-free encoding",
        ),
        *(ours(head) for head in (0, 8, OURS_HEAD, 32)),
        ours(OURS_HEAD, 16),
        *(OwnDelta("ours_own_delta" if r == 32 else f"ours_own_delta@{r}", r, family="own delta") for r in (8, 32)),
        DeltaMethod("none", NoneEstimator(*size), note="control of the estimator interface: must equal fullshared"),
        DeltaMethod("mean", MeanEstimator(*size, pool=CONTROL_POOL), note="mean delta of learned spans at each index"),
        DeltaMethod(
            "nearest", NearestEstimator(*size, pool=CONTROL_POOL), note="delta of the nearest learned span, by token"
        ),
        DeltaMethod("anchors", chained, learns=False, note="the estimator of kvcmas, with glue computed and no gate"),
    ]


__all__ = ["MAIN", "QUICK", "Method", "Used", "make_methods"]
