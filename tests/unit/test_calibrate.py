"""Texts and tables of calibration."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcmas_sgl.calibrate import CalibrationError, Edge, edges, read_texts, render


def test_texts_are_cut_between_paragraphs(tmp_path: Path) -> None:
    paragraphs = [letter * 300 for letter in "abcdefg"]
    (tmp_path / "one.txt").write_text("\n\n".join(paragraphs))
    pieces = list(read_texts([tmp_path], 1000))
    assert pieces == ["\n\n".join(paragraphs[:3]), "\n\n".join(paragraphs[3:6])]
    (tmp_path / "two.txt").write_text("x" * 1700)
    assert [len(piece) for piece in read_texts([tmp_path / "two.txt"], 1000)] == [1000, 700]


def test_no_text_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"holds no \.txt file"):
        list(read_texts([tmp_path], 1000))
    with pytest.raises(CalibrationError, match=r"nowhere\.txt cannot be read"):
        list(read_texts([tmp_path / "nowhere.txt"], 1000))


def row(source: str, consumer: str, estimator: str, kl: float | None, place: str = "first") -> dict[str, object]:
    return {
        "source": source,
        "consumer": consumer,
        "consumer_place": place,
        "estimator": estimator,
        "predicted_kl": kl,
        "pairs": 3,
        "tokens": 500,
    }


def test_the_table_says_which_budget_opens_what() -> None:
    table = [
        row("a", "b", "affine", 0.03),
        row("a", "b", "affine+heavy", 0.012),
        row("b", "a", "affine", 0.05),
        row("b", "a", "affine+heavy", None),
        row("b", "a", "affine", 9.0, place="later"),
        row("a", "c", "affine", None),
        row("stranger", "a", "affine", 0.1),
    ]
    found = edges([{"edge_table": table}], {"a": "", "b": "", "c": ""})
    assert found == [
        Edge("a", "c", 3, 500, None, None),
        Edge("b", "a", 3, 500, 0.05, 0.05),
        Edge("a", "b", 3, 500, 0.03, 0.012),
    ]
    text = render(found, 0.02)
    assert [line.split()[-1] for line in text.splitlines()[1:4]] == ["unknown", "shut", "open"]
    assert "budget 0.02 nats opens 1 of 3 pairs" in text
    assert "50% of the pairs that are known would need 0.0120" in text and "100% of the pairs" in text
    assert text.endswith("0.0500")
