"""Scores a model, with or without a LoRA adapter, on a file of chats by exact match.

Usage:
    python examples/evaluate.py --model DIR --data FILE [--adapter DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 50
MARGIN = 8
"""Tokens an answer may exceed the file's longest one by before it is cut: it is wrong anyway."""


@dataclass(frozen=True)
class Sample:
    """One example with the answer that the model gave."""

    prompt: str
    expected: str
    answer: str


@dataclass(frozen=True)
class Score:
    """How many answers were right, and the first few of them, wrong ones before right ones."""

    correct: int
    total: int
    samples: tuple[Sample, ...]
    begin: tuple[Sample, ...] = ()
    """The first few of the file, right or wrong: the same ones for every model."""

    @property
    def accuracy(self) -> float:
        """The share of right answers, 0 to 1."""
        return self.correct / self.total if self.total else 0.0


def _load(model_dir: Path, adapter_dir: Path | None) -> tuple[Any, Any]:
    """Model in evaluation mode, adapter merged, and a tokenizer that pads on the left."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if adapter_dir is not None:
        model = PeftModel.from_pretrained(model, str(adapter_dir)).merge_and_unload()
    return model.eval(), tokenizer


@torch.inference_mode()
def _answer(model: Any, tokenizer: Any, prompts: list[str], limit: int) -> list[str]:
    """Greedy answers of at most `limit` tokens, one per rendered prompt."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=limit,
        do_sample=False,
    )
    new = output[:, batch["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True)


def evaluate(
    model_dir: str | Path,
    data_file: str | Path,
    adapter_dir: str | Path | None = None,
    limit: int | None = None,
) -> Score:
    """Answers the first `limit` chats of a file (all without it) and compares each last message."""
    lines = Path(data_file).read_text(encoding="utf-8").splitlines()[:limit]
    chats = [json.loads(line)["messages"] for line in lines if line.strip()]
    model, tokenizer = _load(Path(model_dir), Path(adapter_dir) if adapter_dir else None)
    prompts = [
        tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
        for chat in chats
    ]
    expected = [chat[-1]["content"].strip() for chat in chats]
    longest = max((len(tokenizer(text)["input_ids"]) for text in expected), default=0)
    answers: list[str] = []
    for i in range(0, len(prompts), BATCH):
        answers += _answer(model, tokenizer, prompts[i : i + BATCH], longest + MARGIN)
    samples = [
        Sample(chat[-2]["content"], right, answer.strip())
        for chat, right, answer in zip(chats, expected, answers, strict=True)
    ]
    begin = tuple(samples[:3])
    samples.sort(key=lambda sample: sample.expected == sample.answer)
    correct = sum(sample.expected == sample.answer for sample in samples)
    return Score(correct, len(samples), tuple(samples[:5]), begin)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE")
    parser.add_argument("--adapter", type=Path, metavar="DIR")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N examples")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    score = evaluate(options.model, options.data, options.adapter, options.limit)
    if options.json:
        print(json.dumps({**asdict(score), "accuracy": score.accuracy}))
        return
    for sample in score.samples:
        print(
            f"prompt    {sample.prompt}\nexpected  {sample.expected}\nanswer    {sample.answer}\n"
        )
    print(f"exact match {score.correct} of {score.total} ({score.accuracy:.1%})")


if __name__ == "__main__":
    main()
