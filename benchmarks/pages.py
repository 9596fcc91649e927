"""A report as blocks (headings, paragraphs, tables, pictures), written as Markdown or as one HTML page."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is a name, the others are figures, or all are ``words``."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: bool = False


@dataclass(frozen=True)
class Picture:
    """A PNG file beside the report."""

    path: Path
    title: str


Block = Heading | Text | Table | Picture


def markdown(blocks: Sequence[Block]) -> str:
    """The report as Markdown; pictures are referred to by their file's name."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def html_page(title: str, blocks: Sequence[Block]) -> str:
    """The report as one page that needs nothing else: pictures are inside."""
    return _PAGE.format(title=html.escape(title), body="\n".join(_html(block) for block in blocks))


def append_pages(folder: Path, name: str, title: str, blocks: Sequence[Block]) -> None:
    """Add a chapter to the pages ``name``.md and ``name``.html, which are made if they are not there.

    The chapter begins with a heading ``title``; one that is there already is replaced, with all that follows it.
    """
    chapter = [Heading(title), *blocks]
    text, page = folder / f"{name}.md", folder / f"{name}.html"
    known = text.read_text(encoding="utf-8").split(_markdown(chapter[0]))[0].rstrip() if text.exists() else ""
    text.write_text(f"{known}\n\n{markdown(chapter)}".lstrip(), encoding="utf-8")
    known = page.read_text(encoding="utf-8") if page.exists() else html_page(title, ())
    head = known.split(_html(chapter[0]))[0].split(_END)[0]
    page.write_text("\n".join([head, *map(_html, chapter), _END]) + "\n", encoding="utf-8")


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Picture(path, title):
            return f"![{title}]({path.name})"
        case Table(columns, rows, words):
            rule = ["---", *["---" if words else "---:"] * (len(columns) - 1)]
            lines = [[cell.replace("|", "\\|") for cell in line] for line in (columns, rule, *rows)]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{html.escape(text)}</p>"
        case Picture(path, title):
            image = base64.b64encode(path.read_bytes()).decode()
            return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{image}">'
        case Table(columns, rows, words):
            kind = ' class="words"' if words else ""
            head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
            body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
            return f"<table{kind}><tr>{head}</tr>{body}</table>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1f2430; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; white-space: nowrap }}
th, td {{ padding: .25rem .6rem; border-bottom: 1px solid #e6e9ef; text-align: right }}
th:first-child, td:first-child, .words th, .words td {{ text-align: left; vertical-align: top }}
.words {{ white-space: normal }}
img {{ max-width: 100% }}
</style></head><body>
{body}
</body></html>
"""
_END = "</body></html>"
