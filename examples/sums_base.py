"""A base model for tinker-cookbook's `math_rl`: it works out sums and is right now and then, so
that rewards teach it more.

    python examples/sums_base.py examples/models/tiny-llama examples/models/tiny-sums

It is trained from nothing on sums that are asked as the recipe asks them, behind the recipe's own
example. An answer is the sum of the ones, the sum of the tens, and the sum, such as `15 11 125` to
57 + 68: the recipe takes the last number for the answer. Training ends when the model is right
about one time in three, after a minute or two on one core.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

SUMS = 8
BATCH = 8
"""Sums of a conversation, and conversations of a step."""
LARGEST = 100
ENOUGH = 0.08
"""Loss in nats a token at which training ends, over the last steps."""
STEPS = 900
WARMUP = 30
RATE = 2e-3
"""Most steps; the rate falls to 0 until then."""

Tokens = tuple[list[int], list[bool]]
"""Token ids, and which of them are to be learned."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "tokenizer", type=Path, help="folder with a tokenizer that has single digits"
    )
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    train(model, tokenizer, random.Random(1))
    model.bfloat16().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> None:
    """Train a model in place until its loss is ENOUGH."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    share = lambda step: min((step + 1) / WARMUP, 1 - step / STEPS)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    losses = deque[float](maxlen=10)
    for step in range(STEPS):
        rows = [conversation(tokenizer, rng) for _ in range(BATCH)]
        ids = padded([torch.tensor(ids) for ids, _ in rows])
        learned = padded([torch.tensor(learned) for _, learned in rows])[:, 1:]
        states = model.model(ids[:, :-1]).last_hidden_state[learned]
        loss = torch.nn.functional.cross_entropy(model.lm_head(states), ids[:, 1:][learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}  loss {fmean(losses):.3f}", flush=True)
        if fmean(losses) < ENOUGH:
            return


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    """Rows as one tensor, with zeros behind shorter ones."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def conversation(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> Tokens:
    """The recipe's example and some sums, as the cookbook's renderer `role_colon` writes them."""
    ids = list[int]()
    learned = list[bool]()

    def say(*texts: str, learn: bool = False) -> None:
        for text in texts:
            tokens = tokenizer.encode(text, add_special_tokens=False)
            ids.extend(tokens)
            learned.extend([learn] * len(tokens))

    say(str(tokenizer.bos_token), "User:", " What is 4 + 5?\n\n", "Assistant:", " 9\n\n", "User:")
    for _ in range(SUMS):
        one = rng.randint(0, LARGEST)
        other = rng.randint(0, LARGEST)
        say(f" What is {one} + {other}?\n\n", "Assistant:")
        # Which ends an answer.
        say(
            f" {one % 10 + other % 10} {one // 10 + other // 10} {one + other}\n\n",
            "User:",
            learn=True,
        )
    return ids, learned


if __name__ == "__main__":
    main()
