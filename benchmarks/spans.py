"""Throughput of agents that each read several shared spans in one prompt: ours against stock SGLang.

    python -m benchmarks.spans

Both servers are up and take turns. First every pair of agents learns from documents that both read densely. Then
rounds: requests of several agents are sent together, each over spans that its agent has never read and one other agent
has, with the agent's own text between them. Three arms, each on fresh text: stock SGLang; our server; and our server
with a client that stages its prompts, sending the text up to each later span's start before the request itself. At
last single requests: the price of several spans instead of one, and the time to first token.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.span_figures import (
    ARMS,
    OURS,
    STAGED,
    STOCK,
    RequestResult,
    Round,
    Single,
    count_tokens,
    draw,
    summarize,
    table,
)
from benchmarks.span_workload import (
    Agent,
    Request,
    Shape,
    make_agents,
    plan_round,
    plan_single,
    stages,
)
from benchmarks.workload.text import TextSupply
from kvcmas_sgl.demo.client import Client, agent_report
from kvcmas_sgl.demo.prompts import PromptMaker, TokenPrompt
from kvcmas_sgl.demo.roles import DOCUMENTS, load_documents
from kvcmas_sgl.demo.rows import span_rows
from kvcmas_sgl.demo.servers import ServerError, ServerProcess, kvcmas_command, stock_command
from kvcmas_sgl.prepare_model import ModelError, default_model
from kvcmas_sgl.wire import Policy, agent_hint

# Room for a round's readings, those of the holders, and what the agents learned from.
_SERVER_FLAGS = ("--max-total-tokens", "64000")
_QUICK = {"agents": 3, "span_tokens": 256, "train_documents": 6, "rounds": 1, "singles": 1}


class Bench:
    """All requests to the two servers, on fresh text each; `progress` gets a step for each reading or round."""

    def __init__(
        self, stock: str, ours: str, prompts: PromptMaker, options: argparse.Namespace, progress: tqdm
    ) -> None:
        self._shape = Shape(options.spans, options.span_tokens, options.concurrency)
        # One for each request of a round: a client sends one request at a time.
        self._stock = [Client(stock) for _ in range(options.concurrency)]
        self._ours = [Client(ours) for _ in range(options.concurrency)]
        self._without = prompts.special_tokens
        self._options = options
        self._progress = progress
        texts = [document.text for document in load_documents(sorted(DOCUMENTS.rglob("*.txt")))]
        self._supply = TextSupply(texts, prompts.tokens, options.seed)
        self._agents = make_agents(prompts, options.agents, options.spans)

    def train(self) -> None:
        """Make every agent's own prefix resident on both servers, and let ours learn every pair of agents, densely."""
        for agent in self._agents:
            self._stock[0].prefill(agent.head)
        for number in range(self._options.train_documents):
            content = self._supply.content(self._shape.spans, self._shape.span_tokens)
            # Forwards and backwards: each agent of a pair is the later reader in half of the documents.
            for agent in self._agents if number % 2 == 0 else reversed(self._agents):
                self._hold(Request(agent, agent.prompt(content)), policy="learn")
                self._progress.update()

    def rounds(self) -> Iterator[Round]:
        """Yield one round per number and arm; which arm goes first changes from number to number."""
        for number in range(self._options.rounds):
            shift = number % len(ARMS)
            for arm in (*ARMS[shift:], *ARMS[:shift]):
                yield self._round(arm, number)
                self._progress.update()

    def singles(self) -> Iterator[Single]:
        """Yield repetitions of one request at a time; which server, and which prompt on ours, goes first changes."""
        for number in range(self._options.singles):
            plan = plan_single(self._agents, self._supply, self._shape, number)
            for held in plan.held:
                self._hold(held)
            todo = (
                (self._ask_stock, self._stock[0], plan.several),
                (self._ask_ours, self._ours[0], plan.several),
                (self._ask_ours, self._ours[0], plan.one),
            )
            found: dict[int, RequestResult] = {}
            for place in range(len(todo)) if number % 2 == 0 else reversed(range(len(todo))):
                ask, client, request = todo[place]
                found[place] = ask(client, request)
                self._ours[0].wait_until_learned()
            yield Single(number, found[0], found[1], found[2])
            self._progress.update()

    def _round(self, arm: str, number: int) -> Round:
        plan = plan_round(self._agents, self._supply, self._shape, number)
        ask, clients = {
            STOCK: (self._ask_stock, self._stock),
            OURS: (self._ask_ours, self._ours),
            STAGED: (self._ask_staged, self._ours),
        }[arm]
        if arm != STOCK:
            for held in plan.held:
                self._hold(held)
        with ThreadPoolExecutor(len(plan.requests)) as pool:
            begin = time.perf_counter()
            results = tuple(pool.map(ask, clients, plan.requests))
            seconds = time.perf_counter() - begin
        # Learning takes the cores that the next arm is timed on.
        self._ours[0].wait_until_learned()
        return Round(arm, number, seconds, results)

    def _hold(self, request: Request, policy: Policy | None = None) -> None:
        self._ours[0].prefill(request.prompt.ids, **_hint(request.agent, request.prompt, policy))
        self._ours[0].wait_until_learned()

    def _ask_stock(self, client: Client, request: Request) -> RequestResult:
        begin = time.perf_counter()
        answer = client.answer(request.prompt.ids, self._options.new_tokens, self._without)
        seconds = time.perf_counter() - begin
        exact = answer.meta["cached_tokens"]
        return RequestResult(request.agent.name, seconds, answer.ttft_s, 0.0, exact, 0, len(request.prompt.ids) - exact)

    def _ask_ours(self, client: Client, request: Request) -> RequestResult:
        return self._ask_hinted(client, request, [])

    def _ask_staged(self, client: Client, request: Request) -> RequestResult:
        return self._ask_hinted(client, request, stages(request.prompt))

    def _ask_hinted(self, client: Client, request: Request, before: Sequence[TokenPrompt]) -> RequestResult:
        agent, prompt = request.agent, request.prompt
        begin = time.perf_counter()
        passes = [agent_report(client.prefill(stage.ids, **_hint(agent, stage))) for stage in before]
        staging = time.perf_counter() - begin
        answer = client.answer(prompt.ids, self._options.new_tokens, self._without, **_hint(agent, prompt))
        seconds = time.perf_counter() - begin
        report = agent_report(answer.meta)
        # Each stage decides on its last span.
        reasons = [span_rows(done)[-1].reason for done in passes]
        reasons += [span.reason for span in span_rows(report)[len(reasons) :]]
        counts = count_tokens([*passes, report], len(prompt.ids))
        return RequestResult(
            agent=agent.name,
            seconds=seconds,
            ttft_s=staging + answer.ttft_s,
            staging_s=staging,
            exact=counts.exact,
            corrected=counts.corrected,
            computed=counts.computed,
            reasons=tuple(reasons),
        )


