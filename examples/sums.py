"""Writes data and SPECs for reinforcement learning on sums: docs/tutorial-reinforcement.md.

Usage:
    python examples/sums.py DIR
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHOWN_SPEC = """\
model: tiny-llama
training_file: shown.jsonl
suffix: shown
lora: {r: 16, lora_alpha: 32}
training: {n_epochs: 20, batch_size: 16, learning_rate: 3.0e-3, max_length: 64}
"""
REWARDED_SPEC = """\
model: tiny-llama                # --model shown continues the model that was shown some sums
training_file: prompts.jsonl
validation_file: held-out.jsonl
suffix: rewarded
method:
  type: reinforcement
  reinforcement:
    grader:
      type: string_check
      name: right
      input: "{{ sample.output_text }}"
      reference: "{{ item.answer }}"
      operation: eq
    hyperparameters: {n_epochs: 16, batch_size: 25, num_generations: 8, max_completion_length: 4, eval_interval: 8}
training: {learning_rate: 3.0e-3, lr_scheduler_type: constant, max_length: 64}
"""


def question(one: int, other: int) -> list[dict[str, str]]:
    """The messages that ask for a sum."""
    return [{"role": "user", "content": f"{one} + {other} ="}]


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """The command line."""
    folder = Path(sys.argv[1])
    pairs = [(one, other) for one in range(10) for other in range(10)]
    random.Random(1).shuffle(pairs)
    shown = ([*question(*pair), {"role": "assistant", "content": str(sum(pair))}] for pair in pairs)
    write(folder / "shown.jsonl", ({"messages": messages} for messages in shown))
    prompts = [{"messages": question(*pair), "answer": str(sum(pair))} for pair in pairs]
    write(folder / "prompts.jsonl", prompts)
    write(folder / "held-out.jsonl", prompts[:50])
    (folder / "shown.yaml").write_text(SHOWN_SPEC)
    (folder / "rewarded.yaml").write_text(REWARDED_SPEC)


if __name__ == "__main__":
    main()
