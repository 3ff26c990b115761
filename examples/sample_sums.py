"""Data for reinforcement learning: sums of two digits, to be shown first and then to be rewarded.

Lines of `sums.jsonl` have no answer to imitate: what is right is a key that only a grader reads.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NUMBERS = 5
"""Numbers of a sum: 0 to 4."""
WRONG = 3
"""Wrong answers to each sum that are shown beside the right one, so that the model is right now and
then.
"""
HELD_OUT = 18
"""Sums of the validation file.

They are among those that are trained on: the sample base learns sums, not adding.
"""


def write_sums(folder: Path, seed: int) -> None:
    """Write sums-shown.jsonl (with answers), sums.jsonl and sums-validation.jsonl."""
    rng = random.Random(seed)
    pairs = [(one, other) for one in range(NUMBERS) for other in range(NUMBERS)]
    rng.shuffle(pairs)
    shown = []
    for one, other in pairs:
        others = [number for number in range(2 * NUMBERS - 1) if number != one + other]
        shown += [
            {"messages": [*_asked(one, other), _answer(answer)]}
            for answer in (one + other, *rng.sample(others, WRONG))
        ]
    rng.shuffle(shown)
    prompts = [{"messages": _asked(one, other), "answer": str(one + other)} for one, other in pairs]
    _write(folder / "sums-shown.jsonl", shown)
    _write(folder / "sums.jsonl", prompts)
    _write(folder / "sums-validation.jsonl", prompts[:HELD_OUT])


def _asked(one: int, other: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{one} + {other} ="}]


def _answer(number: int) -> dict[str, str]:
    return {"role": "assistant", "content": str(number)}


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
