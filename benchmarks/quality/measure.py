"""Run every method on the same chains, and compare what the model then says with the dense run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality.chains import Chain, Held, Reading, sources_after
from benchmarks.quality.methods import Method, Used
from benchmarks.quality.prompts import Probe
from benchmarks.quality.reference import KV, ReferenceModel


@dataclass(frozen=True)
class ProbeResult:
    """One question: the dense run's and the method's choice at each step, and the right ones."""

    hops: int
    chance: float
    dense: tuple[int, ...]
    chosen: tuple[int, ...]
    gold: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """One method on one reading.

    kl: nats at each token of the request and of the dense answer, fp64 [n]; ``first`` is the index whose next token
    begins the answer. top1: bool [n]. same_answer: the method's greedy answer has the dense one's tokens. error_k,
    error_v: relative error of the spans' KV, fp32 [L]. token_error: squared error of K and V over the squared norms,
    per span token. selected: bool, which of the span tokens a rule chose. computed, reused, encoded: as in `Used`;
    request: token-layers after the spans; seconds: to get the KV, the request not included.
    """

    method: str
    task: str
    kind: str
    agent: str
    kl: Tensor
    first: int
    top1: Tensor
    same_answer: bool
    probes: tuple[ProbeResult, ...]
    error_k: Tensor
    error_v: Tensor
    token_error: Tensor
    span_lengths: tuple[int, ...]
    selected: Tensor | None
    computed: int
    reused: int
    encoded: float
    request: int
    seconds: float


class DenseScores:
    """What is compared with, once a reading: next-token distributions, likeliest tokens, and the dense choices."""

    def __init__(self, model: ReferenceModel, reading: Reading) -> None:
        logprobs = reading.logits.double().log_softmax(-1)
        self._probs = logprobs.exp()
        self._negative_entropy = (self._probs * logprobs).sum(-1)
        self.best = reading.logits.argmax(-1)
        self.choices = tuple(
            choose(model, reading.dense.cut(0, reading.prompt.body), probe) for probe in reading.probes
        )

    def kl(self, logits: Tensor) -> Tensor:
        """KL of the dense distributions to those of ``logits`` fp32 [n, vocabulary], nats, fp64 [n].

        The normaliser is one number a row: sum p (log p - l + log Z) = sum p log p - sum p l + log Z.
        """
        given = logits.double()
        return self._negative_entropy - torch.linalg.vecdot(self._probs, given) + given.logsumexp(-1)


def measure_chain(model: ReferenceModel, methods: Sequence[Method], chain: Chain) -> list[Result]:
    """Every method on every reading but the first. A method's sources are what it left there before."""
    results = []
    dense = {reading.agent: DenseScores(model, reading) for reading in chain.readings[1:]}
    for method in methods:
        sources: dict[str, Held] = sources_after(chain.task, chain.readings[0], {})
        for reading in chain.readings[1:]:
            begin = time.perf_counter()
            used = method.read(chain, reading, chain.alone if method.context_free else sources)
            seconds = time.perf_counter() - begin
            result, whole = compare(model, method.name, chain, reading, dense[reading.agent], used, seconds)
            results.append(result)
            sources.update(sources_after(chain.task, reading, sources, whole))
    return results


def compare(
    model: ReferenceModel,
    name: str,
    chain: Chain,
    reading: Reading,
    dense: DenseScores,
    used: Used,
    seconds: float,
) -> tuple[Result, KV]:
    """The result, and the KV of prompt and answer as the method leaves it."""
    prompt = reading.prompt
    if len(used.kv) != prompt.body:
        raise ValueError(f"{name} returned KV of {len(used.kv)} tokens: it must be the body's {prompt.body}")
    tokens = torch.cat([prompt.tokens[prompt.body :], reading.answer])
    logits, whole = model.extend(tokens, used.kv, last=len(tokens))
    kl = dense.kl(logits[:-1])
    top1 = dense.best == logits[:-1].argmax(-1)
    first = len(prompt.tokens) - prompt.body - 1
    error_k, error_v, token_error = span_errors(reading, used.kv)
    rows = torch.cat([torch.arange(span.start, span.stop) for span in prompt.spans])
    result = Result(
        method=name,
        task=chain.task.name,
        kind=chain.task.kind,
        agent=reading.agent,
        kl=kl,
        first=first,
        top1=top1,
        # At each position the dense answer stands before: it is the method's own answer as long as both agree.
        same_answer=bool(top1[first:].all()),
        probes=tuple(
            ProbeResult(
                probe.hops, probe.chance, choices, choose(model, used.kv, probe), tuple(gold for *_, gold in probe.at)
            )
            for probe, choices in zip(reading.probes, dense.choices, strict=True)
        ),
        error_k=error_k,
        error_v=error_v,
        token_error=token_error,
        span_lengths=tuple(len(span) for span in prompt.spans),
        selected=None if used.selected is None else used.selected[rows],
        computed=used.computed,
        reused=used.reused,
        encoded=used.encoded,
        request=model.layers * (len(prompt.tokens) - prompt.body),
        seconds=seconds,
    )
    return result, whole


def choose(model: ReferenceModel, kv: KV, probe: Probe) -> tuple[int, ...]:
    """The option with the largest logit at each step of ``probe``, read after ``kv``."""
    first = probe.at[0][0]
    logits, _ = model.extend(probe.tokens, kv, last=len(probe.tokens) - first)
    return tuple(int(logits[at - first, list(options)].argmax()) for at, options, _ in probe.at)


def span_errors(reading: Reading, kv: KV) -> tuple[Tensor, Tensor, Tensor]:
    """(K [L], V [L], per token [n]): relative Frobenius errors of the spans' KV, and squared ones of each token.

    Both are as placed; a rotation changes no norm. A token's is the mean over layers from 1 on, and over K and V, of
    its squared error over the layer's squared norm.
    """
    rows = torch.cat([torch.arange(span.start, span.stop) for span in reading.prompt.spans])
    relative, tokens = [], torch.zeros(len(rows))
    for mine, true in ((kv.k, reading.dense.k), (kv.v, reading.dense.v)):
        off = (mine[:, rows] - true[:, rows]).square().sum((2, 3))
        norm = true[:, rows].square().sum((1, 2, 3)).clamp_min(1e-30)
        relative.append((off.sum(1) / norm).sqrt())
        tokens += (off / norm[:, None])[1:].mean(0) / 2
    return relative[0], relative[1], tokens


def bf16_noise(folder: str, chains: Sequence[Chain], chunk: int = 96) -> list[float]:
    """Mean KL of each reading between two dense bf16 runs, in one pass and in chunks: what a server cannot promise."""
    model = ReferenceModel(folder, torch.bfloat16)
    out = []
    for chain in chains:
        for reading in chain.readings[1:]:
            tokens = torch.cat([reading.prompt.tokens, reading.answer[:-1]])
            last = len(tokens) - reading.prompt.body
            one, _ = model.extend(tokens, last=last)
            kv, parts = None, []
            for start in range(0, len(tokens), chunk):
                logits, kv = model.extend(tokens[start : start + chunk], kv, last=chunk)
                parts.append(logits[-(min(start + chunk, len(tokens)) - start) :])
            two = torch.cat(parts)[-last:]
            p, q = (x.double().log_softmax(-1) for x in (one, two))
            out.append(float(F.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean()))
    return out
