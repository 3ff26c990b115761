"""Cost of merging: the validation loss of the adapter on the base it was trained on, on the bf16
base, and merged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from ft_service.bases.adapter_names import peft_name
from ft_service.bases.description import ImageFacts, facts_of_images
from ft_service.bases.safetensors_folder import read_tensors
from ft_service.data.examiner import Examiner
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_cache import find, tokens_key
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.training_set.split import Split, split_off
from ft_service.errors import DataError
from ft_service.host.hardware import available_memory
from ft_service.rundir.evaluations import finite_nats
from ft_service.spec import DataFileRef, JobSpec, PrecisionOptions
from ft_service.wording import bytes_text
from workers.base.load import adapters, load
from workers.data.batches import Batch, collate
from workers.data.token_sets import as_trained, tokenise
from workers.describe import describe
from workers.images.features import CURRENT_IMAGES, Features, SampleImages, by_key
from workers.images.placing import take_images
from workers.images.tower import Tower, positions_of
from workers.model.build import build
from workers.model.multimodal import causal_model
from workers.model.peft_adapter import PeftAdapter
from workers.ranks.runtime import COMPUTE_DTYPE
from workers.training.packing import settle_attention
from workers.training.step import Sums, evaluate

_WITH_RESULTS = 1.1
"""Memory of a model and of the results of one sample, as a share of the model's."""


def measure(spec: JobSpec, base: Path, adapter: Path, merged: Path, samples: int) -> dict[str, Any]:
    """The three losses over the first `samples` of the validation file, of pairs over their
    preferred answers, of answers with labels over the good ones. None, with the reason: there is no
    file to use, or no memory, of which merging itself needs little.

    All in the job's compute dtype and on one device (a GPU if there is one that has room), one
    model after the other. FP8 weights of a merged model are multiplied out: kernels that also
    compute in FP8 add an error of their own.
    """
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"path": str(base)})})
    tokens, reason = _validation(spec, samples)
    if reason is None:
        reason = _unmeasured_tower(base, adapter, tokens)
    if reason is not None:
        return {"validation_loss": None, "reason": reason}
    device = _device(merged, COMPUTE_DTYPE[spec.precision.compute])
    if isinstance(device, str):
        return {"validation_loss": None, "reason": device}
    compute = COMPUTE_DTYPE[spec.precision.compute]
    data = _Data(tokens, _seen(spec, tokens, device), device)
    plain = spec.model_copy(update={"precision": PrecisionOptions(compute=spec.precision.compute)})
    try:
        losses = {
            "adapter_on_base_as_trained": _loss(with_adapter(spec, adapter, device), data, compute),
            "adapter_on_bf16_base": _loss(with_adapter(plain, adapter, device), data, compute),
            "merged": _loss(merged_model(plain, merged, device), data, compute),
        }
    except torch.OutOfMemoryError:
        return {
            "validation_loss": None,
            "reason": "the memory of the GPU did not suffice, of which something else took more",
        }
    return {"validation_loss": losses, "samples": len(tokens), "compute": spec.precision.compute}


def _unmeasured_tower(base: Path, adapter: Path, samples: Sequence[Tokens]) -> str | None:
    """Why the losses of an adapter that changes the base's tower are not compared; None: it does
    not, or no sample has a picture.
    """
    if not any(sample.images for sample in samples):
        return None
    changed = PeftAdapter(adapter).weights().keys()
    towers = {f"{name}.weight" for name in describe(str(base)).tower_linears}
    if changed.isdisjoint(towers):
        return None
    return "the adapter changes the base's tower, whose answers are compared nowhere yet"


def _device(merged: Path, compute: torch.dtype) -> torch.device | str:
    """The device that has room for a merged model and its results; the reason why none has."""
    elements = sum(math.prod(tensor.shape) for tensor in read_tensors(merged).values())
    needed = int(elements * compute.itemsize * _WITH_RESULTS)
    room = available_memory()
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > needed:
        return torch.device("cuda")
    if room > needed:
        return torch.device("cpu")
    return f"they need {bytes_text(needed)} of memory, and {bytes_text(room)} are free"


