"""Folders of bases as a stranger may send them: links, pipes, devices, sizes, and documents of the
wrong kinds.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.bases import TINY, save_base

READ = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
)
"""Files of `save_base` that somebody opens."""


def _replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        make(path)

    return change


def _bind(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path may have 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    finally:
        os.chdir(here)


def _of_holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _linked_beside(path: Path) -> None:
    """A file that would do, but lies outside."""
    outside = path.parent.parent / f"outside-{path.name}"
    if not outside.exists():
        outside.write_bytes(b'{"model": {"vocab": {}}}')
    path.symlink_to(outside)


KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "socket": _bind,
    "loop": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
    "out": _linked_beside,
}
_HUGE: dict[str, Callable[[Path], object]] = {
    "holes": _of_holes,
    "many-lists": lambda path: path.write_bytes(b'{"a": [' + b"[]," * 2_000_000 + b"[]]}"),
    "deep": lambda path: path.write_bytes(b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}"),
    "deeper": lambda path: path.write_bytes(b"[" * 200_000),
}
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**9, 10**30, 0.5, float("nan"), float("inf"), "", "x", "9" * 100_000),
    *([], ["llama"], [[1]], [{}], {}, {"a": {"b": []}}, [None], [10**9] * 3),
)
"""Values that a field of a document may be given in place of its own."""
FIELDS: tuple[str, ...] = (
    *TINY,
    *(
        "architectures",
        "text_config",
        "vision_config",
        "thinker_config",
        "quantization_config",
        "rope_scaling",
        "head_dim",
    ),
    *(
        "rope_parameters",
        "layer_types",
        "layers_block_type",
        "num_local_experts",
        "num_experts_per_tok",
        "attention_bias",
    ),
    *(
        "moe_intermediate_size",
        "sliding_window",
        "torch_dtype",
        "hidden_act",
        "kv_lora_rank",
        "cross_attention_layers",
    ),
    *(
        "num_kv_shared_layers",
        "use_bidirectional_attention",
        "is_encoder_decoder",
        "pad_token_id",
        "eos_token_id",
    ),
    *("_name_or_path", "hybrid_override_pattern", "intermediate_size", "rms_norm_eps"),
)


def save_hostile(models: Path) -> list[str]:
    """Put folders of every kind that may not be opened below `models`; their names."""
    changes: dict[str, Callable[[Path], object]] = {}
    for name in READ:
        for kind, make in KINDS.items():
            changes[f"{kind}-{name}"] = _replaced(name, make)
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        for kind, make in _HUGE.items():
            if (name, kind) != (
                "tokenizer.json",
                "deep",
            ):  # of which only ids are read, at their places
                changes[f"{kind}-{name}"] = _replaced(name, make)
    changes["index-zero"] = _replaced("model.safetensors.index.json", KINDS["zero"])
    changes["layers"] = lambda folder: _no_weights(folder, num_hidden_layers=10**9)
    for name, change in changes.items():
        change(save_base(models / name))
    return sorted(changes)


def _no_weights(folder: Path, **config: Any) -> None:
    """Leave weights under another name, so that config.json alone says what there is."""
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "config.json").write_text(json.dumps({**TINY, **config}))


def wrong_configs(config: Mapping[str, Any] = TINY) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, config.json) with every field in turn given every wrong value, at the top and in a
    text part.
    """
    for field in FIELDS:
        for number, value in enumerate(WRONG):
            changed = {**config, field: value}
            yield (
                f"{field}={number}",
                changed if number % 2 else {"model_type": "gemma3", "text_config": changed},
            )
            if isinstance(value, (list, dict)):
                yield (
                    f"{field}={number}, both",
                    {**changed, "text_config": changed, "quantization_config": changed},
                )
