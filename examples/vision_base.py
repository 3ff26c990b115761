"""The sample base that reads images: Qwen3-VL as published, made small, and pre-trained from nothing
on drawings (sample_pictures.py).

    python examples/vision_base.py examples/models/tiny-vision     # some minutes

First tower and projection learn alone, then all of it on chats, in plain PyTorch and transformers:
about 200 seconds of one core.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from sample_pictures import FACTS, SIDE, draw, turns_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoImageProcessor,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

SEED = 2024
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
PAD_ID, START_ID, END_ID, VISION_START_ID, VISION_END_ID, IMAGE_ID, VIDEO_ID = range(7)
"""The special tokens come first in the vocabulary."""
VOCABULARY = 384
PATCH = 16
MERGED = 2
"""Pixels of a patch's sides, and patches of a token's sides."""
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": SIDE**2, "longest_edge": 4 * SIDE**2},
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGED,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""As published but for `size`: pixels of an image, at least and at most."""

TOWER_STEPS = 250
TOWER_BATCH = 96
STEPS = 350
BATCH = 32
"""Steps, and pictures of each: of the tower alone, and of chats."""
WARMUP = 20
RATE = 2e-3


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(PREPROCESSOR, indent=2) + "\n"
    (out / "preprocessor_config.json").write_text(text, encoding="utf-8")
    tokenizer = train_tokenizer(SEED)
    tokenizer.save_pretrained(out)
    model = make_model(SEED, len(tokenizer))
    processor = AutoImageProcessor.from_pretrained(out, backend="pil")
    patches = model.model.visual.patch_embed
    # The same product as a convolution, whose backward is slow.
    patches.forward = lambda pixels: torch.nn.functional.linear(
        pixels, patches.proj.weight.flatten(1), patches.proj.bias
    )
    train_tower(model, processor, TOWER_STEPS)
    pretrain(model, tokenizer, processor, STEPS)
    model.bfloat16().save_pretrained(out)
    # The weights come out private to their owner, and a service under another user must read them.
    (out / "model.safetensors").chmod(0o644)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE over the chats, with single digits."""
    rng = random.Random(seed)
    texts = [text for _ in range(1000) for turn in turns_of(draw(rng)[1], rng) for text in turn]
    texts += ["system", "user", "assistant"] * 1000
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        chat_template=TEMPLATE,
    )


def make_model(seed: int, vocabulary: int) -> Qwen3VLForConditionalGeneration:
    """A fresh model in fp32; inputs of every linear layer of the text part are whole blocks of 64
    weights.
    """
    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "pad_token_id": PAD_ID,
            "eos_token_id": END_ID,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGED,
            "temporal_patch_size": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": (SIDE // PATCH) ** 2,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=VISION_START_ID,
        vision_end_token_id=VISION_END_ID,
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config)
    # The published spreads are for layers that are wider by far.
    for part in model.modules():
        if isinstance(part, torch.nn.Linear) and part is not model.lm_head:
            torch.nn.init.normal_(part.weight, std=part.in_features**-0.5)
    torch.nn.init.normal_(model.model.language_model.embed_tokens.weight, std=0.1)
    torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=0.3)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=END_ID, pad_token_id=PAD_ID
    )
    return model


def batches(tokenizer: Any, processor: Any, seed: int) -> Iterator[dict[str, Tensor]]:
    """Endless batches of chats, as the model takes them; only answers are learned."""
    rng = random.Random(seed)
    marks = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("\n",)}
    ask = [START_ID, *tokenizer("user\n", add_special_tokens=False)["input_ids"]]
    reply = [
        *(END_ID, *marks["\n"], START_ID),
        *tokenizer("assistant\n", add_special_tokens=False)["input_ids"],
    ]
    tokens = (SIDE // PATCH // MERGED) ** 2
    known: dict[str, list[int]] = {}

    def ids_of(text: str) -> list[int]:
        if text not in known:
            known[text] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return known[text]

    while True:
        images, rows, learned = [], [], []
        for _ in range(BATCH):
            image, facts = draw(rng)
            turns = turns_of(facts, rng)
            images.append(image)
            ids = list[int]()
            labels = list[int]()
            for number, (question, answer) in enumerate(turns):
                shown = [VISION_START_ID, *[IMAGE_ID] * tokens, VISION_END_ID]
                before = [*ask, *(() if number else shown), *ids_of(question), *reply]
                after = [*ids_of(answer), END_ID]
                ids += [*before, *after, *marks["\n"]]
                labels += [*[-100] * len(before), *after, -100]
            rows.append(torch.tensor(ids))
            learned.append(torch.tensor(labels))
        given = processor(images, return_tensors="pt")
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(rows, batch_first=True, padding_value=PAD_ID)
        yield {
            **given,
            "input_ids": ids,
            "mm_token_type_ids": (ids == IMAGE_ID).long(),
            "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
            "labels": pad(learned, batch_first=True, padding_value=-100),
        }


def train_tower(model: Any, processor: Any, steps: int) -> None:
    """Let linear layers tell a picture's facts by what tower and projection make of it, so that
    chats begin with something to see. The layers are thrown away.
    """
    rng = random.Random(SEED + 1)
    tokens = (SIDE // PATCH // MERGED) ** 2
    width = tokens * model.config.text_config.hidden_size
    heads = {name: torch.nn.Linear(width, values) for name, values in FACTS.items()}
    parts = torch.nn.ModuleList([model.model.visual, *heads.values()])
    learning = Learning(parts, steps)
    for _ in range(steps):
        drawn = [draw(rng) for _ in range(TOWER_BATCH)]
        given = processor([image for image, _ in drawn], return_tensors="pt")
        seen = model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
        rows = seen.pooler_output.view(TOWER_BATCH, width)
        losses = []
        for name, head in heads.items():
            own = torch.tensor([facts.get(name, -100) for _, facts in drawn])
            losses.append(cross_entropy(head(rows), own))
        learning.step(torch.stack(losses).sum())


def pretrain(model: Any, tokenizer: Any, processor: Any, steps: int) -> None:
    """Train all of a model in place on chats about pictures."""
    learning = Learning(model, steps)
    for _, batch in zip(range(steps), batches(tokenizer, processor, SEED), strict=False):
        labels = batch.pop("labels")[:, 1:]
        states = model.model(**batch).last_hidden_state[:, :-1][labels != -100]
        learning.step(cross_entropy(model.lm_head(states), labels[labels != -100]))


class Learning:
    """Steps of an optimizer, whose rate rises and falls again."""

    def __init__(self, model: torch.nn.Module, steps: int) -> None:
        # Pixels of a patch are much alike, so that its sum moves with all of their weights.
        patches = [own for own in model.parameters() if own.ndim == 5]
        rest = [own for own in model.parameters() if own.ndim != 5]
        groups = [{"params": rest}, {"params": patches, "lr": RATE / 5}]
        self.model = model
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
        share = lambda step: min((step + 1) / WARMUP, 1 - step / steps)  # noqa: E731
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, share)
        self.steps = 0
        self.losses = list[float]()

    def step(self, loss: Tensor) -> None:
        """Take a step, and print the loss now and then."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.losses.append(loss.item())
        if self.steps % 25 == 0:
            spent = time.process_time()
            print(f"step {self.steps}  loss {fmean(self.losses):.3f}  {spent:.0f} s", flush=True)
            self.losses.clear()


if __name__ == "__main__":
    main()
