"""The sample base model: its tokenizer, its shape and its pre-training."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from sample_skills import WORDS, make_chat
from sample_task import Example, Message
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
PAD_ID, START_ID, END_ID = range(3)
"""The special tokens come first in the vocabulary."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

VOCABULARY = 1024
STEPS = 800
WARMUP = 50
BATCH = 64
"""Chats per optimizer step."""
MATRIX_LR = 0.02
REST_LR = 3e-3
PROMPT_WEIGHT = 0.1
"""Loss weight of a prompt's token against 1 for an answer's: most prompt words are random."""


def train_tokenizer(seed: int, examples: list[Example]) -> PreTrainedTokenizerFast:
    """A byte-level BPE over the skills and the task's train split, with single digits."""
    rng = random.Random(seed)
    chats = [make_chat(rng) for _ in range(20_000)] + [e["messages"] for e in examples]
    texts = [message["content"] for chat in chats for message in chat]
    # A word is rare in random text, but the whole vocabulary is there to have each in one piece.
    texts += [f" {word}" for word in WORDS for _ in range(400)]
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
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(seed: int, vocabulary: int) -> LlamaForCausalLM:
    """A fresh model in float32; every linear layer's inputs are whole blocks of 64 weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=START_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=START_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    return model


def encode(tokenizer: PreTrainedTokenizerFast, chat: list[Message]) -> tuple[list[int], int]:
    """A chat's token ids and the number of those before the answer's first one."""
    prompt = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
    head = tokenizer(str(prompt), add_special_tokens=False)["input_ids"]
    tail = tokenizer(chat[-1]["content"] + END, add_special_tokens=False)["input_ids"]
    return head + tail, len(head)


def _pad(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and loss weights, both [len(rows), longest row], padded on the right."""
    length = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), length), PAD_ID)
    weights = torch.zeros(len(rows), length)
    for i, (row, start) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        weights[i, : len(row)] = PROMPT_WEIGHT
        weights[i, start : len(row)] = 1.0
    return ids, weights


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of BATCH chats; chats of like length go together, which halves the
    padding.
    """
    rng = random.Random(seed)
    while True:
        rows = sorted(
            (encode(tokenizer, make_chat(rng)) for _ in range(4 * BATCH)),
            key=lambda row: len(row[0]),
        )
        groups = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        rng.shuffle(groups)
        for group in groups:
            yield _pad(group)


def _schedule(step: int) -> float:
    """The share of the peak learning rates at a step: linear warm-up, then a cosine to nothing."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def _optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, where it needs far fewer steps, and AdamW for all the rest."""
    matrices = []
    rest = []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and ".layers." in name
        (matrices if inner else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(rest, lr=REST_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Trains `model` in place on the skills, in bfloat16 with float32 weights."""
    optimizers = _optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, _schedule) for o in optimizers]
    began = time.monotonic()
    model.train()
    for step, (ids, weights) in zip(range(STEPS), batches(tokenizer, seed), strict=False):
        # Padding is on the right, so the causal mask alone keeps it out of every real token.
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
        )
        weight = weights[:, 1:].flatten()
        (losses @ weight / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        model.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == STEPS - 1:
            answers = weight == 1.0
            print(
                f"step {step:5d}  answer loss {losses[answers].mean():.4f}  "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )


def write_model(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes model (bfloat16, safetensors) and tokenizer in the Hugging Face layout."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The weights come out private to their owner, and a service under another user must read them.
    (folder / "model.safetensors").chmod(0o644)
