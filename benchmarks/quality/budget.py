"""Does the budget hold? True KL of spans that the server reused, at three settings of the dial.

    python -m benchmarks.quality.budget

One server of ours, SmolLM2 in its own dtype. Pairs of agents learn from documents; then agents read documents that
another agent holds and they have not read, each under one of three budgets (a request's ``max_kl``). The truth is the
same prompt without a hint, which is stock SGLang's dense prefill; both are compared along its own greedy answer. The
documents are sentences of the texts that the repository carries; every eighth is adversarial: other languages, code,
base64, one line repeated, digits. A span of one token and one of ``--longest`` tokens come last. Adds a chapter to the
pages that ``python -m benchmarks.quality`` writes.
"""

from __future__ import annotations

import argparse
import base64
import inspect
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.pages import Block, Table, Text, append_pages, markdown
from benchmarks.span_workload import Agent, make_agents
from benchmarks.workload.text import Span, TextSupply
from kvcmas_sgl.demo.client import Client, agent_report
from kvcmas_sgl.demo.divergence import mean_kl
from kvcmas_sgl.demo.prompts import PromptMaker, TokenPrompt
from kvcmas_sgl.demo.roles import DOCUMENTS, load_documents
from kvcmas_sgl.demo.servers import ServerError, ServerProcess, kvcmas_command
from kvcmas_sgl.prepare_model import ModelError, default_model
from kvcmas_sgl.wire import agent_hint

_HEAD = ("max_kl", "readings", "reused spans", "over budget", "reused share", "KL mean", "KL max", "predicted")
ANSWER_TOKENS = 32
TOP = 128
EXTREMES = "one token", "longest"
"""Lengths that only the largest budget is asked about; no share of tokens can be compared with theirs."""
_QUICK = {"agents": 3, "documents": 9, "learned": 4, "longest": 0}


@dataclass(frozen=True)
class Reading:
    """One agent's reading of one span. KL in nats per answer token; ``kl`` only where something was corrected."""

    max_kl: float
    agent: str
    kind: str
    span_tokens: int
    corrected: int
    reason: str
    predicted_kl: float | None
    kl: float | None
    noise: float | None

    @property
    def violates(self) -> bool:
        return self.kl is not None and self.kl > self.max_kl


def adversarial(rng: random.Random) -> dict[str, str]:
    """Texts unlike anything that is learned from, each a few hundred tokens long."""
    words = ("Hund", "Nachbarn", "nachts,", "weil", "hört;", "東京の朝は", "静かです。", "Добрый", "вечер,", "друзья!")
    return {
        "languages": " ".join(rng.choices(words, k=160)),
        "code": inspect.getsource(rng.choice((argparse, base64, json, random, statistics)))[3000:4200],
        "base64": base64.b64encode(rng.randbytes(500)).decode(),
        "repeated lines": "the same line again\n" * 80,
        "digits": " ".join(str(rng.randrange(10**6)) for _ in range(90)),
    }


