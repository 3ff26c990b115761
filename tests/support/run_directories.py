"""A finished run directory made by hand, without torch: three attempts, one adapter of two LoRA
pairs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import CheckpointMarker, ExitReason, Result, Start
from ft_service.rundir.events import Metrics
from ft_service.rundir.file_digest import FileDigest, NamedFile
from ft_service.rundir.manifest import (
    MANIFEST,
    ORIGINS,
    AdapterSource,
    DataFile,
    FrozenModule,
    Origins,
    base_files,
    base_of,
)
from ft_service.rundir.model_card import describe_adapter
from ft_service.spec import BaseModelRef, DataFileRef, JobContext, parse_request, resolve

CHAT = (
    json.dumps(
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
    )
    + "\n"
)
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
SHAPES = {MODULES[0]: (8, 8), MODULES[1]: (8, 24)}
RANK = 4


def finished_run(folder: Path) -> RunDir:
    """Trained in three attempts: paused on 2 ranks, lost on 2, published on 3."""
    run = RunDir(folder / "run")
    base = folder / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(safetensors({"weight": (2, 2)}))
    data = DataFileRef(name="train.jsonl", path="/data/train.jsonl", sha256="1" * 64)
    spec = resolve(
        parse_request(
            {
                "model": "tiny",
                "training_file": "file-1",
                "lora": {"r": RANK},
                "precision": {"default": "nf4"},
            }
        ),
        JobContext(
            job_id="ftjob-1",
            organization="local",
            model=BaseModelRef(name="tiny", path=str(base)),
            training_data=data,
            validation_data=None,
            seed=7,
            gpus=0,
        ),
    )
    run.write("spec.json", spec)
    run.write(
        ORIGINS,
        Origins(
            base=base_of(
                "tiny", base, {path.name: FileDigest.of(path) for path in base_files(base)}
            ),
            data=[
                DataFile(
                    role="training",
                    name=data.name,
                    sha256=data.sha256,
                    samples=9,
                    tokens=90,
                    targets=40,
                    token_digest="0",
                )
            ],
            frozen_modules=[
                FrozenModule(module=m, format="nf4", shape=list(s), bytes=64, relative_error=0.09)
                for m, s in SHAPES.items()
            ],
            quantiser={"nf4": 1},
        ),
    )
    for attempt, world, checkpoint in ((1, 2, None), (2, 2, "step-3-a1"), (3, 3, "step-3-a1")):
        start = Start(
            job_id="ftjob-1", attempt=attempt, world_size=world, generation=1, checkpoint=checkpoint
        )
        run.write(f"attempts/{attempt}/start.json", start)
    run.write("attempts/1/exit.json", exit_of(ExitReason.STOPPED, "Paused at step 3."))
    save_checkpoint(run)
    save_adapter(run.path("adapter"))
    metrics = Metrics(step=6, total_steps=6, train_loss=1.25, valid_loss=1.5)
    manifest = describe_adapter(
        run,
        run.path("adapter"),
        AdapterSource(
            attempt=3, step=6, checkpoint=None, metrics=metrics, versions={"ft-service": "0"}
        ),
    )
    run.write(MANIFEST, manifest)
    run.write(
        "result.json",
        Result(attempt=3, steps=6, trained_tokens=60, train_loss=1.25, valid_loss=1.5),
    )
    return run


def save_adapter(folder: Path) -> None:
    folder.mkdir()
    config = {
        "r": RANK,
        "lora_alpha": 32,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    shapes = {}
    for module, (rows, cols) in SHAPES.items():
        shapes[f"base_model.model.{module}.lora_A.weight"] = (RANK, cols)
        shapes[f"base_model.model.{module}.lora_B.weight"] = (rows, RANK)
    (folder / "adapter_model.safetensors").write_bytes(safetensors(shapes))


def save_checkpoint(run: RunDir) -> None:
    run.put("checkpoints/step-3-a1/__0_0.distcp", b"shard")
    path = run.path("checkpoints/step-3-a1/__0_0.distcp")
    files = [NamedFile(name=path.name, bytes=5, sha256=sha256_of(path))]
    run.write(
        "checkpoints/step-3-a1/COMPLETE",
        CheckpointMarker(step=3, attempt=1, world_size=2, files=files),
    )


def safetensors(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """A file of fp32 tensors of ones."""
    header = {}
    body = b""
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [len(body), len(body) + 4 * count],
        }
        body += struct.pack("<f", 1.0) * count
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def flip_a_bit(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[-2] ^= 1
    path.write_bytes(bytes(body))
