"""Servers as child processes: a port of their own, a log file, a wait until ready, and an end that is sure.

Also for tests and benchmarks:

    with ServerProcess("ours", kvcmas_command(model), log=Path("ours.log")) as server:
        server.wait_ready()
        requests.post(server.url + "/generate", json=...)
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import requests

from kvcmas_sgl.cpu.environment import cpu_environment, default_cpu_args, has_gpu

HOST = "127.0.0.1"
# A server that was told to stop gets this long before it is killed, seconds.
_GRACE_S = 4.0
# A GPU is shared by the two servers of the demo: half of what SGLang would take for one.
_GPU_FLAGS = ("--mem-fraction-static", "0.4")


class ServerError(RuntimeError):
    """A server died or was not ready in time; the message holds the end of its log."""


def stock_command(model: str, attention: str | None = None, flags: Sequence[str] = ()) -> list[str]:
    """SGLang as it comes, with the CPU flags of `launch_server` where there is no GPU.

    Args:
        model: model folder or hub name.
        attention: `--attention-backend`; None leaves SGLang's choice (without a GPU: ours, `kvcmas_cpu`).
        flags: further SGLang flags, which win.
    """
    given = list(flags)
    if attention is not None and "--attention-backend" not in given:
        given += ["--attention-backend", attention]
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *_with_defaults(given)]


def kvcmas_command(model: str, flags: Sequence[str] = ()) -> list[str]:
    """SGLang with agents sharing their KV; `flags` are SGLang's and `--kvcmas-*` ones."""
    launch = "kvcmas_sgl.launch_server"
    return [sys.executable, "-m", launch, "--model-path", model, *_with_defaults(list(flags))]


class ServerProcess:
    """One SGLang server in its own process group: entered it is started, left it is gone with all its children.

    Args:
        name: how messages call it.
        command: program and flags, without host and port.
        log: file for its stdout and stderr; replaced.
        port: TCP port; None takes a free one.
        environment: environment of the process; None is this process's, set up for the CPU where there is no GPU.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.port = free_port() if port is None else port
        self.command = [*command, "--host", HOST, "--port", str(self.port)]
        self._environment = dict(server_environment() if environment is None else environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_file: IO[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The server's main process. Raises `ServerError` unless it was started and not stopped."""
        if self._process is None:
            raise ServerError(f"{self.name} is not running.")
        return self._process

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and return at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_file = self.log.open("wb")
        self._log_file.write((shlex.join(self.command) + "\n").encode())
        self._log_file.flush()
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            env=self._environment,
            # A group of its own: stop() reaches SGLang's children, and Ctrl-C in the terminal does not reach them
            # before the client has stopped asking.
            start_new_session=True,
        )

    def wait_ready(self, timeout_s: float = 300.0) -> float:
        """Wait until the server has answered a request of its own; returns the seconds waited.

        Raises:
            ServerError: it exited, or was not ready in `timeout_s` seconds.
        """
        start = time.monotonic()
        while time.monotonic() - start < timeout_s:
            self.check_alive()
            try:
                if requests.get(self.url + "/health", timeout=20).status_code == 200:
                    return time.monotonic() - start
            except requests.RequestException:
                pass
            time.sleep(0.3)
        raise ServerError(f"{self.name} was not ready after {timeout_s:.0f} s.{self._log_tail()}")

    def check_alive(self) -> None:
        """Raise `ServerError` with the end of the log if the process has exited."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            raise ServerError(f"{self.name} exited with code {code}.{self._log_tail()}")

    def stop(self) -> None:
        """End the server as Ctrl-C would, and kill what is left of its process group; does nothing twice."""
        process, self._process = self._process, None
        if process is not None:
            # To the parent alone: it ends its children, which it would otherwise report as crashed.
            process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + _GRACE_S
            while _group_exists(process.pid) and time.monotonic() < deadline:
                process.poll()
                time.sleep(0.05)
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None

    def _log_tail(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace").rstrip().splitlines()[-lines:]
        return f" The last lines of {self.log}:\n" + "\n".join(f"    {line}" for line in text)


def server_environment() -> dict[str, str]:
    """This process's environment, set up for SGLang on the CPU where there is no GPU."""
    environment = dict(os.environ) if has_gpu() else cpu_environment(os.environ)
    return {**environment, "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _with_defaults(flags: list[str]) -> list[str]:
    if not has_gpu():
        return [*flags, *default_cpu_args(flags)]
    return flags if _GPU_FLAGS[0] in flags else [*flags, *_GPU_FLAGS]


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
