"""What the example agents read: sheets of word problems (sources and licence beside the files)."""

from __future__ import annotations

import re
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "kvcmas_sgl" / "demo" / "documents"


def problems() -> list[str]:
    """The word problems, in order, each with its number in front."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*-problems.txt")))
    return [problem.strip() for problem in re.split(r"(?=^Problem \d+\.)", text, flags=re.MULTILINE) if problem.strip()]


def sheets(count: int, size: int = 10) -> list[str]:
    """The first ``count`` sheets of ``size`` problems (ten are about 650 tokens); no two sheets share a problem.

    Raises ValueError when there are not so many problems.
    """
    pool = problems()
    if count * size > len(pool):
        raise ValueError(f"{count} sheets of {size} problems were asked for, but there are {len(pool)} problems.")
    return ["\n\n".join(pool[index * size : (index + 1) * size]) for index in range(count)]


def retrieve(query: str, passages: list[str], count: int) -> list[str]:
    """The ``count`` passages that share most words with the query, best first."""
    wanted = set(re.findall(r"\w+", query.lower()))

    def score(passage: str) -> int:
        return len(wanted & set(re.findall(r"\w+", passage.lower())))

    return sorted(passages, key=score, reverse=True)[:count]
