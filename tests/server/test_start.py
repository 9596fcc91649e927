"""Starting: help, and one sentence for what is not supported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcmas_sgl.demo.servers import server_environment
from kvcmas_sgl.prepare_model import default_model

SGLANG = str(Path(sys.executable).parent / "sglang")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**server_environment(), "SGLANG_DISABLED_MODEL_ARCHS": os.environ["SGLANG_DISABLED_MODEL_ARCHS"]}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_sglang_serve_help_shows_our_flags() -> None:
    out = run(SGLANG, "serve", "--help")
    assert out.returncode == 0
    for flag in ("--enable-kvcmas", "--kvcmas-policy", "--kvcmas-max-kl", "--kvcmas-state-bytes"):
        assert flag in out.stdout


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--page-size", "16"], "--page-size is 16, which --enable-kvcmas does not allow: only 1 is supported."),
        (["--kvcmas-max-kl", "-1"], "--kvcmas-max-kl is -1.0, but must be a number from 0 to 10 (nats)."),
    ],
)
def test_an_unsupported_set_up_stops_the_start_with_one_sentence(flags: list[str], sentence: str) -> None:
    out = run(SGLANG, "serve", "--model-path", str(default_model()), "--device", "cpu", "--enable-kvcmas", *flags)
    assert out.returncode != 0
    assert out.stderr.strip().splitlines()[-1] == sentence
    assert "Traceback" not in out.stderr
