"""Scores a model that reads images, with or without a LoRA adapter, on chats with one image each,
by exact match. It uses transformers and PEFT alone.

Usage:
    python examples/evaluate_images.py --model DIR --data FILE [--adapter DIR]
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

LONGEST = 8
"""Tokens of an answer."""


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

    @torch.inference_mode()
    def answer(self, messages: Sequence[dict[str, Any]]) -> str:
        """The likeliest answer to a chat as OpenAI's API takes it, with a `data:` URL."""
        (url,) = (
            part["image_url"]["url"]
            for message in messages
            for part in message["content"]
            if isinstance(part, dict) and part["type"] == "image_url"
        )
        image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
        pixels = self.processor(image, return_tensors="pt")
        tokens = int(pixels["image_grid_thw"].prod()) // self.processor.merge_size**2
        sign = self.tokenizer.convert_ids_to_tokens(self.model.config.image_token_id)
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        ).replace(sign, sign * tokens)
        given = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        ids = given["input_ids"]
        answered = self.model.generate(
            input_ids=ids,
            attention_mask=given["attention_mask"],
            mm_token_type_ids=(ids == self.model.config.image_token_id).long(),
            max_new_tokens=LONGEST,
            do_sample=False,
            **pixels,
        )
        new = answered[0, ids.shape[1] :]
        return self.tokenizer.decode(new, skip_special_tokens=True).strip()


def score(model: Path, data: Path, adapter: Path | None = None) -> tuple[int, int]:
    """The number of right answers to the chats of a file, and of all."""
    reader = Reader(model, adapter)
    chats = [json.loads(text)["messages"] for text in data.read_text(encoding="utf-8").splitlines()]
    right = sum(reader.answer(chat[:-1]) == chat[-1]["content"] for chat in chats)
    return right, len(chats)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE")
    parser.add_argument("--adapter", type=Path, metavar="DIR")
    options = parser.parse_args()
    right, total = score(options.model, options.data)
    print(f"base     {right} of {total} ({right / total:.1%})")
    if options.adapter is not None:
        right, total = score(options.model, options.data, options.adapter)
        print(f"adapter  {right} of {total} ({right / total:.1%})")


if __name__ == "__main__":
    main()
