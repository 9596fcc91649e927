"""The OpenAI form of the hint: every kind of mark, and one sentence for bad ones."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from kvcmas_sgl.chat_marks import locate
from kvcmas_sgl.openai_wire import add_report, completion_envelopes, opt_out_envelope, parse_chat
from kvcmas_sgl.wire import HintError

CHATML = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
STRIPS = "{% for m in messages %}[{{ m.role }}] {{ m.content.strip() }} [/]{% endfor %}"
ESCAPES = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
REPEATS = "{{ messages[-1].content }}\n{% for m in messages %}{{ m.content }}\n{% endfor %}"
CUTS = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
SYSTEM_LAST = "{% for m in messages|reverse %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PICTURES = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<i>' }}{% endfor %}{% endif %}[/]{% endfor %}"
)
PARTS = "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}|{% endfor %}"

DOCUMENT = 'Zwölf Boxkämpfer 🥊👩‍🚀 jagen\nViktor "quer" über den Sylter Deich.'
MESSAGES = [{"role": "system", "content": "You are a critic."}, {"role": "user", "content": f"{DOCUMENT}\n\nWhy?"}]


def marked_text(template: str, messages: list[dict[str, Any]], spans: list[dict[str, int]]) -> list[str]:
    compiled = jinja2.Environment().from_string(template)

    def render(changed: list[dict[str, Any]]) -> str:
        return compiled.render(messages=changed)

    prompt = render(messages)
    hint = parse_chat({"role": "critic", "spans": spans}, messages)
    return [prompt[start:end] for start, end in locate(messages, hint.spans, prompt, render)]


@pytest.mark.parametrize("template", [CHATML, STRIPS, SYSTEM_LAST], ids=["chatml", "strips", "system-last"])
def test_marks_of_whole_messages_and_of_characters(template: str) -> None:
    part = {"message": 1, "start": 0, "end": len(DOCUMENT)}
    assert marked_text(template, MESSAGES, [{"message": 1}]) == [MESSAGES[1]["content"]]
    assert marked_text(template, MESSAGES, [part]) == [DOCUMENT]
    assert marked_text(template, MESSAGES, [{"message": 1, "start": len(DOCUMENT)}]) == ["\n\nWhy?"]
    both = marked_text(template, MESSAGES, [{"message": 0, "end": 3}, part])
    assert sorted(both) == sorted(["You", DOCUMENT])


def test_adjacent_spans_stay_apart() -> None:
    spans = [{"message": 1, "end": 10}, {"message": 1, "start": 10, "end": 20}, {"message": 1, "start": 20, "end": 21}]
    assert marked_text(CHATML, MESSAGES, spans) == [DOCUMENT[:10], DOCUMENT[10:20], DOCUMENT[20:21]]


def test_what_stands_in_the_text_before_does_not_mislead() -> None:
    messages = [{"role": "system", "content": f"Read: {DOCUMENT}"}, {"role": "user", "content": DOCUMENT}]
    compiled = jinja2.Environment().from_string(CHATML)
    prompt = compiled.render(messages=messages)
    hint = parse_chat({"role": "critic", "spans": [{"message": 1}]}, messages)
    found = locate(messages, hint.spans, prompt, lambda changed: compiled.render(messages=changed))
    assert found == ((prompt.rindex(DOCUMENT), prompt.rindex(DOCUMENT) + len(DOCUMENT)),)


def test_a_template_that_strips_keeps_the_mark_inside_the_text() -> None:
    messages = [MESSAGES[0], {"role": "user", "content": f"  \n{DOCUMENT} \n"}]
    assert marked_text(STRIPS, messages, [{"message": 0}, {"message": 1}]) == ["You are a critic.", DOCUMENT]
    assert marked_text(CHATML, messages, [{"message": 1}]) == [messages[1]["content"]]
    assert marked_text(STRIPS, [{"role": "user", "content": " \n "}], [{"message": 0}]) == []


def test_a_template_that_escapes_is_followed() -> None:
    found = marked_text(ESCAPES, MESSAGES, [{"message": 1, "end": len(DOCUMENT)}])
    assert len(found) == 1
    assert found[0].encode().decode("unicode_escape").encode("utf-16", "surrogatepass").decode("utf-16") == DOCUMENT


def test_text_that_has_no_certain_place_is_not_marked() -> None:
    # The last message is in the prompt twice, the first one once.
    assert marked_text(REPEATS, MESSAGES, [{"message": 0}, {"message": 1}]) == ["You are a critic."]
    thought = [{"role": "assistant", "content": "<think>hm</think>Yes."}, MESSAGES[1]]
    assert marked_text(CUTS, thought, [{"message": 0}, {"message": 1}]) == [MESSAGES[1]["content"]]
    assert marked_text(CUTS, thought, [{"message": 0, "start": 17}]) == ["Yes."]


def test_a_render_that_fails_marks_nothing() -> None:
    hint = parse_chat({"role": "critic", "spans": [{"message": 1}]}, MESSAGES)
    assert locate(MESSAGES, hint.spans, "prompt", lambda messages: None) == ()


@pytest.mark.parametrize(
    ("parts", "mark", "expected"),
    [
        ("ii", {}, "<i><i>"),
        ("iai", {}, "<i>one <i>"),
        ("aiib", {}, "one <i><i>two"),
        ("aib", {"start": 1, "end": 6}, "ne <i>tw"),
        ("aib", {"start": 4}, "two"),
        ("aibi", {"end": 4}, "one "),
    ],
)
def test_pictures_belong_to_a_whole_message_and_to_text_on_both_sides(
    parts: str, mark: dict[str, int], expected: str
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "i": {"type": "image_url", "image_url": {"url": "data:"}},
        "a": {"type": "text", "text": "one "},
        "b": {"type": "text", "text": "two"},
    }
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [kinds[part] for part in parts]}]
    assert marked_text(PICTURES, messages, [{"message": 1, **mark}]) == [expected]


def test_offsets_count_the_text_parts_as_one_text() -> None:
    parts = [{"type": "text", "text": "Read 🥊:"}, {"type": "text", "text": ""}, {"type": "text", "text": DOCUMENT}]
    messages = [{"role": "user", "content": parts}]
    document = {"message": 0, "start": 7, "end": 7 + len(DOCUMENT)}
    assert marked_text(PARTS, messages, [document]) == [DOCUMENT]
    assert marked_text(PARTS, messages, [{"message": 0, "end": 7}, document]) == ["Read 🥊:", DOCUMENT]
    assert marked_text(PARTS, messages, [{"message": 0}]) == [f"Read 🥊:)()({DOCUMENT}"]


@pytest.mark.parametrize("content", ["", None, []])
def test_a_message_without_text_marks_nothing(content: Any) -> None:
    assert parse_chat({"role": "a", "spans": [{"message": 0}]}, [{"role": "assistant", "content": content}]).spans == ()


BAD_CHAT: dict[str, Any] = {
    "kvcmas is 'critic'": "critic",
    "unknown field 'unit' in kvcmas; known are role, spans,": {"role": "a", "unit": "char"},
    "role is None": {"spans": []},
    "reuse is 'no', but must be one of auto, never": {"role": "a", "reuse": "no"},
    'must be a list of {"message": i} marks': {"role": "a", "spans": {"message": 1}},
    'must be {"message": i} or': {"role": "a", "spans": [[0, 5]]},
    "unknown field 'stop' in span": {"role": "a", "spans": [{"message": 0, "stop": 3}]},
    "message is 2, but must be an integer from 0 to 1": {"role": "a", "spans": [{"message": 2}]},
    "message is -1": {"role": "a", "spans": [{"message": -1}]},
    "message is True": {"role": "a", "spans": [{"message": True}]},
    "message is None": {"role": "a", "spans": [{"start": 0, "end": 3}]},
    "'end': 99} ends after the message's text, which has 17": {"role": "a", "spans": [{"message": 0, "end": 99}]},
    "'end': 4} must satisfy 0 <= start < end": {"role": "a", "spans": [{"message": 0, "start": 4, "end": 4}]},
    "'end': 3} must satisfy 0 <= start < end": {"role": "a", "spans": [{"message": 0, "start": 4, "end": 3}]},
    "'end': '3'} must satisfy": {"role": "a", "spans": [{"message": 0, "end": "3"}]},
    "overlaps or precedes": {"role": "a", "spans": [{"message": 0, "end": 5}, {"message": 0, "start": 4}]},
    "spans must ascend": {"role": "a", "spans": [{"message": 1}, {"message": 0}]},
    "at most 64": {"role": "a", "spans": [{"message": 1, "start": i, "end": i + 1} for i in range(65)]},
    "auto is True, but only false": {"auto": True},
    "must stand alone": {"role": "a", "auto": False},
}


@pytest.mark.parametrize(("words", "value"), BAD_CHAT.items(), ids=list(BAD_CHAT))
def test_a_bad_field_of_a_chat_gets_one_sentence(words: str, value: Any) -> None:
    with pytest.raises(HintError) as error:
        if opt_out_envelope(value) is None:
            parse_chat(value, MESSAGES)
    message = str(error.value)
    assert words in message and message.endswith(".") and "\n" not in message and len(message) < 250


def test_sound_cannot_be_marked_and_disturbs_no_other_message() -> None:
    sound = {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}
    with pytest.raises(HintError, match="part of type 'input_audio', but only text and pictures are shared"):
        parse_chat({"role": "a", "spans": [{"message": 1}]}, [MESSAGES[0], sound])
    assert len(parse_chat({"role": "a", "spans": [{"message": 0}]}, [MESSAGES[0], sound]).spans) == 1


def payload(envelope: Any) -> dict[str, Any]:
    (action,) = envelope["actions"]
    assert action["action_type"] == "kvcmas.agent" and action["action_version"] == "1"
    return action["payload"]


def test_completions_count_characters_of_text_and_tokens_of_ids() -> None:
    value = {"role": "a", "spans": [[2, 5]], "workflow": "w", "policy": None}
    text = payload(completion_envelopes(value, "some text"))
    assert text == {"role": "a", "unit": "char", "spans": [[2, 5]], "reuse": "auto", "workflow": "w"}
    assert payload(completion_envelopes(value, [5, 6, 7, 8, 9]))["unit"] == "token"
    assert payload(completion_envelopes(value | {"unit": "token"}, "some text"))["unit"] == "token"


@pytest.mark.parametrize(("prompts", "unit"), [(["one", "two"], "char"), ([[1, 2, 3], [4, 5]], "token")])
def test_a_batch_has_spans_for_each_prompt(prompts: list[Any], unit: str) -> None:
    hints = completion_envelopes({"role": "a", "spans": [[[0, 2]], []]}, prompts)
    assert [payload(hint)["spans"] for hint in hints] == [[[0, 2]], []]
    assert {payload(hint)["unit"] for hint in hints} == {unit}
    without = completion_envelopes({"role": "a"}, prompts)
    assert [payload(hint)["spans"] for hint in without] == [[], []]


BAD_COMPLETION: dict[str, tuple[Any, Any]] = {
    "must be a list of 2 lists of spans, one for each prompt": ({"role": "a", "spans": [[0, 2]]}, ["one", "two"]),
    "spans is 0, but must be a list of [start, end)": ({"role": "a", "spans": [0, 2]}, ["one", "two"]),
    "unknown field 'messages'": ({"role": "a", "messages": []}, "text"),
    "unit is 'line'": ({"role": "a", "unit": "line"}, "text"),
    "span [5, 2) must satisfy": ({"role": "a", "spans": [[5, 2]]}, "text"),
    "overlaps or precedes": ({"role": "a", "spans": [[0, 3], [2, 4]]}, "text"),
}


@pytest.mark.parametrize("words", BAD_COMPLETION)
def test_a_bad_field_of_a_completion_gets_one_sentence(words: str) -> None:
    with pytest.raises(HintError) as error:
        completion_envelopes(*BAD_COMPLETION[words])
    assert words in str(error.value)


def test_a_request_can_opt_out_of_detection() -> None:
    assert payload(opt_out_envelope({"auto": False})) == {"auto": False}
    assert payload(completion_envelopes({"auto": False}, ["one", "two"])) == {"auto": False}
    assert opt_out_envelope({"role": "a"}) is None


def report(exact: int, corrected: int) -> dict[str, Any]:
    return {"role": "a", "exact_tokens": exact, "corrected_tokens": corrected, "computed_tokens": 1}


def test_the_report_counts_each_prompt_once() -> None:
    reports = {0: report(10, 5), 1: report(15, 0), 2: report(100, 0), 3: report(100, 7)}
    response: dict[str, Any] = {"usage": {"prompt_tokens": 116, "prompt_tokens_details": None}}
    add_report(response, reports, choices=2)
    assert response["usage"]["prompt_tokens_details"] == {"cached_tokens": 115, "corrected_tokens": 5}
    assert response["kvcmas"] == [reports[index] for index in range(4)]
    single: dict[str, Any] = {"choices": [], "usage": None}
    add_report(single, {0: reports[0]}, choices=1)
    assert single == {"choices": [], "usage": None, "kvcmas": reports[0]}
