"""SGLang with kvcmas on a GPU, on a model made on the spot: time to first token, computed, hit and corrected."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcmas_sgl.demo.client import Answer, Client, agent_report
from kvcmas_sgl.demo.servers import ServerError, ServerProcess, kvcmas_command
from kvcmas_sgl.prepare_model import default_model
from kvcmas_sgl.wire import agent_hint

ATTENTION = ("flashinfer", "triton")
SPANS = (4096, 32_768)
REPETITIONS = 3
_PREFIX, _QUESTION, _LESSON, _LESSONS = 48, 16, 1024, 3
_NEW_TOKENS = 8
# A server that starts has compiled its kernels and captured its graphs within this time, seconds.
_START_S = 150.0
_ORDINARY = range(1000, 40_000)


@dataclass(frozen=True)
class Served:
    """Median seconds to the first token over repetitions; ``note`` says why there are none."""

    attention: str
    span: int
    dense_s: float | None
    exact_s: float | None
    corrected_s: float | None
    corrected_tokens: int = 0
    note: str = ""


def serve(layers: int, deadline: float, reports: Path, say: Callable[[str], None]) -> list[Served]:
    """One server after the other. ``deadline``: of ``time.monotonic()``; what does not fit is noted, not run."""
    folder = Path(tempfile.mkdtemp(prefix="kvcmas-random-model-"))
    found: list[Served] = []
    try:
        make_model(folder, layers)
        say(f"made a model of {layers} layers")
        for attention in ATTENTION:
            left = deadline - time.monotonic()
            if left < 60:
                found += [Served(attention, span, None, None, None, note="no time was left") for span in SPANS]
                continue
            try:
                found += _one_server(folder, attention, min(left - 20, _START_S), deadline, reports, say)
            except (ServerError, RuntimeError) as error:
                found += [Served(attention, span, None, None, None, note=str(error)) for span in SPANS]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def make_model(folder: Path, layers: int) -> None:
    """Random bf16 weights in Llama-3.1-8B's shapes, ``layers`` layers deep, with SmolLM2's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = default_model()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (small / name).is_file():
            shutil.copy(small / name, folder / name)
    config = LlamaConfig(
        vocab_size=json.loads((small / "config.json").read_text())["vocab_size"],
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=65_536,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def _one_server(
    folder: Path, attention: str, patience: float, deadline: float, reports: Path, say: Callable[[str], None]
) -> list[Served]:
    flags = ["--attention-backend", attention, "--max-total-tokens", "300000", "--context-length", "40960"]
    flags += ["--mem-fraction-static", "0.6", "--kvcmas-policy", "always", "--kvcmas-allow-overrides"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    log = reports / f"gpu-{attention}.log"
    name = f"the server with {attention} attention"
    with ServerProcess(name, kvcmas_command(str(folder), flags), log, environment=environment) as server:
        say(f"{name} was ready after {server.wait_ready(patience):.0f} s")
        asker = _Asker(server.url)
        asker.learn()
        found = []
        for span in SPANS:
            if time.monotonic() > deadline - 15:
                found.append(Served(attention, span, None, None, None, note="no time was left"))
                continue
            found.append(asker.measure(attention, span))
            say(f"{attention} {span}: {found[-1]}")
        return found


class _Asker:
    """Requests of two agents, each over text that nobody has read before."""

    def __init__(self, url: str) -> None:
        self._client = Client(url)
        self._generator = torch.Generator().manual_seed(1)
        self._prefix = {role: self._text(_PREFIX) for role in ("writer", "critic")}

    def learn(self) -> None:
        """Let the edge from writer to critic see spans that both computed."""
        for _ in range(_LESSONS):
            content = self._text(_LESSON)
            for role in ("writer", "critic"):
                ids, hint = self._prompt(role, content, "learn")
                self._client.prefill(ids, **hint)
                self._client.wait_until_learned()

    def measure(self, attention: str, span: int) -> Served:
        """The first repetition is a warm-up: it compiles what the span's length needs."""
        times: dict[str, list[float]] = {"dense": [], "exact": [], "corrected": []}
        corrected = 0
        for number in range(REPETITIONS + 1):
            content = self._text(span)
            for kind, role in (("dense", "writer"), ("exact", "writer"), ("corrected", "critic")):
                answer = self._ask(role, content)
                self._client.wait_until_learned()
                if number:
                    times[kind].append(answer.ttft_s)
                if kind == "corrected":
                    corrected = int(agent_report(answer.meta)["corrected_tokens"])
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        note = "" if corrected else "nothing was corrected"
        return Served(attention, span, medians["dense"], medians["exact"], medians["corrected"], corrected, note)

    def _ask(self, role: str, content: Sequence[int]) -> Answer:
        ids, hint = self._prompt(role, content, "always")
        return self._client.answer(ids, _NEW_TOKENS, **hint)

    def _prompt(self, role: str, content: Sequence[int], policy: Any) -> tuple[list[int], dict[str, Any]]:
        ids = [*self._prefix[role], *content, *self._text(_QUESTION)]
        mark = (_PREFIX, _PREFIX + len(content))
        return ids, {"kv_hints": agent_hint(role, [mark], policy=policy)}

    def _text(self, tokens: int) -> list[int]:
        found: list[int] = torch.randint(_ORDINARY.start, _ORDINARY.stop, (tokens,), generator=self._generator).tolist()
        return found


def serving_table(rows: Sequence[Served]) -> str:
    """One line a server and span; seconds, and how many times faster than computing."""
    lines = [f"{'attention':11} {'span':>6} {'dense s':>9} {'exact s':>9} {'corrected s':>12} {'x':>6}"]
    for row in rows:
        if row.dense_s is None or row.exact_s is None or row.corrected_s is None:
            lines.append(f"{row.attention:11} {row.span:6d} {row.note.splitlines()[0]}")
            continue
        faster = row.dense_s / row.corrected_s
        seconds = f"{row.dense_s:9.3f} {row.exact_s:9.3f} {row.corrected_s:12.3f}"
        lines.append(f"{row.attention:11} {row.span:6d} {seconds} {faster:6.1f}  {row.note}".rstrip())
    return "\n".join(lines)
