"""A training loop of the `tinker` package on images: prints one JSON line.

    python tinker_images.py BASE PICTURE COUNT

`PICTURE`: a PNG file, for which COUNT tokens stand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tinker
from tinker import types


def main() -> None:
    base, path, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    image = types.ImageChunk(data=path.read_bytes(), format="png", expected_tokens=count)
    prompt = types.ModelInput(
        chunks=[
            types.EncodedTextChunk(tokens=[5, 6]),
            image,
            types.EncodedTextChunk(tokens=[7, 8, 9]),
        ]
    )
    weights = [0.0] * (prompt.length - 3) + [1.0] * 3
    inputs: Any = {"target_tokens": [0] * (prompt.length - 3) + [8, 9, 10], "weights": weights}
    datum = types.Datum(model_input=prompt, loss_fn_inputs=inputs)
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base, rank=4, seed=1).result()
    losses = []
    for _ in range(3):
        found = training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        losses.append(found.result().metrics["loss:sum"])
    sampling = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, temperature=0.0)
    sampled = sampling.sample(prompt, 1, params).result()
    trained = training.forward([datum], "cross_entropy").result()
    answer = sampling.compute_logprobs(prompt).result()
    pointer = types.ImageAssetPointerChunk(location="tinker://somewhere", format="png")
    errors = []
    for chunk in (types.ImageChunk(data=b"no image", format="png"), pointer):
        try:
            sampling.sample(types.ModelInput(chunks=[chunk]), 1, params).result()
        except tinker.TinkerError as error:
            errors.append(str(error))
    print(
        json.dumps(
            {
                "losses": losses,
                "sampled": sampled.sequences[0].tokens,
                "logprobs": answer[-2:],
                "trained": trained.loss_fn_outputs[0]["logprobs"].tolist()[-3:-1],
                "errors": errors,
            }
        )
    )
    service.close("success").result()


if __name__ == "__main__":
    main()
