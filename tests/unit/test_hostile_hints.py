"""Whatever a client sends as a hint is a valid hint or one sentence that says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcmas_sgl.config import MAX_KL
from kvcmas_sgl.openai_wire import ChatHint, completion_envelopes, opt_out_envelope, parse_chat
from kvcmas_sgl.wire import ACTION_TYPE, MAX_SPANS, OPT_OUT, AgentHint, HintError, find_hint, parse_payload

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=300)
"""JSON can spell lone surrogates, too."""

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**4400, max_value=10**4401),
    st.floats(allow_nan=True, allow_infinity=True),
    ANY_TEXT,
)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4))

PAIRS = st.lists(st.integers(0, 400), unique=True, max_size=12).map(
    lambda marks: [list(pair) for pair in zip(sorted(marks)[::2], sorted(marks)[1::2], strict=False)]
)
MESSAGE_SPANS = st.lists(
    st.fixed_dictionaries(
        {"message": st.integers(-1, 3) | SCALARS},
        optional={"start": st.integers(-1, 9) | SCALARS, "end": st.integers(-1, 9) | SCALARS, "more": SCALARS},
    ),
    max_size=4,
)
FIELDS: dict[str, Any] = {
    "spans": PAIRS | MESSAGE_SPANS | st.lists(PAIRS, max_size=3) | JSON,
    "unit": st.sampled_from(["token", "char"]) | JSON,
    "workflow": ANY_TEXT | JSON,
    "reuse": st.sampled_from(["auto", "never"]) | JSON,
    "policy": st.sampled_from(["gated", "always", "learn"]) | JSON,
    "estimator": st.sampled_from(["affine", "none"]) | JSON,
    "head": st.integers(-1, 1 << 21) | JSON,
    "max_kl": st.floats(-1, 11) | JSON,
    "auto": st.just(False) | JSON,
    "extra": JSON,
}
PAYLOADS = st.one_of(
    JSON,
    st.fixed_dictionaries({"role": st.sampled_from(["critic"]) | ANY_TEXT | JSON}, optional=FIELDS),
    st.fixed_dictionaries({"role": st.just("critic"), "spans": PAIRS}, optional={"reuse": FIELDS["reuse"]}),
)
TEXT_PARTS = st.fixed_dictionaries({"type": st.just("text"), "text": ANY_TEXT})
CONTENT = ANY_TEXT | JSON | st.lists(JSON | TEXT_PARTS, max_size=2)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": CONTENT}), max_size=3)
MANY = settings(max_examples=400, deadline=None)


def outcome(parse: Callable[[], Any]) -> Any:
    """What was parsed, or None where the client gets its sentence."""
    try:
        return parse()
    except HintError as error:
        message = str(error)
        assert len(message) < 400 and "\n" not in message and message.endswith(".")
        # It travels as JSON, in UTF-8.
        json.dumps(message).encode()
        message.encode()
        return None


def check_hint(hint: AgentHint) -> None:
    """Everything the scheduler relies on."""
    if hint == OPT_OUT:
        return
    assert 1 <= len(hint.role) <= 256 and hint.role.strip()
    hint.role.encode()
    marks = [mark for span in hint.spans for mark in span]
    assert len(hint.spans) <= MAX_SPANS and marks == sorted(marks) and all(0 <= mark < 1 << 31 for mark in marks)
    assert all(start < stop for start, stop in hint.spans)
    assert hint.reuse in ("auto", "never") and hint.unit in ("token", "char")
    assert hint.max_kl is None or 0 <= hint.max_kl <= MAX_KL
    assert hint.head is None or 0 <= hint.head <= 1 << 20
    assert parse_payload(json.loads(json.dumps(hint.payload()))) == hint


@MANY
@given(PAYLOADS)
def test_a_native_payload(payload: Any) -> None:
    hint = outcome(lambda: parse_payload(payload))
    if hint is not None:
        check_hint(hint)


@MANY
@given(st.lists(st.tuples(st.sampled_from([ACTION_TYPE, "other"]), ANY_TEXT | st.just("1"), PAYLOADS), max_size=3))
def test_an_envelope(actions: list[tuple[str, str, Any]]) -> None:
    envelope = SimpleNamespace(
        actions=[SimpleNamespace(action_type=t, action_version=v, payload=p) for t, v, p in actions]
    )
    hint = outcome(lambda: find_hint(envelope))
    if hint is not None:
        check_hint(hint)
    if not any(kind == ACTION_TYPE for kind, _, _ in actions):
        assert hint is None


@MANY
@given(PAYLOADS, st.one_of(ANY_TEXT, st.lists(st.integers(0, 9), max_size=4), st.lists(ANY_TEXT, max_size=3)))
def test_a_completion(value: Any, prompt: Any) -> None:
    made = outcome(lambda: completion_envelopes(value, prompt))
    for envelope in made if isinstance(made, list) else [made] if made else []:
        check_hint(parse_payload(envelope["actions"][0]["payload"]))


@MANY
@given(PAYLOADS, MESSAGES)
def test_a_chat(value: Any, messages: list[dict[str, Any]]) -> None:
    def parse() -> Any:
        return opt_out_envelope(value) or parse_chat(value, messages)

    made = outcome(parse)
    if isinstance(made, ChatHint):
        check_hint(made.agent)
        for before, span in zip((None, *made.spans), made.spans, strict=False):
            text = messages[span.message]["content"]
            length = len(text) if isinstance(text, str) else sum(len(part["text"]) for part in text)
            assert 0 <= span.start < span.end <= length
            assert before is None or before.message < span.message or before.end <= span.start


class Unread(list):
    """A list that nobody may look into."""

    def __iter__(self) -> Any:
        raise AssertionError("every span is looked at")


def test_too_many_spans_are_refused_by_their_number() -> None:
    for parse in (
        lambda: parse_payload({"role": "a", "spans": Unread([[0, 1]] * 100_000)}),
        lambda: parse_chat({"role": "a", "spans": Unread([{"message": 0}] * 100_000)}, [{"content": "a"}]),
    ):
        with pytest.raises(HintError, match="at most 64 are allowed"):
            parse()


@pytest.mark.parametrize("role", ["r" * 257, "r" * 10_000_000, "\ud800", " ", "", "a\udfffb"], ids=len)
def test_role_names_are_short_text(role: str) -> None:
    with pytest.raises(HintError) as error:
        parse_payload({"role": role})
    assert len(str(error.value)) < 200
