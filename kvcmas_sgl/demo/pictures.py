"""Generated pictures: a bar chart, a curve, shapes and a page of text, each with its number as the seed."""

from __future__ import annotations

import io
import random

from PIL import Image, ImageDraw

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WORDS = (
    *("north", "river", "copper", "signal", "harbour", "winter"),
    *("ledger", "engine", "orchard", "canvas", "bridge", "lantern"),
)
WIDTH, HEIGHT = 240, 180


def picture(number: int) -> bytes:
    """PNG of picture ``number``; its kind goes round with the number, its content depends on all of it."""
    draw_one = (_bars, _curve, _shapes, _text)[number % 4]
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw_one(ImageDraw.Draw(image), random.Random(number))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _bars(draw: ImageDraw.ImageDraw, chance: random.Random) -> None:
    draw.line((20, 160, 230, 160), fill="black", width=2)
    for place in range(6):
        top = 160 - chance.randint(10, 140)
        draw.rectangle((28 + 34 * place, top, 50 + 34 * place, 160), fill=_COLORS[place])


def _curve(draw: ImageDraw.ImageDraw, chance: random.Random) -> None:
    draw.line((20, 10, 20, 160, 230, 160), fill="black", width=2)
    for color in _COLORS[:2]:
        points = [(20 + 21 * step, chance.randint(20, 150)) for step in range(11)]
        draw.line(points, fill=color, width=4, joint="curve")


def _shapes(draw: ImageDraw.ImageDraw, chance: random.Random) -> None:
    for _ in range(7):
        x, y, size = chance.randint(0, 180), chance.randint(0, 120), chance.randint(25, 60)
        shape = draw.ellipse if chance.random() < 0.5 else draw.rectangle
        shape((x, y, x + size, y + size), fill=chance.choice(_COLORS))


def _text(draw: ImageDraw.ImageDraw, chance: random.Random) -> None:
    for line in range(9):
        draw.text((12, 10 + 18 * line), " ".join(chance.choices(_WORDS, k=5)), fill="black")
