"""Training loops of the `tinker` package, one for each seed, all at once: prints JSON lines, each
with its loop's `seed`.

    python tinker_loop.py BASE STEPS VARIANTS SEED…

A loop prints its model and the numbers of each step; every third step it saves its state, and
samples from the weights so far; at the end it finishes its session. Loops whose seeds are the same
modulo VARIANTS train the same.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import tinker
from tinker import types

SAVE_EVERY = 3


def datum(ids: list[int]) -> types.Datum:
    inputs: Any = {
        "target_tokens": ids[1:],
        "weights": [1.0] * (len(ids) - 1),
    }  # lists become arrays
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def train(base: str, steps: int, variants: int, seed: int) -> None:
    def say(**values: Any) -> None:
        # In one piece, beside other threads'
        sys.stdout.write(json.dumps({"seed": seed, **values}) + "\n")
        sys.stdout.flush()

    variant = seed % variants
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base, rank=4, seed=variant).result()
    say(model=training.model_id)
    for step in range(steps):
        data = [datum([5 + step, 6, 7, 8 + variant]), datum([9, 10 + step, 11])]
        loss = training.forward_backward(data, "cross_entropy")
        made = training.optim_step(types.AdamParams(learning_rate=1e-2))
        values: dict[str, Any] = {**loss.result().metrics, **(made.result().metrics or {})}
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            training.save_state(f"step-{step}").result()
            sampling = training.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=4, seed=step)
            answer = sampling.sample(types.ModelInput.from_ints([5, 6]), 1, params).result()
            values["sampled"] = answer.sequences[0].tokens
        say(step=step, **values)
    service.close("success").result()


def main() -> None:
    base, (steps, variants, *seeds) = sys.argv[1], map(int, sys.argv[2:])
    with ThreadPoolExecutor(len(seeds)) as threads:
        list(threads.map(partial(train, base, steps, variants), seeds))


if __name__ == "__main__":
    main()
