"""The teacher of a distillation on the ranks: the job's model with something else in place of its
adapter, or another base.

A tuned model on the job's base is its A and B alone, which every rank holds whole in the compute
dtype beside the student's: no second base, and nothing more to gather. Another base is sharded as
the job's, and only computes forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from ft_service.errors import SpecError
from ft_service.spec import AdapterRef
from ft_service.spec.teachers import PLACE, TeacherRef, refused_teacher
from workers.base.load import plain_name
from workers.job.parent_adapter import intact_manifest
from workers.layers.linear import Factors, LoraLinear
from workers.model.multimodal import causal_model
from workers.model.peft_adapter import PeftAdapter
from workers.output.served_probes import without_adapter
from workers.ranks.sharding import reshard


@dataclass(frozen=True, eq=False)
class Teacher:
    """Who teaches. Without anything: the base without adapter."""

    factors: Mapping[LoraLinear, Factors] = field(default_factory=dict[LoraLinear, Factors])
    """A tuned model's: layer → what stands in place of the student's adapter there."""
    base: PreTrainedModel | None = None
    """Another base."""

    @contextmanager
    def speaking(self, student: nn.Module) -> Iterator[nn.Module]:
        """While it is entered, a call of what is given is the teacher's, without gradients and
        without what is random.
        """
        if self.base is not None:
            with torch.no_grad():
                yield self.base
            reshard(self.base)  # which only a backward would free
            return
        training = student.training
        student.eval()
        try:
            with torch.no_grad(), without_adapter(student), self._in_place():
                yield student
        finally:
            student.train(training)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        for layer, factors in self.factors.items():
            layer.instead = factors
        try:
            yield
        finally:
            for layer in self.factors:
                layer.instead = None

    def words(self, student: nn.Module) -> int:
        """So many words, the first ones, have a probability by both. Rows beyond those of the
        tokenizer pad an embedding, and bases differ in how many.
        """
        models = (causal_model(student), *([] if self.base is None else [self.base]))
        heads: list[Any] = [model.get_output_embeddings() for model in models]
        return min(head.weight.shape[0] for head in heads)


def adapter_as_teacher(
    model: PeftModel, ref: TeacherRef, digest: str, dtype: torch.dtype, device: torch.device
) -> Teacher:
    """A tuned model's adapter as teacher on the job's model, loaded.

    `digest`: of the job's base; `dtype`: in which layers compute. Raises SpecError if the adapter
    is gone, damaged, of another base, or on layers that the job does not adapt.
    """
    assert ref.job_id is not None
    manifest = intact_manifest(AdapterRef(name=ref.name, job_id=ref.job_id, path=ref.path), PLACE)
    if manifest.base.digest != digest:
        raise SpecError(
            f"{PLACE} = {ref.name}: it was trained on other files than those of this job's base, "
            "which have changed since. Put those back, or train it again.",
            param=PLACE,
            code="base_changed",
        )
    return Teacher(factors_of(model, ref, dtype, device))


def factors_of(
    model: PeftModel, ref: TeacherRef, dtype: torch.dtype, device: torch.device
) -> dict[LoraLinear, Factors]:
    """What stands in place of the student's adapter on each layer of a model. Raises SpecError for
    an adapter that is on layers which the job does not adapt.
    """
    adapter = PeftAdapter(Path(ref.path))
    layers = {
        plain_name(name).removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear)
    }
    found: dict[LoraLinear, Factors] = {}
    for name in adapter.modules:
        layer = layers.get(name.removeprefix("base_model.model."))
        if layer is None:
            raise refused_teacher(
                ref.name, f"it adapts {name}, which this job does not (lora.target_modules)"
            )
        update = adapter.update(name)
        a, b = (part.to(device=device, dtype=dtype).contiguous() for part in (update.a, update.b))
        found[layer] = Factors(a, b, update.scaling)
    if adapter.replaced:
        raise refused_teacher(ref.name, f"it replaces {next(iter(adapter.replaced))}")
    return found
