"""Mixed load on one server: agents with hints on both APIs, plain prompts, clients that leave, aborts, flushes."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.soak.probes import OUTPUT_TOKENS, Recorded, parting
from benchmarks.workload.build import Builder
from benchmarks.workload.endpoint import Endpoint, Reply
from kvcmas_sgl.demo.prompts import TokenPrompt

_AGENT, _OPENAI, _PLAIN, _LEAVES, _ABORTED = "agent", "agent_openai", "plain", "client_left", "aborted"
_SHARES = {_AGENT: 0.4, _OPENAI: 0.15, _PLAIN: 0.25, _LEAVES: 0.12, _ABORTED: 0.08}
_FLUSH_EVERY_S = 5.0
# How long a client that leaves has waited: from before its prefill to the middle of its answer, seconds.
_PATIENCE_S = (0.02, 1.2)


@dataclass
class Outcome:
    """What happened to the requests of a load.

    `sent` by kind. `failed`: one sentence for each request that got no answer though its client waited. `equal`: plain
    answers that were stock's; `parted`: those that were not, with how far stock put the other token below its
    best, nats. `corrected`: prompt tokens of agents that were corrected, of `agent_tokens`. `flushes`: flushes under
    load by their HTTP status (SGLang refuses one while requests run).
    """

    sent: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    equal: int = 0
    parted: list[float] = field(default_factory=list)
    corrected: int = 0
    agent_tokens: int = 0
    flushes: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.sent.values())


class Load:
    """Clients of one server, all of them in this process.

    Args:
        url: the server's address.
        builder: makes the agents' workflows.
        plain: prompts with stock's answers.
        seed: seed of what is asked when.
    """

    def __init__(self, url: str, builder: Builder, plain: Sequence[Recorded], seed: int) -> None:
        self._url = url
        self._plain = plain
        self._random = random.Random(seed)
        self._hops = self._endless_hops(builder)
        self.outcome = Outcome()

    async def run(self, seconds: float, clients: int, done: Callable[[int], object]) -> None:
        """Ask for ``seconds``, ``clients`` at a time, and wait for the last answers; ``done`` counts requests."""
        deadline = time.monotonic() + seconds
        async with (
            Endpoint(self._url, hints=True) as agents,
            Endpoint(self._url, api="openai", hints=True) as openai,
            aiohttp.ClientSession() as control,
        ):

            async def client() -> None:
                while time.monotonic() < deadline:
                    await self._one(agents, openai, control)
                    done(1)

            flushing = asyncio.create_task(self._flush(control))
            try:
                await asyncio.gather(*(client() for _ in range(clients)))
            finally:
                flushing.cancel()

    def _endless_hops(self, builder: Builder) -> Iterator[tuple[str, TokenPrompt, int]]:
        number = 0
        while True:
            for workflow in builder.workflows(8, f"soak-{number}-"):
                for hop in workflow.hops:
                    yield hop.role, hop.prompt(workflow.scripted()), hop.output_tokens
            number += 1

    async def _one(self, agents: Endpoint, openai: Endpoint, control: aiohttp.ClientSession) -> None:
        kind = self._random.choices(list(_SHARES), list(_SHARES.values()))[0]
        self.outcome.sent[kind] += 1
        if kind == _PLAIN:
            await self._ask_plain(agents)
            return
        role, prompt, tokens = next(self._hops)
        if kind == _LEAVES:
            await self._leave(agents, role, prompt, tokens)
        elif kind == _ABORTED:
            await self._abort(agents, control, role, prompt, tokens)
        else:
            endpoint = agents if kind == _AGENT else openai
            self._count(kind, await endpoint.send(role, prompt, tokens), prompt)

    async def _ask_plain(self, endpoint: Endpoint) -> None:
        recorded = self._random.choice(self._plain)
        reply = await endpoint.send("", TokenPrompt(recorded.prompt, ()), OUTPUT_TOKENS)
        if reply.error is not None:
            self.outcome.failed.append(f"{_PLAIN}: {reply.error}")
            return
        found = parting(recorded.cold, reply.tokens)
        if found is None:
            self.outcome.equal += 1
        else:
            self.outcome.parted.append(found[1])

    async def _leave(self, endpoint: Endpoint, role: str, prompt: TokenPrompt, tokens: int) -> None:
        """Ask, and close the connection after a while, wherever the request is by then."""
        asking = asyncio.create_task(endpoint.send(role, prompt, tokens))
        await asyncio.wait({asking}, timeout=self._random.uniform(*_PATIENCE_S))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def _abort(
        self, endpoint: Endpoint, control: aiohttp.ClientSession, role: str, prompt: TokenPrompt, tokens: int
    ) -> None:
        """Ask, and have the server abort it after a while; the answer ends then, with or without tokens."""
        rid = f"soak-{self._random.getrandbits(64):x}"
        body = endpoint.body(role, prompt, tokens) | {"rid": rid}

        async def ask() -> int:
            async with control.post(self._url + "/generate", json=body) as response:
                await response.read()
                return response.status

        asking = asyncio.create_task(ask())
        await asyncio.wait({asking}, timeout=self._random.uniform(*_PATIENCE_S))
        async with control.post(self._url + "/abort_request", json={"rid": rid}) as response:
            if response.status != 200:
                self.outcome.failed.append(f"{_ABORTED}: /abort_request answered {response.status}")
        status = await asking
        if status != 200:
            self.outcome.failed.append(f"{_ABORTED}: HTTP {status}")

    def _count(self, kind: str, reply: Reply, prompt: TokenPrompt) -> None:
        if reply.error is not None:
            self.outcome.failed.append(f"{kind}: {reply.error}")
            return
        if reply.exact is not None and reply.exact + reply.corrected + (reply.computed or 0) != len(prompt.ids):
            self.outcome.failed.append(f"{kind}: the report does not add up to {len(prompt.ids)} tokens: {reply}")
        self.outcome.corrected += reply.corrected
        self.outcome.agent_tokens += len(prompt.ids)

    async def _flush(self, control: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.sleep(_FLUSH_EVERY_S)
            async with control.post(self._url + "/flush_cache") as response:
                self.outcome.flushes[str(response.status)] += 1
