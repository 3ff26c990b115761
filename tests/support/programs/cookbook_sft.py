"""tinker-cookbook's `chat_sl` with AdamW's numbers of a job here: `cookbook_sft.py BASE RENDERER CHATS BATCH_SIZE RATE LOGS`.

`chat_sl.train` has no option for them, but what it calls has. LOGS gets also `batches.json`: for each step its sequences, as
token ids and which of them are learned. Run by the Python that has the cookbook, in the folder of bases.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tinker_cookbook.recipes.chat_sl.train import get_dataset_builder  # pyright: ignore[reportMissingImports]
from tinker_cookbook.supervised import train  # pyright: ignore[reportMissingImports]


def main() -> None:
    base, renderer, chats, batch_size, rate, logs = sys.argv[1:]
    data = get_dataset_builder(chats, base, renderer, max_length=None, batch_size=int(batch_size))
    # The losses of a batch's sequences add up here, and are a mean in a job, so that its gradients are smaller.
    adam = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8 * int(batch_size)}
    made = {"dataset_builder": data, "recipe_name": "sft", "renderer_name": renderer, "learning_rate": float(rate), **adam}
    asyncio.run(train.main(train.Config(log_path=logs, model_name=base, save_every=0, eval_every=0, lora_rank=32, **made)))
    dataset, _ = data()
    dataset.set_epoch(seed=0)
    batches = [[sequence(datum) for datum in dataset.get_batch(step)] for step in range(len(dataset))]
    (Path(logs) / "batches.json").write_text(json.dumps(batches))


def sequence(datum: Any) -> tuple[list[int], list[bool]]:
    targets, weights = (datum.loss_fn_inputs[name].data for name in ("target_tokens", "weights"))
    return [*datum.model_input.to_ints(), targets[-1]], [False, *(weight > 0 for weight in weights)]


if __name__ == "__main__":
    main()
