"""Does a request get dearer, or the state larger, with more documents and more roles?

Short documents, each read by two roles in turn; the server learns when it is idle, as always. A window's cost per
request is what the scheduler's thread spent in our code, and the request's own time.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import theilslopes
from tqdm import tqdm

from benchmarks.serving.arms import ARMS, OURS, Fleet
from benchmarks.serving.session import REQUEST_CLOCKS, settle
from benchmarks.workload.agents import AgentText, make_agent
from benchmarks.workload.text import TextSupply
from kvcmas_sgl.demo.prompts import PromptMaker, TokenPrompt

_SPAN, _SYSTEM, _OUTPUT = 96, 72, 1
_WINDOW_DOCUMENTS = 10
_LEAST_WINDOWS = 5


@dataclass(frozen=True)
class Window:
    """Readings of ten documents or more. Milliseconds are per request; bytes, sources and edges are those after it."""

    documents: int
    roles: int
    requests: int
    request_ms: float
    ours_ms: float
    match_ms: float
    learn_ms: float
    state_bytes: int
    own_delta_bytes: int
    edges: int
    sources: int

    @property
    def edge_bytes(self) -> float:
        """What is kept of one pair of agents, own deltas of documents apart."""
        return (self.state_bytes - self.own_delta_bytes) / max(self.edges, 1)


def measure_scaling(
    fleet: Fleet, prompts: PromptMaker, text: TextSupply, documents: int, roles: int
) -> dict[str, list[Window]]:
    """Windows at 10 to `documents` documents between two roles, and with 2 to `roles` roles."""

    async def work() -> dict[str, list[Window]]:
        agents = [make_agent(prompts, text, number, _SYSTEM + 16 * (number % 3)) for number in range(roles)]
        async with fleet.endpoint(ARMS[OURS]) as endpoint:
            reader = _Reader(endpoint, text)
            by_documents = []
            bar = tqdm(range(0, documents, _WINDOW_DOCUMENTS), desc="documents", file=sys.stderr, mininterval=2.0)
            for start in bar:
                by_documents.append(await reader.window(agents[:2], start + _WINDOW_DOCUMENTS, _WINDOW_DOCUMENTS))
            by_roles = []
            count = 2
            while count <= roles:
                # The newest pairs of roles: each reads after the one before it.
                by_roles.append(await reader.window(agents[:count], documents, max(_WINDOW_DOCUMENTS, count)))
                count *= 2
        return {"documents": by_documents, "roles": by_roles}

    return asyncio.run(work())


def scaling_figures(windows: dict[str, list[Window]]) -> dict[str, Any]:
    """The last windows over early ones, where 1 is flat; the documents' trend, where 0 is; and all windows.

    The early windows of documents begin with the second: the first learns the first pair of agents. `trend` is the
    Theil-Sen slope from there to the last window as a share of the median, with its 95 % interval.
    """
    documents, roles = windows["documents"], windows["roles"]
    early = documents[1:4] or documents
    late = documents[-3:]

    def median(found: Sequence[Window], name: str) -> float:
        return statistics.median(getattr(window, name) for window in found)

    names = ("request_ms", "ours_ms", "match_ms", "state_bytes", "own_delta_bytes", "edge_bytes")
    return {
        "documents": {
            "from": early[0].documents,
            "to": late[-1].documents,
            "ratio": {name: _ratio(median(late, name), median(early, name)) for name in names},
            "trend": {name: _trend(documents[1:], name) for name in ("request_ms", "ours_ms", "match_ms")},
        },
        "roles": {
            "from": roles[0].roles,
            "to": roles[-1].roles,
            "ratio": {name: _ratio(getattr(roles[-1], name), getattr(roles[0], name)) for name in names},
        },
        "windows": {kind: [vars(window) for window in found] for kind, found in windows.items()},
    }


class _Reader:
    def __init__(self, endpoint: Any, text: TextSupply) -> None:
        self._endpoint = endpoint
        self._text = text

    async def window(self, agents: Sequence[AgentText], documents: int, readings: int) -> Window:
        before = await self._state()
        seconds = []
        for number in range(readings):
            document = self._text.span(_SPAN)
            # Two readers a document; all roles take their turn.
            for place in (2 * number, 2 * number + 1):
                agent = agents[place % len(agents)]
                ids = (*agent.head, *document, *agent.tail)
                prompt = TokenPrompt(ids, ((len(agent.head), len(agent.head) + _SPAN),))
                reply = await self._endpoint.send(agent.name, prompt, _OUTPUT)
                if reply.error:
                    raise RuntimeError(f"a request failed while state grew: {reply.error}")
                seconds.append(reply.seconds)
        await settle(self._endpoint, ARMS[OURS])
        after = await self._state()
        spent = {
            name: 1e3 * (after[f"{name}_seconds"] - before[f"{name}_seconds"]) for name in (*REQUEST_CLOCKS, "learn")
        }
        return Window(
            documents=documents,
            roles=len(agents),
            requests=len(seconds),
            request_ms=1e3 * statistics.median(seconds),
            ours_ms=sum(spent[name] for name in REQUEST_CLOCKS) / len(seconds),
            match_ms=spent["match"] / len(seconds),
            learn_ms=spent["learn"] / len(seconds),
            state_bytes=after["state_bytes"],
            own_delta_bytes=after["own_delta_bytes"],
            edges=sum(after["edges"].values()),
            sources=after["sources"],
        )

    async def _state(self) -> Any:
        return (await self._endpoint.json("/server_info"))["internal_states"][0]["kvcmas"]


def _trend(windows: Sequence[Window], name: str) -> dict[str, float] | None:
    if len(windows) < _LEAST_WINDOWS:
        return None
    counts, values = [window.documents for window in windows], [getattr(window, name) for window in windows]
    scale = (counts[-1] - counts[0]) / statistics.median(values)
    slope, _, low, high = theilslopes(values, counts)
    return {"value": float(slope) * scale, "low": float(low) * scale, "high": float(high) * scale}


def _ratio(late: float, early: float) -> float | None:
    return late / early if early else None
