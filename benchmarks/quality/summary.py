"""From results to figures: one row a method, with what counts and what does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.quality.measure import ProbeResult, Result

_NOISE_FACTOR = 3.0
_RESAMPLES = 2000


@dataclass(frozen=True)
class Row:
    """One method over all cells that count.

    kl_*: nats; kl_ratio: of kl_mean to FullShared's. top1: share of tokens. answer_agreement: of questions on which the
    same options are chosen as by the dense run. same_answer: of greedy answers with the dense tokens. score: of
    questions answered right, of kinds that the dense run answers above chance; score_low, score_high: 95 % interval of
    the difference to dense, paired bootstrap over tasks. recomputed_share: token-layers computed over those of a dense
    run, encoding without context included; reused_share: token-layers taken over. span_recomputed_share: token-layers
    of spans computed, of all that spans have; of what a method computes, text between spans comes first. error_k,
    error_v: relative, mean over layers. seconds: a reading, without its request.
    """

    kl_mean: float
    kl_first: float
    kl_p95: float
    kl_ratio: float
    top1: float
    answer_agreement: float | None
    same_answer: float
    score: float | None
    score_low: float | None
    score_high: float | None
    single_hop: float | None
    multi_hop: float | None
    recomputed_share: float
    reused_share: float
    span_recomputed_share: float
    state_bytes: int
    error_k: float
    error_v: float
    error_k_layers: tuple[float, ...]
    error_v_layers: tuple[float, ...]
    seconds: float
    readings: int


@dataclass(frozen=True)
class Cell:
    """FullShared against noise for one kind of task and reader; a cell within three times noise does not count."""

    kind: str
    agent: str
    fullshared: float
    noise: float
    noise_bf16: float | None

    @property
    def counts(self) -> bool:
        return self.fullshared > _NOISE_FACTOR * self.noise

    @property
    def shows_in_bf16(self) -> bool | None:
        return None if self.noise_bf16 is None else self.fullshared > _NOISE_FACTOR * self.noise_bf16


def mean_kl(results: Sequence[Result]) -> float:
    """Over all tokens of all readings, nats."""
    return float(torch.cat([result.kl for result in results]).mean())


def cells(results: Sequence[Result], noise_bf16: float | None) -> list[Cell]:
    """All cells, in the order of reading."""
    keys = dict.fromkeys((result.kind, result.agent) for result in results)
    out = []
    for kind, agent in keys:
        of = {
            method: mean_kl([r for r in results if (r.method, r.kind, r.agent) == (method, kind, agent)])
            for method in ("fullshared", "noise")
        }
        out.append(Cell(kind, agent, of["fullshared"], of["noise"], noise_bf16))
    return out


def scored_hops(results: Sequence[Result]) -> dict[int, tuple[float, float, bool]]:
    """hops -> (dense score, chance, whether the score is two standard errors above chance)."""
    dense = [probe for result in results if result.method == "dense" for probe in result.probes]
    out = {}
    for hops in sorted({probe.hops for probe in dense}):
        right = np.array([_right(probe) for probe in dense if probe.hops == hops], dtype=float)
        chance = float(np.mean([probe.chance for probe in dense if probe.hops == hops]))
        error = max((chance * (1 - chance) / len(right)) ** 0.5, 1e-9)
        out[hops] = (float(right.mean()), chance, bool(right.mean() > chance + 2 * error))
    return out


def summarize(results: Sequence[Result], counted: Sequence[Cell], state: Mapping[str, int]) -> dict[str, Row]:
    """One row a method, over the cells that count; ``state``: method -> bytes."""
    keys = {(cell.kind, cell.agent) for cell in counted if cell.counts}
    results = [result for result in results if (result.kind, result.agent) in keys]
    hops = {hop for hop, (_, _, good) in scored_hops(results).items() if good}
    by_method: dict[str, list[Result]] = {}
    for result in results:
        by_method.setdefault(result.method, []).append(result)
    base = mean_kl(by_method["fullshared"])
    return {name: _row(found, by_method["dense"], base, hops, state.get(name, 0)) for name, found in by_method.items()}


def _row(found: Sequence[Result], dense: Sequence[Result], base: float, hops: set[int], state_bytes: int) -> Row:
    kl = torch.cat([result.kl for result in found])
    probes = [probe for result in found for probe in result.probes]
    scored = [probe for probe in probes if probe.hops in hops]
    low, high = _interval(found, dense, hops)
    total = sum(result.computed + result.reused + result.request for result in found)
    of_spans = [len(result.error_k) * sum(result.span_lengths) for result in found]
    error_k = torch.stack([result.error_k for result in found]).mean(0)
    error_v = torch.stack([result.error_v for result in found]).mean(0)
    return Row(
        kl_mean=float(kl.mean()),
        kl_first=float(torch.stack([result.kl[result.first] for result in found]).mean()),
        kl_p95=float(kl.quantile(0.95)),
        kl_ratio=float(kl.mean()) / base,
        top1=float(torch.cat([result.top1 for result in found]).double().mean()),
        answer_agreement=_share([probe.chosen == probe.dense for probe in probes]),
        same_answer=float(np.mean([result.same_answer for result in found])),
        score=_share([_right(probe) for probe in scored]),
        score_low=low,
        score_high=high,
        single_hop=_share([_right(probe) for probe in probes if probe.hops == 1]),
        multi_hop=_share([_right(probe) for probe in probes if probe.hops == 2]),
        recomputed_share=sum(r.computed + r.encoded + r.request for r in found) / total,
        reused_share=sum(result.reused for result in found) / total,
        span_recomputed_share=sum(max(0, spans - r.reused) for r, spans in zip(found, of_spans, strict=True))
        / sum(of_spans),
        state_bytes=state_bytes,
        error_k=float(error_k.mean()),
        error_v=float(error_v.mean()),
        error_k_layers=tuple(error_k.tolist()),
        error_v_layers=tuple(error_v.tolist()),
        seconds=float(np.mean([result.seconds for result in found])),
        readings=len(found),
    )


def _right(probe: ProbeResult) -> bool:
    return probe.chosen == probe.gold


def _share(flags: Sequence[bool]) -> float | None:
    return float(np.mean(flags)) if flags else None


def _interval(found: Sequence[Result], dense: Sequence[Result], hops: set[int]) -> tuple[float | None, float | None]:
    """95 % of the score's difference to dense. Questions about one document are alike, so whole tasks are drawn."""
    differences: dict[str, list[float]] = {}
    theirs = {(result.task, result.agent): result.probes for result in dense}
    for result in found:
        for mine, other in zip(result.probes, theirs[result.task, result.agent], strict=True):
            if mine.hops in hops:
                differences.setdefault(result.task, []).append(float(_right(mine)) - float(_right(other)))
    if not differences:
        return None, None
    sums = np.array([sum(values) for values in differences.values()])
    counts = np.array([len(values) for values in differences.values()])
    drawn = np.random.default_rng(0).integers(0, len(sums), (_RESAMPLES, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
