"""A base model that follows a system prompt, and a prompt to distil away: a directory of people.

    python examples/context_base.py examples/models/tiny-llama OUT

The sample base is trained on, on conversations behind a directory that is drawn anew for each: it
learns to look up what the system prompt says. It is written to OUT/tiny-context. Training ends when
it is nearly always right, after some minutes on two cores. OUT also gets one directory, of some
two hundred tokens, and questions about it, each with its answer:

    directory.txt       the system prompt
    train.jsonl         questions without it, for a job of method distillation
    heldout.jsonl       the same, asked in other words
    with-context.jsonl  those of heldout.jsonl behind the system prompt
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from sample_words import CITIES, DAYS, NAMES
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

PEOPLE = 16
"""People of a directory."""
QUESTIONS = 12
BATCH = 4
"""Questions of a conversation, and conversations of a step."""
ENOUGH = 0.01
"""Loss in nats a token at which training ends, over the last steps."""
STEPS = 1200
WARMUP = 30
RATE = 1.5e-3
"""Most steps; the rate falls to 0 until then."""

WORDS = (
    ("Where is {name}?", "When does {name} come?"),
    ("Give the city of {name}.", "Give the day of {name}."),
    ("Tell city: {name}", "Tell day: {name}"),
    ("Find the city for {name}.", "Find the day for {name}."),
)
"""How a city and a day are asked for; the last way is that of heldout.jsonl."""

Message = dict[str, str]
Directory = dict[str, tuple[str, str]]
"""Name → city and day."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("base", type=Path, help="folder of the sample base")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data-only", action="store_true", help="leave the model alone")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_questions(options.out, random.Random(7))
    if options.data_only:
        return
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    train(model, tokenizer, random.Random(1))
    folder = options.out / "tiny-context"
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def draw_directory(rng: random.Random) -> Directory:
    names = rng.sample(NAMES, PEOPLE)
    return {name: (rng.choice(CITIES), rng.choice(DAYS)) for name in names}


def prompt_of(directory: Directory) -> str:
    """The system prompt."""
    lines = [f"{name} is in {city}, comes on {day}." for name, (city, day) in directory.items()]
    return " ".join(["You know these people.", *lines, "Answer in one word."])


def asked(directory: Directory, name: str, words: Sequence[str], what: int) -> list[Message]:
    """A question with its answer. `what`: 0, the city; 1, the day."""
    question = words[what].format(name=name)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": directory[name][what]},
    ]


def write_questions(out: Path, rng: random.Random) -> None:
    directory = draw_directory(rng)
    (out / "directory.txt").write_text(prompt_of(directory), encoding="utf-8")
    of_words = [
        [asked(directory, name, words, what) for name in directory for what in (0, 1)]
        for words in WORDS
    ]
    shown = [chat for chats in of_words[:-1] for chat in chats]
    rng.shuffle(shown)
    system = {"role": "system", "content": prompt_of(directory)}
    _write(out / "train.jsonl", shown)
    _write(out / "heldout.jsonl", of_words[-1])
    _write(out / "with-context.jsonl", [[system, *chat] for chat in of_words[-1]])


def _write(path: Path, chats: list[list[Message]]) -> None:
    lines = (json.dumps({"messages": chat}) + "\n" for chat in chats)
    path.write_text("".join(lines), encoding="utf-8")


def train(model: Any, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> None:
    """Train a model in place until its loss is ENOUGH."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    share = lambda step: min((step + 1) / WARMUP, 1 - step / STEPS)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    losses = deque[float](maxlen=10)
    for step in range(STEPS):
        rows = [conversation(tokenizer, rng) for _ in range(BATCH)]
        ids, learned = (
            torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row[part]) for row in rows], batch_first=True
            )
            for part in (0, 1)
        )
        states = model.model(ids[:, :-1]).last_hidden_state[learned[:, 1:]]
        loss = torch.nn.functional.cross_entropy(model.lm_head(states), ids[:, 1:][learned[:, 1:]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 25 == 0:
            print(f"step {step}  loss {fmean(losses):.3f}", flush=True)
        if len(losses) == losses.maxlen and fmean(losses) < ENOUGH:
            return


def conversation(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random
) -> tuple[list[int], list[bool]]:
    """Token ids of questions behind a directory of some people, and which of them are learned."""
    directory = draw_directory(rng)
    few = rng.randint(2, len(directory))
    directory = dict(list(directory.items())[:few])
    ids: list[int] = []
    learned: list[bool] = []

    def say(text: str, *, learn: bool) -> None:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        ids.extend(tokens)
        learned.extend([learn] * len(tokens))

    say(f"<|im_start|>system\n{prompt_of(directory)}<|im_end|>\n", learn=False)
    for _ in range(QUESTIONS):
        name = rng.choice(list(directory))
        user, answer = asked(directory, name, rng.choice(WORDS), rng.randint(0, 1))
        say(f"<|im_start|>user\n{user['content']}<|im_end|>\n<|im_start|>assistant\n", learn=False)
        say(f"{answer['content']}<|im_end|>", learn=True)
        say("\n", learn=False)
    return ids[:512], learned[:512]


if __name__ == "__main__":
    main()
