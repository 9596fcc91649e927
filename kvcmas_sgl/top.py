"""``python -m kvcmas_sgl.top URL``: what a server reuses and learns, as a live table in the terminal.

Reads ``/kvcmas/stats``. Needs no SGLang, so it runs wherever this package and Python are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

_KEY_VARIABLE = "KVCMAS_API_KEY"
_HOME_AND_CLEAR = "\x1b[H\x1b[J"
_TIMEOUT_S = 30


class TopError(RuntimeError):
    """The server cannot be asked; the message is one sentence."""


def fetch(url: str, key: str | None = None) -> list[dict[str, Any]]:
    """The state of every data-parallel rank of the server at ``url``. Raises `TopError`."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(url.rstrip("/") + "/kvcmas/stats", headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return list(json.load(response)["ranks"])
    except urllib.error.HTTPError as error:
        why = {401: f"it wants its API key in --api-key or ${_KEY_VARIABLE}", 404: "it runs without --enable-kvcmas"}
        raise TopError(f"{url} answered HTTP {error.code}: {why.get(error.code, error.reason)}.") from error
    except (OSError, ValueError, KeyError) as error:
        raise TopError(f"{url} does not answer as a server with kvcmas does: {error}.") from error


def render(ranks: Sequence[Mapping[str, Any]], width: int) -> str:
    """The tables of all ranks, lines at most ``width`` wide."""
    lines: list[str] = []
    for number, state in enumerate(ranks):
        lines += [f"rank {number}"] if len(ranks) > 1 else []
        lines += [*_totals(state), "", *_roles(state), "", *_edges(state), ""]
    return "\n".join(line[:width].rstrip() for line in lines).rstrip() + "\n"


def _totals(state: Mapping[str, Any]) -> list[str]:
    tokens = {kind: state[f"{kind}_tokens"] for kind in ("exact", "corrected", "computed")}
    total = sum(tokens.values())
    shares = "  ".join(f"{kind} {count:,} ({_share(count, total)})" for kind, count in tokens.items())
    reasons = sorted(state["reasons"].items(), key=lambda item: -item[1])
    errors, audits = state["held_out_errors"], state["held_out_kl"]
    settings = state["settings"]
    estimators = state["state_bytes"] - state["own_delta_bytes"]
    return [
        f"mode {settings['mode']}  budget {settings['max_kl']:g} nats  requests {state['requests']:,}  "
        f"waiting to be learned {state['learning']}  given up {state['jobs_dropped']}  failures {state['fallbacks']}",
        f"prompt tokens  {shares}",
        "spans          " + "  ".join(f"{reason} {count:,}" for reason, count in reasons),
        f"predictions    KV error: {_held(errors)}   KL: {_held(audits)}",
        f"reuse, checked {_checks(state)}",
        f"state          {_bytes(state['state_bytes'])} of {_bytes(state['budget_bytes'])}: own deltas "
        f"{_bytes(state['own_delta_bytes'])}, estimators {_bytes(estimators)}; sources {state['sources']:,} "
        f"with {state['source_tokens']:,} tokens",
    ]


def _roles(state: Mapping[str, Any]) -> list[str]:
    rows = [["ROLE", "REQUESTS", "EXACT", "CORRECTED", "COMPUTED", "NOT COMPUTED"]]
    for role in state["roles"]:
        kinds = [role["exact_tokens"], role["corrected_tokens"], role["computed_tokens"]]
        name = "(other roles)" if role["role"] is None else _plain(role["role"])
        counts = [f"{count:,}" for count in (role["requests"], *kinds)]
        rows.append([name, *counts, _share(kinds[0] + kinds[1], sum(kinds))])
    return _table(rows, left=1)


def _edges(state: Mapping[str, Any]) -> list[str]:
    head = ["FROM", "TO", "BY", "GATE", "PAIRS", "AUDITS", "TOKENS", "ERROR PREDICTED", "MEASURED"]
    rows = [[*head, "KL PREDICTED", "AUDITED", "CORRECTED", "BYTES"]]
    budget = state["settings"]["max_kl"]
    for edge in state["edge_table"]:
        predicted = edge["predicted_kl"]
        gate = "unknown" if predicted is None else "open" if predicted <= budget else "shut"
        rows.append(
            [
                f"{_plain(edge['source'])}:{edge['source_place']}",
                f"{_plain(edge['consumer'])}:{edge['consumer_place']}",
                edge["estimator"],
                gate,
                str(edge["pairs"]),
                str(edge["audits"]),
                f"{edge['tokens']:,}",
                _number(edge["predicted_error"]),
                _number(edge["measured_error"]),
                _number(predicted),
                _number(edge["audited_kl"]),
                f"{edge['corrected_tokens']:,}",
                _bytes(edge["state_bytes"]),
            ]
        )
    return _table(rows, left=4)


def _table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Columns as wide as their widest cell; the first ``left`` are aligned to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _plain(name: str, longest: int = 24) -> str:
    """A client's name without what a terminal would obey."""
    shown = "".join(character if character.isprintable() else "?" for character in name)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _held(outcomes: Mapping[str, int]) -> str:
    known = outcomes["inside"] + outcomes["above"]
    return f"{outcomes['above']} of {known} above, {outcomes['unpredicted']} had none"


def _checks(state: Mapping[str, Any]) -> str:
    count = state["checks"]
    if not count:
        return "no request yet"
    return (
        f"mean KL {state['checked_kl'] / count:.2g} of {count:,} requests, {state['checks_over_budget']:,} above budget"
    )


def _share(part: int, total: int) -> str:
    return f"{part / total:.0%}" if total else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def main(argv: Sequence[str] | None = None) -> None:
    """Show the table until Ctrl-C, or once. Ends with one sentence and status 1 when the server cannot be asked."""
    parser = argparse.ArgumentParser(prog="python -m kvcmas_sgl.top", description="What a server reuses and learns.")
    parser.add_argument("url", nargs="?", default="http://localhost:30000", help="the server (default: %(default)s)")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--api-key", default=os.environ.get(_KEY_VARIABLE), help=f"default: ${_KEY_VARIABLE}")
    arguments = parser.parse_args(argv)
    if arguments.interval <= 0:
        parser.error(f"--interval is {arguments.interval}, but must be more than 0 seconds.")
    try:
        while True:
            ranks = fetch(arguments.url, arguments.api_key)
            if arguments.once:
                sys.stdout.write(render(ranks, 1 << 16))
                return
            size = shutil.get_terminal_size()
            shown = render(ranks, size.columns).splitlines()[: size.lines - 1]
            sys.stdout.write(_HOME_AND_CLEAR + "\n".join(shown) + "\n")
            sys.stdout.flush()
            time.sleep(arguments.interval)
    except KeyboardInterrupt:
        return
    except TopError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
