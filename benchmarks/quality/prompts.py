"""What the agents read: tasks, and the token prompts of a chain of agents over one task.

A chain: every agent reads the same documents and the answers of the agents before it, with its own text in between and
its own request last. Shared texts and own texts are tokenized apart, so that a span has the same tokens for every
reader.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.agents import AGENTS, Agent
from benchmarks.quality.coding import make_coding
from benchmarks.quality.probes import Question, Step, make_probe

DATA = Path(__file__).parent / "data"
KINDS = ("gsm8k", "mmlu", "probe", "code")
FIRST, LATER, ANSWER = "first", "later", "answer"
"""Places of a span in a prompt, as the cache tells them apart: what stands before the first one never changes."""

_PLACEHOLDER = "\u241fUSER\u241f"
_LETTERS = ("A", "B", "C", "D")
_SEEDS = {"learn": 10_000, "test": 20_000}


@dataclass(frozen=True)
class Task:
    """One chain's work. ``kind`` is one of `KINDS`; ``documents`` are shared; ``questions`` have options."""

    name: str
    kind: str
    documents: tuple[str, ...]
    questions: tuple[Question, ...]


def make_tasks(learn: int, test: int) -> tuple[list[Task], list[Task]]:
    """``learn`` and ``test`` tasks, each an even mixture of the kinds and disjoint in content.

    Raises ValueError when the data holds fewer.
    """
    problems = _read("gsm8k.jsonl")
    passages = _read("mmlu_history.jsonl")
    sets: dict[str, list[Task]] = {"learn": [], "test": []}
    taken = {kind: 0 for kind in KINDS}
    # The test set comes first, so that its content does not depend on how much is learned.
    for split, number in (("test", test), ("learn", learn)):
        for i in range(number):
            kind = KINDS[i % len(KINDS)]
            place, taken[kind] = taken[kind], taken[kind] + 1
            if kind == "gsm8k":
                task = _gsm8k(problems, place)
            elif kind == "mmlu":
                task = _mmlu(passages, place)
            else:
                make = make_probe if kind == "probe" else make_coding
                documents, questions = make(_SEEDS[split] + i)
                task = Task(f"{kind}-{split}-{i}", kind, documents, questions)
            sets[split].append(task)
    return sets["learn"], sets["test"]


def _gsm8k(problems: Sequence[Any], place: int, sheet: int = 3) -> Task:
    mine = problems[place * (sheet + 1) : (place + 1) * (sheet + 1)]
    if len(mine) < sheet + 1:
        raise ValueError(f"gsm8k.jsonl has {len(problems)} problems: task {place} needs {(place + 1) * (sheet + 1)}")
    worked = [f"Problem {n}. {p['question']} Answer: {p['answer']}." for n, p in enumerate(mine[:sheet], 1)]
    return Task(f"gsm8k-{place}", "gsm8k", ("\n\n".join(worked), f"Problem to solve. {mine[-1]['question']}"), ())


def _mmlu(passages: Sequence[Any], place: int) -> Task:
    if place >= len(passages):
        raise ValueError(f"mmlu_history.jsonl has {len(passages)} passages: there is none for task {place}")
    entry = passages[place]
    shown = entry["questions"][0]
    options = "\n".join(f"{letter}. {text}" for letter, text in zip(_LETTERS, shown["options"], strict=True))
    question = Question(
        "Which option is right? Answer with its letter.", (Step("The right option is", _LETTERS, shown["answer"]),), 0
    )
    return Task(f"mmlu-{place}", "mmlu", (entry["passage"], f"{shown['question']}\n{options}"), (question,))


