"""Scores a Qwen-VL model, with or without a LoRA adapter, on chats with one image each, by exact
match. It uses transformers and PEFT alone.

If every answer of the file is one token, it also tells how often the likeliest of these answers is
the right one: a base that was never taught to answer so may still see what is asked for.

Usage:
    python examples/evaluate_images.py --model DIR --data FILE [--adapter DIR]
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

LONGEST = 8
"""Tokens of an answer."""


@dataclass(frozen=True)
class Score:
    """How many answers to the chats of a file were right."""

    right: int
    likeliest: int | None
    """How often the right answer is the likeliest of the file's. None: some are several tokens."""
    total: int

    def __str__(self) -> str:
        text = f"{self.right} of {self.total} ({self.right / self.total:.1%})"
        if self.likeliest is None:
            return text
        return f"{text}; of the file's answers the right one is likeliest: {self.likeliest}"


class Reader:
    """A model that answers chats of one image."""

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        # With Pillow, as in training: torchvision, if it is there, makes slightly other pixels.
        self.processor: Any = AutoImageProcessor.from_pretrained(model, backend="pil")
        self.model: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
        if adapter is not None:
            self.model = PeftModel.from_pretrained(self.model, str(adapter))
        self.model.eval()

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.inference_mode()
    def answer(self, messages: Sequence[dict[str, Any]]) -> tuple[str, torch.Tensor]:
        """The likeliest answer to a chat as OpenAI's API takes it, with a `data:` URL, and the
        logits [vocabulary] of its first token.
        """
        (url,) = (
            part["image_url"]["url"]
            for message in messages
            for part in message["content"]
            if isinstance(part, dict) and part["type"] == "image_url"
        )
        image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
        pixels = self.processor(image, return_tensors="pt")
        count = int(pixels["image_grid_thw"].prod()) // self.processor.merge_size**2
        sign = self.tokenizer.convert_ids_to_tokens(self.model.config.image_token_id)
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        ).replace(sign, sign * count)
        ids = torch.tensor([self.tokens(text)])
        answered = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == self.model.config.image_token_id).long(),
            max_new_tokens=LONGEST,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **pixels,
        )
        new = answered.sequences[0, ids.shape[1] :]
        said = self.tokenizer.decode(new, skip_special_tokens=True).strip()
        return said, answered.logits[0][0]


def score(reader: Reader, data: Path) -> Score:
    """Score a model on the chats of a file."""
    chats = [json.loads(text)["messages"] for text in data.read_text(encoding="utf-8").splitlines()]
    known = sorted({chat[-1]["content"] for chat in chats})
    tokens = [reader.tokens(answer) for answer in known]
    one_token = all(len(own) == 1 for own in tokens)
    firsts = [own[0] for own in tokens]
    right = likeliest = 0
    for *asked, expected in chats:
        said, logits = reader.answer(asked)
        right += said == expected["content"]
        likeliest += known[int(logits[firsts].argmax())] == expected["content"]
    return Score(right, likeliest if one_token else None, len(chats))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE")
    parser.add_argument("--adapter", type=Path, metavar="DIR")
    options = parser.parse_args()
    print(f"base     {score(Reader(options.model), options.data)}", flush=True)
    if options.adapter is not None:
        tuned = Reader(options.model, options.adapter)
        print(f"adapter  {score(tuned, options.data)}")


if __name__ == "__main__":
    main()
