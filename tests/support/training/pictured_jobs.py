"""Jobs on whole bases that read pictures, and what plain PEFT makes of their adapters on the
published class.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel

from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.data.tokens.sample import Picture, Tokens
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import Probe
from ft_service.spec import JobSpec
from tests.support.training.checks import published_model
from tests.support.training.models import spec_for
from tests.support.training.pictures import alike, save_pictured_chats, save_whole_base
from workers.data.batches import collate
from workers.data.token_sets import job_samples
from workers.images.tower import asked

ENDED = (
    "{% for message in messages %}{% if message.role == 'user' %}USER: "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in "
    "message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{% else %} ASSISTANT: {{ message.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT: {% endif %}"
)
"""A chat template in place of LLaVA 1.5's, which ends no answer."""


def pictured_job(family: str, folder: Path, ranks: int, **lora: Any) -> JobSpec:
    """Of two steps, in fp32, with validation after each. `lora`: further options of it."""
    base = save_whole_base(family, folder / "base")
    data = save_pictured_chats(folder / "chats.jsonl", 8)
    valid = save_pictured_chats(folder / "valid.jsonl", 3)
    options: dict[str, Any] = {
        "precision": {"default": "bf16", "compute": "fp32", "compare_served": "off"},
        "checkpoint": {"save_steps": 1},
        "training": {"max_steps": 2, "batch_size": 4, "learning_rate": 5e-3, "eval_steps": 1},
        "lora": {"r": 4, **lora},
        **({"chat_template": ENDED} if family == "llava 1.5" else {}),
    }
    return spec_for(base, data, valid=valid, ranks=ranks, **options)


def published_loss(run: RunDir, spec: JobSpec) -> float:
    """The mean loss of the validation samples in the published class, with pixels and with the
    job's adapter by plain PEFT.
    """
    path = spec.model.path
    base: Any = published_model(Path(path))
    tuned = PeftModel.from_pretrained(base, str(run.path("adapter"))).eval()
    processor = ImageProcessor.of(path)
    _, valid = job_samples(run, spec, warn=print)
    total = 0.0
    for sample in valid:
        own = collate([Tokens(sample.ids, sample.targets)], torch.device("cpu"))
        pixels = _pixels(base, processor, [use.picture for use in sample.images])
        told = asked(base, own.ids, own.ids == processor.token_id)
        with torch.no_grad():
            logits = tuned(input_ids=own.ids, use_cache=False, **told, **pixels).logits
        places = logits.flatten(0, 1)[own.places].float()
        total += torch.nn.functional.cross_entropy(places, own.targets, reduction="sum").item()
    return total / sum(sample.target_count for sample in valid)


def published_probe(run: RunDir, spec: JobSpec, probe: Probe) -> tuple[list[float], list[float]]:
    """Log-probabilities of a probe's tokens but the first, with the adapter and without, in the
    published class under plain PEFT, from the chat that a server would get.
    """
    assert probe.chat is not None
    path = spec.model.path
    tokenizer: Any = load_tokenizer(path)
    processor = ImageProcessor.of(path)
    parts = [part for turn in probe.chat if turn["role"] == "user" for part in turn["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    shown = [Picture.of(base64.b64decode(url.partition(",")[2])) for url in urls]
    text = tokenizer.apply_chat_template(
        [_as_transformers_has(turn) for turn in probe.chat], tokenize=False
    )
    pieces = text.split(processor.image_token)
    written = [*map(processor.replacement, shown), ""]
    text = "".join(piece + own for piece, own in zip(pieces, written, strict=True))
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert ids[0, -len(probe.tokens) :].tolist() == probe.tokens
    base: Any = published_model(Path(path))
    tuned = PeftModel.from_pretrained(base, str(run.path("adapter"))).eval()
    pixels = _pixels(base, processor, shown)
    told = asked(base, ids, ids == processor.token_id)
    behind = ids[0, 1 - len(probe.tokens) :, None]

    def logprobs() -> list[float]:
        with torch.no_grad():
            logits = tuned(input_ids=ids, use_cache=False, **told, **pixels).logits
        logs = logits[0, -len(probe.tokens) : -1].log_softmax(dim=-1)
        return logs.gather(1, behind)[:, 0].tolist()

    with_adapter = logprobs()
    with tuned.disable_adapter():
        return with_adapter, logprobs()


def _as_transformers_has(turn: dict[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's with parts of transformers' form."""
    if isinstance(turn["content"], str):
        return turn
    parts = [{"type": "image"} if own["type"] == "image_url" else own for own in turn["content"]]
    return {**turn, "content": parts}


def _pixels(
    base: Any, processor: ImageProcessor, pictures: Sequence[Picture]
) -> dict[str, torch.Tensor]:
    """What the published class takes of these pictures."""
    made = [processor.inputs(own) for own in pictures]
    axis = 1 if made and made[0]["pixel_values"].ndim == 5 else 0
    names = set(made[0]) & _known(base) if made else set[str]()
    return {
        name: torch.from_numpy(np.concatenate(alike([each[name] for each in made]), axis=axis))
        for name in names
    }


def _known(base: Any) -> set[str]:
    """What the forward of a class takes, and what it hands on."""
    return set(inspect.signature(type(base).forward).parameters) | {"image_sizes"}