class Bench:
    """All requests to one server, one at a time; between them it learns in peace."""

    def __init__(
        self, url: str, prompts: PromptMaker, agents: Sequence[Agent], supply: TextSupply, tokens: int
    ) -> None:
        self._client = Client(url)
        self._prompts = prompts
        self._agents = agents
        self._supply = supply
        self._tokens = tokens
        self._random = random.Random(7)

    def learn(self, documents: int) -> Iterator[None]:
        """Let every pair of agents learn; the order of reading turns round from document to document."""
        for number in range(documents):
            content = self._content(number)[1]
            for agent in self._agents if number % 2 == 0 else reversed(self._agents):
                prompt = agent.prompt((content,))
                # One token, so that audits have a position behind the question.
                self._client.answer(prompt.ids, ANSWER_TOKENS, **_hint(agent, prompt, policy="learn"))
                self._client.wait_until_learned()
            yield

    def readings(self, documents: int, budgets: Sequence[float], longest: int) -> Iterator[list[Reading]]:
        """For each document: the readings by every agent but the one that holds it, under one of the budgets.

        Two more documents, of one token and of `longest` tokens (0: left out), have the largest budget.
        """
        for number in range(documents):
            kind, content = self._content(number + 10_000, adversarial_every=8)
            yield self._read_by_others(number // len(budgets), kind, content, budgets[number % len(budgets)])
        for kind, length in zip(EXTREMES, (1, longest), strict=True):
            if length:
                yield self._read_by_others(0, kind, self._supply.span(length), max(budgets))

    def _read_by_others(self, turn: int, kind: str, content: Span, max_kl: float) -> list[Reading]:
        holder = self._agents[turn % len(self._agents)]
        first = holder.prompt((content,))
        self._client.answer(first.ids, ANSWER_TOKENS, **_hint(holder, first, policy="learn"))
        self._client.wait_until_learned()
        return [self._read(agent, kind, content, max_kl) for agent in self._agents if agent is not holder]

    def _read(self, agent: Agent, kind: str, content: Span, max_kl: float) -> Reading:
        prompt = agent.prompt((content,))
        client, hint = self._client, _hint(agent, prompt, max_kl=max_kl)
        report = agent_report(client.prefill(prompt.ids, **hint))
        corrected = report["corrected_tokens"]
        kl = noise = None
        if corrected:
            answer = client.answer(prompt.ids, ANSWER_TOKENS).tokens
            truth = client.scores(prompt.ids, answer, TOP)
            kl = mean_kl(truth, client.scores(prompt.ids, answer, 1, truth.tokens, **hint))
            if self._random.random() < 0.1:
                # Prefilled once more where no cache reaches: what two dense runs differ by.
                again = client.scores(prompt.ids, answer, 1, truth.tokens, cache_salt=f"{agent.name}/{hash(content)}")
                noise = mean_kl(truth, again)
        client.wait_until_learned()
        return Reading(
            max_kl, agent.name, kind, len(content), corrected, report["reason"], report["predicted_kl"], kl, noise
        )

    def _content(self, number: int, adversarial_every: int = 0) -> tuple[str, Span]:
        if adversarial_every and number % adversarial_every == adversarial_every - 1:
            texts = adversarial(self._random)
            kind = list(texts)[number // adversarial_every % len(texts)]
            return kind, tuple(self._prompts.tokens(f"{number}: {texts[kind]}")[: self._tokens])
        length = self._tokens // 2 + self._random.randrange(self._tokens)
        return "text", self._supply.span(length)


def _hint(agent: Agent, prompt: TokenPrompt, **overrides: Any) -> dict[str, Any]:
    return {"kv_hints": agent_hint(agent.name, prompt.spans, **overrides)}


def summarize(readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """One entry for each budget, ascending; ``violations`` counts spans whose true KL is above it. ``reused_share``
    leaves the extreme lengths out."""
    found = []
    for max_kl in sorted({reading.max_kl for reading in readings}):
        mine = [reading for reading in readings if reading.max_kl == max_kl]
        used = [reading for reading in mine if reading.kl is not None]
        common = [reading for reading in mine if reading.kind not in EXTREMES]
        found.append(
            {
                "max_kl": max_kl,
                "readings": len(mine),
                "spans": len(used),
                "violations": sum(reading.violates for reading in used),
                "reused_share": sum(r.corrected for r in common) / max(1, sum(r.span_tokens for r in common)),
                "kl_mean": statistics.fmean(r.kl for r in used if r.kl is not None) if used else None,
                "kl_max": max((r.kl for r in used if r.kl is not None), default=None),
                "predicted_mean": statistics.fmean(r.predicted_kl or 0.0 for r in used) if used else None,
            }
        )
    return found


def chapter(rows: Sequence[dict[str, Any]], readings: Sequence[Reading], noise: float | None) -> list[Block]:
    """What the pages show: every budget, and by kind what became of the adversarial readings."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    budgets = tuple(
        (
            str(row["max_kl"]), str(row["readings"]), str(row["spans"]), str(row["violations"]),
            f"{row['reused_share']:.2f}", *(shown(row[name]) for name in ("kl_mean", "kl_max", "predicted_mean")),
        )
        for row in rows
    )  # fmt: skip
    kinds = []
    for kind in dict.fromkeys(reading.kind for reading in readings):
        mine = [reading for reading in readings if reading.kind == kind]
        kls = [reading.kl for reading in mine if reading.kl is not None]
        reasons = Counter(reading.reason for reading in mine)
        kinds.append(
            (
                kind, str(len(mine)), ", ".join(f"{count} {reason}" for reason, count in reasons.most_common()),
                shown(statistics.fmean(kls) if kls else None), shown(max(kls, default=None)),
                str(sum(reading.violates for reading in mine)),
            )
        )  # fmt: skip
    return [
        Text(f"True KL of spans that a server reused, nats; two dense runs differ by {shown(noise)}."),
        Table(_HEAD, budgets),
        Table(("content", "readings", "decisions", "KL mean", "KL max", "over budget"), tuple(kinds)),
    ]


def measure(options: argparse.Namespace) -> list[Reading]:
    """Start a server, let it learn, and read."""
    model = str(default_model())
    flags = ["--kvcmas-allow-overrides", "--max-total-tokens", "48000"]
    server = ServerProcess("our server", kvcmas_command(model, flags), options.reports / "budget.log")
    with server:
        prompts = PromptMaker(model)
        texts = [document.text for document in load_documents(sorted(DOCUMENTS.rglob("*.txt")))]
        agents = make_agents(prompts, options.agents, 1)
        server.wait_ready()
        bench = Bench(server.url, prompts, agents, TextSupply(texts, prompts.tokens, options.seed), options.tokens)
        readings: list[Reading] = []
        with tqdm(
            total=options.learned + options.documents + 1 + bool(options.longest), unit="document", file=sys.stderr
        ) as progress:
            for _ in bench.learn(options.learned):
                progress.update()
            for found in bench.readings(options.documents, options.budgets, options.longest):
                readings += found
                progress.update()
    return readings


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.budget", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--agents", type=int, default=4, help="agents with distinct system prompts")
    parser.add_argument("--learned", type=int, default=6, help="documents that all agents read densely first")
    parser.add_argument("--documents", type=int, default=92, help="documents that are reused")
    parser.add_argument("--tokens", type=int, default=300, help="mean length of a document, tokens")
    parser.add_argument("--longest", type=int, default=7600, help="length of the longest document, tokens; 0: none")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.01, 0.02, 0.05], help="max_kl, nats")
    parser.add_argument("--seed", type=int, default=0, help="seed of the text")
    parser.add_argument("--reports", type=Path, default=Path("reports"), help="folder of the report and the log")
    parser.add_argument("--quick", action="store_true", help=f"a check that it works: {_QUICK}")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(_QUICK)
    try:
        readings = measure(options)
    except (ModelError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rows = summarize(readings)
    path = options.reports / "quality.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    noise = [reading.noise for reading in readings if reading.noise is not None]
    report |= {"budget": rows, "budget_noise": statistics.fmean(noise) if noise else None}
    report["budget_readings"] = [asdict(reading) for reading in readings]
    path.write_text(json.dumps(report, indent=1) + "\n")
    blocks = chapter(rows, readings, report["budget_noise"])
    append_pages(options.reports, "quality", "Does the budget hold?", blocks)
    print(markdown(blocks))
    print(f"written to {path}, quality.md and quality.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
