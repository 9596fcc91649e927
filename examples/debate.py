"""Two debaters and a judge over the OpenAI API: the sheet and the speeches are marked with `extra_body`."""

from __future__ import annotations

import time
from typing import Any

import openai

from examples.command_line import Options, Turn, run
from examples.texts import sheets

DEBATERS = {
    "optimist": "You are an optimist. You argue that the problems are just right for ten-year-olds.",
    "sceptic": "You are a sceptic. You argue that the problems are far too hard for ten-year-olds, with examples.",
}
JUDGE = "You are a fair judge of debates. You name the winner and the reason in one sentence."
SPEECHES = 2


def speak(
    client: openai.OpenAI, options: Options, role: str, system: str, shared: list[str], question: str
) -> tuple[str, Any]:
    """One answer to ``question`` after messages that other agents read too, and the server's report."""
    messages: list[Any] = [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": text} for text in (*shared, question)]
    spans = [{"message": index + 1} for index in range(len(shared))]
    chat = client.chat.completions.create(
        model=options.model,
        messages=messages,
        max_tokens=options.max_tokens,
        temperature=0,
        extra_body={"kvcmas": {"role": role, "spans": spans}},
    )
    return chat.choices[0].message.content or "", getattr(chat, "kvcmas", None)


def main(base_url: str, options: Options) -> list[Turn]:
    """Debate one sheet after another."""
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none")
    turns = []
    for sheet in sheets(options.rounds):
        shared = [sheet]
        for speech in range(SPEECHES):
            side = list(DEBATERS)[speech % len(DEBATERS)]
            answer, report = speak(client, options, side, DEBATERS[side], shared, "Make your case in one sentence.")
            turns.append(Turn(side, answer, report))
            shared.append(f"The {side} said: {answer}")
        answer, report = speak(client, options, "judge", JUDGE, shared, "Who wins this debate?")
        turns.append(Turn("judge", answer, report))
        time.sleep(options.pause_s)
    return turns


if __name__ == "__main__":
    run(main, __doc__)
