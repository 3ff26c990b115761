"""The tuned task: a customer's message becomes one line of compact JSON.

The splits are generated, so the data contain no customer's words. Order numbers and items of one
split do not
occur in another: a model that scores well on the held-out split cannot have memorised the answers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from sample_words import CITIES, NAMES, items

SPLITS = {"train": 1200, "validation": 100, "heldout": 100}
"""Examples per split."""

ITEM_SHARES = {"train": 304, "validation": 30, "heldout": 50}
"""Distinct items per split; they add up to all the items there are."""

SYSTEM = "Turn the message into one line of JSON."

REQUESTS: dict[str, tuple[str, ...]] = {
    "refund": (
        "The {item} I bought is not what I expected and I want my money back{order}.",
        "Please give me a refund for the {item}{order}.",
        "I sent the {item} back last week{order}. When do I get my money?",
        "You charged me twice for the {item}{order}, please pay it back.",
    ),
    "cancel": (
        "Please cancel the {item}{order}.",
        "I no longer need the {item}{order}, so do not send it.",
        "I ordered the {item} by mistake{order}. Please stop it.",
        "Can I still call off the {item}{order}?",
    ),
    "track": (
        "Where is my {item}{order}?",
        "The {item} has not arrived yet{order}.",
        "When will the {item} be delivered{order}?",
        "I am still waiting for the {item}{order}.",
    ),
    "exchange": (
        "The {item} has the wrong size{order} and I want to swap it.",
        "Can I exchange the {item} for another one{order}?",
        "You sent me the wrong colour of the {item}{order}, please change it.",
        "I would like a different model of the {item}{order}.",
    ),
    "repair": (
        "The {item} stopped working after two days{order}.",
        "My {item} is broken{order}. Can you fix it?",
        "There is a crack in the {item}{order}, can it be repaired?",
        "The {item} makes a strange noise{order} and needs a repair.",
    ),
    "invoice": (
        "I need an invoice for the {item}{order}.",
        "Please send me the bill for the {item}{order}.",
        "My company asks for a receipt of the {item}{order}.",
        "The address on the invoice of the {item} is wrong{order}.",
    ),
}

ORDERS = (
    ", order {number}",
    " (order {number})",
    ", order number {number}",
    " from order #{number}",
)

OPENINGS = (
    "",
    "",
    "Hello, ",
    "Hi, {name} here. ",
    "My name is {name}. ",
    "I am {name} from {city}. ",
)

URGENT = (
    " This is urgent!",
    " It is urgent, I need it today.",
    " Please hurry, it is urgent.",
    " Very urgent!",
)

CALM = ("", "", " Thank you.", " I can wait.", " Have a nice day.", " I paid {price} euros.")


Message = dict[str, str]
"""One chat message in OpenAI's wire format: its role and its content."""

Example = dict[str, list[Message]]
"""One line of a data file: its messages."""


def make_example(rng: random.Random, intent: str, number: int, item: str) -> Example:
    """One example; one in eight leaves out the order number, and its answer says null."""
    known = rng.random() >= 0.125
    urgent = rng.random() < 0.5
    template = rng.choice(OPENINGS) + rng.choice(REQUESTS[intent])
    template += rng.choice(URGENT if urgent else CALM)
    text = template.format(
        item=item,
        order=rng.choice(ORDERS).format(number=number) if known else "",
        name=rng.choice(NAMES),
        city=rng.choice(CITIES),
        price=rng.randint(11, 99),
    )
    label = {
        "intent": intent,
        "order": str(number) if known else None,
        "item": item,
        "urgent": urgent,
    }
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": text},
            {"role": "assistant", "content": json.dumps(label, separators=(",", ":"))},
        ]
    }


def make_splits(seed: int) -> dict[str, list[Example]]:
    """All the splits, with order numbers and items dealt out so that none is in two of them."""
    rng = random.Random(seed)
    numbers = iter(rng.sample(range(10_000, 100_000), sum(SPLITS.values())))
    pool = items()
    rng.shuffle(pool)
    intents = list(REQUESTS)
    splits: dict[str, list[Example]] = {}
    for split, count in SPLITS.items():
        share = pool[: ITEM_SHARES[split]]
        pool = pool[ITEM_SHARES[split] :]
        splits[split] = [
            make_example(rng, intents[i % len(intents)], next(numbers), rng.choice(share))
            for i in range(count)
        ]
        rng.shuffle(splits[split])
    return splits


def write_splits(folder: Path, splits: dict[str, list[Example]]) -> None:
    """Writes <folder>/<split>.jsonl; always \\n, so the bytes are the same on every system."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, examples in splits.items():
        lines = "".join(json.dumps(e, ensure_ascii=False) + "\n" for e in examples)
        (folder / f"{split}.jsonl").write_bytes(lines.encode())
