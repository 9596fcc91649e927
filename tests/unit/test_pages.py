from __future__ import annotations

from pathlib import Path

from benchmarks.pages import Heading, Table, Text, append_pages, html_page, markdown
from benchmarks.quality.budget import Reading, chapter, summarize


def test_pages_say_the_same_in_markdown_and_html() -> None:
    blocks = [Heading("A & B"), Text("x < y"), Table(("name", "value"), (("a|b", "1"),))]
    assert markdown(blocks) == "## A & B\n\nx < y\n\n| name | value |\n| --- | ---: |\n| a\\|b | 1 |\n"
    page = html_page("T", blocks)
    assert "<h2>A &amp; B</h2>" in page and "<p>x &lt; y</p>" in page and "<td>a|b</td><td>1</td>" in page


def test_a_chapter_is_added_once_and_takes_the_place_of_its_older_self(tmp_path: Path) -> None:
    blocks = [Heading("Title", 1), Text("Body")]
    (tmp_path / "p.md").write_text(markdown(blocks))
    (tmp_path / "p.html").write_text(html_page("Title", blocks))
    for text in ("old", "new"):
        append_pages(tmp_path, "p", "More", [Text(text)])
    assert (tmp_path / "p.md").read_text() == "# Title\n\nBody\n\n## More\n\nnew\n"
    page = (tmp_path / "p.html").read_text()
    assert page.count("<h2>More</h2>") == page.count("</html>") == page.count("<p>new</p>") == 1
    assert "<p>Body</p>" in page and "<p>old</p>" not in page


def test_a_chapter_alone_is_a_page(tmp_path: Path) -> None:
    append_pages(tmp_path, "p", "Alone", [Text("here")])
    assert (tmp_path / "p.md").read_text() == "## Alone\n\nhere\n"
    assert html_page("Alone", [Heading("Alone"), Text("here")]).split() == (tmp_path / "p.html").read_text().split()


def _reading(max_kl: float, kind: str, corrected: int, reason: str, kl: float | None) -> Reading:
    return Reading(max_kl, "solver", kind, 100, corrected, reason, kl, kl, None)


def test_the_chapter_on_the_budget_shows_what_became_of_every_kind() -> None:
    readings = [
        _reading(0.01, "text", 90, "reused", 0.004),
        _reading(0.01, "text", 90, "reused", 0.012),
        _reading(0.05, "base64", 0, "over_budget", None),
        _reading(0.05, "longest", 90, "reused", 0.04),
    ]
    rows = summarize(readings)
    assert [(row["max_kl"], row["spans"], row["violations"], row["reused_share"]) for row in rows] == [
        (0.01, 2, 1, 0.9),
        (0.05, 1, 0, 0.0),
    ]
    text = markdown(chapter(rows, readings, 0.001))
    assert "two dense runs differ by 0.0010" in text
    assert "| 0.01 | 2 | 2 | 1 | 0.90 | 0.0080 | 0.0120 | 0.0080 |" in text
    assert "| text | 2 | 2 reused | 0.0080 | 0.0120 | 1 |" in text
    assert "| base64 | 1 | 1 over_budget | - | - | 0 |" in text
