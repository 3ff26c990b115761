"""Tokens a second of the preview's engine, one answer and several at once, against transformers'
`generate` on one; and the preview as a server has it, under load (`benchmarks/preview_service.py`).

    python benchmarks/preview.py [--model DIR] [--streams 8] [--tokens 64] [--repeats 5] [--load 16]
    [--no-save]

Both in one process on the same device, in fp32 on processors and bf16 on a GPU, greedily and
without an end before `--tokens`; contenders take turns, and the medians count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import machine, save
from benchmarks.preview_service import measure
from ft_service.spec import PrecisionOptions
from workers.serving.chat_tokens import Chats, ChatTokenizer
from workers.serving.engine import Engine
from workers.serving.model import ServedModel
from workers.serving.requests import ChatRequest

SAMPLE = Path(__file__).parent.parent / "examples/models/tiny-llama"
ASKED = [{"role": "user", "content": "Hi, I ordered the round bottle by mistake. Please stop it."}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SAMPLE)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--load", type=int, default=16, help="streams at once of a server; 0: no server is measured"
    )
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute, dtype = ("bf16", torch.bfloat16) if device.type == "cuda" else ("fp32", torch.float32)
    chats = Chats(str(options.model))
    # So that every answer has as many tokens.
    ChatTokenizer.ends = property(lambda chat: frozenset())  # pyright: ignore[reportAttributeAccessIssue]
    served = ServedModel(str(options.model), PrecisionOptions(compute=compute), device, None)
    stock: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    stock.to(device)
    if device.type == "cpu":  # for both, as the preview's process does
        served.settle_threads(torch.get_num_threads())
    rates: dict[str, list[float]] = {"generate": [], "one": [], "several": []}
    for _ in range(options.repeats + 1):
        rates["generate"].append(by_generate(stock, chats.of(None), options.tokens))
        rates["one"].append(by_engine(served, chats, 1, options.tokens))
        rates["several"].append(by_engine(served, chats, options.streams, options.tokens))
    medians = {
        name: statistics.median(found[1:]) for name, found in rates.items()
    }  # the first is to warm up
    ratios = {name: medians[name] / medians["generate"] for name in ("one", "several")}
    print(
        {name: round(value, 1) for name, value in medians.items()},
        {name: round(value, 2) for name, value in ratios.items()},
    )
    service = measure(options.load, options.tokens) if options.load else {}
    print(service)
    if not options.no_save:
        given = {"model": options.model.name, "streams": options.streams, "tokens": options.tokens}
        save(
            "preview",
            {
                **machine(),
                **given,
                "tokens_per_second": medians,
                "against_generate": ratios,
                "service": service,
                "runs": rates,
            },
        )


def by_generate(model: Any, chat: ChatTokenizer, tokens: int) -> float:
    """Tokens a second of one answer by transformers."""
    ids = torch.tensor([chat.tokens(chat.prompt(ASKED, []).result().text)], device=model.device)
    begin = time.perf_counter()
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )
    return tokens / (time.perf_counter() - begin)


def by_engine(served: ServedModel, chats: Chats, streams: int, tokens: int) -> float:
    """Tokens a second of all answers together by the preview's engine."""
    engine = Engine(served, chats, lambda said: None)
    begin = time.perf_counter()
    for stream in range(streams):
        engine.add(ChatRequest(str(stream), ASKED, temperature=0.0, max_tokens=tokens))
    while engine.busy:
        engine.step()
    return streams * tokens / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
