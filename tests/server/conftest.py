"""One HTTP server for the whole session, without the overlap schedule (the engine tests run with it)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcmas_sgl.demo.servers import ServerProcess, kvcmas_command
from kvcmas_sgl.prepare_model import default_model

ADMIN_KEY = "for tests"
KEY = {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = Path(tmp_path_factory.mktemp("server")) / "server.log"
    flags = ["--enable-metrics", "--disable-overlap-schedule", "--max-total-tokens", "12000"]
    flags += ["--kvcmas-max-kl", "0.3", "--kvcmas-log-decisions", "all", "--admin-api-key", ADMIN_KEY]
    with ServerProcess("server", kvcmas_command(str(default_model()), flags), log) as running:
        running.wait_ready()
        yield running
