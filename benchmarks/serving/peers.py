"""Other systems that reuse KV, as far as they start on this machine: each is tried, and what it said is reported."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.arms import Arm, Fleet
from kvcmas_sgl.demo.servers import HOST, ServerError, ServerProcess

_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Peer:
    """A system that SGLang can run with, and the flags that turn it on.

    `package`: what has to be installed for it, beside what the lock file has; `needs`: what that imports besides, of
    which its own requirements ask for other versions than SGLang's. `daemon`: a server of its own, which is
    told its host and port as SGLang's is; `{config}` in `flags` is then a file with them.
    """

    name: str
    what: str
    flags: tuple[str, ...]
    package: str = ""
    needs: tuple[str, ...] = ()
    daemon: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tried:
    """What became of a peer: it runs, or the last error of its log says why not."""

    name: str
    what: str
    command: str
    runs: bool
    why: str


_LMCACHE = "from lmcache.cli.main import main; main()"
PEERS = (
    Peer(
        "hicache",
        "SGLang's own host tier: exact prefixes only",
        ("--enable-hierarchical-cache", "--hicache-ratio", "1.1", "--hicache-io-backend", "direct",
         "--hicache-mem-layout", "layer_first"),
    ),
    Peer(
        "lmcache",
        "LMCache's SGLang connector: exact prefixes only",
        ("--enable-lmcache", "--lmcache-config-file", "{config}"),
        package="lmcache",
        needs=("blake3", "cachetools", "opentelemetry-sdk", "opentelemetry-semantic-conventions", "py-cpuinfo"),
        # Without a GPU SGLang's side moves the KV, which the daemon has to be told.
        daemon=(sys.executable, "-c", _LMCACHE, "server", "--l1-size-gb", "1", "--eviction-policy", "LRU",
                "--supported-transfer-mode", "auto", "--http-port", "0"),
    ),
)  # fmt: skip


def try_peers(
    model: str, logs: Path, flags: Sequence[str], use: Callable[[Fleet, Arm], None], peers: Sequence[Peer] = PEERS
) -> list[Tried]:
    """Start each peer; one that starts and answers is used as an arm, then stopped."""
    found = []
    for peer in peers:
        runs, why = _try(peer, model, logs, flags, use)
        found.append(Tried(peer.name, peer.what, f"sglang serve {' '.join(peer.flags)}", runs, why))
        print(f"{peer.name}: {why}", file=sys.stderr)
    return found


def _try(
    peer: Peer, model: str, logs: Path, flags: Sequence[str], use: Callable[[Fleet, Arm], None]
) -> tuple[bool, str]:
    if peer.package and importlib.util.find_spec(peer.package) is None:
        needed = " ".join((peer.package, *peer.needs))
        return False, f"{peer.package} is not installed; pip install --no-deps {needed}"
    given = peer.flags
    daemon = None
    with ExitStack() as stack:
        if peer.daemon:
            log = logs / f"{peer.name}-daemon.log"
            daemon = stack.enter_context(ServerProcess(f"{peer.name}'s daemon", peer.daemon, log))
            config = logs / f"{peer.name}.yaml"
            config.write_text(f"mp_host: {HOST}\nmp_port: {daemon.port}\n", encoding="utf-8")
            given = tuple(flag.format(config=config) for flag in peer.flags)
        arm = Arm(peer.name, f"stock SGLang with {peer.name}", ours=False, flags=given)
        fleet = stack.enter_context(Fleet(model, logs, flags))
        try:
            fleet.start([arm], _PATIENCE_S)
            use(fleet, arm)
        except (ServerError, RuntimeError) as error:
            said = last_error(logs / f"{arm.name}.log", str(error))
            return False, said if daemon is None else f"{said} (its daemon: {last_error(daemon.log, 'no error')})"
    return True, "runs here"


def last_error(log: Path, otherwise: str) -> str:
    """The last line of a log that names an exception, in one line; `otherwise` where there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    for line in reversed(lines):
        if re.match(r"\s*(\w+\.)*\w*(Error|Exception)\b.*:", line):
            return line.strip()[:300]
    return otherwise.splitlines()[0][:300]
