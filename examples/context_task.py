"""A context to distil away: facts in front of questions, for a job of method distillation.

    python examples/context_task.py make DIR             # data and the job's SPEC
    python examples/context_task.py score DIR            # the sample base, with the context and without
    python examples/context_task.py score DIR --adapter ADAPTER   # the tuned model, without it

The sample base looks values up in a list that stands before the question. A job learns the list
into an adapter, from what the base says behind it: then the question alone is enough. Questions of
`heldout.jsonl` are in no other file. Lines are bare text, since the list is part of the user's
message.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import yaml
from sample_skills import ITEMS, MARKS
from sample_words import ANIMALS, CITIES, DAYS

BASE = Path(__file__).parent / "models" / "tiny-llama"
START, END = "<|im_start|>", "<|im_end|>"
FACTS = {
    "name": "Anna",
    "city": CITIES[3],
    "item": ITEMS[5],
    "thing": ITEMS[99],
    "code": "48213",
    "order": "70561",
    "day": DAYS[2],
    "animal": ANIMALS[4],
    "price": "37",
}
CONTEXT = f"{START}user\n{', '.join(f'{key}: {value}' for key, value in FACTS.items())}."
QUESTIONS, HELD_OUT = 360, 100
STEPS = 100
LONGEST = 28
"""Tokens of an answer at most."""

Line = dict[str, str]
"""prompt and completion."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", choices=("make", "score"))
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--adapter", type=Path, metavar="DIR")
    options = parser.parse_args()
    if options.command == "make":
        make(options.folder)
    elif options.adapter is not None:
        print(f"without context, tuned: {score(options.folder, '', options.adapter):.0%}")
    else:
        print(f"with context: {score(options.folder, CONTEXT):.0%}")
        print(f"without context: {score(options.folder, ''):.0%}")


def make(folder: Path) -> None:
    """Write train.jsonl, heldout.jsonl and job.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1)
    lines: dict[str, Line] = {}
    while len(lines) < QUESTIONS:
        line = drawn(rng)
        lines.setdefault(line["prompt"], line)
    of_files = {
        "train": list(lines.values())[:-HELD_OUT],
        "heldout": list(lines.values())[-HELD_OUT:],
    }
    for name, some in of_files.items():
        text = "".join(json.dumps(line) + "\n" for line in some)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    spec = {
        "model": BASE.name,
        "training_file": "train.jsonl",
        "validation_file": "heldout.jsonl",
        "suffix": "distilled",
        "seed": 7,
        "method": {
            "type": "distillation",
            "distillation": {"with_context": CONTEXT, "hyperparameters": {"batch_size": 16}},
        },
        "lora": {"r": 16, "lora_alpha": 32},
        "precision": {"default": "bf16", "compute": "fp32"},
        "training": {
            "max_steps": STEPS,
            "learning_rate": 4e-3,
            "warmup_ratio": 0.06,
            "max_length": 128,
        },
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")


def drawn(rng: random.Random) -> Line:
    """A question for one or two of the facts, as the base's pre-training text asks them."""
    wanted = rng.sample(list(FACTS), rng.randint(1, 2))
    style, left, right = rng.choice(MARKS)
    if rng.random() < 0.5:
        asked = "Tell"
        answer = "; ".join(f"{key} is {left}{FACTS[key]}{right}" for key in wanted)
    else:
        asked = "Give"
        answer = ", ".join(f"{left}{FACTS[key]}{right}" for key in wanted)
    question = f" {asked} {' and '.join(wanted)}{style}."
    return {
        "prompt": f"{question}{END}\n{START}assistant\n",
        "completion": f"{answer}{END}",
    }


def score(folder: Path, context: str, adapter: Path | None = None) -> float:
    """The share of the held-out questions, each behind a context, that are answered exactly."""
    # Imported late: the data need neither, and load in no time without.
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    text = (folder / "heldout.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    prompts = [context + line["prompt"] for line in lines]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        output = model.generate(**batch, max_new_tokens=LONGEST, do_sample=False)
    answers = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :])
    right = [
        answer.split(END)[0] + END == line["completion"]
        for answer, line in zip(answers, lines, strict=True)
    ]
    return sum(right) / len(right)


if __name__ == "__main__":
    main()
