"""What reuse costs beside the forward pass, and what learning costs beside the dense run that it learns from.

    python -m benchmarks.reuse_path

One server with the flags that it has by default, but for a budget that refuses nothing: the gate is not what is timed.
Two agents read some documents densely, from which the edge is learned. Then one reads fresh documents and the other
reuses them. The server's own clocks say where the time went: finding and weighing sources (match),
correcting (place), and making the prompt a source (publish).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests
from tqdm import tqdm

from benchmarks.span_workload import Agent, make_agents
from benchmarks.workload.text import Span, TextSupply
from kvcmas_sgl.config import MAX_KL
from kvcmas_sgl.demo.client import Client, agent_report
from kvcmas_sgl.demo.prompts import PromptMaker
from kvcmas_sgl.demo.roles import DOCUMENTS, load_documents
from kvcmas_sgl.demo.servers import ServerError, ServerProcess, kvcmas_command
from kvcmas_sgl.prepare_model import ModelError, default_model
from kvcmas_sgl.wire import Reuse, agent_hint

PHASES = ("match", "place", "publish")


@dataclass(frozen=True)
class Reading:
    """One agent's reading of one document. ``phases``: ms of the server's thread; ``seconds``: the whole request."""

    agent: str
    document: int
    reuse: str
    corrected: int
    seconds: float
    learn_seconds: float
    phases: Mapping[str, float]


class Bench:
    """Sends one reading after the other; between them the server learns in peace."""

    def __init__(self, url: str, without: tuple[int, ...]) -> None:
        self._url = url
        self._client = Client(url)
        self._without = without

    def read(self, agent: Agent, content: Span, document: int, reuse: Reuse) -> Reading:
        """Read a document and wait until the server has learned from it."""
        prompt = agent.prompt((content,))
        before = self._state()
        begin = time.perf_counter()
        hint = agent_hint(agent.name, prompt.spans, reuse=reuse)
        answer = self._client.answer(prompt.ids, 1, self._without, kv_hints=hint)
        seconds = time.perf_counter() - begin
        self._client.wait_until_learned()
        after = self._state()

        def spent(name: str) -> float:
            return after[f"{name}_seconds"] - before[f"{name}_seconds"]

        corrected = agent_report(answer.meta)["corrected_tokens"]
        phases = {name: 1e3 * spent(name) for name in PHASES}
        return Reading(agent.name, document, reuse, corrected, seconds, spent("learn"), phases)

    def _state(self) -> Mapping[str, Any]:
        info = requests.get(f"{self._url}/server_info", timeout=60).json()
        state: Mapping[str, Any] = info["internal_states"][0]["kvcmas"]
        return state


def summarize(dense: list[Reading], learned: list[Reading], reused: list[Reading]) -> dict[str, Any]:
    """Medians: of reuse over documents that were corrected, of learning over the dense runs it learned from."""
    used = [reading for reading in reused if reading.corrected]
    if not used:
        raise SystemExit("error: no document was reused, so there is nothing to report; see the server's log")
    dense_ms = 1e3 * statistics.median(reading.seconds for reading in dense)
    breakdown = {name: statistics.median(reading.phases[name] for reading in used) for name in PHASES}
    total = statistics.median(sum(reading.phases.values()) for reading in used)
    return {
        "reuse_path_ms_4096": total,
        "reuse_path_share_of_dense": total / dense_ms,
        "reuse_path_breakdown_ms": breakdown,
        "learning_share": statistics.median(reading.learn_seconds / reading.seconds for reading in learned),
        "dense_prefill_ms": dense_ms,
        "reused_request_ms": 1e3 * statistics.median(reading.seconds for reading in used),
    }


def measure(url: str, prompts: PromptMaker, options: argparse.Namespace) -> dict[str, Any]:
    """All readings on the server at ``url``; the report's entries."""
    texts = [document.text for document in load_documents(sorted(DOCUMENTS.rglob("*.txt")))]
    supply = TextSupply(texts, prompts.tokens, seed=0)
    first, second = make_agents(prompts, 2, 1)
    bench = Bench(url, tuple(prompts.special_tokens))
    dense, learned, reused = [], [], []
    total = 2 * (options.learned + options.documents)
    with tqdm(total=total, unit="reading", file=sys.stderr) as progress:
        for number in range(options.learned + options.documents):
            content = supply.span(options.tokens)
            learning = number < options.learned
            dense.append(bench.read(first, content, number, "never"))
            progress.update()
            reading = bench.read(second, content, number, "never" if learning else "auto")
            (learned if learning else reused).append(reading)
            progress.update()
    readings = [asdict(reading) for reading in (*dense, *learned, *reused)]
    return {**summarize(dense, learned[1:] or learned, reused), "readings": readings}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reuse_path", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--learned", type=int, default=3, help="documents that the edge is learned from")
    parser.add_argument("--documents", type=int, default=3, help="documents that are reused")
    parser.add_argument("--reports", type=Path, default=Path("reports"), help="folder for kernels.json and the log")
    options = parser.parse_args()
    model = str(default_model())
    flags = ["--kvcmas-max-kl", str(MAX_KL), "--max-total-tokens", "64000"]
    server = ServerProcess("our server", kvcmas_command(model, flags), options.reports / "reuse-path.log")
    try:
        with server:
            prompts = PromptMaker(model)
            server.wait_ready()
            found = measure(server.url, prompts, options)
    except (ModelError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    path = options.reports / "kernels.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(report | {"reuse_path": found} | {k: found[k] for k in _TOP}, indent=1) + "\n")
    for name, value in found.items():
        if name != "readings":
            print(f"{name:28} {value if isinstance(value, dict) else round(value, 4)}")
    print(f"written to {path}")
    return 0


_TOP = ("reuse_path_ms_4096", "reuse_path_share_of_dense", "learning_share")


if __name__ == "__main__":
    sys.exit(main())
