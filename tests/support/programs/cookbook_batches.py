"""The batches of tinker-cookbook's `chat_sl`: `cookbook_batches.py BASE RENDERER CHATS BATCH_SIZE`
prints, for each step, its sequences as token ids and which of them are learned, in JSON. Run by the
Python that has the cookbook, in the folder of bases.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tinker_cookbook.recipes.chat_sl.train import get_dataset_builder  # pyright: ignore[reportMissingImports]


def main() -> None:
    base, renderer, chats, batch_size = sys.argv[1:]
    dataset, _ = get_dataset_builder(
        chats, base, renderer, max_length=None, batch_size=int(batch_size)
    )()
    dataset.set_epoch(seed=0)
    print(
        json.dumps(
            [[sequence(datum) for datum in dataset.get_batch(step)] for step in range(len(dataset))]
        )
    )


def sequence(datum: Any) -> tuple[list[int], list[bool]]:
    targets, weights = (datum.loss_fn_inputs[name].data for name in ("target_tokens", "weights"))
    return [*datum.model_input.to_ints(), targets[-1]], [False, *(weight > 0 for weight in weights)]


if __name__ == "__main__":
    main()
