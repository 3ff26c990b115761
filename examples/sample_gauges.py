"""The task for pictures: a scale with a pointer, and the number from 0 to 7 above which it stands.

Each split is drawn from a seed of its own, and no picture is in two of them.

    python examples/sample_gauges.py docs/pictures/gauges.png     # one gauge of each reading
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from sample_pictures import COLOURS, PAPERS, SIDE

SPLITS = {"train": 1000, "validation": 96, "heldout": 200}
"""Pictures per split."""
QUESTION = "What does the gauge show?"
READINGS = 8
MARGIN = 6
"""Pixels beside a scale."""
UNSTEADY = 0.2
"""Share of the way to the next tick by which a pointer may be beside its own."""
BITS_OF_PALETTE = 4


def draw_gauge(rng: random.Random, reading: int) -> Image.Image:
    """A scale of any place and colours, and the pointer that stands above one of its ticks."""
    image = Image.new("RGB", (SIDE, SIDE), rng.choice(PAPERS))
    draw = ImageDraw.Draw(image)
    left, right = MARGIN + rng.randint(-1, 1), SIDE - MARGIN + rng.randint(-1, 1)
    height = rng.randint(24, SIDE - 8)
    scale, pointer = rng.sample(list(COLOURS.values()), 2)
    draw.line([(left, height), (right, height)], fill=scale)
    for tick in range(READINGS):
        x = _place(left, right, tick)
        draw.line([(x, height), (x, height + 3)], fill=scale)
    x = _place(left, right, reading + rng.uniform(-UNSTEADY, UNSTEADY))
    half = rng.randint(3, 4)
    top = height - rng.randint(9, 12)
    draw.polygon([(x - half, top), (x + half, top), (x, height - 2)], fill=pointer)
    return image


def _place(left: int, right: int, reading: float) -> int:
    return round(left + (right - left) * reading / (READINGS - 1))


def png(image: Image.Image) -> bytes:
    """A picture of few colours as a small file."""
    file = io.BytesIO()
    image.quantize(2**BITS_OF_PALETTE, dither=Image.Dither.NONE).save(
        file, "PNG", bits=BITS_OF_PALETTE, optimize=True
    )
    return file.getvalue()


def line(image: Image.Image, reading: int) -> dict[str, object]:
    """A chat about a picture, as OpenAI's API takes it."""
    url = f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
    asked = [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "text", "text": QUESTION},
    ]
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": str(reading)},
        ]
    }


def make_gauges(seed: int) -> dict[str, list[tuple[Image.Image, int]]]:
    """Pictures and readings of each split, as many of each reading."""
    seen = set[bytes]()
    splits: dict[str, list[tuple[Image.Image, int]]] = {}
    for split, count in SPLITS.items():
        rng = random.Random(f"{split} {seed}")
        drawn = splits.setdefault(split, [])
        while len(drawn) < count:
            reading = len(drawn) % READINGS
            image = draw_gauge(rng, reading)
            if image.tobytes() not in seen:
                seen.add(image.tobytes())
                drawn.append((image, reading))
        rng.shuffle(drawn)
    return splits


def write_gauges(folder: Path, seed: int) -> None:
    """Write <folder>/gauges-<split>.jsonl, one picture a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, drawn in make_gauges(seed).items():
        lines = "".join(json.dumps(line(image, reading)) + "\n" for image, reading in drawn)
        (folder / f"gauges-{split}.jsonl").write_text(lines, encoding="utf-8")


def overview(seed: int) -> Image.Image:
    """A gauge of each reading, with what it shows."""
    rng = random.Random(seed)
    side, gap, foot = 2 * SIDE, 8, 32
    image = Image.new("RGB", (READINGS * (side + gap) + gap, gap + side + foot), "white")
    draw = ImageDraw.Draw(image)
    for reading in range(READINGS):
        left = gap + reading * (side + gap)
        gauge = draw_gauge(rng, reading).resize((side, side), Image.Resampling.NEAREST)
        image.paste(gauge, (left, gap))
        middle = (left + side // 2, gap + side + foot // 2)
        draw.text(middle, str(reading), fill="black", anchor="mm", font=ImageFont.load_default(20))
    return image


if __name__ == "__main__":
    overview(2024).save(Path(sys.argv[1]), "PNG", optimize=True)
