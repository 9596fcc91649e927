"""Agent hints of the real OpenAI client: marks in messages and prompts, reports, and 400 for bad values."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from kvcmas_sgl.demo.client import Client
from kvcmas_sgl.demo.servers import ServerProcess
from tests.prompts import CRITIC, HEAD, document, tokenizer

N = 300
MODEL = "any"


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def text(index: int) -> str:
    return tokenizer().decode(document(index, N))


def messages(system: str, shared: str, question: str = "\n\nWhat is this about?") -> list[Any]:
    return [{"role": "system", "content": system}, {"role": "user", "content": shared + question}]


def ask(client: openai.OpenAI, chat: list[Any], kvcmas: Any, **options: Any) -> Any:
    options = {"max_tokens": 2, "temperature": 0, "extra_body": {"kvcmas": kvcmas}} | options
    return client.chat.completions.create(model=MODEL, messages=chat, **options)


def settle(server: ServerProcess) -> None:
    Client(server.url).wait_until_learned()


def tokens(chat: list[Any]) -> list[int]:
    return tokenizer().apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)


def test_a_marked_chat_is_shared_and_reports(client: openai.OpenAI) -> None:
    shared = text(0)
    mark = {"role": "oa-critic", "spans": [{"message": 1, "start": 0, "end": len(shared)}]}
    chat = messages("You judge harshly.", shared)
    first = ask(client, chat, mark)
    assert first.kvcmas["role"] == "oa-critic" and first.kvcmas["corrected_tokens"] == 0
    assert first.usage.prompt_tokens == len(tokens(chat))
    assert first.usage.prompt_tokens_details.cached_tokens == first.kvcmas["exact_tokens"]

    again = ask(client, messages("You judge harshly.", shared, "\n\nAnd its author?"), mark)
    assert again.kvcmas["reason"] == "exact" and again.kvcmas["exact_tokens"] > N
    details = again.usage.prompt_tokens_details
    assert details.cached_tokens == again.kvcmas["exact_tokens"] and details.corrected_tokens == 0


def test_later_readers_of_marked_chats_are_corrected(client: openai.OpenAI, server: ServerProcess) -> None:
    reports = []
    for index in range(10, 15):
        shared = tokenizer().decode(document(index, 400))
        for role, system in (("oa-poet", "You write verse. 🥊"), ("oa-judge", "You judge with care, and at length.")):
            chat = messages(system, shared)
            out = ask(client, chat, {"role": role, "spans": [{"message": 1, "end": len(shared)}]})
            settle(server)
        reports.append(out.kvcmas)
    assert [report["corrected_tokens"] for report in reports[:2]] == [0, 0]
    templated = tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    start = templated.rindex(shared)
    offsets = tokenizer()(templated, return_offsets_mapping=True)["offset_mapping"]
    inside = sum(start <= first < last <= start + len(shared) for first, last in offsets)
    assert reports[-1]["source"] == "oa-poet" and reports[-1]["corrected_tokens"] == inside - HEAD
    details = out.usage.prompt_tokens_details
    assert details.corrected_tokens == inside - HEAD
    assert details.cached_tokens == inside - HEAD + reports[-1]["exact_tokens"]


def test_parts_of_a_message_are_one_text(client: openai.OpenAI) -> None:
    shared = text(2)
    parts = [{"type": "text", "text": "Read this:"}, {"type": "text", "text": shared}]
    chat = [{"role": "user", "content": parts}]
    out = ask(client, chat, {"role": "oa-parts", "spans": [{"message": 0, "start": 10, "end": 10 + len(shared)}]})
    assert out.kvcmas["role"] == "oa-parts"


@pytest.mark.parametrize("usage", [True, False], ids=["usage", "no-usage"])
def test_a_chat_streams_its_report_in_the_last_chunk(client: openai.OpenAI, usage: bool) -> None:
    options = {"stream": True, "max_tokens": 4} | ({"stream_options": {"include_usage": True}} if usage else {})
    mark = {"role": "oa-stream", "spans": [{"message": 1}]}
    chunks = list(ask(client, messages("You stream.", text(3)), mark, **options))
    assert [hasattr(chunk, "kvcmas") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].kvcmas["role"] == "oa-stream"
    if usage:
        details = chunks[-1].usage.prompt_tokens_details
        assert details.corrected_tokens == chunks[-1].kvcmas["corrected_tokens"]
    else:
        assert chunks[-1].choices[0].finish_reason == "length"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    plain = ask(client, messages("You stream.", text(3)), mark, max_tokens=4)
    assert streamed == plain.choices[0].message.content


def test_several_choices_have_a_report_each(client: openai.OpenAI) -> None:
    chat = messages("You guess.", text(4))
    mark = {"role": "oa-guess", "spans": [{"message": 1}]}
    out = ask(client, chat, mark, n=2, temperature=1)
    assert [report["role"] for report in out.kvcmas] == ["oa-guess"] * 2 and len(out.choices) == 2
    # SGLang prefills the prompt once by itself; each choice then hits all of it but its last token.
    prompt = len(tokens(chat))
    assert out.usage.prompt_tokens == prompt
    assert out.usage.prompt_tokens_details.cached_tokens == prompt - 1
    chunks = list(ask(client, chat, mark, n=2, temperature=1, stream=True, stream_options={"include_usage": True}))
    assert len(chunks[-1].kvcmas) == 2
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == prompt - 1


def complete(client: openai.OpenAI, prompt: Any, kvcmas: Any, **options: Any) -> Any:
    options = {"max_tokens": 2, "temperature": 0, "extra_body": {"kvcmas": kvcmas}} | options
    return client.completions.create(model=MODEL, prompt=prompt, **options)


def test_completions_take_text_and_token_prompts(client: openai.OpenAI) -> None:
    span = document(5, N)
    head = len(CRITIC.head())
    ids = complete(client, CRITIC.prompt(span), {"role": "oa-ids", "spans": [[head, head + N]]})
    assert ids.kvcmas["role"] == "oa-ids" and ids.usage.prompt_tokens == len(CRITIC.prompt(span))
    prompt = tokenizer().decode(CRITIC.prompt(span))
    start = prompt.index(tokenizer().decode(span))
    mark = {"role": "oa-ids", "spans": [[start, start + len(tokenizer().decode(span))]]}
    out = complete(client, prompt, mark, stream=True, stream_options={"include_usage": True})
    last = list(out)[-1]
    # The text's tokens are the ids, and the role's own copy of them is an exact hit.
    assert last.kvcmas["reason"] == "exact" and last.kvcmas["exact_tokens"] >= head + N


def test_a_batch_has_a_report_for_each_prompt(client: openai.OpenAI) -> None:
    spans = [document(6, N), document(7, N)]
    head = len(CRITIC.head())
    mark = {"role": "oa-batch", "spans": [[[head, head + N]], []]}
    out = complete(client, [CRITIC.prompt(span) for span in spans], mark)
    assert [report["role"] for report in out.kvcmas] == ["oa-batch"] * 2
    assert [report["corrected_tokens"] for report in out.kvcmas] == [0, 0]
    cached = sum(report["exact_tokens"] for report in out.kvcmas)
    assert out.usage.prompt_tokens_details.cached_tokens == cached


BAD: dict[str, Any] = {
    "kvcmas is ['critic'], but must be an object": ["critic"],
    "unknown field 'sapns' in kvcmas; known are role": {"role": "a", "sapns": []},
    "message is 2, but must be an integer from 0 to 1": {"role": "a", "spans": [{"message": 2}]},
    "ends after the message's text, which has 8 characters": {"role": "a", "spans": [{"message": 1, "end": 9}]},
    "runs without --kvcmas-allow-overrides": {"role": "a", "policy": "always"},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("words", "kvcmas"), BAD.items(), ids=list(BAD))
def test_bad_values_get_400_and_the_server_lives_on(
    client: openai.OpenAI, words: str, kvcmas: Any, stream: bool
) -> None:
    chat = messages("You wait.", "A short ", "")
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, chat, kvcmas, stream=stream)
    sentence = error.value.body["message"]
    assert words in sentence and sentence.endswith(".") and "\n" not in sentence
    assert ask(client, chat, {"role": "a"}).kvcmas["role"] == "a"


def test_bad_values_of_completions_get_400(client: openai.OpenAI) -> None:
    for words, prompt, spans in (
        ("ends after the prompt, which has 5 characters", "seven", [[0, 6]]),
        ("ends after the prompt, which has 3 tokens", [20, 21, 22], [[0, 4]]),
        ("must be a list of 2 lists of spans", ["one", "two"], [[0, 1]]),
    ):
        with pytest.raises(openai.BadRequestError, match=words.replace("[", r"\[")):
            complete(client, prompt, {"role": "a", "spans": spans})


def test_plain_requests_are_answered_as_by_stock(client: openai.OpenAI) -> None:
    chat = messages("You are plain.", "Say yes.", "")
    out = client.chat.completions.create(model=MODEL, messages=chat, max_tokens=2, temperature=0)
    assert not hasattr(out, "kvcmas") and out.usage.prompt_tokens_details is None
    assert not hasattr(client.completions.create(model=MODEL, prompt="kvcmas", max_tokens=2), "kvcmas")
    chunks = list(client.chat.completions.create(model=MODEL, messages=chat, max_tokens=2, stream=True))
    assert not any(hasattr(chunk, "kvcmas") for chunk in chunks)
    # A field that is null, and the word in a text, are no hint.
    quoted = messages("You are plain.", 'Say "kvcmas".', "")
    assert not hasattr(ask(client, quoted, None), "kvcmas")
