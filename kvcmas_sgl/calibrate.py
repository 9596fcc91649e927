"""``python -m kvcmas_sgl.calibrate URL``: teach a server its agents before their users come.

Every role reads the same texts, one after the other, through ``/v1/chat/completions``, while the server only learns:
its gate then knows what a correction does to each pair of roles, and with ``--kvcmas-state-dir`` a restart still does.
An agent is its role and the exact text before the first span, so the roles must be those of the program, word for
word. Needs no SGLang.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

_KEY_VARIABLE = "KVCMAS_API_KEY"
_TIMEOUT_S, _LEARN_S, _POLL_S = 600, 600, 0.2
QUESTION = "What is the main point of this text? Answer in one sentence."
SHARES = (0.5, 0.9, 1.0)


class CalibrationError(RuntimeError):
    """The server cannot be taught; the message is one sentence."""


@dataclass(frozen=True)
class Edge:
    """What the gate expects on one pair of roles: the KL, nats, of the cheapest way to reuse a span, and of the way
    that has least; None while too little is known."""

    source: str
    consumer: str
    pairs: int
    tokens: int
    cheapest_kl: float | None
    least_kl: float | None


class Server:
    """The routes that calibration needs."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET, or POST of ``body``. Raises `CalibrationError`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            why = {401: f"it wants its key in --api-key or ${_KEY_VARIABLE}", 404: "it runs without --enable-kvcmas"}
            said = error.read(500).decode(errors="replace")
            raise CalibrationError(f"{path} answered HTTP {error.code}: {why.get(error.code, said)}.") from error
        except (OSError, ValueError) as error:
            raise CalibrationError(f"{self._url} does not answer as a server with kvcmas does: {error}.") from error

    def states(self) -> list[dict[str, Any]]:
        """One entry for each data-parallel rank."""
        return list(self.ask("/kvcmas/stats")["ranks"])

    def wait_until_learned(self) -> None:
        """Raises `CalibrationError` when other traffic leaves no idle time for ten minutes."""
        deadline = time.monotonic() + _LEARN_S
        while any(state["learning"] for state in self.states()):
            if time.monotonic() > deadline:
                raise CalibrationError(f"the server did not get to learn within {_LEARN_S} s: give it an idle hour.")
            time.sleep(_POLL_S)


def read_roles(path: Path) -> dict[str, str]:
    """Role names and system prompts. Raises `CalibrationError`."""
    try:
        roles = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CalibrationError(f"--roles {path} cannot be read: {error}.") from error
    good = isinstance(roles, dict) and all(isinstance(text, str) and text for text in roles.values())
    if not good or len(roles) < 2:
        raise CalibrationError(
            f"--roles {path} must hold a JSON object of at least two role names, each with its system prompt."
        )
    return roles


