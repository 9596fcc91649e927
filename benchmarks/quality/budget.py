"""Does the budget hold? True KL of spans that the server reused, at three settings of the dial.

    python -m benchmarks.quality.budget

One server of ours, SmolLM2 in its own dtype. Pairs of agents learn from documents; then agents read documents that
another agent holds and they have not read, each under one of three budgets (a request's ``max_kl``). The truth is the
same prompt without a hint, which is stock SGLang's dense prefill; both are compared along its own greedy answer. The
documents are sentences of the texts that the repository carries; every eighth is adversarial: other languages, base64,
one line repeated, digits.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.span_workload import Agent, make_agents
from benchmarks.workload.text import Span, TextSupply
from kvcmas_sgl.demo.client import Client, agent_report
from kvcmas_sgl.demo.divergence import mean_kl
from kvcmas_sgl.demo.prompts import PromptMaker, TokenPrompt
from kvcmas_sgl.demo.roles import DOCUMENTS, load_documents
from kvcmas_sgl.demo.servers import ServerError, ServerProcess, kvcmas_command
from kvcmas_sgl.prepare_model import ModelError, default_model
from kvcmas_sgl.wire import agent_hint

ANSWER_TOKENS = 32
TOP = 128
_QUICK = {"agents": 3, "documents": 12, "learned": 4}


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

    def readings(self, documents: int, budgets: Sequence[float]) -> Iterator[list[Reading]]:
        """For each document: the readings by every agent but the one that holds it, under one of the budgets."""
        for number in range(documents):
            kind, content = self._content(number + 10_000, adversarial_every=8)
            holder = number // len(budgets) % len(self._agents)
            first = self._agents[holder].prompt((content,))
            self._client.answer(first.ids, ANSWER_TOKENS, **_hint(self._agents[holder], first, policy="learn"))
            self._client.wait_until_learned()
            others = [agent for place, agent in enumerate(self._agents) if place != holder]
            yield [self._read(agent, kind, content, budgets[number % len(budgets)]) for agent in others]

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
    """One entry for each budget, ascending; ``violations`` counts spans whose true KL is above it."""
    found = []
    for max_kl in sorted({reading.max_kl for reading in readings}):
        mine = [reading for reading in readings if reading.max_kl == max_kl]
        used = [reading for reading in mine if reading.kl is not None]
        found.append(
            {
                "max_kl": max_kl,
                "readings": len(mine),
                "spans": len(used),
                "violations": sum(reading.violates for reading in used),
                "reused_share": sum(r.corrected for r in used) / sum(r.span_tokens for r in mine),
                "kl_mean": statistics.fmean(r.kl for r in used if r.kl is not None) if used else None,
                "kl_max": max((r.kl for r in used if r.kl is not None), default=None),
                "predicted_mean": statistics.fmean(r.predicted_kl or 0.0 for r in used) if used else None,
            }
        )
    return found


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
        with tqdm(total=options.learned + options.documents, unit="document", file=sys.stderr) as progress:
            for _ in bench.learn(options.learned):
                progress.update()
            for found in bench.readings(options.documents, options.budgets):
                readings += found
                progress.update()
    return readings


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.budget", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--agents", type=int, default=4, help="agents with distinct system prompts")
    parser.add_argument("--learned", type=int, default=6, help="documents that all agents read densely first")
    parser.add_argument("--documents", type=int, default=210, help="documents that are reused")
    parser.add_argument("--tokens", type=int, default=300, help="mean length of a document, tokens")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.01, 0.02, 0.05], help="max_kl, nats")
    parser.add_argument("--seed", type=int, default=0, help="seed of the text")
    parser.add_argument("--reports", type=Path, default=Path("reports"), help="folder for quality.json and the log")
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
    print("max_kl   readings  reused spans  violations  reused share  KL mean  KL max  predicted")
    for row in rows:
        cells = [row["kl_mean"], row["kl_max"], row["predicted_mean"]]
        shown = "".join(f"{'-' if cell is None else format(cell, '.4f'):>9}" for cell in cells)
        print(f"{row['max_kl']:<9} {row['readings']:>7} {row['spans']:>13} {row['violations']:>11} "
              f"{row['reused_share']:>13.2f}{shown}")  # fmt: skip
    print(f"noise {report['budget_noise']}; written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
