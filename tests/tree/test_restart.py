"""What a restarted cache knows: the pairs of agents, each in its scope, and no KV."""

from __future__ import annotations

from pathlib import Path

import torch
from kvcmas_sgl.radix_ext import state_file
from kvcmas_sgl.radix_ext.state_file import FILE_NAME
from kvcmas_sgl.radix_ext.state_keeper import StateKeeper

from tests.tree.harness import CRITIC, PLANNER, Tree, document, learned

N = 48


FINGERPRINT = {"weights": "formula"}


def restarted(tree: Tree, folder: Path, **settings: object) -> Tree:
    """A new cache that was given what a tree has learned."""
    state_file.write(folder / FILE_NAME, FINGERPRINT, tree.cache.learner.state())
    later = Tree(**settings)
    StateKeeper(folder, FINGERPRINT, later.cache.learner, later.cache.statistics).restore()
    assert later.cache.statistics.state_refused == 0
    return later


def test_the_first_workflow_is_corrected_as_the_old_process_would_have(tmp_path: Path) -> None:
    tree, unseen = Tree(), document(99)
    learned(tree)
    later = restarted(tree, tmp_path)
    assert len(later.cache.sources) == len(later.cache.deltas) == 0
    reports, held = [], []
    for one in (tree, later):
        PLANNER.read(one, unseen)
        req = one.request(CRITIC.prompt(unseen), CRITIC.hint(unseen))
        one.admit(req)
        reports.append(req.kvcmas.report.as_dict())
        held.append(one.held(req))
        one.finish(req)
        one.check()
    # A new process has no prompt of the critic's yet: its prefix is computed.
    for report in reports:
        assert report["corrected_tokens"] == N and report["reason"] == "reused"
        assert report["predicted_kl"] == reports[0]["predicted_kl"] <= later.cache.config.max_kl
    for old, new in zip(*held, strict=True):
        assert torch.equal(old, new)


def test_what_one_tenant_taught_serves_no_other_after_a_restart(tmp_path: Path) -> None:
    tree, unseen = Tree(), document(99)
    for seed in range(5):
        PLANNER.read(tree, document(seed), salt="a")
        CRITIC.read(tree, document(seed), salt="a")
    later = restarted(tree, tmp_path)
    reasons = {}
    for salt in ("b", None, "a"):
        PLANNER.read(later, unseen, salt=salt)
        reasons[salt] = CRITIC.read(later, unseen, salt=salt)["reason"]
    assert reasons == {"b": "edge_unknown", None: "edge_unknown", "a": "reused"}


def test_agents_that_were_found_by_content_are_known_again(tmp_path: Path) -> None:
    settings = {"slots": 4096, "auto": True}
    tree, unseen = Tree(**settings), document(99)
    for seed in range(5):
        for role in (PLANNER, CRITIC):
            tree.serve(role.prompt(document(seed)), auto=role.prefix)
    reasons = {}
    for names in ("kept", "forgotten"):
        later = restarted(tree, tmp_path, **settings)
        if names == "forgotten":
            later.cache.prefixes.clear()
        later.serve(PLANNER.prompt(unseen), auto=PLANNER.prefix)
        # Two words of its own before what it shares: what stands there does not tell where its prefix ends.
        report = later.serve([*CRITIC.prefix, 310, 311, *unseen, 8, 8], auto=CRITIC.prefix)
        reasons[names] = report["reason"], report["corrected_tokens"]
    assert reasons == {"kept": ("reused", N), "forgotten": ("edge_unknown", 0)}


def test_a_flush_forgets_what_was_restored(tmp_path: Path) -> None:
    tree, unseen = Tree(), document(99)
    learned(tree)
    later = restarted(tree, tmp_path)
    later.cache.reset()
    again = restarted(later, tmp_path)
    PLANNER.read(again, unseen)
    assert CRITIC.read(again, unseen)["reason"] == "edge_unknown"
