"""Bodies that the interface refuses, and the shape of its refusals."""

from __future__ import annotations

from typing import Any

OVERLONG = "x" * 65


OVERFULL = {str(n): "v" for n in range(17)}


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"model": "gpt-9"}, "model"),
    ({"model": "../models/tiny"}, "model"),
    ({"model": "/etc"}, "model"),
    ({"model": "ft:tiny:local::abc"}, "model"),
    ({"model": "tiny\0"}, "model"),
    ({"training_file": None}, "training_file"),
    ({"training_file": ["file-a"]}, "training_file"),
    ({"training_file": "file-unknown"}, "training_file"),
    ({"training_file": "/data/train.jsonl"}, "training_file"),
    ({"validation_file": "file-unknown"}, "validation_file"),
    ({"validation_file": 1}, "validation_file"),
    ({"suffix": ""}, "suffix"),
    ({"suffix": OVERLONG}, "suffix"),
    ({"suffix": "a:b"}, "suffix"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**31}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"seed": True}, "seed"),
    ({"metadata": OVERFULL}, "metadata"),
    ({"metadata": {"k": 1}}, "metadata.k"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"metadata": {"k": "\ud800"}}, "metadata.k"),
    ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations"),
    ({"method": {"type": "dpo", "supervised": {}}}, "method"),
    (
        {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0}}}},
        "method.dpo.hyperparameters.beta",
    ),
    (
        {"method": {"type": "dpo", "dpo": {"hyperparameters": {"loss_type": "kto"}}}},
        "method.dpo.hyperparameters.loss_type",
    ),
    ({"method": {"type": "tinker"}}, "method.type"),
    ({"method": {"type": "magic"}}, "method.type"),
    (
        {"method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 0}}}},
        "method.supervised.hyperparameters.n_epochs",
    ),
    ({"hyperparameters": {"n_epochs": 51}}, "hyperparameters.n_epochs"),
    ({"hyperparameters": {"n_epochs": "many"}}, "hyperparameters.n_epochs"),
    ({"hyperparameters": {"batch_size": 257}}, "hyperparameters.batch_size"),
    (
        {"hyperparameters": {"learning_rate_multiplier": 0}},
        "hyperparameters.learning_rate_multiplier",
    ),
    ({"hyperparameters": {"learning_rate": 1e-4}}, "hyperparameters.learning_rate"),
    ({"hyperparameters": {"n_epochs": 2}, "training": {"n_epochs": 2}}, "hyperparameters.n_epochs"),
    ({"lora": {"r": 0}}, "lora.r"),
    ({"lora": {"r": 513}}, "lora.r"),
    ({"lora": {"rank": 8}}, "lora.rank"),
    ({"lora": {"lora_dropout": 1}}, "lora.lora_dropout"),
    ({"lora": {"target_modules": "("}}, "lora.target_modules"),
    ({"lora": {"trainable_token_indices": [1]}}, "lora.trainable_token_indices"),
    ({"lora": []}, "lora"),
    ({"precision": {"default": "int4"}}, "precision.default"),
    ({"precision": {"default": "fp4"}}, "precision.default"),
    ({"precision": {"overrides": {"(": "nf4"}}}, "precision.overrides.("),
    ({"precision": {"overrides": {"a.b": "int4"}}}, "precision.overrides.a.b"),
    ({"training": {"max_steps": 0}}, "training.max_steps"),
    ({"training": {"learning_rate": 2}}, "training.learning_rate"),
    ({"training": {"packing": "tight"}}, "training.packing"),
    ({"distributed": {"nproc_per_node": 5}}, "distributed.nproc_per_node"),
    ({"distributed": {"nproc_per_node": 0}}, "distributed.nproc_per_node"),
    ({"distributed": {"nnodes": 2}}, "distributed.nnodes"),
    ({"checkpoint": {"save_steps": 0}}, "checkpoint.save_steps"),
    ({"priority": 1001}, "priority"),
    ({"colour": "red"}, "colour"),
    ({"x" * 5000: 1}, "x" * 80),
]


UNREADABLE: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"model": NaN}',
    b'{"model": "tiny", "model": "tiny"}',
    b'{"seed": ' + b"1" * 5000 + b"}",
    b'{"model": "tiny", "evaluation": {"prompts": [{"prompt": "a", "item": {"x": 1e999}}]}}',
    b'{"model": "tiny", "evaluation": {"prompts": [{"prompt": "a", "item": '
    + b'{"x":' * 100
    + b"1"
    + b"}" * 101
    + b"]}}",
    b'{"model": "' + b"x" * 2**20 + b'"}',
]


def check_error(answer: Any, status: int) -> dict[str, Any]:
    """The error of an answer, after checking its shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"].startswith("req_")
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    return error
