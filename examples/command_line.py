"""The command line that all example programs have, and what they print."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Turn:
    """One agent's answer; ``report`` is the server's, where the program can see it."""

    agent: str
    answer: str
    report: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Options:
    """What every program takes.

    ``max_tokens`` limits each answer, ``rounds`` is the number of documents or topics, and ``pause_s`` the seconds
    between two of them: the server learns while it has nothing to do.
    """

    model: str = "default"
    max_tokens: int = 32
    rounds: int = 5
    pause_s: float = 4.0


Program = Callable[[str, Options], list[Turn]]


def run(program: Program, description: str) -> None:
    """Parse the command line, run the program, and print its answers and what each agent's prompts cost."""
    shape = argparse.ArgumentParser(description=description)
    shape.add_argument("--url", default="http://127.0.0.1:30000", help="the server, without /v1 (default: %(default)s)")
    shape.add_argument("--model", default=Options.model, help="model name to ask for (default: %(default)s)")
    shape.add_argument(
        "--max-tokens", type=int, default=Options.max_tokens, help="tokens per answer at most (default: %(default)s)"
    )
    shape.add_argument(
        "--rounds", type=int, default=Options.rounds, help="documents or topics to work on (default: %(default)s)"
    )
    shape.add_argument(
        "--pause", type=float, default=Options.pause_s, help="seconds between documents (default: %(default)s)"
    )
    given = shape.parse_args()
    turns = program(given.url, Options(given.model, given.max_tokens, given.rounds, given.pause))
    for turn in turns:
        print(f"{turn.agent}: {' '.join(turn.answer.split())}")
    reports = [turn.report for turn in turns if turn.report is not None]
    if reports:
        print(token_table(tokens_by_role(reports)))


def tokens_by_role(reports: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each role: requests, exact, corrected and computed prompt tokens, and how often which reason was given."""
    sums: dict[str, dict[str, Any]] = {}
    for report in reports:
        row = sums.setdefault(
            report["role"], {"requests": 0, "exact": 0, "corrected": 0, "computed": 0, "reasons": Counter()}
        )
        row["requests"] += 1
        row["reasons"][report["reason"]] += 1
        for kind in ("exact", "corrected", "computed"):
            row[kind] += report[f"{kind}_tokens"]
    return sums


def token_table(sums: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each agent: requests, its prompt tokens by where their KV came from, and the server's reasons."""
    columns = ("requests", "exact", "corrected", "computed")
    width = max(len(role) for role in (*sums, "agent"))
    lines = ["agent".ljust(width) + "".join(column.rjust(11) for column in columns) + "  reasons"]
    for role, row in sums.items():
        reasons = ", ".join(f"{reason} {count}" for reason, count in row["reasons"].items())
        lines.append(role.ljust(width) + "".join(f"{row[column]:,}".rjust(11) for column in columns) + f"  {reasons}")
    return "\n".join(lines)
