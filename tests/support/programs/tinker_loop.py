"""A training loop of the `tinker` package: prints a JSON line a step, and at the end the path of the weights to sample from.

python tinker_loop.py BASE STEPS SEED
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker
from tinker import types

base, steps, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def datum(ids: list[int]) -> types.Datum:
    inputs: Any = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}  # lists become arrays
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    training = tinker.ServiceClient().create_lora_training_client(base_model=base, rank=4, seed=seed).result()
    print(json.dumps({"model": training.model_id}), flush=True)
    for step in range(steps):
        data = [datum([5 + step, 6, 7, 8 + seed]), datum([9, 10 + step, 11])]
        loss, made = training.forward_backward(data, "cross_entropy"), training.optim_step(types.AdamParams(learning_rate=1e-2))
        values = {**loss.result().metrics, **(made.result().metrics or {})}
        print(json.dumps({"step": step, **values}), flush=True)
    print(json.dumps({"path": training.save_weights_for_sampler("last").result().path}), flush=True)


if __name__ == "__main__":
    main()