def parser() -> argparse.ArgumentParser:
    shape = argparse.ArgumentParser(
        prog="python -m benchmarks.spans", description=(__doc__ or "").split("\n\n")[2], allow_abbrev=False
    )
    for name, default, text in (
        ("concurrency", 8, "requests that are sent together"),
        ("agents", 4, "agents with distinct system prompts"),
        ("spans", 4, "shared spans a prompt"),
        ("span-tokens", 512, "tokens a span"),
        ("new-tokens", 16, "tokens generated a request"),
        ("train-documents", 6, "documents (of all spans) that every agent reads before the rounds"),
        ("rounds", 3, "rounds of each arm"),
        ("singles", 3, "repetitions of the single requests"),
        ("seed", 0, "seed of the text"),
    ):
        shape.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    shape.add_argument("--model", help="model folder or hub name (default: SmolLM2-135M-Instruct, made on first use)")
    shape.add_argument("--kvcmas-max-kl", type=float, default=0.02, help="quality budget, nats (default: 0.02)")
    shape.add_argument("--reports", type=Path, default=Path("reports"), metavar="DIR", help="output (default: reports)")
    quick = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in _QUICK.items())
    shape.add_argument("--quick", action="store_true", help=f"a check that it works, not a measurement: {quick}")
    return shape


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write spans.json and spans.png; returns the exit status."""
    command = parser()
    options = command.parse_args(arguments)
    if options.quick:
        vars(options).update(_QUICK)
    for name, low in (("concurrency", 1), ("agents", 2), ("spans", 2), ("span_tokens", 1), ("new_tokens", 1),
                      ("train_documents", 0), ("rounds", 1), ("singles", 1)):  # fmt: skip
        if getattr(options, name) < low:
            command.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be at least {low}.")
    try:
        rounds, singles = _run(options)
    except (ModelError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    summary = summarize(rounds, singles)
    report = {
        **summary,
        "settings": {name: value for name, value in vars(options).items() if name != "reports"},
        "units": "seconds, prompt tokens; ratios are medians over rounds or repetitions",
        "machine": {"cores": os.cpu_count(), "load_average_1min": os.getloadavg()[0]},
        "rounds": [{**asdict(entry), "requests_per_s": entry.requests_per_s} for entry in rounds],
        "singles": [asdict(single) for single in singles],
    }
    (options.reports / "spans.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(rounds, summary, options.reports / "spans.png")
    print(table(summary))
    print(f"written to {options.reports}/spans.json and spans.png")
    return 0


def _run(options: argparse.Namespace) -> tuple[list[Round], list[Single]]:
    options.model = options.model or str(default_model())
    ours_flags = ["--kvcmas-allow-overrides", "--kvcmas-max-kl", str(options.kvcmas_max_kl)]
    servers = (
        ServerProcess(
            "stock SGLang", stock_command(options.model, None, _SERVER_FLAGS), options.reports / "spans-stock.log"
        ),
        ServerProcess(
            "our server",
            kvcmas_command(options.model, [*_SERVER_FLAGS, *ours_flags]),
            options.reports / "spans-ours.log",
        ),
    )
    steps = options.agents * options.train_documents + len(ARMS) * options.rounds + options.singles
    # ExitStack stops both whatever happens.
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        prompts = PromptMaker(options.model)
        for server in servers:
            server.wait_ready()
        with tqdm(total=steps, unit="step", file=sys.stderr) as progress:
            bench = Bench(servers[0].url, servers[1].url, prompts, options, progress)
            progress.set_description("learning")
            bench.train()
            progress.set_description("rounds")
            rounds = list(bench.rounds())
            progress.set_description("singles")
            return rounds, list(bench.singles())


def _hint(agent: Agent, prompt: TokenPrompt, policy: Policy | None = None) -> dict[str, Any]:
    return {"kv_hints": agent_hint(agent.name, prompt.spans, policy=policy)}


if __name__ == "__main__":
    sys.exit(main())
