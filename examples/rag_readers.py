"""Three readers of the same retrieved passages over the OpenAI API; the passages are marked by their characters."""

from __future__ import annotations

import time
from typing import Any

import openai

from examples.command_line import Options, Turn, run
from examples.texts import problems, retrieve

READERS = {
    "finder": ("You find facts. You quote numbers exactly.", "Which number answers the query? Query: "),
    "teacher": ("You are a patient teacher who explains with pictures and stories.", "Explain the topic of: "),
    "editor": ("You are an editor. You care for style, and cut every word that is not needed.", "Give a title to: "),
}
QUERIES = (
    "How many eggs, apples or other food does the farmer sell at the market?",
    "What does she pay in dollars for the clothes, shoes and books that she buys?",
    "How many hours and minutes does the trip by car, train or on foot take?",
    "How old will his brother and sister be in some years?",
    "How many students and teachers of the school are in the class?",
    "How much money does he earn for the hours that he works each week?",
    "How many pages, letters or songs are left after the first day?",
    "What is the weight in pounds of all the animals and boxes?",
)
PASSAGES = 10


def main(base_url: str, options: Options) -> list[Turn]:
    """Retrieve passages for one query after another, and let every reader work on them."""
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none")
    passages, turns = problems(), []
    for query in QUERIES[: options.rounds]:
        found = "\n\n".join(retrieve(query, passages, PASSAGES))
        for role, (system, question) in READERS.items():
            messages: list[Any] = [
                {"role": "system", "content": system},
                {"role": "user", "content": f"{found}\n\n{question}{query}"},
            ]
            span = {"message": 1, "start": 0, "end": len(found)}
            chat = client.chat.completions.create(
                model=options.model,
                messages=messages,
                max_tokens=options.max_tokens,
                temperature=0,
                extra_body={"kvcmas": {"role": role, "spans": [span]}},
            )
            turns.append(Turn(role, chat.choices[0].message.content or "", getattr(chat, "kvcmas", None)))
        time.sleep(options.pause_s)
    return turns


if __name__ == "__main__":
    run(main, __doc__)
