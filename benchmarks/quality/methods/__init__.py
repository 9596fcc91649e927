"""Every method of the report, by name, with its parameters."""

from __future__ import annotations

from kvcmas_sgl.radix_ext.estimators import (
    AffineEstimator,
    AnchorsEstimator,
    MeanEstimator,
    NearestEstimator,
    NoneEstimator,
)
from kvcmas_sgl.radix_ext.heavy import EFFORTS, Effort

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
from kvcmas_sgl.config import KvcmasConfig

MAIN = (
    "dense", "noise", "fullshared", "droidspeak", "cacheblend", "relaycaching", "epic", "graphflow", "kamera", "kvcomm",
    "kvcmas", "kvcmas_unchained", "ours", "ours_own_delta", "none", "mean", "nearest", "anchors",
)  # fmt: skip
"""Rows of the table; the others are points of the curves."""

QUICK = (
    *MAIN, "fullshared@16", "fullshared_context_free", "ours@0", "ours+few@0", "ours+heavy@0", "ours_all_spans",
)  # fmt: skip
"""What a quick run measures: the table, and the points of the curves that matter most."""

DEFAULTS = KvcmasConfig()
PUBLISHED_TAU = 0.32
KVCOMM_GATE = 0.3
CONTROL_POOL = 10
FEW = Effort("+few", 1 / 18, 1, 64)
"""Beside the server's efforts: what at most 6 % of a span, without a head, are worth on spans of any length."""


def make_methods(model: ReferenceModel) -> list[Method]:
    """All methods, unlearned."""
    size = (model.layers, model.kv_heads, model.head_dim)

    profile = LayerProfile()
    affine = AffineEstimator(*size, DEFAULTS.rank)
    chained, alone = (AnchorsEstimator(*size, rank=32, pool=10) for _ in range(2))

    def ours(name: str, head: int, effort: Effort, *, min_span: int = 0) -> DeltaMethod:
        more = f", heavy hitters ({effort.share:.1%}) too" if effort.share else ""
        more += f", spans below {min_span} tokens whole" if min_span else ""
        return DeltaMethod(
            name,
            affine,
            head=head,
            effort=effort,
            min_span=min_span,
            learns=name == "ours",
            solve_once=True,
            family=f"ours{effort.mark}",
            parameter=head,
            note=f"affine map of rank {DEFAULTS.rank} from the last reader; {head} head tokens computed{more}",
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
        *(FullShared(f"fullshared@{head}", head=head) for head in (8, DEFAULTS.head, 32)),
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
        ours("ours", DEFAULTS.head, EFFORTS[1], min_span=DEFAULTS.min_span),
        *(
            ours(f"ours{e.mark or '+head'}", DEFAULTS.head, e, min_span=DEFAULTS.min_span)
            for e in (EFFORTS[0], EFFORTS[2])
        ),
        ours("ours_all_spans", DEFAULTS.head, EFFORTS[1]),
        *(ours(f"ours{effort.mark}@{head}", head, effort) for effort in EFFORTS for head in (0, 8, DEFAULTS.head, 32)),
        ours(f"ours{FEW.mark}@0", 0, FEW),
        OwnDelta("ours_own_delta", DEFAULTS.own_rank, energy=DEFAULTS.own_energy, family="own delta"),
        *(OwnDelta(f"ours_own_delta@{rank}", rank, family="own delta") for rank in (8, 32)),
        DeltaMethod("none", NoneEstimator(*size), note="control of the estimator interface: must equal fullshared"),
        DeltaMethod("mean", MeanEstimator(*size, pool=CONTROL_POOL), note="mean delta of learned spans at each index"),
        DeltaMethod(
            "nearest", NearestEstimator(*size, pool=CONTROL_POOL), note="delta of the nearest learned span, by token"
        ),
        DeltaMethod("anchors", chained, learns=False, note="the estimator of kvcmas, with glue computed and no gate"),
    ]


__all__ = ["MAIN", "QUICK", "Method", "Used", "make_methods"]
