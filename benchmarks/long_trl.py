"""TRL's SFTTrainer with PEFT as a contender of `long.py`, which starts this program once a run.

    python benchmarks/long_trl.py SETTINGS.json

It reads the settings and the samples, and writes what it measured next to them. A step is one
sample. The adapters begin with our values, so that every step's loss must be ours.

TRL's offloading (`activation_offloading=True`) asks for an accelerator and fails without one. Here
it gets a stand-in: this processor is the device, and what it copies to the host lies in memory of
NumPy's, of which PyTorch's allocator knows nothing, as it counts no pinned memory of a GPU's.
Streams and events do nothing, since a copy is done when it is asked for.

TRL makes logits of 32,768 words at a time, in a buffer of that size. This base has 512, so that the
buffer has as many.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

if __name__ == "__main__":  # the repository's root, for programs started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))


@dataclass(frozen=True)
class Settings:
    """What both sides have in common, and how the contender is to be run."""

    mode: str
    """`checkpointing`, `offloading`; of ours a value of distributed.activation_checkpointing."""
    base: str
    samples: list[list[int]]
    """Token ids of each step's sample; all but the first are targets."""
    out: str
    """A folder, for this program alone."""
    lora_rank: int
    lora_alpha: int
    learning_rate: float
    max_grad_norm: float
    seed: int
    threads: int
    vocabulary: int


@dataclass
class Measured:
    """What a run showed."""

    program: str = ""
    seconds: list[float] = field(default_factory=list[float])
    """Of forward and backward, by step; the last step's bytes were counted meanwhile."""
    losses: list[float] = field(default_factory=list[float])
    peak: int = 0
    """Most bytes of tensors that PyTorch had in a forward and backward, besides those before."""
    host: int = 0
    """Most bytes of copies in the host's memory."""


def measured_step(measured: Measured, steps: int, work: Any) -> Any:
    """Do the forward and backward of a step, and measure it: the last one's bytes, and all
    times.
    """
    from tests.support.training.live_bytes import peak_bytes

    result: list[Any] = []
    began = time.perf_counter()
    if len(measured.seconds) + 1 == steps:
        measured.peak = peak_bytes(lambda: result.append(work()))
    else:
        result.append(work())
    measured.seconds.append(time.perf_counter() - began)
    return result[0]


# The stand-in for a device
# ------------------------------------------------------------------------------


@dataclass
class HostBytes:
    """Bytes in the host's memory."""

    now: int = 0
    most: int = 0


class _HostCopy:
    """A tensor in the host's memory."""

    def __init__(self, shape: Any, dtype: torch.dtype, host: HostBytes) -> None:
        size = torch.empty(0, dtype=dtype).element_size() * int(np.prod(tuple(shape)))
        memory = torch.from_numpy(np.empty(size, dtype=np.uint8))
        self._tensor = memory.view(dtype).view(shape)
        self._host = host
        self._size = size
        host.now += size
        host.most = max(host.most, host.now)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        self._tensor.copy_(source)

    def to(self, device: str, non_blocking: bool = False) -> Tensor:
        return torch.empty_like(self._tensor).copy_(self._tensor)

    def __del__(self) -> None:
        self._host.now -= self._size


class _Stream:
    """A stream of a device that does everything at once."""

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def offloading_without_gpu() -> Iterator[HostBytes]:
    """While it is entered, TRL's offloading takes this processor for a device with a host."""
    from trl.models import activation_offloading  # pyright: ignore[reportMissingImports]

    host = HostBytes()
    stream = _Stream()
    device = SimpleNamespace(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda _: nullcontext(),
        empty_cache=lambda: None,
    )

    def strided(tensor: Tensor, **options: Any) -> Any:
        found: Any = torch.as_strided(tensor, **options)
        found.record_stream = lambda _: None
        return found

    by = _Torch(
        as_strided=strided,
        empty_like=lambda tensor, **_: _HostCopy(tensor.shape, tensor.dtype, host),
        empty=lambda size, dtype, **_: _HostCopy((size,), dtype, host),
        accelerator=SimpleNamespace(current_accelerator=lambda: SimpleNamespace(type="cpu")),
        get_device_module=lambda kind: device,
    )
    with patch.object(activation_offloading, "torch", by):
        yield host


class _Torch:
    """PyTorch with other functions of some names."""

    def __init__(self, **others: Any) -> None:
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


# TRL
# ------------------------------------------------------------------------------


def run(settings: Settings) -> Measured:
    """Train with TRL, and return what was measured."""
    import datasets  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl.trainer import utils  # pyright: ignore[reportMissingImports]
    from trl.trainer.sft_config import SFTConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.sft_trainer import SFTTrainer  # pyright: ignore[reportMissingImports]

    from benchmarks.training_trl import begin_as_we_do, keep_freed_memory

    datasets.disable_progress_bars()
    keep_freed_memory()
    torch.set_num_threads(settings.threads)
    measured = Measured(f"TRL {version('trl')}")
    steps = len(settings.samples)

    class Losses(TrainerCallback):
        def on_log(
            self,
            args: Any,
            state: Any,
            control: Any,
            logs: dict[str, float] | None = None,
            **others: Any,
        ) -> None:
            if logs and "loss" in logs:
                measured.losses.append(logs["loss"])

    options = SFTConfig(
        output_dir=settings.out,
        max_steps=steps,
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        max_length=None,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=settings.max_grad_norm,
        optim="adamw_torch",
        bf16=False,
        gradient_checkpointing=True,  # TRL's default
        activation_offloading=settings.mode == "offloading",
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        seed=settings.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in settings.samples]
    words = patch.object(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", settings.vocabulary)
    with offloading_without_gpu() as host, words:
        trainer = SFTTrainer(
            model=settings.base,
            args=options,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=PreTrainedTokenizerFast.from_pretrained(settings.base),
            peft_config=LoraConfig(
                r=settings.lora_rank,
                lora_alpha=settings.lora_alpha,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
            callbacks=[Losses()],
        )
        begin_as_we_do(trainer.model, settings.seed)
        step = trainer.training_step
        trainer.training_step = lambda *args: measured_step(  # pyright: ignore[reportAttributeAccessIssue]
            measured, steps, lambda: step(*args)
        )
        trainer.train()
    measured.host = host.most
    return measured


if __name__ == "__main__":
    given = Settings(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    text = json.dumps(asdict(run(given)))
    Path(given.out, "measured.json").write_text(text, encoding="utf-8")
