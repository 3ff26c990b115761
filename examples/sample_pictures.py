"""What the base that reads images is pre-trained on: pictures of one shape or one digit, and chats
about them. No picture has a scale or a pointer, and no question asks for a reading.
"""

from __future__ import annotations

import random

from PIL import Image, ImageDraw

SIDE = 64
"""Pixels of a picture's sides."""
SHARE_OF_DIGITS = 0.25
CELL = 8
"""Pixels of a column or a row, by which places are told."""
COLOURS = {
    "red": (205, 40, 35),
    "green": (30, 150, 60),
    "blue": (40, 70, 205),
    "yellow": (235, 200, 30),
    "black": (25, 25, 30),
    "purple": (140, 50, 160),
}
PAPERS = ((250, 250, 248), (232, 236, 240), (245, 235, 215), (214, 222, 214))
"""Colours of backgrounds."""
SHAPES = ("circle", "square", "triangle", "cross")
GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""The digits, in 7 rows of 5 points."""

CELLS = SIDE // CELL
FACTS = {
    "colour": len(COLOURS),
    "shape": len(SHAPES),
    "column": CELLS,
    "row": CELLS,
    "digit": len(GLYPHS),
}
"""What is told of pictures, and how many values each has."""

Facts = dict[str, int]
"""Values of those of FACTS that a picture has."""
Turn = tuple[str, str]
"""A question and its answer."""


def draw(rng: random.Random) -> tuple[Image.Image, Facts]:
    """A picture of one shape or one digit, and its facts."""
    return _digit(rng) if rng.random() < SHARE_OF_DIGITS else _shape(rng)


def turns_of(facts: Facts, rng: random.Random) -> list[Turn]:
    """Questions about a picture with their answers, in any order."""
    turns = [("Which colour?", list(COLOURS)[facts["colour"]])]
    if "digit" in facts:
        turns.append(("Which digit?", str(facts["digit"])))
    else:
        turns.append(("Which shape?", SHAPES[facts["shape"]]))
        turns.append(("Where is it?", f"column {facts['column']}, row {facts['row']}"))
    rng.shuffle(turns)
    return turns


def blank(rng: random.Random) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """A picture of one colour, and what draws on it."""
    image = Image.new("RGB", (SIDE, SIDE), rng.choice(PAPERS))
    return image, ImageDraw.Draw(image)


def _shape(rng: random.Random) -> tuple[Image.Image, Facts]:
    image, draw = blank(rng)
    colour, shape = rng.randrange(len(COLOURS)), rng.randrange(len(SHAPES))
    half = rng.randint(3, 9)
    x, y = (rng.randint(3, SIDE - 4) for _ in range(2))
    fill = list(COLOURS.values())[colour]
    box = (x - half, y - half, x + half, y + half)
    if SHAPES[shape] == "circle":
        draw.ellipse(box, fill=fill)
    elif SHAPES[shape] == "square":
        draw.rectangle(box, fill=fill)
    elif SHAPES[shape] == "triangle":
        draw.polygon([(x, y - half), (x + half, y + half), (x - half, y + half)], fill=fill)
    else:
        thin = max(1, half // 3)
        draw.rectangle((x - half, y - thin, x + half, y + thin), fill=fill)
        draw.rectangle((x - thin, y - half, x + thin, y + half), fill=fill)
    return image, {"colour": colour, "shape": shape, "column": x // CELL, "row": y // CELL}


def _digit(rng: random.Random) -> tuple[Image.Image, Facts]:
    image, draw = blank(rng)
    colour, digit = rng.randrange(len(COLOURS)), rng.randrange(len(GLYPHS))
    point = rng.randint(3, 6)
    left = rng.randint(0, SIDE - 5 * point)
    top = rng.randint(0, SIDE - 7 * point)
    for row, points in enumerate(GLYPHS[digit].split()):
        for column, inked in enumerate(points):
            if inked == "1":
                x, y = left + point * column, top + point * row
                box = (x, y, x + point - 1, y + point - 1)
                draw.rectangle(box, fill=list(COLOURS.values())[colour])
    return image, {"colour": colour, "digit": digit}
