"""What the runner of the examples concludes from their runs."""

from __future__ import annotations

from typing import Any

import pytest

from examples.__main__ import FRAMEWORKS, HINTED, Result, findings, problems
from examples.command_line import Turn, token_table, tokens_by_role
from examples.texts import retrieve, sheets


def result(arm: str, program: str, answer: str = "yes", corrected: int = 0) -> Result:
    tokens = {"a": {"requests": 1, "exact": 3, "corrected": corrected, "computed": 5}} if corrected else {}
    return Result(arm, program, [Turn("a", answer)], 1.0, tokens)


def test_nothing_is_wrong_when_all_is_as_claimed() -> None:
    runs = [result(arm, name) for arm in ("stock", "plain") for name in FRAMEWORKS]
    runs += [result("plain", name, corrected=9) for name in HINTED]
    runs += [result("auto", name, corrected=9) for name in HINTED | FRAMEWORKS]
    found = findings(runs)
    assert found["framework_answers_equal_stock"] == dict.fromkeys(FRAMEWORKS, True)
    assert found["corrected_tokens"]["auto"] == dict.fromkeys(HINTED | FRAMEWORKS, 9)
    assert problems(found) == []


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (result("plain", "autogen_team", answer="no"), "got other answers than from stock"),
        (result("plain", "autogen_team", corrected=7), "but 7 tokens of it were corrected"),
        (result("plain", "debate"), "debate had no corrected tokens on the plain server"),
        (result("auto", "autogen_team"), "autogen_team had no corrected tokens on the auto server"),
    ],
)
def test_what_is_wrong_is_said(run: Result, words: str) -> None:
    (sentence,) = problems(findings([result("stock", "autogen_team"), run]))
    assert words in sentence


def test_tokens_are_summed_by_role() -> None:
    def report(role: str, exact: int, corrected: int, computed: int) -> dict[str, Any]:
        reason = "reused" if corrected else "edge_unknown"
        counts = {"exact_tokens": exact, "corrected_tokens": corrected, "computed_tokens": computed}
        return {"role": role, "reason": reason, **counts}

    sums = tokens_by_role([report("a", 1, 0, 1000), report("b", 5, 600, 7), report("a", 2, 500, 30)])
    reasons = {"edge_unknown": 1, "reused": 1}
    assert sums["a"] == {"requests": 2, "exact": 3, "corrected": 500, "computed": 1030, "reasons": reasons}
    line = token_table(sums).splitlines()[1].split()
    assert line == ["a", "2", "3", "500", "1,030", "edge_unknown", "1,", "reused", "1"]


def test_sheets_do_not_share_problems() -> None:
    pages = sheets(14)
    assert [page.count("Problem ") for page in pages] == [10] * 14
    assert len(set("\n\n".join(pages).split("\n\n"))) >= 140
    with pytest.raises(ValueError, match="15 sheets of 10 problems"):
        sheets(15)


def test_retrieval_puts_the_passage_with_most_words_first() -> None:
    assert retrieve("red apples", ["green pears", "red apples fall", "red cars"], 2) == ["red apples fall", "red cars"]
