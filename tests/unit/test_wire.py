"""The wire format: what is accepted, and the one sentence for what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

from kvcmas_sgl.wire import (
    ACTION_TYPE,
    MAX_SPANS,
    HintError,
    agent_hint,
    check_range,
    find_hint,
    parse_payload,
    to_token_spans,
)


def test_a_hint_survives_sglangs_own_decoder() -> None:
    envelope = agent_hint("critic", [(3, 9), (12, 20)], unit="char", workflow="w", reuse="never", head=8, max_kl=0.5)
    hint = find_hint(decode_kv_hints_envelope(envelope))
    assert hint is not None
    assert (hint.role, hint.spans, hint.unit, hint.workflow, hint.reuse, hint.head, hint.max_kl) == (
        "critic",
        ((3, 9), (12, 20)),
        "char",
        "w",
        "never",
        8,
        0.5,
    )


def test_other_actions_are_ignored() -> None:
    envelope = agent_hint("critic", [])
    envelope["actions"][0]["action_type"] = "somebody.else"
    assert find_hint(decode_kv_hints_envelope(envelope)) is None


BAD_PAYLOADS = {
    "role is ''": {"role": ""},
    "role is '   '": {"role": "   "},
    "role is None": {},
    "role is 7": {"role": 7},
    "role is 'xxx": {"role": "x" * 257},
    "overlaps or precedes [0, 5)": {"role": "a", "spans": [[0, 5], [4, 9]]},
    "span [5, 5) must satisfy": {"role": "a", "spans": [[5, 5]]},
    "span [9, 5) must satisfy": {"role": "a", "spans": [[9, 5]]},
    "span [-1, 5) must satisfy": {"role": "a", "spans": [[-1, 5]]},
    "span [0, 2.5] must be a pair of integers": {"role": "a", "spans": [[0, 2.5]]},
    "span [True, 3] must be a pair of integers": {"role": "a", "spans": [[True, 3]]},
    "span [1, 2, 3] must be a pair": {"role": "a", "spans": [[1, 2, 3]]},
    "spans is 'all'": {"role": "a", "spans": "all"},
    f"at most {MAX_SPANS} are allowed": {"role": "a", "spans": [[i, i + 1] for i in range(MAX_SPANS + 1)]},
    "ends beyond 2147483648": {"role": "a", "spans": [[0, 1 << 40]]},
    "unit is 'word'": {"role": "a", "unit": "word"},
    "reuse is 'often'": {"role": "a", "reuse": "often"},
    "workflow is ''": {"role": "a", "workflow": ""},
    "max_kl is -0.1": {"role": "a", "max_kl": -0.1},
    "max_kl is 'low'": {"role": "a", "max_kl": "low"},
    "head is -1": {"role": "a", "head": -1},
    "head is True": {"role": "a", "head": True},
    "head is '16'": {"role": "a", "head": "16"},
    "policy is 'maybe'": {"role": "a", "policy": "maybe"},
    "unknown field 'colour'": {"role": "a", "colour": 1},
}


@pytest.mark.parametrize(("words", "payload"), BAD_PAYLOADS.items(), ids=list(BAD_PAYLOADS))
def test_a_malformed_payload_is_named_in_one_sentence(words: str, payload: dict[str, object]) -> None:
    with pytest.raises(HintError) as caught:
        parse_payload(payload)
    text = str(caught.value)
    assert words in text
    assert text.endswith(".") and "\n" not in text and len(text) < 300


def test_an_unknown_version_and_a_second_agent_are_refused() -> None:
    envelope = agent_hint("critic", [])
    envelope["actions"][0]["action_version"] = "2"
    with pytest.raises(HintError, match="action_version is '2', but must be '1'"):
        find_hint(decode_kv_hints_envelope(envelope))
    envelope["actions"][0]["action_version"] = "1"
    envelope["actions"] *= 2
    with pytest.raises(HintError, match=f"2 {ACTION_TYPE} actions"):
        find_hint(decode_kv_hints_envelope(envelope))


def test_a_span_must_end_inside_the_prompt() -> None:
    hint = parse_payload({"role": "a", "spans": [[2, 8]]})
    check_range(hint, 8, "tokens")
    with pytest.raises(HintError, match=r"span \[2, 8\) ends after the prompt, which has 7 tokens"):
        check_range(hint, 7, "tokens")


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=30),
    st.lists(st.integers(0, 120), min_size=2, max_size=2, unique=True),
)
def test_character_spans_keep_exactly_the_tokens_inside(lengths: list[int], marks: list[int]) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    offsets = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    start, stop = sorted(marks)
    inside = [i for i, (a, b) in enumerate(offsets) if start <= a and b <= stop]
    expected = ((inside[0], inside[-1] + 1),) if inside else ()
    assert to_token_spans([(start, stop)], offsets) == expected
