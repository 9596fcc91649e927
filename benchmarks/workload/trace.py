"""Traces: workflows in a file of one JSON object a line.

First lines hold texts, once each, under a digest of their tokens; then comes one line a request, in the order of
arrival::

    {"text": "6b0f...", "ids": [504, 2239, ...]}
    {"timestamp": 1200, "input_length": 2233, "output_length": 16, "hash_ids": [0, 1, 2, 3, 4],
     "workflow": "3", "hop": "hop-1", "role": "critic-1", "after": ["hop-0"], "answer": "99c1...",
     "parts": [{"own": "10ac..."}, {"document": "6b0f..."}, {"own": "77f0..."}, {"answer": "hop-0"}, ...]}

``timestamp``       milliseconds from the run's start to the workflow's arrival. A hop is sent when its workflow has
                    arrived and all in ``after`` are done.
``input_length``    tokens of the prompt.
``output_length``   tokens to generate.
``hash_ids``        one number for each 512 tokens of the prompt, the same for the same tokens after the same tokens:
                    what an exact prefix cache can share (the last block may be shorter).
``workflow``, ``hop``, ``role``  whose request it is; ``after``: hops of the workflow that it waits for.
``parts``           the prompt in pieces: the agent's ``own`` text, a ``document``, or the ``answer`` of another hop.
``answer``          the text that later hops read of this one; null: what it generates.

The first four are those of the Mooncake traces (FAST'25), so that tools for these read ours. The other way round, a
line of theirs, without ``parts``, is read as a workflow of one request whose blocks are documents: text of 512 tokens
for each hash id, the last one cut to the length. Prompts that are longer than `max_tokens` lose their middle blocks.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.workload.workflow import Hop, Ids, Kind, Part, Workflow

BLOCK_TOKENS = 512
_KINDS: tuple[Kind, ...] = ("own", "document", "answer")


class TraceError(ValueError):
    """A trace cannot be read; the message is one sentence that names the file, line and field."""


def save_trace(path: Path, workflows: Sequence[Workflow]) -> None:
    """Write workflows in the order of their arrival."""
    texts: dict[str, Ids] = {}
    blocks: dict[tuple[int, Ids], int] = {}
    lines = []
    for workflow in sorted(workflows, key=lambda entry: entry.arrival_s):
        answers = workflow.scripted()
        for hop in workflow.hops:
            known = {name: answers.get(name, ()) for name in hop.after}
            ids = hop.prompt(known).ids
            lines.append(
                {
                    "timestamp": round(1000 * workflow.arrival_s),
                    "input_length": len(ids),
                    "output_length": hop.output_tokens,
                    "hash_ids": _hash_ids(ids, blocks),
                    "workflow": workflow.name,
                    "hop": hop.name,
                    "role": hop.role,
                    "after": list(hop.after),
                    "answer": _named(hop.answer, texts) if hop.answer else None,
                    "parts": [_part_json(part, texts) for part in hop.parts],
                }
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for name, text in texts.items():
            file.write(json.dumps({"text": name, "ids": list(text)}) + "\n")
        for line in lines:
            file.write(json.dumps(line) + "\n")


def load_trace(
    path: Path, text: Callable[[int, int], Sequence[int]] | None = None, max_tokens: int = 4096
) -> tuple[Workflow, ...]:
    """Read a trace of ours, or a Mooncake trace.

    Args:
        text: for a Mooncake trace: token ids by hash id and length; the same id must give the same beginning.
        max_tokens: longest prompt that is made of a Mooncake line.

    Raises:
        TraceError: a line is no JSON object, lacks a field, or names a text or hop that is not there.
    """
    texts: dict[str, Ids] = {}
    hops: dict[str, list[Hop]] = {}
    arrivals: dict[str, float] = {}
    for number, line in _lines(path):
        where = f"{path} line {number}"
        try:
            if "text" in line:
                texts[line["text"]] = tuple(line["ids"])
            elif "parts" in line:
                name = line["workflow"]
                hops.setdefault(name, []).append(_hop(line, texts, where))
                arrivals.setdefault(name, line["timestamp"] / 1000)
            elif text is None:
                raise TraceError(f"{where} has no parts, so it needs a text for each of its hash_ids.")
            else:
                name = f"line-{number}"
                hops[name] = [_plain_hop(line, text, max_tokens)]
                arrivals[name] = line["timestamp"] / 1000
        except KeyError as error:
            raise TraceError(f"{where} has no {error.args[0]!r}.") from error
    for name, found in hops.items():
        before: set[str] = set()
        for hop in found:
            missing = set(hop.after) - before
            if missing:
                raise TraceError(
                    f"{path}: hop {hop.name!r} of workflow {name!r} reads {min(missing)!r}, not before it."
                )
            before.add(hop.name)
    return tuple(Workflow(name, tuple(found), arrivals[name]) for name, found in hops.items())


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise TraceError(f"{path} line {number} is not JSON: {error}.") from error
        if not isinstance(line, dict):
            raise TraceError(f"{path} line {number} is {type(line).__name__}, but must be a JSON object.")
        yield number, line


def _hop(line: Mapping[str, Any], texts: Mapping[str, Ids], where: str) -> Hop:
    parts = []
    for entry in line["parts"]:
        kind = next((name for name in _KINDS if name in entry), None)
        if kind is None:
            raise TraceError(f"{where}: a part is {entry!r}, but must be one of {', '.join(_KINDS)}.")
        value = entry[kind]
        parts.append(Part(kind, hop=value) if kind == "answer" else Part(kind, texts[value]))
    answer = line["answer"]
    return Hop(line["hop"], line["role"], tuple(parts), line["output_length"], texts[answer] if answer else ())


def _plain_hop(line: Mapping[str, Any], text: Callable[[int, int], Sequence[int]], max_tokens: int) -> Hop:
    length = min(line["input_length"], max_tokens)
    ids = line["hash_ids"]
    needed = -(-length // BLOCK_TOKENS)
    # The beginning is what conversations share, the end is what is new.
    kept = ids if len(ids) <= needed else [*ids[: needed - needed // 2], *ids[len(ids) - needed // 2 :]]
    parts = []
    for place, hash_id in enumerate(kept):
        tokens = min(BLOCK_TOKENS, length - place * BLOCK_TOKENS)
        parts.append(Part("document", tuple(text(hash_id, tokens))))
    return Hop("request", "", tuple(parts), line["output_length"])


def _part_json(part: Part, texts: dict[str, Ids]) -> dict[str, str]:
    return {part.kind: part.hop if part.kind == "answer" else _named(part.ids, texts)}


def _named(ids: Ids, texts: dict[str, Ids]) -> str:
    name = hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:16]
    texts[name] = ids
    return name


def _hash_ids(ids: Ids, blocks: dict[tuple[int, Ids], int]) -> list[int]:
    found: list[int] = []
    for start in range(0, len(ids), BLOCK_TOKENS):
        key = (found[-1] if found else -1, ids[start : start + BLOCK_TOKENS])
        found.append(blocks.setdefault(key, len(blocks)))
    return found
