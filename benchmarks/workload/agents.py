"""Agents with distinct system prompts of a chosen length, and the text that they put between shared spans."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.workload.text import Span, TextSupply
from kvcmas_sgl.demo.prompts import PromptMaker, TokenPrompt
from kvcmas_sgl.demo.roles import Role

_KINDS = (
    ("planner", "You are a patient planner. You break work into steps and name what has to be done first."),
    ("critic", "You are a harsh critic who hates long words. Answer in short sentences."),
    ("solver", "Work like a careful engineer: compute, check every number twice, and state the result with its unit."),
    ("historian", "Thou art a historian of the old school; write in flowing periods, and date whatever thou canst."),
    ("tester", "Find inputs that break things. List them. No explanations, no praise."),
    ("teacher", "You explain to children of ten what grown-ups write, with an example from the kitchen each time."),
    ("lawyer", "As counsel for the other side you look for every clause that can be read in two ways, and quote it."),
    ("editor", "You shorten texts. Whatever can be left out is left out, and what stays is put in the active voice."),
)


@dataclass(frozen=True)
class AgentText:
    """An agent's own text as token ids: `head` before the first span, `tail` after the last."""

    name: str
    head: Span
    tail: Span


def make_agent(
    prompts: PromptMaker, supply: TextSupply, number: int, system_tokens: int, question: str | None = None
) -> AgentText:
    """Agent `number`: its name, its kind's system prompt, and rules of its own in real text up to `system_tokens`.

    Args:
        supply: where the rules come from; an agent's are the same whenever its number is.
        system_tokens: length of the head, the chat template's tokens included.
        question: what follows all that it reads; "" leaves the template's own tail.

    Raises:
        ValueError: `system_tokens` is too small for the kind's system prompt.
    """
    kind, system = _KINDS[number % len(_KINDS)]
    name = f"{kind}-{number}"
    opening = f"You are {name}. {system} Your rules:"
    asked = f"Now speak as {name}: what do you say?" if question is None else question
    empty = prompts.prompt(Role(name, opening, asked), "")
    head, tail = _cut(empty)
    if system_tokens < len(head):
        raise ValueError(f"system_tokens is {system_tokens}, but {name} needs at least {len(head)}.")
    # Rules end the system message: before the tokens, whatever the template's are, that close it and open the user's.
    other, _ = _cut(prompts.prompt(Role(name, f"{opening} None", asked), ""))
    closing = next(n for n, (a, b) in enumerate(zip(reversed(head), reversed(other), strict=False)) if a != b)
    place = len(head) - closing
    rules = supply.reseeded(f"rules-{number}").span(system_tokens - len(head))
    return AgentText(name, (*head[:place], *rules, *head[place:]), tail)


def _cut(empty: TokenPrompt) -> tuple[Span, Span]:
    border = empty.spans[0][0]
    return empty.ids[:border], empty.ids[border:]
