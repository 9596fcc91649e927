"""SGLang's lock fuzz on our tree: random inserts, matches, locks, releases and evictions, checked after each."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import pytest
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import insert_walk
from sglang.test.kits.unified_radix_cache.config import CacheConfig

from tests.tree.harness import Tree


def build(cfg: CacheConfig) -> tuple[object, object, object]:
    tree = Tree(slots=cfg.kv_size)
    # The fuzz trims windows, too; a pool of full attention has none, and no lock receipt of ours names one.
    tree.allocator.free_swa = lambda values: None
    lock = tree.cache.inc_lock_ref

    def with_no_window(*args: Any, **kwargs: Any) -> Any:
        receipt = lock(*args, **kwargs)
        receipt.component_lock_uuids.setdefault(ComponentType.SWA, None)
        return receipt

    tree.cache.inc_lock_ref = with_no_window
    return tree.cache, tree.allocator, tree.rows


class Fuzz(insert_walk.SegmentLockFuzzFixtures, unittest.TestCase):
    cfg = CacheConfig(kv_size=256)


@pytest.mark.parametrize("seed", range(20))
def test_lock_fuzz(seed: int) -> None:
    with mock.patch.object(insert_walk, "build_fixture", build):
        Fuzz()._run_seed(seed, steps=200)
