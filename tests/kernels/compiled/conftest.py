"""Kernels are compiled here, for GPUs that need not be there: not in a process whose Triton interprets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore_glob = ["test_*.py"] if os.environ.get("TRITON_INTERPRET") == "1" else []


@pytest.fixture(scope="session", autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing comes from an earlier compiler run, nothing is left in the user's cache, and the fake driver goes."""
    import triton

    folder = tmp_path_factory.mktemp("triton")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        yield folder
    # `reset_active` would look for a real driver at once.
    triton.runtime.driver._active = None
