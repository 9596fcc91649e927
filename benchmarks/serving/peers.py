"""Other systems that reuse KV, as far as they start on this machine: each is tried, and what it said is reported."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.arms import Arm, Fleet
from kvcmas_sgl.demo.servers import ServerError

_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Peer:
    """A system that SGLang can run with, and the flags that turn it on."""

    name: str
    what: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Tried:
    """What became of a peer: it runs, or the last error of its log says why not."""

    name: str
    what: str
    command: str
    runs: bool
    why: str


PEERS = (
    Peer(
        "hicache",
        "SGLang's own host tier: exact prefixes only",
        ("--enable-hierarchical-cache", "--hicache-ratio", "1.1", "--hicache-io-backend", "direct",
         "--hicache-mem-layout", "layer_first"),
    ),
    Peer("lmcache", "LMCache's SGLang connector: exact prefixes", ("--enable-lmcache",)),
)  # fmt: skip


def try_peers(
    model: str, logs: Path, flags: Sequence[str], use: Callable[[Fleet, Arm], None], peers: Sequence[Peer] = PEERS
) -> list[Tried]:
    """Start each peer; one that starts and answers is used as an arm, then stopped."""
    found = []
    for peer in peers:
        arm = Arm(peer.name, f"stock SGLang with {peer.name}", ours=False, flags=peer.flags)
        command = f"sglang serve {' '.join(peer.flags)}"
        with Fleet(model, logs, flags) as fleet:
            try:
                fleet.start([arm], _PATIENCE_S)
                use(fleet, arm)
                found.append(Tried(peer.name, peer.what, command, True, "runs here"))
            except (ServerError, RuntimeError) as error:
                found.append(
                    Tried(peer.name, peer.what, command, False, last_error(logs / f"{arm.name}.log", str(error)))
                )
        print(f"{peer.name}: {found[-1].why}", file=sys.stderr)
    return found


def last_error(log: Path, otherwise: str) -> str:
    """The last line of a log that names an exception, in one line; `otherwise` where there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    for line in reversed(lines):
        if re.match(r"\s*(\w+\.)*\w*(Error|Exception)\b.*:", line):
            return line.strip()[:300]
    return otherwise.splitlines()[0][:300]
