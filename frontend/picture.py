"""Draws a flow as text and as SVG.

Both take the agents' keys in order and the items as (name, writer or None, readers). SVG lengths are in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from unicodedata import combining, east_asian_width

Drawn = tuple[str, str | None, Sequence[str]]

_BOX_HEIGHT = 44
_LANE = 34
_TOP = 24
_PORT = 26
_GAP = 64
_CHAR = 7.6  # widest ordinary character of the 13 pixel font, so that no label leaves its box
_DOCUMENT = "#1b6ca8"
_COLOURS = ("#c8553d", "#588157", "#7b4fa6", "#b07d12", "#2a9d8f", "#9d4b73")
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.agent{font-weight:600}.box{fill:#fff;stroke:#222;stroke-width:1.5}"
    ".back{fill:#fff}.wire{fill:none;stroke-width:1.8}"
)


def as_text(agents: Sequence[str], items: Sequence[Drawn]) -> str:
    """One box per agent, top to bottom. Ends with a newline."""
    if not agents:
        return "no agents\n"
    reads = {agent: ", ".join(_origin(item) for item in items if agent in item[2]) for agent in agents}
    writes = {agent: ", ".join(name for name, writer, _ in items if writer == agent) for agent in agents}
    left = max(_width(text) for text in reads.values())
    inner = max(_width(agent) for agent in agents) + 2
    margin = " " * (left + 5)
    lines = []
    for number, agent in enumerate(agents):
        lines.append(margin + "┌" + "─" * inner + "┐" if number == 0 else margin + "┌" + _crossed(inner, "┴") + "┐")
        read = f"{_padded(reads[agent], left)} ──▶ " if reads[agent] else margin
        written = f" ──▶ {writes[agent]}" if writes[agent] else ""
        lines.append(f"{read}│ {_padded(agent, inner - 2)} │{written}")
        last = number == len(agents) - 1
        lines.append(margin + "└" + ("─" * inner if last else _crossed(inner, "┬")) + "┘")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def as_svg(agents: Sequence[str], items: Sequence[Drawn]) -> str:
    """A complete SVG document with its own white background."""
    shared = [item for item in items if item[1] is None or item[2]]
    # Each wire meets an agent's box at a place of its own: the item's number among those that touch the agent.
    ports = {agent: [item for item in shared if agent == item[1] or agent in item[2]] for agent in agents}
    boxes: dict[str, tuple[float, float]] = {}
    margin = 24 + max((_label_width(name) for name, writer, _ in shared if writer is None), default=0)
    x = float(margin + 24)
    for agent in agents:
        labels = [_label_width(name) for name, writer, _ in shared if writer == agent]
        width = max(_label_width(agent) + 24, _PORT * (len(ports[agent]) + 1))
        boxes[agent] = (x, width)
        # The label of a variable stands on its lane, right of the box's last port: room for it.
        x += width + max([_GAP, *(label + 16 for label in labels)])

    def port(agent: str, item: Drawn) -> float:
        start, width = boxes[agent]
        return start + width * (ports[agent].index(item) + 1) / (len(ports[agent]) + 1)

    bottom = _TOP + _BOX_HEIGHT
    wires, labels_drawn = [], []
    for row, item in enumerate(shared):
        name, writer, readers = item
        y = bottom + _LANE * (row + 1)
        colour = _DOCUMENT if writer is None else _COLOURS[agents.index(writer) % len(_COLOURS)]
        start = float(margin) if writer is None else port(writer, item)
        ends = [port(reader, item) for reader in readers]
        path = "" if writer is None else f"M{start:.1f} {bottom}V{y}"
        path += f"M{min([start, *ends]):.1f} {y}H{max([start, *ends]):.1f}"
        wires.append(f'<path class="wire" stroke="{colour}" d="{path}"/>')
        for end in ends:
            wires.append(f'<path class="wire" stroke="{colour}" d="M{end:.1f} {y}V{bottom + 7}"/>')
            wires.append(f'<path fill="{colour}" d="M{end:.1f} {bottom}l-5 9h10z"/>')
        if writer is None:
            width = _label_width(name)
            labels_drawn.append(
                f'<rect x="{margin - width:.1f}" y="{y - 13}" width="{width:.1f}" height="26" rx="13" '
                f'fill="#eef5fb" stroke="{colour}"/>' + _text(margin - width / 2, y + 5, name, "middle")
            )
        else:
            at = sum(boxes[writer]) + 4
            labels_drawn.append(
                f'<rect class="back" x="{at:.1f}" y="{y - 10}" width="{_label_width(name) - 8:.1f}" height="20"/>'
                + _text(at + 4, y + 5, name, "start", colour)
            )
    drawn = []
    for agent in agents:
        start, width = boxes[agent]
        drawn.append(
            f'<rect class="box" x="{start:.1f}" y="{_TOP}" width="{width:.1f}" height="{_BOX_HEIGHT}" rx="6"/>'
            + _text(start + width / 2, _TOP + _BOX_HEIGHT / 2 + 5, agent, "middle", kind="agent")
        )
    size = f"{max(x, 120):.0f} {bottom + _LANE * (len(shared) + 1):.0f}"
    width_text, height_text = size.split()
    title = "Agents and what they read: " + ", ".join(agents)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{width_text}" height="{height_text}" '
            f'role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            *wires,
            *labels_drawn,
            *drawn,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str | None = None, kind: str | None = None) -> str:
    style = f' style="fill:{colour}"' if colour else ""
    group = f' class="{kind}"' if kind else ""
    return f'<text{group} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _label_width(text: str) -> float:
    return _width(text) * _CHAR + 20


def _origin(item: Drawn) -> str:
    name, writer, _ = item
    return f"[{name}]" if writer is None else f"{writer}.{name}"


def _crossed(inner: int, joint: str) -> str:
    return "─" * (inner // 2) + joint + "─" * (inner - inner // 2 - 1)


def _padded(text: str, columns: int) -> str:
    return text + " " * (columns - _width(text))


def _width(text: str) -> int:
    """Columns of `text` in a terminal: two for wide characters, none for combining ones."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)
