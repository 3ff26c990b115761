"""Chats of log-normal lengths in made-up words, and a tokenizer and a small random Llama for them.

Nothing is downloaded.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.bases import Llama, write_llama
from ft_service.rundir.directory import sha256_of
from ft_service.spec import DataFileRef

SYLLABLES = [
    consonant + vowel
    for consonant in "bdfgklmnprstvz"
    for vowel in ("a", "e", "i", "o", "u", "an", "or")
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"


def words(count: int, seed: int = 0) -> list[str]:
    """Different words of two to four syllables."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))] = None
    return list(found)


def write_base(folder: Path, llama: Llama) -> None:
    """A random base with a byte-level tokenizer whose vocabulary it fills, about one token a
    word.
    """
    from transformers import PreTrainedTokenizerFast

    write_llama(folder, llama)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=llama.vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    text = [" " + word for word in words(llama.vocabulary)]
    tokenizer.train_from_iterator([" ".join(text), *text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_chats(
    path: Path, count: int, *, median: int = 220, sigma: float = 0.8, longest: int = 900
) -> DataFileRef:
    """`count` chats of a question and an answer.

    `median`, `sigma`: of the log-normal number of words; `longest`: at most.
    """
    rng = random.Random(1)
    vocabulary = words(2000)
    weights = [1 / (rank + 1) for rank in range(len(vocabulary))]
    lines = []
    for _ in range(count):
        length = min(longest, max(8, round(median * rng.lognormvariate(0.0, sigma))))
        chat = rng.choices(vocabulary, weights, k=length)
        asked = max(2, round(length * rng.uniform(0.2, 0.5)))
        question = " ".join(chat[:asked])
        answer = " ".join(chat[asked:])
        lines.append(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))
