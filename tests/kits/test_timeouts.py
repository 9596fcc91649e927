"""The kit of request time-outs: each needs a server of its own, whose environment sets one."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from sglang.test.kits.abort_timeout_kit import RunningTimeoutTwoWaveMixin, WaitingTimeoutMixin

from kvcmas_sgl.demo.servers import ServerProcess, kvcmas_command, server_environment
from kvcmas_sgl.prepare_model import default_model


@pytest.fixture(scope="class")
def own_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    log = Path(tmp_path_factory.mktemp("timeouts")) / "server.log"
    environment = {**server_environment(), **request.cls.environment}
    command = kvcmas_command(str(default_model()), request.cls.flags)
    with ServerProcess("server", command, log, environment=environment) as running:
        running.wait_ready()
        request.cls.base_url, request.cls.process = running.url, running.process
        yield


@pytest.mark.usefixtures("own_server")
class TestWaitingTimeout(WaitingTimeoutMixin, unittest.TestCase):
    environment: ClassVar = {"SGLANG_REQ_WAITING_TIMEOUT": "0.001"}
    flags: ClassVar = ["--max-running-requests", "1"]


@pytest.mark.usefixtures("own_server")
class TestRunningTimeout(RunningTimeoutTwoWaveMixin, unittest.TestCase):
    environment: ClassVar = {"SGLANG_REQ_RUNNING_TIMEOUT": "5"}
    flags: ClassVar = ["--max-running-requests", "16"]
