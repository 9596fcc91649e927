"""Dense runs of the four agents over one task: what methods learn from and are measured against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.quality.prompts import AGENTS, Answer, Probe, Prompt, PromptMaker, Span, Task
from benchmarks.quality.recompute import Pass
from benchmarks.quality.reference import KV, ReferenceModel

SNAPSHOT_LAYERS = 3
"""Hidden states are kept at every third layer's input: where DroidSpeak and RelayCaching may start to recompute."""


@dataclass(frozen=True)
class Held:
    """KV of one content as somebody holds it.

    agent: the holder at a place ("critic@first"); start: position of the first token; hidden: fp32 [n, hidden] at the
    input of snapshot layers, from the exact run that computed the content first.
    """

    agent: str
    start: int
    kv: KV
    hidden: dict[int, Tensor]

    def __len__(self) -> int:
        return len(self.kv)


@dataclass(frozen=True)
class Reading:
    """One agent's dense run.

    answer: int64 [a], greedy. dense: KV of prompt and answer. logits: fp32 [tail + a, vocabulary], after each token of
    the request and each of the answer's but the last. hidden: snapshots from the end of the prefix on.
    """

    agent: str
    prompt: Prompt
    answer: Tensor
    dense: KV
    logits: Tensor
    hidden: dict[int, Tensor]
    probes: tuple[Probe, ...]

    @property
    def after_spans(self) -> Tensor:
        """The request and the answer without its last token, int64."""
        return torch.cat([self.prompt.tokens[self.prompt.body :], self.answer[:-1]])

    def held(self, span: Span, kv: KV | None = None, hidden: dict[int, Tensor] | None = None) -> Held:
        """``span`` as this agent holds it after the run: densely, unless ``kv`` of the prompt is given."""
        at = slice(span.start - self.prompt.prefix, span.stop - self.prompt.prefix)
        own = {layer: part[at] for layer, part in self.hidden.items()} if hidden is None else hidden
        return Held(holder(self.agent, span), span.start, (kv or self.dense).cut(span.start, span.stop), own)

    def held_answer(self, kv: KV | None = None) -> Held:
        """The answer as its writer holds it; ``kv``: of prompt and answer."""
        start = len(self.prompt.tokens)
        at = slice(start - self.prompt.prefix, None)
        hidden = {layer: part[at] for layer, part in self.hidden.items()}
        return Held(f"{self.agent}@written", start, (kv or self.dense).cut(start, start + len(self.answer)), hidden)


@dataclass(frozen=True)
class Chain:
    """readings: in order. alone: content -> the content encoded without context behind one BOS."""

    task: Task
    readings: tuple[Reading, ...]
    alone: dict[str, Held]

    def pairs(self, context_free: bool = False) -> Iterator[tuple[Reading, Span, Held]]:
        """Every span that an agent reads with its source: who held it last, densely, or its context-free encoding."""
        last: dict[str, Held] = {}
        for number, reading in enumerate(self.readings):
            for span in reading.prompt.spans:
                if number and (context_free or span.content in last):
                    yield reading, span, self.alone[span.content] if context_free else last[span.content]
            last.update(sources_after(self.task, reading, last))


def holder(agent: str, span: Span) -> str:
    """Whose KV it is, and where in its prompt: what an edge joins."""
    return f"{agent}@{span.place}"


def sources_after(task: Task, reading: Reading, before: dict[str, Held], kv: KV | None = None) -> dict[str, Held]:
    """The newest sources once ``reading`` is over, which held its prompt and answer as ``kv`` (dense if None).

    Hidden states stay those of the first exact run.
    """
    out = {}
    for span in reading.prompt.spans:
        hidden = before[span.content].hidden if span.content in before else None
        out[span.content] = reading.held(span, kv, hidden)
    out[f"{task.name}/{reading.agent}"] = reading.held_answer(kv)
    return out