def read_texts(paths: Sequence[Path], characters: int) -> Iterator[str]:
    """Pieces of at most ``characters``, cut between paragraphs where there are any. Raises `CalibrationError`."""
    files = [file for path in paths for file in (sorted(path.rglob("*.txt")) if path.is_dir() else [path])]
    if not files:
        raise CalibrationError(f"--documents {' '.join(map(str, paths))} holds no .txt file.")
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CalibrationError(f"--documents {file} cannot be read: {error}.") from error
        while len(text) >= characters // 2:
            end = text.rfind("\n\n", characters // 2, characters)
            piece, text = (text[:characters], text[characters:]) if end < 0 else (text[:end], text[end:].lstrip())
            yield piece


def teach(
    server: Server, roles: Mapping[str, str], texts: Sequence[str], question: str, answer_tokens: int
) -> Iterator[None]:
    """Let every role read every text; one step is one request. The order turns, so that everyone is first at times."""
    names = list(roles)
    for number, text in enumerate(texts):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            body = {
                "model": "default",
                "messages": [
                    {"role": "system", "content": roles[name]},
                    {"role": "user", "content": f"{text}\n\n{question}"},
                ],
                "kvcmas": {"role": name, "spans": [{"message": 1, "start": 0, "end": len(text)}]},
                "temperature": 0,
                "max_tokens": answer_tokens,
            }
            server.ask("/v1/chat/completions", body)
            server.wait_until_learned()
            yield


def edges(states: Sequence[Mapping[str, Any]], roles: Mapping[str, str]) -> list[Edge]:
    """What is known of the pairs of ``roles`` at their first span, worst first."""
    ways: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in (row for state in states for row in state["edge_table"]):
        if row["source"] in roles and row["consumer"] in roles and row["consumer_place"] == "first":
            ways.setdefault((row["source"], row["consumer"]), []).append(row)
    found = []
    for (source, consumer), rows in ways.items():
        known = [row["predicted_kl"] for row in rows if row["predicted_kl"] is not None]
        plain = [row["predicted_kl"] for row in rows if "+" not in row["estimator"]]
        found.append(
            Edge(
                source,
                consumer,
                max(row["pairs"] for row in rows),
                rows[0]["tokens"],
                plain[0] if plain else None,
                min(known, default=None),
            )
        )
    return sorted(found, key=lambda edge: -(edge.least_kl if edge.least_kl is not None else float("inf")))


def render(found: Sequence[Edge], budget: float) -> str:
    """The table, and what share of the edges each budget opens."""
    lines = [f"{'FROM':<24}{'TO':<24}{'PAIRS':>6}{'TOKENS':>8}{'KL':>10}{'LEAST KL':>10}  GATE"]
    for edge in found:
        least = edge.least_kl
        gate = "unknown" if least is None else "open" if least <= budget else "shut"
        numbers = "".join(f"{'-' if kl is None else format(kl, '.4f'):>10}" for kl in (edge.cheapest_kl, least))
        lines.append(f"{edge.source[:23]:<24}{edge.consumer[:23]:<24}{edge.pairs:>6}{edge.tokens:>8}{numbers}  {gate}")
    known = sorted(edge.least_kl for edge in found if edge.least_kl is not None)
    opened = sum(kl <= budget for kl in known)
    lines.append(f"budget {budget:g} nats opens {opened} of {len(found)} pairs")
    for share in SHARES if known else ():
        least = known[max(0, -(-int(share * 100) * len(known) // 100) - 1)]
        lines.append(f"  {share:.0%} of the pairs that are known would need {least:.4f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Teach, then print what the gate expects. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcmas_sgl.calibrate", description="Teach a server its agents before their users come."
    )
    parser.add_argument("url", nargs="?", default="http://localhost:30000", help="the server (default: %(default)s)")
    parser.add_argument(
        "--roles", type=Path, required=True, metavar="FILE", help="JSON object: role name to system prompt"
    )
    parser.add_argument(
        "--documents", type=Path, nargs="+", required=True, metavar="PATH",
        help="text files, or folders of .txt files, like those that the agents will share",
    )  # fmt: skip
    parser.add_argument("--texts", type=int, default=8, help="texts that every role reads (default: %(default)s)")
    parser.add_argument("--characters", type=int, default=4000, help="longest text (default: %(default)s)")
    parser.add_argument("--question", default=QUESTION, help="what is asked after each text (default: %(default)r)")
    parser.add_argument("--answer-tokens", type=int, default=32, help="length of an answer (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get(_KEY_VARIABLE),
        help=f"the admin key if there is one (default: ${_KEY_VARIABLE})",
    )
    options = parser.parse_args(argv)
    for name in ("texts", "characters", "answer_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be at least 1.")
    try:
        roles = read_roles(options.roles)
        texts = list(islice(read_texts(options.documents, options.characters), options.texts))
        if not texts:
            raise CalibrationError(f"--documents hold no text of {options.characters // 2} characters or more.")
        server = Server(options.url, options.api_key)
        before = server.states()[0]["settings"]
        server.ask("/kvcmas/settings", {"mode": "learn"})
        try:
            with tqdm(total=len(texts) * len(roles), unit="request", file=sys.stderr) as progress:
                for _ in teach(server, roles, texts, options.question, options.answer_tokens):
                    progress.update()
        finally:
            server.ask("/kvcmas/settings", {"mode": before["mode"]})
        print(render(edges(server.states(), roles), before["max_kl"]))
    except CalibrationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
