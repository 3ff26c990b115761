"""Two training steps of the `tinker` package, the second once a line comes on stdin: prints a JSON
line after each.

python tinker_pause.py BASE
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker
from tinker import types

ROWS = [[5, 6, 7, 8], [9, 10, 11]]


def main() -> None:
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=sys.argv[1], rank=4, seed=1).result()
    for step in range(2):
        data = [_datum(ids) for ids in ROWS]
        loss = training.forward_backward(data, "cross_entropy")
        made = training.optim_step(types.AdamParams(learning_rate=1e-2))
        print(
            json.dumps(
                {
                    "model": training.model_id,
                    **loss.result().metrics,
                    **(made.result().metrics or {}),
                }
            ),
            flush=True,
        )
        if not step:
            sys.stdin.readline()
    service.close("success").result()


def _datum(ids: list[int]) -> types.Datum:
    inputs: Any = {
        "target_tokens": ids[1:],
        "weights": [1.0] * (len(ids) - 1),
    }  # lists become arrays
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


if __name__ == "__main__":
    main()
