"""A job's spec in a row of the store."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ft_service.spec.resolved import JobSpec
from ft_service.spec.tuned_name import TunedName


@dataclass(frozen=True)
class StoredSpec:
    """A spec that is parsed on first use, once for all copies of a job's record.

    Most readers of a job do not need its spec, and a spec that this version cannot read must not prevent other jobs from being
    claimed or listed, nor its own job from being cancelled. The job's names are therefore read without parsing.
    """

    document: dict[str, Any]
    """The JobSpec in JSON."""

    @classmethod
    def of(cls, spec: JobSpec, *, planned: bool = True) -> StoredSpec:
        """`planned` False: only given options are stored, since the later plan needs to know them."""
        stored = cls(spec.model_dump(mode="json", exclude_unset=not planned))
        stored.__dict__["parsed"] = spec
        return stored

    @cached_property
    def parsed(self) -> JobSpec:
        """The spec. Raises pydantic.ValidationError for one that this version cannot read."""
        return JobSpec.model_validate(self.document)

    @property
    def tuned_name(self) -> TunedName:
        return TunedName.parse(self.document["tuned_name"])

    @property
    def base(self) -> str:
        """Name of the base model."""
        return self.document["model"]["name"]

    @property
    def base_folder(self) -> str:
        """Folder of the base model where ranks run; empty: not known yet."""
        return self.document["model"].get("path", "")

    @property
    def has_training_data(self) -> bool:
        """Whether it has a training file; a Tinker client's model has none."""
        return self.document["training_data"] is not None

    @property
    def adapts_experts(self) -> bool:
        """Whether its adapters are on stacks of experts, too."""
        return bool(self.document.get("lora", {}).get("target_parameters"))
