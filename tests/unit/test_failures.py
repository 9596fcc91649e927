"""The log of internal failures: what went wrong, and how often, but not a line for each time."""

from __future__ import annotations

import pytest
from kvcmas_sgl.radix_ext.failures import INTERVAL_S, FailureLog


class Fault(Exception):
    pass


def failing(log: FailureLog, times: int, where: str = "a match") -> None:
    for _ in range(times):
        try:
            raise Fault("injected")
        except Fault:
            log.report(where, "it goes on")


def test_a_failure_that_repeats_is_one_log_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 1e9
    log = FailureLog(lambda: now)
    failing(log, 1000)
    failing(log, 3, "a correction")
    assert [r.getMessage() for r in caplog.records] == [
        "kvcmas: a match failed; it goes on.",
        "kvcmas: a correction failed; it goes on.",
    ]
    assert all(record.exc_info and record.exc_info[0] is Fault for record in caplog.records)
    now += INTERVAL_S
    failing(log, 2)
    assert [r.getMessage() for r in caplog.records[2:]] == [
        "kvcmas: a match failed; it goes on (999 more since the last such line)."
    ]
