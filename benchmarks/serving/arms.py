"""The arms: which server each runs on, and whether its requests say what is shared."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workload.endpoint import Endpoint
from kvcmas_sgl.demo.servers import ServerProcess, kvcmas_command, server_environment, stock_command

RUST, PYTHON, OFF, OURS = "stock-rust", "stock-python", "ours-off", "ours"
ROTATE, ANCHORS, KVCOMM = "rotate-only", "anchors", "kvcomm-like"
EXTRAS = (ROTATE, ANCHORS, KVCOMM)
"""Other ways to correct, on our cache: measured beside ours where time is left."""
# SGLang's own switch between the two cores of its radix tree.
_TREE_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


@dataclass(frozen=True)
class Arm:
    """`flags` and `environment` are the server's; `hints`: requests name their role and spans.

    `server`: the arm whose server this one uses, if not one of its own. `learns`: from what share of the
    plan's workflows before it is timed; one that never refuses needs fewer.
    """

    name: str
    label: str
    ours: bool
    hints: bool = False
    learns: float = 0.0
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    server: str = ""

    @property
    def key(self) -> str:
        return self.server or self.name


ARMS = {
    arm.name: arm
    for arm in (
        Arm(RUST, "stock SGLang, Rust tree", ours=False, environment={_TREE_CORE: "rust"}),
        Arm(PYTHON, "stock SGLang, Python tree", ours=False, environment={_TREE_CORE: "python"}),
        # Measured before the first request with a hint.
        Arm(OFF, "ours, no agent traffic", ours=True, server="ours"),
        Arm(OURS, "ours", ours=True, hints=True, learns=1.0),
        Arm(
            ROTATE,
            "rotate-only",
            ours=True,
            hints=True,
            flags=("--kvcmas-policy", "always", "--kvcmas-estimator", "none", "--kvcmas-head", "0"),
        ),
        Arm(
            ANCHORS,
            "published anchors, our gate",
            ours=True,
            hints=True,
            learns=1.0,
            flags=("--kvcmas-estimator", "anchors", "--kvcmas-rank", "32"),
        ),
        # From the last reader's KV: KVComm's context-free encoding of a document has no hop of its own here.
        Arm(
            KVCOMM,
            "KVComm-like: anchors of full rank, its entropy gate",
            ours=True,
            hints=True,
            learns=1 / 3,
            flags=(
                *("--kvcmas-policy", "always", "--kvcmas-estimator", "anchors", "--kvcmas-rank", "192"),
                *("--kvcmas-tau", "0.3", "--kvcmas-head", "0", "--kvcmas-own-rank", "0"),
            ),
        ),
    )
}


class Fleet:
    """Servers of one model, one for each arm that was asked for; entered, it stops them all at its end.

    Args:
        model: model folder or hub name.
        logs: folder for the servers' logs.
        flags: SGLang flags that every server gets.
    """

    def __init__(self, model: str, logs: Path, flags: Sequence[str]) -> None:
        self._model = model
        self._logs = logs
        self._flags = list(flags)
        self._running: dict[str, ServerProcess] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop(tuple(self._running))

    def start(self, arms: Iterable[Arm], patience_s: float = 400.0) -> bool:
        """Start the servers that are not up yet, at once, and wait; whether there were any. Raises `ServerError`."""
        fresh = []
        for arm in arms:
            if arm.key not in self._running:
                make = kvcmas_command if arm.ours else stock_command
                command = make(self._model, flags=[*self._flags, *arm.flags])
                environment = {**server_environment(), **(arm.environment or {})}
                server = ServerProcess(arm.label, command, self._logs / f"{arm.key}.log", environment=environment)
                self._running[arm.key] = server
                server.start()
                fresh.append(server)
        for server in fresh:
            waited = server.wait_ready(patience_s)
            print(f"{server.name} was ready after {waited:.0f} s more", file=sys.stderr)
        if fresh:
            # What a start leaves running (compilation of the CPU kernel, imports) must not be timed.
            time.sleep(1.0)
        return bool(fresh)

    def stop(self, names: Iterable[str]) -> None:
        """Stop servers, by their arm's name; one that is not up is no error."""
        for name in names:
            server = self._running.pop(name, None)
            if server is not None:
                server.stop()

    def url(self, arm: Arm) -> str:
        """The address of an arm's server. Raises `ServerError` if it has died."""
        server = self._running[arm.key]
        server.check_alive()
        return server.url

    def endpoint(self, arm: Arm) -> Endpoint:
        """A client of an arm's server, not entered."""
        return Endpoint(self.url(arm), hints=arm.hints)
