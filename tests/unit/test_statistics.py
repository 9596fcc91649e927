"""Counters: bounded whatever clients send, and their listeners cost nothing."""

from __future__ import annotations

from kvcmas_sgl.radix_ext.decision import Report, SpanReport
from kvcmas_sgl.radix_ext.gate import Expected
from kvcmas_sgl.radix_ext.statistics import MAX_NAMES, Statistics


def test_any_number_of_roles_makes_a_bounded_table_with_the_right_sums() -> None:
    statistics = Statistics()
    for number in range(3 * MAX_NAMES):
        statistics.record(f"r{number}", Report(f"role {number}", 100, exact_tokens=number, corrected_tokens=10))
    statistics.record("again", Report(f"role {3 * MAX_NAMES - 2}", 50))
    roles = statistics.as_dict()["roles"]
    assert len(roles) == MAX_NAMES + 1
    assert roles[0] == {
        "role": f"role {3 * MAX_NAMES - 2}",
        "requests": 2,
        "exact_tokens": 3 * MAX_NAMES - 2,
        "corrected_tokens": 10,
        "computed_tokens": 100 - (3 * MAX_NAMES - 2) - 10 + 50,
    }
    assert roles[-1]["role"] is None and roles[-1]["requests"] == 2 * MAX_NAMES
    for name in ("requests", "exact_tokens", "corrected_tokens", "computed_tokens"):
        assert sum(role[name] for role in roles) == getattr(statistics, name)


def test_predictions_are_counted_by_how_they_came_out() -> None:
    statistics = Statistics()
    statistics.held_out(None, error=0.5, kl=0.5)
    statistics.held_out(Expected(0.2, 0.01), error=0.1, kl=None)
    statistics.held_out(Expected(0.2, 0.01), error=0.3, kl=0.005)
    statistics.held_out(Expected(0.2, 0.01), error=0.1, kl=0.02)
    state = statistics.as_dict()
    assert state["held_out_errors"] == {"unpredicted": 1, "inside": 2, "above": 1}
    assert state["held_out_kl"] == {"unpredicted": 1, "inside": 1, "above": 1}


class Broken:
    def on_report(self, report: Report) -> None:
        raise RuntimeError("injected")

    def on_held_out(self, error: str, kl: float | None, audit: str | None) -> None:
        raise RuntimeError("injected")

    def on_check(self, kl: float, over_budget: bool) -> None:
        raise RuntimeError("injected")

    def on_change(self) -> None:
        raise RuntimeError("injected")


def test_a_listener_that_fails_is_counted_and_nothing_else() -> None:
    statistics = Statistics()
    statistics.listeners.append(Broken())
    statistics.record("r", Report("critic", 9, spans=[SpanReport(0, 5)]))
    statistics.held_out(None, error=0.1, kl=None)
    statistics.checked(0.5, over_budget=True)
    statistics.changed()
    assert (statistics.fallbacks, statistics.requests, statistics.held_out_errors.unpredicted) == (4, 1, 1)
    assert (statistics.checks, statistics.checks_over_budget, statistics.checked_kl) == (1, 1, 0.5)
