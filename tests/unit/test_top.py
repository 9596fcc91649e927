"""The table in the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from kvcmas_sgl import top

EDGE: dict[str, Any] = {
    "source": "planner",
    "source_place": "first",
    "consumer": "critic",
    "consumer_place": "later",
    "scope": "ab12cd34",
    "estimator": "affine",
    "pairs": 5,
    "audits": 3,
    "tokens": 1400,
    "predicted_error": 0.0512,
    "measured_error": 0.031,
    "predicted_kl": 0.004,
    "audited_kl": 0.0011,
    "corrected_tokens": 20480,
    "exact_tokens": 0,
    "state_bytes": 3 << 20,
}
STATE: dict[str, Any] = {
    "settings": {"mode": "on", "max_kl": 0.02},
    "requests": 12,
    "learning": 1,
    "jobs_dropped": 0,
    "fallbacks": 0,
    "exact_tokens": 1000,
    "corrected_tokens": 20480,
    "computed_tokens": 3520,
    "reasons": {"edge_unknown": 3, "reused": 9},
    "held_out_errors": {"unpredicted": 2, "inside": 7, "above": 1},
    "held_out_kl": {"unpredicted": 2, "inside": 3, "above": 0},
    "checks": 4,
    "checked_kl": 0.01,
    "checks_over_budget": 1,
    "state_bytes": 5 << 20,
    "own_delta_bytes": 1 << 20,
    "budget_bytes": 1 << 30,
    "sources": 8,
    "source_tokens": 9000,
    "roles": [
        {"role": "critic", "requests": 9, "exact_tokens": 500, "corrected_tokens": 20480, "computed_tokens": 3020},
        {"role": None, "requests": 3, "exact_tokens": 500, "corrected_tokens": 0, "computed_tokens": 500},
    ],
    "edge_table": [
        EDGE,
        {**EDGE, "consumer": "judge", "predicted_kl": 0.05},
        {**EDGE, "consumer": "coder", "predicted_kl": None, "predicted_error": None, "audited_kl": None},
    ],
}


def cells(text: str, first: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(first)]
    return line.split()


def test_the_tables_hold_what_the_state_says() -> None:
    text = top.render([STATE], 400)
    assert "mode on  budget 0.02 nats  requests 12" in text
    assert "corrected 20,480 (82%)" in text and "reused 9  edge_unknown 3" in text
    assert "KV error: 1 of 8 above, 2 had none   KL: 0 of 3 above, 2 had none" in text
    assert "reuse, checked mean KL 0.0025 of 4 requests, 1 above budget" in text
    assert "5 MiB of 1.0 GiB: own deltas 1 MiB, estimators 4 MiB" in text
    assert cells(text, "critic") == ["critic", "9", "500", "20,480", "3,020", "87%"]
    assert cells(text, "(other roles)")[2:] == ["3", "500", "0", "500", "50%"]
    edges = [line.split() for line in text.splitlines() if line.startswith("planner:first")]
    assert edges[0] == (
        [
            "planner:first",
            "critic:later",
            "affine",
            "open",
            "5",
            "3",
            "1,400",
            "0.051",
            "0.031",
            "0.004",
            "0.0011",
            "20,480",
            "3",
            "MiB",
        ]
    )
    assert [(row[1], row[3]) for row in edges] == [
        ("critic:later", "open"),
        ("judge:later", "shut"),
        ("coder:later", "unknown"),
    ]
    assert edges[2].count("-") == 3


def test_a_line_is_never_wider_than_the_terminal() -> None:
    assert max(len(line) for line in top.render([STATE, STATE], 60).splitlines()) <= 60


def test_no_name_of_a_client_reaches_the_terminal_as_a_command() -> None:
    name = "\x1b[2J\x1b]0;owned\x07" + "n" * 300
    state = {**STATE, "roles": [{**STATE["roles"][0], "role": name}], "edge_table": [{**EDGE, "source": name}]}
    text = top.render([state], 400)
    assert all(line.isprintable() for line in text.splitlines()) and "?[2J?]0;owned?" in text


def test_an_idle_server_has_empty_tables() -> None:
    idle = {**STATE, "requests": 0, "roles": [], "edge_table": [], "reasons": {}, "checks": 0}
    idle |= {"exact_tokens": 0, "corrected_tokens": 0, "computed_tokens": 0}
    assert "exact 0 (-)" in top.render([idle], 400)


def test_a_server_that_is_not_there_ends_it_with_one_sentence() -> None:
    with pytest.raises(SystemExit) as caught:
        top.main(["http://127.0.0.1:9", "--once"])
    assert str(caught.value.code).startswith("http://127.0.0.1:9 does not answer") and "\n" not in str(caught.value)