class ChainRunner:
    """Runs chains densely. ``answer_tokens``: length of every greedy answer; special tokens are not written."""

    def __init__(self, model: ReferenceModel, prompts: PromptMaker, answer_tokens: int) -> None:
        self.model, self.prompts, self._answer_tokens = model, prompts, answer_tokens
        self._prefixes: dict[str, KV] = {}
        self._templates: dict[str, tuple[Prompt, KV]] = {}

    def run(self, task: Task) -> Chain:
        answers: list[Answer] = []
        readings = []
        for agent in AGENTS:
            prompt = self.prompts.prompt(agent, task, answers)
            probes = tuple(self.prompts.probe(agent, question) for question in task.questions)
            reading = self._read(agent.name, prompt, probes)
            answers.append(Answer(agent.name, reading.answer))
            readings.append(reading)
        last = readings[-1].prompt
        alone = {span.content: self.alone(last.tokens[span.start : span.stop]) for span in last.spans}
        return Chain(task, tuple(readings), alone)

    def prefix(self, agent: str) -> KV:
        """The agent's own prefix, exact."""
        if agent not in self._prefixes:
            tokens = self.prompts.prefix(next(a for a in AGENTS if a.name == agent))
            self._prefixes[agent] = self.model.extend(tokens)[1]
        return self._prefixes[agent]

    def alone(self, span: Tensor) -> Held:
        """``span`` without context. One BOS before it takes the attention sink, as Llama's tokenizer would have it."""
        work = Pass.dense(self.model, torch.cat([torch.tensor([self.prompts.bos]), span]), None)
        hidden = {}
        for layer in range(self.model.layers):
            if layer % SNAPSHOT_LAYERS == 0:
                hidden[layer] = work.hidden[1:].clone()
            work.step(layer)
        return Held("alone", 1, work.kv.cut(1, 1 + len(span)), hidden)

    def template(self, agent: str, task: Task, answers: Sequence[str]) -> tuple[Prompt, KV]:
        """The agent's prompt with markers in place of all content, computed once: the base of its glue in KVComm."""
        key = f"{agent}/{len(task.documents)}/{len(answers)}"
        if key not in self._templates:
            marked = self.prompts.prompt(
                next(a for a in AGENTS if a.name == agent),
                task,
                [Answer(author, torch.zeros(0, dtype=torch.int64)) for author in answers],
                marked=True,
            )
            self._templates[key] = (marked, self.model.extend(marked.tokens)[1])
        return self._templates[key]

    def _read(self, agent: str, prompt: Prompt, probes: tuple[Probe, ...]) -> Reading:
        prefix = self.prefix(agent)
        work = Pass.dense(self.model, prompt.tokens, prefix)
        hidden: dict[int, list[Tensor]] = {}
        for layer in range(self.model.layers):
            if layer % SNAPSHOT_LAYERS == 0:
                hidden[layer] = [work.hidden.clone()]
            work.step(layer)
        logits = [self.model.logits(work.hidden[prompt.body - prompt.prefix :])]
        tokens, kv = prompt.tokens, with_room(work.kv, self._answer_tokens)
        for _ in range(self._answer_tokens):
            scores = logits[-1][-1].clone()
            scores[self.prompts.special] = -torch.inf
            tokens = torch.cat([tokens, scores.argmax()[None]])
            n = len(tokens)
            step = Pass(self.model, tokens, kv.cut(0, n), torch.tensor([n - 1]), in_place=True)
            for layer in range(self.model.layers):
                if layer % SNAPSHOT_LAYERS == 0:
                    hidden[layer].append(step.hidden.clone())
                step.step(layer)
            logits.append(self.model.logits(step.hidden))
        answer = tokens[len(prompt.tokens) :]
        snapshots = {layer: torch.cat(parts) for layer, parts in hidden.items()}
        return Reading(agent, prompt, answer, kv, torch.cat(logits[:-1]), snapshots, probes)


def with_room(kv: KV, tokens: int) -> KV:
    """A copy of ``kv`` with room for ``tokens`` more."""
    shape = (kv.k.shape[0], tokens, *kv.k.shape[2:])
    return KV.join([kv, KV(kv.k.new_zeros(shape), kv.v.new_zeros(shape))])
