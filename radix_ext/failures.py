"""Internal failures in the log: a line for what went wrong, not one for every time that it does."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

INTERVAL_S = 60.0
"""Between two log lines about the same place, seconds; failures in between are counted."""


class FailureLog:
    """Logs exceptions, at most one line an interval for each place where they happen.

    ``clock`` gives seconds and must not depend on the time of day.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Place -> when it was last logged, and how many failures were silent since. Places are literals of ours.
        self._seen: dict[str, tuple[float, int]] = {}

    def report(self, where: str, then: str) -> None:
        """Log the exception that is being handled: ``where`` it happened, and what is done ``then``."""
        now = self._clock()
        last, silent = self._seen.get(where, (-math.inf, 0))
        if now - last < INTERVAL_S:
            self._seen[where] = last, silent + 1
            return
        self._seen[where] = now, 0
        more = f" ({silent} more since the last such line)" if silent else ""
        logger.exception("kvcmas: %s failed; %s%s.", where, then, more)
