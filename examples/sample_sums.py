"""Data for reinforcement learning: sums of two digits, to be shown first and then to be rewarded.

Lines of `sums.jsonl` have no answer to imitate: what is right is a key that only a grader reads.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DIGITS = 5
"""Numbers of a sum: 0 to 4."""
HELD_OUT = 25
"""Sums of the validation file. They are among those that are trained on: the sample base learns sums, not adding."""


def write_sums(folder: Path, seed: int) -> None:
    """Write sums-shown.jsonl (with answers), sums.jsonl and sums-validation.jsonl."""
    pairs = [(one, other) for one in range(DIGITS) for other in range(DIGITS)]
    random.Random(seed).shuffle(pairs)
    asked = [[{"role": "user", "content": f"{one} + {other} ="}] for one, other in pairs]
    answers = [str(one + other) for one, other in pairs]
    shown = ([*messages, {"role": "assistant", "content": answer}] for messages, answer in zip(asked, answers, strict=True))
    prompts = [{"messages": messages, "answer": answer} for messages, answer in zip(asked, answers, strict=True)]
    _write(folder / "sums-shown.jsonl", ({"messages": messages} for messages in shown))
    _write(folder / "sums.jsonl", prompts)
    _write(folder / "sums-validation.jsonl", prompts[:HELD_OUT])


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
