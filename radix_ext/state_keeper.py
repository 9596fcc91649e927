"""Keeps what a server has learned in a file: written in the background while it idles, and when it leaves.

The scheduler's thread only collects references to tensors; a thread of its own copies them off the device, writes and
waits for the disk. Nothing that goes wrong here reaches a request: it is counted, and logged at most every ten minutes.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from kvcmas_sgl.radix_ext import state_file
from kvcmas_sgl.radix_ext.learner import Learner
from kvcmas_sgl.radix_ext.state_file import FILE_NAME, State
from kvcmas_sgl.radix_ext.statistics import Statistics

logger = logging.getLogger(__name__)

INTERVAL_S = 60.0
"""Least time between two saves, seconds: what a server that is killed may lose."""

WRITE_SHARE = 0.02
"""Largest share of the time that is spent on writing: a large state on a slow disk is saved less often."""

LOG_EVERY_S = 600.0


class StateKeeper:
    """Owns the state file of one server; one thread (the scheduler's) calls it.

    Parameters
    ----------
    folder
        Where the file is, and what is written lies until it is complete.
    fingerprint
        What the learner's state depends on.
    learner
        Whose state is kept.
    device
        Where restored tensors go.
    synchronize
        Waits for the work that was queued on the device by this thread: another thread then reads its tensors.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Mapping[str, Any],
        learner: Learner,
        statistics: Statistics,
        *,
        device: torch.device | str = "cpu",
        synchronize: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = folder / FILE_NAME
        self._fingerprint = fingerprint
        self._learner = learner
        self._statistics = statistics
        self._device = device
        self._synchronize = synchronize
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, "kvcmas-state")
        self._writing: tuple[Future[float], int] | None = None
        self._saved = learner.version
        self._due = clock() + INTERVAL_S
        self._log_from = -math.inf
        self._refused = False
        self._stopped = False

    def restore(self) -> None:
        """Load the file, if there is one. One that cannot be used is left as it is, and the log says why."""
        if not self.path.exists():
            logger.info("kvcmas: %s does not exist yet: the server starts without learned state.", self.path)
            return
        try:
            saved, parts = state_file.read(self.path, self._device)
            state_file.check_fingerprint(self.path, saved, self._fingerprint)
            self._learner.load(parts)
        except Exception as error:
            self._learner.clear()
            self._refused = True
            self._statistics.state_refused += 1
            logger.warning("kvcmas: the server starts without learned state: %s", error)
        else:
            logger.info("kvcmas: %d bytes of learned state come from %s.", self._learner.state_bytes, self.path)
        self._saved = self._learner.version

    def tick(self) -> None:
        """In an idle round: start to save what has changed, if it is time."""
        if self._writing is not None and self._writing[0].done():
            self._collect()
        if self._writing is None and self._clock() >= self._due:
            self._start()

    def stop(self) -> None:
        """The weights change: nothing more is saved. The file stays, it is of those that the next start loads."""
        if not self._stopped:
            logger.warning("kvcmas: the weights change: what is learned from now on is not saved.")
        self._stopped = True

    def close(self) -> None:
        """Before the process ends: save what has changed, and wait for it."""
        if self._writing is not None:
            self._collect()
        self._start()
        if self._writing is not None:
            self._collect()
        self._writer.shutdown()

    def _start(self) -> None:
        version = self._learner.version
        if self._stopped or version == self._saved:
            return
        try:
            parts = self._learner.state()
            self._synchronize()
            self._writing = self._writer.submit(self._write, parts), version
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._statistics.state_failures += 1
        self._due = self._clock() + INTERVAL_S
        if self._clock() >= self._log_from:
            self._log_from = self._clock() + LOG_EVERY_S
            logger.warning("kvcmas: learned state is not saved, and will be tried again: %s", error)

    def _collect(self) -> None:
        assert self._writing is not None
        (future, version), self._writing = self._writing, None
        try:
            seconds = future.result()
        except Exception as error:
            self._failed(error)
        else:
            self._statistics.state_saves += 1
            self._saved = version
            self._due = self._clock() + max(INTERVAL_S, seconds / WRITE_SHARE)

    def _write(self, parts: Mapping[str, State]) -> float:
        """In the writer's thread; returns the seconds that it took."""
        started = time.perf_counter()
        if self._refused and self.path.exists():
            # It may be another server's: the last one is kept.
            os.replace(self.path, self.path.with_suffix(".refused"))
        self._refused = False
        state_file.write(self.path, self._fingerprint, parts)
        return time.perf_counter() - started
