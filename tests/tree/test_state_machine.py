"""The state machine for a short while, what it found, and mistakes that it must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import seed
from hypothesis.stateful import run_state_machine_as_test
from kvcmas_sgl.radix_ext.cache import DeltaRadixCache
from kvcmas_sgl.radix_ext.delta_store import DeltaStore
from kvcmas_sgl.radix_ext.node_marks import DeltaFullComponent
from kvcmas_sgl.radix_ext.publisher import Publisher
from kvcmas_sgl.radix_ext.sources import SourceIndex
from sglang.srt.mem_cache.unified_cache.components import FullComponent

from tests.tree import machine
from tests.tree.harness import document
from tests.tree.machine import CacheMachine, profile
from tests.tree.test_faults import CRITIC, World


def run(number: int, examples: int, steps: int, *, shrink: bool = True) -> None:
    chosen = type("SeededCacheMachine", (CacheMachine,), {})
    run_state_machine_as_test(seed(number)(chosen), settings=profile(examples, steps, shrink=shrink))


def test_nothing_is_lost_in_any_interleaving() -> None:
    machine.seen.clear()
    run(12, 25, 100)
    # It got everywhere.
    for what in ("corrected tokens", "learned spans", "audits", "chunks", "retract", "branches", "faults"):
        assert machine.seen[what] > 0, (what, machine.seen)
    assert machine.seen["steps"] > 2000


# ---- what was found ----


def test_a_retracted_request_reports_its_second_run_only() -> None:
    """Found by the report's invariant: the first run's KL was added to that of the second."""
    world = World()
    job = world.scheduler.add(world.tree.request(*CRITIC.several([document(98), document(97)])))
    # All of the first span is corrected, and one token computed, before memory is short.
    assert world.scheduler.admit(job, 1)
    world.scheduler.forward()
    first = job.agent.report.as_dict()
    assert not job.agent.settled and first["corrected_tokens"] == 48
    world.scheduler.retract(job)
    world.run([job])
    report = job.agent.report.as_dict()
    assert report["predicted_kl"] == first["predicted_kl"] == sum(s["predicted_kl"] or 0 for s in report["spans"])


# ---- what it must find ----


def leak_locks(cache: DeltaRadixCache, req: Any) -> None:
    if getattr(req, "kvcmas", None) is not None:
        req.kvcmas.held = []


def forget_bytes(store: DeltaStore, handle: int) -> None:
    store._rows.pop(handle, None)


def same_tenant(original: Callable[..., Any]) -> Callable[..., Any]:
    def find(index: SourceIndex, scope: str, *args: Any) -> Any:
        return [match for other in list(index._tables) for match in original(index, other, *args)]

    return find


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "a lock on a source is not let go": (DeltaRadixCache, "release", leak_locks),
    "an evicted node's deltas and sources stay": (DeltaFullComponent, "evict_component", FullComponent.evict_component),
    "a split loses its marks": (
        DeltaFullComponent,
        "redistribute_on_node_split",
        FullComponent.redistribute_on_node_split,
    ),
    "corrected KV is not marked": (Publisher, "mark_placed", lambda publisher, req, request, up_to: None),
    "dropped deltas still count": (DeltaStore, "drop", forget_bytes),
    "sources of all tenants are found": (SourceIndex, "find", same_tenant(SourceIndex.find)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_machine_can_fail(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises((AssertionError, KeyError)):
        run(7, 200, 80, shrink=False)
