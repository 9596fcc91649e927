"""``python -m kvcmas_sgl.state``: look at what a server has learned and keeps (``--kvcmas-state-dir``), and move it.

Every command reads the file as a server does: completely, or not at all. A running server writes its file again: stop
it before you ``import`` into its folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcmas_sgl.radix_ext import state_file
from kvcmas_sgl.radix_ext.agent_prefixes import AgentPrefixes
from kvcmas_sgl.radix_ext.delta_store import DeltaStore
from kvcmas_sgl.radix_ext.estimators import Edge, LastingEstimator
from kvcmas_sgl.radix_ext.fingerprint import estimators_of
from kvcmas_sgl.radix_ext.gate import Gate
from kvcmas_sgl.radix_ext.learner import Learner
from kvcmas_sgl.radix_ext.sources import scope_digest
from kvcmas_sgl.radix_ext.state_file import FILE_NAME, StateError
from kvcmas_sgl.radix_ext.statistics import Statistics

SHOWN_SPAN = 1000
"""Length of the span whose predicted KL ``show`` tells, tokens."""

_COLUMNS = "{:<9} {:<32} {:<32} {:>6} {:>6} {:>8} {:>10}"


@dataclass(frozen=True)
class Saved:
    """A file's contents, read into what a server would read it into."""

    path: Path
    fingerprint: dict[str, Any]
    estimators: dict[str, LastingEstimator]
    gate: Gate
    prefixes: AgentPrefixes
    learner: Learner

    @property
    def edges(self) -> list[Edge]:
        """Every edge that an estimator or the gate knows, those of one scope together."""
        known = {edge for estimator in self.estimators.values() for edge in estimator.edges()} | self.gate.edges()
        return sorted(known, key=Edge.as_list)


def load(path: Path) -> Saved:
    """The saved state at ``path``, a file or a server's folder. Raises `StateError`."""
    path = path / FILE_NAME if path.is_dir() else path
    fingerprint, parts = state_file.read(path)
    gate, prefixes = Gate(), AgentPrefixes()
    try:
        estimators = estimators_of(fingerprint)
        learner = Learner(estimators, gate, prefixes, DeltaStore(), Statistics(), sys.maxsize)
        learner.load(parts)
    except StateError as error:
        raise StateError(f"{path} cannot be used: {error}") from error
    return Saved(path, fingerprint, estimators, gate, prefixes, learner)


def show(saved: Saved) -> str:
    """What a file holds, for people."""
    lines = [f"{saved.path}: {saved.path.stat().st_size:,} bytes, {len(saved.edges)} edges"]
    lines += [f"  {name}: {_printable(value)}" for name, value in saved.fingerprint.items()]
    if not saved.edges:
        return "\n".join(lines)
    lines += ["", _COLUMNS.format("scope", "source", "consumer", "spans", "pairs", "audited", "KL")]
    for edge in saved.edges:
        for name, estimator in saved.estimators.items():
            expected = saved.gate.expect(edge, name, SHOWN_SPAN)
            lines.append(
                _COLUMNS.format(
                    "-" if edge.namespace == scope_digest() else edge.namespace[:8],
                    _agent(edge.source),
                    _agent(edge.consumer),
                    estimator.spans_seen(edge),
                    saved.gate.pairs(edge, name),
                    saved.gate.audits(edge, name),
                    "unknown" if expected is None else f"{expected.kl:.5f}",
                )
            )
    lines += [
        "",
        "scope: digest of cache_salt and extra_key, - without; agents: role, digest of the prefix, place;",
        f"KL: the most that is predicted for a span of {SHOWN_SPAN} tokens, nats, without heavy hitters computed.",
    ]
    return "\n".join(lines)


def export(saved: Saved, target: Path, *, all_scopes: bool) -> str:
    """Write a file that may leave the machine; what was learned under a salt or an extra key stays unless asked for."""
    before = len(saved.edges)
    if not all_scopes:
        for edge in saved.edges:
            if edge.namespace != scope_digest():
                saved.gate.drop(edge)
                for estimator in saved.estimators.values():
                    estimator.drop(edge)
        for scope in saved.prefixes.scopes() - {scope_digest()}:
            saved.prefixes.drop_scope(scope)
    state_file.write(target, saved.fingerprint, saved.learner.state())
    return f"{target}: {len(saved.edges)} of {before} edges."


def put(saved: Saved, folder: Path, *, replace: bool) -> str:
    """Make a file the state that a server with this folder starts with."""
    target = folder / FILE_NAME
    if target.exists() and not replace:
        raise StateError(f"{target} is there already: --replace puts {saved.path} in its place.")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"{folder} cannot be made: {error.strerror}.") from error
    state_file.write(target, saved.fingerprint, saved.learner.state())
    return f"{target}: {len(saved.edges)} edges."


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. Ends with one sentence and status 1 on a file that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m kvcmas_sgl.state", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, source: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("source", type=Path, help=source)
        return made

    either = "a state file, or the folder of --kvcmas-state-dir"
    command("show", "Tell what was learned: model, edges, predicted KL.", either)
    command("check", "Tell whether a server can use a file; status 1 if not.", either)
    export_parser = command("export", "Write a copy that may leave the machine.", either)
    export_parser.add_argument("target", type=Path, help="the file to write")
    export_parser.add_argument(
        "--all-scopes", action="store_true", help="also what was learned under a cache_salt or an extra_key"
    )
    import_parser = command("import", "Put a file into a server's folder, for its next start.", "the file to read")
    import_parser.add_argument("folder", type=Path, help="the folder of --kvcmas-state-dir")
    import_parser.add_argument("--replace", action="store_true", help="also where the folder holds state already")
    args = parser.parse_args(argv)
    try:
        saved = load(args.source)
        if args.command == "show":
            print(show(saved))
        elif args.command == "check":
            print(f"{saved.path}: sound, {len(saved.edges)} edges.")
        elif args.command == "export":
            print(export(saved, args.target, all_scopes=args.all_scopes))
        else:
            print(put(saved, args.folder, replace=args.replace))
    except StateError as error:
        sys.exit(str(error))


def _agent(key: str) -> str:
    """``role#prefix@place`` short enough for a column."""
    role, _, rest = key.rpartition("#")
    prefix, _, place = rest.partition("@")
    return f"{_printable(role)[:14]} {prefix[:8]} {place}"


def _printable(value: object) -> str:
    """Clients choose the names of roles: nothing in them may reach the terminal as a control character."""
    return json.dumps(value).strip('"')


if __name__ == "__main__":
    main()
