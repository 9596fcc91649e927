"""The prompts of a pipeline: a document, what the agents before wrote about it, and a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcmas_sgl.demo.roles import InputError, Role

# Stands for each shared text while the chat template is applied; never reaches a model.
_PLACEHOLDER = "\u241fSHARED\u241f"


@dataclass(frozen=True)
class PassedOn:
    """An agent's answer as the next agents read it: the token ids that were generated, not their text."""

    author: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class TokenPrompt:
    """A role's prompt, cut so that the tokens of every shared text are the same for every reader."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """[start, stop) of each shared text in `ids`: the document first, then the answers in the order of writing."""

    @property
    def shared_tokens(self) -> int:
        return sum(stop - start for start, stop in self.spans)


class PromptMaker:
    """Puts what an agent reads into the model's own chat template.

    Every shared text, and every piece between two of them, is tokenized apart: a token that straddles their border
    would differ from role to role, and with it the span.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def prompt(self, role: Role, document: str, answers: Sequence[PassedOn] = ()) -> TokenPrompt:
        """The role's prompt: system message; as the user's message the document, the answers so far, the question.

        Raises:
            InputError: the model's chat template does not take a system message, or changes the user's text.
        """
        read = "".join(f"\n\nThe {answer.author} wrote:\n{_PLACEHOLDER}" for answer in answers)
        messages = [
            {"role": "system", "content": role.system},
            {"role": "user", "content": f"{_PLACEHOLDER}{read}\n\n{role.question}"},
        ]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        own = text.split(_PLACEHOLDER)
        if len(own) != 2 + len(answers) or role.system.split("\n", 1)[0] not in own[0]:
            raise InputError(
                "--model has a chat template that puts the system message elsewhere than before the user's text."
            )
        ids = self.tokens(own[0])
        spans = []
        shared = [self.tokens(document), *(answer.ids for answer in answers)]
        for span, after in zip(shared, own[1:], strict=True):
            start = len(ids)
            ids.extend(span)
            spans.append((start, len(ids)))
            ids.extend(self.tokens(after))
        return TokenPrompt(tuple(ids), tuple(spans))

    @property
    def special_tokens(self) -> list[int]:
        """Tokens that would end a message or open another one if an answer that is passed on held them."""
        added = self._tokenizer.added_tokens_decoder
        return sorted(token for token, entry in added.items() if entry.special)

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