def _read(name: str) -> list[Any]:
    lines = [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(lines)
    return lines


@dataclass(frozen=True)
class Span:
    """Tokens ``[start, stop)`` of a prompt that other agents hold, too; ``content`` names them."""

    content: str
    place: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Answer:
    """What an agent wrote, as the next ones read it; int64 [n]."""

    author: str
    tokens: Tensor


@dataclass(frozen=True)
class Prompt:
    """tokens: int64 [n]; the first ``prefix`` are the agent's own; after ``body`` comes its request."""

    tokens: Tensor
    prefix: int
    spans: tuple[Span, ...]

    @property
    def body(self) -> int:
        """Number of tokens up to the end of the last span."""
        return self.spans[-1].stop


@dataclass(frozen=True)
class Probe:
    """tokens: int64 [n], a question and its answer's lead, read instead of the request. ``at``: for each step the place
    in ``tokens`` whose next token decides, the options' first tokens, and the right one's number."""

    tokens: Tensor
    at: tuple[tuple[int, tuple[int, ...], int], ...]
    hops: int

    @property
    def chance(self) -> float:
        out = 1.0
        for _, options, _ in self.at:
            out /= len(options)
        return out


class PromptMaker:
    """Token prompts in the chat template of the model in ``folder``."""

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.bos = int(self._tokenizer.bos_token_id)
        self.special = sorted(self._tokenizer.added_tokens_decoder)

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, tokens: Tensor) -> str:
        return str(self._tokenizer.decode(tokens.tolist()))

    def prefix(self, agent: Agent) -> Tensor:
        """What stands before the first span, int64 [n]: it is the agent's own and never changes."""
        return torch.tensor(self.tokens(self._frame(agent)[0] + agent.glue_document.format(number=1)))

    def prompt(self, agent: Agent, task: Task, answers: Sequence[Answer], marked: bool = False) -> Prompt:
        """The agent's prompt on ``task`` after ``answers``.

        ``marked``: the spans hold a marker instead of their content, as in KVComm's template prompt (arXiv 2510.12872).
        """
        ids = self.prefix(agent).tolist()
        prefix = len(ids)
        spans = []

        def add(content: str, place: str, span: Sequence[int]) -> None:
            spans.append(Span(content, place, len(ids), len(ids) + len(span)))
            ids.extend(span)

        for number, document in enumerate(task.documents):
            if number:
                ids.extend(self.tokens("\n\n" + agent.glue_document.format(number=number + 1)))
            shown = self.tokens(f"{{document_{number + 1}}}" if marked else document)
            add(f"{task.name}/document-{number}", LATER if number else FIRST, shown)
        for answer in answers:
            ids.extend(self.tokens(agent.glue_answer.format(author=answer.author)))
            shown = self.tokens(f"{{answer_{answer.author}}}") if marked else answer.tokens.tolist()
            add(f"{task.name}/{answer.author}", ANSWER, shown)
        ids.extend(self.tokens(f"\n\n{agent.request}{self._frame(agent)[1]}"))
        return Prompt(torch.tensor(ids), prefix, tuple(spans))

    def probe(self, agent: Agent, question: Question) -> Probe:
        """The question in place of the agent's request. Raises ValueError if two options begin with the same token."""
        ids = self.tokens(f"\n\n{question.text}{self._frame(agent)[1]}")
        at = []
        for step in question.steps:
            ids.extend(self.tokens(step.lead))
            options = tuple(self.tokens(" " + option)[0] for option in step.options)
            if len(set(options)) < len(options):
                raise ValueError(f"options {step.options} cannot be told apart by their first tokens")
            at.append((len(ids) - 1, options, step.gold))
            ids.extend(self.tokens(" " + step.options[step.gold]))
        return Probe(torch.tensor(ids[: at[-1][0] + 1]), tuple(at), question.hops)

    def _frame(self, agent: Agent) -> tuple[str, str]:
        messages = [{"role": "system", "content": agent.system}, {"role": "user", "content": _PLACEHOLDER}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        head, tail = text.split(_PLACEHOLDER)
        return head, tail


__all__ = ["AGENTS", "Answer", "Probe", "Prompt", "PromptMaker", "Span", "Task", "make_tasks"]
