"""Settings: validation in one sentence, flags, and the way to child processes."""

from __future__ import annotations

import argparse

import pytest

from kvcmas_sgl.config import (
    ConfigError,
    KvcmasConfig,
    add_flags,
    config_from_arguments,
    published_config,
)


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--radix-cache-backend")
    add_flags(parser)
    return parser.parse_args(argv)


def test_defaults_of_the_flags_are_those_of_the_dataclass() -> None:
    args = parse("--enable-kvcmas")
    assert config_from_arguments(args) == KvcmasConfig()
    assert args.radix_cache_backend == "kvcmas"


def test_without_the_flag_nothing_is_selected() -> None:
    args = parse()
    assert config_from_arguments(args) is None
    assert args.radix_cache_backend is None


def test_flags_reach_the_settings() -> None:
    args = parse("--enable-kvcmas", "--kvcmas-max-kl", "0.5", "--kvcmas-rank", "8", "--kvcmas-allow-overrides")
    assert config_from_arguments(args) == KvcmasConfig(max_kl=0.5, rank=8, allow_overrides=True)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--enable-kvcmas", "--kvcmas-max-kl", "-1"], "--kvcmas-max-kl is -1.0, but must be a number from 0 to 10"),
        (["--enable-kvcmas", "--kvcmas-rank", "0"], "--kvcmas-rank is 0, but must be an integer from 1 to 4096"),
        (["--kvcmas-rank", "8"], "--kvcmas-rank has no effect without --enable-kvcmas"),
        (["--enable-kvcmas", "--radix-cache-backend", "flexkv"], "--radix-cache-backend is 'flexkv'"),
    ],
)
def test_bad_flags_end_the_start_with_one_sentence(argv: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as caught:
        config_from_arguments(parse(*argv))
    assert words in str(caught.value.code) and "\n" not in str(caught.value.code)


@pytest.mark.parametrize(
    "values",
    [
        {"policy": "sometimes"},
        {"estimator": "magic"},
        {"rank": 1.5},
        {"max_kl": "low"},
        {"colour": 1},
        {"rank": True},
        {"state_dir": ""},
    ],
)
def test_bad_settings_are_named(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        KvcmasConfig.from_mapping(values)
    assert next(iter(values)).replace("_", "-") in str(caught.value)


def test_published_settings_come_back_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCMAS_CONFIG", raising=False)
    assert published_config() is None
    monkeypatch.setenv("KVCMAS_CONFIG", "")
    config = KvcmasConfig(max_kl=0.125, log_decisions="all", state_dir="/var/lib/agents")
    config.publish()
    assert published_config() == config
