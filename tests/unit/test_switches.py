"""Switches: validation in one sentence, and the way over SGLang's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from kvcmas_sgl.config import ConfigError, KvcmasConfig
from kvcmas_sgl.switches import Switches, check, to_numbers


def test_flags_are_where_a_server_starts() -> None:
    assert Switches.of(KvcmasConfig(max_kl=0.5)) == Switches("on", 0.5)
    assert Switches.of(KvcmasConfig(policy="learn")) == Switches("learn", 0.02)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"mode": "off"}, Switches("off", 0.02)),
        ({"mode": "learn", "max_kl": 0.1}, Switches("learn", 0.1)),
        ({"max_kl": 0}, Switches("on", 0)),
    ],
)
def test_changes_arrive_as_they_were_asked_for(values: dict[str, Any], expected: Switches) -> None:
    numbers = to_numbers(check(values))
    assert all(type(number) in (int, float) for number in numbers.values())
    assert Switches("on", 0.02).changed(numbers) == expected


BAD: list[tuple[Any, str]] = [
    ({"mode": "sometimes"}, "mode is 'sometimes', but must be one of on, learn, off."),
    ({"mode": ["off"]}, "mode is ['off'], but must be one of on, learn, off."),
    ({"max_kl": -0.1}, "max_kl is -0.1, but must be a number from 0 to 10 (nats)."),
    ({"max_kl": float("nan")}, "max_kl is nan, but must be a number from 0 to 10 (nats)."),
    ({"max_kl": True}, "max_kl is True, but must be a number from 0 to 10 (nats)."),
    ({"max_kl": "0.1"}, "max_kl is '0.1', but must be a number from 0 to 10 (nats)."),
    ({"rank": 8}, "unknown setting 'rank'; known are mode, max_kl."),
    ({}, "the settings are {}, but must be an object with mode, max_kl or both."),
    ([1], "the settings are [1], but must be an object with mode, max_kl or both."),
]


@pytest.mark.parametrize(("values", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_bad_values_get_one_sentence(values: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(values)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("numbers", [{"kvcmas_mode": 3}, {"kvcmas_mode": -1}, {"kvcmas_mode": 0.5}, {"kvcmas_rank": 1}])
def test_a_control_message_by_another_door_is_checked_too(numbers: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Switches("on", 0.02).changed(numbers)