def _validation(spec: JobSpec, samples: int) -> tuple[Sequence[Tokens], str | None]:
    if samples <= 0:
        return [], "no samples were requested"
    file = spec.validation_data or spec.training_data
    if file is None or not spec.validates:
        return [], "the job had no validation file"
    if not file.path:
        return [], "the validation file is not here: merge where the job has run"
    try:
        data = _data(spec, file)
    except DataError as error:
        return [], error.message
    if data.labels is not None:
        numbers = np.flatnonzero(data.labels).tolist()
        if not numbers:
            return [], "its validation samples have no good answer"
    else:
        numbers = range(0, len(data), 2 if spec.in_pairs else 1)
    return [data[number] for number in numbers[:samples]], None


def _data(spec: JobSpec, file: DataFileRef) -> TokenSet:
    """What the job validated with. Raises DataError."""
    pairs = spec.in_pairs
    split = Split.of(spec)
    key = tokens_key(spec.model.path, file.sha256, TokenOptions.of(spec), pairs=pairs)
    with TemporaryDirectory(prefix="ft-") as folder:
        with closing(Examiner(tokens=Path(folder))) as examiner:
            tokenise(spec, file, examiner)
        found = find(Path(folder), key)
        assert found is not None, "it was made"
        with closing(found.entry):
            samples = found.samples
            chosen = samples if split is None else split_off(samples, split, file.name)[1]
            return TokenSet.of(as_trained(chosen, file, spec))


@dataclass(frozen=True)
class _Seen:
    """What the base's towers make of the samples' pictures, by their keys."""

    facts: ImageFacts
    features: Mapping[str, Features]


def _seen(spec: JobSpec, samples: Sequence[Tokens], device: torch.device) -> _Seen | None:
    """None: no sample has a picture."""
    uses = {use.picture.key: (sample, use) for sample in samples for use in sample.images}
    if not uses:
        return None
    path = spec.model.path
    facts = facts_of_images(describe(path))
    processor = ImageProcessor.of(path, TokenOptions.of(spec).pixels)
    tower = Tower.loaded(path, facts.token_id, device)
    features: dict[str, Features] = {}
    for key, (sample, use) in uses.items():
        ids = sample.ids[use.begin : use.end].tolist()
        features[key] = tower.features(ids, processor.inputs(use.picture))
    return _Seen(facts, features)


@dataclass(frozen=True)
class _Data:
    """The samples on which losses are compared."""

    samples: Sequence[Tokens]
    seen: _Seen | None
    device: torch.device

    def batches(self, model: nn.Module) -> list[Batch]:
        """A batch for each sample, for a model, which is made to take their pictures."""
        if self.seen is not None:
            causal = causal_model(model)
            take_images(causal, self.seen.facts)
            CURRENT_IMAGES.images = SampleImages(
                by_key(self.seen.features), self.seen.facts.token_id, positions_of(causal)
            )
        return [collate([sample], self.device) for sample in self.samples]


def _loss(model: nn.Module, data: _Data, compute: torch.dtype) -> float:
    # Packed or not: which attention the architecture needs.
    settle_attention(model, data.device, compute)
    batches = data.batches(model)
    targets = sum(len(batch.targets) for batch in batches)
    return finite_nats(Sums.read(evaluate(model.eval(), batches, world=1), targets).mean_loss)


def with_adapter(spec: JobSpec, adapter: Path, device: torch.device) -> nn.Module:
    """The base in the spec's precision with a PEFT folder's adapter on it, as a worker of one rank
    has it.
    """
    model = build(spec, device).peft_model
    load(
        model,
        spec.model.path,
        seed=spec.seed,
        compute_dtype=COMPUTE_DTYPE[spec.precision.compute],
        device=device,
    )
    files = PeftAdapter(adapter)
    with torch.no_grad():
        for name, parameter in adapters(model):
            parameter.copy_(files.read(peft_name(name)))
    return model


def merged_model(spec: JobSpec, merged: Path, device: torch.device) -> nn.Module:
    """A merged model for evaluation, in its stored formats.

    It is built as the base is, with an adapter that does nothing (B is zero), so that every
    architecture loads.
    """
    folder = spec.model.model_copy(update={"path": str(merged)})
    # Weights are compared, not ways to multiply.
    precision = spec.precision.model_copy(update={"fp8_products": "off"})
    stored = spec.model_copy(update={"model": folder, "precision": precision})
    model = build(stored, device).peft_model
    load(
        model,
        merged,
        seed=spec.seed,
        compute_dtype=COMPUTE_DTYPE[spec.precision.compute],
        device=device,
    )
    return model
