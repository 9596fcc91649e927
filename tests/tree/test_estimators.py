"""Every estimator behind the flag: what is placed is what its formula gives for the KV that the cache holds."""

from __future__ import annotations

import math

import pytest
import torch
from kvcmas_sgl.radix_ext.estimators import AnchorsEstimator
from kvcmas_sgl.triton_kernels import rotate

from kvcmas_sgl.config import ConfigError, KvcmasConfig
from kvcmas_sgl.switches import Switches
from tests.tree.harness import CRITIC, PLANNER, WIDTH, Role, Tree, document

N, LEARNED = 48, 4


def canonical(tree: Tree, role: Role, text: list[int]) -> torch.Tensor:
    """Canonical K, then V, of a text as a role computes it, fp64 [2, L, n, D]."""
    start = len(role.prefix)
    k, v = tree.model.kv(role.prefix, text, start)
    k = rotate(k, torch.arange(start, start + len(text)), tree.table, inverse=True)
    return torch.stack([k, v]).flatten(3).double()


def published(estimator: str, bases: list[torch.Tensor], deltas: list[torch.Tensor], new: torch.Tensor) -> torch.Tensor:
    """Token by token, K and V apart: the softmax over past spans, its limit at temperature 0, and their mean."""
    out = torch.zeros_like(new)
    for part in range(2):
        for t in range(new.shape[2]):
            distance = [float((new[part, :, t] - base[part, :, t]).abs().mean()) for base in bases]
            if estimator == "nearest":
                weights = [float(d == min(distance)) for d in distance]
            else:
                weights = [1.0 if estimator == "mean" else math.exp(-d) for d in distance]
            for weight, delta in zip(weights, deltas, strict=True):
                out[part, :, t] += weight / sum(weights) * delta[part, :, t]
    return out


def taught(**settings: object) -> Tree:
    tree = Tree(rank=WIDTH, max_kl=0, **settings)
    for seed in range(LEARNED):
        PLANNER.read(tree, document(seed))
        CRITIC.read(tree, document(seed))
    tree.cache.switch(Switches("on", 10))
    return tree


@pytest.mark.parametrize("head", [0, 9])
@pytest.mark.parametrize("estimator", ["anchors", "mean", "nearest"])
def test_a_servers_estimator_matches_whole_spans_by_its_published_formula(estimator: str, head: int) -> None:
    tree, text = taught(estimator=estimator, head=head), document(99)
    PLANNER.read(tree, text)
    req = tree.request(CRITIC.prompt(text), CRITIC.hint(text))
    tree.admit(req)
    report = req.kvcmas.report.as_dict()
    assert (report["estimator"], report["corrected_tokens"]) == (estimator, N - head)
    bases = [canonical(tree, PLANNER, document(seed)) for seed in range(LEARNED)]
    deltas = [canonical(tree, CRITIC, document(seed)) - base for seed, base in enumerate(bases)]
    new = canonical(tree, PLANNER, text)
    want = new + published(estimator, bases, deltas, new)
    start = len(CRITIC.prefix)
    k, v = (part[:, start : start + N] for part in tree.held(req))
    k = rotate(k, torch.arange(start, start + N), tree.table, inverse=True)
    got = torch.stack([k, v]).flatten(3).double()
    torch.testing.assert_close(got[:, 1:, head:], want[:, 1:, head:], rtol=0, atol=2e-4)
    # Layer 0 depends on the token alone.
    torch.testing.assert_close(got[:, 0], new[:, 0], rtol=0, atol=2e-5)
    tree.finish(req)
    tree.check()


def test_the_published_gate_declines_what_it_is_undecided_about() -> None:
    tree, text = taught(estimator="anchors", tau=1.0), document(99)
    PLANNER.read(tree, text)
    estimator = tree.cache.estimators["anchors"]
    assert isinstance(estimator, AnchorsEstimator)
    # No span's entropy is above all of the pool's, and every span's is above none of it.
    estimator.tau = 0.0
    report = CRITIC.read(tree, text)
    assert (report["reason"], report["corrected_tokens"]) == ("over_budget", 0)
    estimator.tau = 1.0
    PLANNER.read(tree, document(98))
    report = CRITIC.read(tree, document(98))
    assert (report["reason"], report["corrected_tokens"]) == ("reused", N)


def test_only_anchors_have_the_published_gate() -> None:
    with pytest.raises(ConfigError, match=r"--kvcmas-tau is 0\.3, but only the estimator 'anchors' has that gate"):
        KvcmasConfig(tau=0.3)


@pytest.mark.parametrize("estimator", ["affine", "anchors", "mean", "nearest", "none"])
def test_what_was_learned_of_a_span_shorter_than_the_next_is_used_as_far_as_it_reaches(estimator: str) -> None:
    tree, text = taught(estimator=estimator), document(99, 2 * N)
    PLANNER.read(tree, text)
    report = CRITIC.read(tree, text)
    assert (report["estimator"], report["corrected_tokens"]) == (estimator, 2 * N)
    assert tree.cache.statistics.fallbacks == 0
